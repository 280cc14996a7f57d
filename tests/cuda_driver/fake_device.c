#define _GNU_SOURCE
#include "fake_device.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

fake_state fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

int fake_contexts[DEVICES];
__thread int fake_stack[MAX_STACK], fake_depth, fake_capture_mode;

/* ---- what a test sees ---- */

/* Under the lock. */
int fake_violation(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (!fake.violations++) vsnprintf(fake.first, sizeof fake.first, format, arguments);
    va_end(arguments);
    return code;
}

EXPORT int fake_violations(char *text, int length) {
    pthread_mutex_lock(&fake.lock);
    for (range *r = fake.ranges; r; r = r->next)
        if (r->registered && msync(r->view, r->bytes, MS_ASYNC)) fake_violation(0, "registered memory was unmapped");
    int count = fake.violations;
    snprintf(text, (size_t)length, "%s", fake.first);
    fake.violations = 0;
    fake.first[0] = 0;
    pthread_mutex_unlock(&fake.lock);
    return count;
}

/* The call of `name` (its part after "cu") that comes after `after` more, and all later ones, return `code`; where that
 * means that the context is lost, as after a kernel's bad address, so do all others. */
EXPORT void fake_fail(const char *name, int after, int code) {
    pthread_mutex_lock(&fake.lock);
    snprintf(fake.failing, sizeof fake.failing, "%s", code ? name : "");
    fake.fail_after = after;
    fake.fail_code = code;
    fake.fail_count = 0;
    pthread_mutex_unlock(&fake.lock);
}

void fake_count(const char *name) {
    int i = 0;
    while (fake.calls[i].name && strcmp(fake.calls[i].name, name)) i++;
    fake.calls[i].name = name;
    fake.calls[i].count++;
}

/* The calls since the last time, "EventRecord 2 EventQuery 5 ". */
EXPORT void fake_calls(char *text, int length) {
    pthread_mutex_lock(&fake.lock);
    for (int i = 0, used = 0; fake.calls[i].name; fake.calls[i++].count = 0)
        if (fake.calls[i].count && used < length)
            used += snprintf(text + used, (size_t)(length - used), "%s %d ", fake.calls[i].name, fake.calls[i].count);
    pthread_mutex_unlock(&fake.lock);
}

/* As while a thread captures a graph in torch's way: it breaks off, whoever does one of these. */
static const char unsafe[] = "MemHostAlloc MemFreeHost MemHostRegister MemHostUnregister StreamQuery EventQuery "
                             "IpcGetMemHandle IpcOpenMemHandle IpcCloseMemHandle StreamSynchronize";
/* All others want a context, and tell if it is lost. */
static const char without_context[] = "Init CtxPushCurrent CtxPopCurrent StreamSynchronize";

EXPORT void fake_capture(int is_under_way) {
    pthread_mutex_lock(&fake.lock);
    fake.capturing = is_under_way;
    pthread_mutex_unlock(&fake.lock);
}

int fake_failing(const char *name) {
    fake_count(name);
    int needs_context = !strstr(without_context, name);
    int is_lost = needs_context && fake.fail_code >= LOST && fake.fail_count > fake.fail_after;
    if (needs_context && !fake_depth) return fake_violation(BAD_CONTEXT, "cu%s without a context", name);
    if (fake.capturing && fake_capture_mode != RELAXED && strstr(unsafe, name))
        return fake_violation(CAPTURING, "cu%s while a graph is captured", name);
    if (!is_lost && (strcmp(fake.failing, name) || fake.fail_count++ < fake.fail_after)) return OK;
    return fake.fail_code;
}

EXPORT int fake_live(int what) { /* 0: pinned blocks, 1: streams besides the default ones, 2: events, 3: registered
                                    memory, 4: what is open of other processes */
    int count = 0;
    pthread_mutex_lock(&fake.lock);
    for (range *r = fake.ranges; r; r = r->next)
        count += what == 4 ? r->opened : what == (r->registered ? 3 : 0) && r->device < 0;
    if (what == 1)
        for (stream *s = fake.streams; s; s = s->next) count += !s->destroyed && s != fake.defaults[s->device];
    if (what == 2)
        for (event *e = fake.events; e; e = e->next) count += !e->destroyed;
    pthread_mutex_unlock(&fake.lock);
    return count;
}

