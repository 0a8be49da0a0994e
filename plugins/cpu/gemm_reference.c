/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products in plain C: what OpenBLAS is checked against and what CPU_SCALAR runs. Also how
 * matrices are cut into tiles.
 */
#include "cpu.h"

/* Columns of C that are formed together, so that rows of B are read in order. */
enum { REFERENCE_COLS = 16 };

#define LOAD_SAME(x)  (x)
#define STORE_SAME(x) (x)

/* Accumulates over k in order, in acc_t. */
#define DEFINE_REFERENCE(name, in_t, LOAD, acc_t, c_t, LOAD_C, STORE_C)                            \
    static void name(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,    \
                     const in_t *a, int64_t lda, const in_t *b, int64_t ldb, double beta, c_t *c,  \
                     int64_t ldc)                                                                  \
    {                                                                                              \
        int64_t a_row = trans_a ? 1 : lda, a_col = trans_a ? lda : 1;                              \
        int64_t b_row = trans_b ? 1 : ldb, b_col = trans_b ? ldb : 1;                              \
        for (int64_t i = 0; i < m; i++) {                                                          \
            for (int64_t j0 = 0; j0 < n; j0 += REFERENCE_COLS) {                                   \
                int64_t cols = n - j0 < REFERENCE_COLS ? n - j0 : REFERENCE_COLS;                  \
                acc_t acc[REFERENCE_COLS] = { 0 };                                                 \
                for (int64_t p = 0; p < k; p++) {                                                  \
                    acc_t x = LOAD(a[i * a_row + p * a_col]);                                      \
                    const in_t *y = b + p * b_row + j0 * b_col;                                    \
                    for (int64_t j = 0; j < cols; j++)                                             \
                        acc[j] += x * LOAD(y[j * b_col]);                                          \
                }                                                                                  \
                c_t *row = c + i * ldc + j0;                                                       \
                for (int64_t j = 0; j < cols; j++) {                                               \
                    acc_t sum = (acc_t)alpha * acc[j];                                             \
                    if (beta != 0)                                                                 \
                        sum += (acc_t)beta * LOAD_C(row[j]);                                       \
                    row[j] = STORE_C(sum);                                                         \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_REFERENCE(reference_f32, float, LOAD_SAME, float, float, LOAD_SAME, STORE_SAME)
DEFINE_REFERENCE(reference_f64, double, LOAD_SAME, double, double, LOAD_SAME, STORE_SAME)
DEFINE_REFERENCE(reference_bf16, uint16_t, mt_bf16_to_f32, float, uint16_t, mt_bf16_to_f32,
                 mt_f32_to_bf16)
DEFINE_REFERENCE(reference_bf16_f32, uint16_t, mt_bf16_to_f32, float, float, LOAD_SAME, STORE_SAME)

void cpu_gemm_reference(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
                        mt_dtype in_dtype, const void *a, int64_t lda, const void *b, int64_t ldb,
                        double beta, mt_dtype c_dtype, void *c, int64_t ldc, void *work)
{
    (void)work;
    if (in_dtype == MT_F32)
        reference_f32(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else if (in_dtype == MT_F64)
        reference_f64(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else if (c_dtype == MT_BF16)
        reference_bf16(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else
        reference_bf16_f32(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* How far tiles shrink while there are fewer than TILES_WANTED of them. */
enum { TILE_M_MIN = 64, TILE_N_MIN = 128, TILES_WANTED = 32 };

static int64_t tiles_along(int64_t n, int64_t tile)
{
    return (n + tile - 1) / tile;
}

cpu_tiles cpu_tiles_of(int64_t m, int64_t n)
{
    cpu_tiles t = { .m = m, .n = n, .tile_m = CPU_TILE_M, .tile_n = CPU_TILE_N };
    for (;;) {
        t.across = tiles_along(n, t.tile_n);
        t.count = tiles_along(m, t.tile_m) * t.across;
        if (t.count >= TILES_WANTED)
            break;
        if (t.tile_n > TILE_N_MIN)
            t.tile_n /= 2;
        else if (t.tile_m > TILE_M_MIN)
            t.tile_m /= 2;
        else
            break;
    }
    return t;
}

cpu_tile cpu_tile_at(const cpu_tiles *t, int64_t index)
{
    cpu_tile at = { .row = index / t->across * t->tile_m, .col = index % t->across * t->tile_n };
    at.rows = t->m - at.row < t->tile_m ? t->m - at.row : t->tile_m;
    at.cols = t->n - at.col < t->tile_n ? t->n - at.col : t->tile_n;
    return at;
}
