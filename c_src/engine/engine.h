/* The engine: one lock, one list of active operations, and whoever waits advances all of them.
 *
 * Rules that keep it right:
 *  - every MPI call of this library is made under the lock, so any thread level from SERIALIZED up will do;
 *  - an operation is started (its first MPI call made, or its place in the group's shared-memory queue
 *    taken) before the starting function returns, so program order is start order on every rank;
 *  - `step` never blocks: it does what can be done now and says whether the operation is complete;
 *  - an operation's buffers may be touched until `step` has returned something other than MPP_PENDING.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "mpi/mpi_api.h"
#include "shim.h"

typedef struct mpp_op mpp_op;
typedef struct mpp_group mpp_group;
typedef struct mpp_bell mpp_bell;         /* bell.h */
typedef struct mpp_activity mpp_activity; /* activity.h */
typedef struct mpp_channel mpp_channel;   /* shared memory of a group, shm/shm.h */
typedef struct mpp_listener mpp_listener; /* receives messages for windows, p2p/windows.c */
typedef struct mpp_staging mpp_staging;   /* between an operation and device memory, cuda/staging.h */

/* The first member of what an operation owns and gives back with itself. */
typedef struct mpp_owned mpp_owned;
struct mpp_owned {
    void (*release)(mpp_owned *);
    int (*enter)(mpp_owned *); /* for a thread that is going to wait; whether `leave` must follow */
    void (*leave)(void);
};

/* Whether all that an operation waits for is still to be begun by another rank: unknown or not, yes, or yes by one of
 * this node, who rings for it (bell.h). Between nodes nobody does, and who sleeps must look for himself. */
enum { MPP_BUSY, MPP_IDLE, MPP_RINGS };

struct mpp_op {
    mpp_op *next; /* in the list of active operations, later in that of completed ones */
    mpp_group *group;
    mpp_op *agreement;                  /* its own: compares the calls before this one begins; may be NULL */
    mpp_staging *staging;               /* NULL where the buffers are in host memory; begins with an mpp_owned */
    int (*step)(mpp_op *);              /* under the lock */
    void (*cancel)(mpp_op *);           /* under the lock; NULL where an operation cannot be taken back */
    int (*arrived)(mpp_op *, int rank); /* NULL where an operation cannot tell */
    void (*discard)(mpp_op *);          /* frees what the operation owns besides these; may be NULL */
    _Atomic int state;
    size_t moves; /* bytes that an asynchronous call may move before it returns; 0: it leaves all to the background */
    int spins;    /* how often whoever waits looks before it yields the core */
    int idle;     /* one of these; set by step */
    int in_short; /* what it has under way goes in short messages, or none: it loses little by a pause */
    int counts;   /* among the group's active operations */
    int ours;     /* a part of the engine's own memory, never Python's */
    int holds;    /* keeps the group: from the moment that Python has the operation's handle */
    int notify;   /* report completion through mpp_next_completed */
    int wake;     /* and wake the thread that asks; else the report waits until that thread wakes up by itself */
    int queued;   /* stands in the list of completed operations */
    int noted_as; /* its kind among the group's calls, activity.h; 0: it is none of them */
    int failure;
    int mpi_error;
    int source;
    int64_t begun;   /* when it was called */
    uint64_t record; /* that call's number, shim.h; 0: none */
    int64_t detail[2];
};

/* What one thread sees while it waits for an operation. */
typedef struct {
    int all_idle, advanced; /* of the last poll; since the last look at the clock: chunks and messages moved */
    int in_mpi;             /* since then: what others have under way in MPI moved */
    int64_t mpi_at;         /* when that was last seen */
    unsigned moves;
    int64_t since; /* when the operation's group has moved something last */
    int64_t quiet; /* when any has */
} mpp_stall;

enum { MPP_RECEIVES, MPP_SENDS };

