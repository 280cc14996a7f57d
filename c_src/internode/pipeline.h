/* Chunks on their way between the hosts of a group. Each goes in one or two legs, which an operation's route begins: it
 * sends and expects messages, and the leg is over when all have come and gone. */
#ifndef MPP_FLIGHTS_H
#define MPP_FLIGHTS_H

#include <stdlib.h>

#include "internode/agreement.h"

/* ---- for the protocol, under the lock ---- */

/* A chunk that all ranks here have written begins its way to the other hosts. */
void mpp_launch(shm_op *s, uint64_t chunk);
/* Moves those that are under way; whether any has come home, which `reduced` counts. */
int mpp_land(shm_op *s);

/* ---- for whoever makes an operation ---- */

/* Its data goes chunk by chunk; 0: no memory. */
int mpp_fly(shm_op *s, const mpp_route *route);
/* Its data goes with the agreement about the call. */
void mpp_ride(shm_op *s, const mpp_route *route, size_t payload);

/* What the flights of a group of `ranks` will take with the first such operation; 0 once they have it. */
size_t mpp_flights_to_take(const mpp_channel *c, size_t ranks);

/* ---- for routes ---- */

static inline mpp_channel *mpp_channel_of(const shm_op *s) { return s->op.group->channel; }
static inline mpp_hosts *mpp_hosts_of(const shm_op *s) { return mpp_channel_of(s)->hosts; }

static inline mpp_flight *mpp_flight_of(const shm_op *s, uint64_t chunk) {
    return &mpp_hosts_of(s)->flights[(s->first + chunk) % (uint64_t)mpp_channel_of(s)->ring];
}

static inline char *mpp_own_slot(const shm_op *s, uint64_t chunk) {
    mpp_channel *c = mpp_channel_of(s);
    return mpp_slot_of(c, c->rank, s->first + chunk);
}

/* Nobody else on this host is to see the data, so they travel from and to where the user has them. (An all_gather would
 * not gain by that: on two hosts it took longer.) */
static inline int mpp_goes_directly(const shm_op *s) { return mpp_channel_of(s)->size == 1 && !s->op.staging; }

/* Memory for the rest of the flight. */
static inline char *mpp_take(mpp_flight *f, size_t bytes) {
    char *taken = f->memory + f->used;
    f->used += (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    if (f->used > f->room) abort(); /* flight_bytes() is wrong */
    return taken;
}

/* The other hosts in turn, on each host beginning with the next one: so that not all send to one. */
static inline int mpp_other_host(const mpp_hosts *h, int i) { return (h->here + i) % h->count; }

/* The rank of this lane on another host. */
static inline int mpp_beside(const shm_op *s, int host) {
    const mpp_hosts *h = mpp_hosts_of(s);
    return h->members[h->first[host] + mpp_channel_of(s)->rank];
}

/* Who has to do on a host with what concerns the rank with number `place` on another one. */
static inline int mpp_counterpart(const shm_op *s, int host, int place) {
    const mpp_hosts *h = mpp_hosts_of(s);
    return h->members[h->first[host] + place % mpp_local_count(h, host)];
}

/* Nothing is sent or expected where there are no bytes. */
void mpp_send_to(shm_op *s, uint64_t chunk, const void *buffer, size_t bytes, int rank);
void mpp_expect_from(shm_op *s, uint64_t chunk, void *buffer, size_t bytes, int rank);

/* Piece number `piece` of `pieces` of a lane's part of `length` bytes, in whole cache lines. */
mpp_stretch mpp_piece_of(const mpp_hosts *h, size_t length, int lane, int piece, int pieces);

void mpp_merge_by_copy(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first);

/* ---- where a rank finds what has come ---- */

void mpp_read_from_first(shm_op *s, uint64_t chunk); /* in the slot of the first rank here */
void mpp_read_lanes(shm_op *s, uint64_t chunk);      /* part by part in the slots of the lanes */

#endif
