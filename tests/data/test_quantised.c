/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantised checkpoints against their definitions: every FP4 code under every scale, every E4M3
 * code under many factors, blocks that the shape cuts, reads from any byte, and what is refused.
 */
#include "support.h"

#include <math.h>

static const mt_weights *w;
static char folder[64];

typedef struct content {
    mt_tensor_info info;
    const void *data;
} content;

static content make(const char *name, mt_dtype dtype, int32_t ndim, const int64_t *dim,
                    const void *data)
{
    content c = { .info = { .name = name, .dtype = dtype, .ndim = ndim }, .data = data };
    c.info.bytes = mt_dtype_size(dtype);
    for (int32_t i = 0; i < ndim; i++) {
        c.info.dim[i] = dim[i];
        c.info.bytes *= dim[i];
    }
    return c;
}

static void write_files(const content *c, int n, int64_t shard)
{
    mt_tensor_info list[8];
    void *out = NULL;
    for (int i = 0; i < n; i++)
        list[i] = c[i].info;
    CHECK(w->create(".", "model", list, n, shard, &out) == MT_OK, "%s", status_text());
    for (int i = 0; i < n; i++)
        CHECK(w->write(out, i, c[i].data, list[i].bytes) == MT_OK, "%s", status_text());
    CHECK(w->finish(out) == MT_OK, "%s", status_text());
}

/* Opens the files, which show `shown` tensors, and reads the one called `name` whole: it is BF16 of
 * `elems` elements. The caller frees. */
static uint16_t *read_whole(const char *name, int64_t shown, int32_t ndim, int64_t elems)
{
    void *r = NULL;
    uint16_t *data = malloc((size_t)elems * 2 + 1), *part = malloc((size_t)elems * 2);
    CHECK(w->open(".", &r) == MT_OK, "%s", status_text());
    if (!r || !data || !part)
        exit(1);
    CHECK(w->count(r) == shown, "%d tensors", (int)w->count(r));
    for (int64_t i = 0; i < w->count(r); i++) {
        mt_tensor_info info;
        CHECK(w->info(r, i, &info) == MT_OK, "%s", status_text());
        if (strcmp(info.name, name) != 0)
            continue;
        CHECK(info.dtype == MT_BF16 && info.ndim == ndim && info.bytes == elems * 2, "%s", name);
        CHECK(w->read(r, i, 0, elems * 2, data) == MT_OK, "%s", status_text());
        /* From anywhere, and of any length, the same bytes come. */
        for (int64_t at = 0, n = 1; at < elems * 2; at += n, n = n * 3 % 40009 + 1) {
            n = at + n > elems * 2 ? elems * 2 - at : n;
            CHECK(w->read(r, i, at, n, part) == MT_OK, "%s", status_text());
            CHECK(memcmp(part, (char *)data + at, (size_t)n) == 0, "%s: bytes %d +%d", name,
                  (int)at, (int)n);
        }
        CHECK(w->read(r, i, elems * 2 - 1, 2, part) == MT_ERR_INVALID, "past the end");
    }
    w->close(r);
    free(part);
    return data;
}

static bool same(uint16_t found, float want)
{
    uint16_t bits = mt_f32_to_bf16(want);
    return isnan(want) ? isnan(mt_bf16_to_f32(found)) : found == bits;
}

static float fp4_value(int code)
{
    static const float table[16] = { 0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f };
    return table[code];
}

