#include "internode/pipeline.h"

#include <stdlib.h>
#include <string.h>

/* ---- phases ---- */

/* Whether a node may send to another one that has nothing to send to it. */
static int is_one_way(const shm_op *s) {
    int is_even = s->lengths != NULL;
    for (int r = 1; r < s->op.group->size && is_even; r++) is_even = s->lengths[r] == s->lengths[0];
    return !is_even && (s->lengths || s->call.kind == MPP_BROADCAST || mpp_reduces_one_way(s));
}

/* How often nodes say how far they are, in chunks. They may be ahead by four times as much: 4 MiB or so, shared by
 * those that send to one. */
enum { PERIODS_AHEAD = 4 };
static uint64_t pace_period(const shm_op *s) {
    int others = mpp_topology_of(s)->count - 1;
    return (uint64_t)(mpp_channel_of(s)->ring * (others < PERIODS_AHEAD ? PERIODS_AHEAD / others : 1));
}

/* A short message is gone at once, and fills the receiver's memory until that looks for it. A node that also receives
 * is never ahead by more than the ring. One that does not would send all there is, so all tell each other by empty
 * messages that they have come to a chunk, and nobody ends the chunk that is so much further before it has heard that.
 * If the others keep up nobody waits. What would not be heard any more is not said. */
static void keep_pace(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    mpp_pipeline_slot *p = mpp_pipeline_slot_of(s, chunk);
    uint64_t ahead = PERIODS_AHEAD * pace_period(s);
    int tag = mpp_internode_of(s)->first_tag + MPP_INTERNODE_TAGS - 1;
    if (mpp_channel_of(s)->rank || chunk % pace_period(s) || !is_one_way(s)) return;
    for (int i = 1; i < t->count; i++) {
        int other = mpp_first_rank_of(t, mpp_other_node(t, i));
        if (chunk + ahead < s->chunks) mpp_post_send(&s->op, &p->messages[p->count++], NULL, 0, other, tag);
        if (chunk >= ahead) mpp_post_recv(&p->messages[p->count++], NULL, 0, other, tag);
    }
}

void mpp_pipeline_start(shm_op *s, uint64_t chunk) {
    mpp_pipeline_slot *p = mpp_pipeline_slot_of(s, chunk);
    p->count = p->second = 0;
    p->used = 0;
    keep_pace(s, chunk);
    s->route->first_phase(s, chunk);
}

/* Whether the chunk is complete. */
static int advance(shm_op *s, uint64_t chunk) {
    mpp_pipeline_slot *p = mpp_pipeline_slot_of(s, chunk);
    if (!mpp_test_all(&s->op, p->messages, p->count) || s->op.failure) return 0;
    if (p->second || !s->route->second_phase) return 1;
    p->second = 1;
    p->count = 0;
    s->route->second_phase(s, chunk);
    return mpp_test_all(&s->op, p->messages, p->count) && !s->op.failure;
}

int mpp_pipeline_poll(shm_op *s) {
    uint64_t before = s->reduced;
    /* The later ones are moved too, but complete in order. */
    for (uint64_t chunk = s->reduced; chunk < s->started; chunk++)
        if (advance(s, chunk) && chunk == s->reduced) s->reduced++;
    return s->reduced > before;
}

/* ---- messages ---- */

/* Chunks under way have tags of their own, for each phase: the messages of the next ones may come earlier. */
static int tag_of(const shm_op *s, uint64_t chunk) {
    const mpp_channel *c = mpp_channel_of(s);
    int slot = (int)((s->first + chunk) % (uint64_t)c->ring);
    return mpp_internode_of(s)->first_tag + 1 + slot + (mpp_pipeline_slot_of(s, chunk)->second ? c->ring : 0);
}

void mpp_pipeline_send(shm_op *s, uint64_t chunk, const void *buffer, size_t bytes, int rank) {
    mpp_pipeline_slot *p = mpp_pipeline_slot_of(s, chunk);
    if (bytes) mpp_post_send(&s->op, &p->messages[p->count++], buffer, bytes, rank, tag_of(s, chunk));
}

void mpp_pipeline_recv(shm_op *s, uint64_t chunk, void *buffer, size_t bytes, int rank) {
    mpp_pipeline_slot *p = mpp_pipeline_slot_of(s, chunk);
    if (bytes) mpp_post_recv(&p->messages[p->count++], buffer, bytes, rank, tag_of(s, chunk));
}

mpp_stretch mpp_piece_of_leader(const mpp_topology *t, size_t length, int leader, int piece, int pieces) {
    size_t lines = (length + CACHE_LINE - 1) / CACHE_LINE, leaders = (size_t)t->leaders_per_node;
    size_t first = lines * (size_t)leader / leaders, last = lines * ((size_t)leader + 1) / leaders;
    size_t begin = (first + (last - first) * (size_t)piece / (size_t)pieces) * CACHE_LINE;
    size_t end = (first + (last - first) * ((size_t)piece + 1) / (size_t)pieces) * CACHE_LINE;
    if (begin > length) begin = length;
    if (end > length) end = length;
    return (mpp_stretch){begin, end - begin};
}

