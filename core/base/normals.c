/* SPDX-License-Identifier: Apache-2.0
 *
 * Normals by the batch: Philox and Box-Muller as loops that a compiler turns into vectors, hence
 * with a logarithm, sine and cosine of their own (power series in double precision, wrong by about
 * one unit in its last place; the result is rounded to float).
 *
 * NORMALS_NAME is the name of the function in this compilation.
 */
#include "normals.h"
#include "philox.h"

#include <math.h>

static inline double of_bits(uint64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline uint64_t bits_of(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

/* A whole number below 2^52. Not every instruction set converts 64-bit integers. */
static inline double whole(uint64_t u)
{
    return of_bits(UINT64_C(0x4330000000000000) | u) - 0x1p52;
}

/* Natural logarithm, x in [2^-32, 1]: x = 2^e m with m in [sqrt(1/2), sqrt(2)), f = m - 1, and
 * log(m) = 2 atanh(s) with s = f / (2 + f), arranged so that f, which is exact, weighs most. */
static inline double logarithm(double x)
{
    const double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
    const uint64_t sqrt_half = UINT64_C(0x3fe6a09e667f3bcd), bias = 1024;
    uint64_t above = bits_of(x) - sqrt_half; /* e in the highest bits */
    double e = whole((above + (bias << 52)) >> 52) - (double)bias;
    double f = of_bits(bits_of(x) - (above & UINT64_C(0xfff0000000000000))) - 1.0;
    double s = f / (2.0 + f), z = s * s;
    double p = 2.0 / 23;
    p = p * z + 2.0 / 21;
    p = p * z + 2.0 / 19;
    p = p * z + 2.0 / 17;
    p = p * z + 2.0 / 15;
    p = p * z + 2.0 / 13;
    p = p * z + 2.0 / 11;
    p = p * z + 2.0 / 9;
    p = p * z + 2.0 / 7;
    p = p * z + 2.0 / 5;
    p = p * z + 2.0 / 3;
    return e * ln2_high + (f - (s * (f - p * z) - e * ln2_low));
}

/* |x| <= pi/4 */
static inline double sine(double x)
{
    double z = x * x, p = 1.0 / 355687428096000.0;
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return x + x * (z * p);
}

/* |x| <= pi/4; what rounding takes from 1 - z / 2 is added again. */
static inline double cosine(double x)
{
    double z = x * x, p = -1.0 / 6402373705728000.0;
    p = p * z + 1.0 / 20922789888000.0;
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    double half = 0.5 * z, most = 1.0 - half;
    return most + (((1.0 - most) - half) + z * z * p);
}

/* Cosine and sine of 2 pi word / 2^32. The angle is rounded to double and then reduced by quarter
 * turns, pi / 2 in three parts, of which the first two have 33 bits each. */
static inline void turn(uint32_t word, double *ret_cosine, double *ret_sine)
{
    uint64_t quarter = ((uint64_t)word + (1u << 29)) >> 30, odd = 0 - (quarter & 1);
    double angle = 6.283185307179586 * (whole(word) * 0x1p-32), q = whole(quarter);
    double x = ((angle - q * 0x1.921fb544p+0) - q * 0x1.0b4611a6p-34) - q * 0x1.3198a2e037073p-69;
    uint64_t c = bits_of(cosine(x)), s = bits_of(sine(x));
    *ret_cosine = of_bits(((s & odd) | (c & ~odd)) ^ ((quarter + 1) & 2) << 62);
    *ret_sine = of_bits(((c & odd) | (s & ~odd)) ^ (quarter & 2) << 62);
}

void NORMALS_NAME(uint64_t key, uint64_t first, float ret[NORMALS])
{
    uint32_t word[4][NORMALS_BLOCKS];
    for (int i = 0; i < NORMALS_BLOCKS; i++) {
        word[0][i] = (uint32_t)(first + (uint64_t)i);
        word[1][i] = (uint32_t)((first + (uint64_t)i) >> 32);
        word[2][i] = PHILOX_NORMALS;
        word[3][i] = 0;
    }
    uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        for (int i = 0; i < NORMALS_BLOCKS; i++)
            philox_round(k, &word[0][i], &word[1][i], &word[2][i], &word[3][i]);
        philox_next_key(k);
    }
    /* Box-Muller, two normals from two words; the first uniform is in (0, 1], so that its logarithm
     * is finite. */
    for (int pair = 0; pair < 4; pair += 2) {
        double radius[NORMALS_BLOCKS];
        for (int i = 0; i < NORMALS_BLOCKS; i++)
            radius[i] = sqrt(-2.0 * logarithm((whole(word[pair][i]) + 1.0) * 0x1p-32));
        for (int i = 0; i < NORMALS_BLOCKS; i++) {
            double c, s;
            turn(word[pair + 1][i], &c, &s);
            ret[NORMALS_PER_BLOCK * i + pair] = (float)(radius[i] * c);
            ret[NORMALS_PER_BLOCK * i + pair + 1] = (float)(radius[i] * s);
        }
    }
}
