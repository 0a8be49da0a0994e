/* SPDX-License-Identifier: Apache-2.0
 *
 * Router, dispatch, grouped linear, combine, slice and concat on the CPU.
 */
#include "side.h"

#include <math.h>

/* ---- router ---------------------------------------------------------------------------------- */

/* With gradients that BF16 can add to 0.5. */
static op_case routing_case(const mt_router_attr *a, int64_t t, int64_t experts, bool bias)
{
    op_case c = router_case(a, t, experts, bias);
    c.out[0].scale = 16;
    return c;
}

typedef struct ranked {
    double by;
    int64_t index;
} ranked;

static int by_rank(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->by != y->by)
        return x->by > y->by ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

enum { MAX_EXPERTS = 64 };

/* The definition, written out: p, then groups, then the best, then the weights. */
static void expected_row(const mt_router_attr *a, const double *logit, const double *bias,
                         int64_t experts, double *ret_weight, int64_t *ret_pick)
{
    double p[MAX_EXPERTS], sum = 0;
    ranked r[MAX_EXPERTS], group[MAX_EXPERTS];
    for (int64_t e = 0; e < experts; e++)
        sum += exp(logit[e]);
    for (int64_t e = 0; e < experts; e++) {
        p[e] = a->scoring == MT_ROUTER_SOFTMAX ? exp(logit[e]) / sum : 1 / (1 + exp(-logit[e]));
        r[e] = (ranked){ p[e] + (bias ? bias[e] : 0), e };
    }
    if (a->groups > 1) {
        int64_t size = experts / a->groups;
        for (int64_t g = 0; g < a->groups; g++) {
            ranked member[MAX_EXPERTS];
            memcpy(member, r + g * size, (size_t)size * sizeof *r);
            qsort(member, (size_t)size, sizeof *member, by_rank);
            group[g] = (ranked){ member[0].by, g };
            if (a->group_score == MT_GROUP_TOP2_SUM)
                group[g].by += member[1].by;
        }
        qsort(group, (size_t)a->groups, sizeof *group, by_rank);
        for (int64_t n = a->top_groups; n < a->groups; n++)
            for (int64_t i = 0; i < size; i++)
                r[group[n].index * size + i].by = -INFINITY;
    }
    qsort(r, (size_t)experts, sizeof *r, by_rank);
    sum = 0;
    for (int32_t j = 0; j < a->top_k; j++) {
        ret_pick[j] = r[j].index;
        sum += p[r[j].index];
    }
    for (int32_t j = 0; j < a->top_k; j++)
        ret_weight[j] = a->scale * p[ret_pick[j]] / (a->renormalise ? sum + 1e-20 : 1);
}

/* Slots and offsets follow from the picks: rows are ordered by expert, then by token. */
static void check_order(const op_case *c, const op_result *r)
{
    int64_t rows = 0, t = c->aux[0].rows, k = c->aux[0].cols, experts = c->in[0].cols;
    for (int64_t e = 0; e < experts; e++) {
        CHECK(r->out[2][e] == (double)rows, "expert %d starts at %g, not %d", (int)e, r->out[2][e],
              (int)rows);
        for (int64_t i = 0; i < t * k; i++)
            if (r->aux[0][i] == (double)e) {
                CHECK(r->out[1][i] == (double)rows, "pick %d is in row %g, not %d", (int)i,
                      r->out[1][i], (int)rows);
                rows++;
            }
    }
    CHECK(rows == t * k && r->out[2][experts] == (double)rows, "%d rows of %d", (int)rows,
          (int)(t * k));
}

static void check_router(const mt_router_attr *a, int64_t t, int64_t experts, bool bias)
{
    op_case c = routing_case(a, t, experts, bias);
    op_data d;
    op_result r;
    op_fill(&c, (uint32_t)(t + 3 * experts), &d);
    op_run(cpu_side("scalar", 1), &c, &d, &(op_how){ .dtype = MT_F64, .pad = 2 }, &r);
    for (int64_t i = 0; i < t; i++) {
        double weight[MAX_EXPERTS];
        int64_t pick[MAX_EXPERTS];
        expected_row(a, d.in[0] + i * experts, bias ? d.in[1] : NULL, experts, weight, pick);
        for (int32_t j = 0; j < a->top_k; j++) {
            CHECK(r.aux[0][i * a->top_k + j] == (double)pick[j], "token %d, pick %d: %g, not %d",
                  (int)i, j, r.aux[0][i * a->top_k + j], (int)pick[j]);
            CHECK(fabs(r.out[0][i * a->top_k + j] - weight[j]) < 1e-14 * a->scale,
                  "token %d, weight %d: %.17g, not %.17g", (int)i, j, r.out[0][i * a->top_k + j],
                  weight[j]);
        }
    }
    check_order(&c, &r);
    op_result_free(&r);
    op_data_free(&d);
    op_check_fast(&c, 5, 2e-6, 1e-2);
}

