/* The collectives over shared memory: for each, what a rank writes to its slot and what it reads from the others'. The
 * protocol around that is in protocol.c. */
#include "shm/shm.h"

#include <stdlib.h>
#include <string.h>

#include "shm/signatures.h"

uintptr_t *mpp_copy_list(const uintptr_t *list, int count) {
    uintptr_t *copy = malloc((size_t)count * sizeof *copy);
    if (copy) memcpy(copy, list, (size_t)count * sizeof *copy);
    return copy;
}

static uintptr_t out_of_memory(shm_op *s, mpp_group *g, int64_t wait_ns) {
    if (s) mpp_discard(&s->op);
    return mpp_shm_out_of_memory(g, wait_ns);
}

static void begin_staging(shm_op *s) {
    if (s->bus) mpp_stage_on_bus(&s->op);
    else mpp_stage_begin(&s->op, mpp_piece_size(s->chunk_bytes, s->op.staging->lane_count));
}

static void leave_bus(shm_op *s) {
    if (s->bus) s->place = MPP_STAGED;
    s->bus = NULL;
}

/* ---- barrier and broadcast ---- */

uintptr_t mpp_shm_barrier(mpp_group *g, int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, 0);
    if (!s) return out_of_memory(s, g, wait_ns);
    mpp_sign(s, MPP_BARRIER, -1, 0);
    return mpp_enqueue_shm(s, wait_ns);
}

static void write_plain(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) mpp_to_slot(s, slot, mpp_shm_in(s, mpp_chunk_begin(s, chunk)), length);
}

static void read_from_root(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) mpp_from_slot(s, mpp_shm_out(s, mpp_chunk_begin(s, chunk)), mpp_slot_at(s, s->root, chunk), length);
}

uintptr_t mpp_shm_broadcast(mpp_group *g, void *buffer, size_t bytes, int root, uintptr_t staging, int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, staging);
    if (!s) return out_of_memory(s, g, wait_ns);
    s->in = s->out = buffer;
    s->bytes = bytes;
    s->root = s->wait_for = root;
    if (g->rank == root) s->write = write_plain;
    else s->read = read_from_root;
    if (g->channel->internode && !g->channel->internode->broadcast(s)) return out_of_memory(s, g, wait_ns);
    mpp_sign(s, MPP_BROADCAST, root, bytes);
    if (staging) {
        mpp_add_lane(&s->op, (uintptr_t)buffer, bytes, g->rank == root ? MPP_LOAD : MPP_STORE);
        begin_staging(s);
    }
    return mpp_enqueue_shm(s, wait_ns);
}

/* ---- all_reduce and reduce ---- */

static void read_sum(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_at(s, r, chunk);
    /* Mine from the user's buffer: it may be the very place the result goes to, which mpp_reduce allows. */
    c->sources[c->rank] = mpp_shm_in(s, offset);
    mpp_reduce(&s->how, mpp_shm_out(s, offset), c->sources, c->size, mpp_chunk_length(s, s->bytes, chunk) / s->element);
}

static void read_parts(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    for (int r = 0; r < c->size; r++) {
        size_t begin = mpp_part_begin(c, length, r), end = mpp_part_begin(c, length, r + 1);
        mpp_from_slot(s, mpp_shm_out(s, mpp_chunk_begin(s, chunk)) + begin, mpp_slot_at(s, r, chunk) + begin,
                      end - begin);
    }
}

/* root -1: everybody gets the result. */
uintptr_t mpp_shm_reduce(mpp_group *g, const void *in, void *out, size_t count, const mpp_reduction *how, int root,
                         uintptr_t staging, int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, staging);
    if (!s) return out_of_memory(s, g, wait_ns);
    s->in = in;
    s->out = out;
    s->how = *how;
    s->root = root;
    s->element = mpp_dtype_size(how->dtype);
    s->bytes = count * s->element;
    s->write = g->size > 1 ? write_plain : NULL;
    s->two_phase = g->size >= TWO_PHASE_RANKS && s->bytes > TWO_PHASE_BYTES;
    s->read = s->two_phase ? read_parts : read_sum;
    s->read_reduced = read_parts;
    if (s->bytes <= s->chunk_bytes) leave_bus(s); /* one more round of all ranks would cost more than a copy */
    if (root >= 0 && root != g->rank) {
        s->read = NULL;
        if (!s->two_phase) s->wait_for = g->rank; /* written is enough: nothing to read */
    }
    if (g->channel->internode && !g->channel->internode->reduce(s)) return out_of_memory(s, g, wait_ns);
    mpp_sign(s, root < 0 ? MPP_ALL_REDUCE : MPP_REDUCE, root, s->bytes);
    if (staging) {
        int result = root < 0 || root == g->rank ? MPP_STORE : 0, in_place = in == out;
        mpp_add_lane(&s->op, (uintptr_t)in, s->bytes, in_place ? MPP_LOAD | result : MPP_LOAD);
        if (result && !in_place) s->out_lane = mpp_add_lane(&s->op, (uintptr_t)out, s->bytes, result);
        begin_staging(s);
    }
    return mpp_enqueue_shm(s, wait_ns);
}

/* ---- all_gather ---- */

static void write_own_block(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = mpp_chunk_length(s, s->lengths[s->op.group->rank], chunk);
    if (length) mpp_to_slot(s, slot, mpp_shm_in(s, mpp_chunk_begin(s, chunk)), length);
}

