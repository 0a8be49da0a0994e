/* SPDX-License-Identifier: Apache-2.0
 *
 * Running one operation of the CPU backend; see op.h.
 */
#include "op.h"

#include <math.h>

static void host_error(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("set_error: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
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

const mt_backend *op_backend(void)
{
    static const mt_host host = { sizeof host, MT_ABI_MAJOR, MT_ABI_MINOR,
                                  host_error,  host_log,     NULL };
    static const mt_backend *backend;
    if (!backend) {
        const mt_plugin *p = mt_plugin_entry_v1(MT_ABI_MAJOR, MT_ABI_MINOR);
        p->init(&host);
        backend = p->get_interface(MT_BACKEND_INTERFACE);
    }
    return backend;
}

static void *get(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);
    if (!p)
        abort();
    return p;
}

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
        double scale = c->in[i].scale != 0 ? c->in[i].scale : 1;
        /* Exact in every dtype, so that all of them compute from the same numbers. */
        for (int64_t k = 0; k < count(&c->in[i]); k++)
            if (c->in[i].index)
                ret->in[i][k] = c->in[i].values[k];
            else
                ret->in[i][k] = mt_bf16_to_f32(
                    mt_f32_to_bf16((float)(c->in[i].middle + scale * uniform(&seed))));
    }
    for (uint32_t i = 0; i < c->n_out; i++) {
        ret->d_out[i] = get((size_t)count(&c->out[i]), sizeof(double));
        double scale = c->out[i].scale != 0 ? c->out[i].scale : 1;
        for (int64_t k = 0; k < count(&c->out[i]); k++)
            ret->d_out[i][k] = mt_bf16_to_f32(mt_f32_to_bf16((float)(scale * uniform(&seed))));
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
}

static void put(mt_tensor *t, int64_t i, double x)
{
    if (t->dtype == MT_F32)
        ((float *)t->data)[i] = (float)x;
    else if (t->dtype == MT_F64)
        ((double *)t->data)[i] = x;
    else if (t->dtype == MT_I32)
        ((int32_t *)t->data)[i] = isnan(x) ? INT32_MIN : (int32_t)x;
    else
        ((uint16_t *)t->data)[i] = mt_f32_to_bf16((float)x);
}

static double take(const mt_tensor *t, int64_t i)
{
    if (t->dtype == MT_F32)
        return ((float *)t->data)[i];
    if (t->dtype == MT_F64)
        return ((double *)t->data)[i];
    if (t->dtype == MT_I32)
        return ((int32_t *)t->data)[i];
    return mt_bf16_to_f32(((uint16_t *)t->data)[i]);
}

static const double unset = NAN; /* as int32 the least there is */
static const double guard = 77;  /* between rows; exact in every dtype */

/* What numbers of v are in memory when a run computes in `compute`. */
static mt_dtype dtype_of(const op_value *v, mt_dtype compute)
{
    if (v->index)
        return MT_I32;
    return !v->stat ? compute : compute == MT_F64 ? MT_F64 : MT_F32;
}

/* A tensor of `dtype` holding `values`, or `constant` everywhere. */
static mt_tensor tensor(const op_value *v, mt_dtype dtype, int64_t pad, const double *values,
                        double constant)
{
    mt_tensor t = { .rows = v->rows, .cols = v->cols, .ld = v->cols + pad, .dtype = dtype };
    t.data = get((size_t)(t.rows * t.ld), (size_t)mt_dtype_size(dtype));
    for (int64_t i = 0; i < t.rows; i++)
        for (int64_t k = 0; k < t.ld; k++)
            put(&t, i * t.ld + k,
                k >= t.cols ? guard : (values ? values[i * t.cols + k] : constant));
    return t;
}

static double *unpack(const mt_tensor *t)
{
    double *x = get((size_t)(t->rows * t->cols), sizeof *x);
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t k = 0; k < t->ld; k++) {
            if (k < t->cols)
                x[i * t->cols + k] = take(t, i * t->ld + k);
            else
                CHECK(take(t, i * t->ld + k) == guard, "written between rows at %d, %d", (int)i,
                      (int)k);
        }
    return x;
}

static void *work_for(const mt_backend *b, void *device, const mt_kernel *k, mt_op_call *call,
                      bool backward)
{
    void *p = NULL;
    call->work_bytes = k->workspace ? k->workspace(device, call, backward) : 0;
    CHECK(b->device_alloc(device, call->work_bytes, &p) == MT_OK, "no work");
    memset(p, 0xff, (size_t)call->work_bytes); /* NaN everywhere: nothing may rely on zeros */
    call->work = p;
    return p;
}

