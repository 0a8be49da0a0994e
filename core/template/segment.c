/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments: where a template's program is cut so that its experts can be streamed some at a time,
 * and which elements of which parameter each segment holds on the device.
 */
#include "../base/status.h"
#include "program.h"

#include <stdlib.h>

/* A stacked parameter falls into at most so many equal parts: the finest cut, and the pieces in
 * which the squares of its gradient are summed, whatever it is streamed in. */
enum { MAX_PARTS = 16, REGION_ALIGN = 256 };

static int64_t align_up(int64_t x, int64_t to)
{
    return (x + to - 1) / to * to;
}

static bool by_expert(const node *n)
{
    return n->def->flags & MT_OP_BY_EXPERT;
}

/* The node that makes v, NULL for inputs and parameters. */
static node *maker_of(struct tpl_graph *g, mt_val v)
{
    int32_t i = v == MT_NONE ? -1 : g->values[graph_base(g, v)].node;
    return i < 0 ? NULL : &g->nodes[i];
}

/* ---- stages ---------------------------------------------------------------------------------- */

/* What follows from experts' outputs is theirs as long as it leads to an expert again. */
static void find_stages(struct tpl_graph *g)
{
    for (int32_t i = 0; i < g->n_nodes; i++) {
        node *n = &g->nodes[i];
        n->stage = by_expert(n) ? TPL_EXPERTS : TPL_BEFORE;
        for (uint32_t k = 0; k < n->n_in && n->stage == TPL_BEFORE; k++) {
            const node *from = maker_of(g, n->in[k]);
            if (from && from->stage != TPL_BEFORE)
                n->stage = TPL_AFTER;
        }
    }
    for (int32_t i = g->n_nodes - 1; i >= 0; i--) {
        const node *n = &g->nodes[i];
        for (uint32_t k = 0; k < n->n_in && n->stage == TPL_EXPERTS; k++) {
            node *from = maker_of(g, n->in[k]);
            if (from && from->stage == TPL_AFTER)
                from->stage = TPL_EXPERTS;
        }
    }
}

mt_status graph_sort_stages(struct tpl_graph *g)
{
    find_stages(g);
    node *sorted = calloc((size_t)g->n_nodes + 1, sizeof *sorted);
    int32_t *to = calloc((size_t)g->n_nodes + 1, sizeof *to);
    if (!sorted || !to) {
        free(sorted);
        free(to);
        return status_nomem("a template", (size_t)g->n_nodes * sizeof *sorted);
    }
    int32_t at = 0;
    for (int stage = 0; stage < TPL_STAGES; stage++)
        for (int32_t i = 0; i < g->n_nodes; i++)
            if ((int)g->nodes[i].stage == stage) {
                to[i] = at;
                sorted[at++] = g->nodes[i];
            }
    for (mt_val v = 0; v < g->n_values; v++)
        if (g->values[v].node >= 0)
            g->values[v].node = to[g->values[v].node];
    free(g->nodes);
    free(to);
    g->nodes = sorted;
    g->cap_nodes = g->n_nodes + 1;
    return MT_OK;
}

/* ---- may it be cut? -------------------------------------------------------------------------- */

/* Is v a parameter that an operation by expert alone reads, as a stack of `experts`? */
static bool is_stack(const struct tpl_graph *g, mt_val v, int64_t experts)
{
    const value *val = &g->values[v];
    if (val->source != VALUE_PARAM || val->uses != 1)
        return false;
    const tpl_param *p = &g->params[val->index];
    return p->info.stack == experts && !p->gathered && !(p->info.flags & MT_PARAM_ALIAS);
}

static bool reads(const struct tpl_graph *g, const node *n, bool params)
{
    for (uint32_t i = 0; i < n->n_in; i++) {
        if (n->in[i] == MT_NONE)
            continue;
        const value *v = &g->values[n->in[i]];
        if (params ? v->source == VALUE_PARAM : v->shape.kind == MT_KIND_INDEX)
            return true;
    }
    return false;
}

/* Rows of the experts that are not there hold anything: what is done between the experts'
 * products must work row by row, and write, not add, its gradients. */
static bool works_by_row(const struct tpl_graph *g, const node *n)
{
    const uint32_t special = MT_OP_GRAD_IN_FORWARD | MT_OP_EMITS_LOSS | MT_OP_GATHERS_ROWS;
    if (!(n->def->flags & MT_OP_CHEAP) || (n->def->flags & special) || reads(g, n, true) ||
        reads(g, n, false))
        return false;
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE && g->values[n->in[i]].uses != 1)
            return false;
    return true;
}

mt_val graph_offsets(const struct tpl_graph *g)
{
    mt_val offsets = MT_NONE;
    for (int32_t i = 0; i < g->n_nodes; i++) {
        const node *n = &g->nodes[i];
        if (n->skipped || !by_expert(n))
            continue;
        if (offsets != MT_NONE && n->in[2] != offsets)
            return MT_NONE;
        offsets = n->in[2];
    }
    return offsets;
}

