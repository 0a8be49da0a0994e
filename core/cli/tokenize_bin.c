/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files as llm.c has them: a header of 256 int32 (magic, version, number of tokens, zeros),
 * then the tokens, 16 bits each where the vocabulary fits, else 32.
 */
#include "../base/status.h"
#include "../train/files.h"
#include "leftover.h"
#include "tokenize.h"

#include <errno.h>
#include <fcntl.h>
#include <megatrain/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    HEADER = 256,
    MAGIC_16 = 20240520,
    VERSION_16 = 1,
    MAGIC_32 = 20240801,
    VERSION_32 = 7,
    VOCAB_16 = 1 << 16
};

typedef struct writer {
    const tokenize_tools *tools;
    const tokenize_bin *options;
    FILE *file;
    bool wide; /* 32 bits a token */
    int32_t end;
    int64_t documents, tokens;
    int64_t line; /* of a JSONL file */
    tokenize_ids ids;
    uint16_t *narrow; /* [ids.cap] */
    int64_t narrow_cap;
} writer;

static mt_status failed(const writer *w, const char *what)
{
    return status_set(MT_ERR_IO, "%s: cannot %s: %s", w->options->path, what, strerror(errno));
}

/* ---- tokens --------------------------------------------------------------------------------- */

static mt_status put_narrow(writer *w)
{
    if (w->narrow_cap < w->ids.n) {
        uint16_t *grown = realloc(w->narrow, (size_t)w->ids.cap * sizeof *grown);
        if (!grown)
            return status_nomem("tokens", (size_t)w->ids.cap * sizeof *grown);
        w->narrow = grown;
        w->narrow_cap = w->ids.cap;
    }
    for (int64_t i = 0; i < w->ids.n; i++)
        w->narrow[i] = (uint16_t)w->ids.id[i];
    size_t n = (size_t)w->ids.n;
    return fwrite(w->narrow, sizeof *w->narrow, n, w->file) == n ? MT_OK : failed(w, "write");
}

static mt_status put_ids(writer *w)
{
    if (w->tokens + w->ids.n > INT32_MAX)
        return status_set(MT_ERR_UNSUPPORTED,
                          "%s: more than 2,147,483,647 tokens, the most that the format counts; "
                          "split the text over several files",
                          w->options->path);
    w->tokens += w->ids.n;
    if (!w->wide)
        return put_narrow(w);
    size_t n = (size_t)w->ids.n;
    return fwrite(w->ids.id, sizeof *w->ids.id, n, w->file) == n ? MT_OK : failed(w, "write");
}

/* One document; an empty one leaves no trace. A template may have put the end token there. */
static mt_status put_document(writer *w, const char *text, int64_t n)
{
    if (n == 0)
        return MT_OK;
    w->ids.n = 0;
    mt_status st = tokenize_add(w->tools, text, n, &w->ids);
    bool ends = w->ids.n > 0 && w->ids.id[w->ids.n - 1] == w->end;
    if (st == MT_OK && w->end >= 0 && !ends)
        w->ids.id[w->ids.n++] = w->end; /* tokenize_add leaves room for it */
    if (st != MT_OK)
        return st;
    w->documents++;
    return put_ids(w);
}

/* ---- documents ------------------------------------------------------------------------------ */

static mt_status put_json(writer *w, const char *line, int64_t n)
{
    json_error_t error;
    json_t *root = mt_json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &error);
    const json_t *text = json_object_get(root, "text");
    mt_status st;
    if (!root)
        st = status_set(MT_ERR_FORMAT, "%s:%lld:%d: %s", w->options->name, (long long)w->line,
                        error.column, error.text);
    else if (!json_is_string(text))
        st = status_set(MT_ERR_FORMAT, "%s:%lld: expected an object with a string at 'text'",
                        w->options->name, (long long)w->line);
    else
        st = put_document(w, json_string_value(text), (int64_t)json_string_length(text));
    json_decref(root);
    return st;
}

static bool is_blank(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n'))
        p++;
    return p == end;
}

static const char *line_end(const char *p, const char *end)
{
    const char *newline = memchr(p, '\n', (size_t)(end - p));
    return newline ? newline + 1 : end;
}

static mt_status put_jsonl(writer *w, const char *p, const char *end)
{
    mt_status st = MT_OK;
    for (const char *next; p < end && st == MT_OK; p = next) {
        next = line_end(p, end);
        w->line++;
        if (!is_blank(p, next))
            st = put_json(w, p, next - p);
    }
    return st;
}

