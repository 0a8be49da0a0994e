/* SPDX-License-Identifier: Apache-2.0
 *
 * What each operation of the CUDA backend achieves at the shapes of Qwen2.5-7B, launches included,
 * beside the ceiling of an H200 machine for that kind of work. BF16. What is bound by memory is
 * also compared with a copy on the device that reads and writes as many bytes in all, timed alike:
 * how much of what is missing is the kernel's own, and how much that of any small launch.
 *
 *     bench-cuda-ops cuda.so [NAME]     only lines whose name begins with NAME
 *
 * Attention is measured on the own kernels, through cuDNN, and through cuDNN with sums in any order
 * (deterministic: false); where cuDNN has no plan, as its log says with MEGATRAIN_BENCH_LOG=1, all
 * are the own kernels.
 */
#include "plugin.h"

#include <megatrain/backend.h>

#include <math.h>
#include <time.h>

enum { HIDDEN = 3584, HEADS = 28, KV_HEADS = 4, DIM = 128, FFN = 18944, VOCAB = 152064 };
enum { MAX_BUFFERS = 64, BLOCK = 64 << 20, SKIP = 77 };

/* Measured on one H200: a large copy counting bytes read and written, cuBLAS at these shapes,
 * cuDNN's attention, PCIe. */
static const double ceiling_copy = 4300, ceiling_gemm = 740, ceiling_head = 640, ceiling_pcie = 54;
static const double ceiling_f32 = 60; /* the datasheet's 67, less what sustains */

static const mt_backend *b;
static void *device, *queue;
static const char *only;
static void *buffer[MAX_BUFFERS];
static int64_t buffer_bytes[MAX_BUFFERS];
static int buffers;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *take(int64_t bytes)
{
    void *p = NULL;
    if (buffers == MAX_BUFFERS || b->device_alloc(device, bytes, &p) != MT_OK)
        exit(1);
    buffer[buffers] = p;
    buffer_bytes[buffers++] = bytes;
    return p;
}

/* All but the first `keep` buffers. */
static void release_after(int keep)
{
    b->queue_sync(device, queue);
    while (buffers > keep) {
        buffers--;
        b->device_free(device, buffer[buffers], buffer_bytes[buffers]);
    }
}

static void release(void)
{
    release_after(0);
}

/* Random numbers in +-1: zeros would run faster than real data. */
static mt_tensor tensor(int64_t rows, int64_t cols, mt_dtype dtype)
{
    static uint16_t *noise_bf16;
    static float *noise_f32;
    if (!noise_bf16) {
        uint32_t seed = 1;
        noise_bf16 = malloc(BLOCK);
        noise_f32 = malloc(BLOCK);
        if (!noise_bf16 || !noise_f32)
            exit(1);
        for (int64_t i = 0; i < BLOCK / 2; i++) {
            seed = seed * 1664525u + 1013904223u;
            float x = (float)(seed >> 8) / (1 << 23) - 1.0f;
            noise_bf16[i] = mt_f32_to_bf16(x);
            if (i < BLOCK / 4)
                noise_f32[i] = x;
        }
    }
    int64_t bytes = rows * cols * mt_dtype_size(dtype);
    mt_tensor t = { take(bytes), rows, cols, cols, dtype, 0 };
    for (int64_t at = 0; at < bytes; at += BLOCK)
        b->copy_in(device, queue, (char *)t.data + at,
                   dtype == MT_BF16 ? (void *)noise_bf16 : (void *)noise_f32,
                   bytes - at < BLOCK ? bytes - at : BLOCK);
    b->queue_sync(device, queue);
    return t;
}

static int32_t *ints(const int32_t *host, int64_t n)
{
    int32_t *p = take(n * 4);
    b->copy_in(device, queue, p, host, n * 4);
    b->queue_sync(device, queue);
    return p;
}

static bool wanted(const char *name)
{
    return !only || strncmp(name, only, strlen(only)) == 0;
}

/* Something that is enqueued once. */
typedef struct work {
    void (*enqueue)(const struct work *);
    void (*op)(void *device, void *queue, const mt_op_call *call);
    const mt_op_call *call;
    void *dst, *src;
    int64_t bytes;
} work;

static void enqueue_op(const work *w)
{
    w->op(device, queue, w->call);
}

static void enqueue_copy(const work *w)
{
    b->copy(device, queue, w->dst, w->src, w->bytes);
}

