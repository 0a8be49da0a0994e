/* SPDX-License-Identifier: Apache-2.0
 *
 * Template of rows_ref.c, included once per compute dtype. REF(name): the dtype's name for a
 * function; REF_T: as stored; REF_A: as computed, and the statistics dtype; REF_LOAD, REF_STORE:
 * from one to the other; REF_FN: the libm function for REF_A. No include guard, by design.
 */

static inline REF_T *REF(row)(const mt_tensor *t, int64_t r)
{
    return (REF_T *)t->data + r * t->ld;
}

/* Stores v, or the sum of v and what is there; rounded once. */
static inline void REF(put)(REF_T *dst, REF_A v, bool add)
{
    *dst = REF_STORE(add ? REF_LOAD(*dst) + v : v);
}

/* ---- rmsnorm -------------------------------------------------------------------------------- */

static void REF(rmsnorm)(const mt_op_call *c, int64_t begin, int64_t end)
{
    const mt_rmsnorm_attr *attr = c->attr;
    int64_t n = c->in[0].cols / attr->heads;
    const REF_T *w = c->in[1].data;
    for (int64_t t = begin; t < end; t++) {
        for (int32_t h = 0; h < attr->heads; h++) {
            const REF_T *x = REF(row)(&c->in[0], t) + h * n;
            REF_T *y = REF(row)(&c->out[0], t) + h * n;
            double sum = 0.0;
            for (int64_t j = 0; j < n; j++)
                sum += (double)REF_LOAD(x[j]) * (double)REF_LOAD(x[j]);
            REF_A r = (REF_A)(1.0 / sqrt(sum / (double)n + attr->eps));
            if (c->aux[0].data)
                ((REF_A *)c->aux[0].data)[t * c->aux[0].ld + h] = r;
            for (int64_t j = 0; j < n; j++) {
                REF_A normed = REF_LOAD(x[j]) * r;
                REF_A weight = REF_LOAD(w[j]);
                if (attr->variant == MT_NORM_ROUND_THEN_SCALE)
                    normed = REF_LOAD(REF_STORE(normed));
                else if (attr->variant == MT_NORM_ONE_PLUS)
                    weight += 1;
                y[j] = REF_STORE(weight * normed);
            }
        }
    }
}

/* With xh = x r and g = dy w': dx = r (g - xh mean(g xh)), dw = sum over rows of dy xh. */
static void REF(rmsnorm_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    const mt_rmsnorm_attr *attr = c->attr;
    int64_t n = c->in[0].cols / attr->heads;
    const REF_T *w = c->in[1].data;
    REF_A one = attr->variant == MT_NORM_ONE_PLUS ? 1 : 0;
    bool add = c->d_accumulate & 1u;
    REF_A *dw = c->d_in[1].data ? (REF_A *)c->work + begin / CPU_ROWS_PER_TASK * n : NULL;
    for (int64_t j = 0; dw && j < n; j++)
        dw[j] = 0;
    for (int64_t t = begin; t < end; t++) {
        for (int32_t h = 0; h < attr->heads; h++) {
            const REF_T *x = REF(row)(&c->in[0], t) + h * n;
            const REF_T *dy = REF(row)(&c->d_out[0], t) + h * n;
            REF_A r = ((const REF_A *)c->aux[0].data)[t * c->aux[0].ld + h];
            for (int64_t j = 0; dw && j < n; j++)
                dw[j] += REF_LOAD(dy[j]) * (REF_LOAD(x[j]) * r);
            if (!c->d_in[0].data)
                continue;
            REF_T *dx = REF(row)(&c->d_in[0], t) + h * n;
            double dot = 0.0;
            for (int64_t j = 0; j < n; j++)
                dot += (double)(REF_LOAD(dy[j]) * (REF_LOAD(w[j]) + one)) *
                       (double)(REF_LOAD(x[j]) * r);
            REF_A mean = (REF_A)(dot / (double)n);
            for (int64_t j = 0; j < n; j++) {
                REF_A g = REF_LOAD(dy[j]) * (REF_LOAD(w[j]) + one);
                REF(put)(dx + j, r * (g - REF_LOAD(x[j]) * r * mean), add);
            }
        }
    }
}

static void REF(rmsnorm_reduce)(const mt_op_call *c, int64_t begin, int64_t end)
{
    int64_t n = c->in[0].cols / ((const mt_rmsnorm_attr *)c->attr)->heads;
    int64_t tasks = cpu_rows_tasks(c, true, 0);
    const REF_A *part = c->work;
    REF_A *dw = c->d_in[1].data;
    for (int64_t j = begin; j < end; j++) {
        REF_A sum = 0;
        for (int64_t i = 0; i < tasks; i++)
            sum += part[i * n + j];
        dw[j] = c->d_accumulate & 2u ? dw[j] + sum : sum;
    }
}

/* ---- rope ----------------------------------------------------------------------------------- */

