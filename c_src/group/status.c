/* Answers whoever asks what this process does, on a socket in the file system, from memory: the thread takes neither
 * the engine's lock nor Python's, so it answers while ranks are stuck. For stacks it sends the process the signal for
 * which Python's faulthandler, in a handler written in C, writes them to a file.
 *
 * A request is a line: "status", "stacks", "dump", "timeline" or "others ...", which Python takes apart. The answer
 * goes until the end of the connection. Only the owner of the process and root get one. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "engine/activity.h"
#include "engine/pause.h"

enum { CALLER_SECONDS = 2, PYTHON_SECONDS = 6, STACKS_LOOKS = 40, PAUSE_NS = 50000000 };

static struct {
    pthread_mutex_t lock; /* of all below; held for no longer than an answer takes to be put together in memory */
    mpp_activity *groups;
    char *about; /* members of a JSON object: the job, and this rank in it */
    _Atomic int listening;
    int stacks, stack_signal;
    pthread_t thread;
    pthread_cond_t is_given;
    char wanted[MPP_REQUEST]; /* of the thread in Python that looks once a second; empty: nothing */
    uint64_t question;        /* its number: an answer to an earlier one comes too late */
    char *given;
} status = {.lock = PTHREAD_MUTEX_INITIALIZER, .is_given = PTHREAD_COND_INITIALIZER, .listening = -1, .stacks = -1};

/* ---- which groups there are ---- */

/* From now on the group's operations are counted. `about`: members of a JSON object. 0: no memory. */
int mpp_group_describe(uintptr_t handle, const char *about) {
    mpp_group *g = (mpp_group *)handle;
    if (g->activity) return 1;
    mpp_activity *a = calloc(1, sizeof *a + (size_t)g->size * sizeof *a->of_rank);
    if (!a) return 0;
    a->group = g;
    a->about = strdup(about);
    if (!a->about) return free(a), 0;
    pthread_mutex_lock(&status.lock);
    a->next = status.groups;
    status.groups = g->activity = a;
    pthread_mutex_unlock(&status.lock);
    return 1;
}

/* The group has ended, or is in nobody's hands: it is shown no more. Its figures stay until it is released. */
void mpp_group_hide(uintptr_t handle) {
    pthread_mutex_lock(&status.lock);
    MPP_TAKE_OUT(status.groups, next, ((mpp_group *)handle)->activity);
    pthread_mutex_unlock(&status.lock);
}

static int64_t in_calls_of(const mpp_activity *a, int64_t now) {
    int64_t ns = MPP_GET(a->in_calls);
    int under_way = MPP_GET(a->under_way);
    return under_way ? ns + now - MPP_GET(a->busy_since) : ns;
}

/* The figures of a group: of each kind of call the number, the bytes and the hand-overs, then ns in calls and ns of
 * waiting for others; `late`: of each rank the ns that it was waited for. 0: the group is not counted. */
int mpp_group_statistics(uintptr_t handle, uint64_t *figures, int64_t *late) {
    const mpp_activity *a = ((mpp_group *)handle)->activity;
    if (!a) return 0;
    for (int kind = 0; kind < MPP_CALL_KINDS; kind++) {
        figures[3 * kind] = MPP_GET(a->calls[kind]);
        figures[3 * kind + 1] = MPP_GET(a->bytes[kind]);
        figures[3 * kind + 2] = MPP_GET(a->hand_overs[kind]);
    }
    figures[3 * MPP_CALL_KINDS] = (uint64_t)in_calls_of(a, now_ns());
    figures[3 * MPP_CALL_KINDS + 1] = (uint64_t)MPP_GET(a->waited.ns);
    for (int r = 0; r < a->group->size; r++) late[r] = MPP_GET(a->of_rank[r].late.ns);
    return 1;
}

/* ---- answers ---- */

static double seconds(int64_t ns) { return 1e-9 * (double)ns; }

