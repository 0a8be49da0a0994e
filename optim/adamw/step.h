/* SPDX-License-Identifier: Apache-2.0
 *
 * One AdamW step on a range of elements: constants and kernels, one kernel per instruction set.
 */
#ifndef ADAMW_STEP_H
#define ADAMW_STEP_H

#include <megatrain/base.h>

/* Everything of a step that does not depend on the element. */
typedef struct adamw_constants {
    float grad_scale;
    float rate_m;  /* 1 - beta1 */
    float beta2;   /* v = beta2 v + rate_v g^2 */
    float rate_v;  /* 1 - beta2 */
    float root;    /* 1 / sqrt(1 - beta2^t) */
    float epsilon; /* added to the corrected root, as torch does */
    float step;    /* lr / (1 - beta1^t) */
    float decay;   /* lr * weight_decay; 0 where the parameter is not decayed */
} adamw_constants;

/* Updates n elements in place: master weights in two planes, the states m and v, from grad. No
 * alignment is needed; the planes do not overlap.
 *
 * Every operation is a single rounded FP32 one, in the order of the scalar kernel, without FMA: all
 * kernels give the same bits, however a tensor is cut and whatever machine it runs on. */
typedef void adamw_step_fn(const adamw_constants *k, int64_t n, uint16_t *hi, int16_t *lo,
                           const float *grad, float *m, float *v);

adamw_step_fn adamw_step_scalar, adamw_step_base, adamw_step_avx2, adamw_step_avx512;

typedef enum adamw_isa { ADAMW_SCALAR, ADAMW_BASE, ADAMW_AVX2, ADAMW_AVX512, ADAMW_ISAS } adamw_isa;

/* The kernel of an instruction set; NULL where this processor or build has none. [pure] */
adamw_step_fn *adamw_step_for(adamw_isa isa);

#endif
