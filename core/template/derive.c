/* SPDX-License-Identifier: Apache-2.0
 *
 * What follows from the graph alone: merged siblings, views, the parameter layout, which values a
 * gradient reaches, and what each policy saves and recomputes.
 */
#include "../base/status.h"
#include "graph.h"

#include <stdlib.h>

const char *tpl_policy_name(tpl_policy p)
{
    static const char *const name[] = { "keep", "select", "input" };
    return (int)p >= 0 && (int)p < (int)TPL_POLICIES ? name[p] : "unknown";
}

bool graph_needs_grad(const struct tpl_graph *g, mt_val v)
{
    if (v == MT_NONE)
        return false;
    const value *val = &g->values[v];
    if (val->shape.kind == MT_KIND_INDEX)
        return false;
    switch (val->source) {
    case VALUE_INPUT:
        return true;
    case VALUE_PARAM:
        return !(g->params[val->index].info.flags & MT_PARAM_FROZEN);
    case VALUE_AUX:
        return false;
    case VALUE_OUT:
        break;
    }
    const node *n = &g->nodes[val->node];
    for (uint32_t i = 0; i < n->n_in; i++)
        if (!(n->shape.no_grad_in >> i & 1) && graph_needs_grad(g, n->in[i]))
            return true;
    return false;
}

/* ---- siblings -------------------------------------------------------------------------------- */

/* Can this node be stacked with others: parameters of its own, each used here only, all trainable
 * or all frozen? */
static bool mergeable(const struct tpl_graph *g, const node *n)
{
    if (!(n->def->flags & MT_OP_MERGES_SIBLINGS) || n->skipped || n->n_out != 1)
        return false;
    if (g->values[n->out[0]].output >= 0)
        return false; /* a unit's output has memory of its own */
    for (uint32_t i = 1; i < n->n_in; i++) {
        if (n->in[i] == MT_NONE)
            continue;
        const value *w = &g->values[n->in[i]];
        if (w->source != VALUE_PARAM || w->uses != 1 || g->params[w->index].gathered ||
            (g->params[w->index].info.flags & MT_PARAM_ALIAS))
            return false;
    }
    return true;
}

static bool siblings(const struct tpl_graph *g, const node *a, const node *b)
{
    if (a->def != b->def || a->in[0] != b->in[0] || !mergeable(g, b))
        return false;
    for (uint32_t i = 1; i < a->n_in; i++) {
        if ((a->in[i] == MT_NONE) != (b->in[i] == MT_NONE))
            return false;
        if (a->in[i] == MT_NONE)
            continue;
        uint32_t fa = g->params[g->values[a->in[i]].index].info.flags;
        uint32_t fb = g->params[g->values[b->in[i]].index].info.flags;
        if ((fa ^ fb) & (MT_PARAM_FROZEN | MT_PARAM_STREAM_F32))
            return false;
    }
    return true;
}

/* Replaces the nodes `member[0..count)` by member[0] on stacked parameters and a wider output of
 * which the old outputs become views. */
static mt_status merge(struct tpl_graph *g, const int32_t *member, int32_t count)
{
    node *first = &g->nodes[member[0]];
    mt_shape shape[MT_OP_MAX_IN] = { 0 };
    mt_val stacked[MT_OP_MAX_IN];
    shape[0] = g->values[first->in[0]].shape;
    for (uint32_t i = 1; i < first->n_in; i++) {
        stacked[i] = MT_NONE;
        if (first->in[i] == MT_NONE)
            continue;
        const value *lead = &g->values[first->in[i]];
        bool vector = g->params[lead->index].info.rows == 0;
        mt_shape sum = lead->shape;
        for (int32_t k = 1; k < count; k++) {
            const value *w = &g->values[g->nodes[member[k]].in[i]];
            if (vector)
                sum.cols += w->shape.cols;
            else
                sum.rows.fixed += w->shape.rows.fixed;
            g->param_group[w->index] = lead->index;
        }
        int32_t slot = lead->index;
        stacked[i] = graph_add_value(g, VALUE_PARAM, sum, -1, slot);
        if (stacked[i] == MT_NONE)
            return MT_ERR_NOMEM;
        shape[i] = sum;
    }
    mt_op_shape wide = { .struct_size = sizeof wide };
    char error[256] = "";
    if (first->def->shape(shape, first->n_in, first->attr, &wide, error, sizeof error) != MT_OK)
        return status_set(MT_ERR_INTERNAL, "merging siblings of '%s': %s", first->def->name, error);
    mt_val out = graph_add_value(g, VALUE_OUT, wide.out[0], member[0], 0);
    if (out == MT_NONE)
        return MT_ERR_NOMEM;
    g->values[out].uses = count;

    int64_t col = 0;
    for (int32_t k = 0; k < count; k++) {
        node *n = &g->nodes[member[k]];
        value *view = &g->values[n->out[0]];
        view->base = out;
        view->col = col;
        view->node = member[0];
        col += view->shape.cols;
        n->skipped = k > 0;
    }
    for (uint32_t i = 1; i < first->n_in; i++)
        if (stacked[i] != MT_NONE)
            first->in[i] = stacked[i];
    first->out[0] = out;
    first->shape = wide;
    return MT_OK;
}

