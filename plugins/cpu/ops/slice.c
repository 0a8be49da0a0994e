/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "slice": some columns of every head. Backward gives the other columns a zero gradient.
 */
#include "sum_rows.h"

static int64_t slice_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    return cpu_row_tasks(backward ? c->d_out[0].rows : c->out[0].rows);
}

static void slice_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task)
{
    (void)phase;
    const mt_slice_attr *a = c->attr;
    const mt_tensor *x = backward ? &c->d_in[0] : &c->in[0];
    const mt_tensor *y = backward ? &c->d_out[0] : &c->out[0];
    size_t size = (size_t)mt_dtype_size(x->dtype);
    int64_t width = x->cols / a->heads, end = cpu_row_task_end(task, y->rows);
    bool add = c->d_accumulate & 1u;
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        if (backward && !add)
            memset(cpu_at(x, t, 0), 0, (size_t)x->cols * size);
        for (int32_t h = 0; h < a->heads; h++) {
            void *in_x = cpu_at(x, t, h * width + a->first), *in_y = cpu_at(y, t, h * a->cols);
            if (!backward)
                memcpy(in_y, in_x, (size_t)a->cols * size);
            else if (!add)
                memcpy(in_x, in_y, (size_t)a->cols * size);
            else
                cpu_sum_rows(isa, x->dtype, in_x, true, a->cols, in_y, 0, NULL, NULL, 1);
        }
    }
}

const cpu_op cpu_op_slice = {
    .name = "slice",
    .tasks = slice_tasks,
    .run = slice_run,
};
