/* SPDX-License-Identifier: Apache-2.0
 *
 * The lander: takes the gradients of pieces off the device, in slices, and hands them on. With a
 * gradient plane the first contribution of a step is copied there and later ones are added in
 * order; without one, slices go by slab straight to the optimizer: during backward, beside the next
 * forward what there was no time for (parking.c), or, where they are held for their norm, once that
 * is known. Alone feeds the copy-out queue.
 *
 * Gradients leave as FP32 or as BF16. What is added up on the host is FP32 always.
 */
#include "internal.h"

#include "../base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- may this step update? ------------------------------------------------------------------- */

/* The sum of what units add to the loss, in the order of the micro-batches in each. */
static double sum_aux_losses(const engine *e)
{
    double sum = 0;
    for (int32_t u = 0; u < e->m->n_units; u++)
        for (int64_t b = 0; e->unit[u].aux_loss && b < e->step.batch->n; b++)
            sum += (double)e->unit[u].aux_loss[b];
    return sum;
}

/* The sum of all token losses, in token order, and that of the losses beside them. Called where
 * nobody else can be in here. */
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
    s->aux_loss_sum = sum_aux_losses(e);
    s->loss_known = true;
    if (!isfinite(sum) || !isfinite(s->aux_loss_sum))
        s->discard = true;
}

/* Its sums of squares were copied out on the compute queue before the gradients were called ready.
 */
void lander_check_piece(engine *e, int32_t index)
{
    step_sum_loss(e);
    if (e->step.discard)
        return;
    int32_t unit = e->piece[index].unit;
    const tpl_segment *s = piece_segment(e, index);
    const double *sums = e->sums_host + e->unit[unit].sum_base;
    for (int32_t i = 0; i < s->n_slices; i++) {
        const tpl_slice *slice = &s->slice[i];
        bool frozen = e->m->params[piece_param(e, index, slice)].flags & MT_PARAM_FROZEN;
        for (int32_t k = 0; k < slice->parts && !frozen; k++)
            if (!isfinite(sums[slice->sum + k])) {
                e->step.bad_unit = unit;
                e->step.discard = true;
            }
    }
}

/* ---- slices in flight ------------------------------------------------------------------------ */

/* Drops or disarms what may not update. An announced update may: its step is over. */
static bool may_go(engine *e, work *w)
{
    if (w->announced || !e->step.discard)
        return true;
    w->then_update = false;
    return w->kind != WORK_UPDATE_SLAB && w->kind != WORK_UPDATE_ROWS;
}

static void hand_over(engine *e, work w)
{
    if (!may_go(e, &w)) {
        if (w.slab)
            pool_release_slab(e, w.slab);
        return;
    }
    chaos_sleep(e, &e->lander_rng);
    pool_submit(e, &w);
}

/* Waits for the oldest slice and hands it to the workers. */
static void land_oldest(engine *e)
{
    int64_t i = e->flight_head++ % LAYOUT_FLIGHT;
    e->b->event_sync(e->dev, e->flight_event[i]);
    hand_over(e, e->flight[i]);
}

static void *get_slab(engine *e)
{
    void *slab = pool_try_slab(e);
    while (!slab && e->flight_head < e->flight_tail) {
        land_oldest(e);
        slab = pool_try_slab(e);
    }
    return slab ? slab : pool_wait_slab(e);
}

/* Gives w a slab, into which n gradients are copied; land_oldest hands it over later. */
static void copy_slice(engine *e, work w, const char *src, int64_t n)
{
    if (e->flight_tail - e->flight_head == LAYOUT_FLIGHT)
        land_oldest(e);
    w.slab = get_slab(e);
    int64_t i = e->flight_tail++ % LAYOUT_FLIGHT;
    chaos_delay(e, e->q_out, &e->lander_rng);
    e->traffic.out_bytes += n * e->l.grad_size;
    e->b->copy_out(e->dev, e->q_out, w.slab, src, n * e->l.grad_size);
    enqueued(e, e->q_out);
    e->b->event_record(e->dev, e->flight_event[i], e->q_out);
    e->flight[i] = w;
}

/* ---- one landing ----------------------------------------------------------------------------- */

/* Contributions are added in the order in which they were formed: earlier ones come first. */
static void finish_earlier(engine *e, const contribution *c)
{
    if (c->again) {
        while (e->flight_head < e->flight_tail)
            land_oldest(e);
        e->b->event_record(e->dev, e->flight_event[0], e->q_out);
        e->b->event_sync(e->dev, e->flight_event[0]);
    }
    pool_wait_param(e, c->param);
}

