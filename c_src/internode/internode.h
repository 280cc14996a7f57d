/* The collectives of a group on several nodes: what travels between the nodes, and where it lies. shm/protocol.c has
 * the protocol within a node, agreement.c the agreement about calls, pipeline.c the messages of chunks.
 *
 * Short data is piggybacked on the agreement about the call, in the messages of the first rank of each node. A sum that
 * is not so short is piggybacked by halves; each node then has its complete share, and sends it to the others.
 *
 * Long data goes through a pipeline, chunk by chunk, while other chunks are written and read. Each node has L leaders,
 * where L is the smallest number of ranks on any node. A chunk of a reduction is split into one part per leader, and
 * each part into one piece per node. Leaders with the same number exchange their nodes' partial sums, one piece each,
 * and then the results: each node sends and receives at most twice what it holds, by all its leaders at once.
 * (Rabenseifner's reduce-scatter and all-gather, with direct messages; several leaders per node as in Bayatpour and
 * others, "Scalable Reduction Collectives with Data Partitioning-based Multi-Leader Design", 2017.) The pieces of a
 * broadcast are scattered over the other nodes, which then exchange them; where a rank is alone on its node, from and
 * to its user's memory. In an all_gather every block goes once to every other node, into a receive buffer in its shared
 * memory. In a reduce_scatter a node's sum of a block goes to the rank that wants it.
 *
 * Partial sums are in the computing type (float32 for narrow floats) where a node has several ranks; with one rank the
 * elements themselves are sent. Results are rounded once, and travel in the elements' type. A node's sum is the tree of
 * its ranks, and nodes are added as a tree too: see mpp_reduce().
 */
#pragma once

#include "message/message.h"
#include "shm/shm.h"

/* A chunk in the pipeline between the nodes. */
typedef struct {
    int count;
    mpp_message *messages;
    char *memory; /* what it sends and receives, except what lies in slots of shared memory */
    size_t used, room;
    int second; /* in its second phase */
} mpp_pipeline_slot;

/* The agreement about the call whose turn it is; only the first rank of each node takes part. */
typedef struct {
    int asking, level;
    char *mine, *theirs; /* summary and payload */
    char *sent;          /* the same, of each level, until MPI is done with it */
    mpp_message *messages;
    int count, awaited, is_late; /* is_late: the awaited message was not there at once */
    size_t sent_bytes;           /* at this level */
} mpp_agreement;

/* What is received only to be dropped, round by round (drain.c). */
typedef struct {
    int round, in_round;
    char *dropped;
    mpp_message messages[2];
} mpp_drain;

struct mpp_internode_state {
    int first_tag;
    mpp_agreement agreement;
    mpp_drain drain;
    mpp_pipeline_slot slots[MAX_RING];
};

/* The most that is piggybacked; and the most that is piggybacked whole at every level, see MPP_EAGER. */
enum { MPP_PAYLOAD = 64 << 10, MPP_WHOLE_PAYLOAD = 32 << 10, MPP_INTERNODE_TAGS = 16 };

static inline mpp_channel *mpp_channel_of(const shm_op *s) { return s->op.group->channel; }
static inline const mpp_topology *mpp_topology_of(const shm_op *s) { return mpp_channel_of(s)->topology; }
static inline mpp_internode_state *mpp_internode_of(const shm_op *s) { return mpp_channel_of(s)->internode_state; }

/* Gives the channel of a group on several nodes what it needs; 0: no memory. */
int mpp_internode_attach(mpp_group *g, mpp_channel *c);

/* See mpp_internode (shm.h). */
const mpp_call_summary *mpp_agree(shm_op *s);

int mpp_drain_early(shm_op *s);

/* Memory for the agreement; 0: there is none. */
int mpp_agreement_init(mpp_agreement *a, const mpp_topology *t);
