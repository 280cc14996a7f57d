/* What bridge.c takes of DLPack (https://dmlc.github.io/dlpack, version 1): a tensor in memory, and the table of
 * functions by which a package shows its tensors to C. The layout is the standard's. */
#pragma once

#include <stdint.h>

enum { DL_MAJOR = 1, DL_CPU = 1, DL_UINT = 1 };

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits; /* of an element's type */
    uint16_t lanes;
    int64_t *shape, *strides; /* the tensor's own; strides in elements, NULL: none has gaps */
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    uint32_t major, minor;
    void *previous; /* the table of an older version */
    void *allocate, *from_object, *to_object;
    int (*view)(void *object, dl_tensor *tensor); /* may be NULL; without an owner, until the object changes */
    void *current_stream;
} dl_exchange;
