/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding: rows of a table picked by the batch. Backward gives a few rows of the table to a
 * block, which looks for their tokens and adds their gradients in the tokens' order.
 */
#include "../common.cuh"

enum {
    GATHER_WARPS = 2,
    GATHER_BATCH = 4, /* vectors of a thread on their way at a time */
    SCATTER_THREADS = 256,
    SCATTER_WARPS = SCATTER_THREADS / 32,
    SCATTER_ROWS = 8,   /* of a block; all tokens are looked at by each block */
    SCATTER_PIECES = 4, /* of rows that a thread adds up at a time */
    SCATTER_BATCH = 2,  /* gradients of a piece on their way at a time */
    IDS = 16,           /* tokens that a thread looks at, at a time */
    SCATTER_LIST = 1024 /* tokens of a row that are collected at most; a warp's fit */
};

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

/* A warp a token. Rows are written past the cache, which keeps the table. */
template <typename T, int V>
static __global__ void __launch_bounds__(GATHER_WARPS * 32) gather_kernel(embed_args a)
{
    const int lane = (int)threadIdx.x & 31;
    const int64_t token = (int64_t)blockIdx.x * GATHER_WARPS + (threadIdx.x >> 5), step = 32 * V;
    if (token >= a.tokens)
        return;
    int32_t row = a.rows[token];
    await_previous();
    if (row < 0 || row >= a.table_rows) {
        if (lane == 0)
            raise_fault(a.fault, a.claim, CUDA_FAULT_EMBEDDING_ROW, token, row, a.table_rows);
        row = 0;
    }
    const T *x = static_cast<const T *>(a.src) + row * a.src_ld;
    T *y = static_cast<T *>(a.dst) + token * a.dst_ld;
    for (int64_t from = lane * V; from < a.cols; from += GATHER_BATCH * step) {
        bits<T, V> v[GATHER_BATCH];
#pragma unroll
        for (int i = 0; i < GATHER_BATCH; i++)
            if (from + i * step < a.cols)
                v[i] = load_bits<T, V>(x + from + i * step);
#pragma unroll
        for (int i = 0; i < GATHER_BATCH; i++)
            if (from + i * step < a.cols)
                __stcs(reinterpret_cast<bits<T, V> *>(y + from + i * step), v[i]);
    }
}

/* Tokens of a block's rows, by row, in order. */
struct token_lists {
    int32_t token[SCATTER_ROWS][SCATTER_LIST];
    int of_warp[SCATTER_ROWS][SCATTER_WARPS];
    int length[SCATTER_ROWS];
};

/* Counts in n which of `id`, the rows of tokens `token`, `token` + 32, ..., are one of the rows
 * from `row` on, and puts them in the lists from their places n on, unless l is NULL. All lanes of
 * the warp take part. */
static __device__ __forceinline__ void list_rows(const int32_t *id, int32_t token, int32_t row,
                                                 int *n, token_lists *l)
{
    const unsigned before = (1u << (threadIdx.x & 31)) - 1u;
#pragma unroll
    for (int i = 0; i < IDS; i++) {
        if (!__any_sync(0xffffffffu, id[i] >= row && id[i] < row + SCATTER_ROWS))
            continue;
#pragma unroll
        for (int r = 0; r < SCATTER_ROWS; r++) {
            unsigned votes = __ballot_sync(0xffffffffu, id[i] == row + r);
            if (l && id[i] == row + r)
                l->token[r][n[r] + __popc(votes & before)] = token + i * 32;
            n[r] += __popc(votes);
        }
    }
}

/* Counts what the warps have for each row; do the lists have room for all of it? */
static __device__ __forceinline__ bool count_tokens(token_lists *l, const int32_t *id, int32_t row,
                                                    bool some)
{
    bool room = true;
    int found[SCATTER_ROWS] = {};
    if (some)
        list_rows(id, 0, row, found, NULL);
    if ((threadIdx.x & 31) == 0)
#pragma unroll
        for (int r = 0; r < SCATTER_ROWS; r++)
            l->of_warp[r][threadIdx.x >> 5] = found[r];
    __syncthreads();
    for (int r = 0; r < SCATTER_ROWS; r++) {
        int n = l->length[r];
        for (int i = 0; i < SCATTER_WARPS; i++)
            n += l->of_warp[r][i];
        room = room && n <= SCATTER_LIST;
    }
    return room;
}

/* Appends what `warps` warps from `first` on have. */
static __device__ __forceinline__ void list_tokens(token_lists *l, const int32_t *id, int32_t token,
                                                   int32_t row, bool some, int first, int warps)
{
    const int warp = (int)threadIdx.x >> 5;
    if (some && warp >= first && warp < first + warps) {
        int at[SCATTER_ROWS];
#pragma unroll
        for (int r = 0; r < SCATTER_ROWS; r++) {
            at[r] = l->length[r];
            for (int i = first; i < warp; i++)
                at[r] += l->of_warp[r][i];
        }
        list_rows(id, token, row, at, l);
    }
    __syncthreads();
    if (threadIdx.x < SCATTER_ROWS)
        for (int i = first; i < first + warps; i++)
            l->length[threadIdx.x] += l->of_warp[threadIdx.x][i];
    __syncthreads();
}

