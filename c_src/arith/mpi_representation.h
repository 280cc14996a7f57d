/* The form in which a reduction is handed to MPI: a type and an operation that every MPI library computes
 * right, and the same on every rank.
 *
 * MPI has no bfloat16, fp16 or fp8: they travel as float32. Two more forms work around what libraries do:
 *  - SUM and PROD of 8- and 16-bit integers travel as 32-bit ones: Open MPI 5 adds the short ones with
 *    instructions that saturate, where torch wraps;
 *  - MIN and MAX of floats travel as integers in the same order: the libraries compare floats in a way that
 *    drops a NaN or keeps it depending on which operand it is, so the ranks' results may differ.
 */
#ifndef MPP_WIRE_H
#define MPP_WIRE_H

#include "arith/reduce.h"

int mpp_wire_dtype(const mpp_reduction *r);
int mpp_wire_op(const mpp_reduction *r);

/* Converts elements, and applies premul. `wire` and `src` must not overlap. */
void mpp_to_wire(const mpp_reduction *r, void *wire, const void *src, size_t count);

/* Applies the divisor, rounds once and converts back; overwrites `wire`, which may be `dst` where the type
 * on the wire is the elements' own. */
void mpp_from_wire(const mpp_reduction *r, void *dst, void *wire, size_t count);

#endif
