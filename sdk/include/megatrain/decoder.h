/* SPDX-License-Identifier: Apache-2.0
 *
 * What decoder-only families share, for architecture plugins: reading the usual hyper-parameters,
 * attention and MLP under the usual names of Hugging Face checkpoints, and the list of units
 * embed, block.0 .. block.N-1, head.
 *
 * A family keeps an mt_decoder as the first member of its state, so that the build functions here
 * find it; it sets the family's defaults, reads the configuration over them, and declares its
 * layers, all of which mt_decoder_configure ties together. Where it differs, it composes its own
 * block from the parts.
 */
#ifndef MEGATRAIN_DECODER_H
#define MEGATRAIN_DECODER_H

#include "arch.h"
#include "report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The routed experts of a layer, each a gated MLP, and the one that all tokens take. */
typedef struct mt_decoder_moe {
    int64_t experts, width; /* of an expert's inner columns */
    mt_router_attr router;
    /* Tensors of published checkpoints, "{}" the index of the expert; NULL: mlp.gate.weight and
     * mlp.experts.{}.gate_proj.weight, .up_proj.weight, .down_proj.weight. */
    const char *router_name, *gate_name, *up_name, *down_name;
    const char *shared_name; /* "mlp.shared_expert" */
    int64_t shared_width;    /* 0: no shared expert */
    bool shared_gate;        /* its result times sigmoid(SHARED_NAME_gate of x) */
    bool fused;              /* published with one tensor for all experts, not one each */
    /* A frozen bias [experts] that takes part in the choice of experts, but not in their weights;
     * NULL: none. */
    const char *bias_name;
    /* A loss that keeps experts evenly used; coef 0: none. Before the configuration is read it is
     * what the family has: output_router_logits decides whether it stays, and of that over all
     * layers router_aux_loss_coef is the coefficient. */
    mt_balance_attr balance;
    bool exact_logits; /* the router's logits are FP32 whatever the device computes in */
} mt_decoder_moe;

typedef struct mt_decoder {
    int64_t vocab, hidden, intermediate, layers, heads;
    int64_t kv_heads; /* default 0: as many as heads */
    int64_t head_dim; /* default 0: hidden / heads */
    int64_t positions;
    double norm_eps, init_std;
    mt_norm_variant norm;     /* of every norm */
    mt_activation activation; /* of the MLP's gate */
    bool mlp_bias;
    bool tied;                 /* the head is the embedding */
    double embed_scale;        /* of the embedding's rows; 0: none */
    double final_softcap;      /* of the logits; 0: none */
    const mt_decoder_moe *moe; /* of mt_decoder_moe_block; in the family's state */
} mt_decoder;

/* How the layers of one kind attend. */
typedef struct mt_decoder_attn {
    mt_rope_attr rope;
    double scale;   /* of the scores */
    double softcap; /* of the scores; 0: none */
    int64_t window; /* keys that a query sees, itself included; 0: all before it */
    bool qkv_bias, o_bias;
    bool qk_norm; /* q and k are normalised head by head before they are rotated */
    bool sinks;   /* a logit a head that takes part in the softmax, without a value */
    bool gated;   /* the result is multiplied by a sigmoid; q_proj has, head by head, q and gate */
    float q_growth;
    int32_t q_growth_positions; /* of mt_rope_attr, for q only */
} mt_decoder_attn;

/* A larger coefficient of an auxiliary loss is a slip: released models have 0.9 at most. */
#define MT_BALANCE_MAX_COEF 100.0

/* ---- reading hyper-parameters --------------------------------------------------------------- */

/* A whole number from 1 to `most`; `unset` where the key is absent or null. [main] */
static inline mt_status mt_config_count(const mt_config *c, const char *key, int64_t unset,
                                        int64_t most, int64_t *ret)
{
    int64_t n;
    mt_status s = mt_config_int(c, key, unset, &n);
    if (s != MT_OK)
        return s;
    if (n < 1 || n > most)
        return c->reject(c, key, "must be 1 to %lld, found %lld", (long long)most, (long long)n);
    *ret = n;
    return MT_OK;
}