/* dst (+)= the gradients of n listed tokens, in order. A thread has V of every SCATTER_THREADS * V
 * columns, SCATTER_PIECES times V at a time. */
template <typename T, int V>
static __device__ __forceinline__ void add_tokens(const embed_args &a, real<T> *dst,
                                                  const int32_t *token, int n, bool fresh)
{
    typedef real<T> R;
    const int64_t step = SCATTER_THREADS * V;
    for (int64_t j = (int64_t)threadIdx.x * V; j < a.cols; j += SCATTER_PIECES * step) {
        R sum[SCATTER_PIECES][V] = {};
        if (!fresh)
#pragma unroll
            for (int p = 0; p < SCATTER_PIECES; p++)
                if (j + p * step < a.cols)
                    load_vector<R, V>(dst + j + p * step, sum[p]);
        for (int from = 0; from < n; from += SCATTER_BATCH) {
            bits<T, V> g[SCATTER_BATCH][SCATTER_PIECES];
#pragma unroll
            for (int i = 0; i < SCATTER_BATCH && from + i < n; i++) {
                const T *src = static_cast<const T *>(a.src) + token[from + i] * a.src_ld + j;
#pragma unroll
                for (int p = 0; p < SCATTER_PIECES; p++)
                    if (j + p * step < a.cols)
                        g[i][p] = load_bits<T, V>(src + p * step);
            }
#pragma unroll
            for (int i = 0; i < SCATTER_BATCH && from + i < n; i++)
#pragma unroll
                for (int p = 0; p < SCATTER_PIECES; p++)
                    if (j + p * step < a.cols) {
                        R x[V];
                        unpack<T, V>(g[i][p], x);
#pragma unroll
                        for (int k = 0; k < V; k++)
                            sum[p][k] += x[k];
                    }
        }
#pragma unroll
        for (int p = 0; p < SCATTER_PIECES; p++)
            if (j + p * step < a.cols)
                put_vector<R, V>(dst + j + p * step, sum[p], false);
    }
}

/* Adds what is listed to the rows and empties the lists. `fresh`: the rows begin at zero. */
template <typename T, int V>
static __device__ __forceinline__ void add_lists(const embed_args &a, token_lists *l, int32_t row,
                                                 bool fresh)
{
    await_previous();
    for (int r = 0; r < SCATTER_ROWS && row + r < a.table_rows; r++)
        if (l->length[r] > 0 || fresh)
            add_tokens<T, V>(a, static_cast<real<T> *>(a.dst) + (row + r) * a.dst_ld, l->token[r],
                             l->length[r], fresh);
    __syncthreads();
    if (threadIdx.x < SCATTER_ROWS)
        l->length[threadIdx.x] = 0;
    __syncthreads();
}

/* dst[row] (+)= sum of src[t] over the tokens t with that row, in order. */
template <typename T, int V>
static __global__ void __launch_bounds__(SCATTER_THREADS, 4) scatter_kernel(embed_args a)
{
    __shared__ token_lists l;
    const int32_t tokens = (int32_t)a.tokens, row = (int32_t)blockIdx.x * SCATTER_ROWS;
    const int32_t mine = (int32_t)(threadIdx.x >> 5) * 32 * IDS + (int32_t)(threadIdx.x & 31);
    bool fresh = !a.add;
    if (threadIdx.x < SCATTER_ROWS)
        l.length[threadIdx.x] = 0;
    for (int32_t from = 0; from < tokens; from += SCATTER_THREADS * IDS) {
        int32_t id[IDS];
        bool any = false;
#pragma unroll
        for (int i = 0; i < IDS; i++)
            id[i] = from + mine + i * 32 < tokens ? a.rows[from + mine + i * 32] : -1;
#pragma unroll
        for (int i = 0; i < IDS; i++)
            any = any || (id[i] >= row && id[i] < row + SCATTER_ROWS);
        if (!__syncthreads_or(any))
            continue;
        bool some = __any_sync(0xffffffffu, any), room = count_tokens(&l, id, row, some);
        if (room) {
            list_tokens(&l, id, from + mine, row, some, 0, SCATTER_WARPS);
            continue;
        }
        for (int warp = 0; warp < SCATTER_WARPS; warp++) {
            add_lists<T, V>(a, &l, row, fresh);
            fresh = false;
            list_tokens(&l, id, from + mine, row, some, warp, 1);
        }
    }
    __syncthreads();
    add_lists<T, V>(a, &l, row, fresh);
}

template <typename T> static void gather(cuda_queue *q, const embed_args &a, bool aligned)
{
    const int wide = vector_of<T>::width;
    bool vectors = aligned && a.cols % wide == 0;
    launch_next(q, vectors ? gather_kernel<T, wide> : gather_kernel<T, 1>,
                dim3((unsigned)ceil_div(a.tokens, GATHER_WARPS)), dim3(GATHER_WARPS * 32), 0, a);
}

template <typename T> static void scatter(cuda_queue *q, const embed_args &a, bool aligned)
{
    const int wide = vector_of<real<T>>::width; /* sums are what is moved by 16 bytes */
    bool vectors = aligned && a.cols % wide == 0;
    launch_next(q, vectors ? scatter_kernel<T, wide> : scatter_kernel<T, 1>,
                dim3((unsigned)ceil_div(a.table_rows, SCATTER_ROWS)), dim3(SCATTER_THREADS), 0, a);
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
