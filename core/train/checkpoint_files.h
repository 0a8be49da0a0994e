/* SPDX-License-Identifier: Apache-2.0
 *
 * What saving and loading a checkpoint share: names, state.json, tensors.
 */
#ifndef MT_CORE_CHECKPOINT_FILES_H
#define MT_CORE_CHECKPOINT_FILES_H

#include "checkpoint.h"
#include "tensor_map.h"

#include <jansson.h>
#include <xxhash.h>

#define CHECKPOINT_STATE_FILE   "state.json"
#define CHECKPOINT_FORMAT       "megatrain-checkpoint"
#define CHECKPOINT_WEIGHTS_STEM "model"
#define CHECKPOINT_STATES_STEM  "optimizer"
enum { CHECKPOINT_VERSION = 1 };

/* state.json as a tree:
 *   format, version, step, optimizer_step, tokens, targets, skipped_in_a_row, best_step,
 *   evaluations_since_best: integers
 *   seed: a decimal string (it has 64 bits); best_validation_loss, loss, validation_loss:
 *   numbers, or "inf" ...
 *   data: { epoch, index, offset, micro_tokens, epoch_documents, epoch_tokens,
 *           fingerprint: 16 hex digits }
 *   model_type, weights_dtype ("fp32"), weights_only
 *   states: [{ name, dtype }]
 *   weights, optimizer: { tensor: XXH3-64 of its bytes in the file, 16 hex digits }
 *   checksum: XXH3-64 of all the others, 16 hex digits */
json_t *checkpoint_state_pack(const checkpoint_state *state);
/* `path` is for messages. */
mt_status checkpoint_state_unpack(const json_t *root, const char *path, checkpoint_state *ret);

/* The checksum of everything in the tree but "checksum" itself, which does not depend on how the
 * file is laid out. */
mt_status checkpoint_state_sum(const json_t *root, char ret[17]);

/* Reads FOLDER/state.json and checks format and version; MT_ERR_NOT_FOUND without the file. */
mt_status checkpoint_read_state(const char *folder, json_t **ret);

/* The tensor of a parameter's optimizer state: it has the shape that the optimizer sees. */
mt_tensor_info checkpoint_state_info(const model_param *p, const char *name, mt_dtype dtype);

/* Writes the files of weights and, unless `o` says weights_only, of optimizer states into `folder`;
 * adds the checksum of every tensor to `weights` and `states`. */
mt_status checkpoint_save_tensors(const store *s, const checkpoint_options *o,
                                  const tensor_map *map, const mt_weights *format,
                                  const char *folder, json_t *weights, json_t *states);

/* Fails unless `sum` of tensor `name` in `file` is the one that state.json has. [any] */
mt_status checkpoint_check_sum(const json_t *sums, const char *name, uint64_t sum,
                               const char *file);

#endif
