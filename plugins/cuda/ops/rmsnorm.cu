/* SPDX-License-Identifier: Apache-2.0
 *
 * rmsnorm: each group of n columns is normalised by a team of threads: a warp, or for wide rows a
 * whole block. Backward walks its groups in a fixed order and keeps the weight's gradient in shared
 * memory; a second kernel adds what the blocks found, in their order.
 */
#include "../common.cuh"

enum {
    NORM_THREADS = 128,     /* of a block of warps, each a team */
    NORM_WARP_COLS = 1024,  /* groups up to this width are a warp's */
    NORM_BACK_BLOCKS = 528, /* of backward; a constant, so that sums do not depend on the device */
    NORM_REDUCE_SLICES = 32 /* enough of a few hundred blocks' sums under way at once */
};

struct norm_args {
    const void *x, *w, *dy;
    void *y, *dx;
    void *r;    /* [rows, heads], statistics dtype */
    void *part; /* [blocks, n] */
    int64_t x_ld, y_ld, dy_ld, dx_ld, r_ld;
    int64_t groups; /* rows * heads */
    int64_t n;
    int heads;
    mt_norm_variant variant;
    double eps;
    bool add;
};

/* Sum over a team: a warp, or the block. */
template <bool WIDE, typename R> static __device__ __forceinline__ R team_sum(R x, R *shared)
{
    return WIDE ? block_sum(x, shared) : warp_sum(x);
}

/* The columns of a group that a thread has, V at a time: K pieces in registers, so that all loads
 * are under way at once and memory is read once; with K = 0 any number, read again when needed. */
template <typename T, int V, int K, int TEAM> struct columns {
    pack<T, V> piece[K > 0 ? K : 1];

    __device__ __forceinline__ void load(const T *p, int lane, int64_t n)
    {
#pragma unroll
        for (int i = 0; i < (K > 0 ? K : 1); i++) {
            int64_t j = (int64_t)(lane + i * TEAM) * V;
            if (K > 0 && j < n)
                piece[i] = *reinterpret_cast<const pack<T, V> *>(p + j);
        }
    }

    /* Piece i, which starts at column j. */
    __device__ __forceinline__ void get(const T *p, int i, int64_t j, real<T> *ret) const
    {
        if constexpr (K > 0) {
#pragma unroll
            for (int k = 0; k < V; k++)
                ret[k] = to_real(piece[i].x[k]);
        } else {
            load_vector<T, V>(p + j, ret);
        }
    }
};

/* Runs the body for every piece of a thread: number i, first column j. */
#define EACH_PIECE(n)                                                                              \
    _Pragma("unroll") for (int i = 0; K == 0 || i < K;                                             \
                           i++) if (int64_t j = (int64_t)(lane + i * TEAM) * V; j >= (n))          \
    {                                                                                              \
        if (K == 0)                                                                                \
            break;                                                                                 \
    }                                                                                              \
    else

