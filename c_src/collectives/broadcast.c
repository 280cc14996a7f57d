/* broadcast: between nodes (see internode.h), on a node, by MPI. */
#include <string.h>

#include "collectives/collective.h"
#include "internode/pipeline.h"

/* On its node. */
static char *root_slot(const shm_op *s, uint64_t chunk) {
    const mpp_topology *t = s->op.group->channel->topology;
    return mpp_slot_at(s, t ? t->place_of[s->root] : s->root, chunk);
}

static void read_from_root(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) mpp_from_slot(s, mpp_out_at(s, mpp_chunk_begin(s, chunk)), root_slot(s, chunk), length);
}

/* ---- between nodes ---- */

static int root_node(const shm_op *s) { return mpp_topology_of(s)->node_of[s->root]; }

/* Where a chunk in the pipeline is sent from here, or received here. */
static char *broadcast_place(const shm_op *s, uint64_t chunk) {
    if (mpp_goes_directly(s)) return mpp_out_at(s, chunk * s->chunk_bytes);
    return mpp_topology_of(s)->here == root_node(s) ? root_slot(s, chunk) : mpp_own_slot(s, chunk);
}

static void pack_from_root(shm_op *s, char *payload) {
    if (root_node(s) == mpp_topology_of(s)->here) memcpy(payload, root_slot(s, 0), s->payload);
}

static void span_of_root(const shm_op *s, int first_node, int end_node, size_t *offset, size_t *length) {
    int node = root_node(s);
    *offset = 0;
    *length = first_node <= node && node < end_node ? s->payload : 0;
}

/* The piece of a leader's part that the root's node sends to `node`. */
static mpp_stretch broadcast_piece(const shm_op *s, uint64_t chunk, int node) {
    const mpp_topology *t = mpp_topology_of(s);
    int piece = node < root_node(s) ? node : node - 1;
    return mpp_piece_of_leader(t, mpp_chunk_length(s, s->bytes, chunk), mpp_channel_of(s)->rank, piece, t->count - 1);
}

static void scatter_pieces(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    if (mpp_channel_of(s)->rank >= t->leaders_per_node) return;
    if (t->here != root_node(s)) {
        mpp_stretch mine = broadcast_piece(s, chunk, t->here);
        mpp_pipeline_recv(s, chunk, broadcast_place(s, chunk) + mine.begin, mine.length,
                          mpp_same_leader_on(s, root_node(s)));
        return;
    }
    for (int i = 1; i < t->count; i++) {
        mpp_stretch piece = broadcast_piece(s, chunk, mpp_other_node(t, i));
        mpp_pipeline_send(s, chunk, broadcast_place(s, chunk) + piece.begin, piece.length,
                          mpp_same_leader_on(s, mpp_other_node(t, i)));
    }
}

static void exchange_pieces(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    if (mpp_channel_of(s)->rank >= t->leaders_per_node || t->here == root_node(s)) return;
    mpp_stretch mine = broadcast_piece(s, chunk, t->here);
    for (int i = 1; i < t->count; i++) {
        int node = mpp_other_node(t, i);
        if (node == root_node(s)) continue;
        mpp_stretch piece = broadcast_piece(s, chunk, node);
        mpp_pipeline_send(s, chunk, broadcast_place(s, chunk) + mine.begin, mine.length, mpp_same_leader_on(s, node));
        mpp_pipeline_recv(s, chunk, broadcast_place(s, chunk) + piece.begin, piece.length, mpp_same_leader_on(s, node));
    }
}

static int between_nodes(shm_op *s) {
    static const mpp_route piggybacked = {
        .pack = pack_from_root, .span = span_of_root, .merge = mpp_merge_by_copy, .unpack = mpp_unpack_by_copy};
    static const mpp_route pipelined = {.first_phase = scatter_pieces, .second_phase = exchange_pieces};
    int reads = s->root != s->op.group->rank;
    s->wait_for = -1;
    s->read = NULL;
    if (!s->bytes) return 1;
    if (s->bytes <= s->chunk_bytes && s->bytes <= MPP_WHOLE_PAYLOAD) {
        mpp_piggyback(s, &piggybacked, s->bytes);
        if (reads) s->read = mpp_read_from_first;
        return 1;
    }
    /* A piece is one message, at most. */
    size_t pieces = (size_t)mpp_topology_of(s)->leaders_per_node * (size_t)(mpp_topology_of(s)->count - 1);
    size_t message = mpp_long_message(s, s->bytes / pieces);
    s->chunk_bytes = mpp_internode_chunk(s, s->bytes, pieces * (message ? message : MPP_EAGER));
    if (mpp_goes_directly(s)) s->write = NULL;
    else if (reads) s->read = root_node(s) == mpp_topology_of(s)->here ? read_from_root : mpp_read_from_leaders;
    return mpp_use_pipeline(s, &pipelined);
}

/* ---- on a node ---- */

static void pull_from_root(shm_op *s) { mpp_pull_from(s, s->root, 0, (uintptr_t)s->out, s->bytes); }

static int over_shm(shm_op *s, const mpp_operands *o) {
    int is_root = s->op.group->rank == s->root;
    uintptr_t shown = is_root ? o->input : 0;
    s->wait_for = s->root;
    s->write = is_root ? mpp_write_plain : NULL;
    s->read = is_root ? NULL : read_from_root;
    s->pull = is_root ? NULL : pull_from_root;
    mpp_offer(s, &shown, NULL, s->bytes, NULL);
    return 1;
}

/* ---- by MPI ---- */

static int issue_broadcast(mpi_collective *c) {
    return mpp_mpi.Ibcast(mpp_out_at(c, c->index * c->per_call), (int)mpp_part_of(c, c->total), mpp_mpi.byte, c->root,
                          c->op.group->comm, &c->request);
}

static int by_mpi(mpi_collective *c, const mpp_operands *o) {
    mpp_split(c, o->count, mpp_call_limit(o->staging));
    return 1;
}

uintptr_t mpp_broadcast(const mpp_operands *o) {
    static const mpp_ways ways = {over_shm, between_nodes, by_mpi, issue_broadcast, NULL};
    return mpp_start_collective(o, MPP_BROADCAST, &ways);
}
