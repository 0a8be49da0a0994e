/* SPDX-License-Identifier: Apache-2.0
 *
 * linear and embedding on the CPU, and the GEMM below them.
 */
#include "side.h"

#include "cpu.h"
#include "device.h"

#include <math.h>

/* Forward in double against x w^T + bias written out. */
static void linear_formula(const op_case *c)
{
    int64_t t = c->in[0].rows, k = c->in[0].cols, n = c->in[1].rows;
    op_data d;
    op_result r;
    op_fill(c, 6, &d);
    op_run(cpu_side("scalar", 1), c, &d, &(op_how){ .dtype = MT_F64 }, &r);
    for (int64_t i = 0; i < t * n; i++) {
        double want = c->in[2].cols ? d.in[2][i % n] : 0;
        for (int64_t p = 0; p < k; p++)
            want += d.in[0][i / n * k + p] * d.in[1][i % n * k + p];
        CHECK(fabs(r.out[0][i] - want) < 1e-12 * (double)k, "%d: %g, not %g", (int)i, r.out[0][i],
              want);
    }
    op_result_free(&r);
    op_data_free(&d);
}

static void check_linear(int64_t t, int64_t k, int64_t n, bool bias)
{
    op_case c = linear_case(t, n, k, bias);
    linear_formula(&c);
    op_check_fast(&c, 7, 1e-5, 1e-2);
    if (t <= 37)
        op_check_gradients(&c, 8, 1e-8);
}

static void linear_small(void)
{
    check_linear(1, 10, 7, true);
    check_linear(37, 30, 19, true);
    check_linear(37, 33, 41, false);
}

/* More than one tile and one panel in each direction. */
static void linear_tiles(void)
{
    check_linear(261, 530, 300, true);
}

static void check_exact_linear(int64_t t, int64_t n, int64_t k)
{
    op_case c = exact_linear_case(t, n, k);
    linear_formula(&c);
    op_check_fast(&c, 7, 1e-5, 1e-2);
    if (t <= 37)
        op_check_gradients(&c, 8, 1e-8);
}

static double through_bf16(double x)
{
    return (double)mt_bf16_to_f32(mt_f32_to_bf16((float)x));
}

/* Sums of products of BF16 numbers as FP32 has them, so that those compare that BF16 would make
 * equal. */
static void exact_linear(void)
{
    enum { T = 37, N = 19, K = 64 };
    check_exact_linear(1, 10, 7);
    check_exact_linear(T, N, K);
    check_exact_linear(261, 300, 530);
    op_case c = exact_linear_case(T, N, K);
    op_data d;
    op_result r;
    op_fill(&c, 6, &d);
    op_run(cpu_side(NULL, 2), &c, &d, &(op_how){ .dtype = MT_BF16 }, &r);
    int lost = 0;
    for (int i = 0; i < T * N; i++) {
        double want = 0, size = 0;
        for (int p = 0; p < K; p++) {
            double product =
                through_bf16(d.in[0][i / N * K + p]) * through_bf16(d.in[1][i % N * K + p]);
            want += product;
            size += fabs(product);
        }
        CHECK(fabs(r.out[0][i] - want) < 1e-6 * size, "%d: %.9g, not %.9g", i, r.out[0][i], want);
        lost += through_bf16(r.out[0][i]) != r.out[0][i];
    }
    CHECK(lost > T * N * 9 / 10, "BF16 would hold all but %d", lost);
    op_result_free(&r);
    op_data_free(&d);
}

static void embedding(void)
{
    enum { T = 101, ROWS = 13, COLS = 130 };
    int32_t rows[T];
    for (int i = 0; i < T; i++)
        rows[i] = (i * 7 + i / 5) % ROWS;
    op_case c = embedding_case(T, rows, ROWS, COLS);
    op_data d;
    op_result r;
    op_fill(&c, 2, &d);
    op_run(cpu_side(NULL, 1), &c, &d, &(op_how){ .dtype = MT_BF16 }, &r);
    for (int i = 0; i < T * COLS; i++)
        CHECK(r.out[0][i] == d.in[0][rows[i / COLS] * COLS + i % COLS], "element %d", i);
    op_result_free(&r);
    op_data_free(&d);
    op_check_fast(&c, 3, 1e-5, 1e-5);
    op_check_gradients(&c, 4, 1e-8);
}

