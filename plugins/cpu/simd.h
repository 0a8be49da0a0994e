/* SPDX-License-Identifier: Apache-2.0
 *
 * A small vector layer: SIMD_WIDTH floats as one value, for the instruction set that the including
 * file is compiled for (16 with AVX-512, 8 with AVX2 and FMA, else 4). A file that uses it is
 * compiled once per instruction set and names what it exports with SIMD_NAME.
 *
 * Everything is a pure function of its arguments. Sums run in a fixed order that depends on
 * SIMD_WIDTH, so results are reproducible per instruction set, not across them.
 */
#ifndef MT_CPU_SIMD_H
#define MT_CPU_SIMD_H

#include <megatrain/base.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define SIMD_AVX512      1
#define SIMD_WIDTH       16
#define SIMD_NAME_(name) name##_avx512
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define SIMD_AVX2        1
#define SIMD_WIDTH       8
#define SIMD_NAME_(name) name##_avx2
#else
#define SIMD_WIDTH       4
#define SIMD_NAME_(name) name##_base
#endif

/* The name of something that is exported, with the instruction set behind it. */
#define SIMD_NAME(name) SIMD_NAME_(name)

typedef float vf __attribute__((vector_size(4 * SIMD_WIDTH)));    /* floats */
typedef int32_t vi __attribute__((vector_size(4 * SIMD_WIDTH)));  /* integers, lane masks (0, -1) */
typedef uint32_t vu __attribute__((vector_size(4 * SIMD_WIDTH))); /* bits of floats */
typedef uint16_t vh __attribute__((vector_size(2 * SIMD_WIDTH))); /* BF16 in memory */

#define SIMD_INLINE static inline __attribute__((always_inline, unused))

/* ---- constants, memory ---------------------------------------------------------------------- */

SIMD_INLINE vf vf_set1(float x)
{
#if defined(SIMD_AVX512)
    return (vf)_mm512_set1_ps(x);
#elif defined(SIMD_AVX2)
    return (vf)_mm256_set1_ps(x);
#else
    return (vf){ x, x, x, x };
#endif
}

SIMD_INLINE vf vf_zero(void)
{
    return vf_set1(0.0f);
}

/* Loads and stores need no alignment. The _n forms touch only the first n lanes, 0 <= n <=
 * SIMD_WIDTH; lanes that are not loaded read as 0. */
SIMD_INLINE vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

SIMD_INLINE void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

SIMD_INLINE vf vf_load_n(const float *p, int64_t n)
{
#if defined(SIMD_AVX512)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
    float lane[SIMD_WIDTH] = { 0 };
    memcpy(lane, p, (size_t)n * sizeof *p);
    return vf_load(lane);
#endif
}

SIMD_INLINE void vf_store_n(float *p, vf v, int64_t n)
{
#if defined(SIMD_AVX512)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#else
    float lane[SIMD_WIDTH];
    vf_store(lane, v);
    memcpy(p, lane, (size_t)n * sizeof *p);
#endif
}

/* BF16 to FP32: exact. */
SIMD_INLINE vf vf_from_bf16(vh h)
{
#if defined(SIMD_AVX512) /* GCC 12 makes two halves of the generic form */
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

/* FP32 to BF16: mt_f32_to_bf16 on every lane (to nearest even, NaN stays NaN). */
SIMD_INLINE vh vf_to_bf16(vf x)
{
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu quiet = (u >> 16) | 0x40u;
    vu nan = (vu)((vi)(u & 0x7fffffffu) > 0x7f800000);
    vu half = (quiet & nan) | (rounded & ~nan);
#if defined(SIMD_AVX512)
    return (vh)_mm512_cvtepi32_epi16((__m512i)half);
#elif defined(SIMD_AVX2)
    __m256i packed = _mm256_packus_epi32((__m256i)half, (__m256i)half);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(half, vh);
#endif
}

SIMD_INLINE vf vf_load_bf16(const uint16_t *p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    return vf_from_bf16(h);
}

SIMD_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    vh h = vf_to_bf16(v);
    memcpy(p, &h, sizeof h);
}

SIMD_INLINE vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
#if defined(SIMD_AVX512)
    return vf_from_bf16((vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1u), p));
#else
    uint16_t lane[SIMD_WIDTH] = { 0 };
    memcpy(lane, p, (size_t)n * sizeof *p);
    return vf_load_bf16(lane);
#endif
}

SIMD_INLINE void vf_store_bf16_n(uint16_t *p, vf v, int64_t n)
{
#if defined(SIMD_AVX512)
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)vf_to_bf16(v));
#else
    uint16_t lane[SIMD_WIDTH];
    vf_store_bf16(lane, v);
    memcpy(p, lane, (size_t)n * sizeof *p);
#endif
}

