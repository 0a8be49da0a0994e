/* SPDX-License-Identifier: Apache-2.0
 *
 * The worker pool: optimizer updates, sums over the gradient plane, packing and scattering of table
 * rows. Work is cut into slices by shapes alone and every element is computed by itself, so that
 * results depend neither on the number of workers nor on their order.
 */
#include "internal.h"

#include "../base/log.h"
#include "../base/machine.h"
#include "../base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK_ELEMS = 1 << 14, MAX_CPUS = 1024 };

/* ---- one slice ------------------------------------------------------------------------------- */

static bool is_update(const work *w)
{
    return w->kind == WORK_UPDATE_PLANE || w->kind == WORK_UPDATE_SLAB ||
           w->kind == WORK_UPDATE_ROWS || w->then_update;
}

static mt_status update_range(engine *e, const work *w, int64_t first, int64_t n, const float *grad)
{
    const model_param *p = &e->m->params[w->param];
    store_unit *u = &e->s->units[p->unit];
    mt_update up = { .struct_size = sizeof up,
                     .flags = p->flags & MT_PARAM_NO_DECAY,
                     .rows = p->rows ? p->rows : 1,
                     .cols = p->cols,
                     .first = first,
                     .n = n,
                     .hi = u->hi + p->offset + first,
                     .lo = u->lo + p->offset + first,
                     .grad = grad,
                     .step = w->update.step,
                     .lr = w->update.lr,
                     .grad_scale = w->update.grad_scale };
    if (e->rules) {
        const engine_rule *rule = &e->rules[w->param];
        up.lr *= rule->lr_scale;
        up.weight_decay = rule->weight_decay;
        up.flags |= rule->has_decay ? (uint32_t)MT_UPDATE_WEIGHT_DECAY : 0;
    }
    for (uint32_t s = 0; s < e->s->n_states; s++)
        up.state[s] =
            (char *)store_state(e->s, w->param, s) + first * mt_dtype_size(e->s->states[s].dtype);
    return e->optim->update(e->optim_state, &up);
}

void pool_widen(const engine *e, float *dst, const void *src, int64_t n, bool add)
{
    const float *x = src;
    const uint16_t *h = src;
    if (e->l.grad_size == 2 && add)
        for (int64_t i = 0; i < n; i++)
            dst[i] += mt_bf16_to_f32(h[i]);
    else if (e->l.grad_size == 2)
        for (int64_t i = 0; i < n; i++)
            dst[i] = mt_bf16_to_f32(h[i]);
    else if (add)
        for (int64_t i = 0; i < n; i++)
            dst[i] += x[i];
    else
        memcpy(dst, x, (size_t)n * sizeof *dst);
}

