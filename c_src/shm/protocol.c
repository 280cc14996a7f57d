/* Collectives over a segment of shared memory, for groups that live on one node.
 *
 * Every collective is cut into chunks, numbered without gaps over the life of the group. Each rank owns a
 * ring of slots; chunk c uses slot c mod slots of every rank. Three counters per rank, each in a cache
 * line of its own, say how many chunks that rank has written to its slot (`in`), reduced its part of
 * (`reduced`), and is done reading from the others (`out`). A rank writes a slot only when every rank is
 * done with the chunk that used it before. All waiting is on these counters, so an operation is a small
 * state machine that any thread may advance, and ranks never need to agree on anything but the order of
 * operations. (`reduced` is moved by two-phase operations only, which set it to the number of their chunk.)
 *
 * With its first chunk every rank publishes a signature of the call: a hash of all that must agree (what, how
 * many bytes, of which type, every length in a list), and the call in words. Nobody reads data or goes on to a
 * second chunk before all signatures are there and equal. On a mismatch the operation fails on every rank alike, all
 * take as many chunk numbers as the longest call would have, and the group goes on.
 *
 * A rank that has no memory for a call publishes that in its place (`oom_placeholder`), and all fail in the same way;
 * so does one whose device fails before its first chunk has come (mpp_withdraw).
 *
 * Sums are taken as the same tree over the ranks by whoever computes them, so the bits are the same on every rank, on
 * every run, and for both algorithms below.
 *
 * Flat: every rank reads all slots. One synchronisation; best for small messages and two ranks.
 * Two-phase: every rank reduces one part of the chunk, in place in its own slot (nobody else reads that
 * part before `reduced` says so), then all copy all parts: 2 n instead of p n bytes read per rank.
 * (The reduce-scatter and all-gather of Rabenseifner's all-reduce, with memory in place of messages.)
 *
 * tests/model/protocol.py is this file once more, function by function, for a program that tries all orders in
 * which ranks can run. Change both together.
 */
#include "shm/shm.h"

#include <stdlib.h>
#include <string.h>

#include "message/message.h"

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
    if (number > s->first && !s->checked) return 0;
    return number < (uint64_t)c->ring ||
           reached(c, &c->all_out, offsetof(rank_counters, out), number - (uint64_t)c->ring + 1);
}

static int all_written(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    return reached(c, &c->all_in, offsetof(rank_counters, in), s->first + chunk + 1);
}

static int may_read(shm_op *s, mpp_channel *c, uint64_t number) {
    if (s->two_phase) return reached(c, &c->all_reduced, offsetof(rank_counters, reduced), number + 1);
    if (s->payload) return 1; /* it was piggybacked on the agreement */
    if (s->wait_for < 0) return reached(c, &c->all_in, offsetof(rank_counters, in), number + 1);
    return atomic_load_explicit(&c->counters[s->wait_for].in, memory_order_acquire) > number;
}

/* Where in its buffers an operation is once it is done with this many chunks. */
static size_t offset_after(const shm_op *s, uint64_t chunks) {
    return (s->batches > 1 ? chunks / s->batches : chunks) * s->chunk_bytes;
}

static void reduce_part(shm_op *s, mpp_channel *c) {
    size_t length = mpp_chunk_length(s, s->bytes, s->reduced);
    size_t begin = mpp_part_begin(c, length, c->rank), end = mpp_part_begin(c, length, c->rank + 1);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_at(s, r, s->reduced) + begin;
    if (end > begin)
        mpp_reduce(&s->how, mpp_slot_at(s, c->rank, s->reduced) + begin, c->sources, c->size,
                   (end - begin) / s->element);
}

/* Whether this rank's data of the next chunk has come from the device it may be on. A call whose first one cannot come
 * is withdrawn. */
static int is_loaded(shm_op *s, mpp_channel *c) {
    mpp_staging *t = s->bus ? s->bus : s->op.staging;
    if (!t) return 1;
    int is_unheard = t->may_withdraw = !s->written && !s->checked;
    int is_there = s->bus ? mpp_bus_load(s, c, may_write) : mpp_stage_open(&s->op, offset_after(s, s->written));
    t->may_withdraw = 0;
    if (is_there || !is_unheard || !s->op.failure) return is_there;
    mpp_withdraw(s, s->op.mpi_error);
    return 1;
}

