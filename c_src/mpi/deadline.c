/* A thread that speaks, and in the end ends the process, while the one that started it is stuck in a call of MPI's.
 * Python could not: mpi4py holds its lock in MPI_Init, and a call that never comes back never gives it up. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    int running, over, code;
    struct timespec word_at, end_at;
    char *word, *last_word;
} deadline = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void say(const char *text) {
    size_t length = strlen(text);
    if (write(STDERR_FILENO, text, length) < 0) return; /* nobody reads it */
}

/* Whether the call has come back by then. */
static int is_over_by(const struct timespec *until) {
    while (!deadline.over)
        if (pthread_cond_timedwait(&deadline.changed, &deadline.lock, until) == ETIMEDOUT) break;
    return deadline.over;
}

static void *watch(void *unused) {
    const struct timespec moment = {.tv_nsec = 200000000}; /* a launcher may not forward what it has not read yet */
    (void)unused;
    pthread_mutex_lock(&deadline.lock);
    if (deadline.word && !is_over_by(&deadline.word_at)) say(deadline.word);
    if (!is_over_by(&deadline.end_at)) {
        say(deadline.last_word);
        nanosleep(&moment, NULL);
        _exit(deadline.code);
    }
    pthread_mutex_unlock(&deadline.lock);
    return NULL;
}

static struct timespec after(double seconds) {
    struct timespec then;
    clock_gettime(CLOCK_MONOTONIC, &then);
    double whole = seconds < 1e9 ? seconds : 1e9; /* for ever */
    then.tv_sec += (time_t)whole;
    then.tv_nsec += (long)((whole - (double)(time_t)whole) * 1e9);
    if (then.tv_nsec >= 1000000000) {
        then.tv_sec++;
        then.tv_nsec -= 1000000000;
    }
    return then;
}

static int prepare(void) {
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes)) return -1;
    int error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (!error) error = pthread_cond_init(&deadline.changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return error;
}

/* Says `word` after `word_after` seconds (a negative number: never) and ends the process with `last_word` and this exit
 * code after `end_after`, unless mpp_deadline_over() comes first. One at a time; -1: there is one, or no thread. */
int mpp_deadline(const char *word, double word_after, const char *last_word, double end_after, int code) {
    if (deadline.running || prepare()) return -1;
    deadline.word = word_after >= 0 && word_after < end_after ? strdup(word) : NULL;
    deadline.last_word = strdup(last_word);
    deadline.word_at = after(word_after);
    deadline.end_at = after(end_after);
    deadline.code = code;
    deadline.over = 0;
    deadline.running = deadline.last_word && !pthread_create(&deadline.thread, NULL, watch, NULL);
    if (deadline.running) return 0;
    free(deadline.word);
    free(deadline.last_word);
    return -1;
}

void mpp_deadline_over(void) {
    pthread_mutex_lock(&deadline.lock);
    deadline.over = 1;
    pthread_cond_signal(&deadline.changed);
    pthread_mutex_unlock(&deadline.lock);
    pthread_join(deadline.thread, NULL);
    deadline.running = 0;
    pthread_cond_destroy(&deadline.changed);
    free(deadline.word);
    free(deadline.last_word);
}
