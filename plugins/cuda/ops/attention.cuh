/* SPDX-License-Identifier: Apache-2.0
 *
 * What the forms of attention share: one call as kernels see it, and which keys a query sees.
 */
#ifndef MT_CUDA_ATTENTION_CUH
#define MT_CUDA_ATTENTION_CUH

#include "../common.cuh"

enum { ATTN_Q = 0, ATTN_K = 1, ATTN_V = 2, ATTN_SINKS = 3 };

/* Row numbers are those of the keys: in decode the keys are the kept ones and query row i is key
 * row `first` + i; otherwise first = 0. */
struct attn_args {
    const void *q, *k, *v, *sinks; /* sinks: NULL or [heads] */
    void *out;
    void *lse; /* [tokens, heads], statistics dtype; NULL in forward: not wanted */
    const void *d_out;
    void *dq, *dk, *dv; /* NULL: not wanted */
    void *delta;        /* [tokens, heads]: dO . O, statistics dtype */
    int32_t *low;       /* backward: [tokens], the first key that each query sees */
    int64_t q_ld, k_ld, v_ld, out_ld, lse_ld, d_out_ld, dq_ld, dk_ld, dv_ld;
    const int32_t *doc_starts;
    int64_t documents;
    int64_t tokens; /* query rows */
    int64_t first;
    int64_t window;
    int heads, kv_heads, group; /* group: query heads of one key head */
    int qk_dim, v_dim;
    bool one_document; /* decode: doc_starts does not apply */
    bool add_q, add_k, add_v;
    double scale, softcap;
};

/* Number of the document that row t belongs to. */
static __device__ __forceinline__ int64_t document_of(const attn_args &a, int64_t t)
{
    int64_t low = 0, high = a.documents;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a.doc_starts[middle] <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Query row i sees key rows [low, first + i]. */
static __device__ __forceinline__ int64_t lowest_key(const attn_args &a, int64_t i)
{
    int64_t at = a.first + i;
    int64_t start = a.one_document ? 0 : a.doc_starts[document_of(a, i)];
    return a.window > 0 && at - a.window + 1 > start ? at - a.window + 1 : start;
}

/* One past the last query row that sees key row j (train passes). */
static __device__ __forceinline__ int64_t seen_until(const attn_args &a, int64_t j)
{
    int64_t end = a.doc_starts[document_of(a, j) + 1];
    return a.window > 0 && j + a.window < end ? j + a.window : end;
}

/* Any dtype and dimensions up to ATTN_SIMPLE_DIM; false where they are larger. */
enum { ATTN_SIMPLE_DIM = 512 };
bool attn_simple_forward(cuda_queue *q, mt_dtype dtype, const attn_args *a);
bool attn_simple_backward(cuda_queue *q, mt_dtype dtype, const attn_args *a);
/* delta and low, of every row: what both forms of backward start from. */
void attn_prepare_backward(cuda_queue *q, mt_dtype dtype, const attn_args *a);

/* BF16 on tensor cores, dimensions up to 256; false where they are larger or where the device has
 * too little shared memory. */
bool attn_flash_forward(cuda_device *d, cuda_queue *q, const attn_args *a);
bool attn_flash_backward(cuda_device *d, cuda_queue *q, const attn_args *a);

/* Through cuDNN; false where it has no plan for the call. attn_dnn_plan builds the plans that calls
 * within the bounds of `c` need, and returns the bytes of work they take; backward finds its own
 * `work_from` bytes into the call's work. */
int64_t attn_dnn_plan(const cuda_device *d, const mt_op_call *c, bool backward);
bool attn_dnn_forward(cuda_queue *q, const mt_op_call *c);
bool attn_dnn_backward(cuda_queue *q, const mt_op_call *c, int64_t work_from);

#endif
