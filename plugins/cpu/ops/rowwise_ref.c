/* SPDX-License-Identifier: Apache-2.0
 *
 * The row-wise kernels in plain C, for FP32, BF16 and FP64: the reference that vector kernels are
 * compared with, what CPU_SCALAR runs, and what gradient checks run in FP64. Also the choice of
 * the table.
 */
#include "rowwise.h"

#include <math.h>

#define REF(name)    name##_f32
#define REF_T        float
#define REF_A        float
#define REF_LOAD(x)  (x)
#define REF_STORE(x) (x)
#define REF_FN(fn)   fn##f
#include "rowwise_ref.inc"

#define REF(name)    name##_bf16
#define REF_T        uint16_t
#define REF_A        float
#define REF_LOAD(x)  mt_bf16_to_f32(x)
#define REF_STORE(x) mt_f32_to_bf16(x)
#define REF_FN(fn)   fn##f
#include "rowwise_ref.inc"

#define REF(name)    name##_f64
#define REF_T        double
#define REF_A        double
#define REF_LOAD(x)  (x)
#define REF_STORE(x) (x)
#define REF_FN(fn)   fn
#include "rowwise_ref.inc"

const cpu_rowwise *cpu_rowwise_of(cpu_isa isa, mt_dtype compute)
{
    if (compute == MT_F64)
        return &cpu_rowwise_f64;
    bool bf16 = compute == MT_BF16;
#if defined(__x86_64__)
    if (isa == CPU_AVX512)
        return bf16 ? &cpu_rowwise_bf16_avx512 : &cpu_rowwise_f32_avx512;
    if (isa == CPU_AVX2)
        return bf16 ? &cpu_rowwise_bf16_avx2 : &cpu_rowwise_f32_avx2;
#endif
    (void)isa;
    return bf16 ? &cpu_rowwise_bf16 : &cpu_rowwise_f32;
}
