#define _GNU_SOURCE
#include "engine/engine.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/activity.h"
#include "engine/pause.h"
#include "engine/progress.h"

enum { LOOK_NS = 1000000 };

/* Under the lock: Python gets the operation's handle. */
static void hand_out(mpp_op *op) {
    if (op->ours) return;
    op->holds = 1;
    mpp_progress.messages += op->arrived == NULL;
    atomic_fetch_add(&op->group->holders, 1);
    pthread_getcpuclockid(pthread_self(), &mpp_progress.starter);
}

/* Polls until `op` is complete, its group aborted, or the time up; what it found. Nor longer than `stall_ns`, if that
 * is not 0, without anything of the group's having moved. Once the operation is complete, the group is kept by whom the
 * caller works for. */
static int poll(mpp_op *op, int64_t wait_ns, int64_t stall_ns) {
    mpp_group *group = op->group;
    int64_t deadline = 0, pause_ns = 0, looked = 0;
    int64_t look_at = 0;
    int is_long = 0;
    mpp_stall stall = {0};
    int state;
    mpp_owned *staging = (mpp_owned *)op->staging;
    int entered = staging && staging->enter(staging);
    atomic_fetch_add(&mpp_progress.waiters, 1);
    for (int polls = 0;; polls++) {
        state = atomic_load_explicit(&op->state, memory_order_acquire);
        if (state != MPP_PENDING) break;
        if (atomic_load_explicit(&group->aborted, memory_order_relaxed)) {
            state = MPP_ABORTED;
            break;
        }
        if (atomic_load_explicit(&mpp_progress.starters, memory_order_relaxed) == 0 &&
            pthread_mutex_trylock(&mpp_progress.lock) == 0) {
            stall.advanced |= mpp_progress_all();
            stall.all_idle = mpp_progress.all_idle;
            if (is_long) stall.in_mpi |= mpp_look_into_mpi();
            is_long = 0;
            pthread_mutex_unlock(&mpp_progress.lock);
        }
        if (polls < op->spins) {
            cpu_relax();
            continue;
        }
        if (pause_ns || polls == op->spins || (polls & 15) == 0) {
            int64_t now = now_ns();
            if (!deadline) deadline = now + wait_ns;
            else if (now >= deadline) break;
            pause_ns = mpp_pause_ns(op, &stall, now);
            if (!looked) looked = look_at = now;
            if (pause_ns && now - looked > LOOK_NS && pthread_mutex_trylock(&mpp_progress.lock) == 0) {
                mpp_note_missing(mpp_progress.active, now);
                looked = now;
                pthread_mutex_unlock(&mpp_progress.lock);
            }
            if (stall_ns && now - stall.since >= stall_ns) break;
            /* Open MPI may yield in a look, a slice where the core is wanted: few looks then, unless MPI is at work. */
            is_long = !mpp_core_is_wanted(now) || stall.mpi_at == now || now - look_at >= MPP_LONGEST_SLEEP_NS;
            if (is_long) look_at = now;
            if (pause_ns && stall.since == now && mpp_core_is_wanted(now)) polls = 0; /* more may come at once */
        }
        if (polls == 0) continue;
        if (pause_ns) mpp_sleep(pause_ns);
        if (pause_ns || mpp_yield()) mpp_note_hand_over(op);
    }
    atomic_fetch_sub(&mpp_progress.waiters, 1);
    if (mpp_count_sleepers(0)) { /* they are to move what this thread leaves */
        mpp_lock();
        mpp_wake_sleepers();
        mpp_unlock();
    }
    if (entered) staging->leave();
    return state;
}

/* Of an asynchronous call: how long it polls before it returns. Where it does, all that was left to the background
 * moves on as well. */
static int64_t inline_ns(const mpp_op *op) {
    if (!op->moves || !mpp_progress.running) return 0;
    return mpp_inline_ns_now(&op->group->inline_progress, op->moves);
}

static int poll_inline(mpp_op *op, int64_t wait_ns) {
    int state = poll(op, wait_ns, MPP_INLINE_STALL_NS);
    mpp_lock();
    mpp_inline_note(&op->group->inline_progress, state != MPP_PENDING);
    mpp_unlock();
    return state;
}

static uintptr_t start(mpp_op *op, int64_t wait_ns) {
    mpp_lock();
    if (!op->ours && op->counts) mpp_note_start(op);
    int state = op->step(op);
    int64_t at_once_ns = 0;
    if (state == MPP_DONE && wait_ns >= 0) {
        mpp_note_completion(op);
        mpp_unlock();
        mpp_discard(op);
        return 0;
    }
    if (state == MPP_PENDING) {
        mpp_push(&mpp_progress.active, &mpp_progress.active_tail, op);
        if (atomic_load(&op->group->aborted) && op->cancel) op->cancel(op); /* mpp_group_abort came before */
        if (wait_ns == 0) at_once_ns = inline_ns(op);
        if (wait_ns <= 0 && !at_once_ns) {
            mpp_wake_progress();
            mpp_wake_sleepers();
        }
    } else {
        mpp_complete(op, state);
    }
    if (wait_ns <= 0 && !at_once_ns) hand_out(op);
    mpp_unlock();
    if (wait_ns <= 0 && !at_once_ns) return (uintptr_t)op;
    if ((at_once_ns ? poll_inline(op, at_once_ns) : poll(op, wait_ns, 0)) == MPP_DONE) {
        mpp_discard(op);
        return 0;
    }
    mpp_lock();
    hand_out(op);
    mpp_wake_progress();
    mpp_unlock();
    return (uintptr_t)op;
}

