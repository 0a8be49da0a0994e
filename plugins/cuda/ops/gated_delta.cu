/* SPDX-License-Identifier: Apache-2.0
 *
 * gated_delta: the recurrences, token by token. The columns of a state do not know of each other:
 * a block has DELTA_COLS of them for one head of one document, four threads a column, each with a
 * quarter of its rows in registers. Forward leaves the state before every chunk; backward first
 * runs all chunks at once from there, for what each token wrote, then goes through the documents
 * from their ends. Gradients that sum over columns are gated_delta_keys.cu's.
 */
#include "gated_delta.cuh"

enum {
    DELTA_COLS = 32,
    DELTA_PARTS = 4, /* threads of a column */
    DELTA_THREADS = DELTA_COLS * DELTA_PARTS,
    DELTA_STAGE = 16 /* tokens whose q and k are in shared memory at once; divides a chunk */
};

/* q and k of the tokens at work, normalised, and numbers of theirs. */
template <typename R, int DK> struct delta_stage {
    R q[DELTA_STAGE][DK], k[DELTA_STAGE][DK];
    R qk[DELTA_STAGE]; /* q . k */
    R decay[DELTA_STAGE], beta[DELTA_STAGE];
};

/* Loads n tokens from `first` on; a warp has every fourth. Columns from k_dim on become 0. */
template <typename T, int DK>
static __device__ void load_stage(const delta_args &a, int v_head, int64_t first, int n,
                                  delta_stage<real<T>, DK> *s)
{
    typedef real<T> R;
    int lane = (int)(threadIdx.x & 31u), warp = (int)(threadIdx.x >> 5);
    int k_head = v_head / a.group;
    __syncthreads(); /* the last use of *s is over */
    for (int i = warp; i < n; i += DELTA_THREADS / 32) {
        int64_t t = first + i;
        const T *q = static_cast<const T *>(a.q) + t * a.q_ld + (int64_t)k_head * a.k_dim;
        const T *k = static_cast<const T *>(a.k) + t * a.k_ld + (int64_t)k_head * a.k_dim;
        R qq = 0, kk = 0, qk = 0;
        for (int j = lane; j < DK; j += 32) {
            R x = j < a.k_dim ? to_real(q[j]) : R(0), y = j < a.k_dim ? to_real(k[j]) : R(0);
            s->q[i][j] = x;
            s->k[i][j] = y;
            qq += x * x;
            kk += y * y;
            qk += x * y;
        }
        R q_root = (R)(a.scale / sqrt((double)warp_sum(qq) + a.eps));
        R k_root = (R)(1.0 / sqrt((double)warp_sum(kk) + a.eps));
        for (int j = lane; j < DK; j += 32) {
            s->q[i][j] *= q_root;
            s->k[i][j] *= k_root;
        }
        qk = warp_sum(qk) * q_root * k_root;
        if (lane == 0) {
            s->qk[i] = qk;
            s->decay[i] = exponential(static_cast<const R *>(a.g)[t * a.g_ld + v_head]);
            s->beta[i] = to_real(static_cast<const T *>(a.beta)[t * a.beta_ld + v_head]);
        }
    }
    __syncthreads();
}