/* x rounded to BF16 and back. */
SIMD_INLINE vf vf_round_bf16(vf x)
{
    return vf_from_bf16(vf_to_bf16(x));
}

/* ---- arithmetic (+, -, *, / are the operators) ---------------------------------------------- */

/* a * b + c; rounded once where the instruction set has FMA, else twice. */
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
#if defined(SIMD_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SIMD_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* mask ? a : b, lane by lane; a mask is the result of a comparison such as x < y. */
SIMD_INLINE vf vf_select(vi mask, vf a, vf b)
{
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

/* The larger, the smaller. Where either is NaN the result is b: pass the value that must stay NaN
 * second, as in vf_max(limit, x). */
SIMD_INLINE vf vf_max(vf a, vf b)
{
#if defined(SIMD_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(SIMD_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

SIMD_INLINE vf vf_min(vf a, vf b)
{
#if defined(SIMD_AVX512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(SIMD_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

SIMD_INLINE vf vf_clamp(vf x, float low, float high)
{
    return vf_max(vf_set1(low), vf_min(vf_set1(high), x));
}

SIMD_INLINE vf vf_abs(vf x)
{
    return (vf)((vu)x & 0x7fffffffu);
}

SIMD_INLINE vf vf_copysign(vf magnitude, vf sign)
{
    return (vf)(((vu)magnitude & 0x7fffffffu) | ((vu)sign & 0x80000000u));
}

/* Sum of the lanes: halves are added until one lane is left. */
SIMD_INLINE float vf_sum(vf v)
{
    float lane[SIMD_WIDTH];
    vf_store(lane, v);
    for (int half = SIMD_WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

/* Largest lane; unspecified when a lane is NaN. */
SIMD_INLINE float vf_hmax(vf v)
{
    float lane[SIMD_WIDTH];
    vf_store(lane, v);
    for (int half = SIMD_WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

/* ---- functions ------------------------------------------------------------------------------ */

/* x = n ln 2 + r with |r| <= ln 2 / 2; returns e^r - 1 and n. |n| <= 150 keeps n * 0.693359375
 * exact, with or without FMA. The polynomial is e^r - 1 = r + r^2 q(r), q of degree 4 interpolated
 * at Chebyshev nodes; its own error is below 2.6e-8 of e^r - 1. */
SIMD_INLINE vf vf_expm1_reduced_(vf x, vi *ret_n)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf t = vf_fma(x, vf_set1(1.44269504f), vf_set1(magic));
    vf n = t - magic;
    *ret_n = (vi)t - (vi)vf_set1(magic);
    vf r = vf_fma(n, vf_set1(-0.693359375f), x);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf q = vf_set1(0x1.6d113cp-10f);
    q = vf_fma(q, r, vf_set1(0x1.120ba2p-7f));
    q = vf_fma(q, r, vf_set1(0x1.55551ap-5f));
    q = vf_fma(q, r, vf_set1(0x1.5554dcp-3f));
    q = vf_fma(q, r, vf_set1(0.5f));
    return vf_fma(q, r * r, r);
}

/* 2^n for -126 <= n <= 127. */
SIMD_INLINE vf vf_pow2_(vi n)
{
    return (vf)((n + 127) << 23);
}

/* e^x within 1.1 ulp (subnormal results: 1 unit of the subnormal spacing). Overflows to +Inf,
 * underflows gradually to 0; e^-Inf = 0; NaN stays NaN. */
SIMD_INLINE vf vf_exp(vf x)
{
    vi n;
    x = vf_clamp(x, -104.0f, 89.0f);
    vf e = vf_expm1_reduced_(x, &n) + 1.0f;
    /* Two factors: 2^n itself may be subnormal or 2^128. */
    vi half = n >> 1;
    return e * vf_pow2_(half) * vf_pow2_(n - half);
}

/* 1 / (1 + e^-x) within 2.5 ulp, for negative x too; 0 and 1 at the ends; NaN stays NaN. */
SIMD_INLINE vf vf_sigmoid(vf x)
{
    vf e = vf_exp((vf)((vu)x | 0x80000000u)); /* e^-|x|: never overflows */
    return vf_select(x < 0.0f, e, vf_set1(1.0f)) / (1.0f + e);
}

/* tanh x within 2.5 ulp, near 0 too; -1 and 1 at the ends; keeps -0; NaN stays NaN. */
SIMD_INLINE vf vf_tanh(vf x)
{
    vi n;
    vf y = vf_min(vf_set1(24.0f), vf_abs(x) * 2.0f);
    vf p = vf_expm1_reduced_(y, &n);
    vf scale = vf_pow2_(n);
    vf e = vf_fma(scale, p, scale - 1.0f); /* e^(2|x|) - 1 */
    return vf_copysign(e / (e + 2.0f), x);
}

#endif