struct mpp_group {
    mpi_handle comm;
    int rank, size;
    /* Tags of exchanges, above every tag a user may give. Above them are those of windows, then those of internode/. */
    int first_tag, tag_count;
    int tags_from; /* added to all of them: other groups on the communicator have others */
    unsigned sequence;
    int yield_early;
    mpp_inline inline_progress;
    int spins; /* for an operation of the group, unless it knows better */
    _Atomic int aborted;
    _Atomic int holders;          /* Python's group, and operations that Python knows */
    void (*release)(mpp_group *); /* by the last of them */
    _Atomic int64_t active;       /* operations that are made and not complete; from MPP_CLOSED on: none will be */
    _Atomic unsigned moves;       /* counts, under the lock, what this rank has moved: pieces, steps of messages */
    /* Where the ranks of a node share memory; else NULL. */
    mpp_bell *bell;             /* this rank's */
    _Atomic int *sleepers;      /* ranks of the node that sleep */
    void (*await)(mpp_group *); /* under the lock: puts into the bell what the next operation waits for */
    mpp_bell *(*bell_of)(const mpp_group *, int rank); /* NULL: that rank is on another node */
    void (*tell)(mpp_group *, int failure, int code);  /* the others, what keeps this rank from going on */
    int listens;                                       /* in the engine's list of those whose bell is asleep */
    mpp_group *also_listens;
    mpp_channel *channel; /* NULL where not all ranks of a node share memory */
    /* Operations with messages still to be matched, and to be sent, in program order. */
    struct message_op *messages_left[2];
    uint64_t messages;              /* so many sends and receives have been queued */
    struct mpi_collective *issuing; /* collectives with calls still to make, in program order */
    struct mpp_window *windows;
    mpp_listener *listener; /* NULL until a window needs one */
    mpp_activity *activity; /* NULL where nobody counts */
};

/* Lists, which are linked by a member: the place behind the last one; and whether one was there, which it is no more.
 */
#define MPP_END_OF(first, link)                                                                                        \
    ({                                                                                                                 \
        __typeof__(first) *at_ = &(first);                                                                             \
        while (*at_) at_ = &(*at_)->link;                                                                              \
        at_;                                                                                                           \
    })
#define MPP_TAKE_OUT(first, link, one)                                                                                 \
    ({                                                                                                                 \
        __typeof__(first) *at_ = &(first);                                                                             \
        while (*at_ && *at_ != (one)) at_ = &(*at_)->link;                                                             \
        int found_ = *at_ != NULL;                                                                                     \
        if (found_) *at_ = (*at_)->link;                                                                               \
        found_;                                                                                                        \
    })

extern size_t mpp_chunk_limit;

/* With a core for every rank, spinning for about 20 us saves the 2 us of a yield that finds nobody to run: hundreds of
 * looks at memory, but tens at a network, which are some system calls each. With fewer cores than ranks every spin
 * takes the core from the rank that is waited for. */
enum { MPP_SPINS_CROWDED = 4, MPP_SPINS_NETWORK = 20, MPP_SPINS_MEMORY = 400 };

/* Set in a process forked from one of MPI's: nothing here may be locked, begun or advanced there. Its parent's threads
 * may have held the lock, and MPI would take what it says for the parent's word. Python refuses every call; this is for
 * what nobody calls, as destructors. */
extern _Atomic int mpp_forked;
static inline int mpp_in_child(void) { return atomic_load_explicit(&mpp_forked, memory_order_relaxed); }

#define MPP_CLOSED ((int64_t)1 << 62)
static inline int mpp_is_closed(const mpp_group *group) {
    return atomic_load(&group->active) >= MPP_CLOSED || mpp_in_child();
}

/* Both return what step should return. */
int mpp_fail(mpp_op *op, int failure, int mpi_error);
int mpp_test(mpp_op *op, mpi_handle *request); /* MPP_DONE: MPI is done with the request */

/* Takes the staging over, also where it returns NULL: no memory, or the group is closed. */
void *mpp_new_op(size_t size, mpp_group *group, int (*step)(mpp_op *), uintptr_t staging);
void mpp_discard(mpp_op *op);
void mpp_no_longer_active(mpp_op *op);
int mpp_is_shared(const mpp_op *op); /* by all that could not be made: nobody's to free */
void mpp_group_unref(mpp_group *group);
void mpp_cancel_all(mpp_group *group);
uintptr_t mpp_start(mpp_op *op, int64_t wait_ns);
/* Of an operation that Python itself has begun: what mpp_start has returned, which it returns. */
uintptr_t mpp_not_owned_yet(uintptr_t op);
/* How long the thread that waits for `op` sleeps rather than yields; 0: not at all. */
int64_t mpp_pause_ns(const mpp_op *op, mpp_stall *stall, int64_t now);
void mpp_time_op(mpp_op *op); /* `begun` and `record`: those of the call that this thread is in */
/* Under the lock: starts an operation that nobody gets the handle of, and that is not the engine's to free. */
void mpp_begin(mpp_op *op);
/* `in_order`: the call takes its place in the order all the same. */
uintptr_t mpp_out_of_memory(const mpp_group *group, int in_order);
