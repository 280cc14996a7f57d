/* What the shared-memory protocol (shm.c) and the collectives on it (shm_collectives.c) share. */
#ifndef MPP_SHM_H
#define MPP_SHM_H

#include "engine/engine.h"
#include "cuda/staging.h"

enum { CACHE_LINE = 64, TWO_PHASE_RANKS = 3, TWO_PHASE_BYTES = 8192, MAX_RING = 7 };

/* What the ranks of a part of the group call, so far as somebody has heard. */
typedef struct {
    uint64_t number;       /* of the call's first chunk */
    uint64_t balance;      /* of an exchange: what its ranks' hashes add up to */
    uint64_t most;         /* chunks that the longest call takes */
    int32_t differ;        /* the two calls below do not agree */
    int32_t rank[2];       /* who made them */
    uint64_t signature[2]; /* of each */
    char pad[CACHE_LINE - 7 * sizeof(uint64_t)];
    mpp_call call[2];
} mpp_opinion;

typedef struct {
    _Atomic uint64_t in;
    uint64_t signature[MAX_RING]; /* of the call in each slot; in the cache line that a reader needs anyway */
    _Atomic uint64_t reduced;
    char pad2[CACHE_LINE - sizeof(uint64_t)];
    _Atomic uint64_t out;
    char pad3[CACHE_LINE - sizeof(uint64_t)];
    mpp_call call[MAX_RING]; /* what the signature stands for; the others hardly ever read it */
    _Atomic uint64_t agreed; /* of the first rank on a host: calls that were compared with the other hosts' */
    _Atomic int64_t broken;  /* of the same: MPI's error, once a rank here has met one between the hosts */
    char pad4[CACHE_LINE - 2 * sizeof(uint64_t)];
    mpp_opinion opinion; /* what came out of the last one */
} rank_counters;

typedef struct shm_op shm_op;
typedef struct mpp_hosts mpp_hosts; /* hosts.h */

/* How an operation's data gets to other hosts. */
typedef struct {
    /* with the agreement, whose messages carry what a part of the hosts has: `payload` bytes, of them a span */
    void (*pack)(shm_op *, char *payload);
    void (*span)(const shm_op *, int first_host, int end_host, size_t *offset, size_t *length);
    void (*merge)(shm_op *, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first);
    void (*unpack)(shm_op *, char *payload);
    /* chunk by chunk, in one or two legs; may be NULL */
    void (*first_leg)(shm_op *, uint64_t chunk);
    void (*second_leg)(shm_op *, uint64_t chunk);
} mpp_route;

struct shm_op {
    mpp_op op;
    shm_op *later;
    uint64_t refused;                /* calls between this one and `later` that there was no memory for */
    uint64_t first, chunks;          /* my chunk numbers are first ... first + chunks - 1 */
    uint64_t written, reduced, done; /* how many of them this rank has dealt with */
    void (*write)(shm_op *, uint64_t chunk, char *slot);
    void (*read)(shm_op *, uint64_t chunk);
    void (*find_imbalance)(shm_op *, mpp_channel *); /* of a call whose signatures must add up to nothing */
    uint64_t signature;
    mpp_call call, theirs; /* `theirs`: that of a rank which disagrees */
    int checked;           /* all ranks have come, with this signature */
    int two_phase;
    int wait_for; /* the one rank whose `in` matters before reading; -1: all; my own: nobody's */
    int root;
    size_t chunk_bytes;
    uint64_t windows;       /* how many chunks it takes to carry chunk_bytes of every block: see mpp_window() */
    const mpp_route *route; /* to other hosts; NULL: none, or none is needed */
    size_t payload;         /* bytes that go with the agreement */
    uint64_t launched;      /* how many chunks have been sent on their way there */
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
    uint64_t next;            /* number of the next chunk to be given to an operation */
    uint64_t all_in, all_out; /* lower bounds of the others' counters, to read fewer foreign cache lines */
    uint64_t all_reduced;
    shm_op *head, *tail;  /* operations in program order; only the head moves data */
    unsigned exchanges;   /* that were compared and begun */
    uint64_t refused;     /* calls before `head` that there was no memory for */
    uint64_t refusals;    /* all such calls, also those behind operations */
    shm_op refusal;       /* takes their places in the order, one after the other */
    const void **sources; /* scratch: one pointer per rank */
    double *factors;      /* scratch: every rank's factor of a PREMUL_SUM */
    mpp_hosts *hosts;     /* NULL: all ranks are on this one. Else size and rank are those on this host. */
    int only_compares;    /* what the ranks call; MPI's collectives move the data */
};

