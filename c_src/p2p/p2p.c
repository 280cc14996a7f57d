/* Messages between pairs: send, recv, and exchanges (every collective that only moves data pairwise).
 *
 * A message longer than the chunk limit travels as several MPI messages in order; MPI's rule that messages between two
 * ranks with one tag do not overtake each other keeps them together.
 *
 * Receives are matched (message/message.h): Open MPI 5.0 writes past a posted buffer that is too small, whatever error
 * it then returns. A message of the wrong length is received all the same, into memory of our own, and the channel
 * stays in order.
 *
 * A send whose data is still on its way from a CUDA device is not begun yet. Later sends that could be taken for it
 * wait behind it, as messages must not overtake each other. A message is staged as one piece, because the other side
 * may have its tensor elsewhere, and would cut it up in another way or not at all.
 */
#include <stdlib.h>
#include <string.h>

#include "message/message.h"
#include "shm/shm.h"

enum { NO_TAG = -1 }; /* of an exchange that is not to begin yet; no message has it */

typedef struct {
    mpp_message message; /* its tag is the operation's */
    mpp_match match;     /* in the state MPP_TO_RECEIVE */
    char *spill;         /* where a message of the wrong length goes */
    int lane;
} transfer;

typedef struct message_op {
    mpp_op op;
    int count, tag;
    int unmatched, unsent;            /* receives still to be matched, sends still to be begun */
    struct message_op *later;         /* in group->receives, until all of it is matched */
    struct message_op *later_to_send; /* in group->sends, until all of it is begun */
    transfer *transfers;
} message_op;

static size_t chunks_of(size_t bytes) { return bytes ? (bytes - 1) / mpp_chunk_limit + 1 : 1; }

/* ---- the queue of receives, in program order ---- */

static void enter_queue(message_op *m) {
    message_op **end = &m->op.group->receives;
    if (!m->unmatched) return;
    while (*end) end = &(*end)->later;
    *end = m;
}

static void leave_queue(message_op *m) {
    for (message_op **at = &m->op.group->receives; *at; at = &(*at)->later) {
        if (*at != m) continue;
        *at = m->later;
        return;
    }
}

/* The first part of an operation that would take a message from `peer`, or whatever one that any_source stands for. */
static transfer *part_for(const message_op *m, int tag, int peer) {
    if (m->tag != tag) return NULL;
    for (int i = 0; i < m->count; i++) {
        transfer *t = &m->transfers[i];
        if (t->message.state == MPP_TO_MATCH && (t->message.peer == peer || t->message.peer == mpp_mpi.any_source))
            return t;
    }
    return NULL;
}

/* Whether an earlier receive looks for every message that this one could take, and would get it. */
static int is_covered(const message_op *m, int peer) {
    for (const message_op *earlier = m->op.group->receives; earlier && earlier != m; earlier = earlier->later)
        if (part_for(earlier, m->tag, peer)) return 1;
    return 0;
}

/* ---- sends that cannot be begun at once ---- */

static void begin_send(message_op *m, transfer *t) {
    m->unsent--;
    mpp_post_send(&m->op, &t->message, t->message.buffer, t->message.bytes, t->message.peer, m->tag);
}

static void enter_sends(message_op *m) {
    message_op **end = &m->op.group->sends;
    if (!m->unsent) return;
    while (*end) end = &(*end)->later_to_send;
    *end = m;
}

static void leave_sends(message_op *m) {
    for (message_op **at = &m->op.group->sends; *at; at = &(*at)->later_to_send) {
        if (*at != m) continue;
        *at = m->later_to_send;
        return;
    }
}

/* Whether an earlier message to the same rank with the same tag has not been begun. Others must not hold this one up:
 * what its receiver does next may be what their data is waiting for, on the device. */
static int is_behind(const message_op *m, const transfer *t) {
    for (const message_op *earlier = m->op.group->sends; earlier && earlier != m; earlier = earlier->later_to_send)
        for (int i = 0; i < earlier->count && earlier->tag == m->tag; i++)
            if (earlier->transfers[i].message.state == MPP_TO_SEND &&
                earlier->transfers[i].message.peer == t->message.peer)
                return 1;
    return 0;
}

