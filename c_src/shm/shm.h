/* What the shared-memory protocol (protocol.c) and the collectives on it (collectives/) share. */
#pragma once

#include <string.h>

#include "cuda/staging.h"
#include "engine/activity.h"
#include "engine/bell.h"
#include "engine/engine.h"
#include "shm/topology.h"
#include "shm/writing.h"

enum { MAX_RING = 7 };

/* What the ranks of a part of the group call, as far as it is known. */
typedef struct {
    uint64_t number;       /* of the call's first chunk */
    uint64_t balance;      /* of an exchange: the XOR of its ranks' hashes */
    uint64_t most;         /* chunks that the longest call takes */
    int32_t mismatch;      /* the two calls below do not agree */
    int32_t rank[2];       /* the ranks that made them */
    int32_t last;          /* the rank that came last */
    uint64_t signature[2]; /* of each */
    int64_t came;          /* when `last` did, by this node's clock; in a message how long ago that was, in ns */
    mpp_call call[2];
} mpp_call_summary;

typedef struct {
    _Atomic uint64_t in;
    uint64_t signature[MAX_RING]; /* of the call in each slot; in the cache line that a reader needs anyway */
    _Atomic uint64_t reduced;
    int64_t came[MAX_RING]; /* when the call in each slot was made, by the node's clock */
    _Atomic uint64_t out;
    char pad3[CACHE_LINE - sizeof(uint64_t)];
    mpp_call call[MAX_RING]; /* what the signature stands for; the others hardly ever read it */
    _Atomic uint64_t agreed; /* of the first rank on a node: calls that were compared with the other nodes' */
    _Atomic int64_t failure; /* what keeps this rank from going on: enum mpp_failure, and its code in the lower half */
    _Atomic int is_broken;   /* of the first rank: there is a rank here with a failure */
    _Atomic int sleepers;    /* of the same: ranks here that sleep */
    _Atomic int has_left;    /* this rank has given up an operation; what others read of its devices may have changed */
    char pad4[CACHE_LINE - 2 * sizeof(uint64_t) - 3 * sizeof(int)];
    mpp_bell bell;
    mpp_call_summary summary; /* of all nodes, from the last comparison */
} rank_counters;

typedef struct shm_op shm_op;
typedef struct mpp_internode_state mpp_internode_state; /* internode/internode.h */

/* How an operation's data gets to other nodes. */
typedef struct {
    /* piggybacked on the agreement, whose messages carry the data of a part of the nodes: a span of `payload` bytes */
    void (*pack)(shm_op *, char *payload);
    void (*span)(const shm_op *, int first_node, int end_node, size_t *offset, size_t *length);
    void (*merge)(shm_op *, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first);
    void (*unpack)(shm_op *, char *payload);
    /* chunk by chunk, in one or two phases; may be NULL */
    void (*first_phase)(shm_op *, uint64_t chunk);
    void (*second_phase)(shm_op *, uint64_t chunk);
} mpp_route;

/* The functions that reach the other nodes. They are in internode/, the layer above. */
typedef struct {
    /* Under the lock. One step of the agreement, once all ranks of this node have called: the summary of all nodes when
     * they agree or there is a mismatch, else NULL. For the first rank of the node. */
    const mpp_call_summary *(*agree)(shm_op *);
    /* Under the lock, after a mismatch, by every rank: whether nothing of what exchanges have sent early is left. */
    int (*drain)(shm_op *);
    /* Starts a chunk that all ranks here have written; moves those that were started, and says whether any is complete,
     * which `reduced` counts. */
    void (*start)(shm_op *, uint64_t chunk);
    int (*poll)(shm_op *);
    /* Drops what has not begun; whether MPI is done with all the rest. */
    int (*is_idle)(shm_op *);
    void (*count_bytes)(const mpp_channel *, size_t ranks, size_t *taken, size_t *later);
    void (*free)(mpp_internode_state *);
} mpp_internode;

enum { MPP_FIRST_HALF = 1, MPP_SECOND_HALF };

