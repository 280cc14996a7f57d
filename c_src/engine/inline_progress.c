/* Whether an asynchronous call moves its data itself before it returns, or leaves that to the background.
 *
 * Where a core is idle, the progress thread moves the data while the caller computes. Where none is, it must take the
 * core from the computation, gets it late, and pays for each wake-up; then the caller polls for as long as the data
 * needs, and the operation is usually complete when the call returns. Ranks need not agree: what one does at once
 * another may leave to its background. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/pause.h"
#include "engine/progress.h"

/* The kernel counts idle time in ticks of 10 ms. */
enum { WINDOW_NS = 50000000, MOST_MISSES = 8 };

/* What moving the data costs at most while it is worth the caller's time: memory takes 0.1 ns a byte, a network that
 * keeps a core busy about 1. */
static const double NS_PER_BYTE = 1.5;

/* Python runs no signal handler, Ctrl-C's for instance, before the call returns. */
enum { MOST_NS = 50000000 };

static mpp_inline_rule rule = {.mode = MPP_INLINE_AUTO, .share = 1.0};

void mpp_set_inline(int mode, double share) {
    rule.mode = mode;
    rule.share = share;
}

/* Whether no core is left for a background thread, as of the last whole window: looks again once the next is over.
 * What is `used` is CPU time of this process but for its progress thread. */
static int cores_are_taken(mpp_inline_rule *r, const mpp_inline_clocks *clocks) {
    int64_t now = clocks->now(), wall = now - r->at;
    if (r->at && wall < WINDOW_NS) return r->taken;
    int64_t used = clocks->process() - clocks->background(), idle = clocks->idle();
    if (r->at) {
        double own = (double)(used - r->used) / (double)wall, spare = (double)(idle - r->idle) / (double)wall;
        double enough = r->share > 1 ? r->share - 0.5 : 0.75 * r->share;
        r->taken = own >= enough || (idle >= 0 && r->idle >= 0 && spare < 0.5 && own >= 0.5);
    }
    r->at = now;
    r->used = used;
    r->idle = idle;
    return r->taken;
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

void mpp_inline_note(mpp_inline *group, int is_complete) {
    if (is_complete) group->misses = 0;
    else if (group->misses < MOST_MISSES) group->misses++;
    group->skip = (1u << group->misses) - 1 - (group->misses > 0);
}

/* How long this call may poll, after those before it were complete in time or not. The more often the others did not
 * come or the data took longer, the rarer it is tried. */
int64_t mpp_inline_ns(mpp_inline_rule *r, mpp_inline *group, size_t bytes, const mpp_inline_clocks *clocks) {
    if (r->mode == MPP_INLINE_NEVER || (r->mode == MPP_INLINE_AUTO && !cores_are_taken(r, clocks))) return 0;
    if (group->skip) return group->skip--, 0;
    double ns = MPP_INLINE_STALL_NS + NS_PER_BYTE * (double)bytes;
    return ns < MOST_NS ? (int64_t)ns : MOST_NS;
}

static int64_t process_ns(void) { return clock_ns(CLOCK_PROCESS_CPUTIME_ID); }
static int64_t background_ns(void) { return clock_ns(mpp_progress.background); }

int64_t mpp_inline_ns_now(mpp_inline *group, size_t bytes) {
    const mpp_inline_clocks clocks = {now_ns, process_ns, background_ns, idle_ns};
    return mpp_inline_ns(&rule, group, bytes, &clocks);
}
