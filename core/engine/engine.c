/* SPDX-License-Identifier: Apache-2.0
 *
 * An engine's life and its steps: what happens before, between and after the passes that the other
 * files enqueue.
 */
#include "internal.h"

#include "../base/log.h"
#include "../base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- life ------------------------------------------------------------------------------------ */

static bool in_store(int region)
{
    return region == LAYOUT_MASTERS || region == LAYOUT_STATES || region == LAYOUT_GRAD_PLANE;
}

static mt_status check_config(const engine_config *c)
{
    const plan_request *r = &c->plan->request;
    if (c->store->m != c->plan->m)
        return status_set(MT_ERR_INVALID, "the store and the plan belong to different models");
    if (!r->training)
        return MT_OK;
    if (!c->optim)
        return status_set(MT_ERR_INVALID, "a plan for training needs an optimizer");
    if (c->optim->granularity != r->grain)
        return status_set(MT_ERR_INVALID, "the optimizer's granularity is %d, the plan's %d",
                          c->optim->granularity, r->grain);
    if (c->store->n_states != r->n_states)
        return status_set(MT_ERR_INVALID, "the store has %u state planes, the plan %u",
                          c->store->n_states, r->n_states);
    if ((c->store->grad_bytes > 0) != plan_needs_grad_plane(c->plan))
        return status_set(
            MT_ERR_INVALID, "the store was created %s a gradient plane, the plan needs %s",
            c->store->grad_bytes ? "with" : "without", c->store->grad_bytes ? "none" : "one");
    return MT_OK;
}

static mt_status alloc_regions(engine *e)
{
    for (int r = 0; r < LAYOUT_REGIONS; r++) {
        int64_t bytes = e->l.bytes[r];
        if (bytes == 0 || in_store(r))
            continue;
        bool device = layout_region_tier((layout_region)r) == PLAN_DEVICE;
        mt_status st = device ? e->b->device_alloc(e->dev, bytes, &e->region[r])
                              : e->b->host_alloc(e->dev, bytes, &e->region[r]);
        if (st < 0) {
            e->region[r] = NULL;
            return status_prefix(st, "%s (%lld bytes of %s memory)",
                                 layout_region_name((layout_region)r), (long long)bytes,
                                 device ? "device" : "host");
        }
    }
    return MT_OK;
}

/* Elements of the smallest range of parameter i that the optimizer is called for. Segments bring
 * their shares one by one, which are updated so unless all of them wait on the host. */
static int64_t smallest_update(const engine *e, int32_t i)
{
    const model_param *p = &e->m->params[i];
    const tpl_plan *t = e->p->tpl[p->unit];
    bool waits = e->p->request.max_grad_norm > 0 && (e->plane[i] || e->narrow[i]);
    int64_t least = layout_slice(p, e->l.slab_elems);
    for (int32_t k = 0; k < t->n_segments && !waits && !p->gathered; k++)
        for (int32_t j = 0; j < t->segment[k].n_slices; j++) {
            const tpl_slice *slice = &t->segment[k].slice[j];
            if (e->m->units[p->unit].slot[slice->slot] == i && slice->n < least)
                least = slice->n;
        }
    return least;
}

/* Where each parameter's gradient lands on the host, and how often in a step. */
static mt_status place_params(engine *e, mt_granularity grain)
{
    int64_t block = 0;
    char *shared = e->region[LAYOUT_SHARED_GRADS], *narrow = e->region[LAYOUT_NARROW_PLANE];
    for (int32_t i = 0; i < e->m->n_params; i++) {
        const model_param *p = &e->m->params[i];
        int64_t slice = layout_slice(p, e->l.slab_elems);
        e->contributors[i] = layout_contributors(e->m, i);
        e->block_base[i] = block;
        block += (p->elems + slice - 1) / slice;
        if (!e->training || (p->flags & MT_PARAM_FROZEN))
            continue;
        if (e->l.grad_plane) {
            e->plane[i] = e->s->units[p->unit].grad + p->offset;
        } else if (e->contributors[i] > 1) {
            e->plane[i] = (float *)shared;
            shared += layout_align(p->elems * 4);
        } else if (e->l.narrow_plane) {
            e->narrow[i] = (uint16_t *)narrow;
            narrow += layout_align(p->elems * 2);
        }
        int64_t part = grain == MT_GRAIN_TENSOR ? smallest_update(e, i) : slice;
        if ((grain == MT_GRAIN_TENSOR && part < p->elems) ||
            (grain == MT_GRAIN_ROW && p->rows > 0 && slice % p->cols != 0))
            return status_set(MT_ERR_UNSUPPORTED,
                              "the optimizer updates whole %s, but '%s' is updated in slices of "
                              "%lld of its %lld elements: use another optimizer",
                              grain == MT_GRAIN_TENSOR ? "tensors" : "rows", p->name,
                              (long long)part, (long long)p->elems);
    }
    return MT_OK;
}