/* ---- memory ---- */

range *fake_range_of(uintptr_t at, size_t bytes) {
    for (range *r = fake.ranges; r; r = r->next)
        if (at >= r->begin && at + bytes <= r->begin + r->bytes) return r;
    return NULL;
}

/* The streams' view of memory on a device (-1: on the host), or NULL. */
char *fake_view_of(uintptr_t at, size_t bytes, int device) {
    range *r = fake_range_of(at, bytes);
    return r && r->device == device ? r->view + (at - r->begin) : NULL;
}

static int overlaps(const char *at, size_t bytes, const char *begin, size_t length) {
    return at && at < begin + length && begin < at + bytes;
}

int fake_in_use(const char *view, size_t bytes) {
    for (stream *s = fake.streams; s; s = s->next)
        for (command *c = s->head; c; c = c->next)
            if (overlaps(c->to, c->bytes, view, bytes) || overlaps(c->from, c->bytes, view, bytes)) return 1;
    return 0;
}

range *fake_add_range(uintptr_t begin, size_t bytes, char *view, int device) {
    range *r = calloc(1, sizeof *r);
    *r = (range){.next = fake.ranges, .begin = begin, .bytes = bytes, .view = view, .device = device, .file = -1};
    r->number = ++fake.allocations;
    return fake.ranges = r;
}

range *fake_take_range(uintptr_t begin) {
    for (range **at = &fake.ranges; *at; at = &(*at)->next) {
        range *r = *at;
        if (r->begin != begin) continue;
        *at = r->next;
        return r;
    }
    return NULL;
}

/* visible: the program may touch it at its address, as a double of a CUDA tensor must. */
EXPORT uintptr_t fake_alloc(int device, size_t bytes, int visible) {
    int file = memfd_create("device", 0);
    size_t length = (bytes / 4096 + 1) * 4096;
    if (file < 0 || ftruncate(file, (off_t)length)) abort();
    char *view = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    char *given = visible ? view : mmap(NULL, length, PROT_NONE, MAP_SHARED, file, 0);
    pthread_mutex_lock(&fake.lock);
    fake_add_range((uintptr_t)given, length, view, device)->file = file;
    pthread_mutex_unlock(&fake.lock);
    return (uintptr_t)given;
}

EXPORT uintptr_t fake_view(uintptr_t at) {
    pthread_mutex_lock(&fake.lock);
    range *r = fake_range_of(at, 1);
    uintptr_t view = r && r->device >= 0 ? (uintptr_t)r->view + (at - r->begin) : 0;
    pthread_mutex_unlock(&fake.lock);
    return view;
}

EXPORT void fake_free(uintptr_t at) {
    pthread_mutex_lock(&fake.lock);
    range *r = fake_take_range(at);
    if (!r) fake_violation(0, "device memory is freed that is none");
    else if (fake_in_use(r->view, r->bytes)) fake_violation(0, "device memory is freed while a stream will use it");
    if (r) {
        munmap(r->view, r->bytes);
        close(r->file);
        if ((uintptr_t)r->view != at) munmap((void *)at, r->bytes);
    }
    free(r);
    pthread_mutex_unlock(&fake.lock);
}

/* ---- streams ---- */

static void pause_us(unsigned us) {
    struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};
    if (us) nanosleep(&t, NULL);
}

static void perform(command *c) {
    switch (c->kind) {
    case COPY: memmove(c->to, c->from, c->bytes); break;
    case KERNEL: memcpy(c->to, c->owned, c->bytes); break;
    }
}

static void *work(void *argument) {
    stream *s = argument;
    for (int kind = COPY; kind != STOP;) {
        pthread_mutex_lock(&fake.lock);
        while (!s->head) pthread_cond_wait(&fake.changed, &fake.lock);
        command *c = s->head;
        s->dice = s->dice * 1103515245u + 12345u;
        unsigned wait_us = (s->dice >> 8) % MOST_DELAY_US;
        while (c->kind == WAIT && c->event->completed < c->version) pthread_cond_wait(&fake.changed, &fake.lock);
        pthread_mutex_unlock(&fake.lock);
        pause_us(c->kind == COPY ? wait_us : c->delay_us);
        perform(c);
        pthread_mutex_lock(&fake.lock);
        if (c->kind == RECORD && c->event->completed < c->version) c->event->completed = c->version;
        s->head = c->next;
        if (!s->head) s->tail = NULL;
        pthread_cond_broadcast(&fake.changed);
        pthread_mutex_unlock(&fake.lock);
        kind = c->kind;
        free(c->owned);
        free(c);
    }
    return NULL;
}

