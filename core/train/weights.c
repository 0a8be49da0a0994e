/* SPDX-License-Identifier: Apache-2.0
 *
 * From tensors in files to masters in the store, and loading a whole model: every parameter is
 * filled exactly once, and every tensor is used, ignored on purpose, or an error.
 */
#include "weights.h"

#include "../base/log.h"
#include "../base/status.h"
#include "checkpoint.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- pieces --------------------------------------------------------------------------------- */

mt_status weights_buffer_init(weights_buffer *b)
{
    *b = (weights_buffer){ malloc(WEIGHTS_PIECE / 2), malloc(WEIGHTS_PIECE / 2) };
    if (b->raw && b->value)
        return MT_OK;
    weights_buffer_finish(b);
    return status_nomem("the buffer that weights pass through", WEIGHTS_PIECE);
}

void weights_buffer_finish(weights_buffer *b)
{
    free(b->raw);
    free(b->value);
    *b = (weights_buffer){ 0 };
}

bool weights_is_float(mt_dtype t)
{
    return t == MT_F32 || t == MT_BF16 || t == MT_F16 || t == MT_F64;
}

const char *weights_shape(char text[160], int32_t ndim, const int64_t *dim)
{
    int n = snprintf(text, 160, "[");
    for (int32_t i = 0; i < ndim && i < MT_TENSOR_MAX_DIMS; i++)
        n += snprintf(text + n, 160 - (size_t)n, "%s%lld", i ? ", " : "", (long long)dim[i]);
    snprintf(text + n, 160 - (size_t)n, "]");
    return text;
}

