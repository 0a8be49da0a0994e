/* SPDX-License-Identifier: Apache-2.0
 *
 * router: a warp picks each token's experts; then the T * k rows are ordered by expert and token.
 * The order is made of counts: of each expert in each chunk of tokens, summed up in order.
 */
#include "../common.cuh"

enum { IN_LOGITS = 0, IN_BIAS = 1, CHUNK = 256, MOST_EXPERTS = 3072 };

struct route {
    const void *logits, *bias; /* [T, E], [E] or NULL */
    void *weights;             /* [T, k] */
    int32_t *experts, *slots;  /* [T, k] */
    int32_t *offsets;          /* [E + 1] */
    int32_t *counts;           /* [chunks, E]; then where the chunk's rows of the expert begin */
    const void *d_weights;     /* backward */
    void *d_logits;
    int64_t ld_logits, ld_weights, ld_experts, ld_slots, ld_d_weights, ld_d_logits;
    int64_t tokens;
    int n;            /* experts */
    bool narrow_bias; /* BF16, whatever the logits are */
    bool add;
    mt_router_attr attr;
};

template <typename R> static __device__ __forceinline__ R infinity(void)
{
    return (R)__int_as_float(0x7f800000);
}

/* Index of the largest of x[0..n), the lowest on a tie; NaNs never. */
template <typename R> static __device__ __forceinline__ int largest(const R *x, int n)
{
    int lane = (int)threadIdx.x & 31, at = n;
    R best = -infinity<R>();
    for (int i = lane; i < n; i += 32)
        if (x[i] > best || (x[i] == best && at == n)) {
            best = x[i];
            at = i;
        }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
        R other = __shfl_xor_sync(0xffffffffu, best, i);
        int where = __shfl_xor_sync(0xffffffffu, at, i);
        if (where < n && (at == n || other > best || (other == best && where < at))) {
            best = other;
            at = where;
        }
    }
    return at < n ? at : 0;
}

/* p[0..E): the probabilities of the token whose logits these are. */
template <typename L, typename R>
static __device__ void probabilities(const route &r, int64_t token, R *p)
{
    const L *logit = static_cast<const L *>(r.logits) + token * r.ld_logits;
    int lane = (int)threadIdx.x & 31;
    if (r.attr.scoring == MT_ROUTER_SIGMOID) {
        for (int e = lane; e < r.n; e += 32)
            p[e] = R(1) / (R(1) + exponential(-(R)to_real(logit[e])));
        __syncwarp();
        return;
    }
    R most = -infinity<R>(), sum = 0;
    for (int e = lane; e < r.n; e += 32)
        most = (R)to_real(logit[e]) > most ? (R)to_real(logit[e]) : most;
    most = warp_max(most);
    for (int e = lane; e < r.n; e += 32) {
        p[e] = exponential((R)to_real(logit[e]) - most);
        sum += p[e];
    }
    sum = warp_sum(sum);
    for (int e = lane; e < r.n; e += 32)
        p[e] /= sum;
    __syncwarp();
}

/* Leaves of `score` the best groups; `group` has room for their scores. */
template <typename R> static __device__ void keep_groups(const route &r, R *score, R *group)
{
    int lane = (int)threadIdx.x & 31, size = r.n / r.attr.groups;
    for (int g = lane; g < r.attr.groups; g += 32) {
        R first = -infinity<R>(), second = first;
        for (int i = 0; i < size; i++) {
            R s = score[g * size + i];
            if (s > first) {
                second = first;
                first = s;
            } else if (s > second) {
                second = s;
            }
        }
        group[g] = r.attr.group_score == MT_GROUP_MAX ? first : first + second;
    }
    __syncwarp();
    for (int i = 0; i < r.attr.top_groups; i++) {
        int g = largest(group, r.attr.groups);
        __syncwarp();
        if (lane == 0)
            group[g] = (R)__int_as_float(0x7fc00000); /* taken */
        __syncwarp();
    }
    for (int e = lane; e < r.n; e += 32)
        if (group[e / size] == group[e / size])
            score[e] = -infinity<R>();
    __syncwarp();
}

template <typename R> static __device__ __forceinline__ R bias_of(const route &r, int e)
{
    return r.narrow_bias ? (R)to_real(static_cast<const bf16 *>(r.bias)[e])
                         : static_cast<const R *>(r.bias)[e];
}

