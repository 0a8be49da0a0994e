/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain tokenize: text to tokens and back, as a model's tokenizer does it.
 */
#include "tokenize.h"
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../train/files.h"
#include "../train/human.h"
#include "../train/session.h"
#include "cli.h"
#include "token_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct request {
    const char *tokenizer, *file, *output, *separator, *chat_format;
    const char *text; /* NULL: the file, or the standard input */
    bool no_special, literal, pieces, decode, count, labels;
    int64_t documents; /* to show, NOT_GIVEN */
} request;

enum { DEFAULT_DOCUMENTS = 10 };

#define NOT_GIVEN INT64_MIN

/* ---- ids ------------------------------------------------------------------------------------- */

static mt_status reserve(tokenize_ids *ids, int64_t cap)
{
    if (cap <= ids->cap)
        return MT_OK;
    int32_t *grown = realloc(ids->id, (size_t)cap * sizeof *grown);
    if (!grown)
        return status_nomem("tokens", (size_t)cap * sizeof *grown);
    ids->id = grown;
    ids->cap = cap;
    return MT_OK;
}

/* A text rarely has more tokens than a third of its bytes; where it does, it is encoded again. Room
 * for one more token is left. */
mt_status tokenize_add(const tokenize_tools *t, const char *text, int64_t n, tokenize_ids *ids)
{
    mt_status st = reserve(ids, ids->n + n / 3 + 64);
    while (st == MT_OK) {
        int64_t room = ids->cap - ids->n - 1;
        int64_t made = t->iface->encode(t->tokenizer, text, n, t->flags, ids->id + ids->n, room);
        if (made < 0)
            return (mt_status)made;
        if (made <= room) {
            ids->n += made;
            return MT_OK;
        }
        st = reserve(ids, ids->n + made + 1);
    }
    return st;
}

void tokenize_free(tokenize_ids *ids)
{
    free(ids->id);
    *ids = (tokenize_ids){ 0 };
}

/* ---- input ----------------------------------------------------------------------------------- */

/* All of the text, with a NUL behind it. */
static mt_status read_input(const request *q, char **ret, size_t *ret_n)
{
    if (q->text) {
        *ret_n = strlen(q->text);
        *ret = strdup(q->text);
        return *ret ? MT_OK : status_nomem("the text", *ret_n);
    }
    if (q->file)
        return cli_read_file(q->file, ret, ret_n);
    return cli_read_stream(stdin, "the standard input", ret, ret_n);
}

static const char *input_name(const request *q)
{
    return q->text ? "the text" : q->file ? q->file : "the standard input";
}

/* ---- output ---------------------------------------------------------------------------------- */

/* Characters that can be seen as they are; \n, \t, \\ and \xNN for all else. */
static void print_escaped(const char *p, int64_t n)
{
    static const char names[] = "\n\t\r\\", letters[] = "ntr\\";
    for (int64_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        const char *name = c ? strchr(names, c) : NULL;
        if (name)
            printf("\\%c", letters[name - names]);
        else if (c < 0x20 || c == 0x7f)
            printf("\\x%02x", c);
        else
            putchar(c);
    }
}

/* Is it whole characters of UTF-8? A token may be a part of one. */
static bool is_text(const char *p, int64_t n)
{
    utf8_stream stream = { 0 };
    char shown[UTF8_ROOM];
    int64_t same = 0;
    for (int64_t i = 0; i < n; i++) {
        int count = utf8_put(&stream, (unsigned char)p[i], shown);
        if (count > i + 1 - same || memcmp(shown, p + same, (size_t)count) != 0)
            return false;
        same += count;
    }
    return same == n;
}

static void print_piece(const char *p, int64_t n)
{
    if (is_text(p, n))
        print_escaped(p, n);
    else
        for (int64_t i = 0; i < n; i++)
            printf("\\x%02x", (unsigned char)p[i]);
}

/* A tokenizer may treat the first token of a text in its own way. */
static void show_piece(const tokenize_tools *t, int32_t id, bool first)
{
    char text[TOKEN_TEXT_ROOM];
    int64_t n = first ? t->iface->decode(t->tokenizer, &id, 1, 0, text, sizeof text)
                      : token_text(t->iface, t->tokenizer, id, 0, text);
    printf("%d\t", id);
    print_piece(text, n < TOKEN_TEXT_ROOM ? n : TOKEN_TEXT_ROOM);
    putchar('\n');
}

