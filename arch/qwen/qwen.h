/* SPDX-License-Identifier: Apache-2.0
 *
 * What the two files of the Qwen plugin share: qwen.c has the transformers, hybrid.c the models in
 * which most layers are gated delta nets.
 */
#ifndef QWEN_H
#define QWEN_H

#include <megatrain/decoder.h>

/* Fails where mlp_only_layers names a layer that the model does not have. */
mt_status qwen_check_dense(const mt_config *c, int64_t layers);

/* Does layer i have experts? One of every `step` layers has, but those in mlp_only_layers. */
mt_status qwen_has_experts(const mt_config *c, int64_t step, int64_t i, bool *ret);

/* Model types qwen3_next and qwen3_5*. */
extern const mt_decoder_family qwen_hybrid;

#endif
