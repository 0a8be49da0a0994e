/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of a table, picked by the batch's tokens. Only the rows in use are on the device.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    (void)attr;
    if (!in[0].is_param)
        return op_refuse(error, error_size, "the table must be a parameter");
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ { 1, 0, 0 }, in[0].cols, MT_KIND_COMPUTE, 0 };
    return MT_OK;
}

const mt_op_def op_embedding = {
    sizeof(mt_op_def), MT_OP_CHEAP | MT_OP_GATHERS_ROWS, "embedding", 1, 1, 0, 0, shape
};
