/* SPDX-License-Identifier: Apache-2.0
 *
 * Qwen 2, 2.5 and QwQ (`qwen2`: biases of q, k and v), Qwen 3 (`qwen3`: q and k normalised), and
 * their mixtures of experts (`qwen2_moe` with a shared expert behind a gate, `qwen3_moe`). Models
 * with gated delta nets are in hybrid.c.
 * Reference: Hugging Face transformers, models/{qwen2,qwen3,qwen2_moe,qwen3_moe}.
 */
#include "qwen.h"

#include <megatrain/plugin.h>

#include <stdlib.h>

typedef struct qwen {
    mt_decoder d; /* first */
    bool qwen3, moe;
    mt_decoder_attn full, sliding;
    mt_decoder_moe experts;
    int64_t max_window_layers;
    int64_t sparse_step; /* one layer of so many has experts */
} qwen;

/* By model type: dense or with experts, Qwen 2 or 3. */
static const mt_decoder defaults[2][2] = {
    { { .hidden = 4096, .intermediate = 22016, .layers = 32, .heads = 32, .kv_heads = 32 },
      { .hidden = 4096,
        .intermediate = 22016,
        .layers = 32,
        .heads = 32,
        .kv_heads = 32,
        .head_dim = 128 } },
    { { .hidden = 2048, .intermediate = 5632, .layers = 24, .heads = 16, .kv_heads = 16 },
      { .hidden = 2048, .intermediate = 6144, .layers = 24, .heads = 32, .kv_heads = 4 } },
};

static const mt_decoder_moe experts[2] = {
    { .experts = 60,
      .width = 1408,
      .router = { .top_k = 4, .scale = 1 },
      .shared_name = "mlp.shared_expert",
      .shared_width = 5632,
      .shared_gate = true,
      .balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 0.001 } },
    { .experts = 128,
      .width = 768,
      .router = { .top_k = 8, .scale = 1 },
      .balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 0.001 } },
};

/* Released models carry a sliding_window that use_sliding_window turns off; some then say 0. */
static mt_status read_window(const mt_config *c, qwen *m, int64_t *ret)
{
    bool use;
    mt_status s;
    if ((s = mt_config_bool(c, "use_sliding_window", false, &use)) ||
        (s = mt_config_int(c, "max_window_layers", 28, &m->max_window_layers)))
        return s;
    if (m->max_window_layers < 0)
        return c->reject(c, "max_window_layers", "must be at least 0, found %lld",
                         (long long)m->max_window_layers);
    if (use)
        return mt_decoder_window(c, 4096, ret);
    c->has(c, "sliding_window"); /* known all the same */
    *ret = 0;
    return MT_OK;
}

/* Without layer_types; each of the four has a rule of its own. */
static bool slides_by_rule(const qwen *m, int64_t i)
{
    if (m->sliding.window == 0)
        return false;
    if (!m->moe)
        return i >= m->max_window_layers;
    return m->qwen3 || (i % 2 == 0 && i < m->max_window_layers);
}

static mt_status read_experts(const mt_config *c, qwen *m)
{
    mt_decoder_moe *e = &m->experts;
    bool renormalise;
    mt_status s;
    *e = experts[m->qwen3];
    m->d.moe = e;
    if ((s = mt_decoder_read_moe(c, e)) ||
        (s = mt_config_count(c, "moe_intermediate_size", e->width, INT32_MAX, &e->width)) ||
        (s = mt_config_bool(c, "norm_topk_prob", false, &renormalise)) ||
        (s = mt_config_count(c, "decoder_sparse_step", 1, INT32_MAX, &m->sparse_step)) ||
        (s = qwen_check_dense(c, m->d.layers)))
        return s;
    e->router.renormalise = renormalise;
    return m->qwen3 ? MT_OK
                    : mt_config_count(c, "shared_expert_intermediate_size", e->shared_width,
                                      INT32_MAX, &e->shared_width);
}

static mt_status read_biases(const mt_config *c, qwen *m)
{
    mt_status s = MT_OK;
    m->full.qkv_bias = true;
    if (m->qwen3)
        s = mt_config_bool(c, "attention_bias", false, &m->full.qkv_bias);
    else if (m->moe)
        s = mt_config_bool(c, "qkv_bias", true, &m->full.qkv_bias);
    m->full.o_bias = m->qwen3 && m->full.qkv_bias;
    return s;
}

