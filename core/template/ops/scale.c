/* SPDX-License-Identifier: Apache-2.0
 *
 * y = factor * x.
 */
#include "ops.h"

#include <math.h>

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_scale_attr *a = attr;
    if (!isfinite(a->factor))
        return op_refuse(error, error_size, "the factor is not finite");
    return op_elementwise(in, 1, ret, error, error_size);
}

const mt_op_def op_scale = { sizeof(mt_op_def),     MT_OP_CHEAP, "scale", 1, 1,
                             sizeof(mt_scale_attr), 0,           shape };
