/* SPDX-License-Identifier: Apache-2.0
 *
 * Philox4x32-10, a round at a time, for loops over many blocks. rng.h is what others use.
 */
#ifndef MT_CORE_PHILOX_H
#define MT_CORE_PHILOX_H

#include <megatrain/base.h>

enum { PHILOX_ROUNDS = 10 };

/* The third word of the counter: keeps the sequences of one key apart. */
enum { PHILOX_WORDS = 0, PHILOX_NORMALS = 1 };

static inline void philox_round(const uint32_t key[2], uint32_t *c0, uint32_t *c1, uint32_t *c2,
                                uint32_t *c3)
{
    uint64_t p0 = (uint64_t)0xD2511F53u * *c0, p1 = (uint64_t)0xCD9E8D57u * *c2;
    *c0 = (uint32_t)(p1 >> 32) ^ *c1 ^ key[0];
    *c2 = (uint32_t)(p0 >> 32) ^ *c3 ^ key[1];
    *c1 = (uint32_t)p1;
    *c3 = (uint32_t)p0;
}

static inline void philox_next_key(uint32_t key[2])
{
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
}

#endif
