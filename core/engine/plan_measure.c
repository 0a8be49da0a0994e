/* SPDX-License-Identifier: Apache-2.0
 *
 * Rough figures of the machine for the cost model, in a fraction of a second: one GEMM, one copy
 * each way, and a pass over host memory by every processor.
 */
#include "plan.h"

#include "../base/status.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { COPY_BYTES = 32 << 20, SWEEP_FLOATS = 4 << 20, MAX_THREADS = 128, MAX_EDGE = 8192 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct probe {
    const mt_backend *b;
    void *device, *queue;
} probe;

/* FLOP/s of y = x w^T, edge x edge x edge, growing until one call takes long enough to time. */
static mt_status measure_gemm(const probe *p, mt_dtype compute, double *ret)
{
    const mt_kernel *k = p->b->kernel(p->device, "linear");
    if (!k)
        return status_set(MT_ERR_UNSUPPORTED, "the backend has no kernel for 'linear'");
    for (int64_t edge = 256;; edge *= 2) {
        int64_t bytes = edge * edge * mt_dtype_size(compute), work_bytes;
        void *memory = NULL, *work = NULL;
        mt_status st = p->b->device_alloc(p->device, 3 * bytes, &memory);
        if (st < 0)
            return st;
        p->b->fill(p->device, p->queue, memory, 0, 3 * bytes);
        mt_op_call call = {
            .struct_size = sizeof call, .pass = MT_PASS_EVAL, .n_in = 3, .n_out = 1
        };
        mt_tensor t = { memory, edge, edge, edge, compute, 0 };
        call.in[0] = t;
        t.data = (char *)memory + bytes;
        call.in[1] = t;
        t.data = (char *)memory + 2 * bytes;
        call.out[0] = t;
        call.batch.tokens = edge;
        work_bytes = k->workspace ? k->workspace(p->device, &call, false) : 0;
        if (work_bytes > 0)
            st = p->b->device_alloc(p->device, work_bytes, &work);
        double seconds = 0;
        if (st == MT_OK) {
            call.work = work;
            call.work_bytes = work_bytes;
            /* The first call of a shape may set things up. */
            for (int i = 0; i < 2; i++) {
                p->b->queue_sync(p->device, p->queue);
                double from = now();
                k->forward(p->device, p->queue, &call);
                p->b->queue_sync(p->device, p->queue);
                seconds = now() - from;
            }
        }
        if (work)
            p->b->device_free(p->device, work, work_bytes);
        p->b->device_free(p->device, memory, 3 * bytes);
        if (st < 0)
            return st;
        if (seconds > 0.003 || edge == MAX_EDGE) {
            double e = (double)edge;
            *ret = 2 * e * e * e / seconds;
            return MT_OK;
        }
    }
}

static mt_status measure_copies(const probe *p, plan_profile *ret)
{
    void *host = NULL, *device = NULL;
    mt_status st = p->b->host_alloc(p->device, COPY_BYTES, &host);
    if (st < 0)
        return st;
    st = p->b->device_alloc(p->device, COPY_BYTES, &device);
    if (st == MT_OK) {
        memset(host, 0, COPY_BYTES);
        for (int i = 0; i < 2; i++) {
            double from = now();
            p->b->copy_in(p->device, p->queue, device, host, COPY_BYTES);
            p->b->queue_sync(p->device, p->queue);
            double between = now();
            p->b->copy_out(p->device, p->queue, host, device, COPY_BYTES);
            p->b->queue_sync(p->device, p->queue);
            ret->copy_in = COPY_BYTES / (between - from);
            ret->copy_out = COPY_BYTES / (now() - between);
        }
        p->b->device_free(p->device, device, COPY_BYTES);
    }
    p->b->host_free(p->device, host, COPY_BYTES);
    return st;
}

static void *sweep(void *arg)
{
    float *x = arg;
    for (int64_t i = 0; i < SWEEP_FLOATS; i++)
        x[i] = x[i] * 0.5f + 1.0f;
    return NULL;
}

/* Bytes/s that every processor together reads and writes, as the optimizer does. */
static mt_status measure_host(double *ret)
{
    pthread_t thread[MAX_THREADS];
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int n = online < 1 ? 1 : online > MAX_THREADS ? MAX_THREADS : (int)online;
    float *x = calloc((size_t)n * SWEEP_FLOATS, sizeof *x);
    if (!x)
        return status_nomem("measuring host memory", (size_t)n * SWEEP_FLOATS * sizeof *x);
    int started = 0;
    double seconds = 0;
    for (int round = 0; round < 2; round++) { /* the first one touches the pages */
        double from = now();
        started = 0;
        while (started < n - 1 && pthread_create(&thread[started], NULL, sweep,
                                                 x + (int64_t)(started + 1) * SWEEP_FLOATS) == 0)
            started++;
        sweep(x);
        for (int i = 0; i < started; i++)
            pthread_join(thread[i], NULL);
        seconds = now() - from;
    }
    free(x);
    *ret = 2.0 * sizeof(float) * SWEEP_FLOATS * (started + 1) / seconds;
    return MT_OK;
}

mt_status plan_measure(const mt_backend *backend, void *device, mt_dtype compute, plan_profile *ret)
{
    plan_profile f = { 0 };
    probe p = { backend, device, NULL };
    mt_status st = backend->queue_create(device, "measure", &p.queue);
    if (st < 0)
        return st;
    st = measure_gemm(&p, compute, &f.gemm_flops);
    if (st == MT_OK)
        st = measure_copies(&p, &f);
    if (st == MT_OK)
        st = measure_host(&f.host_bandwidth);
    if (st == MT_OK)
        st = backend->error(device);
    backend->queue_destroy(device, p.queue);
    if (st < 0)
        return st;
    f.attn_flops = f.gemm_flops / 2; /* good kernels reach about that: GPUs and CPUs alike */
    *ret = f;
    return MT_OK;
}
