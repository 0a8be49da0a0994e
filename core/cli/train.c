/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain train: a run, from its manifest to a checkpoint.
 */
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../train/human.h"
#include "../train/loop.h"
#include "../train/signals.h"
#include "cli.h"

#include <math.h>
#include <stdlib.h>

static void print_line(void *arg, const char *text)
{
    (void)arg;
    log_write(MT_LOG_INFO, "%s", text);
}

static void print_summary(const session *s, const run_manifest *run)
{
    log_write(MT_LOG_INFO, "model:  %s, %s parameters in %d units, vocabulary %lld", run->model,
              human_grouped(s->model->total_params).s, s->model->n_units,
              (long long)s->model->vocab);
    log_write(
        MT_LOG_INFO,
        "data:   %s tokens in %s documents an epoch, read by '%s'; %lld x %lld x %lld tokens a "
        "step",
        human_count((double)s->epoch_tokens).s, human_grouped(s->epoch_documents).s, s->loader,
        (long long)run->gradient_accumulation_steps, (long long)run->micro_batch_size,
        (long long)run->max_seq_len);
    if (s->tokenizer_path[0])
        log_write(MT_LOG_INFO, "tokens: %s%s%s", s->tokenizer_path,
                  s->chat ? ", conversations as " : "", s->chat_format);
    log_write(MT_LOG_INFO, "device: %s (%s), %s", s->info.name, s->info.details,
              mt_dtype_name(s->compute));
    plan_print(s->plan, true, print_line, NULL);
}

static void print_end(const run_manifest *run, const train_outcome *o, mt_status st)
{
    if (st == MT_ERR_STOPPED) {
        const char *from = run->resume_from_checkpoint;
        bool named = strcmp(from, "auto") != 0 && strcmp(from, "none") != 0;
        log_write(MT_LOG_INFO, "stopped after step %lld of %lld; the same command goes on%s",
                  (long long)o->step, (long long)o->steps,
                  named ? " with checkpoint.resume_from_checkpoint=auto" : "");
    } else {
        log_write(MT_LOG_INFO, "finished: step %lld of %lld", (long long)o->step,
                  (long long)o->steps);
        if (isfinite(o->validation_loss))
            log_write(MT_LOG_INFO, "validation loss %.4f nats/token, perplexity %.3f",
                      o->validation_loss, exp(o->validation_loss));
    }
    if (o->skipped > 0)
        log_write(MT_LOG_INFO, "skipped:    %lld of %lld steps, whose numbers were not finite",
                  (long long)o->skipped, (long long)o->step);
    if (isfinite(o->packing_efficiency))
        log_write(MT_LOG_INFO, "packing:    %.1f%% of the micro-batches filled",
                  100 * o->packing_efficiency);
    log_write(MT_LOG_INFO, "run folder: %s", run->output_dir);
    log_write(MT_LOG_INFO, "metrics:    %s/%s", run->output_dir, RUN_FOLDER_METRICS);
    if (o->checkpoint[0])
        log_write(MT_LOG_INFO, "checkpoint: %s", o->checkpoint);
}

static int run_train(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    session_engine_options how = { 0 };
    int64_t chaos = INT64_MIN; /* not given */
    const cli_option options[] = {
        { "serial", CLI_FLAG, &how.serial, NULL, "one queue, no overlap; the same bits" },
        { "chaos", CLI_INT, &chaos, "SEED", "random delays and poisoned buffers; the same bits" },
        { "trace", CLI_TEXT, &how.trace, "FILE", "write a timeline for ui.perfetto.dev" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    run_manifest *run = NULL;
    if (rc == CLI_GO_ON && chaos != INT64_MIN && chaos < 1)
        rc = cli_usage(self, "--chaos needs a seed above 0, not %lld", (long long)chaos);
    how.chaos = chaos > 0 ? (uint64_t)chaos : 0;
    if (rc == CLI_GO_ON)
        rc = cli_read_run(self, argv, words, &run);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    train_outcome outcome = { 0 };
    train_catch_signals();
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = train_check_places(run, &how);
    if (st == MT_OK)
        st = session_open_run(&s, run, true);
    if (st == MT_OK) {
        print_summary(&s, run);
        st = train_run(&s, run, &how, &outcome);
    }
    if (st == MT_OK || st == MT_ERR_STOPPED)
        print_end(run, &outcome, st);
    rc = cli_exit(st);
    session_close(&s);
    run_destroy(run);
    registry_finish();
    return rc;
}

const cli_command cli_train = {
    .name = "train",
    .words = "RUN.yaml [key=value ...] [options]",
    .brief = "train a model as a run manifest says, or go on where it stopped",
    .help = "Trains as RUN.yaml says; every key can be set on the command line as well. The run "
            "folder\n"
            "(output_dir) gets the effective manifest, metrics.jsonl and checkpoints; a run folder "
            "that\n"
            "holds a checkpoint is resumed from it, bit for bit. An interrupt (Ctrl-C) or SIGTERM\n"
            "finishes the step, saves, and exits with 75; another one, at least a second later, or "
            "one\n"
            "before the first step, exits at once.",
    .example = "example: train for 200 steps with a lower learning rate\n"
               "  megatrain train runs/shakespeare.yaml train.max_steps=200 "
               "train.learning_rate=1e-4",
    .run = run_train,
};
