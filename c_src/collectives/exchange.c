/* Exchanges: every collective that only moves data between pairs of ranks, all_to_all, gather and scatter. Their
 * lengths are compared; and where all ranks are on one node, and it is worth it, their data goes through the slots,
 * else in messages.
 *
 * A slot carries a piece of this rank's block for each of the others, in places of `chunk_bytes`. With more ranks than
 * cache lines in a slot those are a batch of them, and the next batches come in the next chunks. How many chunks that
 * takes only all ranks together know: each publishes how many its own longest block does, and signatures.c has the rule
 * by which all decide alike.
 *
 * Between nodes short blocks are sent while the calls are compared. After a disagreement internode/drain.c drops them.
 */
#include <stdlib.h>
#include <string.h>

#include "collectives/collective.h"
#include "p2p/message_op.h"
#include "shm/shm.h"
#include "shm/signatures.h"

/* What goes to each rank and comes from it. */
typedef struct {
    const uintptr_t *send, *recv;
    const size_t *send_bytes, *recv_bytes;
    int is_staged;
    mpp_staging *bus; /* of a rank that can copy between its device and the slots; else NULL */
} exchanged;

/* ---- where in a slot what lies ---- */

static size_t whole_lines(size_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

/* What a rank sends to each and what it expects, at the beginning of its first slot: for the words of an error. */
static size_t lengths_bytes(const mpp_channel *c) { return 2 * (size_t)c->size * sizeof(size_t); }

static int lengths_fit(const mpp_channel *c) { return lengths_bytes(c) <= c->slot_bytes; }

/* What is left of a slot for pieces. */
static size_t room(const mpp_channel *c) { return c->slot_bytes - whole_lines(lengths_bytes(c)); }

static int may_carry(const mpp_group *g) {
    const mpp_channel *c = g->channel;
    return mpp_carries(g) && c->size > 1 && !c->topology && whole_lines(lengths_bytes(c)) <= c->slot_bytes / 2;
}

static int places(const mpp_channel *c) {
    size_t most = room(c) / CACHE_LINE, others = (size_t)c->size - 1;
    return (int)(others < most ? others : most);
}

/* The piece of a block that a chunk carries; of no length: none. */
static mpp_stretch piece_of(const shm_op *s, uint64_t chunk, int from, int to, size_t bytes) {
    const mpp_channel *c = s->op.group->channel;
    mpp_stretch piece = mpp_piece_in_slot(s, chunk, (to - from - 1 + c->size) % c->size, places(c), bytes);
    piece.begin += whole_lines(lengths_bytes(c));
    return piece;
}

static void write_slot(shm_op *s, uint64_t chunk, char *slot) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, mpp_piece_number(s, chunk));
    if (chunk == 0) memcpy(slot, s->lengths, lengths_bytes(c));
    for (int to = 0; s->in_list && to < c->size; to++) {
        if (to == c->rank) continue;
        mpp_stretch piece = piece_of(s, chunk, c->rank, to, s->lengths[to]);
        if (piece.length) mpp_to_slot(s, slot + piece.begin, (const char *)s->in_list[to] + offset, piece.length);
    }
}

static void read_slots(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, mpp_piece_number(s, chunk));
    for (int i = 1; s->carries && i < c->size; i++) {
        int from = (c->rank + i) % c->size;
        mpp_stretch piece = piece_of(s, chunk, from, c->rank, s->lengths[c->size + from]);
        const char *slot = mpp_slot_at(s, from, chunk);
        if (piece.length) mpp_from_slot(s, (char *)s->out_list[from] + offset, slot + piece.begin, piece.length);
    }
}

/* ---- between devices ---- */

static void pull_from_all(shm_op *s) {
    mpp_channel *c = s->op.group->channel;
    for (int i = 1; i < c->size; i++) {
        int from = (c->rank + i) % c->size;
        size_t length = s->lengths[c->size + from];
        uintptr_t block = length ? mpp_peer_address(s, from) : 0;
        if (block) mpp_copy_in_device(s->bus, MPP_UP, s->out_list[from], block, length);
    }
}

/* ---- the lengths ---- */

/* Every length that one rank sends and the other expects is hashed by both. So the hashes of all ranks, taken together
 * with XOR, cancel out if all lengths agree: one word per rank is enough. */
