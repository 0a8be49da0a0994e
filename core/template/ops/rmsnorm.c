/* SPDX-License-Identifier: Apache-2.0
 *
 * Root-mean-square normalisation of a row, or of each head's columns by themselves.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_rmsnorm_attr *a = attr;
    if (!op_is_activation(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation");
    if (a->heads < 1 || in[0].cols % a->heads != 0)
        return op_refuse(error, error_size, "%lld columns do not divide into %d heads",
                         (long long)in[0].cols, a->heads);
    if (!op_is_vector(&in[1], in[0].cols / a->heads))
        return op_refuse(error, error_size, "the weight must be a vector of %lld elements",
                         (long long)(in[0].cols / a->heads));
    if (!(a->eps >= 0))
        return op_refuse(error, error_size, "eps must not be negative, found %g", a->eps);
    if (a->variant < MT_NORM_ROUND_THEN_SCALE || a->variant > MT_NORM_ONE_PLUS)
        return op_refuse(error, error_size, "norm variant %d is unknown", a->variant);
    ret->n_out = 1;
    ret->out[0] = in[0];
    ret->n_aux = 1; /* 1 / root mean square */
    ret->aux[0] = (mt_shape){ in[0].rows, a->heads, MT_KIND_STAT, 0 };
    ret->backward_in = 1u << 0 | 1u << 1;
    return MT_OK;
}

const mt_op_def op_rmsnorm = { sizeof(mt_op_def),       MT_OP_CHEAP, "rmsnorm", 2, 2,
                               sizeof(mt_rmsnorm_attr), 0,           shape };
