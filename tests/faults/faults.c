/* Linked into the shim by build.py: the n-th allocation, or the n-th call of MPI's, fails.
 *
 * The linker's --wrap sends the shim's own calls of malloc, calloc, realloc and dlsym here; nobody else's. A call of
 * MPI's that fails is not made, but for MPI_Test: an error of that one ends the request, so it really must have ended.
 * Of MPI_Test and MPI_Improbe only those count that find something: how many find nothing, nobody can say.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi_api.h"

enum { ALLOCATION, CALL_OF_MPI, KINDS };

#define VISIBLE __attribute__((visibility("default")))

enum { NOTED = 4096 };

static _Atomic long left[KINDS], calls[KINDS], failed;
static void *_Atomic wanted;
static void *sites[KINDS][NOTED];
static int error_code;

/* The `number`-th from now on fails, of those from `site` if that is not NULL; 0: none. `code`: MPI's error for it. */
VISIBLE void faults_arm(int kind, long number, void *site, int code) {
    error_code = code;
    atomic_store(&wanted, site);
    atomic_store(&failed, 0);
    for (int k = 0; k < KINDS; k++) {
        atomic_store(&left[k], k == kind ? number : 0);
        atomic_store(&calls[k], 0);
    }
}

VISIBLE long faults_happened(void) { return atomic_load(&failed); }

/* Where the calls since faults_arm came from; how many there are. */
VISIBLE long faults_sites(int kind, void **to) {
    long count = atomic_load(&calls[kind]);
    if (count > NOTED) count = NOTED;
    memcpy(to, sites[kind], (size_t)count * sizeof *to);
    return count;
}

static int fails(int kind, void *site) {
    long call = atomic_fetch_add(&calls[kind], 1);
    if (call < NOTED) sites[kind][call] = site;
    if (atomic_load(&wanted) && atomic_load(&wanted) != site) return 0;
    if (atomic_load(&left[kind]) <= 0 || atomic_fetch_sub(&left[kind], 1) != 1) return 0;
    atomic_fetch_add(&failed, 1);
    return 1;
}

/* Where the call came from that a replacement answers. */
#define SITE __builtin_return_address(0)

/* ---- memory ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__wrap_malloc(size_t bytes) { return fails(ALLOCATION, SITE) ? NULL : __real_malloc(bytes); }
void *__wrap_calloc(size_t count, size_t bytes) { return fails(ALLOCATION, SITE) ? NULL : __real_calloc(count, bytes); }
void *__wrap_realloc(void *old, size_t bytes) { return fails(ALLOCATION, SITE) ? NULL : __real_realloc(old, bytes); }

/* ---- MPI ---- */

static mpi_api real;
static int (*real_Iprobe)(int, int, mpi_handle, int *, mpi_status *);

static int failing_Test(mpi_handle *request, int *flag, mpi_status *status) {
    int error = real.Test(request, flag, status);
    return !error && *flag && fails(CALL_OF_MPI, SITE) ? error_code : error;
}

static int failing_Improbe(int source, int tag, mpi_handle comm, int *flag, mpi_handle *message, mpi_status *status) {
    int error = real_Iprobe(source, tag, comm, flag, status);
    if (error || !*flag) return error;
    return fails(CALL_OF_MPI, SITE) ? error_code : real.Improbe(source, tag, comm, flag, message, status);
}

/* X(name, parameters, arguments) */
#define FUNCTIONS(X)                                                                                                   \
    X(Isend, (const void *b, int n, mpi_handle t, int r, int g, mpi_handle c, mpi_handle *q), (b, n, t, r, g, c, q))   \
    X(Irecv, (void *b, int n, mpi_handle t, int r, int g, mpi_handle c, mpi_handle *q), (b, n, t, r, g, c, q))         \
    X(Imrecv, (void *b, int n, mpi_handle t, mpi_handle *m, mpi_handle *q), (b, n, t, m, q))                           \
    X(Get_count, (const mpi_status *s, mpi_handle t, int *n), (s, t, n))                                               \
    X(Ibarrier, (mpi_handle c, mpi_handle * q), (c, q))                                                                \
    X(Ibcast, (void *b, int n, mpi_handle t, int r, mpi_handle c, mpi_handle *q), (b, n, t, r, c, q))                  \
    X(Iallreduce, (const void *i, void *o, int n, mpi_handle t, mpi_handle p, mpi_handle c, mpi_handle *q),            \
      (i, o, n, t, p, c, q))                                                                                           \
    X(Ireduce, (const void *i, void *o, int n, mpi_handle t, mpi_handle p, int r, mpi_handle c, mpi_handle *q),        \
      (i, o, n, t, p, r, c, q))                                                                                        \
    X(Iallgather, (const void *i, int n, mpi_handle t, void *o, int m, mpi_handle u, mpi_handle c, mpi_handle *q),     \
      (i, n, t, o, m, u, c, q))                                                                                        \
    X(Ireduce_scatter,                                                                                                 \
      (const void *i, void *o, const int *n, mpi_handle t, mpi_handle p, mpi_handle c, mpi_handle *q),                 \
      (i, o, n, t, p, c, q))                                                                                           \
    X(Ireduce_scatter_block, (const void *i, void *o, int n, mpi_handle t, mpi_handle p, mpi_handle c, mpi_handle *q), \
      (i, o, n, t, p, c, q))

#define DEFINE(name, parameters, arguments)                                                                            \
    static int failing_##name parameters { return fails(CALL_OF_MPI, SITE) ? error_code : real.name arguments; }
FUNCTIONS(DEFINE)

void *__real_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name) {
    void *found = __real_dlsym(library, name);
#define REPLACE(function, parameters, arguments)                                                                       \
    if (found && !strcmp(name, "MPI_" #function)) {                                                                    \
        int(*replacement) parameters = failing_##function;                                                             \
        memcpy(&real.function, &found, sizeof found);                                                                  \
        memcpy(&found, &replacement, sizeof found);                                                                    \
        return found;                                                                                                  \
    }
    FUNCTIONS(REPLACE)
    REPLACE(Test, (mpi_handle *, int *, mpi_status *), )
    if (!real_Iprobe)
        real_Iprobe = (int (*)(int, int, mpi_handle, int *, mpi_status *))__real_dlsym(library, "MPI_Iprobe");
    REPLACE(Improbe, (int, int, mpi_handle, int *, mpi_handle *, mpi_status *), )
    return found;
}
