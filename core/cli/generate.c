/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain generate: text from a model, token by token.
 */
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../train/human.h"
#include "../train/run_folder.h"
#include "../train/sample.h"
#include "../train/session.h"
#include "cli.h"
#include "utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct request {
    const char *model, *prompt, *tokenizer, *device, *precision, *init;
    int64_t max_tokens, threads, seed;
    sampler_options sampling;
} request;

/* The text loader's tokenizer: one token a byte. */
enum { BYTE_VOCAB = 256, MAX_TOKENS = 1 << 30, MAX_THREADS = 4096 };
#define BYTE_TOKENIZER "text"

typedef struct generation {
    const request *q;
    session s;
    const mt_tokenizer *tokenizer;
    void *tok;
    sampler *sampler;
    int32_t *prompt; /* [n_prompt] */
    int64_t n_prompt;
    float *logits; /* [vocab] */
    utf8_stream out;
} generation;

static mt_status open_tokenizer(generation *g)
{
    const char *name = g->q->tokenizer;
    if (!name) {
        if (g->s.model->vocab != BYTE_VOCAB)
            return status_set(
                MT_ERR_UNSUPPORTED,
                "%s has a vocabulary of %lld tokens, and there is no tokenizer for it "
                "yet; models over bytes (vocab_size: %d) need none",
                g->q->model, (long long)g->s.model->vocab, BYTE_VOCAB);
        name = BYTE_TOKENIZER;
    }
    const void *table = NULL;
    mt_status st = registry_find(PLUGIN_LOADER, name, MT_TOKENIZER_INTERFACE, &table, NULL);
    if (st != MT_OK)
        return status_prefix(st, "tokenizer '%s'", name);
    g->tokenizer = table;
    st = g->tokenizer->open(NULL, &g->tok);
    if (st != MT_OK)
        return st;
    int64_t vocab = g->tokenizer->vocab_size(g->tok);
    if (vocab > g->s.model->vocab)
        return status_set(MT_ERR_INVALID,
                          "tokenizer '%s' has %lld tokens, but the model %s only %lld", name,
                          (long long)vocab, g->q->model, (long long)g->s.model->vocab);
    return MT_OK;
}

static mt_status encode_prompt(generation *g)
{
    int64_t bytes = (int64_t)strlen(g->q->prompt);
    int64_t n = g->tokenizer->encode(g->tok, g->q->prompt, bytes, MT_ENCODE_ADD_SPECIAL, NULL, 0);
    if (n < 1)
        return status_set(MT_ERR_INVALID, "the prompt is empty; give at least one character");
    g->prompt = calloc((size_t)n, sizeof *g->prompt);
    if (!g->prompt)
        return status_nomem("the prompt", (size_t)n * sizeof *g->prompt);
    g->n_prompt =
        g->tokenizer->encode(g->tok, g->q->prompt, bytes, MT_ENCODE_ADD_SPECIAL, g->prompt, n);
    int64_t positions = g->s.model->max_positions;
    if (positions > 0 && g->n_prompt >= positions)
        return status_set(MT_ERR_INVALID,
                          "the prompt has %lld tokens, which leaves none of the model's %lld "
                          "positions to generate; shorten it to %lld at most",
                          (long long)g->n_prompt, (long long)positions, (long long)(positions - 1));
    if (positions > 0 && g->q->max_tokens > positions - g->n_prompt)
        return status_set(MT_ERR_INVALID,
                          "%lld tokens of prompt and %lld to generate are more than the model's "
                          "%lld positions; lower --max-tokens to %lld or shorten the prompt",
                          (long long)g->n_prompt, (long long)g->q->max_tokens, (long long)positions,
                          (long long)(positions - g->n_prompt));
    return MT_OK;
}

static bool wants_random(const request *q)
{
    return strcmp(q->init, "random") == 0;
}

static mt_status check_weights(const generation *g, const char *path)
{
    if (!wants_random(g->q) && strcmp(g->q->init, "pretrained") != 0)
        return status_set(MT_ERR_INVALID, "--init must be 'pretrained' or 'random', not '%s'",
                          g->q->init);
    if (!wants_random(g->q) && !g->s.source.weights)
        return status_set(MT_ERR_NOT_FOUND,
                          "%s has no weights; name a checkpoint, a run folder or a model folder, "
                          "or see what untrained weights say with --init random",
                          path);
    return MT_OK;
}

static mt_status load(generation *g)
{
    const request *q = g->q;
    mt_status st = session_make_generation_plan(&g->s, g->n_prompt, g->n_prompt + q->max_tokens);
    if (st == MT_OK)
        st = session_start(&g->s, &(session_engine_options){ 0 });
    if (st == MT_OK)
        st = session_load_weights(&g->s, wants_random(q) ? "" : g->s.source.weights,
                                  (uint64_t)q->seed);
    if (st != MT_OK)
        return st;
    g->logits = calloc((size_t)g->s.model->vocab, sizeof *g->logits);
    if (!g->logits)
        return status_nomem("logits", (size_t)g->s.model->vocab * sizeof *g->logits);
    return sampler_create(&q->sampling, g->s.model->vocab, &g->sampler);
}

