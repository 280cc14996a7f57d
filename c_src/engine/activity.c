#include "engine/activity.h"

#include "engine/engine.h"
#include "engine/pause.h"

_Thread_local mpp_note_of_call mpp_noted;

static inline void put(_Atomic int64_t *where, int64_t value) {
    atomic_store_explicit(where, value, memory_order_relaxed);
}

int64_t mpp_activity_begin(mpp_activity *a) {
    mpp_note_of_call call = mpp_noted;
    mpp_noted.kind = 0;
    if (!call.kind) call = (mpp_note_of_call){MPP_ONE_SIDED, -1, 0};
    int64_t now = now_ns();
    atomic_fetch_add_explicit(&a->calls[call.kind], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&a->bytes[call.kind], call.bytes, memory_order_relaxed);
    atomic_store_explicit(&a->kind, call.kind, memory_order_relaxed);
    atomic_store_explicit(&a->peer, call.peer, memory_order_relaxed);
    atomic_store_explicit(&a->length, call.bytes, memory_order_relaxed);
    put(&a->begun, now);
    atomic_fetch_add_explicit(&a->inside, 1, memory_order_relaxed);
    return now;
}

void mpp_activity_end(mpp_activity *a, int64_t begun, int is_complete) {
    int64_t now = now_ns();
    atomic_fetch_add_explicit(&a->in_calls, now - begun, memory_order_relaxed);
    atomic_fetch_sub_explicit(&a->inside, 1, memory_order_relaxed);
    if (!is_complete) return;
    put(&a->ended, now);
    if (!atomic_load_explicit(&a->has_missing, memory_order_relaxed)) return;
    atomic_store_explicit(&a->has_missing, 0, memory_order_relaxed);
    for (int r = 0; r < a->size; r++) atomic_store_explicit(&a->missing[r], 0, memory_order_relaxed);
}

void mpp_note_waiting(const mpp_op *op, int64_t ns) {
    mpp_activity *a = op->group->activity;
    int others = 0;
    if (!a || !op->arrived || atomic_load(&op->state) != MPP_PENDING || mpp_is_closed(op->group)) return;
    for (int r = 0; r < a->size; r++) {
        int is_missing = r != a->rank && op->arrived((mpp_op *)op, r) == 0;
        atomic_store_explicit(&a->missing[r], (char)is_missing, memory_order_relaxed);
        if (is_missing) atomic_fetch_add_explicit(&a->late[r], ns, memory_order_relaxed);
        others += is_missing;
    }
    if (!others) return;
    atomic_fetch_add_explicit(&a->waited, ns, memory_order_relaxed);
    atomic_store_explicit(&a->has_missing, 1, memory_order_relaxed);
}
