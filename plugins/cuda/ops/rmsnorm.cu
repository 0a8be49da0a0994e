/* SPDX-License-Identifier: Apache-2.0
 *
 * rmsnorm: each group of n columns is normalised by a team of threads: a warp, or for wide rows
 * many. Teams walk their groups in a fixed order with the next ones already on their way into
 * shared memory. Backward adds up the weight's gradient on that walk, and over the teams of a
 * block; a second kernel adds what the blocks found, in their order.
 */
#include "../common.cuh"

enum {
    NORM_TEAMS = 4,        /* of a block: always where they are warps, else as many as fit */
    NORM_WARP_COLS = 1024, /* groups up to this width are a warp's */
    NORM_WIDE_THREADS = 1024,
    NORM_PIECES = 2,            /* of a thread, where a team is more than a warp */
    NORM_AHEAD = 3,             /* groups in shared memory at a time: one in use, others arriving */
    NORM_FORWARD_BLOCKS = 1056, /* at most */
    NORM_BACK_BLOCKS = 528,     /* at most, of NORM_TEAMS warps or one wide team */
    NORM_SMALL_COLS = 256,      /* groups up to this width take twice as many */
    NORM_REDUCE_COLS = 32,
    NORM_REDUCE_AHEAD = 17, /* sums that a thread has under way at once: an eighth of 132 blocks' */
    NORM_REDUCE_SLICES = 32 /* at most */
};

struct norm_args {
    const void *x, *w, *dy;
    void *y, *dx;
    void *r;    /* [rows, heads], statistics dtype */
    void *part; /* [blocks, n] */
    void *dw;   /* [n], statistics dtype */
    int64_t x_ld, y_ld, dy_ld, dx_ld, r_ld;
    int32_t groups; /* rows * heads */
    int32_t n;
    int32_t heads;
    mt_norm_variant variant;
    double eps;
    bool add, add_dw;
};

/* Where a group begins whose rows are `ld` apart and have `cols` elements for each head. */
static __device__ __forceinline__ int64_t group_at(int32_t group, int32_t heads, int64_t ld,
                                                   int32_t cols)
{
    return heads == 1 ? group * ld : group / heads * ld + (int64_t)(group % heads) * cols;
}

/* A thread's part of a team: piece i of a group starts at column (lane + i * size) * V. A block's
 * threads are [teams, size]. */
struct team {
    int lane, size, number, teams; /* number: this team's in the block */
};

template <bool WIDE> static __device__ __forceinline__ team this_team()
{
    int size = WIDE ? (int)blockDim.x : 32, teams = WIDE ? (int)blockDim.y : (int)NORM_TEAMS;
    return { (int)threadIdx.x, size, (int)threadIdx.y, teams };
}

template <int ID> static __device__ __forceinline__ void barrier_of(int threads)
{
    asm volatile("bar.sync %0, %1;" : : "n"(ID), "r"(threads) : "memory");
}

/* Other teams go on. Constants, because a number that is known only later would take all barriers
 * there are, and these limit how many blocks run at a time. */
static __device__ __forceinline__ void team_barrier(const team &t)
{
    switch (t.number) {
    case 0:
        return barrier_of<1>(t.size);
    case 1:
        return barrier_of<2>(t.size);
    case 2:
        return barrier_of<3>(t.size);
    default:
        return barrier_of<4>(t.size);
    }
}

/* A team's first group; the next ones are as far apart as there are teams. Wide teams of a block
 * begin far from each other, so that all blocks have about as many groups. */
template <bool WIDE> static __device__ __forceinline__ int32_t first_group(const team &t)
{
    return WIDE ? t.number * (int)gridDim.x + (int)blockIdx.x
                : (int)blockIdx.x * t.teams + t.number;
}

/* Sums over a team with one barrier: what is added for one slot is read by all before the same slot
 * comes again. */
template <typename R, bool WIDE> struct team_sums {
    R part[NORM_TEAMS][NORM_AHEAD][32];

    __device__ __forceinline__ R add(const team &t, R x, int slot)
    {
        x = warp_sum(x);
        if (!WIDE)
            return x;
        R *mine = part[t.number][slot];
        int lane = t.lane & 31;
        if (lane == 0)
            mine[t.lane >> 5] = x;
        team_barrier(t);
        return warp_sum(lane < t.size >> 5 ? mine[lane] : R(0));
    }
};

/* A team's walk over an operand: a thread has K pieces of V columns of each group and, in shared
 * memory, copies of its own of those of NORM_AHEAD groups; nobody else reads them. With K = 0 it
 * has any number, read from memory whenever they are needed. */
