/* Messages between pairs: send, recv, and exchanges (every collective that only moves data pairwise).
 *
 * A message longer than the chunk limit travels as several MPI messages in order; MPI's rule that
 * messages between two ranks with one tag do not overtake each other keeps them together.
 */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    mpi_handle request;
    size_t expected; /* bytes a receive must bring; SIZE_MAX for a send */
    int active;
} request_slot;

typedef struct {
    mpp_op op;
    int count, capacity;
    request_slot *slots;
    /* What a receive from any source still has to post once the first chunk has named the sender. */
    char *rest;
    size_t rest_bytes;
    int tag;
} message_op;

static size_t chunks_of(size_t bytes) { return bytes ? (bytes - 1) / mpp_chunk_limit + 1 : 1; }

static int status_source(const mpi_status *status) {
    int source;
    memcpy(&source, status->bytes + mpp_mpi.status_source_offset, sizeof source);
    return source;
}

/* Posts one message, in chunks. The MPI error of the first that could not be posted, or 0. */
static int post(message_op *m, char *buffer, size_t bytes, int peer, int tag, int receive) {
    do {
        size_t part = bytes < mpp_chunk_limit ? bytes : mpp_chunk_limit;
        request_slot *slot = &m->slots[m->count];
        mpi_handle comm = m->op.group->comm;
        int error = receive ? mpp_mpi.Irecv(buffer, (int)part, mpp_mpi.byte, peer, tag, comm, &slot->request)
                            : mpp_mpi.Isend(buffer, (int)part, mpp_mpi.byte, peer, tag, comm, &slot->request);
        if (error) {
            mpp_fail(&m->op, MPP_FAILURE_MPI, error);
            return error;
        }
        slot->expected = receive ? part : SIZE_MAX;
        slot->active = 1;
        m->count++;
        buffer += part;
        bytes -= part;
    } while (bytes);
    return 0;
}

static void check_length(message_op *m, request_slot *slot, mpi_status *status) {
    int received = 0;
    m->op.source = status_source(status);
    mpp_mpi.Get_count(status, mpp_mpi.byte, &received);
    if ((size_t)received == slot->expected) return;
    m->op.detail[0] = (int64_t)slot->expected;
    m->op.detail[1] = received;
    mpp_fail(&m->op, MPP_FAILURE_LENGTH, 0);
}

/* An error in one request does not end the operation: the others may still use their buffers. */
static int step(mpp_op *op) {
    message_op *m = (message_op *)op;
    int pending = 0;
    for (int i = 0; i < m->count; i++) {
        request_slot *slot = &m->slots[i];
        if (!slot->active) continue;
        mpi_status status;
        int flag, cancelled = 0;
        mpp_test(op, &slot->request, &status, &flag);
        if (!flag) {
            pending = 1;
            continue;
        }
        slot->active = 0;
        if (slot->expected == SIZE_MAX || op->failure == MPP_FAILURE_MPI) continue;
        mpp_mpi.Test_cancelled(&status, &cancelled);
        if (cancelled) mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
        else check_length(m, slot, &status);
        if (m->rest_bytes && !op->failure) {
            size_t bytes = m->rest_bytes;
            m->rest_bytes = 0;
            pending |= !post(m, m->rest, bytes, op->source, m->tag, 1);
        }
    }
    if (pending) return MPP_PENDING;
    return op->failure ? MPP_FAILED : MPP_DONE;
}

static void cancel(mpp_op *op) {
    message_op *m = (message_op *)op;
    m->rest_bytes = 0;
    for (int i = 0; i < m->count; i++) {
        request_slot *slot = &m->slots[i];
        /* Only receives: MPI-4 deprecates cancelling a send, and no MPI does it once the data is on its way. */
        if (slot->active && slot->expected != SIZE_MAX) mpp_mpi.Cancel(&slot->request);
    }
}

static void discard_slots(mpp_op *op) { free(((message_op *)op)->slots); }

static message_op *new_message_op(mpp_group *group, size_t capacity) {
    message_op *m = mpp_new_op(sizeof *m, group, step);
    if (!m) return NULL;
    m->slots = malloc((capacity ? capacity : 1) * sizeof *m->slots);
    if (!m->slots) {
        free(m);
        return NULL;
    }
    m->op.cancel = cancel;
    m->op.discard = discard_slots;
    return m;
}

uintptr_t mpp_send(uintptr_t group, uintptr_t buffer, size_t bytes, int peer, int tag, int64_t wait_ns) {
    message_op *m = new_message_op((mpp_group *)group, chunks_of(bytes));
    if (!m) return mpp_out_of_memory((mpp_group *)group);
    mpp_lock();
    post(m, (char *)buffer, bytes, peer, tag, 0);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}

uintptr_t mpp_recv(uintptr_t group, uintptr_t buffer, size_t bytes, int peer, int tag, int64_t wait_ns) {
    size_t chunks = chunks_of(bytes);
    message_op *m = new_message_op((mpp_group *)group, chunks);
    if (!m) return mpp_out_of_memory((mpp_group *)group);
    if (peer < 0) {
        size_t first = bytes < mpp_chunk_limit ? bytes : mpp_chunk_limit;
        m->rest = (char *)buffer + first;
        m->rest_bytes = bytes - first;
        bytes = first;
        peer = mpp_mpi.any_source;
    }
    m->tag = tag;
    mpp_lock();
    post(m, (char *)buffer, bytes, peer, tag, 1);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}

/* Sends send[r] to every rank r and receives recv[r] from it; zero lengths are not sent at all, so both
 * sides must agree on them. Receives are posted first: a large message then needs no second copy. */
uintptr_t mpp_exchange(uintptr_t group, const uintptr_t *send, const size_t *send_bytes, const uintptr_t *recv,
                       const size_t *recv_bytes, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    size_t capacity = 0;
    for (int r = 0; r < g->size; r++) capacity += chunks_of(send_bytes[r]) + chunks_of(recv_bytes[r]);
    message_op *m = new_message_op(g, capacity);
    if (!m) return mpp_out_of_memory(g);
    size_t own = send_bytes[g->rank] < recv_bytes[g->rank] ? send_bytes[g->rank] : recv_bytes[g->rank];
    if (own && send[g->rank] != recv[g->rank]) memmove((void *)recv[g->rank], (const void *)send[g->rank], own);
    mpp_lock();
    /* One tag for each exchange: a rank that disagrees about a length cannot shift the next one's data. */
    int tag = g->first_tag + (int)(g->sequence++ % (unsigned)g->tag_count);
    int error = 0;
    for (int i = 1; i < g->size && !error; i++) {
        int peer = (g->rank + g->size - i) % g->size;
        if (recv_bytes[peer]) error = post(m, (char *)recv[peer], recv_bytes[peer], peer, tag, 1);
    }
    for (int i = 1; i < g->size && !error; i++) {
        int peer = (g->rank + i) % g->size;
        if (send_bytes[peer]) error = post(m, (char *)send[peer], send_bytes[peer], peer, tag, 0);
    }
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}
