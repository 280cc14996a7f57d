/* Messages between the hosts of a group, and their agreement about what is called.
 *
 * The first rank of each host compares its own ranks' calls (shm.c), and then its host's with the others'. Hosts meet
 * as the leaves of a balanced tree do: at level k the parts of 2^k hosts have one opinion each, and every host gets
 * that of the part beside its own. So all have the opinion of all after log2(hosts) messages, one after the other.
 * (Recursive doubling, see Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
 * MPICH", 2005. Where a part is cut off at the last host, its members send to several of the complete one beside it.)
 *
 * The pattern is the same whatever is called, so that ranks which call different things still meet in it. What is
 * short travels in the same messages; sums are then those of the tree, to the bit.
 */
#include "internode/agreement.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

/* ---- messages ---- */

enum { TO_MATCH, ACTIVE, OVER };

void mpp_dispatch(shm_op *s, mpp_parcel *p, const void *buffer, size_t bytes, int peer, int tag) {
    const mpp_group *g = s->op.group;
    *p = (mpp_parcel){.bytes = bytes, .peer = peer, .tag = tag, .phase = ACTIVE};
    int error = mpp_mpi.Isend(buffer, (int)bytes, mpp_mpi.byte, peer, tag, g->comm, &p->request);
    if (!error) return;
    p->phase = OVER;
    mpp_fail(&s->op, MPP_FAILURE_MPI, error);
}

void mpp_expect(mpp_parcel *p, void *buffer, size_t bytes, int peer, int tag) {
    *p = (mpp_parcel){.buffer = buffer, .bytes = bytes, .peer = peer, .tag = tag, .phase = TO_MATCH};
}

static int match(shm_op *s, mpp_parcel *p) {
    mpi_status status;
    int found = 0, length = 0;
    int error = mpp_probe(s->op.group, p->peer, p->tag, &p->message, &status, &length, &found);
    if (!error && !found) return 0;
    if (!error) {
        if ((size_t)length > p->bytes) abort(); /* nobody sends that: memory is not what it was */
        p->bytes = (size_t)length;
        error = mpp_mpi.Imrecv(p->buffer, length, mpp_mpi.byte, &p->message, &p->request);
    }
    p->phase = error ? OVER : ACTIVE;
    if (error) mpp_fail(&s->op, MPP_FAILURE_MPI, error);
    return 1;
}

int mpp_delivered(shm_op *s, mpp_parcel *parcels, int count) {
    int over = 1;
    for (int i = 0; i < count; i++) {
        mpp_parcel *p = &parcels[i];
        if (p->phase == TO_MATCH && match(s, p))
            atomic_fetch_add_explicit(&s->op.group->moves, 1, memory_order_relaxed);
        if (p->phase == ACTIVE) {
            mpi_status status;
            int flag;
            mpp_test(&s->op, &p->request, &status, &flag);
            if (flag) p->phase = OVER;
        }
        over &= p->phase == OVER;
    }
    return over;
}

static int idle(shm_op *s, mpp_parcel *parcels, int count) {
    for (int i = 0; i < count; i++)
        if (parcels[i].phase == TO_MATCH) parcels[i].phase = OVER;
    return mpp_delivered(s, parcels, count);
}

int mpp_hosts_idle(shm_op *s) {
    mpp_hosts *h = s->op.group->channel->hosts;
    int is_idle = idle(s, h->calls, h->call_count);
    for (int i = 0; i < MAX_RING; i++) is_idle &= idle(s, h->flights[i].parcels, h->flights[i].count);
    return is_idle;
}

/* ---- opinions ---- */

static void differs(mpp_opinion *of, const mpp_opinion *from, int which) {
    of->differ = 1;
    of->rank[1] = from->rank[which];
    of->signature[1] = from->signature[which];
    of->call[1] = from->call[which];
}

/* Of several calls that differ from the first one, the one to name is that of a rank without memory. */
static void merge(mpp_opinion *mine, const mpp_opinion *theirs) {
    mine->balance ^= theirs->balance;
    if (theirs->most > mine->most) mine->most = theirs->most;
    int known = mine->differ && mine->call[1].kind == MPP_NO_MEMORY;
    for (int i = 0; i <= theirs->differ && !known; i++) {
        int is_other = theirs->signature[i] != mine->signature[0] || theirs->number != mine->number;
        if (is_other && (!mine->differ || theirs->call[i].kind == MPP_NO_MEMORY)) differs(mine, theirs, i);
    }
    mine->differ |= theirs->differ;
}

static mpp_opinion of_this_host(const shm_op *s) {
    const mpp_channel *c = s->op.group->channel;
    const mpp_hosts *h = c->hosts;
    mpp_opinion all = {.number = s->first};
    for (int r = 0; r < c->size; r++) {
        const rank_counters *theirs = &c->counters[r];
        uint64_t place = s->first % (uint64_t)c->ring;
        mpp_opinion one = {.number = s->first,
                           .most = theirs->call[place].chunks,
                           .balance = theirs->call[place].kind == MPP_EXCHANGE ? theirs->call[place].own : 0};
        one.rank[0] = h->members[h->first[h->here] + r];
        one.signature[0] = theirs->signature[place];
        one.call[0] = theirs->call[place];
        if (r) merge(&all, &one);
        else all = one;
    }
    return all;
}

