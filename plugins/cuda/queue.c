/* SPDX-License-Identifier: Apache-2.0
 *
 * Queues are streams, events are CUDA events without timing; copies, and the device's clock.
 */
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- queues ---------------------------------------------------------------------------------- */

mt_status cuda_queue_create(void *device, const char *name, void **ret_queue)
{
    cuda_device *d = device;
    cuda_queue *q = calloc(1, sizeof *q);
    if (!q)
        return mt_fail(MT_ERR_NOMEM, "out of memory for queue '%s'", name);
    cuda_use(d);
    q->device = d;
    snprintf(q->name, sizeof q->name, "%s", name);
    cudaError_t e = cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        free(q);
        return mt_fail(MT_ERR_DEVICE, "CUDA device %d: no stream for queue '%s': %s", d->index,
                       name, cudaGetErrorString(e));
    }
    *ret_queue = q;
    return MT_OK;
}

void cuda_queue_destroy(void *device, void *queue)
{
    cuda_device *d = device;
    cuda_queue *q = queue;
    if (!q)
        return;
    cuda_queue_sync(d, q);
    cuda_blas_forget(q);
    cuda_ok(d, cudaStreamDestroy(q->stream), "ending a queue");
    free(q);
}

void cuda_queue_sync(void *device, void *queue)
{
    cuda_device *d = device;
    cuda_queue *q = queue;
    cuda_use(d);
    cuda_ok(d, cudaStreamSynchronize(q->stream), q->name);
}

/* ---- events ---------------------------------------------------------------------------------- */

mt_status cuda_event_create(void *device, void **ret_event)
{
    cuda_device *d = device;
    cudaEvent_t event = NULL;
    cuda_use(d);
    cudaError_t e = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return mt_fail(MT_ERR_DEVICE, "CUDA device %d: no event: %s", d->index,
                       cudaGetErrorString(e));
    }
    *ret_event = event;
    return MT_OK;
}

void cuda_event_destroy(void *device, void *event)
{
    cuda_device *d = device;
    if (!event)
        return;
    cuda_use(d);
    cuda_ok(d, cudaEventDestroy(event), "ending an event");
}

void cuda_event_record(void *device, void *event, void *queue)
{
    cuda_device *d = device;
    cuda_use(d);
    cuda_ok(d, cudaEventRecord(event, ((cuda_queue *)queue)->stream), "recording an event");
}

void cuda_event_wait(void *device, void *queue, void *event)
{
    cuda_device *d = device;
    cuda_use(d);
    cuda_ok(d, cudaStreamWaitEvent(((cuda_queue *)queue)->stream, event, 0), "waiting in a queue");
}

bool cuda_event_query(void *device, void *event)
{
    cuda_device *d = device;
    cuda_use(d);
    cudaError_t e = cudaEventQuery(event);
    if (e == cudaErrorNotReady)
        return false;
    /* A broken device must not make anyone wait for ever: `error` tells. */
    cuda_ok(d, e, "asking for an event");
    return true;
}

void cuda_event_sync(void *device, void *event)
{
    cuda_device *d = device;
    cuda_use(d);
    cuda_ok(d, cudaEventSynchronize(event), "waiting for an event");
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Cut where the host's address crosses from one registration into the next. */
static void copy_host(cuda_device *d, cuda_queue *q, char *dst, const char *src, int64_t bytes,
                      enum cudaMemcpyKind kind)
{
    cuda_use(d);
    while (bytes > 0) {
        uintptr_t host = (uintptr_t)(kind == cudaMemcpyHostToDevice ? src : dst);
        int64_t n = CUDA_HOST_CHUNK - (int64_t)(host % CUDA_HOST_CHUNK);
        if (n > bytes)
            n = bytes;
        if (!cuda_ok(d, cudaMemcpyAsync(dst, src, (size_t)n, kind, q->stream), "a copy"))
            return;
        dst += n;
        src += n;
        bytes -= n;
    }
}

void cuda_copy_in(void *device, void *queue, void *dst, const void *src, int64_t bytes)
{
    copy_host(device, queue, dst, src, bytes, cudaMemcpyHostToDevice);
}

void cuda_copy_out(void *device, void *queue, void *dst, const void *src, int64_t bytes)
{
    copy_host(device, queue, dst, src, bytes, cudaMemcpyDeviceToHost);
}

void cuda_copy(void *device, void *queue, void *dst, const void *src, int64_t bytes)
{
    cuda_device *d = device;
    cuda_queue *q = queue;
    cuda_use(d);
    if (bytes > 0)
        cuda_ok(d, cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDeviceToDevice, q->stream),
                "a copy on the device");
}

void cuda_fill(void *device, void *queue, void *dst, uint8_t byte, int64_t bytes)
{
    cuda_device *d = device;
    cuda_queue *q = queue;
    cuda_use(d);
    if (bytes > 0)
        cuda_ok(d, cudaMemsetAsync(dst, byte, (size_t)bytes, q->stream), "a fill");
}

