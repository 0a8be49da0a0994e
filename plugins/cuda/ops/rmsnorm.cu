/* SPDX-License-Identifier: Apache-2.0
 *
 * rmsnorm: each group of n columns is normalised by a team of threads: a warp, or for wide rows a
 * whole block. Backward walks its groups in a fixed order and keeps the weight's gradient in shared
 * memory; a second kernel adds what the blocks found, in their order.
 */
#include "../common.cuh"

enum {
    NORM_THREADS = 256,
    NORM_WARP_COLS = 1024,  /* groups up to this width are a warp's */
    NORM_BACK_BLOCKS = 792, /* of backward; a constant, so that sums do not depend on the device */
    NORM_REDUCE_SLICES = 8
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

template <typename T, int V, bool WIDE>
static __global__ void __launch_bounds__(NORM_THREADS) norm_kernel(norm_args a)
{
    typedef real<T> R;
    __shared__ R shared[32];
    const int team = WIDE ? NORM_THREADS : 32, teams = NORM_THREADS / team;
    int lane = (int)threadIdx.x % team;
    int64_t group = (int64_t)blockIdx.x * teams + threadIdx.x / team;
    if (group >= a.groups)
        return; /* a whole team */
    int64_t row = group / a.heads, head = group % a.heads;
    const T *x = static_cast<const T *>(a.x) + row * a.x_ld + head * a.n;
    const T *w = static_cast<const T *>(a.w);
    T *y = static_cast<T *>(a.y) + row * a.y_ld + head * a.n;
    R sum = 0;
    for (int64_t j = (int64_t)lane * V; j < a.n; j += (int64_t)team * V) {
        R v[V];
        load_vector<T, V>(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += v[k] * v[k];
    }
    sum = team_sum<WIDE>(sum, shared);
    R r = (R)(1.0 / sqrt((double)sum / (double)a.n + a.eps));
    if (lane == 0 && a.r)
        static_cast<R *>(a.r)[row * a.r_ld + head] = r;
    for (int64_t j = (int64_t)lane * V; j < a.n; j += (int64_t)team * V) {
        R v[V], weight[V];
        load_vector<T, V>(x + j, v);
        load_vector<T, V>(w + j, weight);
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

/* With xh = x r and g = dy w': dx = r (g - xh mean(g xh)), dw = sum over rows of dy xh. */
template <typename T, int V, bool WIDE>
static __global__ void __launch_bounds__(NORM_THREADS) norm_back_kernel(norm_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ R shared[32];
    const int team = WIDE ? NORM_THREADS : 32, teams = NORM_THREADS / team;
    int lane = (int)threadIdx.x % team, own = (int)threadIdx.x / team;
    R *all = reinterpret_cast<R *>(dynamic), *dw = all + own * a.n;
    R one = a.variant == MT_NORM_ONE_PLUS ? 1 : 0;
    const T *w = static_cast<const T *>(a.w);
    if (a.part) /* every thread zeroes the columns that it will add to */
        for (int64_t j = (int64_t)lane * V; j < a.n; j += (int64_t)team * V)
            for (int k = 0; k < V; k++)
                dw[j + k] = 0;
    for (int64_t group = (int64_t)blockIdx.x * teams + own; group < a.groups;
         group += (int64_t)gridDim.x * teams) {
        int64_t row = group / a.heads, head = group % a.heads;
        const T *x = static_cast<const T *>(a.x) + row * a.x_ld + head * a.n;
        const T *dy = static_cast<const T *>(a.dy) + row * a.dy_ld + head * a.n;
        R r = static_cast<const R *>(a.r)[row * a.r_ld + head], dot = 0;
        for (int64_t j = (int64_t)lane * V; j < a.n; j += (int64_t)team * V) {
            R v[V], d[V], weight[V];
            load_vector<T, V>(x + j, v);
            load_vector<T, V>(dy + j, d);
            load_vector<T, V>(w + j, weight);
#pragma unroll
            for (int k = 0; k < V; k++) {
                R term = d[k] * (v[k] * r);
                dot += (weight[k] + one) * term;
                if (a.part)
                    dw[j + k] += term;
            }
        }
        if (!a.dx)
            continue;
        R mean = team_sum<WIDE>(dot, shared) / (R)a.n;
        T *dx = static_cast<T *>(a.dx) + row * a.dx_ld + head * a.n;
        for (int64_t j = (int64_t)lane * V; j < a.n; j += (int64_t)team * V) {
            R v[V], d[V], weight[V];
            load_vector<T, V>(x + j, v);
            load_vector<T, V>(dy + j, d);
            load_vector<T, V>(w + j, weight);
#pragma unroll
            for (int k = 0; k < V; k++)
                v[k] = r * (d[k] * (weight[k] + one) - v[k] * r * mean);
            put_vector<T, V>(dx + j, v, a.add);
        }
    }
    if (!a.part)
        return;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < a.n; j += NORM_THREADS) {
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

template <typename T, int V, bool WIDE>
static void norm_launch(cuda_device *d, cuda_queue *q, const norm_args &a, bool backward)
{
    int64_t teams = norm_teams(a.n);
    if (!backward) {
        norm_kernel<T, V, WIDE>
            <<<(unsigned)ceil_div(a.groups, teams), NORM_THREADS, 0, q->stream>>>(a);
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
                cudaFuncSetAttribute(norm_back_kernel<T, V, WIDE>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                "rmsnorm");
    norm_back_kernel<T, V, WIDE>
        <<<(unsigned)back_blocks(a.groups, a.n), NORM_THREADS, (size_t)bytes, q->stream>>>(a);
}

template <typename T>
static void norm_typed(cuda_device *d, cuda_queue *q, const norm_args &a, bool aligned,
                       bool backward)
{
    const int wide = vector_of<T>::width;
    if (norm_teams(a.n) == 1) {
        if (aligned)
            norm_launch<T, wide, true>(d, q, a, backward);
        else
            norm_launch<T, 1, true>(d, q, a, backward);
    } else {
        if (aligned)
            norm_launch<T, wide, false>(d, q, a, backward);
        else
            norm_launch<T, 1, false>(d, q, a, backward);
    }
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
