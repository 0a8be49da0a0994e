/* SPDX-License-Identifier: Apache-2.0
 *
 * The experts of the DeepSeek family: their number, how they are chosen and weighed, which layers
 * have them.
 */
#include "deepseek.h"

static const mt_decoder_moe experts[3] = {
    [V1] = { .experts = 64, .width = 1407, .router = { .top_k = 6, .scale = 1 } },
    [V2] = { .experts = 64,
             .width = 1407,
             .router = { .top_k = 6, .scale = 1 },
             .exact_logits = true },
    [V3] = { .experts = 256,
             .width = 2048,
             .router = { .top_k = 8,
                         .scoring = MT_ROUTER_SIGMOID,
                         .groups = 8,
                         .top_groups = 4,
                         .group_score = MT_GROUP_TOP2_SUM,
                         .scale = 2.5 },
             .bias_name = "mlp.gate.e_score_correction_bias",
             .exact_logits = true },
};

static const int64_t shared_experts[3] = { [V1] = 0, [V2] = 2, [V3] = 1 };

/* Experts are picked from the best groups only. */
static mt_status read_groups(const mt_config *c, version v, mt_decoder_moe *e)
{
    const char *method;
    int64_t groups = 0, top_groups = 0;
    mt_status s;
    if ((s = mt_config_string(c, "topk_method", v == V3 ? "noaux_tc" : "greedy", &method)) ||
        (s = mt_config_up_to(c, "n_group", e->router.groups, e->experts, &groups)) ||
        (s = mt_config_up_to(c, "topk_group", e->router.top_groups, e->experts, &top_groups)))
        return s;
    bool limited = strcmp(method, v == V3 ? "noaux_tc" : "group_limited_greedy") == 0;
    if (!limited && (v == V3 || strcmp(method, "greedy") != 0))
        return c->reject(c, "topk_method", "'%s' is not offered; expected %s", method,
                         v == V3 ? "'noaux_tc'" : "'greedy' or 'group_limited_greedy'");
    if (!limited || (v == V3 && groups <= 1)) {
        e->router.groups = e->router.top_groups = 0;
        return MT_OK;
    }
    if (groups < 1 || e->experts % groups)
        return c->reject(c, "n_group", "%lld must divide the number of experts, %lld",
                         (long long)groups, (long long)e->experts);
    if (top_groups < 1 || top_groups > groups ||
        top_groups * (e->experts / groups) < e->router.top_k)
        return c->reject(c, "topk_group",
                         "must be 1 to n_group, %lld, and leave num_experts_per_tok experts, %d; "
                         "found %lld",
                         (long long)groups, e->router.top_k, (long long)top_groups);
    if (v == V3 && e->experts / groups < 2)
        return c->reject(c, "n_group", "must leave two experts a group, found %lld groups of %lld",
                         (long long)groups, (long long)e->experts);
    e->router.groups = (int32_t)groups;
    e->router.top_groups = (int32_t)top_groups;
    return MT_OK;
}

static mt_status read_weights(const mt_config *c, version v, mt_router_attr *r)
{
    bool renormalise;
    double scale = 1;
    mt_status s;
    if ((s = mt_config_bool(c, "norm_topk_prob", v == V3, &renormalise)) ||
        (v != V1 && (s = mt_config_float(c, "routed_scaling_factor", r->scale, &scale))))
        return s;
    if (!(scale > 0 && scale <= 1000))
        return c->reject(c, "routed_scaling_factor", "must be above 0, at most 1000, found %g",
                         scale);
    /* Before V3 the only expert of a token keeps its weight, and what is normalised isn't scaled.
     */
    r->renormalise = renormalise && (v == V3 || r->top_k > 1);
    r->scale = v == V2 && r->renormalise ? 1 : scale;
    return MT_OK;
}

/* Counts the keys of experts as known where there are none: releases have them all the same. */
static void pass_over_experts(const mt_config *c)
{
    static const char *const keys[] = { "num_experts_per_tok",
                                        "moe_intermediate_size",
                                        "scoring_func",
                                        "n_shared_experts",
                                        "first_k_dense_replace",
                                        "moe_layer_freq",
                                        "topk_method",
                                        "n_group",
                                        "topk_group",
                                        "norm_topk_prob",
                                        "aux_loss_alpha",
                                        "routed_scaling_factor",
                                        "seq_aux" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        c->has(c, keys[i]);
}

/* The loss by sequences of the original training code, where output_router_logits asks for one:
 * released configurations have its keys, but transformers does not form it. V3's is another. */
static mt_status read_balance(const mt_config *c, deepseek *m)
{
    mt_decoder_moe *e = &m->moe;
    double coef = 0;
    bool by_sequence = true, wanted;
    mt_status s;
    if ((s = mt_config_number(c, "aux_loss_alpha", 0.001, 0, MT_BALANCE_MAX_COEF, &coef)) ||
        (s = mt_config_bool(c, "seq_aux", true, &by_sequence)) ||
        (s = mt_config_bool(c, "output_router_logits", false, &wanted)))
        return s;
    if (wanted && m->v != V3 && !(coef > 0))
        return c->reject(c, "aux_loss_alpha", "must be above 0 with output_router_logits, found %g",
                         coef);
    if (wanted && m->v != V3 && !by_sequence)
        return c->reject(c, "seq_aux", "false is not offered; balance is kept by sequences");
    if (m->v != V3)
        e->balance = (mt_balance_attr){ MT_BALANCE_DEEPSEEK_SEQ, 0, coef };
    return MT_OK;
}

mt_status deepseek_read_experts(const mt_config *c, deepseek *m)
{
    mt_decoder_moe *e = &m->moe;
    int64_t shared = 0;
    mt_status s;
    *e = experts[m->v];
    e->shared_name = "mlp.shared_experts";
    /* Without a number of experts there are none: in V1 where it is absent, else where it's null.
     */
    bool given =
        c->has(c, "n_routed_experts") || c->has(c, "num_experts") || c->has(c, "num_local_experts");
    if (!given && (m->v == V1 || mt_config_is_null(c, "n_routed_experts"))) {
        m->first_sparse = m->d.layers;
        m->sparse_step = 1;
        pass_over_experts(c);
        return MT_OK;
    }
    if ((s = read_balance(c, m)) || (s = mt_decoder_read_moe(c, e)) ||
        (s = mt_decoder_activation(c, "scoring_func", m->v == V3 ? "sigmoid" : "softmax")) ||
        (s = mt_config_count(c, "moe_intermediate_size", e->width, INT32_MAX, &e->width)) ||
        (s = mt_config_up_to(c, "n_shared_experts", shared_experts[m->v], 1 << 16, &shared)) ||
        (s = mt_config_up_to(c, "first_k_dense_replace", m->v == V3 ? 3 : 0, INT32_MAX,
                             &m->first_sparse)) ||
        (s = mt_config_count(c, "moe_layer_freq", 1, INT32_MAX, &m->sparse_step)) ||
        (m->v != V1 && (s = read_groups(c, m->v, e))) || (s = read_weights(c, m->v, &e->router)))
        return s;
    e->shared_width = shared * e->width;
    return MT_OK;
}
