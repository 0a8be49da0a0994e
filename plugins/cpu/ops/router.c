/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "router": experts of each token, their weights, and the order of rows by expert
 *. Computes in double whatever the dtype: it is a
 * vanishing part of a layer, and near ties then fall as exact arithmetic has them.
 */
#include "sum_rows.h"

#include <math.h>

enum { IN_LOGITS = 0, IN_BIAS = 1, OUT_WEIGHTS = 0, OUT_SLOTS = 1, OUT_OFFSETS = 2 };

/* Of the reference: keeps a sum of underflown scores from dividing by 0. */
static const double renormalise_eps = 1e-20;

/* A task's memory, for every expert: its logit, what it is chosen by (then its score), the weights
 * of the picked, and whether it may still be picked. */
typedef struct row_scratch {
    double *logit, *choice, *weight;
    bool *open;
} row_scratch;

static row_scratch scratch_of(void *memory, int64_t experts)
{
    row_scratch s = { .logit = memory };
    s.choice = s.logit + experts;
    s.weight = s.choice + experts;
    s.open = (bool *)(s.weight + experts);
    return s;
}

static int64_t router_scratch(const mt_op_call *c, bool backward)
{
    (void)backward;
    return c->in[IN_LOGITS].cols * (int64_t)(3 * sizeof(double) + sizeof(bool));
}

static double sigmoid(double x)
{
    return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x));
}

/* Softmax over n logits, those of `pick` where it is given. */
static void softmax(const double *logit, const int32_t *pick, int64_t n, double *ret)
{
    double top = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++)
        top = fmax(top, logit[pick ? pick[i] : i]);
    for (int64_t i = 0; i < n; i++)
        sum += ret[i] = exp(logit[pick ? pick[i] : i] - top);
    for (int64_t i = 0; i < n; i++)
        ret[i] /= sum;
}

/* What experts are compared by. Without a bias, and where groups need no sums, scores need not be
 * formed: they rise with the logits, which do not collide by underflow. */
static void fill_choice(const mt_op_call *c, row_scratch *s, int64_t experts)
{
    const mt_router_attr *a = c->attr;
    const mt_tensor *bias = &c->in[IN_BIAS];
    bool has_bias = c->n_in > IN_BIAS && bias->data;
    bool sums = a->groups > 1 && a->group_score == MT_GROUP_TOP2_SUM;
    if (!has_bias && !sums)
        memcpy(s->choice, s->logit, (size_t)experts * sizeof *s->choice);
    else if (a->scoring == MT_ROUTER_SOFTMAX)
        softmax(s->logit, NULL, experts, s->choice);
    else
        for (int64_t e = 0; e < experts; e++)
            s->choice[e] = sigmoid(s->logit[e]);
    for (int64_t e = 0; has_bias && e < experts; e++)
        s->choice[e] += cpu_get(bias, 0, e);
}

static double group_score(const mt_router_attr *a, const double *choice, int64_t size)
{
    double best = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        if (choice[i] > best) {
            second = best;
            best = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return a->group_score == MT_GROUP_MAX ? best : best + second;
}

/* Opens the experts of the best groups: one after the other, the lower index on a tie. */
static void open_groups(const mt_router_attr *a, row_scratch *s, int64_t experts)
{
    int64_t groups = a->groups > 1 ? a->groups : 1, size = experts / groups;
    memset(s->open, groups == 1, (size_t)experts * sizeof *s->open);
    for (int32_t n = 0; groups > 1 && n < a->top_groups; n++) {
        int64_t best = -1;
        double best_score = 0;
        for (int64_t g = 0; g < groups; g++) {
            if (s->open[g * size])
                continue;
            double score = group_score(a, s->choice + g * size, size);
            if (best < 0 || score > best_score) {
                best = g;
                best_score = score;
            }
        }
        memset(s->open + best * size, true, (size_t)size * sizeof *s->open);
    }
}

/* Every comparison with NaN is false, so that even then k different experts come out. */
static void pick_experts(row_scratch *s, int64_t experts, int32_t k, int32_t *ret)
{
    for (int32_t j = 0; j < k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++)
            if (s->open[e] && (best < 0 || s->choice[e] > s->choice[best]))
                best = e;
        s->open[best] = false;
        ret[j] = (int32_t)best;
    }
}

/* Fills s->weight with those of the picked, before `scale`; s->choice has all scores afterwards
 * where a softmax is not renormalised. Returns what a sigmoid's were divided by. */
static double weigh(const mt_router_attr *a, row_scratch *s, int64_t experts, const int32_t *pick)
{
    double sum = renormalise_eps;
    if (a->scoring == MT_ROUTER_SOFTMAX && a->renormalise) {
        softmax(s->logit, pick, a->top_k, s->weight);
        return 1;
    }
    if (a->scoring == MT_ROUTER_SOFTMAX) {
        softmax(s->logit, NULL, experts, s->choice);
        for (int32_t j = 0; j < a->top_k; j++)
            s->weight[j] = s->choice[pick[j]];
        return 1;
    }
    for (int32_t j = 0; j < a->top_k; j++)
        sum += s->weight[j] = sigmoid(s->logit[pick[j]]);
    if (!a->renormalise)
        return 1;
    for (int32_t j = 0; j < a->top_k; j++)
        s->weight[j] /= sum;
    return sum;
}