static void write_group(FILE *out, const mpp_activity *a, int64_t now) {
    uint64_t calls = 0, bytes = 0;
    uint64_t messages = MPP_GET(a->calls[MPP_SEND]) + MPP_GET(a->calls[MPP_RECV]);
    for (int kind = 0; kind < MPP_CALL_KINDS; kind++) {
        calls += MPP_GET(a->calls[kind]);
        bytes += MPP_GET(a->bytes[kind]);
    }
    int64_t begun = MPP_GET(a->begun), ended = MPP_GET(a->ended);
    int under_way = MPP_GET(a->under_way);
    fprintf(out, "{%s,\"rank\":%d,\"size\":%d,\"calls\":%llu,\"bytes\":%llu,\"number\":%llu", a->about, a->group->rank,
            a->group->size, (unsigned long long)calls, (unsigned long long)bytes,
            (unsigned long long)(calls - messages));
    fprintf(out, ",\"operation\":\"%s\",\"peer\":%d,\"length\":%llu,\"inside\":%s", mpp_call_names[MPP_GET(a->kind)],
            MPP_GET(a->peer), (unsigned long long)MPP_GET(a->length), under_way ? "true" : "false");
    fprintf(out, ",\"pending\":%lld", (long long)(atomic_load(&a->group->active) & (MPP_CLOSED - 1)));
    fprintf(out, ",\"begun_ago\":%.6f,\"ended_ago\":%.6f", begun ? seconds(now - begun) : -1.0,
            ended ? seconds(now - ended) : -1.0);
    fprintf(out, ",\"in_calls\":%.6f,\"waited\":%.6f,\"missing\":[", seconds(in_calls_of(a, now)),
            seconds(MPP_GET(a->waited.ns)));
    const char *comma = "";
    for (int r = 0; r < a->group->size; r++) {
        if (!MPP_GET(a->of_rank[r].missing)) continue;
        fprintf(out, "%s%d", comma, r);
        comma = ",";
    }
    fputs("],\"late\":{", out);
    comma = "";
    for (int r = 0; r < a->group->size; r++) {
        int64_t late = MPP_GET(a->of_rank[r].late.ns);
        if (late) fprintf(out, "%s\"%d\":%.6f", comma, r, seconds(late));
        if (late) comma = ",";
    }
    fputs("}}", out);
}

static void write_status(FILE *out) {
    int64_t now = now_ns();
    pthread_mutex_lock(&status.lock);
    fprintf(out, "{%s%s\"groups\":[", status.about ? status.about : "", status.about ? "," : "");
    for (const mpp_activity *a = status.groups; a; a = a->next) {
        write_group(out, a, now);
        if (a->next) fputc(',', out);
    }
    pthread_mutex_unlock(&status.lock);
    fputs("]}\n", out);
}

/* Python's stacks, of all threads. The file grows while the handler writes. */
static void write_stacks(FILE *out) {
    char piece[4096];
    off_t before = -1, size = 0, at = 0;
    if (status.stacks < 0 || ftruncate(status.stacks, 0) || lseek(status.stacks, 0, SEEK_SET)) return;
    if (kill(getpid(), status.stack_signal)) return; /* who called init_process_group may have ended */
    for (int look = 0; look < STACKS_LOOKS && (size == 0 || size != before); look++) {
        pause_for(PAUSE_NS);
        before = size;
        size = lseek(status.stacks, 0, SEEK_END);
    }
    for (ssize_t got; (got = pread(status.stacks, piece, sizeof piece, at)) > 0; at += got)
        fwrite(piece, 1, (size_t)got, out);
}

/* What only Python can do: ask ranks on other nodes through the job's store, and read the flight recorder. */
static void write_pythons_answer(FILE *out, const char *request) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PYTHON_SECONDS;
    pthread_mutex_lock(&status.lock);
    snprintf(status.wanted, sizeof status.wanted, "%s", request);
    status.question++;
    while (!status.given)
        if (pthread_cond_timedwait(&status.is_given, &status.lock, &until)) break;
    if (status.given) fputs(status.given, out);
    free(status.given);
    status.given = NULL;
    status.wanted[0] = 0;
    status.question++;
    pthread_mutex_unlock(&status.lock);
}

