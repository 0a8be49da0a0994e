/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations of a gated delta net on the CPU: against the recurrence and the sums written out,
 * finite differences, every instruction set against double, and generation against a whole forward
 * pass.
 */
#include "side.h"

#include <math.h>

/* Chunks of 64 tokens: documents shorter, as long, longer, and ending inside one. */
static const int32_t docs_20[] = { 0, 1, 9, 20 };
static const int32_t docs_210[] = { 0, 64, 67, 210 };
static const int32_t docs_70[] = { 0, 3, 70 };
static const int32_t docs_40[] = { 0, 40 };

/* ---- against the formulas -------------------------------------------------------------------- */

static void check_conv(const op_case *c)
{
    int64_t t = c->batch.tokens, cols = c->in[0].cols, width = c->in[1].cols;
    op_data d;
    op_result r;
    op_fill(c, 20, &d);
    op_run(cpu_side(NULL, 1), c, &d, &(op_how){ .dtype = MT_F64, .pad = 1, .forward_only = true },
           &r);
    double *want = calloc((size_t)(t * cols), sizeof *want);
    for (int64_t doc = 0; doc < c->batch.documents; doc++)
        for (int64_t i = c->batch.doc_starts[doc]; i < c->batch.doc_starts[doc + 1]; i++)
            for (int64_t j = 0; j < width; j++)
                for (int64_t k = 0; k < cols && i - width + 1 + j >= c->batch.doc_starts[doc]; k++)
                    want[i * cols + k] +=
                        d.in[1][k * width + j] * d.in[0][(i - width + 1 + j) * cols + k];
    double e = op_error(r.out[0], want, t * cols);
    CHECK(e < 1e-14, "off by %g", e);
    free(want);
    op_result_free(&r);
    op_data_free(&d);
}

static void unit(const double *x, int64_t n, double eps, double scale, double *ret)
{
    double sum = eps;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int64_t i = 0; i < n; i++)
        ret[i] = x[i] / sqrt(sum) * scale;
}

/* One token: state [k_dim, v_dim], q and k normalised, v; the result to o. */
static void recur(const mt_delta_attr *a, double *state, const double *q, const double *k,
                  const double *v, double g, double beta, double *o)
{
    for (int64_t i = 0; i < a->k_dim * a->v_dim; i++)
        state[i] *= exp(g);
    for (int64_t j = 0; j < a->v_dim; j++) {
        double seen = 0, sum = 0;
        for (int64_t i = 0; i < a->k_dim; i++)
            seen += state[i * a->v_dim + j] * k[i];
        for (int64_t i = 0; i < a->k_dim; i++) {
            state[i * a->v_dim + j] += k[i] * beta * (v[j] - seen);
            sum += state[i * a->v_dim + j] * q[i];
        }
        o[j] = sum;
    }
}

static void check_recurrence(const op_case *c)
{
    const mt_delta_attr *a = c->attr;
    int64_t cols = c->out[0].cols, keys = c->in[0].cols;
    op_data d;
    op_result r;
    op_fill(c, 21, &d);
    op_run(cpu_side(NULL, 2), c, &d, &(op_how){ .dtype = MT_F64, .pad = 2, .forward_only = true },
           &r);
    double *want = calloc((size_t)(c->batch.tokens * cols), sizeof *want);
    for (int64_t h = 0; h < a->v_heads; h++)
        for (int64_t doc = 0; doc < c->batch.documents; doc++) {
            double state[256] = { 0 }, q[16], k[16];
            for (int64_t t = c->batch.doc_starts[doc]; t < c->batch.doc_starts[doc + 1]; t++) {
                int64_t at = t * keys + h / (a->v_heads / a->k_heads) * a->k_dim;
                int64_t out = t * cols + h * a->v_dim, gate = t * a->v_heads + h;
                unit(d.in[0] + at, a->k_dim, a->eps, a->scale, q);
                unit(d.in[1] + at, a->k_dim, a->eps, 1, k);
                recur(a, state, q, k, d.in[2] + out, d.in[3][gate], d.in[4][gate], want + out);
            }
        }
    double e = op_error(r.out[0], want, c->batch.tokens * cols);
    CHECK(e < 1e-12, "off by %g", e);
    free(want);
    op_result_free(&r);
    op_data_free(&d);
}