/* ---- the agreement ---- */

enum { OPINION = (sizeof(mpp_opinion) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE, MESSAGE = OPINION + MPP_PAYLOAD };

/* The hosts [begin, end) that have one opinion at this level, and include `host`. */
static int begin_of(int host, int level) { return host >> level << level; }
static int end_of(const mpp_hosts *h, int begin, int level) {
    return h->count - begin < 1 << level ? h->count : begin + (1 << level);
}

static int rides(const shm_op *s, const mpp_opinion *o) { return s->payload && !o->differ; }

static void send_opinion(shm_op *s, int to) {
    mpp_hosts *h = s->op.group->channel->hosts;
    mpp_dispatch(s, &h->calls[h->call_count++], h->sent + (size_t)h->level * MESSAGE, h->sent_bytes,
                 mpp_leader_of(h, to), h->first_tag);
}

/* Sends this part's opinion to those of the part beside it that want it from this host, and expects theirs. */
static void begin_level(shm_op *s) {
    mpp_hosts *h = s->op.group->channel->hosts;
    const mpp_opinion *mine = (const mpp_opinion *)h->mine;
    char *message = h->sent + (size_t)h->level * MESSAGE;
    int begin = begin_of(h->here, h->level), end = end_of(h, begin, h->level);
    int beside = begin ^ 1 << h->level, members = end_of(h, beside, h->level) - beside;
    h->awaited = -1;
    if (beside >= h->count) return;
    size_t offset = 0, length = 0;
    if (rides(s, mine)) s->route->span(s, begin, end, &offset, &length);
    memcpy(message, h->mine, sizeof *mine);
    if (length) memcpy(message + OPINION, h->mine + OPINION + offset, length);
    h->sent_bytes = OPINION + length;
    int place = h->here - begin;
    for (int to = place; to < members; to += end - begin) send_opinion(s, beside + to);
    h->awaited = h->call_count++;
    mpp_expect(&h->calls[h->awaited], h->theirs, MESSAGE, mpp_leader_of(h, beside + place % members), h->first_tag);
}

static void end_level(shm_op *s) {
    mpp_hosts *h = s->op.group->channel->hosts;
    mpp_opinion *mine = (mpp_opinion *)h->mine, theirs;
    memcpy(&theirs, h->theirs, sizeof theirs);
    merge(mine, &theirs);
    if (!rides(s, mine)) return;
    size_t offset, length;
    int beside = begin_of(h->here, h->level) ^ 1 << h->level;
    s->route->span(s, beside, end_of(h, beside, h->level), &offset, &length);
    if (length) s->route->merge(s, h->mine + OPINION, h->theirs + OPINION, offset, length, beside < h->here);
}

static void begin(shm_op *s) {
    mpp_hosts *h = s->op.group->channel->hosts;
    mpp_opinion *mine = (mpp_opinion *)h->mine;
    *mine = of_this_host(s);
    if (rides(s, mine)) s->route->pack(s, h->mine + OPINION);
    h->asking = 1;
    h->level = h->call_count = 0;
    begin_level(s);
}

const mpp_opinion *mpp_agree(shm_op *s) {
    mpp_hosts *h = s->op.group->channel->hosts;
    mpp_opinion *mine = (mpp_opinion *)h->mine;
    if (!h->asking) begin(s);
    while (h->level < h->levels) {
        if (h->awaited >= 0) {
            if (!mpp_delivered(s, &h->calls[h->awaited], 1) || s->op.failure) return NULL;
            end_level(s);
        }
        if (++h->level < h->levels) begin_level(s);
    }
    if (!mpp_delivered(s, h->calls, h->call_count) || s->op.failure) return NULL;
    if (s->call.kind == MPP_EXCHANGE && mine->balance && !mine->differ) {
        mine->differ = 1;
        mine->rank[1] = mine->rank[0];
        mine->call[1] = (mpp_call){.kind = MPP_EXCHANGE, .root = -1};
    }
    if (rides(s, mine)) s->route->unpack(s, h->mine + OPINION);
    h->asking = 0;
    return mine;
}

/* ---- the shape of a group ---- */

/* Shows all memory that there is, the hosts themselves at last. */
static void each_block(mpp_hosts *h, void (*show)(void *block, size_t *bytes), size_t *bytes) {
    void *blocks[] = {h->tables, h->mine, h->theirs, h->sent, h->calls};
    for (int i = 0; i < MAX_RING; i++) {
        show(h->flights[i].parcels, bytes);
        show(h->flights[i].memory, bytes);
    }
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) show(blocks[i], bytes);
    show(h, bytes);
}