static uint64_t balance_of(const mpp_group *g, const exchanged *x) {
    uint64_t sum = 0, me = (uint64_t)g->rank;
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) continue;
        if (x->send_bytes[r]) sum ^= mpp_mix(mpp_mix(me << 32 | (uint64_t)r, 0), x->send_bytes[r]);
        if (x->recv_bytes[r]) sum ^= mpp_mix(mpp_mix((uint64_t)r << 32 | me, 0), x->recv_bytes[r]);
    }
    return sum;
}

/* The first pair of ranks that do not agree: detail[0] sends `bytes` to `root`, which expects `own`. */
static void find_imbalance(shm_op *s, mpp_channel *c) {
    s->theirs = (mpp_call){.kind = MPP_EXCHANGE, .root = -1, .has_lengths = 1};
    if (!lengths_fit(c)) return;
    for (int to = 0; to < c->size; to++) {
        const size_t *expected = (const size_t *)mpp_slot_of(c, to, s->first) + c->size;
        for (int from = 0; from < c->size; from++) {
            size_t sent = ((const size_t *)mpp_slot_of(c, from, s->first))[to];
            if (from == to || sent == expected[from]) continue;
            s->theirs.root = to;
            s->theirs.bytes = sent;
            s->theirs.own = expected[from];
            s->op.detail[0] = from;
            return;
        }
    }
}

/* Whether there was memory for it. */
static int keep_lengths(shm_op *s, const exchanged *x) {
    size_t size = (size_t)s->op.group->size;
    s->lengths = malloc(2 * size * sizeof *s->lengths);
    if (!s->lengths) return 0;
    memcpy(s->lengths, x->send_bytes, size * sizeof *s->lengths);
    memcpy(s->lengths + size, x->recv_bytes, size * sizeof *s->lengths);
    return 1;
}

/* What the rule needs of this rank. */
static int prepare_to_carry(shm_op *s, const exchanged *x) {
    const mpp_channel *c = s->op.group->channel;
    size_t longest = 0;
    s->in_list = mpp_copy_list(x->send, c->size);
    s->out_list = mpp_copy_list(x->recv, c->size);
    if (!s->in_list || !s->out_list) return 0;
    s->chunk_bytes = room(c) / (size_t)places(c) / CACHE_LINE * CACHE_LINE;
    s->batches = (uint64_t)((c->size - 2) / places(c) + 1);
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank) continue;
        s->call.bytes += x->send_bytes[r];
        if (x->send_bytes[r] > longest) longest = x->send_bytes[r];
        if (x->recv_bytes[r] > longest) longest = x->recv_bytes[r];
    }
    s->call.chunks = (longest ? (longest - 1) / s->chunk_bytes + 1 : 1) * s->batches;
    s->read = read_slots;
    return 1;
}

/* An operation that an exchange steps before it begins, and owns: it is done if every rank sends what the others
 * expect. Takes the exchange's place in the order. NULL: no memory. */
static mpp_op *compare(mpp_group *g, const exchanged *x) {
    shm_op *s = mpp_new_agreement(g);
    if (!s) return NULL;
    s->bus = x->bus;
    if (s->bus) s->place = MPP_ON_BUS;
    s->pull = pull_from_all;
    if (may_carry(g)) mpp_offer(s, x->send, x->send_bytes, INT64_MAX, x->recv_bytes);
    mpp_sign(s, MPP_EXCHANGE, -1, 0);
    s->find_imbalance = find_imbalance;
    s->call.own = balance_of(g, x);
    int carries = may_carry(g) && (!x->is_staged || x->bus);
    if (!carries) s->call.divisor = MPP_IN_MESSAGES;
    if (!g->channel->topology && lengths_fit(g->channel)) {
        if (!keep_lengths(s, x) || (carries && !prepare_to_carry(s, x))) {
            mpp_discard(&s->op);
            return NULL;
        }
        s->write = write_slot;
    }
    mpp_take_place(s);
    return &s->op;
}

/* ---- as messages ---- */

