/* What of an operation lies in which chunk, and where in its slot. */
#include "shm/shm.h"

uint64_t mpp_chunk_count(uint64_t bytes, size_t first, size_t others) {
    return bytes > first ? (bytes - first - 1) / others + 2 : 1;
}

/* Of how many ranks' blocks one slot carries a piece in a reduce-scatter: of all, as long as each gets a cache line. */
int mpp_ranks_per_slot(const mpp_channel *c) {
    size_t most = c->slot_bytes / CACHE_LINE;
    int ranks = c->topology ? c->topology->first[c->topology->count] : c->size;
    return (size_t)ranks < most ? ranks : (int)most;
}

size_t mpp_piece_bytes(const mpp_channel *c) {
    return c->slot_bytes / (size_t)mpp_ranks_per_slot(c) / CACHE_LINE * CACHE_LINE;
}

int mpp_first_in_slot(const shm_op *s, uint64_t chunk) {
    return (int)(chunk % s->batches) * mpp_ranks_per_slot(s->op.group->channel);
}

int mpp_end_in_slot(const shm_op *s, uint64_t chunk) {
    int first = mpp_first_in_slot(s, chunk), width = mpp_ranks_per_slot(s->op.group->channel),
        ranks = s->op.group->size;
    return ranks - first < width ? ranks : first + width;
}

mpp_stretch mpp_piece_in_slot(const shm_op *s, uint64_t chunk, int place, int per_slot, size_t bytes) {
    place -= (int)(chunk % s->batches) * per_slot;
    if (place < 0 || place >= per_slot) return (mpp_stretch){0, 0};
    return (mpp_stretch){(size_t)place * mpp_chunk_room(s, mpp_piece_number(s, chunk)),
                         mpp_chunk_length(s, bytes, mpp_piece_number(s, chunk))};
}

mpp_stretch mpp_block_in_slot(const shm_op *s, uint64_t chunk, int rank) {
    return mpp_piece_in_slot(s, chunk, rank, mpp_ranks_per_slot(s->op.group->channel), s->lengths[rank]);
}

/* The part of a chunk of `length` bytes that `rank` reduces; whole cache lines, so that no two ranks
 * write to one line. */
size_t mpp_part_begin(const mpp_channel *c, size_t length, int rank) {
    size_t lines = (length + CACHE_LINE - 1) / CACHE_LINE;
    size_t begin = lines * (size_t)rank / (size_t)c->size * CACHE_LINE;
    return begin < length ? begin : length;
}
