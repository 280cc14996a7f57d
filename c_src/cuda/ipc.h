/* Memory of a device that other processes of the node read, by CUDA's IPC handles. */
#pragma once

#include "cuda/cuda_pool.h"

/* Where a tensor is, for another process. */
typedef struct {
    cuda_ipc_handle handle; /* of the allocation it lies in */
    uint64_t process;       /* whose that is: a number of its own on this node */
    uint64_t allocation;    /* its number, among all of that process */
    uint64_t base, bytes;   /* where it is there */
    uint64_t offset;        /* of the tensor in it */
    uint64_t freed;         /* how often allocations that were exported have been found to be freed */
    int32_t is_there;
} mpp_exported;

/* What this process has opened of another one's, for all its groups: the driver has one mapping per process. */
typedef struct mpp_imports mpp_imports;

/* These two return a CUresult. `exported`: of an address before, which saves the calls where both lie in one
 * allocation, or of none. */
int mpp_export(const copier *c, uintptr_t address, mpp_exported *exported);
int mpp_import(mpp_imports *imports, const mpp_exported *exported, uintptr_t *address);

/* By a group that reads from the process; NULL: no memory. The last one that lets go closes all. */
mpp_imports *mpp_hold_imports(const cuda_device *device, uint64_t process);
void mpp_let_go_of_imports(mpp_imports *imports);
/* What is being read is not closed: an operation counts itself while it copies, and for ever if it fails. */
void mpp_count_readers(mpp_imports *imports, int more);
