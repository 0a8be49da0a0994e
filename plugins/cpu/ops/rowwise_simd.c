/* SPDX-License-Identifier: Apache-2.0
 *
 * The row-wise kernels with vectors, for FP32 and BF16; compiled once per instruction set.
 */
#include "../simd.h"
#include "rowwise.h"

#include <math.h>

typedef uint64_t vq __attribute__((vector_size(4 * SIMD_WIDTH))); /* pairs of floats */

/* ---- mathematics shared by both dtypes ------------------------------------------------------ */

/* f(z) and, in *ret_slope, f'(z); `kind` is a constant at every call. */
SIMD_INLINE vf activate(mt_activation kind, vf z, vf *ret_slope)
{
    if (kind == MT_ACT_GELU_TANH) {
        const float k = (float)CPU_GELU_2K, cubic = (float)CPU_GELU_CUBIC;
        vf q = vf_clamp(z, -(float)CPU_ACT_SATURATED, (float)CPU_ACT_SATURATED);
        vf q2 = q * q;
        vf s = vf_sigmoid(k * q * (1.0f + cubic * q2));
        *ret_slope = s + q * s * (1.0f - s) * k * (1.0f + 3.0f * cubic * q2);
        return z * s;
    }
    vf s = vf_sigmoid(z);
    if (kind == MT_ACT_SIGMOID) {
        *ret_slope = s * (1.0f - s);
        return s;
    }
    *ret_slope = s * (1.0f + z * (1.0f - s));
    return z * s;
}

/* The gated value, and its derivatives by gate and by up; see rowwise_ref.inc for the clamps. */
SIMD_INLINE vf gated(mt_activation kind, float limit, vf gate, vf up, vf *ret_by_gate,
                     vf *ret_by_up)
{
    if (kind == MT_ACT_CLAMPED_SWIGLU) {
        const float alpha = (float)CPU_SWIGLU_ALPHA;
        vf g = vf_clamp(gate, -(float)CPU_ACT_SATURATED, limit);
        vf u = vf_clamp(up, -limit, limit);
        vf s = vf_sigmoid(alpha * g);
        vf zero = vf_zero();
        vf by_gate = (u + 1.0f) * (s + alpha * g * s * (1.0f - s));
        *ret_by_gate = vf_select(gate > limit, zero, by_gate);
        *ret_by_up = vf_select((up < -limit) | (up > limit), zero, g * s);
        return (u + 1.0f) * (g * s);
    }
    vf slope;
    vf f = activate(kind, gate, &slope);
    *ret_by_gate = up * slope;
    *ret_by_up = f;
    return f * up;
}

/* (a0, b0, a1, b1, ...) -> (b0, a0, b1, a1, ...) */
SIMD_INLINE vf swap_pairs(vf v)
{
    vq q = (vq)v;
    return (vf)((q >> 32) | (q << 32));
}

#define ROWS(name)            name##_f32
#define ROWS_T                float
#define ROWS_LOAD(p)          vf_load(p)
#define ROWS_LOAD_N(p, n)     vf_load_n(p, n)
#define ROWS_STORE(p, v)      vf_store(p, v)
#define ROWS_STORE_N(p, v, n) vf_store_n(p, v, n)
#define ROWS_ROUND(v)         (v)
#define ROWS_ROUND_1(x)       (x)
#include "rowwise_simd.inc"

#define ROWS(name)            name##_bf16
#define ROWS_T                uint16_t
#define ROWS_LOAD(p)          vf_load_bf16(p)
#define ROWS_LOAD_N(p, n)     vf_load_bf16_n(p, n)
#define ROWS_STORE(p, v)      vf_store_bf16(p, v)
#define ROWS_STORE_N(p, v, n) vf_store_bf16_n(p, v, n)
#define ROWS_ROUND(v)         vf_round_bf16(v)
#define ROWS_ROUND_1(x)       mt_bf16_to_f32(mt_f32_to_bf16(x))
#include "rowwise_simd.inc"
