#include "cuda/staging.h"

#include <stdio.h>
#include <stdlib.h>

enum { SHORT = 1 << 16 };

/* Bytes of one slot, of all lanes together. Large enough for a bus to be busy with, small enough that several fit
 * into the processor's cache. */
static size_t stage_bytes = (size_t)1 << 20;

void mpp_set_stage_bytes(size_t bytes) { stage_bytes = bytes; }
size_t mpp_get_stage_bytes(void) { return stage_bytes; }

size_t mpp_staged_limit(void) { return stage_bytes < mpp_chunk_limit ? stage_bytes : mpp_chunk_limit; }

size_t mpp_call_limit(uintptr_t staging) { return mpp_through_host(staging) ? mpp_staged_limit() : mpp_chunk_limit; }

/* ---- making ---- */

static void release(mpp_owned *owned) { mpp_staging_free((mpp_staging *)owned); }

static void note(mpp_staging *t, int error) {
    if (error && !t->error) t->error = error;
}

static int enter(mpp_staging *t) {
    int error = mpp_enter_device(t->copier->device);
    note(t, error);
    return !error;
}

/* Takes over what the call has entered already. An error is for who moves the operation to note, under the lock. */
static int enter_to_wait(mpp_owned *owned) {
    mpp_staging *t = (mpp_staging *)owned;
    int entered = t->entered;
    t->entered = 0;
    return entered || !mpp_enter_device(t->copier->device);
}

/* Whether the work of the user's stream goes into a graph; that of the default one never does. A CUresult. */
static int check_capture(mpp_staging *t) {
    int is_captured = 0;
    if (!t->users || !enter(t)) return t->error;
    int error = mpp_left_device(mpp_cuda.stream_is_captured(t->users, &is_captured));
    return is_captured ? CUDA_CAPTURED : error;
}

/* The operation that takes this staging, in this call, starts after what has been queued on the user's stream. */
uintptr_t mpp_stage(int device, uintptr_t stream, int path, int *error) {
    mpp_staging *t = calloc(1, sizeof *t);
    *error = CUDA_OUT_OF_MEMORY;
    if (t) {
        t->owned = (mpp_owned){release, enter_to_wait, mpp_leave_device};
        t->direct = path == MPP_PATH_DIRECT;
        t->shows_memory = path == MPP_PATH_PEERS;
        t->users = (cuda_stream)stream;
        *error = mpp_get_copier(device, &t->copier);
        if (!*error) *error = check_capture(t);
    }
    if (!*error) return (uintptr_t)t;
    mpp_staging_free(t);
    return 0;
}

void mpp_staging_free(mpp_staging *t) {
    if (!t) return;
    if (t->entered) mpp_leave_device();
    /* After an error nobody can tell whether copies are still under way: what they may touch is never used again. */
    if (!t->error || !t->begun) {
        if (t->pinned) mpp_put_pinned(t->copier, t->pinned, t->pinned_bytes);
        if (t->copier) mpp_put_copier(t->copier);
    }
    free(t->exported);
    free(t->lanes);
    free(t->where);
    free(t);
}

int mpp_add_lane(mpp_op *op, uintptr_t device, size_t bytes, int direction) {
    mpp_staging *t = op->staging;
    if (!mpp_has_room((void **)&t->lanes, t->lane_count, &t->lane_capacity, sizeof *t->lanes)) {
        note(t, CUDA_OUT_OF_MEMORY);
        return 0;
    }
    t->lanes[t->lane_count] = (mpp_lane){device, bytes, direction};
    if (bytes > t->longest) t->longest = bytes;
    t->reads |= direction & MPP_LOAD;
    return t->lane_count++;
}

/* ---- copies ---- */

static size_t length_in(const mpp_staging *t, const mpp_lane *lane, size_t piece) {
    size_t begin = piece * t->piece;
    if (begin >= lane->bytes) return 0;
    return lane->bytes - begin < t->piece ? lane->bytes - begin : t->piece;
}

static cuda_stream stream_of(const copier *c, int direction) { return direction == MPP_DOWN ? c->load : c->store; }

/* The same for copies that are begun now, and come after what the user had queued. */
static cuda_stream stream_for(mpp_staging *t, int direction) {
    if (t->loads_there && !t->opened) return t->users;
    cuda_stream stream = stream_of(t->copier, direction);
    if (!t->is_ordered[direction]) note(t, mpp_cuda.stream_wait(stream, t->copier->start, 0));
    t->is_ordered[direction] = t->is_busy[direction] = 1;
    return stream;
}

/* Gives the next piece its slot, and fills that. On the device's side the copies of a slot are in order: those of
 * this piece wait for those of the piece before it, which the host need not see. */
