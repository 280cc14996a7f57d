#include "collectives/collective.h"

enum { LEAST_CHUNK = 64 << 10, MOST_CHUNKS = 16 };

static size_t element_of(const mpp_operands *o) { return o->how ? mpp_dtype_size(o->how->dtype) : 1; }

static const size_t *sizes_of(const mpp_operands *o) { return o->inputs ? o->input_sizes : o->output_sizes; }

void mpp_note_operands(const mpp_operands *o, int kind) {
    const mpp_group *g = (mpp_group *)o->of;
    const size_t *sizes = sizes_of(o);
    uint64_t count = !sizes ? o->count : o->inputs ? mpp_sum_of(sizes, g->size) : sizes[g->rank];
    mpp_note(kind, count * element_of(o), o->root);
}

/* A sum may be longer between nodes than its elements, and its data never goes from a device directly. A first
 * half is one between the devices of a node. */
int mpp_goes_over_shm(const mpp_operands *o, int kind) {
    const mpp_group *g = (mpp_group *)o->of;
    const size_t *sizes = sizes_of(o);
    size_t length = sizes ? (size_t)g->size * mpp_longest_of(sizes, g->size) : o->count;
    if (o->first) return 1;
    if (o->how) return mpp_is_ours(g, kind, length * mpp_dtype_size(mpp_wide_dtype(o->how->dtype)));
    return mpp_is_ours(g, kind, length) && (!o->staging || mpp_through_host(o->staging));
}

/* What is loaded, a block after the other or one tensor, then what is stored, which may be the same; returns the number
 * of the first of the latter. */
static int add_lanes(mpp_op *op, const mpp_operands *o, int kind) {
    const mpp_group *g = op->group;
    const size_t *sizes = sizes_of(o);
    size_t element = element_of(o), own = (sizes ? sizes[g->rank] : o->count) * element;
    int loads = kind == MPP_BROADCAST && o->root != g->rank ? 0 : MPP_LOAD, in_place = !sizes && o->input == o->output;
    int stores = mpp_gets(g, kind, o->root) ? MPP_STORE : 0;
    for (int r = 0; o->inputs && r < g->size; r++) mpp_add_lane(op, o->inputs[r], sizes[r] * element, MPP_LOAD);
    if (!o->inputs) mpp_add_lane(op, o->input, own, in_place ? loads | stores : loads);
    if (!o->outputs && stores && !in_place) return mpp_add_lane(op, o->output, own, stores);
    for (int r = 0; o->outputs && r < g->size; r++) mpp_add_lane(op, o->outputs[r], sizes[r], MPP_STORE);
    return o->outputs != NULL;
}

/* ---- over shared memory ---- */

/* What it reads and writes; 0: no memory. */
static int take_operands(shm_op *s, const mpp_operands *o) {
    int size = s->op.group->size;
    const size_t *sizes = sizes_of(o);
    size_t element = element_of(o);
    s->in = (const char *)o->input;
    s->out = (char *)o->output;
    s->root = o->root;
    s->bytes = (sizes ? mpp_longest_of(sizes, size) : o->count) * element;
    if (o->how) s->how = *o->how;
    if (o->how) s->element = element;
    if (o->inputs && !(s->in_list = mpp_copy_list(o->inputs, size))) return 0;
    if (o->outputs && !(s->out_list = mpp_copy_list(o->outputs, size))) return 0;
    if (sizes && !(s->lengths = mpp_copy_list(sizes, size))) return 0;
    for (int r = 0; sizes && r < size; r++) s->lengths[r] *= element;
    return 1;
}

static int prepare(shm_op *s, const mpp_operands *o, const mpp_ways *ways) {
    if (!take_operands(s, o) || (ways->over_shm && !ways->over_shm(s, o))) return 0;
    return !s->op.group->channel->internode || !ways->between_nodes || ways->between_nodes(s);
}

/* On a node with a core for each rank slots are read while the next are written: shorter chunks, unless there are many.
 * But a root whose device copies to a slot does so once, plan_bus. */
static void split(shm_op *s, int kind) {
    const mpp_group *g = s->op.group;
    int is_copied = kind == MPP_BROADCAST && s->bus && s->root == g->rank;
    if (g->yield_early || g->channel->internode || is_copied) return;
    if (kind != MPP_BROADCAST && kind != MPP_REDUCE && kind != MPP_ALL_REDUCE) return;
    while (s->chunk_bytes > LEAST_CHUNK && s->bytes <= MOST_CHUNKS * (s->chunk_bytes / 2)) s->chunk_bytes /= 2;
}

