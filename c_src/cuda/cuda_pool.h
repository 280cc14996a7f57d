/* What staging needs of a CUDA device and is slow to make: streams, events and pinned memory, kept for reuse. */
#pragma once

#include "cuda/cuda_api.h"

enum { MPP_SLOTS = 4 }; /* pieces of one operation in host memory at a time */

typedef struct cuda_device cuda_device;
typedef struct copier copier;

struct cuda_device {
    cuda_context context; /* the primary one, which torch uses; NULL: nobody has asked for it */
    copier *idle;
    struct mpp_exported *sample; /* of its memory, ipc.c; NULL: there is none yet */
};

/* The streams of one operation, its own so that no operation's copies wait behind another's: those that come first
 * may be waiting for a kernel that runs for long. */
struct copier {
    copier *next;
    cuda_device *device;
    cuda_stream load, store; /* from the device; to it, NULL until mpp_second_stream() */
    cuda_event start;        /* on the user's stream: everything queued before the operation */
    cuda_event loaded[MPP_SLOTS], stored[MPP_SLOTS];
};

/* Makes a list of `count` entries longer where it is full; 0: there is no memory. */
int mpp_has_room(void **list, int count, int *capacity, size_t size);

/* All return a CUresult. */
int mpp_get_copier(int ordinal, copier **found);
int mpp_second_stream(copier *c);
int mpp_get_pinned(copier *c, size_t bytes, char **found, size_t *size);

/* Memory of another kind, pinned for every device until it is given back. */
int mpp_register_memory(copier *c, void *memory, size_t bytes);
void mpp_unregister_memory(cuda_device *device, void *memory);

void mpp_put_copier(copier *c);
void mpp_put_pinned(copier *c, char *block, size_t size);

/* Calls of the driver go to the context that the thread has pushed. The user's threads have one of their own, which
 * must be back in place afterwards; the progress thread has none. Who has entered a device enters it again for nothing.
 */
int mpp_enter_device(const cuda_device *device);
void mpp_leave_device(void);
/* The same behind a call of the driver; what that has returned. */
static inline int mpp_left_device(int code) { return mpp_leave_device(), code; }
