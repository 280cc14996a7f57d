/* How a thread that has nothing to do lets time pass: it yields its core, or sleeps. */
#ifndef MPP_SLEEPING_H
#define MPP_SLEEPING_H

#include "engine/engine.h"

/* Gives the core to whoever wants it, and learns from how long that takes. */
int mpp_yield(void); /* whether that cost a slice of time */
/* Whether a yield gives the core away for a time slice, as of late: then who waits is to sleep, since who sleeps gets
 * the core soon once it is woken. `now`: by the monotonic clock. */
int mpp_core_is_wanted(int64_t now);
/* How long who is woken by a bell sleeps without a look at the program's own MPI and at deadlines. */
enum { MPP_LONGEST_SLEEP_NS = 5000000 };
/* Sleeps for at most `ns`, or until what an active operation waits for has come. Not under the lock. */
void mpp_sleep(int64_t ns);

#endif
