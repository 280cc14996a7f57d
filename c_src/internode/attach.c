#include "internode/internode.h"

#include <malloc.h>
#include <stdlib.h>

#include "internode/pipeline.h"

/* Shows each block of memory, the state itself at last. */
static void each_block(mpp_internode_state *n, void (*show)(void *block, size_t *bytes), size_t *bytes) {
    void *blocks[] = {n->agreement.mine, n->agreement.theirs, n->agreement.sent, n->agreement.messages,
                      n->drain.dropped};
    for (int i = 0; i < MAX_RING; i++) {
        show(n->slots[i].messages, bytes);
        show(n->slots[i].memory, bytes);
    }
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) show(blocks[i], bytes);
    show(n, bytes);
}

static void release(void *block, size_t *bytes) {
    (void)bytes;
    free(block);
}

static void free_state(mpp_internode_state *n) { each_block(n, release, NULL); }

static void count(void *block, size_t *bytes) { *bytes += malloc_usable_size(block); }

static void count_bytes(const mpp_channel *c, size_t ranks, size_t *taken, size_t *later) {
    each_block(c->internode_state, count, taken);
    *later = mpp_pipeline_bytes_to_come(c, ranks);
}

static int is_idle(shm_op *s) {
    mpp_internode_state *n = mpp_internode_of(s);
    mpp_channel *c = mpp_channel_of(s);
    /* What is dropped may be for the operations behind this one, which would take it for received: they fail too. */
    if (s->op.failure && (n->agreement.asking || s->op.failure == MPP_FAILURE_MPI)) {
        c->failure = s->op.failure;
        c->mpi_error = s->op.mpi_error;
    }
    int idle = mpp_finish_all(&s->op, n->agreement.messages, n->agreement.count);
    idle &= mpp_finish_all(&s->op, n->drain.messages, n->drain.in_round ? 2 : 0);
    for (int i = 0; i < MAX_RING; i++) idle &= mpp_finish_all(&s->op, n->slots[i].messages, n->slots[i].count);
    return idle;
}

static const mpp_internode functions = {.agree = mpp_agree,
                                        .drain = mpp_drain_early,
                                        .start = mpp_pipeline_start,
                                        .poll = mpp_pipeline_poll,
                                        .is_idle = is_idle,
                                        .count_bytes = count_bytes,
                                        .free = free_state};

int mpp_internode_attach(mpp_group *g, mpp_channel *c) {
    mpp_internode_state *n = calloc(1, sizeof *n);
    if (!n) return 0;
    if (!mpp_agreement_init(&n->agreement, c->topology)) {
        free_state(n);
        return 0;
    }
    g->tag_count -= MPP_INTERNODE_TAGS;
    n->first_tag = g->first_tag + g->tag_count + MPP_WINDOW_TAGS;
    c->internode = &functions;
    c->internode_state = n;
    return 1;
}
