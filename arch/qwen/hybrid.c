/* SPDX-License-Identifier: Apache-2.0
 *
 * Qwen3-Next (`qwen3_next`) and Qwen 3.5 (`qwen3_5`, `qwen3_5_moe` and their text models): gated
 * delta nets (arXiv 2412.06464) in most layers, gated attention in every fourth.
 * Reference: Hugging Face transformers, models/{qwen3_next,qwen3_5,qwen3_5_moe}.
 */
#include "qwen.h"

typedef struct hybrid {
    mt_decoder d; /* first */
    mt_decoder_attn full;
    mt_decoder_moe experts;
    mt_delta_attr delta;
    int64_t conv_width;
    int64_t interval; /* one layer of so many has attention, where layer_types does not say */
    int64_t sparse_step;
    bool next; /* Qwen3-Next: projections packed by k head */
    bool moe;
} hybrid;

/* What a layer is made of. */
typedef struct layer_kind {
    const char *name;
    bool linear, sparse;
} layer_kind;

static const layer_kind kinds[2][2] = {
    { { "block", false, false }, { "block_moe", false, true } },
    { { "block_delta", true, false }, { "block_delta_moe", true, true } },
};

enum { NEXT, DENSE, MOE };

static const mt_decoder defaults[] = {
    [NEXT] = { .vocab = 151936,
               .hidden = 2048,
               .intermediate = 5632,
               .layers = 48,
               .heads = 16,
               .kv_heads = 2 },
    [DENSE] = { .vocab = 248320,
                .hidden = 4096,
                .intermediate = 12288,
                .layers = 32,
                .heads = 16,
                .kv_heads = 4 },
    [MOE] = { .vocab = 248320,
              .hidden = 2048,
              .intermediate = 512, /* of no layer */
              .layers = 40,
              .heads = 16,
              .kv_heads = 2 },
};

/* ---- reading --------------------------------------------------------------------------------- */

static mt_status read_delta(const mt_config *c, hybrid *m)
{
    int64_t k_heads = 0, v_heads = 0, k_dim = 0, v_dim = 0;
    mt_status s;
    if ((s = mt_config_count(c, "linear_num_key_heads", 16, 1 << 16, &k_heads)) ||
        (s = mt_config_count(c, "linear_num_value_heads", 32, 1 << 16, &v_heads)) ||
        (s = mt_config_count(c, "linear_key_head_dim", 128, 1 << 16, &k_dim)) ||
        (s = mt_config_count(c, "linear_value_head_dim", 128, 1 << 16, &v_dim)) ||
        (s = mt_config_count(c, "linear_conv_kernel_dim", 4, 1 << 10, &m->conv_width)) ||
        (s = mt_config_count(c, "full_attention_interval", 4, INT32_MAX, &m->interval)))
        return s;
    if (v_heads % k_heads)
        return c->reject(c, "linear_num_key_heads", "%lld must divide linear_num_value_heads %lld",
                         (long long)k_heads, (long long)v_heads);
    m->delta = (mt_delta_attr){
        (int32_t)k_heads,       (int32_t)v_heads, (int32_t)k_dim, (int32_t)v_dim, 1e-6,
        1 / sqrt((double)k_dim)
    };
    return MT_OK;
}

static mt_status read_experts(const mt_config *c, hybrid *m)
{
    mt_decoder_moe *e = &m->experts;
    bool renormalise = true;
    mt_status s;
    *e = (mt_decoder_moe){ .experts = m->next ? 512 : 256,
                           .width = 512,
                           .router = { .top_k = m->next ? 10 : 8, .scale = 1 },
                           .shared_name = "mlp.shared_expert",
                           .shared_width = 512,
                           .shared_gate = true,
                           .fused = !m->next,
                           .balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 0.001 } };
    m->d.moe = e;
    m->sparse_step = 1;
    if ((s = mt_decoder_read_moe(c, e)) ||
        (s = mt_config_count(c, "moe_intermediate_size", e->width, INT32_MAX, &e->width)) ||
        (s = mt_config_count(c, "shared_expert_intermediate_size", e->shared_width, INT32_MAX,
                             &e->shared_width)) ||
        (m->next && (s = mt_config_bool(c, "norm_topk_prob", true, &renormalise))) ||
        (m->next &&
         (s = mt_config_count(c, "decoder_sparse_step", 1, INT32_MAX, &m->sparse_step))) ||
        (m->next && (s = qwen_check_dense(c, m->d.layers))))
        return s;
    e->router.renormalise = renormalise;
    return MT_OK;
}

