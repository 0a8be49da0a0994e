/* SPDX-License-Identifier: Apache-2.0
 *
 * attention backward in BF16 on tensor cores, deterministic: one kernel owns queries and one owns
 * keys, each forming the scores anew, so that every sum has one owner and one order.
 */
#include "flash.cuh"

enum { ROWS = FLASH_WARPS * 16 }; /* of a block: queries, or keys */

/* Blocks of a multiprocessor that registers must suffice for. */
static constexpr int flash_blocks(int dims)
{
    return dims <= 128 ? 3 : 2;
}

/* From a product q . k, dO . v and the row's statistics: the probability and the gradient of the
 * product without its factor `scale`. */
struct grad_score {
    float scale, cap, mult;

    __device__ __forceinline__ explicit grad_score(const attn_args &a)
    {
        scale = (float)a.scale;
        cap = (float)a.softcap;
        mult = scale * flash_log2e;
    }

    /* lse_2: the log of the sum, base 2 */
    __device__ __forceinline__ void operator()(float &s, float &dp, float lse_2, float delta,
                                               bool sees) const
    {
        float p, ds;
        if (cap > 0) {
            float t = tanh_fast(s * (scale / cap));
            p = power_of_2(cap * t * flash_log2e - lse_2);
            ds = p * (dp - delta) * (1.0f - t * t);
        } else {
            p = power_of_2(s * mult - lse_2);
            ds = p * (dp - delta);
        }
        s = sees ? p : 0.0f;
        dp = sees ? ds : 0.0f;
    }
};

/* acc[16, N] += left[16, K] (rows `row` on of a tile) times the transpose of right[N, K]. */
template <int K, int N>
static __device__ __forceinline__ void product(float (*acc)[4], const bf16 *left, int row,
                                               const bf16 *right)
{
#pragma unroll
    for (int d = 0; d < K; d += 16) {
        uint32_t x[4];
        left_operand<K>(left, row, d, x);
#pragma unroll
        for (int j = 0; j < N; j += 16) {
            uint32_t y[4];
            right_operand<K>(right, j, d, y);
            multiply_add(acc[j / 8], x, y);
            multiply_add(acc[j / 8 + 1], x, y + 2);
        }
    }
}

/* acc[16, D] += p[16, N], an accumulator, times right[N, D]. */
template <int N, int D>
static __device__ __forceinline__ void product_of_scores(float (*acc)[4], const float (*p)[4],
                                                         const bf16 *right)
{
#pragma unroll
    for (int j = 0; j < N; j += 16) {
        const float(*c)[4] = p + j / 8;
        uint32_t x[4] = { pack_2(c[0][0], c[0][1]), pack_2(c[0][2], c[0][3]),
                          pack_2(c[1][0], c[1][1]), pack_2(c[1][2], c[1][3]) };
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            uint32_t y[4];
            right_operand_rows<D>(right, j, d, y);
            multiply_add(acc[d / 8], x, y);
            multiply_add(acc[d / 8 + 1], x, y + 2);
        }
    }
}

/* ---- queries --------------------------------------------------------------------------------- */

