/* The collectives of a group on several hosts: what travels between them, and where it lies. shm.c has the protocol,
 * hosts.c the agreement, flights.c the messages.
 *
 * What is short rides with the agreement about the call, in the messages of the first rank of each host. A sum that is
 * not so short rides by halves, each host's share of it is complete then, and flies to the other hosts.
 *
 * What is long flies chunk by chunk, while other chunks are written and read. A reduction's chunk is cut into as many
 * parts as every host has ranks at least (lanes), and each part into one piece per host. The ranks of a lane exchange
 * their hosts' partial sums, one piece each, and then the results: each host sends and receives at most twice what it
 * holds, by all its lanes at once. (Rabenseifner's reduce-scatter and all-gather, with direct messages; several
 * leaders per host as in Bayatpour and others, "Scalable Reduction Collectives with Data Partitioning-based
 * Multi-Leader Design", 2017.) A broadcast's pieces are scattered over the other hosts, which then exchange them; where
 * a rank is alone on its host, from and to its user's memory. In an all_gather every block goes once to every other
 * host, into an inbox in its shared memory. In a reduce_scatter a host's sum of a block goes to the rank that wants it.
 *
 * Partial sums are in the computing type (float32 for narrow floats) where a host has several ranks; with one rank the
 * elements themselves are sent. Results are rounded once, and travel in the elements' type. A host's sum is the tree
 * of its ranks, and hosts are added as a tree too: see mpp_reduce().
 */
#ifndef MPP_ACROSS_H
#define MPP_ACROSS_H

#include "shm/shm.h"

/* Each gives an operation what it takes for its data to get to the other hosts as well. 0: there is no memory. They
 * come before mpp_sign(). */

int mpp_reduce_across(shm_op *s);
int mpp_broadcast_across(shm_op *s);
int mpp_allgather_across(shm_op *s, size_t longest);
int mpp_reduce_scatter_across(shm_op *s, size_t longest);

#endif
