/* SPDX-License-Identifier: Apache-2.0
 *
 * y = a + b. Both gradients are the one of y, so backward rarely runs: the core aliases.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    return op_elementwise(in, 2, ret, error, error_size);
}

const mt_op_def op_add = {
    sizeof(mt_op_def), MT_OP_CHEAP | MT_OP_PASS_THROUGH, "add", 2, 2, 0, 0, shape
};
