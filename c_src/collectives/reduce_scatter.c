/* reduce_scatter: between nodes (see internode.h), on a node, by MPI. */
#include <stdlib.h>
#include <string.h>

#include "collectives/collective.h"
#include "internode/sums.h"

/* ---- between nodes ---- */

static void write_all_blocks(shm_op *s, uint64_t chunk, char *slot) {
    (void)chunk;
    for (int r = 0; r < s->op.group->size; r++)
        if (s->lengths[r]) memcpy(slot + (size_t)r * s->call.bytes, mpp_in_block_at(s, r, 0), s->lengths[r]);
}

static void read_own_block(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    const char *sums = mpp_slot_at(s, 0, chunk);
    if (s->lengths[me]) memcpy(mpp_out_at(s, 0), sums + (size_t)me * s->call.bytes, s->lengths[me]);
}

static int sender_of_my_block(const shm_op *s, int node) { return mpp_peer_rank(s, node, mpp_channel_of(s)->rank); }

static void send_block_sums(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    int end = mpp_end_in_slot(s, chunk);
    mpp_stretch mine = mpp_block_in_slot(s, chunk, s->op.group->rank);
    mpp_gather_sums(s, chunk, mine.begin, mine.length, sender_of_my_block);
    for (int r = mpp_first_in_slot(s, chunk); r < end; r++) {
        mpp_stretch block = mpp_block_in_slot(s, chunk, r);
        int is_mine = t->place_of[r] % mpp_channel_of(s)->size == mpp_channel_of(s)->rank;
        if (t->node_of[r] != t->here && is_mine) mpp_send_sums_of(s, chunk, block.begin, block.length, r);
    }
}

static void finish_block(shm_op *s, uint64_t chunk) {
    mpp_stretch mine = mpp_block_in_slot(s, chunk, s->op.group->rank);
    char *result = mpp_is_direct(s) ? mpp_out_at(s, mpp_piece_number(s, chunk) * s->chunk_bytes)
                                    : mpp_own_slot(s, chunk) + mine.begin;
    mpp_add_nodes(s, chunk, mine.length, result);
}

static void read_finished_block(shm_op *s, uint64_t chunk) {
    mpp_stretch mine = mpp_block_in_slot(s, chunk, s->op.group->rank);
    if (!mine.length) return;
    memcpy(mpp_out_at(s, mpp_piece_number(s, chunk) * s->chunk_bytes), mpp_own_slot(s, chunk) + mine.begin,
           mine.length);
}

/* `s` is laid out for the pipeline. */
static int between_nodes(shm_op *s) {
    static const mpp_route pipelined = {.first_phase = send_block_sums, .second_phase = finish_block};
    size_t bytes = (size_t)s->op.group->size * s->bytes, of_node = (size_t)mpp_topology_of(s)->most_per_node * s->bytes;
    s->wait_for = -1;
    if (!s->bytes) return 1;
    if (mpp_piggyback_by_halves(s, bytes, of_node) || mpp_piggyback_sums(s, bytes)) {
        s->chunk_bytes = mpp_channel_of(s)->slot_bytes;
        s->batches = 1;
        s->write = write_all_blocks;
        s->read = read_own_block;
        return 1;
    }
    if (mpp_goes_directly(s)) s->write = NULL;
    s->read = mpp_goes_directly(s) ? NULL : read_finished_block;
    size_t of_block = mpp_most_of_sums(s) / (size_t)s->op.group->size / CACHE_LINE * CACHE_LINE;
    if (of_block > s->chunk_bytes) s->chunk_bytes = mpp_internode_chunk(s, s->bytes, of_block);
    return mpp_use_pipeline(s, &pipelined);
}

/* ---- on a node ---- */

static void write_pieces(shm_op *s, uint64_t chunk, char *slot) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, mpp_piece_number(s, chunk));
    int end = mpp_end_in_slot(s, chunk);
    for (int r = mpp_first_in_slot(s, chunk); r < end; r++) {
        mpp_stretch block = mpp_block_in_slot(s, chunk, r);
        if (block.length && (c->topology || (s->bus && !s->half) || r != c->rank))
            mpp_to_slot(s, slot + block.begin, mpp_in_block_at(s, r, offset), block.length);
    }
}

