/* SPDX-License-Identifier: Apache-2.0
 *
 * The hyper-parameters of the DeepSeek family, but for those of its experts (experts.c): what a
 * configuration leaves out, what it may say.
 */
#include "deepseek.h"

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
    if (strcmp(type, "default") != 0 && (s = mt_config_number(c, key[2], 0, 0, 100, &mscale)))
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
    if ((s = mt_config_up_to(c, "q_lora_rank", 1536, INT32_MAX, &a->q_rank)) ||
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

mt_status deepseek_read(const mt_config *c, const char *type, mt_model *model, void *state)
{
    deepseek *m = state;
    mt_decoder *d = &m->d;
    mt_status s;
    m->v = strcmp(type, "deepseek") == 0 ? V1 : strcmp(type, "deepseek_v2") == 0 ? V2 : V3;
    *d = decoders[m->v];
    d->norm_eps = 1e-6;
    d->init_std = 0.02;
    d->norm = MT_NORM_ROUND_THEN_SCALE;
    d->activation = MT_ACT_SILU;
    d->moe = &m->moe;
    if ((s = mt_decoder_read(c, d)) || (s = mt_decoder_activation(c, "hidden_act", "silu")) ||
        (s = deepseek_read_experts(c, m)))
        return s;
    if (m->v == V3 &&
        (s = mt_config_up_to(c, "num_nextn_predict_layers", 1, 64, &m->predict_layers)))
        return s;
    if (m->v != V1)
        return read_latent(c, model, m);
    if ((s = mt_decoder_read_attention(c, d, false, &m->mha)))
        return s;
    return mt_model_rope(model, c, 10000, d->head_dim, &m->mha.rope);
}
