/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW (Loshchilov and Hutter, arXiv 1711.05101): Adam with decoupled weight decay and bias
 * correction, epsilon outside the root as in torch. The interface, its keys, the scalar kernel and
 * the choice of kernel; step.c has the vector kernels.
 *
 *     g  = grad * grad_scale
 *     m += (1 - beta1) (g - m)
 *     v  = beta2 v + (1 - beta2) g^2
 *     p -= lr weight_decay p + lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
 *
 * The decay and the update are subtracted together, so that a step rounds the master weight once.
 */
#include "step.h"

#include <megatrain/optim.h>
#include <megatrain/plugin.h>
#include <megatrain/template.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>

typedef struct adamw {
    double beta1, beta2, epsilon, weight_decay;
    adamw_step_fn *step;
} adamw;

/* ---- kernels -------------------------------------------------------------------------------- */

void adamw_step_scalar(const adamw_constants *k, int64_t n, uint16_t *hi, int16_t *lo,
                       const float *grad, float *m, float *v)
{
    for (int64_t i = 0; i < n; i++) {
        float p = mt_join_f32(hi[i], lo[i]);
        float g = grad[i] * k->grad_scale;
        m[i] = m[i] + k->rate_m * (g - m[i]);
        v[i] = k->beta2 * v[i] + k->rate_v * (g * g);
        float denominator = sqrtf(v[i]) * k->root + k->epsilon;
        p = p - (k->decay * p + k->step * (m[i] / denominator));
        mt_split_f32(p, &hi[i], &lo[i]);
    }
}

adamw_step_fn *adamw_step_for(adamw_isa isa)
{
    if (isa == ADAMW_SCALAR)
        return adamw_step_scalar;
    if (isa == ADAMW_BASE)
        return adamw_step_base;
#if defined(__x86_64__)
    if (isa == ADAMW_AVX2 && __builtin_cpu_supports("avx2"))
        return adamw_step_avx2;
    if (isa == ADAMW_AVX512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return adamw_step_avx512;
#endif
    return NULL;
}

/* The best kernel, capped by MEGATRAIN_CPU_FLAGS as the CPU backend's are. */
static mt_status choose_step(adamw_step_fn **ret)
{
    const char *flags = getenv("MEGATRAIN_CPU_FLAGS");
    int best = ADAMW_AVX512;
    if (flags && strcmp(flags, "scalar") == 0) {
        best = ADAMW_SCALAR;
    } else if (flags && strcmp(flags, "avx2") == 0) {
        best = ADAMW_AVX2;
    } else if (flags && *flags && strcmp(flags, "avx512") != 0) {
        return mt_fail(MT_ERR_INVALID,
                       "MEGATRAIN_CPU_FLAGS is '%s'; set it to 'scalar', 'avx2' or 'avx512', or "
                       "unset it",
                       flags);
    }
    while (!adamw_step_for((adamw_isa)best))
        best--;
    *ret = adamw_step_for((adamw_isa)best);
    return MT_OK;
}

/* ---- the interface -------------------------------------------------------------------------- */

/* A factor of a running mean: at least 0, below 1. */
static mt_status read_beta(const mt_config *config, const char *key, double fallback, double *ret)
{
    double beta;
    mt_status s = mt_config_float(config, key, fallback, &beta);
    if (s)
        return s;
    if (!(beta >= 0.0 && beta < 1.0))
        return config->reject(config, key, "is %g, must be at least 0 and below 1", beta);
    *ret = beta;
    return MT_OK;
}

static mt_status create(const mt_config *config, void **ret_optim)
{
    adamw a = { 0 };
    mt_status s = read_beta(config, "adam_beta1", 0.9, &a.beta1);
    if (!s)
        s = read_beta(config, "adam_beta2", 0.999, &a.beta2);
    if (!s)
        s = mt_config_float(config, "adam_epsilon", 1e-8, &a.epsilon);
    if (!s)
        s = mt_config_float(config, "weight_decay", 0.01, &a.weight_decay);
    if (!s)
        s = choose_step(&a.step);
    if (s)
        return s;
    /* Without a positive epsilon in FP32 an element that never had a gradient would be 0 / 0. */
    if (!(a.epsilon >= (double)FLT_MIN && a.epsilon <= 1.0))
        return config->reject(config, "adam_epsilon", "is %g, must be from %g to 1", a.epsilon,
                              (double)FLT_MIN);
    if (!(a.weight_decay >= 0.0 && a.weight_decay <= 1.0))
        return config->reject(config, "weight_decay", "is %g, must be from 0 to 1", a.weight_decay);

    adamw *owned = malloc(sizeof *owned);
    if (!owned)
        return mt_fail_nomem();
    *owned = a;
    *ret_optim = owned;
    return MT_OK;
}

static void destroy(void *optim)
{
    free(optim);
}

static uint32_t state_specs(const void *optim, mt_state_spec *ret_specs)
{
    (void)optim;
    ret_specs[0] = (mt_state_spec){ "m", MT_F32 };
    ret_specs[1] = (mt_state_spec){ "v", MT_F32 };
    return 2;
}

static mt_status update(const void *optim, const mt_update *u)
{
    const adamw *a = optim;
    bool decayed = !(u->flags & MT_PARAM_NO_DECAY);
    double decay = u->flags & MT_UPDATE_WEIGHT_DECAY ? u->weight_decay : a->weight_decay;
    double t = (double)u->step;
    adamw_constants k = {
        .grad_scale = (float)u->grad_scale,
        .rate_m = (float)(1.0 - a->beta1),
        .beta2 = (float)a->beta2,
        .rate_v = (float)(1.0 - a->beta2),
        .root = (float)(1.0 / sqrt(1.0 - pow(a->beta2, t))),
        .epsilon = (float)a->epsilon,
        .step = (float)(u->lr / (1.0 - pow(a->beta1, t))),
        .decay = decayed ? (float)(u->lr * decay) : 0.0f,
    };
    a->step(&k, u->n, u->hi, u->lo, u->grad, u->state[0], u->state[1]);
    return MT_OK;
}

static const mt_optim adamw_optim = { .struct_size = sizeof(mt_optim),
                                      .granularity = MT_GRAIN_ELEMENT,
                                      .create = create,
                                      .destroy = destroy,
                                      .state_specs = state_specs,
                                      .update = update,
                                      .flags = MT_OPTIM_GROUP_DECAY };

MT_PLUGIN("adamw", "1.0.0", "Apache-2.0", MT_OPTIM_INTERFACE, &adamw_optim)
