/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_linear: one product for each expert, on rows whose number only the device knows.
 *
 * BF16 on compute capability 9.0 goes through one kernel that finds the experts itself
 * (grouped_wgmma.cu). Elsewhere an expert with many rows is a GEMM of its own, several of which run
 * at a time; for that the host asks the device how the rows fell, which waits for the queue to get
 * there. Experts with few rows (and, where there are few rows in all, everything, without that
 * question) go through one kernel here: its grid has room for every way the rows can fall; a block
 * finds its expert from the offsets and leaves when there is none. BF16 goes through tensor cores
 * where rows can be moved by 16 bytes, everything else through plain arithmetic. How an expert is
 * computed depends on its own rows only, and every order is fixed: the same bits each time,
 * whichever experts are called together.
 */
#include "grouped.cuh"
#include "mma.cuh"

enum { IN_X = 0, IN_W = 1, IN_OFFSETS = 2, IN_BIAS = 3 };

/* An expert with so many rows is a GEMM of its own. */
enum { MANY_ROWS = 128 };

/* The kernels here leave out experts with `many` rows. */
struct product : grouped_product {
    int many;
};

/* What a block works on: rows of C from `row` on, of which `rows` are the expert's. */
struct part {
    int expert;
    int64_t row, rows;
};

/* Tile number `index` when every expert's rows are cut into tiles of `size`. All lanes take part.
 */