/* May the template be streamed by its experts? */
static bool may_cut(const struct tpl_graph *g, int64_t experts)
{
    for (int32_t i = 0; i < g->n_nodes; i++) {
        const node *n = &g->nodes[i];
        if (n->skipped || n->stage == TPL_BEFORE)
            continue;
        if (n->stage == TPL_AFTER) {
            /* The dense part's parameters have left when its turn comes. */
            if (reads(g, n, true) || (n->def->flags & MT_OP_EMITS_LOSS))
                return false;
            continue;
        }
        for (uint32_t k = 0; k < n->n_out; k++)
            if (g->values[n->out[k]].output >= 0)
                return false;
        if (!by_expert(n)) {
            if (!works_by_row(g, n))
                return false;
            continue;
        }
        bool bias = n->n_in > 3 && n->in[3] != MT_NONE;
        if (!is_stack(g, n->in[1], experts) || (bias && !is_stack(g, n->in[3], experts)))
            return false;
    }
    return true;
}

/* The slot of the bias that is added to the scores of whoever made the offsets. */
static int32_t find_bias(struct tpl_graph *g, mt_val offsets)
{
    const node *n = maker_of(g, offsets);
    if (!n || !(n->def->flags & MT_OP_ROUTES) || n->n_in < 2 || n->in[1] == MT_NONE)
        return -1;
    const value *v = &g->values[n->in[1]];
    bool own = v->source == VALUE_PARAM && !(g->params[v->index].info.flags & MT_PARAM_ALIAS);
    return own ? v->index : -1;
}

void graph_find_experts(struct tpl_graph *g, tpl *t)
{
    mt_val offsets = graph_offsets(g);
    int64_t experts = offsets == MT_NONE ? 0 : g->values[offsets].shape.cols - 1;
    int64_t parts = !may_cut(g, experts) ? 1 : experts < MAX_PARTS ? experts : MAX_PARTS;
    for (int32_t i = 0; i < g->n_params; i++) {
        g->params[i].parts = 1;
        if (g->params[i].gathered)
            parts = 1;
    }
    while (parts > 1 && experts % parts != 0)
        parts--;
    t->parts = parts > 1 ? (int32_t)parts : 1;
    t->experts = (int32_t)experts;
    t->bias_slot = find_bias(g, offsets);
    for (int32_t i = 0; i < g->n_nodes; i++) {
        const node *n = &g->nodes[i];
        if (n->skipped || !by_expert(n) || t->parts == 1)
            continue;
        for (uint32_t k = 1; k < n->n_in; k += 2)
            if (n->in[k] != MT_NONE)
                g->params[g->values[n->in[k]].index].parts = t->parts;
    }
}

int64_t tpl_part_elems(const tpl *t)
{
    int64_t n = 0;
    for (uint32_t k = 0; k < t->n_params && t->parts > 1; k++)
        if (t->params[k].parts > 1)
            n += t->params[k].elems / t->parts;
    return n;
}

/* ---- what a segment holds -------------------------------------------------------------------- */

/* Slots by their place in the flat layout. */
static void sort_slots(const tpl *t, int32_t *ret)
{
    for (int32_t i = 0; i < (int32_t)t->n_params; i++) {
        int32_t at = i;
        for (; at > 0 && t->params[ret[at - 1]].offset > t->params[i].offset; at--)
            ret[at] = ret[at - 1];
        ret[at] = i;
    }
}

/* The dense part, or everything where nothing is cut: the flat layout without what is streamed
 * elsewhere, and with gathered tables only as long as they need be. */
static void lay_out_dense(tpl_plan *p, const int32_t *order)
{
    tpl_segment *s = &p->segment[0];
    bool cut = p->n_segments > 1;
    int64_t removed = 0;
    for (uint32_t i = 0; i < p->t->n_params; i++) {
        int32_t k = order[i];
        const tpl_param *param = &p->t->params[k];
        int64_t n = param->gathered ? p->bounds.gather_rows * param->info.cols : param->elems;
        if (cut && param->parts > 1) {
            removed += align_up(param->elems, TPL_PARAM_ALIGN);
            continue;
        }
        p->slot_offset[k] = param->offset - removed;
        s->slice[s->n_slices++] =
            (tpl_slice){ k, param->parts, 0, n, p->slot_offset[k], p->n_sums };
        p->n_sums += param->parts;
        s->elems = p->slot_offset[k] + n > s->elems ? p->slot_offset[k] + n : s->elems;
        if (param->gathered)
            removed += align_up(param->elems, TPL_PARAM_ALIGN) - align_up(n, TPL_PARAM_ALIGN);
    }
}

/* Room for what is streamed in FP32 besides: slots that are adjacent in the flat layout. */
static void lay_out_f32(tpl_plan *p)
{
    tpl_segment *s = &p->segment[0];
    for (int32_t i = 0; i < s->n_slices && p->bounds.compute == MT_BF16; i++) {
        const tpl_slice *slice = &s->slice[i];
        if (!(p->t->params[slice->slot].info.flags & MT_PARAM_STREAM_F32))
            continue;
        if (s->f32_elems == 0) {
            s->f32_slot = slice->slot;
            s->f32_first = slice->at;
        }
        s->f32_elems = slice->at + slice->n - s->f32_first;
    }
}

