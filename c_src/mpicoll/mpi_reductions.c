/* Reductions over MPI: all_reduce, reduce and reduce_scatter, with the conversions of arith/mpi_representation.h. */
#include <stdlib.h>
#include <string.h>

#include "arith/mpi_representation.h"
#include "mpicoll/mpi_collective.h"

/* Elements are converted in pieces of about this size: small enough to stay in the cache. */
enum { SCRATCH_BYTES = 1 << 20 };

/* ---- all_reduce and reduce ---- */

static mpi_handle mpi_op(const mpp_reduction *how) { return mpp_mpi.op[mpp_mpi_op(how)]; }

/* Fills in the reduction; whether the elements have to be converted before MPI sees them. */
static int set_reduction(mpi_collective *c, const mpp_reduction *how) {
    c->how = *how;
    c->element = mpp_dtype_size(how->dtype);
    c->mpi_dtype = mpp_mpi_dtype(how);
    return c->mpi_dtype != how->dtype || how->has_premul;
}

static int new_scratch(mpi_collective *c, size_t elements) {
    c->scratch = malloc((elements ? elements : 1) * mpp_dtype_size(c->mpi_dtype));
    return c->scratch != NULL;
}

/* All-reduce, and reduce to a root: root -1 means everybody. */
static int issue_reduce(mpi_collective *c) {
    mpp_group *g = c->op.group;
    size_t n = mpp_length_of(c), offset = c->index * c->per_call * c->element;
    const char *in = mpp_in_at(c, offset);
    char *out = c->scratch ? c->scratch : mpp_out_at(c, offset);
    const void *send = in == out ? mpp_mpi.in_place : (const void *)in;
    if (c->scratch) {
        mpp_to_mpi(&c->how, c->scratch, in, n);
        send = mpp_mpi.in_place;
    }
    mpi_handle type = mpp_mpi.datatype[c->mpi_dtype];
    if (c->root < 0) return mpp_mpi.Iallreduce(send, out, (int)n, type, mpi_op(&c->how), g->comm, &c->request);
    if (c->root != g->rank) {
        send = c->scratch ? c->scratch : in;
        out = NULL;
    }
    return mpp_mpi.Ireduce(send, out, (int)n, type, mpi_op(&c->how), c->root, g->comm, &c->request);
}

static void finish_reduce(mpi_collective *c) {
    if (c->root >= 0 && c->root != c->op.group->rank) return;
    char *out = mpp_out_at(c, c->index * c->per_call * c->element);
    if (c->scratch) mpp_from_mpi(&c->how, out, c->scratch, mpp_length_of(c));
    else if (c->how.divisor != 1) mpp_from_mpi(&c->how, out, out, mpp_length_of(c));
}

uintptr_t mpp_mpi_reduce(mpp_group *g, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how, int root,
                         uintptr_t staging, int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, root < 0 ? MPP_ALL_REDUCE : MPP_REDUCE, issue_reduce, staging);
    if (!c) return mpp_no_collective(c, g);
    c->in = (const char *)in;
    c->out = (char *)out;
    c->root = root;
    c->finish = finish_reduce;
    int convert = set_reduction(c, how);
    size_t limit = mpp_call_limit(staging);
    if (convert && SCRATCH_BYTES < limit) limit = SCRATCH_BYTES;
    mpp_split(c, count, limit / mpp_dtype_size(c->mpi_dtype));
    if (convert && !new_scratch(c, count < c->per_call ? count : c->per_call)) return mpp_no_collective(c, g);
    if (staging) mpp_stage_buffers(c, count * c->element, MPP_LOAD, root < 0 || root == g->rank ? MPP_STORE : 0);
    return mpp_enqueue(c, wait_ns);
}

/* ---- reduce_scatter ---- */

/* Equal blocks: call number i reduces elements [i * per_call, ...) of every block. */
static int issue_reduce_scatter(mpi_collective *c) {
    mpp_group *g = c->op.group;
    size_t n = mpp_length_of(c), width = mpp_dtype_size(c->mpi_dtype), offset = c->index * c->per_call * c->element;
    const void *send = mpp_block_at(c, 0, offset);
    void *out = c->scratch_out ? c->scratch_out : mpp_out_at(c, offset);
    if (c->scratch) {
        for (int r = 0; r < g->size; r++)
            mpp_to_mpi(&c->how, c->scratch + (size_t)r * n * width, mpp_block_at(c, r, offset), n);
        send = c->scratch;
    }
    return mpp_mpi.Ireduce_scatter_block(send, out, (int)n, mpp_mpi.datatype[c->mpi_dtype], mpi_op(&c->how), g->comm,
                                         &c->request);
}