static double seconds_of(const work *w, int rounds)
{
    double from = now();
    for (int r = 0; r < rounds; r++)
        w->enqueue(w);
    b->queue_sync(device, queue);
    return (now() - from) / rounds;
}

/* Of one among many, the best of three times. */
static double best_seconds(const work *w)
{
    (void)seconds_of(w, 1);
    int rounds = 1 + (int)(0.12 / seconds_of(w, 1));
    rounds = rounds > 200 ? 200 : rounds;
    double best = 1e30;
    for (int i = 0; i < 3; i++) {
        double t = seconds_of(w, rounds);
        best = t < best ? t : best;
    }
    if (b->error(device) != MT_OK)
        exit(1);
    return best;
}

/* `moved`: bytes that are read, and bytes that are written. */
static double copy_seconds(double moved)
{
    int held = buffers;
    work w = { .enqueue = enqueue_copy, .bytes = (int64_t)(moved / 2) / 16 * 16 };
    if (w.bytes == 0)
        return 0;
    w.src = tensor(1, w.bytes / 2, MT_BF16).data;
    w.dst = take(w.bytes);
    double seconds = best_seconds(&w);
    release_after(held);
    return seconds;
}

/* copy: seconds that a copy of as many bytes takes; 0 where there is nothing to compare. */
static void report(const char *name, double seconds, double amount, const char *unit, double top,
                   double copy)
{
    double rate = amount / seconds * 1e-9;
    if (strcmp(unit, "TFLOP/s") == 0)
        rate *= 1e-3;
    printf("%-40s %9.3f ms %8.1f %-7s of %6.0f  %3.0f%%", name, seconds * 1e3, rate, unit, top,
           100 * rate / top);
    if (copy > 0)
        printf("  %3.0f%% of a copy", 100 * copy / seconds);
    putchar('\n');
    fflush(stdout);
}

/* amount: floating-point operations, or bytes that must move. */
static void run(const char *name, const char *op, mt_op_call *c, bool backward, double amount,
                const char *unit, double top)
{
    const mt_kernel *k = b->kernel(device, op);
    c->struct_size = sizeof *c;
    c->work_bytes = k->workspace ? k->workspace(device, c, backward) : 0;
    c->work = c->work_bytes ? take(c->work_bytes) : NULL;
    double seconds = best_seconds(
        &(work){ .enqueue = enqueue_op, .op = backward ? k->backward : k->forward, .call = c });
    bool moves = strcmp(unit, "GB/s") == 0;
    report(name, seconds, amount, unit, top, moves ? copy_seconds(amount) : 0);
}

/* Forward and both gradients of `op`, whose operands 0 and 1 are rows and a weight. */
static void products(const char *name, const char *op, const mt_op_call *forward, double flops)
{
    char text[64];
    mt_op_call f = *forward, g = f;
    snprintf(text, sizeof text, "%s forward", name);
    run(text, op, &f, false, flops, "TFLOP/s", ceiling_gemm);
    g.d_out[0] = tensor(f.out[0].rows, f.out[0].cols, MT_BF16);
    g.d_in[0] = tensor(f.in[0].rows, f.in[0].cols, MT_BF16);
    snprintf(text, sizeof text, "%s dx", name);
    run(text, op, &g, true, flops, "TFLOP/s", ceiling_gemm);
    g.d_in[0].data = NULL;
    g.d_in[1] = tensor(f.in[1].rows, f.in[1].cols, MT_F32);
    g.d_accumulate = 2;
    snprintf(text, sizeof text, "%s dw, accumulating", name);
    run(text, op, &g, true, flops, "TFLOP/s", ceiling_gemm);
}

static void linear(const char *name, int64_t t, int64_t n, int64_t k, bool bias)
{
    char text[64];
    if (!wanted(name))
        return;
    mt_op_call f = { .n_in = 3, .n_out = 1, .batch = { .tokens = t } };
    f.in[0] = tensor(t, k, MT_BF16);
    f.in[1] = tensor(n, k, MT_BF16);
    if (bias)
        f.in[2] = tensor(1, n, MT_BF16);
    f.out[0] = tensor(t, n, MT_BF16);
    products(name, "linear", &f, 2.0 * (double)t * (double)n * (double)k);
    if (bias) {
        mt_op_call g = f;
        g.d_out[0] = tensor(t, n, MT_BF16);
        g.d_in[2] = tensor(1, n, MT_F32);
        snprintf(text, sizeof text, "%s dbias", name);
        run(text, "linear", &g, true, 2.0 * (double)(t * n), "GB/s", ceiling_copy);
    }
    release();
}