int mpp_reduces_one_way(const shm_op *s) {
    return s->element && !s->lengths && s->root >= 0 && mpp_topology_of(s)->count == 2;
}

/* The next message leaves while the last one waits for its answer, and a rank that has lost its core holds up the
 * others once for all of it. Between two nodes, and with shorter ones, messages that need no answer were faster. */
size_t mpp_long_message(const shm_op *s, size_t bytes) {
    enum { MOST = 4 << 20, LEAST = 2 << 20, IN_CHUNK = 8 << 20 };
    size_t others = (size_t)mpp_topology_of(s)->count - 1;
    size_t length = bytes / 8 < IN_CHUNK / others ? bytes / 8 : IN_CHUNK / others;
    if (mpp_topology_of(s)->most_per_node > 1 || others < 2 || length < LEAST) return 0;
    return (length < MOST ? length : MOST) / CACHE_LINE * CACHE_LINE;
}

size_t mpp_internode_chunk(const shm_op *s, size_t bytes, size_t most) {
    size_t eighth = bytes / 8 / CACHE_LINE * CACHE_LINE;
    size_t chunk = mpp_topology_of(s)->most_per_node == 1 && eighth > s->chunk_bytes ? eighth : s->chunk_bytes;
    return chunk < most ? chunk : most;
}

void mpp_merge_by_copy(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first) {
    (void)s, (void)theirs_first;
    memcpy(payload + offset, theirs, length);
}

void mpp_unpack_by_copy(shm_op *s, char *payload) { memcpy(mpp_slot_at(s, 0, 0), payload, s->payload); }

/* ---- where a rank finds received data ---- */

void mpp_read_from_first(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) memcpy(mpp_out_at(s, 0), mpp_slot_at(s, 0, 0), length);
}

void mpp_read_from_leaders(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    for (int leader = 0; leader < t->leaders_per_node; leader++) {
        mpp_stretch part = mpp_piece_of_leader(t, length, leader, 0, 1);
        if (part.length)
            memcpy(mpp_out_at(s, chunk * s->chunk_bytes) + part.begin, mpp_slot_at(s, leader, chunk) + part.begin,
                   part.length);
    }
}

/* ---- how an operation goes ---- */

/* The most that a chunk needs, with float32 for each byte: its parts' sums of a leader's part of a slot, or of the
 * blocks that this rank sends in a reduce_scatter; and the sums of all nodes of one piece, or block, to be received and
 * widened. */
static size_t slot_bytes(const mpp_channel *c, size_t ranks) {
    const mpp_topology *t = c->topology;
    size_t of_leader = c->slot_bytes / (size_t)t->leaders_per_node, of_block = c->slot_bytes / ranks + CACHE_LINE,
           of_blocks = 0;
    size_t of_piece = of_leader / (size_t)t->count, rounding = (ranks + 2 * (size_t)t->count) * CACHE_LINE;
    for (int node = 0; node < t->count; node++)
        of_blocks += (size_t)((mpp_local_count(t, node) + c->size - 1) / c->size) * of_block;
    size_t sent = of_blocks > of_leader ? of_blocks : of_leader, received = of_block > of_piece ? of_block : of_piece;
    sent = (size_t)mpp_part_count(t, t->here) * (sent + CACHE_LINE);
    received = (size_t)t->parts * (received + CACHE_LINE);
    return sizeof(float) * (sent + 2 * received) + rounding;
}

static size_t messages_per_slot(const mpp_channel *c, size_t ranks) { return ranks + 4 * (size_t)c->topology->count; }

size_t mpp_pipeline_bytes_to_come(const mpp_channel *c, size_t ranks) {
    size_t bytes = 0;
    for (int i = 0; i < c->ring; i++) {
        if (!c->internode_state->slots[i].messages) bytes += messages_per_slot(c, ranks) * sizeof(mpp_message);
        if (!c->internode_state->slots[i].memory) bytes += slot_bytes(c, ranks);
    }
    return bytes;
}

/* Whether there is memory. Under the lock: other threads may make such an operation, or move one, at the same time. */
static int reserve(mpp_channel *c, size_t ranks) {
    int is_there = 1;
    mpp_lock();
    for (int i = 0; i < c->ring && is_there; i++) {
        mpp_pipeline_slot *p = &c->internode_state->slots[i];
        if (p->messages && p->memory) continue;
        p->room = slot_bytes(c, ranks);
        if (!p->messages) p->messages = calloc(messages_per_slot(c, ranks), sizeof *p->messages);
        if (!p->memory) p->memory = malloc(p->room);
        is_there = p->messages && p->memory;
    }
    mpp_unlock();
    return is_there;
}

int mpp_use_pipeline(shm_op *s, const mpp_route *route) {
    s->route = route;
    s->two_phase = 1;
    return reserve(mpp_channel_of(s), (size_t)s->op.group->size);
}

void mpp_piggyback(shm_op *s, const mpp_route *route, size_t payload) {
    s->route = route;
    s->payload = payload;
}