static void router(void)
{
    static const struct {
        int64_t experts;
        bool bias;
        mt_router_attr a;
    } kind[] = { { 8, false, { .top_k = 2, .renormalise = 1, .scale = 1 } },
                 { 60, false, { .top_k = 4, .scale = 1 } },
                 { 7, false, { .top_k = 7, .scale = 16 } },
                 { 1, false, { .top_k = 1, .scale = 1 } },
                 { 5, true, { .top_k = 1, .scoring = MT_ROUTER_SIGMOID, .scale = 2.5 } },
                 { 9, true, { 4, MT_ROUTER_SIGMOID, 1, 3, 2, MT_GROUP_TOP2_SUM, 2.5 } },
                 { 64, true, { 8, MT_ROUTER_SIGMOID, 1, 8, 4, MT_GROUP_TOP2_SUM, 2.5 } },
                 { 12, false, { 3, MT_ROUTER_SOFTMAX, 0, 4, 3, MT_GROUP_MAX, 16 } },
                 { 6, false, { 3, MT_ROUTER_SOFTMAX, 1, 2, 1, MT_GROUP_TOP2_SUM, 1 } } };
    for (size_t i = 0; i < sizeof kind / sizeof *kind; i++)
        for (int64_t t = 1; t < 140; t += 66)
            check_router(&kind[i].a, t, kind[i].experts, kind[i].bias);
}

static void router_gradients(void)
{
    mt_router_attr a[] = { { .top_k = 3, .scale = 1.5 },
                           { .top_k = 3, .renormalise = 1, .scale = 1.5 },
                           { .top_k = 3, .scoring = MT_ROUTER_SIGMOID, .scale = 1.5 },
                           { 3, MT_ROUTER_SIGMOID, 1, 2, 1, MT_GROUP_TOP2_SUM, 1.5 } };
    for (int i = 0; i < 4; i++) {
        op_case c = routing_case(&a[i], 5, 8, i == 3);
        op_check_gradients(&c, 3, 1e-7);
    }
}

