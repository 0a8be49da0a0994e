/* SPDX-License-Identifier: Apache-2.0
 *
 * Splitting and joining masters. The copies to and from local arrays tell the compiler that nothing
 * overlaps, and cost nothing.
 */
#include "planes.h"

enum { VECTOR = 64 };

void planes_split(const float *master, int64_t n, uint16_t *ret_hi, int16_t *ret_lo)
{
    int64_t i = 0;
    for (; n - i >= VECTOR; i += VECTOR) {
        uint16_t hi[VECTOR];
        int16_t lo[VECTOR];
        for (int k = 0; k < VECTOR; k++)
            mt_split_f32(master[i + k], &hi[k], &lo[k]);
        memcpy(ret_hi + i, hi, sizeof hi);
        memcpy(ret_lo + i, lo, sizeof lo);
    }
    for (; i < n; i++)
        mt_split_f32(master[i], &ret_hi[i], &ret_lo[i]);
}

void planes_join(const uint16_t *hi, const int16_t *lo, int64_t n, float *ret)
{
    int64_t i = 0;
    for (; n - i >= VECTOR; i += VECTOR) {
        float master[VECTOR];
        for (int k = 0; k < VECTOR; k++)
            master[k] = mt_join_f32(hi[i + k], lo[i + k]);
        memcpy(ret + i, master, sizeof master);
    }
    for (; i < n; i++)
        ret[i] = mt_join_f32(hi[i], lo[i]);
}