/* Experts with about `rows` rows each: 3 in 4, then 5 in 4 of that, in turn. */
static void grouped(int64_t experts, int64_t rows, int64_t n, int64_t k)
{
    char name[64];
    int32_t offsets[1 + 256] = { 0 };
    snprintf(name, sizeof name, "experts %lldx%lld", (long long)experts, (long long)rows);
    if (!wanted(name))
        return;
    for (int64_t e = 0; e < experts; e++)
        offsets[e + 1] = offsets[e] + (int32_t)(e % 2 ? rows + rows / 4 : rows - rows / 4);
    int64_t t = offsets[experts];
    mt_op_call f = { .n_in = 3, .n_out = 1, .batch = { .tokens = t } };
    f.in[0] = tensor(t, k, MT_BF16);
    f.in[1] = tensor(experts * n, k, MT_BF16);
    f.in[2] = (mt_tensor){ ints(offsets, experts + 1), 1, experts + 1, experts + 1, MT_I32, 0 };
    f.out[0] = tensor(t, n, MT_BF16);
    products(name, "grouped_linear", &f, 2.0 * (double)t * (double)n * (double)k);
    release();
}

/* What moves tokens to their experts and back: hidden columns, k experts of so many. */
static void routing(int64_t t, int64_t experts, int32_t k, int64_t hidden)
{
    if (!wanted("routing"))
        return;
    const mt_router_attr attr = { .top_k = k, .scoring = MT_ROUTER_SOFTMAX, .scale = 1 };
    const double rows = (double)t * k * (double)hidden * 2;
    mt_op_call c = { .attr = &attr, .n_in = 2, .n_out = 3, .n_aux = 1, .batch = { .tokens = t } };
    c.in[0] = tensor(t, experts, MT_BF16);
    c.out[0] = tensor(t, k, MT_F32);
    c.out[1] = (mt_tensor){ take(t * k * 4), t, k, k, MT_I32, 0 };
    c.out[2] = (mt_tensor){ take((experts + 1) * 4), 1, experts + 1, experts + 1, MT_I32, 0 };
    c.aux[0] = (mt_tensor){ take(t * k * 4), t, k, k, MT_I32, 0 };
    run("routing: router", "router", &c, false, 2.0 * (double)(t * experts), "GB/s", ceiling_copy);
    mt_op_call g = c;
    g.d_out[0] = tensor(t, k, MT_F32);
    g.d_in[0] = tensor(t, experts, MT_BF16);
    run("routing: router, gradient", "router", &g, true, 4.0 * (double)(t * experts), "GB/s",
        ceiling_copy);

    mt_op_call d = { .n_in = 2, .n_out = 1, .batch = { .tokens = t } };
    d.in[0] = tensor(t, hidden, MT_BF16);
    d.in[1] = c.out[1];
    d.out[0] = tensor(t * k, hidden, MT_BF16);
    run("routing: dispatch", "dispatch", &d, false, rows + rows / k, "GB/s", ceiling_copy);
    mt_op_call e = d;
    e.d_out[0] = d.out[0];
    e.d_in[0] = tensor(t, hidden, MT_BF16);
    run("routing: dispatch, gradient", "dispatch", &e, true, rows + rows / k, "GB/s", ceiling_copy);

    mt_op_call m = { .n_in = 3, .n_out = 1, .batch = { .tokens = t } };
    m.in[0] = d.out[0];
    m.in[1] = c.out[0];
    m.in[2] = c.out[1];
    m.out[0] = d.in[0];
    run("routing: combine", "combine", &m, false, rows + rows / k, "GB/s", ceiling_copy);
    mt_op_call n = m;
    n.d_out[0] = d.in[0];
    n.d_in[0] = tensor(t * k, hidden, MT_BF16);
    n.d_in[1] = tensor(t, k, MT_F32);
    run("routing: combine, gradients", "combine", &n, true, 2 * rows + rows / k, "GB/s",
        ceiling_copy);
    release();
}

