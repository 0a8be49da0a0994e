/* SPDX-License-Identifier: Apache-2.0
 *
 * rope: a block takes a few tokens, forms the sines and cosines of each once, and rotates all heads
 * with them. Backward rotates by the opposite angle.
 */
#include "../common.cuh"

enum { ROPE_THREADS = 256, ROPE_MAX_TOKENS = 8 };

struct rope_args {
    const void *src;
    void *dst;
    int64_t src_ld, dst_ld;
    const int32_t *positions;
    int64_t tokens;
    int tokens_per_block;
    int sign;
    bool add;
    mt_rope_attr attr;
};

static __device__ __forceinline__ void sine_cosine(float x, float *s, float *c)
{
    sincosf(x, s, c);
}
static __device__ __forceinline__ void sine_cosine(double x, double *s, double *c)
{
    sincos(x, s, c);
}

/* What mt_rope_attr::growth multiplies a row with. */
template <typename R>
static __device__ __forceinline__ R growth_at(const mt_rope_attr &attr, int position)
{
    if (!(attr.growth > 0))
        return (R)1;
    return (R)1 + (R)attr.growth * logarithm((R)(1 + position / attr.growth_positions));
}

/* Rotates V pairs (i, i + half), or V / 2 neighbouring ones. V = 1 takes one pair of either. */
template <typename T, int V, bool SPLIT>
static __device__ __forceinline__ void rotate(const T *x, T *y, int i, int half, bool add,
                                              const real<T> *cosine, const real<T> *sine)
{
    typedef real<T> R;
    if (SPLIT) {
        R a[V], b[V];
        load_vector<T, V>(x + i, a);
        load_vector<T, V>(x + half + i, b);
#pragma unroll
        for (int k = 0; k < V; k++) {
            R u = a[k] * cosine[i + k] - b[k] * sine[i + k];
            b[k] = b[k] * cosine[i + k] + a[k] * sine[i + k];
            a[k] = u;
        }
        put_vector<T, V>(y + i, a, add);
        put_vector<T, V>(y + half + i, b, add);
        return;
    }
    const int wide = V == 1 ? 2 : V; /* elements; the pair of index i starts at 2 i */
    R v[wide];
    if (V == 1) {
        v[0] = to_real(x[2 * i]);
        v[1] = to_real(x[2 * i + 1]);
    } else {
        load_vector<T, wide>(x + 2 * i, v);
    }
#pragma unroll
    for (int k = 0; k < wide / 2; k++) {
        R u = v[2 * k] * cosine[i + k] - v[2 * k + 1] * sine[i + k];
        v[2 * k + 1] = v[2 * k + 1] * cosine[i + k] + v[2 * k] * sine[i + k];
        v[2 * k] = u;
    }
    if (V == 1) {
        put_vector<T, 1>(y + 2 * i, v, add);
        put_vector<T, 1>(y + 2 * i + 1, v + 1, add);
    } else {
        put_vector<T, wide>(y + 2 * i, v, add);
    }
}

static __device__ __forceinline__ void fetch_ahead(const void *p)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

