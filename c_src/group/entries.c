#include "group/entries.h"

static const mpp_entries entries = {
    .size = sizeof entries,
    .send = mpp_send,
    .recv = mpp_recv,
    .exchange = mpp_exchange,
    .barrier = mpp_barrier,
    .broadcast = mpp_broadcast,
    .allreduce = mpp_allreduce,
    .reduce_to = mpp_reduce_to,
    .allgather = mpp_allgather,
    .allgather_list = mpp_allgather_list,
    .reduce_scatter = mpp_reduce_scatter,
    .reduction_supported = mpp_reduction_supported,
    .claim = mpp_claim,
    .watch = mpp_watch,
    .wait = mpp_wait,
};

uintptr_t mpp_entries_address(void) { return (uintptr_t)&entries; }
