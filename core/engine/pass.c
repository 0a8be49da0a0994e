/* SPDX-License-Identifier: Apache-2.0
 *
 * What the compute queue does: a group of micro-batches through every unit, forward and backward.
 * Runs on the main thread and only enqueues.
 */
#include "internal.h"

#include "../base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- binding --------------------------------------------------------------------------------- */

/* Value i of the tuple that unit `unit` passes on for batch `b` of the group. */
static void *boundary(const engine *e, int32_t unit, int64_t b, uint32_t i)
{
    const unit_info *u = &e->unit[unit];
    return (char *)e->region[LAYOUT_ACTIVATIONS] + u->activation[0] + b * u->activation[1] +
           u->value_offset[i];
}

/* What units sum up for batch `b` of the group. */
static double *tally_of(const engine *e, int64_t b)
{
    return (double *)((char *)e->region[LAYOUT_TALLIES] + b * e->l.tally_stride);
}

/* Binds the unit of a piece; w is NULL where its weights are not needed. */
static void bind_piece(const engine *e, int32_t piece, const weight_buffer *w, int64_t b,
                       tpl_binding *bind)
{
    int32_t unit = e->piece[piece].unit;
    const tpl *t = e->m->units[unit].t;
    *bind = (tpl_binding){ .weights = w ? w->data : NULL,
                           .work = e->region[LAYOUT_WORK],
                           .segment = e->piece[piece].segment };
    for (uint32_t i = 0; i < t->n_in; i++)
        bind->in[i] = boundary(e, unit - 1, b, i);
    if (unit == e->m->n_units - 1) {
        bind->out[0] = e->region[LAYOUT_LOSS];
    } else {
        for (uint32_t i = 0; i < t->n_out; i++)
            bind->out[i] = boundary(e, unit, b, i);
    }
    if (e->training)
        bind->saved =
            (char *)e->region[LAYOUT_SAVED] + e->unit[unit].saved[0] + b * e->unit[unit].saved[1];
    bind->carry = (char *)e->region[LAYOUT_CARRIED] + b * e->l.carried_stride;
    bind->tally = tally_of(e, b);
}

/* Boundary values whose gradients come from above. */
static uint32_t count_d_out(const engine *e, int32_t unit)
{
    return unit == e->m->n_units - 1 ? 0 : e->m->units[unit].t->n_out;
}

/* Gives the gradients of batch b's boundary values below `unit` their memory. What the unit above
 * left is d_out; a d_in that cannot be formed in place takes free memory. */
static void bind_grads(engine *e, int32_t unit, int64_t b, tpl_binding *bind)
{
    const tpl *t = e->m->units[unit].t;
    const tpl_plan *p = e->p->tpl[unit];
    void **value = e->value + b * MT_UNIT_MAX_IO;
    uint32_t n_out = count_d_out(e, unit);
    for (uint32_t i = 0; i < n_out; i++)
        bind->d_out[i] = value[i];
    for (uint32_t i = 0; i < t->n_in; i++) {
        int32_t in_place = p->d_in_place[i];
        bool there = in_place >= 0 && (uint32_t)in_place < n_out;
        bind->d_in[i] = there ? bind->d_out[in_place] : e->free_value[--e->n_free_values];
        value[i] = bind->d_in[i];
    }
}

/* When the unit's backward has been through: d_out memory that nothing was formed in becomes free,
 * in the order of the compute queue, so no event is needed. */
static void free_grads(engine *e, int32_t unit, const tpl_binding *bind)
{
    for (uint32_t i = 0; i < count_d_out(e, unit); i++) {
        bool kept = false;
        for (uint32_t k = 0; k < e->m->units[unit].t->n_in; k++)
            kept |= bind->d_in[k] == bind->d_out[i];
        if (!kept)
            e->free_value[e->n_free_values++] = bind->d_out[i];
    }
}

