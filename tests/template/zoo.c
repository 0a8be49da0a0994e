/* SPDX-License-Identifier: Apache-2.0
 *
 * One template for each operation and for each way in which graphs are awkward.
 */
#include "zoo.h"

#include "../plugin.h"
#include "core/base/log.h"
#include "core/base/status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { H = ZOO_HIDDEN };

static mt_val weight(mt_builder *b, const char *name, int64_t rows, int64_t cols)
{
    return mt_matrix(b, name, rows, cols, 0.3);
}

static mt_rope_attr rope_attr(int32_t dim, int32_t rotary, mt_rope_pairing pairing)
{
    mt_rope_attr a = { .heads = 1, .head_dim = dim, .rotary_dim = rotary, .pairing = pairing };
    a.attention_factor = 1.25f;
    for (int i = 0; i < rotary / 2; i++)
        a.inv_freq[i] = powf(10.0f, -2.0f * (float)i / (float)rotary);
    return a;
}

static const mt_act_attr silu = { .kind = MT_ACT_SILU };

static mt_status embedding(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_output(b, 0, mt_scale(b, mt_embedding(b, weight(b, "table", ZOO_VOCAB, 7)), 1.75));
    return MT_OK;
}

static mt_status linear(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val x = mt_input(b, 0, H);
    mt_output(b, 0, mt_linear(b, x, weight(b, "w", 7, H), mt_vector(b, "b", 7, MT_INIT_ZEROS)));
    return MT_OK;
}

/* Three siblings with biases of odd sizes, each used in another way. */
static mt_status siblings(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val x = mt_input(b, 0, H);
    mt_val p = mt_linear(b, x, weight(b, "p", 5, H), mt_vector(b, "pb", 5, MT_INIT_ZEROS));
    mt_val q = mt_linear(b, x, weight(b, "q", 5, H), mt_vector(b, "qb", 5, MT_INIT_ZEROS));
    mt_val alone = mt_linear(b, x, weight(b, "no_bias", 5, H), MT_NONE);
    mt_val r = mt_linear(b, x, weight(b, "r", 3, H), mt_vector(b, "rb", 3, MT_INIT_ZEROS));
    mt_output(b, 0, mt_mul(b, mt_mul(b, p, q), alone));
    mt_output(b, 1, mt_act(b, r, &(mt_act_attr){ .kind = MT_ACT_SIGMOID }));
    return MT_OK;
}

static mt_status norm(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const mt_rmsnorm_attr *a = arg;
    mt_val w = mt_vector(b, "w", H / a->heads, MT_INIT_ONES);
    mt_output(b, 0, mt_rmsnorm(b, mt_input(b, 0, H), w, a));
    return MT_OK;
}

static mt_status act(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    mt_output(b, 0, mt_act(b, mt_input(b, 0, H), arg));
    return MT_OK;
}

static mt_status glu(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    mt_output(b, 0, mt_glu(b, mt_input(b, 0, H), mt_input(b, 1, H), arg));
    return MT_OK;
}

static mt_status rope(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    mt_output(b, 0, mt_rope(b, mt_input(b, 0, 18), arg, 3));
    return MT_OK;
}

static mt_status attention(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const mt_attn_attr *a = arg;
    mt_val q = mt_input(b, 0, (int64_t)a->heads * a->qk_dim);
    mt_val k = mt_input(b, 1, (int64_t)a->kv_heads * a->qk_dim);
    mt_val v = mt_input(b, 2, (int64_t)a->kv_heads * a->v_dim);
    mt_val sinks = a->window == 2 ? mt_vector(b, "sinks", a->heads, MT_INIT_ZEROS) : MT_NONE;
    mt_output(b, 0, mt_attention(b, q, k, v, sinks, a));
    return MT_OK;
}

static mt_status loss(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    mt_val h = mt_rmsnorm(b, mt_input(b, 0, H), mt_vector(b, "norm", H, MT_INIT_ONES),
                          &(mt_rmsnorm_attr){ 1e-5, MT_NORM_ONE_PLUS, 1 });
    mt_output(b, 0, mt_linear_cross_entropy(b, h, weight(b, "head", ZOO_VOCAB, H), arg));
    return MT_OK;
}

