/* Memory of a device that other processes of the node read, by CUDA's IPC handles. */
#pragma once

#include "cuda/cuda_pool.h"

/* Where a tensor is, for another process. */
typedef struct mpp_exported {
    cuda_ipc_handle handle; /* of the allocation it lies in */
    uint64_t process;       /* whose that is: a number of its own on this node */
    uint64_t allocation;    /* its number, among all of that process */
    uint64_t base, bytes;   /* where it is there */
    uint64_t offset;        /* of the tensor in it */
    uint64_t freed;         /* how often allocations that were exported have been found to be freed */
    int32_t is_there;
} mpp_exported;

/* Of one operation, for those who may read. */
typedef struct {
    mpp_exported sample;
    uint64_t word; /* for the sample (below) */
    mpp_exported blocks[];
} mpp_export_list;

/* What this process has opened of another one's, for all its groups: the driver has one mapping per process. */
typedef struct mpp_imports mpp_imports;

/* These two return a CUresult. `exported`: of an address before, which saves the calls where both lie in one
 * allocation, or of none. */
int mpp_export(const copier *c, uintptr_t address, mpp_exported *exported);
int mpp_import(mpp_imports *imports, const mpp_exported *exported, uintptr_t *address);

/* Where an IOMMU or the driver breaks what devices read from each other, only the contents tell. So each process has a
 * sample for the others; NULL: it cannot be had. Who has one reads theirs: whether it comes right. Both under the
 * engine's lock, with a copier whose second stream has nothing to do; `word` is host memory that the device reaches. */
const mpp_exported *mpp_own_sample(const copier *c, uint64_t *word);
int mpp_reads_right(const copier *c, mpp_imports *imports, const mpp_exported *theirs, uint64_t *word);

/* By a group that reads from the process; NULL: no memory. The last one that lets go closes all. */
mpp_imports *mpp_hold_imports(const cuda_device *device, uint64_t process);
void mpp_let_go_of_imports(mpp_imports *imports);
/* What is being read is not closed: an operation counts itself while it copies, and for ever if it fails. */
void mpp_count_readers(mpp_imports *imports, int more);
