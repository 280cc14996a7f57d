/* The collectives: over shared memory where the group has it, else through MPI's nonblocking ones.
 *
 * An operation may need several MPI calls (more elements than an int counts, or a conversion to a type
 * that MPI can reduce, done in pieces). MPI wants the calls on one communicator in the same order on every
 * rank, so an operation makes its first call only after the one before it has made its last.
 */
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "wire.h"

/* Elements are converted in pieces of about this size: small enough to stay in the cache. */
enum { STAGE_BYTES = 1 << 20 };

typedef struct mpi_collective mpi_collective;

struct mpi_collective {
    mpp_op op;
    mpi_collective *later; /* in group->launching */
    int (*launch)(mpi_collective *);
    void (*finish)(mpi_collective *); /* may be NULL */
    mpi_handle request;
    int active, last_launched;
    size_t index, calls;
    const char *in;
    char *out;
    size_t total, per_call, element; /* elements, elements, bytes */
    int root;
    mpp_reduction how;
    int wire;
    char *stage, *stage_out;
    uintptr_t *in_list;
    size_t *counts;
};

static size_t length_of(const mpi_collective *c) {
    size_t begin = c->index * c->per_call;
    if (begin >= c->total) return 0;
    return c->total - begin < c->per_call ? c->total - begin : c->per_call;
}

static void leave_queue(mpi_collective *c) {
    c->last_launched = 1;
    c->op.group->launching = c->later;
}

static int step(mpp_op *op) {
    mpi_collective *c = (mpi_collective *)op;
    for (;;) {
        if (!c->active) {
            if (c->index == c->calls) return MPP_DONE;
            if (op->group->launching != c) return MPP_PENDING;
            if (atomic_load_explicit(&op->group->aborted, memory_order_relaxed)) {
                leave_queue(c);
                return mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
            }
            int error = c->launch(c);
            if (error || c->index + 1 == c->calls) leave_queue(c);
            if (error) return mpp_fail(op, MPP_FAILURE_MPI, error);
            c->active = 1;
        }
        mpi_status status;
        int flag, state = mpp_test(op, &c->request, &status, &flag);
        if (!flag) return MPP_PENDING;
        c->active = 0;
        if (state == MPP_FAILED) {
            if (!c->last_launched) leave_queue(c);
            return state;
        }
        if (c->finish) c->finish(c);
        c->index++;
    }
}

static void discard_buffers(mpp_op *op) {
    mpi_collective *c = (mpi_collective *)op;
    free(c->stage);
    free(c->stage_out);
    free(c->in_list);
    free(c->counts);
}

static mpi_collective *new_collective(mpp_group *g, int (*launch)(mpi_collective *)) {
    mpi_collective *c = mpp_new_op(sizeof *c, g, step);
    if (!c) return NULL;
    c->op.discard = discard_buffers;
    c->launch = launch;
    c->calls = 1;
    return c;
}

static uintptr_t out_of_memory(mpi_collective *c, mpp_group *g) {
    if (c) {
        discard_buffers(&c->op);
        free(c);
    }
    return mpp_out_of_memory(g);
}

static uintptr_t enqueue(mpi_collective *c, int64_t wait_ns) {
    mpp_group *g = c->op.group;
    mpp_lock();
    if (c->calls) {
        mpi_collective **end = &g->launching;
        while (*end) end = &(*end)->later;
        *end = c;
    }
    mpp_unlock();
    return mpp_start(&c->op, wait_ns);
}

static void split(mpi_collective *c, size_t total, size_t per_call) {
    c->total = total;
    c->per_call = per_call ? per_call : 1;
    c->calls = (total + c->per_call - 1) / c->per_call;
}

/* ---- barrier ---- */

static int launch_barrier(mpi_collective *c) { return mpp_mpi.Ibarrier(c->op.group->comm, &c->request); }

uintptr_t mpp_barrier(uintptr_t group, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (g->channel) return mpp_shm_barrier(g, wait_ns);
    mpi_collective *c = new_collective(g, launch_barrier);
    return c ? enqueue(c, wait_ns) : out_of_memory(c, g);
}

