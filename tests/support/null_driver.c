// A CUDA driver without a GPU: each call succeeds, and nothing runs. Built as libcuda.so.1 and first in LD_LIBRARY_PATH,
// it lets tests see what the host does for a launch: how many calls, and which bytes of arguments.
//
// null_count(name) = calls of a function below; "" = of all.   null_arguments(n) = the bytes of the launch that came n
// launches before the last one.
// null_fail(name, code, after) = after so many calls of this function, the next one returns that error.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { KINDS = 64, BYTES = 4096, LAUNCHES = 16, GPU_COMPUTE_CAPABILITY = 90 };

static struct { const char *name; long calls; int error, after; } kinds[KINDS];
static __thread uintptr_t current;  // the calling thread's context
static struct { char bytes[BYTES]; size_t size; } arguments[LAUNCHES];  // of the last launches, in turn
static unsigned long launches;

static int called(const char *name) {
    for (int i = 0; i < KINDS; i++) {
        if (kinds[i].name == NULL) kinds[i].name = name;
        if (kinds[i].name != name && strcmp(kinds[i].name, name)) continue;
        kinds[i].calls++;
        if (kinds[i].after > 0) { kinds[i].after--; return 0; }
        int error = kinds[i].error;
        kinds[i].error = 0;
        return error;
    }
    return 999;
}

long null_count(const char *name) {
    long calls = 0;
    for (int i = 0; i < KINDS && kinds[i].name; i++)
        if (!*name || !strcmp(kinds[i].name, name)) calls += kinds[i].calls;
    return calls;
}

void null_fail(const char *name, int error, int after) {
    called(name);
    for (int i = 0; i < KINDS && kinds[i].name; i++)
        if (!strcmp(kinds[i].name, name)) kinds[i].calls--, kinds[i].error = error, kinds[i].after = after;
}

const void *null_arguments(unsigned before, size_t *size) {
    unsigned long at = (launches - 1 - before) % LAUNCHES;
    *size = arguments[at].size;
    return arguments[at].bytes;
}
uintptr_t null_context(void) { return current; }

static void note(void **extra) {
    if (extra && extra[0] == (void *)1 && extra[2] == (void *)2)
        memcpy(arguments[launches % LAUNCHES].bytes, extra[1],
               arguments[launches % LAUNCHES].size = *(size_t *)extra[3]);
    launches++;
}

#define CALL(name, parameters, ...) \
    int name parameters { int error = called(#name); if (error) return error; __VA_ARGS__; return 0; }
typedef uintptr_t word;
static word handles = 0x10000;

CALL(cuInit, (unsigned flags))
CALL(cuDriverGetVersion, (int *version), *version = 13000)
CALL(cuDeviceGetCount, (int *count), *count = 2)
CALL(cuDeviceGet, (int *device, int ordinal), *device = ordinal)
CALL(cuDeviceGetName, (char *name, int size, int device), strncpy(name, "null", size))
CALL(cuDeviceGetUuid, (char *uuid, int device), memset(uuid, 1 + device, 16))
CALL(cuDeviceGetAttribute, (int *value, int attribute, int device),
     *value = attribute == 75 ? GPU_COMPUTE_CAPABILITY / 10 : attribute == 76 ? GPU_COMPUTE_CAPABILITY % 10
            : attribute == 10 ? 32 : 1024)
CALL(cuDeviceTotalMem, (size_t *size, int device), *size = (size_t)1 << 36)
CALL(cuMemGetInfo, (size_t *free, size_t *all), *free = *all = (size_t)1 << 36)
CALL(cuDevicePrimaryCtxRetain, (word *context, int device), *context = 0x1000 + device)
CALL(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), *flags = 0, *active = 1)
CALL(cuCtxGetCurrent, (word *context), *context = current)
CALL(cuCtxSetCurrent, (word context), current = context)
CALL(cuCtxPushCurrent, (word context), current = context)
CALL(cuCtxPopCurrent, (word *context), *context = current)
CALL(cuCtxGetDevice, (int *device), *device = current ? current - 0x1000 : 0)
CALL(cuCtxGetFlags, (unsigned *flags), *flags = 0)
CALL(cuCtxGetId, (word context, uint64_t *id), *id = 1)
CALL(cuStreamGetCtx, (word stream, word *context), *context = 0x1000)
CALL(cuStreamGetCtx_v2, (word stream, word *context, word *green), *context = 0x1000, *green = 0)
CALL(cuStreamGetDevice, (word stream, int *device), *device = 0)
CALL(cuStreamIsCapturing, (word stream, int *status), *status = 0)
CALL(cuThreadExchangeStreamCaptureMode, (int *mode))
CALL(cuModuleLoadData, (word *module, const void *image), *module = ++handles)
CALL(cuModuleLoadDataEx, (word *module), *module = ++handles)
CALL(cuModuleGetFunction, (word *function, word module, const char *name), *function = module)
CALL(cuLibraryLoadData, (word *library), *library = ++handles)
CALL(cuLibraryGetModule, (word *module, word library), *module = library)
CALL(cuLibraryGetKernel, (word *kernel, word library, const char *name), *kernel = library)
CALL(cuKernelGetFunction, (word *function, word kernel), *function = kernel)
CALL(cuKernelGetAttribute, (int *value), *value = 0)
CALL(cuFuncGetAttribute, (int *value), *value = 0)
CALL(cuPointerGetAttribute, (void *value, int attribute, uint64_t pointer),
     if (attribute == 9) *(int *)value = 0; else *(uint64_t *)value = pointer)
CALL(cuLaunchKernel, (word function, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z,
     unsigned shared, word stream, void **parameters, void **extra), note(extra))
CALL(cuGetErrorName, (int code, const char **text), *text = "NULL_ERROR")
CALL(cuGetErrorString, (int code, const char **text), *text = "an error of the null driver")

static int nothing(void) { return 0; }

// Bindings of Python look functions up here. A function of the driver that is not above does nothing.
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    if (status) *status = 0;
    Dl_info own;
    dladdr((void *)nothing, &own);
    void *library = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!strcmp(name, "cuGetProcAddress")) name = "cuGetProcAddress_v2";
    *found = library ? dlsym(library, name) : NULL;
    if (!*found) *found = (void *)nothing;
    return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
