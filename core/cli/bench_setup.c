/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line, data and plans of the benches that run steps.
 */
#include "bench_setup.h"

#include "../base/rng.h"
#include "../base/status.h"
#include "../base/text.h"
#include "../train/run_folder.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum { MIN_MICRO = 1024 };

/* ---- the command line ------------------------------------------------------------------------ */

/* "8192", "8k" = 8192, and 131k = 131072: thousands of a power of two mean that power, other ones
 * 1024 each. */
static bool parse_tokens(const char *text, size_t n, int64_t *ret)
{
    char *end = NULL;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    if (end == text || errno || x < 1 || x > INT32_MAX)
        return false;
    if (end == text + n - 1 && (*end == 'k' || *end == 'K')) {
        for (int64_t power = 1024; power <= INT32_MAX; power *= 2)
            if (power / 1000 == x) {
                *ret = power;
                return true;
            }
        *ret = x * 1024;
        return *ret <= INT32_MAX;
    }
    *ret = x;
    return end == text + n;
}

static int parse_sizes(const cli_command *self, const char *list, bench_sizes *ret)
{
    while (*list) {
        size_t n = strcspn(list, ",");
        if (ret->n == BENCH_MAX_SIZES)
            return cli_usage(self, "--tokens lists more than %d sizes", BENCH_MAX_SIZES);
        if (!parse_tokens(list, n, &ret->tokens[ret->n]) || ret->tokens[ret->n] < 2)
            return cli_usage(
                self, "--tokens must be numbers of tokens such as 8k,32k or 8192, not '%.*s'",
                (int)n, list);
        ret->n++;
        list += n + (list[n] == ',');
    }
    return CLI_GO_ON;
}

static bool begins_with_one(const char *text, const char *const *keys)
{
    for (; *keys; keys++)
        if (strncmp(text, *keys, strlen(*keys)) == 0)
            return true;
    return false;
}

/* "device, memory.* and optimizer.*" of "device=", "memory.", "optimizer.". */
static void list_keys(const char *const *keys, char *text, size_t size)
{
    for (int i = 0; keys[i]; i++) {
        size_t n = strlen(keys[i]) - 1;
        text_append(text, size, "%s%.*s%s",
                    i == 0        ? ""
                    : keys[i + 1] ? ", "
                                  : " and ",
                    (int)n, keys[i], keys[i][n] == '.' ? ".*" : "");
    }
}

static int check_words(const cli_command *self, char **words, int n, const char *const *keys)
{
    char names[512] = "";
    if (n < 1)
        return cli_usage(self, "which model? name a model manifest or a model folder");
    for (int i = 1; i < n; i++) {
        int key = (int)strcspn(words[i], "=");
        if (!words[i][key])
            return cli_usage(self, "'%s' is no override; write key=value, such as precision=bf16",
                             words[i]);
        if (begins_with_one(words[i], keys))
            continue;
        list_keys(keys, names, sizeof names);
        return cli_usage(self,
                         "'%.*s' has no effect on a step; give --tokens and --document for its "
                         "size, and of a run's keys %s",
                         key, words[i], names);
    }
    return CLI_GO_ON;
}

static int check_counts(const cli_command *self, int64_t steps, int64_t document)
{
    if (steps < 1 || steps > 100000)
        return cli_usage(self, "--steps must be from 1 to 100000, not %lld", (long long)steps);
    if (document != INT64_MIN && (document < 2 || document > 1 << 30))
        return cli_usage(self, "--document must be at least 2 tokens, not %lld",
                         (long long)document);
    return CLI_GO_ON;
}

int bench_parse(const cli_command *self, const cli_option *options, int argc, char **argv,
                const char *const *keys, bench_request *r, int *ret_words)
{
    int rc = cli_parse(self, options, argc, argv, ret_words);
    if (rc == CLI_GO_ON)
        rc = check_words(self, argv, *ret_words, keys);
    if (rc == CLI_GO_ON)
        rc = parse_sizes(self, r->tokens, &r->sizes);
    if (rc == CLI_GO_ON)
        rc = check_counts(self, r->steps, r->document);
    if (r->document == INT64_MIN)
        r->document = 0;
    return rc;
}

mt_status bench_read_words(char **words, int n, int64_t document, const char *fixed,
                           run_manifest **ret)
{
    char found[RUN_FOLDER_PATH], length[64], first[128];
    mt_status st = run_folder_find_model(words[0], found);
    if (st != MT_OK)
        return st;
    char **overrides = calloc((size_t)n + 1, sizeof *overrides);
    if (!overrides)
        return status_nomem("overrides", ((size_t)n + 1) * sizeof *overrides);
    int count = 0;
    snprintf(length, sizeof length, "data.max_seq_len=%lld",
             (long long)(document ? document : BENCH_DOCUMENT));
    overrides[count++] = length;
    if (fixed) {
        snprintf(first, sizeof first, "%s", fixed);
        overrides[count++] = first;
    }
    for (int i = 1; i < n; i++)
        overrides[count++] = words[i];
    st = run_of_model(found, overrides, count, ret);
    free(overrides);
    return st;
}

