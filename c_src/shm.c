/* Collectives over a segment of shared memory, for groups that live on one node.
 *
 * Every collective is cut into chunks, numbered without gaps over the life of the group. Each rank owns a
 * ring of slots; chunk c uses slot c mod slots of every rank. Three counters per rank, each in a cache
 * line of its own, say how many chunks that rank has written to its slot (`in`), reduced its part of
 * (`reduced`), and is done reading from the others (`out`). A rank writes a slot only when every rank is
 * done with the chunk that used it before. All waiting is on these counters, so an operation is a small
 * state machine that any thread may advance, and ranks never need to agree on anything but the order of
 * operations.
 *
 * Sums are taken in rank order by whoever computes them, so the bits are the same on every rank, on every
 * run, and for both algorithms below.
 *
 * Flat: every rank reads all slots. One synchronisation; best for small messages and two ranks.
 * Two-phase: every rank reduces one part of the chunk, in place in its own slot (nobody else reads that
 * part before `reduced` says so), then all copy all parts: 2 n instead of p n bytes read per rank.
 * (The reduce-scatter and all-gather of Rabenseifner's all-reduce, with memory in place of messages.)
 */
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { CACHE_LINE = 64, TWO_PHASE_RANKS = 3, TWO_PHASE_BYTES = 8192 };

typedef struct {
    _Atomic uint64_t in;
    char pad1[CACHE_LINE - sizeof(uint64_t)];
    _Atomic uint64_t reduced;
    char pad2[CACHE_LINE - sizeof(uint64_t)];
    _Atomic uint64_t out;
    char pad3[CACHE_LINE - sizeof(uint64_t)];
} rank_counters;

typedef struct shm_op shm_op;

struct mpp_channel {
    rank_counters *counters;
    char *slots;
    int size, rank, ring;
    size_t slot_bytes;
    uint64_t next;             /* number of the next chunk to be given to an operation */
    uint64_t all_in, all_out;  /* lower bounds of the others' counters, to read fewer foreign cache lines */
    uint64_t all_reduced;
    shm_op *head, *tail;       /* operations in program order; only the head moves data */
    const void **sources;      /* scratch: one pointer per rank */
};

struct shm_op {
    mpp_op op;
    shm_op *later;
    uint64_t first, chunks;           /* my chunk numbers are first ... first + chunks - 1 */
    uint64_t written, reduced, done;  /* how many of them this rank has dealt with */
    void (*write)(shm_op *, uint64_t chunk, char *slot);
    void (*read)(shm_op *, uint64_t chunk);
    int two_phase;
    int wait_for; /* the one rank whose `in` matters before reading; -1: all; my own: nobody's */
    int root;
    size_t chunk_bytes;
    /* data */
    const char *in;
    char *out;
    size_t bytes;        /* of `in` or `out`, what is cut into chunks */
    mpp_reduction how;
    size_t element;
    const uintptr_t *in_list, *out_list; /* owned copies */
    size_t *lengths;
};

size_t mpp_segment_size(int size, int slots, size_t slot_bytes) {
    return (size_t)size * (sizeof(rank_counters) + (size_t)slots * slot_bytes);
}

int mpp_group_attach(uintptr_t group, uintptr_t segment, int slots, size_t slot_bytes) {
    mpp_group *g = (mpp_group *)group;
    mpp_channel *c = calloc(1, sizeof *c);
    if (!c) return -1;
    c->sources = malloc((size_t)g->size * sizeof *c->sources);
    if (!c->sources) {
        free(c);
        return -1;
    }
    c->counters = (rank_counters *)segment; /* the file is new, so every counter starts at zero */
    c->slots = (char *)segment + (size_t)g->size * sizeof(rank_counters);
    c->size = g->size;
    c->rank = g->rank;
    c->ring = slots;
    c->slot_bytes = slot_bytes;
    g->channel = c;
    return 0;
}

void mpp_channel_free(mpp_channel *c) {
    if (!c) return;
    free(c->sources);
    free(c);
}

static char *slot_of(mpp_channel *c, int rank, uint64_t number) {
    return c->slots + ((size_t)rank * (size_t)c->ring + (size_t)(number % (uint64_t)c->ring)) * c->slot_bytes;
}

