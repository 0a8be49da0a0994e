/* SPDX-License-Identifier: Apache-2.0
 *
 * Interface "megatrain.arch/1": an architecture reads hyper-parameters and describes a model as an
 * ordered list of units, each streamed as one piece, each an instance of a template.
 */
#ifndef MEGATRAIN_ARCH_H
#define MEGATRAIN_ARCH_H

#include "base.h"
#include "template.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_ARCH_INTERFACE "megatrain.arch/1"

typedef struct mt_model mt_model;

/* Describes one template. `arch` is what configure returned, `arg` what was given with the
 * template. Must describe the same graph whenever it is called. [main] */
typedef mt_status (*mt_build_fn)(mt_builder *b, const void *arch, const void *arg);

/* Which rotary frequencies an architecture asks for, and its defaults. Zero is a good value of
 * every member but struct_size and theta. */
typedef struct mt_rope_spec {
    uint32_t struct_size;
    uint32_t reserved;
    double theta; /* default base */
    /* Layers of different kinds have frequencies of their own in rope_parameters.LAYER_TYPE. */
    const char *layer_type;
    /* Where the base of such layers stands in older configurations ("rope_local_base_freq"), in
     * which the layers then have no scaling; NULL: rope_theta, and the scaling holds for them. */
    const char *theta_key;
    /* Where the configuration has neither rope_parameters nor rope_scaling: */
    const char *type; /* "yarn"; NULL: "default" */
    double factor, original_max_position_embeddings;
    double attention_factor;      /* 0: what follows from factor */
    bool fractional;              /* truncate: false */
    double partial_rotary_factor; /* where that is absent; 0: 1 */
} mt_rope_spec;

typedef struct mt_model_api {
    uint32_t struct_size;
    /* Registers a template; returns its index, or -1 (sticky error). `arg` must outlive the model.
     */
    int32_t (*add_template)(mt_model *m, const char *name, mt_build_fn build, const void *arg);
    /* Appends a unit, e.g. ("block.3", prefix "model.layers.3."). Order = order of execution: the
     * first unit embeds, the last one computes the loss. Strings are copied. */
    void (*add_unit)(mt_model *m, const char *name, int32_t tpl, const char *prefix);
    /* Facts that the training loop needs. */
    void (*set_vocab)(mt_model *m, int64_t vocab_size);
    void (*set_max_positions)(mt_model *m, int64_t max_positions);
    /* Reads rope_theta / rope_scaling / rope_parameters (both spellings of config.json) and fills
     * `ret` for heads of head_dim columns; `theta` is the family's default. Types default, linear,
     * dynamic, llama3 and yarn; every other type is an error that names it. */
    mt_status (*rope)(mt_model *m, const mt_config *c, double theta, int64_t head_dim,
                      mt_rope_attr *ret);
    /* Checkpoint tensors whose name matches the pattern (fnmatch) are ignored when loading. */
    void (*ignore_tensor)(mt_model *m, const char *pattern);
    /* As rope, for layers of a kind, or with a scaling by default. */
    mt_status (*rope_of)(mt_model *m, const mt_config *c, const mt_rope_spec *spec,
                         int64_t head_dim, mt_rope_attr *ret);
} mt_model_api;

struct mt_model {
    const mt_model_api *api;
};

static inline int32_t mt_add_template(mt_model *m, const char *name, mt_build_fn build,
                                      const void *arg)
{
    return m->api->add_template(m, name, build, arg);
}

static inline void mt_add_unit(mt_model *m, const char *name, int32_t tpl, const char *prefix)
{
    m->api->add_unit(m, name, tpl, prefix);
}

static inline mt_status mt_model_rope(mt_model *m, const mt_config *c, double theta,
                                      int64_t head_dim, mt_rope_attr *ret)
{
    return m->api->rope(m, c, theta, head_dim, ret);
}

static inline mt_status mt_model_rope_of(mt_model *m, const mt_config *c, const mt_rope_spec *spec,
                                         int64_t head_dim, mt_rope_attr *ret)
{
    return m->api->rope_of(m, c, spec, head_dim, ret);
}

typedef struct mt_arch {
    uint32_t struct_size;
    uint32_t n_model_types;
    const char *const *model_types; /* config.json `model_type`s that it claims */
    /* Reads the hyper-parameters, checks them, and registers templates and units. `ret_arch` is the
     * architecture's own state, handed to build functions and to destroy. [main] */
    mt_status (*configure)(const mt_config *config, mt_model *model, void **ret_arch);
    void (*destroy)(void *arch); /* accepts NULL [main] */
} mt_arch;

#ifdef __cplusplus
}
#endif
#endif
