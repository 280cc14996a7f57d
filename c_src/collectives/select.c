/* Which way an operation goes: through shared memory (shm/, and internode/ behind it), by MPI's collectives (mpicoll/),
 * or as an exchange of messages (p2p/). The choice depends only on what all ranks share: the group, the operation, its
 * length, and the kind of staging. */
#include <stdlib.h>

#include "mpicoll/mpi_collective.h"
#include "shm/shm.h"

/* Whether an operation goes through shared memory. Data that MPI takes from a device directly does not, nor, in some
 * groups on several nodes, what is long (mpp_group_own_up_to). */
static int in_shm(const mpp_group *g, int kind, size_t bytes, uintptr_t staging) {
    return mpp_is_ours(g, kind, bytes) && (!staging || mpp_through_host(staging));
}

static size_t bytes_of_sums(size_t count, const mpp_reduction *how) {
    return count * mpp_dtype_size(mpp_wide_dtype(how->dtype));
}

/* ---- barrier and broadcast ---- */

uintptr_t mpp_barrier(uintptr_t group, int64_t wait_ns) {
    mpp_note(MPP_BARRIER, 0, -1);
    mpp_group *g = (mpp_group *)group;
    return in_shm(g, MPP_BARRIER, 0, 0) ? mpp_shm_barrier(g, wait_ns) : mpp_mpi_barrier(g, wait_ns);
}

uintptr_t mpp_broadcast(uintptr_t group, uintptr_t buffer, size_t bytes, int root, uintptr_t staging, int64_t wait_ns) {
    mpp_note(MPP_BROADCAST, bytes, root);
    mpp_group *g = (mpp_group *)group;
    if (in_shm(g, MPP_BROADCAST, bytes, staging))
        return mpp_shm_broadcast(g, (void *)buffer, bytes, root, staging, wait_ns);
    return mpp_mpi_broadcast(g, buffer, bytes, root, staging, wait_ns);
}

/* ---- reductions ---- */

uintptr_t mpp_allreduce(uintptr_t group, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how,
                        uintptr_t staging, int64_t wait_ns) {
    mpp_note(MPP_ALL_REDUCE, count * mpp_dtype_size(how->dtype), -1);
    mpp_group *g = (mpp_group *)group;
    if (mpp_is_ours(g, MPP_ALL_REDUCE, bytes_of_sums(count, how)))
        return mpp_shm_reduce(g, (const void *)in, (void *)out, count, how, -1, staging, wait_ns);
    return mpp_mpi_reduce(g, in, out, count, how, -1, staging, wait_ns);
}

uintptr_t mpp_reduce_to(uintptr_t group, uintptr_t in, uintptr_t out, size_t count, const mpp_reduction *how, int root,
                        uintptr_t staging, int64_t wait_ns) {
    mpp_note(MPP_REDUCE, count * mpp_dtype_size(how->dtype), root);
    mpp_group *g = (mpp_group *)group;
    if (mpp_is_ours(g, MPP_REDUCE, bytes_of_sums(count, how)))
        return mpp_shm_reduce(g, (const void *)in, (void *)out, count, how, root, staging, wait_ns);
    return mpp_mpi_reduce(g, in, out, count, how, root, staging, wait_ns);
}

uintptr_t mpp_reduce_scatter(uintptr_t group, const uintptr_t *in, uintptr_t out, const size_t *counts, int flat,
                             const mpp_reduction *how, uintptr_t staging, int64_t wait_ns) {
    mpp_group *g = (mpp_group *)group;
    mpp_note(MPP_REDUCE_SCATTER, mpp_sum_of(counts, g->size) * mpp_dtype_size(how->dtype), -1);
    size_t table = (size_t)g->size * mpp_longest_of(counts, g->size);
    if (mpp_is_ours(g, MPP_REDUCE_SCATTER, bytes_of_sums(table, how)))
        return mpp_shm_reduce_scatter(g, in, (void *)out, counts, how, staging, wait_ns);
    return mpp_mpi_reduce_scatter(g, in, out, counts, flat, how, staging, wait_ns);
}

/* ---- all_gather ---- */

/* One block for each rank: where it begins, and how long it is. */
typedef struct {
    uintptr_t *addresses;
    size_t *lengths;
} block_list;

/* The first begins at `first`, each of the others `step` bytes after the one before. 0: no memory. */
static int make_blocks(block_list *list, const mpp_group *g, uintptr_t first, size_t step, size_t length) {
    list->addresses = malloc((size_t)g->size * sizeof *list->addresses);
    list->lengths = malloc((size_t)g->size * sizeof *list->lengths);
    if (!list->addresses || !list->lengths) return 0;
    for (size_t r = 0; r < (size_t)g->size; r++) {
        list->addresses[r] = first + r * step;
        list->lengths[r] = length;
    }
    return 1;
}

static void free_blocks(block_list *list) {
    free(list->addresses);
    free(list->lengths);
}

static uintptr_t exchange_blocks(mpp_group *g, uintptr_t in, const uintptr_t *out, const size_t *bytes,
                                 uintptr_t staging, int64_t wait_ns) {
    block_list send;
    uintptr_t op;
    if (make_blocks(&send, g, in, 0, bytes[g->rank])) {
        op = mpp_exchange((uintptr_t)g, send.addresses, send.lengths, out, bytes, -1, staging, wait_ns);
    } else {
        mpp_staging_free((mpp_staging *)staging);
        op = mpp_mpi_out_of_memory(g);
    }
    free_blocks(&send);
    return op;
}

uintptr_t mpp_allgather_list(uintptr_t group, uintptr_t in, const uintptr_t *out, const size_t *bytes,
                             uintptr_t staging, int64_t wait_ns) {
    mpp_note(MPP_ALL_GATHER, bytes[((mpp_group *)group)->rank], -1);
    mpp_group *g = (mpp_group *)group;
    if (in_shm(g, MPP_ALL_GATHER, (size_t)g->size * mpp_longest_of(bytes, g->size), staging))
        return mpp_shm_allgather(g, (const void *)in, out, bytes, staging, wait_ns);
    return exchange_blocks(g, in, out, bytes, staging, wait_ns);
}

uintptr_t mpp_allgather(uintptr_t group, uintptr_t in, uintptr_t out, size_t bytes, uintptr_t staging,
                        int64_t wait_ns) {
    mpp_note(MPP_ALL_GATHER, bytes, -1);
    mpp_group *g = (mpp_group *)group;
    int shared = in_shm(g, MPP_ALL_GATHER, (size_t)g->size * bytes, staging);
    if (!shared) {
        size_t limit = mpp_call_limit(staging);
        /* In a slot the blocks of one piece lie side by side, as MPI wants them; in the user's memory all of them. */
        if (mpp_through_host(staging))
            return mpp_mpi_allgather(g, in, out, bytes, limit / (size_t)g->size, staging, wait_ns);
        if (bytes <= limit) return mpp_mpi_allgather(g, in, out, bytes, bytes, staging, wait_ns);
    }
    block_list receive;
    uintptr_t op;
    if (make_blocks(&receive, g, out, bytes, bytes)) {
        op = mpp_allgather_list(group, in, receive.addresses, receive.lengths, staging, wait_ns);
    } else {
        mpp_staging_free((mpp_staging *)staging);
        op = shared ? mpp_shm_out_of_memory(g, wait_ns) : mpp_mpi_out_of_memory(g);
    }
    free_blocks(&receive);
    return op;
}