static __device__ __forceinline__ bool find_part(const product &p, int index, int size, part *ret)
{
    int lane = (int)threadIdx.x & 31, before = 0;
    for (int base = 0; base < p.experts; base += 32) {
        int e = base + lane;
        int from = e < p.experts ? p.offsets[e] : 0, to = e < p.experts ? p.offsets[e + 1] : 0;
        int tiles = to - from < p.many ? (to - from + size - 1) / size : 0, sum = tiles;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            int x = __shfl_up_sync(0xffffffffu, sum, i);
            sum += lane >= i ? x : 0;
        }
        unsigned reached = __ballot_sync(0xffffffffu, before + sum > index);
        if (reached) {
            int owner = __ffs((int)reached) - 1;
            int tile = index - before - __shfl_sync(0xffffffffu, sum - tiles, owner);
            ret->expert = base + owner;
            ret->row = __shfl_sync(0xffffffffu, from, owner) + (int64_t)tile * size;
            ret->rows = __shfl_sync(0xffffffffu, to, owner) - ret->row;
            return true;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return false;
}

/* Where the operands of this block begin; `columns` of B and C from `col` on are its own. */
template <typename T, typename C, bool A_DEEP, bool B_DEEP, int SIZE> struct block_of {
    const T *a, *b;
    C *c;
    const T *bias;
    int64_t rows, columns, depth;

    __device__ __forceinline__ bool find(const product &p)
    {
        int64_t col = (int64_t)blockIdx.x * SIZE;
        columns = p.n - col;
        c = static_cast<C *>(p.c);
        bias = static_cast<const T *>(p.bias);
        a = static_cast<const T *>(p.a);
        b = static_cast<const T *>(p.b);
        if (A_DEEP) { /* the weight gradient */
            int e = (int)blockIdx.z;
            int64_t row = (int64_t)blockIdx.y * SIZE, from = p.offsets[e];
            rows = p.m - row;
            depth = p.offsets[e + 1] - from;
            a += from * p.lda + row;
            b += from * p.ldb + col;
            c += (e * p.m + row) * p.ldc + col;
            return depth < p.many && (depth > 0 || !p.add);
        }
        part at;
        if (!find_part(p, (int)blockIdx.y, SIZE, &at))
            return false;
        rows = at.rows;
        depth = p.k;
        a += at.row * p.lda;
        b += at.expert * (B_DEEP ? p.k : p.n) * p.ldb + (B_DEEP ? col : col * p.ldb);
        c += at.row * p.ldc + col;
        if (bias)
            bias += at.expert * p.ld_bias + col;
        return true;
    }
};

/* ---- tensor cores -----------------------------------------------------------------------------
 */

/* A block of 8 warps makes 128 x 128 of C, a warp 64 x 32, from slices of 32 of the depth that
 * arrive STAGES - 1 slices ahead. In shared memory an operand's slice keeps its order in memory, in
 * rows of 4 (deep: 16) pieces of 8 elements that are permuted so that a fragment's 8 rows lie in
 * different banks. */
enum { TILE = 128, DEPTH = 32, STAGES = 4, THREADS = 256, SLICE = TILE * DEPTH };

template <bool DEEP> static __device__ __forceinline__ int piece_at(int row, int piece)
{
    return DEEP ? row * TILE + ((piece ^ (row & 7)) << 3)
                : row * DEPTH + ((piece ^ ((row >> 1) & 3)) << 3);
}

/* Depth from..from + DEPTH of an operand with `rows` rows; what is not there becomes zero. */
template <bool DEEP>
static __device__ __forceinline__ void load_slice(bf16 *to, const bf16 *g, int64_t ld, int64_t rows,
                                                  int64_t from, int64_t depth)
{
    const int across = DEEP ? TILE / 8 : DEPTH / 8;
#pragma unroll
    for (int i = (int)threadIdx.x; i < SLICE / 8; i += THREADS) {
        int row = i / across, piece = i % across;
        int64_t k = from + (DEEP ? row : piece * 8), r = DEEP ? piece * 8 : row;
        bool there = k < depth && r < rows;
        copy_16(to + piece_at<DEEP>(row, piece), there ? g + (DEEP ? k * ld + r : r * ld + k) : g,
                there);
    }
}

/* The 16 x 16 fragment of A at row r and depth k of the slice. */
template <bool DEEP>
static __device__ __forceinline__ void fragment_a(const bf16 *t, int r, int k, uint32_t *a)
{
    int lane = (int)threadIdx.x & 31;
    if (DEEP)
        load_4_transposed(
            t + piece_at<true>(k + (lane >> 4) * 8 + (lane & 7), r / 8 + ((lane >> 3) & 1)), a);
    else
        load_4(t + piece_at<false>(r + (lane & 15), k / 8 + (lane >> 4)), a);
}

/* Two fragments of B: b[0..1] for columns r .. r + 7, b[2..3] for the next 8; depth k .. k + 15. */
template <bool DEEP>
static __device__ __forceinline__ void fragment_b(const bf16 *t, int r, int k, uint32_t *b)
{
    int lane = (int)threadIdx.x & 31;
    if (DEEP)
        load_4_transposed(t + piece_at<true>(k + (lane & 15), r / 8 + (lane >> 4)), b);
    else
        load_4(t + piece_at<false>(r + (lane >> 4) * 8 + (lane & 7), k / 8 + ((lane >> 3) & 1)), b);
}

static __device__ __forceinline__ void put_pair(float *c, float x, float y, bool add)
{
    float2 *p = reinterpret_cast<float2 *>(c), old = add ? *p : make_float2(0.0f, 0.0f);
    *p = make_float2(old.x + x, old.y + y);
}

static __device__ __forceinline__ void put_pair(bf16 *c, float x, float y, bool add)
{
    __nv_bfloat162 *p = reinterpret_cast<__nv_bfloat162 *>(c);
    float2 old = add ? __bfloat1622float2(*p) : make_float2(0.0f, 0.0f);
    *p = __floats2bfloat162_rn(old.x + x, old.y + y);
}

template <typename C, bool A_DEEP, bool B_DEEP>
static __global__ void __launch_bounds__(THREADS) tensor_kernel(product p)
{
    extern __shared__ __align__(128) bf16 slices[]; /* STAGES of A, then of B */
    block_of<bf16, C, A_DEEP, B_DEEP, TILE> w;
    if (!w.find(p))
        return;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int row = warp / 4 * 64, col = warp % 4 * 32;
    int n_slices = (int)((w.depth + DEPTH - 1) / DEPTH);
    float sum[4][4][4] = {};

    for (int i = 0; i < STAGES - 1; i++) {
        if (i < n_slices) {
            load_slice<A_DEEP>(slices + i * SLICE, w.a, p.lda, w.rows, i * DEPTH, w.depth);
            load_slice<B_DEEP>(slices + (STAGES + i) * SLICE, w.b, p.ldb, w.columns, i * DEPTH,
                               w.depth);
        }
        copies_commit();
    }
    for (int i = 0; i < n_slices; i++) {
        copies_wait<STAGES - 2>();
        __syncthreads(); /* slice i is there, and slice i - 1 is no longer read */
        int next = i + STAGES - 1;
        if (next < n_slices) {
            int64_t from = (int64_t)next * DEPTH;
            load_slice<A_DEEP>(slices + next % STAGES * SLICE, w.a, p.lda, w.rows, from, w.depth);
            load_slice<B_DEEP>(slices + (STAGES + next % STAGES) * SLICE, w.b, p.ldb, w.columns,
                               from, w.depth);
        }
        copies_commit();
        const bf16 *a = slices + i % STAGES * SLICE, *b = slices + (STAGES + i % STAGES) * SLICE;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            uint32_t fa[4][4], fb[2][4];
#pragma unroll
            for (int x = 0; x < 4; x++)
                fragment_a<A_DEEP>(a, row + x * 16, k, fa[x]);
#pragma unroll
            for (int y = 0; y < 2; y++)
                fragment_b<B_DEEP>(b, col + y * 16, k, fb[y]);
#pragma unroll
            for (int x = 0; x < 4; x++)
#pragma unroll
                for (int y = 0; y < 4; y++)
                    multiply_add(sum[x][y], fa[x], fb[y / 2] + y % 2 * 2);
        }
    }

#pragma unroll
    for (int y = 0; y < 4; y++) {
        int at = col + y * 8 + lane % 4 * 2;
        if (at >= w.columns)
            continue;
        float b0 = w.bias ? to_real(w.bias[at]) : 0.0f,
              b1 = w.bias ? to_real(w.bias[at + 1]) : 0.0f;
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int r = row + x * 16 + lane / 4;
            if (r < w.rows)
                put_pair(w.c + r * p.ldc + at, sum[x][y][0] + b0, sum[x][y][1] + b1, p.add);
            if (r + 8 < w.rows)
                put_pair(w.c + (r + 8) * p.ldc + at, sum[x][y][2] + b0, sum[x][y][3] + b1, p.add);
        }
    }
}

