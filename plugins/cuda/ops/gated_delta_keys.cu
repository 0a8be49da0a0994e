/* SPDX-License-Identifier: Apache-2.0
 *
 * gated_delta, backward: the gradients by q, k, g and beta. With the states and their gradients at
 * the ends of all chunks known, and what every token wrote, chunks are independent: a block has one
 * chunk and k head and goes through the v heads that share it. Letters are those of the CPU
 * backend's gated_delta.inc: c_t the sum of g up to token t of the chunk, D(t, s) = e^(c_t - c_s),
 * d_t = beta_t w_t what token t writes, e_t = -beta_t dd_t.
 *   dq_t = e^c_t S do_t + sum over s <= t of D(t, s) (do_t . d_s) k_s
 *   dk_t = e^c_t S e_t + sum over s < t of D(t, s) (e_t . d_s) k_s
 *          + sum over s >= t of D(s, t) (do_s . d_t) q_s
 *          + sum over s > t of D(s, t) (e_s . d_t) k_s + x_t,  x_t = D(n, t) dS d_t
 *   dg_t = dg_t+1 + dq_t . q_t - dv_t . v_t, from e^c_n <dS, S> + sum of k_s . x_s downwards
 */
#include "gated_delta.cuh"

enum {
    KEYS_THREADS = 256,
    KEYS_WARPS = KEYS_THREADS / 32,
    KEYS_DEPTH = 16, /* of a product that is in shared memory at once */
    KEYS_TILE = 4,   /* rows and columns of a product that a thread has */
    KEYS_LD = DELTA_CHUNK + 4
};

/* Numbers of each token. */
template <typename R> struct keys_tokens {
    R q_root[DELTA_CHUNK], k_root[DELTA_CHUNK]; /* of the k head; q's with the scale */
    double sum[DELTA_CHUNK];                    /* c_t */
    R from[DELTA_CHUNK], to[DELTA_CHUNK];       /* e^c_t, D(n, t) */
    R beta[DELTA_CHUNK];
    R dq_q[DELTA_CHUNK], x_k[DELTA_CHUNK], dv_v[DELTA_CHUNK];
    R reduce[32];
};

/* Everything in shared memory; after it dq and dk, [DELTA_CHUNK, k_dim] each. */
template <typename R> struct keys_shared {
    keys_tokens<R> tokens;
    R a[KEYS_DEPTH][KEYS_LD], b[KEYS_DEPTH][KEYS_LD];
    R m1[DELTA_CHUNK][KEYS_LD], m2[DELTA_CHUNK][KEYS_LD];
};

/* One thread's part of a 64 x 64 product. */
template <typename R> struct keys_tile {
    R x[KEYS_TILE][KEYS_TILE];
    int row, col; /* of x[0][0] */

    __device__ __forceinline__ keys_tile()
    {
        row = (int)threadIdx.x / 16 * KEYS_TILE;
        col = (int)threadIdx.x % 16 * KEYS_TILE;
        zero();
    }
    __device__ __forceinline__ void zero()
    {
#pragma unroll
        for (int i = 0; i < KEYS_TILE; i++)
#pragma unroll
            for (int j = 0; j < KEYS_TILE; j++)
                x[i][j] = 0;
    }
    /* Adds the product of A [64, depth] and B [depth, 64], whose elements the two functions give.
     */
    template <typename A, typename B>
    __device__ __forceinline__ void add_product(keys_shared<R> *s, int depth, A a, B b)
    {
        for (int from = 0; from < depth; from += KEYS_DEPTH) {
            __syncthreads();
            for (int i = (int)threadIdx.x; i < KEYS_DEPTH * DELTA_CHUNK; i += KEYS_THREADS) {
                int r = i / KEYS_DEPTH, p = i % KEYS_DEPTH;
                s->a[p][r] = from + p < depth ? a(r, from + p) : R(0);
                s->b[p][r] = from + p < depth ? b(from + p, r) : R(0);
            }
            __syncthreads();
#pragma unroll
            for (int p = 0; p < KEYS_DEPTH; p++)
#pragma unroll
                for (int i = 0; i < KEYS_TILE; i++)
#pragma unroll
                    for (int j = 0; j < KEYS_TILE; j++)
                        x[i][j] += s->a[p][row + i] * s->b[p][col + j];
        }
    }
    /* Row r of every tile times factor[r]. */
    __device__ __forceinline__ void scale_rows(const R *factor)
    {
#pragma unroll
        for (int i = 0; i < KEYS_TILE; i++)
#pragma unroll
            for (int j = 0; j < KEYS_TILE; j++)
                x[i][j] *= factor[row + i];
    }
};

