/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations that treat every element by itself: act, glu, add, mul, scale, forward and backward.
 * One kernel moves N operands in and M results out; what it computes is a functor. BF16 computes in
 * FP32 and is rounded once, when it is stored.
 */
#include "rowwise.cuh"

/* GPT-OSS's gated activation: the gate's factor inside the sigmoid. */
#define SWIGLU_ALPHA 1.702

/* gelu_tanh(z) = z sigmoid(2 k (z + 0.044715 z^3)), k = sqrt(2 / pi): the tanh form without its
 * cancellation at negative z. Twice k: */
#define GELU_2K    1.5957691216057307
#define GELU_CUBIC 0.044715

/* Beyond this |z| every sigmoid in use is exactly 0 or 1; powers of z are formed from the clamped
 * value so that they cannot overflow and 0 * Inf never arises. */
#define ACT_SATURATED 1000.0

template <typename R> static __device__ __forceinline__ R clamp(R x, R low, R high)
{
    return x < low ? low : x > high ? high : x; /* NaN stays NaN */
}

template <typename R> static __device__ __forceinline__ R sigmoid(R x)
{
    R e = exponential(x < 0 ? x : -x);
    return (x < 0 ? e : R(1)) / (R(1) + e);
}

/* f(z) and, in *ret_slope, f'(z). */
template <mt_activation KIND, typename R>
static __device__ __forceinline__ R activate(R z, R *ret_slope)
{
    if (KIND == MT_ACT_GELU_TANH) {
        const R k = R(GELU_2K), cubic = R(GELU_CUBIC);
        R q = clamp(z, -R(ACT_SATURATED), R(ACT_SATURATED));
        R s = sigmoid(k * q * (1 + cubic * q * q));
        *ret_slope = s + q * s * (1 - s) * k * (1 + 3 * cubic * q * q);
        return z * s;
    }
    R s = sigmoid(z);
    if (KIND == MT_ACT_SIGMOID) {
        *ret_slope = s * (1 - s);
        return s;
    }
    *ret_slope = s * (1 + z * (1 - s));
    return z * s;
}

/* The gated value, and its derivatives by gate and by up. The clamps cut a gradient only outside
 * the limits, as torch.clamp does; the gate has no lower limit. */
template <mt_activation KIND, typename R>
static __device__ __forceinline__ R gated(R limit, R gate, R up, R *ret_by_gate, R *ret_by_up)
{
    if (KIND == MT_ACT_CLAMPED_SWIGLU) {
        const R alpha = R(SWIGLU_ALPHA);
        /* Below -ACT_SATURATED the value and the slope are 0 already. */
        R g = clamp(gate, -R(ACT_SATURATED), limit);
        R u = clamp(up, -limit, limit);
        R s = sigmoid(alpha * g);
        *ret_by_gate = gate > limit ? R(0) : (u + 1) * (s + alpha * g * s * (1 - s));
        *ret_by_up = up < -limit || up > limit ? R(0) : g * s;
        return (u + 1) * (g * s);
    }
    R slope;
    R f = activate<KIND>(gate, &slope);
    *ret_by_gate = up * slope;
    *ret_by_up = f;
    return f * up;
}

/* ---- functors -------------------------------------------------------------------------------- */

template <mt_activation KIND> struct act_forward {
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        R slope;
        out[0] = activate<KIND>(in[0], &slope);
    }
};

template <mt_activation KIND> struct act_backward { /* x, dy -> dx */
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        R slope;
        activate<KIND>(in[0], &slope);
        out[0] = in[1] * slope;
    }
};

template <mt_activation KIND> struct glu_forward {
    double limit;
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        R by_gate, by_up;
        out[0] = gated<KIND>(R(limit), in[0], in[1], &by_gate, &by_up);
    }
};

template <mt_activation KIND> struct glu_backward { /* gate, up, dy -> d gate, d up */
    double limit;
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        R by_gate, by_up;
        gated<KIND>(R(limit), in[0], in[1], &by_gate, &by_up);
        out[0] = in[2] * by_gate;
        out[1] = in[2] * by_up;
    }
};

struct sum_forward {
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        out[0] = in[0] + in[1];
    }
};

struct sum_backward {
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        out[0] = out[1] = in[0];
    }
};

struct product_forward {
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        out[0] = in[0] * in[1];
    }
};

struct product_backward { /* a, b, dy -> da, db */
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        out[0] = in[2] * in[1];
        out[1] = in[2] * in[0];
    }
};

struct scaling { /* the factor is already rounded to the compute dtype */
    double factor;
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        out[0] = in[0] * R(factor);
    }
};

/* ---- operations ------------------------------------------------------------------------------ */

