/* SPDX-License-Identifier: Apache-2.0
 *
 * y = f(x), element by element.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_act_attr *a = attr;
    if (a->kind != MT_ACT_SILU && a->kind != MT_ACT_GELU_TANH && a->kind != MT_ACT_SIGMOID)
        return op_refuse(error, error_size, "activation %d is not a function of one operand",
                         a->kind);
    ret->backward_in = 1u << 0;
    return op_elementwise(in, 1, ret, error, error_size);
}

const mt_op_def op_act = { sizeof(mt_op_def),   MT_OP_CHEAP, "act", 1, 1,
                           sizeof(mt_act_attr), 0,           shape };
