/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector kernel of AdamW, on GCC's vector extensions; compiled once per instruction set. The
 * two planes of the master weight are joined and split in registers: a step reads 16 bytes a
 * parameter and writes 12.
 */
#include "step.h"

#include <math.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#define STEP  adamw_step_avx512
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 8
#define STEP  adamw_step_avx2
#else
#define WIDTH 4
#define STEP  adamw_step_base
#endif

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
typedef int16_t vl __attribute__((vector_size(2 * WIDTH)));

static inline vf root(vf x)
{
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < WIDTH; i++)
        x[i] = sqrtf(x[i]);
    return x;
#endif
}

/* One vector; p, m, v are read and written. The formula is adamw_step_scalar's. */
static inline void step(const adamw_constants *k, vh *hi, vl *lo, vf grad, vf *m, vf *v)
{
    vf p = (vf)((__builtin_convertvector(*hi, vu) << 16) + (vu) __builtin_convertvector(*lo, vi));
    vf g = grad * k->grad_scale;
    *m = *m + k->rate_m * (g - *m);
    *v = k->beta2 * *v + k->rate_v * (g * g);
    vf denominator = root(*v) * k->root + k->epsilon;
    p = p - (k->decay * p + k->step * (*m / denominator));

    vu u = (vu)p;
    vu nan = (vu)((vi)(u & 0x7fffffffu) > 0x7f800000);
    u = (u & ~nan) | (0x7fc00000u & nan);
    vu upper = (u + 0x8000u) >> 16;
    *hi = __builtin_convertvector(upper, vh);
    *lo = __builtin_convertvector((vi)(u - (upper << 16)), vl);
}

static inline void step_at(const adamw_constants *k, int64_t i, uint16_t *hi, int16_t *lo,
                           const float *grad, float *m, float *v)
{
    vh h;
    vl l;
    vf g, m_i, v_i;
    memcpy(&h, hi + i, sizeof h);
    memcpy(&l, lo + i, sizeof l);
    memcpy(&g, grad + i, sizeof g);
    memcpy(&m_i, m + i, sizeof m_i);
    memcpy(&v_i, v + i, sizeof v_i);
    step(k, &h, &l, g, &m_i, &v_i);
    memcpy(hi + i, &h, sizeof h);
    memcpy(lo + i, &l, sizeof l);
    memcpy(m + i, &m_i, sizeof m_i);
    memcpy(v + i, &v_i, sizeof v_i);
}

/* Elements in a block of whole cache lines, and how far ahead blocks are fetched: processors' own
 * prefetchers stop at the end of a page and follow five streams badly. */
enum { BLOCK = 32, LINE = 16, AHEAD = 1024 };

void STEP(const adamw_constants *constants, int64_t n, uint16_t *restrict hi, int16_t *restrict lo,
          const float *restrict grad, float *restrict m, float *restrict v)
{
    const adamw_constants k = *constants;
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        /* Past the end of a plane these do nothing. */
        __builtin_prefetch(hi + i + AHEAD, 1);
        __builtin_prefetch(lo + i + AHEAD, 1);
        for (int64_t j = 0; j < BLOCK; j += LINE) {
            __builtin_prefetch(grad + i + j + AHEAD, 0);
            __builtin_prefetch(m + i + j + AHEAD, 1);
            __builtin_prefetch(v + i + j + AHEAD, 1);
        }
        for (int64_t j = 0; j < BLOCK; j += WIDTH)
            step_at(&k, i + j, hi, lo, grad, m, v);
    }
    for (; i + WIDTH <= n; i += WIDTH)
        step_at(&k, i, hi, lo, grad, m, v);
    adamw_step_scalar(&k, n - i, hi + i, lo + i, grad + i, m + i, v + i);
}