/* The residual stream in every awkward form: x + x, sums of sums, a value read by four. */
static mt_status residuals(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val x = mt_input(b, 0, H), y = mt_input(b, 1, H);
    mt_val twice = mt_add(b, x, x);
    mt_val sum = mt_add(b, twice, y);
    mt_val s = mt_act(b, sum, &(mt_act_attr){ .kind = MT_ACT_SILU });
    mt_val m = mt_mul(b, sum, s);
    mt_val z = mt_add(b, mt_add(b, sum, m), mt_add(b, y, s));
    mt_output(b, 0, mt_add(b, z, mt_linear(b, z, weight(b, "w", H, H), MT_NONE)));
    mt_output(b, 1, mt_scale(b, y, -0.5));
    return MT_OK;
}

/* An addition whose gradient lives inside the unit, so that inputs cannot share it. */
static mt_status inner_add(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val x = mt_input(b, 0, H), y = mt_input(b, 1, H);
    mt_output(b, 0, mt_linear(b, mt_add(b, x, y), weight(b, "w", 4, H), MT_NONE));
    return MT_OK;
}

/* A weight that two operations use, and an output that goes on inside the unit. */
static mt_status reuse(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val w = weight(b, "w", H, H);
    mt_val x = mt_input(b, 0, H);
    mt_val once = mt_linear(b, x, w, MT_NONE);
    mt_val again =
        mt_linear(b, mt_act(b, once, &(mt_act_attr){ .kind = MT_ACT_GELU_TANH }), w, MT_NONE);
    mt_output(b, 0, once);
    mt_output(b, 1, mt_add(b, again, mt_scale(b, once, 0.25)));
    return MT_OK;
}

static mt_status frozen(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_param_info p = { .struct_size = sizeof p,
                        .flags = MT_PARAM_FROZEN,
                        .name = "w",
                        .rows = H,
                        .cols = H,
                        .init = MT_INIT_NORMAL,
                        .init_std = 0.3f };
    mt_val x = mt_input(b, 0, H);
    mt_output(b, 0,
              mt_linear(b, mt_linear(b, x, b->api->param(b, &p), MT_NONE), weight(b, "v", 3, H),
                        MT_NONE));
    return MT_OK;
}

/* A whole block with QK norms, four norms, window and softcap: Qwen3 and Gemma at once. */
static mt_status block(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const mt_attn_attr *a = arg;
    int64_t q_dim = (int64_t)a->heads * a->qk_dim, kv_dim = (int64_t)a->kv_heads * a->qk_dim;
    mt_rmsnorm_attr whole = { 1e-6, MT_NORM_ONE_PLUS, 1 }, head = whole;
    mt_rope_attr r = rope_attr(a->qk_dim, a->qk_dim, MT_ROPE_HALF_SPLIT);
    mt_val x = mt_input(b, 0, H);
    mt_val h = mt_rmsnorm(b, x, mt_vector(b, "n1", H, MT_INIT_ZEROS), &whole);
    mt_val q = mt_linear(b, h, weight(b, "q", q_dim, H), MT_NONE);
    mt_val k = mt_linear(b, h, weight(b, "k", kv_dim, H), MT_NONE);
    mt_val v = mt_linear(b, h, weight(b, "v", kv_dim, H), MT_NONE);
    head.heads = a->heads;
    q = mt_rmsnorm(b, q, mt_vector(b, "qn", a->qk_dim, MT_INIT_ZEROS), &head);
    head.heads = a->kv_heads;
    k = mt_rmsnorm(b, k, mt_vector(b, "kn", a->qk_dim, MT_INIT_ZEROS), &head);
    mt_val o =
        mt_attention(b, mt_rope(b, q, &r, a->heads), mt_rope(b, k, &r, a->kv_heads), v, MT_NONE, a);
    o = mt_linear(b, o, weight(b, "o", H, q_dim), MT_NONE);
    x = mt_add(b, x, mt_rmsnorm(b, o, mt_vector(b, "n2", H, MT_INIT_ZEROS), &whole));
    h = mt_rmsnorm(b, x, mt_vector(b, "n3", H, MT_INIT_ZEROS), &whole);
    mt_val g = mt_linear(b, h, weight(b, "gate", 13, H), MT_NONE);
    mt_val u = mt_linear(b, h, weight(b, "up", 13, H), MT_NONE);
    h = mt_linear(b, mt_glu(b, g, u, &(mt_act_attr){ .kind = MT_ACT_GELU_TANH }),
                  weight(b, "down", H, 13), MT_NONE);
    mt_output(b, 0, mt_add(b, x, mt_rmsnorm(b, h, mt_vector(b, "n4", H, MT_INIT_ZEROS), &whole)));
    return MT_OK;
}

