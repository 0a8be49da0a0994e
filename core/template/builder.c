/* SPDX-License-Identifier: Apache-2.0
 *
 * The builder: records what an architecture's build function describes, and checks it at once.
 */
#include "../base/status.h"
#include "graph.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct builder {
    mt_builder api; /* first: what the architecture holds */
    struct tpl_graph *g;
    const char *name; /* of the template, for messages */
    mt_status status; /* sticky */
} builder;

static builder *self(mt_builder *b)
{
    return (builder *)b;
}

static void vrefuse(builder *b, const char *fmt, va_list args) MT_PRINTF(2, 0);
static void refuse(builder *b, const char *fmt, ...) MT_PRINTF(2, 3);

static void vrefuse(builder *b, const char *fmt, va_list args)
{
    if (b->status != MT_OK)
        return;
    status_vset(MT_ERR_INVALID, fmt, args);
    b->status = status_prefix(MT_ERR_INVALID, "template '%s'", b->name);
}

static void refuse(builder *b, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vrefuse(b, fmt, args);
    va_end(args);
}

/* Makes room for one more element of a growing array; false when out of memory. */
static bool grow(void **array, int32_t count, int32_t *capacity, size_t size)
{
    if (count < *capacity)
        return true;
    int32_t next = *capacity ? 2 * *capacity : 32;
    void *p = realloc(*array, (size_t)next * size);
    if (!p) {
        status_nomem("a template", (size_t)next * size);
        return false;
    }
    *array = p;
    *capacity = next;
    return true;
}

mt_val graph_add_value(struct tpl_graph *g, value_source source, mt_shape shape, int32_t producer,
                       int32_t index)
{
    if (!grow((void **)&g->values, g->n_values, &g->cap_values, sizeof *g->values))
        return MT_NONE;
    g->values[g->n_values] = (value){ .source = source,
                                      .shape = shape,
                                      .index = index,
                                      .node = producer,
                                      .base = MT_NONE,
                                      .output = -1 };
    return g->n_values++;
}

static mt_val add_value(builder *b, value_source source, mt_shape shape, int32_t producer,
                        int32_t index)
{
    mt_val v = graph_add_value(b->g, source, shape, producer, index);
    if (v == MT_NONE && b->status == MT_OK)
        b->status = MT_ERR_NOMEM;
    return v;
}

static bool is_value(const builder *b, mt_val v)
{
    return v >= 0 && v < b->g->n_values;
}

static mt_val build_input(mt_builder *mb, uint32_t index, int64_t cols)
{
    builder *b = self(mb);
    if (b->status != MT_OK)
        return MT_NONE;
    if (index >= MT_UNIT_MAX_IO || cols < 1) {
        refuse(b, "input %u with %lld columns: a unit takes at most %d values of at least 1 column",
               index, (long long)cols, MT_UNIT_MAX_IO);
        return MT_NONE;
    }
    if (b->g->in[index] != MT_NONE) {
        refuse(b, "input %u is declared twice", index);
        return MT_NONE;
    }
    mt_val v = add_value(b, VALUE_INPUT, (mt_shape){ { 1, 0, 0 }, cols, MT_KIND_COMPUTE, 0 }, -1,
                         (int32_t)index);
    b->g->in[index] = v;
    return v;
}

/* What a unit passes on has a row a token, and a gradient that comes back; a loss has none. */
static bool fits_outside(const builder *b, const value *v)
{
    mt_rows r = v->shape.rows;
    bool loss = b->g->nodes[v->node].def->flags & MT_OP_GRAD_IN_FORWARD;
    return r.per_token == 1 && r.per_document == 0 && r.fixed == 0 &&
           (v->shape.kind == MT_KIND_COMPUTE || loss);
}

static void build_output(mt_builder *mb, uint32_t index, mt_val v)
{
    builder *b = self(mb);
    if (b->status != MT_OK)
        return;
    if (index >= MT_UNIT_MAX_IO || !is_value(b, v)) {
        refuse(b, "output %u: not a value of this template", index);
        return;
    }
    value *val = &b->g->values[v];
    if (b->g->out[index] != MT_NONE || val->output >= 0)
        refuse(b, "output %u: declared twice, or its value is an output already", index);
    else if (val->source != VALUE_OUT)
        refuse(b, "output %u must be the result of an operation", index);
    else if (!fits_outside(b, val))
        refuse(b, "output %u must have one row a token in the compute dtype, or be the loss",
               index);
    else {
        b->g->out[index] = v;
        val->output = (int32_t)index;
        val->uses++;
    }
}

