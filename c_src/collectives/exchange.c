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

/* ---- where in a slot what lies ---- */

static size_t whole_lines(size_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

/* What a rank sends to each and what it expects, at the beginning of its first slot: for the words of an error. */
static size_t lengths_bytes(const mpp_channel *c) { return 2 * (size_t)c->size * sizeof(size_t); }

static int lengths_fit(const mpp_channel *c) { return lengths_bytes(c) <= c->slot_bytes; }

/* What is left of a slot for pieces. */
static size_t room(const mpp_channel *c) { return c->slot_bytes - whole_lines(lengths_bytes(c)); }

static int may_carry(const mpp_group *g) {
    const mpp_channel *c = g->channel;
    return mpp_is_ours(g, MPP_EXCHANGE, 0) && c->size > 1 && !c->topology &&
           whole_lines(lengths_bytes(c)) <= c->slot_bytes / 2;
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
        mpp_pull_from(s, from, 0, s->out_list[from], s->lengths[c->size + from]);
    }
}

/* ---- the lengths ---- */

/* Every length that one rank sends and the other expects is hashed by both. So the hashes of all ranks, taken together
 * with XOR, cancel out if all lengths agree: one word per rank is enough. */
static uint64_t balance_of(const mpp_operands *o) {
    const mpp_group *g = (mpp_group *)o->of;
    uint64_t sum = 0, me = (uint64_t)g->rank;
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) continue;
        if (o->input_sizes[r]) sum ^= mpp_mix(mpp_mix(me << 32 | (uint64_t)r, 0), o->input_sizes[r]);
        if (o->output_sizes[r]) sum ^= mpp_mix(mpp_mix((uint64_t)r << 32 | me, 0), o->output_sizes[r]);
    }
    return sum;
}

/* The first pair of ranks that do not agree: detail[0] sends `bytes` to `root`, which expects `own`. */
static void find_imbalance(shm_op *s, mpp_channel *c) {
    s->theirs = (mpp_call){.kind = MPP_EXCHANGE, .root = -1, .has_lengths = 1};
    if (!lengths_fit(c)) return;
    for (int to = 0; to < c->size; to++) {
        const size_t *expected = (const size_t *)mpp_slot_at(s, to, 0) + c->size;
        for (int from = 0; from < c->size; from++) {
            size_t sent = ((const size_t *)mpp_slot_at(s, from, 0))[to];
            if (from == to || sent == expected[from]) continue;
            s->theirs.root = to;
            s->theirs.bytes = sent;
            s->theirs.own = expected[from];
            s->op.detail[0] = from;
            return;
        }
    }
}

/* What is sent to each rank, and then what is expected; whether there was memory for it. */
static int keep_lengths(shm_op *s, const mpp_operands *o) {
    size_t size = (size_t)s->op.group->size;
    s->lengths = malloc(2 * size * sizeof *s->lengths);
    if (!s->lengths) return 0;
    memcpy(s->lengths, o->input_sizes, size * sizeof *s->lengths);
    memcpy(s->lengths + size, o->output_sizes, size * sizeof *s->lengths);
    return 1;
}

/* What the rule needs of this rank. */
static int prepare_to_carry(shm_op *s, const mpp_operands *o) {
    const mpp_channel *c = s->op.group->channel;
    size_t longest = 0;
    s->in_list = mpp_copy_list(o->inputs, c->size);
    s->out_list = mpp_copy_list(o->outputs, c->size);
    if (!s->in_list || !s->out_list) return 0;
    s->chunk_bytes = room(c) / (size_t)places(c) / CACHE_LINE * CACHE_LINE;
    s->batches = (uint64_t)((c->size - 2) / places(c) + 1);
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank) continue;
        s->call.bytes += o->input_sizes[r];
        if (o->input_sizes[r] > longest) longest = o->input_sizes[r];
        if (o->output_sizes[r] > longest) longest = o->output_sizes[r];
    }
    s->call.chunks = (longest ? (longest - 1) / s->chunk_bytes + 1 : 1) * s->batches;
    s->read = read_slots;
    return 1;
}

/* An operation that an exchange steps before it begins, and owns: it is done if every rank sends what the others
 * expect. Takes the exchange's place in the order. `bus`: of a rank that can copy between its device and the slots;
 * else NULL. NULL: no memory. */
