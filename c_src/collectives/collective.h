/* What the collectives of this folder share. Each file has some of them: between nodes, on a node, by MPI, and which of
 * these a call takes. That depends only on what all ranks share: the group, the operation, its length, and the kind of
 * staging. */
#pragma once

#include "mpicoll/mpi_collective.h"

/* How a collective goes. What its operands are is known when these are called; all of them may be NULL, and those that
 * return an int say whether there is memory. */
typedef struct {
    int (*over_shm)(shm_op *s, const mpp_operands *o);
    int (*between_nodes)(shm_op *s); /* after that, in a group on several nodes */
    int (*by_mpi)(mpi_collective *c, const mpp_operands *o);
    int (*issue)(mpi_collective *c);
    void (*finish)(mpi_collective *c);
} mpp_ways;

/* Whether an operation goes through shared memory, and between the nodes by our own messages. Data that MPI takes from
 * a device directly does not, nor, in some groups on several nodes, what is long (mpp_group_limit). */
int mpp_goes_over_shm(const mpp_operands *o, int kind);
uintptr_t mpp_start_collective(const mpp_operands *o, int kind, const mpp_ways *ways);
/* Notes the call; first of all. */
void mpp_note_operands(const mpp_operands *o, int kind);
/* A CUDA tensor goes through memory of the rank's own instead of registered slots. */
void mpp_leave_bus(shm_op *s);
/* An all_gather as an exchange, which all ranks must call alike. */
uintptr_t mpp_exchange_to_gather(const mpp_operands *o);
/* Of one tensor, which may be this rank's block, a chunk after the other. */
void mpp_write_plain(shm_op *s, uint64_t chunk, char *slot);
/* Reductions of one tensor by MPI, in calls of at most `limit` bytes; whether there is memory. */
int mpp_reduce_in_calls(mpi_collective *c, const mpp_operands *o, size_t limit);
int mpp_issue_reduction(mpi_collective *c);