static mt_val build_param(mt_builder *mb, const mt_param_info *info)
{
    builder *b = self(mb);
    struct tpl_graph *g = b->g;
    if (b->status != MT_OK)
        return MT_NONE;
    mt_param_info copy;
    mt_status status = graph_copy_param(info, &g->mem, &copy);
    if (status != MT_OK) {
        b->status = status_prefix(status, "template '%s'", b->name);
        return MT_NONE;
    }
    for (int32_t i = 0; i < g->n_params; i++)
        if (strcmp(g->params[i].info.name, copy.name) == 0) {
            refuse(b, "parameter '%s' is declared twice; use the value again instead", copy.name);
            return MT_NONE;
        }
    if (!grow((void **)&g->params, g->n_params, &g->cap_params, sizeof *g->params)) {
        b->status = MT_ERR_NOMEM;
        return MT_NONE;
    }
    int64_t rows = copy.rows ? copy.rows : 1;
    g->params[g->n_params] = (tpl_param){ .info = copy, .elems = rows * copy.cols };
    mt_kind kind = copy.flags & MT_PARAM_STREAM_F32 ? MT_KIND_STAT : MT_KIND_COMPUTE;
    mt_shape shape = { { 0, 0, rows }, copy.cols, kind, 1 };
    return add_value(b, VALUE_PARAM, shape, -1, g->n_params++);
}

/* Operands and their shapes; absent ones are MT_NONE. */
static bool take_operands(builder *b, const mt_val *in, uint32_t n_in, node *n, mt_shape *ret_shape)
{
    const mt_op_def *def = n->def;
    n->n_in = def->max_in;
    for (uint32_t i = 0; i < def->max_in; i++) {
        n->in[i] = i < n_in ? in[i] : MT_NONE;
        if (n->in[i] == MT_NONE && i < def->min_in) {
            refuse(b, "'%s': operand %u is missing", def->name, i);
            return false;
        }
        if (n->in[i] == MT_NONE)
            continue;
        if (!is_value(b, n->in[i])) {
            refuse(b, "'%s': operand %u is not a value of this template", def->name, i);
            return false;
        }
        ret_shape[i] = b->g->values[n->in[i]].shape;
    }
    return true;
}

static bool copy_attributes(builder *b, const void *attr, size_t size, node *n)
{
    char *copy = arena_alloc(&b->g->mem, n->def->attr_size);
    if (!copy) {
        b->status = MT_ERR_NOMEM;
        return false;
    }
    if (size)
        memcpy(copy, attr, size);
    n->attr = copy;
    return true;
}

/* What the operation says of its results. */
static bool derive_shape(builder *b, const mt_shape *in, uint32_t n_out, node *n)
{
    char error[512] = "";
    n->shape.struct_size = sizeof n->shape;
    if (n->def->shape(in, n->n_in, n->attr, &n->shape, error, sizeof error) != MT_OK)
        refuse(b, "'%s': %s", n->def->name, error);
    else if (n->shape.n_out != n_out)
        refuse(b, "'%s' has %u results, not %u", n->def->name, n->shape.n_out, n_out);
    return b->status == MT_OK;
}

/* Parameters must be frozen where they get no gradient, and in FP32 only where they are taken so.
 */
static bool check_parameters(builder *b, const node *n)
{
    for (uint32_t i = 0; i < n->n_in; i++) {
        const value *v = n->in[i] == MT_NONE ? NULL : &b->g->values[n->in[i]];
        if (!v || v->source != VALUE_PARAM)
            continue;
        const mt_param_info *info = &b->g->params[v->index].info;
        if ((n->shape.no_grad_in >> i & 1) && !(info->flags & MT_PARAM_FROZEN)) {
            refuse(b, "parameter '%s' gets no gradient from '%s'; declare it frozen", info->name,
                   n->def->name);
            return false;
        }
        if (v->shape.kind == MT_KIND_STAT && !(n->shape.stat_params >> i & 1)) {
            refuse(b, "'%s' does not take parameter '%s' in FP32; stream it as the others",
                   n->def->name, info->name);
            return false;
        }
    }
    return true;
}

static bool add_results(builder *b, node *n)
{
    struct tpl_graph *g = b->g;
    n->n_out = n->shape.n_out;
    n->n_aux = n->shape.n_aux;
    for (uint32_t i = 0; i < n->n_out; i++)
        n->out[i] = add_value(b, VALUE_OUT, n->shape.out[i], g->n_nodes, (int32_t)i);
    for (uint32_t i = 0; i < n->n_aux; i++)
        n->aux[i] = add_value(b, VALUE_AUX, n->shape.aux[i], g->n_nodes, (int32_t)i);
    return b->status == MT_OK;
}

