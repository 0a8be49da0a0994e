/* SPDX-License-Identifier: Apache-2.0
 *
 * Running programs: binding is pointer arithmetic, then one kernel call after the other.
 */
#include "program.h"

static mt_tensor bind_ref(const ref *r, void *const *base, const mt_batch *b)
{
    mt_tensor t = { 0 };
    if (r->where == REGION_NONE)
        return t;
    /* Without bases only presence matters. */
    t.data = base ? (char *)base[r->where] + r->offset : (void *)r;
    t.rows = r->rows.per_token * b->tokens + r->rows.per_document * b->documents + r->rows.fixed;
    t.cols = r->cols;
    t.ld = r->ld;
    t.dtype = r->dtype;
    return t;
}

void program_fill_call(const tpl_plan *p, const step *s, void *const *base, const mt_batch *batch,
                       mt_pass pass, mt_op_call *ret)
{
    const node *n = &p->t->graph->nodes[s->node];
    *ret = (mt_op_call){ .struct_size = sizeof *ret,
                         .pass = pass,
                         .attr = n->attr,
                         .n_in = n->n_in,
                         .n_out = n->n_out,
                         .n_aux = n->n_aux,
                         .batch = *batch };
    for (uint32_t i = 0; i < n->n_in; i++) {
        ret->in[i] = bind_ref(&s->in[i], base, batch);
        ret->d_in[i] = bind_ref(&s->d_in[i], base, batch);
    }
    for (uint32_t i = 0; i < n->n_out; i++) {
        ret->out[i] = bind_ref(&s->out[i], base, batch);
        ret->d_out[i] = bind_ref(&s->d_out[i], base, batch);
    }
    for (uint32_t i = 0; i < n->n_aux; i++)
        ret->aux[i] = bind_ref(&s->aux[i], base, batch);
    for (uint32_t i = 0; base && base[REGION_STATE] && i < MT_OP_MAX_STATE; i++)
        ret->state[i] = bind_ref(&s->state[i], base, batch);
    if (s->work_bytes) {
        ret->work = base ? (char *)base[REGION_WORK] + s->work_offset : NULL;
        ret->work_bytes = s->work_bytes;
    }
}

static void run(const tpl_plan *p, const struct tpl_program *prog, void *queue,
                const tpl_binding *bind, const mt_batch *batch, mt_pass pass)
{
    const node *nodes = p->t->graph->nodes;
    void *base[REGIONS] = { [REGION_WEIGHTS] = bind->weights, [REGION_GRADS] = bind->grads,
                            [REGION_SAVED] = bind->saved,     [REGION_WORK] = bind->work,
                            [REGION_STATE] = bind->state,     [REGION_CARRY] = bind->carry };
    for (int i = 0; i < MT_UNIT_MAX_IO; i++) {
        base[REGION_IN + i] = bind->in[i];
        base[REGION_OUT + i] = bind->out[i];
        base[REGION_D_OUT + i] = bind->d_out[i];
        base[REGION_D_IN + i] = bind->d_in[i];
    }
    for (int32_t i = 0; i < prog->n_steps; i++) {
        const step *s = &prog->steps[i];
        if (s->stage != bind->stage)
            continue;
        if (s->node < 0) {
            mt_tensor from = bind_ref(&s->in[0], base, batch),
                      to = bind_ref(&s->out[0], base, batch);
            p->backend->copy(p->device, queue, to.data, from.data,
                             from.rows * from.cols * mt_dtype_size(from.dtype));
            continue;
        }
        mt_op_call call;
        program_fill_call(p, s, base, batch, pass, &call);
        if (s->stage == TPL_EXPERTS && (nodes[s->node].def->flags & MT_OP_BY_EXPERT))
            segment_take_experts(p, bind->segment, &call);
        call.used = bind->used;
        call.tally = bind->tally;
        if (s->backward && bind->grad_rows)
            call.batch.rows = bind->grad_rows;
        call.d_accumulate = s->accumulate | (bind->accumulate ? s->accumulate_later : 0);
        if (s->backward)
            s->kernel->backward(p->device, queue, &call);
        else
            s->kernel->forward(p->device, queue, &call);
    }
}

static const struct tpl_program *forward_of(const tpl_plan *p, mt_pass pass)
{
    return p->program[pass == MT_PASS_TRAIN ? 0 : 2];
}

void tpl_forward(const tpl_plan *p, void *queue, const tpl_binding *bind, const mt_batch *batch,
                 mt_pass pass)
{
    run(p, forward_of(p, pass), queue, bind, batch, pass);
}

void tpl_backward(const tpl_plan *p, void *queue, const tpl_binding *bind, const mt_batch *batch)
{
    run(p, p->program[1], queue, bind, batch, MT_PASS_TRAIN);
}

const void *tpl_expert_offsets(const tpl_plan *p, const tpl_binding *bind, mt_pass pass)
{
    const struct tpl_program *prog = forward_of(p, pass);
    for (int32_t i = 0; i < prog->n_steps; i++) {
        const step *s = &prog->steps[i];
        if (!(p->t->graph->nodes[s->node].def->flags & MT_OP_BY_EXPERT))
            continue;
        int32_t where = s->in[2].where;
        const void *base = where == REGION_SAVED   ? bind->saved
                           : where == REGION_CARRY ? bind->carry
                                                   : bind->work;
        return (const char *)base + s->in[2].offset;
    }
    return NULL;
}