/* Sum over the threads of a column. */
template <typename R> static __device__ __forceinline__ R column_sum(R x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* A thread's part of a state's column: rows part, part + DELTA_PARTS, ... */
template <typename R, int DK> struct delta_column {
    static const int rows = DK / DELTA_PARTS;
    R x[rows];

    __device__ __forceinline__ void zero()
    {
#pragma unroll
        for (int r = 0; r < rows; r++)
            x[r] = 0;
    }
    __device__ __forceinline__ void load(const R *state, int part, int k_dim, int v_dim, int col)
    {
#pragma unroll
        for (int r = 0; r < rows; r++) {
            int i = r * DELTA_PARTS + part;
            x[r] = i < k_dim && col < v_dim ? state[(int64_t)i * v_dim + col] : R(0);
        }
    }
    __device__ __forceinline__ void store(R *state, int part, int k_dim, int v_dim, int col) const
    {
#pragma unroll
        for (int r = 0; r < rows; r++) {
            int i = r * DELTA_PARTS + part;
            if (i < k_dim && col < v_dim)
                state[(int64_t)i * v_dim + col] = x[r];
        }
    }
};

/* Tokens [first, first + n) through the state. OUT: their results; else what is left of v. */
template <typename T, int DK, bool OUT>
static __device__ void run_forward(const delta_args &a, int v_head, int64_t first, int n, int col,
                                   int part, delta_column<real<T>, DK> *s,
                                   delta_stage<real<T>, DK> *stage)
{
    typedef real<T> R;
    int64_t at = (int64_t)v_head * a.v_dim + col;
    bool inside = col < a.v_dim;
    for (int from = 0; from < n; from += DELTA_STAGE) {
        int m = n - from < DELTA_STAGE ? n - from : DELTA_STAGE;
        load_stage<T, DK>(a, v_head, first + from, m, stage);
        for (int i = 0; i < m; i++) {
            int64_t t = first + from + i;
            R v = inside ? to_real(static_cast<const T *>(a.v)[t * a.v_ld + at]) : R(0);
            R known = 0, out = 0, decay = stage->decay[i];
#pragma unroll
            for (int r = 0; r < delta_column<R, DK>::rows; r++) {
                s->x[r] *= decay;
                known += s->x[r] * stage->k[i][r * DELTA_PARTS + part];
                if (OUT)
                    out += s->x[r] * stage->q[i][r * DELTA_PARTS + part];
            }
            R rest = v - column_sum(known), write = stage->beta[i] * rest;
            if (OUT)
                out = column_sum(out) + stage->qk[i] * write;
#pragma unroll
            for (int r = 0; r < delta_column<R, DK>::rows; r++)
                s->x[r] += stage->k[i][r * DELTA_PARTS + part] * write;
            if (part != 0 || !inside)
                continue;
            if (OUT)
                static_cast<T *>(a.out)[t * a.out_ld + at] = from_real<T>(out);
            else
                static_cast<R *>(a.rest)[t * a.v_heads * a.v_dim + at] = rest;
        }
    }
}

/* Grid: blocks of columns, v heads, documents. */
template <typename T, int DK>
static __global__ void __launch_bounds__(DELTA_THREADS) forward_kernel(delta_args a)
{
    typedef real<T> R;
    __shared__ delta_stage<R, DK> stage;
    int col = (int)(blockIdx.x * DELTA_COLS + threadIdx.x / DELTA_PARTS);
    int part = (int)(threadIdx.x % DELTA_PARTS), v_head = (int)blockIdx.y;
    int64_t document = blockIdx.z, size = (int64_t)a.k_dim * a.v_dim;
    int64_t start = a.doc_starts[document], end = a.doc_starts[document + 1];
    R *kept = static_cast<R *>(a.state) + v_head * size;
    delta_column<R, DK> s;
    if (a.continues)
        s.load(kept, part, a.k_dim, a.v_dim, col);
    else
        s.zero();
    for (int64_t t = start; t < end; t += DELTA_CHUNK) {
        int64_t slot = document + start / DELTA_CHUNK + (t - start) / DELTA_CHUNK;
        if (a.aux)
            s.store(static_cast<R *>(a.aux) + (slot * a.v_heads + v_head) * size, part, a.k_dim,
                    a.v_dim, col);
        int n = (int)(end - t < DELTA_CHUNK ? end - t : DELTA_CHUNK);
        run_forward<T, DK, true>(a, v_head, t, n, col, part, &s, &stage);
    }
    if (a.state)
        s.store(kept, part, a.k_dim, a.v_dim, col);
}

/* Grid: blocks of columns, v heads, states of aux. */
template <typename T, int DK>
static __global__ void __launch_bounds__(DELTA_THREADS) rest_kernel(delta_args a)
{
    typedef real<T> R;
    __shared__ delta_stage<R, DK> stage;
    int col = (int)(blockIdx.x * DELTA_COLS + threadIdx.x / DELTA_PARTS);
    int part = (int)(threadIdx.x % DELTA_PARTS), v_head = (int)blockIdx.y;
    delta_chunk chunk;
    if (!find_chunk(a, blockIdx.z, &chunk))
        return;
    delta_column<R, DK> s;
    s.load(static_cast<const R *>(a.aux) +
               ((int64_t)blockIdx.z * a.v_heads + v_head) * a.k_dim * a.v_dim,
           part, a.k_dim, a.v_dim, col);
    run_forward<T, DK, false>(a, v_head, chunk.first, chunk.n, col, part, &s, &stage);
}

/* The gradient by the state, from the end of each document. Grid as in forward. */
template <typename T, int DK>
static __global__ void __launch_bounds__(DELTA_THREADS) reverse_kernel(delta_args a)
{
    typedef real<T> R;
    __shared__ delta_stage<R, DK> stage;
    int col = (int)(blockIdx.x * DELTA_COLS + threadIdx.x / DELTA_PARTS);
    int part = (int)(threadIdx.x % DELTA_PARTS), v_head = (int)blockIdx.y;
    int64_t document = blockIdx.z, at = (int64_t)v_head * a.v_dim + col;
    int64_t start = a.doc_starts[document], end = a.doc_starts[document + 1];
    bool inside = col < a.v_dim;
    delta_column<R, DK> s;
    s.zero();
    for (int64_t chunk = ceil_div(end - start, DELTA_CHUNK) - 1; chunk >= 0; chunk--) {
        int64_t first = start + chunk * DELTA_CHUNK;
        int64_t slot = document + start / DELTA_CHUNK + chunk;
        int n = (int)(end - first < DELTA_CHUNK ? end - first : DELTA_CHUNK);
        s.store(static_cast<R *>(a.d_states) + (slot * a.v_heads + v_head) * a.k_dim * a.v_dim,
                part, a.k_dim, a.v_dim, col);
        for (int from = (n - 1) / DELTA_STAGE * DELTA_STAGE; from >= 0; from -= DELTA_STAGE) {
            int m = n - from < DELTA_STAGE ? n - from : DELTA_STAGE;
            load_stage<T, DK>(a, v_head, first + from, m, &stage);
            for (int i = m - 1; i >= 0; i--) {
                int64_t t = first + from + i;
                R d_out =
                    inside ? to_real(static_cast<const T *>(a.d_out)[t * a.d_out_ld + at]) : R(0);
                R d_write = 0;
#pragma unroll
                for (int r = 0; r < delta_column<R, DK>::rows; r++) {
                    d_write += s.x[r] * stage.k[i][r * DELTA_PARTS + part];
                    s.x[r] += stage.q[i][r * DELTA_PARTS + part] * d_out;
                }
                d_write = column_sum(d_write) + stage.qk[i] * d_out;
                R dv = stage.beta[i] * d_write;
#pragma unroll
                for (int r = 0; r < delta_column<R, DK>::rows; r++)
                    s.x[r] = (s.x[r] - stage.k[i][r * DELTA_PARTS + part] * dv) * stage.decay[i];
                if (part != 0 || !inside)
                    continue;
                static_cast<R *>(a.d_rest)[t * a.v_heads * a.v_dim + at] = d_write;
                if (a.dv) {
                    T *to = static_cast<T *>(a.dv) + t * a.dv_ld + at;
                    *to = from_real<T>(a.add_v ? to_real(*to) + dv : dv);
                }
            }
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static dim3 grid_of(const delta_args &a, int64_t depth)
{
    return dim3((unsigned)ceil_div(a.v_dim, DELTA_COLS), (unsigned)a.v_heads, (unsigned)depth);
}

template <typename T, int DK> static void scan(cuda_queue *q, const delta_args &a, bool backward)
{
    if (!backward) {
        forward_kernel<T, DK><<<grid_of(a, a.documents), DELTA_THREADS, 0, q->stream>>>(a);
        return;
    }
    dim3 chunks = grid_of(a, delta_slots(a.tokens, a.documents));
    rest_kernel<T, DK><<<chunks, DELTA_THREADS, 0, q->stream>>>(a);
    reverse_kernel<T, DK><<<grid_of(a, a.documents), DELTA_THREADS, 0, q->stream>>>(a);
}

template <typename T> static void scan_typed(cuda_queue *q, const delta_args &a, bool backward)
{
    if (a.k_dim <= 32)
        scan<T, 32>(q, a, backward);
    else if (a.k_dim <= 64)
        scan<T, 64>(q, a, backward);
    else
        scan<T, 128>(q, a, backward);
}

static void run(cuda_queue *q, mt_dtype dtype, const delta_args &a, bool backward)
{
    FOR_DTYPE(dtype, scan_typed, q, a, backward);
}

static bool fits(cuda_device *d, const delta_args &a)
{
    if (a.k_dim <= 128 && a.v_dim <= 128)
        return true;
    cuda_fail(d, MT_ERR_UNSUPPORTED, "gated_delta with heads of %d and %d columns: at most 128",
              a.k_dim, a.v_dim);
    return false;
}

static delta_args args_of(const mt_op_call *c)
{
    const mt_delta_attr *attr = static_cast<const mt_delta_attr *>(c->attr);
    delta_args a = {};
    a.q = c->in[0].data;
    a.k = c->in[1].data;
    a.v = c->in[2].data;
    a.g = c->in[3].data;
    a.beta = c->in[4].data;
    a.q_ld = c->in[0].ld;
    a.k_ld = c->in[1].ld;
    a.v_ld = c->in[2].ld;
    a.g_ld = c->in[3].ld;
    a.beta_ld = c->in[4].ld;
    a.aux = c->aux[0].data;
    a.doc_starts = c->batch.doc_starts;
    a.tokens = c->in[2].rows;
    a.documents = c->batch.documents;
    a.k_heads = attr->k_heads;
    a.v_heads = attr->v_heads;
    a.group = attr->v_heads / attr->k_heads;
    a.k_dim = attr->k_dim;
    a.v_dim = attr->v_dim;
    a.eps = attr->eps;
    a.scale = attr->scale;
    return a;
}

static void gated_delta_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    delta_args a = args_of(c);
    if (a.tokens == 0 || !fits(d, a))
        return;
    a.out = c->out[0].data;
    a.out_ld = c->out[0].ld;
    a.state = c->state[0].data;
    a.continues = a.state && c->pass == MT_PASS_DECODE;
    if (c->pass != MT_PASS_TRAIN)
        a.aux = NULL;
    run(q, c->in[2].dtype, a, false);
}

/* The parts of a call's work, in this order: rest, d_rest, d_states. */
static int64_t rest_bytes(const mt_op_call *c)
{
    const mt_tensor *v = &c->in[2];
    return align_256(v->rows * v->cols * mt_dtype_size(c->aux[0].dtype));
}

static int64_t gated_delta_work(const cuda_device *d, const mt_op_call *c, bool backward)
{
    const mt_delta_attr *attr = static_cast<const mt_delta_attr *>(c->attr);
    int64_t slots = delta_slots(c->in[2].rows, c->batch.documents);
    int64_t state = (int64_t)attr->v_heads * attr->k_dim * attr->v_dim;
    (void)d;
    if (!backward)
        return 0;
    return 2 * rest_bytes(c) + slots * state * mt_dtype_size(c->aux[0].dtype);
}

static void gated_delta_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    delta_args a = args_of(c);
    char *work = static_cast<char *>(c->work);
    if (a.tokens == 0 || !fits(d, a))
        return;
    a.d_out = c->d_out[0].data;
    a.d_out_ld = c->d_out[0].ld;
    a.dq = c->d_in[0].data;
    a.dk = c->d_in[1].data;
    a.dv = c->d_in[2].data;
    a.dg = c->d_in[3].data;
    a.d_beta = c->d_in[4].data;
    a.dq_ld = c->d_in[0].ld;
    a.dk_ld = c->d_in[1].ld;
    a.dv_ld = c->d_in[2].ld;
    a.dg_ld = c->d_in[3].ld;
    a.d_beta_ld = c->d_in[4].ld;
    a.add_q = c->d_accumulate >> 0 & 1u;
    a.add_k = c->d_accumulate >> 1 & 1u;
    a.add_v = c->d_accumulate >> 2 & 1u;
    a.add_g = c->d_accumulate >> 3 & 1u;
    a.add_beta = c->d_accumulate >> 4 & 1u;
    a.rest = work;
    a.d_rest = work + rest_bytes(c);
    a.d_states = work + 2 * rest_bytes(c);
    run(q, c->in[2].dtype, a, true);
    delta_keys_backward(d, q, c->in[2].dtype, &a);
}

const cuda_op cuda_op_gated_delta = { gated_delta_forward, gated_delta_backward, gated_delta_work };
