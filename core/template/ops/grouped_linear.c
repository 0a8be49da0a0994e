/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: y = x w_e^T + bias_e for the rows of each expert e.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)attr;
    if (!op_is_activation(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation");
    if (!op_is_index(&in[2]) || !op_rows_are(&in[2], (mt_rows){ 0, 0, 1 }) || in[2].cols < 2)
        return op_refuse(error, error_size, "operand 2 must be the offsets of a router");
    int64_t experts = in[2].cols - 1, rows = in[1].rows.fixed;
    if (!in[1].is_param || in[1].cols != in[0].cols || rows % experts != 0)
        return op_refuse(
            error, error_size, "the weight must be [%lld experts * out, %lld], found [%lld, %lld]",
            (long long)experts, (long long)in[0].cols, (long long)rows, (long long)in[1].cols);
    int64_t out = rows / experts;
    if (n_in > 3 && op_present(&in[3]) &&
        (!in[3].is_param || in[3].rows.fixed != experts || in[3].cols != out))
        return op_refuse(error, error_size, "the bias must be [%lld, %lld], found [%lld, %lld]",
                         (long long)experts, (long long)out, (long long)in[3].rows.fixed,
                         (long long)in[3].cols);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, out, MT_KIND_COMPUTE, 0 };
    ret->backward_in = 1u << 0 | 1u << 1 | 1u << 2;
    ret->no_grad_in = 1u << 2;
    ret->gemm_flops_per_token =
        2.0 * (double)in[0].rows.per_token * (double)out * (double)in[1].cols;
    return MT_OK;
}

const mt_op_def op_grouped_linear = {
    sizeof(mt_op_def), MT_OP_BY_EXPERT, "grouped_linear", 3, 4, 0, 0, shape
};
