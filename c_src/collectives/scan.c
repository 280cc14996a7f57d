/* scan and exscan: on a node; by MPI between nodes. exscan leaves the result of rank 0 alone, as MPI does. */
#include <string.h>

#include "collectives/collective.h"

/* ---- on a node ---- */

static void read_prefix(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    int ranks = s->call.kind == MPP_SCAN ? c->rank + 1 : c->rank;
    for (int r = 0; r < c->rank; r++) c->sources[r] = mpp_slot_at(s, r, chunk);
    c->sources[c->rank] = mpp_shm_in(s, offset); /* perhaps where the result goes, which mpp_reduce allows */
    mpp_reduce(&s->how, mpp_shm_out(s, offset), c->sources, ranks, mpp_chunk_length(s, s->bytes, chunk) / s->element);
}

static int has_result(const mpp_group *g, int kind) { return kind == MPP_SCAN || g->rank > 0; }

static uintptr_t over_shm(mpp_group *g, int kind, const void *in, void *out, size_t count, const mpp_reduction *how,
                          uintptr_t staging, int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, staging);
    if (!s) return mpp_no_shm_op(s, g, wait_ns);
    s->in = in;
    s->out = out;
    s->how = *how;
    s->element = mpp_dtype_size(how->dtype);
    s->bytes = count * s->element;
    s->write = g->rank + 1 < g->size ? mpp_write_plain : NULL;
    if (has_result(g, kind)) s->read = read_prefix;
    else s->wait_for = g->rank; /* written is enough: nothing to read */
    mpp_leave_bus(s);
    mpp_sign(s, kind, -1, s->bytes);
    if (staging) {
        int result = has_result(g, kind) ? MPP_STORE : 0;
        mpp_add_lane(&s->op, (uintptr_t)in, s->bytes, in == out ? MPP_LOAD | result : MPP_LOAD);
        if (result && in != out) s->out_lane = mpp_add_lane(&s->op, (uintptr_t)out, s->bytes, result);
        mpp_stage_shm(s);
    }
    return mpp_enqueue_shm(s, wait_ns);
}

/* ---- by MPI ---- */

static int issue_scan(mpi_collective *c) {
    size_t n = mpp_length_of(c), offset = c->index * c->per_call * c->element;
    const char *in = mpp_in_at(c, offset);
    char *out = c->scratch ? c->scratch : mpp_out_at(c, offset);
    if (c->scratch) mpp_to_mpi(&c->how, c->scratch, in, n);
    const void *send = c->scratch || in == out ? mpp_mpi.in_place : (const void *)in;
    return (c->kind == MPP_SCAN ? mpp_mpi.Iscan : mpp_mpi.Iexscan)(
        send, out, (int)n, mpp_mpi.datatype[c->mpi_dtype], mpp_mpi_op_of(&c->how), c->op.group->comm, &c->request);
}

static void finish_scan(mpi_collective *c) {
    if (!c->scratch || !has_result(c->op.group, c->kind)) return;
    mpp_from_mpi(&c->how, mpp_out_at(c, c->index * c->per_call * c->element), c->scratch, mpp_length_of(c));
}

static uintptr_t by_mpi(mpp_group *g, int kind, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how,
                        uintptr_t staging, int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, kind, issue_scan, staging);
    if (!c) return mpp_no_collective(c, g);
    c->in = (const char *)in;
    c->out = (char *)out;
    c->finish = finish_scan;
    int convert = mpp_set_reduction(c, how);
    /* In the same pieces staged or not: as on a node, tensors on the host and on devices may be scanned together. */
    c->place = MPP_ON_HOST;
    size_t limit = mpp_staged_limit();
    if (convert && MPP_SCRATCH_BYTES < limit) limit = MPP_SCRATCH_BYTES;
    mpp_split(c, count, limit / mpp_dtype_size(c->mpi_dtype));
    if (convert && !mpp_new_scratch(c, count < c->per_call ? count : c->per_call)) return mpp_no_collective(c, g);
    if (staging) mpp_stage_buffers(c, count * c->element, MPP_LOAD, has_result(g, kind) ? MPP_STORE : 0);
    return mpp_enqueue(c, wait_ns);
}

/* ---- which of them ---- */

static uintptr_t start(uintptr_t group, int kind, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how,
                       uintptr_t staging, int64_t wait_ns) {
    mpp_note(kind, count * mpp_dtype_size(how->dtype), -1);
    mpp_group *g = (mpp_group *)group;
    if (mpp_sums_in_shm(g, kind, count, how) && !g->channel->topology)
        return over_shm(g, kind, (const void *)in, (void *)out, count, how, staging, wait_ns);
    return by_mpi(g, kind, in, out, count, how, staging, wait_ns);
}

uintptr_t mpp_scan(uintptr_t group, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how,
                   uintptr_t staging, int64_t wait_ns) {
    return start(group, MPP_SCAN, in, out, count, how, staging, wait_ns);
}

uintptr_t mpp_exscan(uintptr_t group, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how,
                     uintptr_t staging, int64_t wait_ns) {
    return start(group, MPP_EXSCAN, in, out, count, how, staging, wait_ns);
}
