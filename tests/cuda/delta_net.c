/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations of a gated delta net on CUDA against the CPU: documents of less than a chunk and
 * of several, odd sizes and those of published models, and generation against a whole forward pass.
 */
#include "side.h"

#include <math.h>

static const int32_t docs_37[] = { 0, 1, 6, 37 };
static const int32_t docs_300[] = { 0, 64, 67, 290, 300 };
static const int32_t docs_40[] = { 0, 40 };

static int32_t positions[512];

static mt_batch batch_of(const int32_t *starts, int64_t documents)
{
    mt_batch b = { .tokens = starts[documents],
                   .documents = documents,
                   .positions = positions,
                   .doc_starts = starts };
    for (int64_t d = 0; d < documents; d++)
        for (int32_t t = starts[d]; t < starts[d + 1]; t++)
            positions[t] = t - starts[d];
    return b;
}

static op_case conv_case(const int32_t *starts, int64_t documents, int64_t cols, int64_t width)
{
    mt_batch b = batch_of(starts, documents);
    return (op_case){ .op = "causal_conv",
                      .n_in = 2,
                      .n_out = 1,
                      .in = { { .rows = b.tokens, .cols = cols },
                              { .rows = cols, .cols = width, .param = true } },
                      .out = { { .rows = b.tokens, .cols = cols } },
                      .batch = b };
}

static op_case delta_case(const int32_t *starts, int64_t documents, const mt_delta_attr *a)
{
    mt_batch b = batch_of(starts, documents);
    int64_t t = b.tokens, keys = a->k_heads * a->k_dim, values = a->v_heads * a->v_dim;
    int64_t state = a->v_heads * a->k_dim * a->v_dim;
    return (op_case){
        .op = "gated_delta",
        .attr = a,
        .n_in = 5,
        .n_out = 1,
        .n_aux = 1,
        .in = { { .rows = t, .cols = keys },
                { .rows = t, .cols = keys },
                { .rows = t, .cols = values },
                { .rows = t, .cols = a->v_heads, .stat = true, .middle = -0.1, .scale = 0.1 },
                { .rows = t, .cols = a->v_heads, .middle = 0.5, .scale = 0.5 } },
        .out = { { .rows = t, .cols = values } },
        .aux = { { .rows = t + documents * MT_DELTA_CHUNK,
                   .cols = (state + MT_DELTA_CHUNK - 1) / MT_DELTA_CHUNK,
                   .stat = true,
                   .opaque = true } },
        .batch = b
    };
}

static void convolution(void)
{
    for (int64_t width = 1; width < 6; width += 3) {
        op_case odd = conv_case(docs_37, 3, 101, width), even = conv_case(docs_300, 4, 1024, width);
        op_check(&odd, 40, (op_bounds){ 2e-6, 5e-4 });
        op_check(&even, 41, (op_bounds){ 2e-6, 5e-4 });
    }
}

/* a_log and dt_bias in the compute dtype, and streamed in the statistics dtype. */
static void decay(void)
{
    for (int stat = 0; stat < 2; stat++) {
        op_case c = { .op = "log_decay",
                      .n_in = 3,
                      .n_out = 1,
                      .in = { { .rows = 700, .cols = 5, .scale = 20 },
                              { .rows = 1, .cols = 5, .param = true, .stat = stat },
                              { .rows = 1, .cols = 5, .param = true, .stat = stat } },
                      .out = { { .rows = 700, .cols = 5, .stat = true } },
                      .batch = { .tokens = 700 } };
        op_check(&c, 42, (op_bounds){ 1e-6, 5e-4 });
    }
}

static void delta_rule(void)
{
    static const mt_delta_attr attr[] = { { 2, 2, 8, 8, 1e-6, 0.35 },
                                          { 2, 6, 7, 5, 1e-3, 0.4 },
                                          { 1, 2, 33, 40, 1e-6, 0.2 },
                                          { 2, 4, 128, 128, 1e-6, 0.0884 },
                                          { 1, 1, 100, 70, 1e-6, 0.1 } };
    for (size_t i = 0; i < sizeof attr / sizeof *attr; i++) {
        op_case few = delta_case(docs_37, 3, &attr[i]);
        op_check(&few, 43, (op_bounds){ 3e-5, 2e-3 });
        op_case many = delta_case(docs_300, 4, &attr[i]);
        op_check(&many, 44, (op_bounds){ 3e-5, 2e-3 });
    }
}

