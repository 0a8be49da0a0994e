/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading weights into the masters of a small model: every dtype, every half, and which tensors
 * must be there.
 */
#include "../../core/train/checkpoint.h"
#include "../../core/train/weights.h"
#include "small_model.h"
#include "support.h"

#include <math.h>

__extension__ typedef _Float16 half;

static const mt_weights *format;
static char folder[64];

typedef struct entry {
    const char *name;
    mt_dtype dtype;
    int64_t rows, cols; /* rows 0: a vector */
    int salt;
} entry;

/* Value of element i, in a dtype: exact in FP32 unless the dtype is F64. */
static double value_of(mt_dtype dtype, int salt, int64_t i)
{
    int64_t k = (i * 37 + salt * 11) % 255 - 127;
    if (dtype == MT_F64)
        return (double)k / 3;
    return (double)k * (i % 3 ? 0.0078125 : 0x1p-20); /* half: also subnormal */
}

static void write_entries(const entry *e, int n)
{
    mt_tensor_info list[16] = { 0 };
    for (int t = 0; t < n; t++) {
        list[t] = (mt_tensor_info){ .name = e[t].name, .dtype = e[t].dtype };
        if (e[t].rows)
            list[t].dim[list[t].ndim++] = e[t].rows;
        list[t].dim[list[t].ndim++] = e[t].cols;
        list[t].bytes = (e[t].rows ? e[t].rows : 1) * e[t].cols * mt_dtype_size(e[t].dtype);
    }
    void *w;
    CHECK(format->create(".", "model", list, n, 0, &w) == MT_OK, "%s", status_text());
    for (int t = 0; t < n; t++)
        for (int64_t i = 0; i < list[t].bytes / mt_dtype_size(e[t].dtype); i++) {
            double x = value_of(e[t].dtype, e[t].salt, i);
            float f = (float)x;
            half h = (half)f;
            uint16_t b = mt_f32_to_bf16(f);
            const void *p = e[t].dtype == MT_F64   ? (const void *)&x
                            : e[t].dtype == MT_F32 ? (const void *)&f
                            : e[t].dtype == MT_F16 ? (const void *)&h
                                                   : (const void *)&b;
            CHECK(format->write(w, t, p, mt_dtype_size(e[t].dtype)) == MT_OK, "%s", status_text());
        }
    CHECK(format->finish(w) == MT_OK, "%s", status_text());
}

enum { V = SMALL_VOCAB, H = SMALL_HIDDEN };

#define NORM "model.layers.0.input_layernorm.weight"
#define PROJ "model.layers.0.proj.weight"
#define EMB  "model.embed_tokens.weight"

static void every_dtype(void)
{
    support_enter(folder);
    model *m = small_model_create(true);
    store *s = small_store_create(m, NULL, 0);
    entry e[] = { { EMB, MT_F16, V, H, 1 },
                  { NORM, MT_BF16, 0, H, 2 },
                  { PROJ, MT_F64, H, H, 3 },
                  { "model.norm.weight", MT_F32, 0, H, 4 } };
    write_entries(e, 4);
    CHECK(weights_load(s, ".", format, NULL) == MT_OK, "%s", status_text());
    for (int t = 0; t < 4; t++) {
        int32_t p = model_find_param(m, e[t].name);
        CHECK(p >= 0, "%s", e[t].name);
        for (int64_t i = 0; p >= 0 && i < m->params[p].elems; i++) {
            float x;
            store_get(s, p, i, 1, &x);
            CHECK(x == (float)value_of(e[t].dtype, e[t].salt, i), "%s %d: %g", e[t].name, (int)i,
                  (double)x);
        }
    }
    store_destroy(s);
    model_destroy(m);
    support_leave(folder);
}

static void all_half_values(void)
{
    support_enter(folder);
    model *m = small_model_create_sized(true, 1024, 64);
    store *s = small_store_create(m, NULL, 0);
    mt_tensor_info list[] = {
        { .name = EMB, .dtype = MT_F16, .ndim = 2, .dim = { 1024, 64 }, .bytes = 131072 },
        { .name = NORM, .dtype = MT_F32, .ndim = 1, .dim = { 64 }, .bytes = 256 },
        { .name = PROJ, .dtype = MT_F32, .ndim = 2, .dim = { 64, 64 }, .bytes = 16384 },
        { .name = "model.norm.weight", .dtype = MT_F32, .ndim = 1, .dim = { 64 }, .bytes = 256 }
    };
    static uint16_t all[65536];
    static char zeros[16384];
    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    void *w;
    CHECK(format->create(".", "model", list, 4, 0, &w) == MT_OK, "%s", status_text());
    CHECK(format->write(w, 0, all, sizeof all) == MT_OK, " ");
    for (int t = 1; t < 4; t++)
        CHECK(format->write(w, t, zeros, list[t].bytes) == MT_OK, " ");
    CHECK(format->finish(w) == MT_OK, " ");
    CHECK(weights_load(s, ".", format, NULL) == MT_OK, "%s", status_text());
    int32_t p = model_find_param(m, EMB);
    for (int i = 0; i < 65536; i++) {
        half h;
        float x;
        memcpy(&h, &all[i], 2);
        store_get(s, p, i, 1, &x);
        float want = (float)h;
        CHECK(mt_f32_bits(x) == mt_f32_bits(want) || (isnan(x) && isnan(want)), "%04x: %g", i,
              (double)x);
    }
    store_destroy(s);
    model_destroy(m);
    support_leave(folder);
}

