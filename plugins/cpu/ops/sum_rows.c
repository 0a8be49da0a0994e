/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums and products of rows; see sum_rows.h. Here in plain C: loops have pieces of constant length,
 * which compilers turn into vector code.
 */
#include "sum_rows.h"

enum { PIECE = 128, LANES = 16 };

#define LOAD_SAME(x)  (x)
#define STORE_SAME(x) (x)

#define DEFINE_ROWS(name, T, A, LOAD, STORE)                                                       \
    static void sum_##name(void *to, bool add, int64_t n, const void *from_rows, int64_t ld,       \
                           const int32_t *row, const void *weights, int64_t k)                     \
    {                                                                                              \
        T *dst = to;                                                                               \
        const T *src = from_rows;                                                                  \
        const A *weight = weights;                                                                 \
        for (int64_t from = 0; from < n; from += PIECE) {                                          \
            int64_t m = n - from < PIECE ? n - from : PIECE;                                       \
            A sum[PIECE] = { 0 };                                                                  \
            for (int64_t i = 0; add && i < m; i++)                                                 \
                sum[i] = LOAD(dst[from + i]);                                                      \
            for (int64_t j = 0; j < k; j++) {                                                      \
                const T *add_row = src + (row ? row[j] : j) * ld + from;                           \
                A w = weight ? weight[j] : 1;                                                      \
                if (m == PIECE)                                                                    \
                    for (int64_t i = 0; i < PIECE; i++)                                            \
                        sum[i] += w * LOAD(add_row[i]);                                            \
                else                                                                               \
                    for (int64_t i = 0; i < m; i++)                                                \
                        sum[i] += w * LOAD(add_row[i]);                                            \
            }                                                                                      \
            for (int64_t i = 0; i < m; i++)                                                        \
                dst[from + i] = STORE(sum[i]);                                                     \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static double dot_##name(const void *x, const void *y, int64_t n)                              \
    {                                                                                              \
        const T *a = x, *b = y;                                                                    \
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

static const cpu_row_sums plain = { sum_f32, sum_bf16, dot_f32, dot_bf16 };

static const cpu_row_sums *table_of(cpu_isa isa)
{
#if defined(__x86_64__)
    if (isa == CPU_AVX512)
        return &cpu_row_sums_avx512;
    if (isa == CPU_AVX2)
        return &cpu_row_sums_avx2;
#endif
    (void)isa;
    return &plain;
}

void cpu_sum_rows(cpu_isa isa, mt_dtype dtype, void *dst, bool add, int64_t n, const void *src,
                  int64_t ld, const int32_t *row, const void *weight, int64_t k)
{
    const cpu_row_sums *t = table_of(isa);
    cpu_sum_rows_fn *sum = dtype == MT_F32 ? t->sum_f32 : dtype == MT_F64 ? sum_f64 : t->sum_bf16;
    sum(dst, add, n, src, ld, row, weight, k);
}

double cpu_dot_rows(cpu_isa isa, mt_dtype dtype, const void *a, const void *b, int64_t n)
{
    const cpu_row_sums *t = table_of(isa);
    cpu_dot_rows_fn *dot = dtype == MT_F32 ? t->dot_f32 : dtype == MT_F64 ? dot_f64 : t->dot_bf16;
    return dot(a, b, n);
}
