/* SPDX-License-Identifier: Apache-2.0
 *
 * Every operation on CUDA against the CPU, forward and backward, in F32, BF16 and F64: odd sizes,
 * sizes that allow 16-byte accesses, several documents, every option; and the same bits twice.
 */
#include "side.h"

#include <math.h>

/* ---- element by element ---------------------------------------------------------------------- */

static const op_bounds row_bounds = { 1e-6, 5e-4 };

static op_case elementwise(const char *op, const void *attr, uint32_t n_in, int64_t rows,
                           int64_t cols)
{
    op_case c = { .op = op, .attr = attr, .n_in = n_in, .n_out = 1, .batch = { .tokens = rows } };
    for (uint32_t i = 0; i < n_in; i++)
        c.in[i] = (op_value){ .rows = rows, .cols = cols, .scale = 6 };
    c.out[0] = (op_value){ .rows = rows, .cols = cols };
    return c;
}

static void check_elementwise(const char *op, const void *attr, uint32_t n_in)
{
    op_case odd = elementwise(op, attr, n_in, 37, 101),
            even = elementwise(op, attr, n_in, 65, 1024);
    op_check(&odd, 1, row_bounds);
    op_check(&even, 2, row_bounds);
}

static void activations(void)
{
    for (int kind = 0; kind <= MT_ACT_SIGMOID; kind++)
        check_elementwise("act", &(mt_act_attr){ .kind = kind }, 1);
}

static void gated_activations(void)
{
    for (int kind = 0; kind <= MT_ACT_CLAMPED_SWIGLU; kind++)
        check_elementwise("glu", &(mt_act_attr){ .kind = kind, .limit = 4 }, 2);
}

static void arithmetic(void)
{
    check_elementwise("add", NULL, 2);
    check_elementwise("mul", NULL, 2);
    check_elementwise("scale", &(mt_scale_attr){ 59.86 }, 1);
}

/* ---- norm, rope, embedding ------------------------------------------------------------------- */

static void check_norm(int64_t rows, int32_t heads, int64_t n, mt_norm_variant variant)
{
    const mt_rmsnorm_attr attr = { 1e-5, variant, heads };
    op_case c = { .op = "rmsnorm",
                  .attr = &attr,
                  .n_in = 2,
                  .n_out = 1,
                  .n_aux = 1,
                  .in = { { .rows = rows, .cols = heads * n, .scale = 3 },
                          { .rows = 1, .cols = n, .param = true } },
                  .out = { { .rows = rows, .cols = heads * n } },
                  .aux = { { .rows = rows, .cols = heads, .stat = true } },
                  .batch = { .tokens = rows } };
    op_check(&c, 3, (op_bounds){ 4e-6, 5e-4 });
}

static void norms(void)
{
    for (int variant = 0; variant <= MT_NORM_ONE_PLUS; variant++) {
        check_norm(37, 1, 101, variant);
        check_norm(37, 3, 64, variant);
        check_norm(37, 1, 1501, variant);
        check_norm(300, 1, 3584, variant);
        check_norm(65, 2, 768, variant);
    }
    check_norm(1, 1, 8, 0);
    check_norm(9, 1, 5120, 0);
    check_norm(9, 1, 9000, 0);
    check_norm(700, 28, 128, 0); /* more groups than backward has teams */
}

static void check_rope(int64_t rows, int32_t heads, int32_t dim, int32_t rotary,
                       mt_rope_pairing pairing)
{
    mt_rope_attr attr = { heads, dim, rotary, pairing, 1.1f, { 0 }, 0.1f, 7 };
    int32_t positions[400];
    for (int i = 0; i < rotary / 2; i++)
        attr.inv_freq[i] = powf(10000.0f, -2.0f * (float)i / (float)rotary);
    for (int i = 0; i < rows; i++)
        positions[i] = i < rows / 2 ? i * 7 : 30000 + i;
    op_case c = elementwise("rope", &attr, 1, rows, heads * dim);
    c.batch.positions = positions;
    op_check(&c, 4, (op_bounds){ 1e-6, 5e-4 });
}

static void ropes(void)
{
    for (int pairing = 0; pairing <= MT_ROPE_INTERLEAVED; pairing++) {
        check_rope(37, 3, 10, 10, pairing);
        check_rope(37, 3, 11, 6, pairing);
        check_rope(100, 4, 128, 128, pairing);
        check_rope(51, 28, 128, 128, pairing);
        check_rope(51, 2, 96, 32, pairing);
        check_rope(51, 1, 64, 64, pairing);
    }
}

