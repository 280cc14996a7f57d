#include "internode/pipeline.h"

#include <stdlib.h>
#include <string.h>

/* ---- legs ---- */

void mpp_launch(shm_op *s, uint64_t chunk) {
    mpp_flight *f = mpp_flight_of(s, chunk);
    f->count = f->second = 0;
    f->used = 0;
    s->route->first_leg(s, chunk);
}

/* Whether the chunk has come home. */
static int move(shm_op *s, uint64_t chunk) {
    mpp_flight *f = mpp_flight_of(s, chunk);
    if (!mpp_delivered(s, f->parcels, f->count) || s->op.failure) return 0;
    if (f->second || !s->route->second_leg) return 1;
    f->second = 1;
    f->count = 0;
    s->route->second_leg(s, chunk);
    return mpp_delivered(s, f->parcels, f->count) && !s->op.failure;
}

int mpp_land(shm_op *s) {
    uint64_t before = s->reduced;
    /* The later ones are moved too, but come home in order. */
    for (uint64_t chunk = s->reduced; chunk < s->launched; chunk++)
        if (move(s, chunk) && chunk == s->reduced) s->reduced++;
    return s->reduced > before;
}

/* ---- messages ---- */

/* Chunks under way have tags of their own, for each leg: the next ones' messages may come earlier. */
static int tag_of(const shm_op *s, uint64_t chunk) {
    const mpp_channel *c = mpp_channel_of(s);
    int slot = (int)((s->first + chunk) % (uint64_t)c->ring);
    return c->hosts->first_tag + 1 + slot + (mpp_flight_of(s, chunk)->second ? c->ring : 0);
}

void mpp_send_to(shm_op *s, uint64_t chunk, const void *buffer, size_t bytes, int rank) {
    mpp_flight *f = mpp_flight_of(s, chunk);
    if (bytes) mpp_dispatch(s, &f->parcels[f->count++], buffer, bytes, rank, tag_of(s, chunk));
}

void mpp_expect_from(shm_op *s, uint64_t chunk, void *buffer, size_t bytes, int rank) {
    mpp_flight *f = mpp_flight_of(s, chunk);
    if (bytes) mpp_expect(&f->parcels[f->count++], buffer, bytes, rank, tag_of(s, chunk));
}

mpp_stretch mpp_piece_of(const mpp_hosts *h, size_t length, int lane, int piece, int pieces) {
    size_t lines = (length + CACHE_LINE - 1) / CACHE_LINE, lanes = (size_t)h->lanes;
    size_t first = lines * (size_t)lane / lanes, last = lines * ((size_t)lane + 1) / lanes;
    size_t begin = (first + (last - first) * (size_t)piece / (size_t)pieces) * CACHE_LINE;
    size_t end = (first + (last - first) * ((size_t)piece + 1) / (size_t)pieces) * CACHE_LINE;
    if (begin > length) begin = length;
    if (end > length) end = length;
    return (mpp_stretch){begin, end - begin};
}

void mpp_merge_by_copy(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first) {
    (void)s, (void)theirs_first;
    memcpy(payload + offset, theirs, length);
}

/* ---- where a rank finds what has come ---- */

void mpp_read_from_first(shm_op *s, uint64_t chunk) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) memcpy(mpp_shm_out(s, 0), mpp_slot_of(mpp_channel_of(s), 0, s->first), length);
}

void mpp_read_lanes(shm_op *s, uint64_t chunk) {
    mpp_channel *c = mpp_channel_of(s);
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    for (int lane = 0; lane < c->hosts->lanes; lane++) {
        mpp_stretch part = mpp_piece_of(c->hosts, length, lane, 0, 1);
        if (part.length)
            memcpy(mpp_shm_out(s, chunk * s->chunk_bytes) + part.begin,
                   mpp_slot_of(c, lane, s->first + chunk) + part.begin, part.length);
    }
}

/* ---- how an operation goes ---- */

/* What a flight can need, with float32 for each byte: its parts' sums of what a lane has of a slot, or of the blocks
 * that this rank sends in a reduce_scatter; and everybody's sums of one piece, or block, to be received and widened. */
static size_t flight_bytes(const mpp_channel *c, size_t ranks) {
    const mpp_hosts *h = c->hosts;
    size_t of_lane = c->slot_bytes / (size_t)h->lanes, of_block = c->slot_bytes / ranks + CACHE_LINE, of_blocks = 0;
    size_t of_piece = of_lane / (size_t)h->count, rounding = (ranks + 2 * (size_t)h->count) * CACHE_LINE;
    for (int host = 0; host < h->count; host++)
        of_blocks += (size_t)((mpp_local_count(h, host) + c->size - 1) / c->size) * of_block;
    size_t sent = of_blocks > of_lane ? of_blocks : of_lane, received = of_block > of_piece ? of_block : of_piece;
    sent = (size_t)mpp_part_count(h, h->here) * (sent + CACHE_LINE);
    received = (size_t)h->parts * (received + CACHE_LINE);
    return sizeof(float) * (sent + 2 * received) + rounding;
}

static size_t parcels_of_flight(const mpp_channel *c, size_t ranks) { return ranks + 2 * (size_t)c->hosts->count; }

size_t mpp_flights_to_take(const mpp_channel *c, size_t ranks) {
    size_t bytes = 0;
    for (int i = 0; c->hosts && i < c->ring; i++) {
        if (!c->hosts->flights[i].parcels) bytes += parcels_of_flight(c, ranks) * sizeof(mpp_parcel);
        if (!c->hosts->flights[i].memory) bytes += flight_bytes(c, ranks);
    }
    return bytes;
}

/* Whether there is memory. Under the lock: other threads may make such an operation, or move one, at the same time. */
static int reserve(mpp_channel *c, size_t ranks) {
    int is_there = 1;
    mpp_lock();
    for (int i = 0; i < c->ring && is_there; i++) {
        mpp_flight *f = &c->hosts->flights[i];
        if (f->parcels && f->memory) continue;
        f->room = flight_bytes(c, ranks);
        if (!f->parcels) f->parcels = calloc(parcels_of_flight(c, ranks), sizeof *f->parcels);
        if (!f->memory) f->memory = malloc(f->room);
        is_there = f->parcels && f->memory;
    }
    mpp_unlock();
    return is_there;
}

int mpp_fly(shm_op *s, const mpp_route *route) {
    s->route = route;
    s->two_phase = 1;
    return reserve(mpp_channel_of(s), (size_t)s->op.group->size);
}

void mpp_ride(shm_op *s, const mpp_route *route, size_t payload) {
    s->route = route;
    s->payload = payload;
}