static void load_logits(const mt_op_call *c, int64_t t, row_scratch *s)
{
    for (int64_t e = 0; e < c->in[IN_LOGITS].cols; e++)
        s->logit[e] = cpu_get(&c->in[IN_LOGITS], t, e);
}

static void route(const mt_op_call *c, int64_t t, row_scratch *s)
{
    const mt_router_attr *a = c->attr;
    int64_t experts = c->in[IN_LOGITS].cols;
    int32_t *pick = (int32_t *)c->aux[0].data + t * c->aux[0].ld;
    load_logits(c, t, s);
    fill_choice(c, s, experts);
    open_groups(a, s, experts);
    pick_experts(s, experts, a->top_k, pick);
    weigh(a, s, experts, pick);
    for (int32_t j = 0; j < a->top_k; j++)
        cpu_put(&c->out[OUT_WEIGHTS], t, j, a->scale * s->weight[j]);
}

/* Counts each expert's rows and gives every pick its row: a counting sort. */
static void order_rows(const mt_op_call *c)
{
    const mt_tensor *experts = &c->aux[0], *slots = &c->out[OUT_SLOTS];
    int32_t *offset = c->out[OUT_OFFSETS].data;
    int64_t n = c->out[OUT_OFFSETS].cols - 1;
    memset(offset, 0, (size_t)(n + 1) * sizeof *offset);
    for (int64_t t = 0; t < experts->rows; t++)
        for (int64_t j = 0; j < experts->cols; j++)
            offset[cpu_index_row(experts, t)[j] + 1]++;
    for (int64_t e = 0; e < n; e++)
        offset[e + 1] += offset[e];
    /* offset[e] runs through e's rows and ends where those of e + 1 begin: shift it back. */
    for (int64_t t = 0; t < experts->rows; t++)
        for (int64_t j = 0; j < experts->cols; j++)
            ((int32_t *)slots->data)[t * slots->ld + j] = offset[cpu_index_row(experts, t)[j]]++;
    memmove(offset + 1, offset, (size_t)n * sizeof *offset);
    offset[0] = 0;
}

/* The gradient of every logit; what is picked is a constant. */
static void route_backward(const mt_op_call *c, int64_t t, row_scratch *s)
{
    const mt_router_attr *a = c->attr;
    const mt_tensor *d = &c->d_in[IN_LOGITS], *g = &c->d_out[OUT_WEIGHTS];
    const int32_t *pick = cpu_index_row(&c->aux[0], t);
    int64_t experts = d->cols;
    load_logits(c, t, s);
    double divided_by = weigh(a, s, experts, pick), mean = 0, *grad = s->logit;
    for (int32_t j = 0; j < a->top_k; j++)
        mean += a->scale * cpu_get(g, t, j) * s->weight[j];
    bool softmax_of_all = a->scoring == MT_ROUTER_SOFTMAX && !a->renormalise;
    for (int64_t e = 0; e < experts; e++)
        grad[e] = softmax_of_all ? -s->choice[e] * mean : 0;
    for (int32_t j = 0; j < a->top_k; j++) {
        double by_weight = a->scale * cpu_get(g, t, j), w = s->weight[j];
        if (softmax_of_all)
            grad[pick[j]] += w * by_weight;
        else if (a->scoring == MT_ROUTER_SOFTMAX)
            grad[pick[j]] = w * (by_weight - mean);
        else
            grad[pick[j]] = (by_weight - (a->renormalise ? mean : 0)) * w * (1 - w * divided_by);
    }
    bool add = c->d_accumulate >> IN_LOGITS & 1u;
    for (int64_t e = 0; e < experts; e++)
        cpu_put(d, t, e, grad[e] + (add ? cpu_get(d, t, e) : 0));
}

static int32_t router_phases(const mt_op_call *c, bool backward)
{
    (void)c;
    return backward ? 1 : 2;
}

static int64_t router_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    if (backward && !c->d_in[IN_LOGITS].data)
        return 0;
    return phase == 1 ? 1 : cpu_row_tasks(c->in[IN_LOGITS].rows);
}

static void router_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task,
                       void *scratch)
{
    (void)isa;
    if (phase == 1) {
        order_rows(c);
        return;
    }
    row_scratch s = scratch_of(scratch, c->in[IN_LOGITS].cols);
    int64_t end = cpu_row_task_end(task, c->in[IN_LOGITS].rows);
    for (int64_t t = task * CPU_ROWS_PER_TASK; t < end; t++) {
        if (backward)
            route_backward(c, t, &s);
        else
            route(c, t, &s);
    }
}

const cpu_op cpu_op_router = {
    .name = "router",
    .phases = router_phases,
    .tasks = router_tasks,
    .scratch = router_scratch,
    .run_scratch = router_run,
};
