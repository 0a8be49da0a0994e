/* SPDX-License-Identifier: Apache-2.0
 *
 * The lander: takes the gradients of units off the device, in slices, and hands them on. With a
 * gradient plane the first contribution of a step is copied there and later ones are added in
 * order; without one, slices go by slab straight to the optimizer. Alone feeds the copy-out queue.
 */
#include "internal.h"

#include "../base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- may this step update? -------------------------------------------------------------------
 */

/* The sum of all token losses, in token order. Called where nobody else can be in here. */
void step_sum_loss(engine *e)
{
    step_state *s = &e->step;
    if (s->loss_known)
        return;
    e->b->event_sync(e->dev, e->loss_ready);
    double sum = 0;
    for (int64_t b = 0; b < s->batch->n; b++) {
        const float *loss = e->loss_host + b * e->l.tokens;
        for (int64_t t = 0; t < s->batch->micro[b].tokens; t++)
            sum += (double)loss[t];
    }
    s->loss_sum = sum;
    s->loss_known = true;
    if (!isfinite(sum))
        s->discard = true;
}

/* With immediate updates: is the loss finite, and this unit's gradient? Its sums of squares were
 * copied out on the compute queue before the gradients were called ready. */
static void check_unit(engine *e, int32_t unit)
{
    step_sum_loss(e);
    if (e->step.discard)
        return;
    const model_unit *u = &e->m->units[unit];
    for (uint32_t k = 0; k < u->t->n_params; k++) {
        bool frozen = e->m->params[u->slot[k]].flags & MT_PARAM_FROZEN;
        if (!frozen && !isfinite(e->sums_host[e->unit[unit].slot_base + k])) {
            e->step.bad_unit = unit;
            e->step.discard = true;
        }
    }
}

/* ---- slices in flight ------------------------------------------------------------------------
 */

static void hand_over(engine *e, work w)
{
    if (e->step.discard && (w.kind == WORK_UPDATE_SLAB || w.kind == WORK_UPDATE_ROWS)) {
        pool_release_slab(e, w.slab);
        return;
    }
    if (e->step.discard)
        w.then_update = false;
    chaos_sleep(e, &e->lander_rng);
    pool_submit(e, &w);
}

/* Waits for the oldest slice and hands it to the workers. */
static void land_oldest(engine *e)
{
    int64_t i = e->flight_head++ % LAYOUT_SLABS;
    e->b->event_sync(e->dev, e->slab_event[i]);
    hand_over(e, e->flight[i]);
}

static float *get_slab(engine *e)
{
    float *slab = pool_try_slab(e);
    while (!slab && e->flight_head < e->flight_tail) {
        land_oldest(e);
        slab = pool_try_slab(e);
    }
    return slab ? slab : pool_wait_slab(e);
}

static void copy_slice(engine *e, const work *w, const float *src, int64_t n)
{
    int64_t i = e->flight_tail++ % LAYOUT_SLABS;
    chaos_delay(e, e->q_out, &e->lander_rng);
    e->traffic.out_bytes += n * 4;
    e->b->copy_out(e->dev, e->q_out, w->slab, src, n * 4);
    enqueued(e, e->q_out);
    e->b->event_record(e->dev, e->slab_event[i], e->q_out);
    e->flight[i] = *w;
}

/* ---- one landing -----------------------------------------------------------------------------
 */

typedef struct contribution {
    int32_t param;
    bool first;  /* of this step */
    bool update; /* the last one of this step, and updates are immediate */
} contribution;

static void land_dense(engine *e, const contribution *c, const float *src)
{
    const model_param *p = &e->m->params[c->param];
    float *plane = e->plane[c->param];
    work w = { .kind = plane ? WORK_ADD : WORK_UPDATE_SLAB,
               .param = c->param,
               .then_update = plane && c->update,
               .update = e->step.params };
    w.slice = layout_slice(p, e->l.slab_elems);
    if (plane && c->first) {
        chaos_delay(e, e->q_out, &e->lander_rng);
        e->traffic.out_bytes += p->elems * 4;
        e->b->copy_out(e->dev, e->q_out, plane, src, p->elems * 4);
        enqueued(e, e->q_out);
        if (c->update)
            e->complete[e->n_complete++] = c->param;
        return;
    }
    if (!plane && !e->step.update)
        return;
    /* Contributions are added in the order in which they were formed. */
    if (plane)
        pool_wait_param(e, c->param);
    int64_t slice = w.slice;
    for (int64_t first = 0; first < p->elems; first += slice) {
        w.first = first;
        w.end = first + slice < p->elems ? first + slice : p->elems;
        w.slice = w.end - w.first;
        w.slab = get_slab(e);
        copy_slice(e, &w, src + first, w.end - first);
    }
}