/* A whole number from 0 to `most`; null is 0, `unset` where the key is absent. [main] */
static inline mt_status mt_config_up_to(const mt_config *c, const char *key, int64_t unset,
                                        int64_t most, int64_t *ret)
{
    int64_t n;
    mt_status s = mt_config_int(c, key, mt_config_is_null(c, key) ? 0 : unset, &n);
    if (s != MT_OK)
        return s;
    if (n < 0 || n > most)
        return c->reject(c, key, "must be 0 to %lld, found %lld", (long long)most, (long long)n);
    *ret = n;
    return MT_OK;
}

/* A number from `least` to `most`; `unset` where the key is absent or null. [main] */
static inline mt_status mt_config_number(const mt_config *c, const char *key, double unset,
                                         double least, double most, double *ret)
{
    double x;
    mt_status s = mt_config_float(c, key, unset, &x);
    if (s != MT_OK)
        return s;
    if (!(x >= least && x <= most))
        return c->reject(c, key, "must be %g to %g, found %g", least, most, x);
    *ret = x;
    return MT_OK;
}

/* A number above 0, at most 1e6, that null turns off (0); `unset` where the key is absent. [main]
 */
static inline mt_status mt_config_optional(const mt_config *c, const char *key, double unset,
                                           double *ret)
{
    double x;
    mt_status s = mt_config_float(c, key, mt_config_is_null(c, key) ? 0 : unset, &x);
    if (s != MT_OK)
        return s;
    if (c->has(c, key) && !(x > 0 && x <= 1e6))
        return c->reject(c, key, "must be above 0, at most 1e6 (or null for none), found %g", x);
    *ret = x;
    return MT_OK;
}

/* sliding_window in keys, itself included; null: 0, no window. [main] */
static inline mt_status mt_decoder_window(const mt_config *c, int64_t unset, int64_t *ret)
{
    if (!c->has(c, "sliding_window")) {
        *ret = mt_config_is_null(c, "sliding_window") ? 0 : unset;
        return MT_OK;
    }
    return mt_config_count(c, "sliding_window", unset, INT32_MAX, ret);
}

/* Is layer i of kind `other` rather than full_attention? As its entry in layer_types says, `unset`
 * where that is absent. [main] */
static inline mt_status mt_decoder_layer_is(const mt_config *c, const mt_decoder *d, int64_t i,
                                            const char *other, bool unset, bool *ret)
{
    const char *type;
    char key[48];
    if (!c->has(c, "layer_types")) {
        *ret = unset;
        return MT_OK;
    }
    if (c->length(c, "layer_types") != d->layers)
        return c->reject(c, "layer_types", "must be a list of num_hidden_layers entries, %lld",
                         (long long)d->layers);
    snprintf(key, sizeof key, "layer_types.%lld", (long long)i);
    mt_status s = c->get_string(c, key, &type);
    if (s != MT_OK)
        return s;
    bool is_other = strcmp(type, other) == 0;
    if (!is_other && strcmp(type, "full_attention") != 0)
        return c->reject(c, key, "'%s' is not offered; expected full_attention or %s", type, other);
    *ret = is_other;
    return MT_OK;
}

/* Does layer i attend in a window? [main] */
static inline mt_status mt_decoder_slides(const mt_config *c, const mt_decoder *d, int64_t i,
                                          bool unset, bool *ret)
{
    return mt_decoder_layer_is(c, d, i, "sliding_attention", unset, ret);
}