struct shm_op {
    mpp_op op;
    shm_op *later;
    uint64_t oom_after;              /* calls between this one and `later` that there was no memory for */
    uint64_t first, chunks;          /* my chunk numbers are first ... first + chunks - 1 */
    uint64_t written, reduced, done; /* how many of them this rank has dealt with */
    void (*write)(shm_op *, uint64_t chunk, char *slot);
    void (*read)(shm_op *, uint64_t chunk);
    void (*read_reduced)(shm_op *, uint64_t chunk);  /* the same where it has become a two-phase one; may be NULL */
    void (*find_imbalance)(shm_op *, mpp_channel *); /* of a call whose signatures must add up to nothing */
    uint64_t signature;
    mpp_call call, theirs; /* `theirs`: that of a rank which disagrees */
    int all_came;          /* all ranks have come */
    int asked;             /* levels of the agreement between nodes that have begun; of the first rank of a node */
    int checked;           /* with this signature */
    int two_phase;
    int wait_for; /* the one rank whose `in` matters before reading; -1: all; my own: none */
    int root;
    int place;                 /* enum mpp_place */
    mpp_staging *bus;          /* copies between a device and the slots, bus.c; NULL: the processor does */
    uint64_t loading, storing; /* chunks that it has been told to copy, like `written` and `done` */
    void (*pull)(shm_op *);    /* reads all from others' devices; NULL: this rank wants nothing */
    int between_devices;       /* that is how it goes */
    int half;                  /* of a sum on the devices: which; 0: it is none */
    shm_op *second;            /* of the same: stands behind this one until it is begun */
    size_t block;              /* bytes that each rank reduces, the last ones less */
    uintptr_t received;        /* and where the others' of this rank's come; of a second half: what has become of it */
    int carries; /* of an exchange: its data goes through the slots; known, and alike, once the calls are compared */
    size_t chunk_bytes;
    size_t widening;        /* chunks but for the first are so many times as long, in wide slots; 1: they are not */
    uint64_t batches;       /* how many chunks it takes to carry chunk_bytes of every block: see mpp_ranks_per_slot() */
    const mpp_route *route; /* to other nodes; NULL: none, or none is needed */
    size_t payload;         /* bytes that are piggybacked on the agreement */
    uint64_t started;       /* how many chunks have been started on their way there */
    /* data */
    const char *in;
    char *out;
    int out_lane; /* where they are staged: number of `out`, or of the first in out_list; 0 is that of the input */
    size_t bytes; /* of `in` or `out`, what is cut into chunks */
    mpp_reduction how;
    size_t element;
    const uintptr_t *in_list, *out_list; /* owned copies */
    size_t *lengths;
};

struct mpp_channel {
    rank_counters *counters;
    char *slots;
    int size, rank, ring;
    size_t slot_bytes;
    char *wide;              /* slots for long chunks; NULL: there are none, nor a bus */
    size_t widening, length; /* how much longer than the others they are; of the whole segment */
    cuda_device *registered; /* the segment is, by this device */
    int refused;             /* what the driver said instead: a CUresult */
    struct mpp_peer *peers;  /* whose devices can be read, peers.c; of a registered segment */
    char *recv_buffer;       /* in the segment, behind the slots: blocks of ranks on other nodes */
    size_t recv_buffer_bytes;
    uint64_t next;            /* number of the next chunk to be given to an operation */
    uint64_t all_in, all_out; /* lower bounds of the others' counters, to read fewer foreign cache lines */
    uint64_t all_reduced;
    shm_op *head, *tail;            /* operations in program order; only the head moves data */
    unsigned exchanges;             /* that were compared, and disagreements between nodes: for tags */
    uint64_t oom_first;             /* calls before `head` that there was no memory for */
    uint64_t oom_total;             /* all such calls, also those behind operations */
    shm_op oom_placeholder;         /* takes their places in the order, one after the other */
    mpp_writing writing;            /* to this rank's slots */
    const void **sources;           /* scratch: one pointer per rank */
    double *factors;                /* scratch: every rank's factor of a PREMUL_SUM */
    mpp_topology *topology;         /* NULL: all ranks are on this node. Else size and rank are those on this node. */
    const mpp_internode *internode; /* NULL exactly where topology is */
    mpp_internode_state *internode_state;
    int failure, mpi_error;     /* between nodes: why all operations from the head on fail; or 0 */
    int64_t limits[MPP_LIMITS]; /* see mpp_group_limit; calls that are MPI's are compared here */
};

/* Before the calls have been compared an exchange between nodes sends blocks of at most so many bytes, and so many to
 * one rank by all others together, which MPI may have to keep there; in a group of at most so many ranks: after a
 * disagreement each of them has a message for each of the others. */
