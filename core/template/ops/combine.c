/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: each token's rows, weighted and added up.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    int64_t k = in[2].cols;
    if (!op_is_index(&in[2]) || !op_row_a_token(&in[2]))
        return op_refuse(error, error_size, "operand 2 must be the slots of a router");
    if (in[1].is_param || in[1].kind != MT_KIND_STAT || in[1].cols != k || !op_row_a_token(&in[1]))
        return op_refuse(error, error_size,
                         "operand 1 must be the weights of the router that gave the %lld slots",
                         (long long)k);
    if (!op_is_activation(&in[0]) || !op_rows_are(&in[0], (mt_rows){ k, 0, 0 }))
        return op_refuse(error, error_size,
                         "operand 0 must be an activation with %lld rows a token", (long long)k);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[2].rows, in[0].cols, MT_KIND_COMPUTE, 0 };
    ret->backward_in = 1u << 0 | 1u << 1 | 1u << 2;
    ret->no_grad_in = 1u << 2;
    return MT_OK;
}

const mt_op_def op_combine = { sizeof(mt_op_def), MT_OP_CHEAP, "combine", 3, 3, 0, 0, shape };