static mpp_op *compare(const mpp_operands *o, mpp_staging *bus) {
    mpp_group *g = (mpp_group *)o->of;
    shm_op *s = mpp_new_agreement(g);
    if (!s) return NULL;
    s->bus = bus;
    if (s->bus) s->place = MPP_ON_BUS;
    s->pull = pull_from_all;
    if (may_carry(g)) mpp_offer(s, o->inputs, o->input_sizes, INT64_MAX, o->output_sizes);
    mpp_sign(s, MPP_EXCHANGE, -1, 0);
    s->find_imbalance = find_imbalance;
    s->call.own = balance_of(o);
    int carries = may_carry(g) && (!o->staging || bus);
    if (!carries) s->call.divisor = MPP_IN_MESSAGES;
    if (!g->channel->topology && lengths_fit(g->channel)) {
        if (!keep_lengths(s, o) || (carries && !prepare_to_carry(s, o))) {
            mpp_discard(&s->op);
            return NULL;
        }
        s->write = write_slot;
    }
    mpp_take_place(s);
    return &s->op;
}

/* ---- as messages ---- */

static void add_exchange(message_op *m, const mpp_operands *o) {
    const mpp_group *g = m->op.group;
    for (int i = 1; i < g->size; i++) {
        int to = (g->rank + i) % g->size;
        if (o->input_sizes[to]) mpp_add_message(m, o->inputs[to], o->input_sizes[to], to, MPP_TO_SEND);
    }
    for (int i = 1; i < g->size; i++) {
        int from = (g->rank + g->size - i) % g->size;
        if (o->output_sizes[from]) mpp_add_message(m, o->outputs[from], o->output_sizes[from], from, MPP_TO_MATCH);
    }
}

/* One tag for each exchange: a rank that disagrees about a length cannot shift the next one's data. The lower half is
 * for exchanges that were compared, which are counted only then. */
static int take_tag(mpp_group *g) {
    int half = g->tag_count / 2;
    return g->first_tag + half + (int)(g->sequence++ % (unsigned)(g->tag_count - half));
}

/* `call`: what all ranks must call alike, where the exchange is a part of that. A reduction's is on devices. */
static mpp_op *agreement_about(const mpp_operands *o, const mpp_exchange_operands *call) {
    size_t element = o->how ? mpp_dtype_size(o->how->dtype) : 1;
    int place = o->how || (o->staging && !mpp_through_host(o->staging)) ? MPP_ON_DEVICE : MPP_ON_HOST;
    return mpp_shm_agree((mpp_group *)o->of, call->kind, o->how, o->root, call->count, call->counts, element, place);
}

static int may_send_early(const mpp_group *g, size_t longest) {
    return mpp_sends_early(g) && longest <= MPP_EARLY_BYTES &&
           longest * (size_t)(g->size - 1) <= MPP_EARLY_BYTES_IN_ALL;
}

/* Of a rank that could copy between its device and the slots, where another one cannot. Under the lock although memory
 * may have to be pinned: it is known only now, and rare. */
static void begin_messages(message_op *m) {
    const shm_op *s = (const shm_op *)m->op.agreement;
    const mpp_operands o = {.inputs = s->in_list,
                            .outputs = s->out_list,
                            .input_sizes = s->lengths,
                            .output_sizes = s->lengths + s->op.group->size};
    m->op.staging->on_bus = 0;
    add_exchange(m, &o);
    mpp_stage_transfers(m);
    mpp_enter_queues(m);
}