/* Whether a chunk was started, or is complete. */
static int move_pipeline(shm_op *s, mpp_channel *c) {
    int moved = 0;
    for (; s->started < s->written && all_written(s, s->started); s->started++, moved = 1)
        c->internode->start(s, s->started);
    return (s->reduced < s->started && c->internode->poll(s)) || moved;
}

static int publish_pipeline(shm_op *s, mpp_channel *c) {
    int moved = move_pipeline(s, c);
    uint64_t complete = s->first + s->reduced; /* some of them before it was the operation's turn */
    if (complete <= atomic_load_explicit(&c->counters[c->rank].reduced, memory_order_relaxed)) return moved;
    mpp_publish(c, MPP_REDUCED, complete);
    return 1;
}

static int write_next(shm_op *s, mpp_channel *c) {
    rank_counters *mine = &c->counters[c->rank];
    uint64_t number = s->first + s->written;
    if (s->written == s->chunks || !may_write(s, c, number) || !is_loaded(s, c)) return 0;
    if (s->write && !s->bus) {
        s->write(s, s->written, mpp_slot_at(s, c->rank, s->written));
        mpp_end_slot(&c->writing);
    }
    s->written++;
    mine->signature[number % (uint64_t)c->ring] = s->signature;
    mine->came[number % (uint64_t)c->ring] = s->op.begun;
    if (s->written == 1) mine->call[number % (uint64_t)c->ring] = s->call;
    mpp_publish(c, MPP_IN, number + 1);
    return 1;
}

/* One round over write, reduce, read; whether anything moved. */
static int advance(shm_op *s, mpp_channel *c) {
    int moved = write_next(s, c);
    if (!s->checked) return moved;
    uint64_t number = s->first + s->reduced;
    if (s->route && s->route->first_phase) {
        moved |= publish_pipeline(s, c);
    } else if (s->two_phase && s->reduced < s->written && all_written(s, s->reduced)) {
        reduce_part(s, c);
        s->reduced++;
        mpp_publish(c, MPP_REDUCED, number + 1);
        moved = 1;
    }
    number = s->first + s->done;
    if (s->done < s->written && (s->bus ? mpp_bus_store(s, c, may_read) : may_read(s, c, number))) {
        if (s->read && !s->bus) s->read(s, s->done);
        s->done++;
        if (s->op.staging) mpp_stage_close(s->op.staging, offset_after(s, s->done));
        mpp_publish(c, MPP_OUT, number + 1);
        moved = 1;
    }
    return moved;
}

/* Whether all ranks here have made this call; then, once, notes when they did. */
static int have_all_come(shm_op *s, mpp_channel *c) {
    if (!s->written || !all_written(s, 0)) return 0;
    if (!s->all_came && s->op.begun) mpp_note_calls(s, c);
    return s->all_came = 1;
}

static int check(shm_op *s, mpp_channel *c) { return have_all_come(s, c) ? mpp_check_calls(s, c) : MPP_PENDING; }

/* Between nodes each rank sees the errors of its own messages only, and nobody those of another one's device. Those
 * here wait for each other: whom one that failed has not finished this operation with fails alike. */
static void share_failure(shm_op *s, mpp_channel *c) {
    mpp_group *g = s->op.group;
    if (s->op.failure == MPP_FAILURE_MPI && g->tell) g->tell(g, MPP_FAILURE_MPI, s->op.mpi_error);
    mpp_share_failure(&s->op, c, s->first + (s->checked ? s->chunks : 1));
}

void mpp_share_failure(mpp_op *op, const mpp_channel *c, uint64_t end) {
    const mpp_topology *t = c->topology;
    for (int r = 0; atomic_load(&c->counters[0].is_broken) && !op->failure && r < c->size; r++) {
        int64_t failure = atomic_load(&c->counters[r].failure);
        if (!failure || atomic_load_explicit(&c->counters[r].out, memory_order_acquire) >= end) continue;
        op->detail[0] = 1 + (t ? t->members[t->first[t->here] + r] : r);
        mpp_fail(op, (int)(failure >> 32), (int)failure);
    }
}

