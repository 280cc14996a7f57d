/* Operations that only compare the ranks' calls: what comes before the data of MPI's collectives and of exchanges. */
#include <stdlib.h>
#include <string.h>

#include "shm/shm.h"

void *mpp_copy_list(const void *list, int count) {
    _Static_assert(sizeof(size_t) == sizeof(uintptr_t), "lists of addresses and of lengths are alike");
    void *copy = malloc((size_t)count * sizeof(size_t));
    return copy ? memcpy(copy, list, (size_t)count * sizeof(size_t)) : NULL;
}

shm_op *mpp_new_agreement(mpp_group *g) {
    shm_op *s = mpp_new_shm_op(g, 0);
    if (s) mpp_no_longer_active(&s->op);
    return s;
}

mpp_op *mpp_shm_agree(mpp_group *g, int kind, const mpp_reduction *how, int root, size_t length, const size_t *lengths,
                      size_t element, int place) {
    shm_op *s = mpp_new_agreement(g);
    if (!s) return NULL;
    if (how) s->how = *how;
    s->place = place;
    if (lengths && !(s->lengths = mpp_copy_list(lengths, g->size))) {
        mpp_discard(&s->op);
        return NULL;
    }
    for (int r = 0; lengths && r < g->size; r++) s->lengths[r] *= element;
    s->chunk_bytes = SIZE_MAX; /* no data: one chunk, whatever the length */
    mpp_sign(s, kind, root, length * element);
    mpp_take_place(s);
    return &s->op;
}

int mpp_arrived_to_compare(mpp_op *op, int rank) {
    int there = op->agreement->arrived(op->agreement, rank);
    return there > 1 && !((const shm_op *)op->agreement)->carries ? 1 : there;
}

int mpp_shm_next_tag(const mpp_group *g) {
    return g->first_tag + (int)(g->channel->exchanges % (unsigned)(g->tag_count / 2));
}

int mpp_shm_tag(mpp_group *g) {
    int tag = mpp_shm_next_tag(g);
    g->channel->exchanges++;
    return tag;
}