static void read_piece_sum(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    mpp_stretch mine = mpp_block_in_slot(s, chunk, c->rank);
    size_t offset = mpp_chunk_begin(s, mpp_piece_number(s, chunk));
    if (!mine.length) return;
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_at(s, r, chunk) + mine.begin;
    char *out = s->bus ? mpp_slot_at(s, c->rank, chunk) + mine.begin : mpp_out_at(s, offset); /* nobody else reads it */
    if (!s->bus) c->sources[c->rank] = mpp_in_block_at(s, c->rank, offset);
    mpp_reduce(&s->how, out, c->sources, c->size, mine.length / s->element);
    if (s->bus) mpp_from_slot(s, mpp_out_at(s, offset), out, mine.length);
}

static int over_shm(shm_op *s, const mpp_operands *o) {
    const mpp_group *g = s->op.group;
    const mpp_block *own = o->first; /* `received` is as in all_reduce, and `output` yet to be written */
    s->chunk_bytes = mpp_piece_bytes(g->channel);
    s->batches = (uint64_t)((g->size - 1) / mpp_ranks_per_slot(g->channel) + 1);
    s->write = write_pieces;
    s->read = read_piece_sum;
    if (own) {
        mpp_gets_own_blocks(s, own->received);
        mpp_offer(s, o->inputs, s->lengths, s->bytes, NULL);
    } else if (s->bus) mpp_introduce(s, o->inputs, s->lengths);
    return 1;
}

/* ---- by MPI ---- */

/* Call number i reduces elements [i * per_call, ...) of every block. */
static int issue_reduce_scatter(mpi_collective *c) {
    mpp_group *g = c->op.group;
    size_t width = mpp_dtype_size(c->mpi_dtype), offset = c->index * c->per_call * c->element, at = 0;
    mpi_handle type = mpp_mpi.datatype[c->mpi_dtype], op = mpp_mpi_op_of(&c->how);
    const void *send = c->scratch ? c->scratch : mpp_in_block_at(c, 0, offset);
    void *out = c->scratch_out ? c->scratch_out : mpp_out_at(c, offset);
    for (int r = 0; r < g->size; r++) {
        size_t n = mpp_part_of(c, c->counts[r]);
        if (c->parts) c->parts[r] = (int)n;
        if (c->scratch) mpp_to_mpi(&c->how, c->scratch + at * width, mpp_in_block_at(c, r, offset), n);
        at += n;
    }
    if (c->parts) return mpp_mpi.Ireduce_scatter(send, out, c->parts, type, op, g->comm, &c->request);
    return mpp_mpi.Ireduce_scatter_block(send, out, (int)mpp_part_of(c, c->total), type, op, g->comm, &c->request);
}

static int overlap(const mpi_collective *c, size_t bytes, int size) {
    uintptr_t in = c->in_list[0], out = (uintptr_t)c->out;
    return out < in + bytes * (size_t)size && in < out + bytes;
}

/* The MPI calls depend on sizes, `flat` and the kind of staging alone, which all ranks share. Each rank decides for
 * itself where bytes are converted. */
static int by_mpi(mpi_collective *c, const mpp_operands *o) {
    const size_t *counts = o->input_sizes;
    size_t size = (size_t)c->op.group->size, longest = mpp_longest_of(counts, (int)size);
    int even = 1, convert = mpp_set_reduction(c, o->how);
    for (size_t r = 1; r < size; r++) even &= counts[r] == counts[0];
    c->in_list = mpp_copy_list(o->inputs, (int)size);
    c->counts = mpp_copy_list(counts, (int)size);
    if (!even) c->parts = malloc(size * sizeof *c->parts);
    if (!c->in_list || !c->counts || (!even && !c->parts)) return 0;
    size_t width = mpp_dtype_size(c->mpi_dtype), limit = mpp_call_limit(o->staging);
    if (MPP_SCRATCH_BYTES < limit) limit = MPP_SCRATCH_BYTES;
    int whole = o->flat && even && !convert && !o->staging && longest * size * width <= mpp_chunk_limit;
    mpp_split(c, longest, whole ? longest : limit / width / size);
    size_t block = longest < c->per_call ? longest : c->per_call;
    c->total = counts[c->op.group->rank];
    /* The blocks of one piece lie side by side in their slot, apart from the output. */
    if (o->staging && !convert) return 1;
    if (whole && !overlap(c, longest * c->element, (int)size)) return 1;
    c->scratch_out = malloc((block ? block : 1) * width);
    return c->scratch_out && mpp_new_scratch(c, block * size);
}

/* ---- which of them ---- */

static const mpp_ways ways = {over_shm, between_nodes, by_mpi, issue_reduce_scatter, mpp_finish_reduction};

uintptr_t mpp_reduce_scatter(const mpp_operands *o) { return mpp_start_collective(o, MPP_REDUCE_SCATTER, &ways); }
