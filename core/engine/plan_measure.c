/* SPDX-License-Identifier: Apache-2.0
 *
 * Rough figures of the machine for the cost model, in a fraction of a second: a GEMM, a copy each
 * way, and a pass over host memory by every processor, each the best of several.
 */
#include "plan.h"

#include "../base/status.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { COPY_BYTES = 32 << 20, SWEEP_FLOATS = 4 << 20, MAX_THREADS = 128, MAX_EDGE = 8192 };

/* On a machine that does other work too, a single call can take many times as long as those of a
 * run do on average. */
enum { REPETITIONS = 5 };
static const double long_enough = 0.003, too_long = 0.1; /* s */

typedef struct probe {
    const mt_backend *b;
    void *device, *queue;
    uint64_t *ns; /* [2] when the queue began and ended, written by itself */
} probe;

/* Seconds that the queue spends on what `enqueue` puts there: the best of several. */
static double best_seconds(const probe *p, void (*enqueue)(const probe *, const void *),
                           const void *arg)
{
    double best = INFINITY, total = 0;
    /* The first call of a shape may set things up. */
    for (int i = 0; i < 2 || (i < REPETITIONS && total < too_long); i++) {
        p->b->timestamp(p->device, p->queue, &p->ns[0]);
        enqueue(p, arg);
        p->b->timestamp(p->device, p->queue, &p->ns[1]);
        p->b->queue_sync(p->device, p->queue);
        double took = fmax((double)(p->ns[1] - p->ns[0]) * 1e-9, 1e-9);
        best = fmin(best, took);
        total += took;
    }
    return best;
}

typedef struct kernel_call {
    const mt_kernel *kernel;
    mt_op_call call;
} kernel_call;

static void enqueue_forward(const probe *p, const void *arg)
{
    const kernel_call *c = arg;
    c->kernel->forward(p->device, p->queue, &c->call);
}

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
        kernel_call c = { k,
                          { .struct_size = sizeof c.call,
                            .pass = MT_PASS_EVAL,
                            .n_in = 3,
                            .n_out = 1,
                            .batch.tokens = edge } };
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
            seconds = best_seconds(p, enqueue_forward, &c);
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
        ret->copy_in = COPY_BYTES / best_seconds(p, enqueue_in, &c);
        ret->copy_out = COPY_BYTES / best_seconds(p, enqueue_out, &c);
        p->b->device_free(p->device, c.device, COPY_BYTES);
    }
    p->b->host_free(p->device, c.host, COPY_BYTES);
    return st;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
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
        double from = now();
        started = 0;
        while (started < n - 1 && pthread_create(&thread[started], NULL, sweep,
                                                 x + (int64_t)(started + 1) * SWEEP_FLOATS) == 0)
            started++;
        sweep(x);
        for (int i = 0; i < started; i++)
            pthread_join(thread[i], NULL);
        best = fmax(best, 2.0 * sizeof(float) * SWEEP_FLOATS * (started + 1) / (now() - from));
    }
    free(x);
    *ret = best;
    return MT_OK;
}

mt_status plan_measure(const mt_backend *backend, void *device, mt_dtype compute, plan_profile *ret)
{
    plan_profile f = { 0 };
    probe p = { backend, device, NULL, NULL };
    void *ns = NULL;
    mt_status st = backend->queue_create(device, "measure", &p.queue);
    if (st < 0)
        return st;
    st = backend->host_alloc(device, 2 * sizeof *p.ns, &ns);
    if (st < 0)
        goto out;
    p.ns = ns;
    st = measure_gemm(&p, compute, &f.gemm_flops);
    if (st == MT_OK)
        st = measure_copies(&p, &f);
    if (st == MT_OK)
        st = measure_host(&f.host_bandwidth);
    if (st == MT_OK)
        st = backend->error(device);
    backend->host_free(device, ns, 2 * sizeof *p.ns);
    if (st < 0)
        goto out;
    f.attn_flops = f.gemm_flops / 2; /* good kernels reach about that: GPUs and CPUs alike */
    *ret = f;
out:
    backend->queue_destroy(device, p.queue);
    return st;
}
