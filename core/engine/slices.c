/* SPDX-License-Identifier: Apache-2.0
 *
 * What a worker does with one slice of work. Work is cut by shapes alone and every element is
 * computed by itself, so that results depend neither on the number of workers nor on their order.
 */
#include "internal.h"

#include "../base/status.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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

void slice_widen(const engine *e, float *dst, const void *src, int64_t n, bool add)
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

/* Index of the first of the set's rows whose id is at least `id`. */
static int64_t first_row(const group_set *s, int64_t id)
{
    int64_t lo = 0, hi = s->n_grad_rows;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (s->grad_rows[mid] < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Gradients of rows that lie in elements first .. first+n of the table: copied into `narrow`, or
 * added to `dst`. */
static void place_rows(const engine *e, const work *w, int64_t first, int64_t n, float *dst,
                       uint16_t *narrow)
{
    int64_t cols = e->m->params[w->param].cols;
    const group_set *s = &e->set[w->set];
    for (int64_t r = first_row(s, first / cols); r < s->n_grad_rows; r++) {
        /* A block may begin or end inside a row. */
        int64_t row = s->grad_rows[r] * cols;
        int64_t from = row > first ? row : first;
        int64_t to = row + cols < first + n ? row + cols : first + n;
        if (row >= first + n)
            break;
        const char *src =
            (const char *)w->slab + ((r - w->first_row) * cols + (from - row)) * e->l.grad_size;
        if (narrow)
            memcpy(narrow + (from - first), src, (size_t)(to - from) * sizeof *narrow);
        else
            slice_widen(e, dst + (from - first), src, to - from, true);
    }
}

/* Elements that the optimizer gets at once from a worker's block: as many as stay in its cache,
 * whole rows or tensors where the optimizer wants those. */
static int64_t block_step(const engine *e, const model_param *p, int64_t n)
{
    if (e->optim->granularity == MT_GRAIN_ELEMENT)
        return LAYOUT_BLOCK_ELEMS;
    if (e->optim->granularity == MT_GRAIN_ROW && p->rows > 0 && p->cols < LAYOUT_BLOCK_ELEMS)
        return LAYOUT_BLOCK_ELEMS / p->cols * p->cols;
    return n;
}

/* The gradient of element `first`; NULL where all are zero. */
static void *slab_at(const engine *e, const work *w, int64_t first)
{
    return w->slab ? (char *)w->slab + (first - w->first) * e->l.grad_size : NULL;
}

/* Updates a slice whose gradient lies somewhere in another form, block by block. */
static mt_status update_blocks(engine *e, const work *w, int64_t first, int64_t n, float *block)
{
    bool plane = w->kind == WORK_UPDATE_PLANE;
    const uint16_t *narrow = plane ? e->narrow[w->param] + first : slab_at(e, w, first);
    int64_t step = block_step(e, &e->m->params[w->param], n);
    for (int64_t at = 0; at < n; at += step) {
        int64_t len = n - at < step ? n - at : step;
        if (w->kind == WORK_UPDATE_ROWS || !narrow)
            memset(block, 0, (size_t)len * sizeof *block);
        else
            slice_widen(e, block, narrow + at, len, false);
        if (w->kind == WORK_UPDATE_ROWS)
            place_rows(e, w, first + at, len, block, NULL);
        mt_status st = update_range(e, w, first + at, len, block);
        if (st < 0)
            return st;
    }
    return MT_OK;
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

/* Elements first .. first+n of anything but a gather. */
static mt_status run_range(engine *e, const work *w, int64_t first, int64_t n, float *block)
{
    float *plane = e->plane[w->param] ? e->plane[w->param] + first : NULL;
    switch (w->kind) {
    case WORK_UPDATE_PLANE:
        return plane ? update_range(e, w, first, n, plane) : update_blocks(e, w, first, n, block);
    case WORK_UPDATE_SLAB:
        if (w->slab && e->l.grad_size == 4)
            return update_range(e, w, first, n, slab_at(e, w, first));
        return update_blocks(e, w, first, n, block);
    case WORK_UPDATE_ROWS:
        return update_blocks(e, w, first, n, block);
    case WORK_ADD:
        if (w->slab)
            slice_widen(e, plane, slab_at(e, w, first), n, !w->first_share);
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
        break;
    }
    return w->then_update ? update_range(e, w, first, n, plane) : MT_OK;
}

/* ---- tables by row --------------------------------------------------------------------------- */

typedef enum row_state { ROW_OLD, ROW_CLAIMED, ROW_NEW } row_state;

static bool claim(_Atomic uint8_t *row)
{
    uint8_t old = ROW_OLD;
    return atomic_compare_exchange_strong_explicit(row, &old, ROW_CLAIMED, memory_order_relaxed,
                                                   memory_order_relaxed);
}

/* Until whoever has claimed the row is done with it, which takes microseconds. */
static void await_row(_Atomic uint8_t *row)
{
    while (atomic_load_explicit(row, memory_order_acquire) != ROW_NEW)
        sched_yield();
}

static mt_status make_rows(engine *e, const work *w, table *t, int64_t row, int64_t n, float *block)
{
    int64_t cols = e->m->params[w->param].cols;
    mt_status st = run_range(e, w, row * cols, n * cols, block);
    for (int64_t r = row; r < row + n; r++)
        atomic_store_explicit(&t->row[r], ROW_NEW, memory_order_release);
    return st;
}

/* Updates rows first .. end-1, but for those that somebody else has claimed; all of them are new
 * when it returns. */
static mt_status run_rows(engine *e, const work *w, int64_t first, int64_t end, float *block)
{
    table *t = e->pool.table[w->param];
    int64_t cols = e->m->params[w->param].cols;
    int64_t most = cols < LAYOUT_BLOCK_ELEMS ? LAYOUT_BLOCK_ELEMS / cols : 1;
    mt_status st = MT_OK;
    for (int64_t from = first, r = first; r < end; from = r) {
        while (r < end && r - from < most && claim(&t->row[r]))
            r++;
        mt_status made = r > from ? make_rows(e, w, t, from, r - from, block) : MT_OK;
        st = made < 0 ? made : st;
        r += r == from;
    }
    for (int64_t r = first; r < end; r++)
        await_row(&t->row[r]);
    return st;
}

/* The update to which the element belongs. */
static const work *find_update(const table *t, int64_t elem)
{
    int64_t lo = 0, hi = t->n_updates; /* the last one that begins at or before it */
    while (hi - lo > 1) {
        int64_t mid = (lo + hi) / 2;
        if (t->update[mid].first <= elem)
            lo = mid;
        else
            hi = mid;
    }
    return &t->update[lo];
}

/* The row as the next forward is to read it. While there are gathers no update is added. */
static mt_status demand_row(engine *e, int32_t param, int64_t row, float *block)
{
    table *t = e->pool.table[param];
    if (t && claim(&t->row[row]))
        return make_rows(e, find_update(t, row * e->m->params[param].cols), t, row, 1, block);
    if (t)
        await_row(&t->row[row]);
    return MT_OK;
}

/* Packs elements first .. first+n of the packed table: whole rows. */
static mt_status gather_slice(engine *e, const work *w, int64_t first, int64_t n, float *block)
{
    const model_param *p = &e->m->params[w->param];
    const group_set *s = &e->set[w->set];
    const store_unit *u = &e->s->units[p->unit];
    mt_status st = MT_OK;
    for (int64_t r = first / p->cols; r < (first + n) / p->cols && st == MT_OK; r++) {
        int64_t src = p->offset + s->rows[r] * p->cols, dst = w->pack_offset + r * p->cols;
        st = demand_row(e, w->param, s->rows[r], block);
        memcpy(s->hi + dst, u->hi + src, (size_t)p->cols * 2);
        if (s->lo)
            memcpy(s->lo + dst, u->lo + src, (size_t)p->cols * 2);
    }
    return st;
}

mt_status slice_run(engine *e, const work *w, int64_t first, int64_t n, float *block)
{
    int64_t cols = e->m->params[w->param].cols;
    if (w->kind == WORK_GATHER)
        return gather_slice(e, w, first, n, block);
    if (w->by_row)
        return run_rows(e, w, first / cols, (first + n) / cols, block);
    return run_range(e, w, first, n, block);
}

void table_add(table *t, const work *w, int64_t cols)
{
    int64_t i = t->n_updates++;
    for (; i > 0 && t->update[i - 1].first > w->first; i--)
        t->update[i] = t->update[i - 1];
    t->update[i] = *w;
    for (int64_t r = w->first / cols; r < w->end / cols; r++)
        atomic_store_explicit(&t->row[r], ROW_OLD, memory_order_relaxed);
}

static mt_status create_table(engine *e, int32_t param)
{
    const model_param *p = &e->m->params[param];
    table *t = e->pool.table[param] = calloc(1, sizeof *t);
    if (!t)
        return status_nomem("a table", sizeof *t);
    /* One of all rows, one for every slab of gathered rows, or of each segment's. */
    int64_t most = p->elems / layout_slice(p, e->l.slab_elems) + 1 + e->l.n_pieces;
    t->update = calloc((size_t)most, sizeof *t->update);
    t->row = malloc((size_t)p->rows * sizeof *t->row);
    if (!t->update || !t->row)
        return status_nomem("a table's rows", (size_t)p->rows);
    for (int64_t r = 0; r < p->rows; r++)
        atomic_init(&t->row[r], ROW_NEW);
    return MT_OK;
}

mt_status tables_start(engine *e)
{
    size_t n = (size_t)e->m->n_params;
    mt_status st = MT_OK;
    e->pool.table = calloc(n, sizeof(table *));
    if (!e->pool.table)
        return status_nomem("the tables", n * sizeof(table *));
    if (!e->training || e->optim->granularity == MT_GRAIN_TENSOR)
        return MT_OK;
    for (int32_t u = 0; u < e->m->n_units; u++)
        for (uint32_t k = 0; k < e->m->units[u].t->n_params && st == MT_OK; k++) {
            int32_t param = e->m->units[u].slot[k];
            if (e->m->units[u].t->params[k].gathered &&
                !(e->m->params[param].flags & MT_PARAM_FROZEN))
                st = create_table(e, param);
        }
    return st;
}

void tables_stop(engine *e)
{
    for (int32_t i = 0; e->pool.table && i < e->m->n_params; i++) {
        table *t = e->pool.table[i];
        if (t) {
            free(t->update);
            free(t->row);
        }
        free(t);
    }
    free(e->pool.table);
}
