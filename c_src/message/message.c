#include "message/message.h"

#include "engine/bell.h"

#include <stdlib.h>
#include <string.h>

/* MPI has taken it, or said why not. */
static void note_begun(mpp_op *op, mpp_message *m, int error) {
    m->state = error ? MPP_OVER : MPP_ACTIVE;
    if (error) mpp_fail(op, MPP_FAILURE_MPI, error);
}

void mpp_post_send(mpp_op *op, mpp_message *m, const void *buffer, size_t bytes, int peer, int tag) {
    *m = (mpp_message){.bytes = bytes, .peer = peer, .tag = tag};
    const mpp_group *g = op->group;
    note_begun(op, m, mpp_mpi.Isend(buffer, (int)bytes, mpp_mpi.byte, peer, g->tags_from + tag, g->comm, &m->request));
    mpp_ring_rank(op->group, peer);
}

void mpp_post_recv(mpp_message *m, void *buffer, size_t bytes, int peer, int tag) {
    *m = (mpp_message){.buffer = buffer, .bytes = bytes, .peer = peer, .tag = tag, .state = MPP_TO_MATCH};
}

int mpp_probe(const mpp_group *group, int peer, int tag, mpp_match *match, int *found) {
    mpi_status status;
    *found = 0;
    int error = mpp_mpi.Improbe(peer, group->tags_from + tag, group->comm, found, &match->handle, &status);
    if (error || !*found) return error;
    memcpy(&match->source, status.bytes + mpp_mpi.status_source_offset, sizeof match->source);
    return mpp_mpi.Get_count(&status, mpp_mpi.byte, &match->length);
}

void mpp_receive(mpp_op *op, mpp_message *m, mpp_match *match, void *buffer, int bytes) {
    note_begun(op, m, mpp_mpi.Imrecv(buffer, bytes, mpp_mpi.byte, &match->handle, &m->request));
    mpp_ring_rank(op->group, m->peer);
}

void mpp_receive_unmatched(mpp_op *op, mpp_message *m, int tag) {
    const mpp_group *g = op->group;
    int bytes = (int)m->bytes;
    note_begun(op, m, mpp_mpi.Irecv(m->buffer, bytes, mpp_mpi.byte, m->peer, g->tags_from + tag, g->comm, &m->request));
}

int mpp_take_back(mpp_op *op, mpp_message *m) {
    if (mpp_test_message(op, m) != MPP_PENDING) return 0;
    mpp_mpi.Cancel(&m->request); /* MPI_Test then ends it */
    return 1;
}

int mpp_test_message(mpp_op *op, mpp_message *m) {
    if (m->state != MPP_ACTIVE) return m->state == MPP_OVER ? MPP_DONE : MPP_PENDING;
    int state = mpp_test(op, &m->request);
    if (state == MPP_PENDING) return state;
    m->state = MPP_OVER;
    mpp_ring_rank(op->group, m->peer);
    return state;
}

/* Whether the message was found. */
static int match(mpp_op *op, mpp_message *m) {
    mpp_match match;
    int found, error = mpp_probe(op->group, m->peer, m->tag, &match, &found);
    if (!error && !found) return 0;
    if (error) {
        m->state = MPP_OVER;
        mpp_fail(op, MPP_FAILURE_MPI, error);
        return 1;
    }
    if ((size_t)match.length > m->bytes) abort(); /* no rank sends that: memory is corrupt */
    m->bytes = (size_t)match.length;
    mpp_receive(op, m, &match, m->buffer, match.length);
    return 1;
}

int mpp_test_all(mpp_op *op, mpp_message *messages, int count) {
    int over = 1;
    for (int i = 0; i < count; i++) {
        mpp_message *m = &messages[i];
        if (m->state == MPP_TO_MATCH && match(op, m))
            atomic_fetch_add_explicit(&op->group->moves, 1, memory_order_relaxed);
        over &= mpp_test_message(op, m) != MPP_PENDING;
    }
    return over;
}

int mpp_finish_all(mpp_op *op, mpp_message *messages, int count) {
    for (int i = 0; i < count; i++)
        if (messages[i].state == MPP_TO_MATCH) messages[i].state = MPP_OVER;
    return mpp_test_all(op, messages, count);
}
