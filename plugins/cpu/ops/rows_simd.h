/* SPDX-License-Identifier: Apache-2.0
 *
 * Template of rows_simd.c, included once per compute dtype. ROWS(name): the dtype's name for a
 * function; ROWS_T: as stored; ROWS_LOAD, ROWS_STORE and the _N forms: to and from vectors;
 * ROWS_ROUND, ROWS_ROUND_1: rounding to the dtype. No include guard, by design.
 *
 * Loops go over `left`, the columns not yet done, so that whole vectors and the tail run the same
 * arithmetic. rows_ref.h has the same kernels with their formulas.
 */

static inline ROWS_T *ROWS(row)(const mt_tensor *t, int64_t r)
{
    return (ROWS_T *)t->data + r * t->ld;
}

/* The next vector at p, or what is left of the row, filled up with zeros. */
SIMD_INLINE vf ROWS(get)(const ROWS_T *p, int64_t left)
{
    return left >= SIMD_WIDTH ? ROWS_LOAD(p) : ROWS_LOAD_N(p, left);
}

SIMD_INLINE void ROWS(set)(ROWS_T *p, vf v, int64_t left)
{
    if (left >= SIMD_WIDTH)
        ROWS_STORE(p, v);
    else
        ROWS_STORE_N(p, v, left);
}

/* Stores v, or the sum of v and what is there; rounded once. */
SIMD_INLINE void ROWS(put)(ROWS_T *p, vf v, int64_t left, bool add)
{
    ROWS(set)(p, add ? ROWS(get)(p, left) + v : v, left);
}

/* ---- rmsnorm -------------------------------------------------------------------------------- */

static float ROWS(sum_squares)(const ROWS_T *x, int64_t n)
{
    vf s0 = vf_zero(), s1 = s0, s2 = s0, s3 = s0;
    int64_t j = 0;
    for (; j + 4 * SIMD_WIDTH <= n; j += 4 * SIMD_WIDTH) {
        vf x0 = ROWS_LOAD(x + j), x1 = ROWS_LOAD(x + j + SIMD_WIDTH);
        vf x2 = ROWS_LOAD(x + j + 2 * SIMD_WIDTH), x3 = ROWS_LOAD(x + j + 3 * SIMD_WIDTH);
        s0 = vf_fma(x0, x0, s0);
        s1 = vf_fma(x1, x1, s1);
        s2 = vf_fma(x2, x2, s2);
        s3 = vf_fma(x3, x3, s3);
    }
    for (; j < n; j += SIMD_WIDTH) {
        vf x0 = ROWS(get)(x + j, n - j);
        s0 = vf_fma(x0, x0, s0);
    }
    return vf_sum((s0 + s1) + (s2 + s3));
}

SIMD_INLINE void ROWS(rmsnorm_variant)(const mt_op_call *c, mt_norm_variant variant, int64_t begin,
                                       int64_t end)
{
    const mt_rmsnorm_attr *attr = c->attr;
    int64_t n = c->in[0].cols / attr->heads;
    const ROWS_T *w = c->in[1].data;
    for (int64_t t = begin; t < end; t++) {
        for (int32_t h = 0; h < attr->heads; h++) {
            const ROWS_T *x = ROWS(row)(&c->in[0], t) + h * n;
            ROWS_T *y = ROWS(row)(&c->out[0], t) + h * n;
            double mean = (double)ROWS(sum_squares)(x, n) / (double)n;
            float r = (float)(1.0 / sqrt(mean + attr->eps));
            if (c->aux[0].data)
                ((float *)c->aux[0].data)[t * c->aux[0].ld + h] = r;
            for (int64_t j = 0; j < n; j += SIMD_WIDTH) {
                vf normed = ROWS(get)(x + j, n - j) * r;
                vf weight = ROWS(get)(w + j, n - j);
                if (variant == MT_NORM_ROUND_THEN_SCALE)
                    normed = ROWS_ROUND(normed);
                else if (variant == MT_NORM_ONE_PLUS)
                    weight = weight + 1.0f;
                ROWS(set)(y + j, weight * normed, n - j);
            }
        }
    }
}

