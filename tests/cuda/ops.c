/* SPDX-License-Identifier: Apache-2.0
 *
 * Every operation on CUDA against the CPU, forward and backward, in F32, BF16 and F64: odd sizes,
 * sizes that allow 16-byte accesses, several documents, every option; and the same bits twice.
 *
 *     MT_TEST_SMALL=1     small shapes only
 *     MT_TEST_ONLY=name   one case
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
        check_norm(65, 2, 768, variant);
    }
    check_norm(1, 1, 8, 0);
    check_norm(9, 1, 5120, 0);
    check_norm(9, 1, 9000, 0);
    check_norm(1700, 1, 1032, 0); /* a team has so many groups that its memory is used again */
}

static void large_norms(void)
{
    for (int variant = 0; variant <= MT_NORM_ONE_PLUS; variant++)
        check_norm(300, 1, 3584, variant);
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
        check_rope(21, 1, 2 * MT_ROPE_MAX_FREQ, 2 * MT_ROPE_MAX_FREQ, pairing);
    }
}

static void check_embedding(int64_t tokens, int64_t rows, int64_t cols, int stride)
{
    static int32_t row[3000];
    for (int64_t t = 0; t < tokens; t++)
        row[t] = (int32_t)(t * stride % rows);
    op_case c = embedding_case(tokens, row, rows, cols);
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
    op_case c = linear_case(rows, n, k, bias);
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

static void check_exact_linear(int64_t rows, int64_t n, int64_t k)
{
    op_case c = exact_linear_case(rows, n, k);
    op_check(&c, 6, (op_bounds){ 2e-6, 2e-3 });
}

static void exact_linears(void)
{
    check_exact_linear(1, 1, 1);
    check_exact_linear(37, 29, 101);
    check_exact_linear(5000, 16, 64);
    check_exact_linear(128, 256, 192);
}

/* ---- mixtures of experts --------------------------------------------------------------------- */

static void check_router(int64_t tokens, int64_t experts, bool bias, mt_router_attr attr)
{
    attr.scale = attr.scale > 0 ? attr.scale : 1;
    op_case c = router_case(&attr, tokens, experts, bias);
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
    const int32_t *slots = some_slots(tokens * k);
    op_case c = dispatch_case(tokens, k, n, slots);
    op_check(&c, 12, row_bounds);
    c = combine_case(tokens, k, n, slots);
    op_check(&c, 13, (op_bounds){ 2e-6, 1e-3 });
}

static void rows_of_experts(void)
{
    check_rows_of_experts(1, 1, 8);
    check_rows_of_experts(37, 3, 101);
    check_rows_of_experts(250, 8, 512);
}

/* Documents of one token and of many; expert e has rows up to e^2 of all. `tally`: what other
 * layers have left. */
static void check_balance(mt_balance_mode mode, int64_t experts, const double *tally)
{
    enum { T = 300, K = 3, MAX_EXPERTS = 600 };
    static const int32_t doc_starts[] = { 0, 1, 70, 71, T };
    int32_t targets[T], offsets[MAX_EXPERTS + 1];
    for (int t = 0; t < T; t++)
        targets[t] = t % 7 == 3 ? -100 : t;
    for (int64_t e = 0; e <= experts; e++)
        offsets[e] = (int32_t)(T * K * e * e / (experts * experts));
    mt_balance_attr a = { mode, 0, 0.3 };
    op_case c =
        balance_case(&a, doc_starts, 4, experts, K, some_slots(T * K), offsets, targets, tally);
    op_check(&c, 15, (op_bounds){ 2e-6, 2e-3 });
}

static void balances(void)
{
    static const double none[2 * 600 + 1] = { 0 };
    double some[2 * 12 + 1] = { [24] = 600 }; /* two layers, unevenly used */
    for (int e = 0; e < 12; e++) {
        some[e] = 1800.0 * e / 66;
        some[12 + e] = 600.0 * (12 - e) / 78;
    }
    check_balance(MT_BALANCE_HF_PER_LAYER, 12, NULL);
    check_balance(MT_BALANCE_DEEPSEEK_SEQ, 12, NULL);
    check_balance(MT_BALANCE_HF_ALL_LAYERS, 12, none);
    check_balance(MT_BALANCE_HF_ALL_LAYERS, 12, some);
    check_balance(MT_BALANCE_HF_ALL_LAYERS, 600, none);
}

static void check_grouped(const int32_t *offsets, int64_t experts, int64_t n, int64_t k, bool bias)
{
    op_case c = grouped_case(offsets, experts, n, k, bias);
    op_check(&c, 14, (op_bounds){ 4e-6, 3e-3 });
}

/* One tile or few of each kind; with many experts, more than there are multiprocessors. */
static void grouped_linears(void)
{
    enum { MANY = 150 };
    static const int32_t one[] = { 0, 1 }, few[] = { 0, 0, 30, 37 }, two[] = { 0, 70, 70, 135 },
                         deep[] = { 0, 1100, 1117 };
    int32_t many[MANY + 1] = { 0 };
    for (int e = 0; e < MANY; e++)
        many[e + 1] = many[e] + e * 7 % 5;
    check_grouped(one, 1, 1, 1, true);
    check_grouped(one, 1, 8, 8, false);
    check_grouped(few, 3, 29, 101, false);
    check_grouped(few, 3, 40, 64, true);
    check_grouped(few, 3, 16, 392, true);
    check_grouped(two, 3, 72, 136, true);
    check_grouped(deep, 2, 16, 24, false);
    check_grouped(many, MANY, 16, 24, true);
}

static void large_grouped_linears(void)
{
    static const int32_t uneven[] = { 0, 127, 127, 255, 384, 384, 600, 600, 601 },
                         full[] = { 0, 128, 300 }, one_has_all[] = { 0, 0, 0, 391, 391 },
                         many_and_few[] = { 0, 1100, 1164, 1164, 1180 };
    int32_t many[70 + 1] = { 0 }; /* more experts than a warp has lanes */
    for (int e = 0; e < 70; e++)
        many[e + 1] = many[e] + e * 7 % 23;
    check_grouped(uneven, 8, 136, 72, true);
    check_grouped(uneven, 8, 256, 512, false);
    check_grouped(uneven, 8, 29, 101, true);
    check_grouped(full, 2, 64, 72, true);
    check_grouped(one_has_all, 4, 392, 328, true);
    check_grouped(many, 70, 72, 136, true);
    check_grouped(many_and_few, 4, 200, 264, true);
}

/* `count` numbers from `at` on are the same bits. */
static bool same(const double *a, const double *b, int64_t at, int64_t count)
{
    return memcmp(a + at, b + at, (size_t)count * sizeof *a) == 0;
}

static bool unwritten(const double *x, int64_t count)
{
    int64_t i = 0;
    while (i < count && isnan(x[i]))
        i++;
    return i == count;
}

/* Whatever another expert's rows are, even not a number. */
static void experts_are_alone(void)
{
    enum { E = 5, N = 264, K = 136, ODD = 2 };
    static const int32_t offsets[] = { 0, 100, 161, 178, 478, 483 };
    static const mt_dtype dtypes[] = { MT_F32, MT_BF16 };
    op_case c = grouped_case(offsets, E, N, K, true);
    op_data d;
    op_fill(&c, 14, &d);
    for (int i = 0; i < 4; i++) {
        op_how how = { .dtype = dtypes[i / 2], .accumulate = i % 2 };
        op_result before, after;
        op_data odd;
        op_fill(&c, 14, &odd);
        for (int64_t r = offsets[ODD]; r < offsets[ODD + 1]; r++) {
            for (int64_t k = 0; k < K; k++)
                odd.in[0][r * K + k] = NAN;
            for (int64_t k = 0; k < N; k++)
                odd.d_out[0][r * N + k] = NAN;
        }
        op_run(&cuda, &c, &d, &how, &before);
        op_run(&cuda, &c, &odd, &how, &after);
        for (int e = 0; e < E; e++) {
            int64_t from = offsets[e], rows = offsets[e + 1] - from;
            bool all = same(after.out[0], before.out[0], from * N, rows * N) &&
                       same(after.d_in[0], before.d_in[0], from * K, rows * K) &&
                       same(after.d_in[1], before.d_in[1], (int64_t)e * N * K, (int64_t)N * K) &&
                       same(after.d_in[3], before.d_in[3], (int64_t)e * N, N);
            CHECK(all == (e != ODD), "expert %d %s the numbers of expert %d, %s%s", e,
                  e == ODD ? "does not depend on" : "depends on", (int)ODD,
                  mt_dtype_name(how.dtype), how.accumulate ? ", accumulating" : "");
        }
        op_result_free(&before);
        op_result_free(&after);
        op_data_free(&odd);
    }
    op_data_free(&d);
}

/* SOME experts from FIRST on by themselves, as a segment has them: the bits of the whole, and no
 * other rows are written. */
static void some_experts(void)
{
    enum { E = 6, FIRST = 2, SOME = 3, N = 264, K = 136 };
    static const int32_t offsets[] = { 0, 100, 161, 178, 478, 483, 700 };
    static const mt_dtype dtypes[] = { MT_F32, MT_BF16 };
    op_case whole = grouped_case(offsets, E, N, K, true), part = whole;
    op_data d;
    op_fill(&whole, 14, &d);
    op_data of_part = d;
    const int64_t weight = (int64_t)FIRST * N * K, bias = (int64_t)FIRST * N;
    part.in[1].rows = (int64_t)SOME * N;
    part.in[2].index = offsets + FIRST;
    part.in[2].cols = SOME + 1;
    part.in[3].rows = SOME;
    of_part.in[1] += weight;
    of_part.in[2] += FIRST;
    of_part.in[3] += bias;
    for (int i = 0; i < 4; i++) {
        op_how how = { .dtype = dtypes[i / 2], .accumulate = i % 2 };
        op_result all, some;
        op_run(&cuda, &whole, &d, &how, &all);
        op_run(&cuda, &part, &of_part, &how, &some);
        int64_t from = offsets[FIRST], rows = offsets[FIRST + SOME] - from, to = from + rows;
        CHECK(unwritten(some.out[0], from * N) &&
                  unwritten(some.out[0] + to * N, (offsets[E] - to) * N) &&
                  same(some.out[0], all.out[0], from * N, rows * N) &&
                  same(some.d_in[0], all.d_in[0], from * K, rows * K) &&
                  same(some.d_in[1], all.d_in[1] + weight, 0, (int64_t)SOME * N * K) &&
                  same(some.d_in[3], all.d_in[3] + bias, 0, (int64_t)SOME * N),
              "%s%s", mt_dtype_name(how.dtype), how.accumulate ? ", accumulating" : "");
        op_result_free(&all);
        op_result_free(&some);
    }
    op_data_free(&d);
}

/* What devices of another compute capability do. */
static void grouped_linears_elsewhere(void)
{
    side here = cuda;
    side_open_with("MEGATRAIN_WGMMA", "0", &cuda);
    grouped_linears();
    if (!only_small())
        large_grouped_linears();
    experts_are_alone();
    some_experts();
    side_close(&cuda);
    cuda = here;
}

static void check_slice(int64_t rows, int32_t heads, int64_t n, int64_t first, int64_t cols)
{
    const mt_slice_attr attr = { heads, 0, first, cols };
    op_case c = slice_case(&attr, rows, heads * n);
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
    static const int32_t width[][3] = { { 128, 64, 0 }, { 5, 3, 7 }, { 8, 16, 24 } };
    for (int i = 0; i < 3; i++)
        for (uint32_t shared = 0; shared < 4; shared += 2) {
            const mt_concat_attr attr = { 4, shared, { width[i][0], width[i][1], width[i][2] } };
            op_case c = concat_case(&attr, 37);
            op_check(&c, 16, row_bounds);
        }
}

/* ---- the loss -------------------------------------------------------------------------------- */

static void check_xent(int64_t tokens, int64_t hidden, int64_t vocab, double cap)
{
    static int32_t targets[9000];
    const mt_xent_attr attr = { cap };
    some_targets(targets, tokens, vocab);
    op_case c = xent_case(tokens, hidden, vocab, &attr, targets);
    op_check(&c, 7, (op_bounds){ 4e-6, 1e-3 });
}

static void losses(void)
{
    check_xent(37, 19, 101, 0);
    check_xent(37, 19, 101, 2);
    check_xent(64, 32, 4096, 0);
}

static void large_losses(void)
{
    check_xent(50, 16, 20011, 3);
    check_xent(8500, 7, 33, 0); /* two chunks */
}

static void nothing_to_learn(void)
{
    enum { T = 9, HIDDEN = 5, VOCAB = 11 };
    int32_t targets[T];
    const mt_xent_attr attr = { 0 };
    for (int i = 0; i < T; i++)
        targets[i] = -100;
    op_case c = xent_case(T, HIDDEN, VOCAB, &attr, targets);
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
    some_targets(targets, T, 300);
    op_case c = xent_case(T, 24, 300, &attr, targets);
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
    some_targets(targets, T, VOCAB);
    for (int cap = 0; cap <= 2; cap += 2) {
        const mt_xent_attr attr = { cap };
        op_case c = xent_case(T, 19, VOCAB, &attr, targets);
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

static void check_attention(const int32_t *starts, int64_t documents, mt_attn_attr attr, bool sinks)
{
    op_case c = attention_case(starts, documents, &attr, sinks);
    op_check(&c, 11, (op_bounds){ 4e-6, 1e-2 });
}

static void masks(void)
{
    check_attention(docs_37, 3, (mt_attn_attr){ 3, 1, 10, 10, 0.3, 0, 0 }, false);
    check_attention(docs_37, 3, (mt_attn_attr){ 3, 1, 10, 10, 0.3, 0, 4 }, false);
    check_attention(docs_37, 3, (mt_attn_attr){ 3, 3, 10, 10, 0.5, 2.0, 0 }, false);
    check_attention(docs_37, 3, (mt_attn_attr){ 4, 2, 10, 10, 0.3, 0, 4 }, true);
    check_attention(docs_37, 3, (mt_attn_attr){ 3, 1, 10, 6, 0.3, 3.0, 4 }, true);
    check_attention((const int32_t[]){ 0, 1 }, 1, (mt_attn_attr){ 3, 1, 10, 6, 0.3, 3.0, 4 }, true);
}

static void several_tiles(void)
{
    check_attention(one_300, 1, (mt_attn_attr){ 2, 1, 64, 64, 0.125, 0, 0 }, false);
    check_attention(docs_300, 4, (mt_attn_attr){ 4, 2, 64, 64, 0.125, 0, 0 }, true);
    check_attention(docs_300, 4, (mt_attn_attr){ 2, 1, 17, 9, 0.3, 4, 100 }, true);
    check_attention(one_300, 1, (mt_attn_attr){ 2, 2, 32, 32, 0.2, 0, 70 }, false);
}

static void head_dims(void)
{
    static const int32_t dims[][2] = { { 16, 16 },   { 32, 32 },   { 48, 48 },   { 64, 64 },
                                       { 80, 80 },   { 96, 96 },   { 128, 128 }, { 192, 128 },
                                       { 256, 256 }, { 100, 104 }, { 129, 31 },  { 64, 256 } };
    const int32_t small_docs[] = { 0, 66, 67, 70 }, large_docs[] = { 0, 140, 141, 200 };
    const int32_t *docs = only_small() ? small_docs : large_docs;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        check_attention(
            docs, 3,
            (mt_attn_attr){ 2, 1, dims[i][0], dims[i][1], 1 / sqrt((double)dims[i][0]), 0, 0 },
            false);
    check_attention((const int32_t[]){ 0, 70 }, 1, (mt_attn_attr){ 2, 1, 300, 280, 0.05, 0, 0 },
                    false);
    check_attention(docs, 3, (mt_attn_attr){ 2, 1, 128, 128, 0.09, 20, 77 }, true);
    check_attention(docs, 3, (mt_attn_attr){ 2, 1, 256, 256, 0.06, 20, 77 }, true);
}

/* Scores far apart: the running maximum has to keep e^s finite. */
static void large_scores(void)
{
    check_attention((const int32_t[]){ 0, 37 }, 1, (mt_attn_attr){ 2, 1, 16, 8, 3.0, 0, 0 }, false);
}

static void generation(void)
{
    static const int32_t docs_90[] = { 0, 90 };
    static const mt_attn_attr attr[] = { { 4, 2, 64, 64, 0.125, 0, 0 },
                                         { 4, 2, 64, 64, 0.2, 5, 9 } };
    for (int i = 0; i < 2; i++) {
        op_case whole = attention_case(docs_90, 1, &attr[i], false);
        op_generation g = { .side = &cuda,
                            .reference = &cpu,
                            .reference_dtype = MT_F64,
                            .state = { attention_state(&attr[i], 0, 96),
                                       attention_state(&attr[i], 1, 96) },
                            .prefill = 50,
                            .decode = 20 };
        g.dtype = MT_F32;
        g.tolerance = 1e-5;
        op_check_generation(&whole, &g);
        g.dtype = MT_BF16;
        g.tolerance = 1e-2;
        op_check_generation(&whole, &g);
    }
}

/* Data that cannot be stops the device with a text, and nothing is read out of bounds. Last, as the
 * failure is sticky. */
static void target_out_of_range(void)
{
    enum { T = 4, HIDDEN = 8, VOCAB = 11 };
    int32_t targets[T];
    const mt_xent_attr attr = { 0 };
    some_targets(targets, T, VOCAB);
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
    const mt_kernel *k = s->b->kernel(s->device, "linear_cross_entropy");
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
    RUN_LARGE(large_norms);
    RUN(ropes);
    RUN(embeddings);
    RUN(linears);
    RUN(exact_linears);
    RUN(routers);
    RUN(rows_of_experts);
    RUN(balances);
    RUN(grouped_linears);
    RUN_LARGE(large_grouped_linears);
    RUN(experts_are_alone);
    RUN(some_experts);
    RUN(grouped_linears_elsewhere);
    RUN(slices);
    RUN(concatenations);
    RUN(losses);
    RUN_LARGE(large_losses);
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
