/* The collectives of a group on several hosts: what travels between them, and where it lies. shm.c has the protocol,
 * hosts.c the messages.
 *
 * What is short rides with the agreement about the call, in the messages of the first rank of each host.
 *
 * What is long flies chunk by chunk, while other chunks are written and read. A reduction's chunk is cut into as many
 * parts as every host has ranks at least (lanes), and each part into one piece per host. The ranks of a lane exchange
 * their hosts' partial sums, one piece each, and then the results: each host sends and receives at most twice what it
 * holds, by all its lanes at once. (Rabenseifner's reduce-scatter and all-gather, with direct messages; several
 * leaders per host as in Bayatpour and others, "Scalable Reduction Collectives with Data Partitioning-based
 * Multi-Leader Design", 2017.) A broadcast's pieces are scattered over the other hosts, which then exchange them. In
 * an all_gather every block goes once to every other host, into an inbox in its shared memory. In a reduce_scatter a
 * host's sum of a block goes to the rank that wants it.
 *
 * Partial sums are in the computing type (float32 for narrow floats) where a host has several ranks; with one rank the
 * elements themselves are sent. Results are rounded once, and travel in the elements' type. A host's sum is the tree
 * of its ranks, and hosts are added as a tree too: see mpp_reduce().
 */
#include "across.h"

#include <string.h>

#include "hosts.h"

static mpp_channel *channel_of(const shm_op *s) { return s->op.group->channel; }
static mpp_hosts *hosts_of(const shm_op *s) { return channel_of(s)->hosts; }

static mpp_flight *flight_of(const shm_op *s, uint64_t chunk) {
    return &hosts_of(s)->flights[(s->first + chunk) % (uint64_t)channel_of(s)->ring];
}

/* Chunks under way have tags of their own, for each leg: the next ones' messages may come earlier. */
static int tag_of(const shm_op *s, uint64_t chunk) {
    const mpp_channel *c = channel_of(s);
    int slot = (int)((s->first + chunk) % (uint64_t)c->ring);
    return c->hosts->first_tag + 1 + slot + (flight_of(s, chunk)->second ? c->ring : 0);
}

static void send_to(shm_op *s, uint64_t chunk, const void *buffer, size_t bytes, int rank) {
    mpp_flight *f = flight_of(s, chunk);
    if (bytes) mpp_dispatch(s, &f->parcels[f->count++], buffer, bytes, rank, tag_of(s, chunk));
}

static void expect_from(shm_op *s, uint64_t chunk, void *buffer, size_t bytes, int rank) {
    mpp_flight *f = flight_of(s, chunk);
    if (bytes) mpp_expect(&f->parcels[f->count++], buffer, bytes, rank, tag_of(s, chunk));
}

