/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_cross_entropy: the LM head and the loss in one, a chunk of tokens at a time, so that the
 * logits of all tokens never exist together. In a train pass a chunk's logits turn into their own
 * gradient in place, and from it come the gradients of x (aux 0) and w.
 */
#include "rowwise.cuh"

enum { IN_X = 0, IN_W = 1, IGNORED = -100 };

/* A chunk's logits take at most CHUNK_BYTES. Each chunk reads and writes the gradient of w once, so
 * that few large ones are better. In prefill and decode, GENERATE_ROWS at a time. */
static const int64_t chunk_bytes = (int64_t)1 << 30;
enum { CHUNK_MIN = 256, CHUNK_MAX = 8192, GENERATE_ROWS = 256, LOSS_THREADS = 1024 };

static bool generates(const mt_op_call *c)
{
    return c->pass == MT_PASS_PREFILL || c->pass == MT_PASS_DECODE;
}

/* Rows of logits start at multiples of 16 bytes whatever the vocabulary. */
static int64_t logit_ld(int64_t vocab)
{
    return ceil_div(vocab, 16) * 16;
}

static int64_t chunk_rows(const mt_op_call *c)
{
    int64_t row = logit_ld(c->in[IN_W].rows) * mt_dtype_size(c->in[IN_X].dtype);
    int64_t rows = chunk_bytes / row / CHUNK_MIN * CHUNK_MIN;
    rows = rows < CHUNK_MIN ? CHUNK_MIN : rows > CHUNK_MAX ? CHUNK_MAX : rows;
    return rows < c->in[IN_X].rows ? rows : c->in[IN_X].rows;
}

/* ---- the loss of a row ------------------------------------------------------------------------
 */

struct loss_args {
    void *logits; /* [rows, vocab], turned into gradients */
    int64_t ld, vocab;
    const int32_t *targets; /* of the first row */
    int64_t first;          /* number of the first row, for messages */
    void *loss;
    int64_t loss_ld;
    double cap, factor;
    bool train;
    cuda_fault *fault;
    int32_t *claim;
};

/* Largest value, and the sum of e^(x - largest). */
template <typename R> struct running {
    R top, sum;
};

template <typename R> static __device__ __forceinline__ running<R> merge(running<R> a, running<R> b)
{
    R top = a.top > b.top ? a.top : b.top;
    running<R> m = { top, 0 };
    if (a.sum > 0)
        m.sum += a.sum * exponential(a.top - top);
    if (b.sum > 0)
        m.sum += b.sum * exponential(b.top - top);
    return m;
}

template <typename T, bool CAPPED>
static __device__ __forceinline__ real<T> capped(real<T> x, real<T> cap)
{
    return CAPPED ? rounded<T>(cap * hyperbolic_tangent(x / cap)) : x;
}

