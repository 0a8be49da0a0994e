/* SPDX-License-Identifier: Apache-2.0
 *
 * Running operations on two backends; see side.h.
 */
#include "side.h"

#include <dlfcn.h>
#include <math.h>
#include <megatrain/plugin.h>
#include <unistd.h>

side cpu, cuda;

static char last_error[512];

static void host_error(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(last_error, sizeof last_error, fmt, args);
    va_end(args);
}

static void host_log(mt_log_level level, const char *fmt, ...)
{
    (void)level;
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
}

static const mt_backend *load(const char *variable)
{
    static const mt_host host = { sizeof host, MT_ABI_MAJOR, MT_ABI_MINOR,
                                  host_error,  host_log,     NULL };
    const char *path = getenv(variable);
    void *so = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    const mt_plugin *(*entry)(uint32_t, uint32_t) = NULL;
    void *symbol = so ? dlsym(so, MT_PLUGIN_ENTRY) : NULL;
    memcpy(&entry, &symbol, sizeof entry);
    const mt_plugin *p = entry ? entry(MT_ABI_MAJOR, MT_ABI_MINOR) : NULL;
    if (!p || p->init(&host) != MT_OK) {
        fprintf(stderr, "%s=%s: %s\n", variable, path ? path : "", so ? "no plugin" : dlerror());
        exit(1);
    }
    return p->get_interface(MT_BACKEND_INTERFACE);
}

static void give_up(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, last_error);
    exit(1);
}

void sides_open(void)
{
    cuda.b = load("MT_TEST_CUDA_PLUGIN");
    if (cuda.b->probe() != MT_OK) {
        printf("skipped: %s\n", last_error);
        exit(SIDE_SKIP);
    }
    if (cuda.b->open(0, 0, &cuda.device) != MT_OK)
        give_up("CUDA");
    cpu.b = load("MT_TEST_CPU_PLUGIN");
    if (cpu.b->open(0, 0, &cpu.device) != MT_OK) {
        /* Without OpenBLAS the plain C kernels serve as well. */
        setenv("MEGATRAIN_CPU_FLAGS", "scalar", 1);
        if (cpu.b->open(0, 0, &cpu.device) != MT_OK)
            give_up("CPU");
    }
    if (cuda.b->queue_create(cuda.device, "test", &cuda.queue) != MT_OK ||
        cpu.b->queue_create(cpu.device, "test", &cpu.queue) != MT_OK)
        give_up("queues");
    mt_device_info info;
    cuda.b->info(cuda.device, &info);
    fprintf(stderr, "%s, %s\n", info.name, info.details);
}

void side_open_cudnn(const char *value, side *ret)
{
    setenv("MEGATRAIN_CUDNN", value, 1);
    *ret = (side){ .b = cuda.b };
    if (ret->b->open(0, 0, &ret->device) != MT_OK ||
        ret->b->queue_create(ret->device, "test", &ret->queue) != MT_OK)
        give_up("CUDA");
}

void side_close(side *s)
{
    s->b->queue_destroy(s->device, s->queue);
    s->b->close(s->device);
}

void sides_close(void)
{
    side_close(&cuda);
    side_close(&cpu);
}

static void *get(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);
    if (!p)
        abort();
    return p;
}

void *side_put(const side *s, const void *host, int64_t bytes)
{
    void *p = NULL;
    if (s->b->device_alloc(s->device, bytes, &p) != MT_OK)
        give_up("device memory");
    if (host)
        s->b->copy_in(s->device, s->queue, p, host, bytes);
    else
        s->b->fill(s->device, s->queue, p, 0xff, bytes);
    s->b->queue_sync(s->device, s->queue);
    return p;
}

void side_get(const side *s, void *host, const void *p, int64_t bytes)
{
    s->b->copy_out(s->device, s->queue, host, p, bytes);
    s->b->queue_sync(s->device, s->queue);
}

