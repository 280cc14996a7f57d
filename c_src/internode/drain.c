/* After a disagreement: what was sent before the calls had been compared is received, and dropped.
 *
 * A rank that calls an exchange between nodes sends its blocks while the nodes still agree (exchange.c). If they do
 * not, nobody is to receive them, and a rank does not know who called an exchange. So each rank sends an empty message
 * behind whatever it has sent, to one rank after the other, and takes what comes from another one up to that message.
 * Messages between two ranks with one tag do not overtake each other, and a block that is sent is never empty.
 */
#include <stdlib.h>

#include "internode/internode.h"

enum { MARKER, FOUND };

static void receive_next(mpp_drain *d, int peer, int tag) {
    mpp_post_recv(&d->messages[FOUND], d->dropped, MPP_EARLY_BYTES, peer, tag);
}

/* The round in which this rank tells one rank, and hears from another; whether it is over. */
static int move_round(shm_op *s, mpp_drain *d) {
    mpp_group *g = s->op.group;
    int to = (g->rank + d->round + 1) % g->size, from = (g->rank + g->size - d->round - 1) % g->size;
    int tag = mpp_shm_next_tag(g);
    if (!d->in_round) {
        mpp_post_send(&s->op, &d->messages[MARKER], NULL, 0, to, tag);
        receive_next(d, from, tag);
        d->in_round = 1;
    }
    while (mpp_test_all(&s->op, &d->messages[FOUND], 1) && !s->op.failure) {
        if (!d->messages[FOUND].bytes) return mpp_test_all(&s->op, &d->messages[MARKER], 1);
        receive_next(d, from, tag);
    }
    return 0;
}

int mpp_drain_early(shm_op *s) {
    mpp_drain *d = &mpp_internode_of(s)->drain;
    if (!mpp_sends_early(s->op.group)) return 1;
    if (!d->dropped) d->dropped = malloc(MPP_EARLY_BYTES);
    if (!d->dropped) return 0; /* the next step tries again */
    for (; d->round < s->op.group->size - 1; d->round++, d->in_round = 0)
        if (!move_round(s, d)) return 0;
    free(d->dropped);
    *d = (mpp_drain){0};
    mpp_shm_tag(s->op.group);
    return 1;
}
