/* SPDX-License-Identifier: Apache-2.0
 *
 * Llama: Llama 1 to 3.3 and every model of `model_type: llama`. Reference: Hugging Face
 * transformers, models/llama/modeling_llama.py.
 */
#include <megatrain/arch.h>
#include <megatrain/plugin.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct llama {
    int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
    double eps, init_std;
    bool attention_bias, mlp_bias, tied;
    mt_rope_attr rope;
} llama;

static mt_val norm(mt_builder *b, const llama *m, mt_val x, const char *name)
{
    mt_val w = mt_vector(b, name, m->hidden, MT_INIT_ONES);
    return mt_rmsnorm(b, x, w, &(mt_rmsnorm_attr){ m->eps, MT_NORM_ROUND_THEN_SCALE, 1 });
}

/* The linear layer NAME.weight [out, in], with NAME.bias where the model has biases. */
static mt_val linear(mt_builder *b, const llama *m, mt_val x, const char *name, int64_t out,
                     int64_t in, bool bias)
{
    char weight_name[64], bias_name[64];
    snprintf(weight_name, sizeof weight_name, "%s.weight", name);
    snprintf(bias_name, sizeof bias_name, "%s.bias", name);
    mt_val w = mt_matrix(b, weight_name, out, in, m->init_std);
    return mt_linear(b, x, w, bias ? mt_vector(b, bias_name, out, MT_INIT_ZEROS) : MT_NONE);
}

static mt_status embed(mt_builder *b, const void *arch, const void *arg)
{
    const llama *m = arch;
    (void)arg;
    mt_val w = mt_matrix(b, "embed_tokens.weight", m->vocab, m->hidden, m->init_std);
    mt_output(b, 0, mt_embedding(b, w));
    return MT_OK;
}

static mt_status block(mt_builder *b, const void *arch, const void *arg)
{
    const llama *m = arch;
    (void)arg;
    int64_t q_dim = m->heads * m->head_dim, kv_dim = m->kv_heads * m->head_dim;
    bool ab = m->attention_bias, mb = m->mlp_bias;
    int32_t heads = (int32_t)m->heads, kv_heads = (int32_t)m->kv_heads, dim = (int32_t)m->head_dim;

    mt_val x = mt_input(b, 0, m->hidden);
    mt_val h = norm(b, m, x, "input_layernorm.weight");
    mt_val q = linear(b, m, h, "self_attn.q_proj", q_dim, m->hidden, ab);
    mt_val k = linear(b, m, h, "self_attn.k_proj", kv_dim, m->hidden, ab);
    mt_val v = linear(b, m, h, "self_attn.v_proj", kv_dim, m->hidden, ab);
    q = mt_rope(b, q, &m->rope, heads);
    k = mt_rope(b, k, &m->rope, kv_heads);
    mt_attn_attr attn = { heads, kv_heads, dim, dim, .scale = 1 / sqrt((double)dim) };
    mt_val a = mt_attention(b, q, k, v, MT_NONE, &attn);
    x = mt_add(b, x, linear(b, m, a, "self_attn.o_proj", m->hidden, q_dim, ab));

    h = norm(b, m, x, "post_attention_layernorm.weight");
    mt_val gate = linear(b, m, h, "mlp.gate_proj", m->intermediate, m->hidden, mb);
    mt_val up = linear(b, m, h, "mlp.up_proj", m->intermediate, m->hidden, mb);
    mt_val act = mt_glu(b, gate, up, &(mt_act_attr){ .kind = MT_ACT_SILU });
    h = linear(b, m, act, "mlp.down_proj", m->hidden, m->intermediate, mb);
    mt_output(b, 0, mt_add(b, x, h));
    return MT_OK;
}

