/* How an operation makes calls of MPI's nonblocking collectives; those are in collectives/. */
#pragma once

#include "arith/mpi_representation.h"
#include "shm/shm.h"

typedef struct mpi_collective mpi_collective;

struct mpi_collective {
    mpp_op op;
    mpi_collective *later; /* in group->issuing */
    int (*issue)(mpi_collective *);
    void (*finish)(mpi_collective *); /* may be NULL */
    mpi_handle request;
    int kind, place; /* enum mpp_call_kind, enum mpp_place: for the comparison of calls */
    int agreed;      /* all ranks call the same, or nobody compares */
    int active;      /* a call of MPI's is under way */
    size_t index, calls;
    const char *in;
    char *out;
    size_t total, per_call, element; /* elements, elements, bytes */
    size_t stride;                   /* bytes of every lane that one call takes */
    int out_lane;
    int root;
    mpp_reduction how;
    int mpi_dtype;
    char *scratch, *scratch_out;
    uintptr_t *in_list;
    size_t *counts;
    int *parts; /* of unequal blocks what a call takes of each, for MPI */
};

/* Whether this rank gets a result of a collective. */
static inline int mpp_gets(const mpp_group *g, int kind, int root) {
    if (kind == MPP_EXSCAN) return g->rank > 0;
    return root < 0 || (root == g->rank) != (kind == MPP_BROADCAST);
}

/* What a call takes of so many elements. */
static inline size_t mpp_part_of(const mpi_collective *c, size_t total) {
    size_t begin = c->index * c->per_call;
    if (begin >= total) return 0;
    return total - begin < c->per_call ? total - begin : c->per_call;
}

/* ---- one call after the other ---- */

mpi_collective *mpp_new_collective(mpp_group *g, int kind, int (*issue)(mpi_collective *), uintptr_t staging);
uintptr_t mpp_no_collective(mpi_collective *c, mpp_group *g);
uintptr_t mpp_enqueue(mpi_collective *c, int64_t wait_ns);
void mpp_split(mpi_collective *c, size_t total, size_t per_call);

/* ---- reductions, with the conversions of arith/mpi_representation.h ---- */

/* Elements are converted in pieces of about this size: small enough to stay in the cache. */
enum { MPP_SCRATCH_BYTES = 1 << 20 };

mpi_handle mpp_mpi_op_of(const mpp_reduction *how);
/* Fills in the reduction; whether the elements have to be converted before MPI sees them. */
int mpp_set_reduction(mpi_collective *c, const mpp_reduction *how);
int mpp_new_scratch(mpi_collective *c, size_t elements);
/* After a call: what is in the scratch memory, or where it belongs, to its final form. */
void mpp_finish_reduction(mpi_collective *c);
