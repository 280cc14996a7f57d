/* The shared-memory collectives and the engine's threads, with every rank in one process, for the sanitizers.
 *
 * A sanitizer sees one process only, so in a real job it cannot see that two ranks touch a slot at the same
 * time. Here each rank is a copy of the shim of its own (loaded from a file of its own, so with a lock, a list
 * and a progress thread of its own), and all copies work on one segment: what orders the ranks' accesses is
 * then nothing but the counters in that segment, as between processes.
 *
 * Each rank runs four threads: two users, each on a group of its own, the progress thread, and a consumer of
 * mpp_next_completed, which stands for Python's.
 *
 * Usage: shared_memory_ranks TURNS SHIM_OF_RANK_0 SHIM_OF_RANK_1 ...
 * Ends with 0 if all results were right; findings are the sanitizer's to report.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shim.h"

enum { MAX_RANKS = 8, USERS = 2, SLOTS = 4, SLOT_BYTES = 4096, MOST = 5000, SECONDS = 240 };
#define PATIENCE_NS ((int64_t)SECONDS * 1000000000)

/* The operands of one of the user's calls, and blocks among them. */
#define OPERANDS(of_root, ...) (&(const mpp_operands){.of = u->group, .root = of_root, __VA_ARGS__})
#define BLOCKS(way, addresses, sizes) .way##s = addresses, .way##_sizes = sizes

/* clang-format off */
#define SHIM_FUNCTIONS(X) \
    X(mpp_engine_start) X(mpp_engine_stop) X(mpp_next_completed) X(mpp_active_count) X(mpp_group_new) \
    X(mpp_group_attach) X(mpp_group_limit) X(mpp_group_abort) X(mpp_group_close) X(mpp_group_release) X(mpp_segment_size) \
    X(mpp_barrier) X(mpp_broadcast) X(mpp_allreduce) X(mpp_reduce_to) X(mpp_allgather) X(mpp_reduce_scatter) X(mpp_wait) \
    X(mpp_state_of) X(mpp_notify_on_completion) X(mpp_arrived) X(mpp_failure_of) X(mpp_release)
/* clang-format on */

typedef struct {
#define MEMBER(name) __typeof__(&name) name;
    SHIM_FUNCTIONS(MEMBER)
#undef MEMBER
    pthread_mutex_t lock;
    pthread_cond_t reported;
    uintptr_t last[USERS]; /* the handle that each user waits for, 0 once the consumer has seen it */
    int over;
} shim;

typedef struct {
    int rank, index;
    uintptr_t group;
    unsigned dice; /* the same on all ranks: which operation, how many elements */
    unsigned own;  /* differs: how to wait */
    float in[MOST], out[MAX_RANKS * MOST];
} user;

static int size, turns;
static shim shims[MAX_RANKS];
static pthread_barrier_t everybody;
static _Atomic int wrong;

static unsigned next(unsigned *state) { return *state = *state * 1103515245u + 12345u, *state >> 16; }

static void check(int ok, const char *what, const user *u, size_t count) {
    if (ok || wrong++ > 20) return;
    fprintf(stderr, "wrong: %s of %zu elements, rank %d, user %d\n", what, count, u->rank, u->index);
}

