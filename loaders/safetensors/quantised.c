/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantised checkpoints, shown as the BF16 that they stand for:
 *
 *   MXFP4 (GPT-OSS)   "X_blocks" U8 [..., n, 16], two E2M1 codes a byte, the lower nibble first,
 * and "X_scales" U8 [..., n], one E8M0 exponent for each 32 values; shown as "X_blocks" [..., 32
 * n]. OCP Microscaling Formats 1.0; exact in BF16. FP8 (DeepSeek-V3) "X" F8_E4M3 [..., M, N] and
 * "X_scale_inv", one factor for each block of 128 x 128 values
 * (quantization_config.weight_block_size), or for all; shown as "X", value times factor in FP32,
 * rounded to BF16.
 */
#include "reader.h"

#include <math.h>
#include <megatrain/json.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- what the codes stand for ---------------------------------------------------------------- */

static mt_status make_tables(st_reader *r)
{
    static const float e2m1[8] = { 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f };
    if (r->tables)
        return MT_OK;
    st_tables *t = malloc(sizeof *t);
    if (!t)
        return mt_fail_nomem();
    for (int scale = 0; scale < 256; scale++)
        for (int code = 0; code < 16; code++) {
            float x = scale == 255 ? NAN : ldexpf(e2m1[code & 7], scale - 127);
            t->fp4[scale][code] = mt_f32_to_bf16(code & 8 ? -x : x);
        }
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        float x =
            exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
        if (exponent == 15 && mantissa == 7)
            x = NAN; /* E4M3 has no infinities */
        t->e4m3[code] = code & 128 ? -x : x;
    }
    r->tables = t;
    return MT_OK;
}

/* ---- which tensors belong together ----------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const st_tensor *const *)a)->name, (*(const st_tensor *const *)b)->name);
}

static int name_of(const void *key, const void *item)
{
    return strcmp(key, (*(const st_tensor *const *)item)->name);
}

/* Index of the tensor named `stem` (its first n characters) and `tail`, -1 when there is none. */
static mt_status find(const st_reader *r, const st_tensor **sorted, const char *stem, int n,
                      const char *tail, int64_t *ret)
{
    char *name = st_format("%.*s%s", n, stem, tail);
    if (!name)
        return MT_ERR_NOMEM;
    const st_tensor **at = bsearch(name, sorted, (size_t)r->n_tensors, sizeof *sorted, name_of);
    free(name);
    *ret = at ? *at - r->tensors : -1;
    return MT_OK;
}

static mt_status wrong_scale(const st_reader *r, const st_tensor *t, const st_tensor *scale,
                             const char *expected)
{
    char shape[160] = "";
    size_t n = 0;
    for (int32_t i = 0; i < scale->ndim && n < sizeof shape; i++)
        n += (size_t)snprintf(shape + n, sizeof shape - n, "%s%lld", i ? ", " : "",
                              (long long)scale->dim[i]);
    return mt_fail(MT_ERR_FORMAT,
                   "%s: tensor '%s', the scales of '%s', is %s [%s]; expected %s: fetch the files "
                   "again",
                   r->shards[scale->shard].path, scale->name, t->name, scale->type->name, shape,
                   expected);
}

static mt_status view_mxfp4(st_reader *r, const st_tensor *t, const st_tensor *scale, st_view *v)
{
    bool fits = t->ndim >= 2 && t->dim[t->ndim - 1] == 16 && scale->ndim == t->ndim - 1 &&
                scale->type->dtype == MT_U8;
    for (int32_t i = 0; fits && i < scale->ndim; i++)
        fits = scale->dim[i] == t->dim[i];
    if (!fits)
        return wrong_scale(r, t, scale, "U8, a byte for each 16 of the blocks");
    v->kind = ST_MXFP4;
    v->scale = scale - r->tensors;
    v->ndim = t->ndim - 1;
    v->dim[v->ndim - 1] *= 32;
    v->dim[v->ndim] = 0;
    return make_tables(r);
}

static mt_status view_fp8(st_reader *r, const st_tensor *t, const st_tensor *scale,
                          const int64_t block[2], st_view *v)
{
    char expected[200];
    bool one = scale->ndim == 0 || (scale->ndim == 1 && scale->dim[0] == 1);
    bool fits = t->ndim >= 2 && scale->ndim == t->ndim;
    snprintf(expected, sizeof expected,
             "F32 or BF16, a factor for each block of %lld x %lld values, or one for all",
             (long long)block[0], (long long)block[1]);
    for (int32_t i = 0; fits && i < t->ndim; i++) {
        int64_t size = i == t->ndim - 2 ? block[0] : i == t->ndim - 1 ? block[1] : 1;
        fits = scale->dim[i] == (t->dim[i] + size - 1) / size;
    }
    if ((!fits && !one) || (scale->type->dtype != MT_F32 && scale->type->dtype != MT_BF16))
        return wrong_scale(r, t, scale, expected);
    v->kind = ST_FP8;
    v->scale = scale - r->tensors;
    v->block_rows = one ? 0 : block[0];
    v->block_cols = one ? 0 : block[1];
    return make_tables(r);
}