/* What the block works on. */
template <typename T> struct keys_work {
    typedef real<T> R;
    const delta_args &a;
    delta_chunk chunk;
    int64_t slot;
    int k_head, v_head;
    keys_shared<R> *s;

    __device__ __forceinline__ R q(int t, int i) const
    {
        if (t >= chunk.n || i >= a.k_dim)
            return 0;
        return s->tokens.q_root[t] * to_real(static_cast<const T *>(
                                         a.q)[(chunk.first + t) * a.q_ld + k_head * a.k_dim + i]);
    }
    __device__ __forceinline__ R k(int t, int i) const
    {
        if (t >= chunk.n || i >= a.k_dim)
            return 0;
        return s->tokens.k_root[t] * to_real(static_cast<const T *>(
                                         a.k)[(chunk.first + t) * a.k_ld + k_head * a.k_dim + i]);
    }
    __device__ __forceinline__ R v(int t, int j) const
    {
        return to_real(static_cast<const T *>(
            a.v)[(chunk.first + t) * a.v_ld + (int64_t)v_head * a.v_dim + j]);
    }
    __device__ __forceinline__ R d_out(int t, int j) const
    {
        if (t >= chunk.n)
            return 0;
        return to_real(static_cast<const T *>(
            a.d_out)[(chunk.first + t) * a.d_out_ld + (int64_t)v_head * a.v_dim + j]);
    }
    __device__ __forceinline__ int64_t rest_at(int t, int j) const
    {
        return ((chunk.first + t) * a.v_heads + v_head) * a.v_dim + j;
    }
    __device__ __forceinline__ R rest(int t, int j) const
    {
        return static_cast<const R *>(a.rest)[rest_at(t, j)];
    }
    __device__ __forceinline__ R d_rest(int t, int j) const
    {
        return static_cast<const R *>(a.d_rest)[rest_at(t, j)];
    }
    __device__ __forceinline__ R write(int t, int j) const /* d_t */
    {
        return t < chunk.n ? s->tokens.beta[t] * rest(t, j) : R(0);
    }
    __device__ __forceinline__ R e(int t, int j) const
    {
        return t < chunk.n ? -s->tokens.beta[t] * d_rest(t, j) : R(0);
    }
    __device__ __forceinline__ const R *state_of(const void *states) const
    {
        return static_cast<const R *>(states) + (slot * a.v_heads + v_head) * a.k_dim * a.v_dim;
    }
};

/* 1 / norm of the chunk's rows of q, with the scale, and k; dq and dk start at 0. */
template <typename T>
static __device__ void start_chunk(const keys_work<T> &w, real<T> *dq, real<T> *dk)
{
    typedef real<T> R;
    const delta_args &a = w.a;
    int lane = (int)(threadIdx.x & 31u), warp = (int)(threadIdx.x >> 5);
    for (int t = warp; t < w.chunk.n; t += KEYS_WARPS) {
        const T *q =
            static_cast<const T *>(a.q) + (w.chunk.first + t) * a.q_ld + w.k_head * a.k_dim;
        const T *k =
            static_cast<const T *>(a.k) + (w.chunk.first + t) * a.k_ld + w.k_head * a.k_dim;
        R qq = 0, kk = 0;
        for (int i = lane; i < a.k_dim; i += 32) {
            qq += to_real(q[i]) * to_real(q[i]);
            kk += to_real(k[i]) * to_real(k[i]);
        }
        qq = warp_sum(qq);
        kk = warp_sum(kk);
        if (lane == 0) {
            w.s->tokens.q_root[t] = (R)(a.scale / sqrt((double)qq + a.eps));
            w.s->tokens.k_root[t] = (R)(1.0 / sqrt((double)kk + a.eps));
        }
    }
    for (int i = (int)threadIdx.x; i < DELTA_CHUNK * a.k_dim; i += KEYS_THREADS)
        dq[i] = dk[i] = 0;
}

