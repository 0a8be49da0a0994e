/* SPDX-License-Identifier: Apache-2.0
 *
 * The inner loop of rng_normals, compiled once for each instruction set. All variants give the same
 * bits, on any machine and with any C library: IEEE operations in one order, none of them fused.
 */
#ifndef MT_CORE_NORMALS_H
#define MT_CORE_NORMALS_H

#include <megatrain/base.h>

/* Blocks of the generator that are drawn at once, and the normals that they give. */
enum { NORMALS_BLOCKS = 64, NORMALS_PER_BLOCK = 4, NORMALS = NORMALS_BLOCKS * NORMALS_PER_BLOCK };

/* Standard normals of the blocks first .. first + NORMALS_BLOCKS - 1 of a key. [pure] */
typedef void normals_fn(uint64_t key, uint64_t first, float ret[NORMALS]);

normals_fn normals_base;
#if defined(__x86_64__)
normals_fn normals_avx2, normals_avx512;
#endif

typedef struct normals_variant {
    const char *name;
    normals_fn *draw;
} normals_variant;

/* Those that this processor can run, the fastest first; the last has draw == NULL. [pure] */
const normals_variant *normals_variants(void);

#endif
