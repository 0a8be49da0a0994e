/* SPDX-License-Identifier: Apache-2.0
 *
 * The backward of nodes: what is made again for it, which gradients share memory, which add up.
 */
#include "maker.h"

/* Recomputes what the value needs, in forward order. */
static void ensure(maker *k, mt_val v)
{
    v = graph_base(k->g, v);
    const value *val = &k->g->values[v];
    if (val->node < 0 || k->choice.saved[v] || val->output >= 0 || k->made[val->node])
        return;
    k->made[val->node] = true;
    const node *n = &k->g->nodes[val->node];
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            ensure(k, n->in[i]);
    maker_emit_forward(k, val->node, PROGRAM_BACKWARD);
}

static bool same_place(const place *a, const place *b)
{
    if (a->where != b->where || a->where == REGION_NONE)
        return false;
    return a->where == REGION_WORK ? a->piece == b->piece : a->offset == b->offset;
}

/* Does any other value still need what its gradient holds in this very place? */
static bool shared(const maker *k, mt_val v)
{
    for (mt_val u = 0; u < k->g->n_values; u++)
        if (u != v && k->g->values[u].base < 0 && k->written[u] && !k->consumed[u] &&
            same_place(&k->grad[u], &k->grad[v]))
            return true;
    return false;
}

/* Memory for the gradient of base value v, if it has none. */
static void place_grad(maker *k, mt_val v, int32_t index)
{
    if (k->grad[v].where != REGION_NONE)
        return;
    const value *val = &k->g->values[v];
    if (val->source == VALUE_INPUT)
        k->grad[v] = (place){ REGION_D_IN + val->index, 0, 0 };
    else
        k->grad[v] =
            (place){ REGION_WORK, 0, maker_add_piece(k, maker_value_bytes(k->p, v), index) };
}

/* Gives v a gradient memory of its own with the same content, because others still need the
 * present one and v's is about to change. */
static void unshare(maker *k, mt_val v)
{
    int32_t index = k->prog->n_steps;
    step *s = maker_add_step(k);
    if (!s)
        return;
    s->node = -1;
    maker_touch(k, &k->grad[v], index);
    s->in[0] = maker_ref(k, v, &k->grad[v]);
    k->grad[v].where = REGION_NONE;
    place_grad(k, v, index);
    s->out[0] = maker_ref(k, v, &k->grad[v]);
}

/* May v's gradient simply be the memory that holds the gradient of `of`? */
static bool may_alias(const maker *k, mt_val v, mt_val of)
{
    const value *val = &k->g->values[v];
    const place *at = &k->grad[of];
    if (val->base >= 0 || val->output >= 0 || k->grad[v].where != REGION_NONE)
        return false;
    if (k->g->values[of].base >= 0)
        return false;
    if (val->source != VALUE_INPUT)
        return true;
    /* An input's gradient ends up outside, in memory that no other input's has. */
    if (at->where < REGION_D_OUT || at->where >= REGION_D_IN)
        return false;
    for (mt_val u = 0; u < k->g->n_values; u++)
        if (u != v && k->g->values[u].source == VALUE_INPUT && same_place(&k->grad[u], at))
            return false;
    return true;
}