/* Slices that become views (they cover one value), of which one is sliced again, and such that do
 * not: of an input, overlapping, of heads, of an output. */
static mt_status slices(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val x = mt_input(b, 0, H);
    mt_val left = mt_linear(b, x, weight(b, "left", 9, H), MT_NONE);
    mt_val right = mt_linear(b, x, weight(b, "right", 4, H), MT_NONE);
    mt_val first = mt_slice(b, left, 1, 0, 3), rest = mt_slice(b, left, 1, 3, 6);
    mt_val second = mt_slice(b, rest, 1, 0, 3), third = mt_slice(b, rest, 1, 3, 3);
    mt_val product = mt_mul(b, mt_mul(b, first, second), mt_act(b, third, &silu));
    mt_val more = mt_mul(b, mt_slice(b, right, 1, 0, 3), mt_slice(b, right, 1, 1, 3));
    mt_val heads = mt_mul(b, mt_slice(b, x, 2, 1, 3), mt_slice(b, x, 1, 4, 6));
    mt_val out = mt_linear(b, heads, weight(b, "w", H, 6), MT_NONE);
    mt_output(b, 0, out);
    mt_output(b, 1, mt_add(b, mt_add(b, product, more), mt_slice(b, out, 1, 7, 3)));
    mt_output(b, 2, mt_slice(b, x, 1, 9, 1));
    return MT_OK;
}

static mt_status concat(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    mt_val x = mt_input(b, 0, 6), in[3] = { x, mt_input(b, 1, 2), mt_act(b, x, &silu) };
    mt_concat_attr heads = { .heads = 3, .shared = 2, .cols = { 2, 2, 2 } }, whole = { .heads = 1 };
    mt_val c = mt_concat(b, in, 3, &heads);
    mt_val two[2] = { c, in[1] };
    whole.cols[0] = 18;
    whole.cols[1] = 2;
    mt_output(b, 0, c);
    mt_output(b, 1, mt_concat(b, two, 2, &whole));
    return MT_OK;
}

/* Multi-head latent attention of DeepSeek: keys and values from a shared latent, one rotary key
 * for all heads, queries and keys wider than values. */
