/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain generate: text from a model, token by token, or a conversation with it.
 */
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "../train/human.h"
#include "../train/run_folder.h"
#include "cli.h"
#include "conversation.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct request {
    const char *model, *prompt, *prompt_file, *system, *tokenizer, *chat_format;
    const char *device;
    cli_choice precision, init;
    bool chat, raw;
    int64_t max_tokens, context, threads, seed;
    sampler_options sampling;
} request;

enum { MAX_TOKENS = 1 << 30, MAX_THREADS = 4096 };
enum { DEFAULT_TOKENS = 256, DEFAULT_CONTEXT = 4096 };

#define NOT_GIVEN INT64_MIN

static const char *const precisions[] = { "auto", "fp32", "bf16", NULL };
static const char *const inits[] = { "pretrained", "random", NULL };

/* What a request works with. */
typedef struct work {
    const request *q;
    session s;
    run_manifest *run; /* that the model was trained by; NULL: none */
    generation g;
    char *prompt; /* text, ending in NUL */
    int64_t n_prompt;
    int32_t *tokens; /* of the prompt, or of the conversation's beginning */
    int64_t n_tokens;
    int64_t most; /* tokens to generate, of an answer */
    conversation talk;
    utf8_stream out;
} work;

/* ---- prompt ---------------------------------------------------------------------------------- */

/* A conversation at a terminal, as opposed to one answer. */
static bool is_dialogue(const request *q)
{
    return q->chat && !q->prompt && !q->prompt_file && isatty(STDIN_FILENO) == 1;
}

static mt_status read_prompt(work *w)
{
    const request *q = w->q;
    const char *text = q->prompt ? q->prompt : "\n";
    bool from_input = q->prompt_file ? strcmp(q->prompt_file, "-") == 0 : q->chat && !q->prompt;
    size_t n = strlen(text);
    mt_status st = MT_OK;
    if (from_input) {
        st = cli_read_stream(stdin, "the standard input", &w->prompt, &n);
    } else if (q->prompt_file) {
        st = cli_read_file(q->prompt_file, &w->prompt, &n);
    } else {
        w->prompt = strdup(text);
        if (!w->prompt)
            st = status_nomem("the prompt", n);
    }
    if (st != MT_OK)
        return st;
    /* A file that holds a message ends its last line; the message does not. */
    if (q->chat && !q->prompt && n > 0 && w->prompt[n - 1] == '\n')
        n--;
    w->n_prompt = (int64_t)n;
    return MT_OK;
}

static mt_status encode_text(work *w)
{
    const mt_tokenizer *t = w->s.tokenizer;
    const void *tokens = w->s.tokens;
    int64_t n = t->encode(tokens, w->prompt, w->n_prompt, MT_ENCODE_ADD_SPECIAL, NULL, 0);
    if (n < 0)
        return (mt_status)n;
    if (n == 0)
        return status_set(MT_ERR_INVALID, "the prompt is empty; give at least one character");
    w->tokens = calloc((size_t)n, sizeof *w->tokens);
    if (!w->tokens)
        return status_nomem("the prompt", (size_t)n * sizeof *w->tokens);
    w->n_tokens = t->encode(tokens, w->prompt, w->n_prompt, MT_ENCODE_ADD_SPECIAL, w->tokens, n);
    return MT_OK;
}

static mt_status begin_conversation(work *w)
{
    const request *q = w->q;
    mt_status st = MT_OK;
    if (q->system)
        st = conversation_add(&w->talk, "system", q->system, (int64_t)strlen(q->system));
    if (st == MT_OK && !is_dialogue(q))
        st = conversation_add(&w->talk, "user", w->prompt, w->n_prompt);
    if (st == MT_OK && !is_dialogue(q))
        st = conversation_tokens(&w->talk, &w->tokens, &w->n_tokens);
    return st;
}

