/* SPDX-License-Identifier: Apache-2.0
 *
 * Interface "megatrain.optim/1": an optimizer updates master weights in host memory, range by
 * range, from several workers at once.
 */
#ifndef MEGATRAIN_OPTIM_H
#define MEGATRAIN_OPTIM_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_OPTIM_INTERFACE "megatrain.optim/1"

enum { MT_OPTIM_MAX_STATES = 4 };

/* The smallest piece of a tensor that may be updated by itself. */
typedef int32_t mt_granularity;
enum { MT_GRAIN_ELEMENT = 0, MT_GRAIN_ROW = 1, MT_GRAIN_TENSOR = 2 };

/* A state plane: one element per parameter element, zero before the first step. */
typedef struct mt_state_spec {
    const char *name; /* as in checkpoints: "m", "v" */
    mt_dtype dtype;
} mt_state_spec;

enum {
    /* mt_update::weight_decay stands in place of the optimizer's own key. Not with
     * MT_PARAM_NO_DECAY. */
    MT_UPDATE_WEIGHT_DECAY = 1u << 16
};

enum {
    MT_OPTIM_GROUP_DECAY = 1u << 0 /* update honours MT_UPDATE_WEIGHT_DECAY */
};

/* One range of one tensor. Element i of the range is element `first + i` of a row-major
 * [rows, cols] tensor (rows 1 for a vector). The master weight is split in two planes
 * (mt_join_f32, mt_split_f32). The effective gradient is grad[i] * grad_scale. */
typedef struct mt_update {
    uint32_t struct_size;
    uint32_t flags; /* MT_PARAM_NO_DECAY (template.h), MT_UPDATE_WEIGHT_DECAY */
    int64_t rows, cols, first, n;
    uint16_t *hi;
    int16_t *lo;
    const float *grad;
    void *state[MT_OPTIM_MAX_STATES];
    int64_t step;        /* 1 for the first update */
    double lr;           /* learning rate of this step */
    double grad_scale;   /* the clipping factor; 1 where clipping is off */
    double weight_decay; /* with MT_UPDATE_WEIGHT_DECAY */
} mt_update;

typedef struct mt_optim {
    uint32_t struct_size;
    mt_granularity granularity;
    /* Reads its keys from the run manifest's `optimizer` section (learning rate and schedule are
     * the host's). [main] */
    mt_status (*create)(const mt_config *config, void **ret_optim);
    void (*destroy)(void *optim); /* accepts NULL [main] */
    /* Fills ret_specs with at most MT_OPTIM_MAX_STATES planes, returns how many. [main] */
    uint32_t (*state_specs)(const void *optim, mt_state_spec *ret_specs);
    /* Updates a range in place. Results must not depend on how a tensor is cut into ranges (of the
     * granularity), nor on the calling thread. [worker] */
    mt_status (*update)(const void *optim, const mt_update *u);
    uint32_t flags; /* MT_OPTIM_GROUP_DECAY */
    uint32_t reserved;
} mt_optim;

#ifdef __cplusplus
}
#endif
#endif
