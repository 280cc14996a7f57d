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
 * With its first chunk every rank publishes a signature of the call (what, how many bytes, of which type).
 * Nobody reads data or goes on to a second chunk before all signatures are there and equal. Where they
 * are not, the operation fails on every rank alike, all take as many chunk numbers as the longest call
 * would have, and the group goes on.
 *
 * Sums are taken in rank order by whoever computes them, so the bits are the same on every rank, on every
 * run, and for both algorithms below.
 *
 * Flat: every rank reads all slots. One synchronisation; best for small messages and two ranks.
 * Two-phase: every rank reduces one part of the chunk, in place in its own slot (nobody else reads that
 * part before `reduced` says so), then all copy all parts: 2 n instead of p n bytes read per rank.
 * (The reduce-scatter and all-gather of Rabenseifner's all-reduce, with memory in place of messages.)
 */
#include "shm.h"

#include <stdlib.h>

size_t mpp_segment_size(int size, int slots, size_t slot_bytes) {
    return (size_t)size * (sizeof(rank_counters) + (size_t)slots * slot_bytes);
}

int mpp_group_attach(uintptr_t group, uintptr_t segment, int slots, size_t slot_bytes) {
    mpp_group *g = (mpp_group *)group;
    mpp_channel *c = calloc(1, sizeof *c);
    if (slots > MAX_RING || !c) {
        free(c);
        return -1;
    }
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

char *mpp_slot_of(mpp_channel *c, int rank, uint64_t number) {
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
    if (s->written > 0 && !s->checked) return 0;
    if (s->written - s->done >= (uint64_t)c->ring) return 0;
    return number < (uint64_t)c->ring ||
           reached(c, &c->all_out, offsetof(rank_counters, out), number - (uint64_t)c->ring + 1);
}

static int may_read(shm_op *s, mpp_channel *c, uint64_t number) {
    if (s->two_phase) return reached(c, &c->all_reduced, offsetof(rank_counters, reduced), number + 1);
    if (s->wait_for < 0) return reached(c, &c->all_in, offsetof(rank_counters, in), number + 1);
    return atomic_load_explicit(&c->counters[s->wait_for].in, memory_order_acquire) > number;
}

/* How much of each rank's block one slot carries in a reduce-scatter. */
size_t mpp_piece_bytes(const mpp_channel *c) { return c->slot_bytes / (size_t)c->size / CACHE_LINE * CACHE_LINE; }

size_t mpp_chunk_length(const shm_op *s, size_t total, uint64_t chunk) {
    size_t begin = (size_t)chunk * s->chunk_bytes;
    if (begin >= total) return 0;
    return total - begin < s->chunk_bytes ? total - begin : s->chunk_bytes;
}

/* The part of a chunk of `length` bytes that `rank` reduces; whole cache lines, so that no two ranks
 * write to one line. */
size_t mpp_part_begin(const mpp_channel *c, size_t length, int rank) {
    size_t lines = (length + CACHE_LINE - 1) / CACHE_LINE;
    size_t begin = lines * (size_t)rank / (size_t)c->size * CACHE_LINE;
    return begin < length ? begin : length;
}

static void reduce_part(shm_op *s, mpp_channel *c, uint64_t number) {
    size_t length = mpp_chunk_length(s, s->bytes, s->reduced);
    size_t begin = mpp_part_begin(c, length, c->rank), end = mpp_part_begin(c, length, c->rank + 1);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_of(c, r, number) + begin;
    if (end > begin)
        mpp_reduce(&s->how, mpp_slot_of(c, c->rank, number) + begin, c->sources, c->size, (end - begin) / s->element);
}

/* Whether this rank's data of the next chunk has come from the device it may be on. */
static int is_loaded(shm_op *s) { return !s->op.staging || mpp_stage_open(&s->op, s->written * s->chunk_bytes); }

/* One round over write, reduce, read; whether anything moved. */
static int advance(shm_op *s, mpp_channel *c) {
    rank_counters *mine = &c->counters[c->rank];
    int moved = 0;
    uint64_t number = s->first + s->written;
    if (s->written < s->chunks && may_write(s, c, number) && is_loaded(s)) {
        if (s->write) s->write(s, s->written, mpp_slot_of(c, c->rank, number));
        s->written++;
        mine->signature[number % (uint64_t)c->ring] = s->signature;
        atomic_store_explicit(&mine->in, number + 1, memory_order_release);
        moved = 1;
    }
    if (!s->checked) return moved;
    number = s->first + s->reduced;
    if (s->two_phase && s->reduced < s->written && reached(c, &c->all_in, offsetof(rank_counters, in), number + 1)) {
        reduce_part(s, c, number);
        s->reduced++;
        atomic_store_explicit(&mine->reduced, number + 1, memory_order_release);
        moved = 1;
    }
    number = s->first + s->done;
    if (s->done < s->written && may_read(s, c, number)) {
        if (s->read) s->read(s, s->done);
        s->done++;
        if (s->op.staging) mpp_stage_close(s->op.staging, s->done * s->chunk_bytes);
        /* A later flat operation must not leave `reduced` behind: two-phase ones compare it with chunk numbers. */
        if (!s->two_phase) atomic_store_explicit(&mine->reduced, number + 1, memory_order_release);
        atomic_store_explicit(&mine->out, number + 1, memory_order_release);
        moved = 1;
    }
    return moved;
}

/* Chunk numbers that a call with this signature takes. */
static uint64_t chunks_of(const mpp_channel *c, uint64_t signature) {
    size_t bytes = (size_t)(signature >> SIGNATURE_BYTES), chunk = c->slot_bytes;
    if ((signature & SIGNATURE_KIND) == REDUCE_SCATTER) chunk = mpp_piece_bytes(c);
    return bytes > chunk ? (bytes - 1) / chunk + 1 : 1;
}

/* The ranks called different things. Everybody sees the same signatures, so everybody agrees on how many
 * chunk numbers to pass over. */
static int mismatch(shm_op *s, mpp_channel *c, int rank) {
    uint64_t most = 1;
    rank_counters *mine = &c->counters[c->rank];
    s->op.detail[0] = rank;
    s->op.detail[1] = (int64_t)c->counters[rank].signature[s->first % (uint64_t)c->ring];
    for (int r = 0; r < c->size; r++) {
        uint64_t chunks = chunks_of(c, c->counters[r].signature[s->first % (uint64_t)c->ring]);
        if (chunks > most) most = chunks;
    }
    for (shm_op *later = s->later; later; later = later->later) later->first += most - s->chunks;
    c->next += most - s->chunks;
    atomic_store_explicit(&mine->in, s->first + most, memory_order_release);
    atomic_store_explicit(&mine->reduced, s->first + most, memory_order_release);
    atomic_store_explicit(&mine->out, s->first + most, memory_order_release);
    return mpp_fail(&s->op, MPP_FAILURE_MISMATCH, 0);
}

static int check(shm_op *s, mpp_channel *c) {
    if (!s->written || !reached(c, &c->all_in, offsetof(rank_counters, in), s->first + 1)) return MPP_PENDING;
    for (int r = 0; r < c->size; r++)
        if (c->counters[r].signature[s->first % (uint64_t)c->ring] != s->signature) return mismatch(s, c, r);
    s->checked = 1;
    return MPP_PENDING;
}

static int step(mpp_op *op) {
    shm_op *s = (shm_op *)op;
    mpp_channel *c = op->group->channel;
    int state = MPP_PENDING;
    if (c->head != s) return MPP_PENDING;
    if (atomic_load_explicit(&op->group->aborted, memory_order_relaxed)) state = mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
    /* A bound on the work done under the lock, so that other groups and threads get their turn. */
    for (int round = 0, moved = 1; !state && moved && s->done < s->chunks && round < 8; round++) {
        moved = advance(s, c);
        if (!s->checked) {
            state = check(s, c);
            moved |= s->checked;
            if (state == MPP_FAILED) break;
        }
        if (moved) atomic_fetch_add_explicit(&op->group->moves, 1, memory_order_relaxed);
    }
    if (op->failure) state = MPP_FAILED; /* also: data that does not come from the device */
    if (s->done == s->chunks && state == MPP_PENDING) state = MPP_DONE;
    if (state == MPP_PENDING) return state;
    c->head = s->later;
    if (!c->head) c->tail = NULL;
    return state;
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

shm_op *mpp_new_shm_op(mpp_group *g, uintptr_t staging) {
    shm_op *s = mpp_new_op(sizeof *s, g, step, staging);
    if (!s) return NULL;
    s->op.discard = discard_lists;
    s->op.arrived = arrived;
    s->wait_for = -1;
    s->chunk_bytes = g->channel->slot_bytes;
    return s;
}

/* `extra`: the root, or whatever else must agree; `bytes`: what is cut into chunks. */
void mpp_sign(shm_op *s, int kind, unsigned extra, size_t bytes) {
    uint64_t how = (uint64_t)(s->how.dtype & 31) << 4 | (uint64_t)(s->how.op & 15) << 9;
    uint64_t scaled = s->how.has_premul || s->how.divisor > 1;
    s->signature =
        (uint64_t)kind | how | scaled << 13 | (uint64_t)(extra & 1023) << 14 | (uint64_t)bytes << SIGNATURE_BYTES;
}

/* Takes the operation's chunk numbers and its place in the queue, then starts it. */
uintptr_t mpp_enqueue_shm(shm_op *s, int64_t wait_ns) {
    mpp_channel *c = s->op.group->channel;
    mpp_lock();
    s->chunks = chunks_of(c, s->signature);
    s->first = c->next;
    c->next += s->chunks;
    if (c->tail) c->tail->later = s;
    else c->head = s;
    c->tail = s;
    mpp_unlock();
    return mpp_start(&s->op, wait_ns);
}
