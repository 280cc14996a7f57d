/* How a rank writes to its slots, which other cores read.
 *
 * A store to a line that another core has read waits until that core has given it up. Where the two have no cache in
 * common that takes up to twenty times as long as the copy. Non-temporal stores wait for nobody: they go to memory, and
 * are read there about as fast as in another core's cache. Where the two share a cache, or memory has no bandwidth to
 * spare, plain ones are better. The time tells: each kind is tried now and then.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct {
    float plain, streamed; /* ns per byte by stores of each kind, smoothed; 0: not known */
    unsigned slots;        /* written in long pieces so far */
    int streams;           /* the slot at hand is written by non-temporal ones */
    size_t bytes;          /* in it so far */
    int64_t begun;
} mpp_writing;

enum { CACHE_LINE = 64, MPP_LONG_PIECE = 1 << 10 }; /* a shorter copy is over before it waits */

/* Copies a piece into the slot at hand. */
void mpp_write_piece(mpp_writing *w, char *slot, const char *from, size_t bytes);
/* Before the slot is published: whoever learns that can read its pieces, and the next one is at hand. */
void mpp_end_slot(mpp_writing *w);
