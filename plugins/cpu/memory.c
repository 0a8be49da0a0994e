/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the CPU device. Large blocks are mapped by themselves, aligned so that huge pages fit,
 * and go back to the system when freed; small ones come from the C library.
 */
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t memory_huge_page = (size_t)2 << 20;

static size_t memory_page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t memory_round(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Maps `bytes` (whole pages) at a multiple of the huge page. */
static void *memory_map(size_t bytes)
{
    size_t span = bytes + memory_huge_page;
    char *base = mmap(NULL, span, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    size_t before = memory_round((uintptr_t)base, memory_huge_page) - (uintptr_t)base;
    size_t after = span - before - bytes;
    if (before)
        munmap(base, before);
    if (after)
        munmap(base + before + bytes, after);
    /* Without huge pages everything works as well, only slower. */
    (void)madvise(base + before, bytes, MADV_HUGEPAGE);
    return base + before;
}

mt_status cpu_memory_alloc(void *device, int64_t bytes, void **ret)
{
    (void)device;
    void *p = NULL;
    if (bytes >= 0 && (uint64_t)bytes < memory_huge_page)
        p = aligned_alloc(256, memory_round(bytes ? (size_t)bytes : 1, 256));
    else if (bytes > 0 && bytes <= INT64_MAX / 2)
        p = memory_map(memory_round((size_t)bytes, memory_page()));
    if (!p)
        return mt_fail(MT_ERR_NOMEM, "cannot get %lld bytes of memory: %s", (long long)bytes,
                       strerror(ENOMEM));
    *ret = p;
    return MT_OK;
}

void cpu_memory_free(void *device, void *p, int64_t bytes)
{
    (void)device;
    if (!p)
        return;
    if ((uint64_t)bytes < memory_huge_page)
        free(p);
    else
        munmap(p, memory_round((size_t)bytes, memory_page()));
}
