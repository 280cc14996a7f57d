/* Exchanges: every collective that only moves data between pairs of ranks, all_to_all, gather and scatter. As messages,
 * unless the comparison of the calls has moved the data too (shm/shm_exchange.c). */
#include <string.h>

#include "p2p/message_op.h"
#include "shm/shm.h"

static void add_exchange(message_op *m, const mpp_exchanged *x) {
    const mpp_group *g = m->op.group;
    for (int i = 1; i < g->size; i++) {
        int to = (g->rank + i) % g->size;
        if (x->send_bytes[to]) mpp_add_send(m, x->send[to], x->send_bytes[to], to);
    }
    for (int i = 1; i < g->size; i++) {
        int from = (g->rank + g->size - i) % g->size;
        if (x->recv_bytes[from]) mpp_add_receive(m, x->recv[from], x->recv_bytes[from], from);
    }
}

/* One tag for each exchange: a rank that disagrees about a length cannot shift the next one's data. The lower half is
 * for exchanges that were compared, which are counted only then. */
static int take_tag(mpp_group *g) {
    int half = g->tag_count / 2;
    return g->first_tag + half + (int)(g->sequence++ % (unsigned)(g->tag_count - half));
}

/* What all ranks must call alike, where an exchange is a part of that. */
typedef struct {
    int kind, root;
    const mpp_reduction *how;
    size_t count;
    const size_t *counts;
    int *later_tag;
} mpp_called;

static mpp_op *agreement_about(mpp_group *g, const mpp_exchanged *x, const mpp_called *call) {
    if (!call) return mpp_shm_compare(g, x);
    return mpp_shm_agree(g, call->kind, call->how, call->root, call->count, call->counts,
                         mpp_dtype_size(call->how->dtype), MPP_ON_DEVICE);
}

/* Of a rank that could copy between its device and the slots, where another one cannot. Under the lock although memory
 * may have to be pinned: it is known only now, and rare. */
static void begin_messages(message_op *m) {
    mpp_exchanged x;
    if (!mpp_shm_exchanged(m->op.agreement, &x)) return;
    m->op.staging->on_bus = 0;
    add_exchange(m, &x);
    mpp_stage_transfers(m);
    mpp_enter_sends(m);
    mpp_enter_receives(m);
}

static uintptr_t exchange(mpp_group *g, mpp_exchanged x, const mpp_called *call, int tag, uintptr_t staging,
                          int64_t wait_ns) {
    const uintptr_t *send = x.send, *recv = x.recv;
    const size_t *send_bytes = x.send_bytes, *recv_bytes = x.recv_bytes;
    size_t capacity = 0;
    if (!call && tag < 0 && g->channel && mpp_place_of(g, staging) == MPP_ON_BUS) x.bus = (mpp_staging *)staging;
    for (int r = 0; r < g->size; r++) capacity += mpp_chunks_of(send_bytes[r]) + mpp_chunks_of(recv_bytes[r]);
    message_op *m = mpp_new_message_op(g, capacity, MPP_NO_TAG, staging);
    int compared = g->channel && tag < 0;
    if (m && compared) m->op.agreement = agreement_about(g, &x, call);
    if (m && m->op.agreement) m->op.arrived = mpp_arrived_to_compare;
    if (!m || (compared && !m->op.agreement)) {
        if (m) mpp_discard(&m->op);
        return compared ? mpp_shm_out_of_memory(g, wait_ns) : mpp_out_of_memory(g);
    }
    size_t own = send_bytes[g->rank] < recv_bytes[g->rank] ? send_bytes[g->rank] : recv_bytes[g->rank];
    if (x.bus) {
        m->begin_messages = begin_messages;
        mpp_stage_on_bus(&m->op);
    } else if (staging) {
        add_exchange(m, &x);
        mpp_stage_transfers(m);
    }
    if (staging) {
        mpp_stage_copy(&m->op, recv[g->rank], send[g->rank], own);
    } else if (send[g->rank] < recv[g->rank] + own && recv[g->rank] < send[g->rank] + own) {
        if (send[g->rank] != recv[g->rank]) memmove((void *)recv[g->rank], (const void *)send[g->rank], own);
    } else {
        m->own = (const char *)send[g->rank];
        m->own_to = (char *)recv[g->rank];
        m->own_left = own;
    }
    /* One that is begun later is none that a caller waits in. */
    if (!staging && tag < 0) {
        size_t sent = mpp_sum_of(send_bytes, g->size), received = mpp_sum_of(recv_bytes, g->size);
        m->op.moves = sent > received ? sent : received;
    }
    if (call) m->later_tag = call->later_tag;
    mpp_lock();
    if (!compared && call) *call->later_tag = take_tag(g);
    if (!compared) m->tag = tag < 0 ? take_tag(g) : tag;
    if (!staging) add_exchange(m, &x);
    mpp_enter_sends(m);
    mpp_enter_receives(m);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}

/* Sends send[r] to every rank r and receives recv[r] from it; zero lengths are not sent at all, so both
 * sides must agree on them. A negative tag stands for the next one: the exchange has its place in the order of
 * collectives, and begins, where the group shares memory, once all ranks' lengths have been compared; that may have
 * moved the data as well. */
uintptr_t mpp_exchange(uintptr_t group, const uintptr_t *send, const size_t *send_bytes, const uintptr_t *recv,
                       const size_t *recv_bytes, int tag, uintptr_t staging, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    mpp_note(MPP_EXCHANGE, mpp_sum_of(send_bytes, g->size), -1);
    return exchange(g, (mpp_exchanged){send, recv, send_bytes, recv_bytes, staging != 0, NULL}, NULL, tag, staging,
                    wait_ns);
}

/* Both tags are taken once the calls have been compared: ranks that call something else take none. */
uintptr_t mpp_exchange_to_reduce(uintptr_t group, const uintptr_t *send, const size_t *send_bytes,
                                 const uintptr_t *recv, const size_t *recv_bytes, int kind, const mpp_reduction *how,
                                 int root, size_t count, const size_t *counts, int *later_tag, uintptr_t staging,
                                 int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    const mpp_called call = {kind, root, how, count, counts, later_tag};
    mpp_note(kind, count * mpp_dtype_size(how->dtype), root);
    return exchange(g, (mpp_exchanged){send, recv, send_bytes, recv_bytes, 1, NULL}, &call, -1, staging, wait_ns);
}

uintptr_t mpp_no_memory(uintptr_t group, uintptr_t staging, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    mpp_staging_free((mpp_staging *)staging);
    return g->channel ? mpp_shm_out_of_memory(g, wait_ns) : mpp_out_of_memory(g);
}
