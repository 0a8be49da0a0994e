/* SPDX-License-Identifier: Apache-2.0
 *
 * attention in blocks of queries and keys (FlashAttention-2, arXiv 2307.08691): scores of a block
 * by a GEMM, a running maximum and sum per query, nothing of size T x T. FP32 inside, operands and
 * results FP32 or BF16. Queries' and keys' gradients are formed by tasks of their own, which form
 * the scores anew: more arithmetic, but every sum has one owner and one order.
 */
#include "../convert.h"
#include "attention.h"

#include <math.h>

/* A block of rows as FP32. */
typedef struct block {
    const float *data;
    int64_t ld;
} block;

/* `n` rows of one head; BF16 is converted to `buffer`, FP32 stays where it is. */
static block load_block(const mt_tensor *t, int64_t row, int64_t n, int64_t head, int64_t dim,
                        float *buffer)
{
    int64_t from = row * t->ld + head * dim;
    if (t->dtype == MT_F32)
        return (block){ (const float *)t->data + from, t->ld };
    for (int64_t i = 0; i < n; i++)
        convert_to_f32(buffer + i * dim, (const uint16_t *)t->data + from + i * t->ld, dim);
    return (block){ buffer, dim };
}

static void store_row(const mt_tensor *t, bool add, int64_t row, int64_t head, int64_t dim,
                      float *x)
{
    int64_t to = row * t->ld + head * dim;
    if (t->dtype == MT_F32) {
        float *y = (float *)t->data + to;
        if (!add)
            memcpy(y, x, (size_t)dim * sizeof *y);
        for (int64_t i = 0; add && i < dim; i++)
            y[i] += x[i];
        return;
    }
    uint16_t *y = (uint16_t *)t->data + to;
    for (int64_t i = 0; add && i < dim; i++)
        x[i] += mt_bf16_to_f32(y[i]);
    convert_to_bf16(y, x, dim);
}

/* c[m, n] (+)= alpha op(a) op(b), FP32. */
static void product(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
                    block a, block b, double beta, float *c, int64_t ldc)
{
    cpu_gemm(trans_a, trans_b, m, n, k, alpha, MT_F32, a.data, a.ld, b.data, b.ld, beta, MT_F32, c,
             ldc, NULL);
}

/* The part [from, to) of keys [key, key + n) that a query with range [lo, hi) sees. */
static void visible(int64_t key, int64_t n, int64_t lo, int64_t hi, int64_t *ret_from,
                    int64_t *ret_to)
{
    *ret_from = lo > key ? lo - key : 0;
    *ret_to = hi < key + n ? hi - key : n;
    if (*ret_from > n)
        *ret_from = n;
    if (*ret_to < *ret_from)
        *ret_to = *ret_from;
}

static void zero_outside(float *x, int64_t n, int64_t from, int64_t to)
{
    memset(x, 0, (size_t)from * sizeof *x);
    memset(x + to, 0, (size_t)(n - to) * sizeof *x);
}