static void check_embedding(int64_t tokens, int64_t rows, int64_t cols, int stride)
{
    static int32_t row[3000];
    for (int64_t t = 0; t < tokens; t++)
        row[t] = (int32_t)(t * stride % rows);
    op_case c = { .op = "embedding",
                  .n_in = 1,
                  .n_out = 1,
                  .in = { { .rows = rows, .cols = cols, .param = true } },
                  .out = { { .rows = tokens, .cols = cols } },
                  .batch = { .tokens = tokens, .rows = row } };
    op_check(&c, 5, (op_bounds){ 1e-6, 1e-6 });
}

static void embeddings(void)
{
    check_embedding(37, 11, 101, 7);
    check_embedding(600, 400, 512, 7); /* rows without a token, too */
    check_embedding(3000, 2, 24, 1);   /* longer than the list of tokens */
    check_embedding(1, 1, 8, 0);
}

/* ---- linear ---------------------------------------------------------------------------------- */

static void check_linear(int64_t rows, int64_t n, int64_t k, bool bias)
{
    op_case c = { .op = "linear",
                  .n_in = 3,
                  .n_out = 1,
                  .in = { { .rows = rows, .cols = k }, { .rows = n, .cols = k, .param = true } },
                  .out = { { .rows = rows, .cols = n } },
                  .batch = { .tokens = rows } };
    if (bias)
        c.in[2] = (op_value){ .rows = 1, .cols = n, .scale = 20, .param = true };
    op_check(&c, 6, (op_bounds){ 2e-6, 2e-3 });
}

static void linears(void)
{
    check_linear(1, 1, 1, true);
    check_linear(37, 29, 101, true);
    check_linear(37, 29, 101, false);
    check_linear(1100, 64, 32, true); /* more slices of the bias gradient than one */
    check_linear(128, 256, 192, true);
}

/* ---- mixtures of experts ---------------------------------------------------------------------
 */

static void check_router(int64_t tokens, int64_t experts, bool bias, mt_router_attr attr)
{
    attr.scale = attr.scale > 0 ? attr.scale : 1;
    op_case c = { .op = "router",
                  .attr = &attr,
                  .n_in = 2,
                  .n_out = 3,
                  .n_aux = 1,
                  .in = { { .rows = tokens, .cols = experts, .scale = 3 } },
                  .out = { { .rows = tokens, .cols = attr.top_k, .stat = true },
                           { .rows = tokens, .cols = attr.top_k, .is_index = true },
                           { .rows = 1, .cols = experts + 1, .is_index = true } },
                  .aux = { { .rows = tokens, .cols = attr.top_k, .is_index = true } },
                  .batch = { .tokens = tokens } };
    if (bias)
        c.in[1] =
            (op_value){ .rows = 1, .cols = experts, .scale = 0.3, .param = true, .no_grad = true };
    op_check(&c, 11, (op_bounds){ 4e-6, 1e-3 });
}

static void routers(void)
{
    check_router(1, 4, false, (mt_router_attr){ .top_k = 1 });
    check_router(37, 5, false, (mt_router_attr){ .top_k = 2 });
    check_router(65, 4, false, (mt_router_attr){ .top_k = 4, .renormalise = 1 });
    check_router(600, 8, false, (mt_router_attr){ .top_k = 2, .renormalise = 1 });
    check_router(600, 128, false, (mt_router_attr){ .top_k = 8, .renormalise = 1 });
    check_router(300, 160, false,
                 (mt_router_attr){ .top_k = 6, .groups = 8, .top_groups = 3, .scale = 16 });
    check_router(300, 256, true,
                 (mt_router_attr){ .top_k = 8,
                                   .scoring = MT_ROUTER_SIGMOID,
                                   .renormalise = 1,
                                   .groups = 8,
                                   .top_groups = 4,
                                   .group_score = MT_GROUP_TOP2_SUM,
                                   .scale = 2.5 });
    check_router(37, 12, true,
                 (mt_router_attr){ .top_k = 3, .scoring = MT_ROUTER_SIGMOID, .scale = 2 });
}

