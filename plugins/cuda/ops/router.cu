/* SPDX-License-Identifier: Apache-2.0
 *
 * router: a warp picks each token's experts; then the T * k rows are ordered by expert and token.
 * The order is made of counts: of each expert in each chunk of picks, and in the chunk in each
 * warp's part of it, summed up in order.
 */
#include "../common.cuh"

enum { IN_LOGITS = 0, IN_BIAS = 1, MOST_EXPERTS = 3072 };
enum { ORDER_WARPS = 8, ORDER_ROUNDS = 8, CHUNK = ORDER_WARPS * ORDER_ROUNDS * 32 /* picks */ };

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
    R most = (R)warp_largest(logit, r.n), sum = 0;
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
    await_previous();
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

/* The pick at `index` of all, in the order of tokens: its expert. */
static __device__ __forceinline__ int32_t picked(const route &r, int64_t index)
{
    return r.experts[index / r.attr.top_k * r.ld_experts + index % r.attr.top_k];
}

/* A block counts how often each expert is picked in a chunk. */
static __global__ void __launch_bounds__(ORDER_WARPS * 32) count_kernel(route r)
{
    extern __shared__ __align__(16) unsigned char shared[];
    int32_t *count = reinterpret_cast<int32_t *>(shared);
    const int64_t from = (int64_t)blockIdx.x * CHUNK, all = r.tokens * r.attr.top_k;
    for (int e = (int)threadIdx.x; e < r.n; e += (int)blockDim.x)
        count[e] = 0;
    __syncthreads();
    await_previous();
    for (int64_t i = from + threadIdx.x; i < from + CHUNK && i < all; i += blockDim.x)
        atomicAdd(count + picked(r, i), 1);
    __syncthreads();
    for (int e = (int)threadIdx.x; e < r.n; e += (int)blockDim.x)
        r.counts[(int64_t)blockIdx.x * r.n + e] = count[e];
}

/* Gives the picks of a chunk their slots, from where its rows of each expert begin. A warp goes
 * through a part of the chunk in order; equal experts of 32 picks find each other. */
static __global__ void __launch_bounds__(ORDER_WARPS * 32) slot_kernel(route r)
{
    extern __shared__ __align__(16) unsigned char shared[];
    uint16_t *count = reinterpret_cast<uint16_t *>(shared); /* [ORDER_WARPS, n]: of parts */
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int64_t all = r.tokens * r.attr.top_k;
    const int64_t from = (int64_t)blockIdx.x * CHUNK + warp * ORDER_ROUNDS * 32 + lane;
    int32_t expert[ORDER_ROUNDS], place[ORDER_ROUNDS];
    for (int i = (int)threadIdx.x; i < ORDER_WARPS * r.n; i += (int)blockDim.x)
        count[i] = 0;
    __syncthreads();
    await_previous();
#pragma unroll
    for (int i = 0; i < ORDER_ROUNDS; i++)
        expert[i] = from + i * 32 < all ? picked(r, from + i * 32) : -1;
#pragma unroll
    for (int i = 0; i < ORDER_ROUNDS; i++) {
        unsigned same = __match_any_sync(0xffffffffu, expert[i]);
        int before = __popc(same & ((1u << lane) - 1u)), mine = warp * r.n + expert[i];
        place[i] = expert[i] < 0 ? 0 : count[mine] + before;
        __syncwarp();
        if (expert[i] >= 0 && before == 0)
            count[mine] = (uint16_t)(count[mine] + __popc(same));
        __syncwarp();
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < r.n; e += (int)blockDim.x) {
        int sum = 0;
        for (int w = 0; w < ORDER_WARPS; w++) {
            int n = count[w * r.n + e];
            count[w * r.n + e] = (uint16_t)sum;
            sum += n;
        }
    }
    __syncthreads();
    const int32_t *first = r.counts + (int64_t)blockIdx.x * r.n;
#pragma unroll
    for (int i = 0; i < ORDER_ROUNDS; i++)
        if (int64_t at = from + i * 32; expert[i] >= 0)
            r.slots[at / r.attr.top_k * r.ld_slots + at % r.attr.top_k] =
                first[expert[i]] + count[warp * r.n + expert[i]] + place[i];
}