/* Decides how much to generate: what is asked for must fit, what is not asked for is made to. */
static mt_status choose_length(work *w)
{
    long long positions = w->s.model->max_positions, n = w->n_tokens, most = w->q->max_tokens;
    if (most == NOT_GIVEN)
        most = positions > n && positions - n < DEFAULT_TOKENS ? positions - n : DEFAULT_TOKENS;
    if (positions > 0 && n >= positions)
        return status_set(MT_ERR_INVALID,
                          "the prompt has %lld tokens, which leaves none of the model's %lld "
                          "positions to generate; shorten it to %lld at most",
                          n, positions, positions - 1);
    if (positions > 0 && most > positions - n)
        return status_set(MT_ERR_INVALID,
                          "%lld token%s of prompt and %lld to generate are more than the model's "
                          "%lld positions; lower --max-tokens to %lld or shorten the prompt",
                          n, n == 1 ? "" : "s", most, positions, positions - n);
    if (positions > 0 && w->q->context > positions)
        return status_set(MT_ERR_INVALID,
                          "--context %lld is more than the model's %lld positions; lower it, or "
                          "leave it out for as many as there are, up to %d",
                          (long long)w->q->context, positions, DEFAULT_CONTEXT);
    w->most = w->talk.max_tokens = most;
    return MT_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* The manifest of the run that the checkpoint at `path` is of, which may name a tokenizer and a
 * chat format of its own; NULL where there is none. */
static run_manifest *read_run(const char *path)
{
    char folder[RUN_FOLDER_PATH], file[RUN_FOLDER_PATH + sizeof RUN_FOLDER_MANIFEST + 1];
    run_manifest *run = NULL;
    snprintf(file, sizeof file, "%s/" RUN_FOLDER_MANIFEST, run_folder_of(path, folder));
    if (!folder[0] || access(file, F_OK) < 0)
        return NULL;
    if (run_read(file, NULL, 0, &run) != MT_OK)
        log_write(MT_LOG_WARNING, "the run's tokenizer and chat format are not used: %s",
                  status_text());
    return run;
}

/* What the command line names, else the run, else the model. */
static mt_status open_named(work *w)
{
    const request *q = w->q;
    const run_manifest *run = w->run;
    const char *tokenizer = q->tokenizer ? q->tokenizer : run ? run->tokenizer : "auto";
    if (!q->chat)
        return session_open_tokenizer(&w->s, tokenizer, "none", NULL);
    if (q->chat_format || !run)
        return session_open_tokenizer(&w->s, tokenizer, q->chat_format ? q->chat_format : "auto",
                                      NULL);
    return session_open_tokenizer(&w->s, tokenizer, run->chat_format,
                                  config_section(run->config, "data.chat_format"));
}

static mt_status open_tokenizer(work *w, const char *path)
{
    const request *q = w->q;
    session *s = &w->s;
    w->run = read_run(path);
    mt_status st = open_named(w);
    if (st != MT_OK)
        return st;
    if (!s->tokenizer)
        return status_set(MT_ERR_NOT_FOUND,
                          "%s has a vocabulary of %lld tokens and no tokenizer beside it; name a "
                          "tokenizer.json or a folder that has one with --tokenizer PATH",
                          q->model, (long long)s->model->vocab);
    long long vocab = s->tokenizer->vocab_size(s->tokens);
    if (vocab > s->model->vocab)
        return status_set(MT_ERR_INVALID,
                          "the tokenizer has %lld tokens, but the model %s only %lld", vocab,
                          q->model, (long long)s->model->vocab);
    if (q->chat && !s->chat)
        return status_set(MT_ERR_NOT_FOUND,
                          "%s does not say how it was taught to converse; name the format with "
                          "--chat-format, such as chatml, or leave --chat out",
                          q->model);
    return MT_OK;
}

static bool wants_random(const request *q)
{
    return strcmp(q->init.word, "random") == 0;
}

static mt_status check_weights(const work *w, const char *path)
{
    if (!wants_random(w->q) && !w->s.source.weights)
        return status_set(MT_ERR_NOT_FOUND,
                          "%s has no weights; name a checkpoint, a run folder or a model folder, "
                          "or see what untrained weights say with --init random",
                          path);
    return MT_OK;
}

static mt_status start(work *w)
{
    const request *q = w->q;
    int64_t positions = w->s.model->max_positions;
    int64_t most = positions > 0 && positions < DEFAULT_CONTEXT ? positions : DEFAULT_CONTEXT;
    int64_t context = q->context == NOT_GIVEN ? most : q->context;
    bool dialogue = is_dialogue(q);
    const generation_options options = {
        .sampling = q->sampling,
        .weights = wants_random(q) ? "" : w->s.source.weights,
        .prompt = dialogue ? context : w->n_tokens,
        .context = dialogue ? context : w->n_tokens + w->most,
    };
    return generation_open(&w->g, &w->s, &options);
}

/* ---- generating ------------------------------------------------------------------------------ */

static mt_status put(void *arg, int32_t token)
{
    work *w = arg;
    char bytes[TOKEN_TEXT_ROOM];
    int64_t n = token_text(w->s.tokenizer, w->s.tokens, token, MT_DECODE_SKIP_SPECIAL, bytes);
    token_text_show(&w->out, bytes, n);
    fflush(stdout);
    return MT_OK;
}

static mt_status go_on(work *w, int64_t *ret_made)
{
    int32_t end = w->s.tokenizer->special(w->s.tokens, MT_SPECIAL_END);
    if (!w->q->raw)
        token_text_show(&w->out, w->prompt, w->n_prompt);
    mt_status st = generation_feed(&w->g, w->tokens, w->n_tokens);
    if (st == MT_OK)
        st = generation_run(&w->g, &end, end >= 0, w->most, put, w, ret_made);
    token_text_end(&w->out);
    putchar('\n');
    return st;
}

static mt_status generate(work *w)
{
    double from = progress_now();
    int64_t made = 0;
    mt_status st = w->q->chat ? conversation_answer(&w->talk, &made) : go_on(w, &made);
    double seconds = progress_now() - from;
    if (st == MT_OK && log_has_terminal())
        log_write(MT_LOG_INFO, "%lld tokens in %s, %s tok/s", (long long)made,
                  human_seconds(seconds).s, human_rate((double)made / seconds).s);
    return st;
}

static mt_status run_request(const request *q)
{
    bool terminal = isatty(STDOUT_FILENO) == 1;
    work w = { .q = q, .out.for_terminal = terminal };
    w.talk =
        (conversation){ .g = &w.g, .raw = q->raw, .dim = terminal, .out.for_terminal = terminal };
    char path[RUN_FOLDER_PATH];
    mt_status st = run_folder_find_model(q->model, path);
    if (st == MT_OK)
        st = session_open_device(&w.s, q->device, q->precision.word, q->threads);
    if (st == MT_OK)
        st = session_open_model(&w.s, path);
    if (st == MT_OK)
        st = check_weights(&w, path);
    if (st == MT_OK)
        st = open_tokenizer(&w, path);
    w.g.s = &w.s;
    if (st == MT_OK && !is_dialogue(q))
        st = read_prompt(&w);
    if (st == MT_OK)
        st = q->chat ? begin_conversation(&w) : encode_text(&w);
    if (st == MT_OK)
        st = choose_length(&w);
    if (st == MT_OK)
        st = start(&w);
    if (st == MT_OK)
        st = is_dialogue(q) ? conversation_talk(&w.talk) : generate(&w);
    conversation_close(&w.talk);
    generation_close(&w.g);
    free(w.tokens);
    free(w.prompt);
    session_close(&w.s);
    run_destroy(w.run);
    return st;
}

/* ---- the command ----------------------------------------------------------------------------- */

static int check(const cli_command *self, const request *q, char **names, int words)
{
    if (words != 1)
        return words ? cli_usage(self, "'%s' is a word too many; a prompt is given with --prompt",
                                 names[1])
                     : cli_usage(self, "which model?");
    if (q->prompt && q->prompt_file)
        return cli_usage(self, "--prompt and --prompt-file %s; give one of the two",
                         q->prompt_file);
    if (!q->chat && (q->system || q->chat_format))
        return cli_usage(self, "%s is for --chat", q->system ? "--system" : "--chat-format");
    if (q->context != NOT_GIVEN && (q->context < 1 || q->context > MAX_TOKENS))
        return cli_usage(self, "--context must be from 1 to %d, not %lld", MAX_TOKENS,
                         (long long)q->context);
    if (q->context != NOT_GIVEN && !is_dialogue(q))
        return cli_usage(self, "--context is for a conversation at a terminal (--chat)");
    if (q->max_tokens != NOT_GIVEN && (q->max_tokens < 1 || q->max_tokens > MAX_TOKENS))
        return cli_usage(self, "--max-tokens must be from 1 to %d, not %lld", MAX_TOKENS,
                         (long long)q->max_tokens);
    if (sampler_check(&q->sampling) != MT_OK)
        return cli_usage(self, "--%s", status_text());
    if (q->seed < 0)
        return cli_usage(self, "--seed must be 0 or more, not %lld", (long long)q->seed);
    if (q->threads < 0 || q->threads > MAX_THREADS)
        return cli_usage(self, "--threads must be from 0 (all) to %d, not %lld", MAX_THREADS,
                         (long long)q->threads);
    return CLI_GO_ON;
}

static int run_generate(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    request q = { .device = "auto",
                  .precision = { "auto", precisions },
                  .init = { "pretrained", inits },
                  .max_tokens = NOT_GIVEN,
                  .context = NOT_GIVEN,
                  .sampling = { .temperature = 0.8, .top_p = 1.0 } };
    const cli_option options[] = {
        { "prompt", CLI_TEXT, &q.prompt, "TEXT", "what to go on from (default: a new line)" },
        { "prompt-file", CLI_TEXT, &q.prompt_file, "FILE", "the same from FILE (-: the input)" },
        { "chat", CLI_FLAG, &q.chat, NULL, "the prompt is a message; without one, converse" },
        { "system", CLI_TEXT, &q.system, "TEXT", "with --chat: the system message" },
        { "chat-format", CLI_TEXT, &q.chat_format, "NAME", "with --chat: instead of the model's" },
        { "raw", CLI_FLAG, &q.raw, NULL, "write only what is generated, as it is" },
        { "max-tokens", CLI_INT, &q.max_tokens, "N", "tokens to generate (256)" },
        { "context", CLI_INT, &q.context, "N", "tokens of the longest conversation (4096)" },
        { "temperature", CLI_REAL, &q.sampling.temperature, "T", "0: always the likeliest (0.8)" },
        { "top-k", CLI_INT, &q.sampling.top_k, "K", "choose among the K likeliest (0: all)" },
        { "top-p", CLI_REAL, &q.sampling.top_p, "P", "choose among those of total mass P (1)" },
        { "seed", CLI_INT, &q.seed, "S", "of the draws, and of random weights (0)" },
        { "device", CLI_TEXT, &q.device, "NAME", "auto, cpu or cuda (auto)" },
        { "precision", CLI_CHOICE, &q.precision, "NAME", "auto, fp32 or bf16 (auto)" },
        { "threads", CLI_INT, &q.threads, "N", "CPU threads (0: all)" },
        { "tokenizer", CLI_TEXT, &q.tokenizer, "PATH",
          "a tokenizer.json or its folder (default: the model's)" },
        { "init", CLI_CHOICE, &q.init, "WHAT", "pretrained, or random: untrained weights" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON)
        rc = check(self, &q, argv, words);
    if (rc != CLI_GO_ON)
        return rc;
    q.model = argv[0];
    q.sampling.seed = (uint64_t)q.seed;

    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = run_request(&q);
    rc = cli_exit(st);
    registry_finish();
    return rc;
}

const cli_command cli_generate = {
    .name = "generate",
    .words = "MODEL [options]",
    .brief = "write text with a model or checkpoint, or converse with it",
    .help =
        "Goes on from a prompt with MODEL: a checkpoint, a run folder (its newest checkpoint),\n"
        "or a Hugging Face model folder. Writes text to the standard output as it is made.\n"
        "The same seed gives the same text.\n\n"
        "With --chat the prompt is a user's message, put into the model's chat format, and the\n"
        "answer is written. At a terminal and without a prompt it is a conversation, in which\n"
        "/clear begins anew and /exit ends.",
    .example = "examples: a careful continuation; a conversation\n"
               "  megatrain generate runs/shakespeare --prompt 'And God said' --temperature 0.5 "
               "--max-tokens 400\n"
               "  megatrain generate models/qwen3-0.6b --chat --system 'Answer briefly.'",
    .run = run_generate,
};
