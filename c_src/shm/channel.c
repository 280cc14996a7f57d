/* A channel: how large its segment is, and its memory. */
#include <malloc.h>
#include <stdlib.h>

#include "message/message.h"
#include "shm/shm.h"

enum { MOST_RECV_BYTES = 16 << 20 };

_Static_assert(sizeof(mpp_call) == CACHE_LINE && sizeof(rank_counters) % CACHE_LINE == 0, "no two ranks share a line");

/* How much of a block from another node one chunk brings; the same on all nodes. */
static size_t recv_buffer_bytes(int ranks, int slots, size_t slot_bytes) {
    size_t most = MOST_RECV_BYTES / ((size_t)ranks * (size_t)slots) / CACHE_LINE * CACHE_LINE;
    size_t at_most = slot_bytes < MPP_EAGER ? slot_bytes : MPP_EAGER;
    return most > at_most ? at_most : most < CACHE_LINE ? CACHE_LINE : most;
}

/* For a group of `ranks`, of which `here` are on this node. */
size_t mpp_segment_size(int ranks, int here, int slots, size_t slot_bytes) {
    size_t recv_buffers = (size_t)(ranks - here) * (size_t)slots * recv_buffer_bytes(ranks, slots, slot_bytes);
    return (size_t)here * (sizeof(rank_counters) + (size_t)slots * slot_bytes) + recv_buffers;
}

mpp_channel *mpp_channel_new(mpp_group *g, uintptr_t segment, int slots, size_t slot_bytes, mpp_topology *topology) {
    int fits = slots >= 1 && slots <= MAX_RING && slot_bytes >= CACHE_LINE && slot_bytes % CACHE_LINE == 0;
    mpp_channel *c = fits ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        mpp_topology_free(topology);
        return NULL;
    }
    c->topology = topology;
    c->size = topology ? mpp_local_count(topology, topology->here) : g->size;
    c->rank = topology ? topology->place_of[g->rank] : g->rank;
    c->sources = malloc((size_t)g->size * sizeof *c->sources);
    c->factors = malloc((size_t)g->size * sizeof *c->factors);
    if (!c->sources || !c->factors) {
        mpp_channel_free(c);
        return NULL;
    }
    c->counters = (rank_counters *)segment; /* the file is new, so every counter starts at zero */
    c->slots = (char *)segment + (size_t)c->size * sizeof(rank_counters);
    c->ring = slots;
    c->slot_bytes = slot_bytes;
    c->recv_buffer = c->slots + (size_t)c->size * (size_t)slots * slot_bytes;
    c->recv_buffer_bytes = recv_buffer_bytes(g->size, slots, slot_bytes);
    for (int limit = 0; limit < MPP_LIMITS; limit++) c->limits[limit] = INT64_MAX;
    if (topology) c->limits[MPP_SCAN] = c->limits[MPP_EXSCAN] = -1; /* which have no way of our own between nodes */
    mpp_prepare_oom_placeholder(c, g);
    return c;
}

void mpp_channel_free(mpp_channel *c) {
    if (!c) return;
    free(c->peers);
    free(c->sources);
    free(c->factors);
    if (c->internode_state) c->internode->free(c->internode_state);
    mpp_topology_free(c->topology);
    free(c);
}

void mpp_channel_bytes(mpp_channel *c, size_t ranks, size_t *taken, size_t *later) {
    *taken = malloc_usable_size(c) + malloc_usable_size(c->sources) + malloc_usable_size(c->factors);
    *taken += mpp_topology_bytes(c->topology);
    if (c->internode) c->internode->count_bytes(c, ranks, taken, later);
    if (!c->internode || c->limits[MPP_EXCHANGE] < 0) *later = 0;
}
