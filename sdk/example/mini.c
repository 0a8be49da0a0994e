/* SPDX-License-Identifier: Apache-2.0
 *
 * mini: a small decoder as an out-of-tree architecture plugin, to copy and change. Attention and
 * MLP stand side by side on one norm (as in GPT-J and PaLM), the MLP has no gate, the head is tied.
 */
#include <megatrain/arch.h>
#include <megatrain/plugin.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct mini {
    int64_t vocab, hidden, inner, layers, heads, head_dim, positions;
    double eps;
    mt_rope_attr rope;
} mini;

static const double init_std = 0.02;

static mt_val norm(mt_builder *b, const mini *m, mt_val x, const char *name)
{
    mt_val w = mt_vector(b, name, m->hidden, MT_INIT_ONES);
    return mt_rmsnorm(b, x, w, &(mt_rmsnorm_attr){ m->eps, MT_NORM_ROUND_THEN_SCALE, 1 });
}

static mt_val linear(mt_builder *b, mt_val x, const char *name, int64_t out, int64_t in)
{
    return mt_linear(b, x, mt_matrix(b, name, out, in, init_std), MT_NONE);
}

static mt_status embed(mt_builder *b, const void *arch, const void *arg)
{
    const mini *m = arch;
    (void)arg;
    mt_val w = mt_matrix(b, "embed.weight", m->vocab, m->hidden, init_std);
    mt_output(b, 0, mt_embedding(b, w));
    return MT_OK;
}

static mt_status block(mt_builder *b, const void *arch, const void *arg)
{
    const mini *m = arch;
    int32_t heads = (int32_t)m->heads, dim = (int32_t)m->head_dim;
    (void)arg;

    mt_val x = mt_input(b, 0, m->hidden);
    mt_val h = norm(b, m, x, "norm.weight");
    mt_val q = linear(b, h, "attn.q.weight", m->hidden, m->hidden);
    mt_val k = linear(b, h, "attn.k.weight", m->hidden, m->hidden);
    mt_val v = linear(b, h, "attn.v.weight", m->hidden, m->hidden);
    mt_val up = linear(b, h, "mlp.up.weight", m->inner, m->hidden);

    mt_attn_attr attn = { heads, heads, dim, dim, .scale = 1 / sqrt((double)dim) };
    mt_val a = mt_attention(b, mt_rope(b, q, &m->rope, heads), mt_rope(b, k, &m->rope, heads), v,
                            MT_NONE, &attn);
    a = linear(b, a, "attn.out.weight", m->hidden, m->hidden);
    mt_val f = mt_act(b, up, &(mt_act_attr){ .kind = MT_ACT_GELU_TANH });
    f = linear(b, f, "mlp.down.weight", m->hidden, m->inner);
    mt_output(b, 0, mt_add(b, x, mt_add(b, a, f)));
    return MT_OK;
}

static mt_status head(mt_builder *b, const void *arch, const void *arg)
{
    const mini *m = arch;
    (void)arg;
    mt_val h = norm(b, m, mt_input(b, 0, m->hidden), "final_norm.weight");
    mt_val w = mt_alias(b, "embed.weight", m->vocab, m->hidden);
    mt_output(b, 0, mt_linear_cross_entropy(b, h, w, &(mt_xent_attr){ 0 }));
    return MT_OK;
}

/* A count of at least 1. */
static mt_status count(const mt_config *c, const char *key, int64_t fallback, int64_t *ret)
{
    int64_t n;
    mt_status s = mt_config_int(c, key, fallback, &n);
    if (s != MT_OK)
        return s;
    if (n < 1)
        return c->reject(c, key, "must be at least 1, found %lld", (long long)n);
    *ret = n;
    return MT_OK;
}

static mt_status read_config(const mt_config *c, mini *m)
{
    mt_status s;
    if ((s = count(c, "vocab_size", 256, &m->vocab)) ||
        (s = count(c, "hidden_size", 128, &m->hidden)) ||
        (s = count(c, "intermediate_size", 4 * m->hidden, &m->inner)) ||
        (s = count(c, "num_hidden_layers", 4, &m->layers)) ||
        (s = count(c, "num_attention_heads", 4, &m->heads)) ||
        (s = count(c, "max_position_embeddings", 1024, &m->positions)) ||
        (s = mt_config_float(c, "rms_norm_eps", 1e-5, &m->eps)))
        return s;
    if (m->hidden % (2 * m->heads))
        return c->reject(c, "num_attention_heads",
                         "%lld heads of an even size do not add up to hidden_size %lld",
                         (long long)m->heads, (long long)m->hidden);
    m->head_dim = m->hidden / m->heads;
    return MT_OK;
}

static mt_status configure(const mt_config *c, mt_model *model, void **ret_arch)
{
    mini *m = calloc(1, sizeof *m);
    if (!m)
        return mt_fail_nomem();
    mt_status s = read_config(c, m);
    if (s == MT_OK)
        s = mt_model_rope(model, c, 10000, m->head_dim, &m->rope);
    if (s != MT_OK) {
        free(m);
        return s;
    }
    model->api->set_vocab(model, m->vocab);
    model->api->set_max_positions(model, m->positions);
    mt_add_unit(model, "embed", mt_add_template(model, "embed", embed, NULL), "");
    int32_t tpl = mt_add_template(model, "block", block, NULL);
    for (int64_t i = 0; i < m->layers; i++) {
        char name[32], prefix[32];
        snprintf(name, sizeof name, "block.%lld", (long long)i);
        snprintf(prefix, sizeof prefix, "blocks.%lld.", (long long)i);
        mt_add_unit(model, name, tpl, prefix);
    }
    mt_add_unit(model, "head", mt_add_template(model, "head", head, NULL), "");
    *ret_arch = m;
    return MT_OK;
}

static const char *const model_types[] = { "mini" };
static const mt_arch mini_arch = { sizeof(mt_arch), 1, model_types, configure, free };

MT_PLUGIN("mini", "0.1.0", "Apache-2.0", MT_ARCH_INTERFACE, &mini_arch)
