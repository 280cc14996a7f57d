#include "cuda/cuda_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "shim.h"

cuda_api mpp_cuda;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

void mpp_cuda_error_text(int code, char *text, int length) {
    const char *name = NULL, *what = NULL;
    if (mpp_cuda.error_name) mpp_cuda.error_name(code, &name);
    if (mpp_cuda.error_string) mpp_cuda.error_string(code, &what);
    snprintf(text, (size_t)length, "%s: %s (%d)", name ? name : "CUDA error", what ? what : "no text for it", code);
}

static int find_functions(const char *library, cuda_api *api, char *message, int length) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL), *symbol;
    if (!handle) {
        const char *why = dlerror();
        snprintf(message, (size_t)length, "the CUDA driver library cannot be loaded: %s", why ? why : library);
        return -1;
    }
    /* Stays loaded: torch uses it, and a driver does not survive being unloaded. */
#define MPP_FIND(name, text, arguments)                                                                                \
    symbol = dlsym(handle, text);                                                                                      \
    if (!symbol) {                                                                                                     \
        snprintf(message, (size_t)length, "the CUDA driver library %s has no function " text, library);                \
        return -1;                                                                                                     \
    }                                                                                                                  \
    memcpy(&api->name, &symbol, sizeof symbol);
    MPP_CUDA_FUNCTIONS(MPP_FIND)
#undef MPP_FIND
    return 0;
}

/* The library is a parameter so that tests can give a stand-in; the first one found is kept. */
int mpp_cuda_load(const char *library, char *message, int length) {
    pthread_mutex_lock(&loading);
    int failed = 0;
    if (!loaded) {
        cuda_api api;
        failed = find_functions(library, &api, message, length);
        if (!failed) {
            mpp_cuda = api;
            int code = mpp_cuda.init(0);
            failed = code != CUDA_OK;
            if (failed) mpp_cuda_error_text(code, message, length);
        }
        loaded = !failed;
    }
    pthread_mutex_unlock(&loading);
    return failed;
}