template <typename T, int V, int K> struct walk {
    bits<T, V> *own; /* piece i of the group in slot s at own[(s * K + i) * size of the team] */
    const T *base, *row;
    int64_t ld;
    int32_t n, heads;

    static __host__ __device__ int bytes(int threads)
    {
        return NORM_AHEAD * K * threads * (int)sizeof(bits<T, V>);
    }

    __device__ __forceinline__ void begin(const void *p, int64_t p_ld, const norm_args &a,
                                          const team &t, void *shared)
    {
        base = static_cast<const T *>(p);
        ld = p_ld;
        n = a.n;
        heads = a.heads;
        own = static_cast<bits<T, V> *>(shared) + t.number * NORM_AHEAD * K * t.size + t.lane;
    }

    __device__ __forceinline__ const T *at(int32_t group) const
    {
        return base + group_at(group, heads, ld, n);
    }

    /* Begins to copy the group into the slot. */
    __device__ __forceinline__ void fetch(const team &t, int32_t group, int slot)
    {
        if constexpr (K > 0) {
            const T *p = at(group);
#pragma unroll
            for (int i = 0; i < K; i++)
                if (int32_t j = (t.lane + i * t.size) * V; j < n)
                    copy_16(own + (slot * K + i) * t.size, p + j, true);
        }
    }

    __device__ __forceinline__ void enter(int32_t group)
    {
        if (K == 0)
            row = at(group);
    }

    /* Piece i, which starts at column j, of the group that is in the slot. */
    __device__ __forceinline__ void get(const team &t, int slot, int i, int32_t j,
                                        real<T> *ret) const
    {
        if constexpr (K > 0)
            unpack<T, V>(own[(slot * K + i) * t.size], ret);
        else
            load_vector<T, V>(row + j, ret);
    }
};

/* The weight as a thread uses it in every group; in registers with K > 0. */
template <typename T, int V, int K> struct weight_of {
    bits<T, V> piece[K > 0 ? K : 1];
    const T *w;
    real<T> one; /* what is added to it */

    __device__ __forceinline__ void begin(const norm_args &a, const team &t)
    {
        w = static_cast<const T *>(a.w);
        one = a.variant == MT_NORM_ONE_PLUS ? 1 : 0;
#pragma unroll
        for (int i = 0; i < K; i++)
            if (int32_t j = (t.lane + i * t.size) * V; j < a.n)
                piece[i] = load_bits<T, V>(w + j);
    }

    __device__ __forceinline__ void get(int i, int32_t j, real<T> *ret) const
    {
        if constexpr (K > 0)
            unpack<T, V>(piece[i], ret);
        else
            load_vector<T, V>(w + j, ret);
#pragma unroll
        for (int k = 0; k < V; k++)
            ret[k] += one;
    }
};

/* Runs the body for every piece of a thread of team t: number i, first column j. */
#define EACH_PIECE(t, n)                                                                           \
    _Pragma("unroll") for (int i = 0; K == 0 || i < K;                                             \
                           i++) if (int32_t j = ((t).lane + i * (t).size) * V; j >= (n))           \
    {                                                                                              \
        if (K == 0)                                                                                \
            break;                                                                                 \
    }                                                                                              \
    else

template <typename T, int V, int K, bool WIDE>
static __global__ void __launch_bounds__(WIDE ? NORM_WIDE_THREADS : NORM_TEAMS * 32)
    norm_kernel(norm_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ team_sums<R, WIDE> sums;
    const team t = this_team<WIDE>();
    const int stride = (int)gridDim.x * t.teams;
    int32_t group = first_group<WIDE>(t);
    walk<T, V, K> x;
    weight_of<T, V, K> w;
    x.begin(a.x, a.x_ld, a, t, dynamic);
    await_previous();
    for (int s = 0; s < NORM_AHEAD - 1; s++) {
        if (group + s * stride < a.groups)
            x.fetch(t, group + s * stride, s);
        copies_commit();
    }
    w.begin(a, t);
    for (int slot = 0; group < a.groups; group += stride, slot = (slot + 1) % NORM_AHEAD) {
        if (group + (NORM_AHEAD - 1) * stride < a.groups)
            x.fetch(t, group + (NORM_AHEAD - 1) * stride, (slot + NORM_AHEAD - 1) % NORM_AHEAD);
        copies_commit();
        copies_wait<NORM_AHEAD - 1>();
        x.enter(group);
        R sum = 0;
        EACH_PIECE(t, a.n)
        {
            R v[V];
            x.get(t, slot, i, j, v);
#pragma unroll
            for (int k = 0; k < V; k++)
                sum += v[k] * v[k];
        }
        sum = sums.add(t, sum, slot);
        R r = 1 / square_root(sum / (R)a.n + (R)a.eps);
        if (t.lane == 0 && a.r)
            static_cast<R *>(a.r)[group_at(group, a.heads, a.r_ld, 1)] = r;
        T *y = static_cast<T *>(a.y) + group_at(group, a.heads, a.y_ld, a.n);
        EACH_PIECE(t, a.n)
        {
            R v[V], weight[V];
            x.get(t, slot, i, j, v);
            w.get(i, j, weight);
#pragma unroll
            for (int k = 0; k < V; k++) {
                R normed = v[k] * r;
                if (a.variant == MT_NORM_ROUND_THEN_SCALE)
                    normed = rounded<T>(normed);
                v[k] = weight[k] * normed;
            }
            put_vector<T, V>(y + j, v, false);
        }
    }
}