static mt_status mla(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch, (void)arg;
    enum { HEADS = 3, NOPE = 4, ROPE = 2, V = 3, LATENT = 5, Q_LATENT = 7 };
    mt_rmsnorm_attr norm_attr = { 1e-6, MT_NORM_ROUND_THEN_SCALE, 1 };
    mt_rope_attr r = rope_attr(ROPE, ROPE, MT_ROPE_INTERLEAVED);
    mt_val x = mt_input(b, 0, H);
    mt_val q = mt_linear(b, x, weight(b, "q_a", Q_LATENT, H), MT_NONE);
    mt_val kv = mt_linear(b, x, weight(b, "kv_a", LATENT + ROPE, H), MT_NONE);
    q = mt_rmsnorm(b, q, mt_vector(b, "q_norm", Q_LATENT, MT_INIT_ONES), &norm_attr);
    q = mt_linear(b, q, weight(b, "q_b", HEADS * (NOPE + ROPE), Q_LATENT), MT_NONE);
    mt_val latent = mt_rmsnorm(b, mt_slice(b, kv, 1, 0, LATENT),
                               mt_vector(b, "kv_norm", LATENT, MT_INIT_ONES), &norm_attr);
    mt_val k_rope = mt_rope(b, mt_slice(b, kv, 1, LATENT, ROPE), &r, 1);
    kv = mt_linear(b, latent, weight(b, "kv_b", HEADS * (NOPE + V), LATENT), MT_NONE);
    mt_val q_parts[2] = { mt_slice(b, q, HEADS, 0, NOPE),
                          mt_rope(b, mt_slice(b, q, HEADS, NOPE, ROPE), &r, HEADS) };
    mt_val k_parts[2] = { mt_slice(b, kv, HEADS, 0, NOPE), k_rope };
    mt_concat_attr join = { .heads = HEADS, .cols = { NOPE, ROPE } };
    q = mt_concat(b, q_parts, 2, &join);
    join.shared = 2;
    mt_val k = mt_concat(b, k_parts, 2, &join), v = mt_slice(b, kv, HEADS, NOPE, V);
    mt_val o = mt_attention(b, q, k, v, MT_NONE,
                            &(mt_attn_attr){ HEADS, HEADS, NOPE + ROPE, V, 0.4, 0, 0 });
    mt_output(b, 0, mt_add(b, x, mt_linear(b, o, weight(b, "o", H, HEADS * V), MT_NONE)));
    return MT_OK;
}

/* Router, experts with stacked gate and up, a shared expert behind a gate of its own. */
static mt_status moe(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const zoo_moe *m = arg;
    enum { N = 3 };
    const char *const name[] = { "gate_up_bias", "down_bias" };
    mt_val x = mt_input(b, 0, H), bias[2] = { MT_NONE, MT_NONE }, correction = MT_NONE;
    if (m->corrected) {
        mt_param_info p = { .struct_size = sizeof p,
                            .flags = MT_PARAM_FROZEN,
                            .name = "correction",
                            .cols = m->experts };
        correction = b->api->param(b, &p);
    }
    for (int i = 0; i < 2 && m->biased; i++)
        bias[i] = weight(b, name[i], m->experts, i ? H : 2 * N);
    mt_val h = mt_rmsnorm(b, x, mt_vector(b, "norm", H, MT_INIT_ONES),
                          &(mt_rmsnorm_attr){ 1e-6, MT_NORM_FP32_SCALE, 1 });
    mt_val w = weight(b, "router", m->experts, H);
    mt_val logits = m->exact ? mt_exact_linear(b, h, w) : mt_linear(b, h, w, MT_NONE);
    mt_routing r = mt_router(b, logits, correction, &m->router);
    if (m->balance.coef > 0)
        mt_balance_loss(b, logits, &r, &m->balance);
    mt_val rows = mt_dispatch(b, h, &r);
    mt_val both =
        mt_grouped_linear(b, rows, weight(b, "gate_up", m->experts * 2 * N, H), bias[0], &r);
    mt_val a = mt_glu(b, mt_slice(b, both, 1, 0, N), mt_slice(b, both, 1, N, N), &m->act);
    mt_val y = mt_grouped_linear(b, a, weight(b, "down", m->experts * H, N), bias[1], &r);
    y = mt_combine(b, y, &r);
    if (m->shared) {
        mt_val g = mt_linear(b, h, weight(b, "shared_gate", N, H), MT_NONE);
        mt_val u = mt_linear(b, h, weight(b, "shared_up", N, H), MT_NONE);
        mt_val s = mt_linear(b, mt_glu(b, g, u, &m->act), weight(b, "shared_down", H, N), MT_NONE);
        y = mt_add(b, y, s);
    }
    mt_output(b, 0, mt_add(b, x, y));
    return MT_OK;
}

static mt_status causal_conv(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const int64_t *width = arg;
    mt_output(b, 0, mt_causal_conv(b, mt_input(b, 0, H), weight(b, "w", H, *width)));
    return MT_OK;
}

