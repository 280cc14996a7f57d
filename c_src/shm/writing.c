#include "shm/writing.h"

#include <string.h>

#include "engine/pause.h"

#ifdef __SSE2__
#include <emmintrin.h>
enum { CAN_STREAM = 1 };
#else
enum { CAN_STREAM = 0 }; /* no other processor has been measured */
#endif
enum { LEAST_TIMED = 8 << 10, FIRST = 128, TRIED_EVERY_FIRST = 8, TRIED_EVERY = 256 };

/* Non-temporal stores return sooner than plain ones in any case, as they leave the way from memory to the readers. They
 * pay from so many times as soon: measured on an AMD EPYC, between cores and between threads of one core. */
static const float GAIN = 2.5f;
/* What counts at most, in ns per byte, of a write that has lost its core. */
static const float MOST = 1;

static int is_to_stream(mpp_writing *w) {
    int is_better = w->plain > GAIN * w->streamed;
    int is_tried = w->slots % (w->slots < FIRST ? TRIED_EVERY_FIRST : TRIED_EVERY) == 0;
    w->slots++;
    return is_tried ? !is_better : is_better;
}

/* Slowness may be chance, as with memory that is touched for the first time; speed is none. */
static void note(float *rate, float sample) {
    if (sample > MOST) sample = MOST;
    *rate += *rate == 0 ? sample : (sample - *rate) / (sample < *rate ? 2 : 4);
}

/* Whole lines only: of a part of one the processor would have to fetch the rest. */
static void stream(char *to, const char *from, size_t bytes) {
    size_t at = 0;
#ifdef __SSE2__
    for (; at + CACHE_LINE <= bytes; at += CACHE_LINE) {
        const __m128i *source = (const __m128i *)(from + at);
        __m128i *line = (__m128i *)(to + at);
        for (int i = 0; i < 4; i++) _mm_stream_si128(line + i, _mm_loadu_si128(source + i));
    }
#endif
    memcpy(to + at, from + at, bytes - at);
}

void mpp_write_piece(mpp_writing *w, char *slot, const char *from, size_t bytes) {
    if (CAN_STREAM && !w->bytes) {
        w->streams = is_to_stream(w);
        w->begun = now_ns();
    }
    if (CAN_STREAM) w->bytes += bytes;
    if (w->streams && !((uintptr_t)slot % CACHE_LINE)) stream(slot, from, bytes);
    else memcpy(slot, from, bytes);
}

void mpp_end_slot(mpp_writing *w) {
    if (!w->bytes) return;
#ifdef __SSE2__
    if (w->streams) _mm_sfence(); /* a release does not order them */
#endif
    if (w->bytes >= LEAST_TIMED)
        note(w->streams ? &w->streamed : &w->plain, (float)(now_ns() - w->begun) / (float)w->bytes);
    w->bytes = 0;
}
