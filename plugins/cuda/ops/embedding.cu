/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding: rows of a table picked by the batch. Backward gives each row of the table to one
 * block, which looks for its tokens and adds their gradients in the tokens' order.
 */
#include "../common.cuh"

enum { GATHER_THREADS = 128, SCATTER_THREADS = 256, SCATTER_LIST = 2048, IDS = 4 };

struct embed_args {
    const void *src;
    void *dst;
    int64_t src_ld, dst_ld;
    const int32_t *rows; /* [tokens] */
    int64_t tokens, table_rows, cols;
    bool add;
    cuda_fault *fault;
    int32_t *claim;
};

template <typename T, int V>
static __global__ void __launch_bounds__(GATHER_THREADS) gather_kernel(embed_args a)
{
    int64_t token = blockIdx.x;
    int32_t row = a.rows[token];
    if (row < 0 || row >= a.table_rows) {
        if (threadIdx.x == 0)
            raise_fault(a.fault, a.claim, CUDA_FAULT_EMBEDDING_ROW, token, row, a.table_rows);
        row = 0;
    }
    const T *x = static_cast<const T *>(a.src) + row * a.src_ld;
    T *y = static_cast<T *>(a.dst) + token * a.dst_ld;
    for (int64_t j = (int64_t)threadIdx.x * V; j < a.cols; j += GATHER_THREADS * V)
        *reinterpret_cast<pack<T, V> *>(y + j) = *reinterpret_cast<const pack<T, V> *>(x + j);
}

/* V sums from or to memory, by 16-byte accesses where rows allow vectors at all. */
template <typename R, int V> static __device__ __forceinline__ void load_sums(const R *p, R *ret)
{
    const int wide = V == 1 ? 1 : 16 / (int)sizeof(R);
#pragma unroll
    for (int k = 0; k < V; k += wide)
        load_vector<R, wide>(p + k, ret + k);
}

template <typename R, int V> static __device__ __forceinline__ void put_sums(R *p, const R *x)
{
    const int wide = V == 1 ? 1 : 16 / (int)sizeof(R);
#pragma unroll
    for (int k = 0; k < V; k += wide)
        put_vector<R, wide>(p + k, x + k, false);
}

/* dst[row] (+)= sum of src[t] over the tokens t with that row, in order. At most SCATTER_LIST
 * tokens are collected at a time; a thread looks at IDS neighbouring ones. */
template <typename T, int V>
static __global__ void __launch_bounds__(SCATTER_THREADS) scatter_kernel(embed_args a)
{
    typedef real<T> R;
    const int step = SCATTER_THREADS * IDS;
    __shared__ int32_t list[SCATTER_LIST];
    __shared__ int counts[SCATTER_THREADS / 32];
    int32_t row = (int32_t)blockIdx.x;
    R *y = static_cast<R *>(a.dst) + row * a.dst_ld;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, listed = 0;
    bool first = !a.add;
    for (int64_t from = 0; from < a.tokens || first; from += step) {
        int64_t token = from + threadIdx.x * IDS;
        bool mine[IDS], any = false;
#pragma unroll
        for (int i = 0; i < IDS; i++) {
            mine[i] = token + i < a.tokens && a.rows[token + i] == row;
            any = any || mine[i];
        }
        if (__syncthreads_or(any)) {
            int before = 0, of_warp = 0;
#pragma unroll
            for (int i = 0; i < IDS; i++) {
                unsigned votes = __ballot_sync(0xffffffffu, mine[i]);
                before += __popc(votes & ((1u << lane) - 1u));
                of_warp += __popc(votes);
            }
            if (lane == 0)
                counts[warp] = of_warp;
            __syncthreads();
            before += listed;
            for (int i = 0; i < SCATTER_THREADS / 32; i++) {
                before += i < warp ? counts[i] : 0;
                listed += counts[i];
            }
#pragma unroll
            for (int i = 0; i < IDS; i++)
                if (mine[i])
                    list[before++] = (int32_t)(token + i);
        }
        bool last = from + step >= a.tokens;
        if (!last && listed + step <= SCATTER_LIST)
            continue;
        __syncthreads();
        if (listed > 0 || first)
            for (int64_t j = (int64_t)threadIdx.x * V; j < a.cols; j += SCATTER_THREADS * V) {
                R sum[V] = {};
                if (!first)
                    load_sums<R, V>(y + j, sum);
                for (int i = 0; i < listed; i++) {
                    R g[V];
                    load_vector<T, V>(static_cast<const T *>(a.src) + list[i] * a.src_ld + j, g);
#pragma unroll
                    for (int k = 0; k < V; k++)
                        sum[k] += g[k];
                }
                put_sums<R, V>(y + j, sum);
            }
        __syncthreads();
        listed = 0;
        first = false;
    }
}

template <typename T> static void gather(cuda_queue *q, const embed_args &a, bool aligned)
{
    const int wide = vector_of<T>::width;
    if (aligned && a.cols % wide == 0)
        gather_kernel<T, wide><<<(unsigned)a.tokens, GATHER_THREADS, 0, q->stream>>>(a);
    else
        gather_kernel<T, 1><<<(unsigned)a.tokens, GATHER_THREADS, 0, q->stream>>>(a);
}

template <typename T> static void scatter(cuda_queue *q, const embed_args &a, bool aligned)
{
    const int wide = vector_of<T>::width;
    if (aligned && a.cols % wide == 0)
        scatter_kernel<T, wide><<<(unsigned)a.table_rows, SCATTER_THREADS, 0, q->stream>>>(a);
    else
        scatter_kernel<T, 1><<<(unsigned)a.table_rows, SCATTER_THREADS, 0, q->stream>>>(a);
}

static void embedding_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *w = &c->in[0], *y = &c->out[0];
    embed_args a = {};
    a.src = w->data;
    a.src_ld = w->ld;
    a.dst = y->data;
    a.dst_ld = y->ld;
    a.rows = c->batch.rows;
    a.tokens = c->batch.tokens;
    a.table_rows = w->rows;
    a.cols = w->cols;
    a.fault = d->fault;
    a.claim = d->fault_claim;
    if (a.tokens > 0)
        FOR_DTYPE(w->dtype, gather, q, a, is_aligned(w) && is_aligned(y));
}

static void embedding_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    const mt_tensor *dw = &c->d_in[0], *dy = &c->d_out[0];
    embed_args a = {};
    (void)d;
    a.src = dy->data;
    a.src_ld = dy->ld;
    a.dst = dw->data;
    a.dst_ld = dw->ld;
    a.rows = c->batch.rows;
    a.tokens = c->batch.tokens;
    a.table_rows = dw->rows;
    a.cols = dw->cols;
    a.add = c->d_accumulate & 1u;
    if (dw->data && dw->rows > 0)
        FOR_DTYPE(dy->dtype, scatter, q, a, is_aligned(dy) && is_aligned(dw));
}

const cuda_op cuda_op_embedding = { embedding_forward, embedding_backward, NULL };
