/* SPDX-License-Identifier: Apache-2.0
 *
 * BF16 attention of packed documents, on the own kernels, through cuDNN, and through cuDNN with
 * sums in any order, all against the CPU: documents of very uneven lengths, every mask, grouped
 * heads, head dimensions. Prints a table: whether cuDNN had plans, the largest error of each
 * result, and whether a second run gave the same bits where it must. What cuDNN refuses, and why,
 * is in the log above it.
 *
 *     MT_TEST_ONLY=name     one case
 *     MT_TEST_NO_CUDNN=1    a machine without cuDNN: that it has no plans is no failure
 */
#include "side.h"

#include <math.h>
#include <time.h>

static side own, dnn, any_order;

static const double bound = 1e-2, document_bound = 2e-2;
enum { MANY_TOKENS = 100, RESULTS = 6, MAX_DOCUMENTS = 16 };

typedef struct attention_test {
    mt_attn_attr attr;
    bool sinks;
    int64_t pad;                      /* elements between rows */
    int32_t documents[MAX_DOCUMENTS]; /* lengths, then 0 */
    bool own_backward;                /* cuDNN is not to run it */
} attention_test;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* out, LSE, dQ, dK, dV, d sinks; NULL where there is none. */
static const double *result(const op_result *r, int i)
{
    return i == 0 ? r->out[0] : i == 1 ? r->aux[0] : r->d_in[i - 2];
}

static int64_t columns(const op_case *c, int i)
{
    return i == 0 ? c->out[0].cols : i == 1 ? c->aux[0].cols : c->in[i - 2].cols;
}

/* The largest error over results, and over those of single documents. */
static void compare(const char *name, const char *form, const op_case *c, const op_result *got,
                    const op_result *want)
{
    static const char *const names[RESULTS] = { "out", "lse", "dq", "dk", "dv", "dsinks" };
    bool bad = false;
    char text[256];
    int at = 0;
    for (int i = 0; i < RESULTS; i++) {
        const double *a = result(got, i), *b = result(want, i);
        if (!b)
            continue;
        int64_t cols = columns(c, i), rows = i == 5 ? 1 : c->batch.tokens;
        double whole = a ? op_error(a, b, rows * cols) : INFINITY, worst = 0;
        int64_t where = -1;
        for (int64_t k = 0; i != 5 && a && k < c->batch.documents; k++) {
            int64_t from = c->batch.doc_starts[k], n = c->batch.doc_starts[k + 1] - from;
            double e = op_error(a + from * cols, b + from * cols, n * cols);
            if ((n >= MANY_TOKENS || !isfinite(e)) && e > worst) {
                worst = e;
                where = k;
            }
        }
        bool failed = !(whole <= bound) || !(worst <= document_bound);
        bad = bad || failed;
        at += snprintf(text + at, sizeof text - (size_t)at, "  %s %.1e", names[i], whole);
        if (failed)
            printf("  FAILED %s, %s: %s is off by %g (at most %g), document %d by %g (at most "
                   "%g)\n",
                   name, form, names[i], whole, bound, (int)where, worst, document_bound);
    }
    printf("%-22s %-6s%s%s\n", name, form, text, bad ? "  FAILED" : "");
    fflush(stdout);
    CHECK(!bad, "%s, %s", name, form);
}

static void check_same(const char *name, const op_case *c, const op_result *a, const op_result *b)
{
    for (int i = 0; i < RESULTS; i++) {
        const double *x = result(a, i), *y = result(b, i);
        int64_t n = (i == 5 ? 1 : c->batch.tokens) * columns(c, i), differ = 0;
        for (int64_t k = 0; x && y && k < n; k++)
            differ += memcmp(&x[k], &y[k], sizeof *x) != 0;
        if (differ)
            printf("  FAILED %s: result %d changes from run to run in %lld of %lld numbers\n", name,
                   i, (long long)differ, (long long)n);
        CHECK(differ == 0, "%s: result %d changes from run to run", name, i);
    }
}

