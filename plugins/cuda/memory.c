/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the device, and pinned host memory: mapped with huge pages, touched by several threads,
 * then registered in chunks, which is some ten times faster than cudaHostAlloc and exact in size.
 */
#include "cuda.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { TOUCH_THREADS = 16, TOUCH_MIN = 64 << 20 };
static const size_t huge_page = (size_t)2 << 20;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static size_t whole_pages(int64_t bytes)
{
    return round_up(bytes > 0 ? (size_t)bytes : 1, (size_t)sysconf(_SC_PAGESIZE));
}

/* ---- device ---------------------------------------------------------------------------------- */

mt_status cuda_device_alloc(void *device, int64_t bytes, void **ret)
{
    cuda_device *d = device;
    void *p = NULL;
    cuda_use(d);
    cudaError_t e = cudaMalloc(&p, bytes > 0 ? (size_t)bytes : 1);
    if (e != cudaSuccess) {
        size_t available = 0, total = 0;
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&available, &total);
        return mt_fail(e == cudaErrorMemoryAllocation ? MT_ERR_NOMEM : MT_ERR_DEVICE,
                       "CUDA device %d (%s): cannot get %lld bytes of device memory, %zu of %zu "
                       "are free: %s",
                       d->index, d->name, (long long)bytes, available, total,
                       cudaGetErrorString(e));
    }
    *ret = p;
    return MT_OK;
}

void cuda_device_free(void *device, void *p, int64_t bytes)
{
    cuda_device *d = device;
    (void)bytes;
    cuda_use(d);
    cuda_ok(d, cudaFree(p), "freeing device memory");
}

/* ---- pinned host memory ---------------------------------------------------------------------- */

typedef struct touch_part {
    pthread_t thread;
    char *from, *to;
    size_t page;
} touch_part;

static void *touch(void *arg)
{
    const touch_part *t = arg;
    for (volatile char *p = t->from; p < (volatile char *)t->to; p += t->page)
        *p = 0;
    return NULL;
}

/* Lets the system find the pages before the driver asks for them one after the other. */
static void touch_all(char *base, size_t bytes)
{
    touch_part part[TOUCH_THREADS];
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    size_t n = bytes / TOUCH_MIN + 1;
    if (n > TOUCH_THREADS)
        n = TOUCH_THREADS;
    if (online > 0 && n > (size_t)online)
        n = (size_t)online;
    size_t each = round_up(bytes / n + 1, huge_page), started = 0;
    for (size_t i = 0; i < n; i++) {
        size_t from = i * each < bytes ? i * each : bytes;
        size_t to = from + each < bytes ? from + each : bytes;
        part[i] = (touch_part){ .from = base + from,
                                .to = base + to,
                                .page = (size_t)sysconf(_SC_PAGESIZE) };
    }
    while (started + 1 < n &&
           pthread_create(&part[started].thread, NULL, touch, &part[started]) == 0)
        started++;
    for (size_t i = started; i < n; i++)
        touch(&part[i]);
    for (size_t i = 0; i < started; i++)
        pthread_join(part[i].thread, NULL);
}

/* Bytes from p to the next multiple of CUDA_HOST_CHUNK, at most n. */
static size_t chunk_at(const char *p, size_t n)
{
    size_t room = CUDA_HOST_CHUNK - (uintptr_t)p % CUDA_HOST_CHUNK;
    return room < n ? room : n;
}

static void unregister(char *base, size_t bytes)
{
    for (size_t at = 0, n; at < bytes; at += n) {
        n = chunk_at(base + at, bytes - at);
        (void)cudaHostUnregister(base + at);
    }
    (void)cudaGetLastError();
}

static mt_status pin(const cuda_device *d, char *base, size_t bytes)
{
    for (size_t at = 0, n; at < bytes; at += n) {
        n = chunk_at(base + at, bytes - at);
        cudaError_t e =
            cudaHostRegister(base + at, n, cudaHostRegisterPortable | cudaHostRegisterMapped);
        if (e == cudaSuccess)
            continue;
        struct rlimit lock = { 0 };
        (void)cudaGetLastError();
        (void)getrlimit(RLIMIT_MEMLOCK, &lock);
        char limit[64];
        if (lock.rlim_cur == RLIM_INFINITY)
            snprintf(limit, sizeof limit, "unlimited");
        else
            snprintf(limit, sizeof limit, "%llu bytes", (unsigned long long)lock.rlim_cur);
        if (at > 0)
            unregister(base, at);
        return mt_fail(MT_ERR_NOMEM,
                       "CUDA device %d: cannot pin %zu bytes of host memory (%zu were): %s; the "
                       "limit of locked memory is %s: raise it with `ulimit -l unlimited` or in "
                       "the container's settings",
                       d->index, bytes, at, cudaGetErrorString(e), limit);
    }
    return MT_OK;
}

mt_status cuda_host_alloc(void *device, int64_t bytes, void **ret)
{
    cuda_device *d = device;
    size_t size = whole_pages(bytes), span = size + huge_page;
    cuda_use(d);
    char *base = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return mt_fail(MT_ERR_NOMEM, "cannot get %lld bytes of host memory: %s", (long long)bytes,
                       strerror(errno));
    /* Aligned so that huge pages fit; the rest goes back. */
    size_t before = round_up((uintptr_t)base, huge_page) - (uintptr_t)base;
    if (before)
        munmap(base, before);
    base += before;
    if (span - before - size)
        munmap(base + size, span - before - size);
    (void)madvise(base, size, MADV_HUGEPAGE);
    touch_all(base, size);
    mt_status st = pin(d, base, size);
    if (st != MT_OK) {
        munmap(base, size);
        return st;
    }
    *ret = base;
    return MT_OK;
}

void cuda_host_free(void *device, void *p, int64_t bytes)
{
    if (!p)
        return;
    cuda_use(device);
    unregister(p, whole_pages(bytes));
    munmap(p, whole_pages(bytes));
}
