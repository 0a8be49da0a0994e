/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "balance_loss". A part (the micro-batch, or a document) of n tokens with c_e rows of
 * expert e adds factor * sum over its tokens and experts of c_e p_te, where factor = coef * E *
 * targets / (norm * n^2) and norm is 1 or k: p_te is all that has a gradient. Over all layers the
 * part is the micro-batch in each of them: n and c_e are those of the tally.
 */
#include "sum_rows.h"

#include <math.h>

enum { IN_LOGITS = 0, IN_SLOTS = 1, IN_OFFSETS = 2 };

static bool by_document(const mt_op_call *c)
{
    return ((const mt_balance_attr *)c->attr)->mode == MT_BALANCE_DEEPSEEK_SEQ;
}

static bool over_layers(const mt_op_call *c)
{
    return ((const mt_balance_attr *)c->attr)->mode == MT_BALANCE_HF_ALL_LAYERS;
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

/* Work: for each part its factor times c_e for every expert (forward over all layers: c_e of this
 * one), then a sum for each task of rows (there: sums of p_e for each task). */
static double *share_of(const mt_op_call *c, int64_t part)
{
    return (double *)c->work + part * c->in[IN_LOGITS].cols;
}

/* Numbers that a task of rows adds up. */
static int64_t sums_of_task(const mt_op_call *c, bool backward)
{
    return over_layers(c) && !backward ? c->in[IN_LOGITS].cols : 1;
}

static double *sum_of(const mt_op_call *c, bool backward, int64_t task)
{
    return share_of(c, parts_of(c)) + task * sums_of_task(c, backward);
}

static int64_t balance_workspace(const mt_op_call *c, bool backward)
{
    return (parts_of(c) * c->in[IN_LOGITS].cols +
            cpu_row_tasks(c->in[IN_LOGITS].rows) * sums_of_task(c, backward)) *
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

static int64_t count_targets(const mt_op_call *c, int64_t first, int64_t end)
{
    int64_t n = 0;
    for (int64_t t = first; t < end; t++)
        n += c->batch.targets[t] >= 0;
    return n;
}

/* c_e of tokens [first, end). */
static void count_rows(const mt_op_call *c, int64_t first, int64_t end, double *ret)
{
    const mt_tensor *slots = &c->in[IN_SLOTS];
    int64_t experts = c->in[IN_LOGITS].cols;
    memset(ret, 0, (size_t)experts * sizeof *ret);
    for (int64_t t = first; t < end; t++)
        for (int64_t j = 0; j < slots->cols; j++)
            ret[expert_of(c->in[IN_OFFSETS].data, experts, cpu_index_row(slots, t)[j])] += 1;
}

static void share_part(const mt_op_call *c, int64_t part)
{
    const mt_balance_attr *a = c->attr;
    int64_t experts = c->in[IN_LOGITS].cols;
    int64_t first = part_start(c, part), end = part_start(c, part + 1), n = end - first;
    double *share = share_of(c, part), norm = by_document(c) ? (double)c->in[IN_SLOTS].cols : 1;
    double all = a->coef * (double)experts * (double)count_targets(c, first, end);
    count_rows(c, first, end, share);
    for (int64_t e = 0; e < experts; e++)
        share[e] *= n > 0 ? all / (norm * (double)n * (double)n) : 0;
}

/* p of one token. */
static void score_row(const mt_tensor *logits, int64_t t, double *ret)
{
    double top = -INFINITY, sum = 0;
    for (int64_t e = 0; e < logits->cols; e++)
        top = fmax(top, cpu_get(logits, t, e));
    for (int64_t e = 0; e < logits->cols; e++)
        sum += ret[e] = exp(cpu_get(logits, t, e) - top);
    for (int64_t e = 0; e < logits->cols; e++)
        ret[e] /= sum;
}

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void run_rows(const mt_op_call *c, bool backward, int64_t task, double *p)
{
    const mt_tensor *logits = &c->in[IN_LOGITS], *d = &c->d_in[IN_LOGITS];
    int64_t part = 0, end = cpu_row_task_end(task, logits->rows);
    bool add = c->d_accumulate >> IN_LOGITS & 1u;
    double total = 0;
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        while (t >= part_start(c, part + 1))
            part++;
        const double *share = share_of(c, part);
        score_row(logits, t, p);
        double loss = dot(share, p, logits->cols);
        total += loss;
        for (int64_t e = 0; backward && e < d->cols; e++)
            cpu_put(d, t, e,
                    c->batch.loss_scale * p[e] * (share[e] - loss) + (add ? cpu_get(d, t, e) : 0));
    }
    *sum_of(c, backward, task) = total;
}

static double total_of(const mt_op_call *c)
{
    double sum = 0;
    for (int64_t i = 0; i < cpu_row_tasks(c->in[IN_LOGITS].rows); i++)
        sum += *sum_of(c, false, i);
    return sum;
}

/* ---- over all layers ------------------------------------------------------------------------- */

/* The tally: c_e, sums of p_e, tokens; of all layers together. */
static double *tally_scores(const mt_op_call *c)
{
    return c->tally + c->in[IN_LOGITS].cols;
}

static double *tally_tokens(const mt_op_call *c)
{
    return c->tally + 2 * c->in[IN_LOGITS].cols;
}

/* What one row of an expert and one of p_e add to the loss, as the tally stands. */
static double tally_factor(const mt_op_call *c)
{
    const mt_balance_attr *a = c->attr;
    double n = *tally_tokens(c), targets = (double)count_targets(c, 0, c->batch.tokens);
    return n > 0 ? a->coef * (double)c->in[IN_LOGITS].cols * targets / (n * n) : 0;
}

static double tally_loss(const mt_op_call *c)
{
    return tally_factor(c) * dot(c->tally, tally_scores(c), c->in[IN_LOGITS].cols);
}

static void share_tally(const mt_op_call *c)
{
    double factor = tally_factor(c), *share = share_of(c, 0);
    for (int64_t e = 0; e < c->in[IN_LOGITS].cols; e++)
        share[e] = factor * c->tally[e];
}

static void sum_scores(const mt_op_call *c, int64_t task, double *p)
{
    const mt_tensor *logits = &c->in[IN_LOGITS];
    double *sum = sum_of(c, false, task);
    memset(sum, 0, (size_t)logits->cols * sizeof *sum);
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < cpu_row_task_end(task, logits->rows); t++) {
        score_row(logits, t, p);
        for (int64_t e = 0; e < logits->cols; e++)
            sum[e] += p[e];
    }
}