static void read_blocks(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    for (int r = 0; r < c->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (!length) continue;
        char *out = mpp_shm_out_block(s, r, offset);
        const char *own = mpp_shm_in(s, offset);
        if (r != c->rank) mpp_from_slot(s, out, mpp_slot_at(s, r, chunk), length);
        else if (s->bus && out != own) mpp_bus_copy_in_device(s->bus, (uintptr_t)out, (uintptr_t)own, length);
        else if (out != own) memcpy(out, own, length);
    }
}

uintptr_t mpp_shm_allgather(mpp_group *g, const void *in, const uintptr_t *out, const size_t *bytes, uintptr_t staging,
                            int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, staging);
    if (!s) return out_of_memory(s, g, wait_ns);
    size_t longest = mpp_longest_of(bytes, g->size);
    s->in = in;
    s->out_list = mpp_copy_list(out, g->size);
    s->lengths = (size_t *)mpp_copy_list((const uintptr_t *)bytes, g->size);
    if (!s->out_list || !s->lengths) return out_of_memory(s, g, wait_ns);
    s->write = write_own_block;
    s->read = read_blocks;
    if (g->channel->internode && !g->channel->internode->allgather(s, longest)) return out_of_memory(s, g, wait_ns);
    mpp_sign(s, MPP_ALL_GATHER, -1, longest);
    if (staging) {
        mpp_add_lane(&s->op, (uintptr_t)in, bytes[g->rank], MPP_LOAD);
        s->out_lane = 1;
        for (int r = 0; r < g->size; r++) mpp_add_lane(&s->op, out[r], bytes[r], MPP_STORE);
        begin_staging(s);
    }
    return mpp_enqueue_shm(s, wait_ns);
}

/* ---- reduce_scatter ---- */

static void write_pieces(shm_op *s, uint64_t chunk, char *slot) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, mpp_piece_number(s, chunk));
    int end = mpp_end_in_slot(s, chunk);
    for (int r = mpp_first_in_slot(s, chunk); r < end; r++) {
        mpp_stretch block = mpp_block_in_slot(s, chunk, r);
        if (block.length && (c->topology || s->bus || r != c->rank))
            mpp_to_slot(s, slot + block.begin, mpp_shm_in_block(s, r, offset), block.length);
    }
}

static void read_piece_sum(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    mpp_stretch mine = mpp_block_in_slot(s, chunk, c->rank);
    size_t offset = mpp_chunk_begin(s, mpp_piece_number(s, chunk));
    if (!mine.length) return;
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_at(s, r, chunk) + mine.begin;
    char *out =
        s->bus ? mpp_slot_at(s, c->rank, chunk) + mine.begin : mpp_shm_out(s, offset); /* nobody else reads it */
    if (!s->bus) c->sources[c->rank] = mpp_shm_in_block(s, c->rank, offset);
    mpp_reduce(&s->how, out, c->sources, c->size, mine.length / s->element);
    if (s->bus) mpp_from_slot(s, mpp_shm_out(s, offset), out, mine.length);
}

uintptr_t mpp_shm_reduce_scatter(mpp_group *g, const uintptr_t *in, void *out, const size_t *counts,
                                 const mpp_reduction *how, uintptr_t staging, int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, staging);
    if (!s) return out_of_memory(s, g, wait_ns);
    s->out = out;
    s->how = *how;
    s->element = mpp_dtype_size(how->dtype);
    size_t longest = mpp_longest_of(counts, g->size) * s->element;
    s->in_list = mpp_copy_list(in, g->size);
    s->lengths = (size_t *)mpp_copy_list((const uintptr_t *)counts, g->size);
    if (!s->in_list || !s->lengths) return out_of_memory(s, g, wait_ns);
    for (int r = 0; r < g->size; r++) s->lengths[r] *= s->element;
    s->chunk_bytes = mpp_piece_bytes(g->channel);
    s->batches = (uint64_t)((g->size - 1) / mpp_ranks_per_slot(g->channel) + 1);
    s->write = write_pieces;
    s->read = read_piece_sum;
    if (g->channel->internode && !g->channel->internode->reduce_scatter(s, longest))
        return out_of_memory(s, g, wait_ns);
    mpp_sign(s, MPP_REDUCE_SCATTER, -1, longest);
    if (staging) {
        for (int r = 0; r < g->size; r++) mpp_add_lane(&s->op, in[r], s->lengths[r], MPP_LOAD);
        s->out_lane = mpp_add_lane(&s->op, (uintptr_t)out, s->lengths[g->rank], MPP_STORE);
        begin_staging(s);
    }
    return mpp_enqueue_shm(s, wait_ns);
}

/* ---- what only compares ---- */

shm_op *mpp_new_agreement(mpp_group *g) {
    shm_op *s = mpp_new_shm_op(g, 0);
    if (!s) return NULL;
    s->op.counts = 0;
    atomic_fetch_sub(&g->active, 1);
    return s;
}

mpp_op *mpp_shm_agree(mpp_group *g, int kind, const mpp_reduction *how, int root, size_t length, const size_t *lengths,
                      size_t element, int place) {
    shm_op *s = mpp_new_agreement(g);
    if (!s) return NULL;
    if (how) s->how = *how;
    s->place = place;
    if (lengths && !(s->lengths = (size_t *)mpp_copy_list((const uintptr_t *)lengths, g->size))) {
        mpp_discard(&s->op);
        return NULL;
    }
    for (int r = 0; lengths && r < g->size; r++) s->lengths[r] *= element;
    s->chunk_bytes = SIZE_MAX; /* no data: one chunk, whatever the length */
    mpp_sign(s, kind, root, length * element);
    mpp_take_place(s);
    return &s->op;
}
