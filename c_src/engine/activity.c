#include "engine/activity.h"

#include <stdlib.h>
#include <string.h>

#include "engine/pause.h"

/* ---- the last calls of this process ---- */

typedef struct {
    uint64_t mask;
    mpp_record *records;
} record_list;

static _Atomic(record_list *) record_store;
static _Atomic uint64_t last_number;
static _Thread_local struct { /* the call that this thread makes */
    uint64_t number;          /* 0: it is not kept */
    int64_t begun;
    int kind, peer; /* kind: 0 before mpp_note, and after mpp_note_start */
    uint64_t bytes;
    uint64_t details;
} called;

/* Where the call of this number is kept, or another in its place; NULL: none is kept. */
static mpp_record *place_of(uint64_t number) {
    record_list *kept = atomic_load_explicit(&record_store, memory_order_acquire);
    return number && kept && !mpp_in_child() ? &kept->records[number & kept->mask] : NULL;
}

static mpp_record *record_of(uint64_t number) { /* NULL: it is not kept any more */
    mpp_record *r = place_of(number);
    return r && r->number == number ? r : NULL;
}

/* A ring takes the place of a shorter one, to which others may be writing: that is never freed. */
static int keep_at(mpp_record *records, uint64_t places) {
    record_list *kept = records ? malloc(sizeof *kept) : NULL;
    if (kept) *kept = (record_list){places - 1, records};
    if (kept) atomic_store(&record_store, kept);
    return kept != NULL;
}

uint64_t mpp_keep_records_at(uintptr_t where, uint64_t places) {
    return keep_at((mpp_record *)where, places) ? atomic_load(&last_number) + 1 : 0;
}

void mpp_keep_records(uint64_t count) {
    const record_list *kept = atomic_load(&record_store);
    uint64_t places = 1;
    while (places < 2 * count) places *= 2; /* calls that fail take a number too */
    if (!kept || kept->mask + 1 < places) keep_at(calloc((size_t)places, sizeof(mpp_record)), places);
}

uint64_t mpp_call_begins(int64_t now) {
    called.begun = now;
    called.number = atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1;
    mpp_record *r = place_of(called.number);
    if (r) *r = (mpp_record){.number = called.number, .begun = called.begun, .last = -1, .peer = -1};
    return called.number;
}

void mpp_call_returns(int is_complete) {
    mpp_record *r = record_of(called.number);
    if (is_complete && r && !r->complete) r->complete = now_ns(); /* it took no operation */
    memset(&called, 0, sizeof called); /* one that failed before it had an operation has left its kind */
}

void mpp_call_details(uint64_t details) { called.details = details; }

uint64_t mpp_called_details(void) { return called.details; }

void mpp_call_is(int kind, uint64_t sequence, int is_awaited) {
    mpp_record *r = record_of(called.number);
    if (!r) return;
    r->kind = kind;
    r->sequence = sequence;
    if (is_awaited) r->asked = r->begun;
}

void mpp_call_asked_for(uint64_t number) {
    mpp_record *r = record_of(number);
    if (r && !r->asked) r->asked = now_ns();
}

void mpp_note_message_order(mpp_group *g, int tag) {
    mpp_record *r = record_of(called.number);
    uint64_t order = ++g->messages;
    if (!r) return;
    r->sequence = order;
    r->tag = tag;
}

int mpp_record_of(uint64_t number, mpp_record *record) {
    const mpp_record *r = record_of(number);
    if (r) *record = *r;
    return r != NULL;
}

/* ---- the counters of a group ---- */

static void add_waiting(mpp_waiting *l, int64_t begun, int64_t until) {
    int64_t from = begun > l->until ? begun : l->until;
    if (until <= from) return;
    MPP_SET(l->ns, MPP_GET(l->ns) + until - from);
    l->until = until;
}

void mpp_time_op(mpp_op *op) {
    op->begun = called.begun ? called.begun : now_ns();
    op->record = called.number;
}

void mpp_note(int kind, uint64_t bytes, int peer) {
    if (called.kind) return;
    called.kind = kind;
    called.bytes = bytes;
    called.peer = peer;
}

void mpp_note_start(mpp_op *op) {
    mpp_activity *a = op->group->activity;
    mpp_note(MPP_ONE_SIDED, 0, -1);
    int kind = op->noted_as = called.kind;
    called.kind = 0;
    mpp_record *r = record_of(op->record);
    if (r) {
        r->bytes += called.bytes;
        r->peer = called.peer;
    }
    if (!a) return;
    MPP_SET(a->calls[kind], MPP_GET(a->calls[kind]) + 1);
    MPP_SET(a->bytes[kind], MPP_GET(a->bytes[kind]) + called.bytes);
    MPP_SET(a->kind, kind);
    MPP_SET(a->peer, called.peer);
    MPP_SET(a->length, called.bytes);
    MPP_SET(a->begun, op->begun);
    int others = MPP_GET(a->under_way);
    if (!others) MPP_SET(a->busy_since, op->begun > MPP_GET(a->ended) ? op->begun : MPP_GET(a->ended));
    MPP_SET(a->under_way, others + 1);
}

void mpp_note_hand_over(mpp_op *op) {
    mpp_activity *a = op->group->activity;
    if (a && op->noted_as) atomic_fetch_add_explicit(&a->hand_overs[op->noted_as], 1, memory_order_relaxed);
}

static void forget_missing(mpp_activity *a) {
    for (int r = 0; a->has_missing && r < a->group->size; r++) MPP_SET(a->of_rank[r].missing, 0);
    a->has_missing = 0;
}

void mpp_note_arrival(mpp_op *op, int rank, int64_t came) {
    mpp_activity *a = op->group->activity;
    mpp_record *r = record_of(op->record);
    if (r && came > r->last_came) {
        r->last_came = came;
        r->last = rank;
    }
    if (!a || rank == a->group->rank) return;
    add_waiting(&a->of_rank[rank].late, op->begun, came);
    add_waiting(&a->waited, op->begun, came);
    forget_missing(a);
}

void mpp_note_completion(mpp_op *op) {
    mpp_activity *a = op->group->activity;
    mpp_record *r = record_of(op->record);
    if (!op->noted_as || (!a && !r)) return;
    int64_t now = now_ns();
    if (r) r->complete = now;
    if (r && op->source >= 0) r->peer = op->source;
    if (!a) return;
    int left = MPP_GET(a->under_way) - 1;
    MPP_SET(a->ended, now);
    MPP_SET(a->under_way, left);
    if (!left) MPP_SET(a->in_calls, MPP_GET(a->in_calls) + now - MPP_GET(a->busy_since));
    forget_missing(a);
}

void mpp_note_missing(mpp_op *active, int64_t now) {
    for (mpp_op *op = active; op; op = op->next) {
        mpp_activity *a = op->noted_as ? op->group->activity : NULL;
        if (!a || a->looked == now || !op->arrived || mpp_is_closed(op->group)) continue;
        a->looked = now; /* for whom its later operations wait is seen when their turn comes */
        forget_missing(a);
        for (int r = 0; r < a->group->size; r++) {
            if (r == a->group->rank || op->arrived(op, r) != 0) continue;
            MPP_SET(a->of_rank[r].missing, 1);
            a->has_missing = 1;
            add_waiting(&a->of_rank[r].late, op->begun, now);
            add_waiting(&a->waited, op->begun, now);
        }
    }
}
