/* SPDX-License-Identifier: Apache-2.0
 *
 * Rough figures of the machine for the cost model, in a fraction of a second: a GEMM, attention, a
 * recurrence, a copy each way, and a pass over host memory by every processor, each the best of
 * several.
 */
#include "hardware.h"

#include "../base/status.h"
#include "probe.h"

#include <stdlib.h>
#include <string.h>

enum { COPY_BYTES = 32 << 20, DEVICE_BYTES = 256 << 20, MAX_EDGE = 8192 };

static const double long_enough = 0.003; /* s */

/* FLOP/s of y = x w^T, edge x edge x edge, growing until one call takes long enough to time. */
static mt_status measure_gemm(const probe *p, const void *noise, mt_dtype compute, double *ret)
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
        probe_put_noise(p, noise, memory, 2 * bytes);
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

enum { ATTN_DIM = 128, ATTN_DOCUMENT = 1024, ATTN_TOKENS = 8192 };

/* One size of attention: `tokens` tokens in documents of up to 1024, with that many heads of 128.
 */
static mt_status time_attention(const probe *p, const void *noise, const mt_kernel *k,
                                mt_dtype compute, int64_t tokens, int32_t heads,
                                double *ret_seconds)
{
    enum { TENSORS = 8 }; /* q, k, v, out, and a gradient of each */
    const mt_attn_attr attr = {
        .heads = heads, .kv_heads = heads, .qk_dim = ATTN_DIM, .v_dim = ATTN_DIM, .scale = 0.09
    };
    int64_t length = tokens < ATTN_DOCUMENT ? tokens : ATTN_DOCUMENT, cols = heads * ATTN_DIM;
    int64_t each = tokens * cols * mt_dtype_size(compute), aux = tokens * heads * 4;
    int64_t starts = (tokens / length + 1) * 4, bytes = TENSORS * each + aux + 256;
    int32_t *host = NULL;
    char *memory = NULL;
    void *got = NULL, *work = NULL;
    int64_t work_bytes = 0;
    mt_status st = p->b->host_alloc(p->device, starts, &got);
    if (st < 0)
        return st;
    host = got;
    got = NULL;
    st = p->b->device_alloc(p->device, bytes, &got);
    if (st < 0)
        goto out;
    memory = got;
    for (int64_t d = 0; d <= tokens / length; d++)
        host[d] = (int32_t)(d * length);
    probe_put_noise(p, noise, memory, TENSORS * each);
    int32_t *doc_starts = (int32_t *)(memory + TENSORS * each + aux);
    p->b->copy_in(p->device, p->queue, doc_starts, host, starts);
    probe_kernel c = { k,
                       { .struct_size = sizeof c.call,
                         .pass = MT_PASS_TRAIN,
                         .attr = &attr,
                         .n_in = 4,
                         .n_out = 1,
                         .n_aux = 1,
                         .batch = { .tokens = tokens,
                                    .documents = tokens / length,
                                    .max_document = length,
                                    .doc_starts = doc_starts,
                                    .host_doc_starts = host } },
                       false };
    for (int i = 0; i < 4; i++) {
        const mt_tensor x = { memory + i * each, tokens, cols, cols, compute, 0 };
        mt_tensor d = x;
        d.data = memory + (4 + i) * each;
        *(i < 3 ? &c.call.in[i] : &c.call.out[0]) = x;
        *(i < 3 ? &c.call.d_in[i] : &c.call.d_out[0]) = d;
    }
    c.call.aux[0] = (mt_tensor){ memory + TENSORS * each, tokens, heads, heads, MT_F32, 0 };
    for (int backward = 0; backward < 2 && k->workspace; backward++) {
        int64_t n = k->workspace(p->device, &c.call, backward);
        work_bytes = n > work_bytes ? n : work_bytes;
    }
    if (work_bytes > 0 && (st = p->b->device_alloc(p->device, work_bytes, &work)) < 0)
        goto out;
    c.call.work = work;
    c.call.work_bytes = work_bytes;
    ret_seconds[0] = probe_best(p, probe_enqueue_kernel, &c);
    c.backward = true;
    ret_seconds[1] = probe_best(p, probe_enqueue_kernel, &c);
out:
    if (work)
        p->b->device_free(p->device, work, work_bytes);
    if (memory)
        p->b->device_free(p->device, memory, bytes);
    p->b->host_free(p->device, host, starts);
    return st;
}