enum { MPP_EARLY_BYTES = 4 << 20, MPP_EARLY_BYTES_IN_ALL = 8 << 20, MPP_EARLY_RANKS = 64 };
static inline int mpp_sends_early(const mpp_group *g) {
    return g->channel && g->channel->internode && g->size <= MPP_EARLY_RANKS;
}

/* What an operation is, MPP_IDLE or MPP_RINGS, that waits for the call or message of a rank, or of all: -1. */
static inline int mpp_idle_until(const mpp_group *g, int rank) {
    const mpp_topology *t = g->channel ? g->channel->topology : NULL;
    int is_here = g->channel && (!t || (rank >= 0 && t->node_of[rank] == t->here));
    return is_here ? MPP_RINGS : MPP_IDLE;
}

static inline int mpp_is_ours(const mpp_group *g, int kind, size_t bytes) {
    return g->channel && (int64_t)bytes <= g->channel->limits[kind];
}

/* ---- for operations over shared memory ---- */

/* channel.c: one over this node's segment, which takes `topology` over; NULL: no memory, or sizes that do not fit. */
mpp_channel *mpp_channel_new(mpp_group *g, uintptr_t segment, int slots, size_t slot_bytes, mpp_topology *topology);
void mpp_channel_free(mpp_channel *channel);
/* Its segment, of so many bytes, ends with wide slots, if it is that long. */
void mpp_channel_widen(mpp_channel *c, size_t length);
/* Memory of this rank's own that it has taken, and that it will take with its first long operation between nodes. */
void mpp_channel_bytes(mpp_channel *channel, size_t ranks, size_t *taken, size_t *later);

/* ---- comparison.c ---- */

/* An operation that another one steps before it begins, and owns: it is done if all ranks call the same. Of a
 * collective that MPI does, in elements of so many bytes; `lengths`: of every rank's block, or NULL.
 * Takes its place in the order. NULL: no memory. */
mpp_op *mpp_shm_agree(mpp_group *g, int kind, const mpp_reduction *how, int root, size_t length, const size_t *lengths,
                      size_t element, int place);
/* `arrived` of an operation that is compared first. Where MPI moves its data, it only says that a rank has come. */
int mpp_arrived_to_compare(mpp_op *op, int rank);
/* The tag of an exchange that was compared: the next one after those of all exchanges before. */
int mpp_shm_tag(mpp_group *g);
/* The same while the calls are compared. */
int mpp_shm_next_tag(const mpp_group *g);
/* Of an exchange between nodes: whether a block for `peer` may be sent with that tag before the others have agreed, for
 * it to take or to drop: it is the exchange's turn, and nothing of the agreement is to follow on that way. */
int mpp_shm_may_send_early(const mpp_op *agreement, int peer);
/* An operation that only compares, for another one, which is counted among the group's operations. */
shm_op *mpp_new_agreement(mpp_group *g);
void *mpp_copy_list(const void *list, int count); /* of addresses or lengths; NULL: no memory */

/* ---- signatures.c: the ranks' calls are signed when an operation is made, compared when all here have published
 * theirs ---- */

/* The `divisor` of an exchange whose data cannot go through the slots. */
enum { MPP_IN_MESSAGES = -1 };

uint64_t mpp_mix(uint64_t hash, uint64_t word);
void mpp_sign(shm_op *s, int kind, int root, size_t bytes);
/* Of a call that this rank has not published, and cannot make for an error of CUDA's: all learn that in its place, the
 * call fails for all, and the group goes on. */
void mpp_withdraw(shm_op *s, int error);
/* Compares the calls, with the other nodes' too. MPP_FAILED on a mismatch; else MPP_PENDING, and `checked` says whether
 * all agree. */
int mpp_check_calls(shm_op *s, mpp_channel *c);
void mpp_note_calls(shm_op *s, const mpp_channel *c);
/* Between nodes: goes on with the agreement about a call whose turn has not come; whether all have made this one. */
int mpp_ask_early(shm_op *s, mpp_channel *c);

/* ---- protocol.c ---- */