/* Experts of 256 rows and two groups: row s has scale s, then scale 255 - s. */
static void mxfp4(void)
{
    enum { EXPERTS = 2, ROWS = 256, GROUPS = 2, N = EXPERTS * ROWS * GROUPS };
    static uint8_t blocks[N][16], scales[N];
    static float other[3] = { 1, 2, 3 };
    for (int g = 0; g < N; g++) {
        scales[g] = (uint8_t)(g % GROUPS ? 255 - g / GROUPS % ROWS : g / GROUPS % ROWS);
        for (int j = 0; j < 16; j++)
            blocks[g][j] = (uint8_t)(j * 17 + g / (ROWS * GROUPS) * 16 + g % GROUPS);
    }
    for (int shards = 0; shards < 2; shards++) {
        support_enter(folder);
        const content c[] = {
            make("x_scales", MT_U8, 3, (int64_t[]){ EXPERTS, ROWS, GROUPS }, scales),
            make("other", MT_F32, 1, (int64_t[]){ 3 }, other),
            make("x_blocks", MT_U8, 4, (int64_t[]){ EXPERTS, ROWS, GROUPS, 16 }, blocks)
        };
        write_files(c, 3, shards ? 1024 : 0);
        uint16_t *data = read_whole("x_blocks", 2, 3, N * 32);
        for (int g = 0; g < N; g++)
            for (int k = 0; k < 32; k++) {
                int code = k % 2 ? blocks[g][k / 2] >> 4 : blocks[g][k / 2] & 15;
                float want = scales[g] == 255
                                 ? NAN
                                 : (float)((double)fp4_value(code) * exp2((double)scales[g] - 127));
                CHECK(same(data[g * 32 + k], want), "scale %d code %d: %04x, expected %g",
                      scales[g], code, data[g * 32 + k], (double)want);
                /* Nothing is lost: BF16 holds each of them. */
                CHECK(isnan(want) || mt_bf16_to_f32(data[g * 32 + k]) == want, "scale %d code %d",
                      scales[g], code);
            }
        free(data);
        support_leave(folder);
    }
}

static float e4m3_value(int code)
{
    int e = code / 8 % 16, m = code % 8;
    double x = e ? exp2(e - 7) * (1 + m / 8.0) : exp2(-6) * (m / 8.0);
    x = e == 15 && m == 7 ? (double)NAN : x;
    return (float)(code >= 128 ? -x : x);
}

/* 300 x 260 values: the last blocks are cut both ways. Factors in FP32, and in BF16. */
static void fp8_blocks(void)
{
    enum { M = 300, N = 260, DOWN = 3, ACROSS = 3 };
    static uint8_t codes[M * N];
    static float factor[DOWN * ACROSS];
    static uint16_t half[DOWN * ACROSS];
    for (int i = 0; i < M * N; i++)
        codes[i] = (uint8_t)(i * 3 + i / N);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        support_enter(folder);
        for (int i = 0; i < DOWN * ACROSS; i++) {
            factor[i] = ldexpf(1.0f + (float)i / 7, i * 5 - 20);
            half[i] = mt_f32_to_bf16(factor[i]);
            factor[i] = bf16 ? mt_bf16_to_f32(half[i]) : factor[i];
        }
        const content c[] = {
            make("y.weight", MT_F8_E4M3, 2, (int64_t[]){ M, N }, codes),
            make("y.weight_scale_inv", bf16 ? MT_BF16 : MT_F32, 2, (int64_t[]){ DOWN, ACROSS },
                 bf16 ? (const void *)half : factor),
        };
        write_files(c, 2, bf16 ? 1 : 0);
        static const char config[] =
            "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": "
            "[128, 128]}}";
        support_write("config.json", config, sizeof config - 1);
        uint16_t *data = read_whole("y.weight", 1, 2, M * N);
        for (int i = 0; i < M * N; i++) {
            float want = e4m3_value(codes[i]) * factor[i / N / 128 * ACROSS + i % N / 128];
            CHECK(same(data[i], want), "element %d, code %02x: %04x, expected %g", i, codes[i],
                  data[i], (double)want);
        }
        free(data);
        support_leave(folder);
    }
}