static void count_uses(struct tpl_graph *g, const node *n)
{
    for (uint32_t i = 0; i < n->n_in; i++) {
        if (n->in[i] == MT_NONE)
            continue;
        value *v = &g->values[n->in[i]];
        v->uses++;
        if (i == 0 && v->source == VALUE_PARAM && (n->def->flags & MT_OP_GATHERS_ROWS))
            g->params[v->index].gathered = true;
    }
}

static void build_op(mt_builder *mb, const char *op, const mt_val *in, uint32_t n_in,
                     const void *attr, size_t attr_size, mt_val *ret_out, uint32_t n_out)
{
    builder *b = self(mb);
    struct tpl_graph *g = b->g;
    for (uint32_t i = 0; i < n_out; i++)
        ret_out[i] = MT_NONE;
    if (b->status != MT_OK)
        return;
    const mt_op_def *def = op_find(op);
    if (!def) {
        refuse(b, "there is no operation '%s'", op);
        return;
    }
    if (n_in < def->min_in || n_in > def->max_in || attr_size > def->attr_size) {
        refuse(b, "'%s': %u operands and %zu bytes of attributes; expected %u to %u and at most %u",
               op, n_in, attr_size, def->min_in, def->max_in, def->attr_size);
        return;
    }
    node n = { .def = def };
    mt_shape shape[MT_OP_MAX_IN] = { 0 };
    if (!take_operands(b, in, n_in, &n, shape) || !copy_attributes(b, attr, attr_size, &n) ||
        !derive_shape(b, shape, n_out, &n) || !check_parameters(b, &n))
        return;
    if (!grow((void **)&g->nodes, g->n_nodes, &g->cap_nodes, sizeof *g->nodes)) {
        b->status = MT_ERR_NOMEM;
        return;
    }
    if (!add_results(b, &n))
        return;
    count_uses(g, &n);
    g->nodes[g->n_nodes++] = n;
    for (uint32_t i = 0; i < n_out; i++)
        ret_out[i] = n.out[i];
}

static void build_fail(mt_builder *mb, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vrefuse(self(mb), fmt, args);
    va_end(args);
}

static const mt_builder_api api = {
    sizeof(mt_builder_api), build_input, build_output, build_param, build_op, build_fail
};

/* Everything that can only be checked once the graph is whole. */
static void check_whole(builder *b)
{
    struct tpl_graph *g = b->g;
    bool gap = false;
    for (uint32_t i = 0; i < MT_UNIT_MAX_IO; i++) {
        if (gap && g->out[i] != MT_NONE)
            refuse(b, "output %u is declared but output %u is not", i, i - 1);
        gap = g->out[i] == MT_NONE;
    }
    gap = false;
    for (uint32_t i = 0; i < MT_UNIT_MAX_IO; i++) {
        if (gap && g->in[i] != MT_NONE)
            refuse(b, "input %u is declared but input %u is not", i, i - 1);
        gap = g->in[i] == MT_NONE;
    }
    if (g->out[0] == MT_NONE)
        refuse(b, "the template has no output");
    int losses = 0;
    for (int32_t i = 0; i < g->n_nodes; i++)
        losses += (g->nodes[i].def->flags & MT_OP_EMITS_LOSS) != 0;
    if (losses > 1)
        refuse(b, "%d losses beside the model's own; a unit may add one", losses);
    for (mt_val v = 0; v < g->n_values; v++) {
        const value *val = &g->values[v];
        if (val->uses > 0 || val->source == VALUE_AUX)
            continue;
        if (val->source == VALUE_PARAM)
            refuse(b, "parameter '%s' is never used", g->params[val->index].info.name);
        else if (val->source == VALUE_INPUT)
            refuse(b, "input %d is never used", val->index);
        else if (!(g->nodes[val->node].def->flags & MT_OP_EMITS_LOSS))
            refuse(b, "a result of '%s' (operation %d) is never used",
                   g->nodes[val->node].def->name, val->node);
    }
    for (int32_t i = 0; i < g->n_params; i++)
        if (g->params[i].gathered && (g->params[i].info.flags & MT_PARAM_ALIAS))
            refuse(b,
                   "parameter '%s': a gathered table cannot be an alias; declare it where it is "
                   "gathered and alias it elsewhere",
                   g->params[i].info.name);
    for (mt_val v = 0; v < g->n_values; v++)
        if (g->values[v].source == VALUE_PARAM && g->params[g->values[v].index].gathered &&
            g->values[v].uses > 1)
            refuse(b, "parameter '%s' is gathered and may be used once only",
                   g->params[g->values[v].index].info.name);
}

