/* SPDX-License-Identifier: Apache-2.0
 *
 * A model as a Hugging Face folder: weights under their names on the hub, configuration, tokenizer.
 */
#ifndef MT_CORE_EXPORT_H
#define MT_CORE_EXPORT_H

#include "../manifest/run.h"
#include "../template/model.h"

#include <megatrain/loader.h>

#define EXPORT_SHARD_BYTES 5000000000 /* what most folders on the hub have */

typedef struct export_options {
    const char *folder;  /* made; where it stands already it must be empty */
    mt_dtype dtype;      /* MT_BF16 or MT_F32; those with MT_PARAM_STREAM_F32 are FP32 always */
    int64_t shard_bytes; /* at most so much of weights a file; 0: one file */
    bool replace;        /* an earlier export with a model card may stand in `folder` */
    bool random;         /* weights drawn from `seed`; the source needs none */
    uint64_t seed;
    const char *tokenizer; /* as export_copy_files takes it */
    bool (*stop)(void);    /* asked now and then; true: MT_ERR_STOPPED. NULL: never */
} export_options;

/* Writes the weights that stand in source->weights in each parameter's first layout, config.json,
 * what export_copy_files takes along, and the model card of a checkpoint. No store: tensors that
 * stand as they are to stand are copied piece by piece, by all processors, others by way of a few
 * matrices. The folder appears complete or not at all. Fails before anything is written where the
 * disk has no room for it. `ret_bytes` is what the weights take. [main] */
mt_status export_model(const model_source *source, const model *m, const mt_weights *format,
                       const export_options *options, int64_t *ret_bytes);

/* Bytes of the weights of an export. [main] */
mt_status export_bytes(const model *m, mt_dtype dtype, int64_t *ret);

/* Fails unless export_model would take the folder. */
mt_status export_check_folder(const char *folder, bool replace);

/* Copies those files of a Hugging Face folder that are there: of the tokenizer and its chat
 * template from `tokenizer` (a folder or a file; NULL or "": from `base`), generation's from `base`
 * (may be NULL). Existing files are an error. */
mt_status export_copy_files(const char *base, const char *tokenizer, const char *folder);

#endif
