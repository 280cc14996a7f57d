/* Reductions of a group on several hosts: what is added up where, and what travels. See across.h. */
#include "across.h"

#include <string.h>

#include "flights.h"

/* ---- partial sums ---- */

static size_t wide_bytes(const shm_op *s, size_t bytes) {
    return bytes / s->element * mpp_dtype_size(mpp_wide_dtype(s->how.dtype));
}

/* Whether a host sends its only rank's elements as they are. */
static int sends_plain(const shm_op *s, int host) {
    return mpp_local_count(mpp_hosts_of(s), host) == 1 && !s->how.has_premul;
}

static size_t wide_count(const shm_op *s, size_t bytes) { return bytes / wide_bytes(s, s->element); }

/* The sum of this host's ranks, of so many elements that lie in their slots at an offset. */
static void add_up(shm_op *s, uint64_t chunk, size_t offset, size_t count, char *wide) {
    mpp_channel *c = mpp_channel_of(s);
    for (int r = 0; r < c->size; r++) c->sources[r] = mpp_slot_of(c, r, s->first + chunk) + offset;
    mpp_reduce_wide(&s->how, wide, c->sources, c->size, count);
}

static void send_sum(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int rank) {
    if (!bytes) return;
    if (sends_plain(s, mpp_hosts_of(s)->here)) {
        mpp_send_to(s, chunk, mpp_own_slot(s, chunk) + offset, bytes, rank);
        return;
    }
    char *sum = mpp_take(mpp_flight_of(s, chunk), wide_bytes(s, bytes));
    add_up(s, chunk, offset, bytes / s->element, sum);
    mpp_send_to(s, chunk, sum, wide_bytes(s, bytes), rank);
}

/* All hosts' sums come to lie side by side, this one's too, at the beginning of the flight's memory. */
static void gather_sums(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int (*sender)(const shm_op *, int)) {
    const mpp_hosts *h = mpp_hosts_of(s);
    if (!bytes) return;
    for (int host = 0; host < h->count; host++) {
        char *sum = mpp_take(mpp_flight_of(s, chunk), wide_bytes(s, bytes));
        if (host == h->here) add_up(s, chunk, offset, bytes / s->element, sum);
        else mpp_expect_from(s, chunk, sum, sends_plain(s, host) ? bytes : wide_bytes(s, bytes), sender(s, host));
    }
}

/* Adds up the hosts' sums, which it overwrites, as mpp_reduce() does the ranks'; where the result is. */
static char *add_tree(const shm_op *s, char **sums, size_t count) {
    const mpp_hosts *h = mpp_hosts_of(s);
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    int weight[sizeof(int) * 8], waiting = 0;
    for (int host = 0; host < h->count; host++) {
        sums[waiting] = sums[host];
        weight[waiting++] = h->weight[host];
        while (waiting > 1 && (host == h->count - 1 || weight[waiting - 1] == weight[waiting - 2])) {
            const void *pair[] = {sums[waiting - 2], sums[waiting - 1]};
            waiting--;
            weight[waiting - 1] += weight[waiting];
            mpp_reduce(&of_wide, sums[waiting - 1], pair, 2, count);
        }
    }
    return sums[0];
}

static void add_hosts(shm_op *s, uint64_t chunk, size_t bytes, char *result) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_hosts *h = c->hosts;
    mpp_flight *f = mpp_flight_of(s, chunk);
    size_t wide = wide_bytes(s, bytes), count = bytes / s->element;
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    if (!bytes) return;
    f->used = 0;
    for (int host = 0; host < h->count; host++) c->sources[host] = mpp_take(f, wide);
    for (int host = 0; host < h->count; host++) {
        if (host == h->here || !sends_plain(s, host) || of_wide.dtype == s->how.dtype) continue;
        char *widened = mpp_take(f, wide);
        mpp_widen(&s->how, widened, c->sources[host], count);
        c->sources[host] = widened;
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
    const void *sources[] = {theirs_first ? theirs : payload, theirs_first ? payload : theirs};
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    (void)offset;
    mpp_reduce(&of_wide, payload, sources, 2, wide_count(s, length));
}

/* Where hosts have different weights, all sums are sent, and added up in the end. */
static void pack_own_sum(shm_op *s, char *payload) {
    const mpp_hosts *h = mpp_hosts_of(s);
    size_t each = s->payload / (size_t)h->count;
    add_up(s, 0, 0, wide_count(s, each), payload + (size_t)h->here * each);
}

