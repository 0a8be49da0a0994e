/* SPDX-License-Identifier: Apache-2.0
 *
 * causal_conv: a short causal convolution of every column. A token's position says how many tokens
 * of its document lie before it; those of earlier calls are in the state, the oldest first.
 */
#include "../common.cuh"

enum {
    CONV_THREADS = 256, /* columns of a block */
    CONV_ROWS = 16,     /* rows that a thread walks */
    CONV_SLICES = 64    /* of the rows, for the weight's gradient */
};

struct conv_args {
    const void *x, *w, *dy, *state;
    void *y, *dx;
    const int32_t *positions;
    int64_t x_ld, y_ld, dy_ld, dx_ld;
    int64_t w_row, w_tap; /* elements from column to column, and from tap to tap */
    int64_t rows, cols, kept;
    int width;
    bool add;
};

template <typename T> static __global__ void conv_kernel(conv_args a)
{
    int64_t col = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x;
    if (col >= a.cols)
        return;
    const T *x = static_cast<const T *>(a.x) + col, *state = static_cast<const T *>(a.state) + col;
    const T *w = static_cast<const T *>(a.w) + col * a.w_row;
    for (int64_t t = (int64_t)blockIdx.y * CONV_ROWS;
         t < a.rows && t < ((int64_t)blockIdx.y + 1) * CONV_ROWS; t++) {
        int reach = min(a.positions[t], a.width - 1);
        real<T> sum = 0;
        for (int back = reach; back >= 0; back--) {
            T from = t >= back ? x[(t - back) * a.x_ld] : state[(a.kept + t - back) * a.cols];
            sum += to_real(w[(a.width - 1 - back) * a.w_tap]) * to_real(from);
        }
        static_cast<T *>(a.y)[t * a.y_ld + col] = from_real<T>(sum);
    }
}

template <typename T> static __global__ void conv_grad_x_kernel(conv_args a)
{
    int64_t col = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x;
    if (col >= a.cols)
        return;
    const T *dy = static_cast<const T *>(a.dy) + col;
    const T *w = static_cast<const T *>(a.w) + col * a.w_row;
    for (int64_t t = (int64_t)blockIdx.y * CONV_ROWS;
         t < a.rows && t < ((int64_t)blockIdx.y + 1) * CONV_ROWS; t++) {
        T *to = static_cast<T *>(a.dx) + t * a.dx_ld + col;
        real<T> sum = a.add ? to_real(*to) : real<T>(0);
        for (int ahead = 0;
             ahead < a.width && t + ahead < a.rows && a.positions[t + ahead] >= ahead; ahead++)
            sum += to_real(w[(a.width - 1 - ahead) * a.w_tap]) * to_real(dy[(t + ahead) * a.dy_ld]);
        *to = from_real<T>(sum);
    }
}

/* part[slice, tap, col]: the rows of a slice, tap blockIdx.z. */
template <typename T> static __global__ void conv_grad_w_kernel(conv_args a, real<T> *part)
{
    int64_t col = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x;
    if (col >= a.cols)
        return;
    int slice = (int)blockIdx.y, tap = (int)blockIdx.z, back = a.width - 1 - tap;
    const T *x = static_cast<const T *>(a.x) + col, *dy = static_cast<const T *>(a.dy) + col;
    int64_t each = ceil_div(a.rows, CONV_SLICES), first = slice * each;
    real<T> sum = 0;
    for (int64_t t = first; t < first + each && t < a.rows; t++)
        if (a.positions[t] >= back)
            sum += to_real(dy[t * a.dy_ld]) * to_real(x[(t - back) * a.x_ld]);
    part[((int64_t)slice * a.width + tap) * a.cols + col] = sum;
}

/* dw[col, tap] (+)= the slices in their order. */
template <typename R>
static __global__ void conv_reduce_kernel(const R *part, int64_t cols, int width, R *dw, int64_t ld,
                                          bool add)
{
    int64_t col = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x;
    int tap = (int)blockIdx.y;
    if (col >= cols)
        return;
    R sum = 0, *to = dw + col * ld + tap;
    for (int slice = 0; slice < CONV_SLICES; slice++)
        sum += part[((int64_t)slice * width + tap) * cols + col];
    *to = add ? *to + sum : sum;
}

