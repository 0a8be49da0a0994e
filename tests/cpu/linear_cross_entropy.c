/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_cross_entropy on the CPU: loss and gradients in every dtype, ignored targets, several
 * chunks, and the logits that generation asks for.
 */
#include "side.h"

#include <math.h>

/* log(sum(exp(softcap(x w^T)))) - the target's, written out. */
static void check_formula(const op_case *c, double cap)
{
    int64_t hidden = c->in[0].cols, vocab = c->in[1].rows;
    op_data d;
    op_result r;
    op_fill(c, 4, &d);
    op_run(cpu_side("scalar", 1), c, &d,
           &(op_how){ .dtype = MT_F64, .forward_only = true, .pass = MT_PASS_EVAL }, &r);
    for (int64_t t = 0; t < c->batch.tokens; t++) {
        double sum = 0, of_target = 0, want = 0;
        for (int64_t v = 0; v < vocab; v++) {
            double x = 0;
            for (int64_t k = 0; k < hidden; k++)
                x += d.in[0][t * hidden + k] * d.in[1][v * hidden + k];
            if (cap > 0)
                x = cap * tanh(x / cap);
            sum += exp(x);
            if (v == c->batch.targets[t])
                of_target = x;
        }
        if (c->batch.targets[t] != -100)
            want = log(sum) - of_target;
        CHECK(fabs(r.out[0][t] - want) < 1e-12, "token %d: %g, not %g", (int)t, r.out[0][t], want);
    }
    op_result_free(&r);
    op_data_free(&d);
}

static void check_case(int64_t t, int64_t hidden, int64_t vocab, double cap)
{
    int32_t targets[3000];
    const mt_xent_attr attr = { cap };
    some_targets(targets, t, vocab);
    op_case c = xent_case(t, hidden, vocab, &attr, targets);
    check_formula(&c, cap);
    op_check_fast(&c, 5, 1e-5, 2e-2);
    if (t <= 37)
        op_check_gradients(&c, 6, 1e-6);
}

static void one_token(void)
{
    check_case(1, 10, 13, 0);
}

static void odd(void)
{
    check_case(37, 19, 61, 0);
}

static void softcap(void)
{
    check_case(37, 19, 61, 3.0);
}

/* Without any target there is no loss and every gradient is zero, or what it was. */
static void nothing_to_learn(void)
{
    enum { T = 5, HIDDEN = 9, VOCAB = 30 };
    static const int32_t targets[T] = { -100, -100, -100, -100, -100 };
    static const mt_xent_attr attr = { 0 };
    op_case c = xent_case(T, HIDDEN, VOCAB, &attr, targets);
    op_data d;
    op_fill(&c, 5, &d);
    for (int i = 0; i < 4; i++) {
        op_how how = { .dtype = i & 1 ? MT_BF16 : MT_F32, .accumulate = i & 2 };
        op_result r;
        op_run(cpu_side(NULL, 2), &c, &d, &how, &r);
        for (int k = 0; k < T; k++)
            CHECK(r.out[0][k] == 0, "loss of token %d", k);
        for (int k = 0; k < T * HIDDEN; k++)
            CHECK(r.d_in[0][k] == (how.accumulate ? 0.5 : 0), "dx %d", k);
        for (int k = 0; k < VOCAB * HIDDEN; k++)
            CHECK(r.d_in[1][k] == (how.accumulate ? 0.5 : 0), "dw %d", k);
        op_result_free(&r);
    }
    op_data_free(&d);
}

static void several_chunks(void)
{
    check_case(2990, 7, 33, 0);
}

/* Targets that are ignored have neither loss nor gradient; eval gives the same losses as train. */
static void ignored(void)
{
    enum { T = 21, HIDDEN = 9, VOCAB = 30 };
    int32_t targets[T];
    const mt_xent_attr attr = { 0 };
    some_targets(targets, T, VOCAB);
    op_case c = xent_case(T, HIDDEN, VOCAB, &attr, targets);
    op_data d;
    op_result train, eval;
    op_fill(&c, 5, &d);
    op_run(cpu_side(NULL, 2), &c, &d, &(op_how){ .dtype = MT_F32 }, &train);
    op_run(cpu_side(NULL, 2), &c, &d,
           &(op_how){ .dtype = MT_F32, .forward_only = true, .pass = MT_PASS_EVAL }, &eval);
    CHECK(memcmp(train.out[0], eval.out[0], T * sizeof(double)) == 0, "eval differs from train");
    for (int i = 0; i < T; i++) {
        double norm = 0;
        for (int k = 0; k < HIDDEN; k++)
            norm += fabs(train.d_in[0][i * HIDDEN + k]);
        CHECK((targets[i] == -100) == (train.out[0][i] == 0), "loss of token %d", i);
        CHECK((targets[i] == -100) == (norm == 0), "gradient of token %d", i);
    }
    op_result_free(&train);
    op_result_free(&eval);
    op_data_free(&d);
}

