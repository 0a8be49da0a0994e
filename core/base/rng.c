/* SPDX-License-Identifier: Apache-2.0
 *
 * Philox4x32-10 and the distributions on top of it.
 */
#include "rng.h"

#include <math.h>
#include <xxhash.h>

enum { ROUNDS = 10, NORMALS_PER_BLOCK = 4 };

void rng_philox(const uint32_t key[2], const uint32_t counter[4], uint32_t ret[4])
{
    uint32_t k0 = key[0], k1 = key[1];
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    ret[0] = c0;
    ret[1] = c1;
    ret[2] = c2;
    ret[3] = c3;
}

/* `purpose` keeps the sequences of one key apart. */
static void block(uint64_t key, uint32_t purpose, uint64_t index, uint32_t ret[4])
{
    uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
    uint32_t counter[4] = { (uint32_t)index, (uint32_t)(index >> 32), purpose, 0 };
    rng_philox(k, counter, ret);
}

uint64_t rng_key(uint64_t seed, const char *label)
{
    return XXH3_64bits_withSeed(label, strlen(label), seed);
}

/* Two normals from two words; the first uniform is in (0, 1], so that its logarithm is finite. */
static void box_muller(uint32_t a, uint32_t b, double ret[2])
{
    double radius = sqrt(-2.0 * log(((double)a + 1.0) * 0x1p-32));
    double angle = 6.283185307179586 * ((double)b * 0x1p-32);
    ret[0] = radius * cos(angle);
    ret[1] = radius * sin(angle);
}

void rng_normals(uint64_t key, uint64_t first, int64_t n, float *ret)
{
    uint64_t index = first / NORMALS_PER_BLOCK;
    int64_t skip = (int64_t)(first % NORMALS_PER_BLOCK);
    for (int64_t i = 0; i < n; index++, skip = 0) {
        uint32_t words[4];
        double normal[NORMALS_PER_BLOCK];
        block(key, 1, index, words);
        box_muller(words[0], words[1], normal);
        box_muller(words[2], words[3], normal + 2);
        for (int64_t j = skip; j < NORMALS_PER_BLOCK && i < n; j++)
            ret[i++] = (float)normal[j];
    }
}

uint64_t rng_next(rng *r)
{
    uint32_t words[4];
    block(r->key, 0, r->position / 2, words);
    uint32_t half = r->position % 2 ? 2 : 0;
    r->position++;
    return (uint64_t)words[half + 1] << 32 | words[half];
}

double rng_uniform(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

uint64_t rng_below(rng *r, uint64_t bound)
{
    /* Draws above the last whole multiple of the bound would favour small results. */
    uint64_t surplus = (UINT64_MAX % bound + 1) % bound;
    uint64_t x;
    do
        x = rng_next(r);
    while (x > UINT64_MAX - surplus);
    return x % bound;
}

double rng_normal(rng *r)
{
    double normal[2];
    uint64_t x = rng_next(r);
    box_muller((uint32_t)x, (uint32_t)(x >> 32), normal);
    return normal[0];
}
