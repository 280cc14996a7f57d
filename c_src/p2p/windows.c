/* Windows: a tensor of one rank that others write to (put), and signals between ranks that say when it is written.
 *
 * Signals are counted in memory of the rank that they go to, a counter for each kind and sender. Who has that memory
 * mapped, and the tensor's with it, writes to both itself. All others send messages, of which the receiving rank's
 * listener takes care whatever that rank does: a notice, and after the notice of a put its data, under a second tag.
 * What comes from one rank is done in its order, so who sees a signal sees all that the same rank has put before.
 *
 * Not MPI's own windows: MPI_Put and MPI_Win_flush may block until the other side calls MPI, have no nonblocking form,
 * and would hold the engine's lock meanwhile.
 */
#include <stdlib.h>
#include <string.h>

#include "p2p/message_op.h"

typedef struct mpp_window mpp_window;
typedef struct incoming incoming;
typedef struct waiting waiting;
typedef _Atomic uint64_t counter;

enum { PUT = -1, KINDS = 2 }; /* Python numbers the kinds of signals from 0 */
enum { MOST_INCOMING = 64 };

/* What a message says. */
typedef struct {
    int64_t window, kind;
    uint64_t offset, bytes;
} notice;

struct mpp_window {
    mpp_window *next; /* in group->windows */
    mpp_group *group;
    int64_t number;
    size_t bytes;
    int listens, closed;
    waiting *waits;  /* in program order */
    uint64_t *taken; /* of the signals to this rank: as many have been waited for */
    struct {
        char *memory;
        counter *counters;
    } reached[]; /* of each rank, where this process can write itself; NULL where it cannot */
};

static counter *counter_of(const mpp_window *w, int of, int kind, int from) {
    return &w->reached[of].counters[kind * w->group->size + from];
}

/* ---- messages: the sender ---- */

static int notice_tag(const mpp_group *g) { return g->first_tag + g->tag_count; }
static int data_tag(const mpp_group *g) { return notice_tag(g) + 1; }

/* `data`: of a put. */
static uintptr_t send(mpp_group *g, notice head, uintptr_t data, int peer, int64_t wait_ns) {
    message_op *m = mpp_new_message_op(g, 1 + mpp_chunks_of(head.bytes), notice_tag(g), 0);
    notice *kept = m ? malloc(sizeof *kept) : NULL;
    if (!kept) {
        if (m) mpp_discard(&m->op);
        return mpp_out_of_memory(g, 0);
    }
    *kept = head;
    mpp_lock();
    mpp_add_message(m, (uintptr_t)kept, sizeof *kept, peer, MPP_TO_SEND);
    m->transfers[0].spill = (char *)kept; /* which goes with it */
    m->tag = data_tag(g);
    if (head.bytes && !m->op.failure) mpp_add_message(m, data, head.bytes, peer, MPP_TO_SEND);
    mpp_unlock();
    return mpp_start(&m->op, wait_ns);
}

uintptr_t mpp_put(const mpp_operands *o) {
    const mpp_window *w = (mpp_window *)o->of;
    const notice head = {.window = w->number, .kind = PUT, .offset = o->offset, .bytes = o->count};
    char *memory = w->reached[o->peer].memory;
    if (!memory && o->count) return send(w->group, head, o->input, o->peer, o->wait_ns);
    if (o->count) memmove(memory + o->offset, (const void *)o->input, o->count);
    return 0;
}

uintptr_t mpp_signal(const mpp_operands *o) {
    const mpp_window *w = (mpp_window *)o->of;
    const notice head = {.window = w->number, .kind = o->tag};
    if (!w->reached[o->peer].counters) return send(w->group, head, 0, o->peer, o->wait_ns);
    atomic_fetch_add_explicit(counter_of(w, o->peer, o->tag, w->group->rank), 1, memory_order_release);
    return 0;
}

/* ---- messages: the listener ---- */

struct incoming {
    incoming *next; /* in the order they came */
    int source, understood;
    mpp_message message; /* the notice, then the pieces of a put's data */
    notice head;
    mpp_window *window; /* of a put that is understood: the listener writes there */
    size_t done;
    char *spill; /* where data goes that no window wants */
};

/* Active while a window needs it, and not counted among the group's operations. */
struct mpp_listener {
    mpp_op op;
    int users, count;
    incoming *first;
    incoming *spare; /* for the next one: a message that is matched must have a place */
};

static void take_notice(mpp_listener *l) {
    mpp_match match;
    if (!l->spare) l->spare = calloc(1, sizeof *l->spare);
    if (!l->spare) return; /* then later */
    int found, error = mpp_probe(l->op.group, mpp_mpi.any_source, notice_tag(l->op.group), &match, &found);
    if (error) mpp_fail(&l->op, MPP_FAILURE_MPI, error);
    if (error || !found) return;
    incoming *in = l->spare;
    in->source = match.source;
    mpp_receive(&l->op, &in->message, &match, &in->head, sizeof in->head);
    if (in->message.state != MPP_ACTIVE) return; /* failed: there is no next one */
    l->spare = NULL;
    *MPP_END_OF(l->first, next) = in;
    l->count++;
}