/* Does what can be done now for the operation whose turn it is. */
static int move(shm_op *s, mpp_channel *c) {
    mpp_op *op = &s->op;
    int state = MPP_PENDING;
    /* A bound on the work done under the lock, so that other groups and threads get their turn. */
    for (int round = 0, moved = !op->failure; moved && s->done < s->chunks && round < 8; round++) {
        moved = advance(s, c);
        if (!s->checked) {
            state = check(s, c);
            moved |= s->checked;
            if (state == MPP_FAILED) break;
        }
        if (moved) atomic_fetch_add_explicit(&op->group->moves, 1, memory_order_relaxed);
    }
    if (s->done < s->chunks) share_failure(s, c);
    if (op->failure && c->internode && !c->internode->is_idle(s)) return MPP_PENDING;
    if (op->failure) return MPP_FAILED; /* also: data that does not come from the device */
    return s->done == s->chunks ? MPP_DONE : state;
}

/* When the first half is over: the second one goes unless it is wanted. */
static void drop_second(shm_op *s, mpp_channel *c) {
    if (c->head == s->second) mpp_drop_head(c);
}

static int is_aborted(const mpp_op *op) { return atomic_load_explicit(&op->group->aborted, memory_order_relaxed); }

static int overlaps(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t first = (uintptr_t)a, second = (uintptr_t)b;
    return a && b && first < second + b_bytes && second < first + a_bytes;
}

/* Whether an operation's data may be touched before the one in front of it is done: those of lists are not compared. */
static int is_apart(const shm_op *s, const shm_op *before) {
    const void *mine[] = {s->in, s->out}, *theirs[] = {before->in, before->out};
    if (s->in_list || s->out_list || before->in_list || before->out_list) return 0;
    for (int i = 0; i < 4; i++)
        if (overlaps(mine[i / 2], s->bytes, theirs[i % 2], before->bytes)) return 0;
    return 1;
}

/* Between nodes the next operation is agreed about, and its chunks are sent, while the last ones of the operation
 * before are under way: else the network would be idle until the answers are there. No rank reads received data, and no
 * call fails, before it is the operation's turn. An operation that can fail on this rank alone, because its data come
 * from a device, does not look ahead: a failure drops the receives that were posted. */
static void look_ahead(shm_op *s, mpp_channel *c) {
    const shm_op *before = c->head;
    if (before->later != s || before->written < before->chunks || !before->checked) return;
    if (before->op.failure || s->op.failure || before->op.staging || s->op.staging) return;
    if (before->how.has_premul || s->how.has_premul) return; /* their factors have one place in the channel */
    if (before->oom_after || c->oom_first || is_aborted(&s->op) || !is_apart(s, before)) return;
    if (s->checked || !s->written) write_next(s, c);
    if (s->checked && s->route && s->route->first_phase) move_pipeline(s, c);
    else if (!s->checked && have_all_come(s, c)) s->checked = mpp_ask_early(s, c);
}

static int step(mpp_op *op) {
    shm_op *s = (shm_op *)op;
    mpp_channel *c = op->group->channel;
    int state;
    if (c->head != s) {
        if (c->internode) look_ahead(s, c);
        return MPP_PENDING;
    }
    if (is_aborted(op) || c->failure) {
        if (c->internode && !c->internode->is_idle(s)) return MPP_PENDING; /* MPI still uses what was begun */
        state = mpp_fail(op, is_aborted(op) ? MPP_FAILURE_CANCELLED : c->failure, c->mpi_error);
    } else if (c->oom_first) return MPP_PENDING;
    else state = move(s, c);
    if (state == MPP_PENDING) return state;
    if (s->between_devices) mpp_peers_end(s, c, state);
    mpp_drop_head(c);
    if (s->second && !(state == MPP_DONE && s->half)) drop_second(s, c);
    return state;
}

static int arrived(mpp_op *op, int rank) {
    const mpp_channel *c = op->group->channel;
    if (c->topology && c->topology->node_of[rank] != c->topology->here) return -1;
    const rank_counters *theirs = &c->counters[c->topology ? c->topology->place_of[rank] : rank];
    const shm_op *s = (const shm_op *)op;
    if (atomic_load_explicit(&theirs->out, memory_order_acquire) >= s->first + s->chunks) return 2;
    return atomic_load_explicit(&theirs->in, memory_order_acquire) > s->first;
}

