/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding: rows of a table picked by the batch. Backward adds each token's gradient to its row;
 * tasks own columns, and tokens come in their order, so sums have one order.
 */
#include "../cpu.h"

#include <stdio.h>

enum { COLS_PER_TASK = 64 };

static int64_t parts(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* Backward zeroes the gradient first unless it accumulates. */
static int32_t embedding_phases(const mt_op_call *c, bool backward)
{
    if (!backward)
        return 1;
    return c->d_in[0].data ? 1 + !(c->d_accumulate & 1u) : 0;
}

static bool is_zeroing(const mt_op_call *c, int32_t phase)
{
    return phase == 0 && !(c->d_accumulate & 1u);
}

static int64_t embedding_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    if (!backward)
        return parts(c->batch.tokens, CPU_ROWS_PER_TASK);
    if (is_zeroing(c, phase))
        return parts(c->d_in[0].rows, CPU_ROWS_PER_TASK);
    return parts(c->d_in[0].cols, COLS_PER_TASK);
}

static void gather(const mt_op_call *c, int64_t task)
{
    const mt_tensor *w = &c->in[0], *y = &c->out[0];
    size_t size = (size_t)mt_dtype_size(w->dtype);
    int64_t end = (task + 1) * CPU_ROWS_PER_TASK;
    if (end > c->batch.tokens)
        end = c->batch.tokens;
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++)
        memcpy((char *)y->data + (size_t)(t * y->ld) * size,
               (const char *)w->data + (size_t)(c->batch.rows[t] * w->ld) * size,
               (size_t)w->cols * size);
}

static void zero(const mt_tensor *d, int64_t task)
{
    size_t size = (size_t)mt_dtype_size(d->dtype);
    int64_t end = (task + 1) * CPU_ROWS_PER_TASK;
    if (end > d->rows)
        end = d->rows;
    for (int64_t i = task * CPU_ROWS_PER_TASK; i < end; i++)
        memset((char *)d->data + (size_t)(i * d->ld) * size, 0, (size_t)d->cols * size);
}

static void scatter(const mt_op_call *c, int64_t task)
{
    const mt_tensor *d = &c->d_in[0], *dy = &c->d_out[0];
    int64_t first = task * COLS_PER_TASK;
    int64_t cols = d->cols - first < COLS_PER_TASK ? d->cols - first : COLS_PER_TASK;
    for (int64_t t = 0; t < c->batch.tokens; t++) {
        int64_t to = c->batch.rows[t] * d->ld + first, from = t * dy->ld + first;
        if (dy->dtype == MT_F32) {
            const float *g = (const float *)dy->data + from;
            float *s = (float *)d->data + to;
            for (int64_t i = 0; i < cols; i++)
                s[i] += g[i];
        } else if (dy->dtype == MT_F64) {
            const double *g = (const double *)dy->data + from;
            double *s = (double *)d->data + to;
            for (int64_t i = 0; i < cols; i++)
                s[i] += g[i];
        } else {
            const uint16_t *g = (const uint16_t *)dy->data + from;
            float *s = (float *)d->data + to;
            for (int64_t i = 0; i < cols; i++)
                s[i] += mt_bf16_to_f32(g[i]);
        }
    }
}

static void embedding_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                          int64_t task)
{
    (void)isa;
    if (!backward)
        gather(c, task);
    else if (is_zeroing(c, phase))
        zero(&c->d_in[0], task);
    else
        scatter(c, task);
}

static bool embedding_check(const mt_op_call *c, char *error, size_t error_size)
{
    int64_t rows = c->in[0].rows;
    for (int64_t t = 0; t < c->batch.tokens; t++) {
        if (c->batch.rows[t] < 0 || c->batch.rows[t] >= rows) {
            snprintf(error, error_size,
                     "token %lld has row %d of a table of %lld rows; do tokenizer and model fit?",
                     (long long)t, (int)c->batch.rows[t], (long long)rows);
            return false;
        }
    }
    return true;
}

const cpu_op cpu_op_embedding = {
    .name = "embedding",
    .phases = embedding_phases,
    .tasks = embedding_tasks,
    .run = embedding_run,
    .check = embedding_check,
};
