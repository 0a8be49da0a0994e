/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: a loss that grows as experts are used unevenly (Switch Transformer, arXiv
 * 2101.03961, section 2.2; DeepSeek-V2, arXiv 2405.04434, section 2.2.3).
 */
#include "ops.h"

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    const mt_balance_attr *a = attr;
    if (in[0].is_param || in[0].kind == MT_KIND_INDEX || !op_row_a_token(&in[0]))
        return op_refuse(error, error_size, "the logits must be an activation with a row a token");
    if (!op_is_index(&in[1]) || !op_row_a_token(&in[1]) || !op_is_index(&in[2]) ||
        in[2].cols != in[0].cols + 1)
        return op_refuse(error, error_size,
                         "operands 1 and 2 must be slots and offsets of a router of %lld experts",
                         (long long)in[0].cols);
    if (a->mode < MT_BALANCE_HF_PER_LAYER || a->mode > MT_BALANCE_HF_ALL_LAYERS)
        return op_refuse(error, error_size, "mode %d is unknown", a->mode);
    if (!(a->coef > 0))
        return op_refuse(error, error_size,
                         "the coefficient must be above 0, not %g; leave the "
                         "loss out instead",
                         a->coef);
    ret->n_out = 1;
    ret->out[0] = (mt_shape){ { 0, 0, 1 }, 1, MT_KIND_STAT, 0 };
    ret->tally = mt_balance_tally(a->mode, in[0].cols);
    ret->backward_in = ret->tally ? 1u << 0 : 1u << 0 | 1u << 1 | 1u << 2;
    ret->no_grad_in = 1u << 1 | 1u << 2;
    return MT_OK;
}

const mt_op_def op_balance_loss = {
    sizeof(mt_op_def), MT_OP_EMITS_LOSS, "balance_loss", 3, 3, sizeof(mt_balance_attr), 0, shape
};
