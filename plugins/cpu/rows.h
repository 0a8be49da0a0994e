/* SPDX-License-Identifier: Apache-2.0
 *
 * Vector kernels on single rows that attention and the loss are made of, one table for each
 * instruction set. FP32, or rows of BF16 where said.
 */
#ifndef MT_CPU_ROWS_H
#define MT_CPU_ROWS_H

#include "cpu.h"

typedef struct cpu_rows {
    /* Largest of x[0..n), -Inf for n = 0. Unspecified where a number is NaN. */
    float (*max)(const float *x, int64_t n);
    /* x = e^(x - shift); returns their sum. */
    float (*exp_sum)(float *x, int64_t n, float shift);
    void (*scale)(float *x, int64_t n, float factor);
    /* x = cap * tanh(x / cap) */
    void (*softcap)(float *x, int64_t n, float cap);
    float (*dot)(const float *x, const float *y, int64_t n);
    /* From scores s (after softcap) and dp = dO . v: s = p = e^(s - lse), and
     * dp = p (dp - delta), times the softcap's derivative 1 - (s / cap)^2 where cap > 0. */
    void (*softmax_grad)(float *s, float *dp, int64_t n, float lse, float delta, float cap);

    /* The loss, on a row of n logits in FP32 or BF16; every result is rounded to that dtype.
     * First: applies softcap where cap > 0, returns the largest. */
    float (*logits_max)(void *x, bool bf16, int64_t n, float cap);
    /* Then: the sum of e^(x - max). */
    double (*logits_sum)(const void *x, bool bf16, int64_t n, float max);
    /* Then: x = e^(x - lse) * factor, times 1 - (x / cap)^2 where cap > 0. */
    void (*logits_grad)(void *x, bool bf16, int64_t n, float lse, float factor, float cap);
} cpu_rows;

/* NULL for CPU_SCALAR. */
const cpu_rows *cpu_rows_for(cpu_isa isa);

#if defined(__x86_64__)
extern const cpu_rows cpu_rows_avx2, cpu_rows_avx512;
#endif

#endif