/* Whether every rank's counter (at `offset` in rank_counters) has reached `target`. */
static int reached(mpp_channel *c, uint64_t *known, size_t offset, uint64_t target) {
    if (*known >= target) return 1;
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < c->size; r++) {
        _Atomic uint64_t *counter = (_Atomic uint64_t *)((char *)&c->counters[r] + offset);
        uint64_t value = atomic_load_explicit(counter, memory_order_acquire);
        if (value < target) return 0;
        if (value < least) least = value;
    }
    *known = least;
    return 1;
}

static int may_write(shm_op *s, mpp_channel *c, uint64_t number) {
    if (s->written - s->done >= (uint64_t)c->ring) return 0;
    return number < (uint64_t)c->ring ||
           reached(c, &c->all_out, offsetof(rank_counters, out), number - (uint64_t)c->ring + 1);
}

static int may_read(shm_op *s, mpp_channel *c, uint64_t number) {
    if (s->two_phase) return reached(c, &c->all_reduced, offsetof(rank_counters, reduced), number + 1);
    if (s->wait_for < 0) return reached(c, &c->all_in, offsetof(rank_counters, in), number + 1);
    return atomic_load_explicit(&c->counters[s->wait_for].in, memory_order_acquire) > number;
}

static size_t chunk_length(const shm_op *s, size_t total, uint64_t chunk) {
    size_t begin = (size_t)chunk * s->chunk_bytes;
    if (begin >= total) return 0;
    return total - begin < s->chunk_bytes ? total - begin : s->chunk_bytes;
}

/* The part of a chunk of `length` bytes that `rank` reduces; whole cache lines, so that no two ranks
 * write to one line. */
static size_t part_begin(const mpp_channel *c, size_t length, int rank) {
    size_t lines = (length + CACHE_LINE - 1) / CACHE_LINE;
    size_t begin = lines * (size_t)rank / (size_t)c->size * CACHE_LINE;
    return begin < length ? begin : length;
}

static void reduce_part(shm_op *s, mpp_channel *c, uint64_t number) {
    size_t length = chunk_length(s, s->bytes, s->reduced);
    size_t begin = part_begin(c, length, c->rank), end = part_begin(c, length, c->rank + 1);
    for (int r = 0; r < c->size; r++) c->sources[r] = slot_of(c, r, number) + begin;
    if (end > begin)
        mpp_reduce(&s->how, slot_of(c, c->rank, number) + begin, c->sources, c->size, (end - begin) / s->element);
}

/* One round over write, reduce, read; whether anything moved. */
static int advance(shm_op *s, mpp_channel *c) {
    rank_counters *mine = &c->counters[c->rank];
    int moved = 0;
    uint64_t number = s->first + s->written;
    if (s->written < s->chunks && may_write(s, c, number)) {
        if (s->write) s->write(s, s->written, slot_of(c, c->rank, number));
        s->written++;
        atomic_store_explicit(&mine->in, number + 1, memory_order_release);
        moved = 1;
    }
    number = s->first + s->reduced;
    if (s->two_phase && s->reduced < s->written &&
        reached(c, &c->all_in, offsetof(rank_counters, in), number + 1)) {
        reduce_part(s, c, number);
        s->reduced++;
        atomic_store_explicit(&mine->reduced, number + 1, memory_order_release);
        moved = 1;
    }
    number = s->first + s->done;
    if (s->done < s->written && may_read(s, c, number)) {
        if (s->read) s->read(s, s->done);
        s->done++;
        /* A later flat operation must not leave `reduced` behind: two-phase ones compare it with chunk numbers. */
        if (!s->two_phase) atomic_store_explicit(&mine->reduced, number + 1, memory_order_release);
        atomic_store_explicit(&mine->out, number + 1, memory_order_release);
        moved = 1;
    }
    return moved;
}

static int step(mpp_op *op) {
    shm_op *s = (shm_op *)op;
    mpp_channel *c = op->group->channel;
    if (c->head != s) return MPP_PENDING;
    /* A bound on the work done under the lock, so that other groups and threads get their turn. */
    for (int round = 0; s->done < s->chunks && round < 8; round++)
        if (!advance(s, c)) break;
    if (s->done < s->chunks) return MPP_PENDING;
    c->head = s->later;
    if (!c->head) c->tail = NULL;
    return MPP_DONE;
}