static void ROWS(rmsnorm)(const mt_op_call *c, int64_t begin, int64_t end)
{
    switch (((const mt_rmsnorm_attr *)c->attr)->variant) {
    case MT_NORM_ROUND_THEN_SCALE:
        ROWS(rmsnorm_variant)(c, MT_NORM_ROUND_THEN_SCALE, begin, end);
        break;
    case MT_NORM_FP32_SCALE:
        ROWS(rmsnorm_variant)(c, MT_NORM_FP32_SCALE, begin, end);
        break;
    default:
        ROWS(rmsnorm_variant)(c, MT_NORM_ONE_PLUS, begin, end);
        break;
    }
}

static void ROWS(rmsnorm_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    const mt_rmsnorm_attr *attr = c->attr;
    int64_t n = c->in[0].cols / attr->heads;
    const ROWS_T *w = c->in[1].data;
    vf one = vf_set1(attr->variant == MT_NORM_ONE_PLUS ? 1.0f : 0.0f);
    bool add = c->d_accumulate & 1u;
    float *dw = c->d_in[1].data ? (float *)c->work + begin / CPU_ROWS_PER_TASK * n : NULL;
    if (dw)
        memset(dw, 0, (size_t)n * sizeof *dw);
    for (int64_t t = begin; t < end; t++) {
        for (int32_t h = 0; h < attr->heads; h++) {
            const ROWS_T *x = ROWS(row)(&c->in[0], t) + h * n;
            const ROWS_T *dy = ROWS(row)(&c->d_out[0], t) + h * n;
            float r = ((const float *)c->aux[0].data)[t * c->aux[0].ld + h];
            vf dot0 = vf_zero(), dot1 = dot0;
            for (int64_t j = 0; j < n; j += SIMD_WIDTH) {
                int64_t left = n - j;
                vf d = ROWS(get)(dy + j, left);
                vf normed = ROWS(get)(x + j, left) * r;
                vf term = d * normed;
                vf both = (ROWS(get)(w + j, left) + one) * term;
                /* Two chains of additions: even and odd vectors. */
                vf sum = dot0 + both;
                dot0 = dot1;
                dot1 = sum;
                if (dw && left >= SIMD_WIDTH)
                    vf_store(dw + j, vf_load(dw + j) + term);
                else if (dw)
                    vf_store_n(dw + j, vf_load_n(dw + j, left) + term, left);
            }
            if (!c->d_in[0].data)
                continue;
            ROWS_T *dx = ROWS(row)(&c->d_in[0], t) + h * n;
            float mean = vf_sum(dot0 + dot1) / (float)n;
            for (int64_t j = 0; j < n; j += SIMD_WIDTH) {
                int64_t left = n - j;
                vf g = ROWS(get)(dy + j, left) * (ROWS(get)(w + j, left) + one);
                vf normed = ROWS(get)(x + j, left) * r;
                ROWS(put)(dx + j, (g - normed * mean) * r, left, add);
            }
        }
    }
}

static void ROWS(rmsnorm_reduce)(const mt_op_call *c, int64_t begin, int64_t end)
{
    int64_t n = c->in[0].cols / ((const mt_rmsnorm_attr *)c->attr)->heads;
    int64_t tasks = cpu_rows_tasks(c, true, 0);
    const float *part = c->work;
    float *dw = c->d_in[1].data;
    bool add = c->d_accumulate & 2u;
    for (int64_t j = begin; j < end; j += SIMD_WIDTH) {
        int64_t left = end - j < SIMD_WIDTH ? end - j : SIMD_WIDTH;
        vf sum = vf_zero();
        for (int64_t i = 0; i < tasks; i++)
            sum = sum + vf_load_n(part + i * n + j, left);
        vf_store_n(dw + j, add ? vf_load_n(dw + j, left) + sum : sum, left);
    }
}

/* ---- rope ----------------------------------------------------------------------------------- */

/* Rotates rows of src into dst by `sign` times their angle. For interleaved pairs the tables hold
 * every cosine twice and every sine as (-s, s), so that y = x c + swap(x) s. */