static void convolution(void)
{
    for (int64_t width = 1; width < 6; width += 3) {
        op_case c = conv_case(docs_20, 3, 131, width);
        check_conv(&c);
        op_check_gradients(&c, 22, 1e-6);
        op_check_fast(&c, 23, 1e-6, 1e-2);
    }
    op_case long_case = conv_case(docs_210, 3, 5, 4);
    check_conv(&long_case);
    op_check_gradients(&long_case, 24, 1e-6);
    op_check_fast(&long_case, 25, 1e-6, 1e-2);
}

static void decay(void)
{
    op_case c = decay_case(210, 5, false);
    op_data d;
    op_result r;
    op_fill(&c, 26, &d);
    d.in[0][7] = 80; /* e^80 of a token would be too large, its logarithm is not */
    op_run(cpu_side(NULL, 1), &c, &d, &(op_how){ .dtype = MT_F64, .forward_only = true }, &r);
    for (int64_t i = 0; i < 210 * 5; i++) {
        double want = -exp(d.in[1][i % 5]) * log(1 + exp(d.in[0][i] + d.in[2][i % 5]));
        CHECK(fabs(r.out[0][i] - want) <= 1e-13 * fabs(want) + 1e-15, "%d: %.17g, expected %.17g",
              (int)i, r.out[0][i], want);
    }
    op_result_free(&r);
    op_data_free(&d);
    op_check_gradients(&c, 27, 1e-6);
    op_check_fast(&c, 28, 1e-6, 1e-2);
    c = decay_case(210, 5, true);
    op_check_fast(&c, 28, 1e-6, 1e-2);
}

static const mt_delta_attr square = { 2, 2, 8, 8, 1e-6, 0.35 };
static const mt_delta_attr grouped = { 2, 6, 7, 5, 1e-3, 0.4 };

static void delta_rule(void)
{
    static const mt_delta_attr *const attr[] = { &square, &grouped };
    for (int i = 0; i < 2; i++) {
        op_case c = delta_case(docs_20, 3, attr[i]);
        check_recurrence(&c);
        op_check_gradients(&c, 29, 1e-6);
        op_check_fast(&c, 30, 1e-5, 2e-2);
        c = delta_case(docs_210, 3, attr[i]);
        check_recurrence(&c);
        op_check_gradients(&c, 31, 1e-6);
        op_check_fast(&c, 32, 1e-5, 2e-2);
    }
}

/* The heads of published models, and decays so strong that e^-c of a chunk would overflow. */
static void strong_decay(void)
{
    const mt_delta_attr attr = { 1, 2, 128, 128, 1e-6, 0.088 };
    op_case c = delta_case(docs_70, 2, &attr);
    c.in[3].middle = -6;
    c.in[3].scale = 5.5;
    c.out[0].scale = 32;               /* gradients that BF16 can add to 0.5 */
    op_check_fast(&c, 33, 1e-4, 2e-2); /* the gradient of g is a small difference here */
}

/* ---- generation ------------------------------------------------------------------------------ */

static void check_generation(const op_case *whole, op_value state, mt_dtype dtype, int32_t prefill,
                             double tolerance)
{
    const side *s = cpu_side(NULL, 2);
    op_check_generation(whole, &(op_generation){ .side = s,
                                                 .reference = s,
                                                 .dtype = dtype,
                                                 .reference_dtype = dtype,
                                                 .state = { state },
                                                 .prefill = prefill,
                                                 .decode = 3,
                                                 .tolerance = tolerance });
}

static void generation(void)
{
    for (int32_t prefill = 1; prefill < 24; prefill += 11) {
        op_case conv = conv_case(docs_40, 1, 9, 4), delta = delta_case(docs_40, 1, &grouped);
        check_generation(&conv, conv_state(&conv), MT_F32, prefill, 0);
        check_generation(&conv, conv_state(&conv), MT_BF16, prefill, 0);
        check_generation(&delta, delta_state(&grouped), MT_F64, prefill, 1e-12);
        check_generation(&delta, delta_state(&grouped), MT_F32, prefill, 1e-5);
        check_generation(&delta, delta_state(&grouped), MT_BF16, prefill, 1e-2);
    }
}

int main(void)
{
    RUN(convolution);
    RUN(decay);
    RUN(delta_rule);
    RUN(strong_decay);
    RUN(generation);
    cpu_sides_close();
    return check_done();
}