/* With xh = x r and g = dy w': dx = r (g - xh mean(g xh)), dw = sum over rows of dy xh. A team adds
 * up dw of its groups, in registers (K > 0) or in shared memory. */
template <typename T, int V, int K, bool WIDE>
static __global__ void __launch_bounds__(WIDE ? NORM_WIDE_THREADS : NORM_TEAMS * 32, WIDE ? 1 : 4)
    norm_back_kernel(norm_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ team_sums<R, WIDE> sums;
    const team t = this_team<WIDE>();
    const int stride = (int)gridDim.x * t.teams;
    int32_t group = first_group<WIDE>(t);
    R *all = reinterpret_cast<R *>(dynamic), *shared_dw = all + t.number * a.n;
    R dw[K > 0 ? K : 1][V] = {};
    walk<T, V, K> x, d;
    weight_of<T, V, K> w;
    x.begin(a.x, a.x_ld, a, t, dynamic);
    d.begin(a.dy, a.dy_ld, a, t, dynamic + x.bytes(t.teams * t.size));
    if (a.part && K == 0)
        EACH_PIECE(t, a.n)
        {
            for (int k = 0; k < V; k++)
                shared_dw[j + k] = 0;
        }
    await_previous();
    for (int s = 0; s < NORM_AHEAD - 1; s++) {
        if (group + s * stride < a.groups) {
            x.fetch(t, group + s * stride, s);
            d.fetch(t, group + s * stride, s);
        }
        copies_commit();
    }
    w.begin(a, t);
    R next_r = 0;
    if (group < a.groups)
        next_r = static_cast<const R *>(a.r)[group_at(group, a.heads, a.r_ld, 1)];
    for (int slot = 0; group < a.groups; group += stride, slot = (slot + 1) % NORM_AHEAD) {
        int32_t ahead = group + (NORM_AHEAD - 1) * stride, next = group + stride;
        if (ahead < a.groups) {
            x.fetch(t, ahead, (slot + NORM_AHEAD - 1) % NORM_AHEAD);
            d.fetch(t, ahead, (slot + NORM_AHEAD - 1) % NORM_AHEAD);
        }
        copies_commit();
        R r = next_r, dot = 0;
        if (next < a.groups)
            next_r = static_cast<const R *>(a.r)[group_at(next, a.heads, a.r_ld, 1)];
        copies_wait<NORM_AHEAD - 1>();
        x.enter(group);
        d.enter(group);
        EACH_PIECE(t, a.n)
        {
            R v[V], g[V], weight[V];
            x.get(t, slot, i, j, v);
            d.get(t, slot, i, j, g);
            w.get(i, j, weight);
#pragma unroll
            for (int k = 0; k < V; k++) {
                R term = g[k] * (v[k] * r);
                dot += weight[k] * term;
                if (K > 0)
                    dw[K > 0 ? i : 0][k] += term;
                else if (a.part)
                    shared_dw[j + k] += term;
            }
        }
        if (!a.dx)
            continue;
        R slope = r * (sums.add(t, dot, slot) / (R)a.n);
        T *dx = static_cast<T *>(a.dx) + group_at(group, a.heads, a.dx_ld, a.n);
        EACH_PIECE(t, a.n)
        {
            R v[V], g[V], weight[V];
            x.get(t, slot, i, j, v);
            d.get(t, slot, i, j, g);
            w.get(i, j, weight);
#pragma unroll
            for (int k = 0; k < V; k++)
                v[k] = r * (g[k] * weight[k] - v[k] * slope);
            put_vector<T, V>(dx + j, v, a.add);
        }
    }
    if (!a.part)
        return;
    /* The block's first team may have had one group more. Only for racecheck, which seems to
     * compare how many barriers two threads have passed, of whichever number. */
    if (WIDE && a.dx && group - t.number * (int)gridDim.x < a.groups)
        team_barrier(t);
    __syncthreads(); /* the walks are over everywhere: their memory is free */
    if constexpr (K > 0)
        EACH_PIECE(t, a.n)
        {
            const int width = vector_of<R>::width;
#pragma unroll
            for (int k = 0; k < V; k += width)
                put_vector<R, width>(shared_dw + j + k, dw[i] + k, false);
        }
    __syncthreads();
    for (int32_t j = t.number * t.size + t.lane; j < a.n; j += t.teams * t.size) {
        R sum = 0;
        for (int i = 0; i < t.teams; i++)
            sum += all[i * a.n + j];
        static_cast<R *>(a.part)[(int64_t)blockIdx.x * a.n + j] = sum;
    }
}