static void finish_reduce_scatter(mpi_collective *c) {
    char *out = mpp_out_at(c, c->index * c->per_call * c->element);
    if (c->scratch_out) mpp_from_mpi(&c->how, out, c->scratch_out, mpp_length_of(c));
    else if (c->how.divisor != 1) mpp_from_mpi(&c->how, out, out, mpp_length_of(c));
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

static int issue_uneven(mpi_collective *c) {
    mpp_group *g = c->op.group;
    uneven_piece p = piece_of(c);
    mpp_to_mpi(&c->how, c->scratch, mpp_block_at(c, p.root, p.begin * c->element), p.n);
    const void *send = p.root == g->rank ? mpp_mpi.in_place : (const void *)c->scratch;
    return mpp_mpi.Ireduce(send, p.root == g->rank ? c->scratch : NULL, (int)p.n, mpp_mpi.datatype[c->mpi_dtype],
                           mpi_op(&c->how), p.root, g->comm, &c->request);
}

static void finish_uneven(mpi_collective *c) {
    uneven_piece p = piece_of(c);
    if (p.root == c->op.group->rank) mpp_from_mpi(&c->how, mpp_out_at(c, p.begin * c->element), c->scratch, p.n);
}

static int overlap(const mpi_collective *c, size_t bytes, int size) {
    uintptr_t in = c->in_list[0], out = (uintptr_t)c->out;
    return out < in + bytes * (size_t)size && in < out + bytes;
}

/* Lanes: every rank's block of the input, then the output. Of unequal blocks a call takes one after the other, so all
 * are staged whole. */
static void stage_blocks(mpi_collective *c, int even) {
    const mpp_group *g = c->op.group;
    for (int r = 0; r < g->size; r++) mpp_add_lane(&c->op, c->in_list[r], c->counts[r] * c->element, MPP_LOAD);
    c->out_lane = mpp_add_lane(&c->op, (uintptr_t)c->out, c->counts[g->rank] * c->element, MPP_STORE);
    if (!even) c->stride = 0;
    mpp_stage_begin(&c->op, c->stride);
}

/* The MPI calls depend on counts, `flat` and the kind of staging alone, which all ranks share. Each rank decides for
 * itself where bytes are converted. */
uintptr_t mpp_mpi_reduce_scatter(mpp_group *g, const uintptr_t *in, uintptr_t out, const size_t *counts, int flat,
                                 const mpp_reduction *how, uintptr_t staging, int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, MPP_REDUCE_SCATTER, issue_reduce_scatter, staging);
    size_t size = (size_t)g->size, pieces = 0;
    if (!c) return mpp_no_collective(c, g);
    c->out = (char *)out;
    c->in_list = malloc(size * sizeof *c->in_list);
    c->counts = malloc(size * sizeof *c->counts);
    if (!c->in_list || !c->counts) return mpp_no_collective(c, g);
    memcpy(c->in_list, in, size * sizeof *in);
    memcpy(c->counts, counts, size * sizeof *counts);
    int even = 1, convert = set_reduction(c, how);
    for (size_t r = 1; r < size; r++) even &= counts[r] == counts[0];
    size_t width = mpp_dtype_size(c->mpi_dtype), limit = mpp_call_limit(staging);
    if (SCRATCH_BYTES < limit) limit = SCRATCH_BYTES;
    int whole = flat && even && !convert && !staging && counts[0] * size * width <= mpp_chunk_limit;
    mpp_split(c, counts[0], whole ? counts[0] : even ? limit / width / size : limit / width);
    size_t block = counts[0] < c->per_call ? counts[0] : c->per_call;
    c->finish = finish_reduce_scatter;
    if (!even) {
        for (size_t r = 0; r < size; r++) pieces += (counts[r] + c->per_call - 1) / c->per_call;
        c->calls = pieces;
        c->issue = issue_uneven;
        c->finish = finish_uneven;
        if (!new_scratch(c, c->per_call)) return mpp_no_collective(c, g);
    } else if (staging && !convert) {
        /* the blocks of one piece lie side by side in their slot, apart from the output */
    } else if (!whole || overlap(c, counts[0] * c->element, g->size)) {
        c->scratch_out = malloc((block ? block : 1) * width);
        if (!c->scratch_out || !new_scratch(c, block * size)) return mpp_no_collective(c, g);
    }
    if (staging) stage_blocks(c, even);
    return mpp_enqueue(c, wait_ns);
}
