/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotary position embedding. Backward rotates the other way and needs nothing saved.
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_rope_attr *a = attr;
    if (a->heads < 1 || a->head_dim < 1 || in[0].cols != (int64_t)a->heads * a->head_dim)
        return op_refuse(error, error_size, "%lld columns are not %d heads of %d",
                         (long long)in[0].cols, a->heads, a->head_dim);
    if (a->rotary_dim < 2 || a->rotary_dim % 2 || a->rotary_dim > a->head_dim ||
        a->rotary_dim / 2 > MT_ROPE_MAX_FREQ)
        return op_refuse(error, error_size,
                         "rotary dimension %d must be even, at least 2, at most %d and at most %d",
                         a->rotary_dim, a->head_dim, 2 * MT_ROPE_MAX_FREQ);
    if (a->pairing < MT_ROPE_HALF_SPLIT || a->pairing > MT_ROPE_INTERLEAVED)
        return op_refuse(error, error_size, "pairing %d is unknown", a->pairing);
    if (!(a->growth >= 0) || (a->growth > 0 && a->growth_positions < 1))
        return op_refuse(error, error_size,
                         "growth %g must be at least 0, and growth_positions, %d, above 0 with it",
                         (double)a->growth, a->growth_positions);
    return op_elementwise(in, 1, ret, error, error_size);
}

const mt_op_def op_rope = { sizeof(mt_op_def),    MT_OP_CHEAP, "rope", 1, 1,
                            sizeof(mt_rope_attr), 0,           shape };