/* Memory for the rest of the flight. */
static char *take(mpp_flight *f, size_t bytes) {
    char *taken = f->memory + f->used;
    f->used += (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return taken;
}

static char *own_slot(const shm_op *s, uint64_t chunk) {
    mpp_channel *c = channel_of(s);
    return mpp_slot_of(c, c->rank, s->first + chunk);
}

/* The rank of this lane on another host. */
static int beside(const shm_op *s, int host) {
    const mpp_hosts *h = hosts_of(s);
    return h->members[h->first[host] + channel_of(s)->rank];
}

/* The other hosts, each host beginning with the next one: so that they do not all send to one. */
static int other_host(const mpp_hosts *h, int i) { return (h->here + i) % h->count; }

typedef struct {
    size_t begin, length;
} stretch;

/* Piece number `piece` of `pieces` of a lane's part of `length` bytes, in whole cache lines. */
static stretch piece_of(const mpp_hosts *h, size_t length, int lane, int piece, int pieces) {
    size_t lines = (length + CACHE_LINE - 1) / CACHE_LINE, lanes = (size_t)h->lanes;
    size_t first = lines * (size_t)lane / lanes, last = lines * ((size_t)lane + 1) / lanes;
    size_t begin = (first + (last - first) * (size_t)piece / (size_t)pieces) * CACHE_LINE;
    size_t end = (first + (last - first) * ((size_t)piece + 1) / (size_t)pieces) * CACHE_LINE;
    if (begin > length) begin = length;
    if (end > length) end = length;
    return (stretch){begin, end - begin};
}

/* ---- partial sums ---- */

static size_t wide_bytes(const shm_op *s, size_t bytes) {
    return bytes / s->element * mpp_dtype_size(mpp_wide_dtype(s->how.dtype));
}

/* Whether a host sends its only rank's elements as they are. */
static int sends_plain(const shm_op *s, int host) {
    return mpp_local_count(hosts_of(s), host) == 1 && !s->how.has_premul;
}

/* The sum of this host's ranks, of what lies in their slots at an offset. */
static void add_up(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, char *wide) {
    mpp_channel *c = channel_of(s);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_of(c, r, s->first + chunk) + offset;
    mpp_reduce_wide(&s->how, wide, c->sources, c->size, bytes / s->element);
}

static void send_sum(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int rank) {
    if (!bytes) return;
    if (sends_plain(s, hosts_of(s)->here)) {
        send_to(s, chunk, own_slot(s, chunk) + offset, bytes, rank);
        return;
    }
    char *sum = take(flight_of(s, chunk), wide_bytes(s, bytes));
    add_up(s, chunk, offset, bytes, sum);
    send_to(s, chunk, sum, wide_bytes(s, bytes), rank);
}

/* All hosts' sums come to lie side by side, this one's too, at the beginning of the flight's memory. */
static void gather_sums(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int (*sender)(const shm_op *, int)) {
    const mpp_hosts *h = hosts_of(s);
    if (!bytes) return;
    for (int host = 0; host < h->count; host++) {
        char *sum = take(flight_of(s, chunk), wide_bytes(s, bytes));
        if (host == h->here) add_up(s, chunk, offset, bytes, sum);
        else expect_from(s, chunk, sum, sends_plain(s, host) ? bytes : wide_bytes(s, bytes), sender(s, host));
    }
}

static void add_hosts(shm_op *s, uint64_t chunk, size_t bytes, char *result) {
    mpp_channel *c = channel_of(s);
    const mpp_hosts *h = c->hosts;
    mpp_flight *f = flight_of(s, chunk);
    size_t wide = wide_bytes(s, bytes), count = bytes / s->element;
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    if (!bytes) return;
    f->used = 0;
    for (int host = 0; host < h->count; host++) c->sources[host] = take(f, wide);
    for (int host = 0; host < h->count; host++) {
        if (host == h->here || !sends_plain(s, host) || of_wide.dtype == s->how.dtype) continue;
        char *widened = take(f, wide);
        mpp_widen(&s->how, widened, c->sources[host], count);
        c->sources[host] = widened;
    }
    mpp_reduce(&of_wide, f->memory + (size_t)h->here * ((wide + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE), c->sources,
               h->count, count);
    mpp_narrow(&s->how, result, c->sources[h->here], count);
}

/* ---- all_reduce and reduce ---- */

static void pack_sum(shm_op *s, char *payload) {
    mpp_channel *c = channel_of(s);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_of(c, r, s->first);
    mpp_reduce_wide(&s->how, payload, c->sources, c->size, s->payload / wide_bytes(s, s->element));
}

static void span_all(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    (void)first_host, (void)end_host;
    *offset = 0;
    *length = s->payload;
}

static void merge_sums(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first) {
    const void *sources[] = {theirs_first ? theirs : payload, theirs_first ? payload : theirs};
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    (void)offset;
    mpp_reduce(&of_wide, payload, sources, 2, length / wide_bytes(s, s->element));
}

static void unpack_sum(shm_op *s, char *payload) {
    mpp_narrow(&s->how, mpp_slot_of(channel_of(s), 0, s->first), payload, s->payload / wide_bytes(s, s->element));
}

static void read_from_first(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) memcpy(mpp_shm_out(s, 0), mpp_slot_of(channel_of(s), 0, s->first), length);
}

static void send_sums(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    int lane = channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (lane >= h->lanes) return;
    stretch mine = piece_of(h, length, lane, h->here, h->count);
    gather_sums(s, chunk, mine.begin, mine.length, beside);
    for (int i = 1; i < h->count; i++) {
        stretch piece = piece_of(h, length, lane, other_host(h, i), h->count);
        send_sum(s, chunk, piece.begin, piece.length, beside(s, other_host(h, i)));
    }
}

/* The results come into this rank's slot, from where all ranks here read this lane's part. */
static void send_results(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    int lane = channel_of(s)->rank, wanted_by = s->root < 0 ? -1 : h->host_of[s->root];
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    char *slot = own_slot(s, chunk);
    if (lane >= h->lanes) return;
    stretch mine = piece_of(h, length, lane, h->here, h->count);
    add_hosts(s, chunk, mine.length, slot + mine.begin);
    for (int i = 1; i < h->count; i++) {
        int host = other_host(h, i);
        stretch piece = piece_of(h, length, lane, host, h->count);
        if (wanted_by < 0 || wanted_by == host) send_to(s, chunk, slot + mine.begin, mine.length, beside(s, host));
        if (wanted_by < 0 || wanted_by == h->here)
            expect_from(s, chunk, slot + piece.begin, piece.length, beside(s, host));
    }
}

static void read_lanes(shm_op *s, uint64_t chunk) {
    mpp_channel *c = channel_of(s);
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    for (int lane = 0; lane < c->hosts->lanes; lane++) {
        stretch part = piece_of(c->hosts, length, lane, 0, 1);
        if (part.length)
            memcpy(mpp_shm_out(s, chunk * s->chunk_bytes) + part.begin,
                   mpp_slot_of(c, lane, s->first + chunk) + part.begin, part.length);
    }
}

/* Memory for what a flight can need: sums of a whole slot to be sent, to be received, and widened. */
static int can_fly(shm_op *s) {
    mpp_channel *c = channel_of(s);
    size_t lines = 4 * (size_t)s->op.group->size * CACHE_LINE;
    return mpp_hosts_reserve(c, 3 * sizeof(float) * c->slot_bytes + lines);
}

static int fly(shm_op *s, const mpp_route *route) {
    s->route = route;
    s->two_phase = 1;
    s->wait_for = -1;
    return can_fly(s);
}

static void ride(shm_op *s, const mpp_route *route, size_t payload) {
    s->route = route;
    s->payload = payload;
    s->two_phase = 0;
    s->wait_for = -1;
}

int mpp_reduce_across(shm_op *s, int root) {
    static const mpp_route riding = {.pack = pack_sum, .span = span_all, .merge = merge_sums, .unpack = unpack_sum};
    static const mpp_route flying = {.first_leg = send_sums, .second_leg = send_results};
    int reads = root < 0 || root == s->op.group->rank;
    s->root = root;
    s->wait_for = -1;
    s->two_phase = 0;
    s->read = NULL;
    if (!s->bytes) return 1;
    if (s->bytes <= s->chunk_bytes && wide_bytes(s, s->bytes) <= MPP_PAYLOAD) {
        ride(s, &riding, wide_bytes(s, s->bytes));
        if (reads) s->read = read_from_first;
        return 1;
    }
    if (reads) s->read = read_lanes;
    return fly(s, &flying);
}

/* ---- broadcast ---- */

static int root_host(const shm_op *s) { return hosts_of(s)->host_of[s->root]; }

static char *root_slot(const shm_op *s, uint64_t chunk) {
    return mpp_slot_of(channel_of(s), hosts_of(s)->place_of[s->root], s->first + chunk);
}

static void pack_from_root(shm_op *s, char *payload) {
    if (root_host(s) == hosts_of(s)->here) memcpy(payload, root_slot(s, 0), s->payload);
}

static void span_of_root(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    int host = root_host(s);
    *offset = 0;
    *length = first_host <= host && host < end_host ? s->payload : 0;
}

static void merge_by_copy(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int first) {
    (void)s, (void)first;
    memcpy(payload + offset, theirs, length);
}

static void unpack_by_copy(shm_op *s, char *payload) {
    memcpy(mpp_slot_of(channel_of(s), 0, s->first), payload, s->payload);
}

/* Of the pieces of a lane's part: the one that the root's host sends to `host`. */
static stretch broadcast_piece(const shm_op *s, uint64_t chunk, int host) {
    const mpp_hosts *h = hosts_of(s);
    int piece = host < root_host(s) ? host : host - 1;
    return piece_of(h, mpp_chunk_length(s, s->bytes, chunk), channel_of(s)->rank, piece, h->count - 1);
}

static void scatter_pieces(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    if (channel_of(s)->rank >= h->lanes) return;
    if (h->here != root_host(s)) {
        stretch mine = broadcast_piece(s, chunk, h->here);
        expect_from(s, chunk, own_slot(s, chunk) + mine.begin, mine.length, beside(s, root_host(s)));
        return;
    }
    for (int i = 1; i < h->count; i++) {
        stretch piece = broadcast_piece(s, chunk, other_host(h, i));
        send_to(s, chunk, root_slot(s, chunk) + piece.begin, piece.length, beside(s, other_host(h, i)));
    }
}

static void exchange_pieces(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    if (channel_of(s)->rank >= h->lanes || h->here == root_host(s)) return;
    stretch mine = broadcast_piece(s, chunk, h->here);
    for (int i = 1; i < h->count; i++) {
        int host = other_host(h, i);
        if (host == root_host(s)) continue;
        stretch piece = broadcast_piece(s, chunk, host);
        send_to(s, chunk, own_slot(s, chunk) + mine.begin, mine.length, beside(s, host));
        expect_from(s, chunk, own_slot(s, chunk) + piece.begin, piece.length, beside(s, host));
    }
}

static void read_from_root_here(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    memcpy(mpp_shm_out(s, chunk * s->chunk_bytes), root_slot(s, chunk), length);
}

int mpp_broadcast_across(shm_op *s) {
    static const mpp_route riding = {
        .pack = pack_from_root, .span = span_of_root, .merge = merge_by_copy, .unpack = unpack_by_copy};
    static const mpp_route flying = {.first_leg = scatter_pieces, .second_leg = exchange_pieces};
    int reads = s->root != s->op.group->rank;
    s->wait_for = -1;
    s->read = NULL;
    if (!s->bytes) return 1;
    if (s->bytes <= s->chunk_bytes && s->bytes <= MPP_PAYLOAD) {
        ride(s, &riding, s->bytes);
        if (reads) s->read = read_from_first;
        return 1;
    }
    if (reads) s->read = root_host(s) == hosts_of(s)->here ? read_from_root_here : read_lanes;
    return fly(s, &flying);
}

/* ---- all_gather ---- */

/* Ranks are numbered host by host, in what rides and in the inbox. */
static int number_of(const mpp_hosts *h, int rank) { return h->first[h->host_of[rank]] + h->place_of[rank]; }

static size_t longest_of(const shm_op *s) { return s->call.bytes; }

static void pack_blocks(shm_op *s, char *payload) {
    mpp_channel *c = channel_of(s);
    size_t begin = (size_t)c->hosts->first[c->hosts->here];
    for (int r = 0; r < c->size; r++)
        memcpy(payload + (begin + (size_t)r) * longest_of(s), mpp_slot_of(c, r, s->first), longest_of(s));
}

static void span_of_blocks(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    const mpp_hosts *h = hosts_of(s);
    *offset = (size_t)h->first[first_host] * longest_of(s);
    *length = (size_t)(h->first[end_host] - h->first[first_host]) * longest_of(s);
}

static void read_table(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    const char *table = mpp_slot_of(channel_of(s), 0, s->first);
    for (int r = 0; r < s->op.group->size; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], chunk);
        if (length) memcpy(mpp_shm_out_block(s, r, 0), table + (size_t)number_of(h, r) * longest_of(s), length);
    }
}

