/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain tokenize --show-labels: what of a file's documents is trained. They come from the
 * loader that training uses, so that nothing here has to know records, formats or masks.
 */
#include "../base/log.h"
#include "../base/status.h"
#include "../train/files.h"
#include "../train/session.h"
#include "cli.h"
#include "leftover.h"
#include "token_text.h"
#include "tokenize.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Documents are shown whole: this is far above the loader's need of any length. */
enum { LONGEST = 1 << 20 };

/* How a stretch is shown that is trained, or is not. */
typedef struct marks {
    const char *trained, *masked, *end;
} marks;

static const marks colours = { "\033[32m", "\033[90m", "\033[0m" };
static const marks brackets = { "⟦", "", "" };
static const char closing[] = "⟧";

static bool is_trained(const mt_document *d, int64_t i)
{
    return i > 0 && (!d->loss_mask || d->loss_mask[i]);
}

static void show_document(const session *s, const mt_document *d, int64_t number)
{
    bool terminal = isatty(STDOUT_FILENO) == 1;
    const marks *m = terminal ? &colours : &brackets;
    utf8_stream out = { .for_terminal = terminal };
    int64_t trained = 0;
    for (int64_t i = 0; i < d->n; i++)
        trained += is_trained(d, i);
    printf("document %lld: %lld tokens, %lld trained\n", (long long)number, (long long)d->n,
           (long long)trained);
    for (int64_t i = 0; i < d->n; i++) {
        char text[TOKEN_TEXT_ROOM];
        bool now = is_trained(d, i);
        if (i == 0 || now != is_trained(d, i - 1)) {
            token_text_end(&out);
            fputs(now ? m->trained : m->masked, stdout);
        }
        token_text_show(&out, text, token_text(s->tokenizer, s->tokens, d->tokens[i], 0, text));
        bool last = i == d->n - 1;
        if (!terminal && now && (last || !is_trained(d, i + 1))) {
            token_text_end(&out);
            fputs(closing, stdout);
        }
    }
    token_text_end(&out);
    printf("%s\n\n", m->end);
}

static mt_status show_stream(const session *s, const mt_data *data, void *stream, int64_t most)
{
    int64_t documents = 0, tokens = 0;
    data->size(stream, &documents, &tokens);
    mt_status st = MT_OK;
    for (int64_t i = 0; i < documents && i < most && st == MT_OK; i++) {
        mt_document d;
        st = data->next(stream, &d);
        if (st == MT_OK)
            show_document(s, &d, i + 1);
    }
    return st;
}

/* ---- the standard input ---------------------------------------------------------------------- */

/* The standard input as a file, which is what loaders read. */
typedef struct input_file {
    char folder[SESSION_PATH], path[SESSION_PATH + 32]; /* "": none was made */
} input_file;

static bool looks_like_json(const char *text)
{
    text += strspn(text, " \t\r\n");
    return *text == '{' || *text == '[';
}

static mt_status make_folder(input_file *f, const char *tmp)
{
    if ((size_t)snprintf(f->folder, sizeof f->folder, "%s/megatrain-XXXXXX", tmp) <
            sizeof f->folder &&
        mkdtemp(f->folder))
        return MT_OK;
    f->folder[0] = '\0';
    return status_set(MT_ERR_IO, "%s: cannot make a folder for the standard input: %s", tmp,
                      strerror(errno));
}

static mt_status keep_input(input_file *f)
{
    char *text = NULL;
    size_t n = 0;
    const char *tmp = getenv("TMPDIR");
    mt_status st = cli_read_stream(stdin, "the standard input", &text, &n);
    if (st == MT_OK && n == 0)
        st = status_set(MT_ERR_INVALID, "the standard input is empty; give it documents, or name "
                                        "a file with --file");
    leftover_keep(f->path, f->folder);
    if (st == MT_OK)
        st = make_folder(f, tmp && *tmp ? tmp : "/tmp");
    if (st == MT_OK) {
        snprintf(f->path, sizeof f->path, "%s/standard-input.%s", f->folder,
                 looks_like_json(text) ? "jsonl" : "txt");
        st = files_write(f->path, text, n);
    }
    free(text);
    return st;
}