/* What x becomes when the lanes' x are added up in order: of the lanes up to this one. */
static __device__ __forceinline__ int32_t sum_up_to(int32_t x)
{
    int lane = (int)threadIdx.x & 31;
#pragma unroll
    for (int k = 1; k < 32; k *= 2) {
        int32_t y = __shfl_up_sync(0xffffffffu, x, k);
        x += lane >= k ? y : 0;
    }
    return x;
}

/* One warp: x[0..n] with x[i] the number at i - 1 become sums of all before. */
static __device__ void add_up(int32_t *x, int n)
{
    int lane = (int)threadIdx.x & 31, before = 0;
    for (int base = 0; base < n; base += 32) {
        int i = base + lane, sum = sum_up_to(i < n ? x[i + 1] : 0);
        if (i < n)
            x[i + 1] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0)
        x[0] = 0;
}

/* One block: counts become first slots, and the experts' offsets. A warp an expert at a time. */
static __global__ void __launch_bounds__(1024) offsets_kernel(route r, int chunks)
{
    extern __shared__ __align__(16) unsigned char shared[];
    int32_t *offset = reinterpret_cast<int32_t *>(shared); /* [n + 1] */
    const int lane = (int)threadIdx.x & 31, warps = (int)blockDim.x >> 5;
    await_previous();
    for (int e = (int)threadIdx.x >> 5; e < r.n; e += warps) {
        int32_t before = 0;
        for (int base = 0; base < chunks; base += 32) {
            int32_t *count = r.counts + (int64_t)(base + lane) * r.n + e;
            int32_t n = base + lane < chunks ? *count : 0, sum = sum_up_to(n);
            if (base + lane < chunks)
                *count = before + sum - n;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0)
            offset[e + 1] = before;
    }
    __syncthreads();
    if (threadIdx.x < 32)
        add_up(offset, r.n);
    __syncthreads();
    for (int e = (int)threadIdx.x; e <= r.n; e += (int)blockDim.x)
        r.offsets[e] = offset[e];
    for (int i = (int)threadIdx.x; i < chunks * r.n; i += (int)blockDim.x)
        r.counts[i] += offset[i % r.n];
}

/* A warp a token. With w_j = scale p_j: dp_j = scale dw_j. Divided by their sum S, q_j = p_j / S:
 * dp_j = scale (dw_j - sum_i dw_i q_i) / S, for a softmax at once dl_j = scale q_j (dw_j - sum). */
template <typename L, typename R> static __global__ void unpick_kernel(route r)
{
    extern __shared__ __align__(16) unsigned char shared[];
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, k = r.attr.top_k;
    int64_t token = (int64_t)blockIdx.x * (blockDim.x >> 5) + warp;
    await_previous();
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
        launch_next(q, pick_kernel<L, R>, dim3(w.blocks), dim3(w.threads), w.bytes, r);
}

template <typename L, typename R> static void unpick(cuda_queue *q, const route &r)
{
    warps w = warps_for(r, sizeof(R));
    if (w.bytes <= 48 * 1024 ||
        cuda_ok(q->device,
                cudaFuncSetAttribute(unpick_kernel<L, R>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)w.bytes),
                "router"))
        launch_next(q, unpick_kernel<L, R>, dim3(w.blocks), dim3(w.threads), w.bytes, r);
}

static unsigned chunks_of(int64_t tokens, int64_t top_k)
{
    return (unsigned)ceil_div(tokens * top_k, CHUNK);
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

    unsigned chunks = chunks_of(r.tokens, r.attr.top_k);
    const dim3 block(ORDER_WARPS * 32);
    size_t bytes = (size_t)(r.n + 1) * sizeof(int32_t);
    launch_next(q, count_kernel, dim3(chunks), block, bytes, r);
    launch_next(q, offsets_kernel, dim3(1), dim3(1024), bytes, r, (int)chunks);
    launch_next(q, slot_kernel, dim3(chunks), block, ORDER_WARPS * (size_t)r.n * sizeof(uint16_t),
                r);
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
    int32_t top_k = static_cast<const mt_router_attr *>(c->attr)->top_k;
    return backward ? 0 : chunks_of(logits->rows, top_k) * logits->cols * (int64_t)sizeof(int32_t);
}

const cuda_op cuda_op_router = { router_forward, router_backward, router_workspace };
