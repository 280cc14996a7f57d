/* Operations before they are started and after they are complete; engine.c has what lies between. */
#include <stdlib.h>

#include "engine/engine.h"

size_t mpp_chunk_limit = (size_t)1 << 30;

_Atomic int mpp_forked;

void mpp_note_fork(void) { atomic_store(&mpp_forked, 1); }

int mpp_fail(mpp_op *op, int failure, int mpi_error) {
    if (!op->failure) {
        op->failure = failure;
        op->mpi_error = mpi_error;
    }
    return MPP_FAILED;
}

int mpp_test(mpp_op *op, mpi_handle *request) {
    mpi_status status;
    int flag = 0;
    int error = mpp_mpi.Test(request, &flag, &status);
    if (!error) return flag ? MPP_DONE : MPP_PENDING;
    *request = mpp_mpi.request_null; /* an error completes the request */
    return mpp_fail(op, MPP_FAILURE_MPI, error);
}

void mpp_no_longer_active(mpp_op *op) {
    if (op->counts) atomic_fetch_sub(&op->group->active, 1);
    op->counts = 0;
}

static void release(mpp_owned *owned) {
    if (owned) owned->release(owned);
}

void *mpp_new_op(size_t size, mpp_group *group, int (*step)(mpp_op *), uintptr_t staging) {
    /* Counted from here on, so that the group is not closed before the operation is complete. */
    int closed = atomic_fetch_add(&group->active, 1) >= MPP_CLOSED;
    mpp_op *op = closed || mpp_in_child() ? NULL : calloc(1, size);
    if (!op) {
        atomic_fetch_sub(&group->active, 1);
        release((mpp_owned *)staging);
        return NULL;
    }
    op->group = group;
    op->counts = 1;
    op->spins = group->spins;
    op->staging = (mpp_staging *)staging;
    op->step = step;
    op->source = -1;
    return op;
}

/* Returned for an operation that could not be made: all it can do is to say why. */
static mpp_op no_memory = {.state = MPP_FAILED, .failure = MPP_FAILURE_MEMORY, .source = -1};
static mpp_op no_memory_in_order = {.state = MPP_FAILED, .failure = MPP_FAILURE_MEMORY, .source = -1, .detail = {1}};
static mpp_op no_group = {.state = MPP_FAILED, .failure = MPP_FAILURE_CANCELLED, .source = -1};

int mpp_is_shared(const mpp_op *op) { return op == &no_memory || op == &no_memory_in_order || op == &no_group; }

uintptr_t mpp_out_of_memory(const mpp_group *group) {
    return (uintptr_t)(mpp_is_closed(group) ? &no_group : &no_memory);
}

uintptr_t mpp_out_of_memory_in_order(const mpp_group *group) {
    return (uintptr_t)(mpp_is_closed(group) ? &no_group : &no_memory_in_order);
}

void mpp_group_unref(mpp_group *group) {
    if (atomic_fetch_sub(&group->holders, 1) == 1) group->release(group);
}

void mpp_discard(mpp_op *op) {
    if (op->discard) op->discard(op);
    release((mpp_owned *)op->staging);
    mpp_no_longer_active(op);
    if (op->holds) mpp_group_unref(op->group);
    free(op);
}

int mpp_failure_of(uintptr_t handle, int *mpi_error, int64_t *first, int64_t *second) {
    mpp_op *op = (mpp_op *)handle;
    *mpi_error = op->mpi_error;
    *first = op->detail[0];
    *second = op->detail[1];
    return op->failure;
}

int mpp_source_of(uintptr_t handle) { return ((mpp_op *)handle)->source; }

void mpp_set_chunk_limit(size_t bytes) { mpp_chunk_limit = bytes; }
size_t mpp_get_chunk_limit(void) { return mpp_chunk_limit; }

/* After what time without a move: in collectives of our own, in messages, with fewer cores than ranks; and where MPI
 * may be at work on what is long, which it moves only in the calls of those who wait. */
enum { STUCK_NS = 2000000, MESSAGE_STUCK_NS = 5000000, CROWDED_STUCK_NS = 200000, LONG_STUCK_NS = 20000000 };
enum { NAP_NS = 50000, LONGEST_NAP_NS = 1000000, NAPS_IN_WAIT = 50 };

static int64_t until_nap_ns(const mpp_op *op, const mpp_stall *s) {
    if (!op->in_short && !s->all_idle) return LONG_STUCK_NS;
    return op->group->yield_early ? CROWDED_STUCK_NS : op->arrived ? STUCK_NS : MESSAGE_STUCK_NS;
}

/* A yield gives only a part of the core to whoever else has work for it. Where each rank has a scheduling group of its
 * own, as with MPICH's mpiexec, those who yield keep the core for up to 0.3 s, as measured. Naps get longer where
 * nothing can be under way, up to a fiftieth of the wait. */
int64_t mpp_nap_ns(const mpp_op *op, mpp_stall *s, int64_t now) {
    unsigned seen = atomic_load_explicit(&op->group->moves, memory_order_relaxed);
    if (!s->since || seen != s->moves) s->since = now;
    if (!s->quiet || s->advanced) s->quiet = now;
    s->moves = seen;
    s->advanced = 0;
    int64_t quiet = now - (s->quiet > s->since ? s->quiet : s->since), longer = quiet / NAPS_IN_WAIT;
    /* Who waits for a message moves what else has been begun, and that is not to come a nap later each time. */
    if ((op->in_short ? now - s->since : quiet) <= until_nap_ns(op, s)) return 0;
    if (!s->all_idle || longer < NAP_NS) return NAP_NS;
    return longer < LONGEST_NAP_NS ? longer : LONGEST_NAP_NS;
}