static void load_next(mpp_staging *t) {
    const copier *c = t->copier;
    size_t piece = t->begun++, slot = piece % t->slots;
    uintptr_t *where = t->where + slot * (size_t)t->lane_count;
    uintptr_t at = (uintptr_t)t->pinned + slot * t->slot_bytes;
    if (piece >= t->slots) note(t, mpp_cuda.stream_wait(stream_for(t, MPP_DOWN), c->stored[slot], 0));
    for (int i = 0; i < t->lane_count; i++) {
        const mpp_lane *lane = &t->lanes[i];
        size_t length = length_in(t, lane, piece);
        where[i] = at;
        at += length; /* without gaps, so that equal lanes make one buffer for MPI */
        if (length && lane->direction & MPP_LOAD && !t->error)
            note(t,
                 mpp_cuda.to_host((void *)where[i], lane->device + piece * t->piece, length, stream_for(t, MPP_DOWN)));
    }
    if (t->pieces > 1 && piece >= t->opened) note(t, mpp_cuda.event_record(c->loaded[slot], c->load));
}

static void store_next(mpp_staging *t) {
    int direction = t->pieces > 1 ? MPP_UP : MPP_DOWN; /* one stream where there is one piece */
    size_t piece = t->closed++, slot = piece % t->slots;
    for (int i = 0; i < t->lane_count; i++) {
        const mpp_lane *lane = &t->lanes[i];
        size_t length = length_in(t, lane, piece);
        if (length && lane->direction & MPP_STORE && !t->error)
            note(t, mpp_cuda.to_device(lane->device + piece * t->piece, mpp_staged(t, i, piece * t->piece), length,
                                       stream_for(t, direction)));
    }
    if (t->begun == t->pieces) return;
    note(t, mpp_cuda.event_record(t->copier->stored[slot], t->copier->store));
    load_next(t);
}

static int step(mpp_op *op);

size_t mpp_piece_size(size_t unit, int lanes) {
    size_t units = stage_bytes / (size_t)(lanes > 0 ? lanes : 1) / unit;
    return (units ? units : 1) * unit;
}

static void choose_pieces(mpp_staging *t, size_t piece) {
    int whole = t->direct || t->on_bus || !piece || piece > t->longest;
    t->piece = whole ? (t->longest ? t->longest : 1) : piece;
    t->pieces = t->longest ? (t->longest - 1) / t->piece + 1 : 0;
    t->slots = t->pieces < MPP_SLOTS ? t->pieces : MPP_SLOTS;
    if (!t->slots) t->slots = 1;
}

static int get_slots(mpp_staging *t) {
    t->where = calloc(t->slots * (size_t)t->lane_count + 1, sizeof *t->where);
    if (!t->where) return CUDA_OUT_OF_MEMORY;
    for (int i = 0; i < t->lane_count; i++) {
        t->slot_bytes += length_in(t, &t->lanes[i], 0);
        if (t->direct || t->on_bus) t->where[i] = t->lanes[i].device;
    }
    if (t->direct || t->on_bus || !t->slot_bytes) return CUDA_OK;
    t->slot_bytes = (t->slot_bytes + 63) / 64 * 64; /* MPI may want numbers to be aligned */
    return mpp_get_pinned(t->copier, t->slot_bytes * t->slots, &t->pinned, &t->pinned_bytes);
}

/* The thread stays in the device until the call has begun, unless it begins again, later. */
void mpp_stage_begin(mpp_op *op, size_t piece) {
    mpp_staging *t = op->staging;
    int is_first = op->step != step;
    if (is_first) t->step = op->step;
    op->step = step;
    choose_pieces(t, piece);
    note(t, get_slots(t));
    if (t->error || !enter(t)) return;
    if (t->on_bus || t->pieces > 1) note(t, mpp_second_stream(t->copier));
    size_t first = t->pieces < t->slots ? t->pieces : t->slots;
    /* What is short keeps the user's stream busy for a moment only, and no stream need wait for another. */
    t->loads_there = is_first && !t->direct && !t->on_bus && t->reads && t->pieces == 1 && t->slot_bytes <= SHORT;
    if (is_first && !t->loads_there) note(t, mpp_cuda.event_record(t->copier->start, t->users));
    /* A message may come in while the user's stream is busy. */
    if (t->on_bus || (!t->direct && !t->reads)) t->opened = first;
    if (t->on_bus || t->direct) t->begun = first;
    while (!t->error && t->begun < first) load_next(t);
    if (t->loads_there) note(t, mpp_cuda.event_record(t->copier->start, t->users));
    if (is_first) t->entered = 1;
    else mpp_leave_device();
}

void mpp_copy_in_device(mpp_staging *t, int direction, uintptr_t to, uintptr_t from, size_t bytes) {
    if (t->error || !bytes || to == from || !enter(t)) return;
    note(t, mpp_left_device(mpp_cuda.in_device(to, from, bytes, stream_for(t, direction))));
}

void mpp_stage_on_bus(mpp_op *op) {
    op->staging->on_bus = 1;
    mpp_stage_begin(op, 0);
}

/* ---- the gate ---- */