/* The keys that all families have, over what *d holds: the family's defaults. [main] */
static inline mt_status mt_decoder_read(const mt_config *c, mt_decoder *d)
{
    mt_status s;
    if ((s = mt_config_count(c, "vocab_size", d->vocab, INT32_MAX, &d->vocab)) ||
        (s = mt_config_count(c, "hidden_size", d->hidden, INT32_MAX, &d->hidden)) ||
        (s = mt_config_count(c, "intermediate_size", d->intermediate, INT32_MAX,
                             &d->intermediate)) ||
        (s = mt_config_count(c, "num_hidden_layers", d->layers, 10000, &d->layers)) ||
        (s = mt_config_count(c, "num_attention_heads", d->heads, INT32_MAX, &d->heads)))
        return s;
    /* null is not the default of these two, but what follows from the other sizes. */
    if (!d->kv_heads || mt_config_is_null(c, "num_key_value_heads"))
        d->kv_heads = d->heads;
    if (!d->head_dim || mt_config_is_null(c, "head_dim"))
        d->head_dim = d->hidden / d->heads;
    if ((s = mt_config_count(c, "num_key_value_heads", d->kv_heads, INT32_MAX, &d->kv_heads)) ||
        (s = mt_config_count(c, "head_dim", d->head_dim, INT32_MAX, &d->head_dim)) ||
        (s = mt_config_count(c, "max_position_embeddings", d->positions, INT32_MAX,
                             &d->positions)) ||
        (s = mt_config_number(c, "rms_norm_eps", d->norm_eps, 0, 1, &d->norm_eps)) ||
        (s = mt_config_number(c, "initializer_range", d->init_std, 0, 100, &d->init_std)) ||
        (s = mt_config_bool(c, "tie_word_embeddings", d->tied, &d->tied)))
        return s;
    if (d->heads % d->kv_heads)
        return c->reject(c, "num_key_value_heads", "%lld must divide num_attention_heads %lld",
                         (long long)d->kv_heads, (long long)d->heads);
    return MT_OK;
}

/* Biases of q, k, v and o, all or none of them by attention_bias, and the usual scale; after
 * mt_decoder_read. [main] */
static inline mt_status mt_decoder_read_attention(const mt_config *c, const mt_decoder *d,
                                                  bool unset_bias, mt_decoder_attn *a)
{
    a->scale = 1 / sqrt((double)d->head_dim);
    mt_status s = mt_config_bool(c, "attention_bias", unset_bias, &a->qkv_bias);
    a->o_bias = a->qkv_bias;
    return s;
}

/* hidden_act where the family knows no other than `only`. [main] */
static inline mt_status mt_decoder_activation(const mt_config *c, const char *key, const char *only)
{
    const char *found;
    mt_status s = mt_config_string(c, key, only, &found);
    if (s != MT_OK)
        return s;
    if (strcmp(found, only) != 0)
        return c->reject(c, key, "'%s' is not offered; expected '%s'", found, only);
    return MT_OK;
}

/* The auxiliary loss, where *m has one and output_router_logits asks for it. [main] */
static inline mt_status mt_decoder_read_balance(const mt_config *c, mt_decoder_moe *m)
{
    mt_balance_attr *a = &m->balance;
    bool offered = a->coef > 0, wanted;
    mt_status s = mt_config_bool(c, "output_router_logits", false, &wanted);
    if (s != MT_OK)
        return s;
    if (wanted && !offered)
        return c->reject(c, "output_router_logits",
                         "asks for an auxiliary loss of the routers, which this family does not "
                         "have; set it to false%s",
                         m->bias_name ? ": train.router_bias_update_rate balances its experts"
                                      : "");
    if (a->mode == MT_BALANCE_HF_ALL_LAYERS &&
        (s = mt_config_number(c, "router_aux_loss_coef", a->coef, 0, MT_BALANCE_MAX_COEF,
                              &a->coef)))
        return s;
    if (!wanted)
        a->coef = 0;
    return MT_OK;
}

/* Number and choice of the experts, over what *m holds. The noise of training is refused where it
 * is asked for, and the auxiliary loss where *m has none to offer. [main] */
static inline mt_status mt_decoder_read_moe(const mt_config *c, mt_decoder_moe *m)
{
    static const char *const counts[] = { "num_experts", "num_local_experts", "n_routed_experts" };
    const char *first = NULL; /* the key that was found */
    int64_t top_k = 0, n = 0;
    double noise;
    mt_status s;
    for (int i = 0; i < 3; i++) {
        if ((s = mt_config_count(c, counts[i], m->experts, 1 << 16, &n)))
            return s;
        if (first && n != m->experts)
            return c->reject(c, counts[i], "is %lld, but %s, which means the same, is %lld",
                             (long long)n, first, (long long)m->experts);
        if (c->has(c, counts[i]))
            first = counts[i];
        m->experts = n;
    }
    if ((s = mt_config_count(c, "num_experts_per_tok", m->router.top_k, m->experts, &top_k)) ||
        (s = mt_decoder_read_balance(c, m)) ||
        (s = mt_config_float(c, "router_jitter_noise", 0, &noise)))
        return s;
    if (noise != 0)
        return c->reject(c, "router_jitter_noise", "is not offered; set it to 0, found %g", noise);
    m->router.top_k = (int32_t)top_k;
    return MT_OK;
}

