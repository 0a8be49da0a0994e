/* SPDX-License-Identifier: Apache-2.0
 *
 * Weighted sums of rows and products of two rows in any compute dtype: what dispatch, combine,
 * slice and concat are made of. BF16 is summed in FP32 and rounded once.
 */
#ifndef MT_CPU_SUM_ROWS_H
#define MT_CPU_SUM_ROWS_H

#include "../cpu.h"

/* dst[0..n) = or += the sum over j < k, in this order, of weight[j] src[row[j] * ld ...]. `row`
 * NULL stands for 0, 1, 2 ...; `weight`, in the statistics dtype, NULL for ones. */
void cpu_sum_rows(cpu_isa isa, mt_dtype dtype, void *dst, bool add, int64_t n, const void *src,
                  int64_t ld, const int32_t *row, const void *weight, int64_t k);

/* Sum of a[i] b[i], in a fixed order. */
double cpu_dot_rows(cpu_isa isa, mt_dtype dtype, const void *a, const void *b, int64_t n);

/* The same for FP32 and BF16 with vectors, one table per instruction set (sum_rows_simd.c). */
typedef void cpu_sum_rows_fn(void *dst, bool add, int64_t n, const void *src, int64_t ld,
                             const int32_t *row, const void *weight, int64_t k);
typedef double cpu_dot_rows_fn(const void *a, const void *b, int64_t n);
typedef struct cpu_row_sums {
    cpu_sum_rows_fn *sum_f32, *sum_bf16;
    cpu_dot_rows_fn *dot_f32, *dot_bf16;
} cpu_row_sums;
extern const cpu_row_sums cpu_row_sums_avx2, cpu_row_sums_avx512;

/* Element (row, col) of a tensor. */
static inline void *cpu_at(const mt_tensor *t, int64_t row, int64_t col)
{
    return (char *)t->data + (row * t->ld + col) * mt_dtype_size(t->dtype);
}

static inline double cpu_get(const mt_tensor *t, int64_t row, int64_t col)
{
    const void *p = cpu_at(t, row, col);
    if (t->dtype == MT_F32)
        return *(const float *)p;
    if (t->dtype == MT_F64)
        return *(const double *)p;
    return mt_bf16_to_f32(*(const uint16_t *)p);
}

static inline void cpu_put(const mt_tensor *t, int64_t row, int64_t col, double x)
{
    void *p = cpu_at(t, row, col);
    if (t->dtype == MT_F32)
        *(float *)p = (float)x;
    else if (t->dtype == MT_F64)
        *(double *)p = x;
    else
        *(uint16_t *)p = mt_f32_to_bf16((float)x);
}

/* Row `row` of a tensor of int32s. */
static inline const int32_t *cpu_index_row(const mt_tensor *t, int64_t row)
{
    return (const int32_t *)t->data + row * t->ld;
}

/* Tasks of CPU_ROWS_PER_TASK rows out of n, and where one ends. */
static inline int64_t cpu_row_tasks(int64_t n)
{
    return (n + CPU_ROWS_PER_TASK - 1) / CPU_ROWS_PER_TASK;
}

static inline int64_t cpu_row_task_end(int64_t task, int64_t n)
{
    int64_t end = (task + 1) * CPU_ROWS_PER_TASK;
    return end < n ? end : n;
}

#endif