static void head(int64_t t)
{
    if (!wanted("head"))
        return;
    static const mt_xent_attr attr = { 0 };
    int32_t *targets = malloc((size_t)t * 4);
    for (int64_t i = 0; targets && i < t; i++)
        targets[i] = (int32_t)(i * 7919 % VOCAB);
    mt_op_call c = { .attr = &attr, .n_in = 2, .n_out = 1, .n_aux = 1 };
    c.batch = (mt_batch){ .tokens = t, .targets = ints(targets, t), .loss_scale = 1e-4 };
    c.in[0] = tensor(t, HIDDEN, MT_BF16);
    c.in[1] = tensor(VOCAB, HIDDEN, MT_BF16);
    c.out[0] = tensor(t, 1, MT_F32);
    c.aux[0] = tensor(t, HIDDEN, MT_BF16);
    c.d_in[1] = tensor(VOCAB, HIDDEN, MT_F32);
    run("head, loss and gradients", "linear_cross_entropy", &c, false,
        6.0 * (double)t * HIDDEN * VOCAB, "TFLOP/s", ceiling_head);
    c.pass = MT_PASS_EVAL;
    run("head, loss only", "linear_cross_entropy", &c, false, 2.0 * (double)t * HIDDEN * VOCAB,
        "TFLOP/s", ceiling_head);
    free(targets);
    release();
}

static void attention(const char *form, int64_t t, int64_t document, int heads, int kv_heads,
                      int dim, mt_dtype dtype, double top, double top_back)
{
    char name[64];
    if (!wanted("attention"))
        return;
    mt_attn_attr attr = { heads, kv_heads, dim, dim, 0.1, 0, 0 };
    int32_t *starts = malloc((size_t)(t / document + 1) * 4);
    int64_t n = t / document;
    for (int64_t i = 0; starts && i <= n; i++)
        starts[i] = (int32_t)(i * document);
    mt_op_call c = { .attr = &attr, .n_in = 4, .n_out = 1, .n_aux = 1 };
    c.batch = (mt_batch){ .tokens = t,
                          .documents = n,
                          .max_document = document,
                          .doc_starts = ints(starts, n + 1),
                          .host_doc_starts = starts };
    c.in[0] = tensor(t, heads * dim, dtype);
    c.in[1] = tensor(t, kv_heads * dim, dtype);
    c.in[2] = tensor(t, kv_heads * dim, dtype);
    c.out[0] = tensor(t, heads * dim, dtype);
    c.aux[0] = tensor(t, heads, MT_F32);
    double pairs = (double)n * (double)document * (double)(document + 1) / 2;
    double flops = 4.0 * pairs * heads * dim;
    snprintf(name, sizeof name, "attention %s D%d T %d fwd %s", mt_dtype_name(dtype), dim,
             (int)document, form);
    run(name, "attention", &c, false, flops, "TFLOP/s", top);
    c.d_out[0] = tensor(t, heads * dim, dtype);
    c.d_in[0] = tensor(t, heads * dim, dtype);
    c.d_in[1] = tensor(t, kv_heads * dim, dtype);
    c.d_in[2] = tensor(t, kv_heads * dim, dtype);
    snprintf(name, sizeof name, "attention %s D%d T %d bwd %s", mt_dtype_name(dtype), dim,
             (int)document, form);
    run(name, "attention", &c, true, 2.5 * flops, "TFLOP/s", top_back);
    free(starts);
    release();
}

static void norm(int64_t t)
{
    if (!wanted("rmsnorm"))
        return;
    static const mt_rmsnorm_attr attr = { 1e-6, MT_NORM_ROUND_THEN_SCALE, 1 };
    mt_op_call c = { .attr = &attr, .n_in = 2, .n_out = 1, .n_aux = 1 };
    c.batch.tokens = t;
    c.in[0] = tensor(t, HIDDEN, MT_BF16);
    c.in[1] = tensor(1, HIDDEN, MT_BF16);
    c.out[0] = tensor(t, HIDDEN, MT_BF16);
    c.aux[0] = tensor(t, 1, MT_F32);
    double bytes = 2.0 * (double)t * HIDDEN;
    run("rmsnorm forward", "rmsnorm", &c, false, 2 * bytes, "GB/s", ceiling_copy);
    c.d_out[0] = tensor(t, HIDDEN, MT_BF16);
    c.d_in[0] = tensor(t, HIDDEN, MT_BF16);
    run("rmsnorm dx", "rmsnorm", &c, true, 3 * bytes, "GB/s", ceiling_copy);
    c.d_in[1] = tensor(1, HIDDEN, MT_F32);
    run("rmsnorm dx and dw", "rmsnorm", &c, true, 3 * bytes, "GB/s", ceiling_copy);
    c.d_accumulate = 1;
    run("rmsnorm dx and dw, accumulating", "rmsnorm", &c, true, 4 * bytes, "GB/s", ceiling_copy);
    release();
}

