/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch and combine: a block moves a token's row to its experts' rows and back. Sums go over the
 * picks in their order.
 */
#include "../common.cuh"

enum { EXPERT_THREADS = 128 };

struct rows_of {
    const void *x; /* one row a token */
    void *to;
    const void *y; /* k rows a token, by slot */
    const void *w; /* [T, k] */
    void *dw;      /* [T, k] */
    const int32_t *slots;
    int64_t ld_x, ld_to, ld_y, ld_w, ld_dw, ld_slots, cols;
    int k;
    bool add, add_dw;
};

/* to[slot] (+)= weight * x[token]; without weights a copy. A block a pick. */
template <typename T, int V, bool WEIGHTED>
static __global__ void __launch_bounds__(EXPERT_THREADS) spread_kernel(rows_of a)
{
    typedef real<T> R;
    int64_t token = blockIdx.x;
    const T *x = static_cast<const T *>(a.x) + token * a.ld_x;
    T *to = static_cast<T *>(a.to) + a.slots[token * a.ld_slots + blockIdx.y] * a.ld_to;
    R w = WEIGHTED ? static_cast<const R *>(a.w)[token * a.ld_w + blockIdx.y] : R(1);
    for (int64_t j = (int64_t)threadIdx.x * V; j < a.cols; j += EXPERT_THREADS * V) {
        R v[V];
        load_vector<T, V>(x + j, v);
        if (WEIGHTED)
#pragma unroll
            for (int n = 0; n < V; n++)
                v[n] *= w;
        put_vector<T, V>(to + j, v, a.add);
    }
}

/* to[token] (+)= sum of weight * y[slot]; without weights a plain sum. */
template <typename T, int V, bool WEIGHTED>
static __global__ void __launch_bounds__(EXPERT_THREADS) collect_kernel(rows_of a)
{
    typedef real<T> R;
    int64_t token = blockIdx.x;
    T *to = static_cast<T *>(a.to) + token * a.ld_to;
    for (int64_t j = (int64_t)threadIdx.x * V; j < a.cols; j += EXPERT_THREADS * V) {
        R sum[V] = {};
        for (int i = 0; i < a.k; i++) {
            R v[V], w = WEIGHTED ? static_cast<const R *>(a.w)[token * a.ld_w + i] : R(1);
            load_vector<T, V>(
                static_cast<const T *>(a.y) + a.slots[token * a.ld_slots + i] * a.ld_y + j, v);
#pragma unroll
            for (int n = 0; n < V; n++)
                sum[n] += WEIGHTED ? w * v[n] : v[n];
        }
        put_vector<T, V>(to + j, sum, a.add);
    }
}

/* dw[token, pick] (+)= y[slot] . x[token] */
template <typename T, int V>
static __global__ void __launch_bounds__(EXPERT_THREADS) weigh_kernel(rows_of a)
{
    typedef real<T> R;
    __shared__ R shared[32];
    int64_t token = blockIdx.x;
    const T *x = static_cast<const T *>(a.x) + token * a.ld_x;
    const T *y = static_cast<const T *>(a.y) + a.slots[token * a.ld_slots + blockIdx.y] * a.ld_y;
    R sum = 0;
    for (int64_t j = (int64_t)threadIdx.x * V; j < a.cols; j += EXPERT_THREADS * V) {
        R v[V], g[V];
        load_vector<T, V>(y + j, v);
        load_vector<T, V>(x + j, g);
#pragma unroll
        for (int n = 0; n < V; n++)
            sum += v[n] * g[n];
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) {
        R *dw = static_cast<R *>(a.dw) + token * a.ld_dw + blockIdx.y;
        *dw = a.add_dw ? *dw + sum : sum;
    }
}

typedef void rows_kernel(rows_of a);

static void launch(cuda_queue *q, const rows_of &a, int64_t tokens, int picks, rows_kernel *kernel)
{
    dim3 grid((unsigned)tokens, (unsigned)picks);
    kernel<<<grid, EXPERT_THREADS, 0, q->stream>>>(a);
}

