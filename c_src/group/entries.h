/* The functions of shim.h that the other extension of this package calls: a table, whose address travels through Python
 * as a number. Below it no file knows a Python object; above it (python/) none knows MPI. */
#pragma once

#include "shim.h"

/* Those that start nothing. */
#define MPP_ENTRIES(X)                                                                                                 \
    X(reduction_supported)                                                                                             \
    X(notify_on_completion) X(wait) X(call_begins) X(call_returns) X(call_is) X(call_asked_for) X(call_details)

typedef struct {
    size_t size; /* of this table: both extensions must be of one build */
#define MPP_MEMBER(name, ...) __typeof__(mpp_##name) *name;
#define MPP_OPERATION MPP_MEMBER
#include "ops.def"
    MPP_ENTRIES(MPP_MEMBER)
#undef MPP_MEMBER
} mpp_entries;