static mt_status head(mt_builder *b, const void *arch, const void *arg)
{
    const llama *m = arch;
    (void)arg;
    mt_val h = norm(b, m, mt_input(b, 0, m->hidden), "model.norm.weight");
    mt_val w = m->tied ? mt_alias(b, "model.embed_tokens.weight", m->vocab, m->hidden)
                       : mt_matrix(b, "lm_head.weight", m->vocab, m->hidden, m->init_std);
    mt_output(b, 0, mt_linear_cross_entropy(b, h, w, &(mt_xent_attr){ 0 }));
    return MT_OK;
}

/* From 1 to `most`; `unset` where the key is absent. */
static mt_status count(const mt_config *c, const char *key, int64_t unset, int most, int64_t *ret)
{
    mt_status s = mt_config_int(c, key, unset, ret);
    bool bad = s == MT_OK && (*ret < 1 || *ret > most);
    return bad ? c->reject(c, key, "must be 1 to %d, found %lld", most, (long long)*ret) : s;
}

static mt_status read_config(const mt_config *c, llama *m)
{
    mt_status s;
    const char *act;
    if ((s = count(c, "vocab_size", 32000, INT32_MAX, &m->vocab)) ||
        (s = count(c, "hidden_size", 4096, INT32_MAX, &m->hidden)) ||
        (s = count(c, "intermediate_size", 11008, INT32_MAX, &m->intermediate)) ||
        (s = count(c, "num_hidden_layers", 32, 10000, &m->layers)) ||
        (s = count(c, "num_attention_heads", 32, INT32_MAX, &m->heads)) ||
        (s = count(c, "num_key_value_heads", m->heads, INT32_MAX, &m->kv_heads)) ||
        (s = count(c, "head_dim", m->hidden / m->heads, INT32_MAX, &m->head_dim)) ||
        (s = count(c, "max_position_embeddings", 2048, INT32_MAX, &m->positions)) ||
        (s = mt_config_float(c, "rms_norm_eps", 1e-6, &m->eps)) ||
        (s = mt_config_float(c, "initializer_range", 0.02, &m->init_std)) ||
        (s = mt_config_bool(c, "attention_bias", false, &m->attention_bias)) ||
        (s = mt_config_bool(c, "mlp_bias", false, &m->mlp_bias)) ||
        (s = mt_config_bool(c, "tie_word_embeddings", false, &m->tied)) ||
        (s = mt_config_string(c, "hidden_act", "silu", &act)))
        return s;
    if (strcmp(act, "silu") != 0)
        return c->reject(c, "hidden_act", "'%s' is not offered; llama uses 'silu'", act);
    if (m->heads % m->kv_heads)
        return c->reject(c, "num_key_value_heads", "%lld must divide num_attention_heads %lld",
                         (long long)m->kv_heads, (long long)m->heads);
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    llama *m = calloc(1, sizeof *m);
    if (!m)
        return MT_ERR_NOMEM;
    mt_status s = read_config(c, m);
    if (s || (s = mt_model_rope(model, c, 10000, m->head_dim, &m->rope))) {
        free(m);
        return s;
    }
    model->api->set_vocab(model, m->vocab);
    model->api->set_max_positions(model, m->positions);
    model->api->ignore_tensor(model, "*.rotary_emb.inv_freq");
    int32_t block_tpl = mt_add_template(model, "block", block, NULL);
    mt_add_unit(model, "embed", mt_add_template(model, "embed", embed, NULL), "model.");
    for (int64_t i = 0; i < m->layers; i++) {
        char name[32], prefix[48];
        snprintf(name, sizeof name, "block.%lld", (long long)i);
        snprintf(prefix, sizeof prefix, "model.layers.%lld.", (long long)i);
        mt_add_unit(model, name, block_tpl, prefix);
    }
    mt_add_unit(model, "head", mt_add_template(model, "head", head, NULL), "");
    *ret_arch = m;
    return MT_OK;
}

static const char *const types[] = { "llama" };
static const mt_arch llama_arch = { sizeof(mt_arch), 1, types, configure, free };

MT_PLUGIN("llama", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &llama_arch)