static mt_status show_ids(const tokenize_tools *t, const request *q, const char *text, size_t n)
{
    tokenize_ids ids = { 0 };
    mt_status st = tokenize_add(t, text, (int64_t)n, &ids);
    if (st == MT_OK && q->count)
        printf("%lld\n", (long long)ids.n);
    for (int64_t i = 0; i < ids.n && !q->count; i++) {
        if (q->pieces)
            show_piece(t, ids.id[i], i == 0);
        else
            printf("%d\n", ids.id[i]);
    }
    tokenize_free(&ids);
    return st;
}

/* ---- decoding -------------------------------------------------------------------------------- */

static mt_status parse_ids(const tokenize_tools *t, const request *q, const char *text,
                           tokenize_ids *ids)
{
    long long vocab = (long long)t->iface->vocab_size(t->tokenizer);
    for (const char *p = text;;) {
        p += strspn(p, " \t\r\n,");
        if (!*p)
            return MT_OK;
        char *end;
        errno = 0;
        long long id = strtoll(p, &end, 10);
        int word = (int)strcspn(p, " \t\r\n,");
        if (end != p + word || errno || id < 0 || id >= vocab)
            return status_set(MT_ERR_INVALID,
                              "%s: found '%.*s', expected ids of tokens, from 0 to %lld, with "
                              "blanks between them",
                              input_name(q), word < 40 ? word : 40, p, vocab - 1);
        if (ids->n == ids->cap) {
            mt_status st = reserve(ids, ids->cap ? 2 * ids->cap : 256);
            if (st != MT_OK)
                return st;
        }
        ids->id[ids->n++] = (int32_t)id;
        p = end;
    }
}