/* Equal logits: the lower index wins, among groups as well. NaN: still different experts. */
static void router_ties(void)
{
    enum { E = 6, K = 3 };
    static const double logit[][E] = { { 1, 1, 1, 1, 1, 1 },
                                       { 0, 2, 2, 1, 2, 2 },
                                       { -800, -801, -800, -900, -800, -801 },
                                       { NAN, NAN, NAN, NAN, NAN, NAN },
                                       { 1, NAN, 3, 2, 1, 0 } };
    static const int pick[][3][K] = { { { 0, 1, 2 }, { 0, 1, 2 } },
                                      { { 1, 2, 4 }, { 1, 2, 0 } },
                                      { { 0, 2, 4 }, { 0, 2, 1 } } };
    for (int grouped = 0; grouped < 2; grouped++) {
        mt_router_attr a = { .top_k = K, .groups = grouped ? 2 : 0, .top_groups = 1, .scale = 1 };
        op_case c = routing_case(&a, 5, E, false);
        op_data d;
        op_result r;
        op_fill(&c, 1, &d);
        memcpy(d.in[0], logit, sizeof logit);
        op_run(cpu_side(NULL, 1), &c, &d, &(op_how){ .dtype = MT_F32, .forward_only = true }, &r);
        for (int t = 0; t < 3; t++)
            for (int j = 0; j < K; j++)
                CHECK(r.aux[0][t * K + j] == pick[t][grouped][j], "token %d, pick %d: %g", t, j,
                      r.aux[0][t * K + j]);
        for (int t = 3; t < 5; t++)
            for (int j = 0; j < K; j++) {
                double e = r.aux[0][t * K + j];
                CHECK(e >= 0 && e < E && e != r.aux[0][t * K + (j + 1) % K], "token %d: %g", t, e);
            }
        check_order(&c, &r);
        op_result_free(&r);
        op_data_free(&d);
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A permutation of n rows. */
static void permute(int32_t *ret, int32_t n, uint32_t seed)
{
    for (int32_t i = 0; i < n; i++)
        ret[i] = i;
    for (int32_t i = n - 1; i > 0; i--) {
        seed = seed * 1664525u + 1013904223u;
        int32_t k = (int32_t)(seed >> 8) % (i + 1), keep = ret[i];
        ret[i] = ret[k];
        ret[k] = keep;
    }
}

enum { MAX_ROWS = 2000 };

static void check_dispatch(int64_t t, int64_t k, int64_t cols)
{
    int32_t slots[MAX_ROWS];
    permute(slots, (int32_t)(t * k), (uint32_t)cols);
    op_case c = dispatch_case(t, k, cols, slots);
    op_data d;
    op_result r;
    op_fill(&c, 1, &d);
    op_run(cpu_side(NULL, 1), &c, &d, &(op_how){ .dtype = MT_BF16 }, &r);
    for (int64_t i = 0; i < t * k; i++)
        for (int64_t n = 0; n < cols; n++)
            CHECK(r.out[0][slots[i] * cols + n] == d.in[0][i / k * cols + n], "row %d", (int)i);
    op_result_free(&r);
    op_data_free(&d);
    op_check_fast(&c, 2, 1e-6, 5e-3);
    op_check_gradients(&c, 3, 1e-8);
}

static void check_combine(int64_t t, int64_t k, int64_t cols)
{
    int32_t slots[MAX_ROWS];
    permute(slots, (int32_t)(t * k), (uint32_t)cols);
    op_case c = combine_case(t, k, cols, slots);
    op_data d;
    op_result r;
    op_fill(&c, 1, &d);
    op_run(cpu_side("scalar", 1), &c, &d, &(op_how){ .dtype = MT_F64 }, &r);
    for (int64_t i = 0; i < t * cols; i++) {
        double want = 0;
        for (int64_t j = i / cols * k; j < (i / cols + 1) * k; j++)
            want += d.in[1][j] * d.in[0][slots[j] * cols + i % cols];
        CHECK(fabs(r.out[0][i] - want) < 1e-13, "element %d: %g, not %g", (int)i, r.out[0][i],
              want);
    }
    op_result_free(&r);
    op_data_free(&d);
    op_check_fast(&c, 2, 1e-6, 5e-3);
    op_check_gradients(&c, 3, 1e-8);
}

static void dispatch_and_combine(void)
{
    static const int64_t t[] = { 1, 3, 67, 130 }, k[] = { 1, 3, 8, 2 }, cols[] = { 1, 7, 130, 300 };
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            check_dispatch(t[i], k[j], cols[(i + j) % 4]);
            check_combine(t[i], k[j], cols[(i + j) % 4]);
        }
}

/* ---- grouped linear -------------------------------------------------------------------------- */

static void check_grouped(const int32_t *offsets, int64_t experts, int64_t n, int64_t out,
                          bool bias)
{
    int64_t rows = offsets[experts];
    op_case c = grouped_case(offsets, experts, out, n, bias);
    op_data d;
    op_result r;
    op_fill(&c, 1, &d);
    op_run(cpu_side("scalar", 1), &c, &d, &(op_how){ .dtype = MT_F64 }, &r);
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t i = offsets[e] * out; i < offsets[e + 1] * out; i++) {
            int64_t column = e * out + i % out;
            double want = bias ? d.in[3][column] : 0;
            for (int64_t p = 0; p < n; p++)
                want += d.in[0][i / out * n + p] * d.in[1][column * n + p];
            CHECK(fabs(r.out[0][i] - want) < 1e-12 * (double)n, "%d: %g, not %g", (int)i,
                  r.out[0][i], want);
        }
        for (int64_t i = e * out * n; offsets[e] == offsets[e + 1] && i < (e + 1) * out * n; i++)
            CHECK(r.d_in[1][i] == 0 && (!bias || r.d_in[3][i / n] == 0),
                  "expert %d has no rows and a gradient", (int)e);
    }
    op_result_free(&r);
    op_data_free(&d);
    op_check_fast(&c, 2, 1e-5, 1e-2);
    if (rows < 40)
        op_check_gradients(&c, 3, 1e-8);
}

