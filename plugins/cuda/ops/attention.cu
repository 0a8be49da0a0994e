/* SPDX-License-Identifier: Apache-2.0
 *
 * attention: the choice of the form, kept keys and values, and the gradient of the sinks. BF16 runs
 * through cuDNN where that has plans (attention_dnn.cu), else on tensor cores
 * (attention_forward.cu, attention_backward.cu); FP32, FP64, single queries and unusual dimensions
 * run the simple form (attention_simple.cu). No form's results depend on timing.
 */
#include "attention.cuh"

enum { SINK_THREADS = 256, FEW_QUERIES = 16 };

static attn_args args_of(const mt_op_call *c, const mt_tensor *out)
{
    const mt_attn_attr *attr = (const mt_attn_attr *)c->attr;
    attn_args a = {};
    a.q = c->in[ATTN_Q].data;
    a.k = c->in[ATTN_K].data;
    a.v = c->in[ATTN_V].data;
    a.q_ld = c->in[ATTN_Q].ld;
    a.k_ld = c->in[ATTN_K].ld;
    a.v_ld = c->in[ATTN_V].ld;
    a.sinks = c->n_in > ATTN_SINKS ? c->in[ATTN_SINKS].data : NULL;
    a.out = c->out[0].data;
    a.out_ld = c->out[0].ld;
    a.lse = c->aux[0].data;
    a.lse_ld = c->aux[0].ld;
    a.doc_starts = c->batch.doc_starts;
    a.documents = c->batch.documents;
    a.tokens = out->rows;
    a.window = attr->window;
    a.heads = attr->heads;
    a.kv_heads = attr->kv_heads;
    a.group = attr->heads / attr->kv_heads;
    a.qk_dim = attr->qk_dim;
    a.v_dim = attr->v_dim;
    a.scale = attr->scale;
    a.softcap = attr->softcap;
    if (c->pass == MT_PASS_DECODE && c->state[0].data) {
        a.first = c->used;
        a.one_document = true;
        a.k = c->state[0].data;
        a.v = c->state[1].data;
        a.k_ld = (int64_t)attr->kv_heads * attr->qk_dim;
        a.v_ld = (int64_t)attr->kv_heads * attr->v_dim;
    }
    return a;
}

static void keep_keys_and_values(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    int64_t to = c->pass == MT_PASS_DECODE ? c->used : 0;
    for (int part = 0; part < 2; part++) {
        const mt_tensor *t = &c->in[part ? ATTN_V : ATTN_K];
        char *kept = (char *)c->state[part].data;
        size_t size = (size_t)mt_dtype_size(t->dtype), row = (size_t)t->cols * size;
        cuda_ok(d,
                cudaMemcpy2DAsync(kept + (size_t)to * row, row, t->data, (size_t)t->ld * size, row,
                                  (size_t)t->rows, cudaMemcpyDeviceToDevice, q->stream),
                "keeping keys and values");
    }
}

static void refuse(cuda_device *d, const attn_args *a)
{
    cuda_fail(d, MT_ERR_UNSUPPORTED, "attention with head dimensions %d and %d: at most %d",
              a->qk_dim, a->v_dim, ATTN_SIMPLE_DIM);
}

static void attention_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    attn_args a = args_of(c, &c->out[0]);
    mt_dtype dtype = c->out[0].dtype;
    bool generates = c->pass == MT_PASS_PREFILL || c->pass == MT_PASS_DECODE;
    if (a.tokens == 0)
        return;
    if (c->state[0].data && generates)
        keep_keys_and_values(d, q, c);
    if (!generates && attn_dnn_forward(q, c))
        return;
    if (dtype == MT_BF16 && !(a.one_document && a.tokens < FEW_QUERIES) &&
        attn_flash_forward(d, q, &a))
        return;
    if (!attn_simple_forward(q, dtype, &a))
        refuse(d, &a);
}

/* d sink_h = - sum over i of e^(sink_h - lse_i) (dO_i . O_i), a block a head. */
template <typename T>
static __global__ void __launch_bounds__(SINK_THREADS)
    sink_kernel(attn_args a, real<T> *d, bool add)
{
    __shared__ double shared[32];
    int head = (int)blockIdx.x;
    double sink = (double)to_real(static_cast<const T *>(a.sinks)[head]), sum = 0;
    const real<T> *lse = static_cast<const real<T> *>(a.lse);
    const real<T> *delta = static_cast<const real<T> *>(a.delta);
    for (int64_t i = threadIdx.x; i < a.tokens; i += SINK_THREADS)
        sum -= exp(sink - (double)lse[i * a.lse_ld + head]) * (double)delta[i * a.heads + head];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        d[head] = (real<T>)(add ? sum + (double)d[head] : sum);
}

template <typename T>
static void sink_gradient(cuda_queue *q, const attn_args &a, const mt_tensor *d, bool add)
{
    sink_kernel<T><<<(unsigned)a.heads, SINK_THREADS, 0, q->stream>>>(a, (real<T> *)d->data, add);
}

static int64_t delta_bytes(const mt_op_call *c)
{
    const mt_attn_attr *attr = (const mt_attn_attr *)c->attr;
    return align_256(c->d_out[0].rows * attr->heads * (c->d_out[0].dtype == MT_F64 ? 8 : 4));
}

static int64_t own_work_bytes(const mt_op_call *c)
{
    return delta_bytes(c) + align_256(c->d_out[0].rows * (int64_t)sizeof(int32_t));
}

static void attention_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    attn_args a = args_of(c, &c->d_out[0]);
    mt_dtype dtype = c->d_out[0].dtype;
    if (a.tokens == 0)
        return;
    a.d_out = c->d_out[0].data;
    a.d_out_ld = c->d_out[0].ld;
    a.dq = c->d_in[ATTN_Q].data;
    a.dk = c->d_in[ATTN_K].data;
    a.dv = c->d_in[ATTN_V].data;
    a.dq_ld = c->d_in[ATTN_Q].ld;
    a.dk_ld = c->d_in[ATTN_K].ld;
    a.dv_ld = c->d_in[ATTN_V].ld;
    a.add_q = c->d_accumulate >> ATTN_Q & 1u;
    a.add_k = c->d_accumulate >> ATTN_K & 1u;
    a.add_v = c->d_accumulate >> ATTN_V & 1u;
    a.delta = c->work;
    a.low = (int32_t *)((char *)c->work + delta_bytes(c));
    bool sinks = a.sinks && c->d_in[ATTN_SINKS].data;
    bool done = attn_dnn_backward(q, c, own_work_bytes(c));
    if (!done || sinks)
        attn_prepare_backward(q, dtype, &a);
    if (!done && !(dtype == MT_BF16 && attn_flash_backward(d, q, &a)) &&
        !attn_simple_backward(q, dtype, &a))
        refuse(d, &a);
    if (sinks)
        FOR_DTYPE(dtype, sink_gradient, q, a, &c->d_in[ATTN_SINKS],
                  c->d_accumulate >> ATTN_SINKS & 1u);
}

static int64_t attention_workspace(const cuda_device *d, const mt_op_call *c, bool backward)
{
    (void)d;
    return backward ? own_work_bytes(c) : 0;
}

static int64_t attention_plan(const cuda_device *d, const mt_op_call *c, bool backward)
{
    return attention_workspace(d, c, backward) + attn_dnn_plan(d, c, backward);
}

const cuda_op cuda_op_attention = { attention_forward, attention_backward, attention_workspace,
                                    attention_plan };