/* Leaves the last rows of what has been seen for the next call. Rows move towards older ones, and
 * each thread has a column of its own. */
template <typename T>
static __global__ void conv_keep_kernel(const T *x, int64_t x_ld, int64_t rows, int64_t cols,
                                        T *state, int64_t kept, bool decode)
{
    int64_t col = (int64_t)blockIdx.x * CONV_THREADS + threadIdx.x;
    if (col >= cols)
        return;
    for (int64_t i = 0; i < kept; i++) {
        int64_t t = rows - kept + i;
        if (t >= 0)
            state[i * cols + col] = x[t * x_ld + col];
        else if (decode)
            state[i * cols + col] = state[(i + rows) * cols + col];
    }
}

static conv_args args_of(const mt_op_call *c)
{
    const mt_tensor *x = &c->in[0], *w = &c->in[1];
    conv_args a = {};
    a.x = x->data;
    a.x_ld = x->ld;
    a.w = w->data;
    a.w_row = w->ld;
    a.w_tap = 1;
    a.state = c->state[0].data;
    a.kept = c->state[0].rows;
    a.positions = c->batch.positions;
    a.rows = x->rows;
    a.cols = x->cols;
    a.width = (int)w->cols;
    return a;
}

static dim3 grid_of(const conv_args &a)
{
    return dim3((unsigned)ceil_div(a.cols, CONV_THREADS), (unsigned)ceil_div(a.rows, CONV_ROWS));
}

template <typename T> static void forward(cuda_queue *q, const conv_args &a, const mt_op_call *c)
{
    conv_kernel<T><<<grid_of(a), CONV_THREADS, 0, q->stream>>>(a);
    if (c->state[0].data)
        conv_keep_kernel<T><<<grid_of(a).x, CONV_THREADS, 0, q->stream>>>(
            static_cast<const T *>(a.x), a.x_ld, a.rows, a.cols, static_cast<T *>(c->state[0].data),
            a.kept, c->pass == MT_PASS_DECODE);
}

static void causal_conv_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    conv_args a = args_of(c);
    (void)d;
    a.y = c->out[0].data;
    a.y_ld = c->out[0].ld;
    if (a.rows > 0)
        FOR_DTYPE(c->in[0].dtype, forward, q, a, c);
}

template <typename T> static void backward(cuda_queue *q, const conv_args &a, const mt_op_call *c)
{
    typedef real<T> R;
    const mt_tensor *dw = &c->d_in[1];
    if (a.dx)
        conv_grad_x_kernel<T><<<grid_of(a), CONV_THREADS, 0, q->stream>>>(a);
    if (!dw->data)
        return;
    R *part = static_cast<R *>(c->work);
    dim3 grid(grid_of(a).x, CONV_SLICES, (unsigned)a.width);
    conv_grad_w_kernel<T><<<grid, CONV_THREADS, 0, q->stream>>>(a, part);
    conv_reduce_kernel<R><<<dim3(grid.x, (unsigned)a.width), CONV_THREADS, 0, q->stream>>>(
        part, a.cols, a.width, static_cast<R *>(dw->data), dw->ld, c->d_accumulate >> 1 & 1u);
}

static void causal_conv_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    conv_args a = args_of(c);
    (void)d;
    a.dy = c->d_out[0].data;
    a.dy_ld = c->d_out[0].ld;
    a.dx = c->d_in[0].data;
    a.dx_ld = c->d_in[0].ld;
    a.add = c->d_accumulate & 1u;
    if (a.rows > 0)
        FOR_DTYPE(c->in[0].dtype, backward, q, a, c);
}

static int64_t causal_conv_work(const cuda_device *d, const mt_op_call *c, bool backward)
{
    (void)d;
    if (!backward || !c->d_in[1].data)
        return 0;
    return CONV_SLICES * c->d_in[1].rows * c->d_in[1].cols * mt_dtype_size(c->d_in[1].dtype);
}

const cuda_op cuda_op_causal_conv = { causal_conv_forward, causal_conv_backward, causal_conv_work };
