/* SPDX-License-Identifier: Apache-2.0
 *
 * Finite differences for whole templates: the derived backward of each is compared, in FP64, with
 * central differences of a scalar of its outputs, and its three activation policies with each
 * other, bit for bit. Needs a backend whose device memory is host memory.
 */
#include "gradcheck.h"

#include "../base/status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A small, odd micro-batch: documents of 5, 1 and 3 tokens, two targets ignored. */
enum { TOKENS = 9, DOCUMENTS = 3, LONGEST = 5, IGNORED = 2 };
static const int32_t doc_starts[DOCUMENTS + 1] = { 0, 5, 6, 9 };
static const int32_t positions[TOKENS] = { 0, 1, 2, 3, 4, 0, 0, 1, 2 };

/* Elements of a tensor that are compared; all of a smaller one. */
enum { MAX_PROBES = 24 };

static const double step_size = 1e-5, tolerance = 1e-6;

typedef struct rig {
    const mt_backend *backend;
    void *device, *queue;
    const tpl *t;
    int64_t vocab;
    tpl_plan *plan;
    tpl_binding bind;
    mt_batch batch;
    int32_t ids[TOKENS], rows[TOKENS], targets[TOKENS];
    /* What is random and stays: weights, inputs, and the outputs' share in the scalar. */
    double *weights, *in[MT_UNIT_MAX_IO], *share[MT_UNIT_MAX_IO];
    void *owned[48];
    int n_owned;
    int64_t owned_bytes[48];
    uint64_t random;
} rig;

/* ---- setting up ------------------------------------------------------------------------------ */

static double draw(rig *r)
{
    r->random = r->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(r->random >> 11) * 0x1p-52 - 1.0; /* [-1, 1) */
}

static mt_status alloc(rig *r, int64_t bytes, void *ret_pointer)
{
    void *p = NULL;
    bytes = bytes > 0 ? bytes : 256;
    mt_status st = r->backend->device_alloc(r->device, bytes, &p);
    if (st != MT_OK)
        return st;
    memset(p, 0, (size_t)bytes);
    r->owned[r->n_owned] = p;
    r->owned_bytes[r->n_owned++] = bytes;
    memcpy(ret_pointer, &p, sizeof p);
    return MT_OK;
}

static int64_t values_of(int64_t bytes)
{
    return bytes / (int64_t)sizeof(double);
}

static void fill_batch(rig *r)
{
    int64_t vocab = r->vocab;
    for (int i = 0; i < TOKENS; i++) {
        r->ids[i] = (int32_t)(((int64_t)i * 5 + 1) % vocab);
        r->targets[i] = i < IGNORED ? -100 : (int32_t)(((int64_t)i * 3 + 2) % vocab);
        /* Token i reads the row of the first token with the same id. */
        int first = 0;
        while (r->ids[first] != r->ids[i])
            first++;
        r->rows[i] = first;
    }
    r->batch = (mt_batch){ .tokens = TOKENS,
                           .documents = DOCUMENTS,
                           .max_document = LONGEST,
                           .ids = r->ids,
                           .rows = r->rows,
                           .targets = r->targets,
                           .positions = positions,
                           .doc_starts = doc_starts,
                           .host_doc_starts = doc_starts,
                           .loss_scale = 1.0 / (TOKENS - IGNORED) };
}

/* Elements of parameter slot i that are on the device. */
static int64_t slot_elems(const rig *r, uint32_t i)
{
    const tpl_param *p = &r->t->params[i];
    return p->gathered ? TOKENS * p->info.cols : p->elems;
}

static void fill_weights(rig *r)
{
    for (uint32_t i = 0; i < r->t->n_params; i++) {
        const mt_param_info *p = &r->t->params[i].info;
        double *w = r->weights + r->plan->slot_offset[i];
        double scale = p->rows ? 1.5 / sqrt((double)p->cols) : 0.3;
        double middle = p->rows || p->init == MT_INIT_ZEROS ? 0.0 : 1.0;
        for (int64_t k = 0; k < slot_elems(r, i); k++)
            w[k] = middle + scale * draw(r);
    }
}

