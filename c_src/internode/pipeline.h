/* Chunks on their way between the nodes of a group. Each takes one or two phases, which an operation's route begins: it
 * posts messages, and the phase is over when all of them are. */
#pragma once

#include <stdlib.h>

#include "internode/internode.h"

/* ---- for the protocol, under the lock ---- */

/* Starts a chunk that all ranks here have written on its way to the other nodes. */
void mpp_pipeline_start(shm_op *s, uint64_t chunk);
/* Moves the chunks that are under way; whether any is complete, which `reduced` counts. */
int mpp_pipeline_poll(shm_op *s);

/* ---- for the functions that make an operation ---- */

/* The operation's data goes chunk by chunk; 0: no memory. */
int mpp_use_pipeline(shm_op *s, const mpp_route *route);
/* The operation's data goes with the agreement about the call. */
void mpp_piggyback(shm_op *s, const mpp_route *route, size_t payload);

/* What the pipeline of a group of `ranks` will take with the first such operation; 0 once it has taken it. */
size_t mpp_pipeline_bytes_to_come(const mpp_channel *c, size_t ranks);

/* ---- for routes ---- */

static inline mpp_pipeline_slot *mpp_pipeline_slot_of(const shm_op *s, uint64_t chunk) {
    return &mpp_internode_of(s)->slots[(s->first + chunk) % (uint64_t)mpp_channel_of(s)->ring];
}

static inline char *mpp_own_slot(const shm_op *s, uint64_t chunk) {
    return mpp_slot_at(s, mpp_channel_of(s)->rank, chunk);
}

/* No other rank on this node reads the data, so they travel from and to the user's memory, or where that is staged: a
 * staging's piece has whole chunks. (An all_gather gains by that in long messages only.) */
static inline int mpp_goes_directly(const shm_op *s) { return mpp_channel_of(s)->size == 1; }

/* Memory until the chunk is complete. */
static inline char *mpp_pipeline_alloc(mpp_pipeline_slot *p, size_t bytes) {
    char *taken = p->memory + p->used;
    p->used += (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    if (p->used > p->room) abort(); /* slot_bytes() in pipeline.c is wrong */
    return taken;
}

/* The other nodes in turn, on each node beginning with the next one, so that not all send to one. */
static inline int mpp_other_node(const mpp_topology *t, int i) { return (t->here + i) % t->count; }

/* The leader on another node that has this rank's number. */
static inline int mpp_same_leader_on(const shm_op *s, int node) {
    const mpp_topology *t = mpp_topology_of(s);
    return t->members[t->first[node] + mpp_channel_of(s)->rank];
}

/* The rank on a node that exchanges blocks with the rank which has the number `place` on another node. */
static inline int mpp_peer_rank(const shm_op *s, int node, int place) {
    const mpp_topology *t = mpp_topology_of(s);
    return t->members[t->first[node] + place % mpp_local_count(t, node)];
}

/* How much of `bytes` a chunk of one tensor, or of each block, carries at most `most`. Where each node has one rank
 * nothing lies in slots, and chunks may be longer than these: their messages are fewer. But there are eight chunks at
 * least, as their phases overlap. */
size_t mpp_internode_chunk(const shm_op *s, size_t bytes, size_t most);
/* The length of one message, where a rank gets so many bytes from each other one, and long ones are better; else 0. */
size_t mpp_long_message(const shm_op *s, size_t bytes);
/* Whether the sums of one node go to the other, which has the root: two thirds of the bytes. */
int mpp_reduces_one_way(const shm_op *s);

/* Nothing is sent or received where there are no bytes. */
void mpp_pipeline_send(shm_op *s, uint64_t chunk, const void *buffer, size_t bytes, int rank);
void mpp_pipeline_recv(shm_op *s, uint64_t chunk, void *buffer, size_t bytes, int rank);

/* Piece number `piece` of `pieces` of a leader's part of `length` bytes, in whole cache lines. */
mpp_stretch mpp_piece_of_leader(const mpp_topology *t, size_t length, int leader, int piece, int pieces);

void mpp_merge_by_copy(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first);
void mpp_unpack_by_copy(shm_op *s, char *payload);

/* ---- where a rank finds received data ---- */

void mpp_read_from_first(shm_op *s, uint64_t chunk);   /* in the slot of the first rank here */
void mpp_read_from_leaders(shm_op *s, uint64_t chunk); /* part by part in the slots of the leaders */