static mpp_window *find_window(const mpp_group *g, int64_t number) {
    mpp_window *w = g->windows;
    while (w && w->number != number) w = w->next;
    return w;
}

static void understand(const mpp_listener *l, incoming *in) {
    mpp_window *w = find_window(l->op.group, in->head.window);
    in->understood = 1;
    if (!w) return;
    if (in->head.kind == PUT) {
        if (in->head.offset <= w->bytes && in->head.bytes <= w->bytes - in->head.offset) in->window = w;
    } else if (in->head.kind >= 0 && in->head.kind < KINDS) {
        counter *count = counter_of(w, w->group->rank, (int)in->head.kind, in->source);
        atomic_fetch_add_explicit(count, 1, memory_order_release);
    }
}

static char *memory_of(const mpp_window *w) { return w->reached[w->group->rank].memory; }

static char *place_for(incoming *in, size_t bytes) {
    if (in->window && bytes <= in->head.bytes - in->done) return memory_of(in->window) + in->head.offset + in->done;
    free(in->spill);
    in->spill = malloc(bytes + 1);
    return in->spill;
}

/* The next piece of a put's data; 0 if there is none yet. */
static int take_piece(mpp_listener *l, incoming *in) {
    mpp_match match;
    int found, error = mpp_probe(l->op.group, in->source, data_tag(l->op.group), &match, &found);
    if (error) return mpp_fail(&l->op, MPP_FAILURE_MPI, error), 0;
    if (!found) return 0;
    char *target = place_for(in, (size_t)match.length);
    if (!target) return mpp_fail(&l->op, MPP_FAILURE_MEMORY, 0), 0;
    mpp_receive(&l->op, &in->message, &match, target, match.length);
    if (in->message.state != MPP_ACTIVE) return 0;
    in->done += (size_t)match.length;
    return 1;
}

/* Whether all of it is over. */
static int advance(mpp_listener *l, incoming *in) {
    for (;;) {
        int state = mpp_test_message(&l->op, &in->message);
        if (state != MPP_DONE) return state == MPP_FAILED;
        if (!in->understood) understand(l, in);
        if (in->head.kind != PUT || in->done >= in->head.bytes) return 1;
        if (!take_piece(l, in)) return l->op.failure != 0;
    }
}

static int is_behind(const mpp_listener *l, const incoming *in) {
    for (const incoming *earlier = l->first; earlier != in; earlier = earlier->next)
        if (earlier->source == in->source) return 1;
    return 0;
}

/* After an error of MPI nothing more is taken, as nobody knows what it belongs to; those who wait are told. */
static int listen_step(mpp_op *op) {
    mpp_listener *l = (mpp_listener *)op;
    if (l->users && !op->failure && l->count < MOST_INCOMING) take_notice(l);
    for (incoming **at = &l->first; *at;) {
        incoming *in = *at;
        if (is_behind(l, in) || !advance(l, in)) {
            at = &in->next;
            continue;
        }
        *at = in->next;
        l->count--;
        free(in->spill);
        free(in);
    }
    return l->users || l->first ? MPP_PENDING : MPP_DONE;
}

static void discard_spare(mpp_op *op) { free(((mpp_listener *)op)->spare); }

static int is_over(const mpp_listener *l) { return atomic_load(&l->op.state) != MPP_PENDING; }

/* From now on what others send to this window is taken; 0 if that could be begun. Threads may do so at once. */
int mpp_window_listen(uintptr_t window) {
    mpp_window *w = (mpp_window *)window;
    mpp_group *g = w->group;
    mpp_listener *l = mpp_new_op(sizeof *l, g, listen_step, 0), *unused = l;
    if (!l) return -1;
    mpp_no_longer_active(&l->op); /* which counts whatever goes on */
    l->op.discard = discard_spare;
    mpp_lock();
    int is_new = !g->listener || is_over(g->listener);
    if (is_new) {
        unused = g->listener;
        g->listener = l;
    }
    g->listener->users++;
    w->listens = 1;
    mpp_unlock();
    if (unused) mpp_discard(&unused->op);
    if (is_new) mpp_start(&l->op, 0);
    return 0;
}

int mpp_windows_failed(uintptr_t handle) {
    const mpp_group *g = ((mpp_op *)handle)->group;
    if (!g) return 0; /* there was no memory for the operation */
    mpp_lock();
    const mpp_listener *l = g->listener;
    int failed = l && l->op.failure;
    mpp_unlock();
    return failed;
}

