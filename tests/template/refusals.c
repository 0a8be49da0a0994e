/* SPDX-License-Identifier: Apache-2.0
 *
 * What the builder and the model refuse, each with its text; and the layout that merged siblings
 * get.
 */
#include "core/base/status.h"
#include "core/template/model.h"
#include "tests/check.h"
#include "zoo.h"

enum { H = ZOO_HIDDEN };

static void refused(mt_build_fn build, const char *text)
{
    tpl *t = NULL;
    mt_status st = tpl_create("bad", build, NULL, NULL, &t);
    CHECK(st == MT_ERR_INVALID && !t, "accepted; expected '%s'", text);
    CHECK(strstr(status_text(), text), "'%s' lacks '%s'", status_text(), text);
    CHECK(strstr(status_text(), "template 'bad'"), "'%s' does not name the template",
          status_text());
    tpl_destroy(t);
}

#define BUILD(name, ...)                                                                           \
    static mt_status name(mt_builder *b, const void *arch, const void *arg)                        \
    {                                                                                              \
        (void)arch, (void)arg;                                                                     \
        __VA_ARGS__ return MT_OK;                                                                  \
    }

BUILD(no_output, mt_act(b, mt_input(b, 0, H), &(mt_act_attr){ 0 });)
BUILD(unused_param, mt_matrix(b, "spare", 3, 3, 0.1);
      mt_output(b, 0, mt_scale(b, mt_input(b, 0, H), 2));)
BUILD(unused_result, mt_val x = mt_input(b, 0, H); mt_scale(b, x, 3);
      mt_output(b, 0, mt_scale(b, x, 2));)
BUILD(unused_input, mt_input(b, 1, H); mt_output(b, 0, mt_scale(b, mt_input(b, 0, H), 2));)
BUILD(wrong_weight,
      mt_output(b, 0, mt_linear(b, mt_input(b, 0, H), mt_matrix(b, "w", 4, H + 1, 0.1), MT_NONE));)
BUILD(wrong_bias, mt_output(b, 0,
                            mt_linear(b, mt_input(b, 0, H), mt_matrix(b, "w", 4, H, 0.1),
                                      mt_vector(b, "b", 5, MT_INIT_ZEROS)));)
BUILD(twice, mt_val w = mt_matrix(b, "w", H, H, 0.1);
      mt_output(b, 0,
                mt_linear(b, mt_linear(b, mt_input(b, 0, H), w, MT_NONE),
                          mt_matrix(b, "w", H, H, 0.1), MT_NONE));)
BUILD(no_such_op, mt_val x = mt_input(b, 0, H);
      mt_output(b, 0, mt_op1_(b, "fold", &x, 1, NULL, 0));)
BUILD(other_shapes, mt_output(b, 0, mt_add(b, mt_input(b, 0, H), mt_input(b, 1, H + 1)));)
BUILD(heads, mt_val x = mt_input(b, 0, H);
      mt_output(b, 0, mt_attention(b, x, x, x, MT_NONE, &(mt_attn_attr){ 3, 2, 2, 2, 1.0, 0, 0 }));)
BUILD(output_is_input, mt_output(b, 0, mt_input(b, 0, H));)
BUILD(own_text, b->api->fail(b, "only %d experts", 3);
      mt_output(b, 0, mt_scale(b, mt_input(b, 0, H), 2));)
BUILD(gathered_alias, mt_output(b, 0, mt_embedding(b, mt_alias(b, "w", 5, 5)));)
BUILD(negative,
      mt_output(b, 0, mt_linear(b, mt_input(b, 0, H), mt_matrix(b, "w", -4, H, 0.1), MT_NONE));)

BUILD(exact_norm, mt_rmsnorm_attr norm = { 1e-6, MT_NORM_ROUND_THEN_SCALE, 1 };
      mt_output(b, 0,
                mt_rmsnorm(b, mt_input(b, 0, H), mt_exact_vector(b, "w", H, MT_INIT_ONES), &norm));)
BUILD(exact_alias, mt_param_info p = { .struct_size = sizeof p, .name = "w", .rows = 5, .cols = H };
      p.flags = MT_PARAM_ALIAS | MT_PARAM_STREAM_F32;
      mt_output(b, 0, mt_linear(b, mt_input(b, 0, H), b->api->param(b, &p), MT_NONE));)
BUILD(short_conv,
      mt_output(b, 0, mt_causal_conv(b, mt_input(b, 0, H), mt_matrix(b, "w", H - 1, 4, 0.1)));)
BUILD(delta_heads, mt_val x = mt_input(b, 0, 6);
      mt_output(b, 0, mt_gated_delta(b, x, x, x, x, x, &(mt_delta_attr){ 2, 3, 3, 2, 1e-6, 1 }));)