static void forward(const attn *a, const cpu_rows *rows, int64_t row, int64_t n, int64_t head,
                    void *scratch)
{
    const mt_op_call *c = a->c;
    int64_t dq = a->attr->qk_dim, dv = a->attr->v_dim, kv = head / a->group;
    float cap = (float)a->attr->softcap;
    float *q_buffer = scratch, *k_buffer = q_buffer + ATTN_QUERIES * dq;
    float *v_buffer = k_buffer + ATTN_KEYS * dq, *s = v_buffer + ATTN_KEYS * dv;
    float *sum = s + ATTN_QUERIES * ATTN_KEYS;
    float top[ATTN_QUERIES], total[ATTN_QUERIES];
    int64_t lo[ATTN_QUERIES], hi[ATTN_QUERIES];
    attn_sees_block(a, row, n, lo, hi);

    const mt_tensor *sinks = &c->in[ATTN_SINKS];
    bool has_sinks = c->n_in > ATTN_SINKS && sinks->data;
    float sink = -INFINITY;
    if (has_sinks)
        sink = sinks->dtype == MT_BF16 ? mt_bf16_to_f32(((const uint16_t *)sinks->data)[head])
                                       : ((const float *)sinks->data)[head];
    for (int64_t i = 0; i < n; i++) {
        top[i] = sink;
        total[i] = has_sinks;
    }
    memset(sum, 0, (size_t)(n * dv) * sizeof *sum);
    block q = load_block(&c->in[ATTN_Q], row, n, head, dq, q_buffer);
    for (int64_t key = lo[0]; key < hi[n - 1]; key += ATTN_KEYS) {
        int64_t keys = hi[n - 1] - key < ATTN_KEYS ? hi[n - 1] - key : ATTN_KEYS;
        block k = load_block(&a->k, key, keys, kv, dq, k_buffer);
        block v = load_block(&a->v, key, keys, kv, dv, v_buffer);
        product(false, true, n, keys, dq, a->attr->scale, q, k, 0, s, ATTN_KEYS);
        for (int64_t i = 0; i < n; i++) {
            float *x = s + i * ATTN_KEYS;
            int64_t from, to;
            visible(key, keys, lo[i], hi[i], &from, &to);
            zero_outside(x, keys, from, to);
            if (from == to)
                continue;
            if (cap > 0)
                rows->softcap(x + from, to - from, cap);
            float new_top = rows->max(x + from, to - from);
            if (new_top < top[i])
                new_top = top[i];
            float added = rows->exp_sum(x + from, to - from, new_top);
            if (new_top != top[i]) {
                float shrink = expf(top[i] - new_top);
                total[i] *= shrink;
                rows->scale(sum + i * dv, dv, shrink);
                top[i] = new_top;
            }
            total[i] += added;
        }
        product(false, false, n, dv, keys, 1, (block){ s, ATTN_KEYS }, v, 1, sum, dv);
    }
    for (int64_t i = 0; i < n; i++) {
        rows->scale(sum + i * dv, dv, 1 / total[i]);
        store_row(&c->out[0], false, row + i, head, dv, sum + i * dv);
        if (c->aux[0].data)
            ((float *)c->aux[0].data)[attn_stat(a, row + i, head)] = top[i] + logf(total[i]);
    }
}

static void delta(const attn *a, const cpu_rows *rows, int64_t row, int64_t n, int64_t head,
                  void *scratch)
{
    (void)head;
    int64_t dv = a->attr->v_dim;
    float *x_buffer = scratch, *y_buffer = x_buffer + dv;
    for (int64_t i = row; i < row + n; i++)
        for (int64_t h = 0; h < a->attr->heads; h++) {
            block x = load_block(&a->c->d_out[0], i, 1, h, dv, x_buffer);
            block y = load_block(&a->c->out[0], i, 1, h, dv, y_buffer);
            ((float *)a->c->work)[attn_delta(a, i, h)] = rows->dot(x.data, y.data, dv);
        }
}

/* Scores of a block of pairs to probabilities (s) and gradients of scores (dp), zero where a query
 * does not see a key. */
static void grad_block(const attn *a, const cpu_rows *rows, int64_t row, int64_t n, int64_t key,
                       int64_t keys, int64_t head, const int64_t *lo, const int64_t *hi, float *s,
                       float *dp)
{
    float cap = (float)a->attr->softcap;
    for (int64_t i = 0; i < n; i++) {
        float *x = s + i * ATTN_KEYS, *y = dp + i * ATTN_KEYS;
        int64_t from, to;
        visible(key, keys, lo[i], hi[i], &from, &to);
        zero_outside(x, keys, from, to);
        zero_outside(y, keys, from, to);
        if (from == to)
            continue;
        if (cap > 0)
            rows->softcap(x + from, to - from, cap);
        rows->softmax_grad(x + from, y + from, to - from,
                           ((const float *)a->c->aux[0].data)[attn_stat(a, row + i, head)],
                           ((const float *)a->c->work)[attn_delta(a, row + i, head)], cap);
    }
}

