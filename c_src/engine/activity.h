/* What a group of this process is doing and has done, for whoever asks from another thread: plain counters, written
 * under the engine's lock where an operation begins, is joined by the last rank and is complete, whoever waits for it.
 * They are read without the lock, so a reader may see an operation half noted. */
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"

static const char *const mpp_call_names[MPP_CALL_KINDS] = {
#define MPP_KIND(name, text) text,
#include "ops.def"
};

/* From this rank's call to another's. What several operations wait for at a time counts once. */
typedef struct {
    _Atomic int64_t ns;
    int64_t until; /* counted up to there */
} mpp_waiting;

struct mpp_activity {
    mpp_activity *next; /* under the lock of status.c, as `about` and the life of all this */
    char *about;        /* members of a JSON object: its name and its ranks */
    const mpp_group *group;
    _Atomic uint64_t calls[MPP_CALL_KINDS], bytes[MPP_CALL_KINDS], hand_overs[MPP_CALL_KINDS];
    _Atomic int kind, peer;       /* of the last call; peer: a rank or root, -1: none */
    _Atomic uint64_t length;      /* of its data, in bytes */
    _Atomic int64_t begun, ended; /* when it began, and when one was complete last: CLOCK_MONOTONIC, ns */
    _Atomic int under_way;
    _Atomic int64_t busy_since, in_calls; /* since when some were under way, and ns in which some were, before that */
    mpp_waiting waited;                   /* in these, for the last rank */
    int has_missing;
    int64_t looked;
    struct {
        mpp_waiting late;     /* for this rank */
        _Atomic char missing; /* it was waited for at the last look */
    } of_rank[];
};

/* A counter of these: other threads read it, or change it, meanwhile. */
#define MPP_GET(counter) atomic_load_explicit(&(counter), memory_order_relaxed)
#define MPP_SET(counter, value) atomic_store_explicit(&(counter), value, memory_order_relaxed)

/* Of the call that this thread is about to start. A function that calls another one of these is the one that counts. */
void mpp_note(int kind, uint64_t bytes, int peer);

static inline size_t mpp_longest_of(const size_t *values, int count) {
    size_t longest = 0;
    for (int i = 0; i < count; i++)
        if (values[i] > longest) longest = values[i];
    return longest;
}

static inline uint64_t mpp_sum_of(const size_t *values, int count) {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) sum += values[i];
    return sum;
}

/* What mpp_call_details has said of this thread's call. */
uint64_t mpp_called_details(void);
/* Who waits for it has given the core away: asleep, or by a yield that cost a slice of time. Not under the lock. */
void mpp_note_hand_over(mpp_op *op);
/* All under the lock. `came`: when a rank has made this call, once all have. */
void mpp_note_start(mpp_op *op);
/* This thread's call is a message, which has been queued. Under the lock, so that the order is that of the queue. */
void mpp_note_message_order(mpp_group *g, int tag);
void mpp_note_arrival(mpp_op *op, int rank, int64_t came);
void mpp_note_completion(mpp_op *op);
/* Who is missing in the operations that are under way, and have been since the last look. */
void mpp_note_missing(mpp_op *active, int64_t now);
