/* An operation of messages between pairs: what p2p.c shares with exchange.c above it; and of windows. */
#pragma once

#include "cuda/staging.h"
#include "message/message.h"

/* The tag of an exchange that is not to begin yet, which no message has. */
enum { MPP_NO_TAG = -1 };
/* So many bytes are copied at once under the lock. */
enum { MPP_OWN_PART = 1 << 20 };

typedef struct {
    mpp_message message; /* its tag is the operation's */
    mpp_match match;     /* in the state MPP_TO_RECEIVE */
    char *spill;         /* where a message of the wrong length goes, or what is sent; its own, or NULL */
    int lane, posted;    /* posted: a receive that MPI has, whether its message has come or not */
} transfer;

typedef struct message_op {
    mpp_op op;
    int count, tag;
    int compared;                                /* of an exchange with an agreement: that is over */
    int early;                                   /* of an exchange: its blocks may be sent before */
    int *later_tag;                              /* where the tag of the exchange that follows goes; may be NULL */
    int unmatched, unsent;                       /* receives still to be matched, sends still to be begun */
    struct message_op *later[2];                 /* in group->messages_left, until all is matched, and begun */
    void (*begin_messages)(struct message_op *); /* of an exchange that may have needed none; may be NULL */
    transfer *transfers;
    const char *own; /* of an exchange: the block from this rank to itself, where it goes, and what is left of it */
    char *own_to;
    size_t own_left;
} message_op;

/* ---- p2p.c: all but the first and the last under the lock where there is no staging ---- */

static inline size_t mpp_chunks_of(size_t bytes) { return bytes ? (bytes - 1) / mpp_chunk_limit + 1 : 1; }

message_op *mpp_new_message_op(mpp_group *group, size_t capacity, int tag, uintptr_t staging);
/* `state`: MPP_TO_SEND or MPP_TO_MATCH. */
void mpp_add_message(message_op *m, uintptr_t buffer, size_t bytes, int peer, int state);
void mpp_enter_queues(message_op *m);
/* All transfers are there, with addresses in the device's memory. Not under the lock: memory may have to be pinned. */
void mpp_stage_transfers(message_op *m);

/* windows.c, at the end of a group: -1 while a window is open, or a message under way; else nothing comes any more. */
int mpp_windows_end(mpp_group *group);