static mt_status open_plan(rig *r, tpl_policy policy)
{
    const tpl_bounds bounds = {
        .tokens = TOKENS, .documents = DOCUMENTS, .gather_rows = TOKENS, .compute = MT_F64
    };
    tpl_plan_destroy(r->plan);
    r->plan = NULL;
    mt_status st = tpl_plan_create(r->t, policy, &bounds, r->backend, r->device, &r->plan);
    if (st != MT_OK)
        return st;
    int64_t work = r->plan->work_bytes[0] > r->plan->work_bytes[1] ? r->plan->work_bytes[0]
                                                                   : r->plan->work_bytes[1];
    st = alloc(r, r->plan->saved_bytes, &r->bind.saved);
    return st == MT_OK ? alloc(r, work, &r->bind.work) : st;
}

static mt_status set_up(rig *r)
{
    fill_batch(r);
    mt_status st = open_plan(r, TPL_KEEP);
    if (st == MT_OK)
        st = alloc(r, r->plan->weight_bytes, &r->weights);
    if (st == MT_OK)
        st = alloc(r, r->plan->grad_bytes, &r->bind.grads);
    r->bind.weights = r->weights;
    if (st == MT_OK)
        st = alloc(r, r->t->tally * (int64_t)sizeof *r->bind.tally, &r->bind.tally);
    for (uint32_t i = 0; st == MT_OK && i < r->t->n_in; i++) {
        st = alloc(r, r->plan->in_bytes[i], &r->in[i]);
        for (int64_t k = 0; st == MT_OK && k < values_of(r->plan->in_bytes[i]); k++)
            r->in[i][k] = draw(r);
        r->bind.in[i] = r->in[i];
    }
    for (uint32_t i = 0; st == MT_OK && i < r->t->n_out; i++) {
        st = alloc(r, r->plan->out_bytes[i], &r->bind.out[i]);
        if (st == MT_OK)
            st = alloc(r, r->plan->out_bytes[i], &r->bind.d_out[i]);
        if (st == MT_OK)
            st = alloc(r, r->plan->out_bytes[i], &r->share[i]);
        for (int64_t k = 0; st == MT_OK && k < values_of(r->plan->out_bytes[i]); k++)
            r->share[i][k] = r->t->makes_loss ? r->batch.loss_scale : draw(r);
    }
    for (uint32_t i = 0; st == MT_OK && i < r->t->n_in; i++) {
        int32_t place = r->plan->d_in_place[i];
        if (place >= 0)
            r->bind.d_in[i] = r->bind.d_out[place];
        else
            st = alloc(r, r->plan->in_bytes[i], &r->bind.d_in[i]);
    }
    if (st == MT_OK)
        fill_weights(r);
    return st;
}

static void tear_down(rig *r)
{
    tpl_plan_destroy(r->plan);
    for (int i = 0; i < r->n_owned; i++)
        r->backend->device_free(r->device, r->owned[i], r->owned_bytes[i]);
}

/* ---- running --------------------------------------------------------------------------------- */

/* The scalar that is differentiated, at the present weights and inputs. */
static double scalar(rig *r, mt_pass pass)
{
    memset(r->bind.tally, 0, (size_t)r->t->tally * sizeof *r->bind.tally);
    tpl_forward(r->plan, r->queue, &r->bind, &r->batch, pass);
    r->backend->queue_sync(r->device, r->queue);
    double sum = 0;
    for (uint32_t i = 0; i < r->t->n_out; i++) {
        const double *out = r->bind.out[i];
        int64_t n = TOKENS * r->t->out_cols[i];
        for (int64_t k = 0; k < n; k++)
            sum += r->share[i][k] * out[k];
    }
    int64_t loss = r->plan->loss_offset[pass != MT_PASS_TRAIN];
    if (loss >= 0)
        sum += r->batch.loss_scale * *(const double *)((const char *)r->bind.work + loss);
    return sum;
}

/* Forward and backward; gradients are left in bind.grads and bind.d_in. */
static mt_status differentiate(rig *r)
{
    memset(r->bind.grads, 0, (size_t)(r->plan->grad_bytes > 0 ? r->plan->grad_bytes : 0));
    scalar(r, MT_PASS_TRAIN);
    for (uint32_t i = 0; i < r->t->n_out; i++)
        memcpy(r->bind.d_out[i], r->share[i], (size_t)r->plan->out_bytes[i]);
    tpl_backward(r->plan, r->queue, &r->bind, &r->batch);
    r->backend->queue_sync(r->device, r->queue);
    return r->backend->error(r->device);
}

static double *copy_of(const void *p, int64_t n)
{
    double *q = malloc((size_t)(n > 0 ? n : 1) * sizeof *q);
    if (q)
        memcpy(q, p, (size_t)n * sizeof *q);
    return q;
}

