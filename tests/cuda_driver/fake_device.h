/* A stand-in for libcuda.so.1: what staging uses of the driver, on threads.
 *
 * As on a GPU, a stream is a queue that is worked off by itself, in order, later than it was filled; streams know of
 * each other through events only. Every command takes a random time, so that whoever does not wait for an event finds
 * old bytes. Device memory is mapped twice: what the driver gives out cannot be touched by the program (unless the test
 * asks for it), what the streams work on is another view of the same pages.
 *
 * It is stricter than the real one: what works there by luck, or is slow there, is an error here and is noted for the
 * test to see (fake_violations). Functions with the prefix fake_ are the test's; a kernel is a pause, then new bytes
 * in device memory.
 */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

typedef unsigned long long address;

enum {
    OK,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    BAD_DEVICE = 101,
    BAD_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    BAD_HANDLE = 400,
    NOT_READY = 600,
    LOST = 700, /* and what comes after it */
    CAPTURING = 900
};
enum { DEVICES = 2, MAX_STACK = 16, MOST_DELAY_US = 50 };
enum { COPY, KERNEL, RECORD, WAIT, STOP };
enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* of a thread, what it may do while others capture a graph */

typedef struct event event;
typedef struct stream stream;
typedef struct range range;
typedef struct command command;

struct event {
    event *next;
    int device, destroyed;
    uint64_t recorded, completed; /* calls of cuEventRecord; those that the stream has come to */
};

struct range { /* memory that somebody has allocated */
    range *next;
    uintptr_t begin;
    size_t bytes;
    char *view;     /* where the streams reach it */
    int device;     /* -1: pinned host memory */
    int registered; /* which was somebody else's before */
    int file;       /* of an allocation on a device, for other processes */
    uint64_t number;
    int opened; /* another process's: so many times */
    int process;
    uintptr_t remote; /* where it is there */
};

struct command {
    command *next;
    int kind;
    char *to;
    const char *from;
    size_t bytes;
    char *owned; /* what a kernel writes */
    event *event;
    uint64_t version;
    unsigned delay_us;
};

struct stream {
    stream *next;
    int device, destroyed, captured;
    command *head, *tail; /* the head is the one under way */
    pthread_t thread;
    unsigned dice;
};

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    event *events;
    stream *streams, *defaults[DEVICES];
    range *ranges;
    int violations, initialised;
    uint64_t allocations;
    char first[256];
    char failing[64];
    int fail_after, fail_code, fail_count;
    int capturing, most_opened; /* some thread captures a graph; so many allocations may be open, 0: any number */
    struct {
        const char *name;
        int count;
    } calls[64]; /* by the part after "cu", as far as there are any */
} fake_state;

extern fake_state fake;
extern int fake_contexts[DEVICES]; /* their addresses are the contexts */
extern __thread int fake_stack[MAX_STACK], fake_depth, fake_capture_mode;

/* All of these under the lock. */
void fake_count(const char *name); /* fake_failing does, too */
int fake_violation(int code, const char *format, ...);
int fake_failing(const char *name);
char *fake_view_of(uintptr_t at, size_t bytes, int device); /* device -1: the host */
uintptr_t fake_alloc(int device, size_t bytes, int visible);
int fake_in_use(const char *view, size_t bytes);
range *fake_add_range(uintptr_t begin, size_t bytes, char *view, int device);
range *fake_range_of(uintptr_t at, size_t bytes);
range *fake_take_range(uintptr_t begin);
stream *fake_new_stream(int device);
void fake_queue(stream *s, command what);
int fake_find_stream(void *handle, stream **found, const char *call);

int fake_stop_stream(stream *s); /* takes the lock */

#endif