/* ---- broadcast ---- */

static int launch_broadcast(mpi_collective *c) {
    return mpp_mpi.Ibcast(c->out + c->index * c->per_call, (int)length_of(c), mpp_mpi.byte, c->root, c->op.group->comm,
                          &c->request);
}

uintptr_t mpp_broadcast(uintptr_t group, uintptr_t buffer, size_t bytes, int root, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (g->channel) return mpp_shm_broadcast(g, (void *)buffer, bytes, root, wait_ns);
    mpi_collective *c = new_collective(g, launch_broadcast);
    if (!c) return out_of_memory(c, g);
    c->out = (char *)buffer;
    c->root = root;
    split(c, bytes, mpp_chunk_limit);
    return enqueue(c, wait_ns);
}

/* ---- all_gather ---- */

static int launch_allgather(mpi_collective *c) {
    const mpp_group *g = c->op.group;
    const void *in = c->in == c->out + (size_t)g->rank * c->total ? mpp_mpi.in_place : c->in;
    return mpp_mpi.Iallgather(in, (int)c->total, mpp_mpi.byte, c->out, (int)c->total, mpp_mpi.byte, g->comm,
                              &c->request);
}

static uintptr_t exchange_blocks(mpp_group *g, uintptr_t in, const uintptr_t *out, const size_t *bytes,
                                 int64_t wait_ns) {
    uintptr_t *send = malloc((size_t)g->size * sizeof *send);
    size_t *send_bytes = malloc((size_t)g->size * sizeof *send_bytes);
    uintptr_t op;
    if (send && send_bytes) {
        for (int r = 0; r < g->size; r++) {
            send[r] = in;
            send_bytes[r] = bytes[g->rank];
        }
        op = mpp_exchange((uintptr_t)g, send, send_bytes, out, bytes, wait_ns);
    } else {
        op = mpp_out_of_memory(g);
    }
    free(send);
    free(send_bytes);
    return op;
}

uintptr_t mpp_allgather_list(uintptr_t group, uintptr_t in, const uintptr_t *out, const size_t *bytes,
                             int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (g->channel) return mpp_shm_allgather(g, (const void *)in, out, bytes, wait_ns);
    return exchange_blocks(g, in, out, bytes, wait_ns);
}

uintptr_t mpp_allgather(uintptr_t group, uintptr_t in, uintptr_t out, size_t bytes, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (!g->channel && bytes <= mpp_chunk_limit) {
        mpi_collective *c = new_collective(g, launch_allgather);
        if (!c) return out_of_memory(c, g);
        c->in = (const char *)in;
        c->out = (char *)out;
        c->total = bytes;
        c->calls = bytes ? 1 : 0;
        return enqueue(c, wait_ns);
    }
    uintptr_t *list = malloc((size_t)g->size * sizeof *list);
    size_t *lengths = malloc((size_t)g->size * sizeof *lengths);
    uintptr_t op;
    if (list && lengths) {
        for (int r = 0; r < g->size; r++) {
            list[r] = out + (size_t)r * bytes;
            lengths[r] = bytes;
        }
        op = mpp_allgather_list(group, in, list, lengths, wait_ns);
    } else {
        op = mpp_out_of_memory(g);
    }
    free(list);
    free(lengths);
    return op;
}

/* ---- reductions ---- */

static mpi_handle mpi_op(const mpp_reduction *how) { return mpp_mpi.op[mpp_wire_op(how)]; }

/* Fills in the reduction; whether the elements have to be converted before MPI sees them. */
static int set_reduction(mpi_collective *c, const mpp_reduction *how) {
    c->how = *how;
    c->element = mpp_dtype_size(how->dtype);
    c->wire = mpp_wire_dtype(how);
    return c->wire != how->dtype || how->has_premul;
}