static mt_status show_text(const tokenize_tools *t, const request *q, const char *input)
{
    tokenize_ids ids = { 0 };
    char *text = NULL;
    uint32_t flags = q->no_special ? MT_DECODE_SKIP_SPECIAL : 0;
    mt_status st = parse_ids(t, q, input, &ids);
    int64_t n = st == MT_OK ? t->iface->decode(t->tokenizer, ids.id, ids.n, flags, NULL, 0) : st;
    if (n >= 0 && !(text = malloc((size_t)n + 1)))
        n = status_nomem("the text", (size_t)n);
    if (n >= 0)
        n = t->iface->decode(t->tokenizer, ids.id, ids.n, flags, text, n);
    if (n > 0)
        fwrite(text, 1, (size_t)n, stdout);
    free(text);
    tokenize_free(&ids);
    return n < 0 ? (mt_status)n : MT_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

static mt_status write_bin(const tokenize_tools *t, const request *q, const char *text, size_t n)
{
    const tokenize_bin o = { .path = q->output,
                             .name = input_name(q),
                             .separator = q->separator,
                             .jsonl = q->file && !q->text && ends_with(q->file, ".jsonl") };
    int64_t documents = 0, tokens = 0;
    mt_status st = tokenize_write_bin(t, &o, text, (int64_t)n, &documents, &tokens);
    if (st == MT_OK)
        log_write(MT_LOG_INFO, "%s: %s tokens of %s document%s", q->output, human_grouped(tokens).s,
                  human_grouped(documents).s, documents == 1 ? "" : "s");
    return st;
}

static mt_status run_request(const request *q)
{
    tokenize_tools t = { .flags = (q->no_special ? 0 : MT_ENCODE_ADD_SPECIAL) |
                                  (q->literal ? MT_ENCODE_LITERAL : 0) };
    char *text = NULL;
    size_t n = 0;
    mt_status st = session_find_tokenizer(q->tokenizer, &t.iface);
    if (st == MT_OK)
        st = t.iface->open(q->tokenizer, &t.tokenizer);
    if (st == MT_OK && q->output)
        st = files_check_output(q->output, TOKEN_FILE_MARK, true);
    if (st == MT_OK)
        st = read_input(q, &text, &n);
    if (st == MT_OK && q->decode)
        st = show_text(&t, q, text);
    else if (st == MT_OK && q->output)
        st = write_bin(&t, q, text, n);
    else if (st == MT_OK)
        st = show_ids(&t, q, text, n);
    free(text);
    if (t.iface)
        t.iface->close(t.tokenizer);
    return st;
}

static int check_labels(const cli_command *self, const request *q, char **words, int n_words)
{
    if (q->no_special || q->literal || q->pieces || q->decode || q->count || q->output ||
        q->separator)
        return cli_usage(self, "--show-labels shows what training sees; other options but "
                               "--chat-format and --documents do not apply");
    if (q->documents < 1 && q->documents != NOT_GIVEN)
        return cli_usage(self, "--documents must be at least 1, not %lld", (long long)q->documents);
    for (int i = 0; i < n_words; i++)
        if (!strchr(words[i], '='))
            return cli_usage(self,
                             "'%s' is no key of the data; write key=value, such as "
                             "train_on=last",
                             words[i]);
    return CLI_GO_ON;
}

static int check(const cli_command *self, const request *q, char **names, int words)
{
    if (!q->tokenizer)
        return cli_usage(self, "which tokenizer? name a file or a folder with --tokenizer PATH");
    if (q->labels)
        return check_labels(self, q, names, words);
    if (q->chat_format || q->documents != NOT_GIVEN)
        return cli_usage(self, "%s is for --show-labels",
                         q->chat_format ? "--chat-format" : "--documents");
    if (words > 1)
        return cli_usage(self, "one text at a time; put it in quotes");
    if (words == 1 && q->file)
        return cli_usage(self, "a text and --file %s; give one of the two", q->file);
    if (q->pieces + q->decode + q->count + (q->output != NULL) > 1)
        return cli_usage(self, "--pieces, --decode, --count and -o: one at a time");
    if (q->separator && !q->output)
        return cli_usage(self, "--separator is for -o");
    if (q->separator && q->file && ends_with(q->file, ".jsonl"))
        return cli_usage(self, "--separator is for plain text; in %s each line is a document",
                         q->file);
    if (q->literal && q->decode)
        return cli_usage(self, "--literal is for text, not for --decode");
    return CLI_GO_ON;
}

static int run_tokenize(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    request q = { .documents = NOT_GIVEN };
    const cli_option options[] = {
        { "tokenizer", CLI_TEXT, &q.tokenizer, "PATH",
          "a tokenizer.json, or a folder with one (required)" },
        { "file", CLI_TEXT, &q.file, "FILE", "read the text from FILE" },
        { "no-special", CLI_FLAG, &q.no_special, NULL,
          "add no special tokens; with --decode, leave them out" },
        { "literal", CLI_FLAG, &q.literal, NULL, "special tokens in the text are mere text" },
        { "pieces", CLI_FLAG, &q.pieces, NULL, "show the text of each token behind its id" },
        { "count", CLI_FLAG, &q.count, NULL, "show only how many tokens there are" },
        { "decode", CLI_FLAG, &q.decode, NULL, "read ids, write text" },
        { "o", CLI_TEXT, &q.output, "OUT.bin", "write the tokens to a file to train on" },
        { "separator", CLI_TEXT, &q.separator, "HOW",
          "with -o, what ends a document: none, blank_line, or a text (none)" },
        { "show-labels", CLI_FLAG, &q.labels, NULL,
          "show documents as training sees them, and what of them is trained" },
        { "chat-format", CLI_TEXT, &q.chat_format, "NAME",
          "with --show-labels, instead of the model's" },
        { "documents", CLI_INT, &q.documents, "N", "with --show-labels, how many (10)" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON)
        rc = check(self, &q, argv, words);
    if (rc != CLI_GO_ON)
        return rc;
    q.text = words ? argv[0] : NULL;
    q.separator = q.separator ? q.separator : "none";

    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK && q.labels)
        st = tokenize_show_labels(&(tokenize_labels){
            .tokenizer = q.tokenizer,
            .chat_format = q.chat_format,
            .file = q.file,
            .keys = argv,
            .n_keys = words,
            .most = q.documents == NOT_GIVEN ? DEFAULT_DOCUMENTS : q.documents,
        });
    else if (st == MT_OK)
        st = run_request(&q);
    rc = cli_exit(st);
    registry_finish();
    return rc;
}

const cli_command cli_tokenize = {
    .name = "tokenize",
    .words = "--tokenizer PATH [options] [TEXT]",
    .brief = "text to tokens and back",
    .help =
        "Writes the ids of the tokens that TEXT becomes, one a line; without TEXT and --file, of\n"
        "the standard input. The ids are those of Hugging Face's tokenizers for the same file.\n"
        "With -o the tokens go to a file in llm.c's format, 16 or 32 bits a token as the\n"
        "vocabulary needs, the end token behind each document; in a FILE.jsonl each line is an\n"
        "object with a document at \"text\".\n"
        "With --show-labels, documents (conversations, instructions, text) are shown as\n"
        "training sees them, in green what is trained, or between \u27e6 and \u27e7 where there "
        "is\n"
        "no terminal. Keys of a run manifest's data section may follow: train_on=last.",
    .example = "examples: look at the tokens of a sentence; make a file to train on; see labels\n"
               "  megatrain tokenize --tokenizer models/qwen3-8b --pieces 'Hello world'\n"
               "  megatrain tokenize --tokenizer models/qwen3-8b --file web.jsonl -o web.bin\n"
               "  megatrain tokenize --tokenizer models/qwen3-8b --file chat.jsonl --show-labels",
    .run = run_tokenize,
};
