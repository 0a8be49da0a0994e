/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of data: shuffling without a table, and the part that is held out for validation.
 * Everything is a function of its arguments, so that a loader can go to any place of any epoch.
 */
#ifndef MEGATRAIN_ORDER_H
#define MEGATRAIN_ORDER_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held-out items are the tails of at most this many equal stretches: enough to be representative,
 * few enough to stay contiguous. */
enum { MT_ORDER_STRETCHES = 8 };

/* Spreads every bit of x over all 64 (SplitMix64, Steele et al. 2014). [pure] */
static inline uint64_t mt_order_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The key of an epoch's permutation. [pure] */
static inline uint64_t mt_order_key(uint64_t seed, int64_t epoch)
{
    return mt_order_mix(mt_order_mix(seed) + (uint64_t)epoch);
}

/* Where a permutation of 0..n-1 takes i: a Feistel network over the next power of four, walked
 * until it lands inside (at most four steps in the mean). It needs no table, whatever n is; n is
 * from 1 to 2^62. [pure] */
static inline int64_t mt_order_permute(uint64_t key, int64_t n, int64_t i)
{
    int half = 1;
    while (half < 31 && ((int64_t)1 << (2 * half)) < n)
        half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t next = left ^ (mt_order_mix(key ^ mt_order_mix(round << 56 | right)) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* How many of `n` items are held out for a fraction of 0 to 0.5: at least one for a fraction above
 * 0, but none of a single item. [pure] */
static inline int64_t mt_order_held_out(int64_t n, double fraction)
{
    if (!(fraction > 0) || n < 2)
        return 0;
    int64_t held = (int64_t)((double)n * fraction);
    return held < 1 ? 1 : held;
}

/* Item `i` of a side of `n` items of which `held` are held out: the i-th that is held out, or the
 * i-th that is not, both in ascending order. held may also be 0 or n. [pure] */
static inline int64_t mt_order_split(int64_t n, int64_t held, bool held_out, int64_t i)
{
    if (held == 0 || held == n)
        return i;
    const int64_t most = MT_ORDER_STRETCHES;
    int64_t k = held < most ? held : most;
    for (int64_t s = 0; s < k; s++) {
        int64_t start = n * s / k, end = n * (s + 1) / k;
        int64_t tail = held * (s + 1) / k - held * s / k;
        int64_t here = held_out ? tail : end - start - tail;
        if (i < here)
            return held_out ? end - tail + i : start + i;
        i -= here;
    }
    return -1;
}

#ifdef __cplusplus
}
#endif
#endif