/* ---- parts of a layer ----------------------------------------------------------------------- */

/* The norm NAME.weight over each of the `heads` groups of n columns of a row. [main] */
static inline mt_val mt_decoder_norm_heads(mt_builder *b, const mt_decoder *d, mt_val x,
                                           const char *name, int64_t n, int64_t heads)
{
    char weight[96];
    snprintf(weight, sizeof weight, "%s.weight", name);
    mt_init init = d->norm == MT_NORM_ONE_PLUS ? MT_INIT_ZEROS : MT_INIT_ONES;
    mt_rmsnorm_attr attr = { d->norm_eps, d->norm, (int32_t)heads };
    return mt_rmsnorm(b, x, mt_vector(b, weight, n, init), &attr);
}

/* The norm NAME.weight [hidden]. [main] */
static inline mt_val mt_decoder_norm(mt_builder *b, const mt_decoder *d, mt_val x, const char *name)
{
    return mt_decoder_norm_heads(b, d, x, name, d->hidden, 1);
}

/* The linear layer NAME.weight [out, in], with NAME.bias [out] where `bias`. [main] */
static inline mt_val mt_decoder_linear(mt_builder *b, const mt_decoder *d, mt_val x,
                                       const char *name, int64_t out, int64_t in, bool bias)
{
    char weight_name[96], bias_name[96];
    snprintf(weight_name, sizeof weight_name, "%s.weight", name);
    snprintf(bias_name, sizeof bias_name, "%s.bias", name);
    mt_val w = mt_matrix(b, weight_name, out, in, d->init_std);
    return mt_linear(b, x, w, bias ? mt_vector(b, bias_name, out, MT_INIT_ZEROS) : MT_NONE);
}

/* Grouped-query attention under self_attn, from normalised x [T, hidden] to the branch's result
 * [T, hidden]. [main] */
static inline mt_val mt_decoder_attention(mt_builder *b, const mt_decoder *d,
                                          const mt_decoder_attn *a, mt_val x)
{
    int32_t heads = (int32_t)d->heads, kv_heads = (int32_t)d->kv_heads, dim = (int32_t)d->head_dim;
    int64_t q_cols = d->heads * d->head_dim, kv_cols = d->kv_heads * d->head_dim;
    mt_val q = mt_decoder_linear(b, d, x, "self_attn.q_proj", a->gated ? 2 * q_cols : q_cols,
                                 d->hidden, a->qkv_bias);
    mt_val k = mt_decoder_linear(b, d, x, "self_attn.k_proj", kv_cols, d->hidden, a->qkv_bias);
    mt_val v = mt_decoder_linear(b, d, x, "self_attn.v_proj", kv_cols, d->hidden, a->qkv_bias);
    mt_val gate = MT_NONE;
    if (a->gated) {
        gate = mt_slice(b, q, heads, dim, dim);
        q = mt_slice(b, q, heads, 0, dim);
    }
    if (a->qk_norm) {
        q = mt_decoder_norm_heads(b, d, q, "self_attn.q_norm", d->head_dim, d->heads);
        k = mt_decoder_norm_heads(b, d, k, "self_attn.k_norm", d->head_dim, d->kv_heads);
    }
    mt_rope_attr q_rope = a->rope;
    q_rope.growth = a->q_growth;
    q_rope.growth_positions = a->q_growth_positions;
    q = mt_rope(b, q, &q_rope, heads);
    k = mt_rope(b, k, &a->rope, kv_heads);
    mt_val sinks = a->sinks ? mt_laid_out(b, "self_attn.sinks", 0, d->heads, MT_INIT_NORMAL,
                                          d->init_std, NULL, 0)
                            : MT_NONE;
    mt_attn_attr attr = { heads, kv_heads, dim, dim, a->scale, a->softcap, a->window };
    mt_val o = mt_attention(b, q, k, v, sinks, &attr);
    if (a->gated) {
        mt_act_attr sigmoid = { MT_ACT_SIGMOID, 0, 0 };
        o = mt_glu(b, gate, o, &sigmoid);
    }
    return mt_decoder_linear(b, d, o, "self_attn.o_proj", d->hidden, q_cols, a->o_bias);
}