void side_free(const side *s, void *p, int64_t bytes)
{
    if (p)
        s->b->device_free(s->device, p, bytes);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static double uniform(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (double)(*seed >> 8) / (1 << 23) - 1.0;
}

static int64_t count(const op_value *v)
{
    return v->rows * v->cols;
}

void op_fill(const op_case *c, uint32_t seed, op_data *ret)
{
    *ret = (op_data){ 0 };
    for (uint32_t i = 0; i < c->n_in; i++) {
        ret->in[i] = get((size_t)count(&c->in[i]), sizeof(double));
        for (int64_t k = 0; c->in[i].is_index && k < count(&c->in[i]); k++)
            ret->in[i][k] = c->in[i].index[k];
        if (c->in[i].is_index)
            continue;
        double scale = c->in[i].scale != 0 ? c->in[i].scale : 1;
        /* Exact in every dtype, so that all of them compute from the same numbers. */
        for (int64_t k = 0; k < count(&c->in[i]); k++)
            ret->in[i][k] =
                mt_bf16_to_f32(mt_f32_to_bf16((float)(c->in[i].middle + scale * uniform(&seed))));
    }
    for (uint32_t i = 0; i < c->n_out; i++) {
        ret->d_out[i] = get((size_t)count(&c->out[i]), sizeof(double));
        for (int64_t k = 0; k < count(&c->out[i]); k++)
            ret->d_out[i][k] = mt_bf16_to_f32(mt_f32_to_bf16((float)uniform(&seed)));
    }
}

void op_data_free(op_data *d)
{
    for (int i = 0; i < MT_OP_MAX_IN; i++)
        free(d->in[i]);
    for (int i = 0; i < MT_OP_MAX_OUT; i++)
        free(d->d_out[i]);
}

void op_result_free(op_result *r)
{
    for (int i = 0; i < MT_OP_MAX_OUT; i++)
        free(r->out[i]);
    for (int i = 0; i < MT_OP_MAX_AUX; i++)
        free(r->aux[i]);
    for (int i = 0; i < MT_OP_MAX_IN; i++)
        free(r->d_in[i]);
    free(r->logits);
}

static void put(void *p, mt_dtype dtype, int64_t i, double x)
{
    if (dtype == MT_F32)
        ((float *)p)[i] = (float)x;
    else if (dtype == MT_F64)
        ((double *)p)[i] = x;
    else if (dtype == MT_I32)
        ((int32_t *)p)[i] = isnan(x) ? INT32_MIN : (int32_t)x;
    else
        ((uint16_t *)p)[i] = mt_f32_to_bf16((float)x);
}

static double take(const void *p, mt_dtype dtype, int64_t i)
{
    if (dtype == MT_F32)
        return ((const float *)p)[i];
    if (dtype == MT_F64)
        return ((const double *)p)[i];
    if (dtype == MT_I32)
        return ((const int32_t *)p)[i];
    return mt_bf16_to_f32(((const uint16_t *)p)[i]);
}

static const double guard = 77; /* between rows; exact in every dtype */

static mt_dtype dtype_of(const op_value *v, mt_dtype compute)
{
    mt_dtype stat = compute == MT_F64 ? MT_F64 : MT_F32;
    return v->is_index ? MT_I32 : v->stat ? stat : compute;
}

static int64_t bytes_of(const mt_tensor *t)
{
    return t->rows * t->ld * mt_dtype_size(t->dtype);
}

/* A tensor on the device holding `values`, or `constant` everywhere. */
static mt_tensor tensor(const side *s, const op_value *v, mt_dtype dtype, int64_t pad,
                        const double *values, double constant)
{
    mt_tensor t = { .rows = v->rows, .cols = v->cols, .ld = v->cols + pad, .dtype = dtype };
    void *host = get((size_t)bytes_of(&t), 1);
    for (int64_t i = 0; i < t.rows; i++)
        for (int64_t k = 0; k < t.ld; k++)
            put(host, dtype, i * t.ld + k,
                k >= t.cols ? guard : (values ? values[i * t.cols + k] : constant));
    t.data = side_put(s, host, bytes_of(&t));
    free(host);
    return t;
}

static double *unpack(const side *s, mt_tensor *t)
{
    if (!t->data)
        return NULL;
    void *host = get((size_t)bytes_of(t), 1);
    side_get(s, host, t->data, bytes_of(t));
    double *x = get((size_t)(t->rows * t->cols), sizeof *x);
    int64_t broken = 0;
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t k = 0; k < t->ld; k++) {
            if (k < t->cols)
                x[i * t->cols + k] = take(host, t->dtype, i * t->ld + k);
            else
                broken += take(host, t->dtype, i * t->ld + k) != guard;
        }
    CHECK(broken == 0, "%d numbers between rows were written", (int)broken);
    free(host);
    side_free(s, t->data, bytes_of(t));
    t->data = NULL;
    return x;
}

/* ---- one call -------------------------------------------------------------------------------- */

