/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv: a short causal convolution of every column. A token's position says how many tokens
 * of its document lie before it; those of earlier calls are in the state, the oldest first.
 */
#include "sum_rows.h"

enum { IN_X, IN_W };
enum { COLUMNS = 128 }; /* of a task of the weight's gradient; columns that are summed at once */

/* The row of x that lies `back` tokens before token t of this call. */
static const void *row_before(const mt_op_call *c, int64_t t, int64_t back, int64_t col)
{
    const mt_tensor *kept = &c->state[0];
    return t >= back ? cpu_at(&c->in[IN_X], t - back, col)
                     : cpu_at(kept, kept->rows + t - back, col);
}

#define ELEM       float
#define REAL       float
#define LOAD(x)    (x)
#define STORE(x)   (x)
#define FORM(name) name##_f32
#include "causal_conv.inc"

#define ELEM       double
#define REAL       double
#define LOAD(x)    (x)
#define STORE(x)   (x)
#define FORM(name) name##_f64
#include "causal_conv.inc"

#define ELEM       uint16_t
#define REAL       float
#define LOAD(x)    mt_bf16_to_f32(x)
#define STORE(x)   mt_f32_to_bf16(x)
#define FORM(name) name##_bf16
#include "causal_conv.inc"

typedef struct conv_form {
    void (*forward)(const mt_op_call *c, int64_t first, int64_t end, void *scratch);
    void (*grad_x)(const mt_op_call *c, int64_t first, int64_t end, void *scratch);
    void (*grad_w)(const mt_op_call *c, int64_t col, int64_t n, void *scratch);
} conv_form;

static const conv_form *form_of(mt_dtype dtype)
{
    static const conv_form f32 = { forward_f32, grad_x_f32, grad_w_f32 },
                           f64 = { forward_f64, grad_x_f64, grad_w_f64 },
                           bf16 = { forward_bf16, grad_x_bf16, grad_w_bf16 };
    return dtype == MT_F64 ? &f64 : dtype == MT_BF16 ? &bf16 : &f32;
}

/* Leaves the last rows of what has been seen for the next call. */
static void keep(const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *kept = &c->state[0];
    size_t bytes = (size_t)(x->cols * mt_dtype_size(x->dtype));
    for (int64_t i = 0; i < kept->rows; i++) {
        int64_t t = x->rows - kept->rows + i;
        if (t >= 0)
            memcpy(cpu_at(kept, i, 0), cpu_at(x, t, 0), bytes);
        else if (c->pass == MT_PASS_DECODE)
            memmove(cpu_at(kept, i, 0), cpu_at(kept, i + x->rows, 0), bytes);
    }
}

/* Forward: rows, then the state. Backward: rows of x's gradient, then columns of the weight's. */
static int32_t conv_phases(const mt_op_call *c, bool backward)
{
    return backward || c->state[0].data ? 2 : 1;
}

static int64_t conv_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    if (phase == 0)
        return backward && !c->d_in[IN_X].data ? 0 : cpu_row_tasks(c->in[IN_X].rows);
    if (!backward)
        return 1;
    return c->d_in[IN_W].data ? (c->in[IN_X].cols + COLUMNS - 1) / COLUMNS : 0;
}

static void conv_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task,
                     void *scratch)
{
    (void)isa;
    const conv_form *f = form_of(c->in[IN_X].dtype);
    int64_t cols = c->in[IN_X].cols, col = task * COLUMNS;
    if (phase == 0)
        (backward ? f->grad_x : f->forward)(c, task * CPU_ROWS_PER_TASK,
                                            cpu_row_task_end(task, c->in[IN_X].rows), scratch);
    else if (backward)
        f->grad_w(c, col, cols - col < COLUMNS ? cols - col : COLUMNS, scratch);
    else
        keep(c);
}

/* The weight, tap by tap; or the sums of a task's columns. */
static int64_t conv_scratch(const mt_op_call *c, bool backward)
{
    int64_t elems = c->in[IN_W].rows * c->in[IN_W].cols, sums = 2 * COLUMNS * c->in[IN_W].cols;
    return (backward && sums > elems ? sums : elems) * (int64_t)sizeof(double);
}

const cpu_op cpu_op_causal_conv = {
    .name = "causal_conv",
    .phases = conv_phases,
    .tasks = conv_tasks,
    .scratch = conv_scratch,
    .run_scratch = conv_run,
};