static mt_status create_tables(engine *e)
{
    size_t n = (size_t)e->m->n_params;
    e->unit = calloc((size_t)e->m->n_units, sizeof *e->unit);
    e->piece = calloc((size_t)e->l.n_pieces, sizeof *e->piece);
    e->visit = calloc((size_t)e->l.n_visits, sizeof *e->visit);
    e->plane = calloc(n, sizeof *e->plane);
    e->narrow = calloc(n, sizeof *e->narrow);
    e->contributors = calloc(n, sizeof *e->contributors);
    e->block_base = calloc(n, sizeof *e->block_base);
    e->pack_offset = calloc((size_t)e->l.n_slots, sizeof *e->pack_offset);
    e->landed = calloc(n, sizeof *e->landed);
    e->positions = calloc((size_t)e->l.tokens, sizeof *e->positions);
    e->complete = calloc(n, sizeof *e->complete);
    e->time.event = malloc((size_t)e->l.n_events * sizeof *e->time.event);
    if (!e->unit || !e->piece || !e->visit || !e->plane || !e->narrow || !e->contributors ||
        !e->block_base || !e->pack_offset || !e->landed || !e->positions || !e->complete ||
        !e->time.event)
        return status_nomem("the engine's tables", n * sizeof *e->plane);
    /* Touched now, so that no step makes the process grow. */
    memset(e->time.event, 0xff, (size_t)e->l.n_events * sizeof *e->time.event);
    e->time.ns = e->region[LAYOUT_TIMELINE];
    memset(e->time.ns, 0, (size_t)e->l.n_events * 16);
    e->time.n_events = e->l.n_events;
    e->time.detailed = e->trace_path != NULL;
    e->loss_host = e->region[LAYOUT_HOST_LOSS];
    if (e->training) {
        e->sums_dev = e->region[LAYOUT_REDUCTIONS];
        e->sum_scratch = (char *)e->region[LAYOUT_REDUCTIONS] + layout_align(e->l.n_sums * 8);
        e->sums_host = e->region[LAYOUT_HOST_REDUCTIONS];
        e->blocks =
            (double *)((char *)e->region[LAYOUT_HOST_REDUCTIONS] + layout_align(e->l.n_sums * 8));
    }
    return MT_OK;
}

static mt_status create_queues(engine *e)
{
    mt_status st = e->b->queue_create(e->dev, "compute", &e->q_compute);
    if (st < 0) {
        e->q_compute = NULL;
        return st;
    }
    if (e->serial) {
        e->q_in = e->q_out = e->q_compute;
        return MT_OK;
    }
    st = e->b->queue_create(e->dev, "copy-in", &e->q_in);
    if (st < 0) {
        e->q_in = NULL;
        return st;
    }
    st = e->b->queue_create(e->dev, "copy-out", &e->q_out);
    if (st < 0)
        e->q_out = NULL;
    return st;
}

mt_status engine_create(const engine_config *config, engine **ret)
{
    mt_status st = check_config(config);
    if (st < 0)
        return st;
    engine *e = calloc(1, sizeof *e);
    if (!e)
        return status_nomem("the engine", sizeof *e);
    e->p = config->plan;
    e->m = config->plan->m;
    e->s = config->store;
    e->b = config->backend;
    e->dev = config->device;
    e->optim = config->optim;
    e->optim_state = config->optim_state;
    e->rules = config->rules;
    e->router_bias_rate = config->router_bias_rate;
    e->trace_path = config->trace_path;
    e->serial = config->serial;
    e->training = config->plan->request.training;
    e->chaos = config->chaos;
    e->rng = config->chaos;
    e->lander_rng = config->chaos + 1;
    e->esize = mt_dtype_size(e->p->request.compute);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    pthread_cond_init(&e->progress, NULL);
    pthread_mutex_init(&e->time.lock, NULL);
    pthread_mutex_init(&e->pool.lock, NULL);
    pthread_cond_init(&e->pool.wake, NULL);
    pthread_cond_init(&e->pool.done, NULL);
    layout_make(e->p, e->b, e->dev, &e->l);

    st = alloc_regions(e);
    if (st == MT_OK)
        st = create_tables(e);
    if (st == MT_OK)
        st = place_params(e, e->training ? e->optim->granularity : MT_GRAIN_ELEMENT);
    if (st == MT_OK)
        st = create_queues(e);
    if (st == MT_OK)
        st = stream_start(e);
    if (st == MT_OK)
        st = pass_start(e);
    if (st == MT_OK)
        st = experts_start(e);
    if (st == MT_OK)
        st = pool_start(e, config->bind_workers);
    if (st == MT_OK)
        st = lander_start(e);
    if (st < 0) {
        e->trace_path = NULL;
        engine_destroy(e);
        return st;
    }
    *ret = e;
    return MT_OK;
}

