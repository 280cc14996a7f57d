/* Reductions of a group on several hosts: what is added up where, and what travels. See across.h. */
#include "internode/internode.h"

#include <string.h>

#include "internode/pipeline.h"

/* ---- partial sums ---- */

static size_t wide_bytes(const shm_op *s, size_t bytes) {
    return bytes / s->element * mpp_dtype_size(mpp_wide_dtype(s->how.dtype));
}

/* Whether a host sends its only rank's elements as they are. */
static int sends_plain(const shm_op *s, int host) {
    return mpp_local_count(mpp_hosts_of(s), host) == 1 && !s->how.has_premul;
}

static size_t wide_count(const shm_op *s, size_t bytes) { return bytes / wide_bytes(s, s->element); }

/* Blocks of a reduce_scatter lie in slots only. */
static int is_direct(const shm_op *s) { return mpp_goes_directly(s) && !s->lengths; }

/* Of a rank here. */
static const char *elements_at(const shm_op *s, int rank, uint64_t chunk, size_t offset) {
    if (is_direct(s)) return mpp_shm_in(s, chunk * s->chunk_bytes) + offset;
    return mpp_slot_of(mpp_channel_of(s), rank, s->first + chunk) + offset;
}

static int is_wanted(const shm_op *s) { return s->root < 0 || s->root == s->op.group->rank; }

/* What a rank here puts results into, for all of them to read, or for its user. */
static char *results_at(const shm_op *s, int rank, uint64_t chunk) {
    if (is_direct(s) && is_wanted(s)) return mpp_shm_out(s, chunk * s->chunk_bytes);
    return mpp_slot_of(mpp_channel_of(s), rank, s->first + chunk);
}

/* The sums of this host's parts, one behind the other, of so many elements that lie in its slots at an offset. */
static void add_up(shm_op *s, uint64_t chunk, size_t offset, size_t count, char *wide) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_hosts *h = c->hosts;
    mpp_reduction how = s->how;
    for (int r = 0; r < c->size; r++) c->sources[r] = elements_at(s, r, chunk, offset);
    for (int part = h->first_part[h->here]; part < h->first_part[h->here + 1]; part++) {
        int first = h->first_in[part] - h->first[h->here], ranks = h->first_in[part + 1] - h->first_in[part];
        if (how.factors) how.factors = s->how.factors + first;
        mpp_reduce_wide(&how, wide, c->sources + first, ranks, count);
        wide += wide_bytes(s, count * s->element);
    }
}

/* What a host's sums of so many bytes take. */
static size_t sums_bytes(const shm_op *s, int host, size_t bytes) {
    return (size_t)mpp_part_count(mpp_hosts_of(s), host) * wide_bytes(s, bytes);
}

static void send_sums_of(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int rank) {
    int here = mpp_hosts_of(s)->here;
    if (!bytes) return;
    if (sends_plain(s, here)) {
        mpp_send_to(s, chunk, elements_at(s, mpp_channel_of(s)->rank, chunk, offset), bytes, rank);
        return;
    }
    char *sums = mpp_take(mpp_flight_of(s, chunk), sums_bytes(s, here, bytes));
    add_up(s, chunk, offset, bytes / s->element, sums);
    mpp_send_to(s, chunk, sums, sums_bytes(s, here, bytes), rank);
}

/* All hosts' sums come to lie side by side, this one's too, at the beginning of the flight's memory. */
static void gather_sums(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int (*sender)(const shm_op *, int)) {
    const mpp_hosts *h = mpp_hosts_of(s);
    if (!bytes) return;
    for (int host = 0; host < h->count; host++) {
        size_t length = sums_bytes(s, host, bytes);
        char *sums = mpp_take(mpp_flight_of(s, chunk), length);
        if (host == h->here) add_up(s, chunk, offset, bytes / s->element, sums);
        else mpp_expect_from(s, chunk, sums, sends_plain(s, host) ? bytes : length, sender(s, host));
    }
}

/* Adds up the parts' sums, by their turns, as mpp_reduce() does the ranks'; overwrites them. Where the result is. */
static char *add_tree(const shm_op *s, char **sums, size_t count) {
    const mpp_hosts *h = mpp_hosts_of(s);
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    int weight[sizeof(int) * 8], waiting = 0;
    for (int turn = 0; turn < h->parts; turn++) {
        sums[waiting] = sums[turn];
        weight[waiting++] = h->weight[turn];
        while (waiting > 1 && (turn == h->parts - 1 || weight[waiting - 1] == weight[waiting - 2])) {
            const void *pair[] = {sums[waiting - 2], sums[waiting - 1]};
            waiting--;
            weight[waiting - 1] += weight[waiting];
            mpp_reduce(&of_wide, sums[waiting - 1], pair, 2, count);
        }
    }
    return sums[0];
}