uintptr_t mpp_start(mpp_op *op, int64_t wait_ns) {
    mpp_owned *staging = (mpp_owned *)op->staging;
    void (*leave)(void) = staging && staging->enter(staging) ? staging->leave : NULL;
    uintptr_t handle = start(op, wait_ns);
    if (leave) leave();
    return handle;
}

void mpp_begin(mpp_op *op) {
    atomic_store(&op->state, MPP_PENDING);
    op->failure = 0;
    op->counts = 1;
    atomic_fetch_add(&op->group->active, 1);
    int state = op->step(op);
    if (state != MPP_PENDING) {
        mpp_complete(op, state);
        return;
    }
    mpp_push(&mpp_progress.active, &mpp_progress.active_tail, op);
    mpp_wake_progress();
}

static int state_of(const mpp_op *op) {
    int state = atomic_load_explicit(&op->state, memory_order_acquire);
    return state != MPP_PENDING && op->queued ? state | MPP_REPORTED : state;
}

/* The waiter will see the completion first: no need to wake the background for it. The caller watches the
 * operation again if it gives up. */
int mpp_wait(uintptr_t handle, int64_t wait_ns) {
    mpp_op *op = (mpp_op *)handle;
    mpp_lock();
    int state = atomic_load(&op->state);
    op->notify = 0;
    mpp_unlock();
    if (state == MPP_PENDING) state = poll(op, wait_ns, 0);
    return state == MPP_DONE || state == MPP_FAILED ? state_of(op) : state;
}

int mpp_state_of(uintptr_t handle) {
    mpp_op *op = (mpp_op *)handle;
    if (atomic_load_explicit(&op->state, memory_order_acquire) == MPP_PENDING) {
        mpp_lock();
        mpp_progress_all();
        mpp_unlock();
    }
    return state_of(op);
}

/* From now on mpp_next_completed reports this operation; 0 if it is complete already and will not be. Nobody is woken
 * for it, which costs more than a small operation itself, unless that hurries: something follows from its end. */
int mpp_notify_on_completion(uintptr_t handle, int wake) {
    mpp_op *op = (mpp_op *)handle;
    mpp_lock();
    int pending = atomic_load(&op->state) == MPP_PENDING;
    op->notify = pending;
    op->wake |= wake;
    if (pending) mpp_wake_progress();
    mpp_unlock();
    return pending;
}

void mpp_wake_on_completion(uintptr_t handle) {
    mpp_op *op = (mpp_op *)handle;
    mpp_lock();
    op->wake = 1;
    if (op->queued) mpp_report_completed();
    mpp_unlock();
}

void mpp_cancel(uintptr_t handle) {
    mpp_op *op = (mpp_op *)handle;
    mpp_lock();
    if (op->cancel && atomic_load(&op->state) == MPP_PENDING) op->cancel(op);
    mpp_unlock();
}

/* Whether `rank` has come to this operation: 1, 0, 2 if it is through with it, -1 where that cannot be seen here. */
int mpp_arrived(uintptr_t handle, int rank) {
    mpp_op *op = (mpp_op *)handle;
    mpp_lock(); /* once the group is closed, its segment may go */
    int there = op->arrived && !mpp_is_closed(op->group) ? op->arrived(op, rank) : -1;
    mpp_unlock();
    return there;
}

void mpp_release(uintptr_t handle) {
    if (!mpp_is_shared((mpp_op *)handle)) mpp_discard((mpp_op *)handle);
}

/* ---- completed operations, for Python ---- */

int mpp_next_completed(uintptr_t *ops, int *states, int most, int64_t timeout_ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + timeout_ns;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    int count = 0;
    mpp_lock();
    while (!mpp_progress.is_due && !atomic_load(&mpp_progress.stopping))
        if (pthread_cond_timedwait(&mpp_progress.completed, &mpp_progress.lock, &until) == ETIMEDOUT) break;
    for (mpp_op *op; count < most && (op = mpp_progress.done); count++) {
        mpp_progress.done = op->next;
        ops[count] = (uintptr_t)op;
        states[count] = atomic_load(&op->state);
    }
    mpp_progress.done_count -= count;
    if (!mpp_progress.done) mpp_progress.done_tail = NULL, mpp_progress.is_due = 0;
    mpp_unlock();
    return count;
}

int64_t mpp_active_count(void) {
    mpp_lock();
    int64_t count = 0;
    for (const mpp_op *op = mpp_progress.active; op; op = op->next) count++;
    mpp_unlock();
    return count;
}

/* Cancels what can be taken back of a group's operations. */
void mpp_cancel_all(mpp_group *group) {
    mpp_lock();
    for (mpp_op *op = mpp_progress.active; op; op = op->next)
        if (op->group == group && op->cancel) op->cancel(op);
    mpp_unlock();
}
