#define _GNU_SOURCE
#include "engine/bell.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/engine.h"

static mpp_group *listening; /* whose bells say that this process sleeps */
static _Atomic int sleeping; /* threads that do */

void mpp_ring(mpp_bell *bell) {
    if (!atomic_exchange(&bell->is_asleep, 0)) return;
    atomic_fetch_add(&bell->rings, 1);
    syscall(SYS_futex, &bell->rings, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void mpp_ring_rank(const mpp_group *g, int rank) {
    if (!g->bell || rank < 0 || !mpp_is_heard(g->sleepers)) return;
    mpp_bell *bell = g->bell_of(g, rank);
    if (bell && bell != g->bell) mpp_ring(bell);
}

void mpp_listen(mpp_group *g) {
    atomic_store(&g->bell->is_asleep, 1);
    if (g->listens) return;
    g->listens = 1;
    g->also_listens = listening;
    listening = g;
    atomic_fetch_add(g->sleepers, 1);
}

static void stop_listening(mpp_group *g) {
    atomic_store(&g->bell->is_asleep, 0);
    atomic_fetch_sub(g->sleepers, 1);
    g->listens = 0;
}

int mpp_count_sleepers(int more) {
    int count = atomic_fetch_add(&sleeping, more) + more;
    if (count == 0 && more)
        for (; listening; listening = listening->also_listens) stop_listening(listening);
    return count;
}

void mpp_forget_bell(mpp_group *group) {
    if (MPP_TAKE_OUT(listening, also_listens, group)) stop_listening(group);
    group->bell = NULL;
}

void mpp_wake_sleepers(void) {
    if (!atomic_load(&sleeping)) return;
    for (mpp_group *g = listening; g; g = g->also_listens) mpp_ring(g->bell);
}
