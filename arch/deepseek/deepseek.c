/* SPDX-License-Identifier: Apache-2.0
 *
 * DeepSeek-MoE (`deepseek`), DeepSeek V2, V2 Lite and Coder V2 (`deepseek_v2`), and V3, R1 and what
 * shares their class (`deepseek_v3`). References: the model code that is released with the first;
 * Hugging Face transformers, models/{deepseek_v2,deepseek_v3}.
 *
 * The routers' logits are formed in the compute dtype, the choice of experts from them in FP32. In
 * a BF16 run e_score_correction_bias, a frozen FP32 parameter in the host, is streamed in BF16 like
 * all others. No auxiliary loss, as in transformers.
 */
#include <megatrain/decoder.h>
#include <megatrain/plugin.h>

#include <stdlib.h>

typedef enum version { V1, V2, V3 } version;

/* Multi-head latent attention: keys and values from a narrow common latent, positions only in the
 * last columns of q and k, those of k one head that all heads share. */
typedef struct latent_attn {
    int64_t q_rank; /* 0: q straight from x */
    int64_t kv_rank, nope_dim, rope_dim, v_dim;
    mt_rope_attr rope;
    double scale;
    bool bias; /* of q_a_proj, kv_a_proj_with_mqa and o_proj */
} latent_attn;

typedef struct deepseek {
    mt_decoder d; /* first */
    version v;
    mt_decoder_attn mha; /* V1 */
    latent_attn mla;     /* V2, V3 */
    mt_decoder_moe moe;
    int64_t first_sparse, sparse_step; /* layers with experts: from the first, each of so many */
    int64_t predict_layers;            /* behind the last: multi-token prediction, not loaded */
} deepseek;

static const mt_decoder decoders[3] = {
    [V1] = { .vocab = 102400,
             .hidden = 4096,
             .intermediate = 11008,
             .layers = 30,
             .heads = 32,
             .positions = 2048 },
    [V2] = { .vocab = 102400,
             .hidden = 4096,
             .intermediate = 11008,
             .layers = 32,
             .heads = 32,
             .positions = 2048 },
    [V3] = { .vocab = 129280,
             .hidden = 7168,
             .intermediate = 18432,
             .layers = 61,
             .heads = 128,
             .positions = 4096 },
};

static const mt_decoder_moe experts[3] = {
    [V1] = { .experts = 64, .width = 1407, .router = { .top_k = 6, .scale = 1 } },
    [V2] = { .experts = 64, .width = 1407, .router = { .top_k = 6, .scale = 1 } },
    [V3] = { .experts = 256,
             .width = 2048,
             .router = { .top_k = 8,
                         .scoring = MT_ROUTER_SIGMOID,
                         .groups = 8,
                         .top_groups = 4,
                         .group_score = MT_GROUP_TOP2_SUM,
                         .scale = 2.5 },
             .bias_name = "mlp.gate.e_score_correction_bias" },
};

/* ---- layers ---------------------------------------------------------------------------------- */

/* The norm NAME.weight [n] of a latent, whose epsilon no configuration changes. */
static mt_val latent_norm(mt_builder *b, const mt_decoder *d, mt_val x, const char *name, int64_t n)
{
    mt_decoder fixed = *d;
    fixed.norm_eps = 1e-6;
    return mt_decoder_norm_heads(b, &fixed, x, name, n, 1);
}

