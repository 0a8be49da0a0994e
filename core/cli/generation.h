/* SPDX-License-Identifier: Apache-2.0
 *
 * Generating with a session's model: the sequence that the engine holds, and the next tokens.
 */
#ifndef MT_CORE_CLI_GENERATION_H
#define MT_CORE_CLI_GENERATION_H

#include "../train/sample.h"
#include "../train/session.h"

typedef struct generation {
    session *s; /* with device, model and tokenizer */
    sampler *sampler;
    float *logits;   /* [vocab], of the next token */
    int32_t *tokens; /* [context], those that the engine holds */
    int64_t used, context;
    int64_t piece; /* most tokens fed at once */
} generation;

typedef struct generation_options {
    sampler_options sampling;
    const char *weights; /* "": drawn from the seed of `sampling` */
    int64_t prompt;      /* tokens of the longest prompt */
    int64_t context;     /* tokens of the longest sequence, prompt included */
} generation_options;

/* A generation starts as { 0 } and is closed also when this fails. [main] */
mt_status generation_open(generation *g, session *s, const generation_options *options);
void generation_close(generation *g);

/* Makes the engine hold exactly these tokens, at most `context`: feeds what goes beyond those that
 * it holds already, or all of them where the two part. [main] */
mt_status generation_feed(generation *g, const int32_t *tokens, int64_t n);

/* What takes the tokens that are made, one by one; fails to stop. */
typedef mt_status (*generation_put)(void *arg, int32_t token);

/* Draws tokens until one of `stops`, which is not put, until there are `most`, or until the context
 * is full. [main] */
mt_status generation_run(generation *g, const int32_t *stops, int64_t n_stops, int64_t most,
                         generation_put put, void *arg, int64_t *ret_made);

#endif
