/* SPDX-License-Identifier: Apache-2.0
 *
 * Some columns of every head.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_slice_attr *a = attr;
    if (!op_is_activation(&in[0]))
        return op_refuse(error, error_size, "operand 0 must be an activation");
    if (a->heads < 1 || in[0].cols % a->heads != 0)
        return op_refuse(error, error_size, "%lld columns do not divide into %d heads",
                         (long long)in[0].cols, a->heads);
    int64_t n = in[0].cols / a->heads;
    if (a->first < 0 || a->cols < 1 || a->first > n - a->cols)
        return op_refuse(error, error_size,
                         "%lld columns from column %lld on are not in a head of "
                         "%lld columns",
                         (long long)a->cols, (long long)a->first, (long long)n);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, a->heads * a->cols, MT_KIND_COMPUTE, 0 };
    ret->is_view = a->heads == 1;
    ret->view_col = a->first;
    return MT_OK;
}

const mt_op_def op_slice = { sizeof(mt_op_def),     MT_OP_CHEAP, "slice", 1, 1,
                             sizeof(mt_slice_attr), 0,           shape };