/* From normalised x [T, hidden] to the branch's result [T, hidden]. */
static mt_val latent_attention(mt_builder *b, const deepseek *m, mt_val x)
{
    const mt_decoder *d = &m->d;
    const latent_attn *a = &m->mla;
    int32_t heads = (int32_t)d->heads;
    int32_t nope = (int32_t)a->nope_dim, rope = (int32_t)a->rope_dim, v_dim = (int32_t)a->v_dim;
    int64_t q_cols = d->heads * (a->nope_dim + a->rope_dim);

    mt_val q = a->q_rank
                   ? mt_decoder_linear(b, d, x, "self_attn.q_a_proj", a->q_rank, d->hidden, a->bias)
                   : mt_decoder_linear(b, d, x, "self_attn.q_proj", q_cols, d->hidden, false);
    mt_val kv = mt_decoder_linear(b, d, x, "self_attn.kv_a_proj_with_mqa", a->kv_rank + a->rope_dim,
                                  d->hidden, a->bias);
    if (a->q_rank) {
        q = latent_norm(b, d, q, "self_attn.q_a_layernorm", a->q_rank);
        q = mt_decoder_linear(b, d, q, "self_attn.q_b_proj", q_cols, a->q_rank, false);
    }
    mt_val k_rope = mt_slice(b, kv, 1, a->kv_rank, a->rope_dim);
    kv = mt_slice(b, kv, 1, 0, a->kv_rank);
    kv = latent_norm(b, d, kv, "self_attn.kv_a_layernorm", a->kv_rank);
    kv = mt_decoder_linear(b, d, kv, "self_attn.kv_b_proj", d->heads * (a->nope_dim + a->v_dim),
                           a->kv_rank, false);

    mt_concat_attr join = { heads, 0, { nope, rope } };
    mt_val q_parts[2] = { mt_slice(b, q, heads, 0, nope), mt_slice(b, q, heads, nope, rope) };
    q_parts[1] = mt_rope(b, q_parts[1], &a->rope, heads);
    q = mt_concat(b, q_parts, 2, &join);
    mt_val k_parts[2] = { mt_slice(b, kv, heads, 0, nope), mt_rope(b, k_rope, &a->rope, 1) };
    join.shared = 1u << 1;
    mt_val k = mt_concat(b, k_parts, 2, &join);
    mt_val v = mt_slice(b, kv, heads, nope, v_dim);
    mt_attn_attr attr = { heads, heads, nope + rope, v_dim, a->scale, 0, 0 };
    mt_val o = mt_attention(b, q, k, v, MT_NONE, &attr);
    return mt_decoder_linear(b, d, o, "self_attn.o_proj", d->hidden, d->heads * a->v_dim, a->bias);
}

/* A layer of V2 and V3; `arg` are its experts (mt_decoder_moe), or NULL. */
static mt_status latent_block(mt_builder *b, const void *arch, const void *arg)
{
    const deepseek *m = arch;
    const mt_decoder *d = &m->d;
    const mt_decoder_moe *moe = arg;
    mt_val x = mt_input(b, 0, d->hidden);
    mt_val h = mt_decoder_norm(b, d, x, "input_layernorm");
    x = mt_add(b, x, latent_attention(b, m, h));
    h = mt_decoder_norm(b, d, x, "post_attention_layernorm");
    mt_val y =
        moe ? mt_decoder_moe_mlp(b, d, moe, h) : mt_decoder_mlp(b, d, h, "mlp", d->intermediate);
    mt_output(b, 0, mt_add(b, x, y));
    return MT_OK;
}

/* ---- hyper-parameters ------------------------------------------------------------------------ */

/* A whole number of at least 0, which null is too. */
static mt_status read_maybe(const mt_config *c, const char *key, int64_t unset, int64_t most,
                            int64_t *ret)
{
    int64_t n = 0;
    mt_status s = mt_config_int(c, key, mt_config_is_null(c, key) ? 0 : unset, &n);
    if (s)
        return s;
    if (n < 0 || n > most)
        return c->reject(c, key, "must be 0 to %lld, found %lld", (long long)most, (long long)n);
    *ret = n;
    return MT_OK;
}