static void grad_queries(const attn *a, const cpu_rows *rows, int64_t row, int64_t n, int64_t head,
                         void *scratch)
{
    const mt_op_call *c = a->c;
    int64_t dq = a->attr->qk_dim, dv = a->attr->v_dim, kv = head / a->group;
    float *q_buffer = scratch, *do_buffer = q_buffer + ATTN_QUERIES * dq;
    float *k_buffer = do_buffer + ATTN_QUERIES * dv, *v_buffer = k_buffer + ATTN_KEYS * dq;
    float *s = v_buffer + ATTN_KEYS * dv, *dp = s + ATTN_QUERIES * ATTN_KEYS;
    float *sum = dp + ATTN_QUERIES * ATTN_KEYS;
    int64_t lo[ATTN_QUERIES], hi[ATTN_QUERIES];
    attn_sees_block(a, row, n, lo, hi);
    memset(sum, 0, (size_t)(n * dq) * sizeof *sum);
    block q = load_block(&c->in[ATTN_Q], row, n, head, dq, q_buffer);
    block d_o = load_block(&c->d_out[0], row, n, head, dv, do_buffer);
    for (int64_t key = lo[0]; key < hi[n - 1]; key += ATTN_KEYS) {
        int64_t keys = hi[n - 1] - key < ATTN_KEYS ? hi[n - 1] - key : ATTN_KEYS;
        block k = load_block(&a->k, key, keys, kv, dq, k_buffer);
        block v = load_block(&a->v, key, keys, kv, dv, v_buffer);
        product(false, true, n, keys, dq, a->attr->scale, q, k, 0, s, ATTN_KEYS);
        product(false, true, n, keys, dv, 1, d_o, v, 0, dp, ATTN_KEYS);
        grad_block(a, rows, row, n, key, keys, head, lo, hi, s, dp);
        product(false, false, n, dq, keys, a->attr->scale, (block){ dp, ATTN_KEYS }, k, 1, sum, dq);
    }
    for (int64_t i = 0; i < n; i++)
        store_row(&c->d_in[ATTN_Q], c->d_accumulate >> ATTN_Q & 1u, row + i, head, dq,
                  sum + i * dq);
}

static void grad_keys(const attn *a, const cpu_rows *rows, int64_t key, int64_t keys, int64_t kv,
                      void *scratch)
{
    const mt_op_call *c = a->c;
    int64_t dq = a->attr->qk_dim, dv = a->attr->v_dim;
    float *q_buffer = scratch, *do_buffer = q_buffer + ATTN_QUERIES * dq;
    float *k_buffer = do_buffer + ATTN_QUERIES * dv, *v_buffer = k_buffer + ATTN_KEYS * dq;
    float *s = v_buffer + ATTN_KEYS * dv, *dp = s + ATTN_QUERIES * ATTN_KEYS;
    float *dk = dp + ATTN_QUERIES * ATTN_KEYS, *d_v = dk + ATTN_KEYS * dq;
    int64_t lo[ATTN_QUERIES], hi[ATTN_QUERIES];
    /* The last key is seen longest: documents follow each other. */
    int64_t until = attn_seen_until(a, key + keys - 1);
    memset(dk, 0, (size_t)(ATTN_KEYS * (dq + dv)) * sizeof *dk);
    block k = load_block(&a->k, key, keys, kv, dq, k_buffer);
    block v = load_block(&a->v, key, keys, kv, dv, v_buffer);
    for (int64_t head = kv * a->group; head < (kv + 1) * a->group; head++) {
        for (int64_t row = key; row < until; row += ATTN_QUERIES) {
            int64_t n = until - row < ATTN_QUERIES ? until - row : ATTN_QUERIES;
            attn_sees_block(a, row, n, lo, hi);
            block q = load_block(&c->in[ATTN_Q], row, n, head, dq, q_buffer);
            block d_o = load_block(&c->d_out[0], row, n, head, dv, do_buffer);
            product(false, true, n, keys, dq, a->attr->scale, q, k, 0, s, ATTN_KEYS);
            product(false, true, n, keys, dv, 1, d_o, v, 0, dp, ATTN_KEYS);
            grad_block(a, rows, row, n, key, keys, head, lo, hi, s, dp);
            product(true, false, keys, dv, n, 1, (block){ s, ATTN_KEYS }, d_o, 1, d_v, dv);
            product(true, false, keys, dq, n, a->attr->scale, (block){ dp, ATTN_KEYS }, q, 1, dk,
                    dq);
        }
    }
    for (int64_t j = 0; j < keys; j++) {
        if (c->d_in[ATTN_K].data)
            store_row(&c->d_in[ATTN_K], c->d_accumulate >> ATTN_K & 1u, key + j, kv, dq,
                      dk + j * dq);
        if (c->d_in[ATTN_V].data)
            store_row(&c->d_in[ATTN_V], c->d_accumulate >> ATTN_V & 1u, key + j, kv, dv,
                      d_v + j * dv);
    }
}

const attn_form attn_fast = {
    .forward = forward,
    .delta = delta,
    .grad_queries = grad_queries,
    .grad_keys = grad_keys,
};
