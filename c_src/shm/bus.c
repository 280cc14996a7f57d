/* CUDA tensors of a group on one node: the device copies between them and the slots, and no processor does.
 *
 * For that the segment is registered with the driver, when the first CUDA tensor comes, by each rank for itself. A slot
 * is filled and emptied by copies that take their time: a rank has published a chunk as written, or as read, when the
 * device says so, and lets it work on as many chunks as the ring has slots. The others see no difference.
 *
 * A round of all ranks takes the device some 30 us, in which the bus moves over a megabyte. So chunks that any rank has
 * on the bus are longer from the second one on, which all ranks know from the comparison of the calls, and have slots
 * of their own. These lie behind the others, and are no memory before somebody registers them. A sum is two-phase then:
 * its parts are reduced where they lie, and go from there to the devices.
 *
 * Where the driver refuses, the rank has its tensors staged (cuda/staging.h), and chunks stay as they are.
 */
#include "shm/shm.h"

enum { WIDE_LIMIT = 64 << 20, WIDE_SLOT = 1 << 20 };

static pthread_mutex_t registering = PTHREAD_MUTEX_INITIALIZER; /* the driver blocks: not the engine's */

static size_t widening_of(int ranks, int slots, size_t slot_bytes) {
    size_t most = WIDE_LIMIT / ((size_t)ranks * (size_t)slots * slot_bytes);
    return slot_bytes * most < WIDE_SLOT ? most : WIDE_SLOT / slot_bytes;
}

size_t mpp_wide_bytes(int ranks, int slots, size_t slot_bytes) {
    size_t widening = widening_of(ranks, slots, slot_bytes), wide = slot_bytes * widening;
    int fits = sizeof(mpp_export_list) + (size_t)ranks * sizeof(mpp_exported) <= wide;
    return widening > 1 && fits ? (size_t)ranks * (size_t)slots * wide : 0;
}

void mpp_channel_widen(mpp_channel *c, size_t length) {
    size_t wide = mpp_wide_bytes(c->size, c->ring, c->slot_bytes);
    c->widening = widening_of(c->size, c->ring, c->slot_bytes);
    c->length = length;
    if (wide && length >= (size_t)(c->recv_buffer - (char *)c->counters) + wide)
        c->wide = (char *)c->counters + length - wide;
}

static int is_registered(mpp_channel *c, const mpp_staging *t) {
    pthread_mutex_lock(&registering);
    if (!c->registered && !c->refused) {
        c->refused = mpp_peers_new(c) ? mpp_register_memory(t->copier, c->counters, c->length) : -1;
        if (!c->refused) c->registered = t->copier->device;
    }
    pthread_mutex_unlock(&registering);
    return c->registered != NULL;
}

int mpp_place_of(mpp_group *g, uintptr_t staging) {
    mpp_channel *c = g->channel;
    if (!staging) return MPP_ON_HOST;
    int fits = c->wide && c->size > 1 && c->ring <= MPP_SLOTS && mpp_through_host(staging);
    return fits && is_registered(c, (const mpp_staging *)staging) ? MPP_ON_BUS : MPP_STAGED;
}

void mpp_bus_close(mpp_channel *c) {
    if (!c) return;
    mpp_peers_close(c);
    if (c->registered) mpp_unregister_memory(c->registered, c->counters);
    c->registered = NULL;
}

/* ---- under the lock ---- */

int mpp_bus_load(shm_op *s, mpp_channel *c, int (*may_write)(shm_op *, mpp_channel *, uint64_t)) {
    if (s->between_devices && s->written) return mpp_has_pulled(s);
    if (!s->written && !s->bus->is_ordered[MPP_DOWN]) mpp_write_exports(s, c);
    if (s->bus->exported && !s->bus->is_ordered[MPP_DOWN]) mpp_bus_begin(s->bus);
    if (!s->write) return mpp_bus_has_come_to(s->bus, &s->op, MPP_DOWN, 0, 1);
    while (s->loading < s->chunks && s->loading < s->written + MPP_SLOTS && may_write(s, c, s->first + s->loading)) {
        s->write(s, s->loading, mpp_slot_at(s, c->rank, s->loading));
        if (++s->loading < s->chunks) mpp_bus_mark(s->bus, MPP_DOWN, s->loading - 1);
    }
    return s->loading > s->written &&
           mpp_bus_has_come_to(s->bus, &s->op, MPP_DOWN, s->written, s->written + 1 == s->chunks);
}

int mpp_bus_store(shm_op *s, mpp_channel *c, int (*may_read)(shm_op *, mpp_channel *, uint64_t)) {
    if (s->between_devices) return mpp_pull(s, c, may_read);
    if (!s->read) return may_read(s, c, s->first + s->done);
    while (s->storing < s->written && s->storing < s->done + MPP_SLOTS && may_read(s, c, s->first + s->storing)) {
        s->read(s, s->storing);
        if (++s->storing < s->chunks) mpp_bus_mark(s->bus, MPP_UP, s->storing - 1);
    }
    return s->storing > s->done && mpp_bus_has_come_to(s->bus, &s->op, MPP_UP, s->done, s->done + 1 == s->chunks);
}