/* Writes a token's bytes, as far as they make whole characters. */
static void show(generation *g, int32_t token)
{
    char text[256], shown[UTF8_ROOM];
    int64_t n = g->tokenizer->decode(g->tok, &token, 1, 0, text, sizeof text);
    for (int64_t i = 0; i < n && i < (int64_t)sizeof text; i++) {
        int count = utf8_put(&g->out, (unsigned char)text[i], shown);
        fwrite(shown, 1, (size_t)count, stdout);
    }
    fflush(stdout);
}

static mt_status generate(generation *g)
{
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    mt_status st = engine_generate(g->s.engine, g->prompt, g->n_prompt, 0, g->logits, NULL);
    for (int64_t i = 0; i < g->n_prompt; i++)
        show(g, g->prompt[i]);

    int32_t end = g->tokenizer->special(g->tok, MT_SPECIAL_END);
    int64_t made = 0;
    while (st == MT_OK && made < g->q->max_tokens) {
        int32_t token = 0;
        st = sampler_next(g->sampler, g->logits, &token);
        if (st != MT_OK || token == end)
            break;
        show(g, token);
        if (++made < g->q->max_tokens)
            st = engine_generate(g->s.engine, &token, 1, g->n_prompt + made - 1, g->logits, NULL);
    }
    char shown[UTF8_ROOM] = "";
    fwrite(shown, 1, (size_t)utf8_end(&g->out, shown), stdout);
    putchar('\n');
    clock_gettime(CLOCK_MONOTONIC, &b);
    double seconds = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
    if (st == MT_OK && log_has_terminal())
        log_write(MT_LOG_INFO, "%lld tokens in %s, %s tok/s", (long long)made,
                  human_seconds(seconds).s, human_count((double)made / seconds).s);
    return st;
}

static mt_status run_request(const request *q)
{
    generation g = { .q = q, .out.for_terminal = isatty(STDOUT_FILENO) == 1 };
    char path[RUN_FOLDER_PATH];
    mt_status st = run_folder_find_model(q->model, path);
    if (st == MT_OK)
        st = session_open_device(&g.s, q->device, q->precision, q->threads);
    if (st == MT_OK)
        st = session_open_model(&g.s, path);
    if (st == MT_OK)
        st = check_weights(&g, path);
    if (st == MT_OK)
        st = open_tokenizer(&g);
    if (st == MT_OK)
        st = encode_prompt(&g);
    if (st == MT_OK)
        st = load(&g);
    if (st == MT_OK)
        st = generate(&g);
    sampler_destroy(g.sampler);
    free(g.logits);
    free(g.prompt);
    if (g.tokenizer)
        g.tokenizer->close(g.tok);
    session_close(&g.s);
    return st;
}

static int run_generate(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    request q = { .prompt = "\n",
                  .device = "auto",
                  .precision = "auto",
                  .init = "pretrained",
                  .max_tokens = 256,
                  .sampling = { .temperature = 0.8, .top_p = 1.0 } };
    const cli_option options[] = {
        { "prompt", CLI_TEXT, &q.prompt, "TEXT", "what to go on from (default: a new line)" },
        { "max-tokens", CLI_INT, &q.max_tokens, "N", "tokens to generate (256)" },
        { "temperature", CLI_REAL, &q.sampling.temperature, "T", "0: always the likeliest (0.8)" },
        { "top-k", CLI_INT, &q.sampling.top_k, "K", "choose among the K likeliest (0: all)" },
        { "top-p", CLI_REAL, &q.sampling.top_p, "P", "choose among those of total mass P (1)" },
        { "seed", CLI_INT, &q.seed, "S", "of the draws, and of random weights (0)" },
        { "device", CLI_TEXT, &q.device, "NAME", "auto, cpu or cuda (auto)" },
        { "precision", CLI_TEXT, &q.precision, "NAME", "auto, fp32 or bf16 (auto)" },
        { "threads", CLI_INT, &q.threads, "N", "CPU threads (0: all)" },
        { "tokenizer", CLI_TEXT, &q.tokenizer, "NAME",
          "loader whose tokenizer to use (text: bytes, for vocab_size 256)" },
        { "init", CLI_TEXT, &q.init, "WHAT", "pretrained, or random: untrained weights" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON && words != 1)
        rc = cli_usage(self, words ? "one model at a time" : "which model?");
    if (rc == CLI_GO_ON && (q.max_tokens < 1 || q.max_tokens > MAX_TOKENS))
        rc = cli_usage(self, "--max-tokens must be from 1 to %d, not %lld", MAX_TOKENS,
                       (long long)q.max_tokens);
    if (rc == CLI_GO_ON && (q.threads < 0 || q.threads > MAX_THREADS))
        rc = cli_usage(self, "--threads must be from 0 (all) to %d, not %lld", MAX_THREADS,
                       (long long)q.threads);
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
    .brief = "write text with a model or checkpoint",
    .help =
        "Goes on from a prompt with MODEL: a checkpoint, a run folder (its newest checkpoint),\n"
        "or a Hugging Face model folder. Writes text to the standard output as it is made.\n"
        "The same seed gives the same text.",
    .example = "example: a careful continuation\n"
               "  megatrain generate runs/shakespeare --prompt 'And God said' --temperature 0.5 "
               "--max-tokens 400",
    .run = run_generate,
};
