/* SPDX-License-Identifier: Apache-2.0
 *
 * Values, memory and steps of programs that are being made; see maker.h.
 */
#include "maker.h"

#include "../base/status.h"

#include <stdlib.h>

mt_dtype maker_dtype(mt_dtype compute, mt_kind kind)
{
    if (kind == MT_KIND_COMPUTE)
        return compute;
    if (kind == MT_KIND_INDEX)
        return MT_I32;
    return compute == MT_F64 ? MT_F64 : MT_F32;
}

static int64_t bound_rows(const tpl_bounds *b, mt_rows r)
{
    return r.per_token * b->tokens + r.per_document * b->documents + r.fixed;
}

int64_t maker_value_bytes(const tpl_plan *p, mt_val v)
{
    const mt_shape *s = &p->t->graph->values[v].shape;
    return align_up(bound_rows(&p->bounds, s->rows) * s->cols *
                        mt_dtype_size(maker_dtype(p->bounds.compute, s->kind)),
                    REGION_ALIGN);
}

/* ---- pieces of work memory ------------------------------------------------------------------- */

int32_t maker_add_piece(maker *k, int64_t bytes, int32_t first)
{
    if (k->n_pieces == k->cap_pieces) {
        int32_t cap = k->cap_pieces ? 2 * k->cap_pieces : 64;
        piece *next = arena_array(&k->mem, (size_t)cap, sizeof *next);
        if (!next) {
            k->status = MT_ERR_NOMEM;
            return 0;
        }
        if (k->n_pieces)
            memcpy(next, k->pieces, (size_t)k->n_pieces * sizeof *next);
        k->pieces = next;
        k->cap_pieces = cap;
    }
    k->pieces[k->n_pieces] = (piece){ .bytes = bytes, .first = first, .last = first, .offset = -1 };
    return k->n_pieces++;
}

static int by_size(const void *a, const void *b, void *arg)
{
    const piece *pieces = arg;
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (pieces[x].bytes != pieces[y].bytes)
        return pieces[x].bytes < pieces[y].bytes ? 1 : -1;
    return x < y ? -1 : 1;
}

/* Gives every piece, carried or not, an offset so that no two of that kind that live at the same
 * time overlap: largest first, each at the lowest offset that is free. Returns the total. */
int64_t maker_pack_pieces(maker *k, bool carried)
{
    int32_t n = 0;
    int32_t *order = arena_array(&k->mem, (size_t)k->n_pieces + 1, sizeof *order);
    if (!order) {
        k->status = MT_ERR_NOMEM;
        return 0;
    }
    for (int32_t i = 0; i < k->n_pieces; i++)
        if (k->pieces[i].carried == carried)
            order[n++] = i;
    qsort_r(order, (size_t)n, sizeof *order, by_size, k->pieces);
    int64_t total = 0;
    for (int32_t i = 0; i < n; i++) {
        piece *a = &k->pieces[order[i]];
        int64_t offset = 0;
        for (bool moved = true; moved;) {
            moved = false;
            for (int32_t j = 0; j < i; j++) {
                const piece *b = &k->pieces[order[j]];
                bool together = a->first <= b->last && b->first <= a->last;
                if (together && offset < b->offset + b->bytes && b->offset < offset + a->bytes) {
                    offset = b->offset + b->bytes;
                    moved = true;
                }
            }
        }
        a->offset = offset;
        if (offset + a->bytes > total)
            total = offset + a->bytes;
    }
    return total;
}

/* Finds what is carried. It stays for all of its first and last stage, since the experts' stage
 * runs once for each segment. */
void maker_find_carried(maker *k)
{
    const struct tpl_program *prog = k->prog;
    for (int32_t i = 0; i < k->n_pieces; i++) {
        piece *p = &k->pieces[i];
        tpl_stage first = prog->steps[p->first].stage, last = prog->steps[p->last].stage;
        if (first == last)
            continue;
        p->carried = true;
        while (p->first > 0 && prog->steps[p->first - 1].stage == first)
            p->first--;
        while (p->last < prog->n_steps - 1 && prog->steps[p->last + 1].stage == last)
            p->last++;
    }
}

