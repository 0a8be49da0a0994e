/* SPDX-License-Identifier: Apache-2.0
 *
 * The worker pool: who does which slice when, and who waits for it.
 */
#include "internal.h"

#include "../base/log.h"
#include "../base/machine.h"
#include "../base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CPUS = 1024 };

/* ---- one slice ------------------------------------------------------------------------------- */

/* Elements of the slice that begins at `first`. */
static int64_t slice_elems(const work *w, int64_t first)
{
    return w->end - first < w->slice ? w->end - first : w->slice;
}

static void run_timed(engine *e, const work *w, int64_t first, int32_t worker, mt_status *ret)
{
    static const event_kind kind[] = {
        [WORK_UPDATE_PLANE] = EVENT_UPDATE, [WORK_UPDATE_SLAB] = EVENT_UPDATE,
        [WORK_UPDATE_ROWS] = EVENT_UPDATE,  [WORK_ADD] = EVENT_ADD,
        [WORK_SCATTER] = EVENT_SCATTER,     [WORK_SUM_SQUARES] = EVENT_NORM,
        [WORK_GATHER] = EVENT_GATHER
    };
    int64_t n = slice_elems(w, first);
    uint64_t from = time_now();
    *ret = slice_run(e, w, first, n, (float *)e->region[LAYOUT_BLOCKS] + worker * e->l.block_elems);
    uint64_t to = time_now();
    if (work_updates(w)) {
        e->traffic.updated_elems += n;
        if (e->pool.n_threads == 0)
            e->traffic.update_ns += to - from;
    }
    if (e->time.detailed)
        time_span(e, TRACK_WORKER + worker, kind[w->kind], e->m->params[w->param].unit, from, to);
}

/* ---- the pool -------------------------------------------------------------------------------- */

/* Counts n elements of w that are to be done (n < 0: that are done); those of an announced update
 * have been counted. The pool's lock is held. */
static void count(pool *p, const work *w, int64_t n, bool announced)
{
    if (w->kind == WORK_UPDATE_ROWS || w->kind == WORK_SCATTER)
        p->set_users[w->set] += n;
    if (announced)
        return;
    p->outstanding += n;
    if (w->kind == WORK_GATHER)
        p->gathering += n;
    else
        p->pending[w->param] += n;
    if (work_updates(w))
        p->updating[w->param] += n;
}

static int32_t *slab_users(const engine *e, const void *slab)
{
    int64_t at = (const char *)slab - (const char *)e->region[LAYOUT_SLAB];
    return &e->pool.slab_users[at / (e->l.slab_elems * e->l.grad_size)];
}

/* Gathers update what rows of a table they come to first. */
static bool may_update(const pool *p, const work *w)
{
    const table *t = p->table[w->param];
    return work_updates(w) || (w->kind == WORK_GATHER && t && t->n_updates > 0);
}

/* The pool's lock is held. */
static void finish_slice(engine *e, const work *w, mt_status st, const char *error_text)
{
    pool *p = &e->pool;
    int64_t n = slice_elems(w, w->first);
    count(p, w, -n, false);
    if (w->by_row && p->updating[w->param] == 0)
        p->table[w->param]->n_updates = 0;
    if (w->slab && --*slab_users(e, w->slab) == 0) {
        chaos_forget(e, w->slab, e->l.slab_elems * e->l.grad_size);
        p->free_slab[p->n_free++] = w->slab;
    }
    if (st < 0 && p->error >= 0) {
        p->error = st;
        snprintf(p->error_text, sizeof p->error_text, "update of '%s': %s",
                 e->m->params[w->param].name, error_text);
    }
    pthread_cond_broadcast(&p->done);
}

/* The workers first do what the next forward needs first: what it gathers, then one unit after the
 * other. So the lower a unit, the less its gradients, which leave late in backward, wait for those
 * of units above; these have time until forward has come to them. Rows of tables that the next
 * forward does not gather come last, unless somebody waits for them. */
static int32_t table_lane(const engine *e)
{
    return e->m->n_units + 1;
}

static int32_t lane_of(const engine *e, const work *w)
{
    if (w->kind == WORK_GATHER)
        return 0;
    return w->by_row ? table_lane(e) : 1 + e->m->params[w->param].unit;
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
        while (!(next = work_queue_next(&p->queue, p->hurry ? table_lane(e) : -1)) && !p->stop)
            pthread_cond_wait(&p->wake, &p->lock);
        if (!next)
            break;
        work w = *next;
        next->first += w.slice;
        if (next->first >= w.end)
            work_queue_drop(&p->queue);
        bool updates = may_update(p, &w);
        if (updates && p->n_updating++ == 0)
            p->updating_since = time_now();
        pthread_mutex_unlock(&p->lock);
        mt_status st;
        chaos_sleep(e, &rng);
        run_timed(e, &w, w.first, a.index, &st);
        pthread_mutex_lock(&p->lock);
        if (updates && --p->n_updating == 0)
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

mt_status pool_start(engine *e, bool bind)
{
    int32_t cpus[MAX_CPUS], threads = e->p->workers;
    pool *p = &e->pool;
    size_t n = (size_t)e->m->n_params;
    /* At most one update and one sum of a parameter wait at a time, and one piece per slab. */
    mt_status st = tables_start(e);
    if (st < 0)
        return st;
    st = work_queue_init(&p->queue, table_lane(e) + 1,
                         (int32_t)(4 * (int64_t)n + e->l.n_slabs + 16));
    if (st < 0)
        return st;
    p->pending = calloc(n, sizeof *p->pending);
    p->updating = calloc(n, sizeof *p->updating);
    p->free_slab = calloc((size_t)e->l.n_slabs + 1, sizeof *p->free_slab);
    p->slab_users = calloc((size_t)e->l.n_slabs + 1, sizeof *p->slab_users);
    if (!p->pending || !p->updating || !p->free_slab || !p->slab_users)
        return status_nomem("the worker pool", n * sizeof *p->pending);
    if (e->training)
        for (; p->n_free < e->l.n_slabs; p->n_free++)
            p->free_slab[p->n_free] =
                (char *)e->region[LAYOUT_SLAB] + p->n_free * e->l.slab_elems * e->l.grad_size;
    /* Touched now, so that no step makes the process grow. */
    if (e->training)
        memset(e->region[LAYOUT_BLOCKS], 0, (size_t)e->l.bytes[LAYOUT_BLOCKS]);
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
    tables_stop(e);
    work_queue_free(&p->queue);
    free(p->free_slab);
    free(p->slab_users);
    free(p->pending);
    free(p->updating);
}

void pool_announce(engine *e, int32_t param, int64_t elems)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    count(p, &(work){ .kind = WORK_UPDATE_SLAB, .param = param }, elems, false);
    if (p->table[param])
        p->table[param]->announced += elems;
    pthread_mutex_unlock(&p->lock);
}