/* ---- plain arithmetic -------------------------------------------------------------------------
 */

enum { SMALL = 64, SMALL_DEPTH = 16 };

/* A block of 16 x 16 threads makes 64 x 64 of C, a thread 4 x 4. */
template <typename T, typename C, bool A_DEEP, bool B_DEEP>
static __global__ void __launch_bounds__(THREADS) plain_kernel(product p)
{
    typedef real<T> R;
    __shared__ R a[SMALL_DEPTH][SMALL + 1], b[SMALL_DEPTH][SMALL + 1];
    block_of<T, C, A_DEEP, B_DEEP, SMALL> w;
    if (!w.find(p))
        return;
    int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16;
    R sum[4][4] = {};
    for (int64_t from = 0; from < w.depth; from += SMALL_DEPTH) {
        __syncthreads();
        for (int i = (int)threadIdx.x; i < SMALL * SMALL_DEPTH; i += THREADS) {
            int r = A_DEEP ? i % SMALL : i / SMALL_DEPTH, k = A_DEEP ? i / SMALL : i % SMALL_DEPTH;
            bool there = r < w.rows && from + k < w.depth;
            a[k][r] =
                there ? to_real(w.a[A_DEEP ? (from + k) * p.lda + r : r * p.lda + from + k]) : R(0);
            r = B_DEEP ? i % SMALL : i / SMALL_DEPTH;
            k = B_DEEP ? i / SMALL : i % SMALL_DEPTH;
            there = r < w.columns && from + k < w.depth;
            b[k][r] =
                there ? to_real(w.b[B_DEEP ? (from + k) * p.ldb + r : r * p.ldb + from + k]) : R(0);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SMALL_DEPTH; k++)
#pragma unroll
            for (int x = 0; x < 4; x++)
#pragma unroll
                for (int y = 0; y < 4; y++)
                    sum[x][y] += a[k][ty + x * 16] * b[k][tx + y * 16];
    }
    for (int x = 0; x < 4; x++)
        for (int y = 0; y < 4; y++) {
            int r = ty + x * 16, at = tx + y * 16;
            if (r >= w.rows || at >= w.columns)
                continue;
            C *c = w.c + r * p.ldc + at;
            R v = sum[x][y] + (w.bias ? to_real(w.bias[at]) : R(0));
            *c = from_real<C>(p.add ? to_real(*c) + v : v);
        }
}