static void refuse_weights(store *s, const entry *e, int n, mt_status code, const char *says)
{
    write_entries(e, n);
    mt_status status = weights_load(s, ".", format, NULL);
    CHECK(status == code, "%d, expected %d: %s", status, code, says);
    CHECK(status == MT_OK || support_says(says), "%s", says);
}

static void which_weights(void)
{
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    model *m = small_model_create(true), *untied = small_model_create(false);
    store *s = small_store_create(m, NULL, 0), *u = small_store_create(untied, NULL, 0);
    entry e[8] = { { "lm_head.weight", MT_BF16, V, H, 1 },
                   { EMB, MT_BF16, V, H, 1 },
                   { NORM, MT_F32, 0, H, 2 },
                   { PROJ, MT_F32, H, H, 3 },
                   { "model.norm.weight", MT_F32, 0, H, 4 } };
    refuse_weights(s, e, 5, MT_OK, "a tied copy");
    refuse_weights(s, e + 1, 4, MT_OK, "tied");
    refuse_weights(u, e, 5, MT_OK, "untied");
    refuse_weights(u, e + 1, 4, MT_ERR_FORMAT, "'lm_head.weight' is missing");
    refuse_weights(s, e + 1, 3, MT_ERR_FORMAT, "'model.norm.weight' is missing");
    refuse_weights(s, e + 1, 2, MT_ERR_FORMAT, "and 1 more of 4 is missing");
    e[0].salt = 9;
    refuse_weights(s, e, 5, MT_ERR_FORMAT, "tie_word_embeddings: false");
    e[0] = (entry){ "extra.weight", MT_F32, 0, 3, 1 };
    refuse_weights(s, e, 5, MT_ERR_FORMAT, "'extra.weight' belongs to no parameter");
    e[0] = (entry){ "model.layers.0.rotary_emb.inv_freq", MT_F32, 0, 3, 1 };
    refuse_weights(s, e, 5, MT_OK, "ignored by the architecture");
    e[3].rows = H + 1;
    refuse_weights(s, e, 5, MT_ERR_FORMAT, "proj.weight' has shape [");
    e[3] = (entry){ PROJ, MT_F32, 0, H * H, 3 };
    refuse_weights(s, e, 5, MT_ERR_FORMAT, "proj.weight' has shape [");
    e[3] = (entry){ PROJ, MT_I16, H, H, 3 };
    refuse_weights(s, e, 5, MT_ERR_UNSUPPORTED, "is int16; weights are read from");
    /* The text part of a vision-language model, in both wrappings; twice is once too often. */
    entry a[] = { { "language_model." EMB, MT_BF16, V, H, 1 },
                  { "language_model." NORM, MT_F32, 0, H, 2 },
                  { "language_model." PROJ, MT_F32, H, H, 3 },
                  { "model.language_model.norm.weight", MT_F32, 0, H, 4 },
                  { EMB, MT_BF16, V, H, 1 } };
    refuse_weights(s, a, 4, MT_OK, "wrapped");
    refuse_weights(s, a, 5, MT_ERR_FORMAT, "expected one");
    log_set_level(MT_LOG_INFO);
    store_destroy(s);
    store_destroy(u);
    model_destroy(m);
    model_destroy(untied);
    support_leave(folder);
}

/* However long its dimensions are, a shape can be told. */
static void shapes(void)
{
    const int64_t short_one[] = { 3, 4 };
    int64_t dim[MT_TENSOR_MAX_DIMS];
    char text[WEIGHTS_SHAPE];
    CHECK(strcmp(weights_shape(text, 2, short_one), "[3, 4]") == 0, "%s", text);
    CHECK(strcmp(weights_shape(text, 0, short_one), "[]") == 0, "%s", text);
    for (int i = 0; i < MT_TENSOR_MAX_DIMS; i++)
        dim[i] = i % 2 ? INT64_MAX : INT64_MIN;
    size_t n = strlen(weights_shape(text, MT_TENSOR_MAX_DIMS, dim));
    CHECK(n == 2 + 4 * 20 + 4 * 19 + 7 * 2 && text[n - 1] == ']', "%s", text);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    format = plugin_interface(argv[1], MT_WEIGHTS_INTERFACE);
    RUN(every_dtype);
    RUN(all_half_values);
    RUN(which_weights);
    RUN(shapes);
    return check_done();
}