static void span_of_sums(const shm_op *s, int first_host, int end_host, size_t *offset, size_t *length) {
    size_t each = s->payload / (size_t)mpp_hosts_of(s)->count;
    *offset = (size_t)first_host * each;
    *length = (size_t)(end_host - first_host) * each;
}

static void unpack_sums(shm_op *s, char *payload) {
    mpp_channel *c = mpp_channel_of(s);
    size_t each = s->payload / (size_t)c->hosts->count, count = wide_count(s, each);
    for (int host = 0; host < c->hosts->count; host++) c->sources[host] = payload + (size_t)host * each;
    mpp_narrow(&s->how, mpp_slot_of(c, 0, s->first), add_tree(s, (char **)c->sources, count), count);
}

static void unpack_sum(shm_op *s, char *payload) {
    mpp_narrow(&s->how, mpp_slot_of(mpp_channel_of(s), 0, s->first), payload, wide_count(s, s->payload));
}

static void send_sums(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int lane = mpp_channel_of(s)->rank;
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (lane >= h->lanes) return;
    mpp_stretch mine = mpp_piece_of(h, length, lane, h->here, h->count);
    gather_sums(s, chunk, mine.begin, mine.length, mpp_beside);
    for (int i = 1; i < h->count; i++) {
        mpp_stretch piece = mpp_piece_of(h, length, lane, mpp_other_host(h, i), h->count);
        send_sum(s, chunk, piece.begin, piece.length, mpp_beside(s, mpp_other_host(h, i)));
    }
}

/* The results come into this rank's slot, from where all ranks here read this lane's part. */
static void send_results(shm_op *s, uint64_t chunk) {
    const mpp_hosts *h = mpp_hosts_of(s);
    int lane = mpp_channel_of(s)->rank, wanted_by = s->root < 0 ? -1 : h->host_of[s->root];
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    char *slot = mpp_own_slot(s, chunk);
    if (lane >= h->lanes) return;
    mpp_stretch mine = mpp_piece_of(h, length, lane, h->here, h->count);
    add_hosts(s, chunk, mine.length, slot + mine.begin);
    for (int i = 1; i < h->count; i++) {
        int host = mpp_other_host(h, i);
        mpp_stretch piece = mpp_piece_of(h, length, lane, host, h->count);
        if (wanted_by < 0 || wanted_by == host)
            mpp_send_to(s, chunk, slot + mine.begin, mine.length, mpp_beside(s, host));
        if (wanted_by < 0 || wanted_by == h->here)
            mpp_expect_from(s, chunk, slot + piece.begin, piece.length, mpp_beside(s, host));
    }
}

/* A short reduction of `bytes` rides; 0: it is too long for that. */
static int ride_if_short(shm_op *s, size_t bytes) {
    static const mpp_route sum = {.pack = pack_sum, .span = span_all, .merge = merge_sums, .unpack = unpack_sum};
    static const mpp_route sums = {
        .pack = pack_own_sum, .span = span_of_sums, .merge = mpp_merge_by_copy, .unpack = unpack_sums};
    const mpp_hosts *h = mpp_hosts_of(s);
    size_t payload = wide_bytes(s, bytes) * (h->regular ? 1 : (size_t)h->count);
    if (bytes > mpp_channel_of(s)->slot_bytes || payload > MPP_PAYLOAD) return 0;
    mpp_ride(s, h->regular ? &sum : &sums, payload);
    return 1;
}

int mpp_reduce_across(shm_op *s) {
    static const mpp_route flying = {.first_leg = send_sums, .second_leg = send_results};
    int reads = s->root < 0 || s->root == s->op.group->rank;
    s->wait_for = -1;
    s->two_phase = 0;
    s->read = NULL;
    if (!s->bytes) return 1;
    if (ride_if_short(s, s->bytes)) {
        if (reads) s->read = mpp_read_from_first;
        return 1;
    }
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
        if (h->host_of[r] != h->here && is_mine) send_sum(s, chunk, block.begin, block.length, r);
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
    s->wait_for = -1;
    if (!longest) return 1;
    if (ride_if_short(s, (size_t)s->op.group->size * longest)) {
        s->chunk_bytes = mpp_channel_of(s)->slot_bytes;
        s->windows = 1;
        s->write = write_all_blocks;
        s->read = read_own_block;
        return 1;
    }
    s->read = read_finished_block;
    return mpp_fly(s, &flying);
}