/* Slots of T tokens: a permutation of their k rows each. */
static const int32_t *some_slots(int64_t rows)
{
    static int32_t slot[2000];
    for (int64_t i = 0; i < rows; i++)
        slot[i] = (int32_t)(i * 7 % rows); /* rows no multiple of 7 */
    return slot;
}

static void check_rows_of_experts(int64_t tokens, int64_t k, int64_t n)
{
    op_value slots = {
        .rows = tokens, .cols = k, .is_index = true, .index = some_slots(tokens * k)
    };
    op_case c = { .op = "dispatch",
                  .n_in = 2,
                  .n_out = 1,
                  .in = { { .rows = tokens, .cols = n }, slots },
                  .out = { { .rows = tokens * k, .cols = n } },
                  .batch = { .tokens = tokens } };
    op_check(&c, 12, row_bounds);
    c = (op_case){ .op = "combine",
                   .n_in = 3,
                   .n_out = 1,
                   .in = { { .rows = tokens * k, .cols = n },
                           { .rows = tokens, .cols = k, .stat = true },
                           slots },
                   .out = { { .rows = tokens, .cols = n } },
                   .batch = { .tokens = tokens } };
    op_check(&c, 13, (op_bounds){ 2e-6, 1e-3 });
}

static void rows_of_experts(void)
{
    check_rows_of_experts(1, 1, 8);
    check_rows_of_experts(37, 3, 101);
    check_rows_of_experts(250, 8, 512);
}

/* Both modes, on documents of one token and of many; expert e has rows up to e^2 of all. */
static void balances(void)
{
    enum { T = 300, E = 12, K = 3 };
    static const int32_t doc_starts[] = { 0, 1, 70, 71, T };
    int32_t targets[T], offsets[E + 1];
    for (int t = 0; t < T; t++)
        targets[t] = t % 7 == 3 ? -100 : t;
    for (int e = 0; e <= E; e++)
        offsets[e] = T * K * e * e / (E * E);
    for (mt_balance_mode mode = 0; mode < 2; mode++) {
        mt_balance_attr a = { mode, 0, 0.3 };
        op_case c = {
            .op = "balance_loss",
            .attr = &a,
            .n_in = 3,
            .n_out = 1,
            .in = { { .rows = T, .cols = E, .scale = 2 },
                    { .rows = T, .cols = K, .is_index = true, .index = some_slots(T * K) },
                    { .rows = 1, .cols = E + 1, .is_index = true, .index = offsets } },
            .out = { { .rows = 1, .cols = 1, .stat = true } },
            .batch = { .tokens = T,
                       .documents = 4,
                       .targets = targets,
                       .doc_starts = doc_starts,
                       .loss_scale = 20 }
        };
        op_check(&c, 15, (op_bounds){ 2e-6, 2e-3 });
    }
}

static void check_grouped(const int32_t *offsets, int64_t experts, int64_t n, int64_t k, bool bias)
{
    op_case c = { .op = "grouped_linear",
                  .n_in = 4,
                  .n_out = 1,
                  .in = { { .rows = offsets[experts], .cols = k },
                          { .rows = experts * n, .cols = k, .param = true },
                          { .rows = 1, .cols = experts + 1, .is_index = true, .index = offsets } },
                  .out = { { .rows = offsets[experts], .cols = n } },
                  .batch = { .tokens = offsets[experts] } };
    if (bias)
        c.in[3] = (op_value){ .rows = experts, .cols = n, .scale = 20, .param = true };
    op_check(&c, 14, (op_bounds){ 4e-6, 3e-3 });
}

static void grouped_linears(void)
{
    static const int32_t one[] = { 0, 1 }, few[] = { 0, 0, 30, 37 },
                         uneven[] = { 0, 127, 127, 255, 384, 384, 600, 600, 601 },
                         full[] = { 0, 128, 300 };
    check_grouped(one, 1, 1, 1, true);
    check_grouped(few, 3, 29, 101, false);
    check_grouped(few, 3, 40, 64, true);
    check_grouped(uneven, 8, 136, 72, true);
    check_grouped(uneven, 8, 256, 512, false);
    check_grouped(uneven, 8, 29, 101, true);
    check_grouped(full, 2, 64, 72, true);
}

