/* SPDX-License-Identifier: Apache-2.0
 *
 * A model run unit by unit straight through a backend: everything resident, no streaming, no
 * overlap. It shows what templates and kernels compute without the engine, in FP32 or FP64.
 */
#ifndef TEST_ORACLE_UNITS_H
#define TEST_ORACLE_UNITS_H

#include "../../core/engine/batch.h"
#include "../../core/host/store.h"

typedef struct units units;

typedef struct units_config {
    const store *store;
    const mt_backend *backend;
    void *device;
    mt_dtype compute; /* MT_F32 or MT_F64 */
    tpl_policy policy;
    int64_t max_tokens, max_documents; /* of a micro-batch, and of a generated sequence */
} units_config;

/* Copies the store's present masters. */
mt_status units_create(const units_config *config, units **ret);
void units_destroy(units *u); /* accepts NULL */

/* Loss in nats, summed over all targets, what units add to that sum, and for every parameter the
 * gradient of the mean of both (ret_grads[param], caller's memory, model_param.elems each). */
mt_status units_gradients(units *u, const step_batch *batch, double *ret_loss_sum,
                          double *ret_aux_loss_sum, double *const *ret_grads);

/* The loss alone, by the inference programs. */
mt_status units_eval(units *u, const step_batch *batch, double *ret_loss_sum);

/* Feeds n tokens at positions used.. (0 starts a sequence); logits of each go to ret [n, vocab]. */
mt_status units_generate(units *u, const int32_t *tokens, int64_t n, int64_t used, double *ret);

#endif
