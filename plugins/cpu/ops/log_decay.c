/* SPDX-License-Identifier: Apache-2.0
 *
 * log_decay: -e^a_log softplus(a + dt_bias), a few numbers a token, in double.
 */
#include "sum_rows.h"

#include <math.h>

enum { IN_A, IN_A_LOG, IN_DT_BIAS };

static double softplus(double z)
{
    return fmax(z, 0) + log1p(exp(-fabs(z)));
}

static double sigmoid(double z)
{
    return z < 0 ? exp(z) / (1 + exp(z)) : 1 / (1 + exp(-z));
}

static void forward_rows(const mt_op_call *c, int64_t first, int64_t end)
{
    for (int64_t h = 0; h < c->out[0].cols; h++) {
        double rate = exp(cpu_get(&c->in[IN_A_LOG], 0, h)),
               bias = cpu_get(&c->in[IN_DT_BIAS], 0, h);
        for (int64_t t = first; t < end; t++)
            cpu_put(&c->out[0], t, h, -rate * softplus(cpu_get(&c->in[IN_A], t, h) + bias));
    }
}

/* Sums of one task for every head: of a_log's gradient, then of dt_bias's. */
static double *sums_of(const mt_op_call *c, int64_t task)
{
    return (double *)c->work + task * 2 * c->d_out[0].cols;
}

static void backward_rows(const mt_op_call *c, int64_t task, int64_t first, int64_t end)
{
    const mt_tensor *a = &c->in[IN_A], *da = &c->d_in[IN_A];
    int64_t heads = c->d_out[0].cols;
    bool add = c->d_accumulate >> IN_A & 1u;
    for (int64_t h = 0; h < heads; h++) {
        double rate = exp(cpu_get(&c->in[IN_A_LOG], 0, h)),
               bias = cpu_get(&c->in[IN_DT_BIAS], 0, h);
        double by_log = 0, by_bias = 0;
        for (int64_t t = first; t < end; t++) {
            double z = cpu_get(a, t, h) + bias, dg = cpu_get(&c->d_out[0], t, h);
            double dz = -dg * rate * sigmoid(z);
            by_log -= dg * rate * softplus(z);
            by_bias += dz;
            if (da->data)
                cpu_put(da, t, h, dz + (add ? cpu_get(da, t, h) : 0));
        }
        sums_of(c, task)[h] = by_log;
        sums_of(c, task)[heads + h] = by_bias;
    }
}

static void reduce(const mt_op_call *c)
{
    int64_t heads = c->d_out[0].cols, tasks = cpu_row_tasks(c->d_out[0].rows);
    for (uint32_t i = IN_A_LOG; i <= IN_DT_BIAS; i++) {
        const mt_tensor *d = &c->d_in[i];
        bool add = c->d_accumulate >> i & 1u;
        for (int64_t h = 0; d->data && h < heads; h++) {
            double sum = add ? cpu_get(d, 0, h) : 0;
            for (int64_t k = 0; k < tasks; k++)
                sum += sums_of(c, k)[(i - IN_A_LOG) * heads + h];
            cpu_put(d, 0, h, sum);
        }
    }
}

/* Backward: rows, then the parameters' gradients from what the tasks found. */
static int32_t decay_phases(const mt_op_call *c, bool backward)
{
    (void)c;
    return backward ? 2 : 1;
}

static int64_t decay_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    return phase ? 1 : cpu_row_tasks(backward ? c->d_out[0].rows : c->out[0].rows);
}

static void decay_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task)
{
    (void)isa;
    int64_t first = task * CPU_ROWS_PER_TASK;
    if (phase)
        reduce(c);
    else if (backward)
        backward_rows(c, task, first, cpu_row_task_end(task, c->d_out[0].rows));
    else
        forward_rows(c, first, cpu_row_task_end(task, c->out[0].rows));
}

static int64_t decay_workspace(const mt_op_call *c, bool backward)
{
    if (!backward)
        return 0;
    return cpu_row_tasks(c->d_out[0].rows) * 2 * c->d_out[0].cols * (int64_t)sizeof(double);
}

const cpu_op cpu_op_log_decay = {
    .name = "log_decay",
    .phases = decay_phases,
    .tasks = decay_tasks,
    .run = decay_run,
    .workspace = decay_workspace,
};