static void grouped_linear(void)
{
    check_grouped((const int32_t[]){ 0, 1 }, 1, 3, 5, true);
    check_grouped((const int32_t[]){ 0, 0, 0, 7, 7, 19, 20, 20 }, 7, 10, 6, true);
    check_grouped((const int32_t[]){ 0, 30, 31 }, 2, 33, 70, false);
    /* more than one tile and one panel in each direction */
    check_grouped((const int32_t[]){ 0, 0, 301, 302, 430 }, 4, 530, 150, true);
}

/* ---- balance --------------------------------------------------------------------------------- */

/* Adds tokens [first, end) to rows of each expert and sums of p of each. */
static void add_scores(const double *logits, const int32_t *pick, int64_t first, int64_t end,
                       int64_t experts, int64_t k, double *rows, double *scores)
{
    for (int64_t t = first; t < end; t++) {
        double sum = 0;
        for (int64_t j = 0; j < k; j++)
            rows[pick[t * k + j]] += 1;
        for (int64_t e = 0; e < experts; e++)
            sum += exp(logits[t * experts + e]);
        for (int64_t e = 0; e < experts; e++)
            scores[e] += exp(logits[t * experts + e]) / sum;
    }
}

static double switch_loss(const double *rows, const double *scores, double tokens, int64_t experts)
{
    double loss = 0;
    for (int64_t e = 0; e < experts && tokens > 0; e++)
        loss += (double)experts * (rows[e] / tokens) * (scores[e] / tokens);
    return loss;
}

static int64_t targets_in(const mt_batch *b, int64_t first, int64_t end)
{
    int64_t n = 0;
    for (int64_t t = first; t < end; t++)
        n += b->targets[t] >= 0;
    return n;
}

/* All modes by their definitions, from the picks; `tally` is what other layers have left. */
static double expected_loss(const mt_balance_attr *a, const double *logits, const int32_t *pick,
                            const mt_batch *b, int64_t experts, int64_t k, const double *tally)
{
    double total = 0, rows[MAX_EXPERTS] = { 0 }, scores[MAX_EXPERTS] = { 0 };
    if (a->mode != MT_BALANCE_DEEPSEEK_SEQ) {
        bool layers = a->mode == MT_BALANCE_HF_ALL_LAYERS;
        double tokens = layers ? tally[2 * experts] : 0;
        for (int64_t e = 0; e < experts && layers; e++) {
            rows[e] = tally[e];
            scores[e] = tally[experts + e];
        }
        total = -switch_loss(rows, scores, tokens, experts);
        add_scores(logits, pick, 0, b->tokens, experts, k, rows, scores);
        total += switch_loss(rows, scores, tokens + (double)b->tokens, experts);
        return a->coef * (double)targets_in(b, 0, b->tokens) * total;
    }
    for (int64_t d = 0; d < b->documents; d++) {
        int64_t first = b->doc_starts[d], end = b->doc_starts[d + 1];
        memset(rows, 0, sizeof rows);
        memset(scores, 0, sizeof scores);
        add_scores(logits, pick, first, end, experts, k, rows, scores);
        double loss = switch_loss(rows, scores, (double)(end - first), experts);
        total += (double)targets_in(b, first, end) * loss;
    }
    return a->coef * total / (double)k;
}

static void check_balance(mt_balance_mode mode, const double *tally)
{
    enum { T = 150, E = 6, K = 2 };
    static const int32_t doc_starts[] = { 0, 1, 70, 71, T };
    int32_t targets[T], pick[T * K], slots[T * K], offsets[E + 1] = { 0 };
    for (int t = 0; t < T; t++) {
        targets[t] = t % 7 == 3 ? -100 : t;
        pick[t * K] = t % 3;
        pick[t * K + 1] = 3 + (t * t + t / 5) % 2; /* nobody needs expert 5 */
    }
    for (int32_t e = 0, row = 0; e < E; e++) {
        for (int i = 0; i < T * K; i++)
            if (pick[i] == e)
                slots[i] = row++;
        offsets[e + 1] = row;
    }
    mt_balance_attr a = { mode, 0, 0.3 };
    op_case c = balance_case(&a, doc_starts, 4, E, K, slots, offsets, targets, tally);
    op_data d;
    op_result r;
    op_fill(&c, 1, &d);
    op_run(cpu_side("scalar", 1), &c, &d, &(op_how){ .dtype = MT_F64 }, &r);
    double want = expected_loss(&a, d.in[0], pick, &c.batch, E, K, tally);
    CHECK(fabs(r.out[0][0] - want) < 1e-12 * fabs(want), "mode %d: %.17g, not %.17g", mode,
          r.out[0][0], want);
    for (int e = 0; c.n_tally && e < E; e++)
        CHECK(r.tally[e] == tally[e] + offsets[e + 1] - offsets[e], "rows of expert %d: %g", e,
              r.tally[e]);
    CHECK(!c.n_tally || r.tally[2 * E] == tally[2 * E] + T, "%g tokens", r.tally[2 * E]);
    op_result_free(&r);
    op_data_free(&d);
    op_check_fast(&c, 2, 2e-6, 1e-2);
    op_check_gradients(&c, 3, 1e-7);
}