template <int DQ, int DV, int BN>
static __global__ void __launch_bounds__(FLASH_THREADS, flash_blocks(DQ + DV))
    flash_queries_kernel(const __grid_constant__ attn_args a, int stages, bool vectors, bool pairs)
{
    extern __shared__ __align__(16) unsigned char dynamic[];
    bf16 *q_tile = reinterpret_cast<bf16 *>(dynamic);
    bf16 *g_tile = q_tile + ROWS * tile<DQ>::ld;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int head = (int)blockIdx.x, kv = head / a.group;
    int64_t row0 = (int64_t)(gridDim.y - 1 - blockIdx.y) * ROWS;
    int n = a.tokens - row0 < ROWS ? (int)(a.tokens - row0) : ROWS;
    load_tile<DQ>(q_tile, static_cast<const bf16 *>(a.q) + row0 * a.q_ld + head * a.qk_dim, a.q_ld,
                  ROWS, n, a.qk_dim, vectors);
    load_tile<DV>(g_tile, static_cast<const bf16 *>(a.d_out) + row0 * a.d_out_ld + head * a.v_dim,
                  a.d_out_ld, ROWS, n, a.v_dim, vectors);
    const int64_t from = a.low[row0], to = row0 + n, all_low = a.low[row0 + n - 1];
    const grad_score grad(a);
    float lse_2[2] = { 0, 0 }, delta[2] = { 0, 0 }, sum[DQ / 8][4] = {};
    int64_t low[2] = { INT32_MAX, INT32_MAX };
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp * 16 + r * 8 + (lane >> 2);
        if (row < n) {
            lse_2[r] =
                static_cast<const float *>(a.lse)[(row0 + row) * a.lse_ld + head] * flash_log2e;
            delta[r] = static_cast<const float *>(a.delta)[(row0 + row) * a.heads + head];
            low[r] = a.low[row0 + row];
        }
    }

    key_tiles<DQ, DV, BN> keys(a, kv, from, to, g_tile + ROWS * tile<DV>::ld, stages, vectors);
    for (int64_t key = from; key < to; key += BN) {
        keys.wait(key);
        const bf16 *k_tile = keys.k(), *v_tile = keys.v();
        float s[BN / 8][4] = {}, dp[BN / 8][4] = {};
        product<DQ, BN>(s, q_tile, warp * 16, k_tile);
        product<DV, BN>(dp, g_tile, warp * 16, v_tile);
        bool whole = n == ROWS && key >= all_low && key + BN <= row0 + 1;
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int r = e / 2;
                int64_t at = key + j * 8 + (lane & 3) * 2 + e % 2;
                int64_t row = row0 + warp * 16 + r * 8 + (lane >> 2);
                grad(s[j][e], dp[j][e], lse_2[r], delta[r], whole || (at >= low[r] && at <= row));
            }
        product_of_scores<BN, DQ>(sum, dp, k_tile);
        keys.done(key);
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp * 16 + r * 8 + (lane >> 2);
        if (row >= n)
            continue;
        bf16 *o = static_cast<bf16 *>(a.dq) + (row0 + row) * a.dq_ld + head * a.qk_dim;
#pragma unroll
        for (int d = 0; d < DQ / 8; d++) {
            int col = d * 8 + (lane & 3) * 2;
            store_2(o + col, col, a.qk_dim, sum[d][r * 2] * grad.scale,
                    sum[d][r * 2 + 1] * grad.scale, a.add_q, pairs);
        }
    }
}

/* ---- keys and values ------------------------------------------------------------------------- */

static __device__ __forceinline__ void store_rows(void *to, int64_t ld, int dim, int64_t row0,
                                                  int n, int head, const float (*acc)[4], int tiles,
                                                  float factor, bool add, bool pairs)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp * 16 + r * 8 + (lane >> 2);
        if (row >= n)
            continue;
        bf16 *o = static_cast<bf16 *>(to) + (row0 + row) * ld + head * dim;
#pragma unroll
        for (int d = 0; d < tiles; d++) {
            int col = d * 8 + (lane & 3) * 2;
            store_2(o + col, col, dim, acc[d][r * 2] * factor, acc[d][r * 2 + 1] * factor, add,
                    pairs);
        }
    }
}

/* Everything is transposed: an accumulator's rows are keys, its columns queries. BQ: queries at a
 * time. Wide heads do dk and dv in launches of their own. */
