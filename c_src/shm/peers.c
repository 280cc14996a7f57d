/* CUDA tensors of a group on one node, read from one device by another, or by another process on the same.
 *
 * Each rank says where its tensor is (cuda/ipc.h), and the others copy from there what they want. Such an operation has
 * two chunks. With the first one the calls are compared, and all know what the others have exported; that it has come
 * from the device means that the tensor is complete there. A rank publishes the second one when it has read all it
 * wants, and is done when all have: nobody may change a tensor that another one is still reading.
 *
 * A rank that gives up, as at a deadline, says so before its caller may change the tensor. Who has read from it since
 * waits on, until its own deadline.
 *
 * Whether a rank can read another one's memory, and gets what is there, is tried with the first tensors that both have
 * on the bus. All see what each of them can do in the calls, and decide alike: one that cannot takes all there (bus.c).
 */
#include <stdlib.h>

#include "engine/activity.h"
#include "shm/shm.h"

enum { UNKNOWN, READABLE, CLOSED };

struct mpp_peer {
    _Atomic int state;
    mpp_imports *imports;
};

int mpp_peers_new(mpp_channel *c) {
    c->peers = calloc((size_t)c->size, sizeof *c->peers);
    return c->peers != NULL;
}

static int is_readable(const mpp_channel *c, int rank) { return rank == c->rank || c->peers[rank].state == READABLE; }

int mpp_is_worth_reading(const mpp_channel *c, uint64_t bytes) { return bytes > (uint64_t)c->limits[MPP_BUS]; }

static int can_take_part(const shm_op *s, const mpp_channel *c) {
    return s->bus && s->bus->shows_memory && s->bus->copier->device == c->registered;
}

/* Of one block for all ranks (`lengths`: NULL), or one for each of the others. */
static int shows_blocks(const shm_op *s) { return s->in_list != NULL; }

/* A CUresult. */
static int show(shm_op *s, const uintptr_t *blocks, const size_t *lengths) {
    const mpp_group *g = s->op.group;
    mpp_exported *all = calloc(lengths ? (size_t)g->size : 1, sizeof *all), last = {0};
    int error = all ? CUDA_OK : CUDA_OUT_OF_MEMORY;
    for (int r = 0; r < (lengths ? g->size : 1) && !error; r++) {
        if (lengths ? !lengths[r] || r == g->rank : !blocks[r]) continue;
        error = mpp_export(s->bus->copier, blocks[r], &last);
        all[r] = last;
    }
    if (last.is_there) s->bus->exported = all;
    else free(all);
    return error;
}

void mpp_introduce(shm_op *s, const uintptr_t *blocks, const size_t *lengths) {
    const mpp_channel *c = s->op.group->channel;
    int unknown = 0;
    for (int r = 0; can_take_part(s, c) && r < c->size; r++) unknown |= r != c->rank && c->peers[r].state == UNKNOWN;
    if (unknown) show(s, blocks, lengths);
}

void mpp_offer(shm_op *s, const uintptr_t *blocks, const size_t *lengths, uint64_t bytes, const size_t *wanted) {
    const mpp_channel *c = s->op.group->channel;
    int readable = 1;
    if (!can_take_part(s, c) || !mpp_is_worth_reading(c, bytes) || show(s, blocks, lengths)) return;
    for (int r = 0; r < c->size; r++)
        if (wanted ? wanted[r] > 0 : s->element || r == s->root) readable &= is_readable(c, r);
    if (readable) s->place = MPP_BETWEEN_DEVICES;
}

void mpp_show(shm_op *s, uintptr_t block) {
    int error = show(s, &block, NULL);
    if (error && !s->bus->error) s->bus->error = error;
}

int mpp_reads_all(const mpp_channel *c) {
    int readable = 1;
    for (int r = 0; r < c->size; r++) readable &= is_readable(c, r);
    return readable;
}

/* ---- under the lock ---- */

/* What a rank shows: in the wide slot of the first chunk, which itself is in a slot of the usual length. */
static mpp_export_list *exports_of(const shm_op *s, const mpp_channel *c, int rank) {
    uint64_t place = (uint64_t)rank * (uint64_t)c->ring + s->first % (uint64_t)c->ring;
    return (mpp_export_list *)(c->wide + place * c->slot_bytes * c->widening);
}

