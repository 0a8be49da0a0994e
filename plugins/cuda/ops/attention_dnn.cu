/* SPDX-License-Identifier: Apache-2.0
 *
 * attention through cuDNN: which calls it takes, which plans a template needs, how packed documents
 * are dealt out to launches, and the sinks, which stay outside. BF16, train and eval passes.
 *
 * A plan has a fixed number of rows a document. There is one for each of a ladder of sizes, and a
 * call sends every document to the smallest that holds it. Deterministic backward keeps the
 * gradient of the scores in memory, so there a launch has as many documents and heads as a fixed
 * budget allows; where one key head of one document is too much, the own kernels run. Backward in
 * any order adds up dq in FP32 memory instead, and has no such bound.
 */
#include "../dnn.h"
#include "attention.cuh"

enum {
    SMALLEST_ROWS = 512,
    LARGEST_ROWS = 1 << 20,
    RUNGS = 12,
    LAUNCH_ROWS = 16384, /* rows of a launch: more would mostly be rows that no document has */
    LAUNCH_DOCUMENTS = 32,
    TABLE_THREADS = 64,
    SINK_WARPS = 4
};
static const int64_t scores_budget = (int64_t)1 << 30; /* bytes, BF16 */

/* ---- what a call asks for -------------------------------------------------------------------- */

static const mt_tensor *tensor_of(const mt_op_call *c, int which)
{
    switch (which) {
    case DNN_OUT:
        return &c->out[0];
    case DNN_LSE:
        return &c->aux[0];
    case DNN_D_OUT:
        return &c->d_out[0];
    case DNN_DQ:
    case DNN_DK:
    case DNN_DV:
        return &c->d_in[which - DNN_DQ + ATTN_Q];
    default:
        return &c->in[which - DNN_Q + ATTN_Q];
    }
}

/* Everything of the shape but rows and documents; false where the own kernels are to run. */
static bool shape_of(const cuda_device *d, const mt_op_call *c, bool backward, dnn_shape *ret)
{
    const mt_attn_attr *attr = (const mt_attn_attr *)c->attr;
    if (!d->dnn || (c->pass != MT_PASS_TRAIN && c->pass != MT_PASS_EVAL) ||
        c->in[ATTN_Q].dtype != MT_BF16)
        return false;
    if (attr->qk_dim % 16 || attr->v_dim % 16 || attr->qk_dim > 256 || attr->v_dim > 256)
        return false;
    /* Backward with heads of 256 gave wrong dk and dv (cuDNN 9.14 on an H200). */
    if (backward && (attr->qk_dim > 192 || attr->v_dim > 128 || c->d_accumulate & 7u))
        return false;
    memset(ret, 0, sizeof *ret);
    ret->heads = attr->heads;
    ret->kv_heads = attr->kv_heads;
    ret->qk_dim = attr->qk_dim;
    ret->v_dim = attr->v_dim;
    ret->backward = backward;
    ret->window = attr->window > 0;
    ret->softcap = attr->softcap > 0;
    for (int i = 0; i < (backward ? DNN_CALL_TENSORS : DNN_FORWARD_TENSORS); i++) {
        const mt_tensor *t = tensor_of(c, i);
        bool absent_lse = i == DNN_LSE && !backward && !t->data;
        if (!t->data && !absent_lse)
            return false;
        ret->ld[i] = absent_lse ? attr->heads : t->ld;
        if (i != DNN_LSE && ret->ld[i] % 8)
            return false;
    }
    /* With rows of q or dq further apart than those of the sum dq came out wrong (cuDNN 9.14 on an
     * H200). */
    int64_t row = (int64_t)attr->heads * attr->qk_dim;
    ret->any_order =
        backward && d->any_order && ret->ld[DNN_Q] == row && ret->ld[DNN_DQ] == row;
    if (ret->any_order)
        ret->ld[DNN_DQ_SUM] = row;
    return true;
}

