/* SPDX-License-Identifier: Apache-2.0
 *
 * The documents plugin with real tokenizers and chat formats: ids and labels are what those say.
 * Usage: PROGRAM documents.so tokenizer.so chat.so FOLDER-OF-TOKENIZERS
 */
#include "support.h"

static const mt_data *d;
static const mt_tokenizer *tokenizer;
static const mt_chat *chat;
static const char *fixtures;
static char folder[64];

/* The end token of all; every fixture has it. */
#define END "<|im_end|>"

static const char *const models[] = { "llama2",      "llama3", "mistral-first", "mistral-always",
                                      "gemma",       "qwen",   "gpt2",          "o200k",
                                      "deepseek-v3", "tekken" };
enum { MODELS = sizeof models / sizeof *models };

static const char *const texts[] = { "Hello world, how are you?",
                                     "  two  spaces, and a tab\t\n\nnew paragraph\n",
                                     "\xe4\xbd\xa0\xe5\xa5\xbd\xef\xbc\x8c\xe4\xb8\x96\xe7\x95\x8c",
                                     "caf\xc3\xa9 \xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb",
                                     "int main(void) { return 1234567; }",
                                     "x" };
enum { TEXTS = sizeof texts / sizeof *texts, MOST = 512 };

/* A folder with the tokenizer and what names its end token. */
static void *open_model(const char *name)
{
    static const char names[] = "{\"eos_token\": \"" END "\"}";
    char path[4096];
    size_t n;
    void *tokens = NULL;
    snprintf(path, sizeof path, "%s/%s.json", fixtures, name);
    char *content = support_read(path, &n);
    CHECK(mkdir(name, 0777) == 0, "%s", name);
    snprintf(path, sizeof path, "%s/tokenizer.json", name);
    support_write(path, content, n);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", name);
    support_write(path, names, sizeof names - 1);
    free(content);
    if (tokenizer->open(name, &tokens) != MT_OK) {
        fprintf(stderr, "%s: %s\n", name, status_text());
        exit(1);
    }
    return tokens;
}

static void put_json(FILE *f, const char *text, size_t n)
{
    fputc('"', f);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == '"' || text[i] == '\\')
            fprintf(f, "\\u%04x", text[i]);
        else
            fputc(text[i], f);
    fputc('"', f);
}

static void *open_stream(const void *tokens, const void *conversation)
{
    static const char *const pairs[] = { "files", "a.jsonl", "validation_split", "0", "shuffle",
                                         "false", NULL };
    const support_config c = support_make_config(pairs);
    const mt_data_request request = { .struct_size = sizeof request,
                                      .split = MT_SPLIT_TRAIN,
                                      .config = &c.base,
                                      .max_seq_len = MOST,
                                      .world = 1,
                                      .tokenizer = tokenizer,
                                      .tokens = tokens,
                                      .chat = chat,
                                      .conversation = conversation };
    void *s = NULL;
    if (d->open(&request, &s) != MT_OK) {
        fprintf(stderr, "%s\n", status_text());
        exit(1);
    }
    return s;
}

/* What the tokenizer gives for a text of its own, with one end token behind it. */
static int64_t expected(const void *tokens, const char *text, int32_t *ids)
{
    int32_t end = tokenizer->special(tokens, MT_SPECIAL_END);
    int64_t n = tokenizer->encode(tokens, text, (int64_t)strlen(text), MT_ENCODE_ADD_SPECIAL, ids,
                                  MOST - 1);
    int64_t plain = tokenizer->encode(tokens, "x", 1, 0, NULL, 0);
    int32_t around[8];
    int64_t all = tokenizer->encode(tokens, "x", 1, MT_ENCODE_ADD_SPECIAL, around, 8);
    CHECK(end >= 0 && n > 0 && all >= plain && all <= 8, "%d", (int)n);
    /* Some add an end of their own, another than the one that the folder names. */
    if (all > plain && tokenizer->encode(tokens, "", 0, MT_ENCODE_ADD_SPECIAL, NULL, 0) == 2)
        n--;
    ids[n] = end;
    return n + 1;
}

static void text(void)
{
    support_enter(folder);
    FILE *f = fopen("a.jsonl", "w");
    for (int i = 0; i < TEXTS; i++) {
        fprintf(f, "{\"text\": ");
        put_json(f, texts[i], strlen(texts[i]));
        fprintf(f, "}\n");
    }
    fclose(f);
    for (int k = 0; k < MODELS; k++) {
        void *tokens = open_model(models[k]);
        void *s = open_stream(tokens, NULL);
        for (int i = 0; i < TEXTS; i++) {
            int32_t ids[MOST];
            mt_document doc;
            int64_t n = expected(tokens, texts[i], ids);
            CHECK(d->next(s, &doc) == MT_OK && doc.n == n, "%s, text %d: %d tokens, expected %d",
                  models[k], i, (int)doc.n, (int)n);
            CHECK(memcmp(doc.tokens, ids, (size_t)n * sizeof *ids) == 0, "%s, text %d", models[k],
                  i);
            for (int64_t t = 0; t < doc.n; t++)
                CHECK(doc.loss_mask[t] == (t > 0), "%s, text %d: token %d", models[k], i, (int)t);
        }
        d->close(s);
        tokenizer->close(tokens);
    }
    support_leave(folder);
}

