/* SPDX-License-Identifier: Apache-2.0
 *
 * slice and concat: columns of heads, taken out and put side by side.
 */
#include "../common.cuh"

struct heads_args {
    const void *from;
    void *to;
    int64_t ld_from, ld_to, rows;
    int heads;
    int64_t from_head, to_head;   /* columns from head to head; 0: all share one */
    int64_t from_first, to_first; /* in a head */
    int64_t cols;                 /* of a head, that move */
    bool add;
};

/* to[row, h * to_head + to_first + j] (+)= from[row, h * from_head + from_first + j] */
template <typename T, int V> static __global__ void move_kernel(heads_args a)
{
    int32_t at = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x), across = (int32_t)a.cols / V;
    int32_t head = at / across, j = at % across * V;
    await_previous();
    if (head >= a.heads)
        return;
    const T *from = static_cast<const T *>(a.from) + head * a.from_head + a.from_first + j;
    T *to = static_cast<T *>(a.to) + head * a.to_head + a.to_first + j;
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < a.rows;
         row += (int64_t)gridDim.y * blockDim.y) {
        real<T> x[V];
        load_vector<T, V>(from + row * a.ld_from, x);
        put_vector<T, V>(to + row * a.ld_to, x, a.add);
    }
}

/* to[row, j] (+)= sum over heads of from[row, h * from_head + from_first + j] */
template <typename T> static __global__ void sum_heads_kernel(heads_args a)
{
    await_previous();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.rows * a.cols;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / a.cols, j = i % a.cols;
        const T *x = static_cast<const T *>(a.from) + row * a.ld_from + a.from_first + j;
        T *to = static_cast<T *>(a.to) + row * a.ld_to + j;
        real<T> sum = 0;
        for (int h = 0; h < a.heads; h++)
            sum += to_real(x[h * a.from_head]);
        *to = from_real<T>(a.add ? to_real(*to) + sum : sum);
    }
}

static unsigned blocks_for(int64_t n)
{
    int64_t blocks = ceil_div(n, 256);
    return (unsigned)(blocks < 65536 ? blocks : 65536);
}

template <typename T> static void move(cuda_queue *q, const heads_args &a, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0 && a.from_head % wide == 0 &&
                   a.to_head % wide == 0 && a.from_first % wide == 0 && a.to_first % wide == 0;
    if (a.rows * a.heads * a.cols == 0)
        return;
    rows_shape s = shape_of_rows(a.rows, a.heads * a.cols / (vectors ? wide : 1));
    launch_next(q, vectors ? move_kernel<T, wide> : move_kernel<T, 1>, s.grid, s.block, 0, a);
}

template <typename T> static void sum_heads(cuda_queue *q, const heads_args &a)
{
    if (a.rows * a.cols > 0)
        launch_next(q, sum_heads_kernel<T>, dim3(blocks_for(a.rows * a.cols)), dim3(256), 0, a);
}

static heads_args between(const mt_tensor *from, const mt_tensor *to, int heads)
{
    heads_args a = {};
    a.from = from->data;
    a.ld_from = from->ld;
    a.to = to->data;
    a.ld_to = to->ld;
    a.rows = to->rows;
    a.heads = heads;
    return a;
}

static void slice_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_slice_attr *s = static_cast<const mt_slice_attr *>(c->attr);
    const mt_tensor *x = &c->in[0], *y = &c->out[0];
    heads_args a = between(x, y, s->heads);
    (void)d;
    a.from_head = x->cols / s->heads;
    a.from_first = s->first;
    a.to_head = a.cols = s->cols;
    FOR_DTYPE(x->dtype, move, q, a, is_aligned(x) && is_aligned(y));
}

static void slice_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_slice_attr *s = static_cast<const mt_slice_attr *>(c->attr);
    const mt_tensor *dx = &c->d_in[0], *dy = &c->d_out[0];
    heads_args a = between(dy, dx, s->heads);
    if (!dx->data || dx->rows == 0)
        return;
    a.add = c->d_accumulate & 1u;
    a.from_head = a.cols = s->cols;
    a.to_head = dx->cols / s->heads;
    a.to_first = s->first;
    if (!a.add) { /* what was not sliced gets no gradient */
        int64_t size = mt_dtype_size(dx->dtype);
        cuda_ok(d,
                cudaMemset2DAsync(dx->data, (size_t)(dx->ld * size), 0, (size_t)(dx->cols * size),
                                  (size_t)dx->rows, q->stream),
                "slice");
    }
    FOR_DTYPE(dy->dtype, move, q, a, is_aligned(dx) && is_aligned(dy));
}

const cuda_op cuda_op_slice = { slice_forward, slice_backward, NULL };

/* Calls fn for every operand that is there, with its place in a head of the whole. */
typedef void concat_fn(cuda_queue *q, const mt_op_call *c, uint32_t i, bool shared, int heads,
                       int64_t first, int64_t cols, int64_t width);

static void for_operands(cuda_queue *q, const mt_op_call *c, const mt_tensor *whole, concat_fn *fn)
{
    const mt_concat_attr *attr = static_cast<const mt_concat_attr *>(c->attr);
    int64_t first = 0;
    for (uint32_t i = 0; i < c->n_in; i++) {
        bool shared = attr->shared >> i & 1u;
        int64_t cols = attr->cols[i];
        if (cols > 0)
            fn(q, c, i, shared, attr->heads, first, cols, whole->cols / attr->heads);
        first += cols;
    }
}

static void put_operand(cuda_queue *q, const mt_op_call *c, uint32_t i, bool shared, int heads,
                        int64_t first, int64_t cols, int64_t width)
{
    const mt_tensor *x = &c->in[i], *y = &c->out[0];
    heads_args a = between(x, y, heads);
    a.from_head = shared ? 0 : cols;
    a.to_head = width;
    a.to_first = first;
    a.cols = cols;
    FOR_DTYPE(y->dtype, move, q, a, is_aligned(x) && is_aligned(y));
}

static void take_operand(cuda_queue *q, const mt_op_call *c, uint32_t i, bool shared, int heads,
                         int64_t first, int64_t cols, int64_t width)
{
    const mt_tensor *dx = &c->d_in[i], *dy = &c->d_out[0];
    heads_args a = between(dy, dx, heads);
    if (!dx->data)
        return;
    a.add = c->d_accumulate >> i & 1u;
    a.from_head = width;
    a.from_first = first;
    a.to_head = a.cols = cols;
    if (shared)
        FOR_DTYPE(dy->dtype, sum_heads, q, a);
    else
        FOR_DTYPE(dy->dtype, move, q, a, is_aligned(dx) && is_aligned(dy));
}

static void concat_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    for_operands(q, c, &c->out[0], put_operand);
}

static void concat_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    for_operands(q, c, &c->d_out[0], take_operand);
}

const cuda_op cuda_op_concat = { concat_forward, concat_backward, NULL };