void engine_destroy(engine *e)
{
    if (!e)
        return;
    lander_stop(e);
    pool_stop(e);
    if (e->q_in)
        e->b->queue_sync(e->dev, e->q_in);
    if (e->q_compute)
        e->b->queue_sync(e->dev, e->q_compute);
    if (e->q_out)
        e->b->queue_sync(e->dev, e->q_out);
    if (e->trace_path && trace_write(e) < 0)
        log_write(MT_LOG_WARNING, "%s", status_text());
    experts_stop(e);
    pass_stop(e);
    stream_stop(e);
    if (e->q_in && e->q_in != e->q_compute)
        e->b->queue_destroy(e->dev, e->q_in);
    if (e->q_out && e->q_out != e->q_compute)
        e->b->queue_destroy(e->dev, e->q_out);
    if (e->q_compute)
        e->b->queue_destroy(e->dev, e->q_compute);
    for (int r = 0; r < LAYOUT_REGIONS; r++) {
        if (!e->region[r])
            continue;
        if (layout_region_tier((layout_region)r) == PLAN_DEVICE)
            e->b->device_free(e->dev, e->region[r], e->l.bytes[r]);
        else
            e->b->host_free(e->dev, e->region[r], e->l.bytes[r]);
    }
    free(e->unit);
    free(e->piece);
    free(e->visit);
    free(e->plane);
    free(e->narrow);
    free(e->contributors);
    free(e->block_base);
    free(e->pack_offset);
    free(e->landed);
    free(e->positions);
    free(e->complete);
    free(e->time.event);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->progress);
    pthread_mutex_destroy(&e->time.lock);
    pthread_mutex_destroy(&e->pool.lock);
    pthread_cond_destroy(&e->pool.wake);
    pthread_cond_destroy(&e->pool.done);
    free(e);
}

