/* SPDX-License-Identifier: Apache-2.0
 *
 * From chosen files to documents in them. Files are read, not mapped: one that shrinks meanwhile is
 * then an error and no SIGBUS.
 */
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <megatrain/files.h>
#include <unistd.h>
#include <xxhash.h>

mt_status text_check_apart(const mt_config *config)
{
    mt_files train = { 0 }, held_out = { 0 };
    mt_status status = mt_files_choose(config, "files", &train);
    if (!status)
        status = mt_files_choose(config, "validation_files", &held_out);
    if (!status)
        status = mt_files_check_apart(config, &train, "files", &held_out, "validation_files");
    mt_files_finish(&train);
    mt_files_finish(&held_out);
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

static mt_status read_all(const text_file *f, int fd, int64_t at, int64_t n, uint8_t *ret)
{
    while (n > 0) {
        ssize_t got = pread(fd, ret, (size_t)n, at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mt_fail(MT_ERR_IO, "%s: cannot read at byte %lld: %s", f->path, (long long)at,
                           strerror(errno));
        if (got == 0)
            return mt_fail(MT_ERR_IO,
                           "%s: has become shorter than the %lld bytes that it had; leave the data "
                           "alone while it is trained on, and resume with what it was",
                           f->path, (long long)f->size);
        ret += got;
        at += got;
        n -= got;
    }
    return MT_OK;
}

static mt_status read_file(const text_file *f, int64_t at, int64_t n, uint8_t *ret)
{
    if (f->fd >= 0)
        return read_all(f, f->fd, at, n, ret);
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mt_fail(MT_ERR_IO, "%s: cannot open: %s; put it back, and resume", f->path,
                       strerror(errno));
    mt_status status = read_all(f, fd, at, n, ret);
    close(fd);
    return status;
}

mt_status text_corpus_read(const text_corpus *c, const text_doc *doc, int64_t start, int64_t n,
                           uint8_t *ret)
{
    return read_file(&c->files[doc->file], doc->start + start, n, ret);
}

/* ---- finding documents ---------------------------------------------------------------------- */

/* Documents are looked for in blocks of a file. */
enum { BLOCK = 1 << 20 };

/* A file whose documents are being found. */
typedef struct search {
    text_corpus *c;
    const text_file *file;
    int64_t inputs; /* most inputs of a piece */
    int64_t first;  /* byte at which text begins */
    uint8_t *block;
    int64_t room;
} search;

/* Of the file's bytes start .. end-1. */
static mt_status add_doc(const search *s, int64_t start, int64_t end)
{
    text_corpus *c = s->c;
    int64_t n = end - start;
    if (n < 2) {
        c->skipped += n;
        return MT_OK;
    }
    if (c->n_docs == c->cap_docs) {
        int64_t cap = c->cap_docs ? 2 * c->cap_docs : 64;
        text_doc *grown = realloc(c->docs, (size_t)cap * sizeof *grown);
        if (!grown)
            return mt_fail_nomem();
        c->docs = grown;
        c->cap_docs = cap;
    }
    c->docs[c->n_docs++] = (text_doc){ start, n, s->file - c->files, c->n_pieces };
    c->n_pieces += (n - 1 + s->inputs - 1) / s->inputs;
    return MT_OK;
}

/* Reads the block at byte `at`; `ret_n` gets how long it is. */
static mt_status read_block(const search *s, int64_t at, int64_t *ret_n)
{
    int64_t left = s->file->size - at;
    *ret_n = left < s->room ? left : s->room;
    return read_file(s->file, at, *ret_n, s->block);
}

/* Documents end where the literal text stands; it belongs to none. */
static mt_status split_literal(const search *s, const char *separator)
{
    const int64_t k = (int64_t)strlen(separator), size = s->file->size;
    mt_status status = MT_OK;
    int64_t start = s->first, n = 0;
    for (int64_t at = s->first; at < size && !status;) {
        int64_t done = 0;
        const uint8_t *hit;
        status = read_block(s, at, &n);
        while (!status &&
               (hit = memmem(s->block + done, (size_t)(n - done), separator, (size_t)k))) {
            int64_t place = hit - s->block;
            status = add_doc(s, start, at + place);
            done = place + k;
            start = at + done;
        }
        /* One may begin in this block and end in the next. */
        if (at + n == size)
            break;
        at += done > n - k + 1 ? done : n - k + 1;
    }
    return status ? status : add_doc(s, start, size);
}

static bool is_blank(const uint8_t *p, const uint8_t *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n'))
        p++;
    return p == end;
}

/* Documents are runs of lines that hold more than white space, line ends included. */
static mt_status split_blank_lines(const search *s)
{
    const int64_t size = s->file->size;
    mt_status status = MT_OK;
    int64_t start = -1, line = s->first, n = 0; /* of the document, -1: between two; of the line */
    bool blank = true;                          /* the line so far */
    for (int64_t at = s->first; at < size && !status; at += n) {
        status = read_block(s, at, &n);
        const uint8_t *end = s->block + n;
        for (const uint8_t *p = s->block, *next; p < end && !status; p = next) {
            const uint8_t *newline = memchr(p, '\n', (size_t)(end - p));
            next = newline ? newline + 1 : end;
            blank = blank && is_blank(p, next);
            if (!newline && at + n < size)
                break; /* the line goes on in the next block */
            if (!blank) {
                start = start < 0 ? line : start;
            } else if (start >= 0) {
                status = add_doc(s, start, line);
                start = -1;
            }
            line = at + (next - s->block);
            blank = true;
        }
    }
    return status || start < 0 ? status : add_doc(s, start, size);
}

/* Bytes of the mark of byte order that some editors write: 3 or none. */
static mt_status mark_bytes(const text_file *f, int64_t *ret)
{
    uint8_t head[3] = { 0 };
    mt_status status = f->size < 3 ? MT_OK : read_file(f, 0, sizeof head, head);
    *ret = memcmp(head, "\xef\xbb\xbf", sizeof head) == 0 ? (int64_t)sizeof head : 0;
    return status;
}

static mt_status find_docs(text_corpus *c, const text_file *file, const char *separator,
                           int64_t inputs)
{
    const int64_t longest = 2 * (int64_t)strlen(separator);
    search s = {
        .c = c, .file = file, .inputs = inputs, .room = longest > BLOCK ? longest : BLOCK
    };
    mt_status status = mark_bytes(file, &s.first);
    if (status)
        return status;
    if (strcmp(separator, "none") == 0)
        return add_doc(&s, s.first, file->size);
    if (!(s.block = malloc((size_t)s.room)))
        return mt_fail_nomem();
    status =
        strcmp(separator, "blank_line") == 0 ? split_blank_lines(&s) : split_literal(&s, separator);
    free(s.block);
    return status;
}

/* Descriptors are few: beyond these, files are opened when they are read. */
enum { MOST_OPEN = 256 };

static mt_status open_file(const mt_config *config, const char *key, const mt_file *s,
                           bool stay_open, text_file *ret)
{
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return config->reject(config, key, "'%s': cannot open: %s; make it readable", s->path,
                              strerror(errno));
    char *path = strdup(s->path);
    if (!path || !stay_open) {
        close(fd);
        fd = -1;
    }
    if (!path)
        return mt_fail_nomem();
    *ret = (text_file){ s->size, fd, path };
    return MT_OK;
}

mt_status text_corpus_open(const mt_config *config, const char *key, const char *separator,
                           int64_t inputs, text_corpus *ret)
{
    text_corpus c = { 0 };
    mt_files l = { 0 };
    mt_status status = mt_files_choose(config, key, &l);
    if (status)
        goto out;
    c.files = calloc((size_t)l.n + 1, sizeof *c.files);
    if (!c.files) {
        status = mt_fail_nomem();
        goto out;
    }
    for (int64_t i = 0; i < l.n && !status; i++) {
        if ((status = open_file(config, key, &l.items[i], i < MOST_OPEN, &c.files[i])))
            break;
        c.n_files++;
        status = find_docs(&c, &c.files[i], separator, inputs);
    }
    if (!status && c.n_docs == 0)
        status = config->reject(config, key,
                                "no document of at least two bytes in %lld file%s; expected text",
                                (long long)l.n, l.n == 1 ? "" : "s");
    if (!status && c.skipped)
        mt_log(MT_LOG_INFO, "%s: documents of a single byte, left out: %lld", key,
               (long long)c.skipped);
out:
    mt_files_finish(&l);
    if (status)
        text_corpus_close(&c);
    else
        *ret = c;
    return status;
}

void text_corpus_close(text_corpus *c)
{
    for (int64_t i = 0; i < c->n_files; i++) {
        if (c->files[i].fd >= 0)
            close(c->files[i].fd);
        free(c->files[i].path);
    }
    free(c->files);
    free(c->docs);
    *c = (text_corpus){ 0 };
}

/* ---- the hash -------------------------------------------------------------------------------- */

/* Of a larger file, so many bytes at so many evenly spaced places. */
enum { HASH_WHOLE = 256 << 20, HASH_PLACES = 256, HASH_BYTES = 1 << 20 };

static mt_status hash_whole(const text_file *f, uint8_t *block, XXH3_state_t *state, uint64_t *hash)
{
    mt_status status = MT_OK;
    XXH3_64bits_reset_withSeed(state, *hash);
    for (int64_t at = 0; at < f->size && !status; at += HASH_BYTES) {
        int64_t n = f->size - at < HASH_BYTES ? f->size - at : HASH_BYTES;
        if (!(status = read_file(f, at, n, block)))
            XXH3_64bits_update(state, block, (size_t)n);
    }
    *hash = XXH3_64bits_digest(state);
    return status;
}

static mt_status hash_places(const text_file *f, uint8_t *block, uint64_t *hash)
{
    mt_status status = MT_OK;
    for (int64_t k = 0; k < HASH_PLACES && !status; k++) {
        int64_t at = (f->size - HASH_BYTES) / (HASH_PLACES - 1) * k;
        if (!(status = read_file(f, at, HASH_BYTES, block)))
            *hash = XXH3_64bits_withSeed(block, HASH_BYTES, *hash);
    }
    return status;
}

uint64_t text_corpus_hash(const text_corpus *c)
{
    uint64_t hash = 0; /* each is the seed of the next */
    XXH3_state_t *state = XXH3_createState();
    uint8_t *block = malloc(HASH_BYTES);
    mt_status status = state && block ? MT_OK : mt_fail_nomem();
    for (int64_t i = 0; i < c->n_files && !status; i++) {
        const text_file *f = &c->files[i];
        hash = XXH3_64bits_withSeed(&f->size, sizeof f->size, hash);
        status = f->size <= HASH_WHOLE ? hash_whole(f, block, state, &hash)
                                       : hash_places(f, block, &hash);
    }
    free(block);
    XXH3_freeState(state);
    return status ? 0 : hash;
}
