/* SPDX-License-Identifier: Apache-2.0
 *
 * Building the table of samples in one pass over the documents.
 */
#include "samples.h"
#include "folder.h"

#include <unistd.h>

/* ---- the table ------------------------------------------------------------------------------ */

/* A table of up to so many samples is kept in memory; a larger one in a file, which is written as
 * many at a time. */
enum { MOST_IN_MEMORY = (256 << 20) / sizeof(sample) };

static mt_status table_error(const char *folder)
{
    int e = errno;
    return mt_fail(MT_ERR_IO,
                   "%s: no room for the table of samples: %s; choose another folder with "
                   "data.cache",
                   folder ? folder : "temporary files", strerror(e));
}

/* A table that is being made. */
typedef struct table {
    samples *samples;
    const char *folder; /* for the file behind a large one */
    int64_t held;       /* samples in memory: the last ones */
    int64_t capacity;
} table;

static mt_status open_file(table *t)
{
    mt_status status = t->folder ? folder_make(t->folder) : MT_OK;
    char *path = strdup("the table of samples in temporary files");
    if (!status && !path)
        status = mt_fail_nomem();
    int fd = status ? -1 : folder_scratch(t->folder);
    if (!status && fd < 0)
        status = table_error(t->folder);
    if (status)
        free(path);
    else
        t->samples->file =
            (doc_file){ .fd = fd, .path = path, .remedy = "choose another folder with data.cache" };
    return status;
}

/* Writes what is in memory behind what is in the file. */
static mt_status flush(table *t)
{
    doc_file *f = &t->samples->file;
    const char *from = (const char *)t->samples->items;
    size_t left = (size_t)t->held * sizeof(sample);
    mt_status status = f->path ? MT_OK : open_file(t);
    while (left > 0 && !status) {
        ssize_t put = pwrite(f->fd, from, left, (off_t)f->size);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return table_error(t->folder);
        from += put;
        left -= (size_t)put;
        f->size += (size_t)put;
    }
    t->held = 0;
    return status;
}

static mt_status make_room(table *t)
{
    enum { FIRST = 4096 };
    if (t->capacity == MOST_IN_MEMORY)
        return flush(t);
    int64_t capacity = t->capacity ? 2 * t->capacity : FIRST;
    sample *grown = realloc(t->samples->items, (size_t)capacity * sizeof *grown);
    if (!grown)
        return mt_fail_nomem();
    t->samples->items = grown;
    t->capacity = capacity;
    return MT_OK;
}

static mt_status put(table *t, const sample *s)
{
    mt_status status = t->held == t->capacity ? make_room(t) : MT_OK;
    if (status)
        return status;
    t->samples->items[t->held++] = *s;
    t->samples->n++;
    return MT_OK;
}

/* Nothing of a table that has a file stays in memory. */
static mt_status complete(table *t)
{
    if (!t->samples->file.path)
        return MT_OK;
    mt_status status = flush(t);
    free(t->samples->items);
    t->samples->items = NULL;
    return status;
}

mt_status samples_get(const samples *t, int64_t i, doc_window *w, sample *ret)
{
    size_t at = (size_t)i * sizeof *ret, n;
    const void *found;
    if (t->items) {
        *ret = t->items[i];
        return MT_OK;
    }
    if (!w)
        return doc_file_read(&t->file, at, sizeof *ret, ret);
    mt_status status = doc_window_at(w, at, at + sizeof *ret, &found, &n);
    if (!status)
        memcpy(ret, found, sizeof *ret);
    return status;
}

void samples_free(samples *t)
{
    free(t->items);
    doc_file_close(&t->file);
    *t = (samples){ 0 };
}

/* ---- cutting -------------------------------------------------------------------------------- */

typedef struct cutter {
    const source *source;
    int64_t inputs;
    doc_long policy; /* LONG_AUTO: by document, see policy_of */
    table *table;
    doc_window trained, offsets; /* of the plane's file, as far as it has them */
    doc_window tokens;
} cutter;

