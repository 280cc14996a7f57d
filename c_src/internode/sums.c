/* Sums of a group on several nodes: what is added up where, what travels, and what is piggybacked. See internode.h. */
#include "internode/sums.h"

#include <string.h>

/* ---- partial sums ---- */

static size_t wide_bytes(const shm_op *s, size_t bytes) {
    return bytes / s->element * mpp_dtype_size(mpp_wide_dtype(s->how.dtype));
}

/* Whether a node sends its only rank's elements as they are. */
static int sends_plain(const shm_op *s, int node) {
    return mpp_local_count(mpp_topology_of(s), node) == 1 && !s->how.has_premul;
}

/* Whether what a node sends is in the elements' type. Rounding a minimum or maximum changes nothing. */
static int sends_narrow(const shm_op *s, int node) {
    const mpp_topology *t = mpp_topology_of(s);
    int is_exact = (s->how.op == MPP_MIN || s->how.op == MPP_MAX) && !s->how.has_premul;
    if (sends_plain(s, node)) return 1;
    return mpp_part_count(t, node) == 1 && (is_exact || (t->narrow_sums && s->element == 2));
}

static size_t wide_count(const shm_op *s, size_t bytes) { return bytes / wide_bytes(s, s->element); }

int mpp_is_direct(const shm_op *s) { return mpp_goes_directly(s) && !(s->lengths && s->payload); }

/* Of a rank here. */
static const char *elements_at(const shm_op *s, int rank, uint64_t chunk, size_t offset) {
    if (!mpp_is_direct(s)) return mpp_slot_at(s, rank, chunk) + offset;
    if (!s->lengths) return mpp_in_at(s, chunk * s->chunk_bytes) + offset;
    int of_block = mpp_first_in_slot(s, chunk) + (int)(offset / s->chunk_bytes);
    return mpp_in_block_at(s, of_block, mpp_piece_number(s, chunk) * s->chunk_bytes);
}

char *mpp_results_at(const shm_op *s, int rank, uint64_t chunk) {
    if (mpp_is_direct(s) && mpp_is_wanted(s)) return mpp_out_at(s, chunk * s->chunk_bytes);
    return mpp_slot_at(s, rank, chunk);
}

/* Notes where the elements of the ranks here lie. */
static void find_elements(shm_op *s, uint64_t chunk, size_t offset) {
    mpp_channel *c = mpp_channel_of(s);
    for (int r = 0; r < c->size; r++) c->sources[r] = elements_at(s, r, chunk, offset);
}

/* Adds up `count` elements at an offset in the slots here: the sums of this node's parts, one behind the other. */
static void add_up(shm_op *s, uint64_t chunk, size_t offset, size_t count, char *wide) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_topology *t = c->topology;
    mpp_reduction how = s->how;
    find_elements(s, chunk, offset);
    for (int part = t->first_part[t->here]; part < t->first_part[t->here + 1]; part++) {
        int first = t->first_in[part] - t->first[t->here], ranks = t->first_in[part + 1] - t->first_in[part];
        if (how.factors) how.factors = s->how.factors + first;
        mpp_reduce_wide(&how, wide, c->sources + first, ranks, count);
        wide += wide_bytes(s, count * s->element);
    }
}

/* The same of all ranks here, rounded, but not divided: that comes in the end. */
static void add_up_narrow(shm_op *s, uint64_t chunk, size_t offset, size_t count, char *sums) {
    mpp_channel *c = mpp_channel_of(s);
    mpp_reduction how = s->how;
    how.divisor = 1;
    find_elements(s, chunk, offset);
    mpp_reduce(&how, sums, c->sources, c->size, count);
}

/* The size of a node's sums of so many bytes. */
static size_t sums_bytes(const shm_op *s, int node, size_t bytes) {
    return (size_t)mpp_part_count(mpp_topology_of(s), node) * wide_bytes(s, bytes);
}

static size_t sent_bytes(const shm_op *s, int node, size_t bytes) {
    return sends_narrow(s, node) ? bytes : sums_bytes(s, node, bytes);
}

