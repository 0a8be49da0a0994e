/* SPDX-License-Identifier: Apache-2.0
 *
 * From a graph to programs: where every value lives and how much memory that takes. Three programs:
 * a training forward, its backward, and inference.
 */
#include "../base/status.h"
#include "maker.h"

#include <stdlib.h>

/* Turns piece numbers into offsets. */
static void resolve_ref(const maker *k, ref *r)
{
    if (r->where != REGION_WORK)
        return;
    const piece *p = &k->pieces[r->offset & 0xffffffff];
    r->where = p->carried ? REGION_CARRY : REGION_WORK;
    r->offset = p->offset + (r->offset >> 32);
}

/* The last step of the stage that step `index` is in. */
static int32_t last_of_stage(const struct tpl_program *prog, int32_t index)
{
    while (index + 1 < prog->n_steps && prog->steps[index + 1].stage == prog->steps[index].stage)
        index++;
    return index;
}

static int64_t finish_program(maker *k, int which)
{
    /* A loss stays until its reader, outside, has had a chance. */
    place *loss = NULL;
    for (int32_t i = 0; i < k->g->n_nodes && which != PROGRAM_BACKWARD; i++)
        if (k->g->nodes[i].def->flags & MT_OP_EMITS_LOSS)
            loss = &k->at[k->g->nodes[i].out[0]];
    if (loss)
        maker_touch(k, loss, last_of_stage(k->prog, k->pieces[loss->piece].first));
    /* And so do the offsets of experts' rows, which are carried where the unit is cut. */
    mt_val offsets = graph_offsets(k->g);
    if (which == PROGRAM_FORWARD && !k->cut && offsets != MT_NONE)
        maker_touch(k, &k->at[offsets], k->prog->n_steps - 1);
    maker_find_carried(k);
    int64_t total = maker_pack_pieces(k, false), carried = maker_pack_pieces(k, true);
    k->p->carry_bytes = carried > k->p->carry_bytes ? carried : k->p->carry_bytes;
    if (k->status != MT_OK)
        return 0;
    for (int32_t i = 0; i < k->prog->n_steps; i++) {
        step *s = &k->prog->steps[i];
        for (int j = 0; j < MT_OP_MAX_IN; j++) {
            resolve_ref(k, &s->in[j]);
            resolve_ref(k, &s->d_in[j]);
        }
        for (int j = 0; j < MT_OP_MAX_OUT; j++) {
            resolve_ref(k, &s->out[j]);
            resolve_ref(k, &s->d_out[j]);
        }
        for (int j = 0; j < MT_OP_MAX_AUX; j++)
            resolve_ref(k, &s->aux[j]);
        if (s->work_bytes)
            s->work_offset = k->pieces[s->work_offset].offset;
    }
    if (loss)
        k->p->loss_offset[which == PROGRAM_INFER] = k->pieces[loss->piece].offset;
    return total;
}

static void start_program(maker *k, int which)
{
    k->prog = k->p->program[which];
    k->cap_steps = 0;
    k->n_pieces = 0;
    for (mt_val v = 0; v < k->g->n_values; v++) {
        k->at[v] = k->saved_at[v];
        if (k->g->values[v].source == VALUE_INPUT)
            k->at[v] = (place){ REGION_IN + k->g->values[v].index, 0, 0 };
        if (which == PROGRAM_BACKWARD && k->g->values[v].output >= 0)
            k->at[v] = (place){ REGION_OUT + k->g->values[v].output, 0, 0 };
    }
}

static int64_t make_forward(maker *k, int which)
{
    start_program(k, which);
    for (int32_t i = 0; i < k->g->n_nodes && k->status == MT_OK; i++) {
        k->stage = k->cut ? k->g->nodes[i].stage : TPL_BEFORE;
        if (!k->g->nodes[i].skipped)
            maker_emit_forward(k, i, which);
    }
    return finish_program(k, which);
}

