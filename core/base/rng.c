/* SPDX-License-Identifier: Apache-2.0
 *
 * Philox4x32-10 and the distributions on top of it.
 */
#include "rng.h"

#include "normals.h"
#include "philox.h"

#include <xxhash.h>

void rng_philox(const uint32_t key[2], const uint32_t counter[4], uint32_t ret[4])
{
    uint32_t k[2] = { key[0], key[1] };
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        philox_round(k, &c0, &c1, &c2, &c3);
        philox_next_key(k);
    }
    ret[0] = c0;
    ret[1] = c1;
    ret[2] = c2;
    ret[3] = c3;
}

uint64_t rng_key(uint64_t seed, const char *label)
{
    return XXH3_64bits_withSeed(label, strlen(label), seed);
}

const normals_variant *normals_variants(void)
{
#if defined(__x86_64__)
    static const normals_variant list[] = {
        { "avx512", normals_avx512 }, { "avx2", normals_avx2 }, { "base", normals_base }, { 0 }
    };
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return list;
    return __builtin_cpu_supports("avx2") ? list + 1 : list + 2;
#else
    static const normals_variant list[] = { { "base", normals_base }, { 0 } };
    return list;
#endif
}

void rng_normals(uint64_t key, uint64_t first, int64_t n, float *ret)
{
    normals_fn *draw = normals_variants()->draw;
    uint64_t block = first / NORMALS_PER_BLOCK;
    int64_t skip = (int64_t)(first % NORMALS_PER_BLOCK);
    for (int64_t i = 0; i < n; block += NORMALS_BLOCKS, skip = 0) {
        int64_t part = n - i < NORMALS - skip ? n - i : NORMALS - skip;
        float batch[NORMALS];
        draw(key, block, part < NORMALS ? batch : ret + i);
        if (part < NORMALS)
            memcpy(ret + i, batch + skip, (size_t)part * sizeof *ret);
        i += part;
    }
}

uint64_t rng_next(rng *r)
{
    uint32_t words[4];
    uint32_t k[2] = { (uint32_t)r->key, (uint32_t)(r->key >> 32) };
    uint64_t index = r->position / 2;
    uint32_t counter[4] = { (uint32_t)index, (uint32_t)(index >> 32), PHILOX_WORDS, 0 };
    rng_philox(k, counter, words);
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