static const mpp_exported *exported_by(const shm_op *s, const mpp_channel *c, int rank, int reader) {
    return &exports_of(s, c, rank)->blocks[shows_blocks(s) ? reader : 0];
}

void mpp_write_exports(const shm_op *s, const mpp_channel *c) {
    static const mpp_exported none;
    mpp_export_list *mine = exports_of(s, c, c->rank);
    for (int r = 0; r < (shows_blocks(s) ? c->size : 1); r++)
        mine->blocks[r] = s->bus->exported ? s->bus->exported[r] : none;
    mine->sample = none;
    if (!can_take_part(s, c) || s->bus->error) return;
    s->bus->is_busy[MPP_UP] = !c->registered->sample; /* should its copies take too long to wait for */
    const mpp_exported *sample = mpp_own_sample(s->bus->copier, &mine->word);
    if (sample) mine->sample = *sample;
}

void mpp_look_for_peers(shm_op *s, mpp_channel *c) {
    for (int r = 0; can_take_part(s, c) && r < c->size; r++) {
        int place = mpp_call_of(s, c, r)->place;
        const mpp_exported *theirs = exported_by(s, c, r, c->rank), *sample = &exports_of(s, c, r)->sample;
        int is_tried = place >= MPP_ON_BUS && theirs->is_there && sample->is_there && c->peers[r].state == UNKNOWN;
        uintptr_t address;
        if (r == c->rank || !is_tried || !exports_of(s, c, c->rank)->sample.is_there) continue;
        mpp_imports *imports = c->peers[r].imports = mpp_hold_imports(c->registered, theirs->process);
        int is_readable = imports && !mpp_import(imports, theirs, &address);
        s->bus->is_busy[MPP_UP] = 1;
        is_readable = is_readable && mpp_reads_right(s->bus->copier, imports, sample, &exports_of(s, c, c->rank)->word);
        c->peers[r].state = is_readable ? READABLE : CLOSED;
    }
}

void mpp_pull_from(shm_op *s, int rank, size_t offset, uintptr_t to, size_t bytes) {
    const mpp_channel *c = s->op.group->channel;
    uintptr_t address;
    if (!bytes) return;
    int error = mpp_import(c->peers[rank].imports, exported_by(s, c, rank, c->rank), &address);
    if (!error) mpp_copy_in_device(s->bus, MPP_UP, to, address + offset, bytes);
    else if (!s->bus->error) s->bus->error = error;
}

int mpp_has_pulled(shm_op *s) { return s->done && mpp_bus_has_come_to(s->bus, &s->op, MPP_UP, 0, 1); }

/* Before it has finished this one: who has, and then left, did so when all had read. */
static int has_anyone_left(const shm_op *s, const mpp_channel *c) {
    for (int r = 0; r < c->size; r++)
        if (atomic_load_explicit(&c->counters[r].has_left, memory_order_acquire) &&
            atomic_load_explicit(&c->counters[r].out, memory_order_acquire) < s->first + s->chunks)
            return 1;
    return 0;
}

static void count_readers(const mpp_channel *c, int more) {
    for (int r = 0; r < c->size; r++)
        if (c->peers[r].imports) mpp_count_readers(c->peers[r].imports, more);
}

int mpp_pull(shm_op *s, mpp_channel *c, int (*may_read)(shm_op *, mpp_channel *, uint64_t)) {
    if (!may_read(s, c, s->first + s->done)) return 0;
    if (s->done) return !has_anyone_left(s, c);
    if (s->pull) s->pull(s);
    count_readers(c, 1); /* not before: what was freed is closed where nobody reads, this operation included */
    return 1;
}

void mpp_peers_end(shm_op *s, mpp_channel *c, int state) {
    if (state == MPP_FAILED) mpp_peers_leave(c);
    /* Copies that may still be under way, as after an error of the driver's, are counted for ever. */
    if (state == MPP_DONE || mpp_has_pulled(s)) count_readers(c, -1);
}

void mpp_peers_leave(mpp_channel *c) { atomic_store_explicit(&c->counters[c->rank].has_left, 1, memory_order_release); }

void mpp_peers_close(mpp_channel *c) {
    for (int r = 0; c->registered && r < c->size; r++)
        if (c->peers[r].imports) mpp_let_go_of_imports(c->peers[r].imports);
    free(c->peers);
    c->peers = NULL;
}