mt_status graph_merge_siblings(struct tpl_graph *g)
{
    g->param_group = calloc((size_t)g->n_params + 1, sizeof *g->param_group);
    int32_t *member = calloc((size_t)g->n_nodes + 1, sizeof *member);
    mt_status status = MT_OK;
    if (!g->param_group || !member) {
        status = status_nomem("a template", 0);
        goto out;
    }
    for (int32_t i = 0; i < g->n_params; i++)
        g->param_group[i] = i;
    for (int32_t i = 0; i < g->n_nodes && status == MT_OK; i++) {
        if (!mergeable(g, &g->nodes[i]))
            continue;
        int32_t count = 0;
        member[count++] = i;
        for (int32_t k = i + 1; k < g->n_nodes; k++)
            if (siblings(g, &g->nodes[i], &g->nodes[k]))
                member[count++] = k;
        if (count > 1)
            status = merge(g, member, count);
    }
out:
    free(member);
    return status;
}

/* ---- views ----------------------------------------------------------------------------------- */

/* Do the operations that make columns of v cover it exactly, and is v nothing else's operand? Then
 * the gradients of the parts are the one of the whole, and nobody sees the whole change. */
static bool falls_into_views(const struct tpl_graph *g, mt_val v)
{
    const value *whole = &g->values[v];
    int32_t parts = 0;
    int64_t covered = 0;
    if (whole->source != VALUE_OUT || whole->output >= 0)
        return false;
    for (int32_t i = 0; i < g->n_nodes; i++) {
        const node *a = &g->nodes[i];
        if (a->skipped || !a->shape.is_view || a->in[0] != v)
            continue;
        int64_t first = a->shape.view_col, cols = g->values[a->out[0]].shape.cols;
        if (g->values[a->out[0]].output >= 0)
            return false; /* a unit's output has memory of its own */
        for (int32_t k = i + 1; k < g->n_nodes; k++) {
            const node *b = &g->nodes[k];
            if (b->skipped || !b->shape.is_view || b->in[0] != v)
                continue;
            if (b->shape.view_col < first + cols &&
                first < b->shape.view_col + g->values[b->out[0]].shape.cols)
                return false;
        }
        parts++;
        covered += cols;
    }
    return parts > 0 && parts == whole->uses && covered == whole->shape.cols;
}

/* Does every operation that reads v hand a gradient back? A part that got none would leave its
 * columns of the whole's gradient unwritten. */
static bool gets_gradients(const struct tpl_graph *g, mt_val v)
{
    for (int32_t i = 0; i < g->n_nodes; i++)
        for (uint32_t k = 0; k < g->nodes[i].n_in; k++)
            if (g->nodes[i].in[k] == v && (g->nodes[i].shape.no_grad_in >> k & 1))
                return false;
    return true;
}

void graph_alias_views(struct tpl_graph *g)
{
    for (int32_t i = 0; i < g->n_nodes; i++) {
        mt_val v = g->nodes[i].in[0];
        if (g->nodes[i].skipped || !g->nodes[i].shape.is_view || !falls_into_views(g, v))
            continue;
        bool whole = true;
        for (int32_t k = i; k < g->n_nodes; k++)
            if (g->nodes[k].shape.is_view && g->nodes[k].in[0] == v)
                whole &= gets_gradients(g, g->nodes[k].out[0]);
        for (int32_t k = i; whole && k < g->n_nodes; k++) {
            node *n = &g->nodes[k];
            if (n->skipped || !n->shape.is_view || n->in[0] != v)
                continue;
            value *part = &g->values[n->out[0]];
            part->base = graph_base(g, v);
            part->col = g->values[v].col + n->shape.view_col;
            part->node = g->values[v].node;
            n->skipped = true;
        }
    }
}

/* ---- parameter layout ------------------------------------------------------------------------ */