/* Are elements first .. end-1 of a stack those of experts without rows? Their gradient is zero. */
static bool is_idle(const engine *e, const landing *l, int32_t slot, int64_t first, int64_t end)
{
    int32_t unit = e->piece[l->piece].unit;
    const tpl_param *p = &e->m->units[unit].t->params[slot];
    if (p->parts == 1)
        return false;
    int64_t each = p->elems / p->info.stack;
    int32_t from = (int32_t)(first / each), to = (int32_t)((end + each - 1) / each);
    return l->held ? experts_unused(e, unit, from, to) : experts_idle(e, unit, from, to, l->range);
}

/* Steps of the contribution from its beginning on that are all idle, or all not: its first part. */
static contribution first_part(const engine *e, const landing *l, int32_t slot,
                               const contribution *c, int64_t step, bool *ret_idle)
{
    contribution part = *c;
    for (part.end = c->begin; part.end < c->end;) {
        int64_t end = c->end - part.end < step ? c->end : part.end + step;
        bool idle = is_idle(e, l, slot, part.end, end);
        if (part.end == c->begin)
            *ret_idle = idle;
        else if (idle != *ret_idle)
            break;
        part.end = end;
    }
    return part;
}

static work work_on(const engine *e, const contribution *c, work_kind kind)
{
    return (work){ .kind = kind,
                   .param = c->param,
                   .first = c->begin,
                   .end = c->end,
                   .slice = layout_slice(&e->m->params[c->param], e->l.slab_elems),
                   .first_share = c->first,
                   .then_update = e->plane[c->param] && c->update,
                   .announced = c->held,
                   .update = c->params };
}

/* Straight to where gradients wait; `to` is the parameter's first element there. */
static void land_whole(engine *e, const landing *l, int32_t slot, contribution c, const char *src,
                       char *to)
{
    int64_t size = e->l.grad_size, stack = e->m->params[c.param].info->stack;
    int64_t expert = stack ? e->m->params[c.param].elems / stack : c.end - c.begin;
    if (c.update)
        e->complete[e->n_complete++] = c;
    c.update = false; /* the whole of it, when it is complete */
    while (c.begin < c.end) {
        bool idle = false;
        contribution part = first_part(e, l, slot, &c, expert, &idle);
        int64_t bytes = (part.end - part.begin) * size;
        if (idle) {
            hand_over(e, work_on(e, &part, WORK_ADD));
        } else {
            chaos_delay(e, e->q_out, &e->lander_rng);
            e->traffic.out_bytes += bytes;
            e->b->copy_out(e->dev, e->q_out, to + part.begin * size, src, bytes);
            enqueued(e, e->q_out);
        }
        src += bytes;
        c.begin = part.end;
    }
}

/* By slabs, in the optimizer's slices. */
static void land_slices(engine *e, const landing *l, int32_t slot, contribution c, const char *src)
{
    work_kind kind = e->plane[c.param] ? WORK_ADD : WORK_UPDATE_SLAB;
    int64_t slice = work_on(e, &c, kind).slice;
    while (c.begin < c.end) {
        bool idle = false;
        contribution part = first_part(e, l, slot, &c, slice, &idle);
        if (idle)
            hand_over(e, work_on(e, &part, kind));
        for (contribution one = part; one.begin < part.end && !idle; one.begin = one.end) {
            one.end = part.end - one.begin < slice ? part.end : one.begin + slice;
            copy_slice(e, work_on(e, &one, kind), src + (one.begin - c.begin) * e->l.grad_size,
                       one.end - one.begin);
        }
        src += (part.end - part.begin) * e->l.grad_size;
        c.begin = part.end;
    }
}

static void land_dense(engine *e, const landing *l, int32_t slot, const contribution *c,
                       const char *src)
{
    float *plane = e->plane[c->param];
    void *whole = e->narrow[c->param];
    if (plane && c->first && e->l.grad_size == 4)
        whole = plane;
    if (!whole && !c->first)
        finish_earlier(e, c);
    if (whole)
        land_whole(e, l, slot, *c, src, whole);
    else
        land_slices(e, l, slot, *c, src);
}

/* A table's gradient: packed rows come out, by slabs, each with the part of the table that begins
 * with its first row, and go where they belong in the dense gradient. An update by an earlier
 * step's must be through. */