/* Parts [first, first + parts) of every stack. */
static void lay_out_experts(tpl_plan *p, const int32_t *order, tpl_segment *s, int32_t first,
                            int32_t parts)
{
    for (uint32_t i = 0; i < p->t->n_params; i++) {
        int32_t k = order[i];
        const tpl_param *param = &p->t->params[k];
        int64_t each = param->elems / param->parts;
        if (param->parts == 1)
            continue;
        p->slot_offset[k] = s->elems; /* the same in all of them: the last may be shorter */
        s->slice[s->n_slices++] =
            (tpl_slice){ k, parts, first * each, parts * each, s->elems, p->n_sums };
        p->n_sums += parts;
        s->elems += align_up(p->bounds.segment_parts * each, TPL_PARAM_ALIGN);
    }
}

mt_status segment_lay_out(tpl_plan *p)
{
    const tpl *t = p->t;
    int32_t parts = p->bounds.segment_parts;
    int64_t size = mt_dtype_size(p->bounds.compute);
    int64_t stat = p->bounds.compute == MT_F64 ? 8 : 4;
    p->n_segments = parts > 0 ? 1 + (t->parts + parts - 1) / parts : 1;
    int32_t *order = calloc((size_t)t->n_params + 1, sizeof *order);
    p->segment = calloc((size_t)p->n_segments, sizeof *p->segment);
    p->slice = calloc((size_t)p->n_segments * t->n_params + 1, sizeof *p->slice);
    p->slot_offset = calloc((size_t)t->n_params + 1, sizeof *p->slot_offset);
    if (!order || !p->segment || !p->slice || !p->slot_offset) {
        free(order);
        return status_nomem("a template plan", (size_t)t->n_params * sizeof *p->slice);
    }
    sort_slots(t, order);
    for (int32_t i = 0; i < p->n_segments; i++)
        p->segment[i].slice = p->slice + (size_t)i * t->n_params;
    lay_out_dense(p, order);
    lay_out_f32(p);
    for (int32_t i = 1; i < p->n_segments; i++) {
        int32_t first = (i - 1) * parts, left = t->parts - first;
        lay_out_experts(p, order, &p->segment[i], first, left < parts ? left : parts);
    }
    for (int32_t i = 0; i < p->n_segments; i++) {
        tpl_segment *s = &p->segment[i];
        s->elems = align_up(s->elems, TPL_PARAM_ALIGN);
        p->device_elems += s->elems;
        p->buffer_elems = s->elems > p->buffer_elems ? s->elems : p->buffer_elems;
        s->f32_at = align_up(s->elems * size, REGION_ALIGN);
        s->bytes = s->f32_at + align_up(s->f32_elems * stat, REGION_ALIGN);
        p->buffer_bytes = s->bytes > p->buffer_bytes ? s->bytes : p->buffer_bytes;
        p->weight_bytes += s->bytes;
    }
    p->grad_bytes = align_up(p->device_elems * stat, REGION_ALIGN);
    free(order);
    return MT_OK;
}

static int64_t ref_bytes(const tpl_plan *p, const ref *r)
{
    int64_t rows = r->rows.per_token * p->bounds.tokens +
                   r->rows.per_document * p->bounds.documents + r->rows.fixed;
    return r->where == REGION_NONE ? 0 : rows * r->cols * mt_dtype_size(r->dtype);
}

int64_t segment_between_bytes(const tpl_plan *p, const struct tpl_program *prog)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < prog->n_steps; i++) {
        const step *s = &prog->steps[i];
        if (s->stage != TPL_EXPERTS || by_expert(&p->t->graph->nodes[s->node]))
            continue;
        for (int k = 0; k < MT_OP_MAX_IN; k++)
            bytes += ref_bytes(p, &s->in[k]) + ref_bytes(p, &s->d_in[k]);
        for (int k = 0; k < MT_OP_MAX_OUT; k++)
            bytes += ref_bytes(p, &s->out[k]) + ref_bytes(p, &s->d_out[k]);
        for (int k = 0; k < MT_OP_MAX_AUX; k++)
            bytes += ref_bytes(p, &s->aux[k]);
    }
    return bytes;
}

void segment_take_experts(const tpl_plan *p, int32_t segment, mt_op_call *c)
{
    int64_t experts = c->in[2].cols - 1, each = experts / p->t->parts;
    int64_t first = (segment - 1) * p->bounds.segment_parts * each;
    int64_t n = p->bounds.segment_parts * each;
    n = experts - first < n ? experts - first : n;
    c->in[2].data = (int32_t *)c->in[2].data + first;
    c->in[2].cols = n + 1;
    for (uint32_t i = 1; i < c->n_in; i += 2) {
        c->in[i].rows = c->in[i].rows / experts * n;
        c->d_in[i].rows = c->d_in[i].rows / experts * n;
    }
}