static int64_t plane_bytes(int64_t n)
{
    return (n * 2 + 255) / 256 * 256;
}

int64_t cuda_join_scratch(const void *device, int64_t n)
{
    (void)device;
    return 2 * plane_bytes(n);
}

void cuda_copy_in_join(void *device, void *queue, float *dst, const uint16_t *hi, const int16_t *lo,
                       int64_t n, void *scratch)
{
    cuda_device *d = device;
    cuda_queue *q = queue;
    char *planes = scratch;
    if (n <= 0)
        return;
    cuda_copy_in(d, q, planes, hi, n * 2);
    cuda_copy_in(d, q, planes + plane_bytes(n), lo, n * 2);
    cuda_launch_join(q->stream, dst, (const uint16_t *)planes,
                     (const int16_t *)(planes + plane_bytes(n)), n);
    cuda_launched(d, "joining weights");
}

void cuda_sum_squares(void *device, void *queue, const float *x, int64_t n, double *dst,
                      void *scratch)
{
    cuda_device *d = device;
    cuda_use(d);
    cuda_launch_sum_squares(((cuda_queue *)queue)->stream, x, n, dst, scratch);
    cuda_launched(d, "a sum of squares");
}

int64_t cuda_sum_squares_scratch(const void *device, int64_t n)
{
    (void)device;
    return cuda_sum_blocks(n) * (int64_t)sizeof(double);
}

void cuda_narrow(void *device, void *queue, uint16_t *dst, float *x, int64_t n)
{
    cuda_device *d = device;
    if (n <= 0)
        return;
    cuda_use(d);
    cuda_launch_narrow(((cuda_queue *)queue)->stream, dst, x, n);
    cuda_launched(d, "narrowing gradients");
}

/* ---- time ------------------------------------------------------------------------------------ */

/* The two clocks drift apart by some microseconds a second. */
enum { CLOCK_SHOTS = 5, CLOCK_WAIT_NS = 20000000 };
static const uint64_t clock_valid_ns = 2000000000u;

/* Lets the device write its time and sees when that arrives: the soonest arrival tells most. */
static void calibrate(cuda_device *d)
{
    cuda_clock *c = &d->clock;
    int64_t best = INT64_MAX;
    for (int i = 0; i < CLOCK_SHOTS; i++) {
        uint64_t from = now(), at = from, seen;
        *c->slot = 0;
        cuda_launch_timestamp(c->stream, c->slot, 0);
        while ((seen = *c->slot) == 0 && at - from < CLOCK_WAIT_NS)
            at = now();
        at = now();
        if (seen == 0)
            break; /* the device is busy with long kernels: what we have must do */
        if ((int64_t)(at - seen) < best)
            best = (int64_t)(at - seen);
    }
    if (cudaStreamSynchronize(c->stream) == cudaSuccess && best != INT64_MAX)
        c->offset = best;
    c->set_at = now();
}

mt_status cuda_clock_open(cuda_device *d)
{
    cuda_clock *c = &d->clock;
    int low = 0, high = 0;
    void *slot = NULL;
    (void)cudaDeviceGetStreamPriorityRange(&low, &high);
    cudaError_t e = cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, high);
    if (e == cudaSuccess)
        e = cudaHostAlloc(&slot, sizeof *c->slot, cudaHostAllocMapped);
    c->slot = slot;
    if (e == cudaSuccess) {
        calibrate(d); /* the first launch also loads the code */
        calibrate(d);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess)
        return MT_OK;
    return mt_fail(MT_ERR_DEVICE,
                   "CUDA device %d (%s) runs no kernel of this plugin: %s; was it built for this "
                   "architecture (option gpu_archs)?",
                   d->index, d->name, cudaGetErrorString(e));
}

void cuda_clock_close(cuda_device *d)
{
    if (d->clock.stream)
        (void)cudaStreamDestroy(d->clock.stream);
    (void)cudaFreeHost((void *)d->clock.slot);
    pthread_mutex_destroy(&d->clock.lock);
}

void cuda_timestamp(void *device, void *queue, uint64_t *host_slot)
{
    cuda_device *d = device;
    cuda_use(d);
    pthread_mutex_lock(&d->clock.lock);
    if (now() - d->clock.set_at > clock_valid_ns)
        calibrate(d);
    int64_t offset = d->clock.offset;
    pthread_mutex_unlock(&d->clock.lock);
    cuda_launch_timestamp(((cuda_queue *)queue)->stream, host_slot, offset);
    cuda_launched(d, "a timestamp");
}

void cuda_delay(void *device, void *queue, uint64_t ns)
{
    cuda_device *d = device;
    cuda_use(d);
    cuda_launch_delay(((cuda_queue *)queue)->stream, ns);
    cuda_launched(d, "a delay");
}
