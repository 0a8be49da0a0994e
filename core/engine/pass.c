/* SPDX-License-Identifier: Apache-2.0
 *
 * What the compute queue does: a group of micro-batches through every unit, forward and backward.
 * Runs on the main thread and only enqueues.
 */
#include "internal.h"

#include "../base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- binding ---------------------------------------------------------------------------------
 */

/* Value i of the tuple that unit `unit` passes on for batch `b` of the group. */
static void *boundary(const engine *e, int32_t unit, int64_t b, uint32_t i)
{
    const unit_info *u = &e->unit[unit];
    return (char *)e->region[LAYOUT_ACTIVATIONS] + u->activation[0] + b * u->activation[1] +
           u->value_offset[i];
}

static void bind_unit(const engine *e, int32_t unit, const weight_buffer *w, int64_t b,
                      tpl_binding *bind)
{
    const tpl *t = e->m->units[unit].t;
    *bind = (tpl_binding){ .weights = w->data, .work = e->region[LAYOUT_WORK] };
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
}

/* Gives the gradients of batch b's boundary values below `unit` their memory. What the unit above
 * left is d_out; a d_in that cannot be formed in place takes free memory, and d_out memory that
 * nothing is formed in becomes free: in the order of the compute queue, so no event is needed. */
static void bind_grads(engine *e, int32_t unit, int64_t b, tpl_binding *bind)
{
    const tpl *t = e->m->units[unit].t;
    const tpl_plan *p = e->p->tpl[unit];
    void **value = e->value + b * MT_UNIT_MAX_IO;
    bool kept[MT_UNIT_MAX_IO] = { false };
    uint32_t n_out = unit == e->m->n_units - 1 ? 0 : t->n_out;
    for (uint32_t i = 0; i < n_out; i++)
        bind->d_out[i] = value[i];
    for (uint32_t i = 0; i < t->n_in; i++) {
        int32_t in_place = p->d_in_place[i];
        if (in_place >= 0 && (uint32_t)in_place < n_out) {
            bind->d_in[i] = bind->d_out[in_place];
            kept[in_place] = true;
        } else {
            bind->d_in[i] = e->free_value[--e->n_free_values];
        }
    }
    for (uint32_t i = 0; i < n_out; i++)
        if (!kept[i])
            e->free_value[e->n_free_values++] = bind->d_out[i];
    for (uint32_t i = 0; i < t->n_in; i++)
        value[i] = bind->d_in[i];
}

/* ---- one unit, all batches of a group --------------------------------------------------------
 */

