/* SPDX-License-Identifier: Apache-2.0
 *
 * Mistral 7B, Nemo, Small and Large (`mistral`), Ministral 8B (`ministral`), Ministral 3
 * (`ministral3`), the language models of `mistral3`, and Mixtral. Reference: Hugging Face
 * transformers, models/{mistral,ministral,ministral3,mixtral}.
 */
#include <megatrain/decoder.h>
#include <megatrain/plugin.h>

#include <stdlib.h>

typedef enum variant { MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL } variant;

typedef struct mistral {
    mt_decoder d; /* first */
    variant v;
    mt_decoder_attn full, sliding;
    mt_decoder_moe moe;
} mistral;

static const mt_decoder defaults = {
    .vocab = 32000,
    .hidden = 4096,
    .intermediate = 14336,
    .layers = 32,
    .heads = 32,
    .kv_heads = 8,
    .positions = 131072,
    .norm_eps = 1e-6,
    .init_std = 0.02,
    .norm = MT_NORM_ROUND_THEN_SCALE,
    .activation = MT_ACT_SILU,
};

/* Ministral 3: YaRN, whose factor on cos and sin cancels, and queries that grow with the position
 * beyond the length of pre-training. */
static mt_status read_ministral3_rope(const mt_config *c, mt_model *model, int64_t head_dim,
                                      mt_decoder_attn *a)
{
    const mt_rope_spec spec = { .struct_size = sizeof spec,
                                .theta = 1e6,
                                .type = "yarn",
                                .factor = 16,
                                .original_max_position_embeddings = 16384,
                                .attention_factor = 1 };
    bool given = c->has(c, "rope_parameters");
    double beta = 0;
    int64_t positions = 0;
    mt_status s;
    if ((s = mt_model_rope_of(model, c, &spec, head_dim, &a->rope)) ||
        (s = mt_config_number(c, "rope_parameters.llama_4_scaling_beta", given ? 0 : 0.1, 0, 100,
                              &beta)) ||
        (s = mt_config_count(c, "rope_parameters.original_max_position_embeddings", 16384,
                             INT32_MAX, &positions)))
        return s;
    a->q_growth = (float)beta;
    a->q_growth_positions = (int32_t)positions;
    return MT_OK;
}

static const mt_decoder_moe mixtral = {
    .experts = 8,
    .router = { .top_k = 2, .renormalise = 1, .scale = 1 },
    .router_name = "block_sparse_moe.gate.weight",
    .gate_name = "block_sparse_moe.experts.{}.w1.weight",
    .up_name = "block_sparse_moe.experts.{}.w3.weight",
    .down_name = "block_sparse_moe.experts.{}.w2.weight",
    .balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 0.001 },
};

static variant variant_of(const char *type)
{
    return strcmp(type, "ministral3") == 0  ? MINISTRAL3
           : strcmp(type, "ministral") == 0 ? MINISTRAL
           : strcmp(type, "mixtral") == 0   ? MIXTRAL
                                            : MISTRAL;
}

static mt_status read_config(const mt_config *c, const char *type, mt_model *model, void *state)
{
    mistral *m = state;
    m->v = variant_of(type);
    bool ministral3 = m->v == MINISTRAL3, moe = m->v == MIXTRAL;
    int64_t window = 0;
    mt_status s;
    m->d = defaults;
    m->moe = mixtral;
    if (moe) {
        m->d.norm_eps = 1e-5;
        m->d.moe = &m->moe;
    }
    if (ministral3) {
        m->d.vocab = 131072;
        m->d.layers = 34;
        m->d.head_dim = 128;
        m->d.positions = 262144;
        m->d.norm_eps = 1e-5;
    }
    if ((s = mt_decoder_read(c, &m->d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = mt_decoder_window(c, ministral3 || moe ? 0 : 4096, &window)) ||
        (s = ministral3 ? read_ministral3_rope(c, model, m->d.head_dim, &m->full)
                        : mt_model_rope(model, c, moe ? 1e6 : 1e4, m->d.head_dim, &m->full.rope)) ||
        (moe && (s = mt_decoder_read_moe(c, &m->moe))))
        return s;
    m->moe.width = m->d.intermediate;
    m->full.scale = 1 / sqrt((double)m->d.head_dim);
    m->sliding = m->full;
    m->sliding.window = window;
    return MT_OK;
}

/* All layers slide where there is a window, unless a `ministral` says otherwise. */
static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const mistral *m = state;
    mt_build_fn block = m->v == MIXTRAL ? mt_decoder_moe_block : mt_decoder_block;
    int32_t full = -1, sliding = -1;
    mt_decoder_ignore_vision(model);
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool windowed = m->sliding.window > 0, slides = windowed;
        mt_status s = mt_decoder_slides(c, &m->d, i, windowed, &slides);
        if (s)
            return s;
        if (m->v != MINISTRAL && slides != windowed)
            return c->reject(c, "layer_types",
                             "must say the same as sliding_window here; model_type 'ministral' has "
                             "layers of two kinds");
        if (slides)
            mt_decoder_layer(model, i, &sliding, "block_sliding", block, &m->sliding);
        else
            mt_decoder_layer(model, i, &full, "block", block, &m->full);
    }
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    static const mt_decoder_family family = { sizeof(mistral), "mistral", read_config, add_layers };
    return mt_decoder_configure(&family, c, model, ret_arch);
}

static const char *const types[] = { "mistral", "mistral3", "ministral", "ministral3", "mixtral" };
static const mt_arch mistral_arch = { sizeof(mt_arch), 5, types, configure, free };

MT_PLUGIN("mistral", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &mistral_arch)