template <typename T, int V, int THREADS, bool WIDE, int K>
static __global__ void __launch_bounds__(THREADS) norm_kernel(norm_args a)
{
    typedef real<T> R;
    __shared__ R shared[32];
    const int TEAM = WIDE ? THREADS : 32, teams = THREADS / TEAM;
    int lane = (int)threadIdx.x % TEAM;
    int64_t group = (int64_t)blockIdx.x * teams + threadIdx.x / TEAM;
    if (group >= a.groups)
        return; /* a whole team */
    int64_t row = group / a.heads, head = group % a.heads;
    const T *x = static_cast<const T *>(a.x) + row * a.x_ld + head * a.n;
    const T *w = static_cast<const T *>(a.w);
    T *y = static_cast<T *>(a.y) + row * a.y_ld + head * a.n;
    columns<T, V, K, TEAM> xs, ws;
    xs.load(x, lane, a.n);
    ws.load(w, lane, a.n);
    R sum = 0;
    EACH_PIECE(a.n)
    {
        R v[V];
        xs.get(x, i, j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += v[k] * v[k];
    }
    sum = team_sum<WIDE>(sum, shared);
    R r = (R)(1.0 / sqrt((double)sum / (double)a.n + a.eps));
    if (lane == 0 && a.r)
        static_cast<R *>(a.r)[row * a.r_ld + head] = r;
    EACH_PIECE(a.n)
    {
        R v[V], weight[V];
        xs.get(x, i, j, v);
        ws.get(w, i, j, weight);
#pragma unroll
        for (int k = 0; k < V; k++) {
            R normed = v[k] * r;
            if (a.variant == MT_NORM_ROUND_THEN_SCALE)
                normed = rounded<T>(normed);
            v[k] = (a.variant == MT_NORM_ONE_PLUS ? weight[k] + 1 : weight[k]) * normed;
        }
        put_vector<T, V>(y + j, v, false);
    }
}

/* With xh = x r and g = dy w': dx = r (g - xh mean(g xh)), dw = sum over rows of dy xh. A team adds
 * up dw of its groups, in registers (K > 0) or in shared memory. */
template <typename T, int V, int THREADS, bool WIDE, int K>
static __global__ void __launch_bounds__(THREADS, 512 / THREADS) norm_back_kernel(norm_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ R shared[32];
    const int TEAM = WIDE ? THREADS : 32, teams = THREADS / TEAM;
    int lane = (int)threadIdx.x % TEAM, own = (int)threadIdx.x / TEAM;
    R *all = reinterpret_cast<R *>(dynamic), *dw = all + own * a.n, one = 0;
    R sums[K > 0 ? K : 1][V] = {};
    const T *w = static_cast<const T *>(a.w);
    if (a.variant == MT_NORM_ONE_PLUS)
        one = 1;
    columns<T, V, K, TEAM> xs, ds;
    if (a.part && K == 0)
        EACH_PIECE(a.n)
        {
            for (int k = 0; k < V; k++)
                dw[j + k] = 0;
        }
    for (int64_t group = (int64_t)blockIdx.x * teams + own; group < a.groups;
         group += (int64_t)gridDim.x * teams) {
        int64_t row = group / a.heads, head = group % a.heads;
        const T *x = static_cast<const T *>(a.x) + row * a.x_ld + head * a.n;
        const T *dy = static_cast<const T *>(a.dy) + row * a.dy_ld + head * a.n;
        xs.load(x, lane, a.n);
        ds.load(dy, lane, a.n);
        R r = static_cast<const R *>(a.r)[row * a.r_ld + head], dot = 0;
        EACH_PIECE(a.n)
        {
            R v[V], d[V], weight[V];
            xs.get(x, i, j, v);
            ds.get(dy, i, j, d);
            load_vector<T, V>(w + j, weight);
#pragma unroll
            for (int k = 0; k < V; k++) {
                R term = d[k] * (v[k] * r);
                dot += (weight[k] + one) * term;
                if (K > 0)
                    sums[K > 0 ? i : 0][k] += term;
                else if (a.part)
                    dw[j + k] += term;
            }
        }
        if (!a.dx)
            continue;
        R mean = team_sum<WIDE>(dot, shared) / (R)a.n;
        T *dx = static_cast<T *>(a.dx) + row * a.dx_ld + head * a.n;
        EACH_PIECE(a.n)
        {
            R v[V], d[V], weight[V];
            xs.get(x, i, j, v);
            ds.get(dy, i, j, d);
            load_vector<T, V>(w + j, weight);
#pragma unroll
            for (int k = 0; k < V; k++)
                v[k] = r * (d[k] * (weight[k] + one) - v[k] * r * mean);
            put_vector<T, V>(dx + j, v, a.add);
        }
    }
    if (!a.part)
        return;
    if (K > 0)
        EACH_PIECE(a.n)
        {
#pragma unroll
            for (int k = 0; k < V; k++)
                dw[j + k] = sums[K > 0 ? i : 0][k];
        }
    __syncthreads();
    for (int64_t j = threadIdx.x; j < a.n; j += THREADS) {
        R sum = 0;
        for (int t = 0; t < teams; t++)
            sum += all[t * a.n + j];
        static_cast<R *>(a.part)[blockIdx.x * a.n + j] = sum;
    }
}

/* dw[j] (+)= sum over blocks of part[b, j]: slices of the blocks first, then these in order. */
template <typename R>
static __global__ void norm_reduce_kernel(const R *part, int blocks, int64_t n, R *dw, bool add)
{
    __shared__ R slice[NORM_REDUCE_SLICES][32];
    int64_t j = (int64_t)blockIdx.x * 32 + threadIdx.x;
    R sum = 0;
    if (j < n)
#pragma unroll 8
        for (int b = (int)threadIdx.y; b < blocks; b += NORM_REDUCE_SLICES)
            sum += part[b * n + j];
    slice[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || j >= n)
        return;
    for (int s = 1; s < NORM_REDUCE_SLICES; s++)
        sum += slice[s][threadIdx.x];
    dw[j] = add ? dw[j] + sum : sum;
}

static int64_t norm_teams(int64_t n)
{
    return n > NORM_WARP_COLS ? 1 : NORM_THREADS / 32;
}

static int64_t back_blocks(int64_t groups, int64_t n)
{
    int64_t blocks = ceil_div(groups, norm_teams(n));
    return blocks < 1 ? 1 : blocks > NORM_BACK_BLOCKS ? NORM_BACK_BLOCKS : blocks;
}

template <typename T, int V, int THREADS, bool WIDE, int K>
static void norm_launch(cuda_device *d, cuda_queue *q, const norm_args &a, bool backward)
{
    int64_t teams = norm_teams(a.n);
    if (!backward) {
        norm_kernel<T, V, THREADS, WIDE, K>
            <<<(unsigned)ceil_div(a.groups, teams), THREADS, 0, q->stream>>>(a);
        return;
    }
    int64_t bytes = a.part ? teams * a.n * (int64_t)sizeof(real<T>) : 0;
    if (bytes + 1024 > d->shared_bytes) {
        cuda_fail(d, MT_ERR_UNSUPPORTED, "rmsnorm of %lld columns: at most %lld fit this GPU",
                  (long long)a.n, (long long)((d->shared_bytes - 1024) / (int64_t)sizeof(real<T>)));
        return;
    }
    if (bytes > 40 << 10)
        cuda_ok(d,
                cudaFuncSetAttribute(norm_back_kernel<T, V, THREADS, WIDE, K>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                "rmsnorm");
    norm_back_kernel<T, V, THREADS, WIDE, K>
        <<<(unsigned)back_blocks(a.groups, a.n), THREADS, (size_t)bytes, q->stream>>>(a);
}

template <typename T>
static void norm_typed(cuda_device *d, cuda_queue *q, const norm_args &a, bool aligned,
                       bool backward)
{
    /* Three registers of numbers a column are the most that fit: x, dy and the sum of dw. */
    const int wide = vector_of<T>::width, by_warp = sizeof(T) == 8 ? 0 : NORM_WARP_COLS / wide / 32;
    const int four = sizeof(T) == 8 ? 0 : 4;
    bool narrow = norm_teams(a.n) > 1;
    if (!aligned && narrow)
        norm_launch<T, 1, NORM_THREADS, false, 0>(d, q, a, backward);
    else if (!aligned)
        norm_launch<T, 1, 256, true, 0>(d, q, a, backward);
    else if (narrow && a.n <= 32 * wide)
        norm_launch<T, wide, NORM_THREADS, false, 1>(d, q, a, backward);
    else if (narrow)
        norm_launch<T, wide, NORM_THREADS, false, by_warp>(d, q, a, backward);
    else if (a.n <= 4 * 128 * wide)
        norm_launch<T, wide, 128, true, four>(d, q, a, backward);
    else if (a.n <= 4 * 256 * wide)
        norm_launch<T, wide, 256, true, four>(d, q, a, backward);
    else
        norm_launch<T, wide, 256, true, 0>(d, q, a, backward);
}

static norm_args common_args(const mt_op_call *c, const mt_tensor *shape)
{
    const mt_rmsnorm_attr *attr = (const mt_rmsnorm_attr *)c->attr;
    norm_args a = {};
    a.x = c->in[0].data;
    a.x_ld = c->in[0].ld;
    a.w = c->in[1].data;
    a.r = c->aux[0].data;
    a.r_ld = c->aux[0].ld;
    a.heads = attr->heads;
    a.groups = shape->rows * attr->heads;
    a.n = shape->cols / attr->heads;
    a.variant = attr->variant;
    a.eps = attr->eps;
    return a;
}

static bool vectors_fit(const norm_args *a, mt_dtype dtype)
{
    return a->n * mt_dtype_size(dtype) % 16 == 0;
}

static void norm_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    norm_args a = common_args(c, &c->out[0]);
    a.y = c->out[0].data;
    a.y_ld = c->out[0].ld;
    bool aligned = vectors_fit(&a, c->out[0].dtype) && is_aligned(&c->in[0]) &&
                   is_aligned(&c->in[1]) && is_aligned(&c->out[0]);
    if (a.groups > 0)
        FOR_DTYPE(c->out[0].dtype, norm_typed, d, q, a, aligned, false);
}

static void norm_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    norm_args a = common_args(c, &c->d_out[0]);
    const mt_tensor *dw = &c->d_in[1];
    a.dy = c->d_out[0].data;
    a.dy_ld = c->d_out[0].ld;
    a.dx = c->d_in[0].data;
    a.dx_ld = c->d_in[0].ld;
    a.add = c->d_accumulate & 1u;
    a.part = dw->data ? c->work : NULL;
    if (!a.dx && !a.part)
        return;
    bool aligned = vectors_fit(&a, c->d_out[0].dtype) && is_aligned(&c->in[0]) &&
                   is_aligned(&c->in[1]) && is_aligned(&c->d_out[0]) && is_aligned(&c->d_in[0]);
    FOR_DTYPE(c->d_out[0].dtype, norm_typed, d, q, a, aligned, true);
    if (!a.part)
        return;
    int blocks = (int)back_blocks(a.groups, a.n);
    dim3 block(32, NORM_REDUCE_SLICES);
    unsigned grid = (unsigned)ceil_div(a.n, 32);
    bool add = c->d_accumulate >> 1 & 1u;
    if (dw->dtype == MT_F64)
        norm_reduce_kernel<double><<<grid, block, 0, q->stream>>>((const double *)a.part, blocks,
                                                                  a.n, (double *)dw->data, add);
    else
        norm_reduce_kernel<float><<<grid, block, 0, q->stream>>>((const float *)a.part, blocks, a.n,
                                                                 (float *)dw->data, add);
}

static int64_t norm_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    const mt_rmsnorm_attr *attr = (const mt_rmsnorm_attr *)c->attr;
    const mt_tensor *dy = &c->d_out[0];
    (void)d;
    if (!backward || !c->d_in[1].data)
        return 0;
    int64_t n = dy->cols / attr->heads;
    return back_blocks(dy->rows * attr->heads, n) * n * (dy->dtype == MT_F64 ? 8 : 4);
}

const cuda_op cuda_op_rmsnorm = { norm_forward, norm_backward, norm_workspace };
