/* Messages between pairs: send, recv, and the messages of exchanges (exchange.c).
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

#include "p2p/message_op.h"
#include "shm/shm.h"

/* ---- the queues of receives and of sends, in program order ---- */

static void enter(message_op *m, int queue) { *MPP_END_OF(m->op.group->messages_left[queue], later[queue]) = m; }

static void leave(message_op *m, int queue) { MPP_TAKE_OUT(m->op.group->messages_left[queue], later[queue], m); }

void mpp_enter_queues(message_op *m) {
    if (m->unsent) enter(m, MPP_SENDS);
    if (m->unmatched) enter(m, MPP_RECEIVES);
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
    const message_op *earlier = m->op.group->messages_left[MPP_RECEIVES];
    for (; earlier && earlier != m; earlier = earlier->later[MPP_RECEIVES])
        if (part_for(earlier, m->tag, peer)) return 1;
    return 0;
}

/* ---- sends that cannot be begun at once ---- */

static void begin_send(message_op *m, transfer *t) {
    m->unsent--;
    mpp_post_send(&m->op, &t->message, t->message.buffer, t->message.bytes, t->message.peer, m->tag);
}

/* Whether an earlier message to the same rank with the same tag has not been begun. Others must not hold this one up:
 * what its receiver does next may be what their data is waiting for, on the device. */
static int is_behind(const message_op *m, const transfer *t) {
    const message_op *earlier = m->op.group->messages_left[MPP_SENDS];
    for (; earlier && earlier != m; earlier = earlier->later[MPP_SENDS])
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
    if (!m->unsent) leave(m, MPP_SENDS);
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
    if (--m->unmatched == 0) leave(m, MPP_RECEIVES);
}

/* Looks for a message. It belongs, as MPI has it, to the first receive in the queue that could take it: where this one
 * takes messages from anyone, that may be one before it, which waits for this sender. So a receive is held up by those
 * before it only as far as they want the same messages. */
static void match(message_op *m, transfer *t) {
    mpp_match match;
    int found, error = mpp_probe(m->op.group, t->message.peer, m->tag, &match, &found);
    if (!found && error) matched(m, t, error);
    if (!found) return;
    message_op *owner = m->op.group->messages_left[MPP_RECEIVES];
    int source = t->message.peer == mpp_mpi.any_source ? match.source : t->message.peer;
    while (!(t = part_for(owner, m->tag, source))) owner = owner->later[MPP_RECEIVES]; /* `m` at the latest */
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
        transfer *t = &m->transfers[i];
        if (t->posted) {
            t->posted = 0;
            found |= mpp_take_back(&m->op, &t->message);
        } else if (t->message.state == MPP_TO_MATCH || t->message.state == MPP_TO_SEND) {
            t->message.state = MPP_OVER;
            found = 1;
        }
    }
    m->unmatched = m->unsent = 0;
    leave(m, MPP_RECEIVES);
    leave(m, MPP_SENDS);
    return found;
}

static void cancel(mpp_op *op) {
    if (give_up((message_op *)op)) mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
}

/* Sends while the other nodes are asked: their answer and the message's beginning come in the time of one. */
static void send_early(message_op *m) {
    for (int i = 0; i < m->count; i++) {
        transfer *t = &m->transfers[i];
        if (t->message.state != MPP_TO_SEND || !mpp_shm_may_send_early(m->op.agreement, t->message.peer)) continue;
        m->tag = mpp_shm_next_tag(m->op.group);
        begin_send(m, t);
    }
    if (!m->unsent) leave(m, MPP_SENDS);
}

/* All lengths agree, so no message is longer than its buffer. MPI answers one that it finds posted at once; were it
 * matched here, the other rank could have this thread busy with what it is to send first. For the same reason the sends
 * are posted before: an answer that is there first has the other rank busy. */
static void post_receives(message_op *m) {
    for (int i = 0; i < m->count && !m->op.failure; i++) {
        transfer *t = &m->transfers[i];
        if (t->message.state != MPP_TO_MATCH) continue;
        m->unmatched--;
        t->posted = 1;
        mpp_receive_unmatched(&m->op, &t->message, m->tag);
    }
    if (!m->unmatched) leave(m, MPP_RECEIVES);
}

/* Whether the ranks' calls have been compared. Then the exchange begins; or it has failed, and MPI is to be done with
 * what was sent early. Goes on also when the exchange has been cancelled, as calls after it wait for its place in the
 * order. */
static int compare_calls(message_op *m) {
    mpp_op *agreement = m->op.agreement;
    int state = agreement->step(agreement);
    if (state == MPP_PENDING) {
        if (m->early && m->unsent) send_early(m);
        return 0;
    }
    m->compared = 1;
    if (state == MPP_FAILED) {
        memcpy(m->op.detail, agreement->detail, sizeof agreement->detail);
        give_up(m);
        mpp_fail(&m->op, agreement->failure, agreement->mpi_error);
        return 1;
    }
    m->tag = mpp_shm_tag(m->op.group);
    if (m->later_tag) *m->later_tag = mpp_shm_tag(m->op.group);
    if (((const shm_op *)agreement)->carries) give_up(m); /* no message is needed */
    else if (m->begin_messages) m->begin_messages(m);
    return 1;
}

