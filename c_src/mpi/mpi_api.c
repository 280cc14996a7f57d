#define _GNU_SOURCE
#include "mpi/mpi_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

mpi_api mpp_mpi;

/* `path` names mpi4py's own extension module: looking symbols up through it finds the very MPI library
 * that mpi4py was linked to, whatever other MPI the process may have loaded. */
const char *mpp_load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!library) {
        const char *why = dlerror();
        return why ? why : "its module is not loaded";
    }
    void *symbol;
#define MPP_FIND(name, arguments)                                                                                      \
    symbol = dlsym(library, "MPI_" #name);                                                                             \
    if (!symbol) {                                                                                                     \
        dlclose(library);                                                                                              \
        return "the MPI library has no function MPI_" #name;                                                           \
    }                                                                                                                  \
    memcpy(&mpp_mpi.name, &symbol, sizeof symbol);
    MPP_MPI_FUNCTIONS(MPP_FIND)
#define MPP_MPI_COLLECTIVE MPP_FIND
#include "ops.def"
#undef MPP_FIND
    dlclose(library); /* mpi4py keeps it loaded to the end of the process */
    return NULL;
}

mpi_handle mpp_to_handle(int64_t value) {
#ifdef MPP_HANDLES_ARE_POINTERS
    return (mpi_handle)(intptr_t)value;
#else
    return (mpi_handle)value; /* MPICH's handles are 32 bits, often with the top one set */
#endif
}

int mpp_set_constant(const char *name, int index, int64_t value) {
    if (!strcmp(name, "BYTE")) mpp_mpi.byte = mpp_to_handle(value);
    else if (!strcmp(name, "REQUEST_NULL")) mpp_mpi.request_null = mpp_to_handle(value);
    else if (!strcmp(name, "IN_PLACE")) mpp_mpi.in_place = (void *)(intptr_t)value;
    else if (!strcmp(name, "COMM_WORLD")) mpp_mpi.world = mpp_to_handle(value);
    else if (!strcmp(name, "RANK")) mpp_mpi.rank = (int)value;
    else if (!strcmp(name, "ANY_SOURCE")) mpp_mpi.any_source = (int)value;
    else if (!strcmp(name, "status_source_offset")) mpp_mpi.status_source_offset = (int)value;
    else if (!strcmp(name, "datatype") && index >= 0 && index < 32) mpp_mpi.datatype[index] = mpp_to_handle(value);
    else if (!strcmp(name, "op") && index >= 0 && index < 16) mpp_mpi.op[index] = mpp_to_handle(value);
    else return -1;
    return 0;
}

/* ---- the end of the process ---- */

static pid_t owner;     /* the process that finalizes MPI; not a forked child of it, which would speak in its name */
static int ending_rank; /* who it is, where a failure of this process ends the job; else -1 */

void mpp_own_mpi(int own) { owner = own ? getpid() : 0; }
void mpp_end_job_on_failure(int rank) { ending_rank = rank; }

void mpp_abort(int status) {
    mpp_mpi.Abort(mpp_mpi.world, status);
    _exit(status); /* MPICH's Abort comes back where the launcher is slow to kill us */
}

static void end_job(int status) {
    const struct timespec moment = {.tv_nsec = 200000000}; /* a launcher may not forward what it has not read yet */
    fprintf(stderr, "mpiplus: rank %d ends the job: exit code %d, while others go on\n", ending_rank, status);
    fflush(NULL);
    nanosleep(&moment, NULL);
    mpp_abort(status);
}

static pthread_t finalizer;

/* A thread that was given up in a call of MPI's, as MPI_Comm_create_group, looks at what MPI_Finalize takes apart.
 * Python has ended, and the process will in a moment: that thread waits for it. */
static void hold_others(int number) {
    while (!pthread_equal(pthread_self(), finalizer)) pause();
    signal(number, SIG_DFL); /* then the same instruction fails again */
}

/* After Python's end, whose exit code nobody knows before: it may come from sys.exit, from a SystemExit, or be Python's
 * own. A rank that leaves with an error while others wait for it would hang itself in MPI_Finalize. */
static void at_exit(int status, void *unused) {
    (void)unused;
    int finalized = 0;
    if (getpid() != owner) return;
    mpp_mpi.Finalized(&finalized);
    if (finalized) return;
    if (status && ending_rank >= 0) end_job(status);
    finalizer = pthread_self();
    signal(SIGSEGV, hold_others);
    mpp_mpi.Finalize();
}

#ifndef __GLIBC__
static void at_some_exit(void) { at_exit(0, NULL); }
#endif

int mpp_finalize_at_exit(void) {
    ending_rank = -1;
#ifdef __GLIBC__
    return on_exit(at_exit, NULL);
#else
    return atexit(at_some_exit);
#endif
}
