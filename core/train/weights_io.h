/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of tensors: what reading and writing a tensor, and loading a model, are made of. Not for
 * others.
 */
#ifndef MT_CORE_WEIGHTS_IO_H
#define MT_CORE_WEIGHTS_IO_H

#include "weights.h"

/* Consecutive elements of a tensor that pass through the buffer at once. In a transposed tensor
 * they are columns col .. of rows row .. of one matrix, column by column. */
typedef struct weights_block {
    int64_t at, n;
    int64_t row, rows, col, cols; /* transposed only */
} weights_block;

/* One tensor, in one direction. */
typedef struct weights_transfer {
    const weights_masters *masters;
    const model *m;
    const mapped_tensor *t;
    tensor_row *rows; /* NULL for a linear tensor */
    bool out;         /* from the masters to the file */
} weights_transfer;

mt_status weights_transfer_init(weights_transfer *x, const weights_masters *masters,
                                const tensor_map *map, int64_t tensor, bool out);
void weights_transfer_finish(weights_transfer *x);

/* The block that starts at element `at`, ends at `end` or before, and has at most `most` elements.
 */
weights_block weights_block_at(const mapped_tensor *t, int64_t at, int64_t end, int64_t most);

/* Between b->value and the masters; uses b->raw too. Blocks of one transfer may move at the same
 * time through buffers of their own, if the masters allow it. */
void weights_move_block(const weights_transfer *x, const weights_block *k, const weights_buffer *b);

#endif