/* ---- one visit, all batches of a group ------------------------------------------------------- */

static void poison_work(engine *e, int64_t bytes)
{
    chaos_poison(e, e->q_compute, e->region[LAYOUT_WORK], bytes);
}

static void poison_carried(engine *e, int32_t unit, const tpl_binding *bind)
{
    chaos_poison(e, e->q_compute, bind->carry, e->p->tpl[unit]->carry_bytes);
}

static void run_forward(engine *e, int32_t unit, const tpl_binding *bind, const mt_batch *batch,
                        mt_pass pass)
{
    poison_work(e, e->p->tpl[unit]->work_bytes[0]);
    tpl_forward(e->p->tpl[unit], e->q_compute, bind, batch, pass);
    enqueued(e, e->q_compute);
}

/* Copies the losses of batch `b` of the step out, on the compute queue itself: they are few. */
static void copy_losses(engine *e, int64_t b, int64_t tokens)
{
    e->b->copy_out(e->dev, e->q_compute, e->loss_host + b * e->l.tokens, e->region[LAYOUT_LOSS],
                   tokens * 4);
    enqueued(e, e->q_compute);
}

/* Copies out the loss that the unit adds to the model's own for batch `b` of the step, before the
 * workspace is used again. */
static void copy_aux_loss(engine *e, int32_t unit, int64_t b)
{
    if (!e->unit[unit].aux_loss)
        return;
    const char *loss = e->region[LAYOUT_WORK];
    loss += e->p->tpl[unit]->loss_offset[0];
    e->b->copy_out(e->dev, e->q_compute, e->unit[unit].aux_loss + b, loss, 4);
    enqueued(e, e->q_compute);
}

/* Gives the piece's gradients the form in which they leave, and sums their squares, for the norm
 * and to see whether they are finite: part by part, so that sums do not depend on how a unit is
 * cut. */
static void finish_grads(engine *e, int32_t piece, float *sums, const grad_buffer *g,
                         const group_set *set)
{
    int32_t unit = e->piece[piece].unit;
    const tpl_segment *s = piece_segment(e, piece);
    int64_t base = e->unit[unit].sum_base, n_sums = 0;
    for (int32_t i = 0; i < s->n_slices; i++) {
        const tpl_slice *slice = &s->slice[i];
        const model_param *p = &e->m->params[piece_param(e, piece, slice)];
        n_sums += slice->parts;
        if (p->flags & MT_PARAM_FROZEN)
            continue;
        bool gathered = e->m->units[unit].t->params[slice->slot].gathered;
        int64_t n = gathered ? set->n_grad_rows * p->cols : slice->n, each = n / slice->parts;
        if (e->l.grad_size == 2) {
            e->b->narrow(e->dev, e->q_compute, (uint16_t *)g->data + slice->at, sums + slice->at,
                         n);
            enqueued(e, e->q_compute);
        }
        for (int32_t k = 0; k < slice->parts; k++) {
            e->b->sum_squares(e->dev, e->q_compute, sums + slice->at + k * each, each,
                              e->sums_dev + base + slice->sum + k, e->sum_scratch);
            enqueued(e, e->q_compute);
        }
    }
    if (e->l.grad_size == 2)
        chaos_poison(e, e->q_compute, sums, layout_sum_bytes(s));
    base += s->slice[0].sum;
    e->b->copy_out(e->dev, e->q_compute, e->sums_host + base, e->sums_dev + base, n_sums * 8);
    enqueued(e, e->q_compute);
}

typedef struct group_pass {
    group_set *set;
    int64_t first_batch; /* of the group, in the step */
    bool first_group, last_group;
} group_pass;

static int64_t detail_begin(engine *e, event_kind kind, int32_t unit, int64_t b)
{
    if (!e->time.detailed)
        return -1;
    return time_begin(e, e->q_compute, TRACK_COMPUTE, kind, unit, (int32_t)b);
}