shm_op *mpp_new_shm_op(mpp_group *g, uintptr_t staging);
void mpp_take_place(shm_op *s);
uintptr_t mpp_enqueue_shm(shm_op *s, int64_t wait_ns);
/* What this rank calls where it has no memory for a call. */
void mpp_prepare_oom_placeholder(mpp_channel *c, mpp_group *g);
/* Under the lock: the operation fails as a rank here has that is not through with all chunks before `end`. */
void mpp_share_failure(mpp_op *op, const mpp_channel *c, uint64_t end);
/* For a call over shared memory that there is no memory for: takes its place in the order, as the others make it. */
uintptr_t mpp_shm_out_of_memory(mpp_group *g, int64_t wait_ns);

/* ---- the user's buffers, of a shm_op or an mpi_collective: in host memory, or staged there ---- */

#define mpp_in_at(op_, offset) mpp_host_at((op_)->op.staging, 0, (op_)->in, offset)
#define mpp_out_at(op_, offset) mpp_host_at((op_)->op.staging, (op_)->out_lane, (op_)->out, offset)
#define mpp_in_block_at(op_, rank, offset) mpp_host_at((op_)->op.staging, rank, (void *)(op_)->in_list[rank], offset)
#define mpp_out_block_at(op_, rank, offset)                                                                            \
    mpp_host_at((op_)->op.staging, (op_)->out_lane + (rank), (void *)(op_)->out_list[rank], offset)

/* ---- between the files ---- */

/* What this rank has done, for the others: a counter moves on, and those that sleep for it wake. */
void mpp_publish(mpp_channel *c, int counter, uint64_t value);
/* Gives the group its bell. */
void mpp_attach_bell(mpp_group *g);
/* Where in its block a chunk begins, and what it takes of it at most. */
static inline size_t mpp_chunk_begin(const shm_op *s, uint64_t chunk) {
    return chunk ? s->chunk_bytes * (1 + (size_t)(chunk - 1) * s->widening) : 0;
}
static inline size_t mpp_chunk_room(const shm_op *s, uint64_t chunk) {
    return chunk ? s->chunk_bytes * s->widening : s->chunk_bytes;
}

static inline size_t mpp_chunk_length(const shm_op *s, size_t total, uint64_t chunk) {
    size_t begin = mpp_chunk_begin(s, chunk), room = mpp_chunk_room(s, chunk);
    if (begin >= total) return 0;
    return total - begin < room ? total - begin : room;
}

/* Of a rank here, which may be a wide one. */
static inline char *mpp_slot_at(const shm_op *s, int rank, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t place = (size_t)rank * (size_t)c->ring + (size_t)((s->first + chunk) % (uint64_t)c->ring);
    return chunk && s->widening > 1 ? c->wide + place * c->slot_bytes * c->widening : c->slots + place * c->slot_bytes;
}

/* What a rank here has published of a call, once all have. */
static inline const mpp_call *mpp_call_of(const shm_op *s, const mpp_channel *c, int rank) {
    return &c->counters[rank].call[s->first % (uint64_t)c->ring];
}

/* Under the lock: the operation in front leaves the queue. */
static inline void mpp_drop_head(mpp_channel *c) {
    c->oom_first = c->head->oom_after;
    c->head = c->head->later;
    if (!c->head) c->tail = NULL;
}

/* ---- bus.c: copies between a device and registered slots ---- */

/* Where the data of an operation on one node is; registers the segment when the first comes that is on a device. */
int mpp_place_of(mpp_group *g, uintptr_t staging);
void mpp_bus_close(mpp_channel *c);
/* Begins what can be copied from the device, to it; whether the next chunk is there. */
int mpp_bus_load(shm_op *s, mpp_channel *c, int (*may_write)(shm_op *, mpp_channel *, uint64_t));
int mpp_bus_store(shm_op *s, mpp_channel *c, int (*may_read)(shm_op *, mpp_channel *, uint64_t));

/* ---- peers.c: copies between devices ---- */

int mpp_peers_new(mpp_channel *c); /* whether there is memory for them */
/* Shows the others tensors that none will read here, as long as it is not known who can read whose. As of mpp_offer. */
void mpp_introduce(shm_op *s, const uintptr_t *blocks, const size_t *lengths);
/* Before a call of `bytes`, as all ranks know them, is signed: each of the others may read its block, or, if `lengths`
 * is NULL, the only one, unless that is at 0; and this rank wants so many bytes from each; NULL: some of the root, or
 * of a sum of all. */