/* dw[j] (+)= sum over blocks of part[b, j]: slices of the blocks first, then these in order. */
template <typename R>
static __global__ void __launch_bounds__(NORM_REDUCE_COLS *NORM_REDUCE_SLICES,
                                         sizeof(R) == 4 ? 2 : 1)
    norm_reduce_kernel(const R *part, int blocks, int n, R *dw, bool add)
{
    __shared__ R slice[NORM_REDUCE_SLICES][NORM_REDUCE_COLS];
    int j = (int)(blockIdx.x * NORM_REDUCE_COLS + threadIdx.x), slices = (int)blockDim.y;
    int step = slices * n, end = blocks * n;
    R sum = 0, old = 0;
    await_previous();
    if (j < n) {
        if (add && threadIdx.y == 0)
            old = dw[j];
        for (int at = (int)threadIdx.y * n + j; at < end; at += NORM_REDUCE_AHEAD * step) {
            R x[NORM_REDUCE_AHEAD];
#pragma unroll
            for (int i = 0; i < NORM_REDUCE_AHEAD; i++)
                x[i] = at + i * step < end ? part[at + i * step] : R(0);
#pragma unroll
            for (int i = 0; i < NORM_REDUCE_AHEAD; i++)
                sum += x[i];
        }
    }
    slice[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || j >= n)
        return;
#pragma unroll 8
    for (int s = 1; s < slices; s++)
        sum += slice[s][threadIdx.x];
    dw[j] = old + sum;
}

/* Blocks of two kernels share a multiprocessor only where both divide its memory alike. */
template <typename F> static void prefer_shared(cuda_device *d, F *kernel)
{
    cuda_ok(d,
            cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared),
            "rmsnorm");
}

template <typename R> static void norm_reduce(const cuda_queue *q, const norm_args &a, int blocks)
{
    int64_t slices = ceil_div(blocks, NORM_REDUCE_AHEAD);
    if (slices > NORM_REDUCE_SLICES)
        slices = NORM_REDUCE_SLICES;
    prefer_shared(q->device, norm_reduce_kernel<R>);
    launch_next(q, norm_reduce_kernel<R>, dim3((unsigned)ceil_div(a.n, NORM_REDUCE_COLS)),
                dim3(NORM_REDUCE_COLS, (unsigned)slices), 0, (const R *)a.part, blocks, (int)a.n,
                (R *)a.dw, a.add_dw);
}

static bool is_narrow(int64_t n)
{
    return n <= NORM_WARP_COLS;
}

static int64_t norm_blocks(int64_t groups, int64_t n, int teams, bool backward)
{
    int64_t blocks = is_narrow(n) ? ceil_div(groups, teams) : groups;
    int64_t most = backward ? NORM_BACK_BLOCKS : NORM_FORWARD_BLOCKS;
    if (!is_narrow(n))
        most /= teams;
    if (n <= NORM_SMALL_COLS)
        most *= 2;
    return blocks < 1 ? 1 : blocks > most ? most : blocks;
}

/* So many threads, and so many bytes of `room` in shared memory, each. A block with all that a
 * multiprocessor can run leaves the fewest sums to be added up. */
static int wide_teams(int threads, int64_t bytes, int64_t room)
{
    int teams = NORM_TEAMS;
    while (teams > 1 && (teams * threads > NORM_WIDE_THREADS || teams * bytes > room))
        teams--;
    return teams;
}

