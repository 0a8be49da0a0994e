/* SPDX-License-Identifier: Apache-2.0
 *
 * The log of a recurrent state's decay, from a projection of the token and two numbers a head.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    if (!op_is_activation(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation");
    for (uint32_t i = 1; i < 3; i++)
        if (!op_is_vector(&in[i], in[0].cols))
            return op_refuse(error, error_size, "%s must be a vector of %lld elements, one a head",
                             i == 1 ? "a_log" : "dt_bias", (long long)in[0].cols);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, in[0].cols, MT_KIND_STAT, 0 };
    ret->backward_in = 1u << 0 | 1u << 1 | 1u << 2;
    ret->stat_params = 1u << 1 | 1u << 2;
    return MT_OK;
}

const mt_op_def op_log_decay = { sizeof(mt_op_def), MT_OP_CHEAP, "log_decay", 3, 3, 0, 0, shape };
