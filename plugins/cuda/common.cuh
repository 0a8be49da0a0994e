/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels share: dtypes as types, 16-byte loads and stores, fixed-order reductions, launch
 * shapes.
 */
#ifndef MT_CUDA_COMMON_CUH
#define MT_CUDA_COMMON_CUH

#include "cuda.h"

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;

/* The type that a stored type computes in, which is also its statistics dtype. */
template <typename T> struct real_of {
    typedef float type;
};
template <> struct real_of<double> {
    typedef double type;
};
template <typename T> using real = typename real_of<T>::type;

__device__ __forceinline__ float to_real(float x)
{
    return x;
}
__device__ __forceinline__ double to_real(double x)
{
    return x;
}
__device__ __forceinline__ float to_real(bf16 x)
{
    return __bfloat162float(x);
}

template <typename T> __device__ __forceinline__ T from_real(real<T> x)
{
    return x;
}
template <> __device__ __forceinline__ bf16 from_real<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* Rounded as storing and loading would. */
template <typename T> __device__ __forceinline__ real<T> rounded(real<T> x)
{
    return to_real(from_real<T>(x));
}

/* By the name of what they are, in the precision of the argument. */
__device__ __forceinline__ float exponential(float x)
{
    return expf(x);
}
__device__ __forceinline__ double exponential(double x)
{
    return exp(x);
}
__device__ __forceinline__ float hyperbolic_tangent(float x)
{
    return tanhf(x);
}
__device__ __forceinline__ double hyperbolic_tangent(double x)
{
    return tanh(x);
}
__device__ __forceinline__ float logarithm(float x)
{
    return logf(x);
}
__device__ __forceinline__ double logarithm(double x)
{
    return log(x);
}

/* V consecutive elements, moved by one access. */
template <typename T, int V> struct alignas(sizeof(T) * V) pack {
    T x[V];
};

/* Elements of a 16-byte access. */
template <typename T> struct vector_of {
    static const int width = 16 / (int)sizeof(T);
};

template <typename T, int V> __device__ __forceinline__ void load_vector(const T *p, real<T> *ret)
{
    pack<T, V> v = *reinterpret_cast<const pack<T, V> *>(p);
#pragma unroll
    for (int i = 0; i < V; i++)
        ret[i] = to_real(v.x[i]);
}

/* Stores v, or the sum of v and what is there; rounded once. */
template <typename T, int V>
__device__ __forceinline__ void put_vector(T *p, const real<T> *x, bool add)
{
    pack<T, V> v;
    if (add)
        v = *reinterpret_cast<const pack<T, V> *>(p);
#pragma unroll
    for (int i = 0; i < V; i++)
        v.x[i] = from_real<T>(add ? to_real(v.x[i]) + x[i] : x[i]);
    *reinterpret_cast<pack<T, V> *>(p) = v;
}

/* Can rows of `t` be moved by 16-byte accesses? An absent tensor does not stand in the way. */
static inline bool is_aligned(const mt_tensor *t)
{
    return !t->data || ((uintptr_t)t->data % 16 == 0 &&
                        (t->rows <= 1 || t->ld * mt_dtype_size(t->dtype) % 16 == 0));
}

static inline __host__ __device__ int64_t ceil_div(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

static inline int64_t align_256(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* ---- reductions: the order depends on the launch shape only -----------------------------------
 */

template <typename R> __device__ __forceinline__ R warp_sum(R x)
{
#pragma unroll
    for (int i = 16; i > 0; i >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
}

template <typename R> __device__ __forceinline__ R warp_max(R x)
{
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
        R y = __shfl_xor_sync(0xffffffffu, x, i);
        x = y > x ? y : x;
    }
    return x;
}

/* Sum over a block of whole warps; every thread gets it. `shared` has 32 elements. */
template <typename R> __device__ __forceinline__ R block_sum(R x, R *shared)
{
    int lane = (int)(threadIdx.x & 31u), warp = (int)(threadIdx.x >> 5);
    int warps = (int)(blockDim.x >> 5);
    x = warp_sum(x);
    __syncthreads(); /* the last use of `shared` is over */
    if (lane == 0)
        shared[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? shared[lane] : R(0));
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* Tells the host about the first piece of data that cannot be. */
static __device__ __noinline__ void raise_fault(cuda_fault *f, int32_t *claim, int32_t kind,
                                                int64_t index, int32_t value, int64_t limit)
{
    if (atomicCAS(claim, 0, 1) != 0)
        return;
    f->index = index;
    f->value = value;
    f->limit = limit;
    __threadfence_system();
    f->kind = kind;
}

/* Calls `fn<T>` for the compute dtype. */
#define FOR_DTYPE(dtype, fn, ...)                                                                  \
    do {                                                                                           \
        if ((dtype) == MT_BF16)                                                                    \
            fn<bf16>(__VA_ARGS__);                                                                 \
        else if ((dtype) == MT_F64)                                                                \
            fn<double>(__VA_ARGS__);                                                               \
        else                                                                                       \
            fn<float>(__VA_ARGS__);                                                                \
    } while (0)

#endif