static void load(shim *s, const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
#define FIND(name)                                                                                                     \
    *(void **)&s->name = dlsym(library, #name);                                                                        \
    if (!s->name) {                                                                                                    \
        fprintf(stderr, "%s has no " #name "\n", path);                                                                \
        exit(2);                                                                                                       \
    }
    SHIM_FUNCTIONS(FIND)
#undef FIND
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->reported, NULL);
}

static void *consume(void *argument) {
    shim *s = argument;
    for (;;) {
        uintptr_t op;
        int state, count = s->mpp_next_completed(&op, &state, 1, 20000000);
        pthread_mutex_lock(&s->lock);
        for (int i = 0; i < USERS; i++)
            if (count && s->last[i] == op) s->last[i] = 0;
        if (count) pthread_cond_broadcast(&s->reported);
        int over = s->over;
        pthread_mutex_unlock(&s->lock);
        if (over) return NULL;
    }
}

/* Leaves the operation to the background and sleeps until the consumer has seen it. */
static void wait_in_background(shim *s, user *u, uintptr_t op) {
    pthread_mutex_lock(&s->lock);
    s->last[u->index] = op;
    if (!s->mpp_notify_on_completion(op, 1)) s->last[u->index] = 0;
    while (s->last[u->index]) pthread_cond_wait(&s->reported, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static int wait_somehow(shim *s, user *u, uintptr_t op, int how) {
    if (how == 1) wait_in_background(s, u, op);
    else if (how == 2)
        while ((s->mpp_state_of(op) & 3) == MPP_PENDING) usleep(50);
    else
        while ((s->mpp_wait(op, 1000000) & 3) == MPP_PENDING) {}
    return s->mpp_state_of(op) & 3;
}

static void finish(shim *s, user *u, uintptr_t op, int how) {
    if (!op) return;
    check(wait_somehow(s, u, op, how) == MPP_DONE, "state", u, 0);
    check(s->mpp_arrived(op, u->rank) == 2, "arrival", u, 0); /* and through */
    s->mpp_release(op);
}

/* One operation; what rank r contributes to element i is r + i (mod 7) + 1, so sums are exact. */
static float contribution(int rank, size_t i) { return (float)(rank + (int)(i % 7) + 1); }

static float sum_of_all(size_t i) {
    float sum = 0;
    for (int r = 0; r < size; r++) sum += contribution(r, i);
    return sum;
}

static void fill(user *u, float *where, size_t count) {
    for (size_t i = 0; i < count; i++) where[i] = contribution(u->rank, i);
}

static void one_turn(shim *s, user *u) {
    static const size_t counts[] = {0, 1, 5, 1024, 2051, MOST};
    const mpp_reduction sum = {.dtype = MPP_F32, .op = MPP_SUM, .divisor = 1};
    int what = (int)(next(&u->dice) % 7), root = (int)(next(&u->dice) % (unsigned)size);
    size_t n = counts[next(&u->dice) % 6], bytes = n * sizeof(float);
    int how = (int)(next(&u->own) % 4); /* 3: synchronously */
    int64_t wait_ns = how == 3 ? PATIENCE_NS : 0;
    uintptr_t in = (uintptr_t)u->in, out = (uintptr_t)u->out, list[MAX_RANKS];
    size_t lengths[MAX_RANKS], longest = n;
    fill(u, u->in, n);
    switch (what) {
    case 0: finish(s, u, s->mpp_barrier(OPERANDS(-1, .wait_ns = wait_ns)), how); break;
    case 1:
        finish(s, u, s->mpp_broadcast(OPERANDS(root, .input = in, .output = in, .count = bytes, .wait_ns = wait_ns)),
               how);
        for (size_t i = 0; i < n; i++) check(u->in[i] == contribution(root, i), "broadcast", u, n);
        break;
    case 2: /* in place */
        finish(s, u,
               s->mpp_allreduce(OPERANDS(-1, .input = in, .output = in, .count = n, .how = &sum, .wait_ns = wait_ns)),
               how);
        for (size_t i = 0; i < n; i++) check(u->in[i] == sum_of_all(i), "all_reduce", u, n);
        break;
    case 3:
        finish(
            s, u,
            s->mpp_reduce_to(OPERANDS(root, .input = in, .output = out, .count = n, .how = &sum, .wait_ns = wait_ns)),
            how);
        for (size_t i = 0; i < n && u->rank == root; i++) check(u->out[i] == sum_of_all(i), "reduce", u, n);
        break;
    case 4:
        for (int r = 0; r < size; r++) {
            list[r] = out + (size_t)r * bytes;
            lengths[r] = bytes;
        }
        finish(
            s, u,
            s->mpp_allgather(OPERANDS(-1, .input = in, BLOCKS(output, list, lengths), .flat = 1, .wait_ns = wait_ns)),
            how);
        for (size_t i = 0; i < n * (size_t)size; i++)
            check(u->out[i] == contribution((int)(i / n), i % n), "all_gather", u, n);
        break;
    case 5: /* uneven: rank r gives n / (r + 1) elements */
        for (int r = 0; r < size; r++) {
            list[r] = (uintptr_t)(u->out + (size_t)r * MOST);
            lengths[r] = n / (size_t)(r + 1) * sizeof(float);
        }
        finish(s, u, s->mpp_allgather(OPERANDS(-1, .input = in, BLOCKS(output, list, lengths), .wait_ns = wait_ns)),
               how);
        for (int r = 0; r < size; r++)
            for (size_t i = 0; i < n / (size_t)(r + 1); i++)
                check(u->out[(size_t)r * MOST + i] == contribution(r, i), "uneven all_gather", u, n);
        break;
    case 6:
        longest = n / (size_t)size;
        for (int r = 0; r < size; r++) {
            lengths[r] = longest / (size_t)(r + 1);
            list[r] = (uintptr_t)u->in;
        }
        finish(s, u,
               s->mpp_reduce_scatter(
                   OPERANDS(-1, .output = out, BLOCKS(input, list, lengths), .how = &sum, .wait_ns = wait_ns)),
               how);
        for (size_t i = 0; i < lengths[u->rank]; i++) check(u->out[i] == sum_of_all(i), "reduce_scatter", u, n);
        break;
    }
}

/* Several operations begun before the first is waited for, the last one first. */
static void in_flight(shim *s, user *u) {
    const mpp_reduction sum = {.dtype = MPP_F32, .op = MPP_SUM, .divisor = 1};
    enum { BEGUN = 5 };
    uintptr_t ops[BEGUN];
    size_t part = MOST / BEGUN;
    for (int k = 0; k < BEGUN; k++) {
        fill(u, u->in + k * part, part);
        uintptr_t at = (uintptr_t)(u->in + k * part);
        ops[k] = s->mpp_allreduce(OPERANDS(-1, .input = at, .output = at, .count = part, .how = &sum));
    }
    for (int k = BEGUN - 1; k >= 0; k--) finish(s, u, ops[k], (int)(next(&u->own) % 3));
    for (size_t i = 0; i < MOST; i++) check(u->in[i] == sum_of_all(i % part), "all_reduce in flight", u, part);
}

/* Ranks that call different operations all learn of it, and the group goes on. */
static void mismatched(shim *s, user *u) {
    const mpp_reduction sum = {.dtype = MPP_F32, .op = MPP_SUM, .divisor = 1};
    int error, how = (int)(next(&u->own) % 3);
    int64_t other, signature;
    uintptr_t in = (uintptr_t)u->in, out = (uintptr_t)u->out;
    if (size == 1) return;
    fill(u, u->in, MOST);
    uintptr_t op, list[MAX_RANKS];
    size_t counts[MAX_RANKS];
    for (int r = 0; r < size; r++) {
        list[r] = in;
        counts[r] = 512 + 512 * (size_t)(r == u->rank);
    }
    if (next(&u->dice) % 2)
        op = s->mpp_reduce_scatter(OPERANDS(-1, .output = out, BLOCKS(input, list, counts), .how = &sum));
    else if (u->rank) op = s->mpp_allreduce(OPERANDS(-1, .input = in, .output = out, .count = MOST, .how = &sum));
    else op = s->mpp_broadcast(OPERANDS(0, .input = in, .output = in, .count = 8));
    uintptr_t later = s->mpp_allreduce(OPERANDS(-1, .input = in, .output = in, .count = 5, .how = &sum));
    check(wait_somehow(s, u, op, how) == MPP_FAILED, "a mismatch", u, 0);
    check(s->mpp_failure_of(op, &error, &other, &signature) == MPP_FAILURE_MISMATCH, "its reason", u, 0);
    s->mpp_release(op);
    finish(s, u, later, how);
    for (size_t i = 0; i < 5; i++) check(u->in[i] == sum_of_all(i), "all_reduce after a mismatch", u, 5);
}

static void *abort_soon(void *argument) {
    user *u = argument;
    usleep(2000);
    shims[u->rank].mpp_group_abort(u->group);
    return NULL;
}

/* Rank 0 waits alone until its group is aborted, which ends its operation; the others have seen it come. */
static void aborted(shim *s, user *u) {
    uintptr_t op = 0;
    pthread_t helper;
    if (u->rank == 0 && size > 1) {
        int state, error;
        int64_t first, second;
        op = s->mpp_barrier(OPERANDS(-1, ));
        check(s->mpp_group_close(u->group) == -1, "closing a busy group", u, 0);
        pthread_create(&helper, NULL, abort_soon, u);
        while ((state = s->mpp_wait(op, 1000000) & 3) == MPP_PENDING) {}
        check(state == MPP_ABORTED || state == MPP_FAILED, "abort", u, 0);
        pthread_join(helper, NULL);
        while ((state = s->mpp_state_of(op) & 3) == MPP_PENDING) {}
        check(state == MPP_FAILED, "end of an aborted operation", u, 0);
        check(s->mpp_failure_of(op, &error, &first, &second) == MPP_FAILURE_CANCELLED, "reason", u, 0);
        s->mpp_release(op);
    }
    pthread_barrier_wait(&everybody);
    if (!op) finish(s, u, s->mpp_barrier(OPERANDS(-1, )), 2);
}

static void *use(void *argument) {
    user *u = argument;
    shim *s = &shims[u->rank];
    for (int turn = 0; turn < turns; turn++) one_turn(s, u);
    in_flight(s, u);
    for (int turn = 0; turn < 10; turn++) mismatched(s, u);
    pthread_barrier_wait(&everybody);
    if (u->index == 0) aborted(s, u);
    else pthread_barrier_wait(&everybody);
    return NULL;
}

static user *new_user(int rank, int index, void *segment) {
    user *u = calloc(1, sizeof *u);
    shim *s = &shims[rank];
    u->rank = rank;
    u->index = index;
    u->dice = 17u + (unsigned)index;
    u->own = 1000u + (unsigned)(rank * USERS + index);
    u->group = s->mpp_group_new(0, rank, size, 1000, 1000, 1);
    if (s->mpp_group_attach(u->group, (uintptr_t)segment, SLOTS, SLOT_BYTES, NULL, 0)) abort();
    if (size > 2) s->mpp_group_limit(u->group, MPP_ONE_PHASE, 2 * SLOT_BYTES);
    return u;
}

int main(int argc, char **argv) {
    if (argc < 3 || argc - 2 > MAX_RANKS) return 2;
    turns = atoi(argv[1]);
    size = argc - 2;
    alarm(SECONDS); /* a deadlock ends the run with SIGALRM */
    pthread_barrier_init(&everybody, NULL, (unsigned)(size * USERS));
    pthread_t consumers[MAX_RANKS], threads[MAX_RANKS * USERS];
    user *users[MAX_RANKS * USERS];
    void *segments[USERS];
    for (int r = 0; r < size; r++) load(&shims[r], argv[2 + r]);
    for (int i = 0; i < USERS; i++) {
        size_t length = shims[0].mpp_segment_size(size, size, SLOTS, SLOT_BYTES);
        segments[i] = aligned_alloc(4096, (length + 4095) / 4096 * 4096);
        memset(segments[i], 0, length);
    }
    for (int r = 0; r < size; r++) {
        if (shims[r].mpp_engine_start()) abort();
        pthread_create(&consumers[r], NULL, consume, &shims[r]);
        for (int i = 0; i < USERS; i++) users[r * USERS + i] = new_user(r, i, segments[i]);
    }
    for (int t = 0; t < size * USERS; t++) pthread_create(&threads[t], NULL, use, users[t]);
    for (int t = 0; t < size * USERS; t++) pthread_join(threads[t], NULL);
    for (int r = 0; r < size; r++) {
        shim *s = &shims[r];
        pthread_mutex_lock(&s->lock);
        s->over = 1;
        pthread_mutex_unlock(&s->lock);
        pthread_join(consumers[r], NULL);
        s->mpp_engine_stop();
        if (s->mpp_active_count()) wrong++;
    }
    for (int t = 0; t < size * USERS; t++) {
        if (shims[users[t]->rank].mpp_group_close(users[t]->group)) wrong++;
        shims[users[t]->rank].mpp_group_release(users[t]->group);
        free(users[t]);
    }
    for (int i = 0; i < USERS; i++) free(segments[i]);
    printf("shared_memory_ranks: %d ranks, %d turns on each of %d groups, %d wrong\n", size, turns, USERS, (int)wrong);
    return wrong != 0;
}