static void ROWS(rotate)(const mt_op_call *c, const mt_tensor *src, const mt_tensor *dst,
                         float sign, bool add, int64_t begin, int64_t end)
{
    const mt_rope_attr *attr = c->attr;
    int32_t half = attr->rotary_dim / 2;
    bool split = attr->pairing == MT_ROPE_HALF_SPLIT;
    float cosine[2 * MT_ROPE_MAX_FREQ] = { 0 }, sine[2 * MT_ROPE_MAX_FREQ] = { 0 };
    for (int64_t t = begin; t < end; t++) {
        for (int32_t i = 0; i < half; i++) {
            float angle = attr->inv_freq[i] * (float)c->batch.positions[t];
            float cos_i = cosf(angle) * attr->attention_factor;
            float sin_i = sign * (sinf(angle) * attr->attention_factor);
            if (split) {
                cosine[i] = cos_i;
                sine[i] = sin_i;
            } else {
                cosine[2 * i] = cosine[2 * i + 1] = cos_i;
                sine[2 * i] = -sin_i;
                sine[2 * i + 1] = sin_i;
            }
        }
        for (int32_t h = 0; h < attr->heads; h++) {
            const ROWS_T *x = ROWS(row)(src, t) + (int64_t)h * attr->head_dim;
            ROWS_T *y = ROWS(row)(dst, t) + (int64_t)h * attr->head_dim;
            for (int64_t i = 0; split && i < half; i += SIMD_WIDTH) {
                int64_t left = half - i;
                vf a = ROWS(get)(x + i, left), b = ROWS(get)(x + half + i, left);
                /* Past `half` the tables hold zeros that nobody stores. */
                vf cos_i = vf_load(cosine + i), sin_i = vf_load(sine + i);
                ROWS(put)(y + i, a * cos_i - b * sin_i, left, add);
                ROWS(put)(y + half + i, b * cos_i + a * sin_i, left, add);
            }
            for (int64_t i = 0; !split && i < 2 * half; i += SIMD_WIDTH) {
                int64_t left = 2 * half - i;
                vf v = ROWS(get)(x + i, left);
                vf cos_i = vf_load(cosine + i), sin_i = vf_load(sine + i);
                ROWS(put)(y + i, v * cos_i + swap_pairs(v) * sin_i, left, add);
            }
            for (int64_t j = 2 * half; j < attr->head_dim; j += SIMD_WIDTH) {
                int64_t left = attr->head_dim - j;
                ROWS(put)(y + j, ROWS(get)(x + j, left), left, add);
            }
        }
    }
}

static void ROWS(rope)(const mt_op_call *c, int64_t begin, int64_t end)
{
    ROWS(rotate)(c, &c->in[0], &c->out[0], 1.0f, false, begin, end);
}

static void ROWS(rope_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    if (c->d_in[0].data)
        ROWS(rotate)(c, &c->d_out[0], &c->d_in[0], -1.0f, c->d_accumulate & 1u, begin, end);
}

/* ---- activations ---------------------------------------------------------------------------- */

SIMD_INLINE void ROWS(act_kind)(const mt_op_call *c, mt_activation kind, int64_t begin, int64_t end)
{
    vf slope;
    for (int64_t t = begin; t < end; t++) {
        const ROWS_T *x = ROWS(row)(&c->in[0], t);
        ROWS_T *y = ROWS(row)(&c->out[0], t);
        for (int64_t j = 0, left = c->out[0].cols; left > 0; j += SIMD_WIDTH, left -= SIMD_WIDTH)
            ROWS(set)(y + j, activate(kind, ROWS(get)(x + j, left), &slope), left);
    }
}

static void ROWS(act)(const mt_op_call *c, int64_t begin, int64_t end)
{
    switch (((const mt_act_attr *)c->attr)->kind) {
    case MT_ACT_GELU_TANH:
        ROWS(act_kind)(c, MT_ACT_GELU_TANH, begin, end);
        break;
    case MT_ACT_SIGMOID:
        ROWS(act_kind)(c, MT_ACT_SIGMOID, begin, end);
        break;
    default:
        ROWS(act_kind)(c, MT_ACT_SILU, begin, end);
        break;
    }
}