void mpp_send_sums_of(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int rank) {
    int here = mpp_topology_of(s)->here;
    if (!bytes) return;
    if (sends_plain(s, here)) {
        mpp_pipeline_send(s, chunk, elements_at(s, mpp_channel_of(s)->rank, chunk, offset), bytes, rank);
        return;
    }
    char *sums = mpp_pipeline_alloc(mpp_pipeline_slot_of(s, chunk), sent_bytes(s, here, bytes));
    if (sends_narrow(s, here)) add_up_narrow(s, chunk, offset, bytes / s->element, sums);
    else add_up(s, chunk, offset, bytes / s->element, sums);
    mpp_pipeline_send(s, chunk, sums, sent_bytes(s, here, bytes), rank);
}

void mpp_gather_sums(shm_op *s, uint64_t chunk, size_t offset, size_t bytes, int (*sender)(const shm_op *, int)) {
    const mpp_topology *t = mpp_topology_of(s);
    if (!bytes) return;
    for (int node = 0; node < t->count; node++) {
        size_t length = sums_bytes(s, node, bytes);
        char *sums = mpp_pipeline_alloc(mpp_pipeline_slot_of(s, chunk), length);
        if (node == t->here) add_up(s, chunk, offset, bytes / s->element, sums);
        else mpp_pipeline_recv(s, chunk, sums, sent_bytes(s, node, bytes), sender(s, node));
    }
}

/* Adds up the parts' sums by tree position, as mpp_reduce() does the ranks'; overwrites them. Returns the result. */
static char *add_tree(const shm_op *s, char **sums, size_t count) {
    const mpp_topology *t = mpp_topology_of(s);
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    int leaves[sizeof(int) * 8], waiting = 0;
    for (int position = 0; position < t->parts; position++) {
        sums[waiting] = sums[position];
        leaves[waiting++] = t->leaf_count[position];
        while (waiting > 1 && (position == t->parts - 1 || leaves[waiting - 1] == leaves[waiting - 2])) {
            const void *pair[] = {sums[waiting - 2], sums[waiting - 1]};
            waiting--;
            leaves[waiting - 1] += leaves[waiting];
            mpp_reduce(&of_wide, sums[waiting - 1], pair, 2, count);
        }
    }
    return sums[0];
}

/* Notes where the sums of a node's parts lie, of so many bytes each, by the parts' tree positions. */
static void find_sums(const shm_op *s, int node, char *sums, size_t bytes) {
    const mpp_topology *t = mpp_topology_of(s);
    for (int part = t->first_part[node]; part < t->first_part[node + 1]; part++, sums += bytes)
        mpp_channel_of(s)->sources[t->tree_position[part]] = sums;
}

char *mpp_add_nodes(shm_op *s, uint64_t chunk, size_t bytes, char *result) {
    mpp_channel *c = mpp_channel_of(s);
    const mpp_topology *t = c->topology;
    mpp_pipeline_slot *p = mpp_pipeline_slot_of(s, chunk);
    size_t wide = wide_bytes(s, bytes), count = bytes / s->element;
    mpp_reduction of_wide = mpp_of_wide(&s->how), received = s->how;
    received.has_premul = 0; /* whoever sent it has multiplied */
    if (!bytes) return result;
    p->used = 0;
    for (int node = 0; node < t->count; node++)
        find_sums(s, node, mpp_pipeline_alloc(p, sums_bytes(s, node, bytes)), wide);
    for (int node = 0; node < t->count; node++) {
        if (node == t->here || !sends_narrow(s, node) || of_wide.dtype == s->how.dtype) continue;
        const void **sum = &c->sources[t->tree_position[t->first_part[node]]];
        char *widened = mpp_pipeline_alloc(p, wide);
        mpp_widen(&received, widened, *sum, count);
        *sum = widened;
    }
    if (!result) result = mpp_pipeline_alloc(p, bytes);
    mpp_narrow(&s->how, result, add_tree(s, (char **)c->sources, count), count);
    return result;
}

/* ---- what is piggybacked ---- */

static void pack_sum(shm_op *s, char *payload) { add_up(s, 0, 0, wide_count(s, s->payload), payload); }

static void span_all(const shm_op *s, int first_node, int end_node, size_t *offset, size_t *length) {
    (void)first_node, (void)end_node;
    *offset = 0;
    *length = s->payload;
}

