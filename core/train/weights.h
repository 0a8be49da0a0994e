/* SPDX-License-Identifier: Apache-2.0
 *
 * What loading weights and loading checkpoints share: from a tensor in a file to a parameter's
 * masters, in bounded memory.
 */
#ifndef MT_CORE_WEIGHTS_H
#define MT_CORE_WEIGHTS_H

#include "../host/store.h"

#include <megatrain/loader.h>
#include <xxhash.h>

/* Files are read and written in pieces of this many bytes. */
enum { WEIGHTS_PIECE = 16 << 20 };

/* Elements of a piece: as bytes of the file, and as FP32. */
typedef struct weights_buffer {
    void *raw;    /* WEIGHTS_PIECE / 2 bytes */
    float *value; /* WEIGHTS_PIECE / 2 bytes */
} weights_buffer;

mt_status weights_buffer_init(weights_buffer *b);
void weights_buffer_finish(weights_buffer *b);

/* Can masters be made of this dtype? */
bool weights_is_float(mt_dtype t);

/* "[3, 4]" */
const char *weights_shape(char text[160], int32_t ndim, const int64_t *dim);

/* Fails unless the tensor has the parameter's shape; names file, tensor, found and expected. */
mt_status weights_check_shape(const model_param *p, const mt_tensor_info *info, const char *file);

/* Elements first .. first+n (at most weights_piece_elems) of the tensor, as FP32 in b->value and as
 * they stand in the file in b->raw. F32, BF16 and F16 are exact, F64 is rounded to nearest. */
mt_status weights_read_piece(const mt_weights *format, const void *reader, int64_t index,
                             mt_dtype dtype, int64_t first, int64_t n, weights_buffer *b);
int64_t weights_piece_elems(mt_dtype dtype);

/* Sets all masters of `param` from the tensor. `hash` also gets the bytes of the file; may be NULL.
 */
mt_status weights_read_param(store *s, int32_t param, const mt_weights *format, const void *reader,
                             int64_t index, mt_dtype dtype, weights_buffer *b, XXH3_state_t *hash);

#endif
