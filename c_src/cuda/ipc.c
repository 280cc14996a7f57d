/* Exported and imported allocations, which are kept: a handle is made once, and opened once by each process.
 *
 * Who frees an allocation does not say so: torch gives memory back to the driver when it runs out of it, or when it is
 * told to. The driver keeps it as long as another process has it open. So each export looks whether one of the others
 * is still there, a new one whether all are, and counts how often not; who imports closes all it has of a process whose
 * count differs, once nobody reads from it. The driver opens nothing where something that was freed is still open:
 * that is closed first, and nobody can be reading from it, as a tensor lives until all have read it. (As UCX's cache.)
 */
#include "cuda/ipc.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/engine.h"
#include "engine/pause.h"

/* Of what the driver gives out to other processes, bytes; how long a sample is waited for, under the engine's lock. */
enum { DRIVERS_UNIT = 2 << 20, SAMPLE_NS = 1000000000 };

typedef struct {
    cuda_address base;
    uint64_t allocation;
    cuda_ipc_handle handle;
    int refused; /* a CUresult: there is no handle, as of memory that is mapped piece by piece */
} export;

static struct {
    pthread_mutex_t lock;
    export *list;
    int count, capacity;
    unsigned looked_at;
    uint64_t freed, process;
} exports = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int number_of(cuda_address base, uint64_t *allocation) {
    return mpp_cuda.pointer_attribute(allocation, CUDA_BUFFER_ID, base);
}

static int is_freed(int i) {
    uint64_t allocation;
    return number_of(exports.list[i].base, &allocation) || allocation != exports.list[i].allocation;
}

static void forget_freed(void) { /* all, as they go together */
    int before = exports.count;
    for (int i = exports.count - 1; i >= 0; i--)
        if (is_freed(i)) exports.list[i] = exports.list[--exports.count];
    exports.freed += exports.count < before;
}

static int find_export(cuda_address base, const export **found) {
    uint64_t allocation;
    int error = number_of(base, &allocation);
    if (error) return error;
    for (int i = 0; i < exports.count; i++) {
        *found = &exports.list[i];
        if ((*found)->base == base && (*found)->allocation == allocation) return CUDA_OK;
    }
    forget_freed(); /* in a list that grows with each call, the one that is looked at may always be the same */
    if (!mpp_has_room((void **)&exports.list, exports.count, &exports.capacity, sizeof(export)))
        return CUDA_OUT_OF_MEMORY;
    export *made = &exports.list[exports.count++];
    *made = (export){.base = base, .allocation = allocation};
    made->refused = mpp_cuda.ipc_handle(&made->handle, base);
    *found = made;
    return CUDA_OK;
}

static int export_in_context(uintptr_t address, mpp_exported *exported) {
    cuda_address base;
    size_t bytes;
    const export *found;
    int error = mpp_cuda.address_range(&base, &bytes, address);
    if (error) return error;
    if (exports.count && is_freed((int)(exports.looked_at++ % (unsigned)exports.count))) forget_freed();
    error = find_export(base, &found);
    if (error || found->refused) return error ? error : found->refused;
    if (!exports.process) exports.process = (uint64_t)getpid() << 40 ^ (uint64_t)now_ns();
    *exported = (mpp_exported){found->handle, exports.process, found->allocation, base,
                               bytes,         address - base,  exports.freed,     1};
    return CUDA_OK;
}

int mpp_export(const copier *c, uintptr_t address, mpp_exported *exported) {
    if (exported->is_there && address - exported->base < exported->bytes) {
        exported->offset = address - exported->base;
        return CUDA_OK;
    }
    int error = mpp_enter_device(c->device);
    if (error) return error;
    pthread_mutex_lock(&exports.lock);
    error = export_in_context(address, exported);
    pthread_mutex_unlock(&exports.lock);
    mpp_leave_device();
    return error;
}

/* ---- what others have exported ---- */

typedef struct {
    uint64_t allocation;
    uint64_t base, bytes; /* in the other process */
    cuda_address at;
} import;

struct mpp_imports {
    mpp_imports *next;
    uint64_t process;
    const cuda_device *device;
    int holders, readers;
    import *list;
    int count, capacity;
    uint64_t freed; /* of the other process, when these were opened */
};

static struct {
    pthread_mutex_t lock;
    mpp_imports *first;
} imported = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* In the device's context: what is open of memory that was at that of `exported`; NULL: all. */
static void close_what_was_at(mpp_imports *imports, const mpp_exported *exported) {
    for (int i = imports->count - 1; i >= 0; i--) {
        const import *o = &imports->list[i];
        if (exported && (o->base >= exported->base + exported->bytes || exported->base >= o->base + o->bytes)) continue;
        mpp_cuda.ipc_close(o->at);
        imports->list[i] = imports->list[--imports->count];
    }
}

