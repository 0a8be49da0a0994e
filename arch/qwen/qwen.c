/* SPDX-License-Identifier: Apache-2.0
 *
 * Qwen 2, 2.5 and QwQ (`qwen2`: biases of q, k and v), Qwen 3 (`qwen3`: q and k normalised).
 * Reference: Hugging Face transformers, models/{qwen2,qwen3}.
 */
#include <megatrain/decoder.h>
#include <megatrain/plugin.h>

#include <stdlib.h>

typedef struct qwen {
    mt_decoder d; /* first */
    mt_decoder_attn full, sliding;
    int64_t first_sliding; /* the layer from which on all slide */
} qwen;

static const mt_decoder defaults = {
    .vocab = 151936,
    .hidden = 4096,
    .intermediate = 22016,
    .layers = 32,
    .heads = 32,
    .kv_heads = 32,
    .positions = 32768,
    .norm_eps = 1e-6,
    .init_std = 0.02,
    .norm = MT_NORM_ROUND_THEN_SCALE,
    .activation = MT_ACT_SILU,
};

/* Released models carry a sliding_window that use_sliding_window turns off. */
static mt_status read_window(const mt_config *c, qwen *m)
{
    bool use;
    mt_status s;
    if ((s = mt_config_bool(c, "use_sliding_window", false, &use)) ||
        (s = mt_decoder_window(c, 4096, &m->sliding.window)) ||
        (s = mt_config_int(c, "max_window_layers", 28, &m->first_sliding)))
        return s;
    if (m->first_sliding < 0)
        return c->reject(c, "max_window_layers", "must be at least 0, found %lld",
                         (long long)m->first_sliding);
    if (!use || m->sliding.window == 0) {
        m->sliding.window = 0;
        m->first_sliding = m->d.layers;
    }
    return MT_OK;
}

static mt_status read_config(const mt_config *c, mt_model *model, bool qwen3, qwen *m)
{
    mt_status s;
    m->d = defaults;
    m->d.head_dim = qwen3 ? 128 : 0;
    m->full.qk_norm = qwen3;
    m->full.qkv_bias = !qwen3;
    if ((s = mt_decoder_read(c, &m->d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = read_window(c, m)) ||
        (s = mt_model_rope(model, c, 10000, m->d.head_dim, &m->full.rope)))
        return s;
    if (qwen3) {
        if ((s = mt_config_bool(c, "attention_bias", false, &m->full.qkv_bias)))
            return s;
        m->full.o_bias = m->full.qkv_bias;
    }
    int64_t window = m->sliding.window;
    m->full.scale = 1 / sqrt((double)m->d.head_dim);
    m->sliding = m->full;
    m->sliding.window = window;
    return MT_OK;
}

static mt_status add_layers(const mt_config *c, mt_model *model, const qwen *m)
{
    int32_t full = -1, sliding = -1;
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool slides = false;
        mt_status s = mt_decoder_slides(c, &m->d, i, i >= m->first_sliding, &slides);
        if (s)
            return s;
        if (slides && m->sliding.window == 0)
            return c->reject(c, "layer_types",
                             "has sliding_attention, but use_sliding_window is not true or there "
                             "is no sliding_window");
        if (slides)
            mt_decoder_layer(model, i, &sliding, "block_sliding", mt_decoder_block, &m->sliding);
        else
            mt_decoder_layer(model, i, &full, "block", mt_decoder_block, &m->full);
    }
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    const char *type;
    mt_status s = mt_config_string(c, "model_type", "qwen2", &type);
    if (s)
        return s;
    qwen *m = calloc(1, sizeof *m);
    if (!m)
        return MT_ERR_NOMEM;
    s = read_config(c, model, strcmp(type, "qwen3") == 0, m);
    if (!s) {
        mt_decoder_begin(model, &m->d);
        s = add_layers(c, model, m);
        mt_decoder_end(model);
    }
    if (s) {
        free(m);
        return s;
    }
    *ret_arch = m;
    return MT_OK;
}

static const char *const types[] = { "qwen2", "qwen3" };
static const mt_arch qwen_arch = { sizeof(mt_arch), 2, types, configure, free };

MT_PLUGIN("qwen", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &qwen_arch)