static char *inbox_of(const shm_op *s, uint64_t chunk, int rank) {
    const mpp_channel *c = channel_of(s);
    const mpp_hosts *h = c->hosts;
    size_t number = (size_t)number_of(h, rank), ring = (size_t)c->ring;
    if (h->host_of[rank] > h->here) number -= (size_t)c->size;
    return h->inbox + (number * ring + (size_t)((s->first + chunk) % ring)) * h->inbox_bytes;
}

/* Who takes the block of the rank with number `place` on its host. */
static int taker(const shm_op *s, int host, int place) {
    const mpp_hosts *h = hosts_of(s);
    return h->members[h->first[host] + place % mpp_local_count(h, host)];
}

static void send_blocks(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    int me = s->op.group->rank, place = channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->lengths[me], chunk);
    for (int i = 1; i < h->count; i++) {
        int host = other_host(h, i), host_before = other_host(h, h->count - i);
        send_to(s, chunk, own_slot(s, chunk), length, taker(s, host, place));
        for (int p = place; p < mpp_local_count(h, host_before); p += channel_of(s)->size) {
            int sender = h->members[h->first[host_before] + p];
            expect_from(s, chunk, inbox_of(s, chunk, sender), mpp_chunk_length(s, s->lengths[sender], chunk), sender);
        }
    }
}

