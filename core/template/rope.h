/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotary frequencies from hyper-parameters.
 */
#ifndef MT_CORE_ROPE_H
#define MT_CORE_ROPE_H

#include <megatrain/arch.h>

/* Fills `ret` (heads 1, half-split pairs) for heads of head_dim columns, from rope_theta with
 * rope_scaling, or from rope_parameters, or as the spec says for lack of them. Frequencies are
 * formed in FP32 as Hugging Face transformers forms them; formulas: transformers'
 * modeling_rope_utils, YaRN (arXiv 2309.00071), Llama 3.1. */
mt_status rope_from_config(const mt_config *c, const mt_rope_spec *spec, int64_t head_dim,
                           mt_rope_attr *ret);

#endif
