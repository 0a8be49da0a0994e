/* SPDX-License-Identifier: Apache-2.0
 *
 * How a step's rows fell to experts: compute tells the host, and what follows from it there.
 * Experts without rows have no gradients; a router's bias moves so that all get as many.
 */
#include "internal.h"

#include "../base/status.h"

#include <math.h>
#include <stdlib.h>

static int32_t *offsets_of(const engine *e, int32_t unit, int64_t b)
{
    int64_t each = layout_offsets_bytes(e->m->units[unit].t);
    return (int32_t *)(void *)(e->unit[unit].offsets + b * each);
}

void experts_tell(engine *e, int32_t unit, int64_t b, const tpl_binding *bind, mt_pass pass)
{
    const tpl *t = e->m->units[unit].t;
    if (t->experts == 0)
        return;
    e->b->copy_out(e->dev, e->q_compute, offsets_of(e, unit, b),
                   tpl_expert_offsets(e->p->tpl[unit], bind, pass), (t->experts + 1) * 4);
    enqueued(e, e->q_compute);
}

bool experts_idle(const engine *e, int32_t unit, int32_t first, int32_t end, micro_range r)
{
    for (int64_t b = r.first; b < r.first + r.n; b++) {
        const int32_t *offsets = offsets_of(e, unit, b);
        if (offsets[end] > offsets[first])
            return false;
    }
    return true;
}

bool experts_unused(const engine *e, int32_t unit, int32_t first, int32_t end)
{
    for (int32_t k = first; k < end; k++)
        if (e->unit[unit].load[k] > 0)
            return false;
    return true;
}

void experts_count(engine *e, int64_t batches)
{
    for (int32_t u = 0; u < e->m->n_units; u++)
        for (int32_t k = 0; k < e->m->units[u].t->experts; k++) {
            int64_t rows = 0;
            for (int64_t b = 0; b < batches; b++)
                rows += offsets_of(e, u, b)[k + 1] - offsets_of(e, u, b)[k];
            e->unit[u].load[k] = rows;
        }
}

static int64_t sum_load(const engine *e, int32_t unit, int64_t *ret_most)
{
    int64_t sum = 0, most = 0;
    for (int32_t k = 0; k < e->m->units[unit].t->experts; k++) {
        int64_t rows = e->unit[unit].load[k];
        sum += rows;
        most = rows > most ? rows : most;
    }
    if (ret_most)
        *ret_most = most;
    return sum;
}

double experts_violation(const engine *e)
{
    double worst = NAN;
    for (int32_t u = 0; u < e->m->n_units; u++) {
        int64_t most, sum = sum_load(e, u, &most);
        if (sum > 0)
            worst = fmax(worst, (double)most * e->m->units[u].t->experts / (double)sum - 1);
    }
    return worst;
}

/* The bias of unit `unit`, in its owner's planes. */
static void move_bias(engine *e, int32_t unit, float rate)
{
    const tpl *t = e->m->units[unit].t;
    const model_param *p = &e->m->params[e->m->units[unit].slot[t->bias_slot]];
    uint16_t *hi = e->s->units[p->unit].hi + p->offset;
    int16_t *lo = e->s->units[p->unit].lo + p->offset;
    int64_t sum = sum_load(e, unit, NULL);
    for (int32_t k = 0; k < t->experts; k++) {
        int64_t excess = e->unit[unit].load[k] * t->experts - sum; /* times experts: whole */
        float move = excess < 0 ? rate : excess > 0 ? -rate : 0;
        mt_split_f32(mt_join_f32(hi[k], lo[k]) + move, &hi[k], &lo[k]);
    }
}

void experts_balance(engine *e)
{
    for (int32_t u = 0; e->router_bias_rate > 0 && u < e->m->n_units; u++)
        if (model_bias_moves(e->m, u))
            move_bias(e, u, (float)e->router_bias_rate);
}

mt_status experts_start(engine *e)
{
    size_t n = 0;
    for (int32_t u = 0; u < e->m->n_units; u++)
        n += (size_t)e->m->units[u].t->experts;
    int64_t *load = e->loads = calloc(n + 1, sizeof *e->loads);
    if (!load)
        return status_nomem("the experts' loads", n * sizeof *load);
    for (int32_t u = 0; u < e->m->n_units; u++) {
        e->unit[u].load = load;
        load += e->m->units[u].t->experts;
    }
    return MT_OK;
}

void experts_stop(engine *e)
{
    free(e->loads);
}
