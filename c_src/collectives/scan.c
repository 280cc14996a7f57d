/* scan and exscan: on a node; by MPI between nodes. exscan leaves the result of rank 0 alone, as MPI does. */
#include "collectives/collective.h"

static void read_prefix(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    int ranks = s->call.kind == MPP_SCAN ? c->rank + 1 : c->rank;
    for (int r = 0; r < c->rank; r++) c->sources[r] = mpp_slot_at(s, r, chunk);
    c->sources[c->rank] = mpp_in_at(s, offset); /* perhaps where the result goes, which mpp_reduce allows */
    mpp_reduce(&s->how, mpp_out_at(s, offset), c->sources, ranks, mpp_chunk_length(s, s->bytes, chunk) / s->element);
}

static int over_shm(shm_op *s, const mpp_operands *o) {
    const mpp_group *g = s->op.group;
    (void)o;
    s->write = g->rank + 1 < g->size ? mpp_write_plain : NULL;
    if (mpp_gets(g, s->call.kind, -1)) s->read = read_prefix;
    else s->wait_for = g->rank; /* written is enough: nothing to read */
    mpp_leave_bus(s);
    return 1;
}

/* In the same pieces staged or not: as on a node, tensors on the host and on devices may be scanned together. */
static int by_mpi(mpi_collective *c, const mpp_operands *o) {
    c->place = MPP_ON_HOST;
    return mpp_reduce_in_calls(c, o, mpp_staged_limit());
}

static const mpp_ways ways = {
    .over_shm = over_shm, .by_mpi = by_mpi, .issue = mpp_issue_reduction, .finish = mpp_finish_reduction};

uintptr_t mpp_scan(const mpp_operands *o) { return mpp_start_collective(o, MPP_SCAN, &ways); }

uintptr_t mpp_exscan(const mpp_operands *o) { return mpp_start_collective(o, MPP_EXSCAN, &ways); }
