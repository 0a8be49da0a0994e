/* SPDX-License-Identifier: Apache-2.0
 *
 * A model as a Hugging Face folder: weights under their names on the hub, configuration, tokenizer.
 */
#ifndef MT_CORE_EXPORT_H
#define MT_CORE_EXPORT_H

#include "../manifest/run.h"
#include "../template/model.h"

#include <megatrain/loader.h>

typedef struct export_options {
    const char *folder;  /* made; where it stands already it must be empty */
    mt_dtype dtype;      /* MT_BF16 or MT_F32 */
    int64_t shard_bytes; /* at most so much of weights a file; 0: one file */
} export_options;

/* Writes the weights that stand in source->weights in each parameter's first layout, config.json,
 * and what export_copy_files takes along. No store: tensors that stand as they are to stand are
 * copied piece by piece, others by way of a few matrices. The folder appears complete or not at
 * all. `ret_bytes` is what the weights take. [main] */
mt_status export_model(const model_source *source, const model *m, const mt_weights *format,
                       const export_options *options, int64_t *ret_bytes);

/* Copies the tokenizer's, the chat format's and generation's files of a Hugging Face folder, those
 * that are there; `from` may be NULL. Existing files are an error. */
mt_status export_copy_files(const char *from, const char *folder);

#endif