/* Every place of every text as the border of prompt and completion. */
static void prompts(void)
{
    support_enter(folder);
    FILE *f = fopen("a.jsonl", "w");
    for (int i = 0; i < TEXTS; i++)
        for (size_t at = 1, n = strlen(texts[i]); at < n; at++) {
            if (((unsigned char)texts[i][at] & 0xc0) == 0x80)
                continue; /* inside a character */
            fprintf(f, "{\"prompt\": ");
            put_json(f, texts[i], at);
            fprintf(f, ", \"completion\": ");
            put_json(f, texts[i] + at, n - at);
            fprintf(f, "}\n");
        }
    fclose(f);
    for (int k = 0; k < MODELS; k++) {
        void *tokens = open_model(models[k]);
        void *s = open_stream(tokens, NULL);
        for (int i = 0; i < TEXTS; i++)
            for (size_t at = 1, n = strlen(texts[i]); at < n; at++) {
                if (((unsigned char)texts[i][at] & 0xc0) == 0x80)
                    continue;
                int32_t ids[MOST];
                mt_document doc;
                int64_t m = expected(tokens, texts[i], ids), masked = 0;
                CHECK(d->next(s, &doc) == MT_OK && doc.n == m, "%s, text %d at %zu", models[k], i,
                      at);
                CHECK(memcmp(doc.tokens, ids, (size_t)m * sizeof *ids) == 0,
                      "%s, text %d at %zu: other tokens", models[k], i, at);
                while (masked < m && !doc.loss_mask[masked])
                    masked++;
                for (int64_t t = masked; t < m; t++)
                    CHECK(doc.loss_mask[t], "%s, text %d at %zu: token %d", models[k], i, at,
                          (int)t);
                /* The masked tokens cover the prompt, and without the last one they do not. Some
                 * tokenizers lose a space at the start. */
                int64_t all =
                    tokenizer->decode(tokens, ids, m - 1, MT_DECODE_SKIP_SPECIAL, NULL, 0);
                int64_t rest = (int64_t)n - (int64_t)at, lost = (int64_t)n - all;
                int64_t covered =
                    tokenizer->decode(tokens, ids, masked, MT_DECODE_SKIP_SPECIAL, NULL, 0);
                int64_t before =
                    tokenizer->decode(tokens, ids, masked - 1, MT_DECODE_SKIP_SPECIAL, NULL, 0);
                CHECK(all - covered <= rest && all - before > rest - lost,
                      "%s, text %d at %zu: %d of %d tokens masked", models[k], i, at, (int)masked,
                      (int)m);
            }
        d->close(s);
        tokenizer->close(tokens);
    }
    support_leave(folder);
}

/* Fault 11: ids and labels of conversations are those of the chat format, whatever the tokenizer
 * would put around a text. */
static void conversations(void)
{
    support_enter(folder);
    FILE *f = fopen("a.jsonl", "w");
    for (int i = 0; i < TEXTS; i++) {
        fprintf(f, "{\"messages\": [{\"role\": \"user\", \"content\": ");
        put_json(f, texts[i], strlen(texts[i]));
        fprintf(f, "}, {\"role\": \"assistant\", \"content\": ");
        put_json(f, texts[TEXTS - 1 - i], strlen(texts[TEXTS - 1 - i]));
        fprintf(f, "}]}\n");
    }
    fclose(f);
    for (int k = 0; k < MODELS; k++) {
        void *tokens = open_model(models[k]), *conversation = NULL;
        CHECK(chat->open("chatml", tokenizer, tokens, &conversation) == MT_OK, "%s", status_text());
        void *s = open_stream(tokens, conversation);
        for (int i = 0; i < TEXTS; i++) {
            int32_t ids[MOST];
            uint8_t trained[MOST];
            const char *a = texts[i], *b = texts[TEXTS - 1 - i];
            const mt_message turns[] = {
                { .role = "user", .content = a, .n_content = (int64_t)strlen(a) },
                { .role = "assistant",
                  .content = b,
                  .n_content = (int64_t)strlen(b),
                  .trained = true },
            };
            mt_document doc;
            int64_t n = chat->encode(conversation, turns, 2, false, ids, trained, MOST);
            trained[0] = 0;
            CHECK(d->next(s, &doc) == MT_OK && doc.n == n, "%s, text %d", models[k], i);
            CHECK(memcmp(doc.tokens, ids, (size_t)n * sizeof *ids) == 0, "%s, text %d", models[k],
                  i);
            CHECK(memcmp(doc.loss_mask, trained, (size_t)n) == 0, "%s, text %d: labels", models[k],
                  i);
            int32_t end = tokenizer->special(tokens, MT_SPECIAL_END);
            int64_t ends = 0;
            for (int64_t t = 1; t < n; t++)
                ends += doc.loss_mask[t] && doc.tokens[t] == end;
            CHECK(ends == 1, "%s, text %d: %d end tokens are targets", models[k], i, (int)ends);
        }
        d->close(s);
        chat->close(conversation);
        tokenizer->close(tokens);
    }
    support_leave(folder);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    d = plugin_interface(argv[1], MT_DATA_INTERFACE);
    tokenizer = plugin_interface(argv[2], MT_TOKENIZER_INTERFACE);
    chat = plugin_interface(argv[3], MT_CHAT_INTERFACE);
    fixtures = argv[4];
    log_set_level(MT_LOG_ERROR);
    RUN(text);
    RUN(prompts);
    RUN(conversations);
    return check_done();
}
