/* Operations on the memory of a CUDA device.
 *
 * A *staging* belongs to one operation and stands between it and device memory. The operation's buffers are its
 * *lanes*; all are walked at the same offset, in *pieces*. Each piece of all lanes lives in a *slot* of pinned host
 * memory while the operation works on it: copied there from the device before (lanes to be loaded), and back to the
 * device after (lanes to be stored). A ring of a few slots per operation lets the copies of some pieces overlap with
 * the communication of another. A ring shared by operations would deadlock where two ranks use two groups in
 * opposite order: each operation would hold what the other one needs.
 *
 * The operation stays one operation: the same MPI calls, chunk numbers and signature as on host memory, begun in
 * program order. All that is added is a gate: it asks mpp_stage_open before it touches the piece at an offset, and
 * says with mpp_stage_close that it is done with everything before an offset. Neither waits for the device.
 *
 * A staging is *direct* where MPI itself reads and writes device memory. Then its one piece is the lanes themselves,
 * and only the gate is left: MPI knows no streams, so nothing may be handed to it before the device is done with
 * what the user queued before the operation.
 *
 * A staging is *on the bus* where the operation itself has the device copy from and to shared memory that is registered
 * with the driver (shm/bus.c). It has no memory either, and no gate.
 *
 * Stream order: the copies wait for an event on the user's stream, recorded when the operation was called. An
 * operation is complete only when its last copy is, so that whoever saw it complete may use the result on any stream.
 */
#pragma once

#include "cuda/ipc.h"
#include "engine/engine.h"

enum { MPP_LOAD = 1, MPP_STORE = 2 }; /* what the operation reads, what it writes */
enum { MPP_DOWN, MPP_UP };            /* from the device, to it */

typedef struct {
    uintptr_t device;
    size_t bytes;
    int direction;
} mpp_lane;

struct mpp_staging {
    mpp_owned owned;       /* first: the engine gives it back */
    int (*step)(mpp_op *); /* the operation's own; the engine calls the staging's, which calls this */
    cuda_stream users;     /* where the operation comes after what is there, when it is begun */
    int loads_there;       /* its one piece comes by that stream as well */
    int state;             /* what that said at last, while copies are still under way */
    int error;             /* of the first CUDA call that failed */
    int may_withdraw;      /* the others have not heard of the call: an error ends it alone */
    int direct, on_bus;
    int shows_memory;              /* other ranks may read the buffers where they are */
    mpp_exported *exported;        /* of an operation on the bus: the memory that others may read, peers.c; or NULL */
    int entered;                   /* the caller's thread has entered the device until its call has begun, or is over */
    int is_ordered[2], is_busy[2]; /* by MPP_DOWN, MPP_UP: the stream waits for the user's; has something to do */
    copier *copier;                /* streams and events */
    mpp_lane *lanes;
    int lane_count, lane_capacity, reads; /* whether any lane is to be loaded */
    size_t longest, piece, pieces;        /* bytes, bytes, their number */
    size_t begun, opened, closed;         /* pieces: copying from the device begun; let in; given back */
    size_t slots, slot_bytes;
    char *pinned;
    size_t pinned_bytes;
    uintptr_t *where; /* [slot][lane]: the piece of that lane in that slot */
};

/* ---- when an operation is made, on the caller's thread, without the engine's lock ---- */

/* The most bytes that one MPI call takes, without a staging (NULL) or with one. It is the same on all ranks: they agree
 * on which operations are on CUDA tensors, and on whether those go directly. */
size_t mpp_call_limit(uintptr_t staging);
size_t mpp_staged_limit(void); /* of one whose data goes through host memory */

/* Whether the operation's data goes through host memory: not where there is no staging, nor where it is direct. */
static inline int mpp_through_host(uintptr_t staging) { return staging && !((const mpp_staging *)staging)->direct; }

/* Adds a buffer and returns its number; numbers count from 0. */
int mpp_add_lane(mpp_op *op, uintptr_t device, size_t bytes, int direction);

/* A good size for pieces, where one must be a multiple of `unit`. */
size_t mpp_piece_size(size_t unit, int lanes);

/* All lanes are there: gets memory for pieces of `piece` bytes of each (0: one piece for everything), and begins to
 * copy. Failure shows at the gate. */
void mpp_stage_begin(mpp_op *op, size_t piece);

/* Copies within the device, before the operation is complete, behind what is copied in that direction; `bytes` may be
 * 0.
 */
void mpp_copy_in_device(mpp_staging *t, int direction, uintptr_t to, uintptr_t from, size_t bytes);

/* In place of mpp_stage_begin: the operation copies by itself, with the functions below. */
void mpp_stage_on_bus(mpp_op *op);

void mpp_staging_free(mpp_staging *t);

/* ---- under the engine's lock ---- */

/* Whether the piece at `offset` may be read and written. If it never will be, the operation has got a failure, and
 * its group is aborted, unless it may be withdrawn: the others cannot be given data that this rank could not read. */
int mpp_stage_open(mpp_op *op, size_t offset);

/* Everything before `offset` has its final value. */
void mpp_stage_close(mpp_staging *t, size_t offset);

/* On the bus. Down is from the device to host memory; a mark is where copies have come to that were begun in one
 * direction; after the last copy the stream itself is one. `op`, which may be a part of the staging's, gets the
 * failure. */
void mpp_bus_copy(mpp_staging *t, int direction, uintptr_t to, uintptr_t from, size_t bytes);
/* Down: nothing has come before what the user had queued, even if there is nothing to copy. */
void mpp_bus_begin(mpp_staging *t);
void mpp_bus_mark(mpp_staging *t, int direction, uint64_t number);
int mpp_bus_has_come_to(mpp_staging *t, mpp_op *op, int direction, uint64_t number, int is_last);

/* Where the byte at `offset` of a lane is, once the gate was open for it. */
static inline char *mpp_staged(const mpp_staging *t, int lane, size_t offset) {
    size_t slot = offset / t->piece % t->slots;
    return (char *)t->where[slot * (size_t)t->lane_count + (size_t)lane] + offset % t->piece;
}

/* The same for a buffer that is in host memory itself where there is no staging. */
static inline char *mpp_host_at(const mpp_staging *t, int lane, const void *buffer, size_t offset) {
    return t ? mpp_staged(t, lane, offset) : (char *)buffer + offset;
}
