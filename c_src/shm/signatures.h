/* The ranks' calls: signed when an operation is made, compared when all ranks here have published theirs. */
#pragma once

#include "shm/shm.h"

/* The `divisor` of an exchange whose data cannot go through the slots. */
enum { MPP_IN_MESSAGES = -1 };

uint64_t mpp_mix(uint64_t hash, uint64_t word);
void mpp_sign(shm_op *s, int kind, int root, size_t bytes);
/* Of a call that this rank has not published, and cannot make for an error of CUDA's: all learn that in its place, the
 * call fails for all, and the group goes on. */
void mpp_withdraw(shm_op *s, int error);
/* Compares the calls, with the other nodes' too. MPP_FAILED on a mismatch; else MPP_PENDING, and `checked` says whether
 * all agree. */
int mpp_check_calls(shm_op *s, mpp_channel *c);
void mpp_note_calls(shm_op *s, const mpp_channel *c);
/* Between nodes: goes on with the agreement about a call whose turn has not come; whether all have made this one. */
int mpp_ask_early(shm_op *s, mpp_channel *c);
