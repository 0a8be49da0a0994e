/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "rmsnorm". Its backward has a second phase where the weight's gradient is wanted: every
 * task of the first leaves the sum over its rows in `work`, the second adds these in their order,
 * so that the result depends on shapes only.
 */
#include "rowwise.h"

enum { COLS_PER_TASK = 512 };

static int64_t group_cols(const mt_op_call *c, bool backward)
{
    return cpu_rowwise_shape(c, backward)->cols / ((const mt_rmsnorm_attr *)c->attr)->heads;
}

static int32_t phases(const mt_op_call *c, bool backward)
{
    return backward && c->d_in[1].data ? 2 : 1;
}

static int64_t tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    if (phase == 1)
        return (group_cols(c, backward) + COLS_PER_TASK - 1) / COLS_PER_TASK;
    return cpu_rowwise_tasks(c, backward, phase);
}

static int64_t workspace(const mt_op_call *c, bool backward)
{
    if (!backward || !c->d_in[1].data)
        return 0;
    return cpu_rowwise_tasks(c, backward, 0) * group_cols(c, backward) *
           mt_dtype_size(c->d_out[0].dtype == MT_F64 ? MT_F64 : MT_F32);
}

static void run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task)
{
    const cpu_rowwise *k = cpu_rowwise_of(isa, cpu_rowwise_shape(c, backward)->dtype);
    if (phase == 1) {
        int64_t n = group_cols(c, backward);
        int64_t begin = task * COLS_PER_TASK;
        int64_t end = begin + COLS_PER_TASK;
        k->rmsnorm_reduce(c, begin, end < n ? end : n);
    } else {
        cpu_rowwise_run(backward ? k->rmsnorm_backward : k->rmsnorm, c, backward, task);
    }
}

const cpu_op cpu_op_rmsnorm = {
    .name = "rmsnorm", .phases = phases, .tasks = tasks, .run = run, .workspace = workspace
};
