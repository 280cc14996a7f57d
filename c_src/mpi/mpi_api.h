/* The MPI functions and constants the shim uses, without an MPI header.
 *
 * The two handle families differ only in what a handle is: an int (MPICH and its relatives) or a
 * pointer (Open MPI, the MPI-5 standard ABI). This file is compiled once for each; the functions are
 * found at run time in the library that mpi4py has loaded, and every constant comes from mpi4py.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef MPP_HANDLES_ARE_POINTERS
typedef void *mpi_handle;
#else
typedef int mpi_handle;
#endif

/* Large enough for every MPI_Status known (20 to 32 bytes); runtime.py refuses a larger one. */
typedef union {
    unsigned char bytes[64];
    int64_t align;
} mpi_status;

/* X(name, arguments); all return an int. ops.def has the collectives. */
#define MPP_MPI_FUNCTIONS(X)                                                                                           \
    X(Isend, (const void *, int, mpi_handle, int, int, mpi_handle, mpi_handle *))                                      \
    X(Irecv, (void *, int, mpi_handle, int, int, mpi_handle, mpi_handle *))                                            \
    X(Cancel, (mpi_handle *))                                                                                          \
    X(Improbe, (int, int, mpi_handle, int *, mpi_handle *, mpi_status *))                                              \
    X(Iprobe, (int, int, mpi_handle, int *, mpi_status *))                                                             \
    X(Imrecv, (void *, int, mpi_handle, mpi_handle *, mpi_handle *))                                                   \
    X(Test, (mpi_handle *, int *, mpi_status *))                                                                       \
    X(Get_count, (const mpi_status *, mpi_handle, int *))                                                              \
    X(Finalized, (int *))                                                                                              \
    X(Finalize, (void))                                                                                                \
    X(Abort, (mpi_handle, int))

typedef struct {
#define MPP_MEMBER(name, arguments) int(*name) arguments;
    MPP_MPI_FUNCTIONS(MPP_MEMBER)
#define MPP_MPI_COLLECTIVE MPP_MEMBER
#include "ops.def"
#undef MPP_MEMBER
    /* Constants, set through mpp_set_constant. */
    mpi_handle byte;
    mpi_handle request_null;
    mpi_handle world;
    int rank; /* there */
    void *in_place;
    int any_source;
    int status_source_offset;
    mpi_handle datatype[32]; /* indexed by enum mpp_dtype; only the types MPI reduces are set */
    mpi_handle op[16];       /* indexed by enum mpp_redop */
} mpi_api;

extern mpi_api mpp_mpi;

void mpp_abort(int status); /* of all ranks; does not come back */

mpi_handle mpp_to_handle(int64_t value);
