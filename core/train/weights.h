/* SPDX-License-Identifier: Apache-2.0
 *
 * Between tensors in files and masters in memory, in bounded memory: what loading weights, loading
 * and saving checkpoints, export and inspect share.
 */
#ifndef MT_CORE_WEIGHTS_H
#define MT_CORE_WEIGHTS_H

#include "../base/parallel.h"
#include "../host/store.h"
#include "tensor_map.h"

#include <megatrain/loader.h>

/* What one thread reads and writes alone passes through this many bytes. */
enum { WEIGHTS_PIECE = 16 << 20 };

/* Elements of a piece: as bytes of the file, and as FP32. */
typedef struct weights_buffer {
    void *raw;
    float *value;
    int64_t bytes; /* of each */
} weights_buffer;

/* `bytes` are of both together. */
mt_status weights_buffer_init(weights_buffer *b, int64_t bytes);
void weights_buffer_finish(weights_buffer *b);

/* Buffers of threads that work at the same time: small, so that what was read or drawn is converted
 * while the processor's cache has it. */
typedef struct weights_lanes {
    weights_buffer lane[PARALLEL_MAX_THREADS];
    int32_t n;
} weights_lanes;

mt_status weights_lanes_init(weights_lanes *l, int32_t n);
void weights_lanes_finish(weights_lanes *l);

/* Can masters be made of this dtype? */
bool weights_is_float(mt_dtype t);

/* Room for any shape of MT_TENSOR_MAX_DIMS dimensions. */
enum { WEIGHTS_SHAPE = 192 };

/* "[3, 4]" */
const char *weights_shape(char text[WEIGHTS_SHAPE], int32_t ndim, const int64_t *dim);

/* Fails unless `info` has the shape `want`; names file, tensor, found and expected. */
mt_status weights_check_shape(const mt_tensor_info *want, const mt_tensor_info *info,
                              const char *file);

/* Elements first .. first+n (at most weights_piece_elems) of the tensor, as FP32 in b->value. F32,
 * BF16 and F16 are exact, F64 is rounded to nearest. */
mt_status weights_read_piece(const mt_weights *format, const void *reader, int64_t index,
                             mt_dtype dtype, int64_t first, int64_t n, weights_buffer *b);
int64_t weights_piece_elems(const weights_buffer *b, mt_dtype dtype);
/* The piece that was read last as it stands in the file. */
const void *weights_piece_bytes(const weights_buffer *b, mt_dtype dtype);

/* The first n of b->value as FP32, or as the BF16 that is streamed (plane hi), which uses b->raw.
 */
const void *weights_from_f32(const weights_buffer *b, int64_t n, mt_dtype dtype);

/* Where masters are kept: element `first` on of parameter `param`, as in store_get and store_set.
 */
typedef struct weights_masters {
    void *arg;
    void (*get)(void *arg, int32_t param, int64_t first, int64_t n, float *ret);
    void (*set)(void *arg, int32_t param, int64_t first, int64_t n, const float *src);
} weights_masters;

weights_masters weights_of_store(store *s);

/* Sets the masters that matrices first .. first+n-1 of the tensor are, from tensor `index` of the
 * reader. */
mt_status weights_read_tensor(const weights_masters *to, const tensor_map *map, int64_t tensor,
                              int64_t first, int64_t n, const mt_weights *format,
                              const void *reader, int64_t index, mt_dtype dtype, weights_buffer *b);

/* How the tensors of a file fit a model. */
typedef struct weights_match {
    tensor_map *map; /* under the layouts that are there */
    int64_t count;   /* tensors in the file */
    int64_t *tensor; /* [count] which one of the map each is, -1: none */
    int64_t *index;  /* [map->n] where in the file each is, -1: nowhere */
    int32_t missing; /* parameters that lack a tensor */
    int32_t first_missing;
} weights_match;

/* Picks each parameter's layout: the first one of which all tensors are there, else the one of
 * which most are. Vision-language wrappings of names are taken off. Fails where two tensors are
 * one. */
mt_status weights_match_create(const model *m, const mt_weights *format, const void *reader,
                               weights_match **ret);
void weights_match_destroy(weights_match *w); /* accepts NULL */

/* Fails unless nothing is missing; names the parameter and the layouts that were tried. */
mt_status weights_match_complete(const weights_match *w, const mt_weights *format,
                                 const void *reader, const char *path);

/* Fails unless tensor `index` of the reader, which the match has found to be one of the model's,
 * has a dtype that masters can be made of and the right shape. */
mt_status weights_check_tensor(const weights_match *w, const mt_weights *format, const void *reader,
                               int64_t index);

/* Fails unless every tensor that no parameter asks for is one that the model ignores, or a tied
 * model's second copy that equals the masters. */
mt_status weights_check_unused(const model *m, const weights_masters *masters,
                               const weights_match *w, const mt_weights *format,
                               const void *reader);

/* Does the model ignore a tensor of this name, wrapped or not? */
bool weights_ignored(const model *m, const char *name);

#endif