mt_status bench_open(session *s, int64_t document, run_manifest *run)
{
    mt_status st = session_open_run_device(s, run);
    if (st == MT_OK)
        st = session_open_model(s, run->model);
    if (st != MT_OK || s->model->max_positions <= 0 || run->max_seq_len <= s->model->max_positions)
        return st;
    if (document == 0)
        run->max_seq_len = s->model->max_positions;
    else
        st = status_set(MT_ERR_INVALID,
                        "--document %lld is more than the model's max_position_embeddings, %lld; "
                        "lower it",
                        (long long)run->max_seq_len, (long long)s->model->max_positions);
    return st;
}

/* ---- a step's data --------------------------------------------------------------------------- */

void bench_free_batch(step_batch *b)
{
    if (!b)
        return;
    for (int64_t i = 0; b->micro && i < b->n; i++) {
        free(b->micro[i].ids);
        free(b->micro[i].targets);
        free(b->micro[i].positions);
        free(b->micro[i].doc_starts);
    }
    free(b->micro);
    free(b);
}

/* Random tokens, each of which has to be predicted. */
static mt_status fill_micro(micro_batch *m, int64_t tokens, int64_t document, int64_t vocab,
                            rng *random)
{
    *m = (micro_batch){ .tokens = tokens,
                        .documents = (tokens + document - 1) / document,
                        .max_document = document < tokens ? document : tokens,
                        .n_targets = tokens };
    size_t n = (size_t)tokens;
    m->ids = malloc(n * sizeof *m->ids);
    m->targets = malloc(n * sizeof *m->targets);
    m->positions = malloc(n * sizeof *m->positions);
    m->doc_starts = malloc((size_t)(m->documents + 1) * sizeof *m->doc_starts);
    if (!m->ids || !m->targets || !m->positions || !m->doc_starts)
        return status_nomem("a micro-batch", 3 * n * sizeof *m->ids);
    for (int64_t t = 0; t < tokens; t++) {
        m->ids[t] = (int32_t)rng_below(random, (uint64_t)vocab);
        m->targets[t] = (int32_t)rng_below(random, (uint64_t)vocab);
        m->positions[t] = (int32_t)(t % document);
    }
    for (int64_t d = 0; d <= m->documents; d++)
        m->doc_starts[d] = (int32_t)(d * document < tokens ? d * document : tokens);
    return MT_OK;
}

mt_status bench_make_batch(int64_t tokens, int64_t micro_tokens, int64_t document, int64_t vocab,
                           uint64_t seed, step_batch **ret)
{
    rng random = { .key = rng_key(seed, "bench") };
    step_batch *b = calloc(1, sizeof *b);
    if (!b)
        return status_nomem("a step", sizeof *b);
    b->n = (tokens + micro_tokens - 1) / micro_tokens;
    b->tokens = b->n_targets = tokens;
    b->micro = calloc((size_t)b->n, sizeof *b->micro);
    mt_status st = b->micro ? MT_OK : status_nomem("a step", (size_t)b->n * sizeof *b->micro);
    for (int64_t i = 0; st == MT_OK && i < b->n; i++) {
        int64_t left = tokens - i * micro_tokens;
        st = fill_micro(&b->micro[i], left < micro_tokens ? left : micro_tokens, document, vocab,
                        &random);
    }
    if (st == MT_OK)
        *ret = b;
    else
        bench_free_batch(b);
    return st;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* Leaves the plan in s->plan. */
static mt_status plan_micro(session *s, const run_manifest *run, int64_t tokens, int64_t micro)
{
    int64_t document = run->max_seq_len;
    micro = micro < tokens ? micro : tokens;
    return session_make_step_plan(s, run, micro, (tokens + micro - 1) / micro,
                                  (micro + document - 1) / document);
}

/* Of equally fast micro-batches, of up to SESSION_MOST_MICRO tokens, the largest. */
mt_status bench_plan(session *s, const run_manifest *run, int64_t tokens, plan **ret)
{
    const mt_config *train = config_section(run->config, "train");
    bool chosen = train->has(train, "micro_batch_size");
    int64_t document = run->max_seq_len, smallest = run->micro_batch_size * document;
    int64_t micro = smallest;
    plan *best = NULL;
    mt_status st = MT_OK;
    while (!chosen && 2 * micro <= SESSION_MOST_MICRO && micro < tokens)
        micro *= 2;
    for (;; micro /= 2) {
        st = plan_micro(s, run, tokens, micro);
        if (st == MT_OK && (!best || s->plan->seconds < best->seconds * 0.99)) {
            plan_destroy(best);
            best = s->plan;
            s->plan = NULL;
        }
        if (micro == smallest || (best && micro <= MIN_MICRO))
            break;
    }
    plan_destroy(s->plan);
    s->plan = NULL;
    if (!best)
        return st;
    *ret = best;
    return MT_OK;
}