static int arrived(mpp_op *op, int rank) {
    rank_counters *theirs = &op->group->channel->counters[rank];
    return atomic_load_explicit(&theirs->in, memory_order_acquire) > ((shm_op *)op)->first;
}

static void discard_lists(mpp_op *op) {
    shm_op *s = (shm_op *)op;
    free((void *)s->in_list);
    free((void *)s->out_list);
    free(s->lengths);
}

static shm_op *new_shm_op(mpp_group *g) {
    shm_op *s = mpp_new_op(sizeof *s, g, step);
    if (!s) return NULL;
    s->op.discard = discard_lists;
    s->op.arrived = arrived;
    s->wait_for = -1;
    s->chunk_bytes = g->channel->slot_bytes;
    return s;
}

/* Takes the operation's chunk numbers and its place in the queue, then starts it. */
static uintptr_t enqueue(shm_op *s, uint64_t chunks, int64_t wait_ns) {
    mpp_channel *c = s->op.group->channel;
    mpp_lock();
    s->chunks = chunks;
    s->first = c->next;
    c->next += chunks;
    if (c->tail) c->tail->later = s;
    else c->head = s;
    c->tail = s;
    mpp_unlock();
    return mpp_start(&s->op, wait_ns);
}

static uint64_t chunks_in(const shm_op *s, size_t bytes) { return (bytes + s->chunk_bytes - 1) / s->chunk_bytes; }

static uintptr_t *copy_list(const uintptr_t *list, int count) {
    uintptr_t *copy = malloc((size_t)count * sizeof *copy);
    if (copy) memcpy(copy, list, (size_t)count * sizeof *copy);
    return copy;
}

static uintptr_t out_of_memory(shm_op *s, mpp_group *g) {
    if (s) {
        discard_lists(&s->op);
        free(s);
    }
    return mpp_out_of_memory(g);
}

/* ---- barrier and broadcast ---- */

uintptr_t mpp_shm_barrier(mpp_group *g, int64_t wait_ns) {
    shm_op *s = new_shm_op(g);
    if (!s) return out_of_memory(s, g);
    return enqueue(s, 1, wait_ns);
}

static void write_plain(shm_op *s, uint64_t chunk, char *slot) {
    memcpy(slot, s->in + chunk * s->chunk_bytes, chunk_length(s, s->bytes, chunk));
}

static void read_from_root(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    memcpy(s->out + chunk * s->chunk_bytes, slot_of(c, s->root, s->first + chunk), chunk_length(s, s->bytes, chunk));
}

uintptr_t mpp_shm_broadcast(mpp_group *g, void *buffer, size_t bytes, int root, int64_t wait_ns) {
    shm_op *s = new_shm_op(g);
    if (!s) return out_of_memory(s, g);
    s->in = s->out = buffer;
    s->bytes = bytes;
    s->root = s->wait_for = root;
    if (g->rank == root) s->write = write_plain;
    else s->read = read_from_root;
    return enqueue(s, chunks_in(s, bytes), wait_ns);
}

/* ---- all_reduce and reduce ---- */

static void read_sum(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = chunk * s->chunk_bytes;
    for (int r = 0; r < c->size; r++) c->sources[r] = slot_of(c, r, s->first + chunk);
    /* Mine from the user's buffer: it may be the very place the result goes to, which mpp_reduce allows. */
    c->sources[c->rank] = s->in + offset;
    mpp_reduce(&s->how, s->out + offset, c->sources, c->size, chunk_length(s, s->bytes, chunk) / s->element);
}

static void read_parts(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t length = chunk_length(s, s->bytes, chunk);
    for (int r = 0; r < c->size; r++) {
        size_t begin = part_begin(c, length, r), end = part_begin(c, length, r + 1);
        memcpy(s->out + chunk * s->chunk_bytes + begin, slot_of(c, r, s->first + chunk) + begin, end - begin);
    }
}