static void begin_sends(message_op *m) {
    for (int i = 0; i < m->count; i++)
        if (m->transfers[i].message.state == MPP_TO_SEND && !is_behind(m, &m->transfers[i]))
            begin_send(m, &m->transfers[i]);
    if (!m->unsent) leave_sends(m);
}

/* ---- the state of one transfer ---- */

static void came_from(message_op *m, int source) {
    m->op.source = source;
    for (int i = 0; i < m->count; i++)
        if (m->transfers[i].message.peer == mpp_mpi.any_source) m->transfers[i].message.peer = source;
}

/* Takes the message that was matched. One of the wrong length needs memory of our own; while there is none it stays
 * where it is, and the operation pending: what is longer than the user's buffer must not go there. The same where the
 * device has failed, and there may be no buffer. */
static void take(message_op *m, transfer *t) {
    int length = t->match.length, fits = (size_t)length == t->message.bytes;
    if (!fits && !m->op.failure) {
        m->op.detail[0] = (int64_t)t->message.bytes;
        m->op.detail[1] = length;
        mpp_fail(&m->op, MPP_FAILURE_LENGTH, 0);
    }
    if (!fits || m->op.failure == MPP_FAILURE_CUDA) {
        t->spill = malloc(length ? (size_t)length : 1);
        if (!t->spill) return;
    }
    mpp_receive(&m->op, &t->message, &t->match, t->spill ? t->spill : t->message.buffer, length);
}

static void matched(message_op *m, transfer *t, int error) {
    t->message.state = error ? MPP_OVER : MPP_TO_RECEIVE;
    if (error) mpp_fail(&m->op, MPP_FAILURE_MPI, error);
    if (--m->unmatched == 0) leave_queue(m);
}

/* Looks for a message. It belongs, as MPI has it, to the first receive in the queue that could take it: where this one
 * takes messages from anyone, that may be one before it, which waits for this sender. So a receive is held up by those
 * before it only as far as they want the same messages. */
static void match(message_op *m, transfer *t) {
    mpp_match match;
    int found, error = mpp_probe(m->op.group, t->message.peer, m->tag, &match, &found);
    if (!found && error) matched(m, t, error);
    if (!found) return;
    message_op *owner = m->op.group->receives;
    int source = t->message.peer == mpp_mpi.any_source ? match.source : t->message.peer;
    while (!(t = part_for(owner, m->tag, source))) owner = owner->later; /* `m` at the latest */
    t->match = match;
    came_from(owner, source);
    matched(owner, t, error);
}

static int advance(message_op *m, int i) {
    transfer *t = &m->transfers[i];
    int before = t->message.state;
    if (t->message.state == MPP_TO_MATCH) {
        /* the chunks of one message, in order */
        int first = i == 0 || m->transfers[i - 1].message.peer != t->message.peer ||
                    m->transfers[i - 1].message.state != MPP_TO_MATCH;
        if (first && !is_covered(m, t->message.peer)) match(m, t);
    }
    if (t->message.state == MPP_TO_RECEIVE) take(m, t);
    int over = mpp_test_message(&m->op, &t->message) != MPP_PENDING;
    if (t->message.state != before) atomic_fetch_add_explicit(&m->op.group->moves, 1, memory_order_relaxed);
    return over;
}

/* What has not been begun never will be; whether there was anything. */
static int give_up(message_op *m) {
    int found = 0;
    for (int i = 0; i < m->count; i++) {
        if (m->transfers[i].message.state != MPP_TO_MATCH && m->transfers[i].message.state != MPP_TO_SEND) continue;
        m->transfers[i].message.state = MPP_OVER;
        found = 1;
    }
    m->unmatched = m->unsent = 0;
    leave_queue(m);
    leave_sends(m);
    return found;
}

static void cancel(mpp_op *op) {
    if (give_up((message_op *)op)) mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
}

/* MPP_DONE: the ranks' calls have been compared, and the exchange may begin. Goes on also when the exchange has been
 * cancelled, as calls after it wait for its place in the order. */
static int agree(message_op *m) {
    mpp_op *agreement = m->op.agreement;
    int state = agreement->step(agreement);
    if (state == MPP_DONE) m->tag = mpp_shm_tag(m->op.group);
    if (state != MPP_FAILED) return state;
    memcpy(m->op.detail, agreement->detail, sizeof agreement->detail);
    give_up(m);
    return mpp_fail(&m->op, agreement->failure, 0);
}