static void poison_work(engine *e, int64_t bytes)
{
    chaos_poison(e, e->q_compute, e->region[LAYOUT_WORK], bytes);
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

/* Gives the unit's gradients the form in which they leave, and sums their squares, for the norm and
 * to see whether they are finite. */
static void finish_grads(engine *e, int32_t unit, float *sums, const grad_buffer *g,
                         const group_set *set)
{
    const model_unit *u = &e->m->units[unit];
    int64_t base = e->unit[unit].slot_base;
    for (uint32_t k = 0; k < u->t->n_params; k++) {
        const model_param *p = &e->m->params[u->slot[k]];
        if (p->flags & MT_PARAM_FROZEN)
            continue;
        int64_t n = u->t->params[k].gathered ? set->n_rows * p->cols : p->elems;
        int64_t at = e->p->tpl[unit]->slot_offset[k];
        if (e->l.grad_size == 2) {
            e->b->narrow(e->dev, e->q_compute, (uint16_t *)g->data + at, sums + at, n);
            enqueued(e, e->q_compute);
        }
        e->b->sum_squares(e->dev, e->q_compute, sums + at, n, e->sums_dev + base + k,
                          e->sum_scratch);
        enqueued(e, e->q_compute);
    }
    if (e->l.grad_size == 2)
        chaos_poison(e, e->q_compute, sums, e->p->tpl[unit]->grad_bytes);
    e->b->copy_out(e->dev, e->q_compute, e->sums_host + base, e->sums_dev + base,
                   (int64_t)u->t->n_params * 8);
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
    *r = (pass_record){ .copy_in = w->copy_in,
                        .copy_out = -1,
                        .batch = -1,
                        .blocked_from = w->blocked_from,
                        .blocked_to = w->blocked_to };
    return r;
}

static void forward_unit(engine *e, const group_pass *g, int64_t pos, mt_pass pass)
{
    const sequence *s = &e->step.seq;
    int32_t unit = stream_unit_at(s, pos);
    weight_buffer *w = stream_acquire(e, s, pos);
    pass_record *r = new_record(e, w);
    if (unit == 0) {
        e->b->event_wait(e->dev, e->q_compute, g->set->loaded);
        r->batch = g->set->batch_in;
    }
    chaos_delay(e, e->q_compute, &e->rng);
    r->compute = time_begin(e, e->q_compute, TRACK_COMPUTE, EVENT_FORWARD, unit, -1);
    for (int64_t b = 0; b < g->set->n_batches; b++) {
        tpl_binding bind;
        mt_batch batch;
        bind_unit(e, unit, w, b, &bind);
        stream_batch(e, g->set, b, &batch);
        int64_t event = detail_begin(e, EVENT_FORWARD, unit, b);
        run_forward(e, unit, &bind, &batch, pass);
        detail_end(e, event);
        if (unit == e->m->n_units - 1)
            copy_losses(e, g->first_batch + b, batch.tokens);
    }
    time_end(e, e->q_compute, r->compute);
    stream_release(e, s, pos, w);
}

/* Backward of a unit. The last unit's forward runs here too, batch by batch, because its gradients
 * are formed while its logits exist. */
static void backward_unit(engine *e, const group_pass *g, int64_t pos)
{
    const sequence *s = &e->step.seq;
    int32_t unit = stream_unit_at(s, pos), index = 0;
    bool last_unit = unit == e->m->n_units - 1;
    const tpl_plan *t = e->p->tpl[unit];
    weight_buffer *w = stream_acquire(e, s, pos);
    pass_record *r = new_record(e, w);
    bool sums_on = e->p->device_sums && !g->first_group; /* on what earlier groups left */
    bool leave = e->unit[unit].trains && (g->last_group || !e->p->device_sums);
    grad_buffer *grads = NULL;
    if (leave || !e->p->device_sums || (e->p->held && g->first_group)) {
        grads = lander_acquire(e, unit, &index);
        r->copy_out = grads->copy_out;
    }
    float *sums = lander_sums(e, unit, grads);
    chaos_delay(e, e->q_compute, &e->rng);
    r->compute = time_begin(e, e->q_compute, TRACK_COMPUTE, EVENT_BACKWARD, unit, -1);
    for (int64_t b = 0; b < g->set->n_batches; b++) {
        tpl_binding bind;
        mt_batch batch;
        bind_unit(e, unit, w, b, &bind);
        bind_grads(e, unit, b, &bind);
        bind.grads = sums;
        bind.accumulate = b > 0 || sums_on;
        stream_batch(e, g->set, b, &batch);
        batch.loss_scale = e->step.loss_scale;
        if (last_unit) {
            int64_t event = detail_begin(e, EVENT_FORWARD, unit, b);
            run_forward(e, unit, &bind, &batch, MT_PASS_TRAIN);
            copy_losses(e, g->first_batch + b, batch.tokens);
            detail_end(e, event);
        }
        int64_t event = detail_begin(e, EVENT_BACKWARD, unit, b);
        poison_work(e, t->work_bytes[1]);
        tpl_backward(t, e->q_compute, &bind, &batch);
        enqueued(e, e->q_compute);
        detail_end(e, event);
        chaos_poison(e, e->q_compute, bind.saved, t->saved_bytes);
        if (!last_unit)
            for (uint32_t i = 0; i < t->t->n_out; i++)
                chaos_poison(e, e->q_compute, bind.out[i], t->out_bytes[i]);
    }
    if (leave)
        finish_grads(e, unit, sums, grads, g->set);
    time_end(e, e->q_compute, r->compute);
    if (last_unit && g->last_group)
        e->b->event_record(e->dev, e->loss_ready, e->q_compute);
    stream_release(e, s, pos, w);
    if (leave)
        lander_submit(e, &(landing){ .unit = unit,
                                     .buffer = index,
                                     .set = (int32_t)(g->set->key % LAYOUT_SETS),
                                     .last_group = g->last_group,
                                     .update = e->step.params });
}

/* ---- groups ----------------------------------------------------------------------------------
 */

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
    stream_prepare(e, e->group_micro, n, s->first_key + g, with_targets);
    e->next_key = s->first_key + g + 1;
}