/* A table's gradient: the packed rows come out, and go where they belong in the dense gradient. */
static void land_rows(engine *e, const contribution *c, const float *src, int32_t set, void *landed)
{
    const model_param *p = &e->m->params[c->param];
    /* Earlier rows may still be read from the packed gradients, or be added to the plane. Slices in
     * flight come first so that contributions keep their order. */
    while (e->flight_head < e->flight_tail)
        land_oldest(e);
    if (e->packed_param >= 0)
        pool_wait_param(e, e->packed_param);
    pool_wait_param(e, c->param);
    e->packed_param = c->param;
    chaos_delay(e, e->q_out, &e->lander_rng);
    e->traffic.out_bytes += e->set[set].n_rows * p->cols * 4;
    e->b->copy_out(e->dev, e->q_out, e->packed_grads, src, e->set[set].n_rows * p->cols * 4);
    enqueued(e, e->q_out);
    e->b->event_record(e->dev, landed, e->q_out);
    e->b->event_sync(e->dev, landed);

    work w = { .kind = WORK_SCATTER,
               .param = c->param,
               .end = p->elems,
               .slice = layout_slice(p, e->l.slab_elems),
               .set = set,
               .zero_first = c->first,
               .then_update = c->update,
               .update = e->step.params };
    if (e->plane[c->param]) {
        hand_over(e, w);
        return;
    }
    if (!e->step.update || e->step.discard)
        return;
    w.kind = WORK_UPDATE_ROWS;
    w.then_update = false;
    int64_t slice = w.slice;
    for (int64_t first = 0; first < p->elems; first += slice) {
        w.first = first;
        w.end = first + slice < p->elems ? first + slice : p->elems;
        w.slice = w.end - w.first;
        w.slab = get_slab(e);
        hand_over(e, w);
    }
}

static void land(engine *e, const landing *l, int64_t number)
{
    const model_unit *u = &e->m->units[l->unit];
    const tpl_plan *t = e->p->tpl[l->unit];
    grad_buffer *g = &e->grads[l->buffer];
    bool immediate = e->step.immediate && l->last_group;

    chaos_delay(e, e->q_out, &e->lander_rng);
    e->b->event_wait(e->dev, e->q_out, g->ready);
    g->copy_out = time_begin(e, e->q_out, TRACK_OUT, EVENT_COPY_OUT, l->unit, -1);
    if (immediate) {
        /* Nothing may be handed to the optimizer before both are known to be finite. */
        e->b->event_sync(e->dev, g->ready);
        check_unit(e, l->unit);
    }
    for (uint32_t k = 0; k < u->t->n_params; k++) {
        int32_t param = u->slot[k];
        if (e->m->params[param].flags & MT_PARAM_FROZEN)
            continue;
        int64_t count = ++e->landed[param];
        contribution c = { .param = param,
                           .first = count == 1,
                           .update = e->step.immediate &&
                                     count == e->contributors[param] * e->step.seq.n_groups };
        const float *src = (const float *)g->data + t->slot_offset[k];
        if (u->t->params[k].gathered)
            land_rows(e, &c, src, l->set, g->free);
        else
            land_dense(e, &c, src);
    }
    time_end(e, e->q_out, g->copy_out);
    chaos_poison(e, e->q_out, g->data, e->l.grad_stride);
    e->b->event_record(e->dev, g->free, e->q_out);

    pthread_mutex_lock(&e->lock);
    e->landings_enqueued = number;
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);

    while (e->flight_head < e->flight_tail)
        land_oldest(e);
    e->b->event_sync(e->dev, g->free);
    for (int32_t i = 0; i < e->n_complete; i++) {
        const model_param *p = &e->m->params[e->complete[i]];
        if (!e->step.discard)
            pool_submit(e, &(work){ .kind = WORK_UPDATE_PLANE,
                                    .param = e->complete[i],
                                    .end = p->elems,
                                    .slice = layout_slice(p, e->l.slab_elems),
                                    .update = e->step.params });
    }
    e->n_complete = 0;

    pthread_mutex_lock(&e->lock);
    e->landings_done = number;
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);
}

