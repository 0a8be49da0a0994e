/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain bench step: steps of the engine that `train` builds, on random weights and tokens, for
 * several step sizes. What is found is printed by bench_report.c.
 */
#include "bench_report.h"

#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/rng.h"
#include "../base/status.h"
#include "../train/human.h"
#include "../train/run_folder.h"
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_SIZES = 32, MAX_MICRO = 8192, MIN_MICRO = 1024 };

typedef struct request {
    int64_t tokens[MAX_SIZES];
    int32_t n_sizes;
    int64_t steps, document;
    const char *trace;
} request;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

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

static int parse_sizes(const cli_command *self, const char *list, request *r)
{
    while (*list) {
        size_t n = strcspn(list, ",");
        if (r->n_sizes == MAX_SIZES)
            return cli_usage(self, "--tokens lists more than %d sizes", MAX_SIZES);
        if (!parse_tokens(list, n, &r->tokens[r->n_sizes]) || r->tokens[r->n_sizes] < 2)
            return cli_usage(
                self, "--tokens must be numbers of tokens such as 8k,32k or 8192, not '%.*s'",
                (int)n, list);
        r->n_sizes++;
        list += n + (list[n] == ',');
    }
    return CLI_GO_ON;
}

/* Keys of a run manifest that change how a step runs. */
static bool has_effect(const char *assignment)
{
    static const char *const keys[] = { "device=",
                                        "precision=",
                                        "threads=",
                                        "seed=",
                                        "optimizer.",
                                        "memory.",
                                        "train.max_grad_norm=",
                                        "train.micro_batch_size=",
                                        "train.learning_rate=" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strncmp(assignment, keys[i], strlen(keys[i])) == 0)
            return true;
    return false;
}

static int check_words(const cli_command *self, char **words, int n)
{
    if (n < 1)
        return cli_usage(self, "which model? name a model manifest or a model folder");
    for (int i = 1; i < n; i++) {
        int key = (int)strcspn(words[i], "=");
        if (!words[i][key])
            return cli_usage(self, "'%s' is no override; write key=value, such as precision=bf16",
                             words[i]);
        if (!has_effect(words[i]))
            return cli_usage(self,
                             "'%.*s' has no effect on a step; give --tokens and --document for its "
                             "size, and of a run's keys device, precision, threads, seed, "
                             "train.max_grad_norm, train.micro_batch_size, train.learning_rate, "
                             "memory.* and optimizer.*",
                             key, words[i]);
    }
    return CLI_GO_ON;
}

/* ---- a step's data --------------------------------------------------------------------------- */

static void free_batch(step_batch *b)
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

