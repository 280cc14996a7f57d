#include "engine/inline_progress.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/pause.h"

/* The kernel counts idle time in ticks of 10 ms. */
enum { WINDOW_NS = 50000000, TICK_NS = 10000000, MOST_MISSES = 8 };

/* What moving the data costs at most while it is worth the caller's time: memory takes 0.1 ns a byte, a network that
 * keeps a core busy about 1. */
static const double NS_PER_BYTE = 1.5;

/* Python runs no signal handler, Ctrl-C's for instance, before the call returns. */
enum { MOST_NS = 50000000 };

static mpp_inline_rule rule = {.mode = MPP_INLINE_AUTO, .load = {.share = 1.0}};

void mpp_set_inline(int mode, double share) {
    rule.mode = mode;
    rule.load.share = share;
}

/* Whether no core is left for a background thread, as of the last whole window.
 *
 * `used`: CPU time of this process but for its progress thread; `idle`: idle time of all cores of the machine, or -1.
 */
int mpp_cores_are_taken(mpp_core_load *l, int64_t now, int64_t used, int64_t idle) {
    int64_t wall = now - l->at;
    if (l->at && wall < WINDOW_NS) return l->taken;
    if (l->at) {
        double own = (double)(used - l->used) / (double)wall, spare = (double)(idle - l->idle) / (double)wall;
        double enough = l->share > 1 ? l->share - 0.5 : 0.75 * l->share;
        l->taken = own >= enough || (idle >= 0 && l->idle >= 0 && spare < 0.5 && own >= 0.5);
    }
    l->at = now;
    l->used = used;
    l->idle = idle;
    return l->taken;
}

/* ns; of all cores together, since the machine started. -1: the kernel does not say. Opened each time: a program may
 * close every descriptor that it has not opened itself. */
static int64_t idle_ns(void) {
    int file = open("/proc/uptime", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    char text[64] = "";
    double up, idle;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    return got > 0 && sscanf(text, "%lf %lf", &up, &idle) == 2 ? (int64_t)(idle * 1e9) : -1;
}

/* How long this call may poll, after those before it were complete in time or not. The more often the others did not
 * come or the data took longer, the rarer it is tried. */
int64_t mpp_inline_try(mpp_inline *group, size_t bytes) {
    if (group->skip) return group->skip--, 0;
    double ns = MPP_INLINE_STALL_NS + NS_PER_BYTE * (double)bytes;
    return ns < MOST_NS ? (int64_t)ns : MOST_NS;
}

void mpp_inline_note(mpp_inline *group, int is_complete) {
    if (is_complete) group->misses = 0;
    else if (group->misses < MOST_MISSES) group->misses++;
    group->skip = (1u << group->misses) - 1 - (group->misses > 0);
}

int64_t mpp_inline_ns(mpp_inline_rule *r, mpp_inline *group, size_t bytes, const mpp_inline_clocks *clocks) {
    if (r->mode == MPP_INLINE_NEVER) return 0;
    if (r->mode == MPP_INLINE_AUTO) {
        int64_t now = clocks->now();
        if (!r->load.at || now - r->load.at >= WINDOW_NS)
            mpp_cores_are_taken(&r->load, now, clocks->process() - clocks->background(), clocks->idle());
        if (!r->load.taken) return 0;
    }
    return mpp_inline_try(group, bytes);
}

static int64_t process_ns(void) { return clock_ns(CLOCK_PROCESS_CPUTIME_ID); }

int64_t mpp_inline_ns_now(mpp_inline *group, size_t bytes, int64_t (*background)(void)) {
    const mpp_inline_clocks clocks = {now_ns, process_ns, background, idle_ns};
    return mpp_inline_ns(&rule, group, bytes, &clocks);
}