static void land_rows(engine *e, const landing *l, const contribution *c, const char *src)
{
    const model_param *p = &e->m->params[c->param];
    const group_set *s = &e->set[l->set];
    bool plane = e->plane[c->param] || e->narrow[c->param];
    if (!c->first)
        finish_earlier(e, c);
    else if (!c->held) /* held ones are announced, and the earlier step's were waited for */
        pool_wait_param(e, c->param);
    int64_t most = e->l.slab_elems / p->cols;
    for (int64_t row = 0; row < s->n_grad_rows; row += most) {
        int64_t n = s->n_grad_rows - row < most ? s->n_grad_rows - row : most;
        work w = work_on(e, c, plane ? WORK_SCATTER : WORK_UPDATE_ROWS);
        w.first = row ? s->grad_rows[row] * p->cols : 0;
        w.end = row + n < s->n_grad_rows ? s->grad_rows[row + n] * p->cols : p->elems;
        w.set = l->set;
        w.first_row = row;
        copy_slice(e, w, src + row * p->cols * e->l.grad_size, n * p->cols);
    }
}

static bool used_before(const engine *e, int32_t piece, int32_t slice)
{
    const tpl_segment *s = piece_segment(e, piece);
    for (int32_t k = 0; k < slice; k++)
        if (piece_param(e, piece, &s->slice[k]) == piece_param(e, piece, &s->slice[slice]))
            return true;
    return false;
}

/* Contributions of this step to the slice's parameter, this one included. Where they are added up
 * segments of a unit land one after the other, the last one first, and each brings its share of the
 * same contribution. */
static int32_t count_contribution(engine *e, int32_t piece, int32_t param)
{
    const tpl_plan *t = e->p->tpl[e->piece[piece].unit];
    int32_t segment = e->piece[piece].segment;
    if (segment == 0 || segment == t->n_segments - 1)
        e->landed[param]++;
    return e->landed[param];
}

/* What slice k of the piece contributes as its gradients are complete. */
static contribution contribute(engine *e, const landing *l, int32_t k)
{
    int64_t shares = e->p->device_sums ? 1 : e->step.seq.n_groups; /* of a slot, in a step */
    int32_t param = piece_param(e, l->piece, &piece_segment(e, l->piece)->slice[k]);
    int32_t count = count_contribution(e, l->piece, param);
    return (contribution){ .param = param,
                           .first = count == 1 || !e->plane[param], /* or the only one */
                           .again = used_before(e, l->piece, k),
                           .update = e->step.immediate && count == e->contributors[param] * shares,
                           .params = l->update };
}

/* While the next step runs nothing of e->step may be looked at: held gradients are complete, and
 * known to be finite. */
static void land_slice(engine *e, const landing *l, int32_t k)
{
    const tpl_slice *slice = &piece_segment(e, l->piece)->slice[k];
    const tpl *t = e->m->units[e->piece[l->piece].unit].t;
    int32_t param = piece_param(e, l->piece, slice);
    contribution c = { .param = param, .first = true, .held = true, .params = l->update };
    if (!l->held)
        c = contribute(e, l, k);
    if (e->p->held && stays_for_norm(e, param) != l->held)
        return;
    c.begin = slice->first;
    c.end = slice->first + slice->n;
    const char *src = (const char *)e->grads[l->buffer].data + slice->at * e->l.grad_size;
    if (t->params[slice->slot].gathered)
        land_rows(e, l, &c, src);
    else
        land_dense(e, l, slice->slot, &c, src);
}

static void land(engine *e, const landing *l)
{
    const tpl_segment *s = piece_segment(e, l->piece);
    grad_buffer *g = &e->grads[l->buffer];

    chaos_delay(e, e->q_out, &e->lander_rng);
    e->b->event_wait(e->dev, e->q_out, g->ready);
    g->copy_out = time_begin(e, e->q_out, TRACK_OUT, EVENT_COPY_OUT, e->piece[l->piece].unit, -1);
    bool immediate = !l->held && l->last_group && e->step.immediate;
    /* Where rows went is known on the host when the device has used it. */
    if (immediate || e->m->units[e->piece[l->piece].unit].t->experts > 0)
        e->b->event_sync(e->dev, g->ready);
    if (immediate) /* nothing may be updated before all is known to be finite */
        lander_check_piece(e, l->piece);
    for (int32_t k = 0; k < s->n_slices; k++)
        if (!(e->m->params[piece_param(e, l->piece, &s->slice[k])].flags & MT_PARAM_FROZEN))
            land_slice(e, l, k);
    time_end(e, e->q_out, g->copy_out);
    if (l->held || !e->p->held)
        chaos_poison(e, e->q_out, g->data, g->bytes);
    e->b->event_record(e->dev, g->free, e->q_out);

    pthread_mutex_lock(&e->lock);
    g->busy = false;
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);

    while (e->flight_head < e->flight_tail)
        land_oldest(e);
    e->b->event_sync(e->dev, g->free);
    for (int32_t i = 0; i < e->n_complete && !e->step.discard; i++) {
        work w = work_on(e, &e->complete[i], WORK_UPDATE_PLANE);
        w.then_update = false;
        pool_wait_param(e, w.param);
        pool_submit(e, &w);
    }
    e->n_complete = 0;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void land_given(engine *e)
{
    int64_t number = e->landings_done + 1;
    pthread_mutex_lock(&e->lock);
    landing l = e->landing[number % e->cap_landings];
    pthread_mutex_unlock(&e->lock);
    land(e, &l);
    pthread_mutex_lock(&e->lock);
    e->landings_done = number;
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);
}

