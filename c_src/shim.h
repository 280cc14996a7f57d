/* What Python calls (through cffi). Addresses travel as uintptr_t, MPI handles as int64_t.
 *
 * Thread safety: every function below may be called from any thread; those that start or advance an
 * operation take the engine's lock. None of them touches a Python object.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "arith/reduce.h"

enum mpp_state { MPP_PENDING = 0, MPP_DONE = 1, MPP_FAILED = 2, MPP_ABORTED = 3 };

/* How long a synchronous call polls in C at a time; between two slices Python handles signals. */
enum { MPP_SLICE_NS = 50000000 };

/* Added to the state of a complete operation that mpp_next_completed reports, or has reported. */
enum { MPP_REPORTED = 4 };

/* Why an operation failed: an MPI error code, a CUDA one, or one of these. After MPP_FAILURE_MEMORY mpp_failure_of
 * says in `first` whether the call has taken its place in the order all the same, so that the group can go on; after
 * one of MPI's or CUDA's, on which other rank that was, plus one. */
enum mpp_failure {
    MPP_FAILURE_MPI = 1,
    MPP_FAILURE_MEMORY = 2,
    MPP_FAILURE_LENGTH = 3,
    MPP_FAILURE_CANCELLED = 4,
    MPP_FAILURE_MISMATCH = 5,
    MPP_FAILURE_CUDA = 6
};

/* The calls that the ranks of a group compare; those of messages and windows are only counted. */
enum mpp_call_kind {
#define MPP_KIND(name, ...) MPP_##name,
#include "ops.def"
    MPP_CALL_KINDS
};

/* Where a call's data is. Compared is whether MPI moves it and it is on a CUDA device; the last four are staged there,
 * in memory of the rank's own or in registered slots; of these the last two could be reduced, or moved where they lie,
 * and the last one be read where it is. */
enum mpp_place { MPP_ON_HOST, MPP_ON_DEVICE, MPP_STAGED, MPP_ON_BUS, MPP_TO_REDUCE, MPP_BETWEEN_DEVICES };

/* What a rank called, for the error text of a mismatch. */
typedef struct mpp_call {
    int32_t kind;      /* enum mpp_call_kind */
    int32_t dtype, op; /* of a reduction */
    int32_t root;      /* -1: none */
    int16_t has_premul, has_lengths;
    int32_t place; /* of its data: enum mpp_place */
    int64_t divisor;
    double premul;
    uint64_t bytes;  /* of the tensor, or of the longest block in a list; of an exchange what goes to others */
    uint64_t own;    /* of the rank's own block in a list; an exchange: see signatures.c */
    uint64_t chunks; /* of shared memory that the call takes */
} mpp_call;

/* library */
const char *mpp_load(const char *path); /* NULL, or why not */
int mpp_set_constant(const char *name, int index, int64_t value);
void mpp_own_mpi(int own);
void mpp_note_fork(void); /* this process is a child of one in which MPI runs */
int mpp_finalize_at_exit(void);
void mpp_end_job_on_failure(int rank);
uintptr_t mpp_entries_address(void); /* entries.h: for the other extension */

/* engine */
int mpp_engine_start(void);
void mpp_engine_stop(void);
void mpp_set_chunk_limit(size_t bytes);
size_t mpp_get_chunk_limit(void);
int64_t mpp_active_count(void);
void mpp_tend_mpi(int more);
void mpp_lock(void); /* for MPI calls from elsewhere, where MPI wants one at a time */
void mpp_unlock(void);
void mpp_end_job(int status);   /* does not come back */
enum { MPP_MOST_REPORTS = 64 }; /* of one call, as each lets other threads of Python take the GIL */
/* Waits until an operation is complete whose end is not to wait, or so many others are, or the time is up; takes up to
 * `most` of those that are complete, with their states; how many. */
int mpp_next_completed(uintptr_t *ops, int *states, int most, int64_t timeout_ns);

/* A thread that ends the process when a call of MPI's does not come back: deadline.c */
int mpp_deadline(const char *word, double word_after, const char *last_word, double end_after, int code);
void mpp_deadline_over(void);

/* groups */

/* The largest tags that MPI allows are our own: most of them for exchanges, the last ones for windows. A user's lie
 * below. */
enum { MPP_OWN_TAGS = 1024, MPP_WINDOW_TAGS = 2 };

uintptr_t mpp_map(int descriptor, size_t bytes); /* -1: of this process's own; 0: errno says why not */
void mpp_unmap(uintptr_t address, size_t bytes);
uintptr_t mpp_group_new(int64_t communicator, int rank, int size, int first_tag, int tag_count, int yield_early);
void mpp_group_tags_from(uintptr_t group, int tag); /* on a communicator that it shares; 0 is this one there */
/* Between nodes: in the computing type; with the same bits wherever the ranks are; 16-bit floats as they are. */
enum { MPP_SUMS_USUAL, MPP_SUMS_REPRODUCIBLE, MPP_SUMS_NARROW };
int mpp_group_attach(uintptr_t group, uintptr_t segment, int slots, size_t slot_bytes, const int *node_of, int sums);
/* Limits of a group, set just after it was attached; without one all calls go the first of two ways. Of a kind (enum
 * mpp_call_kind; `bytes` of all blocks, and of sums, which may be longer than their elements): MPI's collectives move
 * the data of longer calls (-1: of all), and the segment serves to compare these. MPP_ONE_PHASE: on a node all_reduce
 * and reduce of longer tensors go in two phases. MPP_BUS: there CUDA tensors that are longer, and only moved, are read
 * by the others from their devices. And up to which length data is piggybacked on the comparison between nodes. */
