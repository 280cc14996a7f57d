#include "shm/topology.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

static void find_places(mpp_topology *t, int ranks, const int *node_of) {
    for (int node = 0, place = 0; node < t->count; node++) {
        t->first[node] = place;
        for (int r = 0; r < ranks; r++) {
            if (node_of[r] != node) continue;
            t->place_of[r] = place - t->first[node];
            t->members[place++] = r;
        }
        t->first[node + 1] = place;
    }
    memcpy(t->node_of, node_of, (size_t)ranks * sizeof *node_of);
    t->leaders_per_node = ranks;
    for (int node = 0; node < t->count; node++) {
        int local = mpp_local_count(t, node);
        if (local < t->leaders_per_node) t->leaders_per_node = local;
        if (local > t->most_per_node) t->most_per_node = local;
    }
}

/* Splits the tree over all ranks (see mpp_reduce) into parts that lie on one node each, as large as possible. Notes the
 * tree position of each part at its first rank. Returns how many parts there are, `parts` before these ranks included.
 */
static int split(mpp_topology *t, int begin, int end, int parts) {
    int half = 1, together = begin + 1;
    while (together < end && t->node_of[together] == t->node_of[begin]) together++;
    if (together == end) {
        t->tree_position_of[begin] = parts;
        return parts + 1;
    }
    while (2 * half < end - begin) half *= 2;
    parts = split(t, begin, begin + half, parts);
    return split(t, begin + half, end, parts);
}

/* A node's sum is one part of the tree where the node has a block of 2^k ranks that begins at a multiple of 2^k, or the
 * last ranks of all from such a place on. Where a node has other ranks, there are two ways. With `reproducible`, nodes
 * have several parts each. Else, because more parts are more to send, nodes are the leaves of a tree of their own,
 * which gives other bits. */
static void find_parts(mpp_topology *t, int ranks, int reproducible) {
    for (int r = 0; r < ranks; r++) t->tree_position_of[r] = -1;
    int in_tree = split(t, 0, ranks, 0) == t->count || reproducible;
    for (int r = 0; r < ranks && !in_tree; r++) t->tree_position_of[r] = t->place_of[r] ? -1 : t->node_of[r];
    for (int i = 0; i < ranks; i++) {
        int r = t->members[i];
        if (!t->place_of[r]) t->first_part[t->node_of[r]] = t->parts;
        if (t->tree_position_of[r] < 0) continue;
        t->first_in[t->parts] = i;
        t->tree_position[t->parts++] = t->tree_position_of[r];
    }
    t->first_part[t->count] = t->parts;
    t->first_in[t->parts] = ranks;
    for (int part = 0; part < t->parts; part++)
        t->leaf_count[t->tree_position[part]] = in_tree ? t->first_in[part + 1] - t->first_in[part] : 1;
    t->regular = t->parts == t->count;
    for (int part = 0; part < t->parts; part++) {
        int is_last = part == t->parts - 1, less = t->leaf_count[part] < t->leaf_count[0];
        int is_equal = t->leaf_count[part] == t->leaf_count[0];
        t->regular &= t->tree_position[part] == part && (is_equal || (is_last && less));
    }
}

static int new_tables(mpp_topology *t, size_t ranks) {
    int **tables[] = {&t->first,    &t->members,       &t->node_of,          &t->place_of,  &t->first_part,
                      &t->first_in, &t->tree_position, &t->tree_position_of, &t->leaf_count};
    size_t count = sizeof tables / sizeof *tables;
    t->tables = malloc(count * (ranks + 1) * sizeof *t->tables);
    for (size_t i = 0; i < count && t->tables; i++) *tables[i] = t->tables + i * (ranks + 1);
    return t->tables != NULL;
}

mpp_topology *mpp_topology_new(int ranks, int rank, const int *node_of, int reproducible) {
    mpp_topology *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    for (int r = 0; r < ranks; r++)
        if (node_of[r] >= t->count) t->count = node_of[r] + 1;
    while (1 << t->levels < t->count) t->levels++;
    t->here = node_of[rank];
    if (!new_tables(t, (size_t)ranks)) {
        free(t);
        return NULL;
    }
    find_places(t, ranks, node_of);
    find_parts(t, ranks, reproducible);
    return t;
}

void mpp_topology_free(mpp_topology *t) {
    if (t) free(t->tables);
    free(t);
}

size_t mpp_topology_bytes(mpp_topology *t) { return t ? malloc_usable_size(t) + malloc_usable_size(t->tables) : 0; }