int64_t pool_first_row(const group_set *s, int64_t id)
{
    int64_t lo = 0, hi = s->n_rows;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (s->rows[mid] < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The rows of w's slab that lie in elements first .. first+n of the table: copied into `narrow`, or
 * added to `dst`. */
static void place_rows(const engine *e, const work *w, int64_t first, int64_t n, float *dst,
                       uint16_t *narrow)
{
    int64_t cols = e->m->params[w->param].cols;
    const group_set *s = &e->set[w->set];
    int64_t packed = pool_first_row(s, w->first / cols); /* the slab begins with this row */
    for (int64_t r = pool_first_row(s, first / cols); w->slab && r < s->n_rows; r++) {
        /* A block may begin or end inside a row. */
        int64_t row = s->rows[r] * cols;
        int64_t from = row > first ? row : first;
        int64_t to = row + cols < first + n ? row + cols : first + n;
        if (row >= first + n)
            break;
        const char *src =
            (const char *)w->slab + ((r - packed) * cols + (from - row)) * e->l.grad_size;
        if (narrow)
            memcpy(narrow + (from - first), src, (size_t)(to - from) * sizeof *narrow);
        else
            pool_widen(e, dst + (from - first), src, to - from, true);
    }
}

/* Elements that the optimizer gets at once from a worker's block: as many as stay in its cache,
 * whole rows or tensors where the optimizer wants those. */
static int64_t block_step(const engine *e, const model_param *p, int64_t n)
{
    if (e->optim->granularity == MT_GRAIN_ELEMENT)
        return BLOCK_ELEMS;
    if (e->optim->granularity == MT_GRAIN_ROW && p->rows > 0 && p->cols < BLOCK_ELEMS)
        return BLOCK_ELEMS / p->cols * p->cols;
    return n;
}

/* Updates a slice whose gradient lies somewhere in another form, block by block. */
static mt_status update_blocks(engine *e, const work *w, int64_t first, int64_t n, float *block)
{
    bool plane = w->kind == WORK_UPDATE_PLANE;
    const uint16_t *narrow = plane ? e->narrow[w->param] + first : w->slab;
    int64_t step = block_step(e, &e->m->params[w->param], n);
    for (int64_t at = 0; at < n; at += step) {
        int64_t len = n - at < step ? n - at : step;
        if (w->kind == WORK_UPDATE_ROWS || !narrow)
            memset(block, 0, (size_t)len * sizeof *block);
        else
            pool_widen(e, block, narrow + at, len, false);
        if (w->kind == WORK_UPDATE_ROWS)
            place_rows(e, w, first + at, len, block, NULL);
        mt_status st = update_range(e, w, first + at, len, block);
        if (st < 0)
            return st;
    }
    return MT_OK;
}

/* Packs elements first .. first+n of the packed table: whole rows. */
static void gather_slice(engine *e, const work *w, int64_t first, int64_t n)
{
    const model_param *p = &e->m->params[w->param];
    const group_set *s = &e->set[w->set];
    const store_unit *u = &e->s->units[p->unit];
    for (int64_t r = first / p->cols; r < (first + n) / p->cols; r++) {
        int64_t src = p->offset + s->rows[r] * p->cols, dst = w->pack_offset + r * p->cols;
        memcpy(s->hi + dst, u->hi + src, (size_t)p->cols * 2);
        if (s->lo)
            memcpy(s->lo + dst, u->lo + src, (size_t)p->cols * 2);
    }
}

/* Gradients of zero are added to those that wait: to -0 too, which makes it +0 as on the device. */
static void add_zeros(engine *e, const work *w, int64_t first, int64_t n)
{
    float *plane = e->plane[w->param];
    if (w->first_share && !plane)
        memset(e->narrow[w->param] + first, 0, (size_t)n * sizeof **e->narrow);
    else if (w->first_share)
        memset(plane + first, 0, (size_t)n * sizeof *plane);
    for (int64_t i = first; i < first + n && !w->first_share; i++)
        plane[i] += 0.0f;
}

static mt_status run_slice(engine *e, const work *w, int64_t first, int64_t n, float *block)
{
    float *plane = e->plane[w->param] ? e->plane[w->param] + first : NULL;
    switch (w->kind) {
    case WORK_UPDATE_PLANE:
        return plane ? update_range(e, w, first, n, plane) : update_blocks(e, w, first, n, block);
    case WORK_UPDATE_SLAB:
        if (w->slab && e->l.grad_size == 4)
            return update_range(e, w, first, n, w->slab);
        return update_blocks(e, w, first, n, block);
    case WORK_UPDATE_ROWS:
        return update_blocks(e, w, first, n, block);
    case WORK_ADD:
        if (w->slab)
            pool_widen(e, plane, w->slab, n, !w->first_share);
        else
            add_zeros(e, w, first, n);
        break;
    case WORK_SCATTER:
        if (w->first_share)
            add_zeros(e, w, first, n);
        place_rows(e, w, first, n, plane, plane ? NULL : e->narrow[w->param] + first);
        break;
    case WORK_SUM_SQUARES: {
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += (double)plane[i] * plane[i];
        e->blocks[e->block_base[w->param] + first / w->slice] = sum;
        return MT_OK;
    }
    case WORK_GATHER:
        gather_slice(e, w, first, n);
        return MT_OK;
    }
    return w->then_update ? update_range(e, w, first, n, plane) : MT_OK;
}

static void run_timed(engine *e, const work *w, int64_t first, int32_t worker, mt_status *ret)
{
    static const event_kind kind[] = {
        [WORK_UPDATE_PLANE] = EVENT_UPDATE, [WORK_UPDATE_SLAB] = EVENT_UPDATE,
        [WORK_UPDATE_ROWS] = EVENT_UPDATE,  [WORK_ADD] = EVENT_ADD,
        [WORK_SCATTER] = EVENT_SCATTER,     [WORK_SUM_SQUARES] = EVENT_NORM,
        [WORK_GATHER] = EVENT_GATHER
    };
    int64_t n = w->end - first < w->slice ? w->end - first : w->slice;
    uint64_t from = time_now();
    *ret = run_slice(e, w, first, n, e->pool.block + worker * e->pool.block_elems);
    uint64_t to = time_now();
    if (is_update(w)) {
        e->traffic.updated_elems += n;
        if (e->pool.n_threads == 0)
            e->traffic.update_ns += to - from;
    }
    if (e->chaos && w->slab)
        memset(w->slab, 0xff, (size_t)(e->l.slab_elems * e->l.grad_size));
    if (e->time.detailed)
        time_span(e, TRACK_WORKER + worker, kind[w->kind], e->m->params[w->param].unit, from, to);
}

/* ---- the pool -------------------------------------------------------------------------------- */

/* The pool's lock is held. */
static void finish_slice(engine *e, const work *w, mt_status st, const char *error_text)
{
    pool *p = &e->pool;
    p->pending[w->param]--;
    if (is_update(w))
        p->updating[w->param]--;
    p->outstanding--;
    if (w->slab)
        p->free_slab[p->n_free++] = w->slab;
    if (st < 0 && p->error >= 0) {
        p->error = st;
        snprintf(p->error_text, sizeof p->error_text, "update of '%s': %s",
                 e->m->params[w->param].name, error_text);
    }
    pthread_cond_broadcast(&p->done);
}

typedef struct worker_arg {
    engine *e;
    int32_t index;
    int32_t cpu; /* -1: any */
} worker_arg;

static void *worker_main(void *arg)
{
    worker_arg a = *(worker_arg *)arg;
    engine *e = a.e;
    pool *p = &e->pool;
    uint64_t rng = e->chaos + 1000u + (uint64_t)a.index;
    free(arg);
    if (a.cpu >= 0 && !machine_bind_thread(a.cpu))
        log_write(MT_LOG_DEBUG, "optimizer worker %d cannot be bound to processor %d", a.index,
                  a.cpu);
    pthread_mutex_lock(&p->lock);
    for (;;) {
        work *next;
        while (!(next = work_queue_next(&p->queue)) && !p->stop)
            pthread_cond_wait(&p->wake, &p->lock);
        if (!next)
            break;
        work w = *next;
        next->first += w.slice;
        if (next->first >= w.end)
            work_queue_drop(&p->queue);
        if (is_update(&w) && p->n_updating++ == 0)
            p->updating_since = time_now();
        pthread_mutex_unlock(&p->lock);
        mt_status st;
        chaos_sleep(e, &rng);
        run_timed(e, &w, w.first, a.index, &st);
        pthread_mutex_lock(&p->lock);
        if (is_update(&w) && --p->n_updating == 0)
            e->traffic.update_ns += time_now() - p->updating_since;
        finish_slice(e, &w, st, status_text());
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Processors for the workers to stay on, false where they had better be left to the scheduler:
 * where there are too few for one each, or where others use them too. Compute threads of a device
 * that is the host itself need some left. */
static bool choose_cpus(const engine *e, int32_t *ret_cpus, int32_t workers)
{
    mt_device_info info = { .struct_size = sizeof info };
    e->b->info(e->dev, &info);
    int32_t n = machine_own_cpus(ret_cpus, MAX_CPUS);
    int32_t compute = info.unified ? (int32_t)info.compute_threads : 0;
    if (n - compute < workers) {
        log_write(MT_LOG_DEBUG,
                  "%d optimizer workers are not bound: %d processors of this process's own, %d for "
                  "compute",
                  workers, n, compute);
        return false;
    }
    return true;
}

mt_status pool_start(engine *e, int32_t threads, bool bind)
{
    int32_t cpus[MAX_CPUS];
    pool *p = &e->pool;
    size_t n = (size_t)e->m->n_params;
    /* At most one update and one sum of a parameter wait at a time, and one piece per slab. */
    mt_status st = work_queue_init(&p->queue, e->m->n_units + 1,
                                   (int32_t)(4 * (int64_t)n + e->l.n_slabs + 16));
    if (st < 0)
        return st;
    p->pending = calloc(n, sizeof *p->pending);
    p->updating = calloc(n, sizeof *p->updating);
    p->free_slab = calloc((size_t)e->l.n_slabs + 1, sizeof *p->free_slab);
    if (!p->pending || !p->updating || !p->free_slab)
        return status_nomem("the worker pool", n * sizeof *p->pending);
    if (e->training)
        for (; p->n_free < e->l.n_slabs; p->n_free++)
            p->free_slab[p->n_free] =
                (char *)e->region[LAYOUT_SLAB] + p->n_free * e->l.slab_elems * e->l.grad_size;
    if (threads <= 0)
        threads = machine_cpus();
    threads = e->serial || threads < 1 ? 1 : threads > 256 ? 256 : threads;
    if (e->training) {
        bool small = e->optim->granularity == MT_GRAIN_ELEMENT;
        p->block_elems = small ? BLOCK_ELEMS : e->l.slab_elems;
        size_t bytes = (size_t)(threads * p->block_elems) * sizeof *p->block;
        p->block = malloc(bytes);
        if (!p->block)
            return status_nomem("the workers' blocks", bytes);
        memset(p->block, 0, bytes); /* touched now, so that no step makes the process grow */
    }
    if (e->serial)
        return MT_OK;
    p->thread = calloc((size_t)threads, sizeof *p->thread);
    if (!p->thread)
        return status_nomem("the worker pool", (size_t)threads * sizeof *p->thread);
    p->n_threads = threads;
    bind = bind && choose_cpus(e, cpus, threads);
    for (; p->n_started < threads; p->n_started++) {
        worker_arg *arg = malloc(sizeof *arg);
        if (!arg)
            return status_nomem("the worker pool", sizeof *arg);
        *arg = (worker_arg){ e, p->n_started, bind ? cpus[p->n_started] : -1 };
        int err = pthread_create(&p->thread[p->n_started], NULL, worker_main, arg);
        if (err) {
            free(arg);
            return status_set(MT_ERR_NOMEM, "cannot start worker %d of %d: %s", p->n_started + 1,
                              threads, strerror(err));
        }
    }
    return MT_OK;
}

void pool_stop(engine *e)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int32_t i = 0; i < p->n_started; i++)
        pthread_join(p->thread[i], NULL);
    free(p->thread);
    work_queue_free(&p->queue);
    free(p->free_slab);
    free(p->pending);
    free(p->updating);
    free(p->block);
}

/* The workers first do what the next forward needs first: what it gathers, then one unit after the
 * other. So the lower a unit, the less its gradients, which leave late in backward, wait for those
 * of units above; these have time until forward has come to them. */
static int32_t lane_of(const engine *e, const work *w)
{
    return w->kind == WORK_GATHER ? 0 : 1 + e->m->params[w->param].unit;
}

/* The pool's lock is held. */
static void expect(pool *p, int32_t param, int64_t slices, bool update)
{
    p->pending[param] += (int32_t)slices;
    if (update)
        p->updating[param] += (int32_t)slices;
    p->outstanding += slices;
}

void pool_announce(engine *e, int32_t param)
{
    const model_param *q = &e->m->params[param];
    const tpl_plan *t = e->p->tpl[q->unit];
    int64_t slice = layout_slice(q, e->l.slab_elems), slices = 0;
    for (int32_t i = 0; i < t->n_segments; i++)
        for (int32_t k = 0; k < t->segment[i].n_slices; k++) {
            const tpl_slice *s = &t->segment[i].slice[k];
            int64_t n = q->gathered ? q->elems : s->n;
            if (e->m->units[q->unit].slot[s->slot] == param)
                slices += (n + slice - 1) / slice;
        }
    pthread_mutex_lock(&e->pool.lock);
    expect(&e->pool, param, slices, true);
    pthread_mutex_unlock(&e->pool.lock);
}

void pool_submit(engine *e, const work *w)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    if (!w->announced)
        expect(p, w->param, (w->end - w->first + w->slice - 1) / w->slice, is_update(w));
    if (p->n_threads) {
        while (work_queue_full(&p->queue))
            pthread_cond_wait(&p->done, &p->lock);
        work_queue_push(&p->queue, lane_of(e, w), w);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
        return;
    }
    pthread_mutex_unlock(&p->lock);
    for (int64_t first = w->first; first < w->end; first += w->slice) {
        mt_status st;
        run_timed(e, w, first, 0, &st);
        pthread_mutex_lock(&p->lock);
        finish_slice(e, w, st, status_text());
        pthread_mutex_unlock(&p->lock);
    }
}

void pool_wait_param(engine *e, int32_t param)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    while (p->pending[param] > 0)
        pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

/* The pool's lock is held. */
static bool is_updating(const engine *e, int32_t piece)
{
    const tpl_segment *s = piece_segment(e, piece);
    for (int32_t i = 0; i < s->n_slices; i++)
        if (e->pool.updating[piece_param(e, piece, &s->slice[i])] > 0)
            return true;
    return false;
}

bool pool_updating(engine *e, int32_t piece)
{
    pthread_mutex_lock(&e->pool.lock);
    bool busy = is_updating(e, piece);
    pthread_mutex_unlock(&e->pool.lock);
    return busy;
}

void pool_wait_updates(engine *e, int32_t piece)
{
    pthread_mutex_lock(&e->pool.lock);
    while (is_updating(e, piece))
        pthread_cond_wait(&e->pool.done, &e->pool.lock);
    pthread_mutex_unlock(&e->pool.lock);
}

void pool_wait_idle(engine *e)
{
    pthread_mutex_lock(&e->pool.lock);
    while (e->pool.outstanding > 0)
        pthread_cond_wait(&e->pool.done, &e->pool.lock);
    pthread_mutex_unlock(&e->pool.lock);
}

void *pool_try_slab(engine *e)
{
    pthread_mutex_lock(&e->pool.lock);
    void *slab = e->pool.n_free > 0 ? e->pool.free_slab[--e->pool.n_free] : NULL;
    pthread_mutex_unlock(&e->pool.lock);
    return slab;
}

void *pool_wait_slab(engine *e)
{
    pthread_mutex_lock(&e->pool.lock);
    while (e->pool.n_free == 0)
        pthread_cond_wait(&e->pool.done, &e->pool.lock);
    void *slab = e->pool.free_slab[--e->pool.n_free];
    pthread_mutex_unlock(&e->pool.lock);
    return slab;
}

void pool_release_slab(engine *e, void *slab)
{
    pthread_mutex_lock(&e->pool.lock);
    e->pool.free_slab[e->pool.n_free++] = slab;
    pthread_cond_broadcast(&e->pool.done);
    pthread_mutex_unlock(&e->pool.lock);
}

mt_status pool_error(engine *e)
{
    pthread_mutex_lock(&e->pool.lock);
    mt_status st = e->pool.error;
    if (st < 0)
        status_set(st, "%s", e->pool.error_text);
    pthread_mutex_unlock(&e->pool.lock);
    return st;
}