/* ---- launches ---------------------------------------------------------------------------------
 */

template <bool A_DEEP> static dim3 grid_of(const product &p, int size)
{
    unsigned x = (unsigned)ceil_div(p.n, size);
    if (A_DEEP)
        return dim3(x, (unsigned)ceil_div(p.m, size), (unsigned)p.experts);
    /* At most one tile of each expert is not full. */
    int64_t partial = p.experts < p.m ? p.experts : p.m;
    return dim3(x, (unsigned)(p.m / size + partial));
}

template <typename T, typename C, bool A_DEEP, bool B_DEEP>
static void launch_plain(cuda_queue *q, const product &p)
{
    plain_kernel<T, C, A_DEEP, B_DEEP><<<grid_of<A_DEEP>(p, SMALL), THREADS, 0, q->stream>>>(p);
}

template <typename C, bool A_DEEP, bool B_DEEP>
static void launch_tensor(cuda_queue *q, const product &p)
{
    const int bytes = 2 * STAGES * SLICE * (int)sizeof(bf16);
    if (cuda_ok(q->device,
                cudaFuncSetAttribute(tensor_kernel<C, A_DEEP, B_DEEP>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                "grouped_linear"))
        tensor_kernel<C, A_DEEP, B_DEEP>
            <<<grid_of<A_DEEP>(p, TILE), THREADS, bytes, q->stream>>>(p);
}

/* Can BF16 operands and C be moved by 16 bytes? */
template <bool A_DEEP>
static bool in_vectors(const product &p, const mt_tensor *a, const mt_tensor *b, const mt_tensor *c)
{
    return a->dtype == MT_BF16 && is_aligned(a) && is_aligned(b) && is_aligned(c) && p.n % 8 == 0 &&
           (A_DEEP ? p.m : p.k) % 8 == 0;
}

/* C has the compute dtype, or (weights) the statistics dtype. */
template <bool A_DEEP, bool B_DEEP>
static void launch_kernel(cuda_queue *q, const product &p, const mt_tensor *a, const mt_tensor *b,
                          const mt_tensor *c)
{
    bool vectors = in_vectors<A_DEEP>(p, a, b, c);
    if (vectors && grouped_wgmma_runs(q->device) && grouped_wgmma(q, &p, A_DEEP, B_DEEP))
        return;
    vectors &= q->device->shared_bytes >= 2 * STAGES * SLICE * (int64_t)sizeof(bf16);
    if (vectors && A_DEEP)
        launch_tensor<float, A_DEEP, B_DEEP>(q, p);
    else if (vectors)
        launch_tensor<bf16, A_DEEP, B_DEEP>(q, p);
    else if (a->dtype == MT_F64)
        launch_plain<double, double, A_DEEP, B_DEEP>(q, p);
    else if (a->dtype == MT_F32)
        launch_plain<float, float, A_DEEP, B_DEEP>(q, p);
    else if (A_DEEP)
        launch_plain<bf16, float, A_DEEP, B_DEEP>(q, p);
    else
        launch_plain<bf16, bf16, A_DEEP, B_DEEP>(q, p);
}

/* The product of expert e, whose rows are [from, to). */
template <bool A_DEEP, bool B_DEEP>
static cuda_product expert_product(const product &p, int e, int64_t from, int64_t to,
                                   mt_dtype in_dtype, mt_dtype c_dtype)
{
    int64_t in = mt_dtype_size(in_dtype), out = mt_dtype_size(c_dtype);
    cuda_product g = {};
    g.trans_a = A_DEEP;
    g.trans_b = !B_DEEP;
    g.m = A_DEEP ? p.m : to - from;
    g.n = p.n;
    g.k = A_DEEP ? to - from : p.k;
    g.in_dtype = in_dtype;
    g.c_dtype = c_dtype;
    g.a = static_cast<const char *>(p.a) + from * p.lda * in;
    g.b = static_cast<const char *>(p.b) + (A_DEEP ? from : e * (B_DEEP ? p.k : p.n)) * p.ldb * in;
    g.c = static_cast<char *>(p.c) + (A_DEEP ? e * p.m : from) * p.ldc * out;
    g.lda = p.lda;
    g.ldb = p.ldb;
    g.ldc = p.ldc;
    if (p.bias)
        g.bias = static_cast<const char *>(p.bias) + e * p.ld_bias * out;
    g.beta = p.add ? 1 : 0;
    return g;
}

/* `offsets` are p.offsets in host memory, NULL when no expert can have many rows. */
template <bool A_DEEP, bool B_DEEP>
static void launch(cuda_queue *q, product p, const int32_t *offsets, void *work, const mt_tensor *a,
                   const mt_tensor *b, const mt_tensor *c)
{
    bool few = !offsets;
    p.many = offsets ? MANY_ROWS : INT32_MAX;
    if (p.m == 0 || p.n == 0)
        return;
    for (int e = 0; offsets && e < p.experts; e++) {
        int rows = offsets[e + 1] - offsets[e];
        few |= rows < MANY_ROWS && (rows > 0 || (A_DEEP && !p.add));
    }
    if (offsets && !cuda_lanes_fork(q, work))
        return;
    if (few)
        launch_kernel<A_DEEP, B_DEEP>(q, p, a, b, c);
    for (int e = 0; offsets && e < p.experts; e++)
        if (offsets[e + 1] - offsets[e] >= MANY_ROWS) {
            cuda_product g = expert_product<A_DEEP, B_DEEP>(p, e, offsets[e], offsets[e + 1],
                                                            a->dtype, c->dtype);
            cuda_lanes_gemm(q, e, &g);
        }
    if (offsets)
        cuda_lanes_join(q);
}

/* ---- the bias ---------------------------------------------------------------------------------
 */

enum { BIAS_LANES = 8 };

/* C = the sum of an expert's rows of A. */
template <typename T> static __global__ void bias_kernel(product p)
{
    typedef real<T> R;
    __shared__ R part[BIAS_LANES][32];
    int e = (int)blockIdx.y;
    int64_t col = (int64_t)blockIdx.x * 32 + threadIdx.x;
    R sum = 0;
    if (col < p.n)
        for (int64_t row = p.offsets[e] + (int)threadIdx.y; row < p.offsets[e + 1];
             row += BIAS_LANES)
            sum += to_real(static_cast<const T *>(p.a)[row * p.lda + col]);
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || col >= p.n)
        return;
    for (int i = 1; i < BIAS_LANES; i++)
        sum += part[i][threadIdx.x];
    R *c = static_cast<R *>(p.c) + e * p.ldc + col;
    *c = p.add ? *c + sum : sum;
}

