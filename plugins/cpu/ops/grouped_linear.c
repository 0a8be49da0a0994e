/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_linear: y = x w_e^T + bias_e for the rows of each expert e. GEMMs on tiles that never
 * cross an expert's border; how large they are depends on shapes, how many there are on the router.
 */
#include "sum_rows.h"

enum { IN_X = 0, IN_W = 1, IN_OFFSETS = 2, IN_BIAS = 3 };

/* Columns of the bias gradient that one task sums. */
enum { BIAS_COLS = 64 };

static int64_t parts(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* A tile of the rows of one expert. */
typedef struct group_tile {
    int64_t expert;
    cpu_tile at; /* row within the tensor for rows of x and y, within the expert for those of w */
} group_tile;

/* The cut of a matrix whose rows are the experts' rows of x (offset given), or `height` rows of w
 * each. */
typedef struct groups {
    const int32_t *offset; /* NULL: `height` rows each */
    int64_t experts, height, cols;
    int64_t tile_m, tile_n;
} groups;

static groups groups_of(const mt_op_call *c, int64_t rows, int64_t cols, bool by_rows_of_w)
{
    const mt_tensor *offsets = &c->in[IN_OFFSETS];
    groups g = { .experts = offsets->cols - 1, .cols = cols };
    if (by_rows_of_w)
        g.height = rows / g.experts;
    else
        g.offset = offsets->data;
    /* Those of w go by one expert: how many others are there must make no difference. */
    cpu_tiles t = cpu_tiles_of(by_rows_of_w ? g.height : rows, cols);
    g.tile_m = t.tile_m;
    g.tile_n = t.tile_n;
    return g;
}

static int64_t group_rows(const groups *g, int64_t e)
{
    return g->offset ? g->offset[e + 1] - g->offset[e] : g->height;
}

static int64_t tiles_of_expert(const groups *g, int64_t e)
{
    return parts(group_rows(g, e), g->tile_m) * parts(g->cols, g->tile_n);
}

static int64_t count_tiles(const groups *g)
{
    int64_t n = 0;
    for (int64_t e = 0; e < g->experts; e++)
        n += tiles_of_expert(g, e);
    return n;
}

static group_tile tile_at(const groups *g, int64_t index)
{
    int64_t e = 0;
    for (; index >= tiles_of_expert(g, e); e++)
        index -= tiles_of_expert(g, e);
    cpu_tiles t = { .m = group_rows(g, e),
                    .n = g->cols,
                    .tile_m = g->tile_m,
                    .tile_n = g->tile_n,
                    .across = parts(g->cols, g->tile_n) };
    group_tile tile = { e, cpu_tile_at(&t, index) };
    if (g->offset)
        tile.at.row += g->offset[e];
    return tile;
}

/* The gradients are independent of each other: one phase runs the tasks of all three, counted dx
 * first, then dw, then dbias. */
typedef struct grads {
    groups dx, dw;
    int64_t dx_tasks, dw_tasks, bias_tasks, bias_across;
} grads;

static grads grads_of(const mt_op_call *c)
{
    grads g = { 0 };
    const mt_tensor *dx = &c->d_in[IN_X], *dw = &c->d_in[IN_W], *dbias = &c->d_in[IN_BIAS];
    if (dx->data) {
        g.dx = groups_of(c, dx->rows, dx->cols, false);
        g.dx_tasks = count_tiles(&g.dx);
    }
    if (dw->data) {
        g.dw = groups_of(c, dw->rows, dw->cols, true);
        g.dw_tasks = count_tiles(&g.dw);
    }
    if (c->n_in > IN_BIAS && dbias->data) {
        g.bias_across = parts(dbias->cols, BIAS_COLS);
        g.bias_tasks = g.bias_across * dbias->rows;
    }
    return g;
}

static int64_t grouped_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    if (!backward) {
        groups g = groups_of(c, c->out[0].rows, c->out[0].cols, false);
        return count_tiles(&g);
    }
    grads g = grads_of(c);
    return g.dx_tasks + g.dw_tasks + g.bias_tasks;
}

