/* The driver's functions for memory that several processes see: an allocation is a file without a name, which others
 * open by way of /proc. */
#define _GNU_SOURCE
#include "fake_device.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    char reserved[64];
} handle;

typedef struct {
    int process, file;
    size_t bytes;
    uint64_t number;
    uintptr_t base;
} contents;

EXPORT int cuMemGetAddressRange_v2(address *base, size_t *bytes, address at) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("MemGetAddressRange");
    range *r = fake_range_of((uintptr_t)at, 1);
    if (!code && (!r || r->device < 0)) code = fake_violation(INVALID_VALUE, "the range of what is on no device");
    if (!code) {
        *base = r->begin;
        *bytes = r->bytes;
    }
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuPointerGetAttribute(void *value, int attribute, address at) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("PointerGetAttribute");
    range *r = fake_range_of((uintptr_t)at, 1);
    if (!code && attribute != 7) code = fake_violation(INVALID_VALUE, "an attribute other than the buffer's number");
    if (!code && (!r || r->device < 0)) code = INVALID_VALUE; /* it has been freed, which is what is asked */
    if (!code) memcpy(value, &r->number, sizeof r->number);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT int cuIpcGetMemHandle(handle *made, address base) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("IpcGetMemHandle");
    range *r = fake_range_of((uintptr_t)base, 1);
    if (!code && (!r || r->begin != base || r->file < 0 || r->device != fake_stack[fake_depth - 1]))
        code = fake_violation(INVALID_VALUE, "cuIpcGetMemHandle of what is no allocation of the device");
    contents c = {getpid(), r ? r->file : -1, r ? r->bytes : 0, r ? r->number : 0, (uintptr_t)base};
    memset(made, 0, sizeof *made);
    if (!code) memcpy(made, &c, sizeof c);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

/* The mapping of another process's allocation, which is opened once and counted from then on. */
static int open_file(const contents *c, range **found) {
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/fd/%d", c->process, c->file);
    int file = open(name, O_RDWR | O_CLOEXEC);
    if (file < 0) return fake_violation(INVALID_VALUE, "a handle is opened of memory that has been freed");
    char *view = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    char *given = mmap(NULL, c->bytes, PROT_NONE, MAP_SHARED, file, 0);
    close(file);
    if (view == MAP_FAILED || given == MAP_FAILED) return INVALID_VALUE;
    *found = fake_add_range((uintptr_t)given, c->bytes, view, fake_stack[fake_depth - 1]);
    (*found)->number = c->number;
    (*found)->process = c->process;
    (*found)->remote = c->base;
    return OK;
}

/* What is open of that process where the allocation lies there: it, or one that has been freed since. */
static range *opened_at(const contents *c) {
    range *r = fake.ranges;
    while (r &&
           !(r->opened && r->process == c->process && r->remote < c->base + c->bytes && c->base < r->remote + r->bytes))
        r = r->next;
    return r;
}

EXPORT int cuIpcOpenMemHandle_v2(address *opened, handle given, unsigned flags) {
    contents c;
    memcpy(&c, &given, sizeof c);
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("IpcOpenMemHandle");
    if (!code && flags != 1) code = fake_violation(INVALID_VALUE, "a handle is opened without peer access");
    if (!code && c.process == getpid()) code = fake_violation(BAD_CONTEXT, "a process opens its own handle");
    range *r = opened_at(&c);
    int open = 0;
    for (range *other = fake.ranges; other; other = other->next) open += other->opened > 0;
    if (!code && r && r->number != c.number) code = ALREADY_MAPPED;
    if (!code && !r && fake.most_opened && open >= fake.most_opened) code = OUT_OF_MEMORY;
    if (!code && !r) code = open_file(&c, &r);
    if (!code) {
        r->opened++;
        *opened = r->begin;
    }
    pthread_mutex_unlock(&fake.lock);
    return code;
}

EXPORT void fake_open_at_most(int count) { /* of allocations, as where a device has few addresses for others */
    pthread_mutex_lock(&fake.lock);
    fake.most_opened = count;
    pthread_mutex_unlock(&fake.lock);
}

EXPORT int cuIpcCloseMemHandle(address at) {
    pthread_mutex_lock(&fake.lock);
    int code = fake_failing("IpcCloseMemHandle"), is_lost = code / 100 == LOST / 100; /* with all that is open */
    range *r = fake_range_of((uintptr_t)at, 1);
    if (!code && (!r || r->begin != at || !r->opened || r->device != fake_stack[fake_depth - 1]))
        code = fake_violation(INVALID_VALUE, "closed without being open");
    if ((!code || (is_lost && r)) && !--r->opened) {
        if (fake_in_use(r->view, r->bytes)) fake_violation(0, "a handle is closed while a stream will use it");
        munmap(r->view, r->bytes);
        munmap((void *)at, r->bytes);
        free(fake_take_range((uintptr_t)at));
    }
    pthread_mutex_unlock(&fake.lock);
    return code;
}