/* ---- references and steps -------------------------------------------------------------------- */

ref maker_ref(const maker *k, mt_val v, const place *at)
{
    const value *val = &k->g->values[v];
    mt_val base = graph_base(k->g, v);
    mt_dtype dtype = maker_dtype(k->p->bounds.compute, val->shape.kind);
    ref r = { .where = at->where,
              .dtype = dtype,
              .offset = at->where == REGION_WORK ? at->piece : at->offset,
              .rows = val->shape.rows,
              .cols = val->shape.cols,
              .ld = k->g->values[base].shape.cols };
    /* Until pieces are packed, a work reference's offset is its piece; the column comes on top. */
    if (val->base >= 0) {
        if (at->where == REGION_WORK)
            r.offset |= (val->col * mt_dtype_size(dtype)) << 32;
        else
            r.offset += val->col * mt_dtype_size(dtype);
    }
    return r;
}

void maker_touch(maker *k, const place *at, int32_t step_index)
{
    if (at->where == REGION_WORK)
        k->pieces[at->piece].last = step_index;
}

/* Reference to a value that exists already. */
ref maker_use_value(maker *k, mt_val v, int32_t step_index)
{
    const value *val = &k->g->values[v];
    const tpl_plan *p = k->p;
    if (val->source == VALUE_PARAM) {
        const tpl_param *param = &k->g->params[val->index];
        const tpl_segment *s = &p->segment[0];
        int64_t offset = p->slot_offset[val->index];
        place at = { REGION_WEIGHTS, offset * mt_dtype_size(p->bounds.compute), 0 };
        if (val->shape.kind == MT_KIND_STAT && s->f32_elems)
            at.offset = s->f32_at + (offset - s->f32_first) * (int64_t)sizeof(float);
        ref r = maker_ref(k, v, &at);
        if (param->gathered)
            r.rows = (mt_rows){ 0, 0, p->bounds.gather_rows };
        return r;
    }
    mt_val base = graph_base(k->g, v);
    maker_touch(k, &k->at[base], step_index);
    return maker_ref(k, v, &k->at[base]);
}

step *maker_add_step(maker *k)
{
    if (k->prog->n_steps == k->cap_steps) {
        int32_t cap = k->cap_steps ? 2 * k->cap_steps : 32;
        step *next = realloc(k->prog->steps, (size_t)cap * sizeof *next);
        if (!next) {
            k->status = status_nomem("a template plan", (size_t)cap * sizeof *next);
            return NULL;
        }
        k->prog->steps = next;
        k->cap_steps = cap;
    }
    step *s = &k->prog->steps[k->prog->n_steps++];
    memset(s, 0, sizeof *s);
    s->stage = k->stage;
    return s;
}

/* Asks the kernel for its scratch, for the given passes. */
void maker_add_scratch(maker *k, step *s, int32_t index, const mt_pass *passes, int n_passes)
{
    if (!s->kernel->workspace)
        return;
    for (int i = 0; i < n_passes; i++) {
        mt_op_call call;
        mt_batch batch = { .tokens = k->p->bounds.tokens,
                           .documents = k->p->bounds.documents,
                           .max_document = k->p->bounds.tokens,
                           .n_logit_rows = k->p->bounds.tokens };
        program_fill_call(k->p, s, NULL, &batch, passes[i], &call);
        int64_t bytes =
            align_up(s->kernel->workspace(k->p->device, &call, s->backward), REGION_ALIGN);
        if (bytes > s->work_bytes)
            s->work_bytes = bytes;
    }
    if (s->work_bytes)
        s->work_offset = maker_add_piece(k, s->work_bytes, index);
}

const mt_kernel *maker_find_kernel(maker *k, const node *n)
{
    const mt_kernel *kernel = k->p->backend->kernel(k->p->device, n->def->name);
    if (!kernel && k->status == MT_OK)
        k->status =
            status_set(MT_ERR_UNSUPPORTED, "template '%s': backend '%s' has no kernel for '%s'",
                       k->p->t->name, k->p->backend->kind, n->def->name);
    return kernel;
}

