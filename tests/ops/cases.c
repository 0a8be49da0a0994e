/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases of operations; see cases.h.
 */
#include "cases.h"

static mt_batch documents_of(const int32_t *starts, int64_t documents)
{
    mt_batch b = { .tokens = starts[documents], .documents = documents, .doc_starts = starts };
    for (int64_t i = 0; i < documents; i++)
        if (starts[i + 1] - starts[i] > b.max_document)
            b.max_document = starts[i + 1] - starts[i];
    return b;
}

op_case linear_case(int64_t t, int64_t n, int64_t k, bool bias)
{
    op_case c = { .op = "linear",
                  .n_in = 3,
                  .n_out = 1,
                  .in = { { .rows = t, .cols = k }, { .rows = n, .cols = k, .param = true } },
                  .out = { { .rows = t, .cols = n } },
                  .batch = { .tokens = t } };
    if (bias)
        c.in[2] = (op_value){ .rows = 1, .cols = n, .scale = 20, .param = true };
    return c;
}

op_case exact_linear_case(int64_t t, int64_t n, int64_t k)
{
    op_case c = linear_case(t, n, k, false);
    c.op = "exact_linear";
    c.n_in = 2;
    c.out[0].stat = true;
    return c;
}

op_case embedding_case(int64_t t, const int32_t *rows, int64_t table_rows, int64_t cols)
{
    return (op_case){ .op = "embedding",
                      .n_in = 1,
                      .n_out = 1,
                      .in = { { .rows = table_rows, .cols = cols, .param = true } },
                      .out = { { .rows = t, .cols = cols } },
                      .drop_in = 1,
                      .batch = { .tokens = t, .rows = rows } };
}

/* ---- mixtures of experts --------------------------------------------------------------------- */

op_case router_case(const mt_router_attr *a, int64_t t, int64_t experts, bool bias)
{
    op_case c = { .op = "router",
                  .attr = a,
                  .n_in = 2,
                  .n_out = 3,
                  .n_aux = 1,
                  .in = { { .rows = t, .cols = experts, .scale = 3 } },
                  .out = { { .rows = t, .cols = a->top_k, .stat = true },
                           { .rows = t, .cols = a->top_k, .is_index = true },
                           { .rows = 1, .cols = experts + 1, .is_index = true } },
                  .aux = { { .rows = t, .cols = a->top_k, .is_index = true } },
                  .drop_in = 2,
                  .batch = { .tokens = t } };
    if (bias)
        c.in[1] =
            (op_value){ .rows = 1, .cols = experts, .scale = 0.3, .param = true, .no_grad = true };
    return c;
}

op_case dispatch_case(int64_t t, int64_t k, int64_t cols, const int32_t *slots)
{
    return (op_case){ .op = "dispatch",
                      .n_in = 2,
                      .n_out = 1,
                      .in = { { .rows = t, .cols = cols },
                              { .rows = t, .cols = k, .is_index = true, .index = slots } },
                      .out = { { .rows = t * k, .cols = cols } },
                      .drop_in = 1,
                      .batch = { .tokens = t } };
}

op_case combine_case(int64_t t, int64_t k, int64_t cols, const int32_t *slots)
{
    return (op_case){ .op = "combine",
                      .n_in = 3,
                      .n_out = 1,
                      .in = { { .rows = t * k, .cols = cols },
                              { .rows = t, .cols = k, .stat = true },
                              { .rows = t, .cols = k, .is_index = true, .index = slots } },
                      .out = { { .rows = t, .cols = cols } },
                      .batch = { .tokens = t } };
}

op_case grouped_case(const int32_t *offsets, int64_t experts, int64_t n, int64_t k, bool bias)
{
    int64_t rows = offsets[experts];
    op_case c = { .op = "grouped_linear",
                  .n_in = 4,
                  .n_out = 1,
                  .in = { { .rows = rows, .cols = k },
                          { .rows = experts * n, .cols = k, .param = true },
                          { .rows = 1, .cols = experts + 1, .is_index = true, .index = offsets } },
                  .out = { { .rows = rows, .cols = n } },
                  .batch = { .tokens = rows } };
    if (bias)
        c.in[3] = (op_value){ .rows = experts, .cols = n, .scale = 20, .param = true };
    return c;
}

op_case balance_case(const mt_balance_attr *a, const int32_t *starts, int64_t documents,
                     int64_t experts, int64_t k, const int32_t *slots, const int32_t *offsets,
                     const int32_t *targets, const double *tally)
{
    int64_t t = starts[documents];
    op_case c = { .op = "balance_loss",
                  .attr = a,
                  .n_in = 3,
                  .n_out = 1,
                  .in = { { .rows = t, .cols = experts, .scale = 2 },
                          { .rows = t, .cols = k, .is_index = true, .index = slots },
                          { .rows = 1, .cols = experts + 1, .is_index = true, .index = offsets } },
                  .out = { { .rows = 1, .cols = 1, .stat = true } },
                  .grad_in_forward = true, /* backward starts from the loss's scale */
                  .batch = documents_of(starts, documents) };
    c.batch.targets = targets;
    c.batch.loss_scale = 20;
    c.tally = tally;
    c.n_tally = mt_balance_tally(a->mode, experts);
    c.drop_in = c.n_tally ? 1u << 1 | 1u << 2 : 0; /* the tally has the counts */
    return c;
}

/* ---- columns --------------------------------------------------------------------------------- */