template <typename L, typename R> static __global__ void pick_kernel(route r)
{
    extern __shared__ __align__(16) unsigned char shared[];
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int64_t token = (int64_t)blockIdx.x * (blockDim.x >> 5) + warp;
    if (token >= r.tokens)
        return;
    R *p = reinterpret_cast<R *>(shared) + (int64_t)warp * 3 * r.n, *score = p + r.n;
    probabilities<L, R>(r, token, p);
    for (int e = lane; e < r.n; e += 32)
        score[e] = r.bias ? p[e] + bias_of<R>(r, e) : p[e];
    __syncwarp();
    if (r.attr.groups > 1)
        keep_groups(r, score, score + r.n);

    R sum = 0, *weight = static_cast<R *>(r.weights) + token * r.ld_weights;
    int32_t *expert = r.experts + token * r.ld_experts;
    for (int j = 0; j < r.attr.top_k; j++) {
        int e = largest(score, r.n);
        __syncwarp();
        if (lane == 0) {
            expert[j] = e;
            weight[j] = p[e];
            score[e] = (R)__int_as_float(0x7fc00000); /* picked */
        }
        sum += p[e];
        __syncwarp();
    }
    R factor = (R)r.attr.scale;
    for (int j = lane; j < r.attr.top_k; j += 32)
        weight[j] = (r.attr.renormalise ? weight[j] / (sum + R(1e-20)) : weight[j]) * factor;
}

/* A thread an expert goes through the picks of a chunk of tokens in order. Counts them, or gives
 * each its slot. */
template <bool SLOTS> static __global__ void order_kernel(route r)
{
    __shared__ int32_t picked[2048];
    int e = (int)(blockIdx.y * blockDim.x + threadIdx.x), k = r.attr.top_k;
    int64_t from = (int64_t)blockIdx.x * CHUNK;
    int picks = (int)(r.tokens - from < CHUNK ? r.tokens - from : CHUNK) * k;
    int32_t *count = r.counts + (int64_t)blockIdx.x * r.n + e;
    int32_t next = SLOTS && e < r.n ? *count : 0;
    for (int base = 0; base < picks; base += 2048) {
        int here = picks - base < 2048 ? picks - base : 2048;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < here; i += (int)blockDim.x)
            picked[i] = r.experts[(from + (base + i) / k) * r.ld_experts + (base + i) % k];
        __syncthreads();
        if (e < r.n)
            for (int i = 0; i < here; i++)
                if (picked[i] == e) {
                    if (SLOTS)
                        r.slots[(from + (base + i) / k) * r.ld_slots + (base + i) % k] = next;
                    next++;
                }
    }
    if (!SLOTS && e < r.n)
        *count = next;
}

/* One warp: x[0..n] with x[i] the number at i - 1 become sums of all before. */
static __device__ void add_up(int32_t *x, int n)
{
    int lane = (int)threadIdx.x & 31, before = 0;
    for (int base = 0; base < n; base += 32) {
        int i = base + lane, sum = i < n ? x[i + 1] : 0;
#pragma unroll
        for (int k = 1; k < 32; k *= 2) {
            int y = __shfl_up_sync(0xffffffffu, sum, k);
            sum += lane >= k ? y : 0;
        }
        if (i < n)
            x[i + 1] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0)
        x[0] = 0;
}

/* One block: counts become first slots, and the experts' offsets. */
static __global__ void offsets_kernel(route r, int chunks)
{
    for (int e = (int)threadIdx.x; e < r.n; e += (int)blockDim.x) {
        int32_t sum = 0;
        for (int i = 0; i < chunks; i++) {
            int32_t *count = r.counts + (int64_t)i * r.n + e, n = *count;
            *count = sum;
            sum += n;
        }
        r.offsets[e + 1] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32)
        add_up(r.offsets, r.n);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < (int64_t)chunks * r.n; i += blockDim.x)
        r.counts[i] += r.offsets[i % r.n];
}

/* A warp a token. With w_j = scale p_j: dp_j = scale dw_j. Divided by their sum S, q_j = p_j / S:
 * dp_j = scale (dw_j - sum_i dw_i q_i) / S, for a softmax at once dl_j = scale q_j (dw_j - sum). */
template <typename L, typename R> static __global__ void unpick_kernel(route r)
{
    extern __shared__ __align__(16) unsigned char shared[];
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, k = r.attr.top_k;
    int64_t token = (int64_t)blockIdx.x * (blockDim.x >> 5) + warp;
    if (token >= r.tokens)
        return;
    R *p = reinterpret_cast<R *>(shared) + (int64_t)warp * 3 * r.n, *d = p + r.n;
    const R *dw = static_cast<const R *>(r.d_weights) + token * r.ld_d_weights;
    const int32_t *expert = r.experts + token * r.ld_experts;
    bool softmax = r.attr.scoring == MT_ROUTER_SOFTMAX, renormalise = r.attr.renormalise;
    probabilities<L, R>(r, token, p);
    for (int e = lane; e < r.n; e += 32)
        d[e] = 0;
    __syncwarp();

    R sum = 0, mean = 0, all = 0, scale = (R)r.attr.scale;
    for (int j = 0; j < k; j++)
        sum += p[expert[j]];
    sum += R(1e-20);
    for (int j = 0; j < k; j++) {
        mean += dw[j] * p[expert[j]] / sum;
        all += scale * dw[j] * p[expert[j]];
    }
    for (int j = lane; j < k; j += 32) {
        R x = p[expert[j]];
        if (renormalise)
            d[expert[j]] = scale * (dw[j] - mean) / sum * (softmax ? x : x * (R(1) - x));
        else
            d[expert[j]] = scale * dw[j] * (softmax ? x : x * (R(1) - x));
    }
    __syncwarp();
    L *out = static_cast<L *>(r.d_logits) + token * r.ld_d_logits;
    for (int e = lane; e < r.n; e += 32) {
        R g = d[e] - (softmax && !renormalise ? p[e] * all : R(0));
        out[e] = from_real<L>((real<L>)(r.add ? (R)to_real(out[e]) + g : g));
    }
}