/* An error in one transfer does not end the operation: the others may still use their buffers. */
static int step(mpp_op *op) {
    message_op *m = (message_op *)op;
    int state = m->tag == NO_TAG ? agree(m) : MPP_DONE;
    if (state != MPP_DONE) return state;
    if (op->staging && !mpp_stage_open(op, 0)) {
        if (op->failure) give_up(m);
        else return MPP_PENDING;
    }
    if (m->unsent) begin_sends(m);
    int over = 1;
    for (int i = 0; i < m->count; i++)
        if (m->transfers[i].message.state != MPP_OVER) over &= advance(m, i);
    if (!over) return MPP_PENDING;
    return op->failure ? MPP_FAILED : MPP_DONE;
}

/* ---- starting ---- */

static void discard_transfers(mpp_op *op) {
    message_op *m = (message_op *)op;
    if (op->agreement) mpp_discard(op->agreement);
    for (int i = 0; i < m->count; i++) free(m->transfers[i].spill);
    free(m->transfers);
}

static message_op *new_message_op(mpp_group *group, size_t capacity, int tag, uintptr_t staging) {
    message_op *m = mpp_new_op(sizeof *m, group, step, staging);
    if (!m) return NULL;
    m->tag = tag;
    m->op.cancel = cancel;
    m->op.discard = discard_transfers;
    m->transfers = calloc(capacity ? capacity : 1, sizeof *m->transfers);
    if (m->transfers) return m;
    mpp_discard(&m->op);
    return NULL;
}

/* The buffer as a lane; one that goes to several ranks is one lane. */
static int lane_of(message_op *m, uintptr_t buffer, size_t bytes, int direction) {
    const mpp_staging *t = m->op.staging;
    const mpp_lane *before = t && t->lane_count ? &t->lanes[t->lane_count - 1] : NULL;
    if (!t) return 0;
    if (before && before->device == buffer && before->bytes == bytes && before->direction == direction)
        return t->lane_count - 1;
    return mpp_add_lane(&m->op, buffer, bytes, direction);
}

static transfer *add(message_op *m, uintptr_t buffer, size_t bytes, int peer, int lane, int state) {
    transfer *t = &m->transfers[m->count++];
    t->message = (mpp_message){.buffer = (char *)buffer, .bytes = bytes, .peer = peer, .state = state};
    t->lane = lane;
    return t;
}

static void add_send(message_op *m, uintptr_t buffer, size_t bytes, int peer) {
    int lane = lane_of(m, buffer, bytes, MPP_LOAD);
    do {
        size_t part = bytes < mpp_chunk_limit ? bytes : mpp_chunk_limit;
        transfer *t = add(m, buffer, part, peer, lane, MPP_TO_SEND);
        m->unsent++;
        if (!m->op.staging && !m->op.agreement && !is_behind(m, t)) begin_send(m, t);
        buffer += part;
        bytes -= part;
    } while (bytes);
}

static void add_receive(message_op *m, uintptr_t buffer, size_t bytes, int peer) {
    int lane = lane_of(m, buffer, bytes, MPP_STORE);
    do {
        size_t part = bytes < mpp_chunk_limit ? bytes : mpp_chunk_limit;
        add(m, buffer, part, peer, lane, MPP_TO_MATCH);
        m->unmatched++;
        buffer += part;
        bytes -= part;
    } while (bytes);
}

/* All transfers are there, with addresses in the device's memory. Not under the lock: memory may have to be pinned. */
static void stage_transfers(message_op *m) {
    const mpp_staging *t = m->op.staging;
    mpp_stage_begin(&m->op, 0);
    for (int i = 0; i < m->count && !t->error; i++) {
        transfer *part = &m->transfers[i];
        size_t offset = (uintptr_t)part->message.buffer - t->lanes[part->lane].device;
        part->message.buffer = mpp_staged(t, part->lane, 0) + offset;
    }
}

uintptr_t mpp_send(uintptr_t group, uintptr_t buffer, size_t bytes, int peer, int tag, uintptr_t staging,
                   int64_t wait_ns) {
    mpp_note(MPP_SEND, bytes, peer);
    message_op *m = new_message_op((mpp_group *)group, chunks_of(bytes), tag, staging);
    if (!m) return mpp_out_of_memory((mpp_group *)group);
    if (staging) {
        add_send(m, buffer, bytes, peer);
        stage_transfers(m);
    }
    mpp_lock();
    if (!staging) add_send(m, buffer, bytes, peer);
    enter_sends(m);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}

