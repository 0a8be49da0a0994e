/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints and weights: from a store to files and back. A checkpoint is a folder step-NNNNNN
 * that is also a Hugging Face model folder: FP32 (or BF16) weights under their HF names plus
 * config.json; optimizer states in files of their own; state.json, written last, with checksums.
 */
#ifndef MT_CORE_CHECKPOINT_H
#define MT_CORE_CHECKPOINT_H

#include "../host/store.h"
#include "data.h"

#include <megatrain/loader.h>

/* In a folder of checkpoints: a link to the one with the best validation loss. */
#define CHECKPOINT_BEST "best"

/* Everything besides weights and states that a bit-exact resume needs. */
typedef struct checkpoint_state {
    int64_t step;            /* steps done */
    int64_t optimizer_step;  /* updates done (skipped steps do not count) */
    int64_t tokens, targets; /* trained so far */
    data_position data;
    uint64_t seed;
    /* Of the data, to tell whether it is still the same. */
    int64_t epoch_documents, epoch_tokens;
    uint64_t fingerprint; /* 0: not known */
    double best_validation_loss;
    int64_t best_step, evaluations_since_best;
    double loss, validation_loss; /* the last ones, nats; NaN: none yet */
    int64_t skipped_in_a_row;
} checkpoint_state;

typedef struct checkpoint_options {
    const char *folder;     /* of the run's checkpoints */
    int64_t keep;           /* newest ones kept after a save; 0: all */
    int64_t best_step;      /* kept besides them, and named by the link `best`; 0: none */
    bool weights_only;      /* no optimizer states; not resumable */
    mt_dtype weights_dtype; /* MT_F32, or MT_BF16 with weights_only */
    const char *model_type; /* of config.json */
    int64_t shard_bytes;    /* 0: the default, 4 GiB */
} checkpoint_options;

/* Saves to FOLDER/step-NNNNNN by way of a temporary folder, fsync and rename, then rotates.
 * Whatever fails, earlier checkpoints stay as they are. `write_config` writes config.json into the
 * folder it is given. [main] */
mt_status checkpoint_save(const store *s, const checkpoint_state *state,
                          const checkpoint_options *options, const mt_weights *format,
                          mt_status (*write_config)(void *arg, const char *folder), void *arg);

/* Bytes that a checkpoint takes on the disk, a little more rather than less. [main] */
mt_status checkpoint_bytes(const store *s, const checkpoint_options *options, int64_t *ret);

/* How many complete checkpoints there are in `folder`. [main] */
mt_status checkpoint_count(const char *folder, int64_t *ret);

/* "FOLDER holds step-000008, step-000004", the newest first, or that it holds none; the last error
 * text is lost. [main] */
void checkpoint_list(const char *folder, char *ret, size_t size);

/* Finishes what a save that was killed once its checkpoint stood had left to do: removes what is
 * temporary, and lets the link `best` name `best_step` (0: none). Complete checkpoints stay. [main]
 */
mt_status checkpoint_tidy(const char *folder, int64_t best_step);

/* Path of the newest complete checkpoint in `folder`; MT_ERR_NOT_FOUND when there is none.
 * `ret` has room for `size` bytes. [main] */
mt_status checkpoint_latest(const char *folder, char *ret, size_t size);

/* The newest complete one that is older than the checkpoint at `path`. [main] */
mt_status checkpoint_older(const char *path, char *ret, size_t size);

/* Reads what state.json of the checkpoint at `path` says; MT_ERR_NOT_FOUND where there is none.
 * [main] */
mt_status checkpoint_read(const char *path, checkpoint_state *ret);

/* Restores a store bit for bit; verifies checksums. s->n_states == 0 restores the weights only.
 * [main] */
mt_status checkpoint_load(store *s, const char *path, const mt_weights *format,
                          checkpoint_state *ret);

/* Fills the masters from a Hugging Face folder or checkpoint of any float dtype. Every parameter is
 * filled exactly once; a missing or unused tensor, or one of a wrong shape, is an error that names
 * the file and the tensor. A tied model's redundant copy of a weight (any name, the shape of an
 * aliased parameter) is ignored when it holds the same values, else an error. All that headers can
 * tell is checked before data is read, by all processors at once. ret_bytes gets how many bytes of
 * tensors that were; may be NULL. [main] */
mt_status weights_load(store *s, const char *path, const mt_weights *format, int64_t *ret_bytes);

#endif
