/* A thread that speaks, and in the end ends the process, while the one that started it is stuck in a call of MPI's.
 * Python could not: mpi4py holds its lock in MPI_Init, and a call that never comes back never gives it up. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

static struct {
    pthread_t thread;
    _Atomic uint32_t over; /* a futex */
    int running, code;
    double word_after, end_after;
    char *word, *last_word;
} deadline;

static void say(const char *text) {
    size_t length = strlen(text);
    if (write(STDERR_FILENO, text, length) < 0) return; /* nobody reads it */
}

/* Whether the call has come back by then. */
static int is_over_within(double seconds) {
    double whole = seconds < 1e9 ? seconds : 1e9; /* for ever */
    struct timespec limit = {.tv_sec = (time_t)whole, .tv_nsec = (long)((whole - (double)(time_t)whole) * 1e9)};
    while (!atomic_load(&deadline.over))
        if (syscall(SYS_futex, &deadline.over, FUTEX_WAIT, 0, &limit, NULL, 0) && errno == ETIMEDOUT) break;
    return (int)atomic_load(&deadline.over);
}

static void *watch(void *unused) {
    const struct timespec moment = {.tv_nsec = 200000000}; /* a launcher may not forward what it has not read yet */
    sigset_t all;
    (void)unused;
    sigfillset(&all); /* a handler that runs here would have the time begin again */
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    if (deadline.word && !is_over_within(deadline.word_after)) say(deadline.word);
    if (!is_over_within(deadline.end_after - (deadline.word ? deadline.word_after : 0))) {
        say(deadline.last_word);
        nanosleep(&moment, NULL);
        _exit(deadline.code);
    }
    return NULL;
}

/* Says `word` after `word_after` seconds (a negative number: never) and ends the process with `last_word` and this exit
 * code after `end_after`, unless mpp_deadline_over() comes first. One at a time; -1: there is one, or no thread. */
int mpp_deadline(const char *word, double word_after, const char *last_word, double end_after, int code) {
    if (deadline.running) return -1;
    deadline.word = word_after >= 0 && word_after < end_after ? strdup(word) : NULL;
    deadline.last_word = strdup(last_word);
    deadline.word_after = word_after;
    deadline.end_after = end_after;
    deadline.code = code;
    atomic_store(&deadline.over, 0);
    deadline.running = deadline.last_word && !pthread_create(&deadline.thread, NULL, watch, NULL);
    if (deadline.running) return 0;
    free(deadline.word);
    free(deadline.last_word);
    return -1;
}

void mpp_deadline_over(void) {
    atomic_store(&deadline.over, 1);
    syscall(SYS_futex, &deadline.over, FUTEX_WAKE, 1, NULL, NULL, 0);
    pthread_join(deadline.thread, NULL);
    deadline.running = 0;
    free(deadline.word);
    free(deadline.last_word);
}
