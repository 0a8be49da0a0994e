/* SPDX-License-Identifier: Apache-2.0
 *
 * An open set of safetensors files: what the reader and its dequantisation share.
 */
#ifndef SAFETENSORS_READER_H
#define SAFETENSORS_READER_H

#include "direct.h"
#include "safetensors.h"

typedef struct st_shard {
    char *path;
    int fd; /* -1: not open */
    int64_t size;
    int64_t data; /* where the tensors' data starts */
} st_shard;

/* A tensor as it stands in a file. */
typedef struct st_tensor {
    char *name;
    const st_dtype *type;
    int32_t shard;
    int32_t ndim;
    int64_t dim[MT_TENSOR_MAX_DIMS];
    int64_t begin, end; /* bytes, from the start of the shard's data */
} st_tensor;

/* A tensor as it is shown: as it stands, or dequantised to BF16 with the scales of another one,
 * which is not shown then. */
typedef struct st_view {
    enum { ST_PLAIN, ST_MXFP4, ST_FP8 } kind;
    int64_t tensor, scale; /* scale -1: ST_PLAIN */
    int32_t ndim;
    int64_t dim[MT_TENSOR_MAX_DIMS];
    int64_t block_rows, block_cols; /* ST_FP8: of the values that share a scale */
} st_view;

/* What an element's bits stand for. */
typedef struct st_tables {
    uint16_t fp4[256][16]; /* [scale][code] BF16 */
    float e4m3[256];
} st_tables;

typedef struct st_reader {
    st_shard *shards;
    int32_t n_shards;
    st_tensor *tensors;
    int64_t n_tensors, cap_tensors;
    st_view *views;
    int64_t n_views;
    st_tables *tables; /* NULL: nothing is quantised */
    st_pool *once;     /* NULL: what is read may be read again */
} st_reader;

/* n bytes from byte `offset` of the tensor's data in its file. */
mt_status st_read_raw(const st_reader *r, const st_tensor *t, int64_t offset, int64_t n, void *dst);

/* Decides how every tensor is shown, once all are known. `folder` (with a slash at its end, or
 * empty) is where config.json may name the quantisation: of other methods than FP8 in blocks and
 * MXFP4 the values cannot be had, and they are refused. */
mt_status st_make_views(st_reader *r, const char *folder);

/* n bytes from byte `offset` of a dequantised tensor. */
mt_status st_read_dequantised(const st_reader *r, const st_view *v, int64_t offset, int64_t n,
                              void *dst);

#endif