static int new_stage(mpi_collective *c, size_t elements) {
    c->stage = malloc((elements ? elements : 1) * mpp_dtype_size(c->wire));
    return c->stage != NULL;
}

/* All-reduce, and reduce to a root: root -1 means everybody. */
static int launch_reduce(mpi_collective *c) {
    mpp_group *g = c->op.group;
    size_t n = length_of(c), offset = c->index * c->per_call * c->element;
    const char *in = c->in + offset;
    char *out = c->stage ? c->stage : c->out + offset;
    const void *send = in == out ? mpp_mpi.in_place : (const void *)in;
    if (c->stage) {
        mpp_to_wire(&c->how, c->stage, in, n);
        send = mpp_mpi.in_place;
    }
    mpi_handle type = mpp_mpi.datatype[c->wire];
    if (c->root < 0) return mpp_mpi.Iallreduce(send, out, (int)n, type, mpi_op(&c->how), g->comm, &c->request);
    if (c->root != g->rank) {
        send = c->stage ? c->stage : in;
        out = NULL;
    }
    return mpp_mpi.Ireduce(send, out, (int)n, type, mpi_op(&c->how), c->root, g->comm, &c->request);
}

static void finish_reduce(mpi_collective *c) {
    if (c->root >= 0 && c->root != c->op.group->rank) return;
    char *out = c->out + c->index * c->per_call * c->element;
    if (c->stage) mpp_from_wire(&c->how, out, c->stage, length_of(c));
    else if (c->how.divisor != 1) mpp_from_wire(&c->how, out, out, length_of(c));
}

static uintptr_t reduce(mpp_group *g, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how, int root,
                        int64_t wait_ns) {
    mpi_collective *c = new_collective(g, launch_reduce);
    if (!c) return out_of_memory(c, g);
    c->in = (const char *)in;
    c->out = (char *)out;
    c->root = root;
    c->finish = finish_reduce;
    int staged = set_reduction(c, how);
    size_t limit = staged && STAGE_BYTES < mpp_chunk_limit ? STAGE_BYTES : mpp_chunk_limit;
    split(c, count, limit / mpp_dtype_size(c->wire));
    if (staged && !new_stage(c, count < c->per_call ? count : c->per_call)) return out_of_memory(c, g);
    return enqueue(c, wait_ns);
}

uintptr_t mpp_allreduce(uintptr_t group, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how,
                        int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (g->channel) return mpp_shm_reduce(g, (const void *)in, (void *)out, count, how, -1, wait_ns);
    return reduce(g, in, out, count, how, -1, wait_ns);
}

uintptr_t mpp_reduce_to(uintptr_t group, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how, int root,
                        int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (g->channel) return mpp_shm_reduce(g, (const void *)in, (void *)out, count, how, root, wait_ns);
    return reduce(g, in, out, count, how, root, wait_ns);
}

/* ---- reduce_scatter ---- */

/* Equal blocks: call number i reduces elements [i * per_call, ...) of every block. */
static int launch_reduce_scatter(mpi_collective *c) {
    mpp_group *g = c->op.group;
    size_t n = length_of(c), wire = mpp_dtype_size(c->wire);
    const void *send = (const void *)c->in_list[0];
    void *out = c->stage_out ? (void *)c->stage_out : (void *)c->out;
    if (c->stage) {
        for (int r = 0; r < g->size; r++) {
            const char *block = (const char *)c->in_list[r] + c->index * c->per_call * c->element;
            mpp_to_wire(&c->how, c->stage + (size_t)r * n * wire, block, n);
        }
        send = c->stage;
    }
    return mpp_mpi.Ireduce_scatter_block(send, out, (int)n, mpp_mpi.datatype[c->wire], mpi_op(&c->how), g->comm,
                                         &c->request);
}

static void finish_reduce_scatter(mpi_collective *c) {
    char *out = c->out + c->index * c->per_call * c->element;
    if (c->stage_out) mpp_from_wire(&c->how, out, c->stage_out, length_of(c));
    else if (c->how.divisor != 1) mpp_from_wire(&c->how, out, out, length_of(c));
}

