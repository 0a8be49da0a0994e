/* SPDX-License-Identifier: Apache-2.0
 *
 * linear: y = x w^T + bias. Forward and both gradients are GEMMs; the bias is written first and the
 * product added to it before the one rounding. Its gradient is a sum over rows in two steps of a
 * fixed order.
 */
#include "../common.cuh"

enum { IN_X = 0, IN_W = 1, IN_BIAS = 2 };
enum { BIAS_ROWS = 512, BIAS_LANES = 8 }; /* rows of a first step, and running sums in it */

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
static void write_bias(cuda_queue *q, const mt_tensor *bias, const mt_tensor *y)
{
    int64_t rows = y->rows < 1024 ? y->rows : 1024;
    dim3 grid((unsigned)ceil_div(y->cols, 256), (unsigned)rows);
    bias_kernel<T>
        <<<grid, 256, 0, q->stream>>>((const T *)bias->data, (T *)y->data, y->ld, y->rows, y->cols);
}

/* part[s, col] = sum of the rows of slice s. Blocks of 32 columns and BIAS_LANES lanes. */
template <typename T>
static __global__ void column_sums_kernel(const T *dy, int64_t ld, int64_t rows, int64_t cols,
                                          real<T> *part)
{
    typedef real<T> R;
    __shared__ R lanes[BIAS_LANES][32];
    int64_t col = (int64_t)blockIdx.x * 32 + threadIdx.x;
    int64_t from = (int64_t)blockIdx.y * BIAS_ROWS;
    int64_t to = from + BIAS_ROWS < rows ? from + BIAS_ROWS : rows;
    R sum = 0;
    if (col < cols)
        for (int64_t row = from + threadIdx.y; row < to; row += BIAS_LANES)
            sum += to_real(dy[row * ld + col]);
    lanes[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols)
        return;
    for (int i = 1; i < BIAS_LANES; i++)
        sum += lanes[i][threadIdx.x];
    part[blockIdx.y * cols + col] = sum;
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
    int64_t slices = ceil_div(dy->rows, BIAS_ROWS);
    dim3 grid((unsigned)ceil_div(dy->cols, 32), (unsigned)slices), block(32, BIAS_LANES);
    if (slices > 0)
        column_sums_kernel<T><<<grid, block, 0, q->stream>>>((const T *)dy->data, dy->ld, dy->rows,
                                                             dy->cols, (R *)work);
    add_slices_kernel<R><<<(unsigned)ceil_div(dy->cols, 128), 128, 0, q->stream>>>(
        (const R *)work, slices, dy->cols, (R *)d->data, add);
}

static void linear_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *y = &c->out[0];
    bool has_bias = c->n_in > IN_BIAS && c->in[IN_BIAS].data;
    (void)d;
    if (y->rows == 0)
        return;
    if (has_bias)
        FOR_DTYPE(y->dtype, write_bias, q, &c->in[IN_BIAS], y);
    cuda_gemm(q, false, true, y->rows, y->cols, x->cols, x->dtype, x->data, x->ld, w->data, w->ld,
              has_bias, y->dtype, y->data, y->ld);
}

static void linear_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *dy = &c->d_out[0];
    const mt_tensor *dx = &c->d_in[IN_X], *dw = &c->d_in[IN_W], *db = &c->d_in[IN_BIAS];
    (void)d;
    if (dx->data)
        cuda_gemm(q, false, false, dx->rows, dx->cols, dy->cols, dy->dtype, dy->data, dy->ld,
                  w->data, w->ld, c->d_accumulate >> IN_X & 1u, dx->dtype, dx->data, dx->ld);
    if (dw->data)
        cuda_gemm(q, true, false, dw->rows, dw->cols, dy->rows, dy->dtype, dy->data, dy->ld,
                  x->data, x->ld, c->d_accumulate >> IN_W & 1u, dw->dtype, dw->data, dw->ld);
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
