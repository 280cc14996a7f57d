/* Whether a call would write results to memory that it reads, or to one place twice. Such calls are Python's, which
 * makes copies: tensors/overlaps.py. Most lists lie in the order of their addresses; only others are sorted. */
#include <stdlib.h>

#include "python/call.h"

enum { FEW = 32 };

typedef struct {
    uintptr_t begin, end;
    int is_written;
} stretch;

static int are_apart(uintptr_t a, size_t a_bytes, uintptr_t b, size_t b_bytes) {
    return !a_bytes || !b_bytes || a + a_bytes <= b || b + b_bytes <= a;
}

int mpp_operands_are_apart(const operand *a, const operand *b) {
    return are_apart(a->address, a->bytes, b->address, b->bytes);
}

/* Of a list, from its lowest address to its highest; whether its tensors follow each other, and so are apart. */
static int find_bounds(const mpp_tensors *list, int skipped, stretch *all) {
    int in_order = 1;
    *all = (stretch){0};
    for (int i = 0; i < list->count; i++) {
        uintptr_t begin = list->addresses[i], end = begin + list->lengths[i];
        if (begin == end || i == skipped) continue;
        if (all->begin == all->end) *all = (stretch){begin, begin, 0};
        if (begin < all->end) in_order = 0;
        if (begin < all->begin) all->begin = begin;
        if (end > all->end) all->end = end;
    }
    return in_order;
}

static int by_address(const void *a, const void *b) {
    const stretch *left = a, *right = b;
    return left->begin < right->begin ? -1 : left->begin > right->begin;
}

static int append(stretch *all, int count, const mpp_tensors *list, int skipped, int is_written) {
    for (int i = 0; i < list->count; i++)
        if (list->lengths[i] && i != skipped)
            all[count++] = (stretch){list->addresses[i], list->addresses[i] + list->lengths[i], is_written};
    return count;
}

static int sorted_are_apart(const stretch *all, int count) {
    uintptr_t read = 0, written = 0; /* how far those before reach */
    for (int i = 0; i < count; i++) {
        if (all[i].begin < written || (all[i].is_written && all[i].begin < read)) return 0;
        if (all[i].is_written) written = all[i].end;
        else if (all[i].end > read) read = all[i].end;
    }
    return 1;
}

int mpp_lists_are_apart(const mpp_tensors *read, const mpp_tensors *written) {
    int in_place = read->addresses[read->own] == written->addresses[written->own], skipped = in_place ? read->own : -1;
    stretch reads, writes, few[FEW], *all = few;
    int in_order = find_bounds(written, -1, &writes);
    find_bounds(read, skipped, &reads);
    if (in_order && are_apart(reads.begin, reads.end - reads.begin, writes.begin, writes.end - writes.begin)) return 1;
    if (read->count + written->count > FEW) all = malloc((size_t)(read->count + written->count) * sizeof *all);
    if (!all) return 0;
    int count = append(all, append(all, 0, read, skipped, 0), written, -1, 1);
    qsort(all, (size_t)count, sizeof *all, by_address);
    int apart = sorted_are_apart(all, count);
    if (all != few) free(all);
    return apart;
}