/* A part of the block from this rank to itself; whether all is there. While messages are under way, and not before the
 * calls have been compared: a call that fails writes no result. */
static int copy_own(message_op *m) {
    size_t part = m->own_left < MPP_OWN_PART ? m->own_left : MPP_OWN_PART;
    if (!part || m->op.failure) return 1;
    if (m->op.staging) {
        mpp_copy_in_device(m->op.staging, MPP_DOWN, (uintptr_t)m->own_to, (uintptr_t)m->own, m->own_left);
        m->own_left = 0;
        return 1;
    }
    memcpy(m->own_to, m->own, part);
    m->own += part;
    m->own_to += part;
    m->own_left -= part;
    atomic_fetch_add_explicit(&m->op.group->moves, 1, memory_order_relaxed);
    return !m->own_left;
}

/* It is idle if it has nothing but receives, of which no message has come. */
static int idle_of(const message_op *m) {
    int least = MPP_RINGS;
    if (m->op.staging || m->own_left) return MPP_BUSY;
    for (int i = 0; i < m->count; i++) {
        const mpp_message *one = &m->transfers[i].message;
        if (one->state == MPP_OVER) continue;
        if (one->state != MPP_TO_MATCH) return MPP_BUSY;
        int idle = mpp_idle_until(m->op.group, one->peer);
        if (idle < least) least = idle;
    }
    return least;
}

/* An error in one transfer does not end the operation: the others may still use their buffers. */
static int step(mpp_op *op) {
    message_op *m = (message_op *)op;
    if (op->agreement && !m->compared && !compare_calls(m)) {
        op->idle = op->staging ? MPP_BUSY : mpp_idle_until(op->group, -1);
        return MPP_PENDING;
    }
    /* In an exchange each waits for each, and who has failed sends nothing any more. */
    if (op->staging && m->tag >= op->group->first_tag && op->group->channel)
        mpp_share_failure(op, op->group->channel, UINT64_MAX);
    if (op->staging && (op->failure || !mpp_stage_open(op, 0))) {
        if (op->failure) give_up(m);
        else return MPP_PENDING;
    }
    if (m->unsent) begin_sends(m);
    if (op->agreement && m->unmatched && !op->staging) post_receives(m);
    int over = 1;
    for (int i = 0; i < m->count; i++)
        if (m->transfers[i].message.state != MPP_OVER) over &= advance(m, i);
    over &= copy_own(m);
    op->idle = over ? MPP_BUSY : idle_of(m);
    if (!over) return MPP_PENDING;
    return op->failure ? MPP_FAILED : MPP_DONE;
}

/* ---- starting ---- */

static void discard_transfers(mpp_op *op) {
    message_op *m = (message_op *)op;
    for (int i = 0; i < m->count; i++) free(m->transfers[i].spill);
    free(m->transfers);
}

message_op *mpp_new_message_op(mpp_group *group, size_t capacity, int tag, uintptr_t staging) {
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

void mpp_add_message(message_op *m, uintptr_t buffer, size_t bytes, int peer, int state) {
    int is_send = state == MPP_TO_SEND, lane = lane_of(m, buffer, bytes, is_send ? MPP_LOAD : MPP_STORE);
    do {
        size_t part = bytes < mpp_chunk_limit ? bytes : mpp_chunk_limit;
        transfer *t = &m->transfers[m->count++];
        t->message = (mpp_message){.buffer = (char *)buffer, .bytes = part, .peer = peer, .state = state};
        t->lane = lane;
        if (is_send) m->unsent++;
        else m->unmatched++;
        if (is_send && !m->op.staging && !m->op.agreement && !is_behind(m, t)) begin_send(m, t);
        buffer += part;
        bytes -= part;
    } while (bytes);
}

void mpp_stage_transfers(message_op *m) {
    const mpp_staging *t = m->op.staging;
    mpp_stage_begin(&m->op, 0);
    for (int i = 0; i < m->count && !t->error; i++) {
        transfer *part = &m->transfers[i];
        size_t offset = (uintptr_t)part->message.buffer - t->lanes[part->lane].device;
        part->message.buffer = mpp_staged(t, part->lane, 0) + offset;
    }
}

static uintptr_t start_message(const mpp_operands *o, int peer, int state) {
    mpp_group *g = (mpp_group *)o->of;
    message_op *m = mpp_new_message_op(g, mpp_chunks_of(o->count), o->tag, o->staging);
    if (!m) return mpp_out_of_memory(g, 0);
    if (o->staging) {
        mpp_add_message(m, o->input, o->count, peer, state);
        mpp_stage_transfers(m);
    }
    mpp_lock();
    if (!o->staging) mpp_add_message(m, o->input, o->count, peer, state);
    mpp_enter_queues(m);
    mpp_note_message_order(g, o->tag);
    mpp_unlock();
    return mpp_start(&m->op, o->wait_ns);
}

uintptr_t mpp_send(const mpp_operands *o) {
    mpp_note(MPP_SEND, o->count, o->peer);
    return start_message(o, o->peer, MPP_TO_SEND);
}

uintptr_t mpp_recv(const mpp_operands *o) {
    mpp_note(MPP_RECV, o->count, o->peer);
    return start_message(o, o->peer < 0 ? mpp_mpi.any_source : o->peer, MPP_TO_MATCH);
}