/* ---- calls that there is no memory for ---- */

/* Each takes one chunk number, as if this rank had made the call, and fails on all ranks. */
static int step_oom_placeholder(mpp_op *op) {
    shm_op *s = (shm_op *)op;
    mpp_channel *c = op->group->channel;
    while (c->oom_first && !is_aborted(op)) {
        s->first = atomic_load_explicit(&c->counters[c->rank].out, memory_order_relaxed); /* all before is done */
        if (move(s, c) == MPP_PENDING) return MPP_PENDING;
        s->written = s->done = 0;
        s->call.own = op->failure = 0;
        c->oom_first--;
        c->oom_total--;
    }
    if (c->oom_total && !is_aborted(op)) return MPP_PENDING; /* operations come first */
    c->oom_total = 0;
    return mpp_fail(op, MPP_FAILURE_MEMORY, 0);
}

void mpp_prepare_oom_placeholder(mpp_channel *c, mpp_group *g) {
    c->oom_placeholder = (shm_op){
        .op = {.group = g, .step = step_oom_placeholder, .arrived = arrived, .source = -1, .ours = 1, .in_short = 1},
        .chunk_bytes = c->slot_bytes,
        .batches = 1,
        .widening = 1,
        .wait_for = -1};
    mpp_sign(&c->oom_placeholder, MPP_NO_MEMORY, -1, 0);
}

uintptr_t mpp_shm_out_of_memory(mpp_group *g, int64_t wait_ns) {
    mpp_lock();
    if (!mpp_is_closed(g)) {
        mpp_channel *c = g->channel;
        if (c->tail) c->tail->oom_after++;
        else c->oom_first++;
        c->next++;
        if (c->oom_total++ == 0) mpp_begin(&c->oom_placeholder.op);
    }
    mpp_unlock();
    /* The call fails in any case. It waits so that the others learn of it even if this rank never calls again. */
    if (wait_ns > 0 && !mpp_is_closed(g)) mpp_wait((uintptr_t)&g->channel->oom_placeholder, wait_ns);
    return mpp_out_of_memory(g, 1);
}

/* ---- operations ---- */

static void discard_lists(mpp_op *op) {
    shm_op *s = (shm_op *)op;
    free((void *)s->in_list);
    free((void *)s->out_list);
    free(s->lengths);
    if (!s->second) return;
    mpp_lock(); /* the first half may be over, and nobody has begun the second one */
    drop_second(s, op->group->channel);
    mpp_unlock();
    mpp_discard(&s->second->op);
}

shm_op *mpp_new_shm_op(mpp_group *g, uintptr_t staging) {
    shm_op *s = mpp_new_op(sizeof *s, g, step, staging);
    if (!s) return NULL;
    s->op.discard = discard_lists;
    s->op.arrived = arrived;
    s->op.idle = g->channel->topology || staging ? MPP_BUSY : MPP_RINGS;
    s->op.in_short = 1;
    if (g->channel->topology) s->op.spins = MPP_SPINS_CROWDED; /* no slower with a core for each */
    s->wait_for = -1;
    s->chunk_bytes = g->channel->slot_bytes;
    s->batches = s->widening = 1;
    s->place = mpp_place_of(g, staging);
    if (s->place == MPP_ON_BUS) s->bus = s->op.staging;
    return s;
}

/* Takes the operation's chunk numbers and its place in the queue. */
void mpp_take_place(shm_op *s) {
    mpp_channel *c = s->op.group->channel;
    mpp_lock();
    s->first = c->next;
    c->next += s->chunks;
    if (c->tail) c->tail->later = s;
    else c->head = s;
    c->tail = s;
    if (s->second) mpp_take_place(s->second);
    mpp_unlock();
}

uintptr_t mpp_enqueue_shm(shm_op *s, int64_t wait_ns) {
    mpp_take_place(s);
    if (!s->op.staging) s->op.moves = (size_t)s->chunks * s->chunk_bytes;
    return mpp_start(&s->op, wait_ns);
}
