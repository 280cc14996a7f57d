/* Sleeping until another rank of the node has done what this one waits for.
 *
 * Each rank has a bell in the segment of each group. Who finds nothing to do says there what it waits for, looks once
 * more, and sleeps in the kernel on the bell's word, a futex. Who moves a counter or a message looks whether anybody
 * sleeps, and rings for those that have what they wait for. (An event count: the sleeper's store before its last look,
 * and the ringer's fence between what it publishes and its look at `sleepers`, let no ring be lost.)
 *
 * A process waits for all of its operations at once, so it sleeps on the bells of all their groups. Each sleep has an
 * end all the same: MPI, whose messages ring no bell between nodes, moves only in calls of those who wait. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* The counters of other ranks that one may wait for; the last is the first rank's of the node alone. */
enum { MPP_IN, MPP_REDUCED, MPP_OUT, MPP_AGREED, MPP_COUNTERS };
#define MPP_NOTHING UINT64_MAX

typedef struct mpp_bell {
    _Atomic uint32_t rings; /* the futex */
    _Atomic uint32_t is_asleep;
    _Atomic uint64_t awaited[MPP_COUNTERS]; /* the value to ring at; MPP_NOTHING: none */
    _Atomic int32_t of;                     /* whose `in`; -1: everybody's */
    char pad[64 - 2 * sizeof(uint32_t) - MPP_COUNTERS * sizeof(uint64_t) - sizeof(int32_t)];
} mpp_bell;

/* Whether somebody on the node sleeps. After what was published, and before mpp_ring. */
static inline int mpp_is_heard(_Atomic int *sleepers) {
#ifdef __SANITIZE_THREAD__ /* which knows no fences */
    return atomic_fetch_add(sleepers, 0) != 0;
#else
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(sleepers, memory_order_relaxed) != 0;
#endif
}

/* Wakes those that sleep on it. */
void mpp_ring(mpp_bell *bell);

/* ---- under the lock ---- */

struct mpp_group;
/* Something of MPI's is under way to this rank of the group, or over, which it may be waiting for in MPI. */
void mpp_ring_rank(const struct mpp_group *group, int rank);
/* Says that this process sleeps on the group's bell. */
void mpp_listen(struct mpp_group *group);
/* So many more threads of this process sleep, or fewer; how many do. With the last that wakes, its bells say so. */
int mpp_count_sleepers(int more);
/* Wakes the threads of this process that sleep, as there is something new for them. */
void mpp_wake_sleepers(void);
/* The group's segment will not be touched any more. */
void mpp_forget_bell(struct mpp_group *group);
