/* SPDX-License-Identifier: Apache-2.0
 *
 * Running operations on a side; see op.h.
 */
#include "op.h"

#include <math.h>

/* ---- sides ----------------------------------------------------------------------------------- */

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

static void give_up(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, last_error);
    exit(1);
}

const char *side_last_error(void)
{
    return last_error;
}

const mt_backend *side_backend(const mt_plugin *p)
{
    static const mt_host host = { sizeof host, MT_ABI_MAJOR, MT_ABI_MINOR,
                                  host_error,  host_log,     NULL };
    if (p->init(&host) != MT_OK)
        give_up(p->name);
    return p->get_interface(MT_BACKEND_INTERFACE);
}

bool side_try_open(const mt_backend *b, int32_t threads, side *ret)
{
    *ret = (side){ .b = b };
    return b->open(0, threads, &ret->device) == MT_OK &&
           b->queue_create(ret->device, "test", &ret->queue) == MT_OK;
}

void side_open(const mt_backend *b, int32_t threads, side *ret)
{
    if (!side_try_open(b, threads, ret))
        give_up(b->kind);
}

void side_close(side *s)
{
    s->b->queue_destroy(s->device, s->queue);
    s->b->close(s->device);
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

int64_t op_count(const op_value *v)
{
    return v->rows * v->cols;
}

void op_fill(const op_case *c, uint32_t seed, op_data *ret)
{
    *ret = (op_data){ 0 };
    for (uint32_t i = 0; i < c->n_in; i++) {
        ret->in[i] = get((size_t)op_count(&c->in[i]), sizeof(double));
        for (int64_t k = 0; c->in[i].is_index && k < op_count(&c->in[i]); k++)
            ret->in[i][k] = c->in[i].index[k];
        if (c->in[i].is_index)
            continue;
        double scale = c->in[i].scale != 0 ? c->in[i].scale : 1;
        /* Exact in every dtype, so that all of them compute from the same numbers. */
        for (int64_t k = 0; k < op_count(&c->in[i]); k++)
            ret->in[i][k] =
                mt_bf16_to_f32(mt_f32_to_bf16((float)(c->in[i].middle + scale * uniform(&seed))));
    }
    for (uint32_t i = 0; i < c->n_out; i++) {
        ret->d_out[i] = get((size_t)op_count(&c->out[i]), sizeof(double));
        double scale = c->out[i].scale != 0 ? c->out[i].scale : 1;
        for (int64_t k = 0; k < op_count(&c->out[i]); k++)
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
    free(r->tally);
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

enum { BATCH_ARRAYS = 6 };

typedef struct batch_memory {
    void *p[BATCH_ARRAYS];
    int64_t bytes[BATCH_ARRAYS];
} batch_memory;

static const int32_t *ints(const side *s, batch_memory *m, int i, const int32_t *host, int64_t n)
{
    m->bytes[i] = n * 4;
    m->p[i] = host ? side_put(s, host, n * 4) : NULL;
    return m->p[i];
}

/* Positions that restart in every document, to be freed. */
static int32_t *positions_of(const mt_batch *b)
{
    int32_t *p = get((size_t)b->tokens, sizeof *p);
    for (int64_t i = 0; i < b->documents; i++)
        for (int32_t t = b->doc_starts[i]; t < b->doc_starts[i + 1]; t++)
            p[t] = t - b->doc_starts[i];
    return p;
}

static mt_batch put_batch(const side *s, const mt_batch *b, batch_memory *m)
{
    mt_batch d = *b;
    int32_t *positions = !b->positions && b->doc_starts ? positions_of(b) : NULL;
    d.ids = ints(s, m, 0, b->ids, b->tokens);
    d.rows = ints(s, m, 1, b->rows, b->tokens);
    d.targets = ints(s, m, 2, b->targets, b->tokens);
    d.positions = ints(s, m, 3, positions ? positions : b->positions, b->tokens);
    d.doc_starts = ints(s, m, 4, b->doc_starts, b->documents + 1);
    d.host_doc_starts = b->doc_starts;
    d.logit_rows = ints(s, m, 5, b->logit_rows, b->n_logit_rows);
    free(positions);
    return d;
}

/* A case on its way through a side: its tensors and its batch in device memory. */
typedef struct running {
    const side *s;
    const op_case *c;
    const op_data *d;
    const op_how *how;
    mt_dtype stat;
    double before; /* what gradients hold that are added to, or must be overwritten */
    batch_memory memory;
    mt_op_call call;
} running;

static int64_t logits_of(const op_case *c)
{
    return c->batch.n_logit_rows * c->in[1].rows;
}

static int64_t tally_bytes(const op_case *c)
{
    return c->n_tally * (int64_t)sizeof *c->tally;
}

static void put_operands(running *r)
{
    const op_case *c = r->c;
    const op_how *how = r->how;
    mt_op_call *call = &r->call;
    call->batch = put_batch(r->s, &c->batch, &r->memory);
    if (logits_of(c))
        call->batch.logits = side_put(r->s, NULL, logits_of(c) * mt_dtype_size(r->stat));
    if (c->n_tally)
        call->tally = side_put(r->s, c->tally, tally_bytes(c));
    for (uint32_t i = 0; i < c->n_in; i++) {
        const op_value *v = &c->in[i];
        if (!v->cols)
            continue;
        int64_t pad = v->rows > 1 ? how->pad : 0;
        call->in[i] = tensor(r->s, v, dtype_of(v, how->dtype), pad, r->d->in[i], 0);
        if (v->param && c->grad_in_forward && how->pass == MT_PASS_TRAIN && !v->no_grad)
            call->d_in[i] = tensor(r->s, v, r->stat, 0, NULL, r->before);
    }
    for (uint32_t i = 0; i < c->n_out; i++)
        call->out[i] =
            tensor(r->s, &c->out[i], dtype_of(&c->out[i], how->dtype), how->pad, NULL, NAN);
    for (uint32_t i = 0; i < c->n_aux; i++)
        call->aux[i] = tensor(r->s, &c->aux[i], dtype_of(&c->aux[i], how->dtype),
                              c->aux[i].opaque ? 0 : how->pad, NULL, NAN);
}

/* The call of backward; gradients that it makes are entered in r->call too. */
static mt_op_call backward_call(running *r)
{
    const op_case *c = r->c;
    const op_how *how = r->how;
    mt_op_call back = r->call;
    for (uint32_t i = 0; i < c->n_in; i++) {
        const op_value *v = &c->in[i];
        if (c->drop_in >> i & 1u)
            back.in[i].data = NULL;
        if (!v->cols || v->no_grad || v->is_index)
            continue;
        if (v->param && c->grad_in_forward)
            back.d_in[i].data = NULL;
        else
            back.d_in[i] = r->call.d_in[i] =
                tensor(r->s, v, v->param ? r->stat : dtype_of(v, how->dtype),
                       v->param ? 0 : how->pad, NULL, r->before);
    }
    for (uint32_t i = 0; i < c->n_out; i++)
        if (!c->out[i].is_index)
            back.d_out[i] = tensor(r->s, &c->out[i], dtype_of(&c->out[i], how->dtype), how->pad,
                                   r->d->d_out[i], 0);
    return back;
}

static void fetch_results(running *r, op_result *ret)
{
    const op_case *c = r->c;
    mt_op_call *call = &r->call;
    for (uint32_t i = 0; i < c->n_in; i++) {
        ret->d_in[i] = unpack(r->s, &call->d_in[i]);
        side_free(r->s, call->in[i].data, bytes_of(&call->in[i]));
    }
    for (uint32_t i = 0; i < c->n_out; i++)
        ret->out[i] = unpack(r->s, &call->out[i]);
    for (uint32_t i = 0; i < c->n_aux; i++)
        ret->aux[i] = unpack(r->s, &call->aux[i]);
    if (call->batch.logits) {
        mt_tensor t = { call->batch.logits, 1, logits_of(c), logits_of(c), r->stat, 0 };
        ret->logits = unpack(r->s, &t);
    }
    if (c->n_tally) {
        ret->tally = get((size_t)c->n_tally, sizeof *ret->tally);
        side_get(r->s, ret->tally, call->tally, tally_bytes(c));
        side_free(r->s, call->tally, tally_bytes(c));
    }
    for (int i = 0; i < BATCH_ARRAYS; i++)
        side_free(r->s, r->memory.p[i], r->memory.bytes[i]);
}

void op_run(const side *s, const op_case *c, const op_data *d, const op_how *how, op_result *ret)
{
    const mt_kernel *k = s->b->kernel(s->device, c->op);
    if (!k) {
        fprintf(stderr, "no kernel %s\n", c->op);
        exit(1);
    }
    running r = { .s = s,
                  .c = c,
                  .d = d,
                  .how = how,
                  .stat = how->dtype == MT_F64 ? MT_F64 : MT_F32,
                  .before = how->accumulate ? 0.5 : NAN,
                  .call = { .struct_size = sizeof r.call,
                            .pass = how->pass,
                            .attr = c->attr,
                            .n_in = c->n_in,
                            .n_out = c->n_out,
                            .n_aux = c->n_aux,
                            .d_accumulate = how->accumulate ? ~0u : 0,
                            .used = c->used } };
    memcpy(r.call.state, c->state, sizeof c->state);
    *ret = (op_result){ 0 };
    put_operands(&r);
    call_kernel(s, k, &r.call, false);
    ret->work_bytes[0] = r.call.work_bytes;
    if (!how->forward_only) {
        mt_op_call back = backward_call(&r);
        call_kernel(s, k, &back, true);
        ret->work_bytes[1] = back.work_bytes;
        for (uint32_t i = 0; i < c->n_out; i++)
            side_free(s, back.d_out[i].data, bytes_of(&back.d_out[i]));
    }
    fetch_results(&r, ret);
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

void op_compare(const op_case *c, const op_result *a, const op_result *b, double bound,
                const char *how)
{
    for (uint32_t i = 0; i < c->n_out; i++)
        if (c->out[i].is_index)
            compare_index(c, how, "output", i, a->out[i], b->out[i], op_count(&c->out[i]));
        else
            compare_one(c, how, "output", i, a->out[i], b->out[i], op_count(&c->out[i]), bound);
    for (uint32_t i = 0; i < c->n_aux; i++)
        if (c->aux[i].opaque)
            continue;
        else if (c->aux[i].is_index)
            compare_index(c, how, "aux", i, a->aux[i], b->aux[i], op_count(&c->aux[i]));
        else
            compare_one(c, how, "aux", i, a->aux[i], b->aux[i], op_count(&c->aux[i]), bound);
    if (c->n_tally)
        compare_one(c, how, "tally", 0, a->tally, b->tally, c->n_tally, bound);
    for (uint32_t i = 0; i < c->n_in; i++)
        compare_one(c, how, "gradient", i, a->d_in[i], b->d_in[i], op_count(&c->in[i]), bound);
}

/* ---- generation ------------------------------------------------------------------------------ */

/* Tokens [from, from + n) of `whole`: the case in `ret`, its numbers in ret_part. */
static void part_of(const op_case *whole, const op_data *d, int64_t from, int64_t n, op_case *ret,
                    op_data *ret_part)
{
    *ret = *whole;
    *ret_part = *d;
    for (uint32_t i = 0; i < whole->n_in; i++)
        if (!whole->in[i].param) {
            ret->in[i].rows = n;
            ret_part->in[i] = d->in[i] + from * whole->in[i].cols;
        }
    for (uint32_t i = 0; i < whole->n_aux; i++)
        if (!whole->aux[i].opaque)
            ret->aux[i].rows = n;
    ret->out[0].rows = n;
    ret->used = from;
}

void op_check_generation(const op_case *whole, const op_generation *g)
{
    enum { MOST = 64 };
    int64_t tokens = whole->batch.tokens, cols = whole->out[0].cols, bytes[MT_OP_MAX_STATE];
    op_case c;
    op_data d, part;
    op_result want, got;
    mt_tensor state[MT_OP_MAX_STATE] = { { 0 } };
    op_fill(whole, 46, &d);
    op_run(g->reference, whole, &d, &(op_how){ .dtype = g->reference_dtype, .forward_only = true },
           &want);
    for (int i = 0; i < MT_OP_MAX_STATE; i++) {
        const op_value *v = &g->state[i];
        mt_dtype kept = dtype_of(v, g->dtype);
        bytes[i] = op_count(v) * mt_dtype_size(kept);
        if (bytes[i])
            state[i] = (mt_tensor){
                side_put(g->side, NULL, bytes[i]), v->rows, v->cols, v->cols, kept, 0
            };
    }
    double *rows = get((size_t)(tokens * cols), sizeof *rows);
    for (int64_t from = 0, n; from < tokens; from += n) {
        n = from == 0 ? g->prefill : from % 3 == 0 ? 1 : from % 3 == 1 ? 3 : g->decode;
        n = n > tokens - from ? tokens - from : n;
        int32_t starts[2] = { 0, (int32_t)n }, positions[MOST];
        for (int64_t i = 0; i < n; i++)
            positions[i] = (int32_t)(from + i);
        part_of(whole, &d, from, n, &c, &part);
        c.batch = (mt_batch){ .tokens = n,
                              .documents = 1,
                              .max_document = n,
                              .positions = positions,
                              .doc_starts = starts };
        memcpy(c.state, state, sizeof state);
        op_run(g->side, &c, &part,
               &(op_how){ .dtype = g->dtype,
                          .pass = from == 0 ? MT_PASS_PREFILL : MT_PASS_DECODE,
                          .pad = 2,
                          .forward_only = true },
               &got);
        memcpy(rows + from * cols, got.out[0], (size_t)(n * cols) * sizeof *rows);
        op_result_free(&got);
    }
    double e = op_error(rows, want.out[0], tokens * cols);
    CHECK(e <= g->tolerance, "%s, %s, %d tokens first: off by %g", whole->op,
          mt_dtype_name(g->dtype), (int)g->prefill, e);
    free(rows);
    for (int i = 0; i < MT_OP_MAX_STATE; i++)
        side_free(g->side, state[i].data, bytes[i]);
    op_result_free(&want);
    op_data_free(&d);
}
