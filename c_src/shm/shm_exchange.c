/* Exchanges (gather, scatter, all_to_all): their lengths are compared; and where all ranks are on one node, and it is
 * worth it, their data goes through the slots, else in messages (p2p/exchange.c).
 *
 * A slot carries a piece of this rank's block for each of the others, in places of `chunk_bytes`. With more ranks than
 * cache lines in a slot those are a batch of them, and the next batches come in the next chunks. How many chunks that
 * takes only all ranks together know: each publishes how many its own longest block does, and signatures.c has the rule
 * by which all decide alike.
 */
#include <stdlib.h>
#include <string.h>

#include "shm/shm.h"
#include "shm/signatures.h"

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

/* ---- the lengths ---- */

/* Every length that one rank sends and the other expects is hashed by both. So the hashes of all ranks, taken together
 * with XOR, cancel out if all lengths agree: one word per rank is enough. */
static uint64_t balance_of(const mpp_group *g, const mpp_exchanged *x) {
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
    s->theirs = (mpp_call){.kind = MPP_EXCHANGE, .root = -1};
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
static int keep_lengths(shm_op *s, const mpp_exchanged *x) {
    size_t size = (size_t)s->op.group->size;
    s->lengths = malloc(2 * size * sizeof *s->lengths);
    if (!s->lengths) return 0;
    memcpy(s->lengths, x->send_bytes, size * sizeof *s->lengths);
    memcpy(s->lengths + size, x->recv_bytes, size * sizeof *s->lengths);
    return 1;
}

/* What the rule needs of this rank. */
static int prepare_to_carry(shm_op *s, const mpp_exchanged *x) {
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

mpp_op *mpp_shm_compare(mpp_group *g, const mpp_exchanged *x) {
    shm_op *s = mpp_new_agreement(g);
    if (!s) return NULL;
    s->bus = x->bus;
    if (s->bus) s->place = MPP_ON_BUS;
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

int mpp_arrived_to_compare(mpp_op *op, int rank) {
    int there = op->agreement->arrived(op->agreement, rank);
    return there > 1 && !mpp_shm_has_carried(op->agreement) ? 1 : there;
}

int mpp_shm_has_carried(const mpp_op *agreement) { return ((const shm_op *)agreement)->carries; }

int mpp_shm_tag(mpp_group *g) { return g->first_tag + (int)(g->channel->exchanges++ % (unsigned)(g->tag_count / 2)); }

int mpp_shm_exchanged(const mpp_op *agreement, mpp_exchanged *x) {
    const shm_op *s = (const shm_op *)agreement;
    *x = (mpp_exchanged){s->in_list, s->out_list, s->lengths, s->lengths + s->op.group->size, 1, NULL};
    return !s->carries;
}
