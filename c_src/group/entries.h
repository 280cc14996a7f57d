/* The engine as another extension of this package calls it: a table, whose address travels through Python as a number.
 * Below it nothing knows a Python object; above it (bridge.c) nothing knows MPI. The functions are shim.h's. */
#ifndef MPP_ENTRIES_H
#define MPP_ENTRIES_H

#include "shim.h"

typedef struct {
    size_t size; /* of this table: both extensions must be of one build */
    uintptr_t (*send)(uintptr_t, uintptr_t, size_t, int, int, uintptr_t, int64_t);
    uintptr_t (*recv)(uintptr_t, uintptr_t, size_t, int, int, uintptr_t, int64_t);
    uintptr_t (*exchange)(uintptr_t, const uintptr_t *, const size_t *, const uintptr_t *, const size_t *, int,
                          uintptr_t, int64_t);
    uintptr_t (*barrier)(uintptr_t, int64_t);
    uintptr_t (*broadcast)(uintptr_t, uintptr_t, size_t, int, uintptr_t, int64_t);
    uintptr_t (*allreduce)(uintptr_t, uintptr_t, uintptr_t, size_t, const mpp_reduction *, uintptr_t, int64_t);
    uintptr_t (*reduce_to)(uintptr_t, uintptr_t, uintptr_t, size_t, const mpp_reduction *, int, uintptr_t, int64_t);
    uintptr_t (*allgather)(uintptr_t, uintptr_t, uintptr_t, size_t, uintptr_t, int64_t);
    uintptr_t (*allgather_list)(uintptr_t, uintptr_t, const uintptr_t *, const size_t *, uintptr_t, int64_t);
    uintptr_t (*reduce_scatter)(uintptr_t, const uintptr_t *, uintptr_t, const size_t *, int, const mpp_reduction *,
                                uintptr_t, int64_t);
    int (*reduction_supported)(int dtype, int op);
    void (*claim)(uintptr_t);
    int (*watch)(uintptr_t, int hurry);
    int (*wait)(uintptr_t, int64_t);
} mpp_entries;

#endif
