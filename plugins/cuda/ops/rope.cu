/* SPDX-License-Identifier: Apache-2.0
 *
 * rope: a warp takes a token at a time, or a few that have few heads. It forms a token's sines and
 * cosines once and turns all heads with them; those of its first tokens while the kernel ahead is
 * still running. Backward turns by the opposite angle.
 */
#include "../common.cuh"

enum {
    ROPE_WARPS = 8,   /* of a block */
    ROPE_BATCH = 2,   /* pieces of a lane that are on their way at a time */
    ROPE_BLOCKS = 4,  /* of a multiprocessor, at a time */
    ROPE_TOGETHER = 4 /* tokens of a warp at a time, at most */
};

struct rope_args {
    const void *src;
    void *dst;
    int64_t src_ld, dst_ld;
    const int32_t *positions;
    int32_t tokens;
    int together; /* tokens of a warp at a time */
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

/* What mt_rope_attr::growth multiplies a token's row with. */
template <typename R> static __device__ __forceinline__ R growth_of(const rope_args &a, int token)
{
    if (!(a.attr.growth > 0))
        return (R)1;
    return (R)1 +
           (R)a.attr.growth * logarithm((R)(1 + a.positions[token] / a.attr.growth_positions));
}

template <typename R> static __device__ __forceinline__ void turn_pair(R *x, R *y, R cosine, R sine)
{
    R u = *x * cosine - *y * sine;
    *y = *y * cosine + *x * sine;
    *x = u;
}

/* What a lane turns at a time: V pairs (i, i + half) of a head, or V / 2 neighbouring ones (V = 1:
 * one), or V of the columns behind that stay as they are. */
template <typename T, int V, bool SPLIT> struct rope_piece {
    static const bool two = SPLIT || V == 1; /* vectors a piece has */
    static const int pairs = two ? V : V / 2;
    bits<T, V> a, b;

    static __host__ __device__ __forceinline__ int of_head(const mt_rope_attr &attr)
    {
        int half = attr.rotary_dim / 2;
        return half / pairs + (attr.head_dim - 2 * half) / V;
    }
    static __device__ __forceinline__ int first(int i)
    {
        return SPLIT ? i * V : V == 1 ? 2 * i : i * V;
    }
    static __device__ __forceinline__ int second(int i, int half)
    {
        return SPLIT ? half + i * V : 2 * i + 1;
    }

    /* Piece i of a head at x, whose first `rotated` pieces are pairs. */
    __device__ __forceinline__ void load(const T *x, int i, int rotated, int half)
    {
        bool turns = i < rotated;
        a = load_bits<T, V>(x + (turns ? first(i) : 2 * half + (i - rotated) * V));
        if (two && turns)
            b = load_bits<T, V>(x + second(i, half));
    }

    __device__ __forceinline__ void turn(T *y, int i, int half, bool add, const real<T> *cosine,
                                         const real<T> *sine) const
    {
        typedef real<T> R;
        R u[V], w[V];
        cosine += i * pairs;
        sine += i * pairs;
        unpack<T, V>(a, u);
        if constexpr (two) {
            unpack<T, V>(b, w);
#pragma unroll
            for (int k = 0; k < V; k++)
                turn_pair(u + k, w + k, cosine[k], sine[k]);
            put_vector<T, V>(y + second(i, half), w, add);
        } else {
#pragma unroll
            for (int k = 0; k < pairs; k++)
                turn_pair(u + 2 * k, u + 2 * k + 1, cosine[k], sine[k]);
        }
        put_vector<T, V>(y + first(i), u, add);
    }

    __device__ __forceinline__ void stay(T *y, real<T> growth, bool add) const
    {
        real<T> u[V];
        unpack<T, V>(a, u);
#pragma unroll
        for (int k = 0; k < V; k++)
            u[k] *= growth;
        put_vector<T, V>(y, u, add);
    }
};

/* The sines and cosines of n tokens, [n][half] each, by a warp. */
template <typename R>
static __device__ __forceinline__ void form_angles(const rope_args &a, const R *frequency,
                                                   int32_t token, int n, R *cosine, R *sine)
{
    const int lane = (int)threadIdx.x & 31, half = a.attr.rotary_dim / 2;
    __syncwarp(); /* the last tokens' are no longer read */
    for (int t = 0; t < n; t++) {
        const R position = (R)a.positions[token + t];
        const R factor = (R)a.attr.attention_factor * growth_of<R>(a, token + t);
        for (int k = lane; k < half; k += 32) {
            R s, c;
            sine_cosine(frequency[k] * position, &s, &c);
            cosine[t * half + k] = c * factor;
            sine[t * half + k] = (R)a.sign * (s * factor);
        }
    }
    __syncwarp();
}

template <typename T, int V, bool SPLIT>
static __global__ void __launch_bounds__(ROPE_WARPS * 32, ROPE_BLOCKS)
    rope_kernel(const __grid_constant__ rope_args a)
{
    typedef real<T> R;
    typedef rope_piece<T, V, SPLIT> piece;
    extern __shared__ __align__(16) unsigned char dynamic[];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int half = a.attr.rotary_dim / 2, rotated = half / piece::pairs;
    const int of_head = piece::of_head(a.attr), heads = a.attr.heads;
    const int32_t step = (int)gridDim.x * ROPE_WARPS * a.together;
    int32_t token = ((int)blockIdx.x * ROPE_WARPS + warp) * a.together;
    R *frequency = reinterpret_cast<R *>(dynamic); /* [half], of the block */
    R *cosine = frequency + (2 * warp * a.together + 1) * half, *sine = cosine + a.together * half;
    for (int k = (int)threadIdx.x; k < half; k += ROPE_WARPS * 32)
        frequency[k] = (R)a.attr.inv_freq[k];
    __syncthreads();
    form_angles(a, frequency, token, min(a.together, a.tokens - token), cosine, sine);
    await_previous();
    for (; token < a.tokens; token += step) {
        const T *x = static_cast<const T *>(a.src) + token * a.src_ld;
        T *y = static_cast<T *>(a.dst) + token * a.dst_ld;
        const int all = min(a.together, a.tokens - token) * heads * of_head;
        for (int from = lane; from < all; from += 32 * ROPE_BATCH) {
            piece p[ROPE_BATCH];
#pragma unroll
            for (int n = 0; n < ROPE_BATCH; n++)
                if (int at = from + n * 32; at < all) {
                    int head = at / of_head, t = head / heads;
                    p[n].load(x + t * a.src_ld + (head - t * heads) * a.attr.head_dim, at % of_head,
                              rotated, half);
                }
#pragma unroll
            for (int n = 0; n < ROPE_BATCH; n++)
                if (int at = from + n * 32; at < all) {
                    int i = at % of_head, head = at / of_head, t = head / heads;
                    T *to = y + t * a.dst_ld + (head - t * heads) * a.attr.head_dim;
                    if (i < rotated)
                        p[n].turn(to, i, half, a.add, cosine + t * half, sine + t * half);
                    else
                        p[n].stay(to + 2 * half + (i - rotated) * V, growth_of<R>(a, token + t),
                                  a.add);
                }
        }
        int32_t next = token + step;
        form_angles(a, frequency, next, min(a.together, a.tokens - next), cosine, sine);
    }
}

template <typename T, int V, bool SPLIT> static void rope_launch(cuda_queue *q, rope_args a)
{
    int64_t most = (int64_t)q->device->multiprocessors * ROPE_BLOCKS;
    int pieces = a.attr.heads * rope_piece<T, V, SPLIT>::of_head(a.attr);
    int fill = 32 * ROPE_BATCH / pieces;
    a.together = fill < 1 ? 1 : fill < ROPE_TOGETHER ? fill : ROPE_TOGETHER;
    int64_t blocks = ceil_div(a.tokens, ROPE_WARPS * a.together);
    size_t bytes =
        (size_t)((1 + 2 * ROPE_WARPS * a.together) * (a.attr.rotary_dim / 2)) * sizeof(real<T>);
    launch_next(q, rope_kernel<T, V, SPLIT>, dim3((unsigned)(blocks < most ? blocks : most)),
                dim3(ROPE_WARPS * 32), bytes, a);
}

template <typename T> static void rope_typed(cuda_queue *q, const rope_args &a, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool split = a.attr.pairing == MT_ROPE_HALF_SPLIT;
    int half = a.attr.rotary_dim / 2;
    bool vectors =
        aligned && a.attr.head_dim % wide == 0 && (split ? half % wide == 0 : 2 * half % wide == 0);
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
    a.tokens = (int32_t)src->rows;
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