/* The gated MLP NAME.gate_proj, .up_proj and .down_proj, `width` columns inside. [main] */
static inline mt_val mt_decoder_mlp(mt_builder *b, const mt_decoder *d, mt_val x, const char *name,
                                    int64_t width)
{
    char part[80];
    snprintf(part, sizeof part, "%s.gate_proj", name);
    mt_val gate = mt_decoder_linear(b, d, x, part, width, d->hidden, d->mlp_bias);
    snprintf(part, sizeof part, "%s.up_proj", name);
    mt_val up = mt_decoder_linear(b, d, x, part, width, d->hidden, d->mlp_bias);
    mt_act_attr act = { d->activation, 0, 0 };
    mt_val h = mt_glu(b, gate, up, &act);
    snprintf(part, sizeof part, "%s.down_proj", name);
    return mt_decoder_linear(b, d, h, part, d->hidden, width, d->mlp_bias);
}

/* Rows [first, first + n) of a parameter's matrices from a tensor; n = 0: to the last. [main] */
static inline mt_source mt_source_rows(const char *name, int64_t first, int64_t n)
{
    mt_source s;
    memset(&s, 0, sizeof s);
    s.name = name;
    s.first_row = first;
    s.n_rows = n;
    return s;
}

/* x in [T, 1] times each column of y [T, n]. [main] */
static inline mt_val mt_mul_column(mt_builder *b, mt_val x, mt_val y, int64_t n)
{
    mt_concat_attr repeat = { (int32_t)n, 1, { 1 } };
    return mt_mul(b, mt_concat(b, &x, 1, &repeat), y);
}

/* The routed experts' part, from normalised x [T, hidden] to [T, hidden]. Checkpoints hold a tensor
 * for each expert, or one fused tensor each for gate over up, and down. [main] */
static inline mt_val mt_decoder_experts(mt_builder *b, const mt_decoder *d, const mt_decoder_moe *m,
                                        mt_val x)
{
    static const char router[] = "mlp.gate.weight";
    static const char gate_up[] = "mlp.experts.gate_up_proj", down[] = "mlp.experts.down_proj";
    int64_t width = m->width;
    mt_source r[2] = { mt_source_rows(m->router_name ? m->router_name : router, 0, 0),
                       mt_source_rows(router, 0, 0) };
    mt_source in[3] = {
        mt_source_rows(m->gate_name ? m->gate_name : "mlp.experts.{}.gate_proj.weight", 0, width),
        mt_source_rows(m->up_name ? m->up_name : "mlp.experts.{}.up_proj.weight", width, width),
        mt_source_rows(gate_up, 0, 0)
    };
    mt_source out[2] = { mt_source_rows(
                             m->down_name ? m->down_name : "mlp.experts.{}.down_proj.weight", 0, 0),
                         mt_source_rows(down, 0, 0) };
    mt_param_layout of_r[2] = { { r, 1, 0 }, { r + 1, 1, 0 } };
    mt_param_layout of_in[3] = { { in, 2, 0 }, { in + 2, 1, 0 }, { in, 2, 0 } };
    mt_param_layout of_out[3] = { { out, 1, 0 }, { out + 1, 1, 0 }, { out, 1, 0 } };
    int first = m->fused ? 1 : 0; /* the layout to export */
    double std = d->init_std;

    mt_val w = mt_laid_out(b, router, m->experts, d->hidden, MT_INIT_NORMAL, std, of_r,
                           m->router_name ? 2 : 1);
    mt_val bias = MT_NONE;
    if (m->bias_name) {
        uint32_t flags = MT_PARAM_NO_DECAY | MT_PARAM_FROZEN | MT_PARAM_STREAM_F32;
        mt_param_info info = { sizeof info, flags, m->bias_name, 0, m->experts, MT_INIT_ZEROS,
                               0.0f,        0,     NULL,         0, 0 };
        bias = b->api->param(b, &info);
    }
    mt_val logits = m->exact_logits ? mt_exact_linear(b, x, w) : mt_linear(b, x, w, MT_NONE);
    mt_routing to = mt_router(b, logits, bias, &m->router);
    if (m->balance.coef > 0)
        mt_balance_loss(b, logits, &to, &m->balance);
    mt_val rows = mt_dispatch(b, x, &to);
    w = mt_stacked(b, gate_up, m->experts, 2 * width, d->hidden, std, of_in + first, 2);
    mt_val h = mt_grouped_linear(b, rows, w, MT_NONE, &to);
    mt_act_attr act = { d->activation, 0, 0 };
    h = mt_glu(b, mt_slice(b, h, 1, 0, width), mt_slice(b, h, 1, width, width), &act);
    w = mt_stacked(b, down, m->experts, d->hidden, width, std, of_out + first, 2);
    return mt_combine(b, mt_grouped_linear(b, h, w, MT_NONE, &to), &to);
}

