/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: tokens' rows, copied and ordered by expert.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    if (!op_is_activation(&in[0]) || !op_row_a_token(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation with a row a token");
    if (!op_is_index(&in[1]) || !op_row_a_token(&in[1]))
        return op_refuse(error, error_size, "operand 1 must be the slots of a router");
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ { in[1].cols, 0, 0 }, in[0].cols, MT_KIND_COMPUTE, 0 };
    ret->backward_in = 1u << 1;
    ret->no_grad_in = 1u << 1;
    return MT_OK;
}

const mt_op_def op_dispatch = { sizeof(mt_op_def), MT_OP_CHEAP, "dispatch", 2, 2, 0, 0, shape };