void op_run(const op_case *c, const op_data *d, const op_how *how, op_result *ret)
{
    const mt_backend *b = op_backend();
    *ret = (op_result){ 0 };
    if (how->isa)
        setenv("MEGATRAIN_CPU_FLAGS", how->isa, 1);
    else
        unsetenv("MEGATRAIN_CPU_FLAGS");
    void *device, *queue;
    if (b->open(0, how->threads, &device) != MT_OK ||
        b->queue_create(device, "compute", &queue) != MT_OK)
        abort();
    const mt_kernel *k = b->kernel(device, c->op);
    if (!k) {
        CHECK(0, "no kernel %s", c->op);
        abort();
    }
    mt_dtype stat = how->dtype == MT_F64 ? MT_F64 : MT_F32;
    mt_op_call call = { .struct_size = sizeof call,
                        .pass = how->pass,
                        .attr = c->attr,
                        .n_in = c->n_in,
                        .n_out = c->n_out,
                        .n_aux = c->n_aux,
                        .batch = c->batch,
                        .used = c->used };
    memcpy(call.state, c->state, sizeof call.state);
    for (uint32_t i = 0; i < c->n_in; i++) {
        const op_value *v = &c->in[i];
        if (!v->cols)
            continue;
        call.in[i] = tensor(v, dtype_of(v, how->dtype), how->pad, d->in[i], 0);
        if (v->param && c->grad_in_forward && how->pass == MT_PASS_TRAIN && !v->no_grad)
            call.d_in[i] = tensor(v, stat, how->pad, NULL, how->accumulate ? 0.5 : NAN);
    }
    call.d_accumulate = how->accumulate ? ~0u : 0;
    for (uint32_t i = 0; i < c->n_out; i++)
        call.out[i] = tensor(&c->out[i], dtype_of(&c->out[i], how->dtype), how->pad, NULL, unset);
    for (uint32_t i = 0; i < c->n_aux; i++)
        call.aux[i] = tensor(&c->aux[i], dtype_of(&c->aux[i], how->dtype),
                             c->aux[i].opaque ? 0 : how->pad, NULL, unset);
    mt_op_call forward = call;
    void *work = work_for(b, device, k, &forward, false);
    k->forward(device, queue, &forward);
    b->queue_sync(device, queue);
    CHECK(b->error(device) == MT_OK, "forward of %s failed", c->op);
    b->device_free(device, work, forward.work_bytes);

    if (!how->forward_only) {
        mt_op_call back = call;
        for (uint32_t i = 0; i < c->n_in; i++) {
            const op_value *v = &c->in[i];
            if (!v->cols || v->no_grad || v->index) {
                if (c->drop_in >> i & 1u)
                    back.in[i].data = NULL;
                continue;
            }
            if (v->param && c->grad_in_forward)
                back.d_in[i].data = NULL;
            else
                back.d_in[i] = call.d_in[i] = tensor(v, v->param ? stat : dtype_of(v, how->dtype),
                                                     how->pad, NULL, how->accumulate ? 0.5 : NAN);
            if (c->drop_in >> i & 1u)
                back.in[i].data = NULL;
        }
        for (uint32_t i = 0; i < c->n_out; i++) {
            if (!c->out[i].index)
                back.d_out[i] =
                    tensor(&c->out[i], dtype_of(&c->out[i], how->dtype), how->pad, d->d_out[i], 0);
            if (c->drop_out >> i & 1u)
                back.out[i].data = NULL;
        }
        work = work_for(b, device, k, &back, true);
        k->backward(device, queue, &back);
        b->queue_sync(device, queue);
        CHECK(b->error(device) == MT_OK, "backward of %s failed", c->op);
        b->device_free(device, work, back.work_bytes);
        for (uint32_t i = 0; i < c->n_out; i++)
            free(back.d_out[i].data);
    }
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (call.d_in[i].data)
            ret->d_in[i] = unpack(&call.d_in[i]);
        free(call.d_in[i].data);
        free(call.in[i].data);
    }
    for (uint32_t i = 0; i < c->n_out; i++) {
        ret->out[i] = unpack(&call.out[i]);
        free(call.out[i].data);
    }
    for (uint32_t i = 0; i < c->n_aux; i++) {
        ret->aux[i] = unpack(&call.aux[i]);
        free(call.aux[i].data);
    }
    b->queue_destroy(device, queue);
    b->close(device);
}

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

