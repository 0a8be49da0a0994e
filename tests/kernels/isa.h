/* SPDX-License-Identifier: Apache-2.0
 *
 * The best instruction set of the machine that runs a test, as a cpu_isa.
 */
#ifndef MT_TEST_KERNELS_ISA_H
#define MT_TEST_KERNELS_ISA_H

static inline int test_best_isa(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

#endif