static void check_slice(int64_t rows, int32_t heads, int64_t n, int64_t first, int64_t cols)
{
    op_case c = { .op = "slice",
                  .attr = &(mt_slice_attr){ heads, 0, first, cols },
                  .n_in = 1,
                  .n_out = 1,
                  .in = { { .rows = rows, .cols = heads * n } },
                  .out = { { .rows = rows, .cols = heads * cols } },
                  .batch = { .tokens = rows } };
    op_check(&c, 15, row_bounds);
}

static void slices(void)
{
    check_slice(37, 1, 101, 3, 50);
    check_slice(37, 3, 11, 10, 1);
    check_slice(65, 16, 192, 128, 64);
    check_slice(65, 1, 1024, 512, 512);
}

static void concatenations(void)
{
    static const int64_t width[][3] = { { 128, 64, 0 }, { 5, 3, 7 }, { 8, 16, 24 } };
    for (int i = 0; i < 3; i++)
        for (uint32_t shared = 0; shared < 4; shared += 2) {
            const mt_concat_attr attr = {
                4, shared, { (int32_t)width[i][0], (int32_t)width[i][1], (int32_t)width[i][2] }
            };
            op_case c = { .op = "concat",
                          .attr = &attr,
                          .n_in = 3,
                          .n_out = 1,
                          .out = { { .rows = 37 } },
                          .batch = { .tokens = 37 } };
            for (uint32_t k = 0; k < 3; k++) {
                if (width[i][k])
                    c.in[k] =
                        (op_value){ .rows = 37, .cols = width[i][k] * (shared >> k & 1u ? 1 : 4) };
                c.out[0].cols += 4 * width[i][k];
            }
            op_check(&c, 16, row_bounds);
        }
}

/* ---- the loss -------------------------------------------------------------------------------- */

static op_case xent(int64_t tokens, int64_t hidden, int64_t vocab, const mt_xent_attr *attr,
                    int32_t *targets)
{
    for (int64_t t = 0; t < tokens; t++)
        targets[t] = t % 5 == 3 ? -100 : (int32_t)(t * 7919 % vocab);
    return (op_case){ .op = "linear_cross_entropy",
                      .attr = attr,
                      .n_in = 2,
                      .n_out = 1,
                      .n_aux = 1,
                      .in = { { .rows = tokens, .cols = hidden },
                              { .rows = vocab, .cols = hidden, .param = true } },
                      .out = { { .rows = tokens, .cols = 1, .stat = true } },
                      .aux = { { .rows = tokens, .cols = hidden } },
                      .batch = { .tokens = tokens, .targets = targets, .loss_scale = 0.125 },
                      .grad_in_forward = true };
}

static void check_xent(int64_t tokens, int64_t hidden, int64_t vocab, double cap)
{
    static int32_t targets[9000];
    const mt_xent_attr attr = { cap };
    op_case c = xent(tokens, hidden, vocab, &attr, targets);
    op_check(&c, 7, (op_bounds){ 4e-6, 1e-3 });
}

static void losses(void)
{
    check_xent(37, 19, 101, 0);
    check_xent(37, 19, 101, 2);
    check_xent(64, 32, 4096, 0);
    check_xent(50, 16, 20011, 3);
    check_xent(8500, 7, 33, 0); /* two chunks */
}

static void nothing_to_learn(void)
{
    enum { T = 9, HIDDEN = 5, VOCAB = 11 };
    int32_t targets[T];
    const mt_xent_attr attr = { 0 };
    op_case c = xent(T, HIDDEN, VOCAB, &attr, targets);
    for (int i = 0; i < T; i++)
        targets[i] = -100;
    op_data d;
    op_result r;
    op_fill(&c, 8, &d);
    op_run(&cuda, &c, &d, &(op_how){ .dtype = MT_BF16 }, &r);
    for (int i = 0; i < HIDDEN * VOCAB; i++)
        CHECK(r.d_in[1][i] == 0, "gradient %d", i);
    for (int i = 0; i < T; i++)
        CHECK(r.out[0][i] == 0, "loss %d", i);
    op_result_free(&r);
    op_data_free(&d);
}

/* Eval gives the losses of train, bit for bit. */
static void eval_is_train(void)
{
    enum { T = 200 };
    int32_t targets[T];
    const mt_xent_attr attr = { 0 };
    op_case c = xent(T, 24, 300, &attr, targets);
    op_data d;
    op_result train, eval;
    op_fill(&c, 9, &d);
    op_run(&cuda, &c, &d, &(op_how){ .dtype = MT_BF16 }, &train);
    op_run(&cuda, &c, &d, &(op_how){ .dtype = MT_BF16, .pass = MT_PASS_EVAL, .forward_only = true },
           &eval);
    CHECK(memcmp(train.out[0], eval.out[0], T * sizeof(double)) == 0, "differs");
    op_result_free(&train);
    op_result_free(&eval);
    op_data_free(&d);
}