static void act_forward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->in[0] }, *out[] = { &c->out[0] };
    switch (((const mt_act_attr *)c->attr)->kind) {
    case MT_ACT_GELU_TANH:
        map<1, 1>(q, in, out, 0, act_forward<MT_ACT_GELU_TANH>());
        break;
    case MT_ACT_SIGMOID:
        map<1, 1>(q, in, out, 0, act_forward<MT_ACT_SIGMOID>());
        break;
    default:
        map<1, 1>(q, in, out, 0, act_forward<MT_ACT_SILU>());
        break;
    }
}

static void act_backward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->in[0], &c->d_out[0] }, *out[] = { &c->d_in[0] };
    switch (((const mt_act_attr *)c->attr)->kind) {
    case MT_ACT_GELU_TANH:
        map<2, 1>(q, in, out, c->d_accumulate, act_backward<MT_ACT_GELU_TANH>());
        break;
    case MT_ACT_SIGMOID:
        map<2, 1>(q, in, out, c->d_accumulate, act_backward<MT_ACT_SIGMOID>());
        break;
    default:
        map<2, 1>(q, in, out, c->d_accumulate, act_backward<MT_ACT_SILU>());
        break;
    }
}

static void glu_forward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_act_attr *a = (const mt_act_attr *)c->attr;
    const mt_tensor *in[] = { &c->in[0], &c->in[1] }, *out[] = { &c->out[0] };
    switch (a->kind) {
    case MT_ACT_GELU_TANH:
        map<2, 1>(q, in, out, 0, glu_forward<MT_ACT_GELU_TANH>{ a->limit });
        break;
    case MT_ACT_SIGMOID:
        map<2, 1>(q, in, out, 0, glu_forward<MT_ACT_SIGMOID>{ a->limit });
        break;
    case MT_ACT_CLAMPED_SWIGLU:
        map<2, 1>(q, in, out, 0, glu_forward<MT_ACT_CLAMPED_SWIGLU>{ a->limit });
        break;
    default:
        map<2, 1>(q, in, out, 0, glu_forward<MT_ACT_SILU>{ a->limit });
        break;
    }
}

static void glu_backward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_act_attr *a = (const mt_act_attr *)c->attr;
    const mt_tensor *in[] = { &c->in[0], &c->in[1], &c->d_out[0] };
    const mt_tensor *out[] = { &c->d_in[0], &c->d_in[1] };
    uint32_t add = c->d_accumulate;
    switch (a->kind) {
    case MT_ACT_GELU_TANH:
        map<3, 2>(q, in, out, add, glu_backward<MT_ACT_GELU_TANH>{ a->limit });
        break;
    case MT_ACT_SIGMOID:
        map<3, 2>(q, in, out, add, glu_backward<MT_ACT_SIGMOID>{ a->limit });
        break;
    case MT_ACT_CLAMPED_SWIGLU:
        map<3, 2>(q, in, out, add, glu_backward<MT_ACT_CLAMPED_SWIGLU>{ a->limit });
        break;
    default:
        map<3, 2>(q, in, out, add, glu_backward<MT_ACT_SILU>{ a->limit });
        break;
    }
}

static void add_forward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->in[0], &c->in[1] }, *out[] = { &c->out[0] };
    map<2, 1>(q, in, out, 0, sum_forward());
}

static void add_backward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->d_out[0] }, *out[] = { &c->d_in[0], &c->d_in[1] };
    map<1, 2>(q, in, out, c->d_accumulate, sum_backward());
}

static void mul_forward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->in[0], &c->in[1] }, *out[] = { &c->out[0] };
    map<2, 1>(q, in, out, 0, product_forward());
}

static void mul_backward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->in[0], &c->in[1], &c->d_out[0] };
    const mt_tensor *out[] = { &c->d_in[0], &c->d_in[1] };
    map<3, 2>(q, in, out, c->d_accumulate, product_backward());
}

static scaling scaling_of(const mt_op_call *c, mt_dtype dtype)
{
    double factor = ((const mt_scale_attr *)c->attr)->factor;
    if (dtype == MT_BF16)
        factor = mt_bf16_to_f32(mt_f32_to_bf16((float)factor));
    else if (dtype == MT_F32)
        factor = (float)factor;
    return scaling{ factor };
}

static void scale_forward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->in[0] }, *out[] = { &c->out[0] };
    map<1, 1>(q, in, out, 0, scaling_of(c, c->out[0].dtype));
}

static void scale_backward_op(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->d_out[0] }, *out[] = { &c->d_in[0] };
    map<1, 1>(q, in, out, c->d_accumulate, scaling_of(c, c->d_out[0].dtype));
}

const cuda_op cuda_op_act = { act_forward_op, act_backward_op, NULL };
const cuda_op cuda_op_glu = { glu_forward_op, glu_backward_op, NULL };
const cuda_op cuda_op_add = { add_forward_op, add_backward_op, NULL };
const cuda_op cuda_op_mul = { mul_forward_op, mul_backward_op, NULL };
const cuda_op cuda_op_scale = { scale_forward_op, scale_backward_op, NULL };
