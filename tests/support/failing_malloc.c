/* A library to preload: the n-th allocation of at least MIN_BYTES from now on fails, once, in any thread.

     fail_after(n)   n = 0, 1, ...: let the allocation after n others fail; -1 = none
     counted()       how many there were since

   glibc's own functions do the work. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

#define MIN_BYTES 4096

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_long left = -1, seen = 0;

void fail_after(long n) { atomic_store(&seen, 0); atomic_store(&left, n); }

long counted(void) { return atomic_load(&seen); }

static int fails(size_t bytes) {
    if (bytes < MIN_BYTES)
        return 0;
    atomic_fetch_add(&seen, 1);
    if (atomic_load(&left) < 0 || atomic_fetch_sub(&left, 1) != 0)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes) { return fails(bytes) ? NULL : __libc_malloc(bytes); }

void *calloc(size_t count, size_t bytes) { return fails(count * bytes) ? NULL : __libc_calloc(count, bytes); }

void *realloc(void *old, size_t bytes) { return fails(bytes) ? NULL : __libc_realloc(old, bytes); }

void *memalign(size_t alignment, size_t bytes) { return fails(bytes) ? NULL : __libc_memalign(alignment, bytes); }

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **found, size_t alignment, size_t bytes) {
    void *made = fails(bytes) ? NULL : __libc_memalign(alignment, bytes);
    if (made == NULL)
        return ENOMEM;
    *found = made;
    return 0;
}