static void check(const char *name, const attention_test *t)
{
    int32_t starts[MAX_DOCUMENTS + 1] = { 0 };
    int64_t n = 0;
    for (; n < MAX_DOCUMENTS && t->documents[n]; n++)
        starts[n + 1] = starts[n] + t->documents[n];
    op_case c = attention_case(starts, n, &t->attr, t->sinks);
    op_data d;
    op_result want, by_own, by_dnn, again, by_any;
    op_how how = { .dtype = MT_BF16, .pad = t->pad };
    op_fill(&c, 11, &d);
    op_run(&cpu, &c, &d, &how, &want);
    op_run(&own, &c, &d, &how, &by_own);
    compare(name, "own", &c, &by_own, &want);
    double from = seconds();
    op_run(&dnn, &c, &d, &how, &by_dnn);
    from = seconds() - from;
    op_run(&dnn, &c, &d, &how, &again);
    bool forward = by_dnn.work_bytes[0] > by_own.work_bytes[0];
    bool backward = by_dnn.work_bytes[1] > by_own.work_bytes[1];
    compare(name, "cuDNN", &c, &by_dnn, &want);
    printf("%-22s        plans: %s forward, %s backward; %.1f s with building them\n", name,
           forward ? "yes" : "NO", backward ? "yes" : "NO", from);
    check_same(name, &c, &again, &by_dnn);
    op_run(&any_order, &c, &d, &how, &by_any);
    compare(name, "any", &c, &by_any, &want);
    if (!getenv("MT_TEST_NO_CUDNN")) {
        CHECK(forward, "%s: no plan for forward", name);
        CHECK(backward || t->own_backward, "%s: no plan for backward", name);
        CHECK(by_any.work_bytes[1] > by_own.work_bytes[1] || t->own_backward,
              "%s: no plan for backward in any order", name);
    }
    op_result_free(&want);
    op_result_free(&by_own);
    op_result_free(&by_dnn);
    op_result_free(&again);
    op_result_free(&by_any);
    op_data_free(&d);
}

#define UNEVEN 1, 2, 127, 128, 129, 1000
#define SHORT  300, 1, 2, 127, 128, 129
#define CASE(id, ...)                                                                              \
    static void id(void)                                                                           \
    {                                                                                              \
        check(#id, &(const attention_test){ __VA_ARGS__ });                                        \
    }

CASE(uneven, .attr = { 8, 2, 128, 128, 0.088, 0, 0 }, .documents = { UNEVEN })
CASE(one_whole_rung, .attr = { 8, 2, 128, 128, 0.088, 0, 0 }, .documents = { 512, 512 })
CASE(rows_apart, .attr = { 8, 2, 128, 128, 0.088, 0, 0 }, .pad = 8, .documents = { SHORT })
CASE(no_groups, .attr = { 4, 4, 128, 128, 0.088, 0, 0 }, .documents = { SHORT })
CASE(one_key_head, .attr = { 7, 1, 128, 128, 0.088, 0, 0 }, .documents = { SHORT })
CASE(window, .attr = { 8, 2, 128, 128, 0.088, 0, 77 }, .documents = { SHORT })
CASE(softcap, .attr = { 8, 2, 128, 128, 0.088, 20, 0 }, .documents = { SHORT })
CASE(sinks, .attr = { 8, 2, 128, 128, 0.088, 0, 77 }, .sinks = true, .documents = { SHORT })
CASE(everything, .attr = { 8, 2, 64, 64, 0.125, 20, 77 }, .sinks = true, .documents = { SHORT })
CASE(dim_64, .attr = { 8, 2, 64, 64, 0.125, 0, 0 }, .documents = { SHORT })
CASE(dim_96, .attr = { 8, 2, 96, 96, 0.102, 0, 0 }, .documents = { SHORT })
CASE(dim_256, .attr = { 8, 2, 256, 256, 0.0625, 0, 0 }, .own_backward = true,
     .documents = { SHORT })
CASE(dims_192_128, .attr = { 4, 4, 192, 128, 0.072, 0, 0 }, .documents = { SHORT })
CASE(large_scores, .attr = { 8, 2, 128, 128, 1.0, 0, 0 }, .documents = { SHORT })
/* Scores of one document do not fit the budget with all heads: backward goes by key heads. */
CASE(slices, .attr = { 40, 2, 16, 16, 0.25, 0, 0 }, .documents = { 2100, 3, 300 })

int main(void)
{
    double from = seconds();
    setenv("MEGATRAIN_CUDNN", "0", 1);
    sides_open();
    own = cuda;
    side_open_with("MEGATRAIN_CUDNN", "1", &dnn);
    side_open_with("MEGATRAIN_CUDNN", "1", &any_order);
    any_order.b->set_deterministic(any_order.device, false);
    RUN(uneven);
    RUN(one_whole_rung);
    RUN(rows_apart);
    RUN(no_groups);
    RUN(one_key_head);
    RUN(window);
    RUN(softcap);
    RUN(sinks);
    RUN(everything);
    RUN(dim_64);
    RUN(dim_96);
    RUN(dim_256);
    RUN(dims_192_128);
    RUN(large_scores);
    RUN(slices);
    printf("%.1f s\n", seconds() - from);
    side_close(&any_order);
    side_close(&dnn);
    sides_close();
    return check_done();
}