enum mpp_limit { MPP_ONE_PHASE = MPP_CALL_KINDS, MPP_BUS, MPP_LIMITS };
void mpp_group_limit(uintptr_t group, int limit, int64_t bytes);
int64_t mpp_group_piggybacks(uintptr_t group, int kind);
size_t mpp_segment_size(int ranks, int here, int slots, size_t slot_bytes);
/* Of a group on one node: what the segment has behind that, and not before a CUDA tensor comes, in memory; `length` is
 * that of all together. */
size_t mpp_wide_bytes(int ranks, int slots, size_t slot_bytes);
void mpp_group_widen(uintptr_t group, size_t length);
size_t mpp_group_wide(uintptr_t group);                              /* so much of it is no memory yet */
void mpp_group_bytes(uintptr_t group, size_t *taken, size_t *later); /* while no operation is made */
int64_t mpp_group_active(uintptr_t group);
int mpp_group_holders(uintptr_t group); /* Python's group, and the operations that Python has not released */
void mpp_group_abort(uintptr_t group);
void mpp_group_fail(uintptr_t group, int error); /* the same, and the others are told of an error of CUDA's */
void mpp_group_gave_up(uintptr_t group);         /* a call; what it was to send may change from now on */
int mpp_group_close(uintptr_t group);
void mpp_group_release(uintptr_t group);

/* CUDA. Where an operation's buffers are on a device, its `staging` is what mpp_stage made on the same thread just
 * before, else 0. mpp_stage takes the number of the device and the stream whose queued work comes before the
 * operation; it returns 0 and a message if the device cannot be used. The operation takes the staging over. `path` says
 * who may be given the device's addresses: nobody, MPI (not of operations that reduce), or the node's other ranks. */
int mpp_cuda_load(const char *library, char *message, int length);
void mpp_cuda_error_text(int code, char *text, int length);
enum mpp_path { MPP_PATH_STAGED, MPP_PATH_DIRECT, MPP_PATH_PEERS };
uintptr_t mpp_stage(int device, uintptr_t stream, int path, int *error);
uintptr_t mpp_own_stream(int device);                               /* a new one, for good; 0: it cannot be had */
int mpp_cuda_registers(int device, uintptr_t memory, size_t bytes); /* a test; a CUresult */
void mpp_set_stage_bytes(size_t bytes);
size_t mpp_get_stage_bytes(void);
void mpp_cuda_release(void);

/* Of a reduction between devices: where the others' elements of this rank's block come; and of a sum, how many each
 * rank reduces, and where what has become of them is to be. */
typedef struct {
    size_t elements;
    uintptr_t received, result;
} mpp_block;

/* Of one by MPI what its first exchange sends and receives, and what all ranks must call alike: `count` elements, of
 * the longest block if there are `counts`. The second one's tag goes to `later_tag` before the first is complete. */
typedef struct {
    const uintptr_t *send, *recv;
    const size_t *send_bytes, *recv_bytes, *counts;
    size_t count;
    int kind, *later_tag;
} mpp_exchange_operands;

/* What an operation takes. Sizes are elements where it reduces, else bytes. */
typedef struct mpp_operands {
    uintptr_t of;                      /* the group, or a window */
    uintptr_t input, output;           /* a tensor each, or the same */
    const uintptr_t *inputs, *outputs; /* in place of either, and of its size, a block for each rank; else NULL */
    const size_t *input_sizes, *output_sizes; /* of these */
    size_t count;                             /* of the tensor */
    size_t offset;                            /* in another rank's tensor, in bytes */
    int root, peer;                           /* root: -1: none; peer: -1: anyone */
    int tag;                                  /* or which kind of signal; of an exchange -1 */
    int error;                                /* in place of a call (mpp_no_memory) */
    int flat;                                 /* on all ranks blocks lie one behind the other in one tensor */
    const mpp_reduction *how;                 /* NULL: it moves */
    const void *first;                        /* of a first half: what it takes besides; else NULL */
    uintptr_t staging;
    int64_t wait_ns;
} mpp_operands;

/* Operations. Each starts at once, in program order, polls for at most `wait_ns`, and returns 0 if it is
 * complete (and forgotten), else an operation to be waited for and, once not pending, released. A negative
 * `wait_ns` polls once and returns an operation in any case, for what can be asked of it. */
