/* What a group on several hosts moves without adding it up: broadcast and all_gather. See across.h. */
#include "internode/internode.h"

#include <string.h>

#include "internode/pipeline.h"

/* ---- broadcast ---- */

static int root_host(const shm_op *s) { return mpp_hosts_of(s)->host_of[s->root]; }

static char *root_slot(const shm_op *s, uint64_t chunk) {
    return mpp_slot_of(mpp_channel_of(s), mpp_hosts_of(s)->place_of[s->root], s->first + chunk);
}

/* What is sent from here, or comes here, of a chunk that flies. */
static char *broadcast_place(const shm_op *s, uint64_t chunk) {
    if (mpp_goes_directly(s)) return mpp_shm_out(s, chunk * s->chunk_bytes);
    return mpp_hosts_of(s)->here == root_host(s) ? root_slot(s, chunk) : mpp_own_slot(s, chunk);
}

static void pack_from_root(shm_op *s, char *payload) {
    if (root_host(s) == mpp_hosts_of(s)->here) memcpy(payload, root_slot(s, 0), s->payload);
}

static void span_of_root(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    int host = root_host(s);
    *offset = 0;
    *length = first_host <= host && host < end_host ? s->payload : 0;
}

static void unpack_by_copy(shm_op *s, char *payload) {
    memcpy(mpp_slot_of(mpp_channel_of(s), 0, s->first), payload, s->payload);
}

/* Of the pieces of a lane's part: the one that the root's host sends to `host`. */
static mpp_stretch broadcast_piece(const shm_op *s, uint64_t chunk, int host) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int piece = host < root_host(s) ? host : host - 1;
    return mpp_piece_of(h, mpp_chunk_length(s, s->bytes, chunk), mpp_channel_of(s)->rank, piece, h->count - 1);
}

static void scatter_pieces(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    if (mpp_channel_of(s)->rank >= h->lanes) return;
    if (h->here != root_host(s)) {
        mpp_stretch mine = broadcast_piece(s, chunk, h->here);
        mpp_expect_from(s, chunk, broadcast_place(s, chunk) + mine.begin, mine.length, mpp_beside(s, root_host(s)));
        return;
    }
    for (int i = 1; i < h->count; i++) {
        mpp_stretch piece = broadcast_piece(s, chunk, mpp_other_host(h, i));
        mpp_send_to(s, chunk, broadcast_place(s, chunk) + piece.begin, piece.length,
                    mpp_beside(s, mpp_other_host(h, i)));
    }
}

static void exchange_pieces(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    if (mpp_channel_of(s)->rank >= h->lanes || h->here == root_host(s)) return;
    mpp_stretch mine = broadcast_piece(s, chunk, h->here);
    for (int i = 1; i < h->count; i++) {
        int host = mpp_other_host(h, i);
        if (host == root_host(s)) continue;
        mpp_stretch piece = broadcast_piece(s, chunk, host);
        mpp_send_to(s, chunk, broadcast_place(s, chunk) + mine.begin, mine.length, mpp_beside(s, host));
        mpp_expect_from(s, chunk, broadcast_place(s, chunk) + piece.begin, piece.length, mpp_beside(s, host));
    }
}

static void read_from_root_here(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    memcpy(mpp_shm_out(s, chunk * s->chunk_bytes), root_slot(s, chunk), length);
}

int mpp_broadcast_across(shm_op *s) {
    static const mpp_route riding = {
        .pack = pack_from_root, .span = span_of_root, .merge = mpp_merge_by_copy, .unpack = unpack_by_copy};
    static const mpp_route flying = {.first_leg = scatter_pieces, .second_leg = exchange_pieces};
    int reads = s->root != s->op.group->rank;
    s->wait_for = -1;
    s->read = NULL;
    if (!s->bytes) return 1;
    if (s->bytes <= s->chunk_bytes && s->bytes <= MPP_WHOLE_PAYLOAD) {
        mpp_ride(s, &riding, s->bytes);
        if (reads) s->read = mpp_read_from_first;
        return 1;
    }
    const mpp_hosts *h = mpp_hosts_of(s);
    if (h->count == 2 && h->lanes == 1 && s->chunk_bytes > MPP_EAGER) s->chunk_bytes = MPP_EAGER;
    if (mpp_goes_directly(s)) s->write = NULL;
    else if (reads) s->read = root_host(s) == mpp_hosts_of(s)->here ? read_from_root_here : mpp_read_lanes;
    return mpp_fly(s, &flying);
}

