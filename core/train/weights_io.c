/* SPDX-License-Identifier: Apache-2.0
 *
 * One tensor between a file and the masters: conversion, and the rows, transposition and stacks of
 * its layout. A piece at a time, never a whole tensor.
 */
#include "weights_io.h"
#include "../base/planes.h"
#include "../base/status.h"
#include "../base/text.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- pieces --------------------------------------------------------------------------------- */

mt_status weights_buffer_init(weights_buffer *b, int64_t bytes)
{
    *b = (weights_buffer){ malloc((size_t)bytes / 2), malloc((size_t)bytes / 2), bytes / 2 };
    if (b->raw && b->value)
        return MT_OK;
    weights_buffer_finish(b);
    return status_nomem("the buffer that weights pass through", (size_t)bytes);
}

void weights_buffer_finish(weights_buffer *b)
{
    free(b->raw);
    free(b->value);
    *b = (weights_buffer){ 0 };
}

enum { LANE_BYTES = 4 << 20 };

mt_status weights_lanes_init(weights_lanes *l, int32_t n)
{
    mt_status status = MT_OK;
    *l = (weights_lanes){ .n = n };
    for (int32_t i = 0; i < n && !status; i++)
        status = weights_buffer_init(&l->lane[i], LANE_BYTES);
    return status;
}

void weights_lanes_finish(weights_lanes *l)
{
    for (int32_t i = 0; i < l->n; i++)
        weights_buffer_finish(&l->lane[i]);
    l->n = 0;
}

bool weights_is_float(mt_dtype t)
{
    return t == MT_F32 || t == MT_BF16 || t == MT_F16 || t == MT_F64;
}

const char *weights_shape(char text[WEIGHTS_SHAPE], int32_t ndim, const int64_t *dim)
{
    snprintf(text, WEIGHTS_SHAPE, "[");
    for (int32_t i = 0; i < ndim && i < MT_TENSOR_MAX_DIMS; i++)
        text_append(text, WEIGHTS_SHAPE, "%s%lld", i ? ", " : "", (long long)dim[i]);
    text_append(text, WEIGHTS_SHAPE, "]");
    return text;
}

mt_status weights_check_shape(const mt_tensor_info *want, const mt_tensor_info *info,
                              const char *file)
{
    bool same = info->ndim == want->ndim;
    for (int32_t i = 0; i < want->ndim && same; i++)
        same = info->dim[i] == want->dim[i];
    if (same)
        return MT_OK;
    char found[WEIGHTS_SHAPE], expected[WEIGHTS_SHAPE];
    return status_set(MT_ERR_FORMAT,
                      "%s: tensor '%s' has shape %s, the model's has %s; are weights and "
                      "configuration of one model?",
                      file, info->name, weights_shape(found, info->ndim, info->dim),
                      weights_shape(expected, want->ndim, want->dim));
}

/* IEEE half to single precision: exact, subnormals included. */
static float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, m = h & 0x3ffu;
    if (exponent == 31)
        return mt_bits_f32(sign | 0x7f800000u | m << 13);
    if (exponent)
        return mt_bits_f32(sign | (exponent + 112) << 23 | m << 13);
    float tiny = (float)m * 0x1p-24f;
    return sign ? -tiny : tiny;
}

/* From BF16, F16 or F64. */
static void to_f32(mt_dtype dtype, const void *raw, int64_t n, float *ret)
{
    const uint8_t *p = raw;
    for (int64_t i = 0; i < n; i++) {
        if (dtype == MT_F64) {
            double x;
            memcpy(&x, p + i * 8, sizeof x);
            ret[i] = (float)x;
        } else {
            uint16_t h;
            memcpy(&h, p + i * 2, sizeof h);
            ret[i] = dtype == MT_BF16 ? mt_bf16_to_f32(h) : f16_to_f32(h);
        }
    }
}

int64_t weights_piece_elems(const weights_buffer *b, mt_dtype dtype)
{
    int64_t size = mt_dtype_size(dtype);
    return b->bytes / (size > 4 ? size : 4);
}

mt_status weights_read_piece(const mt_weights *format, const void *reader, int64_t index,
                             mt_dtype dtype, int64_t first, int64_t n, weights_buffer *b)
{
    int64_t size = mt_dtype_size(dtype);
    void *bytes = dtype == MT_F32 ? (void *)b->value : b->raw;
    mt_status status = format->read(reader, index, first * size, n * size, bytes);
    if (!status && dtype != MT_F32)
        to_f32(dtype, bytes, n, b->value);
    return status;
}

const void *weights_piece_bytes(const weights_buffer *b, mt_dtype dtype)
{
    return dtype == MT_F32 ? (const void *)b->value : b->raw;
}

const void *weights_from_f32(const weights_buffer *b, int64_t n, mt_dtype dtype)
{
    if (dtype != MT_BF16)
        return b->value;
    uint16_t *half = b->raw;
    planes_split(b->value, n, half, (int16_t *)(half + n)); /* as large as the values */
    return half;
}

/* ---- masters -------------------------------------------------------------------------------- */

static void get_from_store(void *arg, int32_t param, int64_t first, int64_t n, float *ret)
{
    store_get(arg, param, first, n, ret);
}

static void set_in_store(void *arg, int32_t param, int64_t first, int64_t n, const float *src)
{
    store_set(arg, param, first, n, src);
}

weights_masters weights_of_store(store *s)
{
    return (weights_masters){ s, get_from_store, set_in_store };
}

/* ---- blocks of a tensor ---------------------------------------------------------------------- */

