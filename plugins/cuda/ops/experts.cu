/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch and combine: a block moves a token's row to its experts' rows and back. Sums go over the
 * picks in their order.
 */
#include "../common.cuh"

enum {
    EXPERT_THREADS = 128,
    EXPERT_BATCH = 4, /* vectors of a thread on their way at a time */
    EXPERT_PICKS = 32 /* of a token that a block looks up at a time */
};

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

/* to[slot] (+)= x[token]. A block a token. */
template <typename T, int V>
static __global__ void __launch_bounds__(EXPERT_THREADS) spread_kernel(rows_of a)
{
    __shared__ int32_t slot[EXPERT_PICKS];
    const int64_t token = blockIdx.x, step = EXPERT_THREADS * V;
    await_previous();
    const T *x = static_cast<const T *>(a.x) + token * a.ld_x;
    for (int first = 0; first < a.k; first += EXPERT_PICKS) {
        int n = a.k - first < EXPERT_PICKS ? a.k - first : EXPERT_PICKS;
        __syncthreads(); /* the last ones are no longer read */
        if ((int)threadIdx.x < n)
            slot[threadIdx.x] = a.slots[token * a.ld_slots + first + threadIdx.x];
        __syncthreads();
        for (int64_t from = (int64_t)threadIdx.x * V; from < a.cols; from += EXPERT_BATCH * step) {
            bits<T, V> v[EXPERT_BATCH];
#pragma unroll
            for (int b = 0; b < EXPERT_BATCH; b++)
                if (from + b * step < a.cols)
                    v[b] = load_bits<T, V>(x + from + b * step);
            for (int i = 0; i < n; i++) {
                T *to = static_cast<T *>(a.to) + slot[i] * a.ld_to + from;
#pragma unroll
                for (int b = 0; b < EXPERT_BATCH; b++)
                    if (from + b * step < a.cols) {
                        real<T> u[V];
                        unpack<T, V>(v[b], u);
                        put_vector<T, V>(to + b * step, u, a.add);
                    }
            }
        }
    }
}

/* to[token] (+)= sum of weight * y[slot]; without weights a plain sum. */
template <typename T, int V, bool WEIGHTED>
static __global__ void __launch_bounds__(EXPERT_THREADS) collect_kernel(rows_of a)
{
    typedef real<T> R;
    const int64_t token = blockIdx.x;
    T *to = static_cast<T *>(a.to) + token * a.ld_to;
    await_previous();
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

/* With g = x[token]: dw[token, pick] (+)= y[slot] . g, to[slot] (+)= weight * g, where wanted. A
 * block a token, a warp a pick at a time. */
template <typename T, int V>
static __global__ void __launch_bounds__(EXPERT_THREADS) combine_back_kernel(rows_of a)
{
    typedef real<T> R;
    const int lane = (int)threadIdx.x & 31;
    const int64_t token = blockIdx.x, step = 32 * V;
    await_previous();
    const T *g = static_cast<const T *>(a.x) + token * a.ld_x;
    for (int i = (int)threadIdx.x >> 5; i < a.k; i += EXPERT_THREADS / 32) {
        int64_t slot = a.slots[token * a.ld_slots + i];
        const T *y = static_cast<const T *>(a.y) + slot * a.ld_y;
        T *to = static_cast<T *>(a.to) + slot * a.ld_to;
        R w = static_cast<const R *>(a.w)[token * a.ld_w + i], sum = 0;
        for (int64_t from = lane * V; from < a.cols; from += EXPERT_BATCH * step) {
            bits<T, V> gs[EXPERT_BATCH], ys[EXPERT_BATCH];
#pragma unroll
            for (int b = 0; b < EXPERT_BATCH; b++)
                if (from + b * step < a.cols) {
                    gs[b] = load_bits<T, V>(g + from + b * step);
                    if (a.dw)
                        ys[b] = load_bits<T, V>(y + from + b * step);
                }
#pragma unroll
            for (int b = 0; b < EXPERT_BATCH; b++)
                if (from + b * step < a.cols) {
                    R u[V], v[V];
                    unpack<T, V>(gs[b], u);
                    unpack<T, V>(ys[b], v);
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        if (a.dw)
                            sum += v[k] * u[k];
                        u[k] *= w;
                    }
                    if (a.to)
                        put_vector<T, V>(to + from + b * step, u, a.add);
                }
        }
        if (!a.dw)
            continue;
        sum = warp_sum(sum);
        if (lane == 0) {
            R *dw = static_cast<R *>(a.dw) + token * a.ld_dw + i;
            *dw = a.add_dw ? *dw + sum : sum;
        }
    }
}

typedef void rows_kernel(rows_of a);

static void launch(cuda_queue *q, const rows_of &a, int64_t tokens, rows_kernel *kernel)
{
    launch_next(q, kernel, dim3((unsigned)tokens), dim3(EXPERT_THREADS), 0, a);
}

template <typename T>
static void spread(cuda_queue *q, const rows_of &a, int64_t tokens, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    launch(q, a, tokens, vectors ? spread_kernel<T, wide> : spread_kernel<T, 1>);
}

template <typename T>
static void collect(cuda_queue *q, const rows_of &a, int64_t tokens, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    rows_kernel *weighed = vectors ? collect_kernel<T, wide, true> : collect_kernel<T, 1, true>;
    rows_kernel *plain = vectors ? collect_kernel<T, wide, false> : collect_kernel<T, 1, false>;
    launch(q, a, tokens, a.w ? weighed : plain);
}

template <typename T>
static void combine_back(cuda_queue *q, const rows_of &a, int64_t tokens, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    launch(q, a, tokens, vectors ? combine_back_kernel<T, wide> : combine_back_kernel<T, 1>);
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
    if ((dw->data || dy->data) && g->rows > 0)
        FOR_DTYPE(g->dtype, combine_back, q, a, g->rows,
                  is_aligned(y) && is_aligned(dy) && is_aligned(g));
}

const cuda_op cuda_op_combine = { combine_forward, combine_backward, NULL };
