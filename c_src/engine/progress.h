/* What the threads of the engine share: polling.c has those that call, background.c the one that polls for them; and
 * when these wait without work. */
#pragma once

#include <pthread.h>

#include "engine/bell.h"
#include "engine/engine.h"

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work;      /* the progress thread sleeps here when nothing is active */
    pthread_cond_t completed; /* the consumer of mpp_next_completed sleeps here */
    mpp_op *active, *active_tail;
    mpp_op *done, *done_tail;
    int is_due; /* they are to be reported: one of them hurries, or there are many */
    int done_count;
    int tended;           /* who waits in Python, for whom the progress thread looks into MPI */
    int all_idle;         /* the least `idle` of those that the last mpp_progress_all left pending */
    _Atomic int waiters;  /* threads that poll in mpp_wait: the progress thread leaves the work to them */
    _Atomic int starters; /* threads that want the lock to start something: pollers make room */
    _Atomic int stopping;
    int running, asleep, woken;
    clockid_t background; /* of the progress thread */
    unsigned messages;    /* counts those of which Python has got the handle */
    clockid_t starter;    /* counts what the thread that has started something last has of a core */
    pthread_t thread;
} mpp_progress_state;

extern mpp_progress_state mpp_progress; /* all of it under its lock, but for what is atomic */

/* Under the lock. */
void mpp_push(mpp_op **head, mpp_op **tail, mpp_op *op);
void mpp_complete(mpp_op *op, int state);
void mpp_report_completed(void); /* now */
/* Wakes the progress thread, unless it is up already and will see the new operation by itself. */
void mpp_wake_progress(void);

/* Under the lock. What the program itself has under way in MPI moves only while some thread is inside MPI, and who
 * waits in shared memory is not. Whether MPI seems to have moved something, as the look took longer than those that
 * find nothing: then the next one is not to come a pause later. */
int mpp_look_into_mpi(void);

/* Under the lock: how many chunks and messages have moved, and operations have become complete. */
int mpp_progress_all(void);

/* ---- how a thread that has nothing to do lets time pass: sleeping.c ---- */

/* Gives the core to whoever wants it, and learns from how long that takes. */
int mpp_yield(void); /* whether that cost a slice of time */
/* Whether a yield gives the core away for a time slice, as of late: then who waits is to sleep, since who sleeps gets
 * the core soon once it is woken. `now`: by the monotonic clock. */
int mpp_core_is_wanted(int64_t now);
/* How long who is woken by a bell sleeps without a look at the program's own MPI and at deadlines. */
enum { MPP_LONGEST_SLEEP_NS = 5000000 };
/* Sleeps for at most `ns`, or until what an active operation waits for has come. Not under the lock. */
void mpp_sleep(int64_t ns);

/* ---- whether an asynchronous call moves its data itself before it returns: inline_progress.c. Under the lock ---- */

/* How many ns an asynchronous call of a group is to poll for, and for how many if nothing moves; 0: not at all. */
enum { MPP_INLINE_STALL_NS = 1000000 };
int64_t mpp_inline_ns_now(mpp_inline *group, size_t bytes);