static void rope(int64_t t, int heads, const char *name)
{
    if (!wanted("rope"))
        return;
    mt_rope_attr attr = { heads, DIM, DIM, MT_ROPE_HALF_SPLIT, 1, { 0 }, 0, 0 };
    for (int k = 0; k < DIM / 2; k++) /* zeros would have no angle to reduce */
        attr.inv_freq[k] = (float)pow(1e6, -2.0 * k / DIM);
    int32_t *positions = malloc((size_t)t * 4);
    for (int64_t i = 0; positions && i < t; i++)
        positions[i] = (int32_t)i;
    mt_op_call c = { .attr = &attr, .n_in = 1, .n_out = 1 };
    c.batch = (mt_batch){ .tokens = t, .positions = ints(positions, t) };
    c.in[0] = tensor(t, heads * DIM, MT_BF16);
    c.out[0] = tensor(t, heads * DIM, MT_BF16);
    run(name, "rope", &c, false, 4.0 * (double)t * heads * DIM, "GB/s", ceiling_copy);
    free(positions);
    release();
}

/* The parts of latent attention's queries, as DeepSeek V3 has them: 128 heads of 128 and 64. */
static void heads(int64_t t)
{
    if (!wanted("heads"))
        return;
    const int n = 128, nope = 128, turned = 64;
    const double bytes = 2.0 * (double)t * n;
    mt_slice_attr slice = { .heads = n, .first = nope, .cols = turned };
    mt_op_call s = { .attr = &slice, .n_in = 1, .n_out = 1, .batch = { .tokens = t } };
    s.in[0] = tensor(t, n * (nope + turned), MT_BF16);
    s.out[0] = tensor(t, n * turned, MT_BF16);
    run("heads: slice", "slice", &s, false, 2 * bytes * turned, "GB/s", ceiling_copy);
    mt_concat_attr join = { n, 0, { nope, turned } };
    mt_op_call c = { .attr = &join, .n_in = 2, .n_out = 1, .batch = { .tokens = t } };
    c.in[0] = tensor(t, n * nope, MT_BF16);
    c.in[1] = s.out[0];
    c.out[0] = s.in[0];
    run("heads: concat", "concat", &c, false, 2 * bytes * (nope + turned), "GB/s", ceiling_copy);
    release();
}

static void elementwise(int64_t t)
{
    static const mt_act_attr attr = { MT_ACT_SILU, 0, 0 };
    mt_op_call c = { .attr = &attr, .n_in = 2, .n_out = 1 };
    double bytes = 2.0 * (double)t * FFN;
    if (wanted("glu")) {
        c.in[0] = tensor(t, 2 * FFN, MT_BF16); /* gate and up side by side, as siblings merge */
        c.in[0].cols = FFN;
        c.in[1] = c.in[0];
        c.in[1].data = (uint16_t *)c.in[0].data + FFN;
        c.out[0] = tensor(t, FFN, MT_BF16);
        run("glu forward", "glu", &c, false, 3 * bytes, "GB/s", ceiling_copy);
        c.d_out[0] = tensor(t, FFN, MT_BF16);
        c.d_in[0] = tensor(t, 2 * FFN, MT_BF16);
        c.d_in[0].cols = FFN;
        c.d_in[1] = c.d_in[0];
        c.d_in[1].data = (uint16_t *)c.d_in[0].data + FFN;
        run("glu backward", "glu", &c, true, 5 * bytes, "GB/s", ceiling_copy);
        release();
    }
    if (wanted("add")) {
        mt_op_call a = { .n_in = 2, .n_out = 1 };
        a.in[0] = tensor(t, FFN, MT_BF16);
        a.in[1] = tensor(t, FFN, MT_BF16);
        a.out[0] = tensor(t, FFN, MT_BF16);
        run("add", "add", &a, false, 3 * bytes, "GB/s", ceiling_copy);
        release();
    }
}

static void embedding(int64_t t)
{
    if (!wanted("embedding"))
        return;
    int32_t *rows = malloc((size_t)t * 4);
    for (int64_t i = 0; rows && i < t; i++)
        rows[i] = (int32_t)(i * 7919 % (t / 2));
    mt_op_call c = { .n_in = 1, .n_out = 1 };
    c.batch = (mt_batch){ .tokens = t, .rows = ints(rows, t) };
    c.in[0] = tensor(t / 2, HIDDEN, MT_BF16);
    c.out[0] = tensor(t, HIDDEN, MT_BF16);
    double bytes = 2.0 * (double)t * HIDDEN;
    run("embedding forward", "embedding", &c, false, 1.5 * bytes, "GB/s", ceiling_copy);
    c.d_out[0] = tensor(t, HIDDEN, MT_BF16);
    c.d_in[0] = tensor(t / 2, HIDDEN, MT_F32);
    run("embedding backward", "embedding", &c, true, 2 * bytes, "GB/s", ceiling_copy);
    free(rows);
    release();
}

