/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "dispatch": each token's row copied to its slots; backward sums them in the order of
 * the picks.
 */
#include "sum_rows.h"

static int64_t dispatch_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    if (backward && !c->d_in[0].data)
        return 0;
    return cpu_row_tasks(c->in[1].rows);
}

static void dispatch_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                         int64_t task)
{
    (void)phase;
    const mt_tensor *slots = &c->in[1], *x = backward ? &c->d_in[0] : &c->in[0];
    size_t row_bytes = (size_t)(x->cols * mt_dtype_size(x->dtype));
    int64_t end = cpu_row_task_end(task, slots->rows);
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        const int32_t *slot = cpu_index_row(slots, t);
        if (backward)
            cpu_sum_rows(isa, x->dtype, cpu_at(x, t, 0), c->d_accumulate & 1u, x->cols,
                         c->d_out[0].data, c->d_out[0].ld, slot, NULL, slots->cols);
        else
            for (int64_t j = 0; j < slots->cols; j++)
                memcpy(cpu_at(&c->out[0], slot[j], 0), cpu_at(x, t, 0), row_bytes);
    }
}

const cpu_op cpu_op_dispatch = {
    .name = "dispatch",
    .tasks = dispatch_tasks,
    .run = dispatch_run,
};