void engine_bytes(const engine *e, int64_t ret_bytes[PLAN_TIERS])
{
    memset(ret_bytes, 0, PLAN_TIERS * sizeof *ret_bytes);
    for (int r = 0; r < LAYOUT_REGIONS; r++)
        if (e->region[r])
            ret_bytes[layout_region_tier((layout_region)r)] += e->l.bytes[r];
    ret_bytes[PLAN_HOST] += e->s->region_bytes;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static mt_status check_batch(const engine *e, const step_batch *batch, bool whole_step)
{
    const plan_request *r = &e->p->request;
    if (batch->n < 1)
        return status_set(MT_ERR_INVALID, "a batch without micro-batches");
    if (whole_step && batch->n > r->micro_batches)
        return status_set(MT_ERR_INVALID,
                          "a step of %lld micro-batches; the plan has room for %lld",
                          (long long)batch->n, (long long)r->micro_batches);
    int64_t targets = 0;
    for (int64_t b = 0; b < batch->n; b++) {
        const micro_batch *mb = &batch->micro[b];
        if (mb->tokens < 1 || mb->tokens > e->l.tokens)
            return status_set(MT_ERR_INVALID,
                              "micro-batch %lld has %lld tokens; the plan has room for 1 to %lld",
                              (long long)b, (long long)mb->tokens, (long long)e->l.tokens);
        if (mb->documents < 1 || mb->documents > e->l.documents)
            return status_set(
                MT_ERR_INVALID,
                "micro-batch %lld has %lld documents; the plan has room for 1 to %lld",
                (long long)b, (long long)mb->documents, (long long)e->l.documents);
        if (mb->doc_starts[0] != 0 || mb->doc_starts[mb->documents] != mb->tokens)
            return status_set(MT_ERR_INVALID,
                              "micro-batch %lld: documents cover tokens %d to %d of %lld",
                              (long long)b, mb->doc_starts[0], mb->doc_starts[mb->documents],
                              (long long)mb->tokens);
        for (int64_t t = 0; t < mb->tokens; t++) {
            if (mb->ids[t] < 0 || mb->ids[t] >= e->m->vocab)
                return status_set(
                    MT_ERR_INVALID,
                    "micro-batch %lld, token %lld: id %d is not below the vocabulary's "
                    "%lld",
                    (long long)b, (long long)t, mb->ids[t], (long long)e->m->vocab);
            if (mb->targets[t] != -100 && (mb->targets[t] < 0 || mb->targets[t] >= e->m->vocab))
                return status_set(
                    MT_ERR_INVALID,
                    "micro-batch %lld, token %lld: target %d is neither -100 nor below "
                    "the vocabulary's %lld",
                    (long long)b, (long long)t, mb->targets[t], (long long)e->m->vocab);
            targets += mb->targets[t] != -100;
        }
    }
    if (targets != batch->n_targets)
        return status_set(MT_ERR_INVALID, "a batch says it has %lld targets, but holds %lld",
                          (long long)batch->n_targets, (long long)targets);
    if (targets == 0)
        return status_set(MT_ERR_INVALID, "a batch without any target");
    return MT_OK;
}

mt_status engine_alive(engine *e)
{
    mt_status st = e->b->error(e->dev);
    return st < 0 ? st : pool_error(e);
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Forward and backward; returns when every gradient is where it belongs. */
static void run_step(engine *e, const step_batch *batch, bool update,
                     const engine_step_params *params)
{
    bool clip = e->p->request.max_grad_norm > 0;
    e->traffic.first_event = e->traffic.end_event;
    e->step = (step_state){ .batch = batch,
                            .update = update,
                            .immediate = update && !clip,
                            .loss_scale = 1.0 / (double)batch->n_targets,
                            .bad_unit = -1 };
    if (update)
        e->step.params = (update_params){ params->step, params->lr, 1.0 };
    parking_open(e);
    pass_train(e);
    lander_wait(e, e->landings_given);
    e->b->event_sync(e->dev, e->set[lander_last_set(e)].done);
    experts_count(e, batch->n);
    int64_t left = parking_close(e);
    /* What leaves from now on, and updates, are on the timeline the next step's. */
    e->traffic.end_event = atomic_load(&e->time.next);
    parking_clear(e, left);
    e->step.landed = time_now();
    step_sum_loss(e);
}

/* Sum of the squares of what slot k of unit u got on the device, part by part: the same whatever
 * segments they came in. */
static double slot_squares(const engine *e, int32_t u, int32_t k)
{
    const tpl_plan *t = e->p->tpl[u];
    const double *sums = e->sums_host + e->unit[u].sum_base;
    double sum = 0;
    for (int32_t i = 0; i < t->n_segments; i++)
        for (int32_t j = 0; j < t->segment[i].n_slices; j++) {
            const tpl_slice *slice = &t->segment[i].slice[j];
            for (int32_t part = 0; part < slice->parts && slice->slot == k; part++)
                sum += sums[slice->sum + part];
        }
    return sum;
}

/* The global L2 norm, in double: parameters with one contribution were summed on the device, the
 * others are summed where their contributions were added up. */
static double grad_norm(engine *e)
{
    const model *m = e->m;
    pool_wait_idle(e); /* contributions are being added */
    for (int32_t i = 0; i < m->n_params; i++)
        if (e->landed[i] > 1)
            pool_submit(e, &(work){ .kind = WORK_SUM_SQUARES,
                                    .param = i,
                                    .end = m->params[i].elems,
                                    .slice = layout_slice(&m->params[i], e->l.slab_elems) });
    pool_wait_idle(e);
    double sum = 0;
    for (int32_t u = 0; u < m->n_units; u++)
        for (uint32_t k = 0; k < m->units[u].t->n_params; k++) {
            int32_t i = m->units[u].slot[k];
            const model_param *p = &m->params[i];
            if (e->landed[i] == 1) {
                sum += slot_squares(e, u, (int32_t)k);
            } else if (e->landed[i] > 1 && p->unit == u &&
                       !(m->units[u].t->params[k].info.flags & MT_PARAM_ALIAS)) {
                int64_t slice = layout_slice(p, e->l.slab_elems);
                for (int64_t b = 0; b * slice < p->elems; b++)
                    sum += e->blocks[e->block_base[i] + b];
            }
        }
    return sqrt(sum);
}

/* Starts every update, in the order in which the next forward needs them. */
static void start_updates(engine *e)
{
    for (int32_t u = 0; u < e->m->n_units; u++)
        for (int32_t i = 0; i < e->m->n_params; i++) {
            const model_param *p = &e->m->params[i];
            if (p->unit != u || (p->flags & MT_PARAM_FROZEN))
                continue;
            if (stays_for_norm(e, i))
                pool_announce(e, i, p->elems);
            else
                pool_submit(e, &(work){ .kind = WORK_UPDATE_PLANE,
                                        .param = i,
                                        .end = p->elems,
                                        .slice = layout_slice(p, e->l.slab_elems),
                                        .update = e->step.params });
        }
    if (e->p->held)
        lander_release(e);
}

mt_status engine_step(engine *e, const step_batch *batch, const engine_step_params *params,
                      engine_result *ret)
{
    uint64_t from = time_now();
    bool clip = e->p->request.max_grad_norm > 0;
    if (!e->training)
        return status_set(MT_ERR_INVALID, "the plan is not one for training");
    if ((params->max_grad_norm > 0) != clip)
        return status_set(MT_ERR_INVALID, "max_grad_norm is %g, but the plan was made for %g",
                          params->max_grad_norm, e->p->request.max_grad_norm);
    mt_status st = engine_alive(e);
    if (st == MT_OK)
        st = check_batch(e, batch, true);
    if (st < 0)
        return st;

    run_step(e, batch, true, params);
    engine_result r = { .loss_sum = e->step.loss_sum,
                        .aux_loss_sum = e->step.aux_loss_sum,
                        .n_targets = batch->n_targets,
                        .grad_norm = NAN,
                        .router_violation = experts_violation(e) };
    r.updated = isfinite(r.loss_sum) && isfinite(r.aux_loss_sum);
    if (clip) {
        r.grad_norm = grad_norm(e);
        r.updated = r.updated && isfinite(r.grad_norm);
        e->step.params.grad_scale = fmin(1.0, params->max_grad_norm / (r.grad_norm + 1e-6));
    }
    st = engine_alive(e);
    if (st < 0)
        return st;
    e->s->version++;
    if (e->step.bad_unit >= 0)
        return status_set(MT_ERR_NUMERIC,
                          "step %lld: the gradient of unit '%s' is not finite, and others are "
                          "already updated (max_grad_norm is 0): resume from a checkpoint",
                          (long long)params->step, e->m->units[e->step.bad_unit].name);
    if (clip && r.updated)
        start_updates(e);
    if (r.updated)
        experts_balance(e);
    if (e->serial)
        pool_wait_idle(e);
    uint64_t to = time_now();
    time_account(e, from, to, &r);
    r.seconds = (double)(to - from) * 1e-9;
    *ret = r;
    return MT_OK;
}

mt_status engine_drain(engine *e)
{
    lander_wait(e, e->landings_given);
    pool_wait_idle(e);
    return engine_alive(e);
}

mt_status engine_eval(engine *e, const step_batch *batch, double *ret_loss_sum)
{
    mt_status st = engine_alive(e);
    if (st == MT_OK)
        st = check_batch(e, batch, false);
    if (st < 0)
        return st;
    double sum = pass_eval(e, batch);
    st = engine_alive(e);
    if (st == MT_OK)
        *ret_loss_sum = sum;
    return st;
}

mt_status engine_gradients(engine *e, const step_batch *batch, double *ret_loss_sum,
                           double *ret_aux_loss_sum, float *const *ret_grads)
{
    if (!e->training || (!e->l.grad_plane && !e->l.narrow_plane && !e->p->held))
        return status_set(MT_ERR_INVALID,
                          "gradients are read where they wait for their norm, which "
                          "they do not in this plan (max_grad_norm: 0)");
    mt_status st = engine_alive(e);
    if (st == MT_OK)
        st = check_batch(e, batch, true);
    if (st < 0)
        return st;
    run_step(e, batch, false, NULL);
    pool_wait_idle(e);
    st = engine_alive(e);
    if (st < 0)
        return st;
    for (int32_t i = 0; i < e->m->n_params; i++) {
        size_t bytes = (size_t)e->m->params[i].elems * sizeof(float);
        if (e->plane[i])
            memcpy(ret_grads[i], e->plane[i], bytes);
        else if (e->narrow[i])
            slice_widen(e, ret_grads[i], e->narrow[i], e->m->params[i].elems, false);
        else
            memset(ret_grads[i], 0, bytes);
    }
    if (e->p->held)
        lander_read(e, ret_grads);
    *ret_loss_sum = e->step.loss_sum;
    if (ret_aux_loss_sum)
        *ret_aux_loss_sum = e->step.aux_loss_sum;
    return MT_OK;
}