static mt_status make_batch(int64_t tokens, int64_t micro_tokens, int64_t document, int64_t vocab,
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
        free_batch(b);
    return st;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* Takes the session's plan over. */
static plan *take_plan(session *s)
{
    plan *p = s->plan;
    s->plan = NULL;
    return p;
}

static mt_status plan_micro(session *s, const run_manifest *run, int64_t tokens, int64_t micro)
{
    int64_t document = run->max_seq_len;
    micro = micro < tokens ? micro : tokens;
    return session_make_step_plan(s, run, micro, (tokens + micro - 1) / micro,
                                  (micro + document - 1) / document);
}

/* The micro-batch that was asked for, or the one of up to MAX_MICRO tokens with which the plan
 * expects the fastest step; of equals the largest. Leaves the reason of a refusal in b->refused. */
static void plan_size(session *s, const run_manifest *run, bool chosen, step_bench *b)
{
    int64_t document = run->max_seq_len, smallest = run->micro_batch_size * document;
    int64_t micro = smallest;
    while (!chosen && 2 * micro <= MAX_MICRO && micro < b->tokens)
        micro *= 2;
    for (;; micro /= 2) {
        mt_status st = plan_micro(s, run, b->tokens, micro);
        if (st == MT_OK && (!b->plan || s->plan->seconds < b->plan->seconds * 0.99)) {
            plan_destroy(b->plan);
            b->plan = take_plan(s);
        }
        if (micro == smallest || (b->plan && micro <= MIN_MICRO))
            break;
    }
    if (!b->plan)
        snprintf(b->refused, sizeof b->refused, "%s", status_text());
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* The engine of a size, on a store that has values. */
static mt_status start(session *s, const char *trace)
{
    const session_engine_options how = { .trace = trace };
    bool grad_plane = plan_needs_grad_plane(s->plan);
    bool fresh = !s->store || (s->store->grad_bytes > 0) != grad_plane;
    double from = now();
    if (fresh)
        log_write(MT_LOG_INFO, "making a store of %s",
                  human_bytes(store_bytes(s->model, s->states, s->n_states, grad_plane)).s);
    mt_status st = session_start(s, &how);
    if (st == MT_OK && fresh) {
        st = store_init_pattern(s->store);
        log_write(MT_LOG_INFO, "made and filled in %s", human_seconds(now() - from).s);
    } else if (fresh) {
        store_destroy(s->store); /* the next size would take it for one that is filled */
        s->store = NULL;
    }
    return st;
}

static void add(step_bench *b, const engine_result *r)
{
    b->sum.seconds += r->seconds;
    b->sum.compute_seconds += r->compute_seconds;
    for (int k = 0; k < ENGINE_WAITS; k++)
        b->sum.wait_seconds[k] += r->wait_seconds[k];
    b->sum.copy_in_bytes += r->copy_in_bytes;
    b->sum.copy_out_bytes += r->copy_out_bytes;
    b->sum.copy_in_seconds += r->copy_in_seconds;
    b->sum.copy_out_seconds += r->copy_out_seconds;
    b->sum.updated_elems += r->updated_elems;
    b->sum.update_seconds += r->update_seconds;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One step that sets things up, then those that count. Steps follow each other at once, so that
 * updates that run on beside the next forward are paid for. */
static mt_status run_steps(session *s, const run_manifest *run, const step_batch *batch,
                           int64_t *step, step_bench *b)
{
    double *seconds = calloc((size_t)b->steps, sizeof *seconds);
    if (!seconds)
        return status_nomem("the steps' times", (size_t)b->steps * sizeof *seconds);
    mt_status st = MT_OK;
    for (int64_t i = -1; i < b->steps; i++) {
        engine_result r = { 0 };
        const engine_step_params params = { ++*step, run->learning_rate, run->max_grad_norm };
        char line[128];
        snprintf(line, sizeof line, "%lld tokens: step %lld of %lld", (long long)b->tokens,
                 (long long)i + 1, (long long)b->steps);
        log_live(line);
        double from = now();
        st = engine_step(s->engine, batch, &params, &r);
        r.seconds = now() - from;
        if (st == MT_OK && !r.updated)
            st = status_set(MT_ERR_NUMERIC,
                            "step %lld: the loss or a gradient is not finite; lower "
                            "train.learning_rate (%g)",
                            (long long)*step, run->learning_rate);
        if (st != MT_OK)
            break;
        if (i < 0)
            continue;
        seconds[i] = r.seconds;
        add(b, &r);
        b->loss = r.loss_sum / (double)r.n_targets;
    }
    log_live(NULL);
    if (st == MT_OK)
        st = engine_drain(s->engine);
    if (st == MT_OK) {
        qsort(seconds, (size_t)b->steps, sizeof *seconds, compare);
        b->best = seconds[0];
        b->median = (seconds[(b->steps - 1) / 2] + seconds[b->steps / 2]) / 2;
        engine_bytes(s->engine, b->bytes);
    }
    free(seconds);
    return st;
}

static mt_status measure(session *s, const run_manifest *run, const char *trace, int64_t *step,
                         step_bench *b)
{
    step_batch *batch = NULL;
    plan *planned = b->plan;
    s->plan = planned;
    mt_status st = make_batch(b->tokens, planned->request.micro_tokens, run->max_seq_len,
                              s->model->vocab, (uint64_t)run->seed, &batch);
    if (st == MT_OK)
        st = start(s, trace);
    if (st == MT_OK)
        st = run_steps(s, run, batch, step, b);
    session_stop(s);
    s->plan = NULL;
    free_batch(batch);
    return st;
}

static mt_status bench(session *s, const run_manifest *run, const request *r, step_report *report)
{
    bool chosen = config_section(run->config, "train")
                      ->has(config_section(run->config, "train"), "micro_batch_size");
    int32_t last = -1;
    mt_status st = MT_OK;
    report->s = s;
    report->run = run;
    report->size = calloc((size_t)r->n_sizes, sizeof *report->size);
    if (!report->size)
        return status_nomem("the report", (size_t)r->n_sizes * sizeof *report->size);
    /* All plans first: the store that the first size makes would not count as free memory. */
    for (int32_t i = 0; i < r->n_sizes; i++) {
        step_bench *b = &report->size[report->n++];
        b->tokens = r->tokens[i];
        b->steps = r->steps;
        plan_size(s, run, chosen, b);
        last = b->plan ? i : last;
    }
    report_begin(report);
    int64_t step = 0;
    int32_t measured = 0;
    for (int32_t i = 0; st == MT_OK && i < report->n; i++) {
        step_bench *b = &report->size[i];
        if (b->plan) {
            st = measure(s, run, i == last ? r->trace : NULL, &step, b);
            measured += st == MT_OK;
        }
        if (st == MT_ERR_NOMEM) {
            /* Somebody else has taken what was free when it was planned. */
            snprintf(b->refused, sizeof b->refused, "%s", status_text());
            plan_destroy(b->plan);
            b->plan = NULL;
            st = MT_OK;
        }
        if (st == MT_OK)
            report_size(report, b);
    }
    if (st == MT_OK && measured == 0)
        st = status_set(MT_ERR_NOMEM, "no size fits; the reasons are above");
    return st;
}

static mt_status open_session(session *s, const char *path, run_manifest *run)
{
    mt_status st = session_open_device(s, run->device, run->precision, run->threads);
    if (st == MT_OK)
        st = session_open_model(s, path);
    if (st == MT_OK)
        st = session_open_optim(s, run);
    if (st == MT_OK)
        st = run_check_plugin_keys(run);
    if (st == MT_OK && s->model->max_positions > 0 && run->max_seq_len > s->model->max_positions)
        st = status_set(MT_ERR_INVALID,
                        "--document %lld is more than the model's max_position_embeddings, %lld; "
                        "lower it",
                        (long long)run->max_seq_len, (long long)s->model->max_positions);
    return st;
}

/* words[0] is the model, the others are overrides. */
static mt_status read_words(char **words, int n, int64_t document, run_manifest **ret)
{
    char found[RUN_FOLDER_PATH], length[64];
    mt_status st = run_folder_find_model(words[0], found);
    if (st != MT_OK)
        return st;
    char **overrides = calloc((size_t)n, sizeof *overrides);
    if (!overrides)
        return status_nomem("overrides", (size_t)n * sizeof *overrides);
    snprintf(length, sizeof length, "data.max_seq_len=%lld", (long long)document);
    for (int i = 1; i < n; i++)
        overrides[i] = words[i];
    overrides[0] = length;
    st = run_of_model(found, overrides, n, ret);
    free(overrides);
    return st;
}

static int run_bench_step(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    const char *tokens = "8k,32k", *json = NULL;
    request r = { .steps = 3, .document = 1024 };
    const cli_option options[] = {
        { "tokens", CLI_TEXT, &tokens, "LIST", "tokens of a step, several sizes (8k,32k)" },
        { "steps", CLI_INT, &r.steps, "N", "timed steps of each size, after one more (3)" },
        { "document", CLI_INT, &r.document, "TOKENS", "length of the packed documents (1024)" },
        { "json", CLI_TEXT, &json, "FILE", "write the figures as JSON as well" },
        { "trace", CLI_TEXT, &r.trace, "FILE", "write a timeline of the last size" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON)
        rc = check_words(self, argv, words);
    if (rc == CLI_GO_ON)
        rc = parse_sizes(self, tokens, &r);
    if (rc == CLI_GO_ON && (r.steps < 1 || r.steps > 100000))
        rc = cli_usage(self, "--steps must be from 1 to 100000, not %lld", (long long)r.steps);
    if (rc == CLI_GO_ON && (r.document < 2 || r.document > 1 << 30))
        rc = cli_usage(self, "--document must be at least 2 tokens, not %lld",
                       (long long)r.document);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    run_manifest *run = NULL;
    step_report report = { .model = argv[0] };
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = read_words(argv, words, r.document, &run);
    if (st == MT_OK)
        st = open_session(&s, run->model, run);
    if (st == MT_OK)
        st = report_check(json);
    if (st == MT_OK) {
        st = bench(&s, run, &r, &report);
        if (json && report.n > 0 && (st == MT_OK || st == MT_ERR_NOMEM)) {
            char text[2048];
            snprintf(text, sizeof text, "%s", status_text());
            mt_status written = report_write(&report, json);
            if (st == MT_OK)
                st = written;
            else
                status_set(st, "%s", text);
        }
    }
    rc = cli_exit(st);
    report_finish(&report);
    session_close(&s);
    run_destroy(run);
    registry_finish();
    return rc;
}

const cli_command cli_bench_step = {
    .name = "bench step",
    .words = "MODEL [key=value ...] [options]",
    .brief = "measure training steps of a model",
    .help =
        "Builds what `train` builds for MODEL (a model manifest or folder), with random weights\n"
        "and packed documents of random tokens, and measures whole steps of every size: time,\n"
        "tokens and FLOP a second, how long compute worked and what it waited for, copies and\n"
        "updates, each beside what the machine can do at best. Sizes that do not fit are refused\n"
        "with the plan's reason. 8k is 8192 tokens, 131k is 131072.\n\n"
        "The keys are those of a run manifest that change how a step runs: device, precision,\n"
        "threads, seed, train.max_grad_norm, train.micro_batch_size (documents of a micro-batch;\n"
        "by default the plan's fastest of up to 8192 tokens), train.learning_rate, memory.* and\n"
        "optimizer.*.",
    .example = "example: a 7B model without clipping, everything in BF16\n"
               "  megatrain bench step arch/llama/models/llama-2-7b.yaml --tokens 8k,32k,131k \\\n"
               "      precision=bf16 train.max_grad_norm=0",
    .run = run_bench_step,
};
