/* SPDX-License-Identifier: Apache-2.0
 *
 * Which tensors of a checkpoint a model's parameters are, under one layout of each: names, shapes,
 * and what row of which parameter every row of a tensor is. One map serves reading and writing.
 */
#ifndef MT_CORE_TENSOR_MAP_H
#define MT_CORE_TENSOR_MAP_H

#include "../base/arena.h"
#include "../template/model.h"

#include <megatrain/loader.h>

/* Rows of a tensor that belong to a parameter. */
typedef struct tensor_piece {
    int64_t tensor;
    int32_t param;
    int32_t matrix; /* of the parameter's stack; -1: matrix i of the tensor is matrix i of it */
    const mt_source *source;
} tensor_piece;

typedef struct mapped_tensor {
    const char *name; /* in full */
    int32_t ndim;
    int64_t dim[4];
    int64_t matrices, rows, cols; /* rows and cols as the model means them */
    uint32_t flags;               /* MT_SOURCE_* */
    const tensor_piece *pieces;
    int32_t n_pieces;
    /* Its elements, in file order, are consecutive elements of one parameter, from `first` on. */
    bool linear;
    int64_t first;
} mapped_tensor;

typedef struct tensor_map {
    const model *m;
    int64_t n;
    mapped_tensor *tensors; /* in the order of the parameters */
    tensor_piece *pieces;   /* all of them */
    int64_t n_pieces;
    int64_t *by_name; /* [n] sorted */
    arena mem;
} tensor_map;

/* Where one row of a tensor stands: row `row` of each matrix of the piece's parameter. */
typedef struct tensor_row {
    int32_t piece;
    int64_t row;
} tensor_row;

/* `layout[p]` is the layout of parameter p; NULL: the first one of each, which is what is written.
 * Fails when sources of one name contradict each other or do not use all rows of a tensor. */
mt_status tensor_map_create(const model *m, const uint32_t *layout, tensor_map **ret);
void tensor_map_destroy(tensor_map *t); /* accepts NULL */

/* Index of the tensor of that name, -1 when there is none. */
int64_t tensor_map_find(const tensor_map *t, const char *name);

/* Fills ret[t->rows]. */
void tensor_map_rows(const mapped_tensor *t, tensor_row *ret);

int64_t tensor_elems(const mapped_tensor *t);

/* As a loader's list wants it. */
mt_tensor_info tensor_info(const mapped_tensor *t, mt_dtype dtype);

/* Calls fn with the full name of every tensor of a layout until it fails. */
mt_status tensor_map_each_name(const model_param *p, const mt_param_layout *layout,
                               mt_status (*fn)(void *arg, const char *name, const mt_source *s,
                                               int32_t matrix),
                               void *arg);

#endif