static void land_parked(engine *e)
{
    landing l;
    if (!parking_take(e, &l))
        return;
    land(e, &l);
    pthread_mutex_lock(&e->lock);
    e->parking.taken = false;
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);
}

static bool has_parked(const engine *e)
{
    return e->parking.n > 0 && !e->parking.closed;
}

static void *lander_main(void *arg)
{
    engine *e = arg;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        bool given;
        while (!(given = e->landings_done < e->landings_given) && !has_parked(e) && !e->stop)
            pthread_cond_wait(&e->wake, &e->lock);
        if (!given && !has_parked(e))
            break;
        pthread_mutex_unlock(&e->lock);
        if (given)
            land_given(e);
        else
            land_parked(e);
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

mt_status lander_start(engine *e)
{
    if (!e->training)
        return MT_OK;
    /* As many as the main thread may be ahead; sums that stay on the device never hold it up. */
    e->cap_landings = e->l.n_grads > 7 ? e->l.n_grads + 1 : 8;
    e->landing = calloc((size_t)e->cap_landings, sizeof *e->landing);
    e->grads = calloc((size_t)e->l.n_grads, sizeof *e->grads);
    if (!e->landing || !e->grads)
        return status_nomem("the engine's tables", (size_t)e->l.n_grads * sizeof *e->grads);
    int64_t *at = calloc((size_t)e->l.n_pieces, sizeof *at);
    e->parking.landing = calloc((size_t)e->l.n_pieces, sizeof *e->parking.landing);
    if (!at || !e->parking.landing) {
        free(at);
        return status_nomem("the engine's tables", (size_t)e->l.n_pieces * sizeof *at);
    }
    for (int64_t i = 0; i < e->l.n_pieces; i++)
        at[i] = -1;
    if (e->l.parked && !e->l.leave_sums)
        layout_park(e->p, e->l.grad_size, at);
    char *data = e->region[LAYOUT_GRADS];
    mt_status st = e->b->event_create(e->dev, &e->loss_ready);
    for (int i = 0; i < LAYOUT_FLIGHT && st == MT_OK; i++)
        st = e->b->event_create(e->dev, &e->flight_event[i]);
    for (int64_t i = 0; i < e->l.n_grads && st == MT_OK; i++) {
        grad_buffer *g = &e->grads[i];
        const tpl_segment *s = e->l.own_grads ? piece_segment(e, (int32_t)i) : NULL;
        g->bytes = s ? layout_leave_bytes(s, e->l.grad_size) : e->l.grad_stride;
        g->data = e->l.leave_sums ? (char *)lander_sums(e, (int32_t)i, NULL) : data;
        data += e->l.leave_sums || (e->l.parked && at[i] >= 0) ? 0 : g->bytes;
        g->copy_out = -1;
        st = e->b->event_create(e->dev, &g->ready);
        if (st == MT_OK)
            st = e->b->event_create(e->dev, &g->free);
    }
    if (e->l.parked)
        parking_place(e, at);
    free(at);
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
    for (int i = 0; i < LAYOUT_FLIGHT; i++)
        if (e->flight_event[i])
            e->b->event_destroy(e->dev, e->flight_event[i]);
    for (int64_t i = 0; e->grads && i < e->l.n_grads; i++) {
        if (e->grads[i].ready)
            e->b->event_destroy(e->dev, e->grads[i].ready);
        if (e->grads[i].free)
            e->b->event_destroy(e->dev, e->grads[i].free);
    }
    free(e->grads);
    free(e->landing);
    free(e->parking.landing);
}

/* ---- the main thread's side ------------------------------------------------------------------ */

float *lander_sums(const engine *e, int32_t piece, const grad_buffer *g)
{
    if (e->p->device_sums)
        return (float *)((char *)e->region[LAYOUT_GRAD_SUMS] + e->piece[piece].sum_offset);
    if (e->l.grad_size == 2) /* behind the buffers that gradients leave from */
        return (float *)((char *)e->region[LAYOUT_GRADS] + e->l.leave_bytes);
    return g->data;
}

void lander_free(engine *e, const grad_buffer *g)
{
    pthread_mutex_lock(&e->lock);
    while (g->busy) /* a wait means the record before it, so `free` must have been recorded */
        pthread_cond_wait(&e->progress, &e->lock);
    pthread_mutex_unlock(&e->lock);
    e->b->event_wait(e->dev, e->q_compute, g->free);
}

/* The buffer that the piece's gradients will leave from; compute has been told to wait until its
 * former contents are out. */
grad_buffer *lander_acquire(engine *e, int32_t piece, int32_t *ret_index)
{
    int32_t i = e->l.own_grads ? piece : (int32_t)(e->next_grad++ % e->l.n_grads);
    grad_buffer *g = &e->grads[i];
    lander_free(e, g);
    *ret_index = i;
    return g;
}

void lander_give(engine *e, const landing *l)
{
    int64_t number = e->landings_given + 1;
    if (e->unit[e->piece[l->piece].unit].gathers)
        e->set[l->set].landing = number;
    if (e->serial) {
        land(e, l);
        e->landings_given = e->landings_done = number;
        return;
    }
    pthread_mutex_lock(&e->lock);
    while (e->landings_given - e->landings_done >= e->cap_landings - 1)
        pthread_cond_wait(&e->progress, &e->lock);
    e->grads[l->buffer].busy = true;
    e->landing[number % e->cap_landings] = *l;
    e->landings_given = number;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void lander_submit(engine *e, const landing *l)
{
    e->b->event_record(e->dev, e->grads[l->buffer].ready, e->q_compute);
    if (parking_takes(e, l->piece))
        parking_add(e, l);
    else
        lander_give(e, l);
}

static bool any_stays(const engine *e, int32_t piece)
{
    const tpl_segment *s = piece_segment(e, piece);
    for (int32_t k = 0; k < s->n_slices; k++)
        if (stays_for_norm(e, piece_param(e, piece, &s->slice[k])))
            return true;
    return false;
}

int32_t lander_last_set(const engine *e)
{
    const sequence *s = &e->step.seq;
    return (int32_t)((s->first_key + s->n_groups - 1) % LAYOUT_SETS);
}

void lander_release(engine *e)
{
    for (int32_t i = 0; i < e->l.n_pieces; i++)
        if (any_stays(e, i))
            lander_give(e, &(landing){ .piece = i,
                                       .buffer = i,
                                       .set = lander_last_set(e),
                                       .held = true,
                                       .update = e->step.params });
}

/* n gradients that are on the device, by way of a slab. The lander is idle. */
static void read_slice(engine *e, float *dst, const char *src, int64_t n)
{
    void *slab = pool_wait_slab(e);
    e->b->copy_out(e->dev, e->q_out, slab, src, n * e->l.grad_size);
    e->b->queue_sync(e->dev, e->q_out);
    slice_widen(e, dst, slab, n, false);
    pool_release_slab(e, slab);
}

/* The slice of parameter p whose gradients are at src; dst is the whole parameter's. */
static void read_param(engine *e, float *dst, const model_param *p, const tpl_slice *part,
                       const char *src)
{
    const group_set *s = &e->set[lander_last_set(e)];
    int64_t slice = layout_slice(p, e->l.slab_elems);
    for (int64_t r = 0; p->gathered && r < s->n_grad_rows; r++)
        read_slice(e, dst + s->grad_rows[r] * p->cols, src + r * p->cols * e->l.grad_size, p->cols);
    for (int64_t i = 0; !p->gathered && i < part->n; i += slice)
        read_slice(e, dst + part->first + i, src + i * e->l.grad_size,
                   part->n - i < slice ? part->n - i : slice);
}

void lander_read(engine *e, float *const *ret_grads)
{
    for (int32_t i = 0; i < e->l.n_pieces; i++)
        for (int32_t k = 0; k < piece_segment(e, i)->n_slices; k++) {
            const tpl_slice *slice = &piece_segment(e, i)->slice[k];
            int32_t param = piece_param(e, i, slice);
            const char *src = (const char *)e->grads[i].data + slice->at * e->l.grad_size;
            if (stays_for_norm(e, param))
                read_param(e, ret_grads[param], &e->m->params[param], slice, src);
        }
}

void lander_wait(engine *e, int64_t number)
{
    pthread_mutex_lock(&e->lock);
    while (e->landings_done < number)
        pthread_cond_wait(&e->progress, &e->lock);
    pthread_mutex_unlock(&e->lock);
}