static void call_kernel(const side *s, const mt_kernel *k, mt_op_call *call, bool backward)
{
    call->work_bytes = k->workspace ? k->workspace(s->device, call, backward) : 0;
    call->work = call->work_bytes ? side_put(s, NULL, call->work_bytes) : NULL;
    (backward ? k->backward : k->forward)(s->device, s->queue, call);
    s->b->queue_sync(s->device, s->queue);
    bool failed = s->b->error(s->device) != MT_OK;
    CHECK(!failed, "%s of %s failed: %s", backward ? "backward" : "forward", k->op, last_error);
    side_free(s, call->work, call->work_bytes);
    if (failed)
        exit(check_done()); /* a broken device breaks all that follows */
}

typedef struct batch_memory {
    void *p[6];
    int64_t bytes[6];
} batch_memory;

static const int32_t *ints(const side *s, batch_memory *m, int i, const int32_t *host, int64_t n)
{
    m->bytes[i] = n * 4;
    m->p[i] = host ? side_put(s, host, n * 4) : NULL;
    return m->p[i];
}

static mt_batch put_batch(const side *s, const mt_batch *b, batch_memory *m)
{
    mt_batch d = *b;
    d.ids = ints(s, m, 0, b->ids, b->tokens);
    d.rows = ints(s, m, 1, b->rows, b->tokens);
    d.targets = ints(s, m, 2, b->targets, b->tokens);
    d.positions = ints(s, m, 3, b->positions, b->tokens);
    d.doc_starts = ints(s, m, 4, b->doc_starts, b->documents + 1);
    d.host_doc_starts = b->doc_starts;
    d.logit_rows = ints(s, m, 5, b->logit_rows, b->n_logit_rows);
    return d;
}

void op_run(const side *s, const op_case *c, const op_data *d, const op_how *how, op_result *ret)
{
    *ret = (op_result){ 0 };
    const mt_kernel *k = s->b->kernel(s->device, c->op);
    if (!k) {
        fprintf(stderr, "no kernel %s\n", c->op);
        exit(1);
    }
    mt_dtype stat = how->dtype == MT_F64 ? MT_F64 : MT_F32;
    double before = how->accumulate ? 0.5 : NAN;
    batch_memory memory = { 0 };
    mt_op_call call = { .struct_size = sizeof call,
                        .pass = how->pass,
                        .attr = c->attr,
                        .n_in = c->n_in,
                        .n_out = c->n_out,
                        .n_aux = c->n_aux,
                        .d_accumulate = how->accumulate ? ~0u : 0,
                        .batch = put_batch(s, &c->batch, &memory),
                        .used = c->used };
    memcpy(call.state, c->state, sizeof call.state);
    int64_t n_logits = c->batch.n_logit_rows * c->in[1].rows;
    if (n_logits)
        call.batch.logits = side_put(s, NULL, n_logits * mt_dtype_size(stat));
    for (uint32_t i = 0; i < c->n_in; i++) {
        const op_value *v = &c->in[i];
        if (!v->cols)
            continue;
        call.in[i] = tensor(s, v, dtype_of(v, how->dtype), v->rows > 1 ? how->pad : 0, d->in[i], 0);
        if (v->param && c->grad_in_forward && how->pass == MT_PASS_TRAIN)
            call.d_in[i] = tensor(s, v, stat, 0, NULL, before);
    }
    for (uint32_t i = 0; i < c->n_out; i++)
        call.out[i] = tensor(s, &c->out[i], dtype_of(&c->out[i], how->dtype), how->pad, NULL, NAN);
    for (uint32_t i = 0; i < c->n_aux; i++)
        call.aux[i] = tensor(s, &c->aux[i], dtype_of(&c->aux[i], how->dtype),
                             c->aux[i].opaque ? 0 : how->pad, NULL, NAN);
    call_kernel(s, k, &call, false);
    ret->work_bytes[0] = call.work_bytes;
    if (!how->forward_only) {
        mt_op_call back = call;
        for (uint32_t i = 0; i < c->n_in; i++) {
            const op_value *v = &c->in[i];
            if (!v->cols || v->no_grad || v->is_index)
                continue;
            if (v->param && c->grad_in_forward)
                back.d_in[i].data = NULL;
            else
                back.d_in[i] = call.d_in[i] =
                    tensor(s, v, v->param ? stat : dtype_of(v, how->dtype), v->param ? 0 : how->pad,
                           NULL, before);
        }
        for (uint32_t i = 0; i < c->n_out; i++)
            if (!c->out[i].is_index)
                back.d_out[i] = tensor(s, &c->out[i], dtype_of(&c->out[i], how->dtype), how->pad,
                                       d->d_out[i], 0);
        call_kernel(s, k, &back, true);
        ret->work_bytes[1] = back.work_bytes;
        for (uint32_t i = 0; i < c->n_out; i++)
            if (back.d_out[i].data)
                side_free(s, back.d_out[i].data, bytes_of(&back.d_out[i]));
    }
    for (uint32_t i = 0; i < c->n_in; i++) {
        ret->d_in[i] = unpack(s, &call.d_in[i]);
        side_free(s, call.in[i].data, bytes_of(&call.in[i]));
    }
    for (uint32_t i = 0; i < c->n_out; i++)
        ret->out[i] = unpack(s, &call.out[i]);
    for (uint32_t i = 0; i < c->n_aux; i++)
        ret->aux[i] = unpack(s, &call.aux[i]);
    if (n_logits) {
        mt_tensor t = { call.batch.logits, 1, n_logits, n_logits, stat, 0 };
        ret->logits = unpack(s, &t);
    }
    for (int i = 0; i < 6; i++)
        side_free(s, memory.p[i], memory.bytes[i]);
}

