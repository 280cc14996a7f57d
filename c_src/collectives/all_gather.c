/* all_gather: between nodes (see internode.h), on a node, by MPI, or as an exchange of what MPI's call cannot take. */
#include <string.h>

#include "collectives/collective.h"
#include "internode/pipeline.h"

/* ---- between nodes ---- */

/* Ranks are numbered node by node, in a piggybacked table and in the receive buffer. */
static int number_of(const mpp_topology *t, int rank) { return t->first[t->node_of[rank]] + t->place_of[rank]; }

static void pack_blocks(shm_op *s, char *payload) {
    mpp_channel *c = mpp_channel_of(s);
    size_t begin = (size_t)c->topology->first[c->topology->here];
    for (int r = 0; r < c->size; r++)
        memcpy(payload + (begin + (size_t)r) * s->call.bytes, mpp_slot_at(s, r, 0), s->call.bytes);
}

static void span_of_blocks(const shm_op *s, int first_node, int end_node, size_t *offset, size_t *length) {
    const mpp_topology *t = mpp_topology_of(s);
    *offset = (size_t)t->first[first_node] * s->call.bytes;
    *length = (size_t)(t->first[end_node] - t->first[first_node]) * s->call.bytes;
}

static void read_table(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    const char *table = mpp_slot_at(s, 0, 0);
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (length) memcpy(mpp_out_block_at(s, r, 0), table + (size_t)number_of(t, r) * s->call.bytes, length);
    }
}

static char *recv_block(const shm_op *s, uint64_t chunk, int rank) {
    const mpp_channel *c = mpp_channel_of(s);
    const mpp_topology *t = c->topology;
    size_t number = (size_t)number_of(t, rank), ring = (size_t)c->ring;
    if (t->node_of[rank] > t->here) number -= (size_t)c->size;
    return c->recv_buffer + (number * ring + (size_t)((s->first + chunk) % ring)) * c->recv_buffer_bytes;
}

/* Long messages leave, and arrive, in the user's memory; the others in a slot and in the receive buffer. */
static int is_long(const shm_op *s) { return s->chunk_bytes > mpp_channel_of(s)->recv_buffer_bytes; }

static char *received_at(const shm_op *s, uint64_t chunk, int rank) {
    return is_long(s) ? mpp_out_block_at(s, rank, chunk * s->chunk_bytes) : recv_block(s, chunk, rank);
}

static void send_blocks(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    int me = s->op.group->rank, place = mpp_channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->lengths[me], chunk);
    const char *block = is_long(s) && length ? mpp_in_at(s, chunk * s->chunk_bytes) : mpp_own_slot(s, chunk);
    for (int i = 1; i < t->count; i++) {
        int node = mpp_other_node(t, i), node_before = mpp_other_node(t, t->count - i);
        mpp_pipeline_send(s, chunk, block, length, mpp_peer_rank(s, node, place));
        for (int p = place; p < mpp_local_count(t, node_before); p += mpp_channel_of(s)->size) {
            int sender = t->members[t->first[node_before] + p];
            size_t theirs = mpp_chunk_length(s, s->lengths[sender], chunk);
            if (theirs) mpp_pipeline_recv(s, chunk, received_at(s, chunk, sender), theirs, sender);
        }
    }
}

static void read_blocks_internode(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    size_t offset = chunk * s->chunk_bytes;
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        char *out = length ? mpp_out_block_at(s, r, offset) : NULL;
        if (!length || out == mpp_in_at(s, offset)) continue;
        int is_here = t->node_of[r] == t->here;
        if (!is_long(s)) memcpy(out, is_here ? mpp_slot_at(s, t->place_of[r], chunk) : recv_block(s, chunk, r), length);
        else if (is_here) memcpy(out, mpp_in_at(s, offset), length);
    }
}

static int between_nodes(shm_op *s) {
    static const mpp_route piggybacked = {
        .pack = pack_blocks, .span = span_of_blocks, .merge = mpp_merge_by_copy, .unpack = mpp_unpack_by_copy};
    static const mpp_route pipelined = {.first_phase = send_blocks};
    size_t table = (size_t)s->op.group->size * s->bytes;
    s->wait_for = -1;
    if (!s->bytes) return 1;
    if (table <= s->chunk_bytes && table <= MPP_PAYLOAD) {
        mpp_piggyback(s, &piggybacked, table);
        s->read = read_table;
        return 1;
    }
    size_t message = mpp_long_message(s, s->bytes);
    s->chunk_bytes = message ? message : mpp_channel_of(s)->recv_buffer_bytes;
    if (message) s->write = NULL;
    s->read = read_blocks_internode;
    return mpp_use_pipeline(s, &pipelined);
}

/* ---- on a node ---- */

static void pull_blocks(shm_op *s) {
    int own = s->op.group->rank;
    for (int r = 0; r < s->op.group->size; r++) {
        if (r == own) mpp_copy_in_device(s->bus, MPP_UP, s->out_list[r], (uintptr_t)s->in, s->lengths[r]);
        else mpp_pull_from(s, r, 0, s->out_list[r], s->lengths[r]);
    }
}

static void read_blocks(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    for (int r = 0; r < c->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (!length) continue;
        char *out = mpp_out_block_at(s, r, offset);
        const char *own = mpp_in_at(s, offset);
        if (r != c->rank) mpp_from_slot(s, out, mpp_slot_at(s, r, chunk), length);
        else if (s->bus) mpp_copy_in_device(s->bus, MPP_UP, (uintptr_t)out, (uintptr_t)own, length);
        else if (out != own) memcpy(out, own, length);
    }
}

static int over_shm(shm_op *s, const mpp_operands *o) {
    uintptr_t shown = o->output_sizes[s->op.group->rank] ? o->input : 0;
    s->write = mpp_write_plain;
    s->read = read_blocks;
    s->pull = pull_blocks;
    mpp_offer(s, &shown, NULL, s->bytes, o->output_sizes);
    return 1;
}

/* ---- by MPI ---- */

static int issue_allgather(mpi_collective *c) {
    const mpp_group *g = c->op.group;
    int n = (int)mpp_part_of(c, c->total);
    size_t offset = c->index * c->per_call;
    const char *in = mpp_in_at(c, offset);
    char *out = mpp_out_at(c, offset); /* the blocks of all ranks, each of n bytes */
    const void *send = in == out + (size_t)g->rank * (size_t)n ? mpp_mpi.in_place : in;
    return mpp_mpi.Iallgather(send, n, mpp_mpi.byte, out, n, mpp_mpi.byte, g->comm, &c->request);
}

/* In a slot the blocks of one piece lie side by side, as MPI wants them; in the user's memory all of them. */
static int by_mpi(mpi_collective *c, const mpp_operands *o) {
    size_t bytes = o->output_sizes[0], of_piece = mpp_call_limit(o->staging) / (size_t)c->op.group->size;
    c->out = (char *)o->outputs[0];
    mpp_split(c, bytes, mpp_through_host(o->staging) ? of_piece : bytes);
    return 1;
}

uintptr_t mpp_allgather(const mpp_operands *o) {
    static const mpp_ways ways = {over_shm, between_nodes, by_mpi, issue_allgather, NULL};
    int is_one_call = o->output_sizes[0] <= mpp_call_limit(o->staging);
    if (mpp_goes_over_shm(o, MPP_ALL_GATHER) || (o->flat && (is_one_call || mpp_through_host(o->staging))))
        return mpp_start_collective(o, MPP_ALL_GATHER, &ways);
    mpp_note_operands(o, MPP_ALL_GATHER);
    return mpp_exchange_to_gather(o);
}