static void interface_members(void)
{
    const int64_t n = (int64_t)256 << 20;
    void *host = NULL;
    if (!wanted("copy") && !wanted("sum"))
        return;
    double from = now();
    if (b->host_alloc(device, 4 * n, &host) != MT_OK)
        exit(1);
    report("copy: pinning 1 GiB", now() - from, 4.0 * (double)n, "GB/s", 15, 0);
    char *p = take(4 * n);
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < 2; i++) {
            from = now();
            if (way == 0)
                b->copy_in(device, queue, p, host, 4 * n);
            else
                b->copy_out(device, queue, host, p, 4 * n);
            b->queue_sync(device, queue);
        }
        report(way ? "copy out" : "copy in", now() - from, 4.0 * (double)n, "GB/s", ceiling_pcie,
               0);
    }
    double *sum = take(8);
    void *scratch = take(b->sum_squares_scratch(device, n));
    for (int i = 0; i < 2; i++) {
        from = now();
        for (int r = 0; r < 10; r++)
            b->sum_squares(device, queue, (float *)p, n, sum, scratch);
        b->queue_sync(device, queue);
    }
    report("sum of squares", (now() - from) / 10, 4.0 * (double)n, "GB/s", ceiling_copy,
           copy_seconds(4.0 * (double)n));
    report("copy on the device", copy_seconds(8.0 * (double)n), 8.0 * (double)n, "GB/s",
           ceiling_copy, 0);
    release();
    b->host_free(device, host, 4 * n);
}

static void attentions(const char *form, int64_t t)
{
    attention(form, t, 1024, HEADS, KV_HEADS, DIM, MT_BF16, 449, 279);
    attention(form, t, 4096, HEADS, KV_HEADS, DIM, MT_BF16, 603, 473);
    attention(form, 32768, 32768, HEADS, KV_HEADS, DIM, MT_BF16, 610, 535);
    attention(form, t, 4096, 32, 8, 64, MT_BF16, 438, 375);
    attention(form, t, 4096, 16, 8, 256, MT_BF16, 604, 349);
}

static void open_device(const char *cudnn)
{
    setenv("MEGATRAIN_CUDNN", cudnn, 1);
    if (b->open(0, 0, &device) != MT_OK || b->queue_create(device, "bench", &queue) != MT_OK)
        exit(1);
}

static void close_device(void)
{
    b->queue_destroy(device, queue);
    b->close(device);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench-cuda-ops cuda.so [NAME]\n");
        return 2;
    }
    only = argc > 2 ? argv[2] : NULL;
    b = bench_interface(argv[1], MT_BACKEND_INTERFACE);
    if (b->probe() != MT_OK)
        return SKIP;
    open_device("0");
    const int64_t t = 8192;
    interface_members();
    linear("linear qkv", t, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, true);
    linear("linear o", t, HIDDEN, HEADS * DIM, false);
    linear("linear gate, up", t, 2 * FFN, HIDDEN, false);
    linear("linear down", t, HIDDEN, FFN, false);
    grouped(8, 2048, 2 * 14336, 4096); /* Mixtral 8x7B, 8192 tokens */
    grouped(32, 1024, 2 * 2880, 2880); /* gpt-oss-20b */
    grouped(64, 768, 2 * 1408, 2048);  /* DeepSeek V2 Lite */
    for (int64_t rows = 32; rows <= 512; rows *= 2)
        grouped(128, rows, 2 * 768, 2048); /* Qwen3 30B A3B: 512 */
    routing(t, 128, 8, 2048);
    head(t);
    attention("own", t, 1024, HEADS, KV_HEADS, DIM, MT_F32, ceiling_f32, ceiling_f32);
    attentions("own", t);
    norm(t);
    rope(t, HEADS, "rope q");
    rope(t, KV_HEADS, "rope k");
    heads(t);
    elementwise(t);
    embedding(t);
    close_device();
    if (wanted("attention")) {
        open_device("1");
        attentions("cuDNN", t);
        close_device();
        open_device("1");
        b->set_deterministic(device, false);
        attentions("any order", t);
        close_device();
    }
    return 0;
}
