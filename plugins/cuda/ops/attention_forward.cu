/* SPDX-License-Identifier: Apache-2.0
 *
 * attention forward in BF16 on tensor cores (FlashAttention-2, arXiv 2307.08691): a block takes
 * query rows of one head and streams the keys that they see, with a running maximum and sum.
 */
#include "flash.cuh"

/* DQ, DV: head dimensions rounded up; MT: 16-row tiles of a warp; BN: keys at a time. */
template <int DQ, int DV, int MT, int BN>
static __global__ void __launch_bounds__(FLASH_THREADS, 2)
    flash_forward_kernel(const __grid_constant__ attn_args a, int stages, bool vectors, bool pairs)
{
    const int BM = FLASH_WARPS * MT * 16;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ int32_t low[BM];
    bf16 *q_tile = reinterpret_cast<bf16 *>(dynamic);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int head = (int)blockIdx.x, kv = head / a.group;
    /* The last rows see most keys: they start first. */
    int64_t row0 = (int64_t)(gridDim.y - 1 - blockIdx.y) * BM;
    int n = a.tokens - row0 < BM ? (int)(a.tokens - row0) : BM;
    load_tile<DQ>(q_tile, static_cast<const bf16 *>(a.q) + row0 * a.q_ld + head * a.qk_dim, a.q_ld,
                  BM, n, a.qk_dim, vectors);
    for (int i = (int)threadIdx.x; i < BM; i += FLASH_THREADS)
        low[i] = i < n ? (int32_t)lowest_key(a, row0 + i) : INT32_MAX;
    __syncthreads();
    const int64_t from = low[0], to = a.first + row0 + n, all_low = low[n - 1];

    /* Scores are kept as products q . k where there is no softcap; e^score = 2^(mult * kept). */
    const float scale = (float)a.scale, cap = (float)a.softcap;
    const float mult = cap > 0 ? flash_log2e : scale * flash_log2e;
    float top[MT][2], total[MT][2], out[MT][DV / 8][4] = {};
    float sink = -INFINITY;
    if (a.sinks) {
        sink = __bfloat162float(static_cast<const bf16 *>(a.sinks)[head]);
        sink = cap > 0 ? sink : sink / scale;
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[m][r] = sink;
            /* The four lanes of a row add their parts at the end. */
            total[m][r] = a.sinks && (lane & 3) == 0 ? 1.0f : 0.0f;
        }

    key_tiles<DQ, DV, BN> keys(a, kv, from, to, q_tile + BM * tile<DQ>::ld, stages, vectors);
    for (int64_t key = from; key < to; key += BN) {
        keys.wait(key);
        const bf16 *k_tile = keys.k(), *v_tile = keys.v();

        float s[MT][BN / 8][4] = {};
#pragma unroll
        for (int d = 0; d < DQ; d += 16) {
            uint32_t x[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
                left_operand<DQ>(q_tile, (warp * MT + m) * 16, d, x[m]);
#pragma unroll
            for (int j = 0; j < BN; j += 16) {
                uint32_t y[4];
                right_operand<DQ>(k_tile, j, d, y);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply_add(s[m][j / 8], x[m], y);
                    multiply_add(s[m][j / 8 + 1], x[m], y + 2);
                }
            }
        }

        bool whole = key >= all_low && key + BN <= a.first + row0 + 1;
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (cap > 0)
#pragma unroll
                for (int j = 0; j < BN / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[m][j][e] = cap * tanh_fast(s[m][j][e] * (scale / cap));
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = (warp * MT + m) * 16 + r * 8 + (lane >> 2);
                if (!whole) {
                    int64_t last = a.first + row0 + row;
                    int64_t lowest = low[row];
#pragma unroll
                    for (int j = 0; j < BN / 8; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            int64_t at = key + j * 8 + (lane & 3) * 2 + e;
                            if (at < lowest || at > last)
                                s[m][j][r * 2 + e] = -INFINITY;
                        }
                }
                float best = top[m][r];
#pragma unroll
                for (int j = 0; j < BN / 8; j++)
                    best = fmaxf(best, fmaxf(s[m][j][r * 2], s[m][j][r * 2 + 1]));
                best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
                best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
                /* A row that has seen no key yet keeps -Inf, and all its terms are 0. */
                float shift = best == -INFINITY ? 0.0f : best * mult;
                float shrink = power_of_2(top[m][r] * mult - shift), sum = 0;
                top[m][r] = best;
#pragma unroll
                for (int j = 0; j < BN / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float p = power_of_2(s[m][j][r * 2 + e] * mult - shift);
                        s[m][j][r * 2 + e] = p;
                        sum += p;
                    }
                total[m][r] = total[m][r] * shrink + sum;
                /* Most blocks of keys do not raise the maximum of any row of the warp. */
                if (__any_sync(0xffffffffu, shrink != 1.0f))
#pragma unroll
                    for (int d = 0; d < DV / 8; d++) {
                        out[m][d][r * 2] *= shrink;
                        out[m][d][r * 2 + 1] *= shrink;
                    }
            }
        }

#pragma unroll
        for (int j = 0; j < BN; j += 16) {
            uint32_t p[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const float(*c)[4] = &s[m][j / 8];
                p[m][0] = pack_2(c[0][0], c[0][1]);
                p[m][1] = pack_2(c[0][2], c[0][3]);
                p[m][2] = pack_2(c[1][0], c[1][1]);
                p[m][3] = pack_2(c[1][2], c[1][3]);
            }
#pragma unroll
            for (int d = 0; d < DV; d += 16) {
                uint32_t y[4];
                right_operand_rows<DV>(v_tile, j, d, y);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply_add(out[m][d / 8], p[m], y);
                    multiply_add(out[m][d / 8 + 1], p[m], y + 2);
                }
            }
        }
        keys.done(key);
    }

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = total[m][r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            int row = (warp * MT + m) * 16 + r * 8 + (lane >> 2);
            if (row >= n)
                continue;
            float factor = 1.0f / sum;
            bf16 *o = static_cast<bf16 *>(a.out) + (row0 + row) * a.out_ld + head * a.v_dim;
#pragma unroll
            for (int d = 0; d < DV / 8; d++) {
                int col = d * 8 + (lane & 3) * 2;
                store_2(o + col, col, a.v_dim, out[m][d][r * 2] * factor,
                        out[m][d][r * 2 + 1] * factor, false, pairs);
            }
            if ((lane & 3) == 0 && a.lse)
                static_cast<float *>(a.lse)[(row0 + row) * a.lse_ld + head] =
                    top[m][r] * (cap > 0 ? 1.0f : scale) + logf(sum);
        }
}

