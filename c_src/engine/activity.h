/* What a group of this process is doing and has done, for whoever asks from another thread: plain counters, written
 * on the way of each operation without a lock, so a reader may see an operation half noted. */
#ifndef MPP_ACTIVITY_H
#define MPP_ACTIVITY_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "shim.h"

typedef struct mpp_activity mpp_activity;
struct mpp_activity {
    mpp_activity *next; /* under the lock of status.c, as `about` and the life of all this */
    char *about;        /* members of a JSON object: its name and its ranks */
    int rank, size;
    _Atomic uint64_t calls[MPP_CALL_KINDS], bytes[MPP_CALL_KINDS];
    _Atomic int kind, peer;       /* of the last call; peer: a rank or root, -1: none */
    _Atomic uint64_t length;      /* of its data, in bytes */
    _Atomic int64_t begun, ended; /* when it began, and when the last call came back complete: CLOCK_MONOTONIC, ns */
    _Atomic int inside;           /* threads that are in a call, or poll for an operation */
    _Atomic int64_t in_calls;     /* ns that threads have spent there */
    _Atomic int64_t waited;       /* of these, waiting for ranks that had not come */
    _Atomic int64_t *late;        /* of each rank: ns that this one has waited for it */
    _Atomic char *missing;        /* of each rank: whether it was waited for at the last look */
    _Atomic int has_missing;
    const _Atomic int64_t *active; /* the group's */
};

/* The call that this thread is about to start. A function that calls another one of these is the one that counts. */
typedef struct {
    int kind, peer;
    uint64_t bytes;
} mpp_note_of_call;
extern _Thread_local mpp_note_of_call mpp_noted;

static inline void mpp_note(int kind, uint64_t bytes, int peer) {
    if (!mpp_noted.kind) mpp_noted = (mpp_note_of_call){kind, peer, bytes};
}

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

/* The time at which the call began. */
int64_t mpp_activity_begin(mpp_activity *a);
void mpp_activity_end(mpp_activity *a, int64_t begun, int is_complete);

#endif
