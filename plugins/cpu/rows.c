/* SPDX-License-Identifier: Apache-2.0
 *
 * Vector kernels on single rows; compiled once for each instruction set. See rows.h.
 */
#include "rows.h"
#include "simd.h"

#include <math.h>

/* Runs `body` for every vector of a row: offset i, valid lanes `lanes`. */
#define EACH_VECTOR(n)                                                                             \
    for (int64_t i = 0, lanes; lanes = (n)-i < SIMD_WIDTH ? (n)-i : SIMD_WIDTH, i < (n);           \
         i += SIMD_WIDTH)

/* Sums over a long row go to double after this many vectors. */
enum { SUM_VECTORS = 64 };

SIMD_INLINE vf load(const float *x, int64_t i, int64_t lanes)
{
    return lanes == SIMD_WIDTH ? vf_load(x + i) : vf_load_n(x + i, lanes);
}

SIMD_INLINE void store(float *x, int64_t i, int64_t lanes, vf v)
{
    if (lanes == SIMD_WIDTH)
        vf_store(x + i, v);
    else
        vf_store_n(x + i, v, lanes);
}

SIMD_INLINE vf load_any(const void *x, bool bf16, int64_t i, int64_t lanes)
{
    if (!bf16)
        return load(x, i, lanes);
    const uint16_t *h = x;
    return lanes == SIMD_WIDTH ? vf_load_bf16(h + i) : vf_load_bf16_n(h + i, lanes);
}

SIMD_INLINE void store_any(void *x, bool bf16, int64_t i, int64_t lanes, vf v)
{
    uint16_t *h = x;
    if (!bf16)
        store(x, i, lanes, v);
    else if (lanes == SIMD_WIDTH)
        vf_store_bf16(h + i, v);
    else
        vf_store_bf16_n(h + i, v, lanes);
}

/* v in the first `lanes` lanes, `rest` in the others. */
SIMD_INLINE vf first_lanes(vf v, int64_t lanes, float rest)
{
    float lane[SIMD_WIDTH];
    if (lanes == SIMD_WIDTH)
        return v;
    vf_store(lane, v);
    for (int64_t k = lanes; k < SIMD_WIDTH; k++)
        lane[k] = rest;
    return vf_load(lane);
}

static float row_max(const float *x, int64_t n)
{
    vf m = vf_set1(-INFINITY);
    EACH_VECTOR(n)
    m = vf_max(m, first_lanes(load(x, i, lanes), lanes, -INFINITY));
    return vf_hmax(m);
}

static float row_exp_sum(float *x, int64_t n, float shift)
{
    vf sum = vf_zero();
    EACH_VECTOR(n)
    {
        vf e = vf_exp(load(x, i, lanes) - shift);
        store(x, i, lanes, e);
        sum += first_lanes(e, lanes, 0);
    }
    return vf_sum(sum);
}

static void row_scale(float *x, int64_t n, float factor)
{
    EACH_VECTOR(n)
    store(x, i, lanes, load(x, i, lanes) * factor);
}

static void row_softcap(float *x, int64_t n, float cap)
{
    EACH_VECTOR(n)
    store(x, i, lanes, cap * vf_tanh(load(x, i, lanes) / cap));
}

static float row_dot(const float *x, const float *y, int64_t n)
{
    vf sum = vf_zero();
    EACH_VECTOR(n)
    sum = vf_fma(load(x, i, lanes), load(y, i, lanes), sum);
    return vf_sum(sum);
}

static void row_softmax_grad(float *s, float *dp, int64_t n, float lse, float delta, float cap)
{
    EACH_VECTOR(n)
    {
        vf score = load(s, i, lanes);
        vf p = vf_exp(score - lse);
        vf ds = p * (load(dp, i, lanes) - delta);
        if (cap > 0) {
            vf t = score / cap;
            ds = ds * (1.0f - t * t);
        }
        store(s, i, lanes, p);
        store(dp, i, lanes, ds);
    }
}

SIMD_INLINE float logits_max_of(void *x, bool bf16, int64_t n, float cap)
{
    vf m = vf_set1(-INFINITY);
    EACH_VECTOR(n)
    {
        vf v = load_any(x, bf16, i, lanes);
        if (cap > 0) {
            v = cap * vf_tanh(v / cap);
            if (bf16)
                v = vf_round_bf16(v);
            store_any(x, bf16, i, lanes, v);
        }
        m = vf_max(m, first_lanes(v, lanes, -INFINITY));
    }
    return vf_hmax(m);
}

static float logits_max(void *x, bool bf16, int64_t n, float cap)
{
    return bf16 ? logits_max_of(x, true, n, cap) : logits_max_of(x, false, n, cap);
}

SIMD_INLINE double logits_sum_of(const void *x, bool bf16, int64_t n, float max)
{
    double total = 0;
    for (int64_t from = 0; from < n; from += SUM_VECTORS * SIMD_WIDTH) {
        int64_t to = n - from < SUM_VECTORS * SIMD_WIDTH ? n : from + SUM_VECTORS * SIMD_WIDTH;
        vf sum = vf_zero();
        for (int64_t i = from; i < to; i += SIMD_WIDTH) {
            int64_t lanes = to - i < SIMD_WIDTH ? to - i : SIMD_WIDTH;
            sum += first_lanes(vf_exp(load_any(x, bf16, i, lanes) - max), lanes, 0);
        }
        total += (double)vf_sum(sum);
    }
    return total;
}

static double logits_sum(const void *x, bool bf16, int64_t n, float max)
{
    return bf16 ? logits_sum_of(x, true, n, max) : logits_sum_of(x, false, n, max);
}

SIMD_INLINE void logits_grad_of(void *x, bool bf16, int64_t n, float lse, float factor, float cap)
{
    EACH_VECTOR(n)
    {
        vf v = load_any(x, bf16, i, lanes);
        vf g = vf_exp(v - lse) * factor;
        if (cap > 0) {
            vf t = v / cap;
            g = g * (1.0f - t * t);
        }
        store_any(x, bf16, i, lanes, g);
    }
}

static void logits_grad(void *x, bool bf16, int64_t n, float lse, float factor, float cap)
{
    if (bf16)
        logits_grad_of(x, true, n, lse, factor, cap);
    else
        logits_grad_of(x, false, n, lse, factor, cap);
}

const cpu_rows SIMD_NAME(cpu_rows) = {
    .max = row_max,
    .exp_sum = row_exp_sum,
    .scale = row_scale,
    .softcap = row_softcap,
    .dot = row_dot,
    .softmax_grad = row_softmax_grad,
    .logits_max = logits_max,
    .logits_sum = logits_sum,
    .logits_grad = logits_grad,
};
