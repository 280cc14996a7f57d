#include "collectives/collective.h"

uintptr_t mpp_no_shm_op(shm_op *s, mpp_group *g, int64_t wait_ns) {
    if (s) mpp_discard(&s->op);
    return mpp_shm_out_of_memory(g, wait_ns);
}

void mpp_stage_shm(shm_op *s) {
    if (s->bus) mpp_stage_on_bus(&s->op);
    else mpp_stage_begin(&s->op, mpp_piece_size(s->chunk_bytes, s->op.staging->lane_count));
}

void mpp_leave_bus(shm_op *s) {
    if (s->bus) s->place = MPP_STAGED;
    s->bus = NULL;
}

void mpp_write_plain(shm_op *s, uint64_t chunk, char *slot) {
    size_t length = mpp_chunk_length(s, s->bytes, chunk);
    if (length) mpp_to_slot(s, slot, mpp_shm_in(s, mpp_chunk_begin(s, chunk)), length);
}
