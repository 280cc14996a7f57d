/* Sums of CUDA tensors of a group on one node that are reduced on the devices, in two halves: each rank gets its block
 * of everybody's tensor; and when Python has reduced these there (device_reductions.py) the others get the result.
 *
 * In both halves ranks that can all read each other's devices do (peers.c). Else the data goes through the slots, if
 * all have it on the bus (bus.c): of a tensor from the second chunk on, with a place in the slot for each rank's block,
 * as the first one was written before anybody knew. A rank that is not prepared for this says so in its call, and the
 * slots are reduced where they lie, by processors.
 */
#include "shm/shm.h"

static size_t place_bytes(const mpp_channel *c) {
    return c->slot_bytes * c->widening / (size_t)c->size / CACHE_LINE * CACHE_LINE;
}

int mpp_group_reach(uintptr_t group) {
    const mpp_channel *c = ((const mpp_group *)group)->channel;
    if (!c || !c->registered || !place_bytes(c)) return MPP_STAGED;
    return mpp_reads_all(c) ? MPP_BETWEEN_DEVICES : MPP_ON_BUS;
}

static mpp_stretch cut(size_t begin, size_t length, size_t total) {
    if (begin >= total) return (mpp_stretch){0, 0};
    return (mpp_stretch){begin, total - begin < length ? total - begin : length};
}

static mpp_stretch block_of(const shm_op *s, int rank) { return cut(s->block * (size_t)rank, s->block, s->bytes); }

/* ---- between devices ---- */

static void pull_stretch(shm_op *s, mpp_stretch mine) {
    const mpp_channel *c = s->op.group->channel;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank) mpp_pull_from(s, r, mine.begin, s->received + (size_t)r * mine.length, mine.length);
}

static void pull_parts(shm_op *s) { pull_stretch(s, block_of(s, s->op.group->rank)); }

static void pull_own_blocks(shm_op *s) { pull_stretch(s, (mpp_stretch){0, s->lengths[s->op.group->rank]}); }

static void pull_results(shm_op *s) {
    const mpp_channel *c = s->op.group->channel;
    for (int r = 0; r < c->size; r++) {
        mpp_stretch block = block_of(s, r);
        if (r != c->rank) mpp_pull_from(s, r, 0, (uintptr_t)s->out + block.begin, block.length);
    }
}

/* ---- through the slots ---- */

/* What a chunk carries of a rank's block. */
static mpp_stretch piece_of(const shm_op *s, uint64_t chunk, int rank) {
    size_t place = place_bytes(s->op.group->channel);
    if (!chunk) return (mpp_stretch){0, 0};
    return cut((size_t)(chunk - 1) * place, place, block_of(s, rank).length);
}

static void write_blocks(shm_op *s, uint64_t chunk, char *slot) {
    const mpp_channel *c = s->op.group->channel;
    for (int r = 0; r < c->size; r++) {
        mpp_stretch piece = piece_of(s, chunk, r);
        if (r != c->rank)
            mpp_to_slot(s, slot + (size_t)r * place_bytes(c), s->in + block_of(s, r).begin + piece.begin, piece.length);
    }
}

/* From all others' slots, where the piece lies `place` bytes from the beginning. */
static void receive(shm_op *s, uint64_t chunk, size_t place, mpp_stretch piece, size_t block) {
    const mpp_channel *c = s->op.group->channel;
    char *received = (char *)s->received + piece.begin;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank)
            mpp_from_slot(s, received + (size_t)r * block, mpp_slot_at(s, r, chunk) + place, piece.length);
}

static void receive_parts(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    receive(s, chunk, (size_t)me * place_bytes(s->op.group->channel), piece_of(s, chunk, me), block_of(s, me).length);
}

static void receive_own_blocks(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    mpp_stretch mine = mpp_block_in_slot(s, chunk, me);
    mpp_stretch piece = {mpp_chunk_begin(s, mpp_piece_number(s, chunk)), mine.length};
    receive(s, chunk, mine.begin, piece, s->lengths[me]);
}

static void write_result(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = mpp_chunk_length(s, block_of(s, s->op.group->rank).length, chunk);
    mpp_to_slot(s, slot, (const char *)s->received + mpp_chunk_begin(s, chunk), length);
}

static void read_results(shm_op *s, uint64_t chunk) {
    const mpp_channel *c = s->op.group->channel;
    for (int r = 0; r < c->size; r++) {
        mpp_stretch block = block_of(s, r);
        size_t length = mpp_chunk_length(s, block.length, chunk);
        if (r != c->rank)
            mpp_from_slot(s, s->out + block.begin + mpp_chunk_begin(s, chunk), mpp_slot_at(s, r, chunk), length);
    }
}

/* ---- when the operation is made ---- */

void mpp_in_halves(shm_op *s, shm_op *second, size_t block, const mpp_block *own) {
    mpp_gets_own_blocks(s, own->received);
    s->pull = pull_parts;
    s->second = second;
    s->block = second->block = block;
    second->root = s->root;
    second->received = own->result;
    second->out = s->out;
    second->bytes = s->bytes;
    second->checked = 1;
    second->half = MPP_SECOND_HALF;
    second->chunks = 0; /* it takes numbers once the calls have been compared */
}

void mpp_gets_own_blocks(shm_op *s, uintptr_t received) {
    if (s->bus) s->place = MPP_TO_REDUCE;
    s->received = received;
    s->pull = pull_own_blocks;
}

/* ---- under the lock ---- */

/* The second half takes part in what the calls that were compared have decided. */
static void plan_second(const shm_op *s, shm_op *second) {
    int is_root = s->root == s->op.group->rank, reads = s->root < 0 || is_root;
    second->between_devices = s->between_devices;
    second->widening = s->widening;
    second->pull = reads ? pull_results : NULL;
    second->read = reads ? read_results : NULL;
    if (s->between_devices) return;
    if (!is_root) second->write = write_result;
    if (!reads) second->wait_for = s->op.group->rank; /* written is enough */
}

uint64_t mpp_plan_halves(shm_op *s, uint64_t chunks, uint64_t *of_second) {
    size_t place = place_bytes(s->op.group->channel);
    s->half = MPP_FIRST_HALF;
    s->two_phase = 0;
    s->wait_for = -1;
    s->read = receive_own_blocks;
    if (!s->second) return chunks;
    plan_second(s, s->second);
    *of_second = chunks;
    if (s->between_devices) return chunks;
    s->write = write_blocks;
    s->read = receive_parts;
    *of_second = mpp_chunk_count(s->block, s->chunk_bytes, s->chunk_bytes * s->widening);
    return mpp_chunk_count(s->block, 0, place);
}

void mpp_abort_second(mpp_channel *c) {
    if (c->head && c->head->half == MPP_SECOND_HALF && !c->head->bus) mpp_drop_head(c);
}

/* ---- between them ---- */

int mpp_is_left_to_reduce(uintptr_t first) { return ((const shm_op *)first)->half == MPP_FIRST_HALF; }

uintptr_t mpp_second_half(uintptr_t first, uintptr_t staging) {
    shm_op *s = ((shm_op *)first)->second;
    ((shm_op *)first)->second = NULL;
    s->op.staging = s->bus = (mpp_staging *)staging;
    s->op.idle = MPP_BUSY;
    mpp_stage_on_bus(&s->op);
    if (s->between_devices) mpp_show(s, s->received);
    return mpp_not_owned_yet(mpp_start(&s->op, 0));
}