/* FLOP/s of attention, of which backward has 2.5 times as many as forward: kernels reach a share of
 * a GEMM's that differs from one to the other. */
static mt_status measure_attention(const probe *p, const void *noise, mt_dtype compute,
                                   plan_profile *ret)
{
    const mt_kernel *k = p->b->kernel(p->device, "attention");
    if (!k || !k->backward) {
        ret->attn_flops = ret->attn_backward_flops = ret->gemm_flops / 2;
        return MT_OK;
    }
    for (int64_t tokens = 256;; tokens *= 2) {
        int32_t heads = tokens > 1024 ? (int32_t)(tokens / 256) : 4;
        double seconds[2] = { 1, 1 };
        mt_status st = time_attention(p, noise, k, compute, tokens, heads, seconds);
        if (st < 0)
            return st;
        if (seconds[0] < long_enough && tokens < ATTN_TOKENS)
            continue;
        double length = (double)(tokens < ATTN_DOCUMENT ? tokens : ATTN_DOCUMENT);
        double flops = (double)tokens * (length + 1) / 2 * 4 * ATTN_DIM * heads;
        ret->attn_flops = flops / seconds[0];
        ret->attn_backward_flops = 2.5 * flops / seconds[1];
        return MT_OK;
    }
}

/* FLOP/s of a recurrence, where the backend offers one. */
static mt_status measure_recurrence(const probe *p, mt_dtype compute, plan_profile *ret)
{
    for (int64_t tokens = 256;; tokens *= 2) {
        int64_t heads = tokens > 1024 ? tokens / 256 : 4;
        const probe_recurrence r = { compute, tokens, ATTN_DOCUMENT, heads / 2, heads, ATTN_DIM };
        double seconds[2];
        mt_status st = probe_time_recurrence(p, &r, seconds);
        if (st < 0)
            return st == MT_ERR_NOT_FOUND ? MT_OK : st;
        if (seconds[0] < long_enough && tokens < ATTN_TOKENS)
            continue;
        ret->scan_flops = probe_recurrence_flops(&r) / seconds[0];
        ret->scan_backward_flops = 2 * probe_recurrence_flops(&r) / seconds[1];
        return MT_OK;
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

static void enqueue_copy(const probe *p, const void *arg)
{
    p->b->copy(p->device, p->queue, (char *)arg + DEVICE_BYTES / 2, arg, DEVICE_BYTES / 2);
}

/* Bytes/s that a copy on the device reads and writes. */
static mt_status measure_device(const probe *p, double *ret)
{
    void *memory = NULL;
    mt_status st = p->b->device_alloc(p->device, DEVICE_BYTES, &memory);
    if (st < 0)
        return st;
    *ret = DEVICE_BYTES / probe_best(p, enqueue_copy, memory);
    p->b->device_free(p->device, memory, DEVICE_BYTES);
    return MT_OK;
}

mt_status plan_measure(const mt_backend *backend, void *device, mt_dtype compute, plan_profile *ret)
{
    plan_profile f = { 0 };
    probe p = { 0 };
    void *noise = NULL;
    mt_status st = probe_open(backend, device, &p);
    if (st < 0)
        return st;
    st = probe_make_noise(&p, compute, &noise);
    if (st == MT_OK)
        st = measure_gemm(&p, noise, compute, &f.gemm_flops);
    if (st == MT_OK)
        st = measure_attention(&p, noise, compute, &f);
    if (st == MT_OK)
        st = measure_recurrence(&p, compute, &f);
    if (st == MT_OK)
        st = measure_copies(&p, &f);
    if (st == MT_OK)
        st = hardware_time_update(backend, device, &f.host_bandwidth);
    mt_device_info info = { .struct_size = sizeof info };
    backend->info(device, &info);
    f.device_bandwidth = f.host_bandwidth;
    if (st == MT_OK && !info.unified)
        st = measure_device(&p, &f.device_bandwidth);
    if (st == MT_OK)
        st = backend->error(device);
    probe_free_noise(&p, noise);
    probe_close(&p);
    if (st < 0)
        return st;
    *ret = f;
    return MT_OK;
}
