/* Sums of a group on several nodes, for reductions there: what is added up where, what travels, what is piggybacked. */
#pragma once

#include "internode/pipeline.h"

/* Whether this rank's user gets the result. */
static inline int mpp_is_wanted(const shm_op *s) { return s->root < 0 || s->root == s->op.group->rank; }

/* Whether elements are sent from the user's memory. Blocks of a reduce_scatter that are piggybacked lie in slots only.
 */
int mpp_is_direct(const shm_op *s);
/* Where a rank here puts results, for all of them to read, or for its user. */
char *mpp_results_at(const shm_op *s, int rank, uint64_t chunk);
/* Sends this node's sums of a stretch of a chunk. */
void mpp_send_sums_of(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int rank);
/* Places the sums of all nodes, this one's included, side by side at the beginning of the pipeline slot's memory. */
void mpp_gather_sums(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int (*sender)(const shm_op *, int));
/* Adds up what mpp_gather_sums() has placed, and what has come. Returns where the result lies: at `result`, or, where
 * that is NULL, in the pipeline slot's memory. */
char *mpp_add_nodes(shm_op *s, uint64_t chunk, size_t bytes, char *result);
/* Each node has a piece of the result. Sends that to the nodes that want it, and receives theirs in `results`. */
void mpp_exchange_results(shm_op *s, uint64_t chunk, const char *piece, char *results,
                          mpp_stretch (*piece_of)(const shm_op *, uint64_t, int), int (*rank_on)(const shm_op *, int));
/* What a chunk of a long reduction carries at most, of the tensor or of all blocks: for each other node one message
 * that needs no answer, and what a pipeline slot has room for, four bytes of sums for each of a slot of shared memory.
 */
size_t mpp_most_of_sums(const shm_op *s);

/* Piggybacks a short reduction of `bytes`; 0: it is too long for that. */
int mpp_piggyback_sums(shm_op *s, size_t bytes);
/* The same by halves, where a node's share takes so many of the bytes. Of a tensor that no list of lengths cuts into
 * blocks the shares still go through the pipeline. */
int mpp_piggyback_by_halves(shm_op *s, size_t bytes, size_t share);
