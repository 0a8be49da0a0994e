/* SPDX-License-Identifier: Apache-2.0
 *
 * Cutting files into records. One buffer holds the present record and what was read beyond it; it
 * grows to the longest record.
 */
#include "reader.h"

#include <fcntl.h>
#include <strings.h>
#include <unistd.h>

enum { FIRST_BUFFER = 1 << 20 };

/* Text is a document as a whole; beyond this a separator is wanted rather than so much memory. */
static const int64_t longest_record = (int64_t)1 << 30;

/* How records are told apart. */
typedef enum cutting { CUT_LINES, CUT_ARRAY, CUT_WHOLE, CUT_BLANK_LINES, CUT_LITERAL } cutting;

/* Where in a JSON array the search for an element's end stands. */
typedef struct array_state {
    bool opened, closed; /* the array's own brackets */
    bool wants_comma;    /* after an element */
    bool wants_element;  /* after a comma */
    bool started, ended; /* an element; `ended` by its own bracket */
    int64_t depth;
    bool in_string, escaped;
} array_state;

struct reader {
    const mt_files *files;
    const char *separator;
    bool all_json;

    int64_t file; /* the present one */
    int fd;       /* -1: none is open */
    cutting cut;
    bool at_end; /* of the file: nothing is left to read */
    int64_t line;
    array_state array;
    int64_t bytes;

    char *buffer;
    size_t capacity;
    size_t at, end; /* unread part of the buffer */
    size_t scanned; /* bytes from `at` that were searched already */
};

/* What a search for the end of a record found; offsets from r->at. */
typedef struct found {
    bool yes;
    size_t start, n, next;
} found;

/* ---- files ---------------------------------------------------------------------------------- */

static bool ends_in(const char *path, const char *const *ends)
{
    size_t n = strlen(path);
    for (; *ends; ends++) {
        size_t m = strlen(*ends);
        if (n >= m && strcasecmp(path + n - m, *ends) == 0)
            return true;
    }
    return false;
}

file_kind reader_kind(const char *path)
{
    static const char *const json[] = { ".json", ".jsonl", ".ndjson", NULL };
    static const char *const tokens[] = { ".bin", NULL };
    static const char *const refused[] = { ".parquet", ".arrow", ".feather", ".csv", ".tsv",
                                           ".gz",      ".zst",   ".xz",      ".bz2", ".zip",
                                           ".tar",     ".npy",   ".idx",     NULL };
    if (ends_in(path, json))
        return FILE_JSON;
    if (ends_in(path, tokens))
        return FILE_TOKENS;
    return ends_in(path, refused) ? FILE_REFUSED : FILE_TEXT;
}

static const char *path_of(const reader *r)
{
    return r->files->items[r->file].path;
}

mt_status reader_open(const mt_files *files, const char *separator, bool all_json, reader **ret)
{
    reader *r = calloc(1, sizeof *r);
    if (!r || !(r->buffer = malloc(FIRST_BUFFER))) {
        free(r);
        return mt_fail_nomem();
    }
    r->capacity = FIRST_BUFFER;
    r->files = files;
    r->separator = separator;
    r->all_json = all_json;
    r->file = -1;
    r->fd = -1;
    *ret = r;
    return MT_OK;
}

void reader_close(reader *r)
{
    if (!r)
        return;
    if (r->fd >= 0)
        close(r->fd);
    free(r->buffer);
    free(r);
}

int64_t reader_bytes(const reader *r)
{
    return r->bytes;
}