/* Documents and heads of a launch with `rows` rows a document; false: too many scores. */
static bool set_rows(dnn_shape *s, int64_t rows)
{
    int group = s->heads / s->kv_heads;
    s->rows = rows;
    s->documents = LAUNCH_ROWS / rows;
    if (s->documents > LAUNCH_DOCUMENTS)
        s->documents = LAUNCH_DOCUMENTS;
    if (s->documents < 1)
        s->documents = 1;
    if (!s->backward || s->any_order)
        return true;
    int64_t of_group = group * rows * rows * 2;
    int kv_heads = s->kv_heads;
    while (kv_heads > 0 && (s->kv_heads % kv_heads || kv_heads * of_group > scores_budget))
        kv_heads--;
    if (kv_heads == 0)
        return false;
    if (s->documents > scores_budget / (kv_heads * of_group))
        s->documents = scores_budget / (kv_heads * of_group);
    if (kv_heads < s->kv_heads)
        s->ld[DNN_LSE] = kv_heads * group; /* copied: its rows then start at 16 bytes */
    s->kv_heads = kv_heads;
    s->heads = kv_heads * group;
    return true;
}

/* Where no memory grows with the square of the rows, fewer sizes do. */
static int64_t rows_of(int rung, const dnn_shape *s)
{
    return (int64_t)SMALLEST_ROWS << (s->backward && !s->any_order ? rung : 2 * rung);
}

/* Byte offsets in `work`. The statistics come first: for some heads where a launch has not all, or
 * for all of them where the call does not want them. */
typedef struct areas {
    int64_t starts_stride; /* elements from table to table */
    int64_t lengths, starts, sums, dq_sum, library, total;
} areas;

static areas areas_of(const dnn_shape *s, const dnn_plan *p, int64_t tokens)
{
    areas a;
    a.starts_stride = align_256((s->documents + 1) * 8) / 8;
    a.lengths = align_256(tokens * s->ld[DNN_LSE] * 4);
    a.starts = a.lengths + align_256(s->documents * 4);
    a.sums = a.starts + DNN_TENSORS * a.starts_stride * 8;
    a.dq_sum = a.sums + (s->backward ? align_256(s->documents * s->heads * s->rows * 4) : 0);
    a.library = a.dq_sum + align_256(tokens * s->ld[DNN_DQ_SUM] * 4);
    a.total = a.library + align_256(dnn_plan_work(p));
    return a;
}

int64_t attn_dnn_plan(const cuda_device *d, const mt_op_call *c, bool backward)
{
    dnn_shape base, s[RUNGS];
    int64_t longest = c->batch.max_document, need = 0, below = 0;
    int n = 0;
    if (longest <= 0 || longest > LARGEST_ROWS || !shape_of(d, c, backward, &base))
        return 0;
    for (int i = 0; i < RUNGS && below < longest; i++) {
        below = rows_of(i, &base);
        s[n] = base;
        n += set_rows(&s[n], below);
    }
    dnn_plans_make(d, s, n);
    for (int i = 0; i < n; i++) {
        const dnn_plan *p = dnn_plan_find(d, &s[i]);
        int64_t bytes = p ? areas_of(&s[i], p, c->batch.tokens).total : 0;
        need = bytes > need ? bytes : need;
    }
    return need;
}

/* ---- launches -------------------------------------------------------------------------------- */

typedef struct rung {
    const dnn_plan *plan; /* NULL: none of this size */
    dnn_shape shape;
    areas at;
} rung;

typedef struct documents {
    int32_t n;
    int32_t start[LAUNCH_DOCUMENTS + 1]; /* then the end of the last, for every absent one */
    int32_t length[LAUNCH_DOCUMENTS];
} documents;

typedef struct strides {
    int64_t ld[DNN_TENSORS];
} strides;

static __global__ void __launch_bounds__(TABLE_THREADS)
    tables_kernel(documents docs, strides s, int n, int tensors, int32_t *lengths, int64_t *starts,
                  int64_t stride)
{
    int i = (int)threadIdx.x;
    if (i > n)
        return;
    if (i < n)
        lengths[i] = i < docs.n ? docs.length[i] : 0;
    for (int t = 0; t < tensors; t++)
        starts[t * stride + i] = docs.start[i] * s.ld[t];
}

