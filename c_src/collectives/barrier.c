/* barrier: on a node and between nodes the comparison of the calls alone, or MPI's. */
#include "collectives/collective.h"

static int issue_barrier(mpi_collective *c) { return mpp_mpi.Ibarrier(c->op.group->comm, &c->request); }

uintptr_t mpp_barrier(const mpp_operands *o) {
    static const mpp_ways ways = {.issue = issue_barrier};
    return mpp_start_collective(o, MPP_BARRIER, &ways);
}
