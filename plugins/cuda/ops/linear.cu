/* SPDX-License-Identifier: Apache-2.0
 *
 * linear: y = x w^T + bias. Forward and both gradients are GEMMs. The bias is added within the
 * product's kernel, or written first and the product added to it, before the one rounding. Its
 * gradient is a sum over rows in two steps of a fixed order. exact_linear: the same without a bias, y
 * in FP32; its gradient is rounded to the dtype of x and w first.
 */
#include "../common.cuh"

enum { IN_X = 0, IN_W = 1, IN_BIAS = 2 };
enum { BIAS_ROWS = 256, BIAS_LANES = 8 }; /* rows of a first step, and running sums in it */

template <typename T>
static __global__ void bias_kernel(const T *bias, T *y, int64_t ld, int64_t rows, int64_t cols)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols)
        return;
    T b = bias[col];
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
        y[row * ld + col] = b;
}

template <typename T>
static void write_bias(cudaStream_t s, const void *bias, void *y, int64_t ld, int64_t rows,
                       int64_t cols)
{
    dim3 grid((unsigned)ceil_div(cols, 256), (unsigned)(rows < 1024 ? rows : 1024));
    bias_kernel<T><<<grid, 256, 0, s>>>((const T *)bias, (T *)y, ld, rows, cols);
}

void cuda_launch_bias(cudaStream_t s, mt_dtype dtype, const void *bias, void *c, int64_t ld,
                      int64_t rows, int64_t cols)
{
    FOR_DTYPE(dtype, write_bias, s, bias, c, ld, rows, cols);
}

/* part[s, col] = sum of the rows of slice s. Blocks of 32 times V columns and BIAS_LANES lanes. */
template <typename T, int V>
static __global__ void column_sums_kernel(const T *dy, int64_t ld, int64_t rows, int64_t cols,
                                          real<T> *part)
{
    typedef real<T> R;
    __shared__ R lanes[BIAS_LANES][32 * V];
    int64_t col = ((int64_t)blockIdx.x * 32 + threadIdx.x) * V;
    int64_t from = (int64_t)blockIdx.y * BIAS_ROWS;
    int64_t to = from + BIAS_ROWS < rows ? from + BIAS_ROWS : rows;
    R sum[V] = {};
    if (col < cols)
#pragma unroll 4
        for (int64_t row = from + threadIdx.y; row < to; row += BIAS_LANES) {
            R x[V];
            load_vector<T, V>(dy + row * ld + col, x);
#pragma unroll
            for (int k = 0; k < V; k++)
                sum[k] += x[k];
        }
#pragma unroll
    for (int k = 0; k < V; k++)
        lanes[threadIdx.y][threadIdx.x * V + k] = sum[k];
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols)
        return;
    for (int k = 0; k < V; k++) {
        for (int i = 1; i < BIAS_LANES; i++)
            sum[k] += lanes[i][threadIdx.x * V + k];
        part[blockIdx.y * cols + col + k] = sum[k];
    }
}

template <typename T, int V>
static void column_sums(cuda_queue *q, const mt_tensor *dy, int64_t slices, void *work)
{
    dim3 grid((unsigned)ceil_div(dy->cols, 32 * V), (unsigned)slices), block(32, BIAS_LANES);
    column_sums_kernel<T, V><<<grid, block, 0, q->stream>>>((const T *)dy->data, dy->ld, dy->rows,
                                                            dy->cols, (real<T> *)work);
}

template <typename R>
static __global__ void add_slices_kernel(const R *part, int64_t slices, int64_t cols, R *d,
                                         bool add)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols)
        return;
    double sum = 0;
    for (int64_t s = 0; s < slices; s++)
        sum += (double)part[s * cols + col];
    d[col] = (R)(sum + (add ? (double)d[col] : 0.0));
}

