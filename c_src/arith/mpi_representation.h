/* How a reduction is represented for MPI: by a type and an operation that every MPI library computes right, and the
 * same on every rank.
 *
 * MPI has no bfloat16, fp16 or fp8: they become float32. Two more conversions work around the libraries:
 *  - SUM and PROD of 8- and 16-bit integers become those of 32-bit ones: Open MPI 5 saturates
 *    the short ones, where torch wraps;
 *  - MIN and MAX of floats become those of integers in the same order: the libraries drop a NaN or keep it depending on
 *    the operand that holds it, so the ranks' results may differ.
 */
#pragma once

#include "arith/reduce.h"

int mpp_mpi_dtype(const mpp_reduction *r);
int mpp_mpi_op(const mpp_reduction *r);

/* Converts elements, and applies premul. `out` and `src` must not overlap. */
void mpp_to_mpi(const mpp_reduction *r, void *out, const void *src, size_t count);

/* Applies the divisor, rounds once and converts back. Overwrites `values`, which may be `dst` where MPI's type is the
 * elements' own. */
void mpp_from_mpi(const mpp_reduction *r, void *dst, void *values, size_t count);