SIMD_INLINE void ROWS(act_backward_kind)(const mt_op_call *c, mt_activation kind, int64_t begin,
                                         int64_t end)
{
    bool add = c->d_accumulate & 1u;
    for (int64_t t = begin; c->d_in[0].data && t < end; t++) {
        const ROWS_T *x = ROWS(row)(&c->in[0], t);
        const ROWS_T *dy = ROWS(row)(&c->d_out[0], t);
        ROWS_T *dx = ROWS(row)(&c->d_in[0], t);
        for (int64_t j = 0, left = c->d_out[0].cols; left > 0;
             j += SIMD_WIDTH, left -= SIMD_WIDTH) {
            vf slope;
            activate(kind, ROWS(get)(x + j, left), &slope);
            ROWS(put)(dx + j, ROWS(get)(dy + j, left) * slope, left, add);
        }
    }
}

static void ROWS(act_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    switch (((const mt_act_attr *)c->attr)->kind) {
    case MT_ACT_GELU_TANH:
        ROWS(act_backward_kind)(c, MT_ACT_GELU_TANH, begin, end);
        break;
    case MT_ACT_SIGMOID:
        ROWS(act_backward_kind)(c, MT_ACT_SIGMOID, begin, end);
        break;
    default:
        ROWS(act_backward_kind)(c, MT_ACT_SILU, begin, end);
        break;
    }
}

SIMD_INLINE void ROWS(glu_kind)(const mt_op_call *c, mt_activation kind, int64_t begin, int64_t end)
{
    float limit = (float)((const mt_act_attr *)c->attr)->limit;
    vf by_gate, by_up;
    for (int64_t t = begin; t < end; t++) {
        const ROWS_T *gate = ROWS(row)(&c->in[0], t), *up = ROWS(row)(&c->in[1], t);
        ROWS_T *y = ROWS(row)(&c->out[0], t);
        for (int64_t j = 0, left = c->out[0].cols; left > 0; j += SIMD_WIDTH, left -= SIMD_WIDTH)
            ROWS(set)
            (y + j,
             gated(kind, limit, ROWS(get)(gate + j, left), ROWS(get)(up + j, left), &by_gate,
                   &by_up),
             left);
    }
}

static void ROWS(glu)(const mt_op_call *c, int64_t begin, int64_t end)
{
    switch (((const mt_act_attr *)c->attr)->kind) {
    case MT_ACT_GELU_TANH:
        ROWS(glu_kind)(c, MT_ACT_GELU_TANH, begin, end);
        break;
    case MT_ACT_SIGMOID:
        ROWS(glu_kind)(c, MT_ACT_SIGMOID, begin, end);
        break;
    case MT_ACT_CLAMPED_SWIGLU:
        ROWS(glu_kind)(c, MT_ACT_CLAMPED_SWIGLU, begin, end);
        break;
    default:
        ROWS(glu_kind)(c, MT_ACT_SILU, begin, end);
        break;
    }
}

SIMD_INLINE void ROWS(glu_backward_kind)(const mt_op_call *c, mt_activation kind, int64_t begin,
                                         int64_t end)
{
    float limit = (float)((const mt_act_attr *)c->attr)->limit;
    for (int64_t t = begin; t < end; t++) {
        const ROWS_T *gate = ROWS(row)(&c->in[0], t), *up = ROWS(row)(&c->in[1], t);
        const ROWS_T *dy = ROWS(row)(&c->d_out[0], t);
        ROWS_T *d_gate = c->d_in[0].data ? ROWS(row)(&c->d_in[0], t) : NULL;
        ROWS_T *d_up = c->d_in[1].data ? ROWS(row)(&c->d_in[1], t) : NULL;
        for (int64_t j = 0, left = c->d_out[0].cols; left > 0;
             j += SIMD_WIDTH, left -= SIMD_WIDTH) {
            vf by_gate, by_up;
            vf d = ROWS(get)(dy + j, left);
            gated(kind, limit, ROWS(get)(gate + j, left), ROWS(get)(up + j, left), &by_gate,
                  &by_up);
            if (d_gate)
                ROWS(put)(d_gate + j, d * by_gate, left, c->d_accumulate & 1u);
            if (d_up)
                ROWS(put)(d_up + j, d * by_up, left, c->d_accumulate & 2u);
        }
    }
}