template <int DQ, int DV, int MT, int BN>
static bool launch(cuda_device *d, cuda_queue *q, const attn_args *a)
{
    const int BM = FLASH_WARPS * MT * 16;
    int64_t fixed = BM * tile<DQ>::ld * 2, stage = BN * (tile<DQ>::ld + tile<DV>::ld) * 2;
    int stages = flash_stages(d, fixed, stage);
    int64_t bytes = fixed + stages * stage;
    if (bytes + 1024 > d->shared_bytes)
        return false;
    bool vectors = rows_by(16, a->q, a->q_ld, a->qk_dim) && rows_by(16, a->k, a->k_ld, a->qk_dim) &&
                   rows_by(16, a->v, a->v_ld, a->v_dim);
    bool pairs = rows_by(4, a->out, a->out_ld, a->v_dim);
    auto kernel = flash_forward_kernel<DQ, DV, MT, BN>;
    if (!cuda_ok(
            d,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
            "attention"))
        return true;
    kernel<<<dim3((unsigned)a->heads, (unsigned)ceil_div(a->tokens, BM)), FLASH_THREADS,
             (size_t)bytes, q->stream>>>(*a, stages, vectors, pairs);
    return true;
}

bool attn_flash_forward(cuda_device *d, cuda_queue *q, const attn_args *a)
{
    int dq = a->qk_dim, dv = a->v_dim;
    if (dq <= 32 && dv <= 32)
        return launch<32, 32, 2, 64>(d, q, a);
    if (dq <= 64 && dv <= 64)
        return launch<64, 64, 2, 64>(d, q, a);
    if (dq <= 96 && dv <= 96)
        return launch<96, 96, 2, 64>(d, q, a);
    if (dq <= 128 && dv <= 128)
        return launch<128, 128, 2, 64>(d, q, a);
    if (dq <= 192 && dv <= 128)
        return launch<192, 128, 2, 32>(d, q, a);
    if (dq <= 256 && dv <= 256)
        return launch<256, 256, 1, 64>(d, q, a);
    return false;
}