static void merge_sums(shm_op *s, char *payload, const char *theirs, size_t offset, size_t length, int theirs_first) {
    char *sum = payload + offset;
    const void *sources[] = {theirs_first ? theirs : sum, theirs_first ? sum : theirs};
    mpp_reduction of_wide = mpp_of_wide(&s->how);
    mpp_reduce(&of_wide, sum, sources, 2, wide_count(s, length));
}

/* Where nodes are not leaves of one tree, the sums of all parts are sent, and added up in the end. */
static void pack_parts(shm_op *s, char *payload) {
    const mpp_topology *t = mpp_topology_of(s);
    size_t each = s->payload / (size_t)t->parts;
    add_up(s, 0, 0, wide_count(s, each), payload + (size_t)t->first_part[t->here] * each);
}

static void span_of_parts(const shm_op *s, int first_node, int end_node, size_t *offset, size_t *length) {
    const mpp_topology *t = mpp_topology_of(s);
    size_t each = s->payload / (size_t)t->parts;
    *offset = (size_t)t->first_part[first_node] * each;
    *length = (size_t)t->first_part[end_node] * each - *offset;
}

static void unpack_parts(shm_op *s, char *payload) {
    mpp_channel *c = mpp_channel_of(s);
    size_t each = s->payload / (size_t)c->topology->parts, count = wide_count(s, each);
    for (int node = 0; node < c->topology->count; node++)
        find_sums(s, node, payload + (size_t)c->topology->first_part[node] * each, each);
    mpp_narrow(&s->how, mpp_results_at(s, 0, 0), add_tree(s, (char **)c->sources, count), count);
}

static void unpack_sum(shm_op *s, char *payload) {
    mpp_narrow(&s->how, mpp_results_at(s, 0, 0), payload, wide_count(s, s->payload));
}

/* Longer sums are piggybacked by halves, among 2^k nodes: a node sends only the sums that the part beside it goes on
 * with, half as much at each level, and has its own share of all sums in the end. (Recursive halving, see agreement.c.)
 * Shares lie in the order of their nodes' numbers with the bits reversed, so that each message is one stretch. */
static int reversed(const mpp_topology *t, int node) {
    int bits = 0;
    for (int level = 0; level < t->levels; level++) bits |= (node >> level & 1) << (t->levels - 1 - level);
    return bits;
}

static size_t wide_share(const shm_op *s) { return s->payload / (size_t)mpp_topology_of(s)->count; }

/* Part `i` of a node's share of the tensor: all of it, or the block of one of its ranks; of no length after the last.
 */
static mpp_stretch part_of_share(const shm_op *s, int node, int i) {
    const mpp_topology *t = mpp_topology_of(s);
    if (s->lengths && i < mpp_local_count(t, node))
        return (mpp_stretch){(size_t)t->members[t->first[node] + i] * s->call.bytes, s->call.bytes};
    size_t share = wide_count(s, wide_share(s)) * s->element, begin = (size_t)node * share;
    if (s->lengths || i || begin >= s->bytes) return (mpp_stretch){0, 0};
    return (mpp_stretch){begin, s->bytes - begin < share ? s->bytes - begin : share};
}

static void pack_shares(shm_op *s, char *payload) {
    const mpp_topology *t = mpp_topology_of(s);
    for (int place = 0; place < t->count; place++) {
        char *at = payload + (size_t)place * wide_share(s), *end = at + wide_share(s);
        int node = reversed(t, place);
        mpp_stretch part;
        for (int i = 0; (part = part_of_share(s, node, i)).length; i++) {
            add_up(s, 0, part.begin, part.length / s->element, at);
            at += wide_bytes(s, part.length);
        }
        memset(at, 0, (size_t)(end - at));
    }
}

static void span_of_half(const shm_op *s, int first_node, int end_node, size_t *offset, size_t *length) {
    const mpp_topology *t = mpp_topology_of(s);
    int nodes = end_node - first_node, shares = t->count / (2 * nodes);
    int is_sent = first_node <= t->here && t->here < end_node, wanted_by = is_sent ? t->here ^ nodes : t->here;
    *offset = (size_t)(reversed(t, wanted_by) / shares * shares) * wide_share(s);
    *length = (size_t)shares * wide_share(s);
}

