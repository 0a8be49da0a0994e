/* SPDX-License-Identifier: Apache-2.0
 *
 * Rough figures of the machine for the cost model, in a fraction of a second: a GEMM, a copy each
 * way, and a pass over host memory by every processor, each the best of several.
 */
#include "plan.h"

#include "../base/status.h"
#include "probe.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COPY_BYTES = 32 << 20, SWEEP_FLOATS = 4 << 20, MAX_THREADS = 128, MAX_EDGE = 8192 };

enum { REPETITIONS = 5 };
static const double long_enough = 0.003; /* s */

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
        probe_kernel c = { k,
                           { .struct_size = sizeof c.call,
                             .pass = MT_PASS_EVAL,
                             .n_in = 3,
                             .n_out = 1,
                             .batch.tokens = edge },
                           false };
        mt_tensor t = { memory, edge, edge, edge, compute, 0 };
        c.call.in[0] = t;
        t.data = (char *)memory + bytes;
        c.call.in[1] = t;
        t.data = (char *)memory + 2 * bytes;
        c.call.out[0] = t;
        work_bytes = k->workspace ? k->workspace(p->device, &c.call, false) : 0;
        if (work_bytes > 0)
            st = p->b->device_alloc(p->device, work_bytes, &work);
        double seconds = 0;
        if (st == MT_OK) {
            c.call.work = work;
            c.call.work_bytes = work_bytes;
            seconds = probe_best(p, probe_enqueue_kernel, &c);
        }
        if (work)
            p->b->device_free(p->device, work, work_bytes);
        p->b->device_free(p->device, memory, 3 * bytes);
        if (st < 0)
            return st;
        if (seconds > long_enough || edge == MAX_EDGE) {
            double e = (double)edge;
            *ret = 2 * e * e * e / seconds;
            return MT_OK;
        }
    }
}

typedef struct buffers {
    void *host, *device;
} buffers;

static void enqueue_in(const probe *p, const void *arg)
{
    const buffers *c = arg;
    p->b->copy_in(p->device, p->queue, c->device, c->host, COPY_BYTES);
}

static void enqueue_out(const probe *p, const void *arg)
{
    const buffers *c = arg;
    p->b->copy_out(p->device, p->queue, c->host, c->device, COPY_BYTES);
}

static mt_status measure_copies(const probe *p, plan_profile *ret)
{
    buffers c = { NULL, NULL };
    mt_status st = p->b->host_alloc(p->device, COPY_BYTES, &c.host);
    if (st < 0)
        return st;
    st = p->b->device_alloc(p->device, COPY_BYTES, &c.device);
    if (st == MT_OK) {
        memset(c.host, 0, COPY_BYTES);
        ret->copy_in = COPY_BYTES / probe_best(p, enqueue_in, &c);
        ret->copy_out = COPY_BYTES / probe_best(p, enqueue_out, &c);
        p->b->device_free(p->device, c.device, COPY_BYTES);
    }
    p->b->host_free(p->device, c.host, COPY_BYTES);
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
    double best = 0;
    for (int round = 0; round < REPETITIONS; round++) { /* the first one touches the pages */
        double from = probe_now();
        started = 0;
        while (started < n - 1 && pthread_create(&thread[started], NULL, sweep,
                                                 x + (int64_t)(started + 1) * SWEEP_FLOATS) == 0)
            started++;
        sweep(x);
        for (int i = 0; i < started; i++)
            pthread_join(thread[i], NULL);
        best =
            fmax(best, 2.0 * sizeof(float) * SWEEP_FLOATS * (started + 1) / (probe_now() - from));
    }
    free(x);
    *ret = best;
    return MT_OK;
}

mt_status plan_measure(const mt_backend *backend, void *device, mt_dtype compute, plan_profile *ret)
{
    plan_profile f = { 0 };
    probe p = { 0 };
    mt_status st = probe_open(backend, device, &p);
    if (st < 0)
        return st;
    st = measure_gemm(&p, compute, &f.gemm_flops);
    if (st == MT_OK)
        st = measure_copies(&p, &f);
    if (st == MT_OK)
        st = measure_host(&f.host_bandwidth);
    if (st == MT_OK)
        st = backend->error(device);
    probe_close(&p);
    if (st < 0)
        return st;
    f.attn_flops = f.gemm_flops / 2; /* good kernels reach about that: GPUs and CPUs alike */
    *ret = f;
    return MT_OK;
}