static void detail_end(engine *e, int64_t index)
{
    if (index >= 0)
        time_end(e, e->q_compute, index);
}

static pass_record *new_record(engine *e, const weight_buffer *w)
{
    pass_record *r =
        &e->record[e->n_records < e->cap_records ? e->n_records++ : e->cap_records - 1];
    *r = (pass_record){ .copy_in = -1, .copy_out = -1, .batch = -1 };
    if (w) {
        r->copy_in = w->copy_in;
        r->blocked_from = w->blocked_from;
        r->blocked_to = w->blocked_to;
    }
    return r;
}

static bool is_cut(const engine *e, int32_t unit)
{
    return e->p->tpl[unit]->n_segments > 1;
}

/* The stages of a unit's program that a visit runs, which all are one of a unit that is not cut.
 * What follows the experts needs no weights in forward: it comes with the last of them. */
static int visit_stages(const engine *e, const visit *v, bool backward, tpl_stage ret[2])
{
    const piece_info *p = &e->piece[v->piece];
    bool dense = p->segment == 0;
    ret[0] = !dense ? TPL_EXPERTS : backward && v->last ? TPL_AFTER : TPL_BEFORE;
    ret[1] = TPL_AFTER;
    if (!is_cut(e, p->unit))
        ret[0] = TPL_BEFORE;
    return !dense && !backward && v->last ? 2 : 1;
}

static void forward_visit(engine *e, const group_pass *g, int64_t pos, mt_pass pass)
{
    const sequence *s = &e->step.seq;
    const visit *v = stream_visit_at(e, s, pos);
    int32_t unit = e->piece[v->piece].unit;
    tpl_stage stage[2];
    int n_stages = visit_stages(e, v, false, stage);
    bool routes = pass == MT_PASS_TRAIN && v->first;
    if (v->first)
        parking_vacate(e, unit);
    weight_buffer *w = stream_acquire(e, s, pos);
    pass_record *r = new_record(e, w);
    if (unit == 0) {
        e->b->event_wait(e->dev, e->q_compute, g->set->loaded);
        r->batch = g->set->batch_in;
    }
    chaos_delay(e, e->q_compute, &e->rng);
    r->compute = time_begin(e, e->q_compute, TRACK_COMPUTE, EVENT_FORWARD, unit, -1);
    for (int64_t b = 0; b < g->set->range.n; b++) {
        tpl_binding bind;
        mt_batch batch;
        bind_piece(e, v->piece, w, b, &bind);
        stream_batch(e, g->set, b, &batch);
        if (v->first)
            poison_carried(e, unit, &bind);
        int64_t event = detail_begin(e, EVENT_FORWARD, unit, b);
        for (int i = 0; i < n_stages; i++) {
            bind.stage = stage[i];
            run_forward(e, unit, &bind, &batch, pass);
        }
        if (v->first && pass == MT_PASS_TRAIN)
            copy_aux_loss(e, unit, g->first_batch + b);
        detail_end(e, event);
        if (routes)
            experts_tell(e, unit, g->first_batch + b, &bind, pass);
        if (unit == e->m->n_units - 1)
            copy_losses(e, g->first_batch + b, batch.tokens);
    }
    if (routes && is_cut(e, unit)) {
        e->b->event_record(e->dev, e->unit[unit].offsets_there, e->q_compute);
        e->unit[unit].offsets_key = g->set->key;
    }
    time_end(e, e->q_compute, r->compute);
    stream_release(e, s, pos, w);
}

/* Nobody reads again what forward kept of batch b for the unit. */
static void poison_used(engine *e, int32_t unit, const tpl_binding *bind)
{
    const tpl_plan *t = e->p->tpl[unit];
    chaos_poison(e, e->q_compute, bind->saved, t->saved_bytes);
    for (uint32_t i = 0; unit < e->m->n_units - 1 && i < t->t->n_out; i++)
        chaos_poison(e, e->q_compute, bind->out[i], t->out_bytes[i]);
}

