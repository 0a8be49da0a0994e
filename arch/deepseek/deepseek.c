/* SPDX-License-Identifier: Apache-2.0
 *
 * DeepSeek-MoE (`deepseek`), DeepSeek V2, V2 Lite and Coder V2 (`deepseek_v2`), and V3, R1 and what
 * shares their class (`deepseek_v3`). References: the model code that is released with the first;
 * Hugging Face transformers, models/{deepseek_v2,deepseek_v3}.
 *
 * The routers' logits are formed in the compute dtype by the first and in FP32 by the others, the
 * choice of experts from them in FP32 by all.
 */
#include "deepseek.h"

#include <megatrain/plugin.h>

#include <stdlib.h>

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

/* ---- the model ------------------------------------------------------------------------------- */

static mt_status add_layers(const mt_config *c, mt_model *model, const void *state)
{
    const deepseek *m = state;
    int32_t dense = -1, sparse = -1;
    char pattern[48];
    (void)c;
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
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    static const mt_decoder_family family = { sizeof(deepseek), "deepseek_v3", deepseek_read,
                                              add_layers };
    return mt_decoder_configure(&family, c, model, ret_arch);
}

static const char *const types[] = { "deepseek", "deepseek_v2", "deepseek_v3" };
static const mt_arch deepseek_arch = { sizeof(mt_arch), 3, types, configure, free };

MT_PLUGIN("deepseek", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &deepseek_arch)