/* Whether collectives go over the channel. */
static inline int mpp_carries(const mpp_group *g) { return g->channel && !g->channel->only_compares; }
static inline int mpp_only_compares(const mpp_group *g) { return g->channel && g->channel->only_compares; }

/* ---- for whoever has an operation to do over shared memory ---- */

void mpp_channel_free(mpp_channel *channel);
/* Memory of this rank's own that it has taken, and that it will take with its first long operation between hosts. */
void mpp_channel_bytes(mpp_channel *channel, size_t ranks, size_t *taken, size_t *later);
/* An operation that an exchange steps before it begins, and owns: it is done if all ranks exchange what they expect of
 * each other. Takes the exchange's place in the order. NULL: no memory. */
mpp_op *mpp_shm_compare(mpp_group *g, const size_t *send_bytes, const size_t *recv_bytes);
/* The same of a collective that MPI does: `lengths`, of every rank's block, or NULL. Takes its place in the order. */
mpp_op *mpp_shm_agree(mpp_group *g, int kind, const mpp_reduction *how, int root, size_t bytes, const size_t *lengths);
/* The tag of an exchange that was compared: the next one after those of all exchanges before. */
int mpp_shm_tag(mpp_group *g);
/* For a call over shared memory that there is no memory for. The others make it, so it takes its place in the order. */
uintptr_t mpp_shm_out_of_memory(mpp_group *g, int64_t wait_ns);
uintptr_t mpp_shm_barrier(mpp_group *g, int64_t wait_ns);
uintptr_t mpp_shm_broadcast(mpp_group *g, void *buffer, size_t bytes, int root, uintptr_t staging, int64_t wait_ns);
uintptr_t mpp_shm_reduce(mpp_group *g, const void *in, void *out, size_t count, const mpp_reduction *how, int root,
                         uintptr_t staging, int64_t wait_ns);
uintptr_t mpp_shm_allgather(mpp_group *g, const void *in, const uintptr_t *out, const size_t *bytes, uintptr_t staging,
                            int64_t wait_ns);
uintptr_t mpp_shm_reduce_scatter(mpp_group *g, const uintptr_t *in, void *out, const size_t *counts,
                                 const mpp_reduction *how, uintptr_t staging, int64_t wait_ns);

/* ---- the user's buffers: in host memory, or staged there ---- */

static inline const char *mpp_shm_in(const shm_op *s, size_t offset) {
    return mpp_host_at(s->op.staging, 0, s->in, offset);
}

static inline char *mpp_shm_out(const shm_op *s, size_t offset) {
    return mpp_host_at(s->op.staging, s->out_lane, s->out, offset);
}

static inline const char *mpp_shm_in_block(const shm_op *s, int rank, size_t offset) {
    return mpp_host_at(s->op.staging, rank, (const void *)s->in_list[rank], offset);
}

static inline char *mpp_shm_out_block(const shm_op *s, int rank, size_t offset) {
    return mpp_host_at(s->op.staging, s->out_lane + rank, (const void *)s->out_list[rank], offset);
}

/* ---- between the files ---- */

static inline size_t mpp_chunk_length(const shm_op *s, size_t total, uint64_t chunk) {
    size_t begin = (size_t)chunk * s->chunk_bytes;
    if (begin >= total) return 0;
    return total - begin < s->chunk_bytes ? total - begin : s->chunk_bytes;
}

static inline char *mpp_slot_of(mpp_channel *c, int rank, uint64_t number) {
    return c->slots + ((size_t)rank * (size_t)c->ring + (size_t)(number % (uint64_t)c->ring)) * c->slot_bytes;
}

typedef struct {
    size_t begin, length;
} mpp_stretch;

/* Of a reduce_scatter, one slot carries a piece of the blocks of some ranks, each in its own stretch of chunk_bytes.
 * With more ranks than cache lines in a slot those are a window of all, and the next windows come in the next chunks.
 */
int mpp_first_in_slot(const shm_op *s, uint64_t chunk);
int mpp_end_in_slot(const shm_op *s, uint64_t chunk);
mpp_stretch mpp_block_in_slot(const shm_op *s, uint64_t chunk, int rank); /* of no length: it carries none of it */
static inline uint64_t mpp_piece_number(const shm_op *s, uint64_t chunk) { return chunk / s->windows; }

size_t mpp_part_begin(const mpp_channel *c, size_t length, int rank);
size_t mpp_piece_bytes(const mpp_channel *c);
int mpp_window(const mpp_channel *c);

shm_op *mpp_new_shm_op(mpp_group *g, uintptr_t staging);
void mpp_take_place(shm_op *s);
uintptr_t mpp_enqueue_shm(shm_op *s, int64_t wait_ns);

#endif
