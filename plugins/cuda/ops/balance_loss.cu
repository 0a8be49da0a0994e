/* SPDX-License-Identifier: Apache-2.0
 *
 * balance_loss: counts and probabilities of experts over parts of the micro-batch, which are its
 * documents or all of it. Backward counts anew: it costs little, and nothing is saved.
 */
#include "../common.cuh"

enum { BALANCE_THREADS = 256, IN_LOGITS = 0, IN_SLOTS = 1, IN_OFFSETS = 2 };

struct balance_args {
    const void *logits;
    const int32_t *slots, *offsets, *targets, *doc_starts;
    void *d; /* like logits; NULL in forward */
    void *loss;
    double *share; /* [parts, experts] what a probability adds to the loss */
    double *row;   /* [tokens] */
    int64_t logits_ld, slots_ld, d_ld, tokens, parts;
    int experts, top_k;
    bool by_document, add;
    double coef, loss_scale;
};

static __device__ __forceinline__ int64_t part_start(const balance_args &a, int64_t part)
{
    return a.by_document ? a.doc_starts[part] : part * a.tokens;
}

/* The expert that row `slot` belongs to: the last whose rows start at or before it. */
static __device__ __forceinline__ int expert_of(const balance_args &a, int32_t slot)
{
    int low = 0, high = a.experts;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (a.offsets[middle] <= slot)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A block a part; whole numbers are counted, so that the order does not matter. */
static __global__ void count_kernel(balance_args a)
{
    extern __shared__ int32_t count[]; /* [experts + 1]; the last: targets */
    int64_t first = part_start(a, blockIdx.x), end = part_start(a, (int64_t)blockIdx.x + 1);
    for (int e = (int)threadIdx.x; e <= a.experts; e += BALANCE_THREADS)
        count[e] = 0;
    __syncthreads();
    for (int64_t t = first + threadIdx.x; t < end; t += BALANCE_THREADS) {
        if (a.targets[t] >= 0)
            atomicAdd(&count[a.experts], 1);
        for (int j = 0; j < a.top_k; j++)
            atomicAdd(&count[expert_of(a, a.slots[t * a.slots_ld + j])], 1);
    }
    __syncthreads();
    double n = (double)(end - first), norm = a.by_document ? (double)a.top_k : 1;
    double factor = n > 0 ? a.coef * a.experts * (double)count[a.experts] / (norm * n * n) : 0;
    for (int e = (int)threadIdx.x; e < a.experts; e += BALANCE_THREADS)
        a.share[(int64_t)blockIdx.x * a.experts + e] = factor * count[e];
}

static __device__ int64_t part_of(const balance_args &a, int64_t t)
{
    int64_t low = 0, high = a.parts;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (part_start(a, middle) <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A warp a token; T: how logits and their gradient are stored. */
template <typename T, bool BACKWARD>
static __global__ void __launch_bounds__(BALANCE_THREADS) row_kernel(balance_args a)
{
    typedef real<T> R;
    int lane = (int)(threadIdx.x & 31u);
    int64_t t = ((int64_t)blockIdx.x * BALANCE_THREADS + threadIdx.x) / 32;
    if (t >= a.tokens)
        return; /* a whole warp */
    const T *x = static_cast<const T *>(a.logits) + t * a.logits_ld;
    const double *share = a.share + part_of(a, t) * a.experts;
    R top = -INFINITY;
    for (int e = lane; e < a.experts; e += 32)
        top = max(top, to_real(x[e]));
    top = warp_max(top);
    double sum = 0, loss = 0;
    for (int e = lane; e < a.experts; e += 32) {
        double p = (double)exponential(to_real(x[e]) - top);
        sum += p;
        loss += share[e] * p;
    }
    sum = warp_sum(sum);
    loss = warp_sum(loss) / sum;
    if (!BACKWARD) {
        if (lane == 0)
            a.row[t] = loss;
        return;
    }
    T *d = static_cast<T *>(a.d) + t * a.d_ld;
    for (int e = lane; e < a.experts; e += 32) {
        double p = (double)exponential(to_real(x[e]) - top) / sum;
        double by = a.loss_scale * p * (share[e] - loss);
        d[e] = from_real<T>((R)(by + (a.add ? (double)to_real(d[e]) : 0)));
    }
}

template <typename R> static __global__ void total_kernel(balance_args a)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t t = threadIdx.x; t < a.tokens; t += BALANCE_THREADS)
        sum += a.row[t];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *static_cast<R *>(a.loss) = (R)sum;
}

static balance_args args_of(const mt_op_call *c)
{
    const mt_balance_attr *attr = static_cast<const mt_balance_attr *>(c->attr);
    const mt_tensor *logits = &c->in[IN_LOGITS];
    balance_args a = {};
    a.logits = logits->data;
    a.logits_ld = logits->ld;
    a.tokens = logits->rows;
    a.experts = (int)logits->cols;
    a.slots = static_cast<const int32_t *>(c->in[IN_SLOTS].data);
    a.slots_ld = c->in[IN_SLOTS].ld;
    a.top_k = (int)c->in[IN_SLOTS].cols;
    a.offsets = static_cast<const int32_t *>(c->in[IN_OFFSETS].data);
    a.targets = c->batch.targets;
    a.doc_starts = c->batch.doc_starts;
    a.by_document = attr->mode == MT_BALANCE_DEEPSEEK_SEQ;
    a.parts = a.by_document ? c->batch.documents : 1;
    a.coef = attr->coef;
    a.loss_scale = c->batch.loss_scale;
    a.share = static_cast<double *>(c->work);
    a.row = a.share + a.parts * a.experts;
    return a;
}

static void count_parts(cuda_queue *q, const balance_args &a)
{
    size_t shared = (size_t)(a.experts + 1) * sizeof(int32_t);
    count_kernel<<<(unsigned)a.parts, BALANCE_THREADS, shared, q->stream>>>(a);
}

template <typename T> static void forward(cuda_queue *q, const balance_args &a)
{
    unsigned blocks = (unsigned)ceil_div(a.tokens * 32, BALANCE_THREADS);
    row_kernel<T, false><<<blocks, BALANCE_THREADS, 0, q->stream>>>(a);
    total_kernel<real<T>><<<1, BALANCE_THREADS, 0, q->stream>>>(a);
}

template <typename T> static void backward(cuda_queue *q, const balance_args &a)
{
    unsigned blocks = (unsigned)ceil_div(a.tokens * 32, BALANCE_THREADS);
    row_kernel<T, true><<<blocks, BALANCE_THREADS, 0, q->stream>>>(a);
}

static bool generates(const mt_op_call *c)
{
    return c->pass == MT_PASS_PREFILL || c->pass == MT_PASS_DECODE;
}

static void balance_loss_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    balance_args a = args_of(c);
    (void)d;
    if (generates(c) || a.tokens == 0)
        return;
    a.loss = c->out[0].data;
    count_parts(q, a);
    FOR_DTYPE(c->in[IN_LOGITS].dtype, forward, q, a);
}

static void balance_loss_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    balance_args a = args_of(c);
    (void)d;
    if (a.tokens == 0 || !c->d_in[IN_LOGITS].data)
        return;
    a.d = c->d_in[IN_LOGITS].data;
    a.d_ld = c->d_in[IN_LOGITS].ld;
    a.add = c->d_accumulate >> IN_LOGITS & 1u;
    count_parts(q, a);
    FOR_DTYPE(c->in[IN_LOGITS].dtype, backward, q, a);
}

static int64_t balance_loss_work(const cuda_device *d, const mt_op_call *c, bool backward)
{
    balance_args a = args_of(c);
    (void)d;
    (void)backward;
    return (a.parts * a.experts + a.tokens) * (int64_t)sizeof(double);
}

const cuda_op cuda_op_balance_loss = { balance_loss_forward, balance_loss_backward,
                                       balance_loss_work };