static void release(void *block, size_t *bytes) {
    (void)bytes;
    free(block);
}

void mpp_hosts_free(mpp_hosts *h) {
    if (h) each_block(h, release, NULL);
}

static void count(void *block, size_t *bytes) { *bytes += malloc_usable_size(block); }

size_t mpp_hosts_bytes(mpp_hosts *h) {
    size_t bytes = 0;
    if (h) each_block(h, count, &bytes);
    return bytes;
}

static void find_places(mpp_hosts *h, int ranks, const int *host_of) {
    for (int host = 0, place = 0; host < h->count; host++) {
        h->first[host] = place;
        for (int r = 0; r < ranks; r++) {
            if (host_of[r] != host) continue;
            h->place_of[r] = place - h->first[host];
            h->members[place++] = r;
        }
        h->first[host + 1] = place;
    }
    memcpy(h->host_of, host_of, (size_t)ranks * sizeof *host_of);
    h->lanes = ranks;
    for (int host = 0; host < h->count; host++) {
        int local = mpp_local_count(h, host);
        if (local < h->lanes) h->lanes = local;
        if (local > h->most) h->most = local;
    }
}

/* Which parts of the tree over all ranks (see mpp_reduce) lie on one host each, as large as can be: their turns, by
 * their first ranks. How many there are, with the `parts` of the ranks before. */
static int split(mpp_hosts *h, int begin, int end, int parts) {
    int half = 1, together = begin + 1;
    while (together < end && h->host_of[together] == h->host_of[begin]) together++;
    if (together == end) {
        h->turn_of[begin] = parts;
        return parts + 1;
    }
    while (2 * half < end - begin) half *= 2;
    parts = split(h, begin, begin + half, parts);
    return split(h, begin + half, end, parts);
}

/* A host's sum is one of the tree's parts where it has a block of 2^k ranks that begins at a multiple of 2^k, or the
 * last ranks of all from such a place on. Where that is not so for every host, they have several parts each; or, as
 * more parts are more to send, hosts are the leaves of a tree of their own, which gives other bits. */
static void find_parts(mpp_hosts *h, int ranks, int reproducible) {
    for (int r = 0; r < ranks; r++) h->turn_of[r] = -1;
    int in_tree = split(h, 0, ranks, 0) == h->count || reproducible;
    for (int r = 0; r < ranks && !in_tree; r++) h->turn_of[r] = h->place_of[r] ? -1 : h->host_of[r];
    for (int i = 0; i < ranks; i++) {
        int r = h->members[i];
        if (!h->place_of[r]) h->first_part[h->host_of[r]] = h->parts;
        if (h->turn_of[r] < 0) continue;
        h->first_in[h->parts] = i;
        h->turn[h->parts++] = h->turn_of[r];
    }
    h->first_part[h->count] = h->parts;
    h->first_in[h->parts] = ranks;
    for (int part = 0; part < h->parts; part++)
        h->weight[h->turn[part]] = in_tree ? h->first_in[part + 1] - h->first_in[part] : 1;
    h->regular = h->parts == h->count;
    for (int part = 0; part < h->parts; part++) {
        int is_last = part == h->parts - 1, less = h->weight[part] < h->weight[0];
        h->regular &= h->turn[part] == part && (h->weight[part] == h->weight[0] || (is_last && less));
    }
}

static int new_tables(mpp_hosts *h, size_t ranks) {
    int **tables[] = {&h->first,    &h->members, &h->host_of, &h->place_of, &h->first_part,
                      &h->first_in, &h->turn,    &h->turn_of, &h->weight};
    size_t count = sizeof tables / sizeof *tables;
    h->tables = malloc(count * (ranks + 1) * sizeof *h->tables);
    for (size_t i = 0; i < count && h->tables; i++) *tables[i] = h->tables + i * (ranks + 1);
    return h->tables != NULL;
}

mpp_hosts *mpp_hosts_new(mpp_group *g, const int *host_of, int reproducible) {
    mpp_hosts *h = calloc(1, sizeof *h);
    size_t ranks = (size_t)g->size;
    if (!h) return NULL;
    for (int r = 0; r < g->size; r++)
        if (host_of[r] >= h->count) h->count = host_of[r] + 1;
    while (1 << h->levels < h->count) h->levels++;
    h->here = host_of[g->rank];
    h->mine = malloc(MESSAGE);
    h->theirs = malloc(MESSAGE);
    h->sent = malloc((size_t)h->levels * MESSAGE);
    h->calls = calloc((size_t)h->count + 2 * (size_t)h->levels, sizeof *h->calls);
    if (!new_tables(h, ranks) || !h->mine || !h->theirs || !h->sent || !h->calls) {
        mpp_hosts_free(h);
        return NULL;
    }
    find_places(h, g->size, host_of);
    find_parts(h, g->size, reproducible);
    g->tag_count -= MPP_HOST_TAGS;
    h->first_tag = g->first_tag + g->tag_count + MPP_WINDOW_TAGS;
    return h;
}