/* Of a host: where each of its parts' sums lies, of so many bytes, by the parts' turns. */
static void find_sums(const shm_op *s, int host, char *sums, size_t bytes) {
    const mpp_hosts *h = mpp_hosts_of(s);
    for (int part = h->first_part[host]; part < h->first_part[host + 1]; part++, sums += bytes)
        mpp_channel_of(s)->sources[h->turn[part]] = sums;
}

static void add_hosts(shm_op *s, uint64_t chunk, size_t bytes, char *result) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_hosts *h = c->hosts;
    mpp_flight *f = mpp_flight_of(s, chunk);
    size_t wide = wide_bytes(s, bytes), count = bytes / s->element;
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    if (!bytes) return;
    f->used = 0;
    for (int host = 0; host < h->count; host++) find_sums(s, host, mpp_take(f, sums_bytes(s, host, bytes)), wide);
    for (int host = 0; host < h->count; host++) {
        if (host == h->here || !sends_plain(s, host) || of_wide.dtype == s->how.dtype) continue;
        const void **sum = &c->sources[h->turn[h->first_part[host]]];
        char *widened = mpp_take(f, wide);
        mpp_widen(&s->how, widened, *sum, count);
        *sum = widened;
    }
    mpp_narrow(&s->how, result, add_tree(s, (char **)c->sources, count), count);
}

/* ---- all_reduce and reduce ---- */

static void pack_sum(shm_op *s, char *payload) { add_up(s, 0, 0, wide_count(s, s->payload), payload); }

static void span_all(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    (void)first_host, (void)end_host;
    *offset = 0;
    *length = s->payload;
}

static void merge_sums(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first) {
    char *sum = payload + offset;
    const void *sources[] = {theirs_first ? theirs : sum, theirs_first ? sum : theirs};
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    mpp_reduce(&of_wide, sum, sources, 2, wide_count(s, length));
}

/* Where hosts are no such leaves, the sums of all parts are sent, and added up in the end. */
static void pack_parts(shm_op *s, char *payload) {
    const mpp_hosts *h = mpp_hosts_of(s);
    size_t each = s->payload / (size_t)h->parts;
    add_up(s, 0, 0, wide_count(s, each), payload + (size_t)h->first_part[h->here] * each);
}

static void span_of_parts(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    const mpp_hosts *h = mpp_hosts_of(s);
    size_t each = s->payload / (size_t)h->parts;
    *offset = (size_t)h->first_part[first_host] * each;
    *length = (size_t)h->first_part[end_host] * each - *offset;
}

static void unpack_parts(shm_op *s, char *payload) {
    mpp_channel *c = mpp_channel_of(s);
    size_t each = s->payload / (size_t)c->hosts->parts, count = wide_count(s, each);
    for (int host = 0; host < c->hosts->count; host++)
        find_sums(s, host, payload + (size_t)c->hosts->first_part[host] * each, each);
    mpp_narrow(&s->how, results_at(s, 0, 0), add_tree(s, (char **)c->sources, count), count);
}

static void unpack_sum(shm_op *s, char *payload) {
    mpp_narrow(&s->how, results_at(s, 0, 0), payload, wide_count(s, s->payload));
}

/* What is longer rides by halves, among 2^k hosts: a host sends only those sums with which the part beside it goes on,
 * half as much at each level, and has its own share of all sums in the end. (Recursive halving, see hosts.c.) Shares
 * lie in the order of their hosts' numbers with the bits reversed: what is sent is one stretch then. */
static int reversed(const mpp_hosts *h, int host) {
    int bits = 0;
    for (int level = 0; level < h->levels; level++) bits |= (host >> level & 1) << (h->levels - 1 - level);
    return bits;
}

static size_t wide_share(const shm_op *s) { return s->payload / (size_t)mpp_hosts_of(s)->count; }

/* Where in the tensor a host's share is, or the blocks of its ranks are, one after the other; at last of no length. */
static mpp_stretch part_of_share(const shm_op *s, int host, int i) {
    const mpp_hosts *h = mpp_hosts_of(s);
    if (s->lengths && i < mpp_local_count(h, host))
        return (mpp_stretch){(size_t)h->members[h->first[host] + i] * s->call.bytes, s->call.bytes};
    size_t share = wide_count(s, wide_share(s)) * s->element, begin = (size_t)host * share;
    if (s->lengths || i || begin >= s->bytes) return (mpp_stretch){0, 0};
    return (mpp_stretch){begin, s->bytes - begin < share ? s->bytes - begin : share};
}

