/* The driver's functions. */
#include "fake_device.h"

#include <string.h>
#include <sys/mman.h>

/* ---- the driver: devices and fake_contexts ---- */

EXPORT int cuInit(unsigned flags) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("Init");
    fake.initialised = !code;
    pthread_mutex_unlock(&fake.lock);
    return flags ? INVALID_VALUE : code;
}

EXPORT int cuGetErrorName(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == BAD_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
                                  : NULL;
    return *text ? OK : INVALID_VALUE;
}

EXPORT int cuGetErrorString(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
    return *text ? OK : INVALID_VALUE;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? OK : BAD_DEVICE;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    pthread_mutex_lock(&fake.lock);
    int code = fake.initialised ? OK : fake_violation(3, "cuDevicePrimaryCtxRetain before cuInit");
    *context = &fake_contexts[device];
    pthread_mutex_unlock(&fake.lock);
    return code;
}

static int failing(const char *name) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing(name);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
    if (fake_depth == MAX_STACK) abort();
    int code = failing("CtxPushCurrent");
    if (!code) fake_stack[fake_depth++] = (int)((int *)context - fake_contexts);
    return code;
}

EXPORT int cuCtxPopCurrent_v2(void **context) {
    if (!fake_depth) return BAD_CONTEXT;
    failing("CtxPopCurrent");
    *context = &fake_contexts[fake_stack[--fake_depth]];
    return OK;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = fake_capture_mode;
    fake_capture_mode = *mode;
    *mode = before;
    return OK;
}

/* How often this thread has entered a context, or left the mode in which graphs are captured, and not gone back. */
EXPORT int fake_entered(void) { return fake_depth + (fake_capture_mode != 0); }

/* ---- the driver: memory ---- */

EXPORT int cuMemHostAlloc(void **found, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("MemHostAlloc");
    if (!code && !(flags & 1)) code = fake_violation(INVALID_VALUE, "pinned memory for one device only");
    if (!code) {
        *found = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        memset(*found, 0xEE, bytes); /* whoever reads it too early shall notice */
        fake_add_range((uintptr_t)*found, bytes, *found, -1);
    }
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuMemAlloc_v2(address *found, size_t bytes) {
    int code = failing("MemAlloc");
    if (!code) *found = fake_alloc(fake_stack[fake_depth - 1], bytes, 0);
    return code;
}

EXPORT int cuMemFreeHost(void *memory) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("MemFreeHost");
    range *r = code ? NULL : fake_take_range((uintptr_t)memory);
    if (!code && (!r || r->device >= 0)) code = fake_violation(INVALID_VALUE, "cuMemFreeHost of what is not pinned");
    if (!code && fake_in_use(r->view, r->bytes)) fake_violation(0, "pinned memory is freed while a stream will use it");
    if (!code) free(memory);
    free(r);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("MemHostRegister");
    if (!code && !(flags & 1)) code = fake_violation(INVALID_VALUE, "memory registered for one device only");
    if (!code && fake_view_of((uintptr_t)memory, 1, -1)) code = fake_violation(712, "memory is registered twice");
    if (!code) fake_add_range((uintptr_t)memory, bytes, memory, -1);
    if (!code) fake.ranges->registered = 1;
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuMemHostUnregister(void *memory) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("MemHostUnregister");
    range *r = code ? NULL : fake_take_range((uintptr_t)memory);
    if (!code && !(r && r->registered)) code = fake_violation(713, "cuMemHostUnregister of what is not registered");
    if (r && msync(memory, r->bytes, MS_ASYNC)) fake_violation(0, "memory is unmapped before it is unregistered");
    if (r && fake_in_use(r->view, r->bytes))
        fake_violation(0, "memory is no longer registered while a stream will use it");
    free(r);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

static int copy(const char *call, address to, int to_host, address from, int from_host, size_t bytes, void *handle) {
    stream *s;
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing(call);
    if (!code) code = fake_find_stream(handle, &s, call);
    if (!code) {
        char *target = fake_view_of((uintptr_t)to, bytes, to_host ? -1 : s->device);
        char *source = fake_view_of((uintptr_t)from, bytes, from_host ? -1 : s->device);
        range *r = fake_range_of((uintptr_t)from, bytes);
        if (r && r->opened && fake_failing("PeerRead")) source = target; /* as where an IOMMU loses it */
        if (!target) code = fake_violation(INVALID_VALUE, "%s to memory that is not of its kind", call);
        else if (!source) code = fake_violation(INVALID_VALUE, "%s from memory that is not of its kind", call);
        else fake_queue(s, (command){.kind = COPY, .to = target, .from = source, .bytes = bytes});
    }
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *handle) {
    return copy("MemcpyDtoHAsync", (address)(uintptr_t)to, 1, from, 0, bytes, handle);
}

EXPORT int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *handle) {
    return copy("MemcpyHtoDAsync", to, 0, (address)(uintptr_t)from, 1, bytes, handle);
}

