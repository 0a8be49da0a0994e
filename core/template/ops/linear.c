/* SPDX-License-Identifier: Apache-2.0
 *
 * y = x w^T + bias.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)attr;
    if (!op_is_activation(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation");
    if (!in[1].is_param || in[1].cols != in[0].cols)
        return op_refuse(error, error_size, "the weight must be [out, %lld], found [%lld, %lld]",
                         (long long)in[0].cols, (long long)in[1].rows.fixed, (long long)in[1].cols);
    if (n_in > 2 && op_present(&in[2]) && !op_is_vector(&in[2], in[1].rows.fixed))
        return op_refuse(error, error_size, "the bias must be a vector of %lld elements",
                         (long long)in[1].rows.fixed);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, in[1].rows.fixed, MT_KIND_COMPUTE, 0 };
    ret->backward_in = 1u << 0 | 1u << 1;
    ret->gemm_flops_per_token =
        2.0 * (double)in[0].rows.per_token * (double)in[1].rows.fixed * (double)in[1].cols;
    return MT_OK;
}

const mt_op_def op_linear = {
    sizeof(mt_op_def), MT_OP_MERGES_SIBLINGS, "linear", 2, 3, 0, 0, shape
};