BUILD(delta_gate, mt_val x = mt_input(b, 0, 6), y = mt_input(b, 1, 2);
      mt_output(b, 0, mt_gated_delta(b, x, x, x, y, y, &(mt_delta_attr){ 2, 2, 3, 3, 1e-6, 1 }));)

BUILD(balance_mode, mt_router_attr a = { .top_k = 1 }; a.scale = 1;
      mt_val logits = mt_linear(b, mt_input(b, 0, H), mt_matrix(b, "r", 3, H, 0.1), MT_NONE);
      mt_routing to = mt_router(b, logits, MT_NONE, &a);
      mt_balance_loss(b, logits, &to, &(mt_balance_attr){ 3, 0, 1 });)
BUILD(rope_pairing, mt_rope_attr a = { .head_dim = H, .rotary_dim = 4, .pairing = 2 };
      mt_output(b, 0, mt_rope(b, mt_input(b, 0, H), &a, 1));)

static void builder(void)
{
    refused(no_output, "no output");
    refused(unused_param, "parameter 'spare' is never used");
    refused(unused_result, "result of 'scale' (operation 0) is never used");
    refused(unused_input, "input 1 is never used");
    refused(wrong_weight, "'linear': the weight must be [out, 10], found [4, 11]");
    refused(wrong_bias, "the bias must be a vector of 4 elements");
    refused(twice, "parameter 'w' is declared twice");
    refused(no_such_op, "no operation 'fold'");
    refused(other_shapes, "operands differ in shape: 10 and 11 columns");
    refused(heads, "3 heads do not divide into 2 KV heads");
    refused(output_is_input, "must be the result of an operation");
    refused(own_text, "only 3 experts");
    refused(gathered_alias, "a gathered table cannot be an alias");
    refused(negative, "shape [-4, 10] cannot be");
    refused(exact_norm, "'rmsnorm' does not take parameter 'w' in FP32");
    refused(exact_alias, "an alias cannot be streamed in FP32");
    refused(short_conv, "the weight must have a row for each of 10 columns");
    refused(delta_heads, "3 v heads of 2 do not divide into 2 k heads of 3");
    refused(delta_gate, "g must be an activation of 2 columns with a row a token, in the "
                        "statistics dtype");
    refused(balance_mode, "'balance_loss': mode 3 is unknown");
    refused(rope_pairing, "'rope': pairing 2 is unknown");
}

/* ---- models ---------------------------------------------------------------------------------- */

BUILD(embed, mt_output(b, 0, mt_embedding(b, mt_matrix(b, "table", ZOO_VOCAB, H, 0.1)));)
BUILD(double_up, mt_output(b, 0, mt_scale(b, mt_input(b, 0, H), 2));)
BUILD(wider, mt_output(b, 0, mt_scale(b, mt_input(b, 0, H + 2), 2));)
BUILD(tied_head,
      mt_output(b, 0,
                mt_linear_cross_entropy(b, mt_input(b, 0, H), mt_alias(b, "e.table", ZOO_VOCAB, H),
                                        &(mt_xent_attr){ 0 }));)
BUILD(lost_head,
      mt_output(b, 0,
                mt_linear_cross_entropy(b, mt_input(b, 0, H), mt_alias(b, "x.table", ZOO_VOCAB, H),
                                        &(mt_xent_attr){ 0 }));)
BUILD(small_head, mt_output(b, 0,
                            mt_linear_cross_entropy(b, mt_input(b, 0, H),
                                                    mt_alias(b, "e.table", ZOO_VOCAB - 1, H),
                                                    &(mt_xent_attr){ 0 }));)

/* A router of `experts` that adds to the loss over all layers. */
static mt_status balanced(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const int64_t *experts = arg;
    mt_router_attr router = { .top_k = 1, .scale = 1 };
    mt_balance_attr balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 1 };
    mt_val x = mt_input(b, 0, H);
    mt_val logits = mt_linear(b, x, mt_matrix(b, "r", *experts, H, 0.1), MT_NONE);
    mt_routing to = mt_router(b, logits, MT_NONE, &router);
    mt_balance_loss(b, logits, &to, &balance);
    mt_output(b, 0, mt_combine(b, mt_dispatch(b, x, &to), &to));
    return MT_OK;
}

static int shape; /* which model configure() makes */