EXPORT int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *handle) {
    return copy("MemcpyDtoDAsync", to, 0, from, 0, bytes, handle);
}

/* ---- the driver: streams and events ---- */

EXPORT int cuStreamCreate(void **found, unsigned flags) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("StreamCreate");
    if (!code && flags != 1) fake_violation(0, "a stream that waits for the default stream");
    if (!code) *found = fake_new_stream(fake_stack[fake_depth - 1]);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuStreamQuery(void *handle) {
    stream *s;
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("StreamQuery");
    if (!code) code = fake_find_stream(handle, &s, "cuStreamQuery");
    if (!code && s->head) code = NOT_READY;
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT void fake_stream_capture(void *handle, int is_captured) { ((stream *)handle)->captured = is_captured; }

EXPORT int cuStreamIsCapturing(void *handle, int *is_captured) {
    stream *s;
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("StreamIsCapturing");
    if (!code) code = fake_find_stream(handle, &s, "cuStreamIsCapturing");
    if (!code) *is_captured = s->captured;
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuStreamDestroy_v2(void *handle) {
    int code = failing("StreamDestroy");
    return code ? code : fake_stop_stream(handle);
}

EXPORT int cuEventCreate(void **found, unsigned flags) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("EventCreate");
    if (!code) {
        event *e = calloc(1, sizeof *e);
        e->device = fake_stack[fake_depth - 1];
        e->next = fake.events;
        *found = fake.events = e;
    }
    pthread_mutex_unlock(&fake.lock);
    return flags == 2 ? code : INVALID_VALUE;
}

static int find_event(event *e, const char *call) {
    return e->destroyed ? fake_violation(BAD_HANDLE, "%s of an event that was destroyed", call) : OK;
}

EXPORT int cuEventDestroy_v2(void *handle) {
    event *e = handle;
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("EventDestroy");
    if (!code) code = find_event(e, "cuEventDestroy");
    e->destroyed = 1; /* its memory stays: streams may still refer to it */
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuEventRecord(void *handle, void *stream_handle) {
    event *e = handle;
    stream *s;
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("EventRecord");
    if (!code) code = find_event(e, "cuEventRecord");
    if (!code) code = fake_find_stream(stream_handle, &s, "cuEventRecord");
    if (!code && e->device != s->device) code = fake_violation(BAD_HANDLE, "an event on a stream of another device");
    if (!code) fake_queue(s, (command){.kind = RECORD, .event = e, .version = ++e->recorded});
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    event *e = handle;
    stream *s;
    pthread_mutex_lock(&fake.lock);
    int code = flags ? INVALID_VALUE : fake_failing("StreamWaitEvent");
    if (!code) code = find_event(e, "cuStreamWaitEvent");
    if (!code) code = fake_find_stream(stream_handle, &s, "cuStreamWaitEvent");
    /* As in CUDA: the wait is for what has been recorded by now; an event never recorded is complete. */
    if (!code) fake_queue(s, (command){.kind = WAIT, .event = e, .version = e->recorded});
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuEventQuery(void *handle) {
    event *e = handle;
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("EventQuery");
    if (!code) code = find_event(e, "cuEventQuery");
    if (!code && e->completed < e->recorded) code = NOT_READY;
    pthread_mutex_unlock(&fake.lock);
    return code;
}
