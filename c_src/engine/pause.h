/* Time, and ways to let some of it pass. */
#pragma once

#include <stdint.h>
#include <time.h>

static inline int64_t clock_ns(clockid_t clock) { /* 0 for that of a thread that has ended */
    struct timespec t = {0};
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

typedef struct {
    int64_t at, used;
} core_use;

/* Whether the thread with this clock had a core for most of the time since `last`. */
static inline int has_computed(clockid_t thread, core_use *last) {
    core_use now = {now_ns(), clock_ns(thread)};
    int is_busy = 2 * (now.used - last->used) > now.at - last->at;
    *last = now;
    return is_busy;
}

static inline void pause_for(int64_t ns) {
    struct timespec t = {.tv_sec = 0, .tv_nsec = ns};
    nanosleep(&t, NULL);
}

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
