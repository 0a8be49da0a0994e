/* SPDX-License-Identifier: Apache-2.0
 *
 * The streamed executor: runs steps of a plan over a store. Three device queues (copy-in, compute,
 * copy-out) and a pool of optimizer workers, tied only by events.
 */
#ifndef MT_CORE_ENGINE_H
#define MT_CORE_ENGINE_H

#include "batch.h"
#include "plan.h"

typedef struct engine engine;

/* How a parameter's update differs from the others'. */
typedef struct engine_rule {
    double lr_scale; /* times the step's learning rate */
    bool has_decay;
    double weight_decay; /* in place of the optimizer's own, with has_decay */
} engine_rule;

#define TRACE_MARK "{\"displayTimeUnit\""

typedef struct engine_config {
    const plan *plan;
    store *store;
    const mt_backend *backend;
    void *device;
    const mt_optim *optim;    /* NULL for inference */
    const void *optim_state;  /* what optim->create returned */
    const engine_rule *rules; /* [n_params]; NULL: none. Outlives the engine */
    /* By how much each element of a router's bias (MT_OP_ROUTES) moves after a step: up where its
     * expert got fewer of the step's rows than the mean, down where more (auxiliary-loss-free load
     * balancing, arXiv 2408.15664, algorithm 1). 0: biases stay. */
    double router_bias_rate;
    bool bind_workers; /* to processors of their own, where there are enough */
    bool serial;       /* one queue, no overlap: the reference for every race test */
    uint64_t chaos;    /* != 0: random delays in every queue and worker, freed buffers poisoned */
    const char *trace_path; /* NULL: no trace; the file begins with TRACE_MARK */
} engine_config;

typedef struct engine_step_params {
    int64_t step; /* optimizer step, 1 for the first; kept by the caller across skips */
    double lr;
    double max_grad_norm; /* must agree with the plan on 0 / not 0 */
} engine_step_params;

/* Why the compute queue stood still. */
enum engine_wait {
    ENGINE_WAIT_WEIGHTS = 0,
    ENGINE_WAIT_GRADIENTS = 1,
    ENGINE_WAIT_OPTIMIZER = 2,
    ENGINE_WAIT_DATA = 3,
    ENGINE_WAITS = 4
};

typedef struct engine_result {
    double loss_sum; /* over all targets of the step, nats */
    /* What units add to it (experts used evenly), coefficients included; 0 where none does. Divided
     * by n_targets it is the step's, like loss_sum. */
    double aux_loss_sum;
    int64_t n_targets;
    double
        grad_norm; /* global L2 norm before clipping; NaN where immediate updates never form it */
    bool updated;  /* false: something was not finite and no state changed */
    /* Of the layers with experts the worst: the rows of its busiest expert in this step, over the
     * mean, less 1 (MaxVio, arXiv 2408.15664). NaN where there are no experts. */
    double router_violation;
    double seconds;         /* wall time of the step as the caller saw it */
    double compute_seconds; /* compute queue busy */
    double wait_seconds[ENGINE_WAITS];
    /* Weights in and gradients out: how much, and how long their queues were at it (what copy-out
     * waits for on the host included). */
    int64_t copy_in_bytes, copy_out_bytes;
    double copy_in_seconds, copy_out_seconds;
    /* Updates that were finished since the step before: with clipping those of the step before.
     * Seconds are those during which any worker was at one. */
    int64_t updated_elems;
    double update_seconds;
} engine_result;

/* Allocates everything that the plan lists, and nothing later. [main] */
mt_status engine_create(const engine_config *config, engine **ret);
void engine_destroy(engine *e); /* drains; accepts NULL */

/* One optimizer step. With clipping, the updates go on in the background after it returned, ahead
 * of the next forward. A non-finite loss or norm changes no state (ret->updated false, MT_OK); with
 * immediate updates a non-finite gradient fails with MT_ERR_NUMERIC, naming the unit. Fails before
 * any work when the batch exceeds the plan's bounds. [main] */
mt_status engine_step(engine *e, const step_batch *batch, const engine_step_params *params,
                      engine_result *ret);

/* What the queues spent on one unit in the last step: seconds, and how many passes or copies those
 * are of. The last unit's forward is part of its backward. */
typedef struct engine_unit_times {
    double forward, backward; /* of compute, one pass for each group */
    double copy_in, copy_out; /* copy-out: what it waits for on the host included */
    int32_t n_forward, n_backward, n_copy_in, n_copy_out;
} engine_unit_times;

/* After engine_step, before anything else is run. [main] */
void engine_time_unit(engine *e, int32_t unit, engine_unit_times *ret);

/* Sum of the loss over the batch's targets with the present weights, in nats. [main] */
mt_status engine_eval(engine *e, const step_batch *batch, double *ret_loss_sum);

/* Waits until every pending update has landed in the store. [main] */
mt_status engine_drain(engine *e);

/* Bytes that were allocated, per tier; equals the plan (the store included). */
void engine_bytes(const engine *e, int64_t ret_bytes[PLAN_TIERS]);

/* ---- gradients for tests: forward and backward without any update ---------------------------- */

/* Runs one step's forward and backward; the gradient of every parameter (FP32, true shape, no
 * clipping) goes to ret_grads[param] (caller's memory, model_param.elems). ret_aux_loss_sum may be
 * NULL. Needs a plan with clipping, or with a gradient plane. [main] */
mt_status engine_gradients(engine *e, const step_batch *batch, double *ret_loss_sum,
                           double *ret_aux_loss_sum, float *const *ret_grads);

/* ---- generation: one sequence ---------------------------------------------------------------- */

/* Feeds n tokens at positions used.. of the sequence (position 0 starts a new one) and returns the
 * logits [vocab] after the last one; `all_logits` != NULL also gets those of every fed token
 * [n, vocab]. Every call but the first of a sequence goes on where the one before ended; each feeds
 * at most plan_request.micro_tokens. Needs plan_request.context >= used + n. [main] */
mt_status engine_generate(engine *e, const int32_t *tokens, int64_t n, int64_t used,
                          float *ret_logits, float *all_logits);

#endif
