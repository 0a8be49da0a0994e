/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain bench step: steps of the engine that `train` builds, on random weights and tokens, for
 * several step sizes. What is found is printed by bench_report.c.
 */
#include "bench_report.h"

#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "../train/files.h"
#include "../train/human.h"
#include "bench.h"
#include "bench_setup.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Keys of a run manifest that change how a step runs. */
static const char *const keys[] = { "device=",
                                    "precision=",
                                    "threads=",
                                    "seed=",
                                    "deterministic=",
                                    "optimizer.",
                                    "memory.",
                                    "train.max_grad_norm=",
                                    "train.micro_batch_size=",
                                    "train.learning_rate=",
                                    NULL };
/* ---- steps ----------------------------------------------------------------------------------- */

/* The engine of a size, on a store that has values. */
static mt_status start(session *s, const char *trace)
{
    const session_engine_options how = { .trace = trace };
    bool grad_plane = plan_needs_grad_plane(s->plan);
    bool fresh = !s->store || (s->store->grad_bytes > 0) != grad_plane;
    double from = progress_now();
    if (fresh)
        log_write(MT_LOG_INFO, "making a store of %s",
                  human_bytes(store_bytes(s->model, s->states, s->n_states, grad_plane)).s);
    mt_status st = session_start(s, &how);
    if (st == MT_OK && fresh) {
        st = store_init_pattern(s->store);
        log_write(MT_LOG_INFO, "made and filled in %s", human_seconds(progress_now() - from).s);
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
        double from = progress_now();
        st = engine_step(s->engine, batch, &params, &r);
        r.seconds = progress_now() - from;
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
    mt_status st = bench_make_batch(b->tokens, planned->request.micro_tokens, run->max_seq_len,
                                    s->model->vocab, (uint64_t)run->seed, &batch);
    if (st == MT_OK)
        st = start(s, trace);
    if (st == MT_OK)
        st = run_steps(s, run, batch, step, b);
    session_stop(s);
    s->plan = NULL;
    bench_free_batch(batch);
    return st;
}

static mt_status bench(session *s, const run_manifest *run, const bench_request *r,
                       const char *trace, step_report *report)
{
    int32_t last = -1;
    mt_status st = MT_OK;
    report->s = s;
    report->run = run;
    report->size = calloc((size_t)r->sizes.n, sizeof *report->size);
    if (!report->size)
        return status_nomem("the report", (size_t)r->sizes.n * sizeof *report->size);
    /* All plans first: the store that the first size makes would not count as free memory. */
    for (int32_t i = 0; i < r->sizes.n; i++) {
        step_bench *b = &report->size[report->n++];
        b->tokens = r->sizes.tokens[i];
        b->steps = r->steps;
        if (bench_plan(s, run, b->tokens, &b->plan) != MT_OK)
            snprintf(b->refused, sizeof b->refused, "%s", status_text());
        last = b->plan ? i : last;
    }
    report_begin(report);
    int64_t step = 0;
    int32_t measured = 0;
    for (int32_t i = 0; st == MT_OK && i < report->n; i++) {
        step_bench *b = &report->size[i];
        if (b->plan) {
            st = measure(s, run, i == last ? trace : NULL, &step, b);
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

static mt_status open_session(session *s, int64_t document, run_manifest *run)
{
    mt_status st = bench_open(s, document, run);
    if (st == MT_OK)
        st = session_open_optim(s, run);
    return st == MT_OK ? run_check_plugin_keys(run, true) : st;
}

static int run_bench_step(const cli_command *self, int argc, char **argv)
{
    const char *trace = NULL;
    bench_request r = BENCH_DEFAULTS;
    const cli_option options[] = { BENCH_OPTIONS(&r),
                                   { "trace", CLI_TEXT, &trace, "FILE",
                                     "write a timeline of the last size" },
                                   { 0 } };
    int words = 0, rc = bench_parse(self, options, argc, argv, keys, &r, &words);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    run_manifest *run = NULL;
    step_report report = { .model = argv[0] };
    mt_status st = cli_find_plugins(&r.dirs);
    if (st == MT_OK)
        st = bench_read_words(argv, words, r.document, NULL, &run);
    if (st == MT_OK)
        st = open_session(&s, r.document, run);
    if (st == MT_OK && r.json)
        st = files_check_output(r.json, REPORT_MARK, false);
    if (st == MT_OK && trace)
        st = files_check_output(trace, TRACE_MARK, false);
    if (st == MT_OK) {
        st = bench(&s, run, &r, trace, &report);
        if (r.json && report.n > 0 && (st == MT_OK || st == MT_ERR_NOMEM)) {
            char text[2048];
            snprintf(text, sizeof text, "%s", status_text());
            mt_status written = report_write(&report, r.json);
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
        "threads, seed, deterministic, train.max_grad_norm, train.micro_batch_size (documents of "
        "a\n"
        "micro-batch; by default the plan's fastest of up to 8192 tokens), train.learning_rate,\n"
        "memory.* and optimizer.*.",
    .example = "example: a 7B model without clipping, everything in BF16\n"
               "  megatrain bench step arch/llama/models/llama-2-7b.yaml --tokens 8k,32k,131k \\\n"
               "      precision=bf16 train.max_grad_norm=0",
    .run = run_bench_step,
};
