/* SPDX-License-Identifier: Apache-2.0
 *
 * A short causal convolution of every column, inside each document.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    if (!op_is_activation(&in[0]) || !op_row_a_token(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation with a row a token");
    if (!in[1].is_param || !op_rows_are(&in[1], (mt_rows){ 0, 0, in[0].cols }))
        return op_refuse(error, error_size, "the weight must have a row for each of %lld columns",
                         (long long)in[0].cols);
    ret->n_out = 1;
    ret->out[0] = in[0];
    ret->backward_in = 1u << 0 | 1u << 1;
    if (in[1].cols > 1) { /* the inputs that the next token's window reaches back to */
        ret->n_state = 1;
        ret->state[0] = (mt_shape){ { 0, 0, in[1].cols - 1 }, in[0].cols, MT_KIND_COMPUTE, 0 };
    }
    return MT_OK;
}

const mt_op_def op_causal_conv = {
    sizeof(mt_op_def), MT_OP_CHEAP, "causal_conv", 2, 2, 0, 0, shape
};