/* Experts are picked from the best groups only. */
static mt_status read_groups(const mt_config *c, version v, mt_decoder_moe *e)
{
    const char *method;
    int64_t groups = 0, top_groups = 0;
    mt_status s;
    if ((s = mt_config_string(c, "topk_method", v == V3 ? "noaux_tc" : "greedy", &method)) ||
        (s = read_maybe(c, "n_group", e->router.groups, e->experts, &groups)) ||
        (s = read_maybe(c, "topk_group", e->router.top_groups, e->experts, &top_groups)))
        return s;
    bool limited = strcmp(method, v == V3 ? "noaux_tc" : "group_limited_greedy") == 0;
    if (!limited && (v == V3 || strcmp(method, "greedy") != 0))
        return c->reject(c, "topk_method", "'%s' is not offered; expected %s", method,
                         v == V3 ? "'noaux_tc'" : "'greedy' or 'group_limited_greedy'");
    if (!limited || (v == V3 && groups <= 1)) {
        e->router.groups = e->router.top_groups = 0;
        return MT_OK;
    }
    if (groups < 1 || e->experts % groups)
        return c->reject(c, "n_group", "%lld must divide the number of experts, %lld",
                         (long long)groups, (long long)e->experts);
    if (top_groups < 1 || top_groups > groups ||
        top_groups * (e->experts / groups) < e->router.top_k)
        return c->reject(c, "topk_group",
                         "must be 1 to n_group, %lld, and leave num_experts_per_tok experts, %d; "
                         "found %lld",
                         (long long)groups, e->router.top_k, (long long)top_groups);
    if (v == V3 && e->experts / groups < 2)
        return c->reject(c, "n_group", "must leave two experts a group, found %lld groups of %lld",
                         (long long)groups, (long long)e->experts);
    e->router.groups = (int32_t)groups;
    e->router.top_groups = (int32_t)top_groups;
    return MT_OK;
}

static mt_status read_weights(const mt_config *c, version v, mt_router_attr *r)
{
    bool renormalise;
    double scale = 1;
    mt_status s;
    if ((s = mt_config_bool(c, "norm_topk_prob", v == V3, &renormalise)) ||
        (v != V1 && (s = mt_config_float(c, "routed_scaling_factor", r->scale, &scale))))
        return s;
    if (!(scale > 0))
        return c->reject(c, "routed_scaling_factor", "must be above 0, found %g", scale);
    /* Before V3 the only expert of a token keeps its weight, and what is normalised isn't scaled.
     */
    r->renormalise = renormalise && (v == V3 || r->top_k > 1);
    r->scale = v == V2 && r->renormalise ? 1 : scale;
    return MT_OK;
}

