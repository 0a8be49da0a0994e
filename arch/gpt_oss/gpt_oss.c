/* SPDX-License-Identifier: Apache-2.0
 *
 * GPT-OSS 20B and 120B (`gpt_oss`): attention with sinks, every second layer in a window, and in
 * every layer experts with biases and a clamped gate. Reference: Hugging Face transformers,
 * models/gpt_oss.
 */
#include <megatrain/decoder.h>
#include <megatrain/plugin.h>

#include <stdlib.h>

typedef struct gpt_oss {
    mt_decoder d; /* first */
    mt_decoder_attn full, sliding;
    mt_decoder_moe experts;
    double limit; /* of gate and up */
} gpt_oss;

static const mt_decoder defaults = {
    .vocab = 201088,
    .hidden = 2880,
    .intermediate = 2880,
    .layers = 36,
    .heads = 64,
    .kv_heads = 8,
    .head_dim = 64,
    .positions = 131072,
    .norm_eps = 1e-5,
    .init_std = 0.02,
    .norm = MT_NORM_FP32_SCALE,
};

/* The weights are a softmax over the picked logits, the same as over all and then renormalised. */
static const mt_decoder_moe experts = { .experts = 128,
                                        .router = { .top_k = 4, .renormalise = 1, .scale = 1 },
                                        .balance = { MT_BALANCE_HF_ALL_LAYERS, 0, 0.001 } };

/* ---- layers ---------------------------------------------------------------------------------- */

/* Gate rows at 0, 2, 4 .. of the tensor and up rows at 1, 3, 5 .. become gate over up. */
static void deinterleave(mt_source part[2], const char *name, int64_t width, uint32_t flags)
{
    for (int64_t i = 0; i < 2; i++) {
        part[i] = mt_source_rows(name, i * width, width);
        part[i].flags = flags;
        part[i].from_row = i;
        part[i].step = 2;
    }
}

/* [hidden] to [2 width], gate over up. The BF16 release has (in, out) matrices, the MXFP4 one
 * (out, in): of these two only the name tells, for hidden and width are equal in the releases. */
static mt_val gate_up(mt_builder *b, const gpt_oss *m, mt_val rows, const mt_routing *to)
{
    static const char name[] = "mlp.experts.gate_up_proj";
    static const char bias_name[] = "mlp.experts.gate_up_proj_bias";
    int64_t experts_n = m->experts.experts, width = m->experts.width;
    mt_source bf16[2], mxfp4[2], of_bias[2];
    deinterleave(bf16, name, width, MT_SOURCE_TRANSPOSED);
    deinterleave(mxfp4, "mlp.experts.gate_up_proj_blocks", width, 0);
    deinterleave(of_bias, bias_name, width, 0);
    mt_param_layout layouts[2] = { { bf16, 2, 0 }, { mxfp4, 2, 0 } }, bias = { of_bias, 2, 0 };
    mt_val w = mt_stacked(b, name, experts_n, 2 * width, m->d.hidden, m->d.init_std, layouts, 2);
    mt_val v = mt_stacked_vectors(b, bias_name, experts_n, 2 * width, MT_INIT_ZEROS, &bias, 1);
    return mt_grouped_linear(b, rows, w, v, to);
}

static mt_val down(mt_builder *b, const gpt_oss *m, mt_val h, const mt_routing *to)
{
    static const char name[] = "mlp.experts.down_proj";
    int64_t experts_n = m->experts.experts, width = m->experts.width;
    mt_source bf16 = mt_source_rows(name, 0, 0);
    mt_source mxfp4 = mt_source_rows("mlp.experts.down_proj_blocks", 0, 0);
    bf16.flags = MT_SOURCE_TRANSPOSED;
    mt_param_layout layouts[2] = { { &bf16, 1, 0 }, { &mxfp4, 1, 0 } };
    mt_val w = mt_stacked(b, name, experts_n, m->d.hidden, width, m->d.init_std, layouts, 2);
    mt_val v = mt_stacked_vectors(b, "mlp.experts.down_proj_bias", experts_n, m->d.hidden,
                                  MT_INIT_ZEROS, NULL, 0);
    return mt_grouped_linear(b, h, w, v, to);
}

