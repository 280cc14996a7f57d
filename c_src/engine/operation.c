/* Operations before they are started and after they are complete; polling.c has what lies between. */
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
    mpp_time_op(op);
    return op;
}

/* Returned for an operation that could not be made: all it can do is to say why. */
static mpp_op no_memory = {.state = MPP_FAILED, .failure = MPP_FAILURE_MEMORY, .source = -1};
static mpp_op no_memory_in_order = {.state = MPP_FAILED, .failure = MPP_FAILURE_MEMORY, .source = -1, .detail = {1}};
static mpp_op no_group = {.state = MPP_FAILED, .failure = MPP_FAILURE_CANCELLED, .source = -1};

int mpp_is_shared(const mpp_op *op) { return op == &no_memory || op == &no_memory_in_order || op == &no_group; }

uintptr_t mpp_out_of_memory(const mpp_group *group, int in_order) {
    return (uintptr_t)(mpp_is_closed(group) ? &no_group : in_order ? &no_memory_in_order : &no_memory);
}

void mpp_group_unref(mpp_group *group) {
    if (atomic_fetch_sub(&group->holders, 1) == 1) group->release(group);
}

void mpp_discard(mpp_op *op) {
    if (op->discard) op->discard(op);
    if (op->agreement) mpp_discard(op->agreement);
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

/* An exception (Ctrl-C, say) may reach Python between the return of a function here and the next instruction, and the
 * handle that was returned is lost. What C itself owns for Python (python/bridge.c) is not meant. */
static _Thread_local uintptr_t not_owned;

uintptr_t mpp_not_owned_yet(uintptr_t op) { return not_owned = op; }

uintptr_t mpp_unclaimed(void) {
    uintptr_t op = not_owned;
    not_owned = 0;
    return op;
}

int mpp_source_of(uintptr_t handle) { return ((mpp_op *)handle)->source; }

void mpp_set_chunk_limit(size_t bytes) { mpp_chunk_limit = bytes; }
size_t mpp_get_chunk_limit(void) { return mpp_chunk_limit; }
