/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain export: trained weights as a Hugging Face model folder.
 */
#include "../train/export.h"
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"
#include "../train/human.h"
#include "../train/run_folder.h"
#include "../train/session.h"
#include "../train/signals.h"
#include "cli.h"

static mt_status check_weights(const session *s, const char *path, const export_options *o)
{
    if (s->source.weights && o->random)
        return status_set(MT_ERR_INVALID,
                          "%s has weights of its own; random ones are for a model manifest", path);
    if (!s->source.weights && !o->random)
        return status_set(
            MT_ERR_INVALID,
            "%s: there are no weights to export; give a run folder, a checkpoint, or a "
            "model folder, or have them drawn with --init random",
            path);
    return MT_OK;
}

static mt_status export_path(const char *path, const export_options *o, session *s)
{
    char found[RUN_FOLDER_PATH];
    const mt_weights *format = NULL;
    int64_t bytes = 0;
    mt_status st = run_folder_find_model(path, found);
    if (st == MT_OK)
        st = session_open_model(s, found);
    if (st == MT_OK)
        st = check_weights(s, path, o);
    /* A tokenizer that nothing can read is found out now. */
    if (st == MT_OK && o->tokenizer)
        st = session_open_tokenizer(s, o->tokenizer, "none", NULL);
    if (st == MT_OK)
        st = session_format(&format);
    if (st == MT_OK)
        st = export_model(&s->source, s->model, format, o, &bytes);
    if (st == MT_OK)
        log_write(MT_LOG_INFO, "%s: exported to %s, %s parameters, %s in %s", found, o->folder,
                  human_grouped(s->model->total_params).s, human_bytes(bytes).s,
                  mt_dtype_name(o->dtype));
    return st;
}

static int run_export(const cli_command *self, int argc, char **argv)
{
    static const char *const dtypes[] = { "bf16", "fp32", NULL };
    static const char *const inits[] = { "pretrained", "random", NULL };
    cli_list dirs = { 0 };
    const char *output = NULL, *shard = "5GB", *tokenizer = NULL;
    cli_choice dtype = { "bf16", dtypes }, init = { "pretrained", inits };
    int64_t seed = INT64_MIN; /* not given */
    const cli_option options[] = {
        { "o", CLI_TEXT, &output, "DIR", "the folder to make (required); empty where it stands" },
        { "dtype", CLI_CHOICE, &dtype, "NAME", "bf16 (the default) or fp32" },
        { "shard-size", CLI_TEXT, &shard, "SIZE", "most bytes of weights in a file (5GB)" },
        { "tokenizer", CLI_TEXT, &tokenizer, "PATH", "take these tokenizer files along instead" },
        { "init", CLI_CHOICE, &init, "WHAT",
          "pretrained, or random: draw a model manifest's weights" },
        { "seed", CLI_INT, &seed, "S", "of random weights (0)" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON && words != 1)
        rc = cli_usage(self, words ? "one path at a time" : "what? name a run or a checkpoint");
    if (rc == CLI_GO_ON && !output)
        rc = cli_usage(self, "where to? name a folder with -o DIR");
    bool given = seed != INT64_MIN;
    export_options o = { .folder = output,
                         .dtype = strcmp(dtype.word, "fp32") == 0 ? MT_F32 : MT_BF16,
                         .tokenizer = tokenizer,
                         .random = strcmp(init.word, "random") == 0,
                         .seed = given ? (uint64_t)seed : 0,
                         .stop = train_stop_requested };
    if (rc == CLI_GO_ON && given && seed < 0)
        rc = cli_usage(self, "--seed must be 0 or more, not %lld", (long long)seed);
    if (rc == CLI_GO_ON && given && !o.random)
        rc = cli_usage(self, "--seed is for --init random");
    if (rc == CLI_GO_ON && (!text_bytes(shard, &o.shard_bytes) || o.shard_bytes < 1))
        rc = cli_usage(self, "--shard-size must be a size such as 5GB or 512MiB, not '%s'", shard);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    train_catch_signals();
    train_finish_on_signal();
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = export_path(argv[0], &o, &s);
    if (st == MT_ERR_STOPPED)
        log_write(MT_LOG_INFO, "stopped by a signal; nothing was exported");
    rc = cli_exit(st);
    session_close(&s);
    registry_finish();
    return rc;
}

const cli_command cli_export = {
    .name = "export",
    .words = "PATH -o DIR [options]",
    .brief = "write trained weights as a Hugging Face model folder",
    .help =
        "Makes a folder that other programs load: weights in safetensors files under the names\n"
        "that the hub uses, config.json, and the tokenizer's, chat template's and generation\n"
        "files of the model that was trained. PATH is a run folder (its newest checkpoint), a\n"
        "checkpoint, or a model folder, whose quantised weights are then written dequantised;\n"
        "with --init random a model manifest: an untrained model to begin with.\n"
        "Memory stays small whatever the model's size.",
    .example = "example: export the newest checkpoint of a run\n"
               "  megatrain export runs/first -o first-model",
    .run = run_export,
};
