/* SPDX-License-Identifier: Apache-2.0
 *
 * The heads of several values side by side; an operand may be one head that all share.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    const mt_concat_attr *a = attr;
    int64_t width = 0;
    if (a->heads < 1)
        return op_refuse(error, error_size, "%d heads", a->heads);
    for (uint32_t i = 0; i < n_in; i++) {
        if (!op_present(&in[i]) && a->cols[i] == 0)
            continue;
        if (!op_is_activation(&in[i]) || !op_same_rows(&in[i], &in[0]))
            return op_refuse(error, error_size,
                             "operand %u must be an activation with the rows of operand 0", i);
        int64_t expected = (a->shared >> i & 1u ? 1 : a->heads) * (int64_t)a->cols[i];
        if (in[i].cols != expected)
            return op_refuse(error, error_size, "operand %u has %lld columns, expected %lld", i,
                             (long long)in[i].cols, (long long)expected);
        if (i > 0 && !op_present(&in[i - 1]))
            return op_refuse(error, error_size, "operand %u is missing", i - 1);
        width += a->cols[i];
    }
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ in[0].rows, a->heads * width, MT_KIND_COMPUTE, 0 };
    return MT_OK;
}

const mt_op_def op_concat = { sizeof(mt_op_def),      MT_OP_CHEAP, "concat", 1, MT_OP_MAX_IN,
                              sizeof(mt_concat_attr), 0,           shape };
