/* SPDX-License-Identifier: Apache-2.0
 *
 * The resident executor of the oracle tests: buffers for every unit, then one pass after the other.
 */
#include "units.h"

#include "../../core/base/status.h"

#include <stdlib.h>

typedef struct unit_buffers {
    tpl_plan *plan; /* shared by units of the same template; owned by the first of them */
    bool owns_plan;
    void *weights, *grads, *saved;
    void *out[MT_UNIT_MAX_IO];
    void *d_out[MT_UNIT_MAX_IO]; /* may be the unit above's d_out, where gradients pass in place */
    void *state;
} unit_buffers;

typedef struct allocation {
    void *p;
    int64_t bytes;
} allocation;

struct units {
    units_config c;
    const model *m;
    void *queue;
    unit_buffers *unit; /* [n_units] */
    void *work;
    void *logits;
    double *tally;
    int32_t *ids, *targets, *positions, *doc_starts, *logit_rows; /* device */
    int32_t n_allocations;
    allocation allocations[4096];
};

static void *device_alloc(units *u, int64_t bytes)
{
    void *p = NULL;
    int32_t n = u->n_allocations;
    if (bytes < 1)
        bytes = 1;
    if (n == (int32_t)(sizeof u->allocations / sizeof *u->allocations) ||
        u->c.backend->device_alloc(u->c.device, bytes, &p))
        return NULL;
    u->allocations[u->n_allocations++] = (allocation){ p, bytes };
    /* What nobody has written must not be read: NaN shows. */
    u->c.backend->fill(u->c.device, u->queue, p, 0xff, bytes);
    return p;
}

static mt_dtype stat_dtype(const units *u)
{
    return u->c.compute == MT_F64 ? MT_F64 : MT_F32;
}

static void to_double(mt_dtype t, const void *src, int64_t n, double *dst, bool add)
{
    for (int64_t i = 0; i < n; i++) {
        double x = t == MT_F64 ? ((const double *)src)[i] : (double)((const float *)src)[i];
        dst[i] = add ? dst[i] + x : x;
    }
}

/* Masters of every slot in the order of the device layout. */
static mt_status upload_weights(units *u, int32_t index)
{
    const unit_buffers *b = &u->unit[index];
    const model_unit *unit = &u->m->units[index];
    mt_dtype t = u->c.compute;
    char *host = calloc(1, (size_t)b->plan->weight_bytes);
    mt_status status = host ? MT_OK : status_nomem("weights", (size_t)b->plan->weight_bytes);
    for (uint32_t i = 0; i < unit->t->n_params && !status; i++) {
        int64_t elems = unit->t->params[i].elems;
        float *value = malloc((size_t)elems * sizeof *value);
        if (!value) {
            status = status_nomem("weights", (size_t)elems * sizeof *value);
            break;
        }
        store_get(u->c.store, unit->slot[i], 0, elems, value);
        char *to = host + b->plan->slot_offset[i] * mt_dtype_size(t);
        if (t == MT_F64)
            to_double(MT_F32, value, elems, (double *)to, false);
        else
            memcpy(to, value, (size_t)elems * sizeof *value);
        free(value);
    }
    if (!status) {
        u->c.backend->copy_in(u->c.device, u->queue, b->weights, host, b->plan->weight_bytes);
        u->c.backend->queue_sync(u->c.device, u->queue);
    }
    free(host);
    return status;
}

