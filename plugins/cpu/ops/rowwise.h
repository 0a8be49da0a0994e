/* SPDX-License-Identifier: Apache-2.0
 *
 * Row-wise kernels: one table per instruction set and compute dtype. rowwise_ref.c has them in
 * plain C (also the only ones in FP64), rowwise_simd.c with vectors. The operations' own files cut
 * calls into tasks and pick the table.
 */
#ifndef MT_CPU_ROWWISE_H
#define MT_CPU_ROWWISE_H

#include "../cpu.h"

/* Does rows [begin, end) of one call. BF16 is loaded to FP32, computed there and rounded when it is
 * stored; FP32 and FP64 compute as they are. `backward` fills the d_in that are wanted. */
typedef void cpu_rowwise_fn(const mt_op_call *c, int64_t begin, int64_t end);

typedef struct cpu_rowwise {
    cpu_rowwise_fn *rmsnorm, *rmsnorm_backward;
    /* Columns [begin, end) of the weight's gradient: sums what the tasks of rmsnorm_backward left
     * in `work`, [tasks, n] in the statistics dtype, in the order of the tasks. */
    cpu_rowwise_fn *rmsnorm_reduce;
    cpu_rowwise_fn *rope, *rope_backward;
    cpu_rowwise_fn *act, *act_backward;
    cpu_rowwise_fn *glu, *glu_backward;
    cpu_rowwise_fn *add, *add_backward;
    cpu_rowwise_fn *mul, *mul_backward;
    cpu_rowwise_fn *scale, *scale_backward;
} cpu_rowwise;

extern const cpu_rowwise cpu_rowwise_f32, cpu_rowwise_bf16, cpu_rowwise_f64;
extern const cpu_rowwise cpu_rowwise_f32_avx2, cpu_rowwise_bf16_avx2;
extern const cpu_rowwise cpu_rowwise_f32_avx512, cpu_rowwise_bf16_avx512;

const cpu_rowwise *cpu_rowwise_of(cpu_isa isa, mt_dtype compute);

/* What is cut into tasks: the output in forward, its gradient in backward. */
static inline const mt_tensor *cpu_rowwise_shape(const mt_op_call *c, bool backward)
{
    return backward ? &c->d_out[0] : &c->out[0];
}

static inline int64_t cpu_rowwise_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    return (cpu_rowwise_shape(c, backward)->rows + CPU_ROWS_PER_TASK - 1) / CPU_ROWS_PER_TASK;
}

/* Runs task `task` of `fn`. */
static inline void cpu_rowwise_run(cpu_rowwise_fn *fn, const mt_op_call *c, bool backward,
                                   int64_t task)
{
    int64_t rows = cpu_rowwise_shape(c, backward)->rows;
    int64_t begin = task * CPU_ROWS_PER_TASK;
    int64_t end = begin + CPU_ROWS_PER_TASK;
    fn(c, begin, end < rows ? end : rows);
}

/* Defines cpu_op_NAME for an operation of one phase, with kernels NAME and NAME_backward. */
#define CPU_ROWWISE_OP(op)                                                                         \
    static void run_##op(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,           \
                         int64_t task)                                                             \
    {                                                                                              \
        const cpu_rowwise *k = cpu_rowwise_of(isa, cpu_rowwise_shape(c, backward)->dtype);         \
        (void)phase;                                                                               \
        cpu_rowwise_run(backward ? k->op##_backward : k->op, c, backward, task);                   \
    }                                                                                              \
    const cpu_op cpu_op_##op = { .name = #op, .tasks = cpu_rowwise_tasks, .run = run_##op }

/* GPT-OSS's gated activation: the gate's factor inside the sigmoid. */
#define CPU_SWIGLU_ALPHA 1.702

/* gelu_tanh(z) = z sigmoid(2 k (z + 0.044715 z^3)), k = sqrt(2 / pi): the tanh form without its
 * cancellation at negative z. Twice k: */
#define CPU_GELU_2K    1.5957691216057307
#define CPU_GELU_CUBIC 0.044715

/* Beyond this |z| every sigmoid in use is exactly 0 or 1 in FP32 and FP64; powers of z are formed
 * from the clamped value so that they cannot overflow and 0 * Inf never arises. */
#define CPU_ACT_SATURATED 1000.0

#endif