template <typename T>
static void spread(cuda_queue *q, const rows_of &a, int64_t tokens, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    rows_kernel *weighed = vectors ? spread_kernel<T, wide, true> : spread_kernel<T, 1, true>;
    rows_kernel *plain = vectors ? spread_kernel<T, wide, false> : spread_kernel<T, 1, false>;
    launch(q, a, tokens, a.k, a.w ? weighed : plain);
}

template <typename T>
static void collect(cuda_queue *q, const rows_of &a, int64_t tokens, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    rows_kernel *weighed = vectors ? collect_kernel<T, wide, true> : collect_kernel<T, 1, true>;
    rows_kernel *plain = vectors ? collect_kernel<T, wide, false> : collect_kernel<T, 1, false>;
    launch(q, a, tokens, 1, a.w ? weighed : plain);
}

template <typename T>
static void weigh(cuda_queue *q, const rows_of &a, int64_t tokens, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    launch(q, a, tokens, a.k, vectors ? weigh_kernel<T, wide> : weigh_kernel<T, 1>);
}

static rows_of rows_by_slot(const mt_tensor *slots, int64_t cols)
{
    rows_of a = {};
    a.slots = static_cast<const int32_t *>(slots->data);
    a.ld_slots = slots->ld;
    a.k = (int)slots->cols;
    a.cols = cols;
    return a;
}

static void dispatch_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[0], *y = &c->out[0];
    rows_of a = rows_by_slot(&c->in[1], x->cols);
    (void)d;
    a.x = x->data;
    a.ld_x = x->ld;
    a.to = y->data;
    a.ld_to = y->ld;
    if (x->rows > 0)
        FOR_DTYPE(x->dtype, spread, q, a, x->rows, is_aligned(x) && is_aligned(y));
}

static void dispatch_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *dx = &c->d_in[0], *dy = &c->d_out[0];
    rows_of a = rows_by_slot(&c->in[1], dy->cols);
    (void)d;
    a.y = dy->data;
    a.ld_y = dy->ld;
    a.to = dx->data;
    a.ld_to = dx->ld;
    a.add = c->d_accumulate & 1u;
    if (dx->data && dx->rows > 0)
        FOR_DTYPE(dy->dtype, collect, q, a, dx->rows, is_aligned(dx) && is_aligned(dy));
}

const cuda_op cuda_op_dispatch = { dispatch_forward, dispatch_backward, NULL };

enum { IN_Y = 0, IN_WEIGHTS = 1, IN_SLOTS = 2 };

static void combine_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *y = &c->in[IN_Y], *w = &c->in[IN_WEIGHTS], *out = &c->out[0];
    rows_of a = rows_by_slot(&c->in[IN_SLOTS], out->cols);
    (void)d;
    a.y = y->data;
    a.ld_y = y->ld;
    a.w = w->data;
    a.ld_w = w->ld;
    a.to = out->data;
    a.ld_to = out->ld;
    if (out->rows > 0)
        FOR_DTYPE(y->dtype, collect, q, a, out->rows, is_aligned(y) && is_aligned(out));
}

static void combine_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *y = &c->in[IN_Y], *w = &c->in[IN_WEIGHTS], *g = &c->d_out[0];
    const mt_tensor *dy = &c->d_in[IN_Y], *dw = &c->d_in[IN_WEIGHTS];
    rows_of a = rows_by_slot(&c->in[IN_SLOTS], g->cols);
    (void)d;
    a.x = g->data;
    a.ld_x = g->ld;
    a.w = w->data;
    a.ld_w = w->ld;
    a.to = dy->data;
    a.ld_to = dy->ld;
    a.add = c->d_accumulate >> IN_Y & 1u;
    a.y = y->data;
    a.ld_y = y->ld;
    a.dw = dw->data;
    a.ld_dw = dw->ld;
    a.add_dw = c->d_accumulate >> IN_WEIGHTS & 1u;
    if (dw->data && g->rows > 0)
        FOR_DTYPE(g->dtype, weigh, q, a, g->rows, is_aligned(y) && is_aligned(g));
    if (dy->data && g->rows > 0)
        FOR_DTYPE(g->dtype, spread, q, a, g->rows, is_aligned(dy) && is_aligned(g));
}

const cuda_op cuda_op_combine = { combine_forward, combine_backward, NULL };