static void forget_input(const input_file *f)
{
    if (f->folder[0])
        (void)files_remove_tree(f->folder);
    leftover_forget();
}

/* ---- the documents --------------------------------------------------------------------------- */

/* The data section: the file in its order, nothing held out, nothing kept, and the user's keys. */
static mt_status make_config(const tokenize_labels *o, const char *file, config **ret)
{
    static const char fixed[] = "{ validation_split: 0, shuffle: false, cache: off }";
    char label[SESSION_PATH + 64];
    config *c = NULL;
    snprintf(label, sizeof label, "--file %s", file);
    mt_status st = config_parse_yaml(fixed, sizeof fixed - 1, "the data's keys", &c);
    if (st == MT_OK)
        st = config_set_text(c, "files", file, label);
    for (int i = 0; i < o->n_keys && st == MT_OK; i++)
        st = config_override(c, o->keys[i]);
    if (st != MT_OK) {
        config_destroy(c);
        return st;
    }
    *ret = c;
    return MT_OK;
}

/* A model's folder may name its chat format in config.json, which then counts in training. */
static mt_status open_model(const char *tokenizer, model_source *ret)
{
    char path[SESSION_PATH + 16];
    snprintf(path, sizeof path, "%s/config.json", tokenizer);
    return files_is_file(path) ? model_source_open(tokenizer, ret) : MT_OK;
}

/* The tokenizer, and the chat format: the command's, or that of the data's keys, or the model's. */
static mt_status open_tokenizer(session *s, const tokenize_labels *o, config *c)
{
    const mt_config *keys = config_section(c, ""), *custom = config_map(keys, "chat_format");
    const char *format = NULL;
    mt_status st = MT_OK;
    if (!custom && keys->has(keys, "chat_format"))
        st = keys->get_string(keys, "chat_format", &format);
    if (st == MT_OK && o->chat_format && (custom || format))
        st = status_set(MT_ERR_INVALID,
                        "--chat-format %s and the key 'chat_format'; give one of the two",
                        o->chat_format);
    if (st != MT_OK)
        return st;
    if (!format)
        format = o->chat_format ? o->chat_format : "auto";
    return session_open_tokenizer(s, o->tokenizer, custom ? NULL : format, custom);
}

mt_status tokenize_show_labels(const tokenize_labels *o)
{
    session s = { 0 };
    config *c = NULL;
    const mt_data *data = NULL;
    void *stream = NULL;
    input_file input = { 0 };
    mt_status st = open_model(o->tokenizer, &s.source);
    if (st == MT_OK)
        st = o->file ? MT_OK : keep_input(&input);
    if (st == MT_OK)
        st = make_config(o, o->file ? o->file : input.path, &c);
    if (st == MT_OK)
        st = open_tokenizer(&s, o, c);
    if (st == MT_OK)
        st = session_find_records(&data);
    if (st == MT_OK) {
        mt_data_request request = session_data_request(&s, config_section(c, ""));
        request.split = MT_SPLIT_TRAIN;
        request.max_seq_len = LONGEST;
        st = data->open(&request, &stream);
    }
    if (st == MT_OK && s.chat)
        log_write(MT_LOG_INFO, "conversations as %s", s.chat_format);
    /* Before anything is written: a reader that leaves early, as `head` does, ends the program. */
    forget_input(&input);
    if (st == MT_OK)
        st = config_check_unused(c, "");
    if (st == MT_OK)
        st = show_stream(&s, data, stream, o->most);
    if (stream)
        data->close(stream);
    config_destroy(c);
    session_close_tokenizer(&s);
    model_source_close(&s.source);
    return st;
}
