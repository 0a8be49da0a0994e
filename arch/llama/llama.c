/* SPDX-License-Identifier: Apache-2.0
 *
 * Llama: Llama 1 to 3.3 and every model of `model_type: llama`. Reference: Hugging Face
 * transformers, models/llama/modeling_llama.py.
 */
#include <megatrain/decoder.h>
#include <megatrain/plugin.h>

#include <stdlib.h>

typedef struct llama {
    mt_decoder d; /* first */
    mt_decoder_attn attn;
} llama;

static const mt_decoder defaults = {
    .vocab = 32000,
    .hidden = 4096,
    .intermediate = 11008,
    .layers = 32,
    .heads = 32,
    .positions = 2048,
    .norm_eps = 1e-6,
    .init_std = 0.02,
    .norm = MT_NORM_ROUND_THEN_SCALE,
    .activation = MT_ACT_SILU,
};

static mt_status read_config(const mt_config *c, const char *type, mt_model *model, void *state)
{
    llama *m = state;
    mt_status s;
    (void)type;
    m->d = defaults;
    if ((s = mt_decoder_read(c, &m->d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = mt_decoder_read_attention(c, &m->d, false, &m->attn)) ||
        (s = mt_config_bool(c, "mlp_bias", false, &m->d.mlp_bias)))
        return s;
    return mt_model_rope(model, c, 10000, m->d.head_dim, &m->attn.rope);
}

static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const llama *m = state;
    int32_t block = -1;
    (void)c;
    for (int64_t i = 0; i < m->d.layers; i++)
        mt_decoder_layer(model, i, &block, "block", mt_decoder_block, &m->attn);
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    static const mt_decoder_family family = { sizeof(llama), "llama", read_config, add_layers };
    return mt_decoder_configure(&family, c, model, ret_arch);
}

static const char *const types[] = { "llama" };
static const mt_arch llama_arch = { sizeof(mt_arch), 1, types, configure, free };

MT_PLUGIN("llama", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &llama_arch)
