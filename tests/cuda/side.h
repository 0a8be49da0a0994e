/* SPDX-License-Identifier: Apache-2.0
 *
 * The same operation on two sides: the CPU and the CUDA backend of the build tree.
 */
#ifndef MT_TEST_CUDA_SIDE_H
#define MT_TEST_CUDA_SIDE_H

#include "../ops/cases.h"

enum { SIDE_SKIP = 77 };

/* From MT_TEST_CPU_PLUGIN and MT_TEST_CUDA_PLUGIN. Exits with SIDE_SKIP where there is no GPU, with
 * 1 where a plugin is broken. */
extern side cpu, cuda;
void sides_open(void);
void sides_close(void);

/* Is MT_TEST_SMALL=1 set? Then cases leave out what only differs by its size: every operation goes
 * through all of its kernels, but on shapes that compute-sanitizer gets through. */
bool only_small(void);
#define RUN_LARGE(fn)                                                                              \
    do {                                                                                           \
        if (!only_small())                                                                         \
            RUN(fn);                                                                               \
    } while (0)

/* One more device of the CUDA backend, with `value` for an environment variable. */
void side_open_with(const char *variable, const char *value, side *ret);

typedef struct op_bounds {
    double f32, bf16; /* F64 has 1e-11 */
} op_bounds;

/* CUDA against the CPU in F32, BF16 and F64, forward and backward, with rows packed and apart,
 * overwriting and accumulating; and that a second run gives the same bits. */
void op_check(const op_case *c, uint32_t seed, op_bounds bounds);

#endif
