/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of grouped_linear share: its products, and the way to the kernel for compute
 * capability 9.0.
 */
#ifndef MT_CUDA_GROUPED_CUH
#define MT_CUDA_GROUPED_CUH

#include "../cuda.h"

/* For every expert C[m, n] = sum over k of A[m, k] B[n, k]; an operand's depth k runs along its
 * rows in memory ("deep": element (i, k) at k * ld + i) or along its columns (at i * ld + k).
 *   forward          y  = x  w_e^T    A = x             B = w_e
 *   input gradient   dx = dy w_e      A = dy            B = w_e, deep
 *   weight gradient  dw = dy^T x      A = dy, deep      B = x, deep; depth: the expert's rows
 */
typedef struct grouped_product {
    const void *a, *b;
    void *c;
    const void *bias;       /* [experts, n], NULL: none */
    const int32_t *offsets; /* [experts + 1], device memory: rows of x, y and their gradients */
    int64_t lda, ldb, ldc, ld_bias;
    int64_t m, n, k; /* m: of all experts together, or (weight gradient) of one */
    int64_t tokens;  /* rows of A there are, where A is deep */
    int experts;
    bool add;
} grouped_product;

/* Can the device run grouped_wgmma? */
bool grouped_wgmma_runs(const cuda_device *d);

/* BF16 operands whose rows start at multiples of 16 bytes; C is BF16, or FP32 where A is deep.
 * False where nothing was enqueued: more experts than the kernel's table holds, or operands that
 * cannot be moved as it does. [main] */
bool grouped_wgmma(cuda_queue *q, const grouped_product *p, bool a_deep, bool b_deep);

#endif
