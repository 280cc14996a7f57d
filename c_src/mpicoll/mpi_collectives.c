/* MPI's nonblocking collectives that move data, and how an operation makes its MPI calls.
 *
 * An operation may need several MPI calls (more elements than an int counts, or a conversion to a type
 * that MPI can reduce, done in pieces). MPI wants the calls on one communicator in the same order on every
 * rank, so an operation makes its first call only after the one before it has made its last.
 */
#include <stdlib.h>
#include <string.h>

#include "mpicoll/mpi_collective.h"

/* ---- one call after the other ---- */

static void leave_queue(mpi_collective *c) {
    c->last_issued = 1;
    c->op.group->issuing = c->later;
}

static void enter_queue(mpi_collective *c) {
    mpi_collective **end = &c->op.group->issuing;
    while (*end) end = &(*end)->later;
    *end = c;
}

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
    op->idle = state == MPP_PENDING;
    if (state != MPP_DONE) return state;
    for (;;) {
        if (!c->active) {
            if (c->index == c->calls) return MPP_DONE;
            if (op->group->issuing != c) return MPP_PENDING;
            if (atomic_load_explicit(&op->group->aborted, memory_order_relaxed)) {
                leave_queue(c);
                return mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
            }
            if (op->staging && !mpp_stage_open(op, c->index * c->stride)) {
                if (!op->failure) return MPP_PENDING;
                leave_queue(c);
                return MPP_FAILED;
            }
            int error = c->issue(c);
            if (error || c->index + 1 == c->calls) leave_queue(c);
            if (error) return mpp_fail(op, MPP_FAILURE_MPI, error);
            c->active = 1;
        }
        state = mpp_test(op, &c->request);
        if (state == MPP_PENDING) return state;
        c->active = 0;
        if (state == MPP_FAILED) {
            if (!c->last_issued) leave_queue(c);
            return state;
        }
        if (c->finish) c->finish(c);
        c->index++;
        if (op->staging) mpp_stage_close(op->staging, c->index * c->stride);
    }
}

static void discard_buffers(mpp_op *op) {
    mpi_collective *c = (mpi_collective *)op;
    if (op->agreement) mpp_discard(op->agreement);
    free(c->scratch);
    free(c->scratch_out);
    free(c->in_list);
    free(c->counts);
}

mpi_collective *mpp_new_collective(mpp_group *g, int kind, int (*issue)(mpi_collective *), uintptr_t staging) {
    mpi_collective *c = mpp_new_op(sizeof *c, g, step, staging);
    if (!c) return NULL;
    c->op.discard = discard_buffers;
    c->kind = kind;
    c->issue = issue;
    c->root = -1;
    c->calls = 1;
    c->element = 1;
    return c;
}

/* Where calls are compared the others learn of it, in this call's place. */
uintptr_t mpp_mpi_out_of_memory(mpp_group *g) {
    return g->channel ? mpp_shm_out_of_memory(g, 0) : mpp_out_of_memory(g);
}

uintptr_t mpp_no_collective(mpi_collective *c, mpp_group *g) {
    if (c) mpp_discard(&c->op);
    return mpp_mpi_out_of_memory(g);
}

/* The comparison of this call: of what all ranks must have in common. 0: no memory. */
static int begin_agreement(mpi_collective *c) {
    const mpp_group *g = c->op.group;
    size_t longest = c->counts ? mpp_longest_of(c->counts, g->size) : c->total;
    c->op.agreement = mpp_shm_agree(c->op.group, c->kind, &c->how, c->root, longest, c->counts, c->element,
                                    c->op.staging ? MPP_ON_DEVICE : MPP_ON_HOST);
    if (!c->op.agreement) return 0;
    c->op.arrived = mpp_arrived_to_compare;
    c->op.in_short = g->yield_early; /* else MPI's steps would come a nap later, one after the other */
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

/* Lanes of an operation that reads `in` and writes `out`, which may be the same; directions may be 0. */
void mpp_stage_buffers(mpi_collective *c, size_t bytes, int in_direction, int out_direction) {
    int in_place = c->in == c->out;
    mpp_add_lane(&c->op, (uintptr_t)c->in, bytes, in_place ? in_direction | out_direction : in_direction);
    if (out_direction && !in_place) c->out_lane = mpp_add_lane(&c->op, (uintptr_t)c->out, bytes, out_direction);
    mpp_stage_begin(&c->op, c->stride);
}

/* ---- barrier ---- */

static int issue_barrier(mpi_collective *c) { return mpp_mpi.Ibarrier(c->op.group->comm, &c->request); }

uintptr_t mpp_mpi_barrier(mpp_group *g, int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, MPP_BARRIER, issue_barrier, 0);
    return c ? mpp_enqueue(c, wait_ns) : mpp_no_collective(c, g);
}

/* ---- broadcast ---- */

static int issue_broadcast(mpi_collective *c) {
    return mpp_mpi.Ibcast(mpp_out_at(c, c->index * c->per_call), (int)mpp_length_of(c), mpp_mpi.byte, c->root,
                          c->op.group->comm, &c->request);
}

uintptr_t mpp_mpi_broadcast(mpp_group *g, uintptr_t buffer, size_t bytes, int root, uintptr_t staging,
                            int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, MPP_BROADCAST, issue_broadcast, staging);
    if (!c) return mpp_no_collective(c, g);
    c->in = c->out = (char *)buffer;
    c->root = root;
    mpp_split(c, bytes, mpp_call_limit(staging));
    if (staging) mpp_stage_buffers(c, bytes, root == g->rank ? MPP_LOAD : 0, root == g->rank ? 0 : MPP_STORE);
    return mpp_enqueue(c, wait_ns);
}

/* ---- all_gather ---- */

static int issue_allgather(mpi_collective *c) {
    const mpp_group *g = c->op.group;
    int n = (int)mpp_length_of(c);
    size_t offset = c->index * c->per_call;
    const char *in = mpp_in_at(c, offset);
    char *out = mpp_out_at(c, offset); /* the blocks of all ranks, each of n bytes */
    const void *send = in == out + (size_t)g->rank * (size_t)n ? mpp_mpi.in_place : in;
    return mpp_mpi.Iallgather(send, n, mpp_mpi.byte, out, n, mpp_mpi.byte, g->comm, &c->request);
}

uintptr_t mpp_mpi_allgather(mpp_group *g, uintptr_t in, uintptr_t out, size_t bytes, size_t per_call, uintptr_t staging,
                            int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, MPP_ALL_GATHER, issue_allgather, staging);
    if (!c) return mpp_no_collective(c, g);
    c->in = (const char *)in;
    c->out = (char *)out;
    mpp_split(c, bytes, per_call);
    if (staging) {
        mpp_add_lane(&c->op, in, bytes, MPP_LOAD);
        c->out_lane = 1;
        for (size_t r = 0; r < (size_t)g->size; r++) mpp_add_lane(&c->op, out + r * bytes, bytes, MPP_STORE);
        mpp_stage_begin(&c->op, c->stride);
    }
    return mpp_enqueue(c, wait_ns);
}