static void pack_shares(shm_op *s, char *payload) {
    const mpp_hosts *h = mpp_hosts_of(s);
    for (int place = 0; place < h->count; place++) {
        char *at = payload + (size_t)place * wide_share(s), *end = at + wide_share(s);
        int host = reversed(h, place);
        mpp_stretch part;
        for (int i = 0; (part = part_of_share(s, host, i)).length; i++) {
            add_up(s, 0, part.begin, part.length / s->element, at);
            at += wide_bytes(s, part.length);
        }
        memset(at, 0, (size_t)(end - at));
    }
}

static void span_of_half(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int hosts = end_host - first_host, shares = h->count / (2 * hosts);
    int goes_out = first_host <= h->here && h->here < end_host, wanted_by = goes_out ? h->here ^ hosts : h->here;
    *offset = (size_t)(reversed(h, wanted_by) / shares * shares) * wide_share(s);
    *length = (size_t)shares * wide_share(s);
}

static void unpack_share(shm_op *s, char *payload) {
    const mpp_hosts *h = mpp_hosts_of(s);
    char *at = payload + (size_t)reversed(h, h->here) * wide_share(s), *results = results_at(s, 0, 0);
    mpp_stretch part;
    for (int i = 0; (part = part_of_share(s, h->here, i)).length; i++) {
        mpp_narrow(&s->how, results + part.begin, at, part.length / s->element);
        at += wide_bytes(s, part.length);
    }
}

/* Each host has a piece of the result in `results`. It sends that to the hosts that want it, and expects theirs. */
static void trade(shm_op *s, uint64_t chunk, char *results, mpp_stretch (*piece_of)(const shm_op *, uint64_t, int),
                  int (*rank_on)(const shm_op *, int)) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int wanted_by = s->root < 0 ? -1 : h->host_of[s->root];
    mpp_stretch mine = piece_of(s, chunk, h->here);
    for (int i = 1; i < h->count; i++) {
        int host = mpp_other_host(h, i);
        mpp_stretch theirs = piece_of(s, chunk, host);
        if (wanted_by < 0 || wanted_by == host)
            mpp_send_to(s, chunk, results + mine.begin, mine.length, rank_on(s, host));
        if (wanted_by < 0 || wanted_by == h->here)
            mpp_expect_from(s, chunk, results + theirs.begin, theirs.length, rank_on(s, host));
    }
}

static mpp_stretch share_of(const shm_op *s, uint64_t chunk, int host) {
    (void)chunk; /* there is one */
    return part_of_share(s, host, 0);
}

static int first_rank_on(const shm_op *s, int host) { return mpp_leader_of(mpp_hosts_of(s), host); }

/* The first ranks of the hosts have the shares. */
static void send_shares(shm_op *s, uint64_t chunk) {
    if (!mpp_channel_of(s)->rank) trade(s, chunk, results_at(s, 0, chunk), share_of, first_rank_on);
}

/* A host's piece of this lane's part. */
static mpp_stretch piece_of_lane(const shm_op *s, uint64_t chunk, int host) {
    const mpp_hosts *h = mpp_hosts_of(s);
    return mpp_piece_of(h, mpp_chunk_length(s, s->bytes, chunk), mpp_channel_of(s)->rank, host, h->count);
}

static void send_sums(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    if (mpp_channel_of(s)->rank >= h->lanes) return;
    mpp_stretch mine = piece_of_lane(s, chunk, h->here);
    gather_sums(s, chunk, mine.begin, mine.length, mpp_beside);
    for (int i = 1; i < h->count; i++) {
        mpp_stretch piece = piece_of_lane(s, chunk, mpp_other_host(h, i));
        send_sums_of(s, chunk, piece.begin, piece.length, mpp_beside(s, mpp_other_host(h, i)));
    }
}

/* The results come to where all ranks here read this lane's part. */
static void send_results(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int lane = mpp_channel_of(s)->rank;
    char *results = results_at(s, lane, chunk);
    if (lane >= h->lanes) return;
    mpp_stretch mine = piece_of_lane(s, chunk, h->here);
    add_hosts(s, chunk, mine.length, results + mine.begin);
    trade(s, chunk, results, piece_of_lane, mpp_beside);
}

/* A short reduction of `bytes` rides; 0: it is too long for that. */
static int ride_if_short(shm_op *s, size_t bytes) {
    static const mpp_route sum = {.pack = pack_sum, .span = span_all, .merge = merge_sums, .unpack = unpack_sum};
    static const mpp_route parts = {
        .pack = pack_parts, .span = span_of_parts, .merge = mpp_merge_by_copy, .unpack = unpack_parts};
    const mpp_hosts *h = mpp_hosts_of(s);
    size_t payload = wide_bytes(s, bytes) * (h->regular ? 1 : (size_t)h->parts);
    if (bytes > mpp_channel_of(s)->slot_bytes || payload > MPP_WHOLE_PAYLOAD) return 0;
    mpp_ride(s, h->regular ? &sum : &parts, payload);
    return 1;
}