void mpp_offer(shm_op *s, const uintptr_t *blocks, const size_t *lengths, uint64_t bytes, const size_t *wanted);
/* By its length: whether a tensor is read where it is, if that can be. */
int mpp_is_worth_reading(const mpp_channel *c, uint64_t bytes);
/* All ranks have called the same, and some could not: finds out whose devices this one can read. */
void mpp_look_for_peers(shm_op *s, mpp_channel *c);
/* What this rank shows, for the others in the segment. */
void mpp_write_exports(const shm_op *s, const mpp_channel *c);
/* Begins to copy so many bytes from what another one shows this one; where that cannot be had, the operation fails. */
void mpp_pull_from(shm_op *s, int rank, size_t offset, uintptr_t to, size_t bytes);
/* In place of mpp_bus_load and mpp_bus_store. */
int mpp_has_pulled(shm_op *s);
int mpp_pull(shm_op *s, mpp_channel *c, int (*may_read)(shm_op *, mpp_channel *, uint64_t));
/* Under the lock, of an operation that goes so: it is done, or has failed. */
void mpp_peers_end(shm_op *s, mpp_channel *c, int state);
/* Of one that has just been made, on the bus: its one tensor. */
void mpp_show(shm_op *s, uintptr_t block);
/* Whether this rank knows that it can read those of all others. */
int mpp_reads_all(const mpp_channel *c);
/* This rank does not wait for those who read its tensors any more. */
void mpp_peers_leave(mpp_channel *c);
void mpp_peers_close(mpp_channel *c);

/* ---- halves.c: sums that are reduced on the devices ---- */

/* Before the call is signed: this rank can reduce a block of so many bytes, for the root, or for all (-1). The second
 * half, of mpp_new_agreement(), takes its place in the order with the first one. */
void mpp_in_halves(shm_op *s, shm_op *second, size_t block, const mpp_block *own);
/* Of a reduce_scatter: there is no second half. */
void mpp_gets_own_blocks(shm_op *s, uintptr_t received);
/* All ranks can, and have made the same call, of so many chunks: how many it takes, and its second half, if any. */
uint64_t mpp_plan_halves(shm_op *s, uint64_t chunks, uint64_t *of_second);
/* Under the lock, of a group that is aborted: a second half that nobody has begun goes. */
void mpp_abort_second(mpp_channel *c);

/* From the user's memory, wherever it is, to a slot, and back. */
static inline void mpp_to_slot(shm_op *s, char *slot, const char *from, size_t bytes) {
    if (s->bus) mpp_bus_copy(s->bus, MPP_DOWN, (uintptr_t)slot, (uintptr_t)from, bytes);
    else if (bytes < MPP_LONG_PIECE) memcpy(slot, from, bytes);
    else mpp_write_piece(&s->op.group->channel->writing, slot, from, bytes);
}
static inline void mpp_from_slot(shm_op *s, char *to, const char *slot, size_t bytes) {
    if (s->bus) mpp_bus_copy(s->bus, MPP_UP, (uintptr_t)to, (uintptr_t)slot, bytes);
    else memcpy(to, slot, bytes);
}

typedef struct {
    size_t begin, length;
} mpp_stretch;

/* ---- slots.c ---- */

/* Of so many bytes, where the first chunk takes fewer of them than the others. */
uint64_t mpp_chunk_count(uint64_t bytes, size_t first, size_t others);
/* Of a reduce_scatter, one slot carries a piece of the blocks of some ranks, each in its own stretch of chunk_bytes.
 * With more ranks than cache lines in a slot those are a batch of all, and the next batches come in the next chunks.
 */
int mpp_first_in_slot(const shm_op *s, uint64_t chunk);
int mpp_end_in_slot(const shm_op *s, uint64_t chunk);
mpp_stretch mpp_block_in_slot(const shm_op *s, uint64_t chunk, int rank); /* of no length: it carries none of it */
/* The same of a block of so many bytes that is number `place` among the blocks, of which a slot has `per_slot`. */
mpp_stretch mpp_piece_in_slot(const shm_op *s, uint64_t chunk, int place, int per_slot, size_t bytes);
static inline uint64_t mpp_piece_number(const shm_op *s, uint64_t chunk) { return chunk / s->batches; }

size_t mpp_part_begin(const mpp_channel *c, size_t length, int rank);
size_t mpp_piece_bytes(const mpp_channel *c);
int mpp_ranks_per_slot(const mpp_channel *c);
