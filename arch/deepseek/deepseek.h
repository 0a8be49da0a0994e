/* SPDX-License-Identifier: Apache-2.0
 *
 * What the DeepSeek family reads from a configuration (config.c, experts.c) and describes its
 * layers from (deepseek.c).
 */
#ifndef DEEPSEEK_H
#define DEEPSEEK_H

#include <megatrain/decoder.h>

typedef enum version { V1, V2, V3 } version;

/* Multi-head latent attention: keys and values from a narrow common latent, positions only in the
 * last columns of q and k, those of k one head that all heads share. */
typedef struct latent_attn {
    int64_t q_rank; /* 0: q straight from x */
    int64_t kv_rank, nope_dim, rope_dim, v_dim;
    mt_rope_attr rope;
    double scale;
    bool bias; /* of q_a_proj, kv_a_proj_with_mqa and o_proj */
} latent_attn;

typedef struct deepseek {
    mt_decoder d; /* first */
    version v;
    mt_decoder_attn mha; /* V1 */
    latent_attn mla;     /* V2, V3 */
    mt_decoder_moe moe;
    int64_t first_sparse, sparse_step; /* layers with experts: from the first, each of so many */
    int64_t predict_layers;            /* behind the last: multi-token prediction, not loaded */
} deepseek;

/* Fills a deepseek from the configuration. */
mt_status deepseek_read(const mt_config *c, const char *type, mt_model *model, void *state);
/* The part of it that has to do with experts; after mt_decoder_read. */
mt_status deepseek_read_experts(const mt_config *c, deepseek *m);

#endif
