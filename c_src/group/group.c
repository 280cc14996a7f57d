/* Groups: made, aborted, closed and released. Their parts belong to the layers below. */
#define _GNU_SOURCE
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "engine/activity.h"
#include "internode/internode.h"
#include "p2p/message_op.h"

uintptr_t mpp_map(int descriptor, size_t bytes) {
    int how = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, how, descriptor, 0);
    return memory == MAP_FAILED ? 0 : (uintptr_t)memory;
}

void mpp_unmap(uintptr_t address, size_t bytes) { munmap((void *)address, bytes); }

static void release(mpp_group *group) {
    if (group->activity) {
        mpp_group_hide((uintptr_t)group); /* nobody reads of it any more */
        free(group->activity->about);
        free(group->activity);
    }
    mpp_channel_free(group->channel);
    free(group);
}

uintptr_t mpp_group_new(int64_t communicator, int rank, int size, int first_tag, int tag_count, int yield_early) {
    mpp_group *group = calloc(1, sizeof *group);
    if (!group) return 0;
    group->comm = mpp_to_handle(communicator);
    group->rank = rank;
    group->size = size;
    group->first_tag = first_tag;
    group->tag_count = tag_count;
    group->yield_early = yield_early;
    group->spins = yield_early ? MPP_SPINS_CROWDED : MPP_SPINS_MEMORY;
    group->holders = 1;
    group->release = release;
    return (uintptr_t)group;
}

void mpp_group_tags_from(uintptr_t group, int tag) { ((mpp_group *)group)->tags_from = tag; }

/* Of a group on several nodes, `segment` is this node's, and `node_of` has the number of every rank's node; else NULL.
 * `sums`: MPP_SUMS_USUAL ... MPP_SUMS_NARROW. */
int mpp_group_attach(uintptr_t group, uintptr_t segment, int slots, size_t slot_bytes, const int *node_of, int sums) {
    mpp_group *g = (mpp_group *)group;
    int reproducible = sums == MPP_SUMS_REPRODUCIBLE;
    mpp_topology *topology = node_of ? mpp_topology_new(g->size, g->rank, node_of, reproducible) : NULL;
    if (node_of && !topology) return -1;
    if (topology) topology->narrow_sums = sums == MPP_SUMS_NARROW;
    mpp_channel *c = mpp_channel_new(g, segment, slots, slot_bytes, topology);
    if (!c) return -1;
    if (topology && !mpp_internode_attach(g, c)) {
        mpp_channel_free(c);
        return -1;
    }
    if (topology && !g->yield_early) g->spins = MPP_SPINS_NETWORK;
    g->channel = c;
    mpp_attach_bell(g);
    return 0;
}

void mpp_group_widen(uintptr_t handle, size_t length) { mpp_channel_widen(((mpp_group *)handle)->channel, length); }

size_t mpp_group_wide(uintptr_t handle) {
    const mpp_channel *c = ((mpp_group *)handle)->channel;
    return c && c->wide && !c->registered ? mpp_wide_bytes(c->size, c->ring, c->slot_bytes) : 0;
}

void mpp_group_limit(uintptr_t handle, int limit, int64_t bytes) {
    ((mpp_group *)handle)->channel->limits[limit] = bytes;
}

int64_t mpp_group_piggybacks(uintptr_t handle, int kind) {
    const mpp_topology *t = ((mpp_group *)handle)->channel->topology;
    if (kind == MPP_ALL_GATHER) return MPP_PAYLOAD;
    return MPP_WHOLE_PAYLOAD / (kind != MPP_BROADCAST && t && !t->regular ? t->parts : 1);
}

int64_t mpp_group_active(uintptr_t handle) { return atomic_load(&((mpp_group *)handle)->active) & (MPP_CLOSED - 1); }

int mpp_group_holders(uintptr_t handle) { return atomic_load(&((mpp_group *)handle)->holders); }

/* Memory of this rank's own, beside the segment: what the group has taken, and what it will take later. */
void mpp_group_bytes(uintptr_t handle, size_t *taken, size_t *later) {
    mpp_group *g = (mpp_group *)handle;
    *taken = *later = 0;
    if (g->channel) mpp_channel_bytes(g->channel, (size_t)g->size, taken, later);
    *taken += malloc_usable_size(g);
}

void mpp_group_gave_up(uintptr_t handle) {
    mpp_group *g = (mpp_group *)handle;
    if (g->channel && !mpp_is_closed(g)) mpp_peers_leave(g->channel);
}

/* Frees whoever waits. Operations that nobody else touches the buffers of fail, here or at their next step;
 * those that MPI has begun stay active until MPI lets go of them. */
void mpp_group_abort(uintptr_t handle) {
    mpp_group *g = (mpp_group *)handle;
    mpp_lock();
    atomic_store(&g->aborted, 1);
    mpp_group_gave_up(handle);
    if (g->channel) mpp_abort_second(g->channel);
    mpp_cancel_all(g);
    mpp_wake_sleepers();
    mpp_unlock();
}

void mpp_group_fail(uintptr_t handle, int error) {
    mpp_group *g = (mpp_group *)handle;
    if (g->tell && !mpp_is_closed(g)) g->tell(g, MPP_FAILURE_CUDA, error);
    mpp_group_abort(handle);
}

/* The group's communicator and segment are not touched any more. Refuses (-1) while an operation is active, as MPI or
 * a neighbour may still touch its buffers; and while a window is open. */
int mpp_group_close(uintptr_t handle) {
    int64_t none = 0;
    if (mpp_windows_end((mpp_group *)handle)) return -1;
    mpp_lock();
    int closed = atomic_compare_exchange_strong(&((mpp_group *)handle)->active, &none, MPP_CLOSED);
    if (closed) mpp_forget_bell((mpp_group *)handle);
    mpp_unlock();
    if (closed) mpp_bus_close(((mpp_group *)handle)->channel);
    return closed || none >= MPP_CLOSED ? 0 : -1;
}

/* Nobody will use the handle any more. The memory goes with the last of the group's operations. */
void mpp_group_release(uintptr_t handle) { mpp_group_unref((mpp_group *)handle); }
