/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing the next token from logits: greedy, temperature, top-k, top-p.
 */
#ifndef MT_CORE_SAMPLE_H
#define MT_CORE_SAMPLE_H

#include <megatrain/base.h>

typedef struct sampler_options {
    double temperature; /* 0: greedy, the largest logit (the smallest id among equals) */
    int64_t top_k;      /* 0: all; ties at the border are broken by id */
    double top_p;       /* 1: all; the fewest most likely tokens that reach this mass */
    uint64_t seed;
} sampler_options;

typedef struct sampler sampler;

/* Options out of range are errors that name the option. [any] */
mt_status sampler_check(const sampler_options *options);

/* For logits of `vocab` entries. Options are checked. [any] */
mt_status sampler_create(const sampler_options *options, int64_t vocab, sampler **ret);
void sampler_destroy(sampler *s); /* accepts NULL */

/* The next token; the draws depend on the seed and the number of earlier calls only. Fails with
 * MT_ERR_NUMERIC when a logit is NaN. [any], one caller at a time */
mt_status sampler_next(sampler *s, const float *logits, int32_t *ret);

#endif