static void logits(void)
{
    enum { T = 400, WANTED = 300, VOCAB = 103 };
    static int32_t targets[T], rows[WANTED];
    for (int cap = 0; cap <= 2; cap += 2) {
        const mt_xent_attr attr = { cap };
        op_case c = xent(T, 19, VOCAB, &attr, targets);
        for (int i = 0; i < WANTED; i++)
            rows[i] = T - 1 - i;
        c.batch.logit_rows = rows;
        c.batch.n_logit_rows = WANTED;
        op_data d;
        op_fill(&c, 10, &d);
        for (mt_dtype t = MT_F32; t <= MT_F64; t++) {
            op_how how = { .dtype = t, .pass = MT_PASS_PREFILL, .pad = 3, .forward_only = true };
            op_result got, want;
            op_run(&cuda, &c, &d, &how, &got);
            op_run(&cpu, &c, &d, &how, &want);
            double e = op_error(got.logits, want.logits, WANTED * VOCAB);
            CHECK(e < (t == MT_BF16 ? 2e-3 : 2e-6), "%s: off by %g", mt_dtype_name(t), e);
            op_result_free(&got);
            op_result_free(&want);
        }
        op_data_free(&d);
    }
}

/* ---- attention ------------------------------------------------------------------------------- */

static const int32_t docs_37[] = { 0, 1, 6, 37 }, docs_300[] = { 0, 7, 150, 151, 300 },
                     one_300[] = { 0, 300 };

static op_case attention_case(int64_t t, const int32_t *starts, int64_t documents,
                              const mt_attn_attr *attr, bool sinks)
{
    op_case c = { .op = "attention",
                  .attr = attr,
                  .n_in = 4,
                  .n_out = 1,
                  .n_aux = 1,
                  .in = { { .rows = t, .cols = attr->heads * attr->qk_dim, .scale = 2 },
                          { .rows = t, .cols = attr->kv_heads * attr->qk_dim, .scale = 2 },
                          { .rows = t, .cols = attr->kv_heads * attr->v_dim } },
                  .out = { { .rows = t, .cols = attr->heads * attr->v_dim } },
                  .aux = { { .rows = t, .cols = attr->heads, .stat = true } },
                  .batch = { .tokens = t, .documents = documents, .doc_starts = starts } };
    for (int64_t i = 0; i < documents; i++)
        if (starts[i + 1] - starts[i] > c.batch.max_document)
            c.batch.max_document = starts[i + 1] - starts[i];
    if (sinks)
        c.in[3] = (op_value){ .rows = 1, .cols = attr->heads, .param = true };
    return c;
}

static void check_attention(int64_t t, const int32_t *starts, int64_t documents, mt_attn_attr attr,
                            bool sinks)
{
    op_case c = attention_case(t, starts, documents, &attr, sinks);
    op_check(&c, 11, (op_bounds){ 4e-6, 1e-2 });
}

static void masks(void)
{
    check_attention(37, docs_37, 3, (mt_attn_attr){ 3, 1, 10, 10, 0.3, 0, 0 }, false);
    check_attention(37, docs_37, 3, (mt_attn_attr){ 3, 1, 10, 10, 0.3, 0, 4 }, false);
    check_attention(37, docs_37, 3, (mt_attn_attr){ 3, 3, 10, 10, 0.5, 2.0, 0 }, false);
    check_attention(37, docs_37, 3, (mt_attn_attr){ 4, 2, 10, 10, 0.3, 0, 4 }, true);
    check_attention(37, docs_37, 3, (mt_attn_attr){ 3, 1, 10, 6, 0.3, 3.0, 4 }, true);
    check_attention(1, (const int32_t[]){ 0, 1 }, 1, (mt_attn_attr){ 3, 1, 10, 6, 0.3, 3.0, 4 },
                    true);
}

