/* SPDX-License-Identifier: Apache-2.0
 *
 * attention in its simple form, for every dtype: a block a row and head, warps taking keys in turn,
 * lanes holding the columns. What the tensor-core form is compared with, what FP32 and FP64 run,
 * and decode. A warp treats BATCH keys at once to hide latencies; sums have one owner and order.
 */
#include "attention.cuh"

enum { BATCH = 4, TRAIN_WARPS = 4, DECODE_WARPS = 16 };

/* Lane l holds columns l, l + 32, ...; zeros past the end. */
template <typename T, int N>
static __device__ __forceinline__ void load_row(const T *p, int n, int lane, real<T> *ret)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        ret[i] = lane + 32 * i < n ? to_real(p[lane + 32 * i]) : real<T>(0);
}

template <typename R, int N> static __device__ __forceinline__ R dot(const R *x, const R *y)
{
    R sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        sum += x[i] * y[i];
    return warp_sum(sum);
}

template <typename T>
static __device__ __forceinline__ const T *head_row(const void *p, int64_t row, int64_t ld,
                                                    int64_t head, int dim)
{
    return static_cast<const T *>(p) + row * ld + head * dim;
}

/* The score after softcap, from q . k. */
template <typename R> static __device__ __forceinline__ R score(const attn_args &a, R product)
{
    R s = (R)a.scale * product, cap = (R)a.softcap;
    return cap > 0 ? cap * hyperbolic_tangent(s / cap) : s;
}

/* Adds the warps' columns in their order and stores them. `shared` has warps * dim elements. */
template <typename T, int N>
static __device__ void store_sum(const real<T> *mine, real<T> *shared, int warps, int dim, T *to,
                                 bool add)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++)
        if (lane + 32 * i < dim)
            shared[warp * dim + lane + 32 * i] = mine[i];
    __syncthreads();
    for (int j = (int)threadIdx.x; j < dim; j += (int)blockDim.x) {
        real<T> sum = shared[j];
        for (int w = 1; w < warps; w++)
            sum += shared[w * dim + j];
        to[j] = from_real<T>(add ? to_real(to[j]) + sum : sum);
    }
}

template <typename T, int N, int WARPS>
static __global__ void __launch_bounds__(WARPS * 32) simple_forward_kernel(attn_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ R tops[WARPS], totals[WARPS];
    R *shared = reinterpret_cast<R *>(dynamic);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int64_t row = blockIdx.x, low = lowest_key(a, row), high = a.first + row + 1;
    int head = (int)blockIdx.y, kv = head / a.group;
    R q[N], acc[N] = {}, top = -(R)INFINITY, total = 0;
    load_row<T, N>(head_row<T>(a.q, row, a.q_ld, head, a.qk_dim), a.qk_dim, lane, q);
    for (int64_t from = low + warp * BATCH; from < high; from += WARPS * BATCH) {
        R s[BATCH], best = top;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            R k[N];
            int64_t j = from + b < high ? from + b : from;
            load_row<T, N>(head_row<T>(a.k, j, a.k_ld, kv, a.qk_dim), a.qk_dim, lane, k);
            s[b] = dot<R, N>(q, k);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            s[b] = score(a, s[b]);
            if (from + b < high && s[b] > best)
                best = s[b];
        }
        R shrink = total > 0 ? exponential(top - best) : R(0);
        total *= shrink;
#pragma unroll
        for (int i = 0; i < N; i++)
            acc[i] *= shrink;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            R v[N];
            int64_t j = from + b < high ? from + b : from;
            R p = from + b < high ? exponential(s[b] - best) : R(0);
            load_row<T, N>(head_row<T>(a.v, j, a.v_ld, kv, a.v_dim), a.v_dim, lane, v);
            total += p;
#pragma unroll
            for (int i = 0; i < N; i++)
                acc[i] += p * v[i];
        }
        top = best;
    }
    if (lane == 0) {
        tops[warp] = top;
        totals[warp] = total;
    }
    __syncthreads();
    R sink = a.sinks ? to_real(static_cast<const T *>(a.sinks)[head]) : -(R)INFINITY, best = sink;
    for (int w = 0; w < WARPS; w++)
        if (totals[w] > 0 && tops[w] > best)
            best = tops[w];
    R sum = a.sinks ? exponential(sink - best) : R(0);
    for (int w = 0; w < WARPS; w++)
        if (totals[w] > 0)
            sum += totals[w] * exponential(tops[w] - best);
    R factor = total > 0 ? exponential(top - best) / sum : R(0);
