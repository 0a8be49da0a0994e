/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients that the optimizer has no time for yet wait on the device. Those of several groups do
 * so in their sums. Those of one group do where forward saved activations: as backward comes down,
 * what was saved for the units above is done with. The lander takes the newest piece first, the one
 * that the next forward needs first. What is left at the end of the step leaves beside the next
 * forward, before that comes to the memory.
 */
#include "internal.h"

#include <string.h>

void parking_place(engine *e, const int64_t *at)
{
    char *saved = e->region[LAYOUT_SAVED];
    for (int64_t i = 0; i < e->l.n_pieces; i++) {
        grad_buffer *g = &e->grads[i];
        g->first_unit = e->m->n_units;
        if (at[i] < 0)
            continue;
        g->data = saved + at[i];
        /* Units whose memory it reaches into. */
        for (int32_t u = 0; u < e->m->n_units; u++) {
            if (e->unit[u].saved[0] < at[i] + g->bytes)
                g->last_unit = u;
            if (e->unit[u].saved[0] <= at[i])
                g->first_unit = u;
        }
    }
}

void parking_vacate(engine *e, int32_t unit)
{
    for (int64_t i = 0; e->l.parked && i < e->l.n_pieces; i++) {
        grad_buffer *g = &e->grads[i];
        if (g->first_unit <= unit && unit <= g->last_unit)
            lander_free(e, g);
    }
}

bool parking_takes(const engine *e, int32_t piece)
{
    const tpl_segment *s = piece_segment(e, piece);
    /* Contributions that are added up go in the order in which they were formed. */
    for (int32_t i = 0; i < s->n_slices; i++)
        if (e->plane[piece_param(e, piece, &s->slice[i])])
            return false;
    return e->l.parked && !e->serial;
}

void parking_add(engine *e, const landing *l)
{
    pthread_mutex_lock(&e->lock);
    e->grads[l->buffer].busy = true;
    e->parking.landing[e->parking.n++] = *l;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

/* Slabs that the piece's gradients take, or half of all if that is less. */
static int64_t count_slabs(const engine *e, const landing *l)
{
    const tpl_segment *s = piece_segment(e, l->piece);
    int64_t n = 0;
    for (int32_t i = 0; i < s->n_slices; i++) {
        const model_param *p = &e->m->params[piece_param(e, l->piece, &s->slice[i])];
        bool gathered = e->m->units[e->piece[l->piece].unit].t->params[s->slice[i].slot].gathered;
        int64_t elems = gathered ? e->set[l->set].n_grad_rows * p->cols : s->slice[i].n;
        int64_t slice = layout_slice(p, e->l.slab_elems);
        n += (elems + slice - 1) / slice;
    }
    return n < e->l.n_slabs / 2 ? n : e->l.n_slabs / 2;
}

/* The last of them that compute is through with, -1: there is none. e->lock is held. */
static int64_t find_newest(engine *e)
{
    int64_t i = e->parking.n - 1;
    while (i >= 0 && !e->b->event_query(e->dev, e->grads[e->parking.landing[i].buffer].ready))
        i--;
    return i;
}

/* Only where it will not have to wait for slabs half-way: a newer piece may come meanwhile. */
bool parking_take(engine *e, landing *ret)
{
    parking *p = &e->parking;
    pthread_mutex_lock(&e->lock);
    while (p->n > 0 && !p->closed && e->landings_done == e->landings_given) {
        int64_t i = find_newest(e);
        landing l = p->landing[i < 0 ? 0 : i];
        int64_t slabs = count_slabs(e, &l);
        if (i >= 0 && pool_free_slabs(e) >= slabs) {
            p->n--;
            memmove(p->landing + i, p->landing + i + 1, (size_t)(p->n - i) * sizeof *p->landing);
            p->taken = true;
            pthread_mutex_unlock(&e->lock);
            *ret = l;
            return true;
        }
        pthread_mutex_unlock(&e->lock);
        if (i < 0)
            e->b->event_sync(e->dev, e->grads[l.buffer].ready);
        else
            pool_wait_slabs(e, slabs);
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return false;
}

void parking_open(engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->parking.closed = false;
    pthread_mutex_unlock(&e->lock);
}

int64_t parking_close(engine *e)
{
    parking *p = &e->parking;
    pthread_mutex_lock(&e->lock);
    p->closed = true;
    while (p->taken)
        pthread_cond_wait(&e->progress, &e->lock);
    int64_t n = p->n;
    p->n = 0;
    pthread_mutex_unlock(&e->lock);
    return n;
}

/* Lets it leave as gradients do that were held for their norm. */
static void defer(engine *e, landing l)
{
    const tpl_segment *s = piece_segment(e, l.piece);
    const tpl *t = e->m->units[e->piece[l.piece].unit].t;
    for (int32_t i = 0; i < s->n_slices; i++) {
        int32_t param = piece_param(e, l.piece, &s->slice[i]);
        bool gathered = t->params[s->slice[i].slot].gathered;
        if (e->m->params[param].flags & MT_PARAM_FROZEN)
            continue;
        if (gathered) /* an update by an earlier step's */
            pool_wait_param(e, param);
        pool_announce(e, param, gathered ? e->m->params[param].elems : s->slice[i].n);
    }
    l.held = true;
    lander_give(e, &l);
}

/* In the order of forward, but for the lowest tables: workers can begin on slices of the unit above
 * at once, and gather rows only when all of a table's are there. */
static void defer_all(engine *e, int64_t n)
{
    const landing *l = e->parking.landing;
    int64_t above = n - 1;
    while (above >= 0 && e->unit[e->piece[l[above].piece].unit].gathers)
        above--;
    if (above >= 0)
        defer(e, l[above]);
    for (int64_t i = n - 1; i >= 0; i--)
        if (i != above)
            defer(e, l[i]);
}

static void forget(engine *e, int64_t n)
{
    pthread_mutex_lock(&e->lock);
    for (int64_t i = 0; i < n; i++)
        e->grads[e->parking.landing[i].buffer].busy = false;
    pthread_mutex_unlock(&e->lock);
}

void parking_clear(engine *e, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        lander_check_piece(e, e->parking.landing[i].piece);
    if (e->step.discard)
        forget(e, n);
    else
        defer_all(e, n);
}
