/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of BF16 to FP32 and back, and the store's two planes to FP32. Written in pieces of constant
 * length, which compilers turn into vector code on every instruction set.
 */
#ifndef MT_CPU_CONVERT_H
#define MT_CPU_CONVERT_H

#include <megatrain/base.h>

enum { CONVERT_PIECE = 16 };

static inline void convert_to_f32(float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + CONVERT_PIECE <= n; i += CONVERT_PIECE) {
        uint32_t bits[CONVERT_PIECE];
        for (int k = 0; k < CONVERT_PIECE; k++)
            bits[k] = (uint32_t)src[i + k] << 16;
        memcpy(dst + i, bits, sizeof bits);
    }
    for (; i < n; i++)
        dst[i] = mt_bf16_to_f32(src[i]);
}

/* Round to nearest even. */
static inline void convert_to_bf16(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + CONVERT_PIECE <= n; i += CONVERT_PIECE) {
        uint32_t u[CONVERT_PIECE];
        memcpy(u, src + i, sizeof u);
        for (int k = 0; k < CONVERT_PIECE; k++) {
            uint32_t rounded = (u[k] + 0x7fffu + ((u[k] >> 16) & 1u)) >> 16;
            uint32_t nan = (u[k] >> 16) | 0x40u;
            dst[i + k] = (uint16_t)((u[k] & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
        }
    }
    for (; i < n; i++)
        dst[i] = mt_f32_to_bf16(src[i]);
}

/* mt_join_f32 on every number. */
static inline void convert_join(float *dst, const uint16_t *hi, const int16_t *lo, int64_t n)
{
    int64_t i = 0;
    for (; i + CONVERT_PIECE <= n; i += CONVERT_PIECE) {
        uint32_t bits[CONVERT_PIECE];
        for (int k = 0; k < CONVERT_PIECE; k++)
            bits[k] = ((uint32_t)hi[i + k] << 16) + (uint32_t)(int32_t)lo[i + k];
        memcpy(dst + i, bits, sizeof bits);
    }
    for (; i < n; i++)
        dst[i] = mt_join_f32(hi[i], lo[i]);
}

#endif