/* Updates of a table go row by row. The pool's lock is held. */
static void add_to_table(engine *e, const work *w)
{
    pool *p = &e->pool;
    table *t = p->table[w->param];
    table_add(t, w, e->m->params[w->param].cols);
    t->announced -= w->announced ? w->end - w->first : 0;
    pthread_cond_broadcast(&p->done); /* pool_wait_table */
}

void pool_submit(engine *e, const work *given)
{
    pool *p = &e->pool;
    work copy = *given, *w = &copy;
    int64_t n = w->end - w->first;
    pthread_mutex_lock(&p->lock);
    count(p, w, n, w->announced);
    if (w->slab)
        *slab_users(e, w->slab) = (int32_t)((n + w->slice - 1) / w->slice);
    w->by_row = work_updates(w) && p->table[w->param];
    if (w->by_row)
        add_to_table(e, w);
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
        work slice = *w;
        slice.first = first;
        run_timed(e, &slice, first, 0, &st);
        pthread_mutex_lock(&p->lock);
        finish_slice(e, &slice, st, status_text());
        pthread_mutex_unlock(&p->lock);
    }
}

/* Until of what *left counts there is none. */
static void wait_none(pool *p, const int64_t *left)
{
    pthread_mutex_lock(&p->lock);
    while (*left > 0)
        pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

/* Until `left`, of the parameter's elements, is none. */
static void wait_elems(engine *e, int32_t param, const int64_t *left)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    bool by_row = p->table[param] && p->updating[param] > 0;
    p->hurry += by_row;
    while (left[param] > 0)
        pthread_cond_wait(&p->done, &p->lock);
    p->hurry -= by_row;
    pthread_mutex_unlock(&p->lock);
}

void pool_wait_param(engine *e, int32_t param)
{
    wait_elems(e, param, e->pool.pending);
}

/* The pool's lock is held. */
static bool is_updating(const engine *e, int32_t piece)
{
    const tpl_segment *s = piece_segment(e, piece);
    const tpl *t = e->m->units[e->piece[piece].unit].t;
    for (int32_t i = 0; i < s->n_slices; i++)
        if (!t->params[s->slice[i].slot].gathered &&
            e->pool.updating[piece_param(e, piece, &s->slice[i])] > 0)
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

bool pool_is_updating(engine *e, int32_t param)
{
    pthread_mutex_lock(&e->pool.lock);
    bool busy = e->pool.updating[param] > 0;
    pthread_mutex_unlock(&e->pool.lock);
    return busy;
}

void pool_wait_update(engine *e, int32_t param)
{
    wait_elems(e, param, e->pool.updating);
}

void pool_wait_idle(engine *e)
{
    wait_none(&e->pool, &e->pool.outstanding);
}

void pool_wait_table(engine *e, int32_t param)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    const table *t = p->table[param];
    while (p->updating[param] > 0 && (!t || t->announced > 0))
        pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

void pool_wait_gathers(engine *e)
{
    wait_none(&e->pool, &e->pool.gathering);
}

void pool_wait_set(engine *e, int32_t set)
{
    wait_none(&e->pool, &e->pool.set_users[set]);
}

int64_t pool_free_slabs(engine *e)
{
    pthread_mutex_lock(&e->pool.lock);
    int64_t n = e->pool.n_free;
    pthread_mutex_unlock(&e->pool.lock);
    return n;
}

void pool_wait_slabs(engine *e, int64_t n)
{
    pthread_mutex_lock(&e->pool.lock);
    for (int64_t now = e->pool.n_free; e->pool.n_free < n && e->pool.n_free == now;)
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

uint64_t pool_take_update_ns(engine *e)
{
    pool *p = &e->pool;
    pthread_mutex_lock(&p->lock);
    uint64_t ns = atomic_exchange(&e->traffic.update_ns, 0);
    if (p->n_updating > 0) { /* they are at one for ever where they are never idle */
        uint64_t now = time_now();
        ns += now - p->updating_since;
        p->updating_since = now;
    }
    pthread_mutex_unlock(&p->lock);
    return ns;
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
