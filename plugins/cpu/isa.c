/* SPDX-License-Identifier: Apache-2.0
 *
 * Which instruction set kernels run on, and its table of row kernels.
 */
#include "rows.h"

#include <stdlib.h>

static cpu_isa isa_of_processor(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return CPU_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return CPU_AVX2;
#endif
    return CPU_SCALAR;
}

mt_status cpu_detect_isa(cpu_isa *ret)
{
    static const char *const name[CPU_ISAS] = { "scalar", "avx2", "avx512" };
    cpu_isa isa = isa_of_processor();
    const char *cap = getenv("MEGATRAIN_CPU_FLAGS");
    if (cap && *cap) {
        int i = 0;
        while (i < CPU_ISAS && strcmp(cap, name[i]) != 0)
            i++;
        if (i == CPU_ISAS)
            return mt_fail(MT_ERR_INVALID,
                           "MEGATRAIN_CPU_FLAGS is '%s'; it may be scalar, avx2 or avx512", cap);
        if ((cpu_isa)i < isa)
            isa = (cpu_isa)i;
    }
    *ret = isa;
    return MT_OK;
}

const cpu_rows *cpu_rows_for(cpu_isa isa)
{
#if defined(__x86_64__)
    return isa == CPU_AVX512 ? &cpu_rows_avx512 : isa == CPU_AVX2 ? &cpu_rows_avx2 : NULL;
#else
    (void)isa;
    return NULL;
#endif
}
