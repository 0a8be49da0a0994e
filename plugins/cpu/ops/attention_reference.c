/* SPDX-License-Identifier: Apache-2.0
 *
 * attention in plain C, a row at a time, for FP32, FP64 and BF16: what the fast form is compared
 * with, what CPU_SCALAR runs, and what gradient checks use.
 */
#include "attention.h"

#include <math.h>

#define ELEM       float
#define REAL       float
#define LOAD(x)    (x)
#define STORE(x)   (x)
#define MATH(fn)   fn##f
#define FORM(name) name##_f32
#include "attention_reference.inc"

#define ELEM       double
#define REAL       double
#define LOAD(x)    (x)
#define STORE(x)   (x)
#define MATH(fn)   fn
#define FORM(name) name##_f64
#include "attention_reference.inc"

#define ELEM       uint16_t
#define REAL       float
#define LOAD(x)    mt_bf16_to_f32(x)
#define STORE(x)   mt_f32_to_bf16(x)
#define MATH(fn)   fn##f
#define FORM(name) name##_bf16
#include "attention_reference.inc"