template <int DQ, int DV, int BQ, bool DO_K, bool DO_V>
static __global__ void __launch_bounds__(FLASH_THREADS, flash_blocks(DQ + DV))
    flash_keys_kernel(const __grid_constant__ attn_args a, int stages, bool vectors, bool pairs)
{
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ float lse_2[2][BQ], delta[2][BQ];
    __shared__ int32_t low[2][BQ];
    bf16 *k_tile = reinterpret_cast<bf16 *>(dynamic);
    bf16 *v_tile = k_tile + ROWS * tile<DQ>::ld;
    bf16 *q_tiles = v_tile + ROWS * tile<DV>::ld;
    bf16 *g_tiles = q_tiles + stages * BQ * tile<DQ>::ld;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int kv = (int)blockIdx.x;
    int64_t key0 = (int64_t)blockIdx.y * ROWS;
    int n = a.tokens - key0 < ROWS ? (int)(a.tokens - key0) : ROWS;
    load_tile<DQ>(k_tile, static_cast<const bf16 *>(a.k) + key0 * a.k_ld + (int64_t)kv * a.qk_dim,
                  a.k_ld, ROWS, n, a.qk_dim, vectors);
    load_tile<DV>(v_tile, static_cast<const bf16 *>(a.v) + key0 * a.v_ld + (int64_t)kv * a.v_dim,
                  a.v_ld, ROWS, n, a.v_dim, vectors);
    const grad_score grad(a);
    float dk[DO_K ? DQ / 8 : 1][4] = {}, dv[DO_V ? DV / 8 : 1][4] = {};
    /* The last key is seen longest: documents follow each other. */
    const int64_t until = seen_until(a, key0 + n - 1);
    const int tiles = (int)((until - key0 + BQ - 1) / BQ), steps = tiles * a.group;

    auto fetch = [&](int step, int stage) {
        int head = kv * a.group + step / tiles;
        int64_t row0 = key0 + (int64_t)(step % tiles) * BQ, valid = until - row0;
        load_tile<DQ>(q_tiles + stage * BQ * tile<DQ>::ld,
                      static_cast<const bf16 *>(a.q) + row0 * a.q_ld + head * a.qk_dim, a.q_ld, BQ,
                      valid, a.qk_dim, vectors);
        load_tile<DV>(g_tiles + stage * BQ * tile<DV>::ld,
                      static_cast<const bf16 *>(a.d_out) + row0 * a.d_out_ld + head * a.v_dim,
                      a.d_out_ld, BQ, valid, a.v_dim, vectors);
        if (threadIdx.x < BQ) {
            int64_t row = row0 + threadIdx.x;
            bool there = row < until;
            int i = (int)threadIdx.x;
            lse_2[stage][i] =
                there ? static_cast<const float *>(a.lse)[row * a.lse_ld + head] * flash_log2e
                      : 0.0f;
            delta[stage][i] =
                there ? static_cast<const float *>(a.delta)[row * a.heads + head] : 0.0f;
            low[stage][i] = there ? a.low[row] : INT32_MAX;
        }
        copies_commit();
    };

    fetch(0, 0);
    int stage = 0;
    for (int step = 0; step < steps; step++) {
        if (stages == 2 && step + 1 < steps) {
            fetch(step + 1, stage ^ 1);
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const bf16 *q_tile = q_tiles + stage * BQ * tile<DQ>::ld;
        const bf16 *g_tile = g_tiles + stage * BQ * tile<DV>::ld;
        int64_t row0 = key0 + (int64_t)(step % tiles) * BQ;
        float s[BQ / 8][4] = {}, dp[BQ / 8][4] = {};
        product<DQ, BQ>(s, k_tile, warp * 16, q_tile);
        if (DO_K)
            product<DV, BQ>(dp, v_tile, warp * 16, g_tile);
        /* Rows past the end have the largest low. */
        bool whole = key0 >= low[stage][BQ - 1] && key0 + ROWS <= row0 + 1;
#pragma unroll
        for (int j = 0; j < BQ / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int i = j * 8 + (lane & 3) * 2 + e % 2;
                int64_t key = key0 + warp * 16 + e / 2 * 8 + (lane >> 2);
                bool sees = whole || (key >= low[stage][i] && key <= row0 + i);
                grad(s[j][e], dp[j][e], lse_2[stage][i], delta[stage][i], sees);
            }
        if (DO_V)
            product_of_scores<BQ, DV>(dv, s, g_tile);
        if (DO_K)
            product_of_scores<BQ, DQ>(dk, dp, q_tile);
        __syncthreads();
        if (stages == 2)
            stage ^= 1;
        else if (step + 1 < steps)
            fetch(step + 1, 0);
    }
    if (DO_K && a.dk)
        store_rows(a.dk, a.dk_ld, a.qk_dim, key0, n, kv, dk, DQ / 8, grad.scale, a.add_k, pairs);
    if (DO_V && a.dv)
        store_rows(a.dv, a.dv_ld, a.v_dim, key0, n, kv, dv, DV / 8, 1.0f, a.add_v, pairs);
}

/* ---- launches -------------------------------------------------------------------------------- */

typedef void flash_kernel(const attn_args a, int stages, bool vectors, bool pairs);

static void launch_one(cuda_device *d, cuda_queue *q, const attn_args *a, flash_kernel *kernel,
                       int heads, int64_t fixed, int64_t stage, bool vectors, bool pairs)
{
    int stages = flash_stages(d, fixed, stage);
    int64_t bytes = fixed + stages * stage;
    if (cuda_ok(
            d,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
            "attention"))
        kernel<<<dim3((unsigned)heads, (unsigned)ceil_div(a->tokens, ROWS)), FLASH_THREADS,
                 (size_t)bytes, q->stream>>>(*a, stages, vectors, pairs);
}

/* TILE: keys, or queries, at a time. */
template <int DQ, int DV, int TILE>
static bool launch(cuda_device *d, cuda_queue *q, const attn_args *a)
{
    int64_t row = (tile<DQ>::ld + tile<DV>::ld) * 2, fixed = ROWS * row, stage = TILE * row;
    if (fixed + stage + 2048 > d->shared_bytes)
        return false;
    bool vectors = rows_by(16, a->q, a->q_ld, a->qk_dim) && rows_by(16, a->k, a->k_ld, a->qk_dim) &&
                   rows_by(16, a->v, a->v_ld, a->v_dim) &&
                   rows_by(16, a->d_out, a->d_out_ld, a->v_dim);
    if (a->dq)
        launch_one(d, q, a, flash_queries_kernel<DQ, DV, TILE>, a->heads, fixed, stage, vectors,
                   rows_by(4, a->dq, a->dq_ld, a->qk_dim));
    bool pairs = (!a->dk || rows_by(4, a->dk, a->dk_ld, a->qk_dim)) &&
                 (!a->dv || rows_by(4, a->dv, a->dv_ld, a->v_dim));
    if (DQ + DV <= 320) {
        if (a->dk || a->dv)
            launch_one(d, q, a, flash_keys_kernel<DQ, DV, TILE, true, DQ + DV <= 320>, a->kv_heads,
                       fixed, stage, vectors, pairs);
        return true;
    }
    if (a->dk)
        launch_one(d, q, a, flash_keys_kernel<DQ, DV, TILE, true, DQ + DV <= 320>, a->kv_heads,
                   fixed, stage, vectors, pairs);
    if (a->dv)
        launch_one(d, q, a, flash_keys_kernel<DQ, DV, TILE, DQ + DV <= 320, true>, a->kv_heads,
                   fixed, stage, vectors, pairs);
    return true;
}

bool attn_flash_backward(cuda_device *d, cuda_queue *q, const attn_args *a)
{
    int dq = a->qk_dim, dv = a->v_dim;
    if (dq <= 32 && dv <= 32)
        return launch<32, 32, 64>(d, q, a);
    if (dq <= 64 && dv <= 64)
        return launch<64, 64, 64>(d, q, a);
    if (dq <= 96 && dv <= 96)
        return launch<96, 96, 64>(d, q, a);
    if (dq <= 128 && dv <= 128)
        return launch<128, 128, 64>(d, q, a);
    if (dq <= 192 && dv <= 128)
        return launch<192, 128, 32>(d, q, a);
    if (dq <= 256 && dv <= 256)
        return launch<256, 256, 32>(d, q, a);
    return false;
}