/* Other blocks, stacked matrices, more blocks across than are kept at once; one factor for all. */
static void fp8_shapes(void)
{
    enum { E = 2, M = 3, N = 2500, BLOCKS = 1250 };
    static uint8_t codes[E * M * N];
    static float factor[E * 2 * BLOCKS];
    for (int i = 0; i < E * M * N; i++)
        codes[i] = (uint8_t)(i * 5);
    for (int i = 0; i < E * 2 * BLOCKS; i++)
        factor[i] = (float)(i % 97 + 1) / 64;
    for (int one = 0; one < 2; one++) {
        support_enter(folder);
        const content c[] = {
            make("z", MT_F8_E4M3, 3, (int64_t[]){ E, M, N }, codes),
            make("z_scale_inv", MT_F32, one ? 0 : 3, (int64_t[]){ E, 2, BLOCKS }, factor),
        };
        write_files(c, 2, 0);
        static const char config[] =
            "{\"text_config\": {\"quantization_config\": {\"weight_block_size\": [2, 2]}}}";
        support_write("config.json", config, sizeof config - 1);
        uint16_t *data = read_whole("z", 1, 3, E * M * N);
        for (int i = 0; i < E * M * N; i++) {
            int e = i / (M * N), row = i / N % M, col = i % N;
            float f = one ? factor[0] : factor[(e * 2 + row / 2) * BLOCKS + col / 2];
            CHECK(same(data[i], e4m3_value(codes[i]) * f), "element %d", i);
        }
        free(data);
        support_leave(folder);
    }
}

static void refuse(const content *c, int n, mt_status code, const char *says)
{
    void *r = NULL;
    write_files(c, n, 0);
    CHECK(w->open(".", &r) == code, "%s", says);
    CHECK(support_says(says), "%s", says);
}

static void refused(void)
{
    support_enter(folder);
    static const uint8_t zeros[4096];
    const content blocks = make("x_blocks", MT_U8, 3, (int64_t[]){ 4, 2, 16 }, zeros);
    const content fp8 = make("y", MT_F8_E4M3, 2, (int64_t[]){ 3, 130 }, zeros);
    refuse((const content[]){ blocks, make("x_scales", MT_U8, 2, (int64_t[]){ 4, 3 }, zeros) }, 2,
           MT_ERR_FORMAT, "'x_scales', the scales of 'x_blocks', is U8 [4, 3]");
    refuse((const content[]){ blocks, make("x_scales", MT_I8, 2, (int64_t[]){ 4, 2 }, zeros) }, 2,
           MT_ERR_FORMAT, "is I8 [4, 2]; expected U8");
    refuse((const content[]){ fp8, make("y_scale_inv", MT_F32, 2, (int64_t[]){ 1, 1 }, zeros) }, 2,
           MT_ERR_FORMAT, "a factor for each block of 128 x 128");
    refuse((const content[]){ fp8, make("y_scale_inv", MT_F16, 2, (int64_t[]){ 1, 2 }, zeros) }, 2,
           MT_ERR_FORMAT, "is F16 [1, 2]; expected F32 or BF16");
    static const char *const methods[] = { "bitsandbytes", "gptq", "awq", "compressed-tensors" };
    for (int i = 0; i < 4; i++) {
        char config[128];
        snprintf(config, sizeof config, "{\"quantization_config\": {\"quant_method\": \"%s\"}}",
                 methods[i]);
        support_write("config.json", config, strlen(config));
        refuse(&fp8, 1, MT_ERR_UNSUPPORTED, methods[i]);
    }
    CHECK(remove("config.json") == 0, " ");

    /* Without their scales, or with names that only look alike, tensors are what they are. */
    void *r = NULL;
    mt_tensor_info info;
    write_files((const content[]){ blocks, fp8 }, 2, 0);
    CHECK(w->open(".", &r) == MT_OK && w->count(r) == 2, "%s", status_text());
    CHECK(w->info(r, 0, &info) == MT_OK && info.dtype == MT_U8 && info.ndim == 3, " ");
    CHECK(w->info(r, 1, &info) == MT_OK && info.dtype == MT_F8_E4M3, " ");
    w->close(r);
    support_leave(folder);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    w = plugin_interface(argv[1], MT_WEIGHTS_INTERFACE);
    RUN(mxfp4);
    RUN(fp8_blocks);
    RUN(fp8_shapes);
    RUN(refused);
    return check_done();
}