/* e^-c of a chunk would overflow; the gradient of g is a small difference of large numbers. */
static void strong_decay(void)
{
    const mt_delta_attr attr = { 1, 2, 64, 64, 1e-6, 0.125 };
    op_case c = delta_case(docs_300, 4, &attr);
    c.in[3].middle = -6;
    c.in[3].scale = 5.5;
    op_check(&c, 45, (op_bounds){ 2e-4, 2e-3 });
}

/* Prefill of some tokens and decode of the others give the rows of one whole pass on the CPU. */
static void check_generation(const op_case *whole, int64_t rows, int64_t cols, bool stat,
                             mt_dtype dtype, int32_t prefill, double tolerance)
{
    op_data d;
    op_result want;
    op_fill(whole, 46, &d);
    op_run(&cpu, whole, &d, &(op_how){ .dtype = dtype, .forward_only = true }, &want);
    mt_dtype kept = stat ? MT_F32 : dtype;
    int64_t bytes = rows * cols * mt_dtype_size(kept);
    mt_tensor state = { side_put(&cuda, NULL, bytes), rows, cols, cols, kept, 0 };
    int64_t tokens = whole->batch.tokens, out_cols = whole->out[0].cols;
    for (int64_t from = 0; from < tokens;) {
        int32_t n = from == 0 ? prefill : from % 2 ? 1 : 3, at[64];
        if (n > tokens - from)
            n = (int32_t)(tokens - from);
        int32_t starts[2] = { 0, n };
        for (int32_t i = 0; i < n; i++)
            at[i] = (int32_t)from + i;
        op_case c = *whole;
        op_data part = d;
        for (uint32_t i = 0; i < c.n_in; i++)
            if (!c.in[i].param) {
                part.in[i] = d.in[i] + from * c.in[i].cols;
                c.in[i].rows = n;
            }
        c.out[0].rows = n;
        c.batch = (mt_batch){ .tokens = n, .documents = 1, .positions = at, .doc_starts = starts };
        c.state[0] = state;
        c.used = from;
        op_how how = { .dtype = dtype, .pad = 2, .forward_only = true };
        how.pass = from == 0 ? MT_PASS_PREFILL : MT_PASS_DECODE;
        op_result got;
        op_run(&cuda, &c, &part, &how, &got);
        double e = op_error(got.out[0], want.out[0] + from * out_cols, n * out_cols);
        CHECK(e <= tolerance, "%s, %s: row %d: off by %g", c.op, mt_dtype_name(dtype), (int)from,
              e);
        op_result_free(&got);
        from += n;
    }
    side_free(&cuda, state.data, bytes);
    op_result_free(&want);
    op_data_free(&d);
}

static void generation(void)
{
    static const mt_delta_attr attr[] = { { 2, 6, 7, 5, 1e-3, 0.4 },
                                          { 1, 2, 128, 128, 1e-6, 0.1 } };
    for (int32_t prefill = 1; prefill < 24; prefill += 11) {
        op_case conv = conv_case(docs_40, 1, 133, 4);
        check_generation(&conv, 3, 133, false, MT_F32, prefill, 1e-6);
        check_generation(&conv, 3, 133, false, MT_BF16, prefill, 2e-3);
        for (int i = 0; i < 2; i++) {
            op_case delta = delta_case(docs_40, 1, &attr[i]);
            int64_t rows = attr[i].v_heads * attr[i].k_dim;
            check_generation(&delta, rows, attr[i].v_dim, true, MT_F32, prefill, 1e-5);
            check_generation(&delta, rows, attr[i].v_dim, true, MT_BF16, prefill, 5e-3);
        }
    }
}

int main(void)
{
    sides_open();
    RUN(convolution);
    RUN(decay);
    RUN(delta_rule);
    RUN(strong_decay);
    RUN(generation);
    sides_close();
    return check_done();
}