/* The expert that all tokens take. [main] */
static inline mt_val mt_decoder_shared_expert(mt_builder *b, const mt_decoder *d,
                                              const mt_decoder_moe *m, mt_val x)
{
    char name[80];
    mt_val y = mt_decoder_mlp(b, d, x, m->shared_name, m->shared_width);
    if (!m->shared_gate)
        return y;
    mt_act_attr sigmoid = { MT_ACT_SIGMOID, 0, 0 };
    snprintf(name, sizeof name, "%s_gate", m->shared_name);
    mt_val gate = mt_act(b, mt_decoder_linear(b, d, x, name, 1, d->hidden, false), &sigmoid);
    return mt_mul_column(b, gate, y, d->hidden);
}

/* All that stands in place of the MLP: routed experts and the shared one, where there is one.
 * [main] */
static inline mt_val mt_decoder_moe_mlp(mt_builder *b, const mt_decoder *d, const mt_decoder_moe *m,
                                        mt_val x)
{
    mt_val y = mt_decoder_experts(b, d, m, x);
    return m->shared_width > 0 ? mt_add(b, y, mt_decoder_shared_expert(b, d, m, x)) : y;
}

/* ---- templates ------------------------------------------------------------------------------ */

/* The build function of a pre-norm layer, what most families have: x += attention(norm(x)), then
 * x += mlp(norm(x)). `arch` starts with an mt_decoder, `arg` is an mt_decoder_attn. [main] */
static inline mt_status mt_decoder_block(mt_builder *b, const void *arch, const void *arg)
{
    const mt_decoder *d = (const mt_decoder *)arch;
    mt_val x = mt_input(b, 0, d->hidden);
    mt_val h = mt_decoder_norm(b, d, x, "input_layernorm");
    x = mt_add(b, x, mt_decoder_attention(b, d, (const mt_decoder_attn *)arg, h));
    h = mt_decoder_norm(b, d, x, "post_attention_layernorm");
    mt_output(b, 0, mt_add(b, x, mt_decoder_mlp(b, d, h, "mlp", d->intermediate)));
    return MT_OK;
}

/* The same with experts, d->moe, in place of the MLP. [main] */
static inline mt_status mt_decoder_moe_block(mt_builder *b, const void *arch, const void *arg)
{
    const mt_decoder *d = (const mt_decoder *)arch;
    mt_val x = mt_input(b, 0, d->hidden);
    mt_val h = mt_decoder_norm(b, d, x, "input_layernorm");
    x = mt_add(b, x, mt_decoder_attention(b, d, (const mt_decoder_attn *)arg, h));
    h = mt_decoder_norm(b, d, x, "post_attention_layernorm");
    mt_output(b, 0, mt_add(b, x, mt_decoder_moe_mlp(b, d, d->moe, h)));
    return MT_OK;
}

static inline mt_status mt_decoder_embed(mt_builder *b, const void *arch, const void *arg)
{
    const mt_decoder *d = (const mt_decoder *)arch;
    (void)arg;
    mt_val w = mt_matrix(b, "embed_tokens.weight", d->vocab, d->hidden, d->init_std);
    mt_val x = mt_embedding(b, w);
    mt_output(b, 0, d->embed_scale > 0 ? mt_scale(b, x, d->embed_scale) : x);
    return MT_OK;
}