static mt_status configure(const mt_config *c, mt_model *m, void **ret)
{
    (void)c, (void)ret;
    m->api->set_vocab(m, shape == 6 ? 0 : ZOO_VOCAB);
    int32_t e = mt_add_template(m, "embed", embed, NULL),
            d = mt_add_template(m, "mid", double_up, NULL),
            w = mt_add_template(m, "wide", wider, NULL),
            h = mt_add_template(m, "head",
                                shape == 3   ? lost_head
                                : shape == 4 ? small_head
                                             : tied_head,
                                NULL);
    if (shape != 1)
        mt_add_unit(m, "embed", e, "e.");
    mt_add_unit(m, "mid", shape == 2 ? w : d, "");
    if (shape == 5)
        mt_add_unit(m, "again", e, "e.");
    if (shape >= 9) {
        static const int64_t experts[2] = { 3, 4 };
        int32_t few = mt_add_template(m, "few", balanced, &experts[0]),
                more = mt_add_template(m, "more", balanced, &experts[1]);
        mt_add_unit(m, "first", few, "1.");
        mt_add_unit(m, "second", shape == 9 ? more : few, "2.");
    }
    if (shape != 7)
        mt_add_unit(m, "head", h, "h.");
    if (shape == 8)
        mt_add_unit(m, "lost", 99, "");
    return MT_OK;
}

static void destroy(void *arch)
{
    (void)arch;
}

static void models(void)
{
    static const char *const type[] = { "zoo" };
    static const mt_arch arch = { sizeof arch, 1, type, configure, destroy };
    static const char *const text[] = { "",
                                        "comes first but takes 1 values",
                                        "takes 1 (the first of 12 columns)",
                                        "'x.table', which no unit owns",
                                        "but it is [11, 10]",
                                        "unit 'again' takes 0",
                                        "no vocabulary",
                                        "is not a loss",
                                        "no template 99",
                                        "units 'first' and 'second' share sums over layers, of 7 "
                                        "and of 9 numbers" };
    for (shape = 0; shape < 11; shape++) {
        model *m = NULL;
        mt_status st = model_create(&arch, NULL, &m);
        if (shape == 10) {
            CHECK(st == MT_OK && m && m->tally == 7 && model_adds_loss(m), "%s", status_text());
        } else if (shape == 0) {
            CHECK(m && m->tally == 0 && !model_adds_loss(m), "a model without experts");
            CHECK(st == MT_OK, "%s", status_text());
            CHECK(m && m->n_params == 1 && m->total_params == ZOO_VOCAB * H,
                  "the tied table counts once");
            CHECK(m && m->units[2].slot[0] == 0 && m->params[0].gathered, "the alias is the table");
        } else {
            CHECK(st == MT_ERR_INVALID && !m, "model %d was accepted", shape);
            CHECK(strstr(status_text(), text[shape]), "model %d: '%s' lacks '%s'", shape,
                  status_text(), text[shape]);
        }
        model_destroy(m);
    }
}

static void merged_layout(void)
{
    const zoo_entry *z = zoo;
    while (strcmp(z->name, "block") != 0)
        z++;
    tpl *t = NULL;
    CHECK(tpl_create(z->name, z->build, NULL, z->arg, &t) == MT_OK, "%s", status_text());
    int64_t at[3] = { -1, -1, -1 }, gate = -1, up = -1, elems = 0;
    for (uint32_t i = 0; i < t->n_params; i++) {
        const tpl_param *p = &t->params[i];
        const char *n = p->info.name;
        at[0] = strcmp(n, "q") == 0 ? p->offset : at[0];
        at[1] = strcmp(n, "k") == 0 ? p->offset : at[1];
        at[2] = strcmp(n, "v") == 0 ? p->offset : at[2];
        gate = strcmp(n, "gate") == 0 ? p->offset : gate;
        up = strcmp(n, "up") == 0 ? p->offset : up;
        elems += p->elems;
    }
    CHECK(at[0] % TPL_PARAM_ALIGN == 0 && at[1] == at[0] + 24 * H && at[2] == at[1] + 12 * H,
          "q, k and v are not adjacent");
    CHECK(up == gate + 13 * H, "gate and up are not adjacent");
    CHECK(t->own_elems >= elems && t->own_elems < elems + 12 * TPL_PARAM_ALIGN, "padding");
    CHECK(t->gemm_flops_per_token == 2.0 * (48 * H + 24 * H + 39 * H), "%g FLOPs a token",
          t->gemm_flops_per_token);
    CHECK(t->recompute_gemm_flops[TPL_KEEP] == 0 && t->recompute_gemm_flops[TPL_SELECT] == 0,
          "keep and select recompute no GEMM");
    CHECK(t->recompute_gemm_flops[TPL_INPUT] == 2.0 * (48 * H + 24 * H + 39 * H),
          "input recomputes every GEMM that a later norm reads: %g",
          t->recompute_gemm_flops[TPL_INPUT]);
    tpl_destroy(t);
}

int main(void)
{
    RUN(builder);
    RUN(models);
    RUN(merged_layout);
    return check_done();
}