/* Calls fn<logits' type, statistics' type>. */
#define FOR_LOGITS(dtype, statistics, fn, ...)                                                     \
    do {                                                                                           \
        if ((statistics) == MT_F64)                                                                \
            fn<double, double>(__VA_ARGS__);                                                       \
        else if ((dtype) == MT_BF16)                                                               \
            fn<bf16, float>(__VA_ARGS__);                                                          \
        else                                                                                       \
            fn<float, float>(__VA_ARGS__);                                                         \
    } while (0)

struct warps {
    unsigned blocks, threads;
    size_t bytes; /* shared */
};

static warps warps_for(const route &r, size_t size)
{
    unsigned n = r.n <= 256 ? 4 : 1;
    warps w = { (unsigned)ceil_div(r.tokens, n), n * 32, n * 3 * (size_t)r.n * size };
    return w;
}

template <typename L, typename R> static void pick(cuda_queue *q, const route &r)
{
    warps w = warps_for(r, sizeof(R));
    if (w.bytes <= 48 * 1024 ||
        cuda_ok(q->device,
                cudaFuncSetAttribute(pick_kernel<L, R>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)w.bytes),
                "router"))
        pick_kernel<L, R><<<w.blocks, w.threads, w.bytes, q->stream>>>(r);
}

template <typename L, typename R> static void unpick(cuda_queue *q, const route &r)
{
    warps w = warps_for(r, sizeof(R));
    if (w.bytes <= 48 * 1024 ||
        cuda_ok(q->device,
                cudaFuncSetAttribute(unpick_kernel<L, R>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)w.bytes),
                "router"))
        unpick_kernel<L, R><<<w.blocks, w.threads, w.bytes, q->stream>>>(r);
}

static bool route_of(cuda_device *d, const mt_op_call *c, route *ret)
{
    const mt_tensor *logits = &c->in[IN_LOGITS], *experts = &c->aux[0];
    route r = {};
    r.attr = *static_cast<const mt_router_attr *>(c->attr);
    r.logits = logits->data;
    r.ld_logits = logits->ld;
    r.n = (int)logits->cols;
    r.tokens = logits->rows;
    r.experts = static_cast<int32_t *>(experts->data);
    r.ld_experts = experts->ld;
    *ret = r;
    if (r.n > MOST_EXPERTS)
        cuda_fail(d, MT_ERR_UNSUPPORTED, "a router of %d experts; the CUDA backend takes %d", r.n,
                  (int)MOST_EXPERTS);
    return r.n <= MOST_EXPERTS && r.tokens > 0;
}

static void router_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    route r;
    if (!route_of(d, c, &r))
        return;
    if (c->n_in > IN_BIAS && c->in[IN_BIAS].data) {
        r.bias = c->in[IN_BIAS].data;
        r.narrow_bias = c->in[IN_BIAS].dtype == MT_BF16;
    }
    r.weights = c->out[0].data;
    r.ld_weights = c->out[0].ld;
    r.slots = static_cast<int32_t *>(c->out[1].data);
    r.ld_slots = c->out[1].ld;
    r.offsets = static_cast<int32_t *>(c->out[2].data);
    r.counts = static_cast<int32_t *>(c->work);
    FOR_LOGITS(c->in[IN_LOGITS].dtype, c->out[0].dtype, pick, q, r);

    unsigned chunks = (unsigned)ceil_div(r.tokens, CHUNK);
    unsigned threads = r.n <= 64 ? 64 : r.n <= 128 ? 128 : 256;
    dim3 grid(chunks, (unsigned)ceil_div(r.n, threads));
    order_kernel<false><<<grid, threads, 0, q->stream>>>(r);
    offsets_kernel<<<1, 1024, 0, q->stream>>>(r, (int)chunks);
    order_kernel<true><<<grid, threads, 0, q->stream>>>(r);
}

static void router_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    route r;
    if (!c->d_in[IN_LOGITS].data || !route_of(d, c, &r))
        return;
    r.d_weights = c->d_out[0].data;
    r.ld_d_weights = c->d_out[0].ld;
    r.d_logits = c->d_in[IN_LOGITS].data;
    r.ld_d_logits = c->d_in[IN_LOGITS].ld;
    r.add = c->d_accumulate & 1u;
    FOR_LOGITS(c->in[IN_LOGITS].dtype, c->d_out[0].dtype, unpick, q, r);
}

static int64_t router_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    (void)d;
    const mt_tensor *logits = &c->in[IN_LOGITS];
    return backward ? 0 : ceil_div(logits->rows, CHUNK) * logits->cols * (int64_t)sizeof(int32_t);
}

const cuda_op cuda_op_router = { router_forward, router_backward, router_workspace };