uintptr_t mpp_recv(uintptr_t group, uintptr_t buffer, size_t bytes, int peer, int tag, uintptr_t staging,
                   int64_t wait_ns) {
    mpp_note(MPP_RECV, bytes, peer);
    message_op *m = new_message_op((mpp_group *)group, chunks_of(bytes), tag, staging);
    if (!m) return mpp_out_of_memory((mpp_group *)group);
    add_receive(m, buffer, bytes, peer < 0 ? mpp_mpi.any_source : peer);
    if (staging) stage_transfers(m);
    mpp_lock();
    enter_queue(m);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}

typedef struct {
    const uintptr_t *send, *recv;
    const size_t *send_bytes, *recv_bytes;
} exchange;

static void add_exchange(message_op *m, const exchange *x) {
    const mpp_group *g = m->op.group;
    for (int i = 1; i < g->size; i++) {
        int to = (g->rank + i) % g->size;
        if (x->send_bytes[to]) add_send(m, x->send[to], x->send_bytes[to], to);
    }
    for (int i = 1; i < g->size; i++) {
        int from = (g->rank + g->size - i) % g->size;
        if (x->recv_bytes[from]) add_receive(m, x->recv[from], x->recv_bytes[from], from);
    }
}

/* One tag for each exchange: a rank that disagrees about a length cannot shift the next one's data. The lower half is
 * for exchanges that were compared, which are counted only then. */
static int take_tag(mpp_group *g) {
    int half = g->tag_count / 2;
    return g->first_tag + half + (int)(g->sequence++ % (unsigned)(g->tag_count - half));
}

/* For an exchange that is begun later, at a time of each rank's own, when others may have been begun. */
int mpp_next_tag(uintptr_t group) {
    mpp_lock();
    int tag = take_tag((mpp_group *)group);
    mpp_unlock();
    return tag;
}

/* Sends send[r] to every rank r and receives recv[r] from it; zero lengths are not sent at all, so both
 * sides must agree on them. A negative tag stands for the next one: the exchange has its place in the order of
 * collectives, and begins, where the group shares memory, once all ranks' lengths have been compared. */
uintptr_t mpp_exchange(uintptr_t group, const uintptr_t *send, const size_t *send_bytes, const uintptr_t *recv,
                       const size_t *recv_bytes, int tag, uintptr_t staging, int64_t wait_ns) {
    mpp_note(MPP_EXCHANGE, mpp_sum_of(send_bytes, ((mpp_group *)group)->size), -1);
    mpp_group *g = (mpp_group *)group;
    const exchange x = {send, recv, send_bytes, recv_bytes};
    size_t capacity = 0;
    for (int r = 0; r < g->size; r++) capacity += chunks_of(send_bytes[r]) + chunks_of(recv_bytes[r]);
    message_op *m = new_message_op(g, capacity, NO_TAG, staging);
    int compared = g->channel && tag < 0;
    if (m && compared) m->op.agreement = mpp_shm_compare(g, send_bytes, recv_bytes);
    if (!m || (compared && !m->op.agreement)) {
        if (m) mpp_discard(&m->op);
        return compared ? mpp_shm_out_of_memory(g, wait_ns) : mpp_out_of_memory(g);
    }
    size_t own = send_bytes[g->rank] < recv_bytes[g->rank] ? send_bytes[g->rank] : recv_bytes[g->rank];
    if (staging) {
        add_exchange(m, &x);
        stage_transfers(m);
        mpp_stage_copy(&m->op, recv[g->rank], send[g->rank], own);
    } else if (own && send[g->rank] != recv[g->rank]) {
        memmove((void *)recv[g->rank], (const void *)send[g->rank], own);
    }
    /* One that is begun later is none that a caller waits in. */
    if (!staging && tag < 0) {
        size_t sent = mpp_sum_of(send_bytes, g->size), received = mpp_sum_of(recv_bytes, g->size);
        m->op.moves = sent > received ? sent : received;
    }
    mpp_lock();
    if (!compared) m->tag = tag < 0 ? take_tag(g) : tag;
    if (!staging) add_exchange(m, &x);
    enter_sends(m);
    enter_queue(m);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}