static int64_t align_up(int64_t x)
{
    return (x + TPL_PARAM_ALIGN - 1) / TPL_PARAM_ALIGN * TPL_PARAM_ALIGN;
}

enum { PLACE_OWNED, PLACE_F32, PLACE_GATHERED, PLACE_ALIAS };

static int pass_of(const tpl_param *p)
{
    if (p->info.flags & MT_PARAM_ALIAS)
        return PLACE_ALIAS;
    if (p->gathered)
        return PLACE_GATHERED;
    return p->info.flags & MT_PARAM_STREAM_F32 ? PLACE_F32 : PLACE_OWNED;
}

/* Places the groups whose leaders are of the pass, from `at` on; returns the end. */
static int64_t place(struct tpl_graph *g, int pass, int64_t at)
{
    for (int32_t lead = 0; lead < g->n_params; lead++) {
        if (g->param_group[lead] != lead || pass_of(&g->params[lead]) != pass)
            continue;
        at = align_up(at);
        for (int32_t i = lead; i < g->n_params; i++)
            if (g->param_group[i] == lead) {
                g->params[i].offset = at;
                at += g->params[i].elems;
            }
    }
    return align_up(at);
}

void graph_lay_out_params(struct tpl_graph *g, tpl *t)
{
    for (int pass = PLACE_OWNED; pass <= PLACE_GATHERED; pass++)
        t->own_elems = place(g, pass, t->own_elems);
    t->flat_elems = place(g, PLACE_ALIAS, t->own_elems);
}

/* ---- policies -------------------------------------------------------------------------------- */

/* Makes v available to backward: marks it saved, or its producer (and what that needs) recomputed.
 */
static void require(const struct tpl_graph *g, tpl_policy policy, mt_val v, graph_choice *c)
{
    v = graph_base(g, v);
    const value *val = &g->values[v];
    if (val->node < 0 || c->saved[v])
        return; /* inputs and parameters are there anyway */
    const node *n = &g->nodes[val->node];
    bool once = n->def->flags & MT_OP_GRAD_IN_FORWARD;
    bool cheap = n->def->flags & MT_OP_CHEAP;
    bool save = once || policy == TPL_KEEP || (policy == TPL_SELECT && !cheap);
    if (save) {
        /* A unit's output stays in the next unit's input. */
        if (val->output < 0)
            c->saved[v] = true;
        return;
    }
    if (val->output >= 0 || c->recomputed[val->node])
        return;
    c->recomputed[val->node] = true;
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            require(g, policy, n->in[i], c);
}

/* Marks v where it is what an expert hands on to the part of the unit after them. */
static void save_handed_on(const struct tpl_graph *g, mt_val v, graph_choice *c)
{
    v = graph_base(g, v);
    int32_t from = g->values[v].node;
    if (from >= 0 && g->nodes[from].stage == TPL_EXPERTS)
        c->saved[v] = true;
}

mt_status graph_choose(const struct tpl_graph *g, tpl_policy policy, bool cut, arena *mem,
                       graph_choice *ret)
{
    graph_choice c = { arena_array(mem, (size_t)g->n_values + 1, sizeof(bool)),
                       arena_array(mem, (size_t)g->n_nodes + 1, sizeof(bool)) };
    if (!c.saved || !c.recomputed)
        return MT_ERR_NOMEM;
    for (int32_t i = 0; cut && i < g->n_nodes; i++) {
        const node *n = &g->nodes[i];
        for (uint32_t k = 0; k < n->n_in && !n->skipped && n->stage == TPL_AFTER; k++)
            if (n->in[k] != MT_NONE && (n->shape.backward_in >> k & 1))
                save_handed_on(g, n->in[k], &c);
    }
    for (int32_t i = 0; i < g->n_nodes; i++) {
        const node *n = &g->nodes[i];
        if (n->skipped)
            continue;
        bool needed = false;
        for (uint32_t k = 0; k < n->n_in; k++)
            needed |= !(n->shape.no_grad_in >> k & 1) && graph_needs_grad(g, n->in[k]);
        if (!needed)
            continue;
        for (uint32_t k = 0; k < n->n_in; k++)
            if (n->in[k] != MT_NONE && (n->shape.backward_in >> k & 1))
                require(g, policy, n->in[k], &c);
        for (uint32_t k = 0; k < n->n_out; k++)
            if (n->shape.backward_out >> k & 1)
                require(g, policy, n->out[k], &c);
        for (uint32_t k = 0; k < n->n_aux; k++)
            require(g, policy, n->aux[k], &c);
    }
    *ret = c;
    return MT_OK;
}
