/* all_gather: between nodes (see internode.h), on a node, by MPI, or as an exchange of what MPI's call cannot take. */
#include <stdlib.h>
#include <string.h>

#include "collectives/collective.h"
#include "internode/pipeline.h"

/* ---- between nodes ---- */

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

/* Long messages leave, and arrive, in the user's memory; the others in a slot and in the inbox. */
static int is_long(const shm_op *s) { return s->chunk_bytes > mpp_channel_of(s)->inbox_bytes; }

static char *received_at(const shm_op *s, uint64_t chunk, int rank) {
    return is_long(s) ? mpp_shm_out_block(s, rank, chunk * s->chunk_bytes) : inbox_of(s, chunk, rank);
}

static void send_blocks(shm_op *s, uint64_t chunk) {
    const mpp_topology *t = mpp_topology_of(s);
    int me = s->op.group->rank, place = mpp_channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->lengths[me], chunk);
    const char *block = is_long(s) && length ? mpp_shm_in(s, chunk * s->chunk_bytes) : mpp_own_slot(s, chunk);
    for (int i = 1; i < t->count; i++) {
        int node = mpp_other_node(t, i), node_before = mpp_other_node(t, t->count - i);
        mpp_pipeline_send(s, chunk, block, length, mpp_peer_rank(s, node, place));
        for (int p = place; p < mpp_local_count(t, node_before); p += mpp_channel_of(s)->size) {
            int sender = t->members[t->first[node_before] + p];
            size_t theirs = mpp_chunk_length(s, s->lengths[sender], chunk);
            if (theirs) mpp_pipeline_recv(s, chunk, received_at(s, chunk, sender), theirs, sender);
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
        if (!is_long(s))
            memcpy(out, is_here ? mpp_slot_of(c, t->place_of[r], s->first + chunk) : inbox_of(s, chunk, r), length);
        else if (is_here) memcpy(out, mpp_shm_in(s, offset), length);
    }
}

static int between_nodes(shm_op *s, size_t longest) {
    static const mpp_route piggybacked = {
        .pack = pack_blocks, .span = span_of_blocks, .merge = mpp_merge_by_copy, .unpack = mpp_unpack_by_copy};
    static const mpp_route pipelined = {.first_phase = send_blocks};
    size_t table = (size_t)s->op.group->size * longest;
    s->wait_for = -1;
    if (!longest) return 1;
    if (table <= s->chunk_bytes && table <= MPP_PAYLOAD) {
        mpp_piggyback(s, &piggybacked, table);
        s->read = read_table;
        return 1;
    }
    size_t message = mpp_long_message(s, longest);
    s->chunk_bytes = message ? message : mpp_channel_of(s)->inbox_bytes;
    if (message) s->write = NULL;
    s->read = read_blocks_internode;
    return mpp_use_pipeline(s, &pipelined);
}

/* ---- on a node ---- */

static void write_own_block(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = mpp_chunk_length(s, s->lengths[s->op.group->rank], chunk);
    if (length) mpp_to_slot(s, slot, mpp_shm_in(s, mpp_chunk_begin(s, chunk)), length);
}

static void pull_blocks(shm_op *s) {
    int own = s->op.group->rank;
    for (int r = 0; r < s->op.group->size; r++) {
        uintptr_t from = !s->lengths[r] ? 0 : r == own ? (uintptr_t)s->in : mpp_peer_address(s, r);
        if (from) mpp_copy_in_device(s->bus, MPP_UP, s->out_list[r], from, s->lengths[r]);
    }
}

static void read_blocks(shm_op *s, uint64_t chunk) {
    mpp_channel *c = s->op.group->channel;
    size_t offset = mpp_chunk_begin(s, chunk);
    for (int r = 0; r < c->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (!length) continue;
        char *out = mpp_shm_out_block(s, r, offset);
        const char *own = mpp_shm_in(s, offset);
        if (r != c->rank) mpp_from_slot(s, out, mpp_slot_at(s, r, chunk), length);
        else if (s->bus) mpp_copy_in_device(s->bus, MPP_UP, (uintptr_t)out, (uintptr_t)own, length);
        else if (out != own) memcpy(out, own, length);
    }
}

static uintptr_t over_shm(mpp_group *g, const void *in, const uintptr_t *out, const size_t *bytes, uintptr_t staging,
                          int64_t wait_ns) {
    shm_op *s = mpp_new_shm_op(g, staging);
    if (!s) return mpp_no_shm_op(s, g, wait_ns);
    size_t longest = mpp_longest_of(bytes, g->size);
    s->in = in;
    s->out_list = mpp_copy_list(out, g->size);
    s->lengths = (size_t *)mpp_copy_list((const uintptr_t *)bytes, g->size);
    if (!s->out_list || !s->lengths) return mpp_no_shm_op(s, g, wait_ns);
    s->write = write_own_block;
    s->read = read_blocks;
    s->pull = pull_blocks;
    uintptr_t shown = bytes[g->rank] ? (uintptr_t)in : 0;
    mpp_offer(s, &shown, NULL, longest, bytes);
    if (g->channel->internode && !between_nodes(s, longest)) return mpp_no_shm_op(s, g, wait_ns);
    mpp_sign(s, MPP_ALL_GATHER, -1, longest);
    if (staging) {
        mpp_add_lane(&s->op, (uintptr_t)in, bytes[g->rank], MPP_LOAD);
        s->out_lane = 1;
        for (int r = 0; r < g->size; r++) mpp_add_lane(&s->op, out[r], bytes[r], MPP_STORE);
        mpp_stage_shm(s);
    }
    return mpp_enqueue_shm(s, wait_ns);
}