/* Reads more of the present file behind what is unread. */
static mt_status read_more(reader *r)
{
    if (r->at > 0) {
        memmove(r->buffer, r->buffer + r->at, r->end - r->at);
        r->end -= r->at;
        r->at = 0;
    }
    if (r->end == r->capacity) {
        if ((int64_t)r->capacity > longest_record)
            return mt_fail(MT_ERR_FORMAT, "%s:%lld: a record of more than %s; %s", path_of(r),
                           (long long)r->line, doc_bytes(longest_record).s,
                           r->cut == CUT_LINES || r->cut == CUT_ARRAY
                               ? "is this really one record a line, or a JSON array of records?"
                               : "say with data.document_separator where documents end");
        char *grown = realloc(r->buffer, 2 * r->capacity);
        if (!grown)
            return mt_fail_nomem();
        r->buffer = grown;
        r->capacity *= 2;
    }
    ssize_t n;
    do
        n = read(r->fd, r->buffer + r->end, r->capacity - r->end);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return mt_fail(MT_ERR_IO, "%s: cannot read: %s", path_of(r), strerror(errno));
    r->end += (size_t)n;
    r->bytes += n;
    r->at_end = n == 0;
    return MT_OK;
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static bool is_blank(const char *p, const char *end)
{
    while (p < end && is_space(*p))
        p++;
    return p == end;
}

static found find_line(const reader *r, const char *p, size_t n)
{
    const char *newline = memchr(p + r->scanned, '\n', n - r->scanned);
    if (!newline)
        return (found){ r->at_end && n > 0, 0, n, n };
    size_t length = (size_t)(newline - p);
    return (found){ true, 0, length, length + 1 };
}

/* One step inside an element; true when `c` is the first byte after it. */
static bool past_element(array_state *a, char c)
{
    if (a->in_string) {
        a->in_string = a->escaped || c != '"';
        a->escaped = !a->escaped && c == '\\';
        return false;
    }
    if (a->ended || (a->depth == 0 && (c == ',' || c == ']')))
        return true;
    a->in_string = c == '"';
    a->depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    a->ended = a->depth == 0 && (c == '}' || c == ']');
    return false;
}

/* Steps between elements, from offset *i on; fails on what may not stand there. Stops at the first
 * byte of an element, or at n. */
static mt_status skip_between(reader *r, const char *p, size_t n, size_t *i)
{
    array_state *a = &r->array;
    for (; *i < n; ++*i) {
        char c = p[*i];
        if (is_space(c)) {
            r->line += c == '\n';
        } else if (a->closed) {
            return mt_fail(MT_ERR_FORMAT, "%s:%lld: text after the end of the array", path_of(r),
                           (long long)r->line);
        } else if (!a->opened) { /* known to be '[' */
            a->opened = true;
        } else if ((c == ']' && a->wants_element) || (c == ',' && !a->wants_comma)) {
            return mt_fail(MT_ERR_FORMAT,
                           "%s:%lld: expected an element of the array, found '%c'; remove the "
                           "comma too many, or put in what is missing",
                           path_of(r), (long long)r->line, c);
        } else if (c == ']') {
            a->closed = true;
        } else if (a->wants_comma && c != ',') {
            return mt_fail(MT_ERR_FORMAT,
                           "%s:%lld: expected ',' or ']' after an element of the array, found "
                           "'%c'",
                           path_of(r), (long long)r->line, c);
        } else if (a->wants_comma) {
            a->wants_comma = false;
            a->wants_element = true;
        } else {
            break;
        }
    }
    return MT_OK;
}

static mt_status find_element(reader *r, const char *p, size_t n, found *ret)
{
    array_state *a = &r->array;
    size_t i = r->scanned;
    if (!a->started) {
        mt_status status = skip_between(r, p, n, &i);
        if (status)
            return status;
        r->at += i; /* the element, when there is one, begins at r->at */
        p += i;
        n -= i;
        i = r->scanned = 0;
        a->started = n > 0;
    }
    while (i < n && !past_element(a, p[i]))
        i++;
    r->scanned = i;
    if (i < n) {
        a->started = a->ended = a->wants_element = false;
        a->wants_comma = true;
        *ret = (found){ true, 0, i, i };
    } else if (r->at_end && !a->closed) {
        return mt_fail(MT_ERR_FORMAT,
                       "%s:%lld: the file ends inside its array; expected ']' (is it whole?)",
                       path_of(r), (long long)r->line);
    }
    return MT_OK;
}

/* ---- text ----------------------------------------------------------------------------------- */

static found find_literal(const reader *r, const char *p, size_t n)
{
    size_t k = strlen(r->separator), from = r->scanned > k ? r->scanned - k : 0;
    const char *hit = n > from ? memmem(p + from, n - from, r->separator, k) : NULL;
    if (!hit)
        return (found){ r->at_end && n > 0, 0, n, n };
    size_t length = (size_t)(hit - p);
    return (found){ true, 0, length, length + k };
}

/* A run of lines that hold more than white space, line ends included. */
static found find_paragraph(const reader *r, const char *p, size_t n)
{
    size_t at = 0, start = 0;
    bool inside = false;
    while (at < n) {
        const char *newline = memchr(p + at, '\n', n - at);
        if (!newline && !r->at_end)
            return (found){ 0 };
        size_t next = newline ? (size_t)(newline - p) + 1 : n;
        bool blank = is_blank(p + at, p + next);
        if (blank && inside)
            return (found){ true, start, at - start, next };
        if (!blank && !inside)
            start = at;
        inside |= !blank;
        at = next;
    }
    return (found){ r->at_end && inside, start, n - start, n };
}

/* ---- records -------------------------------------------------------------------------------- */

/* Files that have the name of a text and are none. */
static mt_status check_kind(const reader *r)
{
    static const struct {
        const char *begin;
        size_t n;
        const char *kind, *remedy;
    } kinds[] = {
        { "\xff\xfe", 2, "UTF-16", "`iconv -f UTF-16 -t UTF-8` makes it so" },
        { "\xfe\xff", 2, "UTF-16", "`iconv -f UTF-16 -t UTF-8` makes it so" },
        { "\x1f\x8b", 2, "compressed by gzip", "unpack it" },
        { "\x28\xb5\x2f\xfd", 4, "compressed by zstd", "unpack it" },
        { "PK\x03\x04", 4, "a zip archive", "unpack it" },
        { "PAR1", 4, "a Parquet table", "convert it to JSON lines" },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (r->end >= kinds[i].n && memcmp(r->buffer, kinds[i].begin, kinds[i].n) == 0)
            return mt_fail(MT_ERR_UNSUPPORTED, "%s: is %s; expected text in UTF-8: %s", path_of(r),
                           kinds[i].kind, kinds[i].remedy);
    return MT_OK;
}

/* Begins to read a file, past the mark of byte order that some editors write. */
static mt_status skip_mark(reader *r)
{
    static const char mark[] = "\xef\xbb\xbf";
    mt_status status = read_more(r);
    if (!status)
        status = check_kind(r);
    if (r->end >= 3 && memcmp(r->buffer, mark, 3) == 0)
        r->at = 3;
    return status;
}

/* Opens the next file and finds out how its records are told apart. */
static mt_status next_file(reader *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
    if (++r->file >= r->files->n)
        return MT_END;
    r->fd = open(path_of(r), O_RDONLY | O_CLOEXEC);
    if (r->fd < 0)
        return mt_fail(MT_ERR_IO, "%s: cannot open: %s", path_of(r), strerror(errno));
    (void)posix_fadvise(r->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    r->at = r->end = r->scanned = 0;
    r->at_end = false;
    r->line = 1;
    r->array = (array_state){ 0 };
    if (!r->all_json && reader_kind(path_of(r)) != FILE_JSON) {
        r->cut = strcmp(r->separator, "none") == 0         ? CUT_WHOLE
                 : strcmp(r->separator, "blank_line") == 0 ? CUT_BLANK_LINES
                                                           : CUT_LITERAL;
        return skip_mark(r);
    }
    mt_status status = skip_mark(r);
    size_t i = r->at;
    while (!status) {
        while (i < r->end && is_space(r->buffer[i]))
            i++;
        if (i < r->end || r->at_end)
            break;
        i -= r->at; /* what is unread moves to the start */
        status = read_more(r);
    }
    r->cut = i < r->end && r->buffer[i] == '[' ? CUT_ARRAY : CUT_LINES;
    return status;
}

static mt_status find(reader *r, found *ret)
{
    const char *p = r->buffer + r->at;
    size_t n = r->end - r->at;
    switch (r->cut) {
    case CUT_ARRAY:
        return find_element(r, p, n, ret);
    case CUT_LINES:
        *ret = find_line(r, p, n);
        break;
    case CUT_WHOLE:
        *ret = (found){ r->at_end && n > 0, 0, n, n };
        break;
    case CUT_BLANK_LINES:
        *ret = find_paragraph(r, p, n);
        break;
    case CUT_LITERAL:
        *ret = find_literal(r, p, n);
        break;
    }
    if (!ret->yes)
        r->scanned = n;
    return MT_OK;
}

static int64_t count_lines(const char *p, size_t n)
{
    int64_t lines = 0;
    const char *end = p + n;
    while ((p = memchr(p, '\n', (size_t)(end - p)))) {
        lines++;
        p++;
    }
    return lines;
}

/* Takes what was found out of the buffer; false when there is nothing in it. */
static bool take(reader *r, const found *f, raw_record *ret)
{
    const char *p = r->buffer + r->at;
    *ret = (raw_record){ .text = p + f->start,
                         .n = (int64_t)f->n,
                         .file = r->file,
                         .line = r->line + count_lines(p, f->start),
                         .json = r->cut == CUT_LINES || r->cut == CUT_ARRAY };
    r->line += count_lines(p, f->next);
    r->at += f->next;
    r->scanned = 0;
    return f->n > 0 && !(r->cut == CUT_LINES && is_blank(ret->text, ret->text + ret->n));
}

mt_status reader_next(reader *r, raw_record *ret)
{
    mt_status status = r->fd < 0 ? next_file(r) : MT_OK;
    while (!status) {
        found f = { 0 };
        status = find(r, &f);
        if (!status && f.yes && take(r, &f, ret))
            return MT_OK;
        if (!status && !f.yes)
            status = r->at_end ? next_file(r) : read_more(r);
    }
    return status;
}
