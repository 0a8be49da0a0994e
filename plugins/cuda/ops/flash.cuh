/* SPDX-License-Identifier: Apache-2.0
 *
 * Tiles for attention on tensor cores: rows of BF16 in shared memory, padded by 16 bytes so that
 * eight rows of a fragment lie in different banks; m16n8k16 products with FP32 accumulators.
 *
 * In an accumulator tile of 16 x 8, lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and
 * the next: c[0], c[1] of the first row, c[2], c[3] of the second.
 */
#ifndef MT_CUDA_FLASH_CUH
#define MT_CUDA_FLASH_CUH

#include "attention.cuh"
#include "mma.cuh"

enum { FLASH_WARPS = 4, FLASH_THREADS = FLASH_WARPS * 32 };

static const float flash_log2e = 1.4426950408889634f;

template <int D> struct tile {
    static const int ld = D + 8; /* elements from row to row */
};

__device__ __forceinline__ float power_of_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* tanh by one exponential; exact at both ends, an absolute error of some 1e-7 between. */
__device__ __forceinline__ float tanh_fast(float x)
{
    return 1.0f - __fdividef(2.0f, power_of_2(x * (2.0f * flash_log2e)) + 1.0f);
}

__device__ __forceinline__ uint32_t pack_2(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&v);
}

/* Fills `rows` rows of D columns from `dim` columns of memory; rows from `valid` on and columns
 * from `dim` on become zero. `vectors`: rows can be read by 16 bytes. */
template <int D>
__device__ __forceinline__ void load_tile(bf16 *to, const bf16 *from, int64_t ld, int rows,
                                          int64_t valid, int dim, bool vectors)
{
    const int chunks = D / 8;
    if (vectors && FLASH_THREADS % chunks == 0) { /* a thread stays in its columns */
        const int step = FLASH_THREADS / chunks;
        int row = (int)threadIdx.x / chunks, col = (int)threadIdx.x % chunks * 8;
        int last = valid < rows ? (int)valid : rows; /* rows there are */
        bool inside = col < dim;
        bf16 *p = to + row * tile<D>::ld + col;
        const bf16 *g = from + row * ld + (inside ? col : 0);
        for (; row < rows; row += step) {
            bool there = row < last && inside;
            copy_16(p, there ? g : from, there);
            p += step * tile<D>::ld;
            g += step * ld;
        }
        return;
    }
    for (int i = (int)threadIdx.x; i < rows * chunks; i += FLASH_THREADS) {
        int row = i / chunks, col = i % chunks * 8;
        bf16 *p = to + row * tile<D>::ld + col;
        bool there = row < valid && col < dim;
        const bf16 *g = there ? from + row * ld + col : from;
        if (vectors) {
            copy_16(p, g, there);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                p[k] = there && col + k < dim ? g[k] : __float2bfloat16(0.0f);
        }
    }
}

/* Keys and values of a head on their way through shared memory, BN rows at a time: where there are
 * two stages, the next rows arrive while these are at work. */
template <int DQ, int DV, int BN> struct key_tiles {
    const bf16 *k_head, *v_head;
    bf16 *k_tiles, *v_tiles; /* [stages][BN] rows */
    int64_t k_ld, v_ld, to;
    int qk_dim, v_dim, stages, stage;
    bool vectors;

    /* `memory` has room for all stages of both. Fetches the rows from `from` on, none from `to`. */
    __device__ __forceinline__ key_tiles(const attn_args &a, int kv, int64_t from, int64_t to,
                                         bf16 *memory, int stages, bool vectors)
        : k_head(static_cast<const bf16 *>(a.k) + (int64_t)kv * a.qk_dim),
          v_head(static_cast<const bf16 *>(a.v) + (int64_t)kv * a.v_dim), k_tiles(memory),
          v_tiles(memory + stages * BN * tile<DQ>::ld), k_ld(a.k_ld), v_ld(a.v_ld), to(to),
          qk_dim(a.qk_dim), v_dim(a.v_dim), stages(stages), stage(0), vectors(vectors)
    {
        fetch(from, 0);
    }

    __device__ __forceinline__ void fetch(int64_t key, int into)
    {
        load_tile<DQ>(k_tiles + into * BN * tile<DQ>::ld, k_head + key * k_ld, k_ld, BN, to - key,
                      qk_dim, vectors);
        load_tile<DV>(v_tiles + into * BN * tile<DV>::ld, v_head + key * v_ld, v_ld, BN, to - key,
                      v_dim, vectors);
        copies_commit();
    }

    /* Rows key .. key + BN - 1 are there for all threads, in k() and v(). */
    __device__ __forceinline__ void wait(int64_t key)
    {
        if (stages == 2 && key + BN < to) {
            fetch(key + BN, stage ^ 1);
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
    }

    __device__ __forceinline__ const bf16 *k(void) const
    {
        return k_tiles + stage * BN * tile<DQ>::ld;
    }
    __device__ __forceinline__ const bf16 *v(void) const
    {
        return v_tiles + stage * BN * tile<DV>::ld;
    }

    /* All threads are through with the rows from `key` on. */
    __device__ __forceinline__ void done(int64_t key)
    {
        __syncthreads();
        if (stages == 2)
            stage ^= 1;
        else if (key + BN < to)
            fetch(key + BN, 0);
    }
};

/* The 16 x 16 left operand at (row, col) of a tile. */
template <int D>
__device__ __forceinline__ void left_operand(const bf16 *t, int row, int col, uint32_t *a)
{
    int lane = (int)threadIdx.x & 31;
    load_4(t + (row + (lane & 15)) * tile<D>::ld + col + (lane >> 4) * 8, a);
}

/* Right operands of two products side by side, from a tile whose rows are the product's columns:
 * b[0..1] for columns row .. row + 7, b[2..3] for the next 8; depth col .. col + 15. */
template <int D>
__device__ __forceinline__ void right_operand(const bf16 *t, int row, int col, uint32_t *b)
{
    int lane = (int)threadIdx.x & 31;
    load_4(t + (row + (lane & 7) + (lane >> 4) * 8) * tile<D>::ld + col + ((lane >> 3) & 1) * 8, b);
}

/* The same from a tile whose rows are the depth: depth row .. row + 15, columns col .. col + 15. */
template <int D>
__device__ __forceinline__ void right_operand_rows(const bf16 *t, int row, int col, uint32_t *b)
{
    int lane = (int)threadIdx.x & 31;
    load_4_transposed(t + (row + (lane & 15)) * tile<D>::ld + col + (lane >> 4) * 8, b);
}

/* Stores two neighbouring columns; `pairs`: as one word. */
__device__ __forceinline__ void store_2(bf16 *to, int col, int dim, float x, float y, bool add,
                                        bool pairs)
{
    if (col >= dim)
        return;
    if (add) {
        x += __bfloat162float(to[0]);
        if (col + 1 < dim)
            y += __bfloat162float(to[1]);
    }
    if (pairs && col + 1 < dim) {
        *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(x, y);
        return;
    }
    to[0] = __float2bfloat16_rn(x);
    if (col + 1 < dim)
        to[1] = __float2bfloat16_rn(y);
}

static inline bool rows_by(int bytes, const void *p, int64_t ld, int dim)
{
    return (uintptr_t)p % (unsigned)bytes == 0 && ld * 2 % bytes == 0 && dim * 2 % bytes == 0;
}

/* Two buffers for what streams through, where two blocks still fit a multiprocessor; else one. */
static inline int flash_stages(const cuda_device *d, int64_t fixed, int64_t stage)
{
    return 2 * (fixed + 2 * stage + 2048) <= d->shared_bytes ? 2 : 1;
}

#endif
