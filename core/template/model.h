/* SPDX-License-Identifier: Apache-2.0
 *
 * A configured model: units in order, their templates, and the table of unique parameters.
 * Immutable once created; thread-safe.
 */
#ifndef MT_CORE_MODEL_H
#define MT_CORE_MODEL_H

#include "template.h"

/* One unique parameter. */
typedef struct model_param {
    const char *name;          /* full name: the unit's prefix, then the declared name */
    const char *prefix;        /* of the unit, to which the names of sources are relative */
    const mt_param_info *info; /* the declaration: stack, layouts */
    int32_t unit;              /* owner */
    uint32_t flags;            /* MT_PARAM_* */
    int64_t offset;            /* elements into the owner's flat store */
    int64_t elems;
    int64_t rows, cols; /* rows == 0: a vector, shape [cols] */
    mt_init init;
    float init_std;
    bool gathered;
    bool pinned; /* train.freeze names it: nothing else changes it either */
} model_param;

typedef struct model_unit {
    const char *name;
    const tpl *t;
    int32_t tpl_index;
    int32_t *slot; /* [t->n_params] index of the unique parameter behind each slot */
} model_unit;

typedef struct model {
    int32_t n_units;
    model_unit *units;
    int32_t n_tpls;
    tpl **tpls;
    int32_t n_params;
    model_param *params;
    int64_t total_params; /* unique elements, no padding */
    int64_t store_elems;  /* sum of own_elems over units */
    int64_t tally;        /* doubles of a micro-batch's (mt_op_shape); 0: there is none */
    int64_t vocab;
    int64_t max_positions;
    int32_t n_ignore;
    const char **ignore;       /* fnmatch patterns of checkpoint tensors to skip */
    struct model_owner *owner; /* private */
} model;

/* Calls arch->configure and builds all templates. `config` must outlive the model. [main] */
mt_status model_create(const mt_arch *arch, const mt_config *config, model **ret);
/* The same with the first unit, `copies` of unit `unit` one after the other, and the last unit
 * only: one kind of layer without the rest of a large model. Of the last unit there is always one.
 * [main] */
mt_status model_create_excerpt(const mt_arch *arch, const mt_config *config, int32_t unit,
                               int32_t copies, model **ret);
void model_destroy(model *m); /* accepts NULL */

/* Index of a parameter by its full name, -1 when there is none. */
int32_t model_find_param(const model *m, const char *name);

/* Draws elements first .. first+n of a parameter as its declaration says; the result depends on
 * `seed` and its name only. [any] */
void model_draw(const model_param *p, uint64_t seed, int64_t first, int64_t n, float *ret);

/* Does the unit own a parameter that is trained? One that does not needs weights only. */
bool model_unit_trains(const model *m, int32_t unit);

/* Does any unit add a loss to the model's own? */
bool model_adds_loss(const model *m);

/* Has the unit a router's bias that a run may move? */
bool model_bias_moves(const model *m, int32_t unit);

/* Is the checkpoint tensor `name` one that loading skips? */
bool model_ignores(const model *m, const char *name);

/* FLOPs of training one token (forward + backward, causal counted as causal, no recompute), when
 * documents are `context` tokens long. GEMMs count 6 per weight. */
double model_train_flops_per_token(const model *m, double context);
/* The same of one template. [pure] */
double model_tpl_train_flops_per_token(const tpl *t, double context);

#endif