template <typename T, int V, bool SPLIT>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(const __grid_constant__ rope_args a)
{
    typedef real<T> R;
    extern __shared__ __align__(16) unsigned char dynamic[];
    int half = a.attr.rotary_dim / 2, tokens = a.tokens_per_block;
    R *cosine = reinterpret_cast<R *>(dynamic), *sine = cosine + tokens * half;
    int64_t first = (int64_t)blockIdx.x * tokens;
    /* Pieces of a head: pairs, then what is not rotated. */
    const int pairs = SPLIT || V == 1 ? V : V / 2;
    int rotated = half / pairs, rest = (a.attr.head_dim - 2 * half) / V, pieces = rotated + rest;
    int per_token = a.attr.heads * pieces;
    int mine = (int)threadIdx.x; /* the first piece, on its way while the table is formed */
    if (mine < tokens * per_token && mine % pieces < rotated &&
        first + mine / per_token < a.tokens) {
        const T *x = static_cast<const T *>(a.src) + (first + mine / per_token) * a.src_ld +
                     (int64_t)(mine % per_token / pieces) * a.attr.head_dim +
                     mine % pieces * (SPLIT ? pairs : 2 * pairs);
        fetch_ahead(x);
        if (SPLIT)
            fetch_ahead(x + half);
    }
    for (int k = (int)threadIdx.x; k < tokens * half; k += ROPE_THREADS) {
        int64_t token = first + k / half;
        if (token >= a.tokens)
            break;
        R s, c;
        R factor = (R)a.attr.attention_factor * growth_at<R>(a.attr, a.positions[token]);
        sine_cosine((R)a.attr.inv_freq[k % half] * (R)a.positions[token], &s, &c);
        cosine[k] = c * factor;
        sine[k] = (R)a.sign * (s * factor);
    }
    __syncthreads();
    for (int k = (int)threadIdx.x; k < tokens * per_token; k += ROPE_THREADS) {
        int t = k / per_token, head = k % per_token / pieces, piece = k % pieces;
        int64_t token = first + t;
        if (token >= a.tokens)
            break;
        int64_t at = (int64_t)head * a.attr.head_dim;
        const T *x = static_cast<const T *>(a.src) + token * a.src_ld + at;
        T *y = static_cast<T *>(a.dst) + token * a.dst_ld + at;
        if (piece < rotated) {
            rotate<T, V, SPLIT>(x, y, piece * pairs, half, a.add, cosine + t * half,
                                sine + t * half);
        } else {
            R v[V];
            int from = 2 * half + (piece - rotated) * V;
            load_vector<T, V>(x + from, v);
            R growth = growth_at<R>(a.attr, a.positions[token]);
#pragma unroll
            for (int j = 0; j < V; j++)
                v[j] *= growth;
            put_vector<T, V>(y + from, v, a.add);
        }
    }
}

template <typename T, int V, bool SPLIT> static void rope_launch(cuda_queue *q, const rope_args &a)
{
    size_t bytes = (size_t)(a.tokens_per_block * a.attr.rotary_dim) * sizeof(real<T>);
    rope_kernel<T, V, SPLIT>
        <<<(unsigned)ceil_div(a.tokens, a.tokens_per_block), ROPE_THREADS, bytes, q->stream>>>(a);
}

template <typename T> static void rope_typed(cuda_queue *q, rope_args a, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool split = a.attr.pairing == MT_ROPE_HALF_SPLIT;
    int half = a.attr.rotary_dim / 2;
    bool vectors =
        aligned && a.attr.head_dim % wide == 0 && (split ? half % wide == 0 : 2 * half % wide == 0);
    int pieces = a.attr.heads * (vectors ? a.attr.head_dim / wide : a.attr.head_dim) / 2;
    /* The tables of all tokens of a block stay within 32 KiB. */
    int most = (32 << 10) / (int)(a.attr.rotary_dim * sizeof(real<T>));
    a.tokens_per_block = ROPE_THREADS / (pieces > 0 ? pieces : 1);
    if (a.tokens_per_block > ROPE_MAX_TOKENS)
        a.tokens_per_block = ROPE_MAX_TOKENS;
    if (a.tokens_per_block > most)
        a.tokens_per_block = most;
    if (a.tokens_per_block < 1)
        a.tokens_per_block = 1;
    if (vectors && split)
        rope_launch<T, wide, true>(q, a);
    else if (vectors)
        rope_launch<T, wide, false>(q, a);
    else if (split)
        rope_launch<T, 1, true>(q, a);
    else
        rope_launch<T, 1, false>(q, a);
}

static void rope_run(cuda_queue *q, const mt_op_call *c, const mt_tensor *src, const mt_tensor *dst,
                     int sign, bool add)
{
    rope_args a = {};
    if (!dst->data || src->rows == 0)
        return;
    a.src = src->data;
    a.dst = dst->data;
    a.src_ld = src->ld;
    a.dst_ld = dst->ld;
    a.positions = c->batch.positions;
    a.tokens = src->rows;
    a.sign = sign;
    a.add = add;
    a.attr = *(const mt_rope_attr *)c->attr;
    bool aligned = is_aligned(src) && is_aligned(dst);
    FOR_DTYPE(src->dtype, rope_typed, q, a, aligned);
}

static void rope_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    rope_run(q, c, &c->in[0], &c->out[0], 1, false);
}

static void rope_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    (void)d;
    rope_run(q, c, &c->d_out[0], &c->d_in[0], -1, c->d_accumulate & 1u);
}

const cuda_op cuda_op_rope = { rope_forward, rope_backward, NULL };