/* root -1: everybody gets the result. */
uintptr_t mpp_shm_reduce(mpp_group *g, const void *in, void *out, size_t count, const mpp_reduction *how, int root,
                         int64_t wait_ns) {
    shm_op *s = new_shm_op(g);
    if (!s) return out_of_memory(s, g);
    s->in = in;
    s->out = out;
    s->how = *how;
    s->element = mpp_dtype_size(how->dtype);
    s->bytes = count * s->element;
    s->write = g->size > 1 ? write_plain : NULL;
    s->two_phase = g->size >= TWO_PHASE_RANKS && s->bytes > TWO_PHASE_BYTES;
    s->read = s->two_phase ? read_parts : read_sum;
    if (root >= 0 && root != g->rank) {
        s->read = NULL;
        if (!s->two_phase) s->wait_for = g->rank; /* written is enough: nothing to read */
    }
    return enqueue(s, chunks_in(s, s->bytes), wait_ns);
}

/* ---- all_gather ---- */

static void write_own_block(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = chunk_length(s, s->lengths[s->op.group->rank], chunk);
    if (length) memcpy(slot, s->in + chunk * s->chunk_bytes, length);
}

static void read_blocks(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = chunk * s->chunk_bytes;
    for (int r = 0; r < c->size; r++) {
        size_t length = chunk_length(s, s->lengths[r], chunk);
        char *out = (char *)s->out_list[r] + offset;
        if (!length) continue;
        if (r != c->rank) memcpy(out, slot_of(c, r, s->first + chunk), length);
        else if (out != s->in + offset) memcpy(out, s->in + offset, length);
    }
}

uintptr_t mpp_shm_allgather(mpp_group *g, const void *in, const uintptr_t *out, const size_t *bytes, int64_t wait_ns) {
    shm_op *s = new_shm_op(g);
    if (!s) return out_of_memory(s, g);
    size_t longest = 0;
    s->in = in;
    s->out_list = copy_list(out, g->size);
    s->lengths = (size_t *)copy_list((const uintptr_t *)bytes, g->size);
    if (!s->out_list || !s->lengths) return out_of_memory(s, g);
    for (int r = 0; r < g->size; r++)
        if (bytes[r] > longest) longest = bytes[r];
    s->write = write_own_block;
    s->read = read_blocks;
    return enqueue(s, chunks_in(s, longest), wait_ns);
}

/* ---- reduce_scatter ---- */

/* One slot carries a piece of every rank's block, each in its own stretch of chunk_bytes. */
static void write_pieces(shm_op *s, uint64_t chunk, char *slot) {
    mpp_channel *c = s->op.group->channel;
    for (int r = 0; r < c->size; r++) {
        size_t length = chunk_length(s, s->lengths[r], chunk);
        if (length && r != c->rank)
            memcpy(slot + (size_t)r * s->chunk_bytes, (const char *)s->in_list[r] + chunk * s->chunk_bytes, length);
    }
}

static void read_piece_sum(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t length = chunk_length(s, s->lengths[c->rank], chunk), offset = chunk * s->chunk_bytes;
    if (!length) return;
    for (int r = 0; r < c->size; r++)
        c->sources[r] = slot_of(c, r, s->first + chunk) + (size_t)c->rank * s->chunk_bytes;
    c->sources[c->rank] = (const char *)s->in_list[c->rank] + offset;
    mpp_reduce(&s->how, s->out + offset, c->sources, c->size, length / s->element);
}

uintptr_t mpp_shm_reduce_scatter(mpp_group *g, const uintptr_t *in, void *out, const size_t *counts,
                                 const mpp_reduction *how, int64_t wait_ns) {
    shm_op *s = new_shm_op(g);
    if (!s) return out_of_memory(s, g);
    size_t longest = 0;
    s->out = out;
    s->how = *how;
    s->element = mpp_dtype_size(how->dtype);
    s->in_list = copy_list(in, g->size);
    s->lengths = (size_t *)copy_list((const uintptr_t *)counts, g->size);
    if (!s->in_list || !s->lengths) return out_of_memory(s, g);
    for (int r = 0; r < g->size; r++) {
        s->lengths[r] *= s->element;
        if (s->lengths[r] > longest) longest = s->lengths[r];
    }
    s->chunk_bytes = s->chunk_bytes / (size_t)g->size / CACHE_LINE * CACHE_LINE;
    s->write = write_pieces;
    s->read = read_piece_sum;
    return enqueue(s, chunks_in(s, longest), wait_ns);
}
