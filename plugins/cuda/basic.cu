/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels behind members of the interface itself: joining the two planes of master weights, sums of
 * squares, the device's clock, delays.
 */
#include "common.cuh"

static __device__ __forceinline__ uint64_t global_time(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* ---- join ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ float join(uint16_t hi, int16_t lo)
{
    return __uint_as_float(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

static __global__ void join_kernel(float *dst, const uint16_t *hi, const int16_t *lo, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n && (uintptr_t)(dst + i) % 16 == 0) {
        pack<uint16_t, 4> h = *reinterpret_cast<const pack<uint16_t, 4> *>(hi + i);
        pack<int16_t, 4> l = *reinterpret_cast<const pack<int16_t, 4> *>(lo + i);
        pack<float, 4> v;
        for (int k = 0; k < 4; k++)
            v.x[k] = join(h.x[k], l.x[k]);
        *reinterpret_cast<pack<float, 4> *>(dst + i) = v;
        return;
    }
    for (int k = 0; k < 4 && i + k < n; k++)
        dst[i + k] = join(hi[i + k], lo[i + k]);
}

bool cuda_overlaps_launches(void)
{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, join_kernel) == cudaSuccess)
        return a.ptxVersion >= 90;
    (void)cudaGetLastError();
    return false;
}

void cuda_launch_join(cudaStream_t s, float *dst, const uint16_t *hi, const int16_t *lo, int64_t n)
{
    join_kernel<<<(unsigned)ceil_div(n, 4 * 256), 256, 0, s>>>(dst, hi, lo, n);
}

/* ---- sum of squares -------------------------------------------------------------------------- */

enum { SUM_THREADS = 256, SUM_MIN = 1 << 14, SUM_BLOCKS = 1024 };

/* Depends on n only, so that the order of additions does. */
int64_t cuda_sum_blocks(int64_t n)
{
    int64_t blocks = ceil_div(n, SUM_MIN);
    return blocks < 1 ? 1 : blocks > SUM_BLOCKS ? SUM_BLOCKS : blocks;
}

static __global__ void __launch_bounds__(SUM_THREADS)
    sum_squares_kernel(const float *x, int64_t n, double *partial)
{
    __shared__ double shared[32];
    double sum = 0;
    bool aligned = (uintptr_t)x % 16 == 0;
    int64_t step = (int64_t)gridDim.x * SUM_THREADS * 4;
    for (int64_t i = ((int64_t)blockIdx.x * SUM_THREADS + threadIdx.x) * 4; i < n; i += step) {
        float v[4] = { 0, 0, 0, 0 };
        if (aligned && i + 4 <= n)
            load_vector<float, 4>(x + i, v);
        else
            for (int k = 0; k < 4 && i + k < n; k++)
                v[k] = x[i + k];
        double part = 0;
        for (int k = 0; k < 4; k++)
            part += (double)v[k] * (double)v[k];
        sum += part;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(SUM_THREADS)
    sum_partial_kernel(const double *partial, int n, double *dst)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int i = (int)threadIdx.x; i < n; i += SUM_THREADS)
        sum += partial[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *dst = sum;
}

void cuda_launch_sum_squares(cudaStream_t s, const float *x, int64_t n, double *dst,
                             double *partial)
{
    int blocks = (int)cuda_sum_blocks(n);
    sum_squares_kernel<<<blocks, SUM_THREADS, 0, s>>>(x, n, partial);
    sum_partial_kernel<<<1, SUM_THREADS, 0, s>>>(partial, blocks, dst);
}

/* ---- gradients that leave as BF16 ------------------------------------------------------------- */

/* By bits, as mt_f32_to_bf16 does. */
static __device__ __forceinline__ uint32_t nearest_bf16(float x)
{
    uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (u >> 16) | 0x40u;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

static __global__ void narrow_kernel(uint16_t *dst, float *x, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    bool aligned = (uintptr_t)x % 16 == 0 && (uintptr_t)dst % 8 == 0;
    if (aligned && i + 4 <= n) {
        float4 v = *(const float4 *)(x + i);
        uint32_t a = nearest_bf16(v.x), b = nearest_bf16(v.y);
        uint32_t c = nearest_bf16(v.z), d = nearest_bf16(v.w);
        *(uint2 *)(dst + i) = make_uint2(a | b << 16, c | d << 16);
        *(float4 *)(x + i) = make_float4(__uint_as_float(a << 16), __uint_as_float(b << 16),
                                         __uint_as_float(c << 16), __uint_as_float(d << 16));
    } else {
        for (int k = 0; k < 4 && i + k < n; k++) {
            uint32_t a = nearest_bf16(x[i + k]);
            dst[i + k] = (uint16_t)a;
            x[i + k] = __uint_as_float(a << 16);
        }
    }
}

void cuda_launch_narrow(cudaStream_t s, uint16_t *dst, float *x, int64_t n)
{
    narrow_kernel<<<(unsigned)ceil_div(n, 4 * 256), 256, 0, s>>>(dst, x, n);
}

/* ---- time ------------------------------------------------------------------------------------ */

static __global__ void timestamp_kernel(volatile uint64_t *slot, int64_t offset)
{
    *slot = global_time() + (uint64_t)offset;
}

void cuda_launch_timestamp(cudaStream_t s, volatile uint64_t *slot, int64_t offset)
{
    timestamp_kernel<<<1, 1, 0, s>>>(slot, offset);
}

static __global__ void delay_kernel(uint64_t ns)
{
    uint64_t from = global_time();
    while (global_time() - from < ns)
        __nanosleep(200);
}

void cuda_launch_delay(cudaStream_t s, uint64_t ns)
{
    delay_kernel<<<1, 1, 0, s>>>(ns);
}
