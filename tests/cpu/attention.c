/* SPDX-License-Identifier: Apache-2.0
 *
 * attention on the CPU: every mask and option, plain C against the formula written out and finite
 * differences, fast against plain C, and generation against a whole forward pass.
 */
#include "side.h"

#include <math.h>

static const int32_t docs_37[] = { 0, 1, 6, 37 };
static const int32_t docs_300[] = { 0, 7, 150, 151, 300 };

static const int32_t one_37[] = { 0, 37 }, one_1[] = { 0, 1 };

/* softmax(mask(softcap(scale q k^T)))v, all pairs of a head at a time, every condition spelt out.
 */
static void check_formula(const op_case *c)
{
    const mt_attn_attr *a = c->attr;
    int64_t t = c->batch.tokens;
    op_data d;
    op_result r;
    op_fill(c, 10, &d);
    op_run(cpu_side("scalar", 1), c, &d, &(op_how){ .dtype = MT_F64, .forward_only = true }, &r);
    double *want = calloc((size_t)(t * c->out[0].cols), sizeof *want);
    double *lse = calloc((size_t)(t * a->heads), sizeof *lse);
    for (int64_t h = 0; h < a->heads; h++) {
        int64_t kv = h / (a->heads / a->kv_heads);
        for (int64_t i = 0; i < t; i++) {
            double total = c->in[3].cols ? exp(d.in[3][h]) : 0;
            double *o = want + i * c->out[0].cols + h * a->v_dim;
            for (int64_t j = 0; j < t; j++) {
                bool same_document = true;
                for (int64_t n = 1; n < c->batch.documents; n++)
                    if ((i < c->batch.doc_starts[n]) != (j < c->batch.doc_starts[n]))
                        same_document = false;
                if (j > i || !same_document || (a->window > 0 && !(j > i - a->window)))
                    continue;
                double s = 0;
                for (int64_t k = 0; k < a->qk_dim; k++)
                    s += d.in[0][i * c->in[0].cols + h * a->qk_dim + k] *
                         d.in[1][j * c->in[1].cols + kv * a->qk_dim + k];
                s *= a->scale;
                if (a->softcap > 0)
                    s = a->softcap * tanh(s / a->softcap);
                total += exp(s);
                for (int64_t k = 0; k < a->v_dim; k++)
                    o[k] += exp(s) * d.in[2][j * c->in[2].cols + kv * a->v_dim + k];
            }
            for (int64_t k = 0; k < a->v_dim; k++)
                o[k] /= total;
            lse[i * a->heads + h] = log(total);
        }
    }
    double e = op_error(r.out[0], want, t * c->out[0].cols);
    CHECK(e < 1e-12, "output is off by %g", e);
    e = op_error(r.aux[0], lse, t * a->heads);
    CHECK(e < 1e-12, "log of the sum is off by %g", e);
    free(want);
    free(lse);
    op_result_free(&r);
    op_data_free(&d);
}

static void check_small(const mt_attn_attr *attr, bool sinks)
{
    op_case c = attention_case(docs_37, 3, attr, sinks);
    check_formula(&c);
    op_check_gradients(&c, 11, 1e-6);
    op_check_fast(&c, 12, 1e-5, 2e-2);
}

static void plain(void)
{
    check_small(&(mt_attn_attr){ 3, 1, 10, 10, 0.3, 0, 0 }, false);
}

static void window(void)
{
    check_small(&(mt_attn_attr){ 3, 1, 10, 10, 0.3, 0, 4 }, false);
}

static void softcap(void)
{
    check_small(&(mt_attn_attr){ 3, 3, 10, 10, 0.5, 2.0, 0 }, false);
}

static void sinks(void)
{
    check_small(&(mt_attn_attr){ 4, 2, 10, 10, 0.3, 0, 4 }, true);
}

static void everything(void)
{
    check_small(&(mt_attn_attr){ 3, 1, 10, 6, 0.3, 3.0, 4 }, true);
}

static void one_token(void)
{
    const mt_attn_attr attr = { 3, 1, 10, 6, 0.3, 3.0, 4 };
    op_case c = attention_case(one_1, 1, &attr, true);
    op_check_fast(&c, 12, 1e-5, 2e-2);
}

/* More than one block of queries and of keys, windows that start and end inside blocks. */
static void blocks(void)
{
    static const int32_t one_300[] = { 0, 300 };
    static const mt_attn_attr attr[] = { { 2, 1, 17, 9, 0.3, 0, 0 }, { 2, 1, 17, 9, 0.3, 4, 100 } };
    op_case c = attention_case(one_300, 1, &attr[0], true);
    op_check_fast(&c, 13, 1e-5, 2e-2);
    c = attention_case(docs_300, 4, &attr[1], true);
    op_check_fast(&c, 14, 1e-5, 2e-2);
}

/* Heads of DeepSeek's latent attention: 128 + 64 columns of q and k, 128 of v. */
static void latent_heads(void)
{
    const mt_attn_attr attr = { 2, 2, 192, 128, 0.072, 0, 0 };
    op_case c = attention_case(docs_37, 3, &attr, false);
    op_check_gradients(&c, 16, 1e-6);
    op_check_fast(&c, 17, 1e-5, 2e-2);
}

/* Scores far apart: the running maximum has to keep e^s finite. */
static void large_scores(void)
{
    const mt_attn_attr attr = { 2, 1, 16, 8, 30.0, 0, 0 };
    op_case c = attention_case(one_37, 1, &attr, false);
    op_data d;
    op_result a, b;
    op_fill(&c, 15, &d);
    op_run(cpu_side(NULL, 2), &c, &d, &(op_how){ .dtype = MT_F32 }, &a);
    op_run(cpu_side("scalar", 1), &c, &d, &(op_how){ .dtype = MT_F64 }, &b);
    CHECK(op_error(a.out[0], b.out[0], 37 * 16) < 1e-4, "%g",
          op_error(a.out[0], b.out[0], 37 * 16));
    op_result_free(&a);
    op_result_free(&b);
    op_data_free(&d);
}

static void generate(const mt_attn_attr *attr, mt_dtype dtype, const char *isa, double tolerance)
{
    op_case whole = attention_case(one_37, 1, attr, true);
    const side *s = cpu_side(isa, 2);
    op_check_generation(&whole, &(op_generation){ .side = s,
                                                  .reference = s,
                                                  .dtype = dtype,
                                                  .reference_dtype = dtype,
                                                  .state = { attention_state(attr, 0, 40),
                                                             attention_state(attr, 1, 40) },
                                                  .prefill = 20,
                                                  .decode = 3,
                                                  .tolerance = tolerance });
}

static void generation(void)
{
    static const mt_attn_attr attr[] = { { 4, 2, 10, 6, 0.3, 0, 0 }, { 4, 2, 10, 6, 0.3, 2, 5 } };
    for (int i = 0; i < 2; i++) {
        generate(&attr[i], MT_F32, NULL, 1e-5);
        generate(&attr[i], MT_BF16, NULL, 1e-2);
        generate(&attr[i], MT_F32, "scalar", 1e-5);
        generate(&attr[i], MT_F64, "scalar", 1e-12);
    }
}

int main(void)
{
    RUN(plain);
    RUN(window);
    RUN(softcap);
    RUN(sinks);
    RUN(everything);
    RUN(one_token);
    RUN(blocks);
    RUN(latent_heads);
    RUN(large_scores);
    RUN(generation);
    cpu_sides_close();
    return check_done();
}