/* ---- the thread ------------------------------------------------------------------------------
 */

static void *lander_main(void *arg)
{
    engine *e = arg;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        while (e->landings_done == e->landings_given && !e->stop)
            pthread_cond_wait(&e->wake, &e->lock);
        if (e->landings_done == e->landings_given)
            break;
        int64_t number = e->landings_done + 1;
        landing l = e->landing[number % LANDINGS];
        pthread_mutex_unlock(&e->lock);
        land(e, &l, number);
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

mt_status lander_start(engine *e)
{
    if (!e->training)
        return MT_OK;
    mt_status st = e->b->event_create(e->dev, &e->loss_ready);
    for (int i = 0; i < LAYOUT_SLABS && st == MT_OK; i++)
        st = e->b->event_create(e->dev, &e->slab_event[i]);
    for (int i = 0; i < LAYOUT_GRAD_BUFFERS && st == MT_OK; i++) {
        grad_buffer *g = &e->grads[i];
        g->data = (char *)e->region[LAYOUT_GRADS] + i * e->l.grad_stride;
        g->copy_out = -1;
        st = e->b->event_create(e->dev, &g->ready);
        if (st == MT_OK)
            st = e->b->event_create(e->dev, &g->free);
    }
    if (st < 0 || e->serial)
        return st;
    int err = pthread_create(&e->lander, NULL, lander_main, e);
    if (err)
        return status_set(MT_ERR_NOMEM, "cannot start the copy-out thread: %s", strerror(err));
    e->lander_started = true;
    return MT_OK;
}

void lander_stop(engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->stop = true;
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
    if (e->lander_started)
        pthread_join(e->lander, NULL);
    if (e->loss_ready)
        e->b->event_destroy(e->dev, e->loss_ready);
    for (int i = 0; i < LAYOUT_SLABS; i++)
        if (e->slab_event[i])
            e->b->event_destroy(e->dev, e->slab_event[i]);
    for (int i = 0; i < LAYOUT_GRAD_BUFFERS; i++) {
        if (e->grads[i].ready)
            e->b->event_destroy(e->dev, e->grads[i].ready);
        if (e->grads[i].free)
            e->b->event_destroy(e->dev, e->grads[i].free);
    }
}

/* ---- the main thread's side ------------------------------------------------------------------
 */

/* The next gradient buffer; compute has been told to wait until its former contents are out. */
grad_buffer *lander_acquire(engine *e, int32_t *ret_index)
{
    int32_t i = (int32_t)(e->next_grad++ % LAYOUT_GRAD_BUFFERS);
    grad_buffer *g = &e->grads[i];
    pthread_mutex_lock(&e->lock);
    /* A wait means the record before it, so `free` must have been recorded. */
    while (e->landings_enqueued < g->landing)
        pthread_cond_wait(&e->progress, &e->lock);
    pthread_mutex_unlock(&e->lock);
    e->b->event_wait(e->dev, e->q_compute, g->free);
    *ret_index = i;
    return g;
}

void lander_submit(engine *e, const landing *l)
{
    int64_t number = e->landings_given + 1;
    e->grads[l->buffer].landing = number;
    if (e->unit[l->unit].gathers)
        e->set[l->set].landing = number;
    e->b->event_record(e->dev, e->grads[l->buffer].ready, e->q_compute);
    if (e->serial) {
        e->landings_given = number;
        land(e, l, number);
        return;
    }
    pthread_mutex_lock(&e->lock);
    while (e->landings_given - e->landings_done >= LANDINGS - 1)
        pthread_cond_wait(&e->progress, &e->lock);
    e->landing[number % LANDINGS] = *l;
    e->landings_given = number;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void lander_wait(engine *e, int64_t number)
{
    pthread_mutex_lock(&e->lock);
    while (e->landings_done < number)
        pthread_cond_wait(&e->progress, &e->lock);
    pthread_mutex_unlock(&e->lock);
}
