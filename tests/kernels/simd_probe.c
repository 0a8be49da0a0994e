/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled once per instruction set, as kernels are.
 */
#include "simd_probe.h"

#include "simd.h"

#define MAP(fn)                                                                                    \
    static void map_##fn(float *dst, const float *src, int64_t n)                                  \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        for (; i + SIMD_WIDTH <= n; i += SIMD_WIDTH)                                               \
            vf_store(dst + i, vf_##fn(vf_load(src + i)));                                          \
        vf_store_n(dst + i, vf_##fn(vf_load_n(src + i, n - i)), n - i);                            \
    }
#define MAP2(fn)                                                                                   \
    static void map_##fn(float *dst, const float *a, const float *b, int64_t n)                    \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        for (; i + SIMD_WIDTH <= n; i += SIMD_WIDTH)                                               \
            vf_store(dst + i, vf_##fn(vf_load(a + i), vf_load(b + i)));                            \
        vf_store_n(dst + i, vf_##fn(vf_load_n(a + i, n - i), vf_load_n(b + i, n - i)), n - i);     \
    }

MAP(exp)
MAP(tanh)
MAP(sigmoid)
MAP2(max)
MAP2(min)

static void map_to_bf16(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + SIMD_WIDTH <= n; i += SIMD_WIDTH)
        vf_store_bf16(dst + i, vf_load(src + i));
    vf_store_bf16_n(dst + i, vf_load_n(src + i, n - i), n - i);
}

static void map_from_bf16(float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + SIMD_WIDTH <= n; i += SIMD_WIDTH)
        vf_store(dst + i, vf_load_bf16(src + i));
    vf_store_n(dst + i, vf_load_bf16_n(src + i, n - i), n - i);
}

static float sum(const float *x)
{
    return vf_sum(vf_load(x));
}

static float hmax(const float *x)
{
    return vf_hmax(vf_load(x));
}

const simd_probe SIMD_NAME(simd_probe) = { SIMD_WIDTH,  map_exp,       map_tanh, map_sigmoid,
                                           map_to_bf16, map_from_bf16, map_max,  map_min,
                                           sum,         hmax };