static inline mt_status mt_decoder_head(mt_builder *b, const void *arch, const void *arg)
{
    const mt_decoder *d = (const mt_decoder *)arch;
    (void)arg;
    mt_val h = mt_decoder_norm(b, d, mt_input(b, 0, d->hidden), "model.norm");
    mt_val w = d->tied ? mt_alias(b, "model.embed_tokens.weight", d->vocab, d->hidden)
                       : mt_matrix(b, "lm_head.weight", d->vocab, d->hidden, d->init_std);
    mt_xent_attr attr = { d->final_softcap };
    mt_output(b, 0, mt_linear_cross_entropy(b, h, w, &attr));
    return MT_OK;
}

/* ---- the list of units ---------------------------------------------------------------------- */

/* Facts of the model and unit "embed"; before the layers. [main] */
static inline void mt_decoder_begin(mt_model *m, const mt_decoder *d)
{
    m->api->set_vocab(m, d->vocab);
    m->api->set_max_positions(m, d->positions);
    m->api->ignore_tensor(m, "*.rotary_emb.inv_freq");
    mt_add_unit(m, "embed", mt_add_template(m, "embed", mt_decoder_embed, NULL), "model.");
}

/* The language model of a vision-language model is loaded by itself. [main] */
static inline void mt_decoder_ignore_vision(mt_model *m)
{
    m->api->ignore_tensor(m, "vision_tower.*");
    m->api->ignore_tensor(m, "model.vision_tower.*");
    m->api->ignore_tensor(m, "multi_modal_projector.*");
    m->api->ignore_tensor(m, "model.multi_modal_projector.*");
}

/* Unit "block.I", the layer of index i. *tpl, at first -1, is the template `name`, which the first
 * layer of its kind adds; `arg` must outlive the model. [main] */
static inline void mt_decoder_layer(mt_model *m, int64_t i, int32_t *tpl, const char *name,
                                    mt_build_fn build, const void *arg)
{
    char unit[32], prefix[48];
    if (*tpl < 0)
        *tpl = mt_add_template(m, name, build, arg);
    snprintf(unit, sizeof unit, "block.%lld", (long long)i);
    snprintf(prefix, sizeof prefix, "model.layers.%lld.", (long long)i);
    mt_add_unit(m, unit, *tpl, prefix);
}

/* Unit "head": the final norm and the loss; after the layers. [main] */
static inline void mt_decoder_end(mt_model *m)
{
    mt_add_unit(m, "head", mt_add_template(m, "head", mt_decoder_head, NULL), "");
}

/* ---- configuring ---------------------------------------------------------------------------- */

/* What a family of decoders brings to mt_decoder_configure. */
typedef struct mt_decoder_family {
    size_t state_size;      /* bytes of its state, which starts with an mt_decoder */
    const char *model_type; /* where the configuration names none */
    /* Fills the state, which is zero, for a model of `type`. [main] */
    mt_status (*read)(const mt_config *c, const char *type, mt_model *model, void *state);
    /* Calls mt_decoder_layer for every layer. [main] */
    mt_status (*add_layers)(const mt_config *c, mt_model *model, const void *state);
} mt_decoder_family;

/* The work of mt_arch::configure: the state, from malloc, and all units. [main] */
static inline mt_status mt_decoder_configure(const mt_decoder_family *f, const mt_config *c,
                                             mt_model *model, void **ret_arch)
{
    const char *type;
    mt_status s = mt_config_string(c, "model_type", f->model_type, &type);
    if (s != MT_OK)
        return s;
    void *state = calloc(1, f->state_size);
    if (!state)
        return mt_fail_nomem();
    if ((s = f->read(c, type, model, state)) == MT_OK) {
        mt_decoder_begin(model, (const mt_decoder *)state);
        s = f->add_layers(c, model, state);
        mt_decoder_end(model);
    }
    if (s != MT_OK) {
        free(state);
        return s;
    }
    *ret_arch = state;
    return MT_OK;
}

#ifdef __cplusplus
}
#endif
#endif