/* Rotates rows of src into dst by `sign` times their angle. */
static void REF(rotate)(const mt_op_call *c, const mt_tensor *src, const mt_tensor *dst, REF_A sign,
                        bool add, int64_t begin, int64_t end)
{
    const mt_rope_attr *attr = c->attr;
    int32_t half = attr->rotary_dim / 2;
    bool split = attr->pairing == MT_ROPE_HALF_SPLIT;
    REF_A cosine[MT_ROPE_MAX_FREQ], sine[MT_ROPE_MAX_FREQ];
    for (int64_t t = begin; t < end; t++) {
        for (int32_t i = 0; i < half; i++) {
            REF_A angle = (REF_A)attr->inv_freq[i] * (REF_A)c->batch.positions[t];
            cosine[i] = REF_FN(cos)(angle) * (REF_A)attr->attention_factor;
            sine[i] = sign * (REF_FN(sin)(angle) * (REF_A)attr->attention_factor);
        }
        for (int32_t h = 0; h < attr->heads; h++) {
            const REF_T *x = REF(row)(src, t) + (int64_t)h * attr->head_dim;
            REF_T *y = REF(row)(dst, t) + (int64_t)h * attr->head_dim;
            for (int32_t i = 0; i < half; i++) {
                int32_t ia = split ? i : 2 * i;
                int32_t ib = split ? i + half : 2 * i + 1;
                REF_A a = REF_LOAD(x[ia]), b = REF_LOAD(x[ib]);
                REF(put)(y + ia, a * cosine[i] - b * sine[i], add);
                REF(put)(y + ib, b * cosine[i] + a * sine[i], add);
            }
            for (int32_t j = 2 * half; j < attr->head_dim; j++)
                REF(put)(y + j, REF_LOAD(x[j]), add);
        }
    }
}

static void REF(rope)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF(rotate)(c, &c->in[0], &c->out[0], 1, false, begin, end);
}

static void REF(rope_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    if (c->d_in[0].data)
        REF(rotate)(c, &c->d_out[0], &c->d_in[0], -1, c->d_accumulate & 1u, begin, end);
}

/* ---- activations ---------------------------------------------------------------------------- */

static inline REF_A REF(clamp)(REF_A x, REF_A low, REF_A high)
{
    return x < low ? low : x > high ? high : x; /* NaN stays NaN */
}

static inline REF_A REF(sigmoid)(REF_A x)
{
    REF_A e = REF_FN(exp)(-REF_FN(fabs)(x));
    return (x < 0 ? e : 1) / (1 + e);
}

/* f(z) and, in *ret_slope, f'(z). */
static inline REF_A REF(activate)(mt_activation kind, REF_A z, REF_A *ret_slope)
{
    REF_A s;
    if (kind == MT_ACT_GELU_TANH) {
        REF_A k = (REF_A)CPU_GELU_2K, cubic = (REF_A)CPU_GELU_CUBIC;
        REF_A q = REF(clamp)(z, -(REF_A)CPU_ACT_SATURATED, (REF_A)CPU_ACT_SATURATED);
        s = REF(sigmoid)(k * q * (1 + cubic * q * q));
        *ret_slope = s + q * s * (1 - s) * k * (1 + 3 * cubic * q * q);
        return z * s;
    }
    s = REF(sigmoid)(z);
    if (kind == MT_ACT_SIGMOID) {
        *ret_slope = s * (1 - s);
        return s;
    }
    *ret_slope = s * (1 + z * (1 - s));
    return z * s;
}

static void REF(act)(const mt_op_call *c, int64_t begin, int64_t end)
{
    const mt_act_attr *attr = c->attr;
    REF_A slope;
    for (int64_t t = begin; t < end; t++) {
        const REF_T *x = REF(row)(&c->in[0], t);
        REF_T *y = REF(row)(&c->out[0], t);
        for (int64_t j = 0; j < c->out[0].cols; j++)
            y[j] = REF_STORE(REF(activate)(attr->kind, REF_LOAD(x[j]), &slope));
    }
}

static void REF(act_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    const mt_act_attr *attr = c->attr;
    if (!c->d_in[0].data)
        return;
    for (int64_t t = begin; t < end; t++) {
        const REF_T *x = REF(row)(&c->in[0], t);
        const REF_T *dy = REF(row)(&c->d_out[0], t);
        REF_T *dx = REF(row)(&c->d_in[0], t);
        for (int64_t j = 0; j < c->d_out[0].cols; j++) {
            REF_A slope;
            REF(activate)(attr->kind, REF_LOAD(x[j]), &slope);
            REF(put)(dx + j, REF_LOAD(dy[j]) * slope, c->d_accumulate & 1u);
        }
    }
}

/* The gated value, and its derivatives by gate and by up. The clamps cut a gradient only outside
 * the limits, as torch.clamp does; the gate has no lower limit. */