weights_block weights_block_at(const mapped_tensor *t, int64_t at, int64_t end, int64_t most)
{
    weights_block b = { .at = at, .n = end - at < most ? end - at : most };
    if (!(t->flags & MT_SOURCE_TRANSPOSED))
        return b;
    b.row = at % t->rows;
    b.col = at / t->rows % t->cols;
    if (t->rows <= most) { /* whole columns */
        int64_t fit = most / t->rows;
        b.rows = t->rows;
        b.cols = t->cols - b.col < fit ? t->cols - b.col : fit;
    } else {
        b.rows = t->rows - b.row < most ? t->rows - b.row : most;
        b.cols = 1;
    }
    b.n = b.rows * b.cols;
    return b;
}

static void move_run(const weights_transfer *x, int32_t param, int64_t first, int64_t n,
                     float *value)
{
    if (x->out)
        x->masters->get(x->masters->arg, param, first, n, value);
    else
        x->masters->set(x->masters->arg, param, first, n, value);
}

/* First element of row `row` of the tensor's matrix `matrix` in the masters of its parameter. */
static int64_t target(const weights_transfer *x, int64_t matrix, int64_t row, int32_t *ret_param)
{
    const tensor_piece *piece = &x->t->pieces[x->rows[row].piece];
    int64_t own = piece->matrix < 0 ? matrix : piece->matrix;
    *ret_param = piece->param;
    return (own * tpl_matrix_rows(x->m->params[piece->param].info) + x->rows[row].row) * x->t->cols;
}

/* Rows as they stand: runs that are consecutive in both places move at once. */
static void move_rows(const weights_transfer *x, const weights_block *b, float *value)
{
    const mapped_tensor *t = x->t;
    for (int64_t done = 0; done < b->n;) {
        int64_t at = b->at + done, row = at / t->cols % t->rows, col = at % t->cols;
        int64_t n = t->cols - col;
        while (n < b->n - done && row + 1 < t->rows &&
               x->rows[row + 1].piece == x->rows[row].piece &&
               x->rows[row + 1].row == x->rows[row].row + 1) {
            n += t->cols;
            row++;
        }
        if (n > b->n - done)
            n = b->n - done;
        int32_t param;
        int64_t first = target(x, at / t->cols / t->rows, at / t->cols % t->rows, &param);
        move_run(x, param, first + col, n, value + done);
        done += n;
    }
}

/* to[j][i] = from[i][j], from [rows, cols], in tiles that the cache holds. */
static void transpose(const float *from, int64_t rows, int64_t cols, float *to)
{
    enum { TILE = 32 };
    for (int64_t i0 = 0; i0 < rows; i0 += TILE)
        for (int64_t j0 = 0; j0 < cols; j0 += TILE)
            for (int64_t i = i0; i < rows && i < i0 + TILE; i++)
                for (int64_t j = j0; j < cols && j < j0 + TILE; j++)
                    to[j * rows + i] = from[i * cols + j];
}

static void move_transposed(const weights_transfer *x, const weights_block *b, float *value,
                            float *scratch)
{
    int64_t matrix = b->at / (x->t->rows * x->t->cols);
    if (!x->out)
        transpose(value, b->cols, b->rows, scratch);
    for (int64_t r = 0; r < b->rows; r++) {
        int32_t param;
        int64_t first = target(x, matrix, b->row + r, &param);
        move_run(x, param, first + b->col, b->cols, scratch + r * b->cols);
    }
    if (x->out)
        transpose(scratch, b->rows, b->cols, value);
}

void weights_move_block(const weights_transfer *x, const weights_block *k, const weights_buffer *b)
{
    /* A block's bytes are converted, or not made yet, when the scratch is in use. */
    if (x->t->flags & MT_SOURCE_TRANSPOSED)
        move_transposed(x, k, b->value, b->raw);
    else if (x->t->linear)
        move_run(x, x->t->pieces[0].param, x->t->first + k->at, k->n, b->value);
    else
        move_rows(x, k, b->value);
}

mt_status weights_transfer_init(weights_transfer *x, const weights_masters *masters,
                                const tensor_map *map, int64_t tensor, bool out)
{
    const mapped_tensor *t = &map->tensors[tensor];
    *x = (weights_transfer){ .masters = masters, .m = map->m, .t = t, .out = out };
    if (t->linear)
        return MT_OK;
    if (!(x->rows = malloc((size_t)t->rows * sizeof *x->rows)))
        return status_nomem("the rows of a tensor", (size_t)t->rows * sizeof *x->rows);
    tensor_map_rows(t, x->rows);
    return MT_OK;
}

void weights_transfer_finish(weights_transfer *x)
{
    free(x->rows);
    x->rows = NULL;
}

mt_status weights_read_tensor(const weights_masters *to, const tensor_map *map, int64_t tensor,
                              int64_t first, int64_t n, const mt_weights *format,
                              const void *reader, int64_t index, mt_dtype dtype, weights_buffer *b)
{
    weights_transfer x;
    mt_status status = weights_transfer_init(&x, to, map, tensor, false);
    int64_t each = x.t->rows * x.t->cols, end = (first + n) * each;
    for (int64_t at = first * each; at < end && !status;) {
        weights_block k = weights_block_at(x.t, at, end, weights_piece_elems(b, dtype));
        status = weights_read_piece(format, reader, index, dtype, k.at, k.n, b);
        if (status)
            break;
        weights_move_block(&x, &k, b);
        at += k.n;
    }
    weights_transfer_finish(&x);
    return status;
}