/* A gated delta net: convolved q, k and v, decay, state, gated norm. */
static mt_status delta_net(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const mt_delta_attr *a = arg;
    int64_t keys = (int64_t)a->k_heads * a->k_dim, values = (int64_t)a->v_heads * a->v_dim;
    mt_val x = mt_input(b, 0, H);
    mt_val qkv = mt_linear(b, x, weight(b, "qkv", 2 * keys + values, H), MT_NONE);
    mt_val z = mt_linear(b, x, weight(b, "z", values, H), MT_NONE);
    mt_val beta = mt_linear(b, x, weight(b, "b", a->v_heads, H), MT_NONE);
    mt_val decay = mt_linear(b, x, weight(b, "a", a->v_heads, H), MT_NONE);
    qkv = mt_act(b, mt_causal_conv(b, qkv, weight(b, "conv", 2 * keys + values, 3)), &silu);
    decay = mt_log_decay(b, decay, mt_exact_vector(b, "a_log", a->v_heads, MT_INIT_ZEROS),
                         mt_vector(b, "dt_bias", a->v_heads, MT_INIT_ONES));
    beta = mt_act(b, beta, &(mt_act_attr){ .kind = MT_ACT_SIGMOID });
    mt_val o = mt_gated_delta(b, mt_slice(b, qkv, 1, 0, keys), mt_slice(b, qkv, 1, keys, keys),
                              mt_slice(b, qkv, 1, 2 * keys, values), decay, beta, a);
    o = mt_rmsnorm(b, o, mt_vector(b, "norm", a->v_dim, MT_INIT_ONES),
                   &(mt_rmsnorm_attr){ 1e-6, MT_NORM_ROUND_THEN_SCALE, a->v_heads });
    mt_output(
        b, 0,
        mt_add(b, x, mt_linear(b, mt_glu(b, z, o, &silu), weight(b, "out", H, values), MT_NONE)));
    return MT_OK;
}

static mt_rope_attr half, interleaved;

__attribute__((constructor)) static void fill(void)
{
    half = rope_attr(6, 4, MT_ROPE_HALF_SPLIT);
    interleaved = rope_attr(6, 6, MT_ROPE_INTERLEAVED);
}