/* A block a row. Columns past the vocabulary are never looked at. */
template <typename T, bool CAPPED>
static __global__ void __launch_bounds__(LOSS_THREADS) loss_kernel(loss_args a)
{
    typedef real<T> R;
    const int V = vector_of<T>::width;
    __shared__ R tops[32], sums[32];
    int64_t row = blockIdx.x;
    T *x = static_cast<T *>(a.logits) + row * a.ld;
    R *loss = static_cast<R *>(a.loss) + row * a.loss_ld, cap = (R)a.cap;
    int64_t whole = a.vocab / V * V;
    int32_t target = a.targets[row];
    if (target != IGNORED && (target < 0 || target >= a.vocab)) {
        if (threadIdx.x == 0)
            raise_fault(a.fault, a.claim, CUDA_FAULT_TARGET, a.first + row, target, a.vocab);
        target = IGNORED;
    }
    if (target == IGNORED) {
        if (threadIdx.x == 0)
            *loss = 0;
        R zero[V] = {};
        for (int64_t j = (int64_t)threadIdx.x * V; a.train && j < a.ld; j += LOSS_THREADS * V)
            put_vector<T, V>(x + j, zero, false);
        return;
    }
    running<R> mine = { -(R)INFINITY, 0 };
    for (int64_t j = (int64_t)threadIdx.x * V; j < whole; j += LOSS_THREADS * V) {
        R v[V], top = mine.top;
        load_vector<T, V>(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            v[k] = capped<T, CAPPED>(v[k], cap);
            top = v[k] > top ? v[k] : top;
        }
        R sum = mine.sum > 0 ? mine.sum * exponential(mine.top - top) : R(0);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += exponential(v[k] - top);
        mine.top = top;
        mine.sum = sum;
    }
    if (whole + threadIdx.x < a.vocab)
        mine =
            merge(mine, running<R>{ capped<T, CAPPED>(to_real(x[whole + threadIdx.x]), cap), 1 });
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
#pragma unroll
    for (int i = 16; i > 0; i >>= 1)
        mine = merge(mine, running<R>{ __shfl_xor_sync(0xffffffffu, mine.top, i),
                                       __shfl_xor_sync(0xffffffffu, mine.sum, i) });
    if (lane == 0) {
        tops[warp] = mine.top;
        sums[warp] = mine.sum;
    }
    __syncthreads();
    mine = running<R>{ tops[lane], sums[lane] };
#pragma unroll
    for (int i = 16; i > 0; i >>= 1)
        mine = merge(mine, running<R>{ __shfl_xor_sync(0xffffffffu, mine.top, i),
                                       __shfl_xor_sync(0xffffffffu, mine.sum, i) });
    R lse = mine.top + logarithm(mine.sum);
    R at_target = capped<T, CAPPED>(to_real(x[target]), cap);
    __syncthreads(); /* everyone has read the target's logit before it is overwritten */
    if (threadIdx.x == 0)
        *loss = lse - at_target;
    if (!a.train)
        return;
    R factor = (R)a.factor;
    for (int64_t j = (int64_t)threadIdx.x * V; j < a.ld; j += LOSS_THREADS * V) {
        R v[V];
        load_vector<T, V>(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            R u = capped<T, CAPPED>(v[k], cap);
            R g = (exponential(u - lse) - (j + k == target ? R(1) : R(0))) * factor;
            if (CAPPED)
                g *= 1 - u / cap * (u / cap);
            v[k] = j + k < a.vocab ? g : R(0);
        }
        put_vector<T, V>(x + j, v, false);
    }
}

template <typename T> static void finish_rows(cuda_queue *q, const loss_args &a, int64_t rows)
{
    if (a.cap > 0)
        loss_kernel<T, true><<<(unsigned)rows, LOSS_THREADS, 0, q->stream>>>(a);
    else
        loss_kernel<T, false><<<(unsigned)rows, LOSS_THREADS, 0, q->stream>>>(a);
}

static void *row_of(const mt_tensor *t, int64_t row)
{
    return (char *)t->data + row * t->ld * mt_dtype_size(t->dtype);
}

static mt_tensor rows_of(const mt_tensor *t, int64_t from, int64_t rows)
{
    mt_tensor part = *t;
    part.data = row_of(t, from);
    part.rows = rows;
    return part;
}

static void train_or_eval(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *dw = &c->d_in[IN_W];
    const mt_tensor *dx = &c->aux[0];
    bool train = c->pass == MT_PASS_TRAIN, add = c->d_accumulate >> IN_W & 1u;
    int64_t step = chunk_rows(c), vocab = w->rows, ld = logit_ld(vocab);
    for (int64_t from = 0; from < x->rows; from += step) {
        int64_t rows = x->rows - from < step ? x->rows - from : step;
        mt_tensor xs = rows_of(x, from, rows);
        mt_tensor logits = { c->work, rows, vocab, ld, x->dtype, 0 };
        loss_args a = {};
        a.logits = c->work;
        a.ld = ld;
        a.vocab = vocab;
        a.targets = c->batch.targets + from;
        a.first = from;
        a.loss = row_of(&c->out[0], from);
        a.loss_ld = c->out[0].ld;
        a.cap = ((const mt_xent_attr *)c->attr)->softcap;
        a.factor = c->batch.loss_scale;
        a.train = train;
        a.fault = d->fault;
        a.claim = d->fault_claim;
        cuda_gemm(q, cuda_product_of(&xs, false, w, true, &logits, 0));
        FOR_DTYPE(x->dtype, finish_rows, q, a, rows);
        if (train && c->n_aux > 0 && dx->data) {
            mt_tensor dxs = rows_of(dx, from, rows);
            cuda_gemm(q, cuda_product_of(&logits, false, w, false, &dxs, 0));
        }
        if (train && dw->data)
            cuda_gemm(q, cuda_product_of(&logits, true, &xs, false, dw, add || from > 0));
    }
}