/* Adds this layer to the tally; returns what the loss gains. */
static double add_to_tally(const mt_op_call *c)
{
    const mt_tensor *logits = &c->in[IN_LOGITS];
    const double *count = share_of(c, 0), before = tally_loss(c);
    for (int64_t e = 0; e < logits->cols; e++) {
        c->tally[e] += count[e];
        for (int64_t i = 0; i < cpu_row_tasks(logits->rows); i++)
            tally_scores(c)[e] += sum_of(c, false, i)[e];
    }
    *tally_tokens(c) += (double)logits->rows;
    return tally_loss(c) - before;
}

/* ---- the operation --------------------------------------------------------------------------- */

/* Shares, then rows, then (forward) the sum of what they have. */
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

static void share(const mt_op_call *c, bool backward, int64_t part)
{
    if (!over_layers(c))
        share_part(c, part);
    else if (backward)
        share_tally(c);
    else
        count_rows(c, 0, c->in[IN_LOGITS].rows, share_of(c, 0));
}

static void balance_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                        int64_t task, void *scratch)
{
    (void)isa;
    if (phase == 0)
        share(c, backward, task);
    else if (phase == 1 && over_layers(c) && !backward)
        sum_scores(c, task, scratch);
    else if (phase == 1)
        run_rows(c, backward, task, scratch);
    else
        cpu_put(&c->out[0], 0, 0, over_layers(c) ? add_to_tally(c) : total_of(c));
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
