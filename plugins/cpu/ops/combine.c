/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "combine": each token's rows, weighted and summed in the order of the picks.
 */
#include "sum_rows.h"

enum { IN_Y = 0, IN_WEIGHTS = 1, IN_SLOTS = 2 };

static int64_t combine_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)backward, (void)phase;
    return cpu_row_tasks(c->in[IN_SLOTS].rows);
}

static void backward_row(cpu_isa isa, const mt_op_call *c, int64_t t, const int32_t *slot)
{
    const mt_tensor *y = &c->in[IN_Y], *weights = &c->in[IN_WEIGHTS], *g = &c->d_out[0];
    const mt_tensor *dy = &c->d_in[IN_Y], *dw = &c->d_in[IN_WEIGHTS];
    bool add_y = c->d_accumulate >> IN_Y & 1u, add_w = c->d_accumulate >> IN_WEIGHTS & 1u;
    for (int64_t j = 0; j < weights->cols; j++) {
        if (dy->data)
            cpu_sum_rows(isa, dy->dtype, cpu_at(dy, slot[j], 0), add_y, dy->cols, cpu_at(g, t, 0),
                         g->ld, NULL, cpu_at(weights, t, j), 1);
        if (dw->data)
            cpu_put(dw, t, j,
                    cpu_dot_rows(isa, y->dtype, cpu_at(g, t, 0), cpu_at(y, slot[j], 0), y->cols) +
                        (add_w ? cpu_get(dw, t, j) : 0));
    }
}

static void combine_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                        int64_t task)
{
    (void)phase;
    const mt_tensor *y = &c->in[IN_Y], *slots = &c->in[IN_SLOTS];
    int64_t end = cpu_row_task_end(task, slots->rows);
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        const int32_t *slot = cpu_index_row(slots, t);
        if (backward)
            backward_row(isa, c, t, slot);
        else
            cpu_sum_rows(isa, y->dtype, cpu_at(&c->out[0], t, 0), false, y->cols, y->data, y->ld,
                         slot, cpu_at(&c->in[IN_WEIGHTS], t, 0), slots->cols);
    }
}

const cpu_op cpu_op_combine = {
    .name = "combine",
    .tasks = combine_tasks,
    .run = combine_run,
};
