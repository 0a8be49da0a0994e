/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend as a side, with any instruction set and number of threads, and what is checked of
 * its kernels.
 */
#ifndef MT_TEST_CPU_SIDE_H
#define MT_TEST_CPU_SIDE_H

#include "../ops/cases.h"

/* The interface table. */
const mt_backend *op_backend(void);

/* A device of up to three threads whose kernels are capped at "scalar", "avx2" or "avx512"; NULL:
 * the best there is. Opened when it is first asked for. */
const side *cpu_side(const char *isa, int32_t threads);
void cpu_sides_close(void);

/* Runs the case in double on plain C and compares every gradient with central differences. */
void op_check_gradients(const op_case *c, uint32_t seed, double tolerance);
/* Fast kernels in F32 and BF16 against double; also accumulation, padding, and that 1, 2 and 3
 * threads give the same bits. */
void op_check_fast(const op_case *c, uint32_t seed, double tolerance_f32, double tolerance_bf16);

#endif
