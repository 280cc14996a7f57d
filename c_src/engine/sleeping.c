#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/pause.h"
#include "engine/progress.h"

/* ---- whether others want this core ---- */

/* A yield to a rank that waits as well is over in microseconds, one to who computes takes a slice of its time: then
 * for so long nobody here yields. The next yield tries again, each time later while it takes as long. */
enum { SLICE_NS = 700000, SHORTEST_HOLD_NS = 50000000, LONGEST_HOLD_NS = 1000000000 };

static _Atomic int64_t wanted_until, hold_ns;

int mpp_yield(void) {
    int64_t before = now_ns();
    sched_yield();
    int64_t now = now_ns(), hold = atomic_load_explicit(&hold_ns, memory_order_relaxed);
    if (now - before < SLICE_NS) return 0;
    int again = now - atomic_load_explicit(&wanted_until, memory_order_relaxed) < 2 * hold;
    hold = again ? 2 * hold : SHORTEST_HOLD_NS;
    if (hold > LONGEST_HOLD_NS) hold = LONGEST_HOLD_NS;
    atomic_store_explicit(&hold_ns, hold, memory_order_relaxed);
    atomic_store_explicit(&wanted_until, now + hold, memory_order_relaxed);
    return 1;
}

int mpp_core_is_wanted(int64_t now) { return now < atomic_load_explicit(&wanted_until, memory_order_relaxed); }

/* ---- sleeping ---- */

enum { MOST_BELLS = 16, BLIND_NS = 200000, LONGEST_PAUSE_NS = 1000000, FUTEX_WAITV = 449, FUTEX_32_BITS = 2 };

/* struct futex_waitv of Linux 5.16. */
typedef struct {
    uint64_t seen, word;
    uint32_t flags, reserved;
} watched_word;

/* Under the lock: says what the group's operations wait for; the bell's word as it is now. */
static watched_word listen_for(mpp_group *g) {
    uint32_t rings = atomic_load(&g->bell->rings);
    g->await(g);
    mpp_listen(g);
    return (watched_word){.seen = rings, .word = (uintptr_t)&g->bell->rings, .flags = FUTEX_32_BITS};
}

/* Under the lock: the bells of all groups with an active operation, each once; how many. */
static int listen(watched_word *words) {
    int count = 0;
    for (mpp_op *op = mpp_progress.active; op; op = op->next) {
        mpp_group *g = op->group;
        int known = !g->bell;
        for (int i = 0; i < count && !known; i++) known = words[i].word == (uintptr_t)&g->bell->rings;
        if (known) continue;
        if (count == MOST_BELLS) return -1;
        words[count++] = listen_for(g);
    }
    return count;
}

static void wait_for_one(const watched_word *w, int64_t ns) {
    struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, (void *)(uintptr_t)w->word, FUTEX_WAIT, (uint32_t)w->seen, &t, NULL, 0);
}

/* An error of the kernel's (a bell whose segment has gone, a signal) is an end of the sleep. */
static void wait_for_any(const watched_word *words, int count, int64_t ns) {
    static _Atomic int is_missing;
    if (count == 1) {
        wait_for_one(words, ns);
        return;
    }
    if (!atomic_load(&is_missing)) {
        int64_t until = now_ns() + ns;
        struct timespec t = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
        if (syscall(FUTEX_WAITV, words, count, 0, &t, CLOCK_MONOTONIC) >= 0 || errno != ENOSYS) return;
        atomic_store(&is_missing, 1);
    }
    wait_for_one(words, ns < BLIND_NS ? ns : BLIND_NS); /* deaf to the others' */
}

void mpp_sleep(int64_t ns) {
    watched_word words[MOST_BELLS];
    mpp_lock();
    int count = listen(words);
    /* What came before the others could see that this rank sleeps. */
    int moved = count > 0 && mpp_progress_all();
    if (count > 0) mpp_count_sleepers(1);
    mpp_unlock();
    if (count <= 0) {
        int64_t most = count < 0 ? BLIND_NS : LONGEST_PAUSE_NS;
        pause_for(ns < most ? ns : most);
        return;
    }
    if (!moved) wait_for_any(words, count, ns);
    mpp_lock();
    mpp_count_sleepers(-1);
    mpp_unlock();
}

/* ---- when to ---- */

/* After what time without a move: in collectives of our own, of the program's own MPI (of which only the time of a look
 * tells, and wrongly at times), in messages, with fewer cores than ranks; and where MPI may be at work on what is long,
 * which it moves only in the calls of those who wait. */
enum { STUCK_NS = 2000000, MPI_STUCK_NS = 200000, MESSAGE_STUCK_NS = 5000000 };
enum { CROWDED_STUCK_NS = 200000, LONG_STUCK_NS = 20000000 };
enum { PAUSE_NS = 50000, PAUSES_IN_WAIT = 50, PAUSES_IN_WAIT_WANTED = 8 };

static int64_t until_pause_ns(const mpp_op *op, const mpp_stall *s) {
    if (!op->in_short && s->all_idle == MPP_BUSY) return LONG_STUCK_NS;
    return op->group->yield_early ? CROWDED_STUCK_NS : op->arrived ? STUCK_NS : MESSAGE_STUCK_NS;
}

/* A yield gives only a part of the core to whoever else has work for it. Where each rank has a scheduling group of its
 * own, as with MPICH's mpiexec, those who yield keep the core for up to 0.3 s, as measured. Pauses get longer where
 * nothing can be under way, up to a fiftieth of the wait. */
int64_t mpp_pause_ns(const mpp_op *op, mpp_stall *s, int64_t now) {
    unsigned seen = atomic_load_explicit(&op->group->moves, memory_order_relaxed);
    if (!s->since || seen != s->moves) s->since = now;
    if (!s->quiet || s->advanced) s->quiet = now;
    s->moves = seen;
    s->advanced = 0;
    if (s->in_mpi) s->mpi_at = now;
    s->in_mpi = 0;
    int64_t quiet = now - (s->quiet > s->since ? s->quiet : s->since), longer = quiet / PAUSES_IN_WAIT;
    if (s->mpi_at && now - s->mpi_at < MPI_STUCK_NS) return mpp_core_is_wanted(now) ? PAUSE_NS : 0;
    if (mpp_core_is_wanted(now)) {
        if (s->all_idle == MPP_RINGS) return MPP_LONGEST_SLEEP_NS;
        longer = quiet / PAUSES_IN_WAIT_WANTED;
        return longer > LONGEST_PAUSE_NS ? LONGEST_PAUSE_NS : longer < PAUSE_NS ? PAUSE_NS : longer;
    }
    /* Who waits for a message moves what else has been begun, and that is not to come a pause later each time. */
    if ((op->in_short ? now - s->since : quiet) <= until_pause_ns(op, s)) return 0;
    if (s->all_idle == MPP_BUSY || longer < PAUSE_NS) return PAUSE_NS;
    return longer < LONGEST_PAUSE_NS ? longer : LONGEST_PAUSE_NS;
}
