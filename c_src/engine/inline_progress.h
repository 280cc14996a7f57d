/* Whether an asynchronous call moves its data itself before it returns, or leaves that to the background.
 *
 * Where a core is idle, the progress thread moves the data while the caller computes. Where none is, it must take the
 * core from the computation, gets it late, and pays for each wake-up; then the caller polls for as long as the data
 * needs, and the operation is usually complete when the call returns. Ranks need not agree: what one does at once
 * another may leave to its background.
 *
 * Thread safety: the functions below are called under the engine's lock. */
#ifndef MPP_INLINE_PROGRESS_H
#define MPP_INLINE_PROGRESS_H

#include <stddef.h>
#include <stdint.h>

#include "shim.h"

enum { MPP_INLINE_STALL_NS = 1000000 };

/* How many ns an asynchronous call of a group is to poll for; 0: not at all. `background`: CPU time of the progress
 * thread. */
int64_t mpp_inline_ns_now(mpp_inline *group, size_t bytes, int64_t (*background)(void));

#endif