static inline REF_A REF(gated)(const mt_act_attr *attr, REF_A gate, REF_A up, REF_A *ret_by_gate,
                               REF_A *ret_by_up)
{
    if (attr->kind == MT_ACT_CLAMPED_SWIGLU) {
        REF_A limit = (REF_A)attr->limit, alpha = (REF_A)CPU_SWIGLU_ALPHA;
        /* Below -CPU_ACT_SATURATED the value and the slope are 0 already. */
        REF_A g = REF(clamp)(gate, -(REF_A)CPU_ACT_SATURATED, limit);
        REF_A u = REF(clamp)(up, -limit, limit);
        REF_A s = REF(sigmoid)(alpha * g);
        *ret_by_gate = gate > limit ? 0 : (u + 1) * (s + alpha * g * s * (1 - s));
        *ret_by_up = up < -limit || up > limit ? 0 : g * s;
        return (u + 1) * (g * s);
    }
    REF_A slope;
    REF_A f = REF(activate)(attr->kind, gate, &slope);
    *ret_by_gate = up * slope;
    *ret_by_up = f;
    return f * up;
}

static void REF(glu)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF_A by_gate, by_up;
    for (int64_t t = begin; t < end; t++) {
        const REF_T *gate = REF(row)(&c->in[0], t), *up = REF(row)(&c->in[1], t);
        REF_T *y = REF(row)(&c->out[0], t);
        for (int64_t j = 0; j < c->out[0].cols; j++)
            y[j] = REF_STORE(
                REF(gated)(c->attr, REF_LOAD(gate[j]), REF_LOAD(up[j]), &by_gate, &by_up));
    }
}

static void REF(glu_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const REF_T *gate = REF(row)(&c->in[0], t), *up = REF(row)(&c->in[1], t);
        const REF_T *dy = REF(row)(&c->d_out[0], t);
        REF_T *d_gate = c->d_in[0].data ? REF(row)(&c->d_in[0], t) : NULL;
        REF_T *d_up = c->d_in[1].data ? REF(row)(&c->d_in[1], t) : NULL;
        for (int64_t j = 0; j < c->d_out[0].cols; j++) {
            REF_A by_gate, by_up;
            REF(gated)(c->attr, REF_LOAD(gate[j]), REF_LOAD(up[j]), &by_gate, &by_up);
            if (d_gate)
                REF(put)(d_gate + j, REF_LOAD(dy[j]) * by_gate, c->d_accumulate & 1u);
            if (d_up)
                REF(put)(d_up + j, REF_LOAD(dy[j]) * by_up, c->d_accumulate & 2u);
        }
    }
}

/* ---- add, mul, scale ------------------------------------------------------------------------ */

/* dst = src * other (* factor where there is no other). */
static void REF(multiply)(const mt_tensor *src, const mt_tensor *other, REF_A factor,
                          const mt_tensor *dst, bool add, int64_t begin, int64_t end)
{
    for (int64_t t = begin; dst->data && t < end; t++) {
        const REF_T *x = REF(row)(src, t);
        const REF_T *f = other ? REF(row)(other, t) : NULL;
        REF_T *y = REF(row)(dst, t);
        for (int64_t j = 0; j < dst->cols; j++)
            REF(put)(y + j, REF_LOAD(x[j]) * (f ? REF_LOAD(f[j]) : factor), add);
    }
}

static void REF(add)(const mt_op_call *c, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const REF_T *a = REF(row)(&c->in[0], t), *b = REF(row)(&c->in[1], t);
        REF_T *y = REF(row)(&c->out[0], t);
        for (int64_t j = 0; j < c->out[0].cols; j++)
            y[j] = REF_STORE(REF_LOAD(a[j]) + REF_LOAD(b[j]));
    }
}

static void REF(add_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF(multiply)(&c->d_out[0], NULL, 1, &c->d_in[0], c->d_accumulate & 1u, begin, end);
    REF(multiply)(&c->d_out[0], NULL, 1, &c->d_in[1], c->d_accumulate & 2u, begin, end);
}

static void REF(mul)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF(multiply)(&c->in[0], &c->in[1], 1, &c->out[0], false, begin, end);
}

static void REF(mul_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF(multiply)(&c->d_out[0], &c->in[1], 1, &c->d_in[0], c->d_accumulate & 1u, begin, end);
    REF(multiply)(&c->d_out[0], &c->in[0], 1, &c->d_in[1], c->d_accumulate & 2u, begin, end);
}

static REF_A REF(factor)(const mt_op_call *c)
{
    REF_A factor = (REF_A)((const mt_scale_attr *)c->attr)->factor;
    return REF_LOAD(REF_STORE(factor));
}

static void REF(scale)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF(multiply)(&c->in[0], NULL, REF(factor)(c), &c->out[0], false, begin, end);
}

static void REF(scale_backward)(const mt_op_call *c, int64_t begin, int64_t end)
{
    REF(multiply)
    (&c->d_out[0], NULL, REF(factor)(c), &c->d_in[0], c->d_accumulate & 1u, begin, end);
}

const cpu_rows REF(cpu_rows) = { REF(rmsnorm),        REF(rmsnorm_backward),
                                 REF(rmsnorm_reduce), REF(rope),
                                 REF(rope_backward),  REF(act),
                                 REF(act_backward),   REF(glu),
                                 REF(glu_backward),   REF(add),
                                 REF(add_backward),   REF(mul),
                                 REF(mul_backward),   REF(scale),
                                 REF(scale_backward) };

#undef REF
#undef REF_T
#undef REF_A
#undef REF_LOAD
#undef REF_STORE
#undef REF_FN