/* A row outside the table stops the device with a text, and nothing is read there. */
static void embedding_out_of_range(void)
{
    const mt_backend *b = op_backend();
    int32_t rows[2] = { 0, 3 };
    float w[6] = { 0 }, y[4];
    void *device = NULL, *queue = NULL;
    CHECK(b->open(0, 1, &device) == MT_OK && b->queue_create(device, "q", &queue) == MT_OK, " ");
    mt_op_call c = { .n_in = 1,
                     .n_out = 1,
                     .in = { { w, 3, 2, 2, MT_F32, 0 } },
                     .out = { { y, 2, 2, 2, MT_F32, 0 } },
                     .batch = { .tokens = 2, .rows = rows } };
    b->kernel(device, "embedding")->forward(device, queue, &c);
    b->queue_sync(device, queue);
    CHECK(b->error(device) == MT_ERR_INVALID, "accepted");
    b->queue_destroy(device, queue);
    b->close(device);
}

static void fill(void *p, mt_dtype dtype, int64_t n, uint32_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        float x = (float)(seed >> 8) / (1 << 23) - 1.0f;
        if (dtype == MT_F32)
            ((float *)p)[i] = x;
        else if (dtype == MT_F64)
            ((double *)p)[i] = x;
        else
            ((uint16_t *)p)[i] = mt_f32_to_bf16(x);
    }
}

static double element(const void *p, mt_dtype dtype, int64_t i)
{
    if (dtype == MT_F32)
        return ((const float *)p)[i];
    if (dtype == MT_F64)
        return ((const double *)p)[i];
    return mt_bf16_to_f32(((const uint16_t *)p)[i]);
}

static void gemm(void)
{
    static const struct {
        mt_dtype in, c;
        double tolerance;
    } kind[] = { { MT_F32, MT_F32, 1e-6 },
                 { MT_F64, MT_F64, 1e-14 },
                 { MT_BF16, MT_BF16, 3e-3 },
                 { MT_BF16, MT_F32, 1e-6 } };
    enum { M = 37, N = 53, K = 1100, LD = 1103 };
    unsetenv("MEGATRAIN_CPU_FLAGS");
    op_backend();
    cpu_isa isa;
    CHECK(cpu_detect_isa(&isa) == MT_OK && cpu_blas_load(isa) == MT_OK, "no library");
    if (isa == CPU_SCALAR)
        return;
    double *a = malloc(sizeof(double) * LD * K), *b = malloc(sizeof(double) * LD * K);
    double *c = malloc(sizeof(double) * M * LD), *r = malloc(sizeof(double) * M * LD);
    double *x = malloc(sizeof(double) * M * N), *y = malloc(sizeof(double) * M * N);
    float *work = malloc((size_t)cpu_gemm_work(M, N, K, MT_BF16));
    for (size_t i = 0; i < sizeof kind / sizeof kind[0]; i++) {
        for (int t = 0; t < 8; t++) {
            double beta = t & 4 ? 0.5 : 0;
            fill(a, kind[i].in, LD * K, 1);
            fill(b, kind[i].in, LD * K, 2);
            fill(c, kind[i].c, M * LD, 3);
            fill(r, kind[i].c, M * LD, 3);
            cpu_gemm(t & 1, t & 2, M, N, K, 0.25, kind[i].in, a, LD, b, LD, beta, kind[i].c, c, LD,
                     work);
            cpu_gemm_reference(t & 1, t & 2, M, N, K, 0.25, kind[i].in, a, LD, b, LD, beta,
                               kind[i].c, r, LD, work);
            for (int64_t k = 0; k < M * N; k++) {
                x[k] = element(c, kind[i].c, k / N * LD + k % N);
                y[k] = element(r, kind[i].c, k / N * LD + k % N);
            }
            double e = op_error(x, y, M * N);
            CHECK(e < kind[i].tolerance, "kind %d, case %d: off by %g", (int)i, t, e);
        }
    }
    free(a), free(b), free(c), free(r), free(x), free(y), free(work);
}

static void tiles_cover(void)
{
    static const int64_t size[] = { 1, 63, 64, 65, 300, 1024, 5000 };
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 7; j++) {
            cpu_tiles t = cpu_tiles_of(size[i], size[j]);
            int64_t area = 0;
            for (int64_t k = 0; k < t.count; k++) {
                cpu_tile at = cpu_tile_at(&t, k);
                CHECK(at.rows > 0 && at.cols > 0 && at.rows <= CPU_TILE_M && at.cols <= CPU_TILE_N,
                      "empty or too large");
                area += at.rows * at.cols;
            }
            CHECK(area == size[i] * size[j], "%d x %d", (int)size[i], (int)size[j]);
        }
}

int main(void)
{
    RUN(gemm);
    RUN(tiles_cover);
    RUN(linear_small);
    RUN(linear_tiles);
    RUN(exact_linear);
    RUN(embedding);
    RUN(embedding_out_of_range);
    cpu_sides_close();
    return check_done();
}
