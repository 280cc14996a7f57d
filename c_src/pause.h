/* Time, and ways to let some of it pass. */
#ifndef MPP_PAUSE_H
#define MPP_PAUSE_H

#include <stdint.h>
#include <time.h>

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void nap(int64_t ns) {
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

#endif