/* Counts the keys of experts as known where there are none: releases have them all the same. */
static void pass_over_experts(const mt_config *c)
{
    static const char *const keys[] = { "num_experts_per_tok",
                                        "moe_intermediate_size",
                                        "scoring_func",
                                        "n_shared_experts",
                                        "first_k_dense_replace",
                                        "moe_layer_freq",
                                        "topk_method",
                                        "n_group",
                                        "topk_group",
                                        "norm_topk_prob",
                                        "aux_loss_alpha",
                                        "routed_scaling_factor",
                                        "seq_aux" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        c->has(c, keys[i]);
}

/* The loss by sequences of the original training code, where output_router_logits asks for one:
 * released configurations have its keys, but transformers does not form it. V3's is another. */
static mt_status read_balance(const mt_config *c, deepseek *m)
{
    mt_decoder_moe *e = &m->moe;
    double coef = 0;
    bool by_sequence = true, wanted;
    mt_status s;
    if ((s = mt_config_float(c, "aux_loss_alpha", 0.001, &coef)) ||
        (s = mt_config_bool(c, "seq_aux", true, &by_sequence)) ||
        (s = mt_config_bool(c, "output_router_logits", false, &wanted)))
        return s;
    if (wanted && m->v != V3 && !(coef > 0))
        return c->reject(c, "aux_loss_alpha", "must be above 0 with output_router_logits, found %g",
                         coef);
    if (wanted && m->v != V3 && !by_sequence)
        return c->reject(c, "seq_aux", "false is not offered; balance is kept by sequences");
    if (m->v != V3)
        e->balance = (mt_balance_attr){ MT_BALANCE_DEEPSEEK_SEQ, 0, coef };
    return MT_OK;
}

static mt_status read_experts(const mt_config *c, deepseek *m)
{
    mt_decoder_moe *e = &m->moe;
    int64_t shared = 0;
    mt_status s;
    *e = experts[m->v];
    e->shared_name = "mlp.shared_experts";
    /* Without a number of experts there are none: in V1 where it is absent, else where it's null.
     */
    bool given =
        c->has(c, "n_routed_experts") || c->has(c, "num_experts") || c->has(c, "num_local_experts");
    if (!given && (m->v == V1 || mt_config_is_null(c, "n_routed_experts"))) {
        m->first_sparse = m->d.layers;
        m->sparse_step = 1;
        pass_over_experts(c);
        return MT_OK;
    }
    if ((s = read_balance(c, m)) || (s = mt_decoder_read_moe(c, e)) ||
        (s = mt_decoder_activation(c, "scoring_func", m->v == V3 ? "sigmoid" : "softmax")) ||
        (s = mt_config_count(c, "moe_intermediate_size", e->width, INT32_MAX, &e->width)) ||
        (s = read_maybe(c, "n_shared_experts",
                        m->v == V1   ? 0
                        : m->v == V2 ? 2
                                     : 1,
                        1 << 16, &shared)) ||
        (s = read_maybe(c, "first_k_dense_replace", m->v == V3 ? 3 : 0, INT32_MAX,
                        &m->first_sparse)) ||
        (s = mt_config_count(c, "moe_layer_freq", 1, INT32_MAX, &m->sparse_step)) ||
        (m->v != V1 && (s = read_groups(c, m->v, e))) || (s = read_weights(c, m->v, &e->router)))
        return s;
    e->shared_width = shared * e->width;
    return MT_OK;
}

/* YaRN's factor on cos and sin cancels in releases; that on the scores is here. */
static mt_status read_scale(const mt_config *c, latent_attn *a)
{
    const char *map = c->has(c, "rope_parameters") ? "rope_parameters" : "rope_scaling";
    const char *type = "default";
    char key[4][64];
    static const char *const names[4] = { "type", "rope_type", "mscale_all_dim", "factor" };
    double mscale = 0, factor = 0, gain = 1;
    mt_status s;
    for (int i = 0; i < 4; i++)
        snprintf(key[i], sizeof key[i], "%s.%s", map, names[i]);
    if ((s = mt_config_string(c, key[0], type, &type)) ||
        (s = mt_config_string(c, key[1], type, &type)))
        return s;
    if (strcmp(type, "default") != 0 && (s = mt_config_float(c, key[2], 0, &mscale)))
        return s;
    if (mscale != 0) {
        if (!c->has(c, key[3]))
            return c->reject(c, map, "mscale_all_dim needs 'factor' beside it");
        if ((s = c->get_float(c, key[3], &factor)))
            return s;
        gain = factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1;
    }
    a->scale = gain * gain / sqrt((double)(a->nope_dim + a->rope_dim));
    return MT_OK;
}

static mt_status read_latent(const mt_config *c, mt_model *model, deepseek *m)
{
    latent_attn *a = &m->mla;
    bool interleaved = true;
    mt_status s;
    if ((s = read_maybe(c, "q_lora_rank", 1536, INT32_MAX, &a->q_rank)) ||
        (s = mt_config_count(c, "kv_lora_rank", 512, INT32_MAX, &a->kv_rank)) ||
        (s = mt_config_count(c, "qk_nope_head_dim", 128, 1 << 16, &a->nope_dim)) ||
        (s = mt_config_count(c, "qk_rope_head_dim", 64, 1 << 16, &a->rope_dim)) ||
        (s = mt_config_count(c, "v_head_dim", 128, 1 << 16, &a->v_dim)) ||
        (s = mt_config_bool(c, "attention_bias", false, &a->bias)) ||
        (m->v == V2 && (s = mt_config_bool(c, "mlp_bias", false, &m->d.mlp_bias))) ||
        (m->v == V3 && (s = mt_config_bool(c, "rope_interleave", true, &interleaved))))
        return s;
    if (c->has(c, "q_lora_rank") && a->q_rank == 0)
        return c->reject(c, "q_lora_rank", "must be above 0, or null for queries without a latent");
    if (a->rope_dim % 2)
        return c->reject(c, "qk_rope_head_dim", "must be even, found %lld", (long long)a->rope_dim);
    if ((s = mt_model_rope(model, c, 10000, a->rope_dim, &a->rope)) || (s = read_scale(c, a)))
        return s;
    a->rope.pairing = interleaved ? MT_ROPE_INTERLEAVED : MT_ROPE_HALF_SPLIT;
    if (c->has(c, "head_dim") && m->d.head_dim != a->rope_dim)
        return c->reject(c, "head_dim", "must be qk_rope_head_dim, %lld, found %lld",
                         (long long)a->rope_dim, (long long)m->d.head_dim);
    if (m->d.kv_heads != m->d.heads)
        return c->reject(c, "num_key_value_heads",
                         "must be num_attention_heads, %lld, found %lld: each head has keys of its "
                         "own from the latent",
                         (long long)m->d.heads, (long long)m->d.kv_heads);
    return MT_OK;
}

static mt_status read_config(const mt_config *c, mt_model *model, deepseek *m)
{
    mt_decoder *d = &m->d;
    mt_status s;
    *d = decoders[m->v];
    d->norm_eps = 1e-6;
    d->init_std = 0.02;
    d->norm = MT_NORM_ROUND_THEN_SCALE;
    d->activation = MT_ACT_SILU;
    d->moe = &m->moe;
    if ((s = mt_decoder_read(c, d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = read_experts(c, m)))
        return s;
    if (m->v == V3 && (s = read_maybe(c, "num_nextn_predict_layers", 1, 64, &m->predict_layers)))
        return s;
    if (m->v != V1)
        return read_latent(c, model, m);
    m->mha.scale = 1 / sqrt((double)d->head_dim);
    if ((s = mt_config_bool(c, "attention_bias", false, &m->mha.qkv_bias)))
        return s;
    m->mha.o_bias = m->mha.qkv_bias;
    return mt_model_rope(model, c, 10000, d->head_dim, &m->mha.rope);
}

static void add_units(mt_model *model, const deepseek *m)
{
    int32_t dense = -1, sparse = -1;
    char pattern[48];
    mt_decoder_begin(model, &m->d);
    for (int64_t i = 0; i < m->predict_layers; i++) {
        snprintf(pattern, sizeof pattern, "model.layers.%lld.*", (long long)(m->d.layers + i));
        model->api->ignore_tensor(model, pattern);
    }
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool has_experts = i >= m->first_sparse && i % m->sparse_step == 0;
        mt_build_fn block = m->v != V1    ? latent_block
                            : has_experts ? mt_decoder_moe_block
                                          : mt_decoder_block;
        const void *arg = m->v == V1 ? (const void *)&m->mha : has_experts ? &m->moe : NULL;
        mt_decoder_layer(model, i, has_experts ? &sparse : &dense,
                         has_experts ? "block_moe" : "block", block, arg);
    }
    mt_decoder_end(model);
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    const char *type;
    mt_status s = mt_config_string(c, "model_type", "deepseek_v3", &type);
    if (s)
        return s;
    deepseek *m = calloc(1, sizeof *m);
    if (!m)
        return MT_ERR_NOMEM;
    m->v = strcmp(type, "deepseek") == 0 ? V1 : strcmp(type, "deepseek_v2") == 0 ? V2 : V3;
    if ((s = read_config(c, model, m))) {
        free(m);
        return s;
    }
    add_units(model, m);
    *ret_arch = m;
    return MT_OK;
}

static const char *const types[] = { "deepseek", "deepseek_v2", "deepseek_v3" };
static const mt_arch deepseek_arch = { sizeof(mt_arch), 3, types, configure, free };

MT_PLUGIN("deepseek", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &deepseek_arch)