/* One batch's part in a visit of backward. The last unit's forward runs here too, batch by batch,
 * because its gradients are formed while its logits exist. */
static void backward_batch(engine *e, const group_pass *g, const visit *v, int64_t b,
                           const tpl_binding *bind)
{
    int32_t unit = e->piece[v->piece].unit;
    const tpl_plan *t = e->p->tpl[unit];
    mt_batch batch;
    stream_batch(e, g->set, b, &batch);
    batch.loss_scale = e->step.loss_scale;
    if (unit == e->m->n_units - 1) {
        int64_t event = detail_begin(e, EVENT_FORWARD, unit, b);
        run_forward(e, unit, bind, &batch, MT_PASS_TRAIN);
        copy_aux_loss(e, unit, g->first_batch + b);
        copy_losses(e, g->first_batch + b, batch.tokens);
        experts_tell(e, unit, g->first_batch + b, bind, MT_PASS_TRAIN);
        detail_end(e, event);
    }
    int64_t event = detail_begin(e, EVENT_BACKWARD, unit, b);
    poison_work(e, t->work_bytes[1]);
    tpl_backward(t, e->q_compute, bind, &batch);
    enqueued(e, e->q_compute);
    detail_end(e, event);
    if (v->last)
        poison_used(e, unit, bind);
}

