#include "cuda/cuda_pool.h"

#include <pthread.h>
#include <stdlib.h>

#include "shim.h"

enum { FIRST_CAPACITY = 16, MAX_DEVICES = 128, ORDERS = 48, SMALLEST = 16 /* 64 KiB */ };
enum { NESTED = 8 }; /* a call, a wait, a step, what that does: each may be on another device */

/* Pinned memory is taken from everybody else on the machine: more than this is given back. */
static const size_t KEEP_BYTES = (size_t)256 << 20;

typedef struct block block;
struct block {
    block *next;
};

static struct {
    pthread_mutex_t lock; /* never held while the driver may block, except to make a device's context */
    cuda_device devices[MAX_DEVICES];
    block *idle[ORDERS]; /* by the logarithm of their size; the link lies in the block itself */
    size_t idle_bytes;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

int mpp_has_room(void **list, int count, int *capacity, size_t size) {
    int more = *capacity ? 2 * *capacity : FIRST_CAPACITY;
    if (count < *capacity) return 1;
    void *longer = realloc(*list, (size_t)more * size);
    if (!longer) return 0;
    *list = longer;
    *capacity = more;
    return 1;
}

/* ---- devices ---- */

static int find_device(int ordinal, cuda_device **found) {
    if (ordinal < 0 || ordinal >= MAX_DEVICES) return CUDA_BAD_DEVICE;
    cuda_device *d = *found = &pool.devices[ordinal];
    if (d->context) return CUDA_OK; /* not written again: other threads read it, without the lock */
    cuda_context context;
    int number, error = mpp_cuda.device_get(&number, ordinal);
    if (!error) error = mpp_cuda.context_retain(&context, number);
    if (!error) d->context = context;
    return error;
}

static __thread cuda_context entered[NESTED];
static __thread int depth, mode;

/* While a thread captures a graph in torch's way, the driver lets nobody ask whether an event is over, or make memory:
 * what is captured might come to wait for itself. What is done here has nothing to do with it. */
int mpp_enter_device(const cuda_device *device) {
    int is_in = depth && entered[depth - 1] == device->context;
    int error = is_in ? CUDA_OK : mpp_cuda.context_push(device->context);
    if (error) return error;
    if (!depth) mpp_cuda.capture_mode((mode = CUDA_RELAXED, &mode));
    entered[depth++] = device->context;
    return CUDA_OK;
}

void mpp_leave_device(void) {
    cuda_context old;
    depth--;
    if (!depth || entered[depth - 1] != entered[depth]) mpp_cuda.context_pop(&old);
    if (!depth) mpp_cuda.capture_mode(&mode);
}

/* ---- streams and events ---- */

static void destroy_event(cuda_event event) {
    if (event) mpp_cuda.event_destroy(event);
}

static void destroy_copier(copier *c) {
    for (int i = 0; i < MPP_SLOTS; i++) {
        destroy_event(c->loaded[i]);
        destroy_event(c->stored[i]);
    }
    destroy_event(c->start);
    if (c->load) mpp_cuda.stream_destroy(c->load);
    if (c->store) mpp_cuda.stream_destroy(c->store);
    free(c);
}

static int new_event(cuda_event *event) { return mpp_cuda.event_create(event, CUDA_EVENT_NO_TIMING); }

static int new_copier(cuda_device *device, copier **made) {
    int error = mpp_enter_device(device);
    if (error) return error;
    copier *c = calloc(1, sizeof *c);
    if (!c) return mpp_left_device(CUDA_OUT_OF_MEMORY);
    c->device = device;
    error = mpp_cuda.stream_create(&c->load, CUDA_STREAM_NON_BLOCKING);
    for (int i = 0; i < MPP_SLOTS && !error; i++) {
        error = new_event(&c->loaded[i]);
        if (!error) error = new_event(&c->stored[i]);
    }
    if (!error) error = new_event(&c->start);
    if (error) destroy_copier(c);
    else *made = c;
    mpp_leave_device();
    return error;
}

int mpp_get_copier(int ordinal, copier **found) {
    cuda_device *device = NULL;
    copier *c = NULL;
    pthread_mutex_lock(&pool.lock);
    int error = find_device(ordinal, &device);
    if (!error && (c = device->idle)) device->idle = c->next;
    pthread_mutex_unlock(&pool.lock);
    if (!error && !c) error = new_copier(device, &c);
    *found = c;
    return error;
}

uintptr_t mpp_own_stream(int ordinal) {
    copier *c;
    return mpp_get_copier(ordinal, &c) ? 0 : (uintptr_t)c->load;
}

int mpp_second_stream(copier *c) {
    return c->store ? CUDA_OK : mpp_cuda.stream_create(&c->store, CUDA_STREAM_NON_BLOCKING);
}

void mpp_put_copier(copier *c) {
    pthread_mutex_lock(&pool.lock);
    c->next = c->device->idle;
    c->device->idle = c;
    pthread_mutex_unlock(&pool.lock);
}

/* ---- pinned memory, in powers of two ---- */

static int order_of(size_t bytes) {
    int order = SMALLEST;
    while (order < ORDERS - 1 && ((size_t)1 << order) < bytes) order++;
    return order;
}

int mpp_get_pinned(copier *c, size_t bytes, char **found, size_t *size) {
    int order = order_of(bytes);
    pthread_mutex_lock(&pool.lock);
    block *b = pool.idle[order];
    if (b) {
        pool.idle[order] = b->next;
        pool.idle_bytes -= (size_t)1 << order;
    }
    pthread_mutex_unlock(&pool.lock);
    *size = (size_t)1 << order;
    *found = (char *)b;
    if (b) return CUDA_OK;
    int error = mpp_enter_device(c->device);
    return error ? error : mpp_left_device(mpp_cuda.host_alloc((void **)found, *size, CUDA_HOST_PORTABLE));
}

void mpp_put_pinned(copier *c, char *memory, size_t size) {
    block *b = (block *)memory;
    int order = order_of(size);
    pthread_mutex_lock(&pool.lock);
    int keep = pool.idle_bytes + size <= KEEP_BYTES;
    if (keep) {
        b->next = pool.idle[order];
        pool.idle[order] = b;
        pool.idle_bytes += size;
    }
    pthread_mutex_unlock(&pool.lock);
    if (!keep && !mpp_enter_device(c->device)) mpp_left_device(mpp_cuda.host_free(memory));
}

/* ---- memory of others ---- */

int mpp_register_memory(copier *c, void *memory, size_t bytes) {
    int error = mpp_enter_device(c->device);
    return error ? error : mpp_left_device(mpp_cuda.host_register(memory, bytes, CUDA_HOST_PORTABLE));
}

void mpp_unregister_memory(cuda_device *device, void *memory) {
    if (!mpp_enter_device(device)) mpp_left_device(mpp_cuda.host_unregister(memory));
}

int mpp_cuda_registers(int ordinal, uintptr_t memory, size_t bytes) {
    copier *c;
    int error = mpp_get_copier(ordinal, &c);
    if (error) return error;
    error = mpp_register_memory(c, (void *)memory, bytes);
    if (!error) mpp_unregister_memory(c->device, (void *)memory);
    mpp_put_copier(c);
    return error;
}

/* ---- the end ---- */

/* Gives everything back that no operation uses. The devices' contexts are torch's as well, and stay to the end of the
 * process: copies of an operation that was left behind may still be under way. */
void mpp_cuda_release(void) {
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < MAX_DEVICES; i++) {
        cuda_device *d = &pool.devices[i];
        if (!d->context || mpp_enter_device(d)) continue;
        for (int order = 0; order < ORDERS; order++)
            for (block *b; (b = pool.idle[order]); mpp_cuda.host_free(b)) pool.idle[order] = b->next;
        pool.idle_bytes = 0;
        for (copier *c; (c = d->idle); destroy_copier(c)) d->idle = c->next;
        mpp_leave_device();
    }
    pthread_mutex_unlock(&pool.lock);
}
