/* The thread that moves operations while no thread waits for one. */
#define _GNU_SOURCE
#include <sys/prctl.h>

#include "engine/activity.h"
#include "engine/pause.h"
#include "engine/progress.h"

/* How long the thread stays half awake after its last operation: the next start then costs no wake-up. Each pause's end
 * takes up to 50 us from a computation on the same core, as measured on a virtual machine. */
enum { LIGHT_PAUSES = 4, LIGHT_PAUSE_NS = 500000, PAUSE_NS = 100000, LONGEST_PAUSE_NS = 500000 };
enum { LOOKS_BEFORE_PAUSE = 1000 }; /* that find nothing, with a yield behind each */

/* A poll that finds little costs the computation as much as one that finds much. So pauses get longer while polls find
 * few movements, as on a slow wire, which is busy with the next chunks meanwhile, and shorter where they find more. */
enum { FEW_MOVES = 8, PAUSE_GROWTH_NS = 10000, LOOK_NS = 1000000 };

enum { MANY_STARTS = 4, START_NS = 100000 };

/* Whether the program begins message after message: as of the last time, where it is too soon to tell. */
static int is_beginning_messages(unsigned messages, int64_t now) {
    static int64_t told;
    static unsigned before;
    static int is_beginning;
    if (now - told < START_NS) return is_beginning;
    unsigned count = messages - before;
    is_beginning = count >= MANY_STARTS && (int64_t)count * START_NS >= now - told;
    before = messages;
    told = now;
    return is_beginning;
}

static void sleep_until_work(void) {
    mpp_progress.asleep = 1;
    while (!mpp_progress.woken && !atomic_load(&mpp_progress.stopping))
        pthread_cond_wait(&mpp_progress.work, &mpp_progress.lock);
    mpp_progress.asleep = mpp_progress.woken = 0;
}

static void *progress_thread(void *unused) {
    (void)unused;
    int idle = 0, quiet = 0, busy = 0, rounds = 0;
    int64_t pause_ns = PAUSE_NS, looked = 0, looked_into_mpi = 0;
    core_use last = {0};
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0); /* ns; pauses would last 50 us longer otherwise */
    while (!atomic_load(&mpp_progress.stopping)) {
        mpp_lock();
        if (!mpp_progress.active && !mpp_progress.tended && ++quiet > LIGHT_PAUSES) {
            sleep_until_work();
            quiet = 0;
        }
        int empty = !mpp_progress.active, others = atomic_load(&mpp_progress.waiters) > 0;
        int worked = empty || others ? 0 : mpp_progress_all();
        int64_t now = now_ns();
        if (!others && now - looked > LOOK_NS) mpp_note_missing(mpp_progress.active, looked = now);
        int tended = mpp_progress.tended, is_wanted = mpp_core_is_wanted(now);
        int is_due = is_wanted ? now - looked_into_mpi >= MPP_LONGEST_SLEEP_NS : busy || rounds++ % 16 == 0;
        int in_mpi = !others && (empty ? tended : is_due) && mpp_look_into_mpi();
        if (is_due) looked_into_mpi = now;
        int is_rung_for = mpp_progress.all_idle == MPP_RINGS && !worked;
        clockid_t starter = mpp_progress.starter;
        unsigned messages = mpp_progress.messages;
        mpp_unlock();
        if (!empty) quiet = 0;
        if (in_mpi) idle = 0;
        if (empty && in_mpi) continue;
        if (empty || others) {
            pause_for(empty && tended ? PAUSE_NS : LIGHT_PAUSE_NS);
            idle = 0;
            continue;
        }
        if (worked) idle = 0;
        else idle += idle <= LOOKS_BEFORE_PAUSE;
        pause_ns = worked > FEW_MOVES ? pause_ns / 2 : pause_ns + PAUSE_GROWTH_NS;
        pause_ns = pause_ns < PAUSE_NS ? PAUSE_NS : pause_ns > LONGEST_PAUSE_NS ? LONGEST_PAUSE_NS : pause_ns;
        if (busy || idle % 16 == 0) busy = has_computed(starter, &last);
        /* Who begins one message after another wants the lock for each, and those that get them ring for each.
         * A computation wants this core, and who yields is back after a whole time slice of it. A blocked thread waits
         * for us, perhaps in the wait() of a future, of which the engine knows nothing. */
        if (is_beginning_messages(messages, now)) pause_for(LIGHT_PAUSE_NS);
        else if (is_wanted) mpp_sleep(is_rung_for ? MPP_LONGEST_SLEEP_NS : LONGEST_PAUSE_NS);
        else if (!busy && idle <= LOOKS_BEFORE_PAUSE) mpp_yield();
        else pause_for(pause_ns);
    }
    return NULL;
}

int mpp_engine_start(void) {
    mpp_lock();
    int error = 0;
    if (!mpp_progress.running) {
        atomic_store(&mpp_progress.stopping, 0);
        error = pthread_create(&mpp_progress.thread, NULL, progress_thread, NULL);
        mpp_progress.running = !error;
        if (!error) pthread_getcpuclockid(mpp_progress.thread, &mpp_progress.background);
    }
    mpp_unlock();
    return error;
}

void mpp_engine_stop(void) {
    mpp_lock();
    int running = mpp_progress.running;
    mpp_progress.running = 0;
    atomic_store(&mpp_progress.stopping, 1);
    pthread_cond_broadcast(&mpp_progress.work);
    pthread_cond_broadcast(&mpp_progress.completed);
    mpp_unlock();
    if (running) pthread_join(mpp_progress.thread, NULL);
}