static mt_status create_unit(units *u, int32_t i, int64_t *work_bytes)
{
    const tpl *t = u->m->units[i].t;
    unit_buffers *b = &u->unit[i];
    for (int32_t j = 0; j < i && !b->plan; j++)
        if (u->m->units[j].t == t)
            b->plan = u->unit[j].plan;
    if (!b->plan) {
        tpl_bounds bounds = { .tokens = u->c.max_tokens,
                              .documents = u->c.max_documents,
                              .gather_rows = u->m->vocab,
                              .context = u->c.max_tokens,
                              .compute = u->c.compute };
        mt_status status =
            tpl_plan_create(t, u->c.policy, &bounds, u->c.backend, u->c.device, &b->plan);
        if (status)
            return status;
        b->owns_plan = true;
    }
    const tpl_plan *p = b->plan;
    int64_t work[] = { p->work_bytes[0], p->work_bytes[1], p->generate_work_bytes };
    for (int k = 0; k < 3; k++)
        *work_bytes = work[k] > *work_bytes ? work[k] : *work_bytes;
    b->weights = device_alloc(u, p->weight_bytes);
    b->grads = device_alloc(u, p->grad_bytes);
    b->saved = device_alloc(u, p->saved_bytes);
    bool ok = b->weights && b->grads && b->saved;
    for (uint32_t k = 0; k < t->n_out; k++)
        ok = ok && (b->out[k] = device_alloc(u, p->out_bytes[k]));
    ok = ok && (b->state = device_alloc(u, p->state_bytes));
    return ok ? upload_weights(u, i) : status_nomem("a unit", (size_t)p->weight_bytes);
}

/* Gradients of boundary values, from the top: in place where the plan forms them so. */
static mt_status place_gradients(units *u)
{
    for (int32_t i = u->m->n_units - 1; i > 0; i--) {
        const tpl_plan *p = u->unit[i].plan;
        for (uint32_t k = 0; k < u->m->units[i].t->n_in; k++) {
            int32_t at = p->d_in_place[k];
            void *d = at >= 0 ? u->unit[i].d_out[at] : device_alloc(u, p->in_bytes[k]);
            if (!d)
                return status_nomem("gradients", (size_t)p->in_bytes[k]);
            u->unit[i - 1].d_out[k] = d;
        }
    }
    return MT_OK;
}

mt_status units_create(const units_config *config, units **ret)
{
    units *u = calloc(1, sizeof *u);
    if (!u)
        return status_nomem("units", sizeof *u);
    u->c = *config;
    u->m = config->store->m;
    int64_t t = config->max_tokens, work_bytes = 0, ints = t * (int64_t)sizeof(int32_t);
    mt_status status = config->backend->queue_create(config->device, "oracle", &u->queue);
    u->unit = calloc((size_t)u->m->n_units, sizeof *u->unit);
    if (!status && !u->unit)
        status = status_nomem("units", (size_t)u->m->n_units * sizeof *u->unit);
    for (int32_t i = 0; i < u->m->n_units && !status; i++)
        status = create_unit(u, i, &work_bytes);
    if (!status)
        status = place_gradients(u);
    if (!status) {
        u->work = device_alloc(u, work_bytes);
        u->tally = device_alloc(u, u->m->tally * (int64_t)sizeof *u->tally);
        u->logits = device_alloc(u, t * u->m->vocab * mt_dtype_size(stat_dtype(u)));
        u->ids = device_alloc(u, ints);
        u->targets = device_alloc(u, ints);
        u->positions = device_alloc(u, ints);
        u->logit_rows = device_alloc(u, ints);
        u->doc_starts = device_alloc(u, (config->max_documents + 1) * (int64_t)sizeof(int32_t));
        if (!u->work || !u->tally || !u->logits || !u->ids || !u->targets || !u->positions ||
            !u->logit_rows || !u->doc_starts)
            status = status_nomem("units", (size_t)work_bytes);
    }
    if (status) {
        units_destroy(u);
        return status;
    }
    *ret = u;
    return MT_OK;
}

void units_destroy(units *u)
{
    if (!u)
        return;
    const mt_backend *b = u->c.backend;
    if (u->queue) {
        b->queue_sync(u->c.device, u->queue);
        b->queue_destroy(u->c.device, u->queue);
    }
    for (int32_t i = 0; u->unit && i < u->m->n_units; i++)
        if (u->unit[i].owns_plan)
            tpl_plan_destroy(u->unit[i].plan);
    for (int32_t i = 0; i < u->n_allocations; i++)
        b->device_free(u->c.device, u->allocations[i].p, u->allocations[i].bytes);
    free(u->unit);
    free(u);
}

/* ---- passes ---------------------------------------------------------------------------------- */