/* What backward differentiates: sum of out * d_out, or the summed loss times its scale. */
static double objective(const op_case *c, const op_data *d, const op_result *r)
{
    double sum = 0;
    for (uint32_t i = 0; i < c->n_out; i++)
        for (int64_t k = 0; k < count(&c->out[i]); k++)
            sum += c->out[i].index
                       ? 0
                       : r->out[i][k] * (c->grad_in_forward ? c->batch.loss_scale : d->d_out[i][k]);
    return sum;
}

void op_check_gradients(const op_case *c, uint32_t seed, double tolerance)
{
    enum { SAMPLES = 24 };
    op_data d;
    op_result r;
    op_fill(c, seed, &d);
    const op_how how = { .dtype = MT_F64, .isa = "scalar", .threads = 1, .pad = 3 };
    op_run(c, &d, &how, &r);
    op_how fwd = how;
    fwd.forward_only = true;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (!r.d_in[i])
            continue;
        int64_t n = count(&c->in[i]), step = n > SAMPLES ? n / SAMPLES : 1;
        double norm = 0, got[2 * SAMPLES + 1], want[2 * SAMPLES + 1];
        int m = 0;
        for (int64_t k = 0; k < n && m < 2 * SAMPLES; k += step, m++) {
            const double h = 1e-4, x = d.in[i][k];
            op_result up, down;
            d.in[i][k] = x + h;
            op_run(c, &d, &fwd, &up);
            d.in[i][k] = x - h;
            op_run(c, &d, &fwd, &down);
            d.in[i][k] = x;
            want[m] = (objective(c, &d, &up) - objective(c, &d, &down)) / (2 * h);
            got[m] = r.d_in[i][k];
            norm += fabs(want[m]);
            op_result_free(&up);
            op_result_free(&down);
        }
        CHECK(norm > 0, "%s: gradient %u is zero everywhere", c->op, i);
        double e = op_error(got, want, m);
        CHECK(e < tolerance, "%s: gradient %u is off by %g of its size", c->op, i, e);
    }
    op_result_free(&r);
    op_data_free(&d);
}

static void compare(const op_case *c, const op_result *a, const op_result *b, double tolerance,
                    double shift, const char *what)
{
    for (uint32_t i = 0; i < c->n_out; i++) {
        double e = op_error(a->out[i], b->out[i], count(&c->out[i]));
        CHECK(e <= tolerance, "%s, %s: output %u is off by %g", c->op, what, i, e);
    }
    for (uint32_t i = 0; i < c->n_aux; i++) {
        if (c->aux[i].opaque)
            continue;
        double e = op_error(a->aux[i], b->aux[i], count(&c->aux[i]));
        CHECK(e <= tolerance, "%s, %s: aux %u is off by %g", c->op, what, i, e);
    }
    for (uint32_t i = 0; i < c->n_in; i++) {
        CHECK(!a->d_in[i] == !b->d_in[i], "gradient %u", i);
        if (!a->d_in[i] || !b->d_in[i])
            continue;
        for (int64_t k = 0; k < count(&c->in[i]); k++)
            a->d_in[i][k] -= shift;
        double e = op_error(a->d_in[i], b->d_in[i], count(&c->in[i]));
        CHECK(e <= tolerance, "%s, %s: gradient %u is off by %g", c->op, what, i, e);
    }
}

void op_check_fast(const op_case *c, uint32_t seed, double tolerance_f32, double tolerance_bf16)
{
    static const char *const isa[] = { "scalar", "avx2", "avx512" };
    op_data d;
    op_result want;
    op_fill(c, seed, &d);
    op_run(c, &d, &(op_how){ .dtype = MT_F64, .isa = "scalar", .threads = 1 }, &want);
    for (int s = 0; s < 3; s++) {
        for (int bf16 = 0; bf16 < 2; bf16++) {
            op_how how = { .dtype = bf16 ? MT_BF16 : MT_F32, .isa = isa[s], .threads = 1 };
            double tolerance = bf16 ? tolerance_bf16 : tolerance_f32;
            char what[64];
            snprintf(what, sizeof what, "%s %s", isa[s], mt_dtype_name(how.dtype));
            op_result one, more;
            op_run(c, &d, &how, &one);
            compare(c, &one, &want, tolerance, 0, what);
            for (how.threads = 2; how.threads <= 3; how.threads++) {
                how.pad = 4 - how.threads;
                op_run(c, &d, &how, &more);
                compare(c, &more, &one, 0, 0, "threads");
                op_result_free(&more);
            }
            how.accumulate = true;
            op_run(c, &d, &how, &more);
            compare(c, &more, &one, tolerance * 4, 0.5, "accumulating");
            op_result_free(&more);
            op_result_free(&one);
        }
    }
    op_result_free(&want);
    op_data_free(&d);
}