void pass_train(engine *e)
{
    step_state *step = &e->step;
    const step_batch *batch = step->batch;
    int64_t n_units = e->m->n_units;
    int64_t groups = e->p->groups < batch->n ? e->p->groups : batch->n;
    step->seq = (sequence){ .n_units = n_units,
                            .n_groups = groups,
                            .group_length = 2 * n_units - 1,
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
        for (int64_t u = 0; u < n_units - 1; u++)
            forward_unit(e, &pass, pos + u, MT_PASS_TRAIN);
        for (int64_t u = n_units - 1; u < step->seq.group_length; u++) {
            backward_unit(e, &pass, pos + u);
            if (u == n_units - 1 && !pass.last_group)
                prepare_group(e, batch, g + 1, true);
        }
        e->b->event_record(e->dev, pass.set->done, e->q_compute);
    }
}

double pass_eval(engine *e, const step_batch *batch)
{
    int64_t n_units = e->m->n_units;
    int64_t groups = (batch->n + e->p->group_batches - 1) / e->p->group_batches;
    double sum = 0;
    e->step.seq = (sequence){
        .n_units = n_units, .n_groups = groups, .group_length = n_units, .first_key = e->next_key
    };
    for (int64_t g = 0; g < groups; g++) {
        e->n_records = 0;
        prepare_group(e, batch, g, true);
        /* Losses of one group at a time are on the host. */
        group_pass pass = { .set = &e->set[(e->step.seq.first_key + g) % LAYOUT_SETS] };
        for (int64_t u = 0; u < n_units; u++)
            forward_unit(e, &pass, g * n_units + u, MT_PASS_EVAL);
        e->b->event_record(e->dev, pass.set->done, e->q_compute);
        e->b->event_sync(e->dev, pass.set->done);
        for (int64_t b = 0; b < pass.set->n_batches; b++)
            for (int64_t t = 0; t < pass.set->micro[b]->tokens; t++)
                sum += (double)e->loss_host[b * e->l.tokens + t];
    }
    return sum;
}

void pass_generate_unit(engine *e, int32_t unit, const weight_buffer *w, const mt_batch *batch,
                        mt_pass pass, int64_t used)
{
    tpl_binding bind;
    bind_unit(e, unit, w, 0, &bind);
    bind.state = e->unit[unit].state;
    bind.used = used;
    poison_work(e, e->p->tpl[unit]->generate_work_bytes);
    tpl_forward(e->p->tpl[unit], e->q_compute, &bind, batch, pass);
    enqueued(e, e->q_compute);
}

/* ---- life ------------------------------------------------------------------------------------
 */

/* Where every unit's boundary values and saved tensors lie, and its generation state. */
static void place_units(engine *e)
{
    int64_t activation = 0, saved = 0, slots = 0, pack = 0, sums = 0;
    char *state = e->region[LAYOUT_STATE];
    for (int32_t u = 0; u < e->m->n_units; u++) {
        const tpl_plan *t = e->p->tpl[u];
        unit_info *info = &e->unit[u];
        bool last = u == e->m->n_units - 1;
        info->slot_base = slots;
        info->sum_offset = sums;
        sums += layout_sum_bytes(t);
        info->dense_elems = t->t->own_elems;
        for (uint32_t k = 0; k < t->t->n_params; k++) {
            const tpl_param *slot = &t->t->params[k];
            info->trains |= !(e->m->params[e->m->units[u].slot[k]].flags & MT_PARAM_FROZEN);
            if (!slot->gathered)
                continue;
            info->gathers = true;
            e->pack_offset[slots + k] = pack;
            pack += e->l.gather_rows * slot->info.cols;
            if (!(slot->info.flags & MT_PARAM_ALIAS) && slot->offset < info->dense_elems)
                info->dense_elems = slot->offset;
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
    }
}

mt_status pass_start(engine *e)
{
    int64_t batches = e->p->group_batches;
    e->cap_records = e->p->groups * 2 * e->m->n_units;
    e->record = calloc((size_t)e->cap_records, sizeof *e->record);
    e->group_micro = calloc((size_t)batches, sizeof *e->group_micro);
    e->value = calloc((size_t)batches * MT_UNIT_MAX_IO, sizeof *e->value);
    e->free_value = calloc((size_t)e->l.n_values + 1, sizeof *e->free_value);
    if (!e->record || !e->group_micro || !e->value || !e->free_value)
        return status_nomem("the engine's tables", (size_t)e->cap_records * sizeof *e->record);
    if (e->training)
        for (; e->n_free_values < e->l.n_values; e->n_free_values++)
            e->free_value[e->n_free_values] =
                (char *)e->region[LAYOUT_ACTIVATION_GRADS] + e->n_free_values * e->l.value_stride;
    place_units(e);
    return MT_OK;
}

void pass_stop(engine *e)
{
    free(e->record);
    free(e->group_micro);
    free(e->value);
    free(e->free_value);
}