static mt_status read_config(const mt_config *c, const char *type, mt_model *model, void *state)
{
    hybrid *m = state;
    const mt_rope_spec rope = { .struct_size = sizeof rope,
                                .theta = 10000,
                                .partial_rotary_factor = 0.25 };
    mt_decoder *d = &m->d;
    mt_status s;
    m->next = strcmp(type, "qwen3_next") == 0;
    m->moe = m->next || strstr(type, "_moe") != NULL;
    *d = defaults[m->next ? NEXT : m->moe ? MOE : DENSE];
    d->head_dim = 256;
    d->positions = 32768;
    d->norm_eps = 1e-6;
    d->init_std = 0.02;
    d->norm = MT_NORM_ONE_PLUS;
    d->activation = MT_ACT_SILU;
    if ((s = mt_decoder_read(c, d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = mt_decoder_read_attention(c, d, false, &m->full)) || (s = read_delta(c, m)) ||
        (m->moe && (s = read_experts(c, m))) ||
        (s = mt_model_rope_of(model, c, &rope, d->head_dim, &m->full.rope)))
        return s;
    m->full.qk_norm = m->full.gated = true;
    return MT_OK;
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* The projections of a delta net, each [rows, hidden] of one of our parameters. */
typedef struct projections {
    mt_val qkv, z, b, a;
} projections;

static mt_val project(mt_builder *b, const hybrid *m, mt_val x, const char *name, int64_t rows,
                      const mt_source *sources, uint32_t n)
{
    mt_param_layout layout = { sources, n, 0 };
    mt_val w = mt_laid_out(b, name, rows, m->d.hidden, MT_INIT_NORMAL, m->d.init_std, &layout,
                           n > 0 ? 1 : 0);
    return mt_linear(b, x, w, MT_NONE);
}

/* Qwen3-Next packs q, k, v and z of a k head after each other, and b and a likewise. */
static projections project_all(mt_builder *b, const hybrid *m, mt_val x)
{
    static const char qkvz[] = "linear_attn.in_proj_qkvz.weight";
    static const char ba[] = "linear_attn.in_proj_ba.weight";
    const mt_delta_attr *a = &m->delta;
    int64_t group = a->v_heads / a->k_heads, k = a->k_dim, v = group * a->v_dim;
    int64_t keys = a->k_heads * k, values = a->k_heads * v, step = 2 * (k + v);
    const mt_source of_qkv[] = {
        { .name = qkvz, .n_rows = keys, .block = k, .step = step },
        { .name = qkvz,
          .first_row = keys,
          .n_rows = keys,
          .from_row = k,
          .block = k,
          .step = step },
        { .name = qkvz, .first_row = 2 * keys, .from_row = 2 * k, .block = v, .step = step }
    };
    const mt_source of_z = { .name = qkvz, .from_row = 2 * k + v, .block = v, .step = step };
    const mt_source of_b = { .name = ba, .block = group, .step = 2 * group };
    const mt_source of_a = { .name = ba, .from_row = group, .block = group, .step = 2 * group };
    uint32_t one = m->next ? 1 : 0;
    return (projections){
        project(b, m, x, "linear_attn.in_proj_qkv.weight", 2 * keys + values, of_qkv, 3 * one),
        project(b, m, x, "linear_attn.in_proj_z.weight", values, &of_z, one),
        project(b, m, x, "linear_attn.in_proj_b.weight", a->v_heads, &of_b, one),
        project(b, m, x, "linear_attn.in_proj_a.weight", a->v_heads, &of_a, one)
    };
}

/* From normalised x [T, hidden] to the branch's result [T, hidden]. */
static mt_val delta_net(mt_builder *b, const hybrid *m, mt_val x)
{
    static const mt_act_attr silu = { .kind = MT_ACT_SILU }, sigmoid = { .kind = MT_ACT_SIGMOID };
    static const char conv_name[] = "linear_attn.conv1d.weight";
    static const mt_source of_conv = { .name = conv_name, .flags = MT_SOURCE_MIDDLE_ONE };
    static const mt_param_layout conv_layout = { &of_conv, 1, 0 };
    const mt_delta_attr *a = &m->delta;
    int64_t keys = (int64_t)a->k_heads * a->k_dim, values = (int64_t)a->v_heads * a->v_dim;
    projections p = project_all(b, m, x);
    mt_val conv = mt_laid_out(b, conv_name, 2 * keys + values, m->conv_width, MT_INIT_NORMAL,
                              m->d.init_std, &conv_layout, 1);
    mt_val qkv = mt_act(b, mt_causal_conv(b, p.qkv, conv), &silu);
    mt_val g =
        mt_log_decay(b, p.a, mt_exact_vector(b, "linear_attn.A_log", a->v_heads, MT_INIT_LOG_DECAY),
                     mt_exact_vector(b, "linear_attn.dt_bias", a->v_heads, MT_INIT_ONES));
    mt_val o =
        mt_gated_delta(b, mt_slice(b, qkv, 1, 0, keys), mt_slice(b, qkv, 1, keys, keys),
                       mt_slice(b, qkv, 1, 2 * keys, values), g, mt_act(b, p.b, &sigmoid), a);
    mt_rmsnorm_attr norm = { m->d.norm_eps, MT_NORM_ROUND_THEN_SCALE, a->v_heads };
    o = mt_rmsnorm(b, o, mt_vector(b, "linear_attn.norm.weight", a->v_dim, MT_INIT_ONES), &norm);
    return mt_decoder_linear(b, &m->d, mt_glu(b, p.z, o, &silu), "linear_attn.out_proj",
                             m->d.hidden, values, false);
}

static mt_status block(mt_builder *b, const void *arch, const void *arg)
{
    const hybrid *m = arch;
    const mt_decoder *d = &m->d;
    const layer_kind *kind = arg;
    mt_val x = mt_input(b, 0, d->hidden);
    mt_val h = mt_decoder_norm(b, d, x, "input_layernorm");
    h = kind->linear ? delta_net(b, m, h) : mt_decoder_attention(b, d, &m->full, h);
    x = mt_add(b, x, h);
    h = mt_decoder_norm(b, d, x, "post_attention_layernorm");
    h = kind->sparse ? mt_decoder_moe_mlp(b, d, &m->experts, h)
                     : mt_decoder_mlp(b, d, h, "mlp", d->intermediate);
    mt_output(b, 0, mt_add(b, x, h));
    return MT_OK;
}

static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const hybrid *m = state;
    int32_t tpl[2][2] = { { -1, -1 }, { -1, -1 } };
    model->api->ignore_tensor(model, "mtp.*");
    model->api->ignore_tensor(model, "visual.*");
    model->api->ignore_tensor(model, "model.visual.*");
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool linear = false, sparse = m->moe;
        mt_status s;
        if ((s = mt_decoder_layer_is(c, &m->d, i, "linear_attention", (i + 1) % m->interval != 0,
                                     &linear)) ||
            (m->next && (s = qwen_has_experts(c, m->sparse_step, i, &sparse))))
            return s;
        const layer_kind *kind = &kinds[linear][sparse];
        mt_decoder_layer(model, i, &tpl[linear][sparse], kind->name, block, kind);
    }
    return MT_OK;
}

const mt_decoder_family qwen_hybrid = { sizeof(hybrid), "qwen3_next", read_config, add_layers };
