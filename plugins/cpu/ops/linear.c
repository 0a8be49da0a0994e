/* SPDX-License-Identifier: Apache-2.0
 *
 * linear: y = x w^T + bias. Forward and both gradients are GEMMs on fixed tiles. exact_linear: the
 * same without a bias, y in FP32; its gradient is rounded to the dtype of x and w first.
 */
#include "../cpu.h"

enum { IN_X = 0, IN_W = 1, IN_BIAS = 2 };

/* Columns of the bias gradient that one task sums. */
enum { BIAS_COLS = 64 };

/* The gradients are independent of each other: one phase runs the tasks of all three, counted dx
 * first, then dw, then dbias. */
typedef struct linear_grads {
    cpu_tiles dx, dw;
    int64_t dx_tasks, dw_tasks, bias_tasks;
} linear_grads;

static linear_grads grads_of(const mt_op_call *c)
{
    const mt_tensor *dy = &c->d_out[0];
    linear_grads g = { 0 };
    if (c->d_in[IN_X].data) {
        g.dx = cpu_tiles_of(c->d_in[IN_X].rows, c->d_in[IN_X].cols);
        g.dx_tasks = g.dx.count;
    }
    if (c->d_in[IN_W].data) {
        g.dw = cpu_tiles_of(c->d_in[IN_W].rows, c->d_in[IN_W].cols);
        g.dw_tasks = g.dw.count;
    }
    if (c->n_in > IN_BIAS && c->d_in[IN_BIAS].data)
        g.bias_tasks = (dy->cols + BIAS_COLS - 1) / BIAS_COLS;
    return g;
}

static int64_t linear_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    if (!backward)
        return cpu_tiles_of(c->out[0].rows, c->out[0].cols).count;
    linear_grads g = grads_of(c);
    return g.dx_tasks + g.dw_tasks + g.bias_tasks;
}

static void *at(const mt_tensor *t, int64_t row, int64_t col)
{
    return (char *)t->data + (row * t->ld + col) * mt_dtype_size(t->dtype);
}

static void forward_tile(cpu_isa isa, const mt_op_call *c, int64_t task, void *scratch)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *y = &c->out[0];
    const mt_tensor *bias = &c->in[IN_BIAS];
    cpu_tiles tiles = cpu_tiles_of(y->rows, y->cols);
    cpu_tile t = cpu_tile_at(&tiles, task);
    bool has_bias = c->n_in > IN_BIAS && bias->data;
    /* The product is added to the bias before the one rounding, as in a GEMM's epilogue. */
    if (has_bias)
        for (int64_t i = 0; i < t.rows; i++)
            memcpy(at(y, t.row + i, t.col), at(bias, 0, t.col),
                   (size_t)(t.cols * mt_dtype_size(y->dtype)));
    cpu_gemm_for(isa)(false, true, t.rows, t.cols, x->cols, 1, x->dtype, at(x, t.row, 0), x->ld,
                      at(w, t.col, 0), w->ld, has_bias, y->dtype, at(y, t.row, t.col), y->ld,
                      scratch);
}

static double bias_element(const mt_tensor *dy, int64_t row, int64_t col)
{
    if (dy->dtype == MT_F32)
        return ((const float *)dy->data)[row * dy->ld + col];
    if (dy->dtype == MT_F64)
        return ((const double *)dy->data)[row * dy->ld + col];
    return mt_bf16_to_f32(((const uint16_t *)dy->data)[row * dy->ld + col]);
}

static void bias_columns(const mt_op_call *c, int64_t task)
{
    const mt_tensor *dy = &c->d_out[0], *d = &c->d_in[IN_BIAS];
    bool add = c->d_accumulate >> IN_BIAS & 1u;
    int64_t first = task * BIAS_COLS;
    int64_t cols = dy->cols - first < BIAS_COLS ? dy->cols - first : BIAS_COLS;
    double sum[BIAS_COLS] = { 0 };
    for (int64_t row = 0; row < dy->rows; row++)
        for (int64_t i = 0; i < cols; i++)
            sum[i] += bias_element(dy, row, first + i);
    for (int64_t i = 0; i < cols; i++) {
        if (d->dtype == MT_F64) {
            double *to = (double *)d->data + first + i;
            *to = sum[i] + (add ? *to : 0);
        } else {
            float *to = (float *)d->data + first + i;
            *to = (float)(sum[i] + (add ? (double)*to : 0));
        }
    }
}

