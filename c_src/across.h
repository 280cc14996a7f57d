/* What an operation over shared memory is given so that its data gets to the other hosts of its group as well. Each
 * returns 0 where there is no memory; all come before mpp_sign(). */
#ifndef MPP_ACROSS_H
#define MPP_ACROSS_H

#include "shm.h"

int mpp_reduce_across(shm_op *s, int root);
int mpp_broadcast_across(shm_op *s);
int mpp_allgather_across(shm_op *s, size_t longest);
int mpp_reduce_scatter_across(shm_op *s, size_t longest);

#endif