static mt_status read_config(const mt_config *c, const char *type, mt_model *model, void *state)
{
    qwen *m = state;
    int64_t window = 0;
    mt_status s;
    m->qwen3 = strncmp(type, "qwen3", 5) == 0;
    m->moe = strstr(type, "_moe") != NULL;
    m->d = defaults[m->moe][m->qwen3];
    m->d.vocab = 151936;
    m->d.positions = 32768;
    m->d.norm_eps = 1e-6;
    m->d.init_std = 0.02;
    m->d.norm = MT_NORM_ROUND_THEN_SCALE;
    m->d.activation = MT_ACT_SILU;
    if ((s = mt_decoder_read(c, &m->d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = read_window(c, m, &window)) || (s = read_biases(c, m)) ||
        (m->moe && (s = read_experts(c, m))) ||
        (s = mt_model_rope(model, c, 10000, m->d.head_dim, &m->full.rope)))
        return s;
    m->full.qk_norm = m->qwen3;
    m->full.scale = 1 / sqrt((double)m->d.head_dim);
    m->sliding = m->full;
    m->sliding.window = window;
    return MT_OK;
}

/* Something that has a value of its own; `length` is 0 of that, as it is of an empty list. */
static bool is_single(const mt_config *c, const char *key)
{
    double number;
    const char *text;
    bool answer;
    return c->has(c, key) && (!c->get_float(c, key, &number) || !c->get_string(c, key, &text) ||
                              !c->get_bool(c, key, &answer));
}

mt_status qwen_check_dense(const mt_config *c, int64_t layers)
{
    if (is_single(c, "mlp_only_layers"))
        return c->reject(c, "mlp_only_layers", "must be a list of layers, such as [0]");
    for (int64_t k = 0; k < c->length(c, "mlp_only_layers"); k++) {
        char key[48];
        int64_t dense;
        snprintf(key, sizeof key, "mlp_only_layers.%lld", (long long)k);
        mt_status s = c->get_int(c, key, &dense);
        if (s)
            return s;
        if (dense < 0 || dense >= layers)
            return c->reject(c, key, "must be a layer, 0 to %lld, found %lld",
                             (long long)layers - 1, (long long)dense);
    }
    return MT_OK;
}

mt_status qwen_has_experts(const mt_config *c, int64_t step, int64_t i, bool *ret)
{
    bool sparse = (i + 1) % step == 0;
    for (int64_t k = 0; sparse && k < c->length(c, "mlp_only_layers"); k++) {
        char key[48];
        int64_t dense;
        snprintf(key, sizeof key, "mlp_only_layers.%lld", (long long)k);
        mt_status s = c->get_int(c, key, &dense);
        if (s)
            return s;
        sparse = dense != i;
    }
    *ret = sparse;
    return MT_OK;
}

static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const qwen *m = state;
    static const char *const names[2][2] = { { "block", "block_moe" },
                                             { "block_sliding", "block_sliding_moe" } };
    int32_t tpl[2][2] = { { -1, -1 }, { -1, -1 } };
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool slides = false, sparse = false;
        mt_status s;
        if ((s = mt_decoder_slides(c, &m->d, i, slides_by_rule(m, i), &slides)) ||
            (m->moe && (s = qwen_has_experts(c, m->sparse_step, i, &sparse))))
            return s;
        if (slides && m->sliding.window == 0)
            return c->reject(c, "layer_types",
                             "has sliding_attention, but use_sliding_window is not true or there "
                             "is no sliding_window");
        mt_decoder_layer(model, i, &tpl[slides][sparse], names[slides][sparse],
                         sparse ? mt_decoder_moe_block : mt_decoder_block,
                         slides ? &m->sliding : &m->full);
    }
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    static const mt_decoder_family transformers = { sizeof(qwen), "qwen2", read_config,
                                                    add_layers };
    const char *type;
    mt_status s = mt_config_string(c, "model_type", transformers.model_type, &type);
    if (s)
        return s;
    bool hybrid = strncmp(type, "qwen3_next", 10) == 0 || strncmp(type, "qwen3_5", 7) == 0;
    return mt_decoder_configure(hybrid ? &qwen_hybrid : &transformers, c, model, ret_arch);
}

static const char *const types[] = { "qwen2",        "qwen3",       "qwen2_moe",
                                     "qwen3_moe",    "qwen3_next",  "qwen3_5",
                                     "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text" };
static const mt_arch qwen_arch = { sizeof(mt_arch), sizeof types / sizeof *types, types, configure,
                                   free };

MT_PLUGIN("qwen", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &qwen_arch)