/* Decays and beta of the v head, the gradient by beta, and dv . v. */
template <typename T> static __device__ void start_head(const keys_work<T> &w)
{
    typedef real<T> R;
    const delta_args &a = w.a;
    keys_tokens<R> *k = &w.s->tokens;
    int lane = (int)(threadIdx.x & 31u), warp = (int)(threadIdx.x >> 5), n = w.chunk.n;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int t = 0; t < n; t++)
            k->sum[t] = sum +=
                (double)static_cast<const R *>(a.g)[(w.chunk.first + t) * a.g_ld + w.v_head];
    }
    __syncthreads();
    for (int t = (int)threadIdx.x; t < DELTA_CHUNK; t += KEYS_THREADS) {
        k->from[t] = t < n ? exponential((R)k->sum[t]) : R(0);
        k->to[t] = t < n ? exponential((R)(k->sum[n - 1] - k->sum[t])) : R(0);
        k->beta[t] = t < n ? to_real(static_cast<const T *>(
                                 a.beta)[(w.chunk.first + t) * a.beta_ld + w.v_head])
                           : R(0);
        k->dq_q[t] = k->x_k[t] = 0;
    }
    __syncthreads();
    for (int t = warp; t < n; t += KEYS_WARPS) {
        R by_beta = 0, dv_v = 0;
        for (int j = lane; j < a.v_dim; j += 32) {
            R d = w.d_rest(t, j);
            by_beta += d * w.rest(t, j);
            dv_v += d * w.v(t, j);
        }
        by_beta = warp_sum(by_beta);
        dv_v = warp_sum(dv_v) * k->beta[t];
        if (lane != 0)
            continue;
        k->dv_v[t] = dv_v;
        if (a.d_beta) {
            T *to = static_cast<T *>(a.d_beta) + (w.chunk.first + t) * a.d_beta_ld + w.v_head;
            *to = from_real<T>(a.add_beta ? to_real(*to) + by_beta : by_beta);
        }
    }
}

/* m1 = D(t, s) (do_t . d_s) for s <= t, m2 = D(t, s) (e_t . d_s) for s < t; else 0. */
template <typename T> static __device__ void pairs(const keys_work<T> &w)
{
    typedef real<T> R;
    const keys_tokens<R> *k = &w.s->tokens;
    keys_tile<R> m1, m2;
    auto write = [&](int j, int s) { return w.write(s, j); };
    m1.add_product(
        w.s, w.a.v_dim, [&](int t, int j) { return w.d_out(t, j); }, write);
    m2.add_product(
        w.s, w.a.v_dim, [&](int t, int j) { return w.e(t, j); }, write);
#pragma unroll
    for (int i = 0; i < KEYS_TILE; i++)
#pragma unroll
        for (int j = 0; j < KEYS_TILE; j++) {
            int t = m1.row + i, s = m1.col + j;
            R decay = s <= t && t < w.chunk.n ? exponential((R)(k->sum[t] - k->sum[s])) : R(0);
            w.s->m1[t][s] = m1.x[i][j] * decay;
            w.s->m2[t][s] = s < t ? m2.x[i][j] * decay : R(0);
        }
    __syncthreads();
}