static int is_there(mpp_staging *t, int code) {
    if (code == CUDA_NOT_READY) return 0;
    note(t, code);
    return 1;
}

static int query(mpp_staging *t, cuda_event event) {
    return !enter(t) || is_there(t, mpp_left_device(mpp_cuda.event_query(event)));
}

/* Whether a stream has done all it was given. It is this operation's alone, so no event is needed for its end. */
static int is_over(mpp_staging *t, int direction) {
    if (!t->is_busy[direction] || !enter(t)) return 1;
    int code = mpp_left_device(mpp_cuda.stream_query(stream_of(t->copier, direction)));
    t->is_busy[direction] = code == CUDA_NOT_READY;
    return is_there(t, code);
}

static int has_come(mpp_staging *t, size_t piece) {
    if (t->direct || t->loads_there) return t->is_ordered[MPP_DOWN] = query(t, t->copier->start);
    return t->pieces > 1 ? query(t, t->copier->loaded[piece % t->slots]) : is_over(t, MPP_DOWN);
}

static int fail(mpp_op *op, const mpp_staging *t) {
    mpp_fail(op, MPP_FAILURE_CUDA, t->error);
    if (op->failure != MPP_FAILURE_CUDA || t->may_withdraw) return 0;
    atomic_store(&op->group->aborted, 1);
    if (op->group->tell) op->group->tell(op->group, MPP_FAILURE_CUDA, t->error);
    return 0;
}

int mpp_stage_open(mpp_op *op, size_t offset) {
    mpp_staging *t = op->staging;
    if (t->error) return fail(op, t);
    if (!t->pieces) return 1; /* there are no bytes */
    size_t piece = offset / t->piece;
    if (piece < t->opened) return 1;
    if (piece >= t->begun) return 0;
    if (!has_come(t, piece)) return 0;
    if (t->error) return fail(op, t);
    t->opened = piece + 1;
    return 1;
}

void mpp_stage_close(mpp_staging *t, size_t offset) {
    if (t->direct || t->on_bus || t->closed == t->pieces || t->error) return;
    if (offset < t->longest && offset < (t->closed + 1) * t->piece) return;
    if (!enter(t)) return;
    while (t->closed < t->pieces && (offset >= t->longest || offset >= (t->closed + 1) * t->piece)) store_next(t);
    mpp_leave_device();
}

/* ---- on the bus ---- */

void mpp_bus_copy(mpp_staging *t, int direction, uintptr_t to, uintptr_t from, size_t bytes) {
    if (t->error || !bytes || !enter(t)) return;
    cuda_stream stream = stream_for(t, direction);
    note(t, direction == MPP_DOWN ? mpp_cuda.to_host((void *)to, from, bytes, stream)
                                  : mpp_cuda.to_device(to, (const void *)from, bytes, stream));
    mpp_leave_device();
}

void mpp_bus_begin(mpp_staging *t) {
    if (t->error || !enter(t)) return;
    stream_for(t, MPP_DOWN);
    mpp_leave_device();
}

static cuda_event mark_of(const mpp_staging *t, int direction, uint64_t number) {
    const copier *c = t->copier;
    return (direction == MPP_DOWN ? c->loaded : c->stored)[number % MPP_SLOTS];
}

void mpp_bus_mark(mpp_staging *t, int direction, uint64_t number) {
    if (t->error || !enter(t)) return;
    note(t, mpp_left_device(mpp_cuda.event_record(mark_of(t, direction, number), stream_for(t, direction))));
}

int mpp_bus_has_come_to(mpp_staging *t, mpp_op *op, int direction, uint64_t number, int is_last) {
    if (!t->error && !(is_last ? is_over(t, direction) : query(t, mark_of(t, direction, number)))) return 0;
    return t->error ? fail(op, t) : 1;
}

/* ---- the end ---- */

/* MPI that works on device memory wants its context to be the thread's, and the progress thread has none. */
static int step_in_context(mpp_op *op) {
    mpp_staging *t = op->staging;
    int entered = t->direct && enter(t), state = t->step(op);
    if (entered) mpp_leave_device();
    return state;
}

/* Whether all copies are over, those of a failed operation, too. Where there were none, what the user had queued is:
 * it may be what the result comes from. */
static int is_at_end(mpp_staging *t) {
    int has_waited = t->is_ordered[MPP_DOWN] || t->is_ordered[MPP_UP];
    return has_waited ? is_over(t, MPP_DOWN) && is_over(t, MPP_UP) : query(t, t->copier->start);
}

static int step(mpp_op *op) {
    mpp_staging *t = op->staging;
    if (!t->state) {
        t->state = step_in_context(op);
        if (!t->state) return MPP_PENDING;
        if (t->state == MPP_DONE) mpp_stage_close(t, t->longest);
    }
    if (!t->error && !is_at_end(t)) return MPP_PENDING;
    return t->error && !fail(op, t) ? MPP_FAILED : t->state;
}
