/* Long blocks of an exchange to a rank on another node.
 *
 * Long messages to a rank on another node wait for an answer before their data leaves (MPP_EAGER), and while they wait
 * one direction of the wire is idle. So a long block goes there in chunks that need no answer, of which only a few are
 * under way to each rank: what the receiver has not looked for yet lies in MPI's memory. Both sides cut a block up in
 * the same way, since its length has been compared; without that, and within a node, it is one message.
 */
#include "p2p/message_op.h"
#include "shm/shm.h"

static size_t chunk_limit(void) { return mpp_chunk_limit < MPP_EAGER ? mpp_chunk_limit : MPP_EAGER; }

int mpp_goes_in_chunks(const mpp_group *g, size_t bytes, int peer) {
    const mpp_topology *t = g->channel->topology;
    return t && bytes > chunk_limit() && t->node_of[peer] != t->here;
}

mpp_block *mpp_block_for(message_op *m, size_t bytes, int peer) {
    if (!m->blocks || !mpp_goes_in_chunks(m->op.group, bytes, peer)) return NULL;
    mpp_block *b = &m->blocks[m->block_count++];
    b->chunk = chunk_limit(); /* once: a test may change the limit while chunks are under way */
    return b;
}

static size_t next_length(const transfer *t) {
    size_t left = t->message.bytes - t->block->begun;
    return left < t->block->chunk ? left : t->block->chunk;
}

static void count_begun(message_op *m, transfer *t, size_t length) {
    t->block->begun += length;
    atomic_fetch_add_explicit(&m->op.group->moves, 1, memory_order_relaxed);
}

static int is_under_way(message_op *m, mpp_message *part) {
    return part->state == MPP_ACTIVE && mpp_test_message(&m->op, part) == MPP_PENDING;
}

int mpp_test_chunks(message_op *m, transfer *t) {
    int over = 1;
    for (int i = 0; i < MPP_UNDER_WAY; i++) over &= !is_under_way(m, &t->block->parts[i]);
    return over;
}

int mpp_send_chunks(message_op *m, transfer *t) {
    mpp_block *b = t->block;
    for (int i = 0; i < MPP_UNDER_WAY && b->begun < t->message.bytes; i++) {
        if (is_under_way(m, &b->parts[i])) continue;
        size_t length = next_length(t);
        mpp_post_send(&m->op, &b->parts[i], t->message.buffer + b->begun, length, t->message.peer, m->tag);
        count_begun(m, t, length);
    }
    return b->begun == t->message.bytes;
}

int mpp_receive_chunks(message_op *m, transfer *t, int *error) {
    mpp_block *b = t->block;
    *error = 0;
    for (int i = 0; i < MPP_UNDER_WAY && b->begun < t->message.bytes; i++) {
        int found;
        if (is_under_way(m, &b->parts[i])) continue;
        *error = mpp_probe(m->op.group, t->message.peer, m->tag, &t->match, &found);
        if (*error) return MPP_FAILED;
        if (!found) return MPP_PENDING;
        size_t length = next_length(t);
        if ((size_t)t->match.length != length) return MPP_FAILED;
        mpp_receive(&m->op, &b->parts[i], &t->match, t->message.buffer + b->begun, (int)length);
        count_begun(m, t, length);
    }
    return b->begun == t->message.bytes ? MPP_DONE : MPP_PENDING;
}