/* to[t] += sum over the tile's columns of x times what `other` gives; row by row in a fixed order.
 */
template <typename R, typename F>
static __device__ __forceinline__ void add_dots(const keys_tile<R> &x, R *to, F other)
{
#pragma unroll
    for (int i = 0; i < KEYS_TILE; i++) {
        R sum = 0;
#pragma unroll
        for (int j = 0; j < KEYS_TILE; j++)
            sum += x.x[i][j] * other(x.row + i, x.col + j);
#pragma unroll
        for (int lanes = 8; lanes > 0; lanes >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (threadIdx.x % 16 == 0)
            to[x.row + i] += sum;
    }
}

template <typename R>
static __device__ __forceinline__ void add_tile(const keys_tile<R> &x, R *to, int first, int k_dim)
{
#pragma unroll
    for (int i = 0; i < KEYS_TILE; i++)
#pragma unroll
        for (int j = 0; j < KEYS_TILE; j++)
            if (first + x.col + j < k_dim)
                to[(x.row + i) * k_dim + first + x.col + j] += x.x[i][j];
}

/* Adds columns first .. first + 64 of dq and dk of the v head. */
template <typename T>
static __device__ void columns(const keys_work<T> &w, int first, real<T> *dq, real<T> *dk)
{
    typedef real<T> R;
    const delta_args &a = w.a;
    const R *state = w.state_of(a.aux), *d_state = w.state_of(a.d_states);
    keys_shared<R> *s = w.s;
    auto key = [&](int t, int i) { return w.k(t, first + i); };
    auto query = [&](int t, int i) { return w.q(t, first + i); };
    auto row_of = [&](const R *m, int i, int j) {
        return first + i < a.k_dim ? m[(int64_t)(first + i) * a.v_dim + j] : R(0);
    };
    keys_tile<R> x;
    x.add_product(
        s, a.v_dim, [&](int t, int j) { return w.d_out(t, j); },
        [&](int j, int i) { return row_of(state, i, j); });
    x.scale_rows(s->tokens.from);
    x.add_product(
        s, DELTA_CHUNK, [&](int t, int p) { return s->m1[t][p]; }, key);
    add_dots(x, s->tokens.dq_q, query);
    add_tile(x, dq, first, a.k_dim);

    x.zero();
    x.add_product(
        s, a.v_dim, [&](int t, int j) { return w.write(t, j); },
        [&](int j, int i) { return row_of(d_state, i, j); });
    x.scale_rows(s->tokens.to);
    add_dots(x, s->tokens.x_k, key);
    add_tile(x, dk, first, a.k_dim);

    x.zero();
    x.add_product(
        s, a.v_dim, [&](int t, int j) { return w.e(t, j); },
        [&](int j, int i) { return row_of(state, i, j); });
    x.scale_rows(s->tokens.from);
    x.add_product(
        s, DELTA_CHUNK, [&](int t, int p) { return s->m1[p][t]; }, query);
    x.add_product(
        s, DELTA_CHUNK, [&](int t, int p) { return s->m2[p][t] + s->m2[t][p]; }, key);
    add_tile(x, dk, first, a.k_dim);
}

template <typename T> static __device__ void decays(const keys_work<T> &w)
{
    typedef real<T> R;
    const delta_args &a = w.a;
    keys_tokens<R> *k = &w.s->tokens;
    const R *state = w.state_of(a.aux), *d_state = w.state_of(a.d_states);
    R dot = 0;
    for (int i = (int)threadIdx.x; i < a.k_dim * a.v_dim; i += KEYS_THREADS)
        dot += state[i] * d_state[i];
    dot = block_sum(dot, k->reduce);
    if (threadIdx.x != 0 || !a.dg)
        return;
    double sum = (double)dot * (double)k->from[w.chunk.n - 1];
    for (int t = 0; t < w.chunk.n; t++)
        sum += (double)k->x_k[t];
    for (int t = w.chunk.n - 1; t >= 0; t--) {
        R *to = static_cast<R *>(a.dg) + (w.chunk.first + t) * a.dg_ld + w.v_head;
        sum += (double)k->dq_q[t] - (double)k->dv_v[t];
        *to = (R)(a.add_g ? sum + (double)*to : sum);
    }
}

/* From the gradient by normalised rows, x root, to that by the rows; `scale` is part of root. */
template <typename T, typename F>
static __device__ void normalise_grad(const keys_work<T> &w, const real<T> *grad, F row,
                                      const real<T> *root, double scale, void *to, int64_t ld,
                                      bool add)
{
    typedef real<T> R;
    const delta_args &a = w.a;
    int lane = (int)(threadIdx.x & 31u), warp = (int)(threadIdx.x >> 5);
    for (int t = warp; to && t < w.chunk.n; t += KEYS_WARPS) {
        const R *g = grad + t * a.k_dim;
        T *d = static_cast<T *>(to) + (w.chunk.first + t) * ld + w.k_head * a.k_dim;
        R along = 0;
        for (int i = lane; i < a.k_dim; i += 32)
            along += g[i] * row(t, i);
        along = warp_sum(along) / (R)(scale * scale);
        for (int i = lane; i < a.k_dim; i += 32) {
            R x = root[t] * (g[i] - along * row(t, i));
            d[i] = from_real<T>(add ? to_real(d[i]) + x : x);
        }
    }
}

/* Grid: states of aux, k heads. */
template <typename T>
static __global__ void __launch_bounds__(KEYS_THREADS) keys_kernel(delta_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    keys_shared<R> *s = reinterpret_cast<keys_shared<R> *>(dynamic);
    R *dq = reinterpret_cast<R *>(s + 1), *dk = dq + DELTA_CHUNK * a.k_dim;
    keys_work<T> w = { a, {}, (int64_t)blockIdx.x, (int)blockIdx.y, 0, s };
    if (!find_chunk(a, w.slot, &w.chunk))
        return;
    start_chunk(w, dq, dk);
    for (int head = 0; head < a.group; head++) {
        w.v_head = w.k_head * a.group + head;
        start_head(w);
        pairs(w);
        for (int first = 0; first < a.k_dim; first += DELTA_CHUNK)
            columns(w, first, dq, dk);
        __syncthreads();
        decays(w);
    }
    __syncthreads();
    normalise_grad(
        w, dq, [&](int t, int i) { return w.q(t, i); }, s->tokens.q_root, a.scale, a.dq, a.dq_ld,
        a.add_q);
    normalise_grad(
        w, dk, [&](int t, int i) { return w.k(t, i); }, s->tokens.k_root, 1, a.dk, a.dk_ld,
        a.add_k);
}

template <typename T> static void launch(cuda_device *d, cuda_queue *q, const delta_args &a)
{
    size_t shared =
        sizeof(keys_shared<real<T>>) + 2 * DELTA_CHUNK * (size_t)a.k_dim * sizeof(real<T>);
    if ((int64_t)shared > d->shared_bytes) {
        cuda_fail(d, MT_ERR_UNSUPPORTED,
                  "gated_delta needs %lld bytes of shared memory a block, this device has %lld",
                  (long long)shared, (long long)d->shared_bytes);
        return;
    }
    if (!cuda_ok(d,
                 cudaFuncSetAttribute(keys_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared),
                 "gated_delta"))
        return;
    dim3 grid((unsigned)delta_slots(a.tokens, a.documents), (unsigned)a.k_heads);
    keys_kernel<T><<<grid, KEYS_THREADS, shared, q->stream>>>(a);
}

void delta_keys_backward(cuda_device *d, cuda_queue *q, mt_dtype dtype, const delta_args *a)
{
    if (a->dq || a->dk || a->dg || a->d_beta)
        FOR_DTYPE(dtype, launch, d, q, *a);
}