static mt_status describe(struct tpl_graph *g, const char *name, mt_build_fn build,
                          const void *arch, const void *arg)
{
    builder b = { .api = { &api }, .g = g, .name = name };
    mt_status status = build(&b.api, arch, arg);
    if (b.status != MT_OK)
        return b.status;
    if (status != MT_OK)
        return status_prefix(status, "template '%s'", name);
    check_whole(&b);
    return b.status;
}

static void sum_flops(const struct tpl_graph *g, tpl *t)
{
    bool attends = false;
    for (int32_t i = 0; i < g->n_nodes; i++) {
        const node *n = &g->nodes[i];
        if (n->skipped)
            continue;
        t->gemm_flops_per_token += n->shape.gemm_flops_per_token;
        t->scan_flops_per_token += n->shape.scan_flops_per_token;
        t->attn_flops_per_pair += n->shape.attn_flops_per_pair;
        if (n->shape.attn_flops_per_pair > 0) {
            int64_t w = n->shape.attn_window;
            bool unlimited = w == 0 || (attends && t->attn_window == 0);
            t->attn_window = unlimited ? 0 : w > t->attn_window ? w : t->attn_window;
            attends = true;
        }
        if ((n->def->flags & MT_OP_GRAD_IN_FORWARD) && g->out[0] == n->out[0])
            t->makes_loss = true;
        if (n->def->flags & MT_OP_EMITS_LOSS)
            t->adds_loss = true;
        t->tally += n->shape.tally; /* a unit adds one loss at most */
    }
}

static mt_status sum_recompute(const struct tpl_graph *g, tpl *t)
{
    for (int p = 0; p < TPL_POLICIES; p++) {
        arena scratch = { 0 };
        graph_choice choice;
        mt_status status = graph_choose(g, (tpl_policy)p, false, &scratch, &choice);
        for (int32_t i = 0; status == MT_OK && i < g->n_nodes; i++)
            if (choice.recomputed[i]) {
                t->recompute_gemm_flops[p] += g->nodes[i].shape.gemm_flops_per_token;
                t->recompute_scan_flops[p] += g->nodes[i].shape.scan_flops_per_token;
                t->recompute_attn_flops[p] += g->nodes[i].shape.attn_flops_per_pair;
            }
        arena_finish(&scratch);
        if (status != MT_OK)
            return status;
    }
    return MT_OK;
}

mt_status tpl_create(const char *name, mt_build_fn build, const void *arch, const void *arg,
                     tpl **ret)
{
    tpl *t = calloc(1, sizeof *t);
    struct tpl_graph *g = calloc(1, sizeof *g);
    if (!t || !g) {
        free(t);
        free(g);
        return status_nomem("a template", sizeof *t + sizeof *g);
    }
    t->graph = g;
    for (int i = 0; i < MT_UNIT_MAX_IO; i++)
        g->in[i] = g->out[i] = MT_NONE;

    mt_status status = MT_ERR_NOMEM;
    if (!(t->name = arena_strdup(&g->mem, name)))
        goto out;
    if ((status = describe(g, t->name, build, arch, arg)) != MT_OK)
        goto out;
    if ((status = graph_merge_siblings(g)) != MT_OK)
        goto out;
    graph_alias_views(g);
    if ((status = graph_sort_stages(g)) != MT_OK)
        goto out;
    graph_find_experts(g, t);
    graph_lay_out_params(g, t);
    t->n_params = (uint32_t)g->n_params;
    t->params = g->params;
    for (int i = 0; i < MT_UNIT_MAX_IO; i++) {
        if (g->in[i] != MT_NONE)
            t->in_cols[t->n_in++] = g->values[g->in[i]].shape.cols;
        if (g->out[i] != MT_NONE)
            t->out_cols[t->n_out++] = g->values[g->out[i]].shape.cols;
    }
    sum_flops(g, t);
    status = sum_recompute(g, t);

out:
    if (status != MT_OK) {
        tpl_destroy(t);
        return status;
    }
    *ret = t;
    return MT_OK;
}

void tpl_destroy(tpl *t)
{
    if (!t)
        return;
    arena_finish(&t->graph->mem);
    free(t->graph->values);
    free(t->graph->nodes);
    free(t->graph->params);
    free(t->graph->param_group);
    free(t->graph);
    free(t);
}