/* Where a result that a step is about to write goes. */
static place place_result(maker *k, mt_val v, int32_t index, int program)
{
    const value *val = &k->g->values[v];
    if (val->output >= 0 && program != PROGRAM_BACKWARD)
        return (place){ REGION_OUT + val->output, 0, 0 };
    if (program == PROGRAM_FORWARD && k->choice.saved[v])
        return k->saved_at[v];
    return (place){ REGION_WORK, 0, maker_add_piece(k, maker_value_bytes(k->p, v), index) };
}

/* Gradient reference of a parameter operand. */
ref maker_param_grad(maker *k, mt_val v, uint32_t bit, step *s)
{
    const value *val = &k->g->values[v];
    const tpl_plan *p = k->p;
    mt_dtype stat = maker_dtype(p->bounds.compute, MT_KIND_STAT);
    bool gathered = k->g->params[val->index].gathered;
    ref r = { .where = REGION_GRADS,
              .dtype = stat,
              .offset = p->slot_offset[val->index] * mt_dtype_size(stat),
              .rows = gathered ? (mt_rows){ 0, 0, p->bounds.gather_rows } : val->shape.rows,
              .cols = val->shape.cols,
              .ld = val->shape.cols };
    if (k->param_done[val->index])
        s->accumulate |= 1u << bit;
    else
        s->accumulate_later |= 1u << bit;
    k->param_done[val->index] = true;
    return r;
}

/* Memory for what the node keeps between calls; rows of a state do not follow the micro-batch. */
static void place_state(maker *k, const node *n, step *s)
{
    const tpl_bounds *b = &k->p->bounds;
    for (uint32_t i = 0; i < n->shape.n_state; i++) {
        const mt_shape *t = &n->shape.state[i];
        int64_t rows = bound_rows(&(tpl_bounds){ .tokens = b->context, .documents = 1 }, t->rows);
        mt_dtype dtype = maker_dtype(b->compute, t->kind);
        s->state[i] = (ref){ .where = REGION_STATE,
                             .dtype = dtype,
                             .offset = k->p->state_bytes,
                             .rows = { 0, 0, rows },
                             .cols = t->cols,
                             .ld = t->cols };
        k->p->state_bytes += align_up(rows * t->cols * mt_dtype_size(dtype), REGION_ALIGN);
    }
}

/* Emits the forward call of a node. */
void maker_emit_forward(maker *k, int32_t node_index, int program)
{
    const node *n = &k->g->nodes[node_index];
    static const mt_pass train[] = { MT_PASS_TRAIN };
    static const mt_pass infer[] = { MT_PASS_EVAL, MT_PASS_PREFILL, MT_PASS_DECODE };
    int32_t index = k->prog->n_steps;
    step *s = maker_add_step(k);
    if (!s)
        return;
    s->node = node_index;
    if (!(s->kernel = maker_find_kernel(k, n)))
        return;
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            s->in[i] = maker_use_value(k, n->in[i], index);
    for (uint32_t i = 0; i < n->n_out; i++) {
        k->at[n->out[i]] = place_result(k, n->out[i], index, program);
        s->out[i] = maker_ref(k, n->out[i], &k->at[n->out[i]]);
    }
    for (uint32_t i = 0; i < n->n_aux; i++) {
        k->at[n->aux[i]] = place_result(k, n->aux[i], index, program);
        s->aux[i] = maker_ref(k, n->aux[i], &k->at[n->aux[i]]);
    }
    if (program == PROGRAM_FORWARD && (n->def->flags & MT_OP_GRAD_IN_FORWARD))
        for (uint32_t i = 0; i < n->n_in; i++)
            if (n->in[i] != MT_NONE && k->g->values[n->in[i]].source == VALUE_PARAM &&
                graph_needs_grad(k->g, n->in[i]))
                s->d_in[i] = maker_param_grad(k, n->in[i], i, s);
    if (program == PROGRAM_INFER && k->p->bounds.context)
        place_state(k, n, s);
    if (program == PROGRAM_INFER)
        maker_add_scratch(k, s, index, infer, 3);
    else
        maker_add_scratch(k, s, index, train, 1);
}