static int64_t count_bits(const uint8_t *bits, int64_t from, int64_t to)
{
    int64_t n = 0;
    for (; from < to && from % 64; from++)
        n += bits[from / 8] >> (from % 8) & 1;
    for (; from + 64 <= to; from += 64) {
        uint64_t word;
        memcpy(&word, bits + from / 8, sizeof word);
        n += __builtin_popcountll(word);
    }
    for (; from < to; from++)
        n += bits[from / 8] >> (from % 8) & 1;
    return n;
}

/* Number of trained tokens from token `from` up to `to`. */
static mt_status count_trained(cutter *c, const plane *p, int64_t from, int64_t to, int64_t *ret)
{
    *ret = 0;
    while (from < to) {
        const void *bits;
        size_t n;
        const int64_t first = from / 8 * 8; /* token of the first bit that is looked at */
        mt_status status = doc_window_at(&c->trained, p->trained + (size_t)first / 8,
                                         p->trained + (size_t)(to + 7) / 8, &bits, &n);
        if (status)
            return status;
        int64_t here = first + (int64_t)n * 8 < to ? first + (int64_t)n * 8 : to;
        *ret += count_bits(bits, from - first, here - first);
        from = here;
    }
    return MT_OK;
}

/* Adds the tokens from `from` up to `to`, which are at least two. */
static mt_status add(cutter *c, int64_t plane_index, int64_t from, int64_t to)
{
    samples *t = c->table->samples;
    const plane *p = &c->source->planes[plane_index];
    int64_t targets = to - from - 1;
    mt_status status = p->trained ? count_trained(c, p, from + 1, to, &targets) : MT_OK;
    if (status)
        return status;
    if (targets == 0) {
        t->empty++;
        return MT_OK;
    }
    const sample s = { .start = (uint64_t)plane_index << SAMPLE_PLANE_SHIFT | (uint64_t)from,
                       .n = (uint32_t)(to - from),
                       .targets = (uint32_t)targets };
    if ((status = put(c->table, &s)))
        return status;
    t->tokens += to - from - 1;
    t->targets += targets;
    t->most = to - from > t->most ? to - from : t->most;
    return MT_OK;
}

/* By the mark of the document's first token; token files hold text. */
static mt_status policy_of(cutter *c, const plane *p, int64_t from, doc_long *ret)
{
    int64_t text = 1;
    mt_status status = MT_OK;
    if (c->policy == LONG_AUTO && p->trained)
        status = count_trained(c, p, from, from + 1, &text);
    *ret = c->policy != LONG_AUTO ? c->policy : text ? LONG_SPLIT : LONG_TRUNCATE;
    return status;
}

static mt_status cut(cutter *c, int64_t plane_index, int64_t from, int64_t to)
{
    samples *t = c->table->samples;
    int64_t n = to - from;
    if (n < 2) /* a token file may begin with an end token */
        return MT_OK;
    t->longest = n > t->longest ? n : t->longest;
    if (n - 1 <= c->inputs)
        return add(c, plane_index, from, to);
    doc_long policy;
    mt_status status = policy_of(c, &c->source->planes[plane_index], from, &policy);
    if (status)
        return status;
    if (policy == LONG_DROP) {
        t->dropped++;
        return MT_OK;
    }
    t->cut++;
    if (policy == LONG_TRUNCATE)
        return add(c, plane_index, from, from + c->inputs + 1);
    for (int64_t at = from; at + 1 < to && !status; at += c->inputs)
        status = add(c, plane_index, at, at + c->inputs + 1 < to ? at + c->inputs + 1 : to);
    return status;
}

/* Whole blocks are searched without a branch a token, which compilers make vector code of; only the
 * one with the end token is looked at again. */
enum { SCAN_BLOCK = 64 };

#define DEFINE_SCAN(name, type)                                                                    \
    static bool name(const type *ids, uint32_t end, uint32_t *largest)                             \
    {                                                                                              \
        type most = 0, hit = 0;                                                                    \
        for (int i = 0; i < SCAN_BLOCK; i++) {                                                     \
            most = ids[i] > most ? ids[i] : most;                                                  \
            hit |= (type)(ids[i] == (type)end ? 1 : 0);                                            \
        }                                                                                          \
        *largest = most > *largest ? most : *largest;                                              \
        return hit && (type)end == end;                                                            \
    }
DEFINE_SCAN(scan_16, uint16_t)
DEFINE_SCAN(scan_32, uint32_t)