static void generation(mt_dtype dtype, const char *isa, double cap, double tolerance)
{
    enum { T = 101, HIDDEN = 19, VOCAB = 301, WANTED = 70 };
    const mt_xent_attr attr = { cap };
    op_case c = xent_case(T, HIDDEN, VOCAB, &attr, NULL);
    int32_t rows[WANTED];
    for (int i = 0; i < WANTED; i++)
        rows[i] = T - 1 - i;
    c.batch.logit_rows = rows;
    c.batch.n_logit_rows = WANTED;
    op_data d;
    op_result r;
    op_fill(&c, 9, &d);
    op_run(cpu_side(isa, 2), &c, &d,
           &(op_how){ .dtype = dtype, .pad = 3, .forward_only = true, .pass = MT_PASS_PREFILL },
           &r);
    double *want = calloc(WANTED * VOCAB, sizeof *want);
    for (int i = 0; i < WANTED * VOCAB; i++) {
        for (int k = 0; k < HIDDEN; k++)
            want[i] += d.in[0][rows[i / VOCAB] * HIDDEN + k] * d.in[1][i % VOCAB * HIDDEN + k];
        if (cap > 0)
            want[i] = cap * tanh(want[i] / cap);
        if (dtype == MT_BF16)
            CHECK(mt_bf16_to_f32(mt_f32_to_bf16((float)r.logits[i])) == (float)r.logits[i],
                  "not rounded");
    }
    double e = op_error(r.logits, want, WANTED * VOCAB);
    CHECK(e < tolerance, "logits are off by %g", e);
    for (int i = 0; i < T; i++)
        CHECK(isnan(r.out[0][i]), "the loss was written");
    free(want);
    op_result_free(&r);
    op_data_free(&d);
}

static void logits(void)
{
    generation(MT_F32, NULL, 0, 1e-6);
    generation(MT_F32, "scalar", 2, 1e-6);
    generation(MT_F64, "scalar", 2, 1e-14);
    generation(MT_BF16, NULL, 2, 1e-2);
}

static void target_out_of_range(void)
{
    const mt_backend *b = op_backend();
    const mt_xent_attr attr = { 0 };
    int32_t targets[2] = { 0, 3 };
    float x[2] = { 0 }, w[3] = { 0 }, loss[2];
    void *device = NULL, *queue = NULL, *work;
    CHECK(b->open(0, 1, &device) == MT_OK && b->queue_create(device, "q", &queue) == MT_OK, " ");
    mt_op_call c = { .attr = &attr,
                     .pass = MT_PASS_EVAL,
                     .n_in = 2,
                     .n_out = 1,
                     .in = { { x, 2, 1, 1, MT_F32, 0 }, { w, 3, 1, 1, MT_F32, 0 } },
                     .out = { { loss, 2, 1, 1, MT_F32, 0 } },
                     .batch = { .tokens = 2, .targets = targets } };
    const mt_kernel *k = b->kernel(device, "linear_cross_entropy");
    c.work_bytes = k->workspace(device, &c, false);
    CHECK(b->device_alloc(device, c.work_bytes, &work) == MT_OK, " ");
    c.work = work;
    k->forward(device, queue, &c);
    b->queue_sync(device, queue);
    CHECK(b->error(device) == MT_ERR_INVALID, "accepted");
    b->device_free(device, work, c.work_bytes);
    b->queue_destroy(device, queue);
    b->close(device);
}

int main(void)
{
    RUN(one_token);
    RUN(odd);
    RUN(softcap);
    RUN(nothing_to_learn);
    RUN(several_chunks);
    RUN(ignored);
    RUN(logits);
    RUN(target_out_of_range);
    cpu_sides_close();
    return check_done();
}
