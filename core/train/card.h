/* SPDX-License-Identifier: Apache-2.0
 *
 * The model card of an exported folder: README.md with the facts of the run.
 */
#ifndef MT_CORE_CARD_H
#define MT_CORE_CARD_H

#include "../template/model.h"

/* Writes FOLDER/README.md about the model that was exported from `checkpoint` as `dtype`: what the
 * checkpoint's state and the manifest of the run folder around it say. Nothing is written where
 * `checkpoint` is no checkpoint. [main] */
mt_status card_write(const char *folder, const char *checkpoint, const model *m, mt_dtype dtype);

/* Does the folder hold a card that card_write has written? */
bool card_is_ours(const char *folder);

#endif
