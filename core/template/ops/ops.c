/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of built-in operations and what their shape rules share.
 */
#include "ops.h"

#include <stdio.h>

mt_status op_refuse(char *error, size_t size, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(error, size, fmt, args);
    va_end(args);
    return MT_ERR_INVALID;
}

mt_status op_elementwise(const mt_shape *in, uint32_t operands, mt_op_shape *ret, char *error,
                         size_t size)
{
    for (uint32_t i = 0; i < operands; i++) {
        if (!op_is_activation(&in[i]))
            return op_refuse(error, size, "operand %u must be an activation", i);
        if (in[i].cols != in[0].cols || !op_same_rows(&in[i], &in[0]))
            return op_refuse(error, size, "operands differ in shape: %lld and %lld columns",
                             (long long)in[0].cols, (long long)in[i].cols);
    }
    ret->n_out = 1;
    ret->out[0] = in[0];
    return MT_OK;
}

static const mt_op_def *const ops[] = {
    &op_act,         &op_add,
    &op_attention,   &op_balance_loss,
    &op_causal_conv, &op_combine,
    &op_concat,      &op_dispatch,
    &op_embedding,   &op_gated_delta,
    &op_glu,         &op_grouped_linear,
    &op_linear,      &op_linear_cross_entropy,
    &op_log_decay,   &op_mul,
    &op_rmsnorm,     &op_rope,
    &op_router,      &op_scale,
    &op_slice,       NULL,
};

const mt_op_def *const *op_list(void)
{
    return ops;
}

const mt_op_def *op_find(const char *name)
{
    for (const mt_op_def *const *op = ops; *op; op++)
        if (strcmp((*op)->name, name) == 0)
            return *op;
    return NULL;
}
