/* barrier: on a node and between nodes the comparison of the calls alone, or MPI's. */
#include "collectives/collective.h"

static uintptr_t over_shm(mpp_group *g, int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, 0);
    if (!s) return mpp_no_shm_op(s, g, wait_ns);
    mpp_sign(s, MPP_BARRIER, -1, 0);
    return mpp_enqueue_shm(s, wait_ns);
}

static int issue_barrier(mpi_collective *c) { return mpp_mpi.Ibarrier(c->op.group->comm, &c->request); }

static uintptr_t by_mpi(mpp_group *g, int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, MPP_BARRIER, issue_barrier, 0);
    return c ? mpp_enqueue(c, wait_ns) : mpp_no_collective(c, g);
}

uintptr_t mpp_barrier(uintptr_t group, int64_t wait_ns) {
    mpp_note(MPP_BARRIER, 0, -1);
    mpp_group *g = (mpp_group *)group;
    return mpp_in_shm(g, MPP_BARRIER, 0, 0) ? over_shm(g, wait_ns) : by_mpi(g, wait_ns);
}