/* `call`: see agreement_about; NULL: the exchange is the call. */
static uintptr_t exchange(const mpp_operands *o, const mpp_exchange_operands *call) {
    mpp_group *g = (mpp_group *)o->of;
    size_t capacity = 0, sent = o->input_sizes[g->rank], expected = o->output_sizes[g->rank];
    size_t own = sent < expected ? sent : expected;
    uintptr_t from = o->inputs[g->rank], to = o->outputs[g->rank];
    int compared = g->channel && o->tag < 0, may_copy = !call && compared;
    mpp_staging *bus = may_copy && mpp_place_of(g, o->staging) == MPP_ON_BUS ? (mpp_staging *)o->staging : NULL;
    for (int r = 0; r < g->size; r++) capacity += mpp_chunks_of(o->input_sizes[r]) + mpp_chunks_of(o->output_sizes[r]);
    message_op *m = mpp_new_message_op(g, capacity, MPP_NO_TAG, o->staging);
    if (m && compared) m->op.agreement = call ? agreement_about(o, call) : compare(o, bus);
    if (m && m->op.agreement) m->op.arrived = mpp_arrived_to_compare;
    if (!m || (compared && !m->op.agreement)) {
        if (m) mpp_discard(&m->op);
        return compared ? mpp_shm_out_of_memory(g, o->wait_ns) : mpp_out_of_memory(g, 0);
    }
    if (bus) {
        m->begin_messages = begin_messages;
        mpp_stage_on_bus(&m->op);
    } else if (o->staging) {
        add_exchange(m, o);
        mpp_stage_transfers(m);
        if (m->op.staging->error && m->op.agreement) mpp_withdraw((shm_op *)m->op.agreement, m->op.staging->error);
    }
    if (!o->staging && from < to + own && to < from + own) {
        if (from != to) memmove((void *)to, (const void *)from, own);
    } else {
        m->own = (const char *)from;
        m->own_to = (char *)to;
        m->own_left = own;
    }
    /* One that is begun later is none that a caller waits in. */
    if (!o->staging && o->tag < 0) {
        size_t in_all = mpp_sum_of(o->input_sizes, g->size), received = mpp_sum_of(o->output_sizes, g->size);
        m->op.moves = in_all > received ? in_all : received;
    }
    if (call) m->later_tag = call->later_tag;
    m->early = compared && !o->staging && may_send_early(g, mpp_longest_of(o->input_sizes, g->size));
    mpp_lock();
    if (!compared && call && call->later_tag) *call->later_tag = take_tag(g);
    if (!compared) m->tag = o->tag < 0 ? take_tag(g) : o->tag;
    if (!o->staging) add_exchange(m, o);
    mpp_enter_queues(m);
    mpp_unlock();
    uintptr_t op = mpp_start(&m->op, o->wait_ns);
    return o->tag < 0 ? op : mpp_not_owned_yet(op);
}

/* Sends inputs[r] to every rank r and receives outputs[r] from it; zero lengths are not sent at all, so both
 * sides must agree on them. A negative tag stands for the next one: the exchange has its place in the order of
 * collectives, and begins, where the group shares memory, once all ranks' lengths have been compared; that may have
 * moved the data as well. */
uintptr_t mpp_exchange(const mpp_operands *o) {
    mpp_note(MPP_EXCHANGE, mpp_sum_of(o->input_sizes, ((mpp_group *)o->of)->size), -1);
    return exchange(o, NULL);
}

/* Both tags are taken once the calls have been compared: ranks that call something else take none. */
uintptr_t mpp_exchange_to_reduce(const mpp_operands *o) {
    const mpp_exchange_operands *first = o->first;
    mpp_operands blocks = *o;
    blocks.inputs = first->send;
    blocks.outputs = first->recv;
    blocks.input_sizes = first->send_bytes;
    blocks.output_sizes = first->recv_bytes;
    blocks.tag = -1;
    mpp_note(first->kind, first->count * mpp_dtype_size(o->how->dtype), o->root);
    return exchange(&blocks, first);
}

uintptr_t mpp_exchange_to_gather(const mpp_operands *o) {
    int size = ((mpp_group *)o->of)->size, me = ((mpp_group *)o->of)->rank;
    const mpp_exchange_operands call = {
        .kind = MPP_ALL_GATHER, .count = mpp_longest_of(o->output_sizes, size), .counts = o->output_sizes};
    mpp_operands blocks = *o;
    uintptr_t *send = malloc(2 * (size_t)size * sizeof *send);
    if (!send) return mpp_no_memory(o);
    for (int r = 0; r < size; r++) {
        send[r] = o->input;
        send[size + r] = o->output_sizes[me];
    }
    blocks.inputs = send;
    blocks.input_sizes = (size_t *)(send + size);
    blocks.tag = -1;
    uintptr_t op = exchange(&blocks, &call);
    free(send);
    return op;
}

uintptr_t mpp_no_memory(const mpp_operands *o) {
    mpp_group *g = (mpp_group *)o->of;
    mpp_staging_free((mpp_staging *)o->staging);
    if (g->channel) g->channel->oom_placeholder.call.own = (uint64_t)o->error; /* until the others have seen it */
    return g->channel ? mpp_shm_out_of_memory(g, o->wait_ns) : mpp_out_of_memory(g, 0);
}