static void ROWS(glu_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    switch (((const mt_act_attr *)c->attr)->kind) {
    case MT_ACT_GELU_TANH:
        ROWS(glu_backward_kind)(c, MT_ACT_GELU_TANH, begin, end);
        break;
    case MT_ACT_SIGMOID:
        ROWS(glu_backward_kind)(c, MT_ACT_SIGMOID, begin, end);
        break;
    case MT_ACT_CLAMPED_SWIGLU:
        ROWS(glu_backward_kind)(c, MT_ACT_CLAMPED_SWIGLU, begin, end);
        break;
    default:
        ROWS(glu_backward_kind)(c, MT_ACT_SILU, begin, end);
        break;
    }
}

/* ---- add, mul, scale ------------------------------------------------------------------------ */

/* dst = src * other (* factor where there is no other). */
static void ROWS(multiply)(const mt_tensor *src, const mt_tensor *other, float factor,
                           const mt_tensor *dst, bool add, int64_t begin, int64_t end)
{
    for (int64_t t = begin; dst->data && t < end; t++) {
        const ROWS_T *x = ROWS(row)(src, t);
        const ROWS_T *f = other ? ROWS(row)(other, t) : NULL;
        ROWS_T *y = ROWS(row)(dst, t);
        for (int64_t j = 0, left = dst->cols; left > 0; j += SIMD_WIDTH, left -= SIMD_WIDTH) {
            vf by = f ? ROWS(get)(f + j, left) : vf_set1(factor);
            ROWS(put)(y + j, ROWS(get)(x + j, left) * by, left, add);
        }
    }
}

static void ROWS(add)(const mt_op_call *c, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const ROWS_T *a = ROWS(row)(&c->in[0], t), *b = ROWS(row)(&c->in[1], t);
        ROWS_T *y = ROWS(row)(&c->out[0], t);
        for (int64_t j = 0, left = c->out[0].cols; left > 0; j += SIMD_WIDTH, left -= SIMD_WIDTH)
            ROWS(set)(y + j, ROWS(get)(a + j, left) + ROWS(get)(b + j, left), left);
    }
}

static void ROWS(add_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    ROWS(multiply)(&c->d_out[0], NULL, 1.0f, &c->d_in[0], c->d_accumulate & 1u, begin, end);
    ROWS(multiply)(&c->d_out[0], NULL, 1.0f, &c->d_in[1], c->d_accumulate & 2u, begin, end);
}

static void ROWS(mul)(const mt_op_call *c, int64_t begin, int64_t end)
{
    ROWS(multiply)(&c->in[0], &c->in[1], 1.0f, &c->out[0], false, begin, end);
}

static void ROWS(mul_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    ROWS(multiply)(&c->d_out[0], &c->in[1], 1.0f, &c->d_in[0], c->d_accumulate & 1u, begin, end);
    ROWS(multiply)(&c->d_out[0], &c->in[0], 1.0f, &c->d_in[1], c->d_accumulate & 2u, begin, end);
}

static float ROWS(factor)(const mt_op_call *c)
{
    return ROWS_ROUND_1((float)((const mt_scale_attr *)c->attr)->factor);
}

static void ROWS(scale)(const mt_op_call *c, int64_t begin, int64_t end)
{
    ROWS(multiply)(&c->in[0], NULL, ROWS(factor)(c), &c->out[0], false, begin, end);
}

static void ROWS(scale_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    ROWS(multiply)
    (&c->d_out[0], NULL, ROWS(factor)(c), &c->d_in[0], c->d_accumulate & 1u, begin, end);
}

const cpu_rows SIMD_NAME(ROWS(cpu_rows)) = { ROWS(rmsnorm),        ROWS(rmsnorm_backward),
                                             ROWS(rmsnorm_reduce), ROWS(rope),
                                             ROWS(rope_backward),  ROWS(act),
                                             ROWS(act_backward),   ROWS(glu),
                                             ROWS(glu_backward),   ROWS(add),
                                             ROWS(add_backward),   ROWS(mul),
                                             ROWS(mul_backward),   ROWS(scale),
                                             ROWS(scale_backward) };

#undef ROWS
#undef ROWS_T
#undef ROWS_LOAD
#undef ROWS_LOAD_N
#undef ROWS_STORE
#undef ROWS_STORE_N
#undef ROWS_ROUND
#undef ROWS_ROUND_1