/* Pairs tensor `index` with its scales if it has some. */
static mt_status view(st_reader *r, const st_tensor **sorted, int64_t index, const int64_t block[2],
                      st_view *v)
{
    static const char blocks[] = "_blocks";
    const st_tensor *t = &r->tensors[index];
    size_t n = strlen(t->name);
    int64_t scale = -1;
    mt_status status = MT_OK;
    *v = (st_view){ .kind = ST_PLAIN, .tensor = index, .scale = -1, .ndim = t->ndim };
    memcpy(v->dim, t->dim, sizeof v->dim);
    if (t->begin == t->end) /* sizes of nothing may be any */
        return MT_OK;
    if (t->type->dtype == MT_U8 && n >= sizeof blocks &&
        strcmp(t->name + n - (sizeof blocks - 1), blocks) == 0) {
        status = find(r, sorted, t->name, (int)(n - (sizeof blocks - 1)), "_scales", &scale);
        if (!status && scale >= 0)
            status = view_mxfp4(r, t, &r->tensors[scale], v);
    } else if (t->type->dtype == MT_F8_E4M3) {
        status = find(r, sorted, t->name, (int)n, "_scale_inv", &scale);
        if (!status && scale >= 0)
            status = view_fp8(r, t, &r->tensors[scale], block, v);
    }
    return status;
}

/* ---- config.json ----------------------------------------------------------------------------- */

/* What config.json says about the quantisation. Whether the file is there and right is not for the
 * weights' reader to judge. */
static mt_status read_config(const char *folder, int64_t ret_block[2])
{
    char *path = st_format("%sconfig.json", folder);
    if (!path)
        return MT_ERR_NOMEM;
    mt_status status = MT_OK;
    json_error_t error;
    json_t *root = mt_json_load_file(path, 0, &error);
    const json_t *q = json_object_get(root, "quantization_config");
    if (!json_is_object(q))
        q = json_object_get(json_object_get(root, "text_config"), "quantization_config");
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    if (method && strcmp(method, "fp8") != 0 && strcmp(method, "mxfp4") != 0)
        status = mt_fail(MT_ERR_UNSUPPORTED,
                         "%s: weights quantised with '%s' (quantization_config.quant_method) are "
                         "not read, only 'fp8' in blocks and 'mxfp4'; use the model's unquantised "
                         "release",
                         path, method);
    const json_t *size = json_object_get(q, "weight_block_size");
    for (size_t i = 0; i < 2 && json_array_size(size) == 2; i++) {
        int64_t n = json_integer_value(json_array_get(size, i));
        if (n < 1 || n > INT32_MAX) {
            status = mt_fail(MT_ERR_FORMAT,
                             "%s: quantization_config.weight_block_size is not two numbers above 0",
                             path);
            break;
        }
        ret_block[i] = n;
    }
    json_decref(root);
    free(path);
    return status;
}

