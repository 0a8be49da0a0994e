/* SPDX-License-Identifier: Apache-2.0
 *
 * Timing what a device's queue does.
 */
#include "probe.h"

#include <math.h>
#include <time.h>

enum { REPETITIONS = 5 };
static const double too_long = 0.1; /* s */

double probe_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

mt_status probe_open(const mt_backend *b, void *device, probe *ret)
{
    probe p = { b, device, NULL, NULL };
    void *ns = NULL;
    mt_status st = b->queue_create(device, "measure", &p.queue);
    if (st < 0)
        return st;
    st = b->host_alloc(device, 2 * sizeof *p.ns, &ns);
    if (st < 0) {
        b->queue_destroy(device, p.queue);
        return st;
    }
    p.ns = ns;
    *ret = p;
    return MT_OK;
}

void probe_close(probe *p)
{
    if (!p->b)
        return;
    p->b->queue_sync(p->device, p->queue);
    p->b->host_free(p->device, p->ns, 2 * sizeof *p->ns);
    p->b->queue_destroy(p->device, p->queue);
    *p = (probe){ 0 };
}

double probe_best(const probe *p, void (*enqueue)(const probe *, const void *), const void *arg)
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

mt_status probe_make_noise(const probe *p, mt_dtype dtype, void **ret)
{
    uint32_t seed = 1;
    mt_status st = p->b->host_alloc(p->device, PROBE_NOISE_BYTES, ret);
    if (st < 0) {
        *ret = NULL;
        return st;
    }
    for (int64_t i = 0; i < PROBE_NOISE_BYTES / mt_dtype_size(dtype); i++) {
        seed = seed * 1664525u + 1013904223u;
        float x = (float)(seed >> 8) / (1 << 23) - 1.0f;
        if (dtype == MT_BF16)
            ((uint16_t *)*ret)[i] = mt_f32_to_bf16(x);
        else if (dtype == MT_F64)
            ((double *)*ret)[i] = x;
        else
            ((float *)*ret)[i] = x;
    }
    return MT_OK;
}

void probe_free_noise(const probe *p, void *noise)
{
    if (!noise)
        return;
    p->b->queue_sync(p->device, p->queue);
    p->b->host_free(p->device, noise, PROBE_NOISE_BYTES);
}

void probe_put_noise(const probe *p, const void *noise, void *to, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += PROBE_NOISE_BYTES)
        p->b->copy_in(p->device, p->queue, (char *)to + at, noise,
                      bytes - at < PROBE_NOISE_BYTES ? bytes - at : PROBE_NOISE_BYTES);
}

void probe_enqueue_kernel(const probe *p, const void *kernel_call)
{
    const probe_kernel *k = kernel_call;
    if (k->backward)
        k->kernel->backward(p->device, p->queue, &k->call);
    else
        k->kernel->forward(p->device, p->queue, &k->call);
}