static void unpack_share(shm_op *s, char *payload) {
    const mpp_topology *t = mpp_topology_of(s);
    char *at = payload + (size_t)reversed(t, t->here) * wide_share(s), *results = mpp_results_at(s, 0, 0);
    mpp_stretch part;
    for (int i = 0; (part = part_of_share(s, t->here, i)).length; i++) {
        mpp_narrow(&s->how, results + part.begin, at, part.length / s->element);
        at += wide_bytes(s, part.length);
    }
}

void mpp_exchange_results(shm_op *s, uint64_t chunk, const char *piece, char *results,
                          mpp_stretch (*piece_of)(const shm_op *, uint64_t, int), int (*rank_on)(const shm_op *, int)) {
    const mpp_topology *t = mpp_topology_of(s);
    int wanted_by = s->root < 0 ? -1 : t->node_of[s->root];
    mpp_stretch mine = piece_of(s, chunk, t->here);
    for (int i = 1; i < t->count; i++) {
        int node = mpp_other_node(t, i);
        mpp_stretch theirs = piece_of(s, chunk, node);
        if (wanted_by < 0 || wanted_by == node) mpp_pipeline_send(s, chunk, piece, mine.length, rank_on(s, node));
        if (wanted_by < 0 || wanted_by == t->here)
            mpp_pipeline_recv(s, chunk, results + theirs.begin, theirs.length, rank_on(s, node));
    }
}

static mpp_stretch share_of(const shm_op *s, uint64_t chunk, int node) {
    (void)chunk; /* there is one */
    return part_of_share(s, node, 0);
}

static int first_rank_on(const shm_op *s, int node) { return mpp_first_rank_of(mpp_topology_of(s), node); }

/* The first ranks of the nodes have the shares. */
static void send_shares(shm_op *s, uint64_t chunk) {
    char *results = mpp_results_at(s, 0, chunk);
    size_t begin = share_of(s, chunk, mpp_topology_of(s)->here).begin;
    if (!mpp_channel_of(s)->rank) mpp_exchange_results(s, chunk, results + begin, results, share_of, first_rank_on);
}

int mpp_piggyback_sums(shm_op *s, size_t bytes) {
    static const mpp_route sum = {.pack = pack_sum, .span = span_all, .merge = merge_sums, .unpack = unpack_sum};
    static const mpp_route parts = {
        .pack = pack_parts, .span = span_of_parts, .merge = mpp_merge_by_copy, .unpack = unpack_parts};
    const mpp_topology *t = mpp_topology_of(s);
    size_t payload = wide_bytes(s, bytes) * (t->regular ? 1 : (size_t)t->parts);
    if (bytes > mpp_channel_of(s)->slot_bytes || payload > MPP_WHOLE_PAYLOAD) return 0;
    mpp_piggyback(s, t->regular ? &sum : &parts, payload);
    return 1;
}

int mpp_piggyback_by_halves(shm_op *s, size_t bytes, size_t share) {
    static const mpp_route of_blocks = {
        .pack = pack_shares, .span = span_of_half, .merge = merge_sums, .unpack = unpack_share};
    static const mpp_route of_tensor = {.pack = pack_shares,
                                        .span = span_of_half,
                                        .merge = merge_sums,
                                        .unpack = unpack_share,
                                        .first_phase = send_shares};
    const mpp_topology *t = mpp_topology_of(s);
    size_t payload = wide_bytes(s, share) * (size_t)t->count;
    if (!t->regular || t->count & (t->count - 1)) return 0;
    if (bytes > mpp_channel_of(s)->slot_bytes || payload > MPP_PAYLOAD) return 0;
    mpp_piggyback(s, s->lengths ? &of_blocks : &of_tensor, payload);
    return 1;
}

size_t mpp_most_of_sums(const shm_op *s) {
    size_t room = sizeof(float) * mpp_channel_of(s)->slot_bytes / wide_bytes(s, s->element) * s->element;
    size_t messages = (size_t)mpp_topology_of(s)->count * MPP_EAGER;
    return (messages < room ? messages : room) / CACHE_LINE * CACHE_LINE;
}
