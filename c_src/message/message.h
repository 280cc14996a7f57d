/* One message between two ranks, from its post to its end.
 *
 * A receive is matched (MPI_Improbe, then MPI_Imrecv) instead of posted: its length is known before a byte lands, and a
 * receive whose message never comes needs no MPI_Cancel.
 *
 * Thread safety: all functions are called under the engine's lock. An error of MPI's becomes a failure of `op`. */
#pragma once

#include "engine/engine.h"

enum mpp_message_state { MPP_TO_SEND, MPP_TO_MATCH, MPP_TO_RECEIVE, MPP_ACTIVE, MPP_OVER };

typedef struct {
    mpi_handle request;
    char *buffer;
    size_t bytes; /* to be sent, or the most to be received */
    int peer, tag, state;
} mpp_message;

/* A message that was found, and is not received yet. */
typedef struct {
    mpi_handle handle;
    int source, length;
} mpp_match;

/* With Open MPI a message over TCP of more than 64 KiB, its header included (btl_tcp_eager_limit), waits for an answer
 * before its data leaves. So a chunk that goes to another node whole has at most this length. */
enum { MPP_EAGER = 60 << 10 };

/* ---- a list of messages ---- */

/* Sends at once. */
void mpp_post_send(mpp_op *op, mpp_message *m, const void *buffer, size_t bytes, int peer, int tag);
/* Notes what is to be received; mpp_test_all looks for it. */
void mpp_post_recv(mpp_message *m, void *buffer, size_t bytes, int peer, int tag);
/* Moves the messages on; whether all of them are over. */
int mpp_test_all(mpp_op *op, mpp_message *messages, int count);
/* The same after a failure: receives that have matched nothing are dropped. */
int mpp_finish_all(mpp_op *op, mpp_message *messages, int count);

/* ---- the steps of one message ---- */

/* Begins to receive a message that is known to fit, and has come or not. */
void mpp_receive_unmatched(mpp_op *op, mpp_message *m, int tag);
/* Takes that back unless the message has come; whether it had not. */
int mpp_take_back(mpp_op *op, mpp_message *m);
/* Looks for a message from `peer`, which may be any_source; MPI's error. */
int mpp_probe(const mpp_group *group, int peer, int tag, mpp_match *match, int *found);
/* Begins to receive a message that was found, into a buffer of `bytes`. */
void mpp_receive(mpp_op *op, mpp_message *m, mpp_match *match, void *buffer, int bytes);
/* MPP_DONE if the message is over, MPP_FAILED if it ended with an error. */
int mpp_test_message(mpp_op *op, mpp_message *m);
