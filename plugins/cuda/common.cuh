/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels share: dtypes as types, 16-byte loads and stores, asynchronous copies, fixed-order
 * reductions, launches.
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
__device__ __forceinline__ float square_root(float x)
{
    return sqrtf(x);
}
__device__ __forceinline__ double square_root(double x)
{
    return sqrt(x);
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

/* As a load moves them, where that is up to 16 bytes: a pack takes a register for each element. */
template <int BYTES> struct bits_of;
template <> struct bits_of<16> {
    typedef uint4 type;
};
template <> struct bits_of<8> {
    typedef uint2 type;
};
template <> struct bits_of<4> {
    typedef uint32_t type;
};
template <> struct bits_of<2> {
    typedef uint16_t type;
};
template <typename T, int V> using bits = typename bits_of<(int)sizeof(T) * V>::type;

/* Elements that are read and rounded two at a time: a register holds a pair. */
template <typename T, int V> struct in_pairs {
    static const bool value = false;
};
template <int V> struct in_pairs<bf16, V> {
    static const bool value = V % 2 == 0;
};

template <typename T, int V> __device__ __forceinline__ bits<T, V> load_bits(const T *p)
{
    return *reinterpret_cast<const bits<T, V> *>(p);
}

template <typename T, int V> __device__ __forceinline__ void unpack(bits<T, V> from, real<T> *ret)
{
    if constexpr (in_pairs<T, V>::value) {
        uint32_t pair[V / 2];
        memcpy(pair, &from, sizeof pair);
#pragma unroll
        for (int i = 0; i < V / 2; i++) { /* BF16 is the upper half of FP32 */
            ret[2 * i] = __uint_as_float(pair[i] << 16);
            ret[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
        }
    } else {
        pack<T, V> v;
        memcpy(&v, &from, sizeof v);
#pragma unroll
        for (int i = 0; i < V; i++)
            ret[i] = to_real(v.x[i]);
    }
}

template <typename T, int V> __device__ __forceinline__ void load_vector(const T *p, real<T> *ret)
{
    if constexpr (in_pairs<T, V>::value) {
        unpack<T, V>(load_bits<T, V>(p), ret);
    } else {
        pack<T, V> v = *reinterpret_cast<const pack<T, V> *>(p);
#pragma unroll
        for (int i = 0; i < V; i++)
            ret[i] = to_real(v.x[i]);
    }
}

template <typename T, int V> __device__ __forceinline__ void store_vector(T *p, const real<T> *x)
{
    if constexpr (in_pairs<T, V>::value) {
        bits<T, V> v;
        __nv_bfloat162 pair[V / 2];
#pragma unroll
        for (int i = 0; i < V / 2; i++)
            pair[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&v, pair, sizeof v);
        *reinterpret_cast<bits<T, V> *>(p) = v;
    } else {
        pack<T, V> v;
#pragma unroll
        for (int i = 0; i < V; i++)
            v.x[i] = from_real<T>(x[i]);
        *reinterpret_cast<pack<T, V> *>(p) = v;
    }
}

/* Stores x, or the sum of x and what is there; rounded once. */
template <typename T, int V>
__device__ __forceinline__ void put_vector(T *p, const real<T> *x, bool add)
{
    real<T> sum[V];
    if (!add) {
        store_vector<T, V>(p, x);
        return;
    }
    load_vector<T, V>(p, sum);
#pragma unroll
    for (int i = 0; i < V; i++)
        sum[i] += x[i];
    store_vector<T, V>(p, sum);
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

/* ---- launches that overlap ----------------------------------------------------------------------
 */

/* First thing in every kernel that goes through launch_next: its blocks may have been started while
 * the kernel ahead of it was still running. Then lets those of the kernel behind it start. */
static __device__ __forceinline__ void await_previous(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Enqueues a kernel that begins with await_previous (programmatic dependent launch): it saves the
 * microseconds between two kernels. */
template <typename... P, typename... A>
static void launch_next(const cuda_queue *q, void (*kernel)(P...), dim3 grid, dim3 block,
                        size_t bytes, const A &...args)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t c = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = bytes;
    c.stream = q->stream;
    c.attrs = &early;
    c.numAttrs = q->device->overlaps_launches;
    (void)cudaLaunchKernelEx(&c, kernel, P(args)...); /* cuda_launched names the operation */
}

/* A launch for `rows` rows of so many vectors: x runs along a row, y over rows, of which a thread
 * may have several, gridDim.y * blockDim.y apart. */
struct rows_shape {
    dim3 grid, block;
};

static inline rows_shape shape_of_rows(int64_t rows, int64_t vectors)
{
    rows_shape s;
    unsigned x = 32;
    while (x < 256 && x < vectors)
        x *= 2;
    s.block = dim3(x, 256 / x);
    int64_t y = ceil_div(rows, s.block.y);
    s.grid = dim3((unsigned)ceil_div(vectors, x), (unsigned)(y < 32768 ? y : 32768));
    return s;
}

/* ---- asynchronous copies into shared memory ----------------------------------------------------
 */

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void copy_16(void *to, const void *from, bool valid)
{
    int bytes = valid ? 16 : 0; /* the rest is filled with zeros */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
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

/* The largest of x[0..n), NaNs apart, for every thread of the warp. */
template <typename T> __device__ __forceinline__ real<T> warp_largest(const T *x, int n)
{
    real<T> top = -INFINITY;
    for (int i = (int)(threadIdx.x & 31u); i < n; i += 32)
        top = max(top, to_real(x[i]));
    return warp_max(top);
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
