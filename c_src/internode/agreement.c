/* The nodes of a group agree about what is called.
 *
 * The first rank of each node compares the calls of its own node's ranks (shm/signatures.c), and then its node's with
 * the others'. Nodes meet as the leaves of a balanced tree do: at level k each part of 2^k nodes has one summary, and
 * every node gets the summary of the part beside its own. So all have the summary of all after log2(nodes) messages,
 * one after the other. (Recursive doubling, see Thakur, Rabenseifner and Gropp, "Optimization of Collective
 * Communication Operations in MPICH", 2005. Where a part is cut off at the last node, its members send to several of
 * the complete one beside it.)
 *
 * The pattern is the same whatever is called, so that ranks which call different things still meet in it. Short data
 * is piggybacked on the same messages; sums are then those of the tree, to the bit.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/pause.h"
#include "internode/internode.h"

/* ---- summaries ---- */

static void set_mismatch(mpp_call_summary *of, const mpp_call_summary *from, int which) {
    of->mismatch = 1;
    of->rank[1] = from->rank[which];
    of->signature[1] = from->signature[which];
    of->call[1] = from->call[which];
}

/* Of several calls that differ from the first one, a rank's without memory is the one to name. */
static void merge(mpp_call_summary *mine, const mpp_call_summary *theirs) {
    mine->balance ^= theirs->balance;
    if (theirs->came > mine->came) {
        mine->came = theirs->came;
        mine->last = theirs->last;
    }
    if (theirs->most > mine->most) mine->most = theirs->most;
    int known = mine->mismatch && mine->call[1].kind == MPP_NO_MEMORY;
    for (int i = 0; i <= theirs->mismatch && !known; i++) {
        int is_none = theirs->call[i].kind == MPP_NO_MEMORY;
        int is_other = is_none || theirs->signature[i] != mine->signature[0] || theirs->number != mine->number;
        if (is_other && (!mine->mismatch || is_none)) set_mismatch(mine, theirs, i);
    }
    mine->mismatch |= theirs->mismatch;
}

static mpp_call_summary of_this_node(const shm_op *s) {
    const mpp_channel *c = mpp_channel_of(s);
    const mpp_topology *t = c->topology;
    mpp_call_summary all = {.number = s->first};
    for (int r = 0; r < c->size; r++) {
        const rank_counters *theirs = &c->counters[r];
        uint64_t place = s->first % (uint64_t)c->ring;
        mpp_call_summary one = {.number = s->first,
                                .most = theirs->call[place].chunks,
                                .balance = theirs->call[place].kind == MPP_EXCHANGE ? theirs->call[place].own : 0};
        one.rank[0] = one.last = t->members[t->first[t->here] + r];
        one.came = theirs->came[place];
        one.signature[0] = theirs->signature[place];
        one.call[0] = theirs->call[place];
        if (r) merge(&all, &one);
        else all = one;
    }
    return all;
}

/* ---- the agreement ---- */

