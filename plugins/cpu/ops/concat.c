/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "concat": heads of several operands side by side. An operand that all heads share gets
 * the sum of their gradients, in the order of heads.
 */
#include "sum_rows.h"

static int64_t concat_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    return cpu_row_tasks(backward ? c->d_out[0].rows : c->out[0].rows);
}

static void concat_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task)
{
    (void)phase;
    const mt_concat_attr *a = c->attr;
    const mt_tensor *y = backward ? &c->d_out[0] : &c->out[0];
    int64_t size = mt_dtype_size(y->dtype), width = y->cols / a->heads;
    int64_t end = cpu_row_task_end(task, y->rows);
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        int64_t col = 0;
        for (uint32_t i = 0; i < c->n_in && a->cols[i]; col += a->cols[i++]) {
            const mt_tensor *x = backward ? &c->d_in[i] : &c->in[i];
            bool shared = a->shared >> i & 1u, add = c->d_accumulate >> i & 1u;
            int64_t n = a->cols[i];
            if (!x->data)
                continue;
            if (backward && shared) {
                cpu_sum_rows(isa, x->dtype, cpu_at(x, t, 0), add, n, cpu_at(y, t, col), width, NULL,
                             NULL, a->heads);
                continue;
            }
            for (int32_t h = 0; h < a->heads; h++) {
                void *in_x = cpu_at(x, t, shared ? 0 : h * n),
                     *in_y = cpu_at(y, t, h * width + col);
                if (!backward)
                    memcpy(in_y, in_x, (size_t)(n * size));
                else
                    cpu_sum_rows(isa, x->dtype, in_x, add, n, in_y, 0, NULL, NULL, 1);
            }
        }
    }
}

const cpu_op cpu_op_concat = {
    .name = "concat",
    .tasks = concat_tasks,
    .run = concat_run,
};
