/* Operations as the rest calls them: started and waited for by the engine, and counted. */
#include "engine/activity.h"
#include "engine/engine.h"

#include "engine/pause.h"

uintptr_t mpp_start(mpp_op *op, int64_t wait_ns) {
    mpp_activity *activity = op->ours ? NULL : op->group->activity;
    if (!activity) return mpp_start_uncounted(op, wait_ns);
    int64_t begun = mpp_activity_begin(activity);
    uintptr_t pending = mpp_start_uncounted(op, wait_ns); /* 0: there is no operation any more */
    mpp_activity_end(activity, begun, !pending);
    return pending;
}

int mpp_wait(uintptr_t handle, int64_t wait_ns) {
    mpp_op *op = (mpp_op *)handle;
    mpp_activity *activity =
        op->group ? op->group->activity : NULL; /* one that says that there is no memory has none */
    if (!activity || atomic_load(&op->state) != MPP_PENDING) return mpp_wait_uncounted(handle, wait_ns);
    int64_t begun = now_ns();
    atomic_fetch_add_explicit(&activity->inside, 1, memory_order_relaxed);
    int state = mpp_wait_uncounted(handle, wait_ns);
    mpp_activity_end(activity, begun, state != MPP_PENDING);
    return state;
}
