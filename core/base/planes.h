/* SPDX-License-Identifier: Apache-2.0
 *
 * Masters and their two planes, many at once: mt_split_f32 and mt_join_f32 in pieces of a fixed
 * size, which compilers turn into vectors.
 */
#ifndef MT_CORE_PLANES_H
#define MT_CORE_PLANES_H

#include <megatrain/base.h>

/* Arrays of n elements that do not overlap. [pure] */
void planes_split(const float *master, int64_t n, uint16_t *ret_hi, int16_t *ret_lo);
void planes_join(const uint16_t *hi, const int16_t *lo, int64_t n, float *ret);

#endif