/* dq starts from zero in every row of the launch, and of documents in between. */
static bool clear_dq_sum(cuda_queue *q, const rung *r, const documents *docs, char *work)
{
    int64_t row = r->shape.ld[DNN_DQ_SUM] * 4, from = docs->start[0], to = docs->start[docs->n];
    return row == 0 || cuda_ok(q->device,
                               cudaMemsetAsync(work + r->at.dq_sum + from * row, 0,
                                               (size_t)((to - from) * row), q->stream),
                               "clearing dq");
}

static bool launch(cuda_queue *q, const mt_op_call *c, const rung *r, const documents *docs,
                   char *work)
{
    cuda_device *d = q->device;
    const mt_attn_attr *attr = (const mt_attn_attr *)c->attr;
    const dnn_shape *s = &r->shape;
    const int tensors = dnn_tensors(s);
    const mt_tensor *lse = &c->aux[0];
    dnn_launch l = {};
    int32_t *lengths = (int32_t *)(work + r->at.lengths);
    int64_t *starts = (int64_t *)(work + r->at.starts);
    strides by;
    memcpy(by.ld, s->ld, sizeof by.ld);
    tables_kernel<<<1, TABLE_THREADS, 0, q->stream>>>(*docs, by, (int)s->documents, tensors,
                                                      lengths, starts, r->at.starts_stride);
    if (!cuda_launched(d, "tables of documents") || !clear_dq_sum(q, r, docs, work))
        return false;
    for (int i = 0; i < tensors; i++)
        l.starts[i] = starts + i * r->at.starts_stride;
    l.lengths = lengths;
    l.sums = (float *)(work + r->at.sums);
    l.work = work + r->at.library;
    l.scale = (float)attr->scale;
    l.softcap = (float)attr->softcap;
    l.window = (float)attr->window;
    for (int kv = 0; kv < attr->kv_heads; kv += s->kv_heads) {
        int head = kv * (attr->heads / attr->kv_heads);
        for (int i = 0; i < tensors; i++) {
            bool of_keys = i == DNN_K || i == DNN_V || i == DNN_DK || i == DNN_DV;
            bool of_scores = i == DNN_Q || i == DNN_K || i == DNN_DQ || i == DNN_DK;
            if (i == DNN_DQ_SUM)
                l.data[i] = work + r->at.dq_sum;
            else if (i != DNN_LSE)
                l.data[i] = (bf16 *)tensor_of(c, i)->data +
                            (int64_t)(of_keys ? kv : head) * (of_scores ? s->qk_dim : s->v_dim);
        }
        l.data[DNN_LSE] = lse->data;
        if (!lse->data || s->heads < attr->heads)
            l.data[DNN_LSE] = work;
        if (s->heads < attr->heads) {
            size_t row = (size_t)s->heads * 4;
            if (!cuda_ok(d,
                         cudaMemcpy2DAsync(l.data[DNN_LSE], row, (const float *)lse->data + head,
                                           (size_t)lse->ld * 4, row, (size_t)c->batch.tokens,
                                           cudaMemcpyDeviceToDevice, q->stream),
                         "statistics of some heads"))
                return false;
        }
        if (!dnn_run(q, r->plan, &l))
            return false;
    }
    return true;
}

/* The plans that this call may use, by size; false where a document has none. */
static bool find_rungs(const cuda_device *d, const mt_op_call *c, bool backward, int64_t work_bytes,
                       rung *ret, int *ret_n)
{
    dnn_shape base;
    const int32_t *start = c->batch.host_doc_starts;
    int64_t below = 0, longest = c->batch.max_document;
    int n = 0;
    if (!start || longest <= 0 || longest > LARGEST_ROWS || !shape_of(d, c, backward, &base))
        return false;
    for (int i = 0; i < (backward ? DNN_CALL_TENSORS : DNN_FORWARD_TENSORS); i++)
        if ((uintptr_t)tensor_of(c, i)->data % 16)
            return false;
    for (; n < RUNGS && below < longest; n++) {
        rung *r = &ret[n];
        r->shape = base;
        below = rows_of(n, &base);
        r->plan = set_rows(&r->shape, below) ? dnn_plan_find(d, &r->shape) : NULL;
        if (r->plan) {
            r->at = areas_of(&r->shape, r->plan, c->batch.tokens);
            if (r->at.total > work_bytes)
                r->plan = NULL;
        }
    }
    /* The largest plan there is holds what smaller ones do not. */
    while (n > 0 && !ret[n - 1].plan)
        n--;
    for (int64_t i = 0; i < c->batch.documents; i++)
        if (n == 0 || start[i + 1] - start[i] > ret[n - 1].shape.rows)
            return false;
    *ret_n = n;
    return n > 0;
}