/* ---- by MPI ---- */

static int issue_allgather(mpi_collective *c) {
    const mpp_group *g = c->op.group;
    int n = (int)mpp_length_of(c);
    size_t offset = c->index * c->per_call;
    const char *in = mpp_in_at(c, offset);
    char *out = mpp_out_at(c, offset); /* the blocks of all ranks, each of n bytes */
    const void *send = in == out + (size_t)g->rank * (size_t)n ? mpp_mpi.in_place : in;
    return mpp_mpi.Iallgather(send, n, mpp_mpi.byte, out, n, mpp_mpi.byte, g->comm, &c->request);
}

static uintptr_t by_mpi(mpp_group *g, uintptr_t in, uintptr_t out, size_t bytes, size_t per_call, uintptr_t staging,
                        int64_t wait_ns) {
    mpi_collective *c = mpp_new_collective(g, MPP_ALL_GATHER, issue_allgather, staging);
    if (!c) return mpp_no_collective(c, g);
    c->in = (const char *)in;
    c->out = (char *)out;
    mpp_split(c, bytes, per_call);
    if (staging) {
        mpp_add_lane(&c->op, in, bytes, MPP_LOAD);
        c->out_lane = 1;
        for (size_t r = 0; r < (size_t)g->size; r++) mpp_add_lane(&c->op, out + r * bytes, bytes, MPP_STORE);
        mpp_stage_begin(&c->op, c->stride);
    }
    return mpp_enqueue(c, wait_ns);
}

/* ---- which of them ---- */

/* One block for each rank: where they begin, then how long they are. The first begins at `first`, each of the others
 * `step` bytes after the one before. NULL: no memory. */
static uintptr_t *new_blocks(const mpp_group *g, uintptr_t first, size_t step, size_t length) {
    size_t size = (size_t)g->size;
    uintptr_t *blocks = malloc(2 * size * sizeof *blocks);
    for (size_t r = 0; blocks && r < size; r++) {
        blocks[r] = first + r * step;
        blocks[size + r] = length;
    }
    return blocks;
}

static uintptr_t exchange_blocks(mpp_group *g, uintptr_t in, const uintptr_t *out, const size_t *bytes,
                                 uintptr_t staging, int64_t wait_ns) {
    uintptr_t *send = new_blocks(g, in, 0, bytes[g->rank]);
    if (!send) return mpp_no_memory((uintptr_t)g, staging, 0, wait_ns);
    uintptr_t op = mpp_exchange_to_gather(g, send, (size_t *)(send + g->size), out, bytes, staging, wait_ns);
    free(send);
    return op;
}

uintptr_t mpp_allgather_list(uintptr_t group, uintptr_t in, const uintptr_t *out, const size_t *bytes,
                             uintptr_t staging, int64_t wait_ns) {
    mpp_note(MPP_ALL_GATHER, bytes[((mpp_group *)group)->rank], -1);
    mpp_group *g = (mpp_group *)group;
    if (mpp_in_shm(g, MPP_ALL_GATHER, (size_t)g->size * mpp_longest_of(bytes, g->size), staging))
        return over_shm(g, (const void *)in, out, bytes, staging, wait_ns);
    return exchange_blocks(g, in, out, bytes, staging, wait_ns);
}

uintptr_t mpp_allgather(uintptr_t group, uintptr_t in, uintptr_t out, size_t bytes, uintptr_t staging,
                        int64_t wait_ns) {
    mpp_note(MPP_ALL_GATHER, bytes, -1);
    mpp_group *g = (mpp_group *)group;
    if (!mpp_in_shm(g, MPP_ALL_GATHER, (size_t)g->size * bytes, staging)) {
        size_t limit = mpp_call_limit(staging);
        /* In a slot the blocks of one piece lie side by side, as MPI wants them; in the user's memory all of them. */
        if (mpp_through_host(staging)) return by_mpi(g, in, out, bytes, limit / (size_t)g->size, staging, wait_ns);
        if (bytes <= limit) return by_mpi(g, in, out, bytes, bytes, staging, wait_ns);
    }
    uintptr_t *receive = new_blocks(g, out, bytes, bytes);
    if (!receive) return mpp_no_memory(group, staging, 0, wait_ns);
    uintptr_t op = mpp_allgather_list(group, in, receive, (size_t *)(receive + g->size), staging, wait_ns);
    free(receive);
    return op;
}
