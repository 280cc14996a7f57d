/* Which ranks of a group are on which node, and the parts of a sum that lie on one node each. */
#pragma once

#include <stddef.h>

typedef struct {
    int count, here;         /* nodes; the number of this one */
    int levels;              /* of a binary tree over the nodes */
    int *tables;             /* all those below */
    int *first, *members;    /* the ranks on node n: members[first[n]] ... members[first[n + 1] - 1], in order */
    int *node_of, *place_of; /* of a rank: its node, and its number among the ranks there */
    /* A node adds up and sends one part of the tree over all ranks, or several. Node n has the parts first_part[n] ...
     * first_part[n + 1] - 1. Each part is the ranks members[first_in[part]] ... members[first_in[part + 1] - 1]. */
    int parts, *first_part, *first_in;
    int *tree_position;    /* of a part: its place in the tree's order */
    int *tree_position_of; /* of the part that begins with a rank; -1: none does */
    int *leaf_count;       /* of the part at a tree position: how many ranks it adds up */
    int regular;           /* nodes are the leaves of a balanced tree, one part each */
    int leaders_per_node;  /* the smallest number of ranks on a node: so many share what a node sends */
    int most_per_node;     /* the largest number of ranks on a node */
    int narrow_sums;       /* a node's sums of 16-bit floats are rounded before they are sent */
} mpp_topology;

static inline int mpp_local_count(const mpp_topology *t, int node) { return t->first[node + 1] - t->first[node]; }
static inline int mpp_part_count(const mpp_topology *t, int node) {
    return t->first_part[node + 1] - t->first_part[node];
}
static inline int mpp_first_rank_of(const mpp_topology *t, int node) { return t->members[t->first[node]]; }

/* `node_of`: the number of each rank's node. `reproducible`: sums have the bits that they have on one node, wherever
 * the ranks are. NULL: no memory. */
mpp_topology *mpp_topology_new(int ranks, int rank, const int *node_of, int reproducible);
void mpp_topology_free(mpp_topology *t);
size_t mpp_topology_bytes(mpp_topology *t);
