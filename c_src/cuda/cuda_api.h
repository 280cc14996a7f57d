/* The CUDA driver functions that staging uses, without a CUDA header or library.
 *
 * They are found at run time in libcuda.so.1, which comes with the GPU's driver, when the first CUDA tensor is
 * communicated: so the same build serves machines with and without a GPU. The names are those of the library's
 * symbols; where CUDA has several versions of a function, of the one that takes 64-bit addresses.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef unsigned long long cuda_address;
typedef void *cuda_context, *cuda_stream, *cuda_event;
typedef struct {
    char bytes[64];
} cuda_ipc_handle; /* of an allocation, for other processes of the machine */

enum {
    CUDA_OK = 0,
    CUDA_OUT_OF_MEMORY = 2,
    CUDA_BAD_DEVICE = 101,
    CUDA_NOT_READY = 600,
    CUDA_CAPTURED = 900,          /* not of a stream whose work goes into a graph */
    CUDA_RELAXED = 2,             /* a thread's mode: it does no harm to graphs that are captured meanwhile */
    CUDA_STREAM_NON_BLOCKING = 1, /* does not wait for the legacy default stream */
    CUDA_EVENT_NO_TIMING = 2,
    CUDA_HOST_PORTABLE = 1, /* pinned for every device */
    CUDA_BUFFER_ID = 7,     /* an attribute: a number that no other allocation of the process ever has */
    CUDA_LAZY_PEER_ACCESS = 1
};

/* X(member, symbol, arguments); each returns a CUresult, an int. */
#define MPP_CUDA_FUNCTIONS(X)                                                                                          \
    X(init, "cuInit", (unsigned))                                                                                      \
    X(error_name, "cuGetErrorName", (int, const char **))                                                              \
    X(error_string, "cuGetErrorString", (int, const char **))                                                          \
    X(device_get, "cuDeviceGet", (int *, int))                                                                         \
    X(context_retain, "cuDevicePrimaryCtxRetain", (cuda_context *, int))                                               \
    X(context_push, "cuCtxPushCurrent_v2", (cuda_context))                                                             \
    X(context_pop, "cuCtxPopCurrent_v2", (cuda_context *))                                                             \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                                      \
    X(host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                       \
    X(host_free, "cuMemFreeHost", (void *))                                                                            \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                               \
    X(host_unregister, "cuMemHostUnregister", (void *))                                                                \
    X(to_host, "cuMemcpyDtoHAsync_v2", (void *, cuda_address, size_t, cuda_stream))                                    \
    X(to_device, "cuMemcpyHtoDAsync_v2", (cuda_address, const void *, size_t, cuda_stream))                            \
    X(in_device, "cuMemcpyDtoDAsync_v2", (cuda_address, cuda_address, size_t, cuda_stream))                            \
    X(alloc, "cuMemAlloc_v2", (cuda_address *, size_t))                                                                \
    X(address_range, "cuMemGetAddressRange_v2", (cuda_address *, size_t *, cuda_address))                              \
    X(pointer_attribute, "cuPointerGetAttribute", (void *, int, cuda_address))                                         \
    X(ipc_handle, "cuIpcGetMemHandle", (cuda_ipc_handle *, cuda_address))                                              \
    X(ipc_open, "cuIpcOpenMemHandle_v2", (cuda_address *, cuda_ipc_handle, unsigned))                                  \
    X(ipc_close, "cuIpcCloseMemHandle", (cuda_address))                                                                \
    X(stream_create, "cuStreamCreate", (cuda_stream *, unsigned))                                                      \
    X(stream_destroy, "cuStreamDestroy_v2", (cuda_stream))                                                             \
    X(stream_is_captured, "cuStreamIsCapturing", (cuda_stream, int *))                                                 \
    X(stream_query, "cuStreamQuery", (cuda_stream))                                                                    \
    X(stream_wait, "cuStreamWaitEvent", (cuda_stream, cuda_event, unsigned))                                           \
    X(event_create, "cuEventCreate", (cuda_event *, unsigned))                                                         \
    X(event_record, "cuEventRecord", (cuda_event, cuda_stream))                                                        \
    X(event_query, "cuEventQuery", (cuda_event))                                                                       \
    X(event_destroy, "cuEventDestroy_v2", (cuda_event))

typedef struct {
#define MPP_MEMBER(name, symbol, arguments) int(*name) arguments;
    MPP_CUDA_FUNCTIONS(MPP_MEMBER)
#undef MPP_MEMBER
} cuda_api;

extern cuda_api mpp_cuda;
