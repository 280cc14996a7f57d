/* What the collectives of this folder share. Each file has one of them: between nodes, on a node, by MPI, and which of
 * these a call takes. That depends only on what all ranks share: the group, the operation, its length, and the kind of
 * staging. */
#pragma once

#include "mpicoll/mpi_collective.h"
#include "shm/signatures.h"

/* Whether an operation goes through shared memory, and between the nodes by our own messages. Data that MPI takes from
 * a device directly does not, nor, in some groups on several nodes, what is long (mpp_group_limit). */
static inline int mpp_in_shm(const mpp_group *g, int kind, size_t bytes, uintptr_t staging) {
    return mpp_is_ours(g, kind, bytes) && (!staging || mpp_through_host(staging));
}

/* The same of a reduction, whose data never goes from a device directly, and which may be longer between nodes than its
 * elements. */
static inline int mpp_sums_in_shm(const mpp_group *g, int kind, size_t count, const mpp_reduction *how) {
    return mpp_is_ours(g, kind, count * mpp_dtype_size(mpp_wide_dtype(how->dtype)));
}

/* For a call over shared memory that there is not enough memory for. */
uintptr_t mpp_no_shm_op(shm_op *s, mpp_group *g, int64_t wait_ns);
/* All lanes are there, and the length of chunks is settled. */
void mpp_stage_shm(shm_op *s);
/* A CUDA tensor goes through memory of the rank's own instead of registered slots. */
void mpp_leave_bus(shm_op *s);
/* A gather to all as an exchange, which all ranks must call alike: `recv_bytes` are of each rank's block. */
uintptr_t mpp_exchange_to_gather(mpp_group *g, const uintptr_t *send, const size_t *send_bytes, const uintptr_t *recv,
                                 const size_t *recv_bytes, uintptr_t staging, int64_t wait_ns);
/* Of one tensor a chunk after the other. */
void mpp_write_plain(shm_op *s, uint64_t chunk, char *slot);