/* The same by halves, where a host's share takes so many of the bytes. */
static int ride_by_halves(shm_op *s, const mpp_route *route, size_t bytes, size_t share) {
    const mpp_hosts *h = mpp_hosts_of(s);
    size_t payload = wide_bytes(s, share) * (size_t)h->count;
    if (!h->regular || h->count & (h->count - 1)) return 0;
    if (bytes > mpp_channel_of(s)->slot_bytes || payload > MPP_PAYLOAD) return 0;
    mpp_ride(s, route, payload);
    return 1;
}

int mpp_reduce_across(shm_op *s) {
    static const mpp_route flying = {.first_leg = send_sums, .second_leg = send_results};
    static const mpp_route halves = {.pack = pack_shares,
                                     .span = span_of_half,
                                     .merge = merge_sums,
                                     .unpack = unpack_share,
                                     .first_leg = send_shares};
    size_t lines = (s->bytes + CACHE_LINE - 1) / CACHE_LINE, hosts = (size_t)mpp_hosts_of(s)->count;
    int reads = is_wanted(s) && !mpp_goes_directly(s);
    s->wait_for = -1;
    s->two_phase = 0;
    if (mpp_goes_directly(s)) s->write = NULL;
    s->read = reads ? mpp_read_from_first : NULL;
    if (!s->bytes || ride_if_short(s, s->bytes)) return 1;
    if (ride_by_halves(s, &halves, s->bytes, (lines + hosts - 1) / hosts * CACHE_LINE)) return mpp_fly(s, &halves);
    if (reads) s->read = mpp_read_lanes;
    return mpp_fly(s, &flying);
}

/* ---- reduce_scatter ---- */

static void write_all_blocks(shm_op *s, uint64_t chunk, char *slot) {
    (void)chunk;
    for (int r = 0; r < s->op.group->size; r++)
        if (s->lengths[r]) memcpy(slot + (size_t)r * s->call.bytes, mpp_shm_in_block(s, r, 0), s->lengths[r]);
}

static void read_own_block(shm_op *s, uint64_t chunk) {
    int me = s->op.group->rank;
    const char *sums = mpp_slot_of(mpp_channel_of(s), 0, s->first + chunk);
    if (s->lengths[me]) memcpy(mpp_shm_out(s, 0), sums + (size_t)me * s->call.bytes, s->lengths[me]);
}

static int sender_of_my_block(const shm_op *s, int host) { return mpp_counterpart(s, host, mpp_channel_of(s)->rank); }

static void send_block_sums(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int end = mpp_end_in_slot(s, chunk);
    mpp_stretch mine = mpp_block_in_slot(s, chunk, s->op.group->rank);
    gather_sums(s, chunk, mine.begin, mine.length, sender_of_my_block);
    for (int r = mpp_first_in_slot(s, chunk); r < end; r++) {
        mpp_stretch block = mpp_block_in_slot(s, chunk, r);
        int is_mine = h->place_of[r] % mpp_channel_of(s)->size == mpp_channel_of(s)->rank;
        if (h->host_of[r] != h->here && is_mine) send_sums_of(s, chunk, block.begin, block.length, r);
    }
}

static void finish_block(shm_op *s, uint64_t chunk) {
    mpp_stretch mine = mpp_block_in_slot(s, chunk, s->op.group->rank);
    add_hosts(s, chunk, mine.length, mpp_own_slot(s, chunk) + mine.begin);
}

static void read_finished_block(shm_op *s, uint64_t chunk) {
    mpp_stretch mine = mpp_block_in_slot(s, chunk, s->op.group->rank);
    if (!mine.length) return;
    memcpy(mpp_shm_out(s, mpp_piece_number(s, chunk) * s->chunk_bytes), mpp_own_slot(s, chunk) + mine.begin,
           mine.length);
}

/* `s` is laid out for flying. */
int mpp_reduce_scatter_across(shm_op *s, size_t longest) {
    static const mpp_route flying = {.first_leg = send_block_sums, .second_leg = finish_block};
    static const mpp_route halves = {
        .pack = pack_shares, .span = span_of_half, .merge = merge_sums, .unpack = unpack_share};
    size_t bytes = (size_t)s->op.group->size * longest, of_host = (size_t)mpp_hosts_of(s)->most * longest;
    s->wait_for = -1;
    if (!longest) return 1;
    if (ride_by_halves(s, &halves, bytes, of_host) || ride_if_short(s, bytes)) {
        s->chunk_bytes = mpp_channel_of(s)->slot_bytes;
        s->windows = 1;
        s->write = write_all_blocks;
        s->read = read_own_block;
        return 1;
    }
    s->read = read_finished_block;
    return mpp_fly(s, &flying);
}