const zoo_entry zoo[] = {
    { "embedding", embedding, NULL },
    { "linear", linear, NULL },
    { "siblings", siblings, NULL },
    { "norm, round then scale", norm, &(mt_rmsnorm_attr){ 1e-5, MT_NORM_ROUND_THEN_SCALE, 1 } },
    { "norm, FP32 scale", norm, &(mt_rmsnorm_attr){ 1e-5, MT_NORM_FP32_SCALE, 1 } },
    { "norm, one plus", norm, &(mt_rmsnorm_attr){ 1e-5, MT_NORM_ONE_PLUS, 1 } },
    { "norm of heads", norm, &(mt_rmsnorm_attr){ 1e-5, MT_NORM_ROUND_THEN_SCALE, 2 } },
    { "silu", act, &(mt_act_attr){ .kind = MT_ACT_SILU } },
    { "gelu", act, &(mt_act_attr){ .kind = MT_ACT_GELU_TANH } },
    { "sigmoid", act, &(mt_act_attr){ .kind = MT_ACT_SIGMOID } },
    { "swiglu", glu, &(mt_act_attr){ .kind = MT_ACT_SILU } },
    { "geglu", glu, &(mt_act_attr){ .kind = MT_ACT_GELU_TANH } },
    { "clamped swiglu", glu, &(mt_act_attr){ .kind = MT_ACT_CLAMPED_SWIGLU, .limit = 0.6 } },
    { "rope, partial", rope, &half },
    { "rope, interleaved", rope, &interleaved },
    { "attention", attention, &(mt_attn_attr){ 4, 4, 6, 6, 0.4, 0, 0 } },
    { "attention, grouped, odd", attention, &(mt_attn_attr){ 6, 2, 5, 3, 0.4, 0, 0 } },
    { "attention, window", attention, &(mt_attn_attr){ 3, 1, 4, 4, 0.5, 0, 3 } },
    { "attention, softcap", attention, &(mt_attn_attr){ 2, 1, 4, 4, 0.9, 0.8, 0 } },
    { "attention, sinks, window, softcap", attention, &(mt_attn_attr){ 4, 2, 4, 6, 0.9, 1.5, 2 } },
    { "loss", loss, &(mt_xent_attr){ 0 } },
    { "loss, softcap", loss, &(mt_xent_attr){ 1.5 } },
    { "residuals", residuals, NULL },
    { "addition inside", inner_add, NULL },
    { "reuse", reuse, NULL },
    { "frozen", frozen, NULL },
    { "block", block, &(mt_attn_attr){ 4, 2, 6, 6, 0.4, 5.0, 4 } },
    { "slices", slices, NULL },
    { "concat", concat, NULL },
    { "latent attention", mla, NULL },
    { "experts, softmax", moe, &(zoo_moe){ 5, .router = { .top_k = 2, .scale = 1 } } },
    { "experts, renormalised", moe,
      &(zoo_moe){ 8, .router = { .top_k = 3, .renormalise = 1, .scale = 1 } } },
    { "experts, one pick", moe, &(zoo_moe){ 3, .shared = true, .router = { 1, .scale = 2.5 } } },
    { "experts, one", moe, &(zoo_moe){ 1, .router = { .top_k = 1, .scale = 0.5 } } },
    { "experts, all picked", moe,
      &(zoo_moe){ 3, .router = { .top_k = 3, .renormalise = 1, .scale = 1 } } },
    { "experts, sigmoid", moe,
      &(zoo_moe){ 7, .shared = true, .router = { 2, MT_ROUTER_SIGMOID, .scale = 1.5 } } },
    { "experts, groups by maximum", moe,
      &(zoo_moe){ 6, .shared = true, .router = { 3, MT_ROUTER_SOFTMAX, 0, 3, 2, .scale = 16 } } },
    { "experts, groups by sums, corrected", moe,
      &(zoo_moe){ 8, .corrected = true, .shared = true, .exact = true,
                  .router = { 2, MT_ROUTER_SIGMOID, 1, 4, 2, MT_GROUP_TOP2_SUM, 2.5 } } },
    { "experts, biased, clamped", moe,
      &(zoo_moe){ 5, .biased = true, .act = { MT_ACT_CLAMPED_SWIGLU, 0, 0.7 },
                  .router = { .top_k = 2, .renormalise = 1, .scale = 1 } } },
    { "experts, balanced by layer", moe,
      &(zoo_moe){ 5, .router = { .top_k = 2, .renormalise = 1, .scale = 1 },
                  .balance = { MT_BALANCE_HF_PER_LAYER, 0, 0.3 } } },
    { "experts, balanced by document", moe,
      &(zoo_moe){ 6, .shared = true, .router = { .top_k = 3, .scale = 1 },
                  .balance = { MT_BALANCE_DEEPSEEK_SEQ, 0, 0.7 } } },
    { "experts, balanced over layers", moe,
      &(zoo_moe){ 5, .router = { .top_k = 2, .scale = 1 },
                  .balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 0.4 } } },
    { "causal convolution", causal_conv, &(int64_t){ 4 } },
    { "causal convolution of one tap", causal_conv, &(int64_t){ 1 } },
    { "delta net", delta_net, &(mt_delta_attr){ 2, 2, 4, 4, 1e-6, 0.5 } },
    { "delta net, grouped, odd", delta_net, &(mt_delta_attr){ 2, 6, 5, 3, 1e-6, 0.4 } },
    { NULL, NULL, NULL },
};

const zoo_entry *zoo_find(const char *name)
{
    const zoo_entry *z = zoo;
    while (strcmp(z->name, name) != 0)
        z++;
    return z;
}

const mt_backend *zoo_backend(void **ret_device)
{
    const mt_backend *b = plugin_interface(getenv("MT_TEST_CPU_PLUGIN"), MT_BACKEND_INTERFACE);
    if (b->open(0, 2, ret_device) != MT_OK) {
        fprintf(stderr, "cannot open the CPU device: %s\n", status_text());
        exit(1);
    }
    return b;
}