/* From normalised x [T, hidden] to the branch's result [T, hidden]. */
static mt_val mixture(mt_builder *b, const gpt_oss *m, mt_val x)
{
    int64_t width = m->experts.width;
    mt_val logits =
        mt_decoder_linear(b, &m->d, x, "mlp.router", m->experts.experts, m->d.hidden, true);
    mt_routing to = mt_router(b, logits, MT_NONE, &m->experts.router);
    if (m->experts.balance.coef > 0)
        mt_balance_loss(b, logits, &to, &m->experts.balance);
    mt_val h = gate_up(b, m, mt_dispatch(b, x, &to), &to);
    mt_act_attr act = { MT_ACT_CLAMPED_SWIGLU, 0, m->limit };
    h = mt_glu(b, mt_slice(b, h, 1, 0, width), mt_slice(b, h, 1, width, width), &act);
    return mt_combine(b, down(b, m, h, &to), &to);
}

static mt_status block(mt_builder *b, const void *arch, const void *arg)
{
    const gpt_oss *m = arch;
    mt_val x = mt_input(b, 0, m->d.hidden);
    mt_val h = mt_decoder_norm(b, &m->d, x, "input_layernorm");
    x = mt_add(b, x, mt_decoder_attention(b, &m->d, arg, h));
    h = mt_decoder_norm(b, &m->d, x, "post_attention_layernorm");
    mt_output(b, 0, mt_add(b, x, mixture(b, m, h)));
    return MT_OK;
}

/* ---- configuration --------------------------------------------------------------------------- */

static mt_status read_experts(const mt_config *c, gpt_oss *m)
{
    double alpha;
    mt_status s;
    m->experts = experts;
    m->experts.width = m->d.intermediate;
    if ((s = mt_decoder_read_moe(c, &m->experts)) ||
        (s = mt_config_float(c, "swiglu_alpha", 1.702, &alpha)) ||
        (s = mt_config_float(c, "swiglu_limit", 7, &m->limit)))
        return s;
    if (!(fabs(alpha - 1.702) < 1e-9))
        return c->reject(c, "swiglu_alpha", "%g is not offered; expected 1.702", alpha);
    if (!(m->limit > 0 && m->limit <= 1e6))
        return c->reject(c, "swiglu_limit", "must be above 0, at most 1e6, found %g", m->limit);
    return MT_OK;
}

static mt_status read_attention(const mt_config *c, mt_model *model, gpt_oss *m)
{
    static const mt_rope_spec spec = { .struct_size = sizeof spec,
                                       .theta = 150000,
                                       .type = "yarn",
                                       .factor = 32,
                                       .original_max_position_embeddings = 4096,
                                       .fractional = true };
    int64_t window = 0;
    mt_status s;
    if ((s = mt_decoder_window(c, 128, &window)) ||
        (s = mt_decoder_read_attention(c, &m->d, true, &m->full)) ||
        (s = mt_model_rope_of(model, c, &spec, m->d.head_dim, &m->full.rope)))
        return s;
    m->full.sinks = true;
    m->sliding = m->full;
    m->sliding.window = window;
    return MT_OK;
}

static mt_status read_config(const mt_config *c, const char *type, mt_model *model, void *state)
{
    gpt_oss *m = state;
    mt_status s;
    (void)type;
    m->d = defaults;
    if ((s = mt_decoder_read(c, &m->d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = read_experts(c, m)))
        return s;
    return read_attention(c, model, m);
}

static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const gpt_oss *m = state;
    int32_t full = -1, sliding = -1;
    for (int64_t i = 0; i < m->d.layers; i++) {
        bool slides = false;
        mt_status s = mt_decoder_slides(c, &m->d, i, i % 2 == 0, &slides);
        if (s)
            return s;
        if (slides && m->sliding.window == 0)
            return c->reject(c, "sliding_window",
                             "is null, but layer %lld is one of sliding_attention", (long long)i);
        if (slides)
            mt_decoder_layer(model, i, &sliding, "block_sliding", block, &m->sliding);
        else
            mt_decoder_layer(model, i, &full, "block_full", block, &m->full);
    }
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    static const mt_decoder_family family = { sizeof(gpt_oss), "gpt_oss", read_config, add_layers };
    return mt_decoder_configure(&family, c, model, ret_arch);
}

static const char *const types[] = { "gpt_oss" };
static const mt_arch gpt_oss_arch = { sizeof(mt_arch), 1, types, configure, free };

MT_PLUGIN("gpt_oss", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &gpt_oss_arch)