/* Compares gradient[0..n) with differences of the scalar by x[0..n). */
static mt_status compare(rig *r, const char *what, double *x, const double *gradient, int64_t n)
{
    double largest = 0;
    for (int64_t k = 0; k < n; k++)
        largest = fmax(largest, fabs(gradient[k]));
    int64_t stride = n > MAX_PROBES ? n / MAX_PROBES : 1;
    for (int64_t k = 0; k < n; k += stride) {
        double keep = x[k];
        x[k] = keep + step_size;
        double above = scalar(r, MT_PASS_EVAL);
        x[k] = keep - step_size;
        double below = scalar(r, MT_PASS_EVAL);
        x[k] = keep;
        double expected = (above - below) / (2 * step_size);
        if (!(fabs(gradient[k] - expected) <= tolerance * fmax(largest, 1e-2)))
            return status_set(
                MT_ERR_NUMERIC,
                "template %s: the gradient of %s at element %lld is %.12g, but finite "
                "differences say %.12g",
                r->t->name, what, (long long)k, gradient[k], expected);
    }
    return r->backend->error(r->device);
}

static mt_status compare_all(rig *r, const double *grads, double *const *d_in)
{
    mt_status st = MT_OK;
    for (uint32_t i = 0; st == MT_OK && i < r->t->n_params; i++) {
        if (r->t->params[i].info.flags & MT_PARAM_FROZEN)
            continue;
        int64_t at = r->plan->slot_offset[i];
        st = compare(r, r->t->params[i].info.name, r->weights + at, grads + at, slot_elems(r, i));
    }
    for (uint32_t i = 0; st == MT_OK && i < r->t->n_in; i++) {
        char what[24];
        snprintf(what, sizeof what, "input %u", i);
        st = compare(r, what, r->in[i], d_in[i], TOKENS * r->t->in_cols[i]);
    }
    return st;
}

/* The other policies must give the bits of `keep`. */
static mt_status compare_policy(rig *r, tpl_policy policy, const double *grads, double *const *d_in)
{
    mt_status st = open_plan(r, policy);
    if (st == MT_OK)
        st = differentiate(r);
    if (st != MT_OK)
        return st;
    bool same = memcmp(r->bind.grads, grads, (size_t)r->plan->grad_bytes) == 0;
    for (uint32_t i = 0; i < r->t->n_in; i++)
        same &= memcmp(r->bind.d_in[i], d_in[i],
                       (size_t)(TOKENS * r->t->in_cols[i]) * sizeof(double)) == 0;
    if (!same)
        return status_set(MT_ERR_NUMERIC,
                          "template %s: the gradients under policy '%s' are not "
                          "those under 'keep'",
                          r->t->name, tpl_policy_name(policy));
    return MT_OK;
}

static mt_status check_template(rig *r)
{
    double *grads = NULL, *d_in[MT_UNIT_MAX_IO] = { NULL };
    mt_status st = set_up(r);
    if (st == MT_OK)
        st = differentiate(r);
    if (st != MT_OK)
        return st;
    grads = copy_of(r->bind.grads, values_of(r->plan->grad_bytes));
    bool whole = grads != NULL;
    for (uint32_t i = 0; i < r->t->n_in; i++) {
        d_in[i] = copy_of(r->bind.d_in[i], TOKENS * r->t->in_cols[i]);
        whole &= d_in[i] != NULL;
    }
    st = whole ? compare_all(r, grads, d_in) : status_nomem("gradients", 0);
    for (int p = TPL_SELECT; st == MT_OK && p < TPL_POLICIES; p++)
        st = compare_policy(r, (tpl_policy)p, grads, d_in);
    for (uint32_t i = 0; i < r->t->n_in; i++)
        free(d_in[i]);
    free(grads);
    return st;
}

mt_status gradcheck_template(const tpl *t, int64_t vocab, const mt_backend *backend, void *device)
{
    void *queue = NULL;
    mt_device_info info = { .struct_size = sizeof info };
    backend->info(device, &info);
    if (!info.unified || !(info.compute_dtypes >> MT_F64 & 1))
        return status_set(MT_ERR_UNSUPPORTED,
                          "gradients are checked in FP64 in host memory; backend '%s' has not both",
                          backend->kind);
    mt_status st = backend->queue_create(device, "gradient check", &queue);
    if (st != MT_OK)
        return st;
    rig r = {
        .backend = backend, .device = device, .queue = queue, .t = t, .vocab = vocab, .random = 1
    };
    st = check_template(&r);
    tear_down(&r);
    backend->queue_destroy(device, queue);
    return st;
}
