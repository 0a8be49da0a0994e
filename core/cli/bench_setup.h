/* SPDX-License-Identifier: Apache-2.0
 *
 * What the benches that run steps share: the model and overrides on the command line, steps of
 * random tokens, and the plan of a step size.
 */
#ifndef MT_CORE_BENCH_SETUP_H
#define MT_CORE_BENCH_SETUP_H

#include "../train/session.h"
#include "cli.h"

enum { BENCH_MAX_SIZES = 32, BENCH_DOCUMENT = 1024 };

/* Tokens of a step, for several steps. */
typedef struct bench_sizes {
    int64_t tokens[BENCH_MAX_SIZES];
    int32_t n;
} bench_sizes;

/* The next three return CLI_GO_ON, or the exit code of wrong usage that has been explained.
 *
 * Reads a list such as "8k,32k". */
int bench_parse_sizes(const cli_command *self, const char *list, bench_sizes *ret);
/* words[0] must be there; the others must be overrides of keys that begin with one of `keys`
 * (NULL-terminated), which the message calls `names`. */
int bench_check_words(const cli_command *self, char **words, int n, const char *const *keys,
                      const char *names);
int bench_check_counts(const cli_command *self, int64_t steps, int64_t document);

/* The run manifest of a model, words[0], with documents of `document` tokens, 0: BENCH_DOCUMENT.
 * Overrides: first `fixed` (NULL: none), then the other words. */
mt_status bench_read_words(char **words, int n, int64_t document, const char *fixed,
                           run_manifest **ret);

/* Opens device and model. Documents must be within the model's positions; with a `document` of 0
 * they are made as short as that. */
mt_status bench_open(session *s, int64_t document, run_manifest *run);

/* Packed documents of random tokens, each of which has to be predicted. */
mt_status bench_make_batch(int64_t tokens, int64_t micro_tokens, int64_t document, int64_t vocab,
                           uint64_t seed, step_batch **ret);
void bench_free_batch(step_batch *b); /* accepts NULL */

/* The plan of a step of `tokens` tokens, with the micro-batch that the run asks for or else the one
 * with which the plan expects the fastest step. The caller owns it. */
mt_status bench_plan(session *s, const run_manifest *run, int64_t tokens, plan **ret);

double bench_now(void); /* seconds of the monotonic clock */

#endif
