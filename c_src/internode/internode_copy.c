/* The operations of a group on several nodes that add nothing up: broadcast and all_gather. See internode.h. */
#include <string.h>

#include "internode/internode.h"
#include "internode/pipeline.h"

/* ---- broadcast ---- */

static int root_node(const shm_op *s) { return mpp_topology_of(s)->node_of[s->root]; }

static char *root_slot(const shm_op *s, uint64_t chunk) {
    return mpp_slot_of(mpp_channel_of(s), mpp_topology_of(s)->place_of[s->root], s->first + chunk);
}

/* Where a chunk in the pipeline is sent from here, or received here. */
static char *broadcast_place(const shm_op *s, uint64_t chunk) {
    if (mpp_goes_directly(s)) return mpp_shm_out(s, chunk * s->chunk_bytes);
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

static void unpack_by_copy(shm_op *s, char *payload) {
    memcpy(mpp_slot_of(mpp_channel_of(s), 0, s->first), payload, s->payload);
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

static void read_from_root_here(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    memcpy(mpp_shm_out(s, chunk * s->chunk_bytes), root_slot(s, chunk), length);
}

int mpp_broadcast_internode(shm_op *s) {
    static const mpp_route piggybacked = {
        .pack = pack_from_root, .span = span_of_root, .merge = mpp_merge_by_copy, .unpack = unpack_by_copy};
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
    /* A piece is at most one message that needs no answer. */
    size_t pieces = (size_t)mpp_topology_of(s)->leaders_per_node * (size_t)(mpp_topology_of(s)->count - 1);
    s->chunk_bytes = mpp_internode_chunk(s, s->bytes, pieces * MPP_EAGER);
    if (mpp_goes_directly(s)) s->write = NULL;
    else if (reads) s->read = root_node(s) == mpp_topology_of(s)->here ? read_from_root_here : mpp_read_from_leaders;
    return mpp_use_pipeline(s, &pipelined);
}

/* ---- all_gather ---- */

/* Ranks are numbered node by node, in a piggybacked table and in the inbox. */
static int number_of(const mpp_topology *t, int rank) { return t->first[t->node_of[rank]] + t->place_of[rank]; }

static void pack_blocks(shm_op *s, char *payload) {
    mpp_channel *c = mpp_channel_of(s);
    size_t begin = (size_t)c->topology->first[c->topology->here];
    for (int r = 0; r < c->size; r++)
        memcpy(payload + (begin + (size_t)r) * s->call.bytes, mpp_slot_of(c, r, s->first), s->call.bytes);
}

static void span_of_blocks(const shm_op *s, int first_node, int end_node, size_t *offset, size_t *length) {
    const mpp_topology *t = mpp_topology_of(s);
    *offset = (size_t)t->first[first_node] * s->call.bytes;
    *length = (size_t)(t->first[end_node] - t->first[first_node]) * s->call.bytes;
}

static void read_table(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    const char *table = mpp_slot_of(mpp_channel_of(s), 0, s->first);
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (length) memcpy(mpp_shm_out_block(s, r, 0), table + (size_t)number_of(t, r) * s->call.bytes, length);
    }
}

static char *inbox_of(const shm_op *s, uint64_t chunk, int rank) {
    const mpp_channel *c = mpp_channel_of(s);
    const mpp_topology *t = c->topology;
    size_t number = (size_t)number_of(t, rank), ring = (size_t)c->ring;
    if (t->node_of[rank] > t->here) number -= (size_t)c->size;
    return c->inbox + (number * ring + (size_t)((s->first + chunk) % ring)) * c->inbox_bytes;
}

static void send_blocks(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    int me = s->op.group->rank, place = mpp_channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->lengths[me], chunk);
    for (int i = 1; i < t->count; i++) {
        int node = mpp_other_node(t, i), node_before = mpp_other_node(t, t->count - i);
        mpp_pipeline_send(s, chunk, mpp_own_slot(s, chunk), length, mpp_peer_rank(s, node, place));
        for (int p = place; p < mpp_local_count(t, node_before); p += mpp_channel_of(s)->size) {
            int sender = t->members[t->first[node_before] + p];
            mpp_pipeline_recv(s, chunk, inbox_of(s, chunk, sender), mpp_chunk_length(s, s->lengths[sender], chunk),
                              sender);
        }
    }
}

static void read_blocks_internode(shm_op *s, uint64_t chunk) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_topology *t = c->topology;
    size_t offset = chunk * s->chunk_bytes;
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        char *out = length ? mpp_shm_out_block(s, r, offset) : NULL;
        if (!length || out == mpp_shm_in(s, offset)) continue;
        int is_here = t->node_of[r] == t->here;
        memcpy(out, is_here ? mpp_slot_of(c, t->place_of[r], s->first + chunk) : inbox_of(s, chunk, r), length);
    }
}

int mpp_allgather_internode(shm_op *s, size_t longest) {
    static const mpp_route piggybacked = {
        .pack = pack_blocks, .span = span_of_blocks, .merge = mpp_merge_by_copy, .unpack = unpack_by_copy};
    static const mpp_route pipelined = {.first_phase = send_blocks};
    size_t table = (size_t)s->op.group->size * longest;
    s->wait_for = -1;
    if (!longest) return 1;
    if (table <= s->chunk_bytes && table <= MPP_PAYLOAD) {
        mpp_piggyback(s, &piggybacked, table);
        s->read = read_table;
        return 1;
    }
    s->chunk_bytes = mpp_channel_of(s)->inbox_bytes;
    s->read = read_blocks_internode;
    return mpp_use_pipeline(s, &pipelined);
}