mt_status weights_check_shape(const model_param *p, const mt_tensor_info *info, const char *file)
{
    int64_t want[2] = { p->rows ? p->rows : p->cols, p->cols };
    int32_t ndim = p->rows ? 2 : 1;
    bool same = info->ndim == ndim;
    for (int32_t i = 0; i < ndim && same; i++)
        same = info->dim[i] == want[i];
    if (same)
        return MT_OK;
    char found[160], expected[160];
    return status_set(MT_ERR_FORMAT,
                      "%s: tensor '%s' has shape %s, the model's has %s; are weights and "
                      "configuration of one model?",
                      file, info->name, weights_shape(found, info->ndim, info->dim),
                      weights_shape(expected, ndim, want));
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

/* Element-wise copies through memcpy: the bytes of a file are aligned for nothing. */
static void to_f32(mt_dtype dtype, const void *raw, int64_t n, float *ret)
{
    const uint8_t *p = raw;
    if (dtype == MT_F32)
        memcpy(ret, p, (size_t)n * sizeof *ret);
    for (int64_t i = 0; i < n && dtype != MT_F32; i++) {
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

int64_t weights_piece_elems(mt_dtype dtype)
{
    int64_t size = mt_dtype_size(dtype);
    return WEIGHTS_PIECE / 2 / (size > 4 ? size : 4);
}

mt_status weights_read_piece(const mt_weights *format, const void *reader, int64_t index,
                             mt_dtype dtype, int64_t first, int64_t n, weights_buffer *b)
{
    int64_t size = mt_dtype_size(dtype);
    mt_status status = format->read(reader, index, first * size, n * size, b->raw);
    if (!status)
        to_f32(dtype, b->raw, n, b->value);
    return status;
}

mt_status weights_read_param(store *s, int32_t param, const mt_weights *format, const void *reader,
                             int64_t index, mt_dtype dtype, weights_buffer *b, XXH3_state_t *hash)
{
    int64_t elems = s->m->params[param].elems, step = weights_piece_elems(dtype);
    for (int64_t at = 0; at < elems; at += step) {
        int64_t n = elems - at < step ? elems - at : step;
        mt_status status = weights_read_piece(format, reader, index, dtype, at, n, b);
        if (status)
            return status;
        if (hash)
            XXH3_64bits_update(hash, b->raw, (size_t)(n * mt_dtype_size(dtype)));
        store_set(s, param, at, n, b->value);
    }
    return MT_OK;
}

/* ---- a whole model -------------------------------------------------------------------------- */

/* Text models are also saved as a part of a vision-language model; both wrappings are taken off:
 * "language_model.model.X", "language_model.lm_head.X" and "model.language_model.X". */
static int32_t find_param(const model *m, const char *name)
{
    static const char outer[] = "language_model.", inner[] = "model.language_model.";
    int32_t p = model_find_param(m, name);
    if (p >= 0)
        return p;
    if (strncmp(name, outer, sizeof outer - 1) == 0)
        return model_find_param(m, name + sizeof outer - 1);
    if (strncmp(name, inner, sizeof inner - 1) == 0) {
        char bare[512];
        if (snprintf(bare, sizeof bare, "model.%s", name + sizeof inner - 1) < (int)sizeof bare)
            return model_find_param(m, bare);
    }
    return -1;
}

/* The parameter that some unit uses as an alias and that has this tensor's shape, -1 for none. */
static int32_t find_aliased(const model *m, const mt_tensor_info *info)
{
    for (int32_t u = 0; u < m->n_units; u++) {
        const tpl *t = m->units[u].t;
        for (uint32_t k = 0; k < t->n_params; k++) {
            const model_param *p = &m->params[m->units[u].slot[k]];
            if ((t->params[k].info.flags & MT_PARAM_ALIAS) && info->ndim == 2 &&
                info->dim[0] == p->rows && info->dim[1] == p->cols)
                return m->units[u].slot[k];
        }
    }
    return -1;
}

/* Does the tensor hold what the parameter now holds? Compared as the store keeps it. */
static mt_status equals_param(const store *s, int32_t param, const mt_weights *format,
                              const void *reader, int64_t index, mt_dtype dtype, weights_buffer *b,
                              bool *ret)
{
    int64_t elems = s->m->params[param].elems, step = weights_piece_elems(MT_F64);
    bool same = true;
    for (int64_t at = 0; at < elems && same; at += step) {
        int64_t n = elems - at < step ? elems - at : step;
        mt_status status = weights_read_piece(format, reader, index, dtype, at, n, b);
        if (status)
            return status;
        float *held = b->raw; /* its content is converted by now */
        store_get(s, param, at, n, held);
        for (int64_t i = 0; i < n && same; i++) {
            uint16_t hi;
            int16_t lo;
            mt_split_f32(b->value[i], &hi, &lo);
            same = mt_f32_bits(mt_join_f32(hi, lo)) == mt_f32_bits(held[i]);
        }
    }
    *ret = same;
    return MT_OK;
}

/* A tensor that no parameter asks for: a tied model's second copy is fine if it is one, and
 * anything else would be weights that silently do nothing. */
static mt_status check_unused(const store *s, const mt_weights *format, const void *reader,
                              int64_t index, const mt_tensor_info *info, weights_buffer *b)
{
    const char *file = format->file(reader, index);
    int32_t owner = find_aliased(s->m, info);
    if (owner < 0 || !weights_is_float(info->dtype))
        return status_set(MT_ERR_FORMAT,
                          "%s: tensor '%s' belongs to no parameter of the model; are weights and "
                          "configuration of one model?",
                          file, info->name);
    bool same;
    mt_status status = equals_param(s, owner, format, reader, index, info->dtype, b, &same);
    if (status)
        return status;
    if (!same)
        return status_set(MT_ERR_FORMAT,
                          "%s: the model ties a weight to '%s', but tensor '%s' of the same shape "
                          "holds other values; untie them in the configuration "
                          "(tie_word_embeddings: false) or remove the tensor",
                          file, s->m->params[owner].name, info->name);
    log_write(MT_LOG_INFO, "%s: tensor '%s' repeats '%s', to which it is tied; not needed", file,
              info->name, s->m->params[owner].name);
    return MT_OK;
}

static mt_status load_one(store *s, const mt_weights *format, const void *reader, int64_t index,
                          int32_t param, const char **from, weights_buffer *b)
{
    const char *file = format->file(reader, index);
    mt_tensor_info info;
    mt_status status = format->info(reader, index, &info);
    if (status)
        return status;
    if (from[param])
        return status_set(MT_ERR_FORMAT,
                          "%s: tensors '%s' and '%s' both are '%s' of the model; expected one",
                          file, from[param], info.name, s->m->params[param].name);
    if (!weights_is_float(info.dtype))
        return status_set(MT_ERR_UNSUPPORTED,
                          "%s: tensor '%s' is %s; weights are read from fp32, bf16, fp16 and fp64: "
                          "convert (dequantise) them first",
                          file, info.name,
                          info.dtype < 0 ? "of a dtype unknown here" : mt_dtype_name(info.dtype));
    if ((status = weights_check_shape(&s->m->params[param], &info, file)))
        return status;
    from[param] = info.name;
    return weights_read_param(s, param, format, reader, index, info.dtype, b, NULL);
}

static mt_status check_complete(const model *m, const char *const *from, const char *path)
{
    int32_t missing = 0, first = -1;
    for (int32_t p = 0; p < m->n_params; p++)
        if (!from[p]) {
            first = first < 0 ? p : first;
            missing++;
        }
    if (!missing)
        return MT_OK;
    char more[64] = "";
    if (missing > 1)
        snprintf(more, sizeof more, " and %d more of %d", missing - 1, m->n_params);
    return status_set(MT_ERR_FORMAT,
                      "%s: tensor '%s'%s is missing; are weights and configuration of one model, "
                      "and are all files there?",
                      path, m->params[first].name, more);
}

mt_status weights_load(store *s, const char *path, const mt_weights *format)
{
    const model *m = s->m;
    void *reader = NULL;
    const char **from = NULL; /* name of the tensor that filled each parameter */
    weights_buffer b = { 0 };
    mt_status status = format->open(path, &reader);
    if (status)
        return status;
    from = calloc((size_t)m->n_params + 1, sizeof *from);
    if (!from) {
        status = status_nomem("loading weights", (size_t)m->n_params * sizeof *from);
        goto out;
    }
    if ((status = weights_buffer_init(&b)))
        goto out;
    int64_t n = format->count(reader);
    mt_tensor_info info;
    for (int64_t i = 0; i < n && !status; i++) {
        if ((status = format->info(reader, i, &info)))
            break;
        int32_t p = find_param(m, info.name);
        if (p >= 0)
            status = load_one(s, format, reader, i, p, from, &b);
    }
    if (!status)
        status = check_complete(m, from, path);
    /* Only now, because a tied copy is compared with the owner, which may come later. */
    for (int64_t i = 0; i < n && !status; i++)
        if (!(status = format->info(reader, i, &info)) && find_param(m, info.name) < 0 &&
            !model_ignores(m, info.name))
            status = check_unused(s, format, reader, i, &info, &b);
out:
    weights_buffer_finish(&b);
    free(from);
    format->close(reader);
    return status;
}
