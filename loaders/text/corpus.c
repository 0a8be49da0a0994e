/* SPDX-License-Identifier: Apache-2.0
 *
 * From chosen files to mapped ones, and from those to documents.
 */
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <megatrain/files.h>
#include <sys/mman.h>
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

/* ---- finding documents ---------------------------------------------------------------------- */

static mt_status add_doc(text_corpus *c, const uint8_t *bytes, int64_t n, int64_t inputs)
{
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
    c->docs[c->n_docs++] = (text_doc){ bytes, n, c->n_maps - 1, c->n_pieces };
    c->n_pieces += (n - 1 + inputs - 1) / inputs;
    return MT_OK;
}

/* Documents end where the literal text stands; it belongs to none. */
static mt_status split_literal(text_corpus *c, const uint8_t *p, int64_t n, const char *separator,
                               int64_t inputs)
{
    size_t k = strlen(separator);
    const uint8_t *end = p + n;
    mt_status status = MT_OK;
    while (p < end && !status) {
        const uint8_t *hit = memmem(p, (size_t)(end - p), separator, k);
        const uint8_t *stop = hit ? hit : end;
        status = add_doc(c, p, stop - p, inputs);
        p = hit ? hit + k : end;
    }
    return status;
}

static bool is_blank(const uint8_t *p, const uint8_t *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n'))
        p++;
    return p == end;
}

/* Documents are runs of lines that hold more than white space, line ends included. */
static mt_status split_blank_lines(text_corpus *c, const uint8_t *p, int64_t n, int64_t inputs)
{
    const uint8_t *end = p + n, *start = NULL;
    mt_status status = MT_OK;
    while (p < end && !status) {
        const uint8_t *newline = memchr(p, '\n', (size_t)(end - p));
        const uint8_t *next = newline ? newline + 1 : end;
        if (!is_blank(p, next)) {
            start = start ? start : p;
        } else if (start) {
            status = add_doc(c, start, p - start, inputs);
            start = NULL;
        }
        p = next;
    }
    return status || !start ? status : add_doc(c, start, end - start, inputs);
}

/* Bytes of the mark of byte order that some editors write: 3 or none. */
static int64_t mark_bytes(const uint8_t *p, int64_t n)
{
    return n >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

/* Descriptors are few: beyond these, files are trusted to stay as they are. */
enum { MOST_OPEN = 256 };

static mt_status map_file(const mt_config *config, const char *key, const mt_file *s,
                          bool stay_open, text_map *ret)
{
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return config->reject(config, key, "'%s': cannot open: %s; make it readable", s->path,
                              strerror(errno));
    void *base = mmap(NULL, (size_t)s->size, PROT_READ, MAP_PRIVATE, fd, 0);
    int e = errno;
    char *path = base == MAP_FAILED ? NULL : strdup(s->path);
    if (!path || !stay_open) {
        close(fd);
        fd = -1;
    }
    if (base == MAP_FAILED)
        return mt_fail(MT_ERR_IO, "%s: cannot map %lld bytes: %s", s->path, (long long)s->size,
                       strerror(e));
    if (!path) {
        munmap(base, (size_t)s->size);
        return mt_fail_nomem();
    }
    *ret = (text_map){ base, (size_t)s->size, fd, path };
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
    c.maps = calloc((size_t)l.n + 1, sizeof *c.maps);
    if (!c.maps) {
        status = mt_fail_nomem();
        goto out;
    }
    for (int64_t i = 0; i < l.n && !status; i++) {
        if ((status = map_file(config, key, &l.items[i], i < MOST_OPEN, &c.maps[i])))
            break;
        c.n_maps++;
        const uint8_t *bytes = c.maps[i].base;
        int64_t mark = mark_bytes(bytes, l.items[i].size), n = l.items[i].size - mark;
        bytes += mark;
        if (strcmp(separator, "none") == 0)
            status = add_doc(&c, bytes, n, inputs);
        else if (strcmp(separator, "blank_line") == 0)
            status = split_blank_lines(&c, bytes, n, inputs);
        else
            status = split_literal(&c, bytes, n, separator, inputs);
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
    for (int64_t i = 0; i < c->n_maps; i++) {
        munmap(c->maps[i].base, c->maps[i].size);
        if (c->maps[i].fd >= 0)
            close(c->maps[i].fd);
        free(c->maps[i].path);
    }
    free(c->maps);
    free(c->docs);
    *c = (text_corpus){ 0 };
}

/* Of a larger file, so many bytes at so many evenly spaced places. */
enum { HASH_WHOLE = 256 << 20, HASH_PLACES = 256, HASH_BYTES = 1 << 20 };

uint64_t text_corpus_hash(const text_corpus *c)
{
    uint64_t hash = 0; /* each is the seed of the next */
    for (int64_t i = 0; i < c->n_maps; i++) {
        const text_map *m = &c->maps[i];
        const char *bytes = m->base;
        hash = XXH3_64bits_withSeed(&m->size, sizeof m->size, hash);
        if (m->size <= HASH_WHOLE) {
            hash = XXH3_64bits_withSeed(bytes, m->size, hash);
            continue;
        }
        for (size_t k = 0; k < HASH_PLACES; k++)
            hash = XXH3_64bits_withSeed(bytes + (m->size - HASH_BYTES) / (HASH_PLACES - 1) * k,
                                        HASH_BYTES, hash);
    }
    return hash;
}

mt_status text_corpus_check(const text_corpus *c, const text_doc *doc)
{
    const text_map *m = &c->maps[doc->map];
    struct stat st;
    if (m->fd < 0 || (fstat(m->fd, &st) == 0 && st.st_size >= (int64_t)m->size))
        return MT_OK;
    return mt_fail(MT_ERR_IO,
                   "%s: has become shorter than the %zu bytes that it had; leave the data alone "
                   "while it is trained on, and resume with what it was",
                   m->path, m->size);
}