static void upload(units *u, int32_t *dst, const int32_t *src, int64_t n)
{
    u->c.backend->copy_in(u->c.device, u->queue, dst, src, n * (int64_t)sizeof *src);
}

static mt_batch upload_batch(units *u, const micro_batch *micro, double loss_scale)
{
    upload(u, u->ids, micro->ids, micro->tokens);
    upload(u, u->targets, micro->targets, micro->tokens);
    upload(u, u->positions, micro->positions, micro->tokens);
    upload(u, u->doc_starts, micro->doc_starts, micro->documents + 1);
    return (mt_batch){ .tokens = micro->tokens,
                       .documents = micro->documents,
                       .max_document = micro->max_document,
                       .ids = u->ids,
                       .rows = u->ids, /* the gathered table is the whole one */
                       .targets = u->targets,
                       .positions = u->positions,
                       .doc_starts = u->doc_starts,
                       .host_doc_starts = micro->doc_starts,
                       .loss_scale = loss_scale };
}

static tpl_binding bind_unit(units *u, int32_t i, bool accumulate)
{
    const unit_buffers *b = &u->unit[i];
    tpl_binding bind = { .weights = b->weights,
                         .grads = b->grads,
                         .accumulate = accumulate,
                         .saved = b->saved,
                         .work = u->work,
                         .tally = u->tally };
    for (int k = 0; k < MT_UNIT_MAX_IO; k++) {
        bind.out[k] = b->out[k];
        bind.d_out[k] = b->d_out[k];
        if (i > 0) {
            bind.in[k] = u->unit[i - 1].out[k];
            bind.d_in[k] = u->unit[i - 1].d_out[k];
        }
    }
    return bind;
}

/* What unit i has just added to the loss. */
static double read_aux_loss(units *u, int32_t i)
{
    int64_t at = u->unit[i].plan->loss_offset[0];
    double raw = 0, loss = 0;
    if (at < 0)
        return 0;
    u->c.backend->copy_out(u->c.device, u->queue, &raw, (const char *)u->work + at,
                           mt_dtype_size(stat_dtype(u)));
    u->c.backend->queue_sync(u->c.device, u->queue);
    to_double(stat_dtype(u), &raw, 1, &loss, false);
    return loss;
}

/* Returns what units add to the loss of a training pass. */
static double forward(units *u, const mt_batch *batch, mt_pass pass, int64_t used, bool accumulate)
{
    double aux_loss = 0;
    u->c.backend->fill(u->c.device, u->queue, u->tally, 0, u->m->tally * (int64_t)sizeof *u->tally);
    for (int32_t i = 0; i < u->m->n_units; i++) {
        tpl_binding bind = bind_unit(u, i, accumulate);
        if (pass == MT_PASS_PREFILL || pass == MT_PASS_DECODE) {
            bind.state = u->unit[i].state;
            bind.used = used;
        }
        tpl_forward(u->unit[i].plan, u->queue, &bind, batch, pass);
        if (pass == MT_PASS_TRAIN)
            aux_loss += read_aux_loss(u, i);
    }
    return aux_loss;
}

static double read_loss(units *u, const micro_batch *micro)
{
    mt_dtype t = stat_dtype(u);
    double *loss = calloc((size_t)micro->tokens, 2 * sizeof *loss), sum = 0;
    if (!loss)
        return -1;
    u->c.backend->copy_out(u->c.device, u->queue, loss, u->unit[u->m->n_units - 1].out[0],
                           micro->tokens * mt_dtype_size(t));
    u->c.backend->queue_sync(u->c.device, u->queue);
    to_double(t, loss, micro->tokens, loss + micro->tokens, false);
    for (int64_t i = 0; i < micro->tokens; i++)
        sum += loss[micro->tokens + i];
    free(loss);
    return sum;
}

