/* all_reduce and reduce: between nodes (see internode.h), on a node, by MPI. A root of -1 means everybody. */
#include <string.h>

#include "collectives/collective.h"
#include "internode/sums.h"

/* ---- between nodes ---- */

/* A node's piece of this leader's part: of a reduce between two nodes all of it, so that the other one sends once. */
static mpp_stretch leaders_piece_of(const shm_op *s, uint64_t chunk, int node) {
    const mpp_topology *t = mpp_topology_of(s);
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    int leader = mpp_channel_of(s)->rank;
    if (!mpp_reduces_one_way(s)) return mpp_piece_of_leader(t, length, leader, node, t->count);
    return mpp_piece_of_leader(t, t->node_of[s->root] == node ? length : 0, leader, 0, 1);
}

static void send_sums(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    if (mpp_channel_of(s)->rank >= t->leaders_per_node) return;
    mpp_stretch mine = leaders_piece_of(s, chunk, t->here);
    mpp_gather_sums(s, chunk, mine.begin, mine.length, mpp_same_leader_on);
    for (int i = 1; i < t->count; i++) {
        mpp_stretch piece = leaders_piece_of(s, chunk, mpp_other_node(t, i));
        mpp_send_sums_of(s, chunk, piece.begin, piece.length, mpp_same_leader_on(s, mpp_other_node(t, i)));
    }
}

/* Receives the results where all ranks here read this leader's part. A piece that no rank here reads may be longer than
 * a slot. */
static void send_results(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    int leader = mpp_channel_of(s)->rank, is_read = mpp_is_wanted(s) || !mpp_is_direct(s);
    char *results = mpp_results_at(s, leader, chunk);
    if (leader >= t->leaders_per_node) return;
    mpp_stretch mine = leaders_piece_of(s, chunk, t->here);
    const char *piece = mpp_add_nodes(s, chunk, mine.length, is_read ? results + mine.begin : NULL);
    mpp_exchange_results(s, chunk, piece, results, leaders_piece_of, mpp_same_leader_on);
}

static int between_nodes(shm_op *s) {
    static const mpp_route pipelined = {.first_phase = send_sums, .second_phase = send_results};
    size_t lines = (s->bytes + CACHE_LINE - 1) / CACHE_LINE, nodes = (size_t)mpp_topology_of(s)->count;
    int reads = mpp_is_wanted(s) && !mpp_goes_directly(s);
    s->wait_for = -1;
    s->two_phase = 0;
    if (mpp_goes_directly(s)) s->write = NULL;
    s->read = reads ? mpp_read_from_first : NULL;
    if (!s->bytes || mpp_piggyback_sums(s, s->bytes)) return 1;
    if (mpp_piggyback_by_halves(s, s->bytes, (lines + nodes - 1) / nodes * CACHE_LINE))
        return mpp_use_pipeline(s, s->route);
    if (reads) s->read = mpp_read_from_leaders;
    s->chunk_bytes = mpp_internode_chunk(s, s->bytes, mpp_most_of_sums(s) / (mpp_reduces_one_way(s) ? nodes : 1));
    return mpp_use_pipeline(s, &pipelined);
}

/* ---- on a node ---- */

/* In one phase nobody reads the root's slots; that there are two may turn out behind the first chunk (plan_bus). */
static void write_if_read(shm_op *s, uint64_t chunk, char *slot) {
    if (!chunk || s->two_phase || s->root != s->op.group->rank) mpp_write_plain(s, chunk, slot);
}

static void read_parts(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    for (int r = 0; r < c->size; r++) {
        size_t begin = mpp_part_begin(c, length, r), end = mpp_part_begin(c, length, r + 1);
        mpp_from_slot(s, mpp_out_at(s, mpp_chunk_begin(s, chunk)) + begin, mpp_slot_at(s, r, chunk) + begin,
                      end - begin);
    }
}

static void read_sum(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_at(s, r, chunk);
    /* Mine from the user's buffer: it may be the very place the result goes to, which mpp_reduce allows. */
    c->sources[c->rank] = mpp_in_at(s, offset);
    mpp_reduce(&s->how, mpp_out_at(s, offset), c->sources, c->size, mpp_chunk_length(s, s->bytes, chunk) / s->element);
}

/* A rank that has what it takes offers it; else the ranks find out whether they could. Where all do, and reduce on
 * their devices, in place, this is the first half: `received` of `own` has what the others have of this rank's
 * block, one after the other by rank, this one's left out but not its place; and the second one, mpp_second_half,
 * shares `result`, what came of it. */
static int offer(shm_op *s, const mpp_block *own) {
    uintptr_t shown = (uintptr_t)s->in;
    if (!own) {
        mpp_introduce(s, &shown, NULL);
        return 1;
    }
    shm_op *second = mpp_new_agreement(s->op.group);
    if (!second) return 0;
    mpp_in_halves(s, second, own->elements * s->element, own);
    mpp_offer(s, &shown, NULL, s->bytes, NULL);
    return 1;
}

static int over_shm(shm_op *s, const mpp_operands *o) {
    const mpp_group *g = s->op.group;
    s->write = g->size > 1 ? write_if_read : NULL;
    s->two_phase = (int64_t)s->bytes > g->channel->limits[MPP_ONE_PHASE];
    s->read = s->two_phase ? read_parts : read_sum;
    s->read_reduced = read_parts;
    if (s->bytes <= s->chunk_bytes) mpp_leave_bus(s); /* one more round of all ranks would cost more than a copy */
    if (!mpp_is_wanted(s)) {
        s->read = NULL;
        if (!s->two_phase) s->wait_for = g->rank; /* written is enough: nothing to read */
    }
    return !s->bus || offer(s, o->first);
}

static int by_mpi(mpi_collective *c, const mpp_operands *o) {
    return mpp_reduce_in_calls(c, o, mpp_call_limit(o->staging));
}

static const mpp_ways ways = {over_shm, between_nodes, by_mpi, mpp_issue_reduction, mpp_finish_reduction};

uintptr_t mpp_allreduce(const mpp_operands *o) { return mpp_start_collective(o, MPP_ALL_REDUCE, &ways); }

uintptr_t mpp_reduce_to(const mpp_operands *o) { return mpp_start_collective(o, MPP_REDUCE, &ways); }
