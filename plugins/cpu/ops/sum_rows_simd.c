/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums and products of rows with vectors, for FP32 and BF16; compiled once per instruction set.
 */
#include "../simd.h"
#include "sum_rows.h"

/* Vectors that are summed side by side. */
enum { WIDE = 4 };

#define DEFINE_ROWS(name, T, LOAD, LOAD_N, STORE, STORE_N)                                         \
    SIMD_INLINE void columns_##name(T *dst, bool add, int64_t n, const T *src, int64_t ld,         \
                                    const int32_t *row, const float *weight, int64_t k)            \
    {                                                                                              \
        vf sum = add ? LOAD_N(dst, n) : vf_zero();                                                 \
        for (int64_t j = 0; j < k; j++)                                                            \
            sum = vf_fma(LOAD_N(src + (row ? row[j] : j) * ld, n),                                 \
                         vf_set1(weight ? weight[j] : 1.0f), sum);                                 \
        STORE_N(dst, sum, n);                                                                      \
    }                                                                                              \
                                                                                                   \
    static void sum_##name(void *to, bool add, int64_t n, const void *from, int64_t ld,            \
                           const int32_t *row, const void *weights, int64_t k)                     \
    {                                                                                              \
        T *dst = to;                                                                               \
        const T *src = from;                                                                       \
        const float *weight = weights;                                                             \
        int64_t i = 0;                                                                             \
        for (; i + WIDE * SIMD_WIDTH <= n; i += WIDE * SIMD_WIDTH) {                               \
            vf sum[WIDE];                                                                          \
            for (int w = 0; w < WIDE; w++)                                                         \
                sum[w] = add ? LOAD(dst + i + w * SIMD_WIDTH) : vf_zero();                         \
            for (int64_t j = 0; j < k; j++) {                                                      \
                const T *x = src + (row ? row[j] : j) * ld + i;                                    \
                vf by = vf_set1(weight ? weight[j] : 1.0f);                                        \
                for (int w = 0; w < WIDE; w++)                                                     \
                    sum[w] = vf_fma(LOAD(x + w * SIMD_WIDTH), by, sum[w]);                         \
            }                                                                                      \
            for (int w = 0; w < WIDE; w++)                                                         \
                STORE(dst + i + w * SIMD_WIDTH, sum[w]);                                           \
        }                                                                                          \
        for (; i < n; i += SIMD_WIDTH)                                                             \
            columns_##name(dst + i, add, n - i < SIMD_WIDTH ? n - i : SIMD_WIDTH, src + i, ld,     \
                           row, weight, k);                                                        \
    }                                                                                              \
                                                                                                   \
    static double dot_##name(const void *x, const void *y, int64_t n)                              \
    {                                                                                              \
        const T *a = x, *b = y;                                                                    \
        vf sum[WIDE] = { vf_zero(), vf_zero(), vf_zero(), vf_zero() };                             \
        int64_t i = 0;                                                                             \
        for (; i + WIDE * SIMD_WIDTH <= n; i += WIDE * SIMD_WIDTH)                                 \
            for (int w = 0; w < WIDE; w++)                                                         \
                sum[w] =                                                                           \
                    vf_fma(LOAD(a + i + w * SIMD_WIDTH), LOAD(b + i + w * SIMD_WIDTH), sum[w]);    \
        for (; i < n; i += SIMD_WIDTH) {                                                           \
            int64_t m = n - i < SIMD_WIDTH ? n - i : SIMD_WIDTH;                                   \
            sum[0] = vf_fma(LOAD_N(a + i, m), LOAD_N(b + i, m), sum[0]);                           \
        }                                                                                          \
        return vf_sum(sum[0] + sum[1] + (sum[2] + sum[3]));                                        \
    }

DEFINE_ROWS(f32, float, vf_load, vf_load_n, vf_store, vf_store_n)
DEFINE_ROWS(bf16, uint16_t, vf_load_bf16, vf_load_bf16_n, vf_store_bf16, vf_store_bf16_n)

const cpu_row_sums SIMD_NAME(cpu_row_sums) = { sum_f32, sum_bf16, dot_f32, dot_bf16 };
