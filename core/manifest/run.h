/* SPDX-License-Identifier: Apache-2.0
 *
 * A run manifest, read and checked: every key has its type, its default and its place in messages
 * (docs/manifests.md lists them). And how a `model:` value becomes a configured architecture.
 */
#ifndef MT_CORE_RUN_H
#define MT_CORE_RUN_H

#include "config.h"

#include <megatrain/arch.h>

typedef enum run_schedule { RUN_CONSTANT, RUN_LINEAR, RUN_COSINE, RUN_WSD } run_schedule;
typedef enum run_bad_numbers { RUN_SKIP, RUN_STOP } run_bad_numbers;

/* In the order of packing_mode. */
typedef enum run_packing {
    RUN_PACKING_BEST_FIT,
    RUN_PACKING_SEQUENTIAL,
    RUN_PACKING_NONE
} run_packing;

typedef enum run_gradients {
    RUN_GRADIENTS_AUTO,
    RUN_GRADIENTS_DEVICE,
    RUN_GRADIENTS_HOST
} run_gradients;
typedef enum run_bind { RUN_BIND_AUTO, RUN_BIND_OFF } run_bind;
typedef enum run_gradient_dtype { RUN_GRADIENT_FP32, RUN_GRADIENT_BF16 } run_gradient_dtype;

typedef struct run_manifest {
    config *config; /* owned; sections "data" and "optimizer" also belong to plugins */
    const char *path;
    /* top level */
    const char *model;     /* HF folder, model manifest, or checkpoint: an existing path */
    const char *device;    /* "auto", "cpu", "cuda" */
    const char *precision; /* "auto", "fp32", "bf16" */
    int64_t threads;       /* 0: all */
    int64_t seed;
    bool deterministic;
    const char *output_dir; /* against the working directory; default runs/NAME of NAME.yaml */
    bool from_scratch;      /* init: random (default for a model manifest) or pretrained (for a HF
                               folder) */
    /* data */
    const char *loader;      /* "auto", or the name of a plugin */
    const char *tokenizer;   /* "auto", or an existing path */
    const char *chat_format; /* "auto", "none", a name; NULL: a map that spells one out */
    int64_t max_seq_len;
    run_packing packing;
    /* train */
    int64_t max_steps; /* 0: by epochs */
    double num_train_epochs;
    int64_t micro_batch_size; /* sequences of max_seq_len tokens in a micro-batch */
    int64_t
        gradient_accumulation_steps; /* micro-batches of a step; exclusive with tokens_per_step */
    double learning_rate, min_lr_ratio;
    run_schedule lr_scheduler_type;
    int64_t warmup_steps;
    double warmup_ratio;    /* used when warmup_steps is 0 */
    double wsd_decay_ratio; /* last part of a wsd schedule that decays */
    double max_grad_norm;
    double router_bias_update_rate;   /* 0: routers' biases stay */
    int64_t eval_steps, eval_batches; /* 0: never / all */
    int64_t early_stopping_patience;  /* evaluations without a gain; 0: off */
    run_bad_numbers on_bad_numbers;
    int64_t max_skipped; /* skips in a row before the run stops */
    /* optimizer */
    const char *optimizer; /* "adamw" */
    /* memory */
    int64_t memory_device, memory_host; /* bytes; -1: auto */
    int64_t groups;                     /* -1: auto */
    int32_t activations;                /* tpl_policy, -1: auto */
    int32_t weight_buffers;             /* -1: auto */
    int64_t segment_bytes;              /* -1: auto, 0: off */
    run_gradients gradients;
    run_gradient_dtype gradient_dtype;
    int32_t optimizer_threads; /* 0: all */
    run_bind bind_workers;
    /* log */
    int64_t logging_steps;
    /* checkpoint */
    int64_t save_steps; /* 0: only at the end */
    int64_t save_total_limit;
    bool weights_only;
    bool save_best;
    const char *export_dir;             /* "auto", "true", "false", or a folder */
    const char *resume_from_checkpoint; /* "auto" (default), "none", or a path */
} run_manifest;

