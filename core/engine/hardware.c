/* SPDX-License-Identifier: Apache-2.0
 *
 * Measuring a device: copies, GEMMs, attention, recurrences and its own memory, all through the
 * backend's interface and the kernels that training runs.
 */
#include "hardware.h"

#include "../base/status.h"
#include "probe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_EDGE = 8192, HEAD_DIM = 128, MAX_BUFFERS = 16 };

/* What a measurement holds; everything of it is freed between two of them. */
typedef struct rig {
    probe p;
    const mt_backend *b;
    void *device;
    const hardware_options *options;
    void *noise; /* of the dtype that is measured */
    void *buffer[MAX_BUFFERS];
    int64_t bytes[MAX_BUFFERS];
    int n;
} rig;

static mt_status take(rig *r, int64_t bytes, void **ret)
{
    mt_status st = r->b->device_alloc(r->device, bytes, ret);
    if (st < 0)
        return status_prefix(st, "measuring with %lld bytes of device memory", (long long)bytes);
    r->buffer[r->n] = *ret;
    r->bytes[r->n++] = bytes;
    return MT_OK;
}

static void release(rig *r)
{
    r->b->queue_sync(r->device, r->p.queue);
    while (r->n > 0) {
        r->n--;
        r->b->device_free(r->device, r->buffer[r->n], r->bytes[r->n]);
    }
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* A tensor with the noise's numbers, which must be of the same dtype. */
static mt_status tensor(rig *r, int64_t rows, int64_t cols, mt_dtype dtype, mt_tensor *ret)
{
    void *data;
    int64_t bytes = rows * cols * mt_dtype_size(dtype);
    mt_status st = take(r, bytes, &data);
    if (st < 0)
        return st;
    probe_put_noise(&r->p, r->noise, data, bytes);
    *ret = (mt_tensor){ data, rows, cols, cols, dtype, 0 };
    return MT_OK;
}

/* FLOP/s of a kernel, the best of several calls. */
static mt_status rate(rig *r, const mt_kernel *k, const mt_op_call *call, bool backward,
                      double flops, double *ret)
{
    probe_kernel c = { k, *call, backward };
    c.call.struct_size = sizeof c.call;
    c.call.work_bytes = k->workspace ? k->workspace(r->device, &c.call, backward) : 0;
    int before = r->n;
    mt_status st = MT_OK;
    if (c.call.work_bytes > 0)
        st = take(r, c.call.work_bytes, &c.call.work);
    if (st < 0)
        return st;
    *ret = flops / probe_best(&r->p, probe_enqueue_kernel, &c);
    for (; r->n > before; r->n--)
        r->b->device_free(r->device, r->buffer[r->n - 1], r->bytes[r->n - 1]);
    return r->b->error(r->device);
}

static mt_status find_kernel(const rig *r, const char *op, const mt_kernel **ret)
{
    *ret = r->b->kernel(r->device, op);
    return *ret ? MT_OK : status_set(MT_ERR_UNSUPPORTED, "the backend has no kernel for '%s'", op);
}

static void progress(const rig *r, const char *fmt, ...) MT_PRINTF(2, 3);
static void progress(const rig *r, const char *fmt, ...)
{
    char text[128];
    va_list args;
    if (!r->options->progress)
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    r->options->progress(text);
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

static mt_status measure_gemm(rig *r, hardware_gemm *g)
{
    const mt_kernel *k = NULL;
    double flops = 2.0 * (double)g->rows * (double)g->cols * (double)g->inner;
    mt_op_call c = { .pass = MT_PASS_TRAIN, .n_in = 3, .n_out = 1, .batch.tokens = g->rows };
    mt_status st = find_kernel(r, "linear", &k);
    progress(r, "GEMM %s %lld x %lld x %lld", mt_dtype_name(g->dtype), (long long)g->rows,
             (long long)g->cols, (long long)g->inner);
    if (st == MT_OK)
        st = tensor(r, g->rows, g->inner, g->dtype, &c.in[0]);
    if (st == MT_OK)
        st = tensor(r, g->cols, g->inner, g->dtype, &c.in[1]);
    if (st == MT_OK)
        st = tensor(r, g->rows, g->cols, g->dtype, &c.out[0]);
    if (st == MT_OK)
        st = rate(r, k, &c, false, flops, &g->forward);
    if (st == MT_OK)
        st = tensor(r, g->rows, g->cols, g->dtype, &c.d_out[0]);
    if (st == MT_OK)
        st = tensor(r, g->rows, g->inner, g->dtype, &c.d_in[0]);
    if (st == MT_OK)
        st = rate(r, k, &c, true, flops, &g->input_gradient);
    c.d_in[0].data = NULL;
    if (st == MT_OK) {
        st = take(r, g->cols * g->inner * 4, &c.d_in[1].data);
        c.d_in[1] = (mt_tensor){ c.d_in[1].data, g->cols, g->inner, g->inner, MT_F32, 0 };
    }
    if (st == MT_OK)
        st = rate(r, k, &c, true, flops, &g->weight_gradient);
    release(r);
    return st;
}

/* The edge of a cubic GEMM that is long enough to time, a power of two. */
static mt_status find_edge(rig *r, mt_dtype dtype, int64_t *ret)
{
    double enough = r->options->quick ? 0.0003 : 0.01;
    hardware_gemm g = { .dtype = dtype };
    mt_status st = MT_OK;
    int64_t edge = 128;
    do {
        edge *= 2;
        g.rows = g.cols = g.inner = edge;
        st = measure_gemm(r, &g);
    } while (st == MT_OK && edge < MAX_EDGE &&
             2.0 * (double)(edge * edge) * (double)edge / g.forward < enough);
    *ret = edge;
    return st;
}

/* The projections of a layer, in the proportions of a Llama: `edge` tokens through a hidden size
 * of half as much. */
static mt_status measure_gemms(rig *r, mt_dtype dtype, int64_t edge, hardware *h)
{
    const int64_t shape[][2] = { { edge / 2, edge / 2 },
                                 { 2 * edge, edge / 2 },
                                 { edge / 2, 2 * edge },
                                 { edge / 8, edge / 2 } };
    mt_status st = MT_OK;
    for (int i = 0; i < 4 && st == MT_OK; i++) {
        hardware_gemm *g = &h->gemm[h->n_gemms++];
        *g = (hardware_gemm){
            .dtype = dtype, .rows = edge, .cols = shape[i][0], .inner = shape[i][1]
        };
        st = measure_gemm(r, g);
    }
    return st;
}

/* ---- attention ------------------------------------------------------------------------------- */

bool hardware_set_deterministic(const mt_backend *b, void *device, bool on)
{
    const size_t has = offsetof(mt_backend, set_deterministic) + sizeof b->set_deterministic;
    if (b->struct_size < has || !b->set_deterministic)
        return false;
    b->set_deterministic(device, on);
    return true;
}

static mt_status make_starts(rig *r, const hardware_attention *a, int32_t *host, mt_batch *ret)
{
    int64_t n = a->tokens / a->document;
    void *device;
    mt_status st = take(r, (n + 1) * 4, &device);
    if (st < 0)
        return st;
    for (int64_t i = 0; i <= n; i++)
        host[i] = (int32_t)(i * a->document);
    r->b->copy_in(r->device, r->p.queue, device, host, (n + 1) * 4);
    *ret = (mt_batch){ .tokens = a->tokens,
                       .documents = n,
                       .max_document = a->document,
                       .doc_starts = device,
                       .host_doc_starts = host };
    return MT_OK;
}

static mt_status measure_attention(rig *r, hardware_attention *a)
{
    const mt_kernel *k = NULL;
    int64_t q = a->heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    double pairs = (double)a->tokens * (double)(a->document + 1) / 2;
    double flops = 4 * pairs * (double)q;
    const mt_attn_attr attr = { .heads = (int32_t)a->heads,
                                .kv_heads = (int32_t)a->kv_heads,
                                .qk_dim = (int32_t)a->head_dim,
                                .v_dim = (int32_t)a->head_dim,
                                .scale = 1 / sqrt((double)a->head_dim) };
    mt_op_call c = { .attr = &attr, .pass = MT_PASS_TRAIN, .n_in = 4, .n_out = 1, .n_aux = 1 };
    const int64_t cols[3] = { q, kv, kv };
    int32_t *starts = malloc((size_t)(a->tokens / a->document + 1) * sizeof *starts);
    mt_status st = starts ? find_kernel(r, "attention", &k) : status_nomem("documents", 4);
    progress(r, "attention %s, documents of %lld", mt_dtype_name(a->dtype), (long long)a->document);
    if (st == MT_OK)
        st = make_starts(r, a, starts, &c.batch);
    for (int i = 0; i < 3 && st == MT_OK; i++) {
        st = tensor(r, a->tokens, cols[i], a->dtype, &c.in[i]);
        if (st == MT_OK)
            st = tensor(r, a->tokens, cols[i], a->dtype, &c.d_in[i]);
    }
    if (st == MT_OK)
        st = tensor(r, a->tokens, q, a->dtype, &c.out[0]);
    if (st == MT_OK)
        st = tensor(r, a->tokens, q, a->dtype, &c.d_out[0]);
    if (st == MT_OK) {
        st = take(r, a->tokens * a->heads * 4, &c.aux[0].data);
        c.aux[0] = (mt_tensor){ c.aux[0].data, a->tokens, a->heads, a->heads, MT_F32, 0 };
    }
    mt_op_call forward = c;
    memset(forward.d_in, 0, sizeof forward.d_in);
    memset(forward.d_out, 0, sizeof forward.d_out);
    if (st == MT_OK)
        st = rate(r, k, &forward, false, flops, &a->forward);
    if (st == MT_OK)
        st = rate(r, k, &c, true, 2.5 * flops, &a->backward);
    if (st == MT_OK && hardware_set_deterministic(r->b, r->device, false)) {
        st = rate(r, k, &c, true, 2.5 * flops, &a->any_order);
        hardware_set_deterministic(r->b, r->device, true);
    }
    release(r);
    free(starts);
    return st;
}

static mt_status measure_attentions(rig *r, mt_dtype dtype, int64_t edge, hardware *h)
{
    const int64_t document[2] = { r->options->quick ? 128 : 1024, r->options->quick ? 256 : 4096 };
    int64_t heads = edge < 4096 ? 2 : 32; /* enough work for many processors */
    mt_status st = MT_OK;
    for (int i = 0; i < 2 && st == MT_OK; i++) {
        hardware_attention *a = &h->attention[h->n_attentions++];
        *a = (hardware_attention){ .dtype = dtype,
                                   .document = document[i],
                                   .tokens = edge > document[i] ? edge : document[i],
                                   .heads = heads,
                                   .kv_heads = heads < 4 ? 1 : heads / 4,
                                   .head_dim = HEAD_DIM };
        st = measure_attention(r, a);
    }
    return st;
}

static mt_status measure_scan(rig *r, mt_dtype dtype, int64_t edge, hardware *h)
{
    int64_t document = r->options->quick ? 128 : 1024, heads = edge < 4096 ? 2 : 32;
    const probe_recurrence q = { dtype,    edge > document ? edge : document,
                                 document, heads / 2,
                                 heads,    HEAD_DIM };
    double seconds[2];
    progress(r, "gated delta rule %s", mt_dtype_name(dtype));
    mt_status st = probe_time_recurrence(&r->p, &q, seconds);
    if (st < 0)
        return st == MT_ERR_NOT_FOUND ? MT_OK : st;
    h->scan[h->n_scans++] =
        (hardware_scan){ .dtype = dtype,
                         .document = q.document,
                         .tokens = q.tokens,
                         .k_heads = q.k_heads,
                         .v_heads = q.v_heads,
                         .head_dim = q.dim,
                         .forward = probe_recurrence_flops(&q) / seconds[0],
                         .backward = 2 * probe_recurrence_flops(&q) / seconds[1] };
    return MT_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

typedef struct copies {
    char *host, *device;
    int64_t bytes, count;
} copies;

static void enqueue_in(const probe *p, const void *arg)
{
    const copies *c = arg;
    for (int64_t i = 0; i < c->count; i++)
        p->b->copy_in(p->device, p->queue, c->device + i * c->bytes, c->host + i * c->bytes,
                      c->bytes);
}

static void enqueue_out(const probe *p, const void *arg)
{
    const copies *c = arg;
    for (int64_t i = 0; i < c->count; i++)
        p->b->copy_out(p->device, p->queue, c->host + i * c->bytes, c->device + i * c->bytes,
                       c->bytes);
}

static void enqueue_within(const probe *p, const void *arg)
{
    const copies *c = arg;
    p->b->copy(p->device, p->queue, c->device + c->bytes, c->device, c->bytes);
}

/* Both directions at once, each on its own queue and memory, timed by its own queue. */
static void measure_both(const probe *in, const probe *out, const copies *a, const copies *b,
                         hardware_copy *ret)
{
    enum { ROUNDS = 3 };
    double total = (double)(a->bytes * a->count);
    const mt_backend *backend = in->b;
    for (int i = 0; i < ROUNDS; i++) {
        backend->timestamp(in->device, in->queue, &in->ns[0]);
        backend->timestamp(out->device, out->queue, &out->ns[0]);
        for (int64_t k = 0; k < a->count; k++) {
            backend->copy_in(in->device, in->queue, a->device + k * a->bytes,
                             a->host + k * a->bytes, a->bytes);
            backend->copy_out(out->device, out->queue, b->host + k * b->bytes,
                              b->device + k * b->bytes, b->bytes);
        }
        backend->timestamp(in->device, in->queue, &in->ns[1]);
        backend->timestamp(out->device, out->queue, &out->ns[1]);
        backend->queue_sync(in->device, in->queue);
        backend->queue_sync(out->device, out->queue);
        double in_rate = total / fmax((double)(in->ns[1] - in->ns[0]) * 1e-9, 1e-9);
        double out_rate = total / fmax((double)(out->ns[1] - out->ns[0]) * 1e-9, 1e-9);
        if (in_rate + out_rate > ret->both_in + ret->both_out) {
            ret->both_in = in_rate;
            ret->both_out = out_rate;
        }
    }
}

static mt_status measure_copies(rig *r, hardware *h)
{
    const int64_t sizes[HARDWARE_COPIES] = { 1 << 20, 32 << 20 };
    int64_t half = r->options->quick ? 32 << 20 : 128 << 20;
    void *device = NULL, *host = NULL;
    probe other = { 0 };
    progress(r, "copies");
    mt_status st = take(r, 2 * half, &device);
    if (st == MT_OK) {
        st = r->b->host_alloc(r->device, 2 * half, &host);
        host = st == MT_OK ? host : NULL;
    }
    if (st == MT_OK)
        st = probe_open(r->b, r->device, &other);
    if (st == MT_OK) {
        memset(host, 1, (size_t)(2 * half));
        r->b->fill(r->device, r->p.queue, device, 1, 2 * half);
        for (int i = 0; i < HARDWARE_COPIES; i++) {
            hardware_copy *c = &h->copy[h->n_copies++];
            copies a = { host, device, sizes[i], half / sizes[i] };
            copies b = { (char *)host + half, (char *)device + half, sizes[i], half / sizes[i] };
            c->bytes = sizes[i];
            c->in = (double)half / probe_best(&r->p, enqueue_in, &a);
            c->out = (double)half / probe_best(&r->p, enqueue_out, &a);
            measure_both(&r->p, &other, &a, &b, c);
        }
        copies within = { NULL, device, half, 1 };
        h->device_copy = 2 * (double)half / probe_best(&r->p, enqueue_within, &within);
        st = r->b->error(r->device);
    }
    probe_close(&other);
    if (host)
        r->b->host_free(r->device, host, 2 * half);
    release(r);
    return st;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static mt_status measure_compute(rig *r, hardware *h)
{
    static const mt_dtype dtypes[] = { MT_F32, MT_BF16 };
    mt_status st = MT_OK;
    for (int i = 0; i < 2 && st == MT_OK; i++) {
        int64_t edge = 0;
        if (!(h->device.compute_dtypes & 1u << dtypes[i]))
            continue;
        st = probe_make_noise(&r->p, dtypes[i], &r->noise);
        if (st == MT_OK)
            st = find_edge(r, dtypes[i], &edge);
        if (st == MT_OK)
            st = measure_gemms(r, dtypes[i], edge, h);
        if (st == MT_OK)
            st = measure_attentions(r, dtypes[i], edge, h);
        if (st == MT_OK)
            st = measure_scan(r, dtypes[i], edge, h);
        probe_free_noise(&r->p, r->noise);
        r->noise = NULL;
    }
    return st;
}

mt_status hardware_measure(const mt_backend *b, void *device, const hardware_options *options,
                           hardware *ret)
{
    hardware *h = calloc(1, sizeof *h);
    rig r = { .b = b, .device = device, .options = options };
    if (!h)
        return status_nomem("a hardware profile", sizeof *h);
    h->device.struct_size = sizeof h->device;
    b->info(device, &h->device);
    snprintf(h->kind, sizeof h->kind, "%s", b->kind);
    snprintf(h->megatrain, sizeof h->megatrain, "%s", MT_VERSION);
    if (gethostname(h->host, sizeof h->host - 1) != 0)
        snprintf(h->host, sizeof h->host, "unknown");
    h->measured_at = (int64_t)time(NULL);

    mt_status st = probe_open(b, device, &r.p);
    if (st < 0)
        goto out;
    st = hardware_measure_host(b, device, options, h);
    if (st == MT_OK)
        st = measure_copies(&r, h);
    if (st == MT_OK)
        st = measure_compute(&r, h);
    if (st == MT_OK && options->disk)
        st = hardware_measure_disk(options, h);
    if (st == MT_OK)
        *ret = *h;
out:
    if (r.p.b)
        release(&r);
    probe_close(&r.p);
    free(h);
    return st;
}

/* ---- for the plan ---------------------------------------------------------------------------- */

mt_status hardware_profile(const hardware *h, mt_dtype compute, int64_t document, plan_profile *ret)
{
    plan_profile f = { 0 };
    /* Time is what adds up: of every shape as many FLOPs, forward and both gradients. */
    double flops = 0, seconds = 0;
    for (int32_t i = 0; i < h->n_gemms; i++) {
        const hardware_gemm *g = &h->gemm[i];
        double work = 2.0 * (double)g->rows * (double)g->cols * (double)g->inner;
        if (g->dtype != compute)
            continue;
        flops += 3 * work;
        seconds += work / g->forward + work / g->input_gradient + work / g->weight_gradient;
    }
    const hardware_attention *nearest = NULL;
    for (int32_t i = 0; i < h->n_attentions; i++) {
        const hardware_attention *a = &h->attention[i];
        if (a->dtype == compute &&
            (!nearest || llabs(a->document - document) < llabs(nearest->document - document)))
            nearest = a;
    }
    if (!nearest || seconds <= 0 || h->n_copies < 1 || h->n_threads < 1)
        return status_set(MT_ERR_UNSUPPORTED, "nothing was measured in %s", mt_dtype_name(compute));
    f.gemm_flops = flops / seconds;
    f.attn_flops = 3.5 / (1 / nearest->forward + 2.5 / nearest->backward);
    if (nearest->any_order > 0)
        f.attn_any_order = 3.5 / (1 / nearest->forward + 2.5 / nearest->any_order);
    for (int32_t i = 0; i < h->n_scans; i++)
        if (h->scan[i].dtype == compute) {
            f.scan_flops = h->scan[i].forward;
            f.scan_backward_flops = h->scan[i].backward;
        }
    f.copy_in = h->copy[h->n_copies - 1].in;
    f.copy_out = h->copy[h->n_copies - 1].out;
    f.host_bandwidth = h->memory[h->n_threads - 1].update;
    f.device_bandwidth = h->device.unified ? f.host_bandwidth : h->device_copy;
    *ret = f;
    return MT_OK;
}