/* Blocks of different lengths: one reduction to every rank after the other, in pieces. */
typedef struct {
    int root;
    size_t begin, n;
} uneven_piece;

static uneven_piece piece_of(const mpi_collective *c) {
    size_t index = c->index;
    for (int r = 0; r < c->op.group->size; r++) {
        size_t pieces = (c->counts[r] + c->per_call - 1) / c->per_call;
        if (index < pieces) {
            size_t begin = index * c->per_call, left = c->counts[r] - begin;
            return (uneven_piece){r, begin, left < c->per_call ? left : c->per_call};
        }
        index -= pieces;
    }
    return (uneven_piece){0, 0, 0};
}

static int launch_uneven(mpi_collective *c) {
    mpp_group *g = c->op.group;
    uneven_piece p = piece_of(c);
    mpp_to_wire(&c->how, c->stage, (const char *)c->in_list[p.root] + p.begin * c->element, p.n);
    const void *send = p.root == g->rank ? mpp_mpi.in_place : (const void *)c->stage;
    return mpp_mpi.Ireduce(send, p.root == g->rank ? c->stage : NULL, (int)p.n, mpp_mpi.datatype[c->wire],
                           mpi_op(&c->how), p.root, g->comm, &c->request);
}

static void finish_uneven(mpi_collective *c) {
    uneven_piece p = piece_of(c);
    if (p.root == c->op.group->rank) mpp_from_wire(&c->how, c->out + p.begin * c->element, c->stage, p.n);
}

static int overlap(const mpi_collective *c, size_t bytes, int size) {
    uintptr_t in = c->in_list[0], out = (uintptr_t)c->out;
    return out < in + bytes * (size_t)size && in < out + bytes;
}

/* Which MPI calls are made depends on counts and `flat` alone, which all ranks share; where the bytes are
 * staged is each rank's own affair. */
uintptr_t mpp_reduce_scatter(uintptr_t group, const uintptr_t *in, uintptr_t out, const size_t *counts, int flat,
                             const mpp_reduction *how, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    if (g->channel) return mpp_shm_reduce_scatter(g, in, (void *)out, counts, how, wait_ns);
    mpi_collective *c = new_collective(g, launch_reduce_scatter);
    size_t size = (size_t)g->size, pieces = 0;
    if (!c) return out_of_memory(c, g);
    c->out = (char *)out;
    c->in_list = malloc(size * sizeof *c->in_list);
    c->counts = malloc(size * sizeof *c->counts);
    if (!c->in_list || !c->counts) return out_of_memory(c, g);
    memcpy(c->in_list, in, size * sizeof *in);
    memcpy(c->counts, counts, size * sizeof *counts);
    int even = 1, convert = set_reduction(c, how);
    for (size_t r = 1; r < size; r++) even &= counts[r] == counts[0];
    size_t wire = mpp_dtype_size(c->wire), limit = STAGE_BYTES < mpp_chunk_limit ? STAGE_BYTES : mpp_chunk_limit;
    int whole = flat && even && !convert && counts[0] * size * wire <= mpp_chunk_limit;
    split(c, counts[0], whole ? counts[0] : even ? limit / wire / size : limit / wire);
    size_t block = counts[0] < c->per_call ? counts[0] : c->per_call;
    c->finish = finish_reduce_scatter;
    if (!even) {
        for (size_t r = 0; r < size; r++) pieces += (counts[r] + c->per_call - 1) / c->per_call;
        c->calls = pieces;
        c->launch = launch_uneven;
        c->finish = finish_uneven;
        if (!new_stage(c, c->per_call)) return out_of_memory(c, g);
    } else if (!whole || overlap(c, counts[0] * c->element, g->size)) {
        c->stage_out = malloc((block ? block : 1) * wire);
        if (!c->stage_out || !new_stage(c, block * size)) return out_of_memory(c, g);
    }
    return enqueue(c, wait_ns);
}