static void several_tiles(void)
{
    check_attention(300, one_300, 1, (mt_attn_attr){ 2, 1, 64, 64, 0.125, 0, 0 }, false);
    check_attention(300, docs_300, 4, (mt_attn_attr){ 4, 2, 64, 64, 0.125, 0, 0 }, true);
    check_attention(300, docs_300, 4, (mt_attn_attr){ 2, 1, 17, 9, 0.3, 4, 100 }, true);
    check_attention(300, one_300, 1, (mt_attn_attr){ 2, 2, 32, 32, 0.2, 0, 70 }, false);
}

static void head_dims(void)
{
    static const int32_t dims[][2] = { { 16, 16 },   { 32, 32 },   { 48, 48 },   { 64, 64 },
                                       { 80, 80 },   { 96, 96 },   { 128, 128 }, { 192, 128 },
                                       { 256, 256 }, { 100, 104 }, { 129, 31 },  { 64, 256 } };
    static const int32_t docs[] = { 0, 140, 141, 200 };
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        check_attention(
            200, docs, 3,
            (mt_attn_attr){ 2, 1, dims[i][0], dims[i][1], 1 / sqrt((double)dims[i][0]), 0, 0 },
            false);
    check_attention(70, (const int32_t[]){ 0, 70 }, 1, (mt_attn_attr){ 2, 1, 300, 280, 0.05, 0, 0 },
                    false);
    check_attention(200, docs, 3, (mt_attn_attr){ 2, 1, 128, 128, 0.09, 20, 77 }, true);
    check_attention(200, docs, 3, (mt_attn_attr){ 2, 1, 256, 256, 0.06, 20, 77 }, true);
}

/* Scores far apart: the running maximum has to keep e^s finite. */
static void large_scores(void)
{
    check_attention(37, (const int32_t[]){ 0, 37 }, 1, (mt_attn_attr){ 2, 1, 16, 8, 3.0, 0, 0 },
                    false);
}

/* Prefill of some tokens and decode of the others gives the rows of one whole pass. */
static void generate(const mt_attn_attr *attr, mt_dtype dtype, double tolerance)
{
    enum { T = 90, PREFILL = 50, CAPACITY = 96 };
    static const int32_t whole_starts[] = { 0, T };
    const side *s = &cuda;
    op_case whole = attention_case(T, whole_starts, 1, attr, false);
    op_data d;
    op_result want;
    op_fill(&whole, 21, &d);
    op_run(&cpu, &whole, &d, &(op_how){ .dtype = MT_F64, .forward_only = true }, &want);
    int64_t size = mt_dtype_size(dtype), cols[4];
    uint8_t *host[3];
    void *in[3];
    for (int i = 0; i < 3; i++) {
        cols[i] = whole.in[i].cols;
        host[i] = malloc((size_t)(T * cols[i] * size));
        for (int64_t k = 0; k < T * cols[i]; k++) {
            if (dtype == MT_BF16)
                ((uint16_t *)host[i])[k] = mt_f32_to_bf16((float)d.in[i][k]);
            else
                ((float *)host[i])[k] = (float)d.in[i][k];
        }
        in[i] = side_put(s, host[i], T * cols[i] * size);
    }
    cols[3] = whole.out[0].cols;
    void *out = side_put(s, NULL, T * cols[3] * size);
    mt_tensor kept[2];
    for (int i = 0; i < 2; i++)
        kept[i] = (mt_tensor){ side_put(s, NULL, CAPACITY * cols[1 + i] * size),
                               CAPACITY,
                               cols[1 + i],
                               cols[1 + i],
                               dtype,
                               0 };
    const mt_kernel *k = s->b->kernel(s->device, "attention");
    for (int64_t from = 0; from < T;) {
        int32_t n = from == 0 ? PREFILL : from % 3 == 0 ? 1 : from % 3 == 1 ? 3 : 20;
        if (n > T - from)
            n = (int32_t)(T - from);
        int32_t starts[2] = { 0, n };
        void *starts_device = side_put(s, starts, sizeof starts);
        mt_op_call c = { .struct_size = sizeof c,
                         .pass = from == 0 ? MT_PASS_PREFILL : MT_PASS_DECODE,
                         .attr = attr,
                         .n_in = 4,
                         .n_out = 1,
                         .n_aux = 1,
                         .batch = { .tokens = n, .documents = 1, .doc_starts = starts_device },
                         .state = { kept[0], kept[1] },
                         .used = from };
        for (int i = 0; i < 3; i++)
            c.in[i] =
                (mt_tensor){ (char *)in[i] + from * cols[i] * size, n, cols[i], cols[i], dtype, 0 };
        c.out[0] =
            (mt_tensor){ (char *)out + from * cols[3] * size, n, cols[3], cols[3], dtype, 0 };
        k->forward(s->device, s->queue, &c);
        s->b->queue_sync(s->device, s->queue);
        side_free(s, starts_device, sizeof starts);
        from += n;
    }
    CHECK(s->b->error(s->device) == MT_OK, "failed");
    uint8_t *raw = malloc((size_t)(T * cols[3] * size));
    double *got = malloc((size_t)(T * cols[3]) * sizeof *got);
    side_get(s, raw, out, T * cols[3] * size);
    for (int64_t i = 0; i < T * cols[3]; i++)
        got[i] = dtype == MT_BF16 ? mt_bf16_to_f32(((uint16_t *)raw)[i]) : ((float *)raw)[i];
    double e = op_error(got, want.out[0], T * cols[3]);
    CHECK(e < tolerance, "%s: off by %g", mt_dtype_name(dtype), e);
    free(raw);
    free(got);
    side_free(s, out, T * cols[3] * size);
    for (int i = 0; i < 2; i++)
        side_free(s, kept[i].data, CAPACITY * cols[1 + i] * size);
    for (int i = 0; i < 3; i++) {
        side_free(s, in[i], T * cols[i] * size);
        free(host[i]);
    }
    op_result_free(&want);
    op_data_free(&d);
}

