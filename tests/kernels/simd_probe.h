/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector layer (plugins/cpu/simd.h) seen through plain functions, one table per instruction set
 * that it is compiled for.
 */
#ifndef MT_TEST_KERNELS_SIMD_PROBE_H
#define MT_TEST_KERNELS_SIMD_PROBE_H

#include <stdint.h>

typedef struct simd_probe {
    int width;
    /* dst[i] = f(src[i]), n elements, the last ones through the _n loads and stores. */
    void (*exp)(float *dst, const float *src, int64_t n);
    void (*tanh)(float *dst, const float *src, int64_t n);
    void (*sigmoid)(float *dst, const float *src, int64_t n);
    void (*to_bf16)(uint16_t *dst, const float *src, int64_t n);
    void (*from_bf16)(float *dst, const uint16_t *src, int64_t n);
    void (*max)(float *dst, const float *a, const float *b, int64_t n);
    void (*min)(float *dst, const float *a, const float *b, int64_t n);
    float (*sum)(const float *x);  /* of `width` elements */
    float (*hmax)(const float *x); /* of `width` elements */
} simd_probe;

extern const simd_probe simd_probe_base, simd_probe_avx2, simd_probe_avx512;

#endif
