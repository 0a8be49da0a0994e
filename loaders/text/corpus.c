/* SPDX-License-Identifier: Apache-2.0
 *
 * From file names and patterns to mapped files, and from files to documents.
 */
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file that was chosen; device and inode tell whether two names mean the same one. */
typedef struct source {
    char *path;
    dev_t dev;
    ino_t ino;
    int64_t size;
} source;

typedef struct source_list {
    source *items;
    int64_t n, cap;
} source_list;

/* ---- choosing files ------------------------------------------------------------------------- */

static bool has_same(const source_list *l, dev_t dev, ino_t ino)
{
    for (int64_t i = 0; i < l->n; i++)
        if (l->items[i].dev == dev && l->items[i].ino == ino)
            return true;
    return false;
}

static void free_sources(source_list *l)
{
    for (int64_t i = 0; i < l->n; i++)
        free(l->items[i].path);
    free(l->items);
}

/* Appends one file. Named outright, it must be a file with text; found by a pattern, folders and
 * empty files are passed over. */
static mt_status add_file(const mt_config *c, const char *key, const char *path, bool by_pattern,
                          source_list *l)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return c->reject(c, key, "'%s': cannot open: %s; expected a text file or a pattern", path,
                         strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        if (by_pattern)
            return MT_OK;
        return c->reject(c, key,
                         "'%s' is a folder; name files, or use a pattern such as '%s/*.txt'", path,
                         path);
    }
    if (!S_ISREG(st.st_mode))
        return c->reject(c, key, "'%s' is not a regular file; expected a text file", path);
    if (st.st_size == 0) {
        if (!by_pattern)
            return c->reject(c, key, "'%s' is empty; expected a file with text", path);
        text_log(MT_LOG_WARNING, "%s: empty, left out", path);
        return MT_OK;
    }
    if (has_same(l, st.st_dev, st.st_ino))
        return c->reject(c, key, "'%s' is named more than once; remove one of the two", path);
    if (l->n == l->cap) {
        int64_t cap = l->cap ? 2 * l->cap : 16;
        source *grown = realloc(l->items, (size_t)cap * sizeof *grown);
        if (!grown)
            return text_nomem();
        l->items = grown;
        l->cap = cap;
    }
    source *s = &l->items[l->n];
    *s = (source){ strdup(path), st.st_dev, st.st_ino, st.st_size };
    if (!s->path)
        return text_nomem();
    l->n++;
    return MT_OK;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A name that stands for itself if there is such a file, a pattern otherwise. Matches are sorted by
 * their bytes, so that the order does not depend on the locale. */
static mt_status add_pattern(const mt_config *c, const char *key, const char *text, source_list *l)
{
    struct stat st;
    if (stat(text, &st) == 0 || !strpbrk(text, "*?["))
        return add_file(c, key, text, false, l);
    glob_t found;
    int rc = glob(text, GLOB_NOSORT, NULL, &found);
    if (rc == GLOB_NOSPACE)
        return text_nomem();
    if (rc != 0)
        return c->reject(c, key, "the pattern '%s' matches no file that can be read", text);
    qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, by_text);
    int64_t before = l->n;
    mt_status status = MT_OK;
    for (size_t i = 0; i < found.gl_pathc && !status; i++)
        status = add_file(c, key, found.gl_pathv[i], true, l);
    globfree(&found);
    if (!status && l->n == before)
        status = c->reject(c, key, "the pattern '%s' matches no file with text", text);
    return status;
}

static mt_status choose_files(const mt_config *c, const char *key, source_list *l)
{
    mt_status status = MT_OK;
    const char *text;
    int64_t n = c->has(c, key) ? c->length(c, key) : 0;
    if (n == 0) {
        if ((status = c->get_string(c, key, &text)))
            return status;
        return add_pattern(c, key, text, l);
    }
    for (int64_t i = 0; i < n && !status; i++) {
        char item[96];
        snprintf(item, sizeof item, "%s.%lld", key, (long long)i);
        if (!(status = c->get_string(c, item, &text)))
            status = add_pattern(c, item, text, l);
    }
    return status;
}

mt_status text_check_apart(const mt_config *config, const char *train_key, const char *key)
{
    source_list train = { 0 }, other = { 0 };
    mt_status status = choose_files(config, train_key, &train);
    if (!status)
        status = choose_files(config, key, &other);
    for (int64_t i = 0; i < other.n && !status; i++)
        if (has_same(&train, other.items[i].dev, other.items[i].ino))
            status =
                config->reject(config, key, "'%s' is among '%s' too; name it in one of the two",
                               other.items[i].path, train_key);
    free_sources(&train);
    free_sources(&other);
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
            return text_nomem();
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

/* Descriptors are few: beyond these, files are trusted to stay as they are. */
enum { MOST_OPEN = 256 };

static mt_status map_file(const mt_config *config, const char *key, const source *s, bool stay_open,
                          text_map *ret)
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
        return text_fail(MT_ERR_IO, "%s: cannot map %lld bytes: %s", s->path, (long long)s->size,
                         strerror(e));
    if (!path) {
        munmap(base, (size_t)s->size);
        return text_nomem();
    }
    *ret = (text_map){ base, (size_t)s->size, fd, path };
    return MT_OK;
}

mt_status text_corpus_open(const mt_config *config, const char *key, const char *separator,
                           int64_t inputs, text_corpus *ret)
{
    text_corpus c = { 0 };
    source_list l = { 0 };
    mt_status status = choose_files(config, key, &l);
    if (status)
        goto out;
    c.maps = calloc((size_t)l.n + 1, sizeof *c.maps);
    if (!c.maps) {
        status = text_nomem();
        goto out;
    }
    for (int64_t i = 0; i < l.n && !status; i++) {
        if ((status = map_file(config, key, &l.items[i], i < MOST_OPEN, &c.maps[i])))
            break;
        c.n_maps++;
        const uint8_t *bytes = c.maps[i].base;
        int64_t n = l.items[i].size;
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
        text_log(MT_LOG_INFO, "%s: documents of a single byte, left out: %lld", key,
                 (long long)c.skipped);
out:
    free_sources(&l);
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

mt_status text_corpus_check(const text_corpus *c, const text_doc *doc)
{
    const text_map *m = &c->maps[doc->map];
    struct stat st;
    if (m->fd < 0 || (fstat(m->fd, &st) == 0 && st.st_size >= (int64_t)m->size))
        return MT_OK;
    return text_fail(MT_ERR_IO,
                     "%s: has become shorter than the %zu bytes that it had; leave the data alone "
                     "while it is trained on, and resume with what it was",
                     m->path, m->size);
}