static void read_blocks_across(shm_op *s, uint64_t chunk) {
    mpp_channel *c = channel_of(s);
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
        .pack = pack_blocks, .span = span_of_blocks, .merge = merge_by_copy, .unpack = unpack_by_copy};
    static const mpp_route flying = {.first_leg = send_blocks};
    size_t table = (size_t)s->op.group->size * longest;
    s->wait_for = -1;
    if (!longest) return 1;
    if (table <= s->chunk_bytes && table <= MPP_PAYLOAD) {
        ride(s, &riding, table);
        s->read = read_table;
        return 1;
    }
    s->chunk_bytes = hosts_of(s)->inbox_bytes;
    s->read = read_blocks_across;
    return fly(s, &flying);
}

/* ---- reduce_scatter ---- */

static void write_all_blocks(shm_op *s, uint64_t chunk, char *slot) {
    (void)chunk;
    for (int r = 0; r < s->op.group->size; r++)
        if (s->lengths[r]) memcpy(slot + (size_t)r * longest_of(s), mpp_shm_in_block(s, r, 0), s->lengths[r]);
}

static void read_own_block(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    const char *sums = mpp_slot_of(channel_of(s), 0, s->first + chunk);
    if (s->lengths[me]) memcpy(mpp_shm_out(s, 0), sums + (size_t)me * longest_of(s), s->lengths[me]);
}