static void forward_tile(cpu_isa isa, const mt_op_call *c, int64_t task, void *scratch)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *y = &c->out[0];
    const mt_tensor *bias = &c->in[IN_BIAS];
    groups g = groups_of(c, y->rows, y->cols, false);
    group_tile tile = tile_at(&g, task);
    cpu_tile t = tile.at;
    /* The product is added to the bias before the one rounding, as in a GEMM's epilogue. */
    bool has_bias = c->n_in > IN_BIAS && bias->data;
    for (int64_t i = 0; has_bias && i < t.rows; i++)
        memcpy(cpu_at(y, t.row + i, t.col), cpu_at(bias, tile.expert, t.col),
               (size_t)(t.cols * mt_dtype_size(y->dtype)));
    cpu_gemm_for(isa)(false, true, t.rows, t.cols, x->cols, 1, x->dtype, cpu_at(x, t.row, 0), x->ld,
                      cpu_at(w, tile.expert * y->cols + t.col, 0), w->ld, has_bias, y->dtype,
                      cpu_at(y, t.row, t.col), y->ld, scratch);
}

static void dx_tile(cpu_isa isa, const mt_op_call *c, const groups *g, int64_t task, void *scratch)
{
    const mt_tensor *w = &c->in[IN_W], *dy = &c->d_out[0], *d = &c->d_in[IN_X];
    group_tile tile = tile_at(g, task);
    cpu_tile t = tile.at;
    cpu_gemm_for(isa)(false, false, t.rows, t.cols, dy->cols, 1, dy->dtype, cpu_at(dy, t.row, 0),
                      dy->ld, cpu_at(w, tile.expert * dy->cols, t.col), w->ld,
                      c->d_accumulate >> IN_X & 1u, d->dtype, cpu_at(d, t.row, t.col), d->ld,
                      scratch);
}

static void dw_tile(cpu_isa isa, const mt_op_call *c, const groups *g, int64_t task, void *scratch)
{
    const mt_tensor *x = &c->in[IN_X], *dy = &c->d_out[0], *d = &c->d_in[IN_W];
    const int32_t *offset = c->in[IN_OFFSETS].data;
    group_tile tile = tile_at(g, task);
    cpu_tile t = tile.at;
    int64_t first = offset[tile.expert], rows = offset[tile.expert + 1] - first;
    int64_t to = tile.expert * g->height + t.row;
    bool add = c->d_accumulate >> IN_W & 1u;
    if (rows > 0)
        cpu_gemm_for(isa)(true, false, t.rows, t.cols, rows, 1, dy->dtype, cpu_at(dy, first, t.row),
                          dy->ld, cpu_at(x, first, t.col), x->ld, add, d->dtype,
                          cpu_at(d, to, t.col), d->ld, scratch);
    for (int64_t i = 0; rows == 0 && !add && i < t.rows; i++)
        memset(cpu_at(d, to + i, t.col), 0, (size_t)(t.cols * mt_dtype_size(d->dtype)));
}

static void bias_columns(const mt_op_call *c, int64_t expert, int64_t first)
{
    const mt_tensor *dy = &c->d_out[0], *d = &c->d_in[IN_BIAS];
    const int32_t *offset = c->in[IN_OFFSETS].data;
    bool add = c->d_accumulate >> IN_BIAS & 1u;
    int64_t cols = dy->cols - first < BIAS_COLS ? dy->cols - first : BIAS_COLS;
    double sum[BIAS_COLS] = { 0 };
    for (int64_t row = offset[expert]; row < offset[expert + 1]; row++)
        for (int64_t i = 0; i < cols; i++)
            sum[i] += cpu_get(dy, row, first + i);
    for (int64_t i = 0; i < cols; i++)
        cpu_put(d, expert, first + i, sum[i] + (add ? cpu_get(d, expert, first + i) : 0));
}

static void grouped_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                        int64_t task, void *scratch)
{
    (void)phase;
    if (!backward) {
        forward_tile(isa, c, task, scratch);
        return;
    }
    grads g = grads_of(c);
    if (task < g.dx_tasks) {
        dx_tile(isa, c, &g.dx, task, scratch);
    } else if (task < g.dx_tasks + g.dw_tasks) {
        dw_tile(isa, c, &g.dw, task - g.dx_tasks, scratch);
    } else {
        task -= g.dx_tasks + g.dw_tasks;
        bias_columns(c, task / g.bias_across, task % g.bias_across * BIAS_COLS);
    }
}

/* The largest tile with the deepest panels serves every call. */
static int64_t grouped_scratch(const mt_op_call *c, bool backward)
{
    mt_dtype dtype = backward ? c->d_out[0].dtype : c->in[IN_X].dtype;
    return cpu_gemm_work(CPU_TILE_M, CPU_TILE_N, INT32_MAX, dtype);
}

const cpu_op cpu_op_grouped_linear = {
    .name = "grouped_linear",
    .tasks = grouped_tasks,
    .scratch = grouped_scratch,
    .run_scratch = grouped_run,
};