static bool reads_params(const struct tpl_program *prog)
{
    for (int32_t i = 0; i < prog->n_steps; i++)
        for (int j = 0; j < MT_OP_MAX_IN; j++)
            if (prog->steps[i].in[j].where == REGION_WEIGHTS)
                return true;
    return false;
}

static int64_t make_backward(maker *k)
{
    static const tpl_stage turn[TPL_STAGES] = {
        [TPL_AFTER] = TPL_BEFORE, [TPL_EXPERTS] = TPL_EXPERTS, [TPL_BEFORE] = TPL_AFTER
    };
    start_program(k, PROGRAM_BACKWARD);
    k->stage = TPL_BEFORE;
    for (int i = 0; i < MT_UNIT_MAX_IO; i++)
        if (k->g->out[i] != MT_NONE && k->g->values[k->g->out[i]].shape.kind == MT_KIND_COMPUTE) {
            k->grad[k->g->out[i]] = (place){ REGION_D_OUT + i, 0, 0 };
            k->written[k->g->out[i]] = true;
        }
    for (int32_t i = k->g->n_nodes - 1; i >= 0 && k->status == MT_OK; i--) {
        tpl_stage stage = k->cut ? turn[k->g->nodes[i].stage] : TPL_BEFORE;
        if (k->stage == TPL_BEFORE && stage == TPL_EXPERTS)
            maker_ensure_dense(k);
        k->stage = stage;
        if (!k->g->nodes[i].skipped)
            maker_emit_backward(k, i);
    }
    for (int i = 0; i < MT_UNIT_MAX_IO; i++) {
        k->p->d_in_place[i] = -1;
        if (k->g->in[i] == MT_NONE)
            continue;
        const place *at = &k->grad[k->g->in[i]];
        if (at->where >= REGION_D_OUT && at->where < REGION_D_IN)
            k->p->d_in_place[i] = at->where - REGION_D_OUT;
    }
    return finish_program(k, PROGRAM_BACKWARD);
}

static mt_status make_programs(maker *k)
{
    tpl_plan *p = k->p;
    size_t n = (size_t)k->g->n_values + 1;
    k->saved_at = arena_array(&k->mem, n, sizeof *k->saved_at);
    k->at = arena_array(&k->mem, n, sizeof *k->at);
    k->grad = arena_array(&k->mem, n, sizeof *k->grad);
    k->written = arena_array(&k->mem, n, sizeof *k->written);
    k->consumed = arena_array(&k->mem, n, sizeof *k->consumed);
    k->made = arena_array(&k->mem, (size_t)k->g->n_nodes + 1, sizeof *k->made);
    k->param_done = arena_array(&k->mem, (size_t)k->g->n_params + 1, sizeof *k->param_done);
    if (!k->saved_at || !k->at || !k->grad || !k->written || !k->consumed || !k->made ||
        !k->param_done)
        return MT_ERR_NOMEM;
    mt_status status = graph_choose(k->g, p->policy, k->cut, &k->mem, &k->choice);
    if (status != MT_OK)
        return status;
    for (int32_t i = 0; i < k->g->n_nodes; i++)
        if (k->choice.recomputed[i]) {
            p->recompute_gemm_flops += k->g->nodes[i].shape.gemm_flops_per_token;
            p->recompute_scan_flops += k->g->nodes[i].shape.scan_flops_per_token;
            p->recompute_attn_flops += k->g->nodes[i].shape.attn_flops_per_pair;
        }
    for (mt_val v = 0; v < k->g->n_values; v++)
        if (k->choice.saved[v]) {
            k->saved_at[v] = (place){ REGION_SAVED, p->saved_bytes, 0 };
            p->saved_bytes += maker_value_bytes(p, v);
        }
    p->work_bytes[0] = make_forward(k, PROGRAM_FORWARD);
    if (k->status == MT_OK)
        p->work_bytes[1] = make_backward(k);
    if (k->status == MT_OK)
        p->generate_work_bytes = make_forward(k, PROGRAM_INFER);
    p->backward_reads = reads_params(p->program[PROGRAM_BACKWARD]);
    for (int i = 0; i < 2 && k->status == MT_OK; i++)
        p->between_bytes[i] = segment_between_bytes(p, p->program[i]);
    if (p->generate_work_bytes > p->work_bytes[0])
        p->work_bytes[0] = p->generate_work_bytes; /* evaluation runs the inference program */
    return k->status;
}