template <typename T> static void bias_gradient(cuda_queue *q, const product &p)
{
    bias_kernel<T><<<dim3((unsigned)ceil_div(p.n, 32), (unsigned)p.experts), dim3(32, BIAS_LANES),
                     0, q->stream>>>(p);
}

/* ---- the operation ----------------------------------------------------------------------------
 */

static product product_of(const mt_op_call *c, const mt_tensor *a, const mt_tensor *b,
                          const mt_tensor *result)
{
    product p = {};
    p.offsets = static_cast<const int32_t *>(c->in[IN_OFFSETS].data);
    p.experts = (int)c->in[IN_OFFSETS].cols - 1;
    p.a = a->data;
    p.lda = a->ld;
    p.b = b->data;
    p.ldb = b->ld;
    p.c = result->data;
    p.ldc = result->ld;
    return p;
}

/* May there be experts that are GEMMs of their own? */
static bool in_lanes(const cuda_device *d, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X];
    return x->rows >= MANY_ROWS && !(x->dtype == MT_BF16 && grouped_wgmma_runs(d));
}

/* How the rows fell to experts, in host memory; NULL when it does not matter. */
static const int32_t *host_offsets(cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *offsets = &c->in[IN_OFFSETS];
    return in_lanes(q->device, c)
               ? cuda_read_numbers(q, static_cast<const int32_t *>(offsets->data), offsets->cols)
               : NULL;
}

