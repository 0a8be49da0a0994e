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

#define ADDRESS(id) &op_##id,

static const mt_op_def *const ops[] = { MT_OPERATIONS(ADDRESS) NULL };

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