/* What a slot carries in this chunk: pieces of the blocks of ranks [begin, end), see mpp_window(). */
typedef struct {
    int begin, end;
    uint64_t piece;
} window;

static window window_of(const shm_op *s, uint64_t chunk) {
    int ranks = s->op.group->size, width = mpp_window(channel_of(s));
    int begin = (int)(chunk % s->windows) * width;
    return (window){begin, ranks - begin < width ? ranks : begin + width, chunk / s->windows};
}

static int sender_of_my_block(const shm_op *s, int host) { return taker(s, host, channel_of(s)->rank); }

static void send_block_sums(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = hosts_of(s);
    window w = window_of(s, chunk);
    for (int r = w.begin; r < w.end; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], w.piece), at = (size_t)(r - w.begin) * s->chunk_bytes;
        if (r == s->op.group->rank) gather_sums(s, chunk, at, length, sender_of_my_block);
    }
    for (int r = w.begin; r < w.end; r++) {
        size_t length = mpp_chunk_length(s, s->lengths[r], w.piece), at = (size_t)(r - w.begin) * s->chunk_bytes;
        int is_mine = h->place_of[r] % channel_of(s)->size == channel_of(s)->rank;
        if (h->host_of[r] != h->here && is_mine) send_sum(s, chunk, at, length, r);
    }
}

static void finish_block(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    window w = window_of(s, chunk);
    if (me < w.begin || me >= w.end) return;
    size_t at = (size_t)(me - w.begin) * s->chunk_bytes;
    add_hosts(s, chunk, mpp_chunk_length(s, s->lengths[me], w.piece), own_slot(s, chunk) + at);
}

static void read_finished_block(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    window w = window_of(s, chunk);
    size_t length = mpp_chunk_length(s, s->lengths[me], w.piece);
    if (me < w.begin || me >= w.end || !length) return;
    const char *block = own_slot(s, chunk) + (size_t)(me - w.begin) * s->chunk_bytes;
    memcpy(mpp_shm_out(s, w.piece * s->chunk_bytes), block, length);
}

/* `s` is laid out for flying. */
int mpp_reduce_scatter_across(shm_op *s, size_t longest) {
    static const mpp_route riding = {.pack = pack_sum, .span = span_all, .merge = merge_sums, .unpack = unpack_sum};
    static const mpp_route flying = {.first_leg = send_block_sums, .second_leg = finish_block};
    size_t table = (size_t)s->op.group->size * longest, most = channel_of(s)->slot_bytes;
    s->wait_for = -1;
    if (!longest) return 1;
    if (table <= most && wide_bytes(s, table) <= MPP_PAYLOAD) {
        ride(s, &riding, wide_bytes(s, table));
        s->chunk_bytes = most;
        s->windows = 1;
        s->write = write_all_blocks;
        s->read = read_own_block;
        return 1;
    }
    s->read = read_finished_block;
    return fly(s, &flying);
}