/* Looks for the end token among n tokens; how many stand up to it, with it, or n. */
static int64_t scan(const plane *p, const void *ids, int64_t n, bool *ret_found, uint32_t *largest)
{
    const uint16_t *narrow = ids;
    const uint32_t *wide = ids;
    uint32_t end = (uint32_t)p->end; /* none: no id is as large */
    int64_t i = 0;
    for (; i + SCAN_BLOCK <= n; i += SCAN_BLOCK)
        if (p->width == 2 ? scan_16(narrow + i, end, largest) : scan_32(wide + i, end, largest))
            break;
    while (i < n && !*ret_found) {
        uint32_t id = p->width == 2 ? narrow[i] : wide[i];
        i++;
        *largest = id > *largest ? id : *largest;
        *ret_found = id == end;
    }
    return i;
}

/* The end of the document that begins at token `at` of a token file, behind its end token; notes
 * the largest id on the way. */
static mt_status find_end(cutter *c, const plane *p, int64_t at, uint32_t *largest, int64_t *ret)
{
    const size_t width = (size_t)p->width;
    bool found = false;
    while (at < p->n && !found) {
        const void *ids;
        size_t bytes;
        mt_status status = doc_window_at(&c->tokens, p->tokens + (size_t)at * width,
                                         p->tokens + (size_t)p->n * width, &ids, &bytes);
        if (status)
            return status;
        at += scan(p, ids, (int64_t)(bytes / width), &found, largest);
    }
    *ret = at;
    return MT_OK;
}

static mt_status cut_token_file(cutter *c, int64_t plane_index)
{
    const plane *p = &c->source->planes[plane_index];
    samples *t = c->table->samples;
    mt_status status = doc_window_open(p->file, &c->tokens);
    doc_long policy = c->policy;
    uint32_t largest = 0;
    if (p->end < 0) /* one stream of windows, not one long document */
        c->policy = LONG_SPLIT;
    for (int64_t at = 0, end = 0; at < p->n && !status; at = end) {
        status = find_end(c, p, at, &largest, &end);
        if (!status)
            status = cut(c, plane_index, at, end);
    }
    if (largest >= t->vocab)
        t->vocab = (int64_t)largest + 1;
    if (!status && largest >= INT32_MAX)
        status = mt_fail(MT_ERR_FORMAT, "%s: holds ids above 2^31 - 1; is data.dtype right?",
                         p->file->path);
    c->policy = policy;
    return status;
}

/* Where document i begins, or behind the last one, where all of them end. */
static mt_status get_offset(cutter *c, const plane *p, int64_t i, int64_t *ret)
{
    const void *found;
    size_t at = p->offsets + (size_t)i * sizeof(uint64_t), n;
    mt_status status = doc_window_at(&c->offsets, at, at + sizeof(uint64_t), &found, &n);
    if (!status)
        memcpy(ret, found, sizeof *ret);
    return status;
}

static mt_status cut_cache(cutter *c, int64_t plane_index)
{
    const plane *p = &c->source->planes[plane_index];
    int64_t from = 0, to = 0;
    mt_status status = doc_window_open(p->file, &c->offsets);
    if (!status)
        status = doc_window_open(p->file, &c->trained);
    for (int64_t i = 0; i < p->documents && !status; i++, from = to) {
        status = get_offset(c, p, i + 1, &to);
        if (!status)
            status = cut(c, plane_index, from, to);
    }
    c->table->samples->vocab = c->source->cache.facts.vocab;
    return status;
}

mt_status samples_build(const source *s, int64_t inputs, doc_long policy, const char *folder,
                        samples *ret)
{
    samples t = { 0 };
    table made = { .samples = &t, .folder = folder };
    mt_status status = MT_OK;
    for (int64_t i = 0; i < s->n_planes && !status; i++) {
        cutter c = { .source = s, .inputs = inputs, .policy = policy, .table = &made };
        status = s->planes[i].offsets ? cut_cache(&c, i) : cut_token_file(&c, i);
        doc_window_close(&c.tokens);
        doc_window_close(&c.offsets);
        doc_window_close(&c.trained);
    }
    if (!status)
        status = complete(&made);
    if (status)
        samples_free(&t);
    else
        *ret = t;
    return status;
}
