/* Each rank publishes what it calls; all calls are compared before any data is used. */
#include "shm/shm.h"

/* Of an exchange: so many chunks are always worth it; more, if the slots are filled to one part of so many. */
enum { FEW_CHUNKS = 8, LEAST_FILLED = 4 };

/* A step of splitmix64: words that differ in one bit give hashes that differ in half of theirs. */
uint64_t mpp_mix(uint64_t hash, uint64_t word) {
    uint64_t z = (hash ^ word) + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Everything that must agree, and nothing else: a rank may have a list or one tensor, and its own factor of a
 * PREMUL_SUM. `root`: -1 where there is none; `bytes`: what is cut into chunks. */
void mpp_sign(shm_op *s, int kind, int root, size_t bytes) {
    const mpp_reduction *how = &s->how;
    const mpp_group *g = s->op.group;
    s->call = (mpp_call){.kind = kind, .dtype = how->dtype, .op = how->op, .root = root, .bytes = bytes};
    s->call.has_premul = how->has_premul != 0;
    s->call.place = s->place;
    s->call.premul = how->premul;
    s->call.divisor = how->divisor;
    s->chunks = s->call.chunks = (bytes > s->chunk_bytes ? (bytes - 1) / s->chunk_bytes + 1 : 1) * s->batches;
    uint64_t word = (uint64_t)kind | (uint64_t)how->dtype << 8 | (uint64_t)how->op << 16 |
                    (uint64_t)(how->has_premul != 0) << 24 | (uint64_t)(s->place == MPP_ON_DEVICE) << 25 |
                    (uint64_t)(uint32_t)root << 32;
    uint64_t first = mpp_mix(mpp_called_details(), word);
    s->signature = mpp_mix(mpp_mix(first, bytes), (uint64_t)how->divisor);
    if (!s->lengths) return;
    s->call.has_lengths = 1;
    s->call.own = s->lengths[g->rank];
    for (int r = 0; r < g->size; r++) s->signature = mpp_mix(s->signature, s->lengths[r]);
}

void mpp_withdraw(shm_op *s, int error) {
    s->signature = s->op.group->channel->oom_placeholder.signature;
    s->call.kind = MPP_NO_MEMORY;
    s->call.own = (uint64_t)error;
    s->call.has_lengths = s->op.failure = 0;
    s->payload = 0;
    s->write = NULL;
    s->find_imbalance = NULL;
}

/* After MPP_FAILURE_MISMATCH: what this rank called, and what another one did. */
void mpp_disagreement(uintptr_t op, mpp_call *mine, mpp_call *theirs) {
    const mpp_op *compared = ((mpp_op *)op)->agreement ? ((mpp_op *)op)->agreement : (mpp_op *)op;
    *mine = ((const shm_op *)compared)->call;
    *theirs = ((const shm_op *)compared)->theirs;
}

/* ---- comparing ---- */

/* The rank to name in the error: one without memory, or one that explains more than `rank`, else `rank`. */
static int blamed(const shm_op *s, const mpp_channel *c, int rank) {
    for (int r = 0; r < c->size; r++)
        if (mpp_call_of(s, c, r)->kind == MPP_NO_MEMORY && r != c->rank) return r;
    for (int r = 0; r < c->size && s->call.has_lengths; r++)
        if (mpp_call_of(s, c, r)->kind == s->call.kind && mpp_call_of(s, c, r)->own != s->lengths[r]) return r;
    return rank;
}

/* The operation takes so many chunk numbers. */
static void take_numbers(shm_op *s, mpp_channel *c, uint64_t chunks) {
    for (shm_op *later = s == &c->oom_placeholder ? c->head : s->later; later; later = later->later)
        later->first += chunks - s->chunks;
    c->next += chunks - s->chunks;
}

/* The ranks called different things. Everybody sees the same calls, so everybody agrees on how many chunk numbers
 * to pass over: as many as the longest call takes. */
static int pass_over(shm_op *s, mpp_channel *c, uint64_t most) {
    take_numbers(s, c, most);
    mpp_publish(c, MPP_IN, s->first + most);
    mpp_publish(c, MPP_OUT, s->first + most);
    return mpp_fail(&s->op, MPP_FAILURE_MISMATCH, 0);
}

static int mismatch(shm_op *s, mpp_channel *c, int rank) {
    uint64_t most = 1;
    for (int r = 0; r < c->size; r++) {
        const mpp_call *call = mpp_call_of(s, c, r);
        if (call->chunks > most) most = call->chunks;
    }
    rank = blamed(s, c, rank);
    s->theirs = *mpp_call_of(s, c, rank);
    s->op.detail[0] = rank;
    s->op.detail[1] = s->lengths ? (int64_t)s->lengths[rank] : -1;
    if (rank == c->rank && s->find_imbalance) s->find_imbalance(s, c); /* now: `out` gives the slots back */
    return pass_over(s, c, most);
}

/* Of an exchange: whether what each rank sends to each is what that one expects. */
static int is_balanced(const shm_op *s, const mpp_channel *c) {
    uint64_t sum = 0;
    for (int r = 0; r < c->size; r++) sum ^= mpp_call_of(s, c, r)->own;
    return sum == 0;
}

/* An exchange that agrees goes through the slots unless some rank cannot, or the slots would be mostly empty, as where
 * one pair of many has a long block: the rounds of all ranks cost more there than messages. Everybody sees the same
 * calls, and decides alike. */
static void plan_exchange(shm_op *s, mpp_channel *c) {
    uint64_t most = 1, bytes = 0;
    int on_bus = 0;
    for (int r = 0; r < c->size; r++) {
        const mpp_call *call = mpp_call_of(s, c, r);
        if (call->divisor == MPP_IN_MESSAGES) return;
        on_bus |= call->place >= MPP_ON_BUS;
        if (call->chunks > most) most = call->chunks;
        bytes += call->bytes;
    }
    if (!on_bus && most > FEW_CHUNKS && bytes < most * (uint64_t)c->size * c->slot_bytes / LEAST_FILLED) return;
    take_numbers(s, c, most);
    s->chunks = most;
    s->carries = 1;
}

/* If a rank has its data on the bus: longer chunks, and parts of sums where they lie, unless all can reduce them on
 * their devices; two chunks and no data if all can read each other's devices. Everybody decides alike. */
static void plan_bus(shm_op *s, mpp_channel *c) {
    int most = MPP_ON_HOST, least = MPP_BETWEEN_DEVICES, staged = 0;
    for (int r = 0; r < c->size && c->wide; r++) {
        int place = mpp_call_of(s, c, r)->place;
        if (place > most) most = place;
        if (place < least) least = place;
        staged |= place == MPP_STAGED;
    }
    if (most < MPP_ON_BUS || (s->call.kind == MPP_EXCHANGE && !s->carries)) return;
    int is_root_on_bus = s->call.kind == MPP_BROADCAST && mpp_call_of(s, c, s->root)->place >= MPP_ON_BUS;
    if (is_root_on_bus) s->chunk_bytes = c->slot_bytes; /* which it has filled */
    uint64_t bytes = s->call.kind == MPP_EXCHANGE ? s->chunks * s->chunk_bytes : s->call.bytes;
    uint64_t chunks = 2, of_second = 0;
    s->between_devices = least == MPP_BETWEEN_DEVICES && mpp_is_worth_reading(c, bytes);
    if (!s->between_devices) {
        mpp_look_for_peers(s, c);
        /* Pieces that are staged have chunks of the one length. */
        if (!staged && s->batches == 1) s->widening = c->widening;
        chunks = s->batches > 1 ? s->chunks : mpp_chunk_count(bytes, s->chunk_bytes, s->chunk_bytes * s->widening);
    }
    if (s->element && least >= MPP_TO_REDUCE) chunks = mpp_plan_halves(s, chunks, &of_second);
    else if (s->between_devices) s->wait_for = -1;
    else if (s->read_reduced) {
        s->two_phase = 1;
        if (s->read) s->read = s->read_reduced;
    }
    take_numbers(s, c, chunks);
    s->chunks = chunks;
    if (!of_second) return;
    take_numbers(s->second, c, of_second);
    s->second->chunks = of_second;
}

static void take_factors(shm_op *s, mpp_channel *c) {
    for (int r = 0; s->how.has_premul && r < c->size; r++) c->factors[r] = mpp_call_of(s, c, r)->premul;
    if (s->how.has_premul) s->how.factors = c->factors;
}

/* The first rank of a node asks the other nodes, and publishes the answer to the ranks here. */
static void ask_nodes(shm_op *s, mpp_channel *c) {
    const mpp_call_summary *all = c->internode->agree(s);
    if (!all) return;
    c->counters[0].summary = *all;
    mpp_publish(c, MPP_AGREED, s->first + 1);
}

static int has_agreed(const shm_op *s, mpp_channel *c) {
    return atomic_load_explicit(&c->counters[0].agreed, memory_order_acquire) > s->first;
}

int mpp_shm_may_send_early(const mpp_op *agreement, int peer) {
    const shm_op *s = (const shm_op *)agreement;
    mpp_channel *c = agreement->group->channel;
    const mpp_topology *t = c->topology;
    /* Once they have agreed nothing may be sent behind this rank's last word about what was: drain.c. */
    if (c->head != s || !s->all_came || c->oom_first || has_agreed(s, c)) return 0;
    return c->rank || (t->here ^ t->node_of[peer]) >> s->asked == 0;
}

static int check_with_nodes(shm_op *s, mpp_channel *c) {
    const mpp_call_summary *all = &c->counters[0].summary;
    if (c->rank == 0 && !has_agreed(s, c)) ask_nodes(s, c);
    if (!has_agreed(s, c) || (all->mismatch && !c->internode->drain(s))) return MPP_PENDING;
    s->checked = !all->mismatch;
    /* mpp_note_calls has seen to the ranks here. */
    if (c->topology->node_of[all->last] != c->topology->here) mpp_note_arrival(&s->op, all->last, all->came);
    if (s->checked) return MPP_PENDING;
    int other = all->signature[0] != s->signature ? 0 : 1;
    s->op.detail[0] = all->rank[other];
    s->op.detail[1] = s->lengths ? (int64_t)s->lengths[all->rank[other]] : -1;
    s->theirs = all->call[other];
    return pass_over(s, c, all->most);
}

/* When each rank here has made this call, once all have. */
void mpp_note_calls(shm_op *s, const mpp_channel *c) {
    const mpp_topology *t = c->topology;
    for (int r = 0; r < c->size; r++)
        mpp_note_arrival(&s->op, t ? t->members[t->first[t->here] + r] : r,
                         c->counters[r].came[s->first % (uint64_t)c->ring]);
}

int mpp_ask_early(shm_op *s, mpp_channel *c) {
    if (c->rank == 0 && !has_agreed(s, c)) ask_nodes(s, c);
    return has_agreed(s, c) && !c->counters[0].summary.mismatch;
}

int mpp_check_calls(shm_op *s, mpp_channel *c) {
    take_factors(s, c);
    if (c->internode) return check_with_nodes(s, c);
    for (int r = 0; r < c->size; r++)
        if (c->counters[r].signature[s->first % (uint64_t)c->ring] != s->signature) return mismatch(s, c, r);
    if (s->call.kind == MPP_NO_MEMORY) return mismatch(s, c, c->rank);
    if (s->call.kind == MPP_EXCHANGE && !is_balanced(s, c)) return mismatch(s, c, c->rank);
    if (s->call.kind == MPP_EXCHANGE) plan_exchange(s, c);
    plan_bus(s, c);
    s->checked = 1;
    return MPP_PENDING;
}