static bool run(cuda_queue *q, const mt_op_call *c, bool backward, int64_t work_from)
{
    rung r[RUNGS];
    int n = 0;
    char *work = (char *)c->work + work_from;
    const int32_t *start = c->batch.host_doc_starts;
    if (!find_rungs(q->device, c, backward, c->work_bytes - work_from, r, &n))
        return false;
    int64_t above = 0; /* longer documents than this go to the next plan */
    for (int k = 0; k < n; k++) {
        if (!r[k].plan)
            continue;
        documents docs = {};
        for (int64_t i = 0; i <= c->batch.documents; i++) {
            bool end = i == c->batch.documents;
            int32_t length = end ? 0 : start[i + 1] - start[i];
            if (length > above && length <= r[k].shape.rows) {
                docs.start[docs.n] = start[i];
                docs.length[docs.n++] = length;
            }
            if (docs.n == 0 || (!end && docs.n < r[k].shape.documents))
                continue;
            for (int j = docs.n; j <= LAUNCH_DOCUMENTS; j++)
                docs.start[j] = docs.start[docs.n - 1] + docs.length[docs.n - 1];
            if (!launch(q, c, &r[k], &docs, work))
                return true; /* the device has failed: nothing else would help */
            docs.n = 0;
        }
        above = r[k].shape.rows;
    }
    return true;
}

/* ---- sinks ----------------------------------------------------------------------------------- */

/* A sink is one more key that every query sees and whose value is zero: it scales the output and
 * raises the statistics. A warp a row and head. */
static __global__ void __launch_bounds__(SINK_WARPS * 32)
    add_sinks_kernel(bf16 *out, int64_t out_ld, float *lse, int64_t lse_ld, const bf16 *sinks,
                     int64_t tokens, int heads, int dim)
{
    int64_t i = (int64_t)blockIdx.x * SINK_WARPS + (threadIdx.x >> 5), row = i / heads;
    int head = (int)(i % heads), lane = (int)threadIdx.x & 31;
    if (row >= tokens)
        return;
    float *at = lse + row * lse_ld + head;
    float old = *at, over = to_real(sinks[head]) - old;
    float factor = 1.0f / (1.0f + expf(over));
    bf16 *o = out + row * out_ld + (int64_t)head * dim;
    for (int k = lane; k < dim; k += 32)
        o[k] = from_real<bf16>(to_real(o[k]) * factor);
    __syncwarp();
    if (lane == 0)
        *at = old + (fmaxf(over, 0.0f) + log1pf(expf(-fabsf(over))));
}

/* ---- the operation --------------------------------------------------------------------------- */

bool attn_dnn_forward(cuda_queue *q, const mt_op_call *c)
{
    const mt_attn_attr *attr = (const mt_attn_attr *)c->attr;
    const mt_tensor *out = &c->out[0], *lse = &c->aux[0];
    const void *sinks = c->n_in > ATTN_SINKS ? c->in[ATTN_SINKS].data : NULL;
    if (!run(q, c, false, 0))
        return false;
    if (sinks)
        add_sinks_kernel<<<(unsigned)ceil_div(out->rows * attr->heads, SINK_WARPS), SINK_WARPS * 32,
                           0, q->stream>>>((bf16 *)out->data, out->ld,
                                           (float *)(lse->data ? lse->data : c->work),
                                           lse->data ? lse->ld : attr->heads, (const bf16 *)sinks,
                                           out->rows, attr->heads, attr->v_dim);
    return true;
}

bool attn_dnn_backward(cuda_queue *q, const mt_op_call *c, int64_t work_from)
{
    return run(q, c, true, work_from);
}