int mpp_windows_end(mpp_group *g) {
    if (g->windows) return -1;
    if (!g->listener) return 0;
    if (mpp_state_of((uintptr_t)g->listener) == MPP_PENDING) return -1;
    mpp_lock(); /* any thread may ask whether it has failed */
    mpp_listener *old = g->listener;
    g->listener = NULL;
    mpp_unlock();
    mpp_discard(&old->op);
    return 0;
}

/* ---- waiting for a signal ---- */

struct waiting {
    mpp_op op;
    mpp_window *window;
    waiting *later; /* in window->waits */
    int peer, kind;
};

static void leave(waiting *m) {
    MPP_TAKE_OUT(m->window->waits, later, m);
    m->window = NULL;
}

static void cancel(mpp_op *op) {
    waiting *m = (waiting *)op;
    if (!m->window) return;
    leave(m);
    mpp_fail(op, MPP_FAILURE_CANCELLED, 0);
}

/* Signals are taken in the order in which they are waited for. */
static int wait_step(mpp_op *op) {
    waiting *m = (waiting *)op;
    mpp_window *w = m->window;
    if (w && w->closed) cancel(op);
    if (op->failure) return MPP_FAILED;
    for (const waiting *earlier = w->waits; earlier != m; earlier = earlier->later)
        if (earlier->peer == m->peer && earlier->kind == m->kind) return MPP_PENDING;
    uint64_t *taken = &w->taken[m->kind * w->group->size + m->peer];
    const counter *count = counter_of(w, w->group->rank, m->kind, m->peer);
    if (atomic_load_explicit(count, memory_order_acquire) > *taken) {
        ++*taken;
        leave(m);
        return MPP_DONE;
    }
    const mpp_listener *l = w->group->listener;
    if (!w->listens || !l->op.failure || w->reached[m->peer].counters) return MPP_PENDING;
    leave(m);
    return mpp_fail(op, l->op.failure, l->op.mpi_error);
}

/* A signal that nobody waits for any more is only a number: nothing is left of a wait that is given up. */
static int arrived(mpp_op *op, int rank) { return rank == op->group->rank; }

uintptr_t mpp_wait_signal(const mpp_operands *o) {
    mpp_window *w = (mpp_window *)o->of;
    waiting *m = mpp_new_op(sizeof *m, w->group, wait_step, 0);
    if (!m) return mpp_out_of_memory(w->group, 0);
    m->window = w;
    m->peer = o->peer;
    m->kind = o->tag;
    m->op.cancel = cancel;
    m->op.arrived = arrived;
    m->op.in_short = 1;
    mpp_lock();
    *MPP_END_OF(w->waits, later) = m;
    mpp_unlock();
    return mpp_start(&m->op, o->wait_ns);
}

/* ---- life ---- */

size_t mpp_counters_size(int size) { return KINDS * (size_t)size * sizeof(counter); }

/* `counters` are zeros, as many as mpp_counters_size says. Both memories must outlive the window. */
uintptr_t mpp_window_new(uintptr_t group, int64_t number, uintptr_t memory, size_t bytes, uintptr_t counters) {
    mpp_group *g = (mpp_group *)group;
    mpp_window *w = calloc(1, sizeof *w + (size_t)g->size * (sizeof *w->reached + KINDS * sizeof *w->taken));
    if (!w) return 0;
    w->group = g;
    w->number = number;
    w->bytes = bytes;
    w->taken = (uint64_t *)&w->reached[g->size];
    mpp_window_reach((uintptr_t)w, g->rank, memory, counters);
    mpp_lock();
    w->next = g->windows;
    g->windows = w;
    mpp_unlock();
    return (uintptr_t)w;
}

void mpp_window_reach(uintptr_t window, int rank, uintptr_t memory, uintptr_t counters) {
    mpp_window *w = (mpp_window *)window;
    w->reached[rank].memory = (char *)memory;
    w->reached[rank].counters = (counter *)counters;
}

/* Nothing more comes in, and who waits for a signal fails. Refuses (-1) while MPI writes a put to it. */
int mpp_window_close(uintptr_t window) {
    mpp_window *w = (mpp_window *)window;
    if (w->closed) return 0;
    if (w->listens) mpp_state_of((uintptr_t)w->group->listener); /* at the end of the process nobody else polls */
    mpp_lock();
    for (incoming *in = w->listens ? w->group->listener->first : NULL; in; in = in->next) {
        if (in->window != w) continue;
        mpp_unlock();
        return -1;
    }
    w->closed = 1;
    while (w->waits) cancel(&w->waits->op);
    MPP_TAKE_OUT(w->group->windows, next, w);
    if (w->listens) w->group->listener->users--;
    mpp_unlock();
    return 0;
}

/* Nobody will use the handle of a closed window any more. */
void mpp_window_release(uintptr_t window) { free((mpp_window *)window); }