/* Bytes are counted in 64 bits, and those of one value are multiplied by micro-batches and layers:
 * what no machine holds is refused before it can come out as little. */
static mt_status check_sizes(const tpl *t, const tpl_bounds *b)
{
    const double most = 0x1p42;
    for (mt_val v = 0; v < t->graph->n_values; v++) {
        const mt_shape *s = &t->graph->values[v].shape;
        double rows = (double)s->rows.per_token * (double)b->tokens +
                      (double)s->rows.per_document * (double)b->documents + (double)s->rows.fixed;
        double bytes =
            rows * (double)s->cols * (double)mt_dtype_size(maker_dtype(b->compute, s->kind));
        if (bytes > most)
            return status_set(MT_ERR_NOMEM,
                              "template '%s': a value of [%.0f, %lld] would take %.0f TiB; is the "
                              "model's size right? Else lower data.max_seq_len or "
                              "train.micro_batch_size",
                              t->name, rows, (long long)s->cols, bytes * 0x1p-40);
    }
    return MT_OK;
}

mt_status tpl_plan_create(const tpl *t, tpl_policy policy, const tpl_bounds *bounds,
                          const mt_backend *backend, void *device, tpl_plan **ret)
{
    if (bounds->segment_parts < 0 || (bounds->segment_parts > 0 && t->parts == 1))
        return status_set(MT_ERR_INTERNAL, "template '%s' cannot be cut at experts", t->name);
    if (bounds->tokens < 1 || bounds->documents < 1 || (int)policy < 0 ||
        (int)policy >= (int)TPL_POLICIES)
        return status_set(MT_ERR_INTERNAL,
                          "template '%s': a plan needs at least a token and a document", t->name);
    maker k = { .g = t->graph, .cut = bounds->segment_parts > 0 };
    mt_status status = check_sizes(t, bounds);
    if (status != MT_OK)
        return status;
    status = MT_ERR_NOMEM;
    tpl_plan *p = calloc(1, sizeof *p);
    if (!p)
        goto out;
    k.p = p;
    *p = (tpl_plan){ .t = t,
                     .policy = policy,
                     .bounds = *bounds,
                     .loss_offset = { -1, -1 },
                     .backend = backend,
                     .device = device };
    for (int i = 0; i < 3; i++)
        p->program[i] = calloc(1, sizeof *p->program[i]);
    if (!p->program[0] || !p->program[1] || !p->program[2])
        goto out;
    if ((status = segment_lay_out(p)) != MT_OK)
        goto out;
    for (int i = 0; i < MT_UNIT_MAX_IO; i++) {
        if (t->graph->in[i] != MT_NONE)
            p->in_bytes[i] = maker_value_bytes(p, t->graph->in[i]);
        if (t->graph->out[i] != MT_NONE)
            p->out_bytes[i] = maker_value_bytes(p, t->graph->out[i]);
    }
    status = make_programs(&k);

out:
    arena_finish(&k.mem);
    if (status != MT_OK) {
        tpl_plan_destroy(p);
        return p ? status : status_nomem("a template plan", sizeof *p);
    }
    *ret = p;
    return MT_OK;
}

void tpl_plan_destroy(tpl_plan *p)
{
    if (!p)
        return;
    for (int i = 0; i < 3; i++)
        if (p->program[i]) {
            free(p->program[i]->steps);
            free(p->program[i]);
        }
    free(p->slot_offset);
    free(p->segment);
    free(p->slice);
    free(p);
}