template <typename T>
static void bias_gradient(cuda_queue *q, const mt_tensor *dy, const mt_tensor *d, void *work,
                          bool add)
{
    typedef real<T> R;
    const int wide = vector_of<T>::width;
    int64_t slices = ceil_div(dy->rows, BIAS_ROWS);
    if (slices > 0 && is_aligned(dy) && dy->cols % wide == 0)
        column_sums<T, wide>(q, dy, slices, work);
    else if (slices > 0)
        column_sums<T, 1>(q, dy, slices, work);
    add_slices_kernel<R><<<(unsigned)ceil_div(dy->cols, 128), 128, 0, q->stream>>>(
        (const R *)work, slices, dy->cols, (R *)d->data, add);
}

/* The product and its bias as one kernel, where there is one. */
static bool with_bias(cuda_device *d, cuda_queue *q, const mt_tensor *x, const mt_tensor *w,
                      const void *bias, const mt_tensor *y)
{
    cuda_product p = cuda_product_of(x, false, w, true, y, 0);
    p.bias = bias;
    return cuda_blas_on(q) && cuda_light_product(d, &p, q->stream, d->blas.work, CUDA_BLAS_WORK);
}

static void linear_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *y = &c->out[0];
    const void *bias = c->n_in > IN_BIAS ? c->in[IN_BIAS].data : NULL;
    if (y->rows == 0 || (bias && with_bias(d, q, x, w, bias, y)))
        return;
    if (bias)
        cuda_launch_bias(q->stream, y->dtype, bias, y->data, y->ld, y->rows, y->cols);
    cuda_gemm(q, cuda_product_of(x, false, w, true, y, bias != NULL));
}

static void linear_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *dy = &c->d_out[0];
    const mt_tensor *dx = &c->d_in[IN_X], *dw = &c->d_in[IN_W], *db = &c->d_in[IN_BIAS];
    (void)d;
    if (dx->data)
        cuda_gemm(q, cuda_product_of(dy, false, w, false, dx, c->d_accumulate >> IN_X & 1u));
    if (dw->data)
        cuda_gemm(q, cuda_product_of(dy, true, x, false, dw, c->d_accumulate >> IN_W & 1u));
    if (c->n_in > IN_BIAS && db->data)
        FOR_DTYPE(dy->dtype, bias_gradient, q, dy, db, c->work, c->d_accumulate >> IN_BIAS & 1u);
}

static int64_t linear_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    const mt_tensor *dy = &c->d_out[0];
    (void)d;
    if (!backward || c->n_in <= IN_BIAS || !c->d_in[IN_BIAS].data)
        return 0;
    return ceil_div(dy->rows, BIAS_ROWS) * dy->cols * (dy->dtype == MT_F64 ? 8 : 4);
}

const cuda_op cuda_op_linear = { linear_forward, linear_backward, linear_workspace };

/* ---- exact_linear ------------------------------------------------------------------------------ */

static __global__ void round_rows_kernel(const float *x, int64_t ld, int64_t rows, int64_t cols,
                                         bf16 *y)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols)
        return;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
        y[row * cols + col] = from_real<bf16>(x[row * ld + col]);
}

static bool is_mixed(const mt_op_call *c)
{
    return c->in[IN_X].dtype == MT_BF16;
}

static void exact_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    mt_op_call rounded = *c;
    mt_tensor *dy = &rounded.d_out[0];
    if (dy->rows > 0 && is_mixed(c)) {
        dim3 grid((unsigned)ceil_div(dy->cols, 128), (unsigned)(dy->rows < 4096 ? dy->rows : 4096));
        round_rows_kernel<<<grid, 128, 0, q->stream>>>((const float *)dy->data, dy->ld, dy->rows,
                                                       dy->cols, (bf16 *)c->work);
        dy->data = c->work;
        dy->ld = dy->cols;
        dy->dtype = MT_BF16;
    }
    linear_backward(d, q, &rounded);
}

static int64_t exact_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    const mt_tensor *dy = &c->d_out[0];
    (void)d;
    return backward && is_mixed(c) ? dy->rows * dy->cols * 2 : 0;
}

const cuda_op cuda_op_exact_linear = { linear_forward, exact_backward, exact_workspace };