op_case slice_case(const mt_slice_attr *a, int64_t t, int64_t cols)
{
    return (op_case){ .op = "slice",
                      .attr = a,
                      .n_in = 1,
                      .n_out = 1,
                      .in = { { .rows = t, .cols = cols } },
                      .out = { { .rows = t, .cols = a->heads * a->cols } },
                      .drop_in = 1,
                      .batch = { .tokens = t } };
}

op_case concat_case(const mt_concat_attr *a, int64_t t)
{
    op_case c = { .op = "concat",
                  .attr = a,
                  .n_in = 3,
                  .n_out = 1,
                  .out = { { .rows = t } },
                  .drop_in = ~0u,
                  .batch = { .tokens = t } };
    for (int i = 0; i < 3 && a->cols[i]; i++) {
        bool shared = a->shared >> i & 1u;
        c.in[i] = (op_value){ .rows = t, .cols = a->cols[i] * (shared ? 1 : a->heads) };
        c.out[0].cols += (int64_t)a->heads * a->cols[i];
    }
    return c;
}

/* ---- attention and the loss ------------------------------------------------------------------ */

op_case attention_case(const int32_t *starts, int64_t documents, const mt_attn_attr *a, bool sinks)
{
    int64_t t = starts[documents];
    op_case c = { .op = "attention",
                  .attr = a,
                  .n_in = 4,
                  .n_out = 1,
                  .n_aux = 1,
                  .in = { { .rows = t, .cols = a->heads * a->qk_dim, .scale = 2 },
                          { .rows = t, .cols = a->kv_heads * a->qk_dim, .scale = 2 },
                          { .rows = t, .cols = a->kv_heads * a->v_dim } },
                  .out = { { .rows = t, .cols = a->heads * a->v_dim } },
                  .aux = { { .rows = t, .cols = a->heads, .stat = true } },
                  .batch = documents_of(starts, documents) };
    if (sinks)
        c.in[3] = (op_value){ .rows = 1, .cols = a->heads, .param = true };
    return c;
}

op_value attention_state(const mt_attn_attr *a, int part, int64_t capacity)
{
    int64_t dim = part == 0 ? a->qk_dim : a->v_dim;
    return (op_value){ .rows = capacity, .cols = a->kv_heads * dim };
}

void some_targets(int32_t *targets, int64_t t, int64_t vocab)
{
    for (int64_t i = 0; i < t; i++)
        targets[i] = i % 5 == 3 ? -100 : (int32_t)(i * 7919 % vocab);
}

op_case xent_case(int64_t t, int64_t hidden, int64_t vocab, const mt_xent_attr *a,
                  const int32_t *targets)
{
    return (op_case){ .op = "linear_cross_entropy",
                      .attr = a,
                      .n_in = 2,
                      .n_out = 1,
                      .n_aux = 1,
                      .in = { { .rows = t, .cols = hidden },
                              { .rows = vocab, .cols = hidden, .param = true } },
                      .out = { { .rows = t, .cols = 1, .stat = true } },
                      .aux = { { .rows = t, .cols = hidden } },
                      .drop_in = 3,
                      .grad_in_forward = true,
                      .batch = { .tokens = t, .targets = targets, .loss_scale = 0.125 } };
}

/* ---- gated delta nets ------------------------------------------------------------------------ */

op_case conv_case(const int32_t *starts, int64_t documents, int64_t cols, int64_t width)
{
    int64_t t = starts[documents];
    return (op_case){ .op = "causal_conv",
                      .n_in = 2,
                      .n_out = 1,
                      .in = { { .rows = t, .cols = cols },
                              { .rows = cols, .cols = width, .param = true } },
                      .out = { { .rows = t, .cols = cols } },
                      .batch = documents_of(starts, documents) };
}

op_value conv_state(const op_case *conv)
{
    return (op_value){ .rows = conv->in[1].cols - 1, .cols = conv->in[0].cols };
}

op_case decay_case(int64_t t, int64_t heads, bool stat)
{
    return (op_case){ .op = "log_decay",
                      .n_in = 3,
                      .n_out = 1,
                      .in = { { .rows = t, .cols = heads, .scale = 3 },
                              { .rows = 1, .cols = heads, .param = true, .stat = stat },
                              { .rows = 1, .cols = heads, .param = true, .stat = stat } },
                      .out = { { .rows = t, .cols = heads, .stat = true } },
                      .batch = { .tokens = t } };
}

op_case delta_case(const int32_t *starts, int64_t documents, const mt_delta_attr *a)
{
    int64_t t = starts[documents], keys = a->k_heads * a->k_dim, values = a->v_heads * a->v_dim;
    int64_t state = a->v_heads * a->k_dim * a->v_dim;
    return (op_case){
        .op = "gated_delta",
        .attr = a,
        .n_in = 5,
        .n_out = 1,
        .n_aux = 1,
        .in = { { .rows = t, .cols = keys },
                { .rows = t, .cols = keys },
                { .rows = t, .cols = values },
                { .rows = t, .cols = a->v_heads, .stat = true, .middle = -0.1, .scale = 0.1 },
                { .rows = t, .cols = a->v_heads, .middle = 0.5, .scale = 0.5 } },
        .out = { { .rows = t, .cols = values } },
        .aux = { { .rows = t + documents * MT_DELTA_CHUNK,
                   .cols = (state + MT_DELTA_CHUNK - 1) / MT_DELTA_CHUNK,
                   .stat = true,
                   .opaque = true } },
        .batch = documents_of(starts, documents)
    };
}

op_value delta_state(const mt_delta_attr *a)
{
    return (op_value){ .rows = (int64_t)a->v_heads * a->k_dim, .cols = a->v_dim, .stat = true };
}
