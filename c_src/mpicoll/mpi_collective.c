/* How an operation makes its MPI calls. An operation may need several MPI calls (more elements than an int counts, or a
 * conversion to a type that MPI can reduce, done in pieces). MPI wants the calls on one communicator in the same order
 * on every rank, so an operation makes its first call only after the one before it has made its last.
 */
#include "mpicoll/mpi_collective.h"

#include <stdlib.h>
#include <string.h>

/* ---- one call after the other ---- */

static void leave_queue(mpi_collective *c) { MPP_TAKE_OUT(c->op.group->issuing, later, c); }

static void enter_queue(mpi_collective *c) { *MPP_END_OF(c->op.group->issuing, later) = c; }

/* Where the group compares what its ranks call: MPP_DONE once all call the same. Comparisons end in the order of the
 * calls, so that is the order in which MPI's collectives begin, on every rank. */
static int agree(mpi_collective *c) {
    mpp_op *agreement = c->op.agreement;
    int state = agreement->step(agreement);
    if (state == MPP_PENDING) return state;
    c->agreed = 1;
    if (state == MPP_DONE && c->calls) enter_queue(c);
    if (state == MPP_DONE) return state;
    memcpy(c->op.detail, agreement->detail, sizeof agreement->detail);
    return mpp_fail(&c->op, agreement->failure, agreement->mpi_error);
}

static int step(mpp_op *op) {
    mpi_collective *c = (mpi_collective *)op;
    int state = c->agreed ? MPP_DONE : agree(c);
    op->idle = state == MPP_PENDING ? mpp_idle_until(op->group, -1) : MPP_BUSY;
    if (state != MPP_DONE) return state;
    for (;;) {
        if (!c->active) {
            if (c->index == c->calls) return MPP_DONE;
            if (op->group->issuing != c) return MPP_PENDING;
            int error = 0, is_there = 1;
            if (atomic_load_explicit(&op->group->aborted, memory_order_relaxed)) mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
            else if (op->staging) is_there = mpp_stage_open(op, c->index * c->stride);
            if (!is_there && !op->failure) return MPP_PENDING;
            if (!op->failure) error = c->issue(c);
            if (error) mpp_fail(op, MPP_FAILURE_MPI, error);
            if (op->failure || c->index + 1 == c->calls) leave_queue(c);
            if (op->failure) return MPP_FAILED;
            c->active = 1;
        }
        state = mpp_test(op, &c->request);
        if (state == MPP_PENDING) return state;
        c->active = 0;
        if (state == MPP_FAILED) {
            leave_queue(c);
            return state;
        }
        if (c->finish) c->finish(c);
        c->index++;
        if (op->staging) mpp_stage_close(op->staging, c->index * c->stride);
    }
}

static void discard_buffers(mpp_op *op) {
    mpi_collective *c = (mpi_collective *)op;
    free(c->scratch);
    free(c->scratch_out);
    free(c->in_list);
    free(c->counts);
    free(c->parts);
}

mpi_collective *mpp_new_collective(mpp_group *g, int kind, int (*issue)(mpi_collective *), uintptr_t staging) {
    mpi_collective *c = mpp_new_op(sizeof *c, g, step, staging);
    if (!c) return NULL;
    c->op.discard = discard_buffers;
    c->kind = kind;
    c->place = staging ? MPP_ON_DEVICE : MPP_ON_HOST;
    c->issue = issue;
    c->root = -1;
    c->calls = 1;
    c->element = 1;
    return c;
}

/* Where calls are compared the others learn of it, in this call's place. */
uintptr_t mpp_no_collective(mpi_collective *c, mpp_group *g) {
    if (c) mpp_discard(&c->op);
    return g->channel ? mpp_shm_out_of_memory(g, 0) : mpp_out_of_memory(g, 0);
}

/* The comparison of this call: of what all ranks must have in common. 0: no memory. */
static int begin_agreement(mpi_collective *c) {
    const mpp_group *g = c->op.group;
    size_t longest = c->counts ? mpp_longest_of(c->counts, g->size) : c->total;
    c->op.agreement = mpp_shm_agree(c->op.group, c->kind, &c->how, c->root, longest, c->counts, c->element, c->place);
    if (!c->op.agreement) return 0;
    if (c->op.staging && c->op.staging->error) mpp_withdraw((shm_op *)c->op.agreement, c->op.staging->error);
    c->op.arrived = mpp_arrived_to_compare;
    c->op.in_short = g->yield_early; /* else MPI's steps would come a pause later, one after the other */
    return 1;
}

uintptr_t mpp_enqueue(mpi_collective *c, int64_t wait_ns) {
    mpp_group *g = c->op.group;
    c->agreed = !g->channel;
    if (!c->agreed && !begin_agreement(c)) return mpp_no_collective(c, g);
    mpp_lock();
    if (c->agreed && c->calls) enter_queue(c);
    mpp_unlock();
    return mpp_start(&c->op, wait_ns);
}

void mpp_split(mpi_collective *c, size_t total, size_t per_call) {
    c->total = total;
    c->per_call = per_call ? per_call : 1;
    c->calls = (total + c->per_call - 1) / c->per_call;
    c->stride = c->per_call * c->element;
}

/* ---- reductions ---- */

mpi_handle mpp_mpi_op_of(const mpp_reduction *how) { return mpp_mpi.op[mpp_mpi_op(how)]; }

int mpp_set_reduction(mpi_collective *c, const mpp_reduction *how) {
    c->how = *how;
    c->element = mpp_dtype_size(how->dtype);
    c->mpi_dtype = mpp_mpi_dtype(how);
    return c->mpi_dtype != how->dtype || how->has_premul;
}

int mpp_new_scratch(mpi_collective *c, size_t elements) {
    c->scratch = malloc((elements ? elements : 1) * mpp_dtype_size(c->mpi_dtype));
    return c->scratch != NULL;
}

void mpp_finish_reduction(mpi_collective *c) {
    char *out = mpp_out_at(c, c->index * c->per_call * c->element);
    char *from = c->scratch_out ? c->scratch_out : c->scratch ? c->scratch : out;
    if (mpp_gets(c->op.group, c->kind, c->root) && (from != out || c->how.divisor != 1))
        mpp_from_mpi(&c->how, out, from, mpp_part_of(c, c->total));
}
