/* The lock, and the list of active operations, which whoever waits moves. */
#define _GNU_SOURCE
#include <pthread.h>

#include "engine/activity.h"
#include "engine/pause.h"
#include "engine/progress.h"

enum { LOOKS = 16, LOOKS_IN_VAIN_NS = 2000, LOOK_AND_YIELD_NS = 500000, COLD_NS = 20000 };

mpp_progress_state mpp_progress = {.lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP,
                                   .work = PTHREAD_COND_INITIALIZER,
                                   .completed = PTHREAD_COND_INITIALIZER};

/* Deadlines are not to move when somebody sets the clock. */
__attribute__((constructor)) static void wait_by_the_monotonic_clock(void) {
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes)) return;
    if (!pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC))
        pthread_cond_init(&mpp_progress.completed, &attributes);
    pthread_condattr_destroy(&attributes);
}

void mpp_lock(void) {
    if (mpp_in_child() || pthread_mutex_trylock(&mpp_progress.lock) == 0) return;
    /* A poller takes the lock again within nanoseconds of giving it up, before a sleeping starter wakes:
     * without this hint a starter could wait for as long as somebody polls. */
    atomic_fetch_add(&mpp_progress.starters, 1);
    pthread_mutex_lock(&mpp_progress.lock);
    atomic_fetch_sub(&mpp_progress.starters, 1);
}

void mpp_unlock(void) { (void)(mpp_in_child() || pthread_mutex_unlock(&mpp_progress.lock)); }

/* MPICH's MPI_Abort takes MPI apart: no other thread may be in it, but one that is stuck there is not waited for. */
void mpp_end_job(int status) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    atomic_fetch_add(&mpp_progress.starters, 1); /* as in mpp_lock */
    pthread_mutex_timedlock(&mpp_progress.lock, &until);
    mpp_abort(status);
}

/* ---- the list of active operations (under the lock) ---- */

void mpp_push(mpp_op **head, mpp_op **tail, mpp_op *op) {
    op->next = NULL;
    if (*tail) (*tail)->next = op;
    else *head = op;
    *tail = op;
}

void mpp_report_completed(void) {
    mpp_progress.is_due = 1;
    pthread_cond_signal(&mpp_progress.completed);
}

void mpp_complete(mpp_op *op, int state) {
    mpp_note_completion(op);
    mpp_no_longer_active(op);
    if (op->notify) {
        op->queued = 1;
        mpp_push(&mpp_progress.done, &mpp_progress.done_tail, op);
        if (++mpp_progress.done_count >= MPP_MOST_REPORTS || op->wake) mpp_report_completed();
    }
    /* Last: from here a waiter may release the operation. */
    atomic_store_explicit(&op->state, state, memory_order_release);
    mpp_wake_sleepers();
}

void mpp_wake_progress(void) {
    if (!mpp_progress.running || !mpp_progress.asleep) return;
    mpp_progress.woken = 1;
    pthread_cond_signal(&mpp_progress.work);
}

/* A probe takes no message, and this one asks for none that comes. */
static int64_t look_ns(void) {
    mpi_status status;
    int flag;
    int64_t before = now_ns();
    mpp_mpi.Iprobe(mpp_mpi.rank, 0, mpp_mpi.world, &flag, &status);
    return now_ns() - before;
}

/* Whether MPI had something to do tells only the time it took. Where it had nothing, every tenth look or so takes five
 * to eight times as long as others, and the first one behind a pause, with cold caches, longer than any: so the sum of
 * some tells. Behind a pause they come at once. */
int mpp_look_into_mpi(void) {
    static int64_t usual_ns = 4000, spent_ns, last;
    static int looks;
    int flag = 0;
    if (mpp_in_child() || !mpp_mpi.Iprobe || mpp_mpi.Finalized(&flag) || flag) return 0; /* tests of the engine: none */
    int at_once = now_ns() - last > COLD_NS;
    int64_t took, in_vain = 2 * usual_ns + LOOKS_IN_VAIN_NS;
    if (at_once) looks = -1;
    do {
        took = look_ns();
        spent_ns = looks++ < 0 ? 0 : spent_ns + took;
    } while (at_once && looks < LOOKS && spent_ns <= in_vain && took < LOOK_AND_YIELD_NS);
    last = now_ns();
    if (spent_ns <= in_vain && looks < LOOKS) return 0;
    int is_at_work = spent_ns > in_vain && took < LOOK_AND_YIELD_NS;
    if (spent_ns < usual_ns) usual_ns -= (usual_ns - spent_ns) / 2; /* near the least of late */
    else usual_ns += usual_ns * looks / (64 * LOOKS) + 1;
    spent_ns = looks = 0;
    return is_at_work;
}

/* For who waits in Python for other ranks, 1 at the begin and -1 at the end: the progress thread looks into MPI. */
void mpp_tend_mpi(int more) {
    mpp_lock();
    mpp_progress.tended += more;
    mpp_wake_progress();
    mpp_unlock();
}

int mpp_progress_all(void) {
    int advances = 0;
    mpp_progress.all_idle = MPP_RINGS;
    mpp_op *previous = NULL;
    for (mpp_op *op = mpp_in_child() ? NULL : mpp_progress.active, *next; op; op = next) {
        next = op->next;
        unsigned before = op->group->moves;
        int state = op->step(op);
        if (state == MPP_PENDING) {
            advances += (int)(op->group->moves - before);
            if (op->idle < mpp_progress.all_idle) mpp_progress.all_idle = op->idle;
            previous = op;
            continue;
        }
        if (previous) previous->next = next;
        else mpp_progress.active = next;
        if (mpp_progress.active_tail == op) mpp_progress.active_tail = previous;
        advances++;
        mpp_complete(op, state);
    }
    return advances;
}