/* ---- prefill and decode ---------------------------------------------------------------------- */

struct pick_args {
    const char *x;
    char *to;
    const int32_t *rows;
    int64_t x_bytes, row_bytes; /* from one row to the next, and of a row */
    int64_t x_rows;
    cuda_fault *fault;
    int32_t *claim;
};

static __global__ void pick_kernel(pick_args a)
{
    int32_t row = a.rows[blockIdx.x];
    if (row < 0 || row >= a.x_rows) {
        if (threadIdx.x == 0)
            raise_fault(a.fault, a.claim, CUDA_FAULT_LOGIT_ROW, blockIdx.x, row, a.x_rows);
        row = 0;
    }
    const char *from = a.x + row * a.x_bytes;
    char *to = a.to + blockIdx.x * a.row_bytes;
    for (int64_t i = (int64_t)threadIdx.x * 2; i < a.row_bytes; i += blockDim.x * 2)
        *reinterpret_cast<uint16_t *>(to + i) = *reinterpret_cast<const uint16_t *>(from + i);
}

/* Rounded as in training: to the compute dtype, after softcap again. */
template <typename T>
static __global__ void finish_logits_kernel(real<T> *x, int64_t n, real<T> cap)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    real<T> v = rounded<T>(x[i]);
    x[i] = cap > 0 ? rounded<T>(cap * hyperbolic_tangent(v / cap)) : v;
}

template <typename T> static void finish_logits(cuda_queue *q, void *x, int64_t n, double cap)
{
    finish_logits_kernel<T>
        <<<(unsigned)ceil_div(n, 256), 256, 0, q->stream>>>((real<T> *)x, n, (real<T>)cap);
}

static void generate(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W];
    int64_t size = mt_dtype_size(x->dtype), vocab = w->rows;
    mt_dtype stat = x->dtype == MT_F64 ? MT_F64 : MT_F32;
    for (int64_t from = 0; from < c->batch.n_logit_rows; from += GENERATE_ROWS) {
        int64_t rows = c->batch.n_logit_rows - from;
        rows = rows < GENERATE_ROWS ? rows : GENERATE_ROWS;
        pick_args a = {};
        a.x = (const char *)x->data;
        a.to = (char *)c->work;
        a.rows = c->batch.logit_rows + from;
        a.x_bytes = x->ld * size;
        a.row_bytes = x->cols * size;
        a.x_rows = x->rows;
        a.fault = d->fault;
        a.claim = d->fault_claim;
        pick_kernel<<<(unsigned)rows, 128, 0, q->stream>>>(a);
        const mt_tensor picked = { c->work, rows, x->cols, x->cols, x->dtype, 0 };
        const mt_tensor all = { c->batch.logits, c->batch.n_logit_rows, vocab, vocab, stat, 0 };
        const mt_tensor logits = rows_of(&all, from, rows);
        cuda_gemm(q, cuda_product_of(&picked, false, w, true, &logits, 0));
        FOR_DTYPE(x->dtype, finish_logits, q, logits.data, rows * vocab,
                  ((const mt_xent_attr *)c->attr)->softcap);
    }
}

/* ---- the operation --------------------------------------------------------------------------- */

static void xent_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    if (generates(c))
        generate(d, q, c);
    else
        train_or_eval(d, q, c);
}

struct hand_down {
    template <typename R> __device__ void operator()(const R *in, R *out) const
    {
        out[0] = in[0];
    }
};

/* Backward only hands down what forward has formed. */
static void xent_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    const mt_tensor *in[] = { &c->aux[0] }, *out[] = { &c->d_in[IN_X] };
    map<1, 1>(q, in, out, c->d_accumulate >> IN_X & 1u, hand_down());
}

static int64_t xent_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W];
    int64_t size = mt_dtype_size(x->dtype), n = c->batch.n_logit_rows;
    (void)d;
    if (backward)
        return 0;
    if (generates(c))
        return (n < GENERATE_ROWS ? n : GENERATE_ROWS) * x->cols * size;
    return chunk_rows(c) * logit_ld(w->rows) * size;
}

const cuda_op cuda_op_linear_cross_entropy = { xent_forward, xent_backward, xent_workspace };