static void backward_visit(engine *e, const group_pass *g, int64_t pos)
{
    const sequence *s = &e->step.seq;
    const visit *v = stream_visit_at(e, s, pos);
    const piece_info *p = &e->piece[v->piece];
    int32_t unit = p->unit, index = 0;
    tpl_stage stage[2];
    visit_stages(e, v, true, stage);
    bool forms = !is_cut(e, unit) || stage[0] != TPL_BEFORE; /* any gradients of parameters */
    bool skip = stream_skips(e, s, pos);
    weight_buffer *w = skip || !stream_reads(e, s, pos) ? NULL : stream_acquire(e, s, pos);
    pass_record *r = new_record(e, w);
    bool sums_on = e->p->device_sums && !g->first_group; /* on what earlier groups left */
    bool leave = forms && p->trains && (g->last_group || !e->p->device_sums);
    grad_buffer *grads = NULL;
    if (unit == e->m->n_units - 1)
        parking_vacate(e, unit); /* its forward is here */
    /* Sums of the last step may still be on their way to the optimizer. */
    bool anew = g->first_group && (e->p->held || e->l.parked);
    if (leave || (forms && (!e->p->device_sums || anew))) {
        grads = lander_acquire(e, v->piece, &index);
        r->copy_out = grads->copy_out;
    }
    float *sums = forms ? lander_sums(e, v->piece, grads) : NULL;
    chaos_delay(e, e->q_compute, &e->rng);
    r->compute = time_begin(e, e->q_compute, TRACK_COMPUTE, EVENT_BACKWARD, unit, -1);
    if (skip && !sums_on)
        e->b->fill(e->dev, e->q_compute, sums, 0, layout_sum_bytes(piece_segment(e, v->piece)));
    for (int64_t b = 0; b < g->set->range.n && !skip; b++) {
        tpl_binding *bind = &e->bound[b];
        if (v->first) {
            bind_piece(e, v->piece, w, b, bind);
            bind_grads(e, unit, b, bind);
            poison_carried(e, unit, bind);
        }
        bind->weights = w ? w->data : NULL;
        bind->grads = sums;
        bind->accumulate = b > 0 || sums_on;
        bind->grad_rows = stream_grad_rows(e, g->set, b);
        bind->stage = stage[0];
        bind->segment = p->segment;
        backward_batch(e, g, v, b, bind);
        if (v->last)
            free_grads(e, unit, bind);
    }
    if (leave)
        finish_grads(e, v->piece, sums, grads, g->set);
    time_end(e, e->q_compute, r->compute);
    if (unit == e->m->n_units - 1 && g->last_group)
        e->b->event_record(e->dev, e->loss_ready, e->q_compute);
    stream_release(e, s, pos, w);
    micro_range range = g->set->range;
    if (e->p->device_sums) /* all there were */
        range = (micro_range){ 0, range.first + range.n };
    if (leave)
        lander_submit(e, &(landing){ .piece = v->piece,
                                     .buffer = index,
                                     .set = (int32_t)(g->set->key % LAYOUT_SETS),
                                     .last_group = g->last_group,
                                     .range = range,
                                     .update = e->step.params });
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Batches n are cut into `groups` groups as evenly as possible, in order; the first of group g. */
static int64_t group_first(int64_t n, int64_t groups, int64_t g)
{
    return g * (n / groups) + (g < n % groups ? g : n % groups);
}

static void prepare_group(engine *e, const step_batch *batch, int64_t g, bool with_targets)
{
    const sequence *s = &e->step.seq;
    int64_t first = group_first(batch->n, s->n_groups, g);
    int64_t n = group_first(batch->n, s->n_groups, g + 1) - first;
    for (int64_t i = 0; i < n; i++)
        e->group_micro[i] = &batch->micro[first + i];
    stream_prepare(e, e->group_micro, (micro_range){ first, n }, s->first_key + g, with_targets);
    e->next_key = s->first_key + g + 1;
}

/* Before a group's forward. */
static void clear_tallies(engine *e, const group_set *set)
{
    if (e->l.tally_stride == 0)
        return;
    e->b->fill(e->dev, e->q_compute, tally_of(e, 0), 0, set->range.n * e->l.tally_stride);
    enqueued(e, e->q_compute);
}

void pass_train(engine *e)
{
    step_state *step = &e->step;
    const step_batch *batch = step->batch;
    int64_t head = e->l.n_forward - 1; /* its forward is part of its backward */
    int64_t groups = e->p->groups < batch->n ? e->p->groups : batch->n;
    step->seq = (sequence){ .n_groups = groups,
                            .group_length = e->l.n_visits,
                            .first_key = e->next_key,
                            .backward = true };
    memset(e->landed, 0, (size_t)e->m->n_params * sizeof *e->landed);
    e->n_records = 0;
    prepare_group(e, batch, 0, true);
    for (int64_t g = 0; g < groups; g++) {
        group_pass pass = { .set = &e->set[(step->seq.first_key + g) % LAYOUT_SETS],
                            .first_batch = group_first(batch->n, groups, g),
                            .first_group = g == 0,
                            .last_group = g == groups - 1 };
        int64_t pos = g * step->seq.group_length;
        clear_tallies(e, pass.set);
        for (int64_t i = 0; i < head; i++)
            forward_visit(e, &pass, pos + i, MT_PASS_TRAIN);
        for (int64_t i = head; i < e->l.n_visits; i++) {
            backward_visit(e, &pass, pos + i);
            if (i == head && !pass.last_group)
                prepare_group(e, batch, g + 1, true);
        }
        e->b->event_record(e->dev, pass.set->done, e->q_compute);
    }
}

double pass_eval(engine *e, const step_batch *batch)
{
    int64_t n = e->l.n_forward;
    int64_t groups = (batch->n + e->p->group_batches - 1) / e->p->group_batches;
    double sum = 0;
    e->step.seq = (sequence){ .n_groups = groups, .group_length = n, .first_key = e->next_key };
    for (int64_t g = 0; g < groups; g++) {
        e->n_records = 0;
        prepare_group(e, batch, g, true);
        /* Losses of one group at a time are on the host. */
        group_pass pass = { .set = &e->set[(e->step.seq.first_key + g) % LAYOUT_SETS] };
        clear_tallies(e, pass.set);
        for (int64_t i = 0; i < n; i++)
            forward_visit(e, &pass, g * n + i, MT_PASS_EVAL);
        e->b->event_record(e->dev, pass.set->done, e->q_compute);
        e->b->event_sync(e->dev, pass.set->done);
        for (int64_t b = 0; b < pass.set->range.n; b++)
            for (int64_t t = 0; t < pass.set->micro[b]->tokens; t++)
                sum += (double)e->loss_host[b * e->l.tokens + t];
    }
    return sum;
}

/* Of a token's experts few are in each segment, and copying weights is what takes the time: it is
 * worth waiting to hear which segments are needed. */
static void await_offsets(engine *e, int32_t unit, int64_t key, const tpl_binding *bind)
{
    unit_info *u = &e->unit[unit];
    experts_tell(e, unit, 0, bind, MT_PASS_DECODE);
    e->b->event_record(e->dev, u->offsets_there, e->q_compute);
    e->b->event_sync(e->dev, u->offsets_there);
    u->offsets_key = key;
}

void pass_generate(engine *e, int64_t pos, const weight_buffer *w, const mt_batch *batch,
                   mt_pass pass, int64_t used)
{
    const sequence *s = &e->step.seq;
    const visit *v = stream_visit_at(e, s, pos);
    int32_t unit = e->piece[v->piece].unit;
    tpl_stage stage[2];
    tpl_binding bind;
    int n_stages = visit_stages(e, v, false, stage);
    bind_piece(e, v->piece, w, 0, &bind);
    bind.state = e->unit[unit].state;
    bind.used = used;
    if (v->first)
        poison_carried(e, unit, &bind);
    for (int i = 0; i < n_stages; i++) {
        if (!w && stage[i] == TPL_EXPERTS)
            continue;
        bind.stage = stage[i];
        poison_work(e, e->p->tpl[unit]->generate_work_bytes);
        tpl_forward(e->p->tpl[unit], e->q_compute, &bind, batch, pass);
        enqueued(e, e->q_compute);
    }
    if (v->first && is_cut(e, unit))
        await_offsets(e, unit, s->first_key, &bind);
}

/* ---- life ------------------------------------------------------------------------------------ */

/* The pieces of every unit, and where their gradients are summed. */
static void place_pieces(engine *e)
{
    int32_t n = 0;
    int64_t offset = 0, sums = 0;
    for (int32_t u = 0; u < e->m->n_units; u++) {
        const tpl_plan *t = e->p->tpl[u];
        e->unit[u].first_piece = n;
        e->unit[u].sum_base = sums;
        sums += t->n_sums;
        for (int32_t i = 0; i < t->n_segments; i++, n++) {
            const tpl_segment *s = &t->segment[i];
            e->piece[n] = (piece_info){ .unit = u, .segment = i, .sum_offset = offset };
            offset += layout_sum_bytes(s);
            for (int32_t k = 0; k < s->n_slices; k++) {
                int32_t param = piece_param(e, n, &s->slice[k]);
                e->piece[n].trains |= !(e->m->params[param].flags & MT_PARAM_FROZEN);
            }
        }
    }
}

static void place_visits(engine *e)
{
    visit *v = e->visit;
    for (int32_t u = 0; u < e->m->n_units; u++) {
        int32_t first = e->unit[u].first_piece, n = e->p->tpl[u]->n_segments;
        for (int32_t i = 0; i < n; i++)
            *v++ = (visit){ first + i, i == 0, i == n - 1 };
    }
    for (int32_t u = e->m->n_units - 2; u >= 0; u--) {
        int32_t first = e->unit[u].first_piece, n = e->p->tpl[u]->n_segments;
        *v++ = (visit){ first, true, n == 1 };
        for (int32_t i = n - 1; i > 0; i--)
            *v++ = (visit){ first + i, false, false };
        if (n > 1)
            *v++ = (visit){ first, false, true };
    }
}

/* Where every unit's boundary values and saved tensors lie, and its generation state. */
static void place_units(engine *e)
{
    int64_t activation = 0, saved = 0, slots = 0, pack = 0;
    char *state = e->region[LAYOUT_STATE], *offsets = e->region[LAYOUT_HOST_OFFSETS];
    float *aux_loss = e->region[LAYOUT_HOST_AUX_LOSS];
    for (int32_t u = 0; u < e->m->n_units; u++) {
        const tpl_plan *t = e->p->tpl[u];
        unit_info *info = &e->unit[u];
        bool last = u == e->m->n_units - 1;
        info->slot_base = slots;
        for (uint32_t k = 0; k < t->t->n_params; k++) {
            const tpl_param *slot = &t->t->params[k];
            if (!slot->gathered)
                continue;
            info->gathers = true;
            e->pack_offset[slots + k] = pack;
            pack += e->l.pack_rows * slot->info.cols;
        }
        slots += t->t->n_params;

        int64_t at = 0;
        for (uint32_t i = 0; !last && i < t->t->n_out; i++) {
            info->value_offset[i] = at;
            at += layout_align(t->out_bytes[i]);
        }
        info->activation[0] = activation;
        info->activation[1] = at;
        info->saved[0] = saved;
        info->saved[1] = last ? 0 : layout_align(t->saved_bytes);
        if (e->training) {
            activation += at * e->p->group_batches;
        } else {
            /* Nothing below the unit at work is read again: two sets of values suffice. */
            info->activation[0] = (u & 1) * e->l.activation_stride * e->p->group_batches;
            info->activation[1] = e->l.activation_stride;
        }
        saved += layout_align(t->saved_bytes) * e->p->group_batches;

        if (t->state_bytes) {
            info->state = state;
            state += layout_align(t->state_bytes);
        }
        if (e->training && t->t->adds_loss) {
            info->aux_loss = aux_loss;
            aux_loss += e->p->request.micro_batches;
        }
        info->offsets = offsets;
        info->offsets_key = -1;
        if (offsets)
            offsets += layout_offsets_bytes(t->t) * e->p->request.micro_batches;
    }
}

mt_status pass_start(engine *e)
{
    int64_t batches = e->p->group_batches;
    e->cap_records = e->p->groups * e->l.n_visits;
    e->record = calloc((size_t)e->cap_records, sizeof *e->record);
    e->group_micro = calloc((size_t)batches, sizeof *e->group_micro);
    e->value = calloc((size_t)batches * MT_UNIT_MAX_IO, sizeof *e->value);
    e->bound = calloc((size_t)batches, sizeof *e->bound);
    e->free_value = calloc((size_t)e->l.n_values + 1, sizeof *e->free_value);
    if (!e->record || !e->group_micro || !e->value || !e->bound || !e->free_value)
        return status_nomem("the engine's tables", (size_t)e->cap_records * sizeof *e->record);
    if (e->training)
        for (; e->n_free_values < e->l.n_values; e->n_free_values++)
            e->free_value[e->n_free_values] =
                (char *)e->region[LAYOUT_ACTIVATION_GRADS] + e->n_free_values * e->l.value_stride;
    place_pieces(e);
    place_visits(e);
    place_units(e);
    mt_status st = MT_OK;
    for (int32_t u = 0; u < e->m->n_units && st == MT_OK; u++)
        if (is_cut(e, u) && e->l.bytes[LAYOUT_HOST_OFFSETS])
            st = e->b->event_create(e->dev, &e->unit[u].offsets_there);
    return st;
}

void pass_stop(engine *e)
{
    for (int32_t u = 0; e->unit && u < e->m->n_units; u++)
        if (e->unit[u].offsets_there)
            e->b->event_destroy(e->dev, e->unit[u].offsets_there);
    free(e->record);
    free(e->group_micro);
    free(e->value);
    free(e->bound);
    free(e->free_value);
}
