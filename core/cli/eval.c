/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain eval: the validation loss of a checkpoint.
 */
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../manifest/mistaken.h"
#include "../train/loop.h"
#include "cli.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* What to evaluate: the checkpoint named, else the run's newest, else the pretrained model that the
 * run would begin with. */
static mt_status choose_weights(const run_manifest *run, const session *s, const char *checkpoint,
                                char ret[RUN_FOLDER_PATH])
{
    if (checkpoint)
        return run_folder_find_model(checkpoint, ret);
    if (run_folder_is(run->output_dir)) {
        mt_status st = run_folder_find_model(run->output_dir, ret);
        if (st != MT_ERR_NOT_FOUND)
            return st;
    }
    if (run->from_scratch && s->source.weights) {
        const mt_config *c = config_section(run->config, "");
        return c->reject(c, "init",
                         "is random and %s has no checkpoint, so there are no trained weights; "
                         "train first, name a checkpoint with --checkpoint PATH, or set init: "
                         "pretrained to evaluate %s",
                         run->output_dir, run->model);
    }
    if (!s->source.weights)
        return status_set(MT_ERR_NOT_FOUND,
                          "%s has no checkpoint, and the model %s has no weights; train first, or "
                          "name a checkpoint with --checkpoint PATH",
                          run->output_dir, run->model);
    return run_folder_find_model(s->source.weights, ret);
}

/* Before the data is read: is what is to be evaluated there? */
static mt_status check_checkpoint(const run_manifest *run, const char *checkpoint)
{
    char list[RUN_FOLDER_LIST], hub[MISTAKEN_TEXT];
    if (access(checkpoint, F_OK) == 0)
        return MT_OK;
    return status_set(MT_ERR_NOT_FOUND,
                      "--checkpoint %s: there is no such file or folder%s; %s: name the path of a "
                      "checkpoint, a run folder or a model "
                      "folder, or leave --checkpoint out for the newest%s",
                      checkpoint, *checkpoint == '/' ? "" : " below the working directory",
                      run_folder_list(run->output_dir, list), mistaken_name(checkpoint, hub));
}

static mt_status evaluate(run_manifest *run, const char *checkpoint, session *s)
{
    char path[RUN_FOLDER_PATH];
    double loss = 0;
    int64_t targets = 0;
    mt_status st = session_open_run(s, run, false);
    if (st != MT_OK)
        return st;
    if (s->validation_documents == 0) {
        const mt_config *c = config_section(run->config, "data");
        return c->reject(c, "validation_split",
                         "leaves no validation data to evaluate on; set it above 0");
    }
    st = choose_weights(run, s, checkpoint, path);
    if (st == MT_OK)
        st = session_check_model(s, path);
    if (st == MT_OK)
        st = session_start(s, &(session_engine_options){ 0 });
    if (st == MT_OK)
        st = session_load_weights(s, path, 0);
    if (st == MT_OK)
        log_write(MT_LOG_INFO, "evaluating %s", path);
    if (st == MT_OK)
        st = train_evaluate(s, run, &loss, &targets, NULL);
    if (st == MT_OK && !isfinite(loss))
        st = status_set(MT_ERR_NUMERIC,
                        "%s: the validation loss is %g: the weights are damaged or the precision "
                        "is too low",
                        path, loss);
    if (st == MT_OK)
        printf("validation loss %.6f nats/token, perplexity %.4f, %lld targets\n", loss, exp(loss),
               (long long)targets);
    return st;
}

/* Makes all of `data` the run's validation data, in place of what its manifest says. */
static mt_status use_data(run_manifest *run, const char *data)
{
    char label[RUN_FOLDER_PATH];
    snprintf(label, sizeof label, "--data %s", data);
    mt_status st = config_set_text(run->config, "data.validation_files", data, label);
    return st == MT_OK ? config_override(run->config, "data.validation_split=null") : st;
}

static int run_eval(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    const char *checkpoint = NULL, *data = NULL;
    const cli_option options[] = {
        { "data", CLI_TEXT, &data, "FILE", "evaluate on this file, or pattern, instead" },
        { "checkpoint", CLI_TEXT, &checkpoint, "PATH",
          "a checkpoint, model or run folder (default: the run's newest)" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    run_manifest *run = NULL;
    if (rc == CLI_GO_ON)
        rc = cli_read_run(self, argv, words, &run);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK && data)
        st = use_data(run, data);
    if (st == MT_OK && checkpoint)
        st = check_checkpoint(run, checkpoint);
    if (st == MT_OK)
        st = evaluate(run, checkpoint, &s);
    rc = cli_exit(st);
    session_close(&s);
    run_destroy(run);
    registry_finish();
    return rc;
}

const cli_command cli_eval = {
    .name = "eval",
    .words = "RUN.yaml [key=value ...] [options]",
    .brief = "measure a checkpoint's validation loss",
    .help = "Measures the mean loss over the validation split of RUN.yaml's data: of the run's\n"
            "newest checkpoint, of --checkpoint, or of the pretrained model when the run has not\n"
            "begun. With --data it is over all of that file instead. The loss is in nats a token\n"
            "(a byte where the loader reads bytes).",
    .example = "example: evaluate an earlier checkpoint on all validation data\n"
               "  megatrain eval runs/shakespeare.yaml train.eval_batches=0 "
               "--checkpoint runs/shakespeare/checkpoints/step-001000",
    .run = run_eval,
};