static int import_in_context(mpp_imports *imports, const mpp_exported *exported, uintptr_t *address) {
    if (imports->freed != exported->freed && !imports->readers) {
        close_what_was_at(imports, NULL);
        imports->freed = exported->freed;
    }
    for (int i = 0; i < imports->count; i++) {
        *address = imports->list[i].at + exported->offset;
        if (imports->list[i].allocation == exported->allocation) return CUDA_OK;
    }
    close_what_was_at(imports, exported);
    if (!mpp_has_room((void **)&imports->list, imports->count, &imports->capacity, sizeof *imports->list))
        return CUDA_OUT_OF_MEMORY;
    cuda_address at;
    int error = mpp_cuda.ipc_open(&at, exported->handle, CUDA_LAZY_PEER_ACCESS);
    if (error && imports->count && !imports->readers) { /* so much may be open that there is no room for it */
        close_what_was_at(imports, NULL);
        error = mpp_cuda.ipc_open(&at, exported->handle, CUDA_LAZY_PEER_ACCESS);
    }
    if (error) return error;
    imports->list[imports->count++] = (import){exported->allocation, exported->base, exported->bytes, at};
    *address = at + exported->offset;
    return CUDA_OK;
}

int mpp_import(mpp_imports *imports, const mpp_exported *exported, uintptr_t *address) {
    int error = mpp_enter_device(imports->device);
    if (error) return error;
    pthread_mutex_lock(&imported.lock);
    error = import_in_context(imports, exported, address);
    pthread_mutex_unlock(&imported.lock);
    mpp_leave_device();
    return error;
}

static mpp_imports *find_imports(const cuda_device *device, uint64_t process) {
    mpp_imports *found = imported.first;
    while (found && !(found->device == device && found->process == process)) found = found->next;
    return found;
}

mpp_imports *mpp_hold_imports(const cuda_device *device, uint64_t process) {
    pthread_mutex_lock(&imported.lock);
    mpp_imports *imports = find_imports(device, process);
    if (!imports && (imports = calloc(1, sizeof *imports))) {
        *imports = (mpp_imports){.next = imported.first, .process = process, .device = device};
        imported.first = imports;
    }
    if (imports) imports->holders++;
    pthread_mutex_unlock(&imported.lock);
    return imports;
}

void mpp_count_readers(mpp_imports *imports, int more) {
    pthread_mutex_lock(&imported.lock);
    imports->readers += more;
    pthread_mutex_unlock(&imported.lock);
}

void mpp_let_go_of_imports(mpp_imports *imports) {
    pthread_mutex_lock(&imported.lock);
    if (--imports->holders == 0 && !imports->readers && !mpp_enter_device(imports->device)) {
        close_what_was_at(imports, NULL);
        mpp_leave_device();
        MPP_TAKE_OUT(imported.first, next, imports);
        free(imports->list);
        free(imports);
    }
    pthread_mutex_unlock(&imported.lock);
}

/* ---- whether what is read of others is what is there ---- */

/* The word goes to a place on the device, where that at `from` (0: none) comes over it, and back. A CUresult. */
static int send_around(const copier *c, uint64_t *word, cuda_address at, cuda_address from) {
    int64_t until = now_ns() + SAMPLE_NS;
    int error = mpp_enter_device(c->device);
    if (error) return error;
    error = mpp_cuda.to_device(at, word, sizeof *word, c->store);
    if (!error && from) error = mpp_cuda.in_device(at, from, sizeof *word, c->store);
    if (!error) error = mpp_cuda.to_host(word, at, sizeof *word, c->store);
    while (!error && (error = mpp_cuda.stream_query(c->store)) == CUDA_NOT_READY && now_ns() < until) error = CUDA_OK;
    return mpp_left_device(error);
}

/* The process's number. Behind it on the device is room for those of others. It stays to the end of the process; what
 * cannot be shown or written is not tried again. NULL: no memory. */
static mpp_exported *new_sample(const copier *c, uint64_t *word) {
    cuda_address at;
    if (mpp_enter_device(c->device) || mpp_left_device(mpp_cuda.alloc(&at, DRIVERS_UNIT))) return NULL;
    mpp_exported *made = calloc(1, sizeof *made);
    if (made && !mpp_export(c, at, made)) {
        *word = made->process;
        made->is_there = !send_around(c, word, at, 0);
    }
    return made;
}

const mpp_exported *mpp_own_sample(const copier *c, uint64_t *word) {
    cuda_device *device = c->device;
    if (!device->sample) device->sample = new_sample(c, word);
    return device->sample && device->sample->is_there ? device->sample : NULL;
}

int mpp_reads_right(const copier *c, mpp_imports *imports, const mpp_exported *theirs, uint64_t *word) {
    mpp_exported sample = *theirs;
    uintptr_t from;
    sample.freed = imports->freed; /* it is there for good */
    *word = 0;
    return !mpp_import(imports, &sample, &from) &&
           !send_around(c, word, c->device->sample->base + sizeof *word, from) && *word == sample.process;
}
