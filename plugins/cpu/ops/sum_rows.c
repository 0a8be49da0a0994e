/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums and products of rows; see sum_rows.h. Loops have pieces of constant length, which compilers
 * turn into vector code.
 */
#include "sum_rows.h"

enum { PIECE = 128, LANES = 16 };

#define LOAD_SAME(x)  (x)
#define STORE_SAME(x) (x)

#define DEFINE_ROWS(name, T, A, LOAD, STORE)                                                       \
    static void sum_##name(T *dst, bool add, int64_t n, const T *src, int64_t ld,                  \
                           const int32_t *row, const A *weight, int64_t k)                         \
    {                                                                                              \
        for (int64_t from = 0; from < n; from += PIECE) {                                          \
            int64_t m = n - from < PIECE ? n - from : PIECE;                                       \
            A sum[PIECE] = { 0 };                                                                  \
            for (int64_t i = 0; add && i < m; i++)                                                 \
                sum[i] = LOAD(dst[from + i]);                                                      \
            for (int64_t j = 0; j < k; j++) {                                                      \
                const T *x = src + (row ? row[j] : j) * ld + from;                                 \
                A w = weight ? weight[j] : 1;                                                      \
                if (m == PIECE)                                                                    \
                    for (int64_t i = 0; i < PIECE; i++)                                            \
                        sum[i] += w * LOAD(x[i]);                                                  \
                else                                                                               \
                    for (int64_t i = 0; i < m; i++)                                                \
                        sum[i] += w * LOAD(x[i]);                                                  \
            }                                                                                      \
            for (int64_t i = 0; i < m; i++)                                                        \
                dst[from + i] = STORE(sum[i]);                                                     \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static double dot_##name(const T *a, const T *b, int64_t n)                                    \
    {                                                                                              \
        A lane[LANES] = { 0 };                                                                     \
        int64_t i = 0;                                                                             \
        for (; i + LANES <= n; i += LANES)                                                         \
            for (int l = 0; l < LANES; l++)                                                        \
                lane[l] += LOAD(a[i + l]) * LOAD(b[i + l]);                                        \
        for (int l = 0; i + l < n; l++)                                                            \
            lane[l] += LOAD(a[i + l]) * LOAD(b[i + l]);                                            \
        double sum = 0;                                                                            \
        for (int l = 0; l < LANES; l++)                                                            \
            sum += lane[l];                                                                        \
        return sum;                                                                                \
    }

DEFINE_ROWS(f32, float, float, LOAD_SAME, STORE_SAME)
DEFINE_ROWS(f64, double, double, LOAD_SAME, STORE_SAME)
DEFINE_ROWS(bf16, uint16_t, float, mt_bf16_to_f32, mt_f32_to_bf16)

void cpu_sum_rows(mt_dtype dtype, void *dst, bool add, int64_t n, const void *src, int64_t ld,
                  const int32_t *row, const void *weight, int64_t k)
{
    if (dtype == MT_F32)
        sum_f32(dst, add, n, src, ld, row, weight, k);
    else if (dtype == MT_F64)
        sum_f64(dst, add, n, src, ld, row, weight, k);
    else
        sum_bf16(dst, add, n, src, ld, row, weight, k);
}

double cpu_dot_rows(mt_dtype dtype, const void *a, const void *b, int64_t n)
{
    if (dtype == MT_F32)
        return dot_f32(a, b, n);
    return dtype == MT_F64 ? dot_f64(a, b, n) : dot_bf16(a, b, n);
}