/* Emits the backward call of a node for the operands in `wanted`. */
static void emit_backward(maker *k, int32_t node_index, uint32_t wanted)
{
    const node *n = &k->g->nodes[node_index];
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE && (n->shape.backward_in >> i & 1))
            ensure(k, n->in[i]);
    for (uint32_t i = 0; i < n->n_out; i++)
        if (n->shape.backward_out >> i & 1)
            ensure(k, n->out[i]);
    for (uint32_t i = 0; i < n->n_aux; i++)
        ensure(k, n->aux[i]);
    for (uint32_t i = 0; i < n->n_in; i++) {
        mt_val v = n->in[i];
        if ((wanted >> i & 1) && k->g->values[v].source != VALUE_PARAM && k->written[v] &&
            k->g->values[v].base < 0 && shared(k, v))
            unshare(k, v);
    }

    int32_t index = k->prog->n_steps;
    step *s = maker_add_step(k);
    if (!s)
        return;
    s->node = node_index;
    s->backward = true;
    if (!(s->kernel = maker_find_kernel(k, n)))
        return;
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE && (n->shape.backward_in >> i & 1))
            s->in[i] = maker_use_value(k, n->in[i], index);
    for (uint32_t i = 0; i < n->n_out; i++) {
        mt_val base = graph_base(k->g, n->out[i]);
        if (n->shape.backward_out >> i & 1)
            s->out[i] = maker_use_value(k, n->out[i], index);
        if (k->grad[base].where != REGION_NONE) {
            maker_touch(k, &k->grad[base], index);
            s->d_out[i] = maker_ref(k, n->out[i], &k->grad[base]);
        }
    }
    for (uint32_t i = 0; i < n->n_aux; i++)
        s->aux[i] = maker_use_value(k, n->aux[i], index);
    for (uint32_t i = 0; i < n->n_in; i++) {
        if (!(wanted >> i & 1))
            continue;
        mt_val v = n->in[i];
        if (k->g->values[v].source == VALUE_PARAM) {
            s->d_in[i] = maker_param_grad(k, v, i, s);
            continue;
        }
        mt_val base = graph_base(k->g, v);
        place_grad(k, base, index);
        maker_touch(k, &k->grad[base], index);
        s->d_in[i] = maker_ref(k, v, &k->grad[base]);
        if (k->written[v])
            s->accumulate |= 1u << i;
        k->written[v] = k->written[base] = true;
    }
    static const mt_pass train[] = { MT_PASS_TRAIN };
    maker_add_scratch(k, s, index, train, 1);
}

void maker_emit_backward(maker *k, int32_t node_index)
{
    const node *n = &k->g->nodes[node_index];
    bool in_forward = n->def->flags & MT_OP_GRAD_IN_FORWARD;
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < n->n_in; i++) {
        mt_val v = n->in[i];
        if (v == MT_NONE || (n->shape.no_grad_in >> i & 1) || !graph_needs_grad(k->g, v))
            continue;
        if (in_forward && k->g->values[v].source == VALUE_PARAM)
            continue;
        wanted |= 1u << i;
    }
    if (!wanted)
        return;
    if ((n->def->flags & MT_OP_PASS_THROUGH) && n->n_out == 1) {
        mt_val out = n->out[0];
        for (uint32_t i = 0; i < n->n_in; i++) {
            mt_val v = n->in[i];
            if (!(wanted >> i & 1) || k->g->values[v].source == VALUE_PARAM ||
                !may_alias(k, v, out))
                continue;
            k->grad[v] = k->grad[out];
            k->written[v] = true;
            wanted &= ~(1u << i);
        }
    }
    if (wanted)
        emit_backward(k, node_index, wanted);
    for (uint32_t i = 0; i < n->n_out; i++)
        k->consumed[n->out[i]] = true;
}

/* Makes again, before the experts' turn, what v's node or those of the experts before it take from
 * the dense part. */
static void ensure_dense(maker *k, mt_val v)
{
    v = graph_base(k->g, v);
    const value *val = &k->g->values[v];
    if (val->node < 0 || k->choice.saved[v] || val->output >= 0)
        return;
    const node *n = &k->g->nodes[val->node];
    if (n->stage != TPL_EXPERTS) {
        ensure(k, v);
        return;
    }
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            ensure_dense(k, n->in[i]);
}

void maker_ensure_dense(maker *k)
{
    for (int32_t i = k->g->n_nodes - 1; i >= 0; i--) {
        const node *n = &k->g->nodes[i];
        if (n->stage != TPL_EXPERTS || n->skipped)
            continue;
        for (uint32_t j = 0; j < n->n_in; j++)
            if (n->in[j] != MT_NONE && (n->shape.backward_in >> j & 1))
                ensure_dense(k, n->in[j]);
        for (uint32_t j = 0; j < n->n_out; j++)
            if (n->shape.backward_out >> j & 1)
                ensure_dense(k, n->out[j]);
        for (uint32_t j = 0; j < n->n_aux; j++)
            ensure_dense(k, n->aux[j]);
    }
}