mt_status st_make_views(st_reader *r, const char *folder)
{
    int64_t block[2] = { 128, 128 };
    mt_status status = read_config(folder, block);
    if (status)
        return status;
    const st_tensor **sorted = malloc(((size_t)r->n_tensors + 1) * sizeof *sorted);
    bool *hidden = calloc((size_t)r->n_tensors + 1, sizeof *hidden);
    r->views = malloc(((size_t)r->n_tensors + 1) * sizeof *r->views);
    if (!sorted || !hidden || !r->views) {
        status = mt_fail_nomem();
        goto out;
    }
    for (int64_t i = 0; i < r->n_tensors; i++)
        sorted[i] = &r->tensors[i];
    qsort(sorted, (size_t)r->n_tensors, sizeof *sorted, by_name);
    for (int64_t i = 0; i < r->n_tensors && !status; i++) {
        status = view(r, sorted, i, block, &r->views[i]);
        if (!status && r->views[i].scale >= 0)
            hidden[r->views[i].scale] = true;
    }
    for (int64_t i = 0; i < r->n_tensors && !status; i++)
        if (!hidden[i])
            r->views[r->n_views++] = r->views[i];
out:
    free(sorted);
    free(hidden);
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Where a batch of decoded values, from byte `at` of the tensor on, overlaps what was asked for. */
static void deliver(const uint16_t *values, int64_t at, int64_t bytes, int64_t offset, int64_t n,
                    void *dst)
{
    int64_t from = at > offset ? at : offset;
    int64_t to = at + bytes < offset + n ? at + bytes : offset + n;
    if (from < to)
        memcpy((char *)dst + (from - offset), (const char *)values + (from - at),
               (size_t)(to - from));
}

static mt_status read_mxfp4(const st_reader *r, const st_view *v, int64_t offset, int64_t n,
                            void *dst)
{
    enum { BATCH = 1024, GROUP = 32 };
    const st_tensor *t = &r->tensors[v->tensor], *s = &r->tensors[v->scale];
    uint8_t codes[BATCH * GROUP / 2], scales[BATCH];
    uint16_t values[BATCH * GROUP];
    const int64_t each = GROUP * (int64_t)sizeof *values;
    int64_t end = (offset + n + each - 1) / each;
    for (int64_t group = offset / each; group < end; group += BATCH) {
        int64_t count = end - group < BATCH ? end - group : BATCH;
        mt_status status = st_read_raw(r, t, group * (GROUP / 2), count * (GROUP / 2), codes);
        if (!status)
            status = st_read_raw(r, s, group, count, scales);
        if (status)
            return status;
        for (int64_t i = 0; i < count; i++) {
            const uint16_t *table = r->tables->fp4[scales[i]];
            const uint8_t *in = codes + i * (GROUP / 2);
            uint16_t *out = values + i * GROUP;
            for (int k = 0; k < GROUP / 2; k++) {
                out[2 * k] = table[in[k] & 15];
                out[2 * k + 1] = table[in[k] >> 4];
            }
        }
        deliver(values, group * each, count * each, offset, n, dst);
    }
    return MT_OK;
}

/* Factors of the blocks that a row crosses, kept from row to row. */
typedef struct factors {
    float value[1024];
    int64_t first, n; /* of the scale tensor's elements; n 0: none yet */
} factors;

static mt_status load_factors(const st_reader *r, const st_tensor *s, int64_t first, int64_t n,
                              factors *f)
{
    uint8_t raw[sizeof f->value];
    int64_t size = mt_dtype_size(s->type->dtype);
    mt_status status = st_read_raw(r, s, first * size, n * size, raw);
    for (int64_t i = 0; i < n && !status; i++) {
        uint16_t half;
        if (s->type->dtype == MT_F32) {
            memcpy(&f->value[i], raw + i * 4, 4);
        } else {
            memcpy(&half, raw + i * 2, 2);
            f->value[i] = mt_bf16_to_f32(half);
        }
    }
    f->first = first;
    f->n = status ? 0 : n;
    return status;
}

/* The factor of element `at`, and how many elements from there on share it. */
static mt_status factor_at(const st_reader *r, const st_view *v, int64_t at, factors *f, float *ret,
                           int64_t *ret_run)
{
    const st_tensor *s = &r->tensors[v->scale];
    int64_t rows = v->dim[v->ndim - 2], cols = v->dim[v->ndim - 1], index = 0;
    *ret_run = INT64_MAX;
    if (v->block_rows) {
        int64_t across = (cols + v->block_cols - 1) / v->block_cols;
        int64_t down = (rows + v->block_rows - 1) / v->block_rows;
        int64_t col = at % cols, row = at / cols % rows, matrix = at / cols / rows;
        int64_t line = (matrix * down + row / v->block_rows) * across, block = col / v->block_cols;
        int64_t stop = (block + 1) * v->block_cols;
        *ret_run = (stop < cols ? stop : cols) - col;
        index = line + block;
        if (!f->n || index < f->first || index >= f->first + f->n) {
            int64_t most = (int64_t)(sizeof f->value / sizeof *f->value), n = across - block;
            mt_status status = load_factors(r, s, index, n < most ? n : most, f);
            if (status)
                return status;
        }
    } else if (!f->n) {
        mt_status status = load_factors(r, s, 0, 1, f);
        if (status)
            return status;
    }
    *ret = f->value[index - f->first];
    return MT_OK;
}

static mt_status read_fp8(const st_reader *r, const st_view *v, int64_t offset, int64_t n,
                          void *dst)
{
    enum { BATCH = 32 << 10 };
    const st_tensor *t = &r->tensors[v->tensor];
    uint8_t codes[BATCH];
    uint16_t values[BATCH];
    factors f;
    f.n = 0;
    int64_t end = (offset + n + 1) / 2;
    for (int64_t at = offset / 2; at < end; at += BATCH) {
        int64_t count = end - at < BATCH ? end - at : BATCH;
        mt_status status = st_read_raw(r, t, at, count, codes);
        for (int64_t i = 0; i < count && !status;) {
            float factor = 0;
            int64_t run = 0;
            status = factor_at(r, v, at + i, &f, &factor, &run);
            int64_t stop = run < count - i ? i + run : count;
            for (; i < stop && !status; i++)
                values[i] = mt_f32_to_bf16(r->tables->e4m3[codes[i]] * factor);
        }
        if (status)
            return status;
        deliver(values, at * 2, count * 2, offset, n, dst);
    }
    return MT_OK;
}

mt_status st_read_dequantised(const st_reader *r, const st_view *v, int64_t offset, int64_t n,
                              void *dst)
{
    return v->kind == ST_MXFP4 ? read_mxfp4(r, v, offset, n, dst) : read_fp8(r, v, offset, n, dst);
}