enum {
    SUMMARY = (sizeof(mpp_call_summary) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE,
    MESSAGE = SUMMARY + MPP_PAYLOAD,
    MESSAGE_NS = 100000 /* that a message may take, and is no wait for a rank */
};

/* The nodes [begin, end) that have one summary at this level, and include `node`. */
static int begin_of(int node, int level) { return node >> level << level; }
static int end_of(const mpp_topology *t, int begin, int level) {
    return t->count - begin < 1 << level ? t->count : begin + (1 << level);
}

static mpp_agreement *agreement_of(const shm_op *s) { return &mpp_internode_of(s)->agreement; }

static int has_piggyback(const shm_op *s, const mpp_call_summary *all) { return s->payload && !all->mismatch; }

static void send_summary(shm_op *s, int to) {
    mpp_agreement *a = agreement_of(s);
    mpp_post_send(&s->op, &a->messages[a->count++], a->sent + (size_t)a->level * MESSAGE, a->sent_bytes,
                  mpp_first_rank_of(mpp_topology_of(s), to), mpp_internode_of(s)->first_tag);
}

/* Sends this part's summary to the nodes of the part beside it that want it from this node, and posts the receive of
 * theirs. */
static void begin_level(shm_op *s) {
    const mpp_topology *t = mpp_topology_of(s);
    mpp_agreement *a = agreement_of(s);
    const mpp_call_summary *mine = (const mpp_call_summary *)a->mine;
    char *message = a->sent + (size_t)a->level * MESSAGE;
    int begin = begin_of(t->here, a->level), end = end_of(t, begin, a->level);
    int beside = begin ^ 1 << a->level, members = end_of(t, beside, a->level) - beside;
    a->awaited = -1;
    a->is_late = 0;
    s->asked = a->level + 1;
    if (beside >= t->count) return;
    size_t offset = 0, length = 0;
    if (has_piggyback(s, mine)) s->route->span(s, begin, end, &offset, &length);
    memcpy(message, a->mine, sizeof *mine);
    ((mpp_call_summary *)message)->came = now_ns() - mine->came;
    if (length) memcpy(message + SUMMARY, a->mine + SUMMARY + offset, length);
    a->sent_bytes = SUMMARY + length;
    int place = t->here - begin;
    for (int to = place; to < members; to += end - begin) send_summary(s, beside + to);
    a->awaited = a->count++;
    mpp_post_recv(&a->messages[a->awaited], a->theirs, MESSAGE, mpp_first_rank_of(t, beside + place % members),
                  mpp_internode_of(s)->first_tag);
}

static void end_level(shm_op *s) {
    const mpp_topology *t = mpp_topology_of(s);
    mpp_agreement *a = agreement_of(s);
    mpp_call_summary *mine = (mpp_call_summary *)a->mine, theirs;
    memcpy(&theirs, a->theirs, sizeof theirs);
    /* A message that was there already tells of ranks that came before. */
    theirs.came = a->is_late ? now_ns() - theirs.came - MESSAGE_NS : 0;
    merge(mine, &theirs);
    if (!has_piggyback(s, mine)) return;
    size_t offset, length;
    int beside = begin_of(t->here, a->level) ^ 1 << a->level;
    s->route->span(s, beside, end_of(t, beside, a->level), &offset, &length);
    if (length) s->route->merge(s, a->mine + SUMMARY, a->theirs + SUMMARY, offset, length, beside < t->here);
}

static void begin(shm_op *s) {
    mpp_agreement *a = agreement_of(s);
    mpp_call_summary *mine = (mpp_call_summary *)a->mine;
    *mine = of_this_node(s);
    if (has_piggyback(s, mine)) s->route->pack(s, a->mine + SUMMARY);
    a->asking = 1;
    a->level = a->count = 0;
    begin_level(s);
}

const mpp_call_summary *mpp_agree(shm_op *s) {
    mpp_agreement *a = agreement_of(s);
    mpp_call_summary *mine = (mpp_call_summary *)a->mine;
    int levels = mpp_topology_of(s)->levels;
    if (!a->asking) begin(s);
    while (a->level < levels) {
        if (a->awaited >= 0) {
            if (!mpp_test_all(&s->op, &a->messages[a->awaited], 1) || s->op.failure) return a->is_late = 1, NULL;
            end_level(s);
        }
        if (++a->level < levels) begin_level(s);
    }
    if (!mpp_test_all(&s->op, a->messages, a->count) || s->op.failure) return NULL;
    if (s->call.kind == MPP_EXCHANGE && mine->balance && !mine->mismatch) {
        mine->mismatch = 1;
        mine->rank[1] = mine->rank[0];
        mine->call[1] = (mpp_call){.kind = MPP_EXCHANGE, .root = -1, .has_lengths = 1};
    }
    if (has_piggyback(s, mine)) s->route->unpack(s, a->mine + SUMMARY);
    a->asking = 0;
    return mine;
}

int mpp_agreement_init(mpp_agreement *a, const mpp_topology *t) {
    a->mine = malloc(MESSAGE);
    a->theirs = malloc(MESSAGE);
    a->sent = malloc((size_t)t->levels * MESSAGE);
    a->messages = calloc((size_t)t->count + 2 * (size_t)t->levels, sizeof *a->messages);
    return a->mine && a->theirs && a->sent && a->messages;
}