#define MPP_OPERATION(name) uintptr_t mpp_##name(const mpp_operands *o);
#include "ops.def"
int mpp_group_reach(uintptr_t group); /* enum mpp_place: how others' CUDA tensors come, so far as this rank knows */
int mpp_is_left_to_reduce(uintptr_t first);
uintptr_t mpp_second_half(uintptr_t first, uintptr_t staging);

/* Windows. A window is the memory that `number` stands for on all ranks; what others send to it comes from the time
 * that somebody listens on. Signals of different kinds are counted apart: 0 and 1. */
size_t mpp_counters_size(int size);
uintptr_t mpp_window_new(uintptr_t group, int64_t number, uintptr_t memory, size_t bytes, uintptr_t counters);
void mpp_window_reach(uintptr_t window, int rank, uintptr_t memory, uintptr_t counters);
int mpp_window_listen(uintptr_t window);
int mpp_window_close(uintptr_t window);
void mpp_window_release(uintptr_t window);
/* Whether what is sent to windows of the operation's group can no longer be received, whichever it is for. */
int mpp_windows_failed(uintptr_t op);

/* Of an operation in two halves the second one that this thread has begun last, once; 0: none since. */
uintptr_t mpp_unclaimed(void);

/* Asynchronous calls that move their data themselves: inline_progress.c. */
enum mpp_inline_mode { MPP_INLINE_NEVER = 0, MPP_INLINE_AUTO = 1, MPP_INLINE_ALWAYS = 2 };

/* Who moves the data of this process's asynchronous calls; and what its cores have been used for, zero at first. */
typedef struct mpp_inline_rule {
    int mode;               /* enum mpp_inline_mode */
    double share;           /* of the node's cores, this rank's: they divided by its ranks */
    int64_t at, used, idle; /* when last looked at, and what had been counted by then, in ns */
    int taken;              /* no core is left for a background thread */
} mpp_inline_rule;

/* Each in ns; asked only when a window is over, but for `now`. */
typedef struct mpp_inline_clocks {
    int64_t (*now)(void);
    int64_t (*process)(void), (*background)(void); /* CPU time of all threads, and of the progress thread alone */
    int64_t (*idle)(void);                         /* of all cores; -1: not known */
} mpp_inline_clocks;

/* A group's experience; zero at first. */
typedef struct mpp_inline {
    unsigned misses, skip; /* tries in a row that were given up; calls until the next one */
} mpp_inline;

void mpp_set_inline(int mode, double share);
void mpp_inline_note(mpp_inline *group, int is_complete);
int64_t mpp_inline_ns(mpp_inline_rule *rule, mpp_inline *group, size_t bytes, const mpp_inline_clocks *clocks);

/* Status: what a process tells of itself, status.c. */
int mpp_group_describe(uintptr_t group, const char *about);
void mpp_group_hide(uintptr_t group);
int mpp_group_statistics(uintptr_t group, uint64_t *figures, int64_t *late);
int mpp_status_start(int listening, const char *about, int stacks, int stack_signal);
void mpp_status_stop(void);
enum { MPP_REQUEST = 256 };
uint64_t mpp_status_wanted(char *request);
void mpp_status_give(uint64_t number, const char *text);

/* The last calls of this process, by number from 1 on: when this rank came, when the last rank did, and which, when it
 * was complete, and when it was asked for. CLOCK_MONOTONIC in ns; 0: not yet, or not to be seen here. What follows is
 * for the timeline: timeline/rows.py reads this from a file, and `kind` is one of its numbers, 0: none. */
typedef struct mpp_record {
    uint64_t number;
    int64_t begun, last_came, complete, asked;
    uint64_t sequence, bytes;
    int kind, last, peer, tag; /* ranks of the group; peer: -1: none */
} mpp_record;
void mpp_keep_records(uint64_t count);
/* From now on in this memory, for ever: a power of two of them. Returns the number of the next call; 0: no memory. */
uint64_t mpp_keep_records_at(uintptr_t where, uint64_t places);
/* This thread begins a call now, whose number it returns; what it starts until it returns is that call's. */
uint64_t mpp_call_begins(int64_t now);
void mpp_call_returns(int is_complete);
/* What this thread's call is, and whether it returns when it is complete. */
void mpp_call_is(int kind, uint64_t sequence, int is_awaited);
void mpp_call_asked_for(uint64_t number);
/* This thread's call has, besides what ranks always compare, a hash that must be the same on all ranks. */
void mpp_call_details(uint64_t details);
int mpp_record_of(uint64_t number, mpp_record *record); /* 0: it is not kept any more */

/* waiting */
int mpp_wait(uintptr_t op, int64_t wait_ns);
int mpp_state_of(uintptr_t op);
int mpp_notify_on_completion(uintptr_t op, int wake);
void mpp_wake_on_completion(uintptr_t op);
void mpp_cancel(uintptr_t op);
int mpp_failure_of(uintptr_t op, int *mpi_error, int64_t *first, int64_t *second);
void mpp_disagreement(uintptr_t op, mpp_call *mine, mpp_call *theirs);
int mpp_arrived(uintptr_t op, int rank);
int mpp_source_of(uintptr_t op);
void mpp_release(uintptr_t op);