/* Documents are runs of lines that hold more than white space, as for the loader of text. */
static mt_status put_blank_line(writer *w, const char *p, const char *end)
{
    const char *start = NULL;
    mt_status st = MT_OK;
    for (const char *next; p < end && st == MT_OK; p = next) {
        next = line_end(p, end);
        if (!is_blank(p, next)) {
            start = start ? start : p;
        } else if (start) {
            st = put_document(w, start, p - start);
            start = NULL;
        }
    }
    return st == MT_OK && start ? put_document(w, start, end - start) : st;
}

static mt_status put_literal(writer *w, const char *p, const char *end)
{
    const char *separator = w->options->separator;
    size_t n = strlen(separator);
    mt_status st = MT_OK;
    while (p < end && st == MT_OK) {
        const char *hit = memmem(p, (size_t)(end - p), separator, n);
        st = put_document(w, p, (hit ? hit : end) - p);
        p = hit ? hit + n : end;
    }
    return st;
}

static mt_status put_documents(writer *w, const char *text, int64_t n)
{
    if (w->options->jsonl)
        return put_jsonl(w, text, text + n);
    if (strcmp(w->options->separator, "none") == 0)
        return put_document(w, text, n);
    if (strcmp(w->options->separator, "blank_line") == 0)
        return put_blank_line(w, text, text + n);
    return put_literal(w, text, text + n);
}

/* ---- the file ------------------------------------------------------------------------------- */

static mt_status put_header(writer *w)
{
    const int32_t header[HEADER] = { w->wide ? MAGIC_32 : MAGIC_16,
                                     w->wide ? VERSION_32 : VERSION_16, (int32_t)w->tokens };
    rewind(w->file);
    return fwrite(header, sizeof header, 1, w->file) == 1 ? MT_OK : failed(w, "write");
}

static mt_status write_file(writer *w, const char *text, int64_t n)
{
    mt_status st = put_header(w);
    if (st == MT_OK)
        st = put_documents(w, text, n);
    if (st == MT_OK && w->documents == 0)
        st = status_set(MT_ERR_INVALID, "%s: no text to write tokens of", w->options->name);
    if (st == MT_OK)
        st = put_header(w);
    if (st == MT_OK && (fflush(w->file) != 0 || fsync(fileno(w->file)) < 0))
        st = failed(w, "write");
    return st;
}

/* The token that tells documents apart. */
static mt_status find_end(writer *w)
{
    const tokenize_tools *t = w->tools;
    w->end = -1;
    if (!(t->flags & MT_ENCODE_ADD_SPECIAL))
        return MT_OK;
    w->end = t->iface->special(t->tokenizer, MT_SPECIAL_END);
    if (w->end < 0)
        return status_set(MT_ERR_INVALID,
                          "the tokenizer names no token that ends a document; name 'eos_token' in "
                          "a tokenizer_config.json beside it, or write bare text with "
                          "--no-special");
    return MT_OK;
}

mt_status tokenize_write_bin(const tokenize_tools *t, const tokenize_bin *o, const char *text,
                             int64_t n, int64_t *ret_documents, int64_t *ret_tokens)
{
    writer w = { .tools = t, .options = o };
    char *partial = NULL;
    w.wide = t->iface->vocab_size(t->tokenizer) > VOCAB_16;
    mt_status st = find_end(&w);
    if (st != MT_OK)
        return st;
    /* Another process may be writing the same. */
    if (asprintf(&partial, "%s.partial-%ld", o->path, (long)getpid()) < 0)
        return status_nomem("a path", strlen(o->path));
    leftover_keep(partial, NULL);
    unlink(partial);
    if (!(w.file = fopen(partial, "wbx")))
        st = failed(&w, "create it");
    if (st == MT_OK)
        st = write_file(&w, text, n);
    if (w.file && fclose(w.file) != 0 && st == MT_OK)
        st = failed(&w, "write");
    if (st == MT_OK && rename(partial, o->path) < 0)
        st = failed(&w, "rename the finished file to it");
    if (st != MT_OK && w.file)
        unlink(partial);
    if (st == MT_OK) {
        *ret_documents = w.documents;
        *ret_tokens = w.tokens;
    }
    leftover_forget();
    tokenize_free(&w.ids);
    free(w.narrow);
    free(partial);
    return st;
}
