/* SPDX-License-Identifier: Apache-2.0
 *
 * Gemma 1, 2 and 3 (text): embeddings scaled by the root of their width, norms that multiply by
 * 1 + w; from the second on four norms a layer and windows on most layers; in the third q and k
 * normalised and two rotary bases. Reference: Hugging Face transformers,
 * models/{gemma,gemma2,gemma3}.
 */
#include <megatrain/decoder.h>
#include <megatrain/plugin.h>

#include <stdlib.h>

typedef struct gemma {
    mt_decoder d; /* first */
    int generation;
    mt_decoder_attn full, sliding;
    int64_t pattern; /* one layer of so many attends fully */
} gemma;

static const mt_decoder defaults[] = {
    {
        .vocab = 256000,
        .hidden = 3072,
        .intermediate = 24576,
        .layers = 28,
        .heads = 16,
        .kv_heads = 16,
        .head_dim = 256,
        .positions = 8192,
    },
    {
        .vocab = 256000,
        .hidden = 2304,
        .intermediate = 9216,
        .layers = 26,
        .heads = 8,
        .kv_heads = 4,
        .head_dim = 256,
        .positions = 8192,
    },
    {
        .vocab = 262208,
        .hidden = 2304,
        .intermediate = 9216,
        .layers = 26,
        .heads = 8,
        .kv_heads = 4,
        .head_dim = 256,
        .positions = 131072,
    },
};

/* Each branch is normalised before and after. */
static mt_status block(mt_builder *b, const void *arch, const void *arg)
{
    const mt_decoder *d = arch;
    mt_val x = mt_input(b, 0, d->hidden);
    mt_val h = mt_decoder_norm(b, d, x, "input_layernorm");
    h = mt_decoder_attention(b, d, arg, h);
    x = mt_add(b, x, mt_decoder_norm(b, d, h, "post_attention_layernorm"));
    h = mt_decoder_norm(b, d, x, "pre_feedforward_layernorm");
    h = mt_decoder_mlp(b, d, h, "mlp", d->intermediate);
    mt_output(b, 0, mt_add(b, x, mt_decoder_norm(b, d, h, "post_feedforward_layernorm")));
    return MT_OK;
}

/* Gemma 1 was published with "gelu", in either key, and trained with its tanh approximation. */
static mt_status read_activation(const mt_config *c, int generation)
{
    static const char *const keys[] = { "hidden_act", "hidden_activation" };
    const char *only = "gelu_pytorch_tanh", *found;
    if (generation > 1)
        return mt_decoder_activation(c, "hidden_activation", only);
    for (int i = 0; i < 2; i++) {
        mt_status s = mt_config_string(c, keys[i], only, &found);
        if (s)
            return s;
        if (strcmp(found, only) != 0 && strcmp(found, "gelu") != 0)
            return c->reject(c, keys[i], "'%s' is not offered; expected '%s'", found, only);
    }
    return MT_OK;
}

static mt_status read_rope(const mt_config *c, mt_model *model, gemma *m)
{
    if (m->generation < 3) {
        mt_status s = mt_model_rope(model, c, 10000, m->d.head_dim, &m->full.rope);
        m->sliding.rope = m->full.rope;
        return s;
    }
    const mt_rope_spec full = { .struct_size = sizeof full,
                                .theta = 1e6,
                                .layer_type = "full_attention" };
    const mt_rope_spec sliding = { .struct_size = sizeof sliding,
                                   .theta = 1e4,
                                   .layer_type = "sliding_attention",
                                   .theta_key = "rope_local_base_freq" };
    mt_status s = mt_model_rope_of(model, c, &full, m->d.head_dim, &m->full.rope);
    return s ? s : mt_model_rope_of(model, c, &sliding, m->d.head_dim, &m->sliding.rope);
}

static mt_status read_attention(const mt_config *c, mt_model *model, gemma *m)
{
    mt_decoder_attn *a = &m->full;
    double scalar = (double)m->d.head_dim;
    int64_t window = 0;
    bool both_ways;
    mt_status s;
    if ((s = mt_config_bool(c, "use_bidirectional_attention", false, &both_ways)) ||
        (s = mt_decoder_read_attention(c, &m->d, false, a)))
        return s;
    if (both_ways)
        return c->reject(c, "use_bidirectional_attention",
                         "is not offered: attention here is causal");
    if (m->generation > 1 && ((s = mt_config_float(c, "query_pre_attn_scalar", 256, &scalar)) ||
                              (s = mt_config_optional(c, "attn_logit_softcapping",
                                                      m->generation == 2 ? 50 : 0, &a->softcap)) ||
                              (s = mt_decoder_window(c, 4096, &window))))
        return s;
    if (m->generation == 3 && a->softcap > 0)
        return c->reject(c, "attn_logit_softcapping",
                         "is not offered for Gemma 3, whose reference does not apply it");
    if (!(scalar > 0 && scalar <= 1e6))
        return c->reject(c, "query_pre_attn_scalar", "must be above 0, at most 1e6, found %g",
                         scalar);
    a->qk_norm = m->generation == 3;
    a->scale = 1 / sqrt(scalar);
    m->sliding = *a;
    m->sliding.window = window;
    m->pattern = m->generation;
    if (m->generation == 3 &&
        (s = mt_config_count(c, "sliding_window_pattern", 6, INT32_MAX, &m->pattern)))
        return s;
    return read_rope(c, model, m);
}

static mt_status read_config(const mt_config *c, const char *type, mt_model *model, void *state)
{
    gemma *m = state;
    mt_status s;
    m->generation = strncmp(type, "gemma3", 6) == 0 ? 3 : strcmp(type, "gemma2") == 0 ? 2 : 1;
    m->d = defaults[m->generation - 1];
    m->d.norm_eps = 1e-6;
    m->d.init_std = 0.02;
    m->d.norm = MT_NORM_ONE_PLUS;
    m->d.activation = MT_ACT_GELU_TANH;
    m->d.tied = true;
    if ((s = mt_decoder_read(c, &m->d)) || (s = read_activation(c, m->generation)))
        return s;
    m->d.embed_scale = sqrt((double)m->d.hidden);
    if (m->generation > 1 &&
        (s = mt_config_optional(c, "final_logit_softcapping", m->generation == 2 ? 30 : 0,
                                &m->d.final_softcap)))
        return s;
    return read_attention(c, model, m);
}

static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const gemma *m = state;
    int32_t full = -1, sliding = -1;
    mt_decoder_ignore_vision(model);
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool slides = false;
        mt_status s = MT_OK;
        if (m->generation == 1)
            mt_decoder_layer(model, i, &full, "block", mt_decoder_block, &m->full);
        else if ((s = mt_decoder_slides(c, &m->d, i, (i + 1) % m->pattern != 0, &slides)))
            return s;
        else if (slides)
            mt_decoder_layer(model, i, &sliding, "block_sliding", block, &m->sliding);
        else
            mt_decoder_layer(model, i, &full, "block_full", block, &m->full);
    }
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    static const mt_decoder_family family = { sizeof(gemma), "gemma", read_config, add_layers };
    return mt_decoder_configure(&family, c, model, ret_arch);
}

static const char *const types[] = { "gemma", "gemma2", "gemma3", "gemma3_text" };
static const mt_arch gemma_arch = { sizeof(mt_arch), 4, types, configure, free };

MT_PLUGIN("gemma", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &gemma_arch)