static void generation(void)
{
    static const mt_attn_attr attr[] = { { 4, 2, 64, 64, 0.125, 0, 0 },
                                         { 4, 2, 64, 64, 0.2, 5, 9 } };
    for (int i = 0; i < 2; i++) {
        generate(&attr[i], MT_F32, 1e-5);
        generate(&attr[i], MT_BF16, 1e-2);
    }
}

/* Data that cannot be stops the device with a text, and nothing is read out of bounds. Last, as the
 * failure is sticky. */
static void target_out_of_range(void)
{
    enum { T = 4, HIDDEN = 8, VOCAB = 11 };
    int32_t targets[T];
    const mt_xent_attr attr = { 0 };
    op_case c = xent(T, HIDDEN, VOCAB, &attr, targets);
    targets[2] = VOCAB;
    const side *s = &cuda;
    int32_t *t = side_put(s, targets, sizeof targets);
    float *x = side_put(s, NULL, 1024), *w = side_put(s, NULL, 1024), *loss = side_put(s, NULL, 64);
    mt_op_call call = { .struct_size = sizeof call,
                        .pass = MT_PASS_EVAL,
                        .attr = &attr,
                        .n_in = 2,
                        .n_out = 1,
                        .in = { { x, T, HIDDEN, HIDDEN, MT_F32, 0 },
                                { w, VOCAB, HIDDEN, HIDDEN, MT_F32, 0 } },
                        .out = { { loss, T, 1, 1, MT_F32, 0 } },
                        .batch = { .tokens = T, .targets = t } };
    const mt_kernel *k = s->b->kernel(s->device, c.op);
    call.work_bytes = k->workspace(s->device, &call, false);
    call.work = side_put(s, NULL, call.work_bytes);
    k->forward(s->device, s->queue, &call);
    s->b->queue_sync(s->device, s->queue);
    CHECK(s->b->error(s->device) == MT_ERR_INVALID, "accepted");
    side_free(s, call.work, call.work_bytes);
    side_free(s, t, sizeof targets);
    side_free(s, x, 1024);
    side_free(s, w, 1024);
    side_free(s, loss, 64);
}

int main(void)
{
    sides_open();
    RUN(activations);
    RUN(gated_activations);
    RUN(arithmetic);
    RUN(norms);
    RUN(ropes);
    RUN(embeddings);
    RUN(linears);
    RUN(routers);
    RUN(rows_of_experts);
    RUN(balances);
    RUN(grouped_linears);
    RUN(slices);
    RUN(concatenations);
    RUN(losses);
    RUN(nothing_to_learn);
    RUN(eval_is_train);
    RUN(logits);
    RUN(masks);
    RUN(several_tiles);
    RUN(head_dims);
    RUN(large_scores);
    RUN(generation);
    RUN(target_out_of_range);
    sides_close();
    return check_done();
}
