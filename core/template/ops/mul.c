/* SPDX-License-Identifier: Apache-2.0
 *
 * y = a * b, element by element.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    ret->backward_in = 1u << 0 | 1u << 1;
    return op_elementwise(in, 2, ret, error, error_size);
}

const mt_op_def op_mul = { sizeof(mt_op_def), MT_OP_CHEAP, "mul", 2, 2, 0, 0, shape };