static mt_status read_grads(units *u, double *const *ret)
{
    const model *m = u->m;
    mt_dtype t = stat_dtype(u);
    for (int32_t p = 0; p < m->n_params; p++)
        memset(ret[p], 0, (size_t)m->params[p].elems * sizeof **ret);
    for (int32_t i = 0; i < m->n_units; i++) {
        const tpl_plan *plan = u->unit[i].plan;
        char *host = malloc((size_t)plan->grad_bytes);
        if (!host)
            return status_nomem("gradients", (size_t)plan->grad_bytes);
        u->c.backend->copy_out(u->c.device, u->queue, host, u->unit[i].grads, plan->grad_bytes);
        u->c.backend->queue_sync(u->c.device, u->queue);
        for (uint32_t k = 0; k < m->units[i].t->n_params; k++)
            to_double(t, host + plan->slot_offset[k] * mt_dtype_size(t),
                      m->units[i].t->params[k].elems, ret[m->units[i].slot[k]], true);
        free(host);
    }
    return MT_OK;
}

mt_status units_gradients(units *u, const step_batch *batch, double *ret_loss_sum,
                          double *ret_aux_loss_sum, double *const *ret_grads)
{
    double sum = 0, aux_sum = 0;
    for (int64_t k = 0; k < batch->n; k++) {
        mt_batch b = upload_batch(u, &batch->micro[k], 1.0 / (double)batch->n_targets);
        aux_sum += forward(u, &b, MT_PASS_TRAIN, 0, k > 0);
        sum += read_loss(u, &batch->micro[k]);
        for (int32_t i = u->m->n_units - 1; i >= 0; i--) {
            tpl_binding bind = bind_unit(u, i, k > 0);
            tpl_backward(u->unit[i].plan, u->queue, &bind, &b);
        }
        u->c.backend->queue_sync(u->c.device, u->queue);
    }
    mt_status status = read_grads(u, ret_grads);
    if (!status)
        status = u->c.backend->error(u->c.device);
    if (!status) {
        *ret_loss_sum = sum;
        *ret_aux_loss_sum = aux_sum;
    }
    return status;
}

mt_status units_eval(units *u, const step_batch *batch, double *ret_loss_sum)
{
    double sum = 0;
    for (int64_t k = 0; k < batch->n; k++) {
        mt_batch b = upload_batch(u, &batch->micro[k], 1.0 / (double)batch->n_targets);
        forward(u, &b, MT_PASS_EVAL, 0, false);
        sum += read_loss(u, &batch->micro[k]);
    }
    mt_status status = u->c.backend->error(u->c.device);
    if (!status)
        *ret_loss_sum = sum;
    return status;
}

mt_status units_generate(units *u, const int32_t *tokens, int64_t n, int64_t used, double *ret)
{
    mt_dtype t = stat_dtype(u);
    int64_t elems = n * u->m->vocab;
    int32_t starts[2] = { 0, (int32_t)n };
    int32_t *ints = malloc((size_t)n * 3 * sizeof *ints);
    double *logits = malloc((size_t)elems * sizeof *logits);
    mt_status status = ints && logits ? MT_OK : status_nomem("logits", (size_t)elems * 8);
    if (status)
        goto out;
    for (int64_t i = 0; i < n; i++) {
        ints[i] = -100;
        ints[n + i] = (int32_t)(used + i);
        ints[2 * n + i] = (int32_t)i;
    }
    micro_batch micro = { .tokens = n,
                          .documents = 1,
                          .max_document = n,
                          .ids = (int32_t *)tokens,
                          .targets = ints,
                          .positions = ints + n,
                          .doc_starts = starts };
    mt_batch b = upload_batch(u, &micro, 0);
    upload(u, u->logit_rows, ints + 2 * n, n);
    b.logits = u->logits;
    b.logit_rows = u->logit_rows;
    b.n_logit_rows = n;
    forward(u, &b, used ? MT_PASS_DECODE : MT_PASS_PREFILL, used, false);
    u->c.backend->copy_out(u->c.device, u->queue, logits, u->logits, elems * mt_dtype_size(t));
    u->c.backend->queue_sync(u->c.device, u->queue);
    to_double(t, logits, elems, ret, false);
    status = u->c.backend->error(u->c.device);
out:
    free(ints);
    free(logits);
    return status;
}