#pragma unroll
    for (int i = 0; i < N; i++)
        acc[i] *= factor;
    store_sum<T, N>(acc, shared, WARPS, a.v_dim,
                    static_cast<T *>(a.out) + row * a.out_ld + (int64_t)head * a.v_dim, false);
    if (threadIdx.x == 0 && a.lse)
        static_cast<R *>(a.lse)[row * a.lse_ld + head] = best + logarithm(sum);
}

/* delta of every row and head by a warp each, and low of every row. V: columns of an access. */
template <typename T, int V> static __global__ void prepare_kernel(attn_args a)
{
    typedef real<T> R;
    int lane = (int)threadIdx.x & 31;
    int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (at >= a.tokens * a.heads)
        return;
    int64_t row = at / a.heads, head = at % a.heads;
    const T *x = head_row<T>(a.d_out, row, a.d_out_ld, head, a.v_dim);
    const T *y = head_row<T>(a.out, row, a.out_ld, head, a.v_dim);
    R sum = 0;
    for (int j = lane * V; j < a.v_dim; j += 32 * V) {
        R u[V], v[V];
        load_vector<T, V>(x + j, u);
        load_vector<T, V>(y + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += u[k] * v[k];
    }
    sum = warp_sum(sum);
    if (lane == 0)
        static_cast<R *>(a.delta)[at] = sum;
    if (lane == 0 && head == 0)
        a.low[row] = (int32_t)lowest_key(a, row);
}

/* The probability of pair (i, j) and the gradient of its score before softcap, times scale. */
template <typename R>
static __device__ __forceinline__ void pair(const attn_args &a, R product, R dp, R lse, R delta,
                                            R *ret_p, R *ret_ds)
{
    R s = score(a, product), cap = (R)a.softcap;
    *ret_p = exponential(s - lse);
    R ds = *ret_p * (dp - delta);
    if (cap > 0)
        ds *= 1 - s / cap * (s / cap);
    *ret_ds = ds * (R)a.scale;
}

template <typename T, int N>
static __global__ void __launch_bounds__(TRAIN_WARPS * 32) simple_queries_kernel(attn_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int64_t row = blockIdx.x, high = row + 1;
    int head = (int)blockIdx.y, kv = head / a.group;
    R q[N], g[N], sum[N] = {};
    load_row<T, N>(head_row<T>(a.q, row, a.q_ld, head, a.qk_dim), a.qk_dim, lane, q);
    load_row<T, N>(head_row<T>(a.d_out, row, a.d_out_ld, head, a.v_dim), a.v_dim, lane, g);
    R lse = static_cast<const R *>(a.lse)[row * a.lse_ld + head];
    R delta = static_cast<const R *>(a.delta)[row * a.heads + head];
    for (int64_t from = a.low[row] + warp * BATCH; from < high; from += TRAIN_WARPS * BATCH) {
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            R k[N], v[N], p, ds;
            int64_t j = from + b < high ? from + b : from;
            load_row<T, N>(head_row<T>(a.k, j, a.k_ld, kv, a.qk_dim), a.qk_dim, lane, k);
            load_row<T, N>(head_row<T>(a.v, j, a.v_ld, kv, a.v_dim), a.v_dim, lane, v);
            pair(a, dot<R, N>(q, k), dot<R, N>(g, v), lse, delta, &p, &ds);
            if (from + b < high)
#pragma unroll
                for (int i = 0; i < N; i++)
                    sum[i] += ds * k[i];
        }
    }
    store_sum<T, N>(sum, reinterpret_cast<R *>(dynamic), TRAIN_WARPS, a.qk_dim,
                    static_cast<T *>(a.dq) + row * a.dq_ld + (int64_t)head * a.qk_dim, a.add_q);
}

/* A block a key and key head; its pairs are the group's heads times the queries that see it. */
template <typename T, int N>
static __global__ void __launch_bounds__(TRAIN_WARPS * 32) simple_keys_kernel(attn_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    R *shared = reinterpret_cast<R *>(dynamic);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int64_t key = blockIdx.x, queries = seen_until(a, key) - key;
    int kv = (int)blockIdx.y;
    R k[N], v[N], dk[N] = {}, dv[N] = {};
    load_row<T, N>(head_row<T>(a.k, key, a.k_ld, kv, a.qk_dim), a.qk_dim, lane, k);
    load_row<T, N>(head_row<T>(a.v, key, a.v_ld, kv, a.v_dim), a.v_dim, lane, v);
    for (int64_t at = warp; at < a.group * queries; at += TRAIN_WARPS) {
        int64_t head = kv * a.group + at / queries, row = key + at % queries;
        R q[N], g[N], p, ds;
        load_row<T, N>(head_row<T>(a.q, row, a.q_ld, head, a.qk_dim), a.qk_dim, lane, q);
        load_row<T, N>(head_row<T>(a.d_out, row, a.d_out_ld, head, a.v_dim), a.v_dim, lane, g);
        pair(a, dot<R, N>(q, k), dot<R, N>(g, v),
             static_cast<const R *>(a.lse)[row * a.lse_ld + head],
             static_cast<const R *>(a.delta)[row * a.heads + head], &p, &ds);
#pragma unroll
        for (int i = 0; i < N; i++) {
            dk[i] += ds * q[i];
            dv[i] += p * g[i];
        }
    }
    if (a.dk)
        store_sum<T, N>(dk, shared, TRAIN_WARPS, a.qk_dim,
                        static_cast<T *>(a.dk) + key * a.dk_ld + (int64_t)kv * a.qk_dim, a.add_k);
    if (a.dv)
        store_sum<T, N>(dv, shared, TRAIN_WARPS, a.v_dim,
                        static_cast<T *>(a.dv) + key * a.dv_ld + (int64_t)kv * a.v_dim, a.add_v);
}

