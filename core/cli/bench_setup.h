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

/* What all JSON files of benches have near their beginning. */
#define REPORT_MARK "megatrain-bench-"

/* What the command line asks for. */
typedef struct bench_request {
    const char *tokens; /* as given */
    bench_sizes sizes;
    int64_t steps, document; /* document 0: not given, once they are read */
    const char *json;        /* NULL: no file */
    cli_list dirs;
} bench_request;

#define BENCH_DEFAULTS                                                                             \
    {                                                                                              \
        .tokens = "8k,32k", .steps = 3, .document = INT64_MIN                                      \
    }

/* Entries of the option table. */
#define BENCH_OPTIONS(r)                                                                           \
    { "tokens", CLI_TEXT, &(r)->tokens, "LIST", "tokens of a step, several sizes (8k,32k)" },      \
        { "steps", CLI_INT, &(r)->steps, "N", "timed steps of each size, after one more (3)" },    \
        { "document", CLI_INT, &(r)->document, "TOKENS",                                           \
          "length of documents (1024, or the positions)" },                                        \
        { "json", CLI_TEXT, &(r)->json, "FILE", "write the figures as JSON as well" },             \
        CLI_PLUGIN_DIR(&(r)->dirs)

/* Reads the command line, into `r` by `options`; words[0] is the model, the other words must be
 * overrides of keys that begin with one of `keys` (NULL-terminated: "seed=", "memory."). Returns
 * CLI_GO_ON, or the exit code of a command that is over. */
int bench_parse(const cli_command *self, const cli_option *options, int argc, char **argv,
                const char *const *keys, bench_request *r, int *ret_words);

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

#endif
