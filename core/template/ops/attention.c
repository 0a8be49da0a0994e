/* SPDX-License-Identifier: Apache-2.0
 *
 * Causal attention inside each document, with grouped heads, sliding window, softcap and sinks.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    const mt_attn_attr *a = attr;
    for (uint32_t i = 0; i < 3; i++)
        if (!op_is_activation(&in[i]) || !op_same_rows(&in[i], &in[0]))
            return op_refuse(error, error_size, "q, k and v must be activations of the same rows");
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads != 0)
        return op_refuse(error, error_size, "%d heads do not divide into %d KV heads", a->heads,
                         a->kv_heads);
    int64_t expected[3] = { (int64_t)a->heads * a->qk_dim, (int64_t)a->kv_heads * a->qk_dim,
                            (int64_t)a->kv_heads * a->v_dim };
    for (int i = 0; i < 3; i++)
        if (in[i].cols != expected[i])
            return op_refuse(error, error_size, "%c has %lld columns, expected %lld", "qkv"[i],
                             (long long)in[i].cols, (long long)expected[i]);
    if (!(a->scale > 0) || !(a->softcap >= 0) || a->window < 0)
        return op_refuse(
            error, error_size,
            "scale must be above 0, softcap and window not below 0; found %g, %g, %lld", a->scale,
            a->softcap, (long long)a->window);
    if (n_in > 3 && op_present(&in[3]) && !op_is_vector(&in[3], a->heads))
        return op_refuse(error, error_size, "sinks must be a vector of %d elements", a->heads);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, (int64_t)a->heads * a->v_dim, MT_KIND_COMPUTE, 0 };
    ret->n_aux = 1; /* log of the softmax's denominator */
    ret->aux[0] = (mt_shape){ in[0].rows, a->heads, MT_KIND_STAT, 0 };
    ret->backward_in = 0xf;
    ret->backward_out = 1u << 0;
    ret->attn_flops_per_pair = 2.0 * a->heads * (a->qk_dim + a->v_dim);
    ret->attn_window = a->window;
    ret->n_state = 2; /* keys and values */
    for (uint32_t i = 0; i < 2; i++)
        ret->state[i] = (mt_shape){ { 1, 0, 0 }, in[1 + i].cols, MT_KIND_COMPUTE, 0 };
    return MT_OK;
}

const mt_op_def op_attention = { sizeof(mt_op_def),    0, "attention", 3, 4,
                                 sizeof(mt_attn_attr), 0, shape };