static void grouped_linear_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *y = &c->out[0];
    product p = product_of(c, x, w, y);
    (void)d;
    p.m = y->rows;
    p.n = y->cols;
    p.k = x->cols;
    if (c->n_in > IN_BIAS && c->in[IN_BIAS].data) {
        p.bias = c->in[IN_BIAS].data;
        p.ld_bias = c->in[IN_BIAS].ld;
    }
    launch<false, false>(q, p, host_offsets(q, c), c->work, x, w, y);
}

static void grouped_linear_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W], *dy = &c->d_out[0];
    const mt_tensor *dx = &c->d_in[IN_X], *dw = &c->d_in[IN_W], *db = &c->d_in[IN_BIAS];
    const int32_t *offsets = host_offsets(q, c);
    (void)d;
    if (dx->data) {
        product p = product_of(c, dy, w, dx);
        p.m = dx->rows;
        p.n = dx->cols;
        p.k = dy->cols;
        p.add = c->d_accumulate >> IN_X & 1u;
        launch<false, true>(q, p, offsets, c->work, dy, w, dx);
    }
    if (dw->data) {
        product p = product_of(c, dy, x, dw);
        p.m = dy->cols;
        p.n = dw->cols;
        p.tokens = dy->rows;
        p.add = c->d_accumulate >> IN_W & 1u;
        launch<true, true>(q, p, offsets, c->work, dy, x, dw);
    }
    if (c->n_in > IN_BIAS && db->data) {
        product p = product_of(c, dy, dy, db);
        p.n = dy->cols;
        p.add = c->d_accumulate >> IN_BIAS & 1u;
        FOR_DTYPE(dy->dtype, bias_gradient, q, p);
    }
}

static int64_t grouped_linear_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    (void)backward;
    return in_lanes(d, c) ? (int64_t)CUDA_LANES * CUDA_LANE_BYTES : 0;
}

/* Lanes take device memory, and are made now rather than in the midst of a step. */
static int64_t grouped_linear_plan(const cuda_device *d, const mt_op_call *c, bool backward)
{
    if (in_lanes(d, c))
        (void)cuda_lanes_prepare(d); /* the first call tells what is wrong */
    return grouped_linear_workspace(d, c, backward);
}

const cuda_op cuda_op_grouped_linear = { grouped_linear_forward, grouped_linear_backward,
                                         grouped_linear_workspace, grouped_linear_plan };