/* Paths: a relative `model` or `data.tokenizer` is looked for in the manifest's folder, then in the
 * working directory (an override: the other way round). It is stored absolute, so that the
 * effective manifest that a run folder keeps means the same wherever it is read.
 *
 * Reads FILE, applies the overrides, checks every key outside `data` and `optimizer`; those two are
 * checked by run_check_plugins once the plugins have read theirs. [main] */
mt_status run_read(const char *path, char *const *overrides, int n_overrides, run_manifest **ret);
/* The same without a file: defaults, a model, and overrides, for tools that make their own data. */
mt_status run_of_model(const char *model, char *const *overrides, int n_overrides,
                       run_manifest **ret);
/* Fails where `data` or `optimizer` has a key that nobody asked for. Where `data_was_read` is false
 * nobody asked, and only what is not offered is refused there. [main] */
mt_status run_check_plugin_keys(run_manifest *r, bool data_was_read);
/* Makes the default of data.max_seq_len fit a model of fewer positions (0: any number): a manifest
 * that gives the key is left alone. The step's size follows. [main] */
mt_status run_fit_length(run_manifest *run, int64_t positions, bool *ret_fitted);

void run_destroy(run_manifest *r); /* accepts NULL */

/* One key of a run manifest: what run_read checks, and what docs and `--help` list. */
typedef enum run_key_type {
    RUN_KEY_STRING,
    RUN_KEY_CHOICE,
    RUN_KEY_INT,
    RUN_KEY_FLOAT,
    RUN_KEY_BOOL,
    RUN_KEY_BYTES, /* 24GiB, 512MB, 4096 */
    RUN_KEY_LIST,  /* checked where it is used; a single string is a list of one */
    RUN_KEY_NAME   /* a string, or a map that some plugin reads (NULL is stored) */
} run_key_type;

typedef struct run_key {
    const char *section; /* "" for the top level */
    const char *name;
    run_key_type type;
    const char *fallback;       /* as one would write it; NULL: no default */
    const char *const *choices; /* NULL-terminated; RUN_KEY_CHOICE only */
    double min, max;            /* numbers only, inclusive */
    int8_t yes, no;             /* choices, of strings too, that true and false stand for, from 1 */
    bool automatic;             /* a number that may also be "auto", stored as -1 */
    bool can_be_off;            /* a number that may also be "off", stored as 0 */
    int32_t offset, size;       /* of its field in run_manifest; size 0: combined with other keys */
    const char *doc;            /* one sentence */
} run_key;

/* All keys in the order in which they are documented. [pure] */
const run_key *run_schema(int32_t *ret_n);

/* Where a model's hyper-parameters come from. */
typedef struct model_source {
    config *config;         /* owned */
    const mt_config *hyper; /* what the architecture reads */
    const char *model_type;
    const char *weights; /* folder with weights, or NULL when there are only hyper-parameters */
    const char *label;   /* for messages */
} model_source;

/* Opens a HF folder (config.json), a checkpoint (the same), or a model manifest (YAML with `arch:`
 * or `model_type:` and hyper-parameters at the top level or under `config:`). [main] */
mt_status model_source_open(const char *path, model_source *ret);
/* Fails when a model manifest has a key that the architecture did not ask for; call it once the
 * model is configured. Hugging Face folders carry keys of many other programs and always pass. */
mt_status model_source_check_keys(const model_source *s);
void model_source_close(model_source *s);
/* Fails where a hyper-parameter that the architecture has asked for is another one than that of
 * `then`, and names each with both values and the place of the first. `now` is configured; facts
 * for other programs (architectures, token ids ...) do not count. */
mt_status model_source_check_same(const model_source *now, const model_source *then);
/* Is a key of hyper-parameters such a fact, or one of how they are written down? [pure] */
bool model_source_is_fact(const char *key);
/* Writes config.json: the hyper-parameters as they were read, plus model_type and architectures,
 * and without the quantisation, which loading has undone. `dtype` is that of the weights beside it
 * ("bfloat16"), `chat_format` what conversations were trained in, by name or, as a map, spelled
 * out; where both are NULL, what was read is kept. All live at least as long as the source. */
mt_status model_source_write_config(const model_source *s, const char *folder, const char *dtype,
                                    const char *chat_format, const mt_config *spelled_out);

#endif
