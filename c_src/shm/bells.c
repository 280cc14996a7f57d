/* Who sleeps until a counter of others has moved, who wakes them (engine/bell.h), and who moves none any more. */
#include "shm/shm.h"

static const size_t offset_of[MPP_COUNTERS] = {[MPP_IN] = offsetof(rank_counters, in),
                                               [MPP_REDUCED] = offsetof(rank_counters, reduced),
                                               [MPP_OUT] = offsetof(rank_counters, out),
                                               [MPP_AGREED] = offsetof(rank_counters, agreed)};

static _Atomic uint64_t *counter_of(mpp_channel *c, int rank, int counter) {
    return (_Atomic uint64_t *)((char *)&c->counters[rank] + offset_of[counter]);
}

/* Whether all of them, or the one that matters, have come as far as a sleeper wants. Only the last rings: a rank that
 * is woken too early costs its core twice. */
static int has_come(mpp_channel *c, const mpp_bell *bell, int counter, uint64_t target) {
    int of = counter == MPP_AGREED ? 0 : counter == MPP_IN ? atomic_load(&bell->of) : -1;
    for (int r = of < 0 ? 0 : of; r < (of < 0 ? c->size : of + 1); r++)
        if (atomic_load_explicit(counter_of(c, r, counter), memory_order_acquire) < target) return 0;
    return 1;
}

static void ring_for(mpp_channel *c, int counter) {
    for (int r = 0; r < c->size; r++) {
        mpp_bell *bell = &c->counters[r].bell;
        if (r == c->rank || !atomic_load_explicit(&bell->is_asleep, memory_order_acquire)) continue;
        uint64_t target = atomic_load(&bell->awaited[counter]);
        if (target != MPP_NOTHING && has_come(c, bell, counter, target)) mpp_ring(bell);
    }
}

void mpp_publish(mpp_channel *c, int counter, uint64_t value) {
    atomic_store_explicit(counter_of(c, c->rank, counter), value, memory_order_release);
    if (c->size > 1 && mpp_is_heard(&c->counters[0].sleepers)) ring_for(c, counter);
}

/* Several chunks at a time are worth a hand-over of the core, one is not: half a ring, so that whoever is the farthest
 * behind always has what it sleeps for, as the others may be a whole ring ahead. */
static uint64_t some_after(const shm_op *s, const mpp_channel *c, uint64_t done) {
    uint64_t next = done + (c->ring > 3 ? (uint64_t)c->ring / 2 : 1);
    return s->first + (next < s->chunks ? next : s->chunks);
}

/* What the operation whose turn it is could go on with. */
static void await(mpp_group *g) {
    mpp_channel *c = g->channel;
    const shm_op *s = c->oom_first ? &c->oom_placeholder : c->head;
    uint64_t until[MPP_COUNTERS] = {MPP_NOTHING, MPP_NOTHING, MPP_NOTHING, MPP_NOTHING};
    int of = -1;
    if (s && s->written < s->chunks && (s->checked || !s->written)) {
        uint64_t some = some_after(s, c, s->written), ring = (uint64_t)c->ring;
        if (some > ring) until[MPP_OUT] = some - ring;
    }
    if (s && !s->checked && s->written) until[MPP_IN] = s->first + 1;
    if (s && !s->checked && s->written && c->internode) until[MPP_AGREED] = s->first + 1;
    if (s && s->checked && s->two_phase) {
        if (s->reduced < s->chunks) until[MPP_IN] = some_after(s, c, s->reduced);
        if (s->done < s->chunks) until[MPP_REDUCED] = some_after(s, c, s->done);
    } else if (s && s->checked && s->done < s->chunks) {
        until[MPP_IN] = s->between_devices ? s->first + s->done + 1 : some_after(s, c, s->done);
        of = s->wait_for;
    }
    atomic_store(&g->bell->of, of);
    for (int i = 0; i < MPP_COUNTERS; i++) atomic_store(&g->bell->awaited[i], until[i]);
}

static mpp_bell *bell_of(const mpp_group *g, int rank) {
    const mpp_topology *t = g->channel->topology;
    if (t && t->node_of[rank] != t->here) return NULL;
    return &g->channel->counters[t ? t->place_of[rank] : rank].bell;
}

static void tell(mpp_group *g, int failure, int code) {
    rank_counters *counters = g->channel->counters;
    atomic_store(&counters[g->channel->rank].failure, (int64_t)failure << 32 | (uint32_t)code);
    atomic_store(&counters[0].is_broken, 1);
}

void mpp_attach_bell(mpp_group *g) {
    mpp_channel *c = g->channel;
    g->bell = &c->counters[c->rank].bell;
    g->sleepers = &c->counters[0].sleepers;
    g->await = await;
    g->bell_of = bell_of;
    g->tell = tell;
}
