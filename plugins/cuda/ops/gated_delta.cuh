/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of gated_delta share: the arguments of a call, and where chunks are.
 */
#ifndef MT_CUDA_GATED_DELTA_CUH
#define MT_CUDA_GATED_DELTA_CUH

#include "../common.cuh"

enum { DELTA_CHUNK = MT_DELTA_CHUNK };

struct delta_args {
    const void *q, *k, *v, *beta, *d_out;
    const void *g;
    void *out, *aux, *state;          /* state NULL: none is kept */
    void *dq, *dk, *dv, *dg, *d_beta; /* NULL: not wanted */
    int64_t q_ld, k_ld, v_ld, g_ld, beta_ld, out_ld, d_out_ld;
    int64_t dq_ld, dk_ld, dv_ld, dg_ld, d_beta_ld;
    const int32_t *doc_starts;
    int64_t tokens, documents;
    int k_heads, v_heads, group, k_dim, v_dim;
    double eps, scale;
    bool continues; /* decode: from `state` */
    bool add_q, add_k, add_v, add_g, add_beta;
    /* backward, statistics dtype: v less what the state knows of it, and the gradient by it times
     * beta, [tokens, v_heads * v_dim]; the gradients by the states after chunks, like aux */
    void *rest, *d_rest, *d_states;
};

/* A chunk: tokens [first, first + n) of a document. */
struct delta_chunk {
    int64_t first;
    int n;
};

/* The chunk whose state is number `slot` (mt_delta_slot); false where there is none. */
static __device__ __forceinline__ bool find_chunk(const delta_args &a, int64_t slot,
                                                  delta_chunk *ret)
{
    int64_t low = 0, high = a.documents;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (middle + a.doc_starts[middle] / DELTA_CHUNK <= slot)
            low = middle;
        else
            high = middle;
    }
    int64_t chunk = slot - (low + a.doc_starts[low] / DELTA_CHUNK);
    int64_t first = a.doc_starts[low] + chunk * DELTA_CHUNK, left = a.doc_starts[low + 1] - first;
    ret->first = first;
    ret->n = (int)(left < DELTA_CHUNK ? left : DELTA_CHUNK);
    return left > 0;
}

/* Chunks of all documents, at most: states in aux. */
static inline int64_t delta_slots(int64_t tokens, int64_t documents)
{
    return documents + ceil_div(tokens, DELTA_CHUNK);
}

/* The gradients by q, k, g and beta, from what the scans left. */
void delta_keys_backward(cuda_device *d, cuda_queue *q, mt_dtype dtype, const delta_args *a);

#endif