static void backward_task(cpu_isa isa, const mt_op_call *c, int64_t task, void *scratch)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *dy = &c->d_out[0];
    linear_grads g = grads_of(c);
    if (task < g.dx_tasks) {
        const mt_tensor *d = &c->d_in[IN_X];
        cpu_tile t = cpu_tile_at(&g.dx, task);
        cpu_gemm_for(isa)(false, false, t.rows, t.cols, dy->cols, 1, dy->dtype, at(dy, t.row, 0),
                          dy->ld, at(w, 0, t.col), w->ld, c->d_accumulate >> IN_X & 1u, d->dtype,
                          at(d, t.row, t.col), d->ld, scratch);
        return;
    }
    task -= g.dx_tasks;
    if (task < g.dw_tasks) {
        const mt_tensor *d = &c->d_in[IN_W];
        cpu_tile t = cpu_tile_at(&g.dw, task);
        cpu_gemm_for(isa)(true, false, t.rows, t.cols, dy->rows, 1, dy->dtype, at(dy, 0, t.row),
                          dy->ld, at(x, 0, t.col), x->ld, c->d_accumulate >> IN_W & 1u, d->dtype,
                          at(d, t.row, t.col), d->ld, scratch);
        return;
    }
    bias_columns(c, task - g.dw_tasks);
}

static void linear_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task,
                       void *scratch)
{
    (void)phase;
    if (backward)
        backward_task(isa, c, task, scratch);
    else
        forward_tile(isa, c, task, scratch);
}

/* The largest tile with the deepest panels serves every call. */
static int64_t linear_scratch(const mt_op_call *c, bool backward)
{
    mt_dtype dtype = backward ? c->d_out[0].dtype : c->in[IN_X].dtype;
    return cpu_gemm_work(CPU_TILE_M, CPU_TILE_N, INT32_MAX, dtype);
}

const cpu_op cpu_op_linear = {
    .name = "linear",
    .tasks = linear_tasks,
    .scratch = linear_scratch,
    .run_scratch = linear_run,
};

/* ---- exact_linear ------------------------------------------------------------------------------
 */

static bool is_mixed(const mt_op_call *c, bool backward)
{
    return backward && c->in[IN_X].dtype == MT_BF16;
}

/* Backward begins with the phase that rounds. */
static int32_t exact_phases(const mt_op_call *c, bool backward)
{
    return is_mixed(c, backward) ? 2 : 1;
}

static int64_t exact_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    if (phase == 0 && is_mixed(c, backward))
        return (c->d_out[0].rows + CPU_ROWS_PER_TASK - 1) / CPU_ROWS_PER_TASK;
    return linear_tasks(c, backward, phase);
}

static int64_t exact_workspace(const mt_op_call *c, bool backward)
{
    const mt_tensor *dy = &c->d_out[0];
    return is_mixed(c, backward) ? dy->rows * dy->cols * (int64_t)sizeof(uint16_t) : 0;
}

static void round_rows(const mt_op_call *c, int64_t task)
{
    const mt_tensor *dy = &c->d_out[0];
    uint16_t *to = c->work;
    int64_t first = task * CPU_ROWS_PER_TASK;
    int64_t end = dy->rows - first < CPU_ROWS_PER_TASK ? dy->rows : first + CPU_ROWS_PER_TASK;
    for (int64_t row = first; row < end; row++)
        for (int64_t i = 0; i < dy->cols; i++)
            to[row * dy->cols + i] = mt_f32_to_bf16(((const float *)dy->data)[row * dy->ld + i]);
}

static void exact_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task,
                      void *scratch)
{
    if (!is_mixed(c, backward)) {
        linear_run(isa, c, backward, phase, task, scratch);
    } else if (phase == 0) {
        round_rows(c, task);
    } else {
        mt_op_call rounded = *c;
        mt_tensor *dy = &rounded.d_out[0];
        dy->data = c->work;
        dy->ld = dy->cols;
        dy->dtype = MT_BF16;
        backward_task(isa, &rounded, task, scratch);
    }
}

static int64_t exact_scratch(const mt_op_call *c, bool backward)
{
    (void)backward;
    return cpu_gemm_work(CPU_TILE_M, CPU_TILE_N, INT32_MAX, c->in[IN_X].dtype);
}

const cpu_op cpu_op_exact_linear = {
    .name = "exact_linear",
    .phases = exact_phases,
    .tasks = exact_tasks,
    .workspace = exact_workspace,
    .scratch = exact_scratch,
    .run_scratch = exact_run,
};
