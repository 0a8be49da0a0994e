/* SPDX-License-Identifier: Apache-2.0
 *
 * What a step trains on, in host memory: packed micro-batches.
 */
#ifndef MT_CORE_BATCH_H
#define MT_CORE_BATCH_H

#include <megatrain/base.h>

/* A packed stream of `tokens` tokens. Positions restart at 0 in each document. */
typedef struct micro_batch {
    int64_t tokens;
    int64_t documents;
    int64_t max_document;
    int64_t n_targets;   /* targets that are not -100 */
    int32_t *ids;        /* [tokens] */
    int32_t *targets;    /* [tokens], -100: ignored */
    int32_t *positions;  /* [tokens] */
    int32_t *doc_starts; /* [documents + 1] */
} micro_batch;

typedef struct step_batch {
    int64_t n;          /* micro-batches; none is empty */
    micro_batch *micro; /* [n] */
    int64_t tokens;     /* sums over micro-batches */
    int64_t n_targets;
} step_batch;

#endif