static uintptr_t start_over_shm(const mpp_operands *o, int kind, const mpp_ways *ways) {
    mpp_group *g = (mpp_group *)o->of;
    shm_op *s = mpp_new_shm_op(g, o->staging);
    if (s) s->call.kind = kind;
    if (!s || !prepare(s, o, ways)) {
        if (s) mpp_discard(&s->op);
        return mpp_shm_out_of_memory(g, o->wait_ns);
    }
    size_t unit = s->chunk_bytes; /* of what is staged: it has whole chunks however they are split */
    split(s, kind);
    mpp_sign(s, kind, o->root, s->bytes);
    if (o->staging) s->out_lane = add_lanes(&s->op, o, kind);
    if (s->bus) mpp_stage_on_bus(&s->op);
    else if (o->staging) mpp_stage_begin(&s->op, mpp_piece_size(unit, s->op.staging->lane_count));
    return mpp_enqueue_shm(s, o->wait_ns);
}

void mpp_leave_bus(shm_op *s) {
    if (s->bus) s->place = MPP_STAGED;
    s->bus = NULL;
}

void mpp_write_plain(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = mpp_chunk_length(s, s->lengths ? s->lengths[s->op.group->rank] : s->bytes, chunk);
    if (length) mpp_to_slot(s, slot, mpp_in_at(s, mpp_chunk_begin(s, chunk)), length);
}

/* ---- by MPI ---- */

static uintptr_t start_by_mpi(const mpp_operands *o, int kind, const mpp_ways *ways) {
    mpp_group *g = (mpp_group *)o->of;
    mpi_collective *c = mpp_new_collective(g, kind, ways->issue, o->staging);
    if (!c) return mpp_no_collective(c, g);
    c->in = (const char *)o->input;
    c->out = (char *)o->output;
    c->root = o->root;
    c->finish = ways->finish;
    if (ways->by_mpi && !ways->by_mpi(c, o)) return mpp_no_collective(c, g);
    if (o->staging) {
        c->out_lane = add_lanes(&c->op, o, kind);
        mpp_stage_begin(&c->op, c->stride);
    }
    return mpp_enqueue(c, o->wait_ns);
}

int mpp_reduce_in_calls(mpi_collective *c, const mpp_operands *o, size_t limit) {
    int convert = mpp_set_reduction(c, o->how);
    if (convert && MPP_SCRATCH_BYTES < limit) limit = MPP_SCRATCH_BYTES;
    mpp_split(c, o->count, limit / mpp_dtype_size(c->mpi_dtype));
    return !convert || mpp_new_scratch(c, o->count < c->per_call ? o->count : c->per_call);
}

int mpp_issue_reduction(mpi_collective *c) {
    mpp_group *g = c->op.group;
    size_t n = mpp_part_of(c, c->total), offset = c->index * c->per_call * c->element;
    const char *in = mpp_in_at(c, offset);
    char *out = c->scratch ? c->scratch : mpp_out_at(c, offset);
    const void *send = c->scratch || in == out ? mpp_mpi.in_place : (const void *)in;
    mpi_handle type = mpp_mpi.datatype[c->mpi_dtype], op = mpp_mpi_op_of(&c->how);
    if (c->scratch) mpp_to_mpi(&c->how, c->scratch, in, n);
    if (c->kind == MPP_SCAN) return mpp_mpi.Iscan(send, out, (int)n, type, op, g->comm, &c->request);
    if (c->kind == MPP_EXSCAN) return mpp_mpi.Iexscan(send, out, (int)n, type, op, g->comm, &c->request);
    if (c->root < 0) return mpp_mpi.Iallreduce(send, out, (int)n, type, op, g->comm, &c->request);
    if (c->root != g->rank) {
        send = c->scratch ? c->scratch : in;
        out = NULL;
    }
    return mpp_mpi.Ireduce(send, out, (int)n, type, op, c->root, g->comm, &c->request);
}

/* ---- which of them ---- */

uintptr_t mpp_start_collective(const mpp_operands *o, int kind, const mpp_ways *ways) {
    mpp_note_operands(o, kind);
    return (mpp_goes_over_shm(o, kind) ? start_over_shm : start_by_mpi)(o, kind, ways);
}
