/* SPDX-License-Identifier: Apache-2.0
 *
 * Timing a recurrence: the gated delta rule, the one operation of that kind.
 */
#include "probe.h"

#include "../base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { Q, K, V, G, BETA, OPERANDS, MAX_BLOCKS = 16 };

/* What a call holds. */
typedef struct holder {
    const probe *p;
    void *block[MAX_BLOCKS];
    int64_t bytes[MAX_BLOCKS];
    int n;
} holder;

/* Zeros: a state that stays zero takes as long as any other. */
static mt_status zeros(holder *h, int64_t bytes, void **ret)
{
    mt_status st = h->p->b->device_alloc(h->p->device, bytes, ret);
    if (st < 0)
        return st;
    h->p->b->fill(h->p->device, h->p->queue, *ret, 0, bytes);
    h->block[h->n] = *ret;
    h->bytes[h->n++] = bytes;
    return MT_OK;
}

static mt_status tensor(holder *h, int64_t rows, int64_t cols, mt_dtype dtype, mt_tensor *ret)
{
    void *data;
    mt_status st = zeros(h, rows * cols * mt_dtype_size(dtype), &data);
    if (st == MT_OK)
        *ret = (mt_tensor){ data, rows, cols, cols, dtype, 0 };
    return st;
}

static mt_status operands(holder *h, const probe_recurrence *r, mt_op_call *c)
{
    int64_t cols[OPERANDS] = { [Q] = r->k_heads * r->dim,
                               [K] = r->k_heads * r->dim,
                               [V] = r->v_heads * r->dim,
                               [G] = r->v_heads,
                               [BETA] = r->v_heads };
    mt_status st = MT_OK;
    for (int i = 0; i < OPERANDS && st == MT_OK; i++) {
        mt_dtype dtype = i == G ? MT_F32 : r->dtype;
        st = tensor(h, r->tokens, cols[i], dtype, &c->in[i]);
        if (st == MT_OK)
            st = tensor(h, r->tokens, cols[i], dtype, &c->d_in[i]);
    }
    if (st == MT_OK)
        st = tensor(h, r->tokens, cols[V], r->dtype, &c->out[0]);
    if (st == MT_OK)
        st = tensor(h, r->tokens, cols[V], r->dtype, &c->d_out[0]);
    if (st == MT_OK) {
        int64_t state = r->v_heads * r->dim * r->dim;
        int64_t rows = r->tokens + MT_DELTA_CHUNK * c->batch.documents;
        st = tensor(h, rows, (state + MT_DELTA_CHUNK - 1) / MT_DELTA_CHUNK, MT_F32, &c->aux[0]);
    }
    return st;
}

static mt_status time_it(holder *h, const mt_kernel *k, const mt_op_call *call, bool backward,
                         double *ret)
{
    probe_kernel c = { k, *call, backward };
    mt_status st = MT_OK;
    c.call.work_bytes = k->workspace ? k->workspace(h->p->device, &c.call, backward) : 0;
    if (c.call.work_bytes > 0)
        st = zeros(h, c.call.work_bytes, &c.call.work);
    if (st == MT_OK)
        *ret = probe_best(h->p, probe_enqueue_kernel, &c);
    return st;
}

mt_status probe_time_recurrence(const probe *p, const probe_recurrence *r, double ret_seconds[2])
{
    const mt_delta_attr attr = { .k_heads = (int32_t)r->k_heads,
                                 .v_heads = (int32_t)r->v_heads,
                                 .k_dim = (int32_t)r->dim,
                                 .v_dim = (int32_t)r->dim,
                                 .eps = 1e-6,
                                 .scale = 1 / sqrt((double)r->dim) };
    const mt_kernel *k = p->b->kernel(p->device, "gated_delta");
    int64_t documents = (r->tokens + r->document - 1) / r->document;
    holder h = { .p = p };
    void *starts = NULL;
    if (!k || !k->backward)
        return MT_ERR_NOT_FOUND;
    int32_t *host = malloc((size_t)(documents + 1) * sizeof *host);
    if (!host)
        return status_nomem("documents", (size_t)(documents + 1) * sizeof *host);
    for (int64_t d = 0; d <= documents; d++)
        host[d] = (int32_t)(d < documents ? d * r->document : r->tokens);
    mt_op_call c = { .struct_size = sizeof c,
                     .pass = MT_PASS_TRAIN,
                     .attr = &attr,
                     .n_in = OPERANDS,
                     .n_out = 1,
                     .n_aux = 1 };
    mt_status st = zeros(&h, (documents + 1) * 4, &starts);
    if (st == MT_OK) {
        p->b->copy_in(p->device, p->queue, starts, host, (documents + 1) * 4);
        c.batch = (mt_batch){ .tokens = r->tokens,
                              .documents = documents,
                              .max_document = r->document < r->tokens ? r->document : r->tokens,
                              .doc_starts = starts,
                              .host_doc_starts = host };
        st = operands(&h, r, &c);
    }
    double seconds[2] = { 0, 0 };
    for (int backward = 0; backward < 2 && st == MT_OK; backward++)
        st = time_it(&h, k, &c, backward, &seconds[backward]);
    p->b->queue_sync(p->device, p->queue);
    while (h.n > 0) {
        h.n--;
        p->b->device_free(p->device, h.block[h.n], h.bytes[h.n]);
    }
    free(host);
    if (st == MT_OK)
        st = p->b->error(p->device);
    if (st == MT_OK)
        memcpy(ret_seconds, seconds, sizeof seconds);
    return st;
}

double probe_recurrence_flops(const probe_recurrence *r)
{
    return 6.0 * (double)r->tokens * (double)(r->v_heads * r->dim * r->dim);
}