/* ---- all_gather ---- */

/* Ranks are numbered host by host, in what rides and in the inbox. */
static int number_of(const mpp_hosts *h, int rank) { return h->first[h->host_of[rank]] + h->place_of[rank]; }

static void pack_blocks(shm_op *s, char *payload) {
    mpp_channel *c = mpp_channel_of(s);
    size_t begin = (size_t)c->hosts->first[c->hosts->here];
    for (int r = 0; r < c->size; r++)
        memcpy(payload + (begin + (size_t)r) * s->call.bytes, mpp_slot_of(c, r, s->first), s->call.bytes);
}

static void span_of_blocks(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    const mpp_hosts *h = mpp_hosts_of(s);
    *offset = (size_t)h->first[first_host] * s->call.bytes;
    *length = (size_t)(h->first[end_host] - h->first[first_host]) * s->call.bytes;
}

static void read_table(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    const char *table = mpp_slot_of(mpp_channel_of(s), 0, s->first);
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (length) memcpy(mpp_shm_out_block(s, r, 0), table + (size_t)number_of(h, r) * s->call.bytes, length);
    }
}

static char *inbox_of(const shm_op *s, uint64_t chunk, int rank) {
    const mpp_channel *c = mpp_channel_of(s);
    const mpp_hosts *h = c->hosts;
    size_t number = (size_t)number_of(h, rank), ring = (size_t)c->ring;
    if (h->host_of[rank] > h->here) number -= (size_t)c->size;
    return h->inbox + (number * ring + (size_t)((s->first + chunk) % ring)) * h->inbox_bytes;
}

static void send_blocks(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int me = s->op.group->rank, place = mpp_channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->lengths[me], chunk);
    for (int i = 1; i < h->count; i++) {
        int host = mpp_other_host(h, i), host_before = mpp_other_host(h, h->count - i);
        mpp_send_to(s, chunk, mpp_own_slot(s, chunk), length, mpp_counterpart(s, host, place));
        for (int p = place; p < mpp_local_count(h, host_before); p += mpp_channel_of(s)->size) {
            int sender = h->members[h->first[host_before] + p];
            mpp_expect_from(s, chunk, inbox_of(s, chunk, sender), mpp_chunk_length(s, s->lengths[sender], chunk),
                            sender);
        }
    }
}

static void read_blocks_across(shm_op *s, uint64_t chunk) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_hosts *h = c->hosts;
    size_t offset = chunk * s->chunk_bytes;
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        char *out = length ? mpp_shm_out_block(s, r, offset) : NULL;
        if (!length || out == mpp_shm_in(s, offset)) continue;
        int is_here = h->host_of[r] == h->here;
        memcpy(out, is_here ? mpp_slot_of(c, h->place_of[r], s->first + chunk) : inbox_of(s, chunk, r), length);
    }
}

int mpp_allgather_across(shm_op *s, size_t longest) {
    static const mpp_route riding = {
        .pack = pack_blocks, .span = span_of_blocks, .merge = mpp_merge_by_copy, .unpack = unpack_by_copy};
    static const mpp_route flying = {.first_leg = send_blocks};
    size_t table = (size_t)s->op.group->size * longest;
    s->wait_for = -1;
    if (!longest) return 1;
    if (table <= s->chunk_bytes && table <= MPP_PAYLOAD) {
        mpp_ride(s, &riding, table);
        s->read = read_table;
        return 1;
    }
    s->chunk_bytes = mpp_hosts_of(s)->inbox_bytes;
    s->read = read_blocks_across;
    return mpp_fly(s, &flying);
}
