/* SPDX-License-Identifier: Apache-2.0
 *
 * balance_loss: counts and probabilities of experts over parts of the micro-batch, which are its
 * documents or all of it. Backward counts anew: it costs little, and nothing is saved. Over all
 * layers forward adds both to the tally instead, of which backward takes the counts.
 */
#include "../common.cuh"

enum { BALANCE_THREADS = 256, IN_LOGITS = 0, IN_SLOTS = 1, IN_OFFSETS = 2 };

/* Sums of probabilities: a warp's width of experts, and so many rows at a time, a block. */
enum { SUM_WIDTH = 32, SUM_HEIGHT = 8, SUM_TOKENS = 128 };

struct balance_args {
    const void *logits;
    const int32_t *slots, *offsets, *targets, *doc_starts;
    void *d; /* like logits; NULL in forward */
    void *loss;
    double *share; /* [parts, experts] what a probability adds to the loss */
    double *row;   /* [tokens]; two of them over all layers */
    double *tally; /* over all layers: counts and sums of probabilities [experts], tokens */
    double *sums;  /* and of this layer: probabilities [chunks of SUM_TOKENS, experts] */
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

/* What one row of an expert and one probability add to the loss of n tokens. */
static __device__ double factor_of(const balance_args &a, double n, double targets)
{
    double norm = a.by_document ? (double)a.top_k : 1;
    return n > 0 ? a.coef * a.experts * targets / (norm * n * n) : 0;
}

/* Whole numbers are counted, so that the order does not matter: rows of each expert, then the
 * number of targets. `rows`: not of targets alone. */
static __device__ void count_part(const balance_args &a, int64_t first, int64_t end, bool rows,
                                  int32_t *count)
{
    for (int e = (int)threadIdx.x; e <= a.experts; e += BALANCE_THREADS)
        count[e] = 0;
    __syncthreads();
    for (int64_t t = first + threadIdx.x; t < end; t += BALANCE_THREADS) {
        if (a.targets[t] >= 0)
            atomicAdd(&count[a.experts], 1);
        for (int j = 0; rows && j < a.top_k; j++)
            atomicAdd(&count[expert_of(a, a.slots[t * a.slots_ld + j])], 1);
    }
    __syncthreads();
}

/* A block a part. */
static __global__ void count_kernel(balance_args a)
{
    extern __shared__ int32_t count[]; /* [experts + 1] */
    int64_t first = part_start(a, blockIdx.x), end = part_start(a, (int64_t)blockIdx.x + 1);
    count_part(a, first, end, true, count);
    double factor = factor_of(a, (double)(end - first), count[a.experts]);
    for (int e = (int)threadIdx.x; e < a.experts; e += BALANCE_THREADS)
        a.share[(int64_t)blockIdx.x * a.experts + e] = factor * count[e];
}

/* The same from the tally. */
static __global__ void count_tally_kernel(balance_args a)
{
    extern __shared__ int32_t count[];
    count_part(a, 0, a.tokens, false, count);
    double factor = factor_of(a, a.tally[2 * a.experts], count[a.experts]);
    for (int e = (int)threadIdx.x; e < a.experts; e += BALANCE_THREADS)
        a.share[e] = factor * a.tally[e];
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
    R top = warp_largest(x, a.experts);
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

/* ---- over all layers ------------------------------------------------------------------------- */

/* A warp a token: its largest logit, and what makes its exponentials probabilities. */
template <typename T>
static __global__ void __launch_bounds__(BALANCE_THREADS) scale_kernel(balance_args a)
{
    typedef real<T> R;
    int lane = (int)(threadIdx.x & 31u);
    int64_t t = ((int64_t)blockIdx.x * BALANCE_THREADS + threadIdx.x) / 32;
    if (t >= a.tokens)
        return; /* a whole warp */
    const T *x = static_cast<const T *>(a.logits) + t * a.logits_ld;
    R top = warp_largest(x, a.experts);
    double sum = 0;
    for (int e = lane; e < a.experts; e += 32)
        sum += (double)exponential(to_real(x[e]) - top);
    sum = warp_sum(sum);
    if (lane == 0) {
        a.row[2 * t] = (double)top;
        a.row[2 * t + 1] = 1 / sum;
    }
}

/* A block sums the probabilities of SUM_WIDTH experts over SUM_TOKENS tokens. */
template <typename T>
static __global__ void __launch_bounds__(SUM_WIDTH *SUM_HEIGHT) probability_kernel(balance_args a)
{
    typedef real<T> R;
    __shared__ double part[SUM_HEIGHT][SUM_WIDTH];
    int64_t e = (int64_t)blockIdx.x * SUM_WIDTH + threadIdx.x;
    int64_t first = (int64_t)blockIdx.y * SUM_TOKENS, end = min(first + SUM_TOKENS, a.tokens);
    const T *x = static_cast<const T *>(a.logits);
    double sum = 0;
    for (int64_t t = first + threadIdx.y; t < end && e < a.experts; t += SUM_HEIGHT)
        sum += (double)exponential(to_real(x[t * a.logits_ld + e]) - (R)a.row[2 * t]) *
               a.row[2 * t + 1];
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || e >= a.experts)
        return;
    for (int i = 1; i < SUM_HEIGHT; i++)
        sum += part[i][threadIdx.x];
    a.sums[blockIdx.y * (int64_t)a.experts + e] = sum;
}

/* One block adds this layer to the tally; the loss is what that changes. */
template <typename R> static __global__ void tally_kernel(balance_args a)
{
    extern __shared__ int32_t count[];
    __shared__ double shared[32];
    double before = 0, after = 0, tokens = a.tally[2 * a.experts];
    count_part(a, 0, a.tokens, true, count);
    for (int e = (int)threadIdx.x; e < a.experts; e += BALANCE_THREADS) {
        double rows = a.tally[e], scores = a.tally[a.experts + e];
        before += rows * scores;
        for (int64_t i = 0; i < ceil_div(a.tokens, SUM_TOKENS); i++)
            scores += a.sums[i * a.experts + e];
        rows += count[e];
        after += rows * scores;
        a.tally[e] = rows;
        a.tally[a.experts + e] = scores;
    }
    before = block_sum(before, shared); /* all have read the number of tokens when it returns */
    after = block_sum(after, shared);
    if (threadIdx.x == 0) {
        double n = tokens + (double)a.tokens, targets = count[a.experts];
        a.tally[2 * a.experts] = n;
        *static_cast<R *>(a.loss) =
            (R)(factor_of(a, n, targets) * after - factor_of(a, tokens, targets) * before);
    }
}

/* ---- the operation --------------------------------------------------------------------------- */

static bool over_layers(const mt_op_call *c)
{
    return static_cast<const mt_balance_attr *>(c->attr)->mode == MT_BALANCE_HF_ALL_LAYERS;
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
    a.tally = c->tally;
    a.share = static_cast<double *>(c->work);
    a.row = a.share + a.parts * a.experts;
    a.sums = a.row + 2 * a.tokens;
    return a;
}

static size_t count_bytes(const balance_args &a)
{
    return (size_t)(a.experts + 1) * sizeof(int32_t);
}

static void count_parts(cuda_queue *q, const balance_args &a)
{
    count_kernel<<<(unsigned)a.parts, BALANCE_THREADS, count_bytes(a), q->stream>>>(a);
}

template <typename T> static void forward(cuda_queue *q, const balance_args &a)
{
    unsigned blocks = (unsigned)ceil_div(a.tokens * 32, BALANCE_THREADS);
    row_kernel<T, false><<<blocks, BALANCE_THREADS, 0, q->stream>>>(a);
    total_kernel<real<T>><<<1, BALANCE_THREADS, 0, q->stream>>>(a);
}

template <typename T> static void forward_over_layers(cuda_queue *q, const balance_args &a)
{
    unsigned blocks = (unsigned)ceil_div(a.tokens * 32, BALANCE_THREADS);
    dim3 grid((unsigned)ceil_div(a.experts, SUM_WIDTH), (unsigned)ceil_div(a.tokens, SUM_TOKENS));
    scale_kernel<T><<<blocks, BALANCE_THREADS, 0, q->stream>>>(a);
    probability_kernel<T><<<grid, dim3(SUM_WIDTH, SUM_HEIGHT), 0, q->stream>>>(a);
    tally_kernel<real<T>><<<1, BALANCE_THREADS, count_bytes(a), q->stream>>>(a);
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
    if (over_layers(c)) {
        FOR_DTYPE(c->in[IN_LOGITS].dtype, forward_over_layers, q, a);
        return;
    }
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
    if (over_layers(c))
        count_tally_kernel<<<1, BALANCE_THREADS, count_bytes(a), q->stream>>>(a);
    else
        count_parts(q, a);
    FOR_DTYPE(c->in[IN_LOGITS].dtype, backward, q, a);
}

static int64_t balance_loss_work(const cuda_device *d, const mt_op_call *c, bool backward)
{
    balance_args a = args_of(c);
    int64_t numbers = a.parts * a.experts + a.tokens;
    (void)d;
    if (over_layers(c) && !backward)
        numbers += a.tokens + ceil_div(a.tokens, SUM_TOKENS) * a.experts;
    return numbers * (int64_t)sizeof(double);
}

const cuda_op cuda_op_balance_loss = { balance_loss_forward, balance_loss_backward,
                                       balance_loss_work };
