/* SPDX-License-Identifier: Apache-2.0
 *
 * map: a functor applied to every element of N operands, giving M results, by 16-byte accesses
 * where rows allow it.
 */
#ifndef MT_CUDA_ROWWISE_CUH
#define MT_CUDA_ROWWISE_CUH

#include "../common.cuh"

template <int N, int M> struct map_args {
    const void *in[N];
    void *out[M]; /* NULL: not wanted */
    int64_t in_ld[N], out_ld[M];
    int64_t rows, cols;
    uint32_t add; /* bit i: add to out[i] */
};

template <typename T, int V, int N, int M, typename F>
static __global__ void map_kernel(map_args<N, M> a, F f)
{
    int64_t col = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * V;
    await_previous();
    if (col >= a.cols)
        return;
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < a.rows;
         row += (int64_t)gridDim.y * blockDim.y) {
        real<T> in[N][V], out[M][V];
#pragma unroll
        for (int i = 0; i < N; i++)
            load_vector<T, V>(static_cast<const T *>(a.in[i]) + row * a.in_ld[i] + col, in[i]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            real<T> x[N], y[M];
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = in[i][v];
            f(x, y);
#pragma unroll
            for (int i = 0; i < M; i++)
                out[i][v] = y[i];
        }
#pragma unroll
        for (int i = 0; i < M; i++)
            if (a.out[i])
                put_vector<T, V>(static_cast<T *>(a.out[i]) + row * a.out_ld[i] + col, out[i],
                                 a.add >> i & 1u);
    }
}

template <typename T, int V, int N, int M, typename F>
static void map_launch(cuda_queue *q, const map_args<N, M> &a, F f)
{
    rows_shape s = shape_of_rows(a.rows, ceil_div(a.cols, V));
    launch_next(q, map_kernel<T, V, N, M, F>, s.grid, s.block, 0, a, f);
}

template <typename T, int N, int M, typename F>
static void map_typed(cuda_queue *q, map_args<N, M> a, bool aligned, F f)
{
    const int wide = vector_of<T>::width;
    if (aligned && a.cols % wide == 0)
        map_launch<T, wide, N, M>(q, a, f);
    else
        map_launch<T, 1, N, M>(q, a, f);
}

/* Operands and results have the shape and dtype of in[N - 1]. */
template <int N, int M, typename F>
static void map(cuda_queue *q, const mt_tensor *const *in, const mt_tensor *const *out,
                uint32_t add, F f)
{
    const mt_tensor *shape = in[N - 1];
    map_args<N, M> a;
    bool aligned = true, packed = true, wanted = false;
    a.rows = shape->rows;
    a.cols = shape->cols;
    a.add = add;
    for (int i = 0; i < N; i++) {
        a.in[i] = in[i]->data;
        a.in_ld[i] = in[i]->ld;
        aligned = aligned && is_aligned(in[i]);
        packed = packed && in[i]->ld == a.cols;
    }
    for (int i = 0; i < M; i++) {
        a.out[i] = out[i]->data;
        a.out_ld[i] = out[i]->ld;
        aligned = aligned && is_aligned(out[i]);
        packed = packed && (!out[i]->data || out[i]->ld == a.cols);
        wanted = wanted || out[i]->data;
    }
    if (!wanted || a.rows == 0 || a.cols == 0)
        return;
    if (packed && aligned) { /* one long row, unless that breaks the vectors */
        int64_t n = a.rows * a.cols;
        if (n % 8 == 0 && n < (int64_t)1 << 38) {
            a.cols = n;
            a.rows = 1;
        }
    }
    if (shape->dtype == MT_BF16)
        map_typed<bf16, N, M>(q, a, aligned, f);
    else if (shape->dtype == MT_F64)
        map_typed<double, N, M>(q, a, aligned, f);
    else
        map_typed<float, N, M>(q, a, aligned, f);
}

#endif