/* ---- comparing ------------------------------------------------------------------------------- */

double op_error(const double *a, const double *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    if (!isfinite(diff) || !isfinite(norm))
        return INFINITY;
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

static void compare_one(const op_case *c, const char *how, const char *what, uint32_t i,
                        const double *a, const double *b, int64_t n, double bound)
{
    CHECK(!a == !b, "%s, %s: %s %u", c->op, how, what, i);
    if (!a || !b)
        return;
    if (bound == 0) {
        CHECK(memcmp(a, b, (size_t)n * sizeof *a) == 0, "%s, %s: %s %u changes from run to run",
              c->op, how, what, i);
        return;
    }
    double e = op_error(a, b, n);
    if (getenv("MT_TEST_VERBOSE"))
        fprintf(stderr, "  %s, %s: %s %u: %.3g\n", c->op, how, what, i, e);
    CHECK(e <= bound, "%s, %s: %s %u is off by %g, at most %g", c->op, how, what, i, e, bound);
}

static void compare_index(const op_case *c, const char *how, const char *what, uint32_t i,
                          const double *a, const double *b, int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        if (a[k] != b[k]) {
            CHECK(a[k] == b[k], "%s, %s: %s %u, number %d is %g, not %g", c->op, how, what, i,
                  (int)k, a[k], b[k]);
            return;
        }
}

static void compare(const op_case *c, const op_result *a, const op_result *b, double bound,
                    const char *how)
{
    for (uint32_t i = 0; i < c->n_out; i++)
        if (c->out[i].is_index)
            compare_index(c, how, "output", i, a->out[i], b->out[i], count(&c->out[i]));
        else
            compare_one(c, how, "output", i, a->out[i], b->out[i], count(&c->out[i]), bound);
    for (uint32_t i = 0; i < c->n_aux; i++)
        if (c->aux[i].opaque)
            continue;
        else if (c->aux[i].is_index)
            compare_index(c, how, "aux", i, a->aux[i], b->aux[i], count(&c->aux[i]));
        else
            compare_one(c, how, "aux", i, a->aux[i], b->aux[i], count(&c->aux[i]), bound);
    for (uint32_t i = 0; i < c->n_in; i++)
        compare_one(c, how, "gradient", i, a->d_in[i], b->d_in[i], count(&c->in[i]), bound);
}

void op_check(const op_case *c, uint32_t seed, op_bounds bounds)
{
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    op_data d;
    op_fill(c, seed, &d);
    for (int t = 0; t < 3; t++) {
        double bound = dtypes[t] == MT_F64 ? 1e-11 : dtypes[t] == MT_F32 ? bounds.f32 : bounds.bf16;
        for (int v = 0; v < 3; v++) {
            /* Rows packed; apart by what keeps 16-byte accesses possible, or does not. */
            op_how how = { .dtype = dtypes[t],
                           .pad = v == 0   ? 0
                                  : v == 1 ? 8
                                           : 3,
                           .accumulate = v == 2 };
            char what[64];
            snprintf(what, sizeof what, "%s, rows %d apart%s", mt_dtype_name(how.dtype),
                     (int)how.pad, how.accumulate ? ", accumulating" : "");
            op_result got, again, want;
            op_run(&cpu, c, &d, &how, &want);
            op_run(&cuda, c, &d, &how, &got);
            op_run(&cuda, c, &d, &how, &again);
            compare(c, &got, &want, bound, what);
            compare(c, &again, &got, 0, what);
            op_result_free(&got);
            op_result_free(&again);
            op_result_free(&want);
        }
    }
    op_data_free(&d);
}