/* ---- launches -------------------------------------------------------------------------------- */

static int largest_dim(const attn_args *a)
{
    return a->qk_dim > a->v_dim ? a->qk_dim : a->v_dim;
}

template <typename T, int N> static void forward_launch(cuda_queue *q, const attn_args *a)
{
    size_t column = (size_t)a->v_dim * sizeof(real<T>);
    dim3 grid((unsigned)a->tokens, (unsigned)a->heads);
    if (a->one_document && N <= 8)
        simple_forward_kernel<T, N, DECODE_WARPS>
            <<<grid, DECODE_WARPS * 32, DECODE_WARPS * column, q->stream>>>(*a);
    else
        simple_forward_kernel<T, N, TRAIN_WARPS>
            <<<grid, TRAIN_WARPS * 32, TRAIN_WARPS * column, q->stream>>>(*a);
}

template <typename T, int N> static void backward_launch(cuda_queue *q, const attn_args *a)
{
    size_t bytes = (size_t)(TRAIN_WARPS * largest_dim(a)) * sizeof(real<T>);
    if (a->dq)
        simple_queries_kernel<T, N>
            <<<dim3((unsigned)a->tokens, (unsigned)a->heads), TRAIN_WARPS * 32, bytes, q->stream>>>(
                *a);
    if (a->dk || a->dv)
        simple_keys_kernel<T, N><<<dim3((unsigned)a->tokens, (unsigned)a->kv_heads),
                                   TRAIN_WARPS * 32, bytes, q->stream>>>(*a);
}

#define BY_DIM(launch)                                                                             \
    do {                                                                                           \
        int dim = largest_dim(a);                                                                  \
        if (dim <= 64)                                                                             \
            launch<T, 2>(q, a);                                                                    \
        else if (dim <= 128)                                                                       \
            launch<T, 4>(q, a);                                                                    \
        else if (dim <= 256)                                                                       \
            launch<T, 8>(q, a);                                                                    \
        else                                                                                       \
            launch<T, 16>(q, a);                                                                   \
    } while (0)

template <typename T> static void forward(cuda_queue *q, const attn_args *a)
{
    BY_DIM(forward_launch);
}

template <typename T> static void backward(cuda_queue *q, const attn_args *a)
{
    BY_DIM(backward_launch);
}

template <typename T> static void prepare(cuda_queue *q, const attn_args *a)
{
    const int V = 4, size = V * (int)sizeof(T);
    unsigned grid = (unsigned)ceil_div(a->tokens * a->heads, 8);
    if (a->v_dim % V == 0 && a->out_ld % V == 0 && a->d_out_ld % V == 0 &&
        (uintptr_t)a->out % size == 0 && (uintptr_t)a->d_out % size == 0)
        prepare_kernel<T, V><<<grid, 256, 0, q->stream>>>(*a);
    else
        prepare_kernel<T, 1><<<grid, 256, 0, q->stream>>>(*a);
}

bool attn_simple_forward(cuda_queue *q, mt_dtype dtype, const attn_args *a)
{
    if (largest_dim(a) > ATTN_SIMPLE_DIM)
        return false;
    FOR_DTYPE(dtype, forward, q, a);
    return true;
}

bool attn_simple_backward(cuda_queue *q, mt_dtype dtype, const attn_args *a)
{
    if (largest_dim(a) > ATTN_SIMPLE_DIM)
        return false;
    FOR_DTYPE(dtype, backward, q, a);
    return true;
}

void attn_prepare_backward(cuda_queue *q, mt_dtype dtype, const attn_args *a)
{
    FOR_DTYPE(dtype, prepare, q, a);
}