static void add_exchange(message_op *m, const exchanged *x) {
    const mpp_group *g = m->op.group;
    for (int i = 1; i < g->size; i++) {
        int to = (g->rank + i) % g->size;
        if (x->send_bytes[to]) mpp_add_message(m, x->send[to], x->send_bytes[to], to, MPP_TO_SEND);
    }
    for (int i = 1; i < g->size; i++) {
        int from = (g->rank + g->size - i) % g->size;
        if (x->recv_bytes[from]) mpp_add_message(m, x->recv[from], x->recv_bytes[from], from, MPP_TO_MATCH);
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
    const mpp_reduction *how; /* NULL: bytes are moved */
    size_t count;
    const size_t *counts;
    int place;
    int *later_tag; /* NULL: no second exchange follows */
} called;

static mpp_op *agreement_about(mpp_group *g, const exchanged *x, const called *call) {
    if (!call) return compare(g, x);
    size_t element = call->how ? mpp_dtype_size(call->how->dtype) : 1;
    return mpp_shm_agree(g, call->kind, call->how, call->root, call->count, call->counts, element, call->place);
}

static int may_send_early(const mpp_group *g, size_t longest) {
    return mpp_sends_early(g) && longest <= MPP_EARLY_BYTES &&
           longest * (size_t)(g->size - 1) <= MPP_EARLY_BYTES_IN_ALL;
}

/* Of a rank that could copy between its device and the slots, where another one cannot. Under the lock although memory
 * may have to be pinned: it is known only now, and rare. */
static void begin_messages(message_op *m) {
    const shm_op *s = (const shm_op *)m->op.agreement;
    const exchanged x = {s->in_list, s->out_list, s->lengths, s->lengths + s->op.group->size, 1, NULL};
    m->op.staging->on_bus = 0;
    add_exchange(m, &x);
    mpp_stage_transfers(m);
    mpp_enter_queues(m);
}

static uintptr_t exchange(mpp_group *g, exchanged x, const called *call, int tag, uintptr_t staging, int64_t wait_ns) {
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
        return compared ? mpp_shm_out_of_memory(g, wait_ns) : mpp_out_of_memory(g, 0);
    }
    size_t own = send_bytes[g->rank] < recv_bytes[g->rank] ? send_bytes[g->rank] : recv_bytes[g->rank];
    if (x.bus) {
        m->begin_messages = begin_messages;
        mpp_stage_on_bus(&m->op);
    } else if (staging) {
        add_exchange(m, &x);
        mpp_stage_transfers(m);
        if (m->op.staging->error && m->op.agreement) mpp_withdraw((shm_op *)m->op.agreement, m->op.staging->error);
    }
    if (!staging && send[g->rank] < recv[g->rank] + own && recv[g->rank] < send[g->rank] + own) {
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
    m->early = compared && !staging && may_send_early(g, mpp_longest_of(send_bytes, g->size));
    mpp_lock();
    if (!compared && call && call->later_tag) *call->later_tag = take_tag(g);
    if (!compared) m->tag = tag < 0 ? take_tag(g) : tag;
    if (!staging) add_exchange(m, &x);
    mpp_enter_queues(m);
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
    return exchange(g, (exchanged){send, recv, send_bytes, recv_bytes, staging != 0, NULL}, NULL, tag, staging,
                    wait_ns);
}

/* Both tags are taken once the calls have been compared: ranks that call something else take none. */
uintptr_t mpp_exchange_to_reduce(uintptr_t group, const mpp_exchange_operands *b, const mpp_reduction *how, int root,
                                 uintptr_t staging, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    const called call = {b->kind, root, how, b->count, b->counts, MPP_ON_DEVICE, b->later_tag};
    const exchanged x = {b->send, b->recv, b->send_bytes, b->recv_bytes, 1, NULL};
    mpp_note(b->kind, b->count * mpp_dtype_size(how->dtype), root);
    return exchange(g, x, &call, -1, staging, wait_ns);
}

uintptr_t mpp_exchange_to_gather(mpp_group *g, const uintptr_t *send, const size_t *send_bytes, const uintptr_t *recv,
                                 const size_t *recv_bytes, uintptr_t staging, int64_t wait_ns) {
    int place = staging && !mpp_through_host(staging) ? MPP_ON_DEVICE : MPP_ON_HOST;
    size_t longest = mpp_longest_of(recv_bytes, g->size);
    const called call = {MPP_ALL_GATHER, -1, NULL, longest, recv_bytes, place, NULL};
    return exchange(g, (exchanged){send, recv, send_bytes, recv_bytes, staging != 0, NULL}, &call, -1, staging,
                    wait_ns);
}

uintptr_t mpp_no_memory(uintptr_t group, uintptr_t staging, int error, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    mpp_staging_free((mpp_staging *)staging);
    if (g->channel) g->channel->oom_placeholder.call.own = (uint64_t)error; /* until the others have seen it */
    return g->channel ? mpp_shm_out_of_memory(g, wait_ns) : mpp_out_of_memory(g, 0);
}