static void balance(void)
{
    /* Before the first layer with experts, and after two layers of 150 tokens. */
    static const double none[13] = { 0 },
                        some[13] = { 10, 250, 0, 40, 100, 200, 60, 20, 110, 30, 45, 35, 300 };
    check_balance(MT_BALANCE_HF_PER_LAYER, NULL);
    check_balance(MT_BALANCE_DEEPSEEK_SEQ, NULL);
    check_balance(MT_BALANCE_HF_ALL_LAYERS, none);
    check_balance(MT_BALANCE_HF_ALL_LAYERS, some);
}

/* ---- columns --------------------------------------------------------------------------------- */

static void slice(void)
{
    static const struct {
        int64_t t, cols;
        mt_slice_attr a;
    } kind[] = { { 1, 1, { 1, 0, 0, 1 } },
                 { 67, 24, { 3, 0, 5, 3 } },
                 { 3, 300, { 2, 0, 0, 140 } },
                 { 130, 19, { 1, 0, 6, 13 } } };
    for (int i = 0; i < 4; i++) {
        const mt_slice_attr *a = &kind[i].a;
        int64_t width = kind[i].cols / a->heads, t = kind[i].t;
        op_case c = slice_case(a, t, kind[i].cols);
        op_data d;
        op_result r;
        op_fill(&c, 1, &d);
        op_run(cpu_side(NULL, 1), &c, &d, &(op_how){ .dtype = MT_BF16 }, &r);
        for (int64_t k = 0; k < t * c.out[0].cols; k++) {
            int64_t row = k / c.out[0].cols, col = k % c.out[0].cols;
            int64_t from = col / a->cols * width + a->first + col % a->cols;
            CHECK(r.out[0][k] == d.in[0][row * kind[i].cols + from], "element %d", (int)k);
        }
        op_result_free(&r);
        op_data_free(&d);
        op_check_fast(&c, 2, 1e-6, 5e-3);
        op_check_gradients(&c, 3, 1e-8);
    }
}

static void concat(void)
{
    static const mt_concat_attr kind[] = { { .heads = 1, .cols = { 3, 130 } },
                                           { .heads = 3, .cols = { 4, 2, 1 }, .shared = 2 },
                                           { .heads = 16, .cols = { 3 }, .shared = 1 } };
    for (int i = 0; i < 3; i++) {
        const mt_concat_attr *a = &kind[i];
        for (int64_t t = 1; t < 100; t += 66) {
            op_case c = concat_case(a, t);
            op_data d;
            op_result r;
            op_fill(&c, 1, &d);
            op_run(cpu_side(NULL, 1), &c, &d, &(op_how){ .dtype = MT_BF16 }, &r);
            for (int64_t row = 0, n = 0; row < t; row++)
                for (int32_t h = 0; h < a->heads; h++)
                    for (int k = 0; k < 3; k++)
                        for (int32_t j = 0; j < a->cols[k]; j++, n++) {
                            int64_t at = a->shared >> k & 1u ? j : h * a->cols[k] + j;
                            CHECK(r.out[0][n] == d.in[k][row * c.in[k].cols + at], "element %d",
                                  (int)n);
                        }
            op_result_free(&r);
            op_data_free(&d);
            op_check_fast(&c, 2, 1e-6, 5e-3);
            op_check_gradients(&c, 3, 1e-8);
        }
    }
}

int main(void)
{
    RUN(router);
    RUN(router_gradients);
    RUN(router_ties);
    RUN(dispatch_and_combine);
    RUN(grouped_linear);
    RUN(balance);
    RUN(slice);
    RUN(concat);
    cpu_sides_close();
    return check_done();
}