stream *fake_new_stream(int device) {
    stream *s = calloc(1, sizeof *s);
    s->device = device;
    s->dice = (unsigned)getpid() * 31 + (unsigned)(uintptr_t)s;
    s->next = fake.streams;
    fake.streams = s;
    if (pthread_create(&s->thread, NULL, work, s)) abort();
    return s;
}

void fake_queue(stream *s, command what) {
    command *c = malloc(sizeof *c);
    *c = what;
    c->next = NULL;
    if (s->tail) s->tail->next = c;
    else s->head = c;
    s->tail = c;
    pthread_cond_broadcast(&fake.changed);
}

/* Under the lock: the stream that a handle means, for a call in the current context. */
int fake_find_stream(void *handle, stream **found, const char *call) {
    int device = fake_stack[fake_depth - 1];
    *found = handle;
    if (!handle) {
        if (!fake.defaults[device]) fake.defaults[device] = fake_new_stream(device);
        *found = fake.defaults[device];
    }
    if ((*found)->destroyed) return fake_violation(BAD_HANDLE, "%s on a stream that was destroyed", call);
    if ((*found)->captured && strcmp(call, "cuStreamIsCapturing"))
        return fake_violation(CAPTURING, "%s on a stream that is captured", call);
    if ((*found)->device != device) return fake_violation(BAD_HANDLE, "%s on a stream of another device", call);
    return OK;
}

EXPORT void *fake_stream(int device) {
    pthread_mutex_lock(&fake.lock);
    stream *s = fake_new_stream(device);
    pthread_mutex_unlock(&fake.lock);
    return s;
}

/* Queues a kernel that takes `delay_us` and then writes `bytes` copied from `from` now. */
EXPORT void fake_kernel(void *handle, int device, unsigned delay_us, uintptr_t to, const void *from, size_t bytes) {
    pthread_mutex_lock(&fake.lock);
    fake_stack[fake_depth++] = device;
    stream *s;
    char *view = fake_view_of(to, bytes, device), *owned = malloc(bytes + 1);
    if (fake_find_stream(handle, &s, "a kernel") || !view) abort();
    memcpy(owned, from, bytes);
    fake_queue(s, (command){.kind = KERNEL, .to = view, .bytes = bytes, .owned = owned, .delay_us = delay_us});
    fake_depth--;
    pthread_mutex_unlock(&fake.lock);
}

/* Waits until a stream has nothing left to do, as a test does that reads what a kernel wrote. */
EXPORT void fake_drain(void *handle) {
    pthread_mutex_lock(&fake.lock);
    stream *s = handle ? handle : fake.defaults[0];
    while (s && s->head) pthread_cond_wait(&fake.changed, &fake.lock);
    pthread_mutex_unlock(&fake.lock);
}

EXPORT void fake_synchronize(void *handle) { /* the same of the program's */
    pthread_mutex_lock(&fake.lock);
    fake_failing("StreamSynchronize");
    pthread_mutex_unlock(&fake.lock);
    fake_drain(handle);
}

EXPORT void fake_drain_all(void) {
    pthread_mutex_lock(&fake.lock);
    for (stream *s = fake.streams; s; s = s->next)
        while (s->head) pthread_cond_wait(&fake.changed, &fake.lock);
    pthread_mutex_unlock(&fake.lock);
}

int fake_stop_stream(stream *s) {
    pthread_mutex_lock(&fake.lock);
    int code = s->destroyed ? fake_violation(BAD_HANDLE, "a stream is destroyed twice") : OK;
    if (s->head) fake_violation(0, "a stream is destroyed with work left to do");
    if (!code) fake_queue(s, (command){.kind = STOP});
    s->destroyed = 1;
    pthread_mutex_unlock(&fake.lock);
    if (!code) pthread_join(s->thread, NULL);
    return code;
}

EXPORT void fake_stream_destroy(void *handle) { fake_stop_stream(handle); }