/* Into `request`, of MPP_REQUEST bytes, the line of somebody who waits for the caller's answer; empty: nobody does.
 * Returns the question's number. */
uint64_t mpp_status_wanted(char *request) {
    pthread_mutex_lock(&status.lock);
    uint64_t number = status.question;
    memcpy(request, status.wanted, sizeof status.wanted);
    status.wanted[0] = 0;
    pthread_mutex_unlock(&status.lock);
    return number;
}

/* The answer to that question, if somebody still waits for it. */
void mpp_status_give(uint64_t number, const char *text) {
    pthread_mutex_lock(&status.lock);
    if (number == status.question) {
        free(status.given);
        status.given = strdup(text);
        pthread_cond_signal(&status.is_given);
    }
    pthread_mutex_unlock(&status.lock);
}

static void send_all(int connection, const char *text, size_t length) {
    while (length) {
        ssize_t sent = send(connection, text, length, MSG_NOSIGNAL);
        if (sent <= 0) return;
        text += sent;
        length -= (size_t)sent;
    }
}

static int may_ask(int connection) {
    struct ucred who;
    socklen_t length = sizeof who;
    return !getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &length) && (who.uid == geteuid() || who.uid == 0);
}

static void answer(int connection) {
    struct timeval limit = {.tv_sec = CALLER_SECONDS};
    char request[MPP_REQUEST] = "", *text = NULL;
    size_t length = 0;
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (!may_ask(connection) || recv(connection, request, sizeof request - 1, 0) <= 0) return;
    FILE *out = open_memstream(&text, &length);
    if (!out) return;
    if (!strcmp(request, "status\n")) write_status(out);
    if (!strcmp(request, "stacks\n")) write_stacks(out);
    if (!strcmp(request, "dump\n") || !strcmp(request, "timeline\n") || !strncmp(request, "others ", 7))
        write_pythons_answer(out, request);
    if (!fclose(out)) send_all(connection, text, length);
    free(text);
}

/* Without a descriptor or memory left this thread waits for one. Else the socket has ended: mpp_status_stop. */
static int may_accept_later(void) {
    return errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM || errno == ECONNABORTED;
}

static void *answer_forever(void *unused) {
    (void)unused;
    for (;;) {
        int connection = accept4(status.listening, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0 && !may_accept_later()) return NULL;
        if (connection < 0) {
            pause_for(PAUSE_NS);
            continue;
        }
        answer(connection);
        close(connection);
    }
}

/* Answers who connects to this socket, and owns it; `stacks`: the file that faulthandler writes to on `stack_signal`,
 * or -1. 0: nobody will answer, and the socket is still the caller's. */
int mpp_status_start(int listening, const char *about, int stacks, int stack_signal) {
    sigset_t all, before;
    status.about = strdup(about);
    if (!status.about) return 0;
    status.stacks = stacks;
    status.stack_signal = stack_signal;
    status.listening = listening;
    sigfillset(&all); /* the user's handlers are for the user's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&status.thread, NULL, answer_forever, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) return 1;
    free(status.about);
    status.about = NULL;
    status.listening = -1;
    return 0;
}

void mpp_status_stop(void) {
    int listening = status.listening;
    if (listening < 0) return;
    if (shutdown(listening, SHUT_RDWR)) return; /* ends accept(), unless the program has closed the socket */
    status.listening = -1;                      /* ends it where no descriptor is left, too */
    pthread_join(status.thread, NULL);
    close(listening);
    pthread_mutex_lock(&status.lock); /* a thread of Python's may be reading it */
    free(status.about);
    status.about = NULL;
    pthread_mutex_unlock(&status.lock);
}
