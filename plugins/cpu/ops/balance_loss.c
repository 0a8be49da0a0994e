/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "balance_loss". A part (the micro-batch, or a document) of n tokens with c_e rows of
 * expert e adds factor * sum over its tokens and experts of c_e p_te, where factor = coef * E *
 * targets / (norm * n^2) and norm is 1 or k: p_te is all that has a gradient.
 */
#include "sum_rows.h"

#include <math.h>

enum { IN_LOGITS = 0, IN_SLOTS = 1, IN_OFFSETS = 2 };

static bool by_document(const mt_op_call *c)
{
    return ((const mt_balance_attr *)c->attr)->mode == MT_BALANCE_DEEPSEEK_SEQ;
}

static int64_t parts_of(const mt_op_call *c)
{
    return by_document(c) ? c->batch.documents : 1;
}

/* First token of part `part`. */
static int64_t part_start(const mt_op_call *c, int64_t part)
{
    return by_document(c) ? c->batch.doc_starts[part] : part * c->batch.tokens;
}

/* Work: for each part its factor times c_e for every expert, then a sum for each task of rows. */
static double *share_of(const mt_op_call *c, int64_t part)
{
    return (double *)c->work + part * c->in[IN_LOGITS].cols;
}

static double *sum_of(const mt_op_call *c, int64_t task)
{
    return share_of(c, parts_of(c)) + task;
}

static int64_t balance_workspace(const mt_op_call *c, bool backward)
{
    (void)backward;
    return (parts_of(c) * c->in[IN_LOGITS].cols + cpu_row_tasks(c->in[IN_LOGITS].rows)) *
           (int64_t)sizeof(double);
}

/* The expert that row `slot` belongs to: the last whose rows start at or before it. */
static int64_t expert_of(const int32_t *offset, int64_t experts, int32_t slot)
{
    int64_t low = 0, high = experts;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (offset[middle] <= slot)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void count_part(const mt_op_call *c, int64_t part)
{
    const mt_balance_attr *a = c->attr;
    const mt_tensor *slots = &c->in[IN_SLOTS];
    int64_t experts = c->in[IN_LOGITS].cols, targets = 0;
    int64_t first = part_start(c, part), end = part_start(c, part + 1), n = end - first;
    double *share = share_of(c, part);
    memset(share, 0, (size_t)experts * sizeof *share);
    for (int64_t t = first; t < end; t++) {
        targets += c->batch.targets[t] >= 0;
        for (int64_t j = 0; j < slots->cols; j++)
            share[expert_of(c->in[IN_OFFSETS].data, experts, cpu_index_row(slots, t)[j])] += 1;
    }
    double norm = by_document(c) ? (double)slots->cols : 1;
    double factor =
        n > 0 ? a->coef * (double)experts * (double)targets / (norm * (double)n * (double)n) : 0;
    for (int64_t e = 0; e < experts; e++)
        share[e] *= factor;
}

/* p of one token to `ret`; returns the sum of share times p. */
static double score_row(const mt_op_call *c, int64_t t, const double *share, double *ret)
{
    const mt_tensor *logits = &c->in[IN_LOGITS];
    double top = -INFINITY, sum = 0, loss = 0;
    for (int64_t e = 0; e < logits->cols; e++)
        top = fmax(top, cpu_get(logits, t, e));
    for (int64_t e = 0; e < logits->cols; e++)
        sum += ret[e] = exp(cpu_get(logits, t, e) - top);
    for (int64_t e = 0; e < logits->cols; e++) {
        ret[e] /= sum;
        loss += share[e] * ret[e];
    }
    return loss;
}

static void run_rows(const mt_op_call *c, bool backward, int64_t task, double *p)
{
    int64_t part = 0, end = cpu_row_task_end(task, c->in[IN_LOGITS].rows);
    const mt_tensor *d = &c->d_in[IN_LOGITS];
    bool add = c->d_accumulate >> IN_LOGITS & 1u;
    double total = 0;
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        while (t >= part_start(c, part + 1))
            part++;
        const double *share = share_of(c, part);
        double loss = score_row(c, t, share, p);
        total += loss;
        for (int64_t e = 0; backward && e < d->cols; e++)
            cpu_put(d, t, e,
                    c->batch.loss_scale * p[e] * (share[e] - loss) + (add ? cpu_get(d, t, e) : 0));
    }
    *sum_of(c, task) = total;
}

/* Count, then rows, then (forward) the sum of what they have. */
static int32_t balance_phases(const mt_op_call *c, bool backward)
{
    if (c->pass == MT_PASS_PREFILL || c->pass == MT_PASS_DECODE)
        return 0;
    return backward ? 2 : 3;
}

static int64_t balance_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)backward;
    if (phase == 0)
        return parts_of(c);
    return phase == 1 ? cpu_row_tasks(c->in[IN_LOGITS].rows) : 1;
}

static void balance_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                        int64_t task, void *scratch)
{
    (void)isa;
    if (phase == 0) {
        count_part(c, task);
    } else if (phase == 1) {
        run_rows(c, backward, task, scratch);
    } else {
        double sum = 0;
        for (int64_t i = 0; i < cpu_row_tasks(c->in[IN_LOGITS].rows); i++)
            sum += *sum_of(c, i);
        cpu_put(&c->out[0], 0, 0, sum);
    }
}

static int64_t balance_scratch(const mt_op_call *c, bool backward)
{
    (void)backward;
    return c->in[IN_LOGITS].cols * (int64_t)sizeof(double);
}

const cpu_op cpu_op_balance_loss = {
    .name = "balance_loss",
    .phases = balance_phases,
    .tasks = balance_tasks,
    .workspace = balance_workspace,
    .scratch = balance_scratch,
    .run_scratch = balance_run,
};
