/* SPDX-License-Identifier: Apache-2.0
 *
 * Gated activation: y = f(gate) * up.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_act_attr *a = attr;
    if (a->kind < MT_ACT_SILU || a->kind > MT_ACT_CLAMPED_SWIGLU)
        return op_refuse(error, error_size, "activation %d is unknown", a->kind);
    if (a->kind == MT_ACT_CLAMPED_SWIGLU && !(a->limit > 0))
        return op_refuse(error, error_size, "the clamped activation needs a limit above 0, not %g",
                         a->limit);
    ret->backward_in = 1u << 0 | 1u << 1;
    return op_elementwise(in, 2, ret, error, error_size);
}

const mt_op_def op_glu = { sizeof(mt_op_def),   MT_OP_CHEAP, "glu", 2, 2,
                           sizeof(mt_act_attr), 0,           shape };