template <typename T, int V, int K, bool WIDE>
static void norm_launch(cuda_device *d, cuda_queue *q, const norm_args &a, bool backward)
{
    void (*kernel)(norm_args) =
        backward ? norm_back_kernel<T, V, K, WIDE> : norm_kernel<T, V, K, WIDE>;
    bool adds_up = backward && a.part;
    int threads = !WIDE ? 32 : K == 0 ? 256 : (int)ceil_div(a.n, K * V * 32) * 32; /* of a team */
    int64_t sums = adds_up ? a.n * (int64_t)sizeof(real<T>) : 0;
    int64_t walks = (backward ? 2 : 1) * walk<T, V, K>::bytes(threads);
    int64_t bytes = sums > walks ? sums : walks;
    int64_t room = d->shared_bytes - (int64_t)sizeof(team_sums<real<T>, WIDE>);
    int teams = !WIDE ? (int)NORM_TEAMS : adds_up && K > 0 ? wide_teams(threads, bytes, room) : 1;
    bytes *= teams;
    if (bytes > room) {
        cuda_fail(d, MT_ERR_UNSUPPORTED, "rmsnorm of %d columns: at most %lld fit this GPU", a.n,
                  (long long)(room / (int64_t)sizeof(real<T>)));
        return;
    }
    if (bytes > 40 << 10)
        cuda_ok(
            d,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
            "rmsnorm");
    if (adds_up && K > 0)
        prefer_shared(d, kernel);
    int blocks = (int)norm_blocks(a.groups, a.n, teams, backward);
    launch_next(q, kernel, dim3((unsigned)blocks), dim3((unsigned)threads, (unsigned)teams),
                (size_t)bytes, a);
    if (adds_up)
        norm_reduce<real<T>>(q, a, blocks);
}

template <typename T>
static void norm_typed(cuda_device *d, cuda_queue *q, const norm_args &a, bool aligned,
                       bool backward)
{
    /* As many pieces as leave backward's sums of dw in registers; 16-byte ones only. */
    const int wide = vector_of<T>::width, by_warp = sizeof(T) == 8 ? 0 : NORM_WARP_COLS / wide / 32;
    const int pieces = sizeof(T) == 8 ? 0 : NORM_PIECES;
    const int most = NORM_WIDE_THREADS * NORM_PIECES * wide;
    /* Where two walks do not fit the GPU, its memory is read twice instead. */
    bool fits =
        2 * walk<T, wide, NORM_PIECES>::bytes((int)ceil_div(a.n, NORM_PIECES * wide)) + 4096 <
        d->shared_bytes;
    bool narrow = is_narrow(a.n);
    if (!aligned && narrow)
        norm_launch<T, 1, 0, false>(d, q, a, backward);
    else if (!aligned)
        norm_launch<T, 1, 0, true>(d, q, a, backward);
    else if (narrow && a.n <= 32 * wide)
        norm_launch<T, wide, 1, false>(d, q, a, backward);
    else if (narrow)
        norm_launch<T, wide, by_warp, false>(d, q, a, backward);
    else if (a.n <= most && fits)
        norm_launch<T, wide, pieces, true>(d, q, a, backward);
    else
        norm_launch<T, wide, 0, true>(d, q, a, backward);
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
    a.groups = (int32_t)(shape->rows * attr->heads);
    a.n = (int32_t)(shape->cols / attr->heads);
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
    a.dy = c->d_out[0].data;
    a.dy_ld = c->d_out[0].ld;
    a.dx = c->d_in[0].data;
    a.dx_ld = c->d_in[0].ld;
    a.add = c->d_accumulate & 1u;
    a.add_dw = c->d_accumulate >> 1 & 1u;
    a.dw = c->d_in[1].data;
    a.part = a.dw ? c->work : NULL;
    if (!a.dx && !a.part)
        return;
    bool aligned = vectors_fit(&a, c->d_out[0].dtype) && is_aligned(&c->in[0]) &&
                   is_aligned(&c->in[1]) && is_aligned(&c->d_out[0]) && is_aligned(&c->d_in[0]);
    FOR_DTYPE(c->d_out[0].dtype, norm_typed, d, q, a, aligned, true);
}

static int64_t norm_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    const mt_rmsnorm_attr *attr = (const mt_rmsnorm_attr *)c->attr;
    const mt_tensor *dy = &c->d_out[0];
    (void)d;
    if (!backward || !c->d_in[1].data)
        return 0;
    int64_t n = dy->cols / attr->heads;
    int fewest = is_narrow(n) ? NORM_TEAMS : 1; /* teams of a block */
    int64_t blocks = norm_blocks(dy->rows * attr->heads, n, fewest, true);
    return blocks * n * (dy->dtype == MT_F64 ? 8 : 4);
}

const cuda_op cuda_op_rmsnorm = { norm_forward, norm_backward, norm_workspace };
