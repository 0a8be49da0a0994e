/* SPDX-License-Identifier: Apache-2.0
 *
 * LM head and loss in one, chunk by chunk: the logits never exist whole. While a chunk's logits
 * are there in a train pass, both gradients are formed; aux 0 is the one that goes down.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_xent_attr *a = attr;
    if (!op_is_activation(&in[0]) || in[0].rows.per_token != 1)
        return op_refuse(error, error_size, "operand 0 must be an activation with a row a token");
    if (!in[1].is_param || in[1].cols != in[0].cols)
        return op_refuse(error, error_size, "the weight must be [vocab, %lld], found [%lld, %lld]",
                         (long long)in[0].cols, (long long)in[1].rows.fixed, (long long)in[1].cols);
    if (!(a->softcap >= 0))
        return op_refuse(error, error_size, "softcap must not be negative, found %g", a->softcap);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, 1, MT_KIND_STAT, 0 };
    ret->n_aux = 1;
    ret->aux[0] = in[0];
    ret->gemm_flops_per_token = 2.0 * (double)in[1].rows.fixed * (double)in[1].cols;
    return MT_OK;
}

const mt_op_def op_linear_cross_entropy = { sizeof(mt_op_def),
                                            MT_OP_GRAD_IN_FORWARD,
                                            "linear_cross_entropy",
                                            2,
                                            2,
                                            sizeof(mt_xent_attr),
                                            0,
                                            shape };
