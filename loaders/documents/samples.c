/* SPDX-License-Identifier: Apache-2.0
 *
 * Building the table of samples in one pass over the documents.
 */
#include "samples.h"
#include "folder.h"

#include <sys/mman.h>
#include <unistd.h>

/* A table of up to so many bytes is kept in memory; a larger one in a file, which the system may
 * write out. */
static const size_t most_memory = 256 << 20;

/* ---- the table ------------------------------------------------------------------------------ */

static mt_status table_error(const char *folder)
{
    int e = errno;
    return mt_fail(MT_ERR_IO,
                   "%s: no room for the table of samples: %s; choose another folder with "
                   "data.cache",
                   folder ? folder : "temporary files", strerror(e));
}

/* Moves a table that became large to a file. */
static mt_status move_to_file(samples *t, size_t bytes, const char *folder)
{
    mt_status status = folder ? folder_make(folder) : MT_OK;
    if (status)
        return status;
    int fd = folder_scratch(folder);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
        status = table_error(folder);
        if (fd >= 0)
            close(fd);
        return status;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        close(fd);
        return table_error(folder);
    }
    memcpy(base, t->items, (size_t)t->n * sizeof *t->items);
    munmap(t->items, (size_t)t->capacity * sizeof *t->items);
    t->items = base;
    t->fd = fd;
    return MT_OK;
}

static mt_status grow(samples *t, const char *folder)
{
    enum { FIRST = 4096 };
    int64_t capacity = t->capacity ? 2 * t->capacity : FIRST;
    size_t old = (size_t)t->capacity * sizeof *t->items, bytes = 2 * old;
    void *base;
    mt_status status = MT_OK;
    if (!t->items) {
        bytes = FIRST * sizeof *t->items;
        base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    } else if (t->fd < 0 && bytes > most_memory) {
        status = move_to_file(t, bytes, folder);
        base = t->items;
    } else {
        if (t->fd >= 0 && ftruncate(t->fd, (off_t)bytes) < 0)
            return table_error(folder);
        base = mremap(t->items, old, bytes, MREMAP_MAYMOVE);
    }
    if (status)
        return status;
    if (base == MAP_FAILED)
        return t->fd < 0 ? mt_fail_nomem() : table_error(folder);
    t->items = base;
    t->capacity = capacity;
    return MT_OK;
}

void samples_free(samples *t)
{
    if (t->items)
        munmap(t->items, (size_t)t->capacity * sizeof *t->items);
    if (t->items && t->fd >= 0)
        close(t->fd);
    *t = (samples){ .fd = -1 };
}

/* ---- cutting -------------------------------------------------------------------------------- */

typedef struct cutter {
    const source *source;
    int64_t inputs;
    doc_long policy; /* LONG_AUTO: by document, see policy_of */
    const char *folder;
    samples *table;
} cutter;

/* Adds the tokens from `from` up to `to`, which are at least two. */
static mt_status add(cutter *c, int64_t plane_index, int64_t from, int64_t to)
{
    samples *t = c->table;
    const plane *p = &c->source->planes[plane_index];
    int64_t targets = p->trained ? cache_count_trained(p->trained, from + 1, to) : to - from - 1;
    if (targets == 0) {
        t->empty++;
        return MT_OK;
    }
    if (t->n == t->capacity) {
        mt_status status = grow(t, c->folder);
        if (status)
            return status;
    }
    t->items[t->n++] =
        (sample){ .start = (uint64_t)plane_index << SAMPLE_PLANE_SHIFT | (uint64_t)from,
                  .n = (uint32_t)(to - from),
                  .targets = (uint32_t)targets };
    t->tokens += to - from - 1;
    t->targets += targets;
    return MT_OK;
}

/* By the mark of the document's first token; token files hold text. */
static doc_long policy_of(const cutter *c, int64_t plane_index, int64_t from)
{
    const uint8_t *trained = c->source->planes[plane_index].trained;
    if (c->policy != LONG_AUTO)
        return c->policy;
    return !trained || trained[from / 8] >> (from % 8) & 1 ? LONG_SPLIT : LONG_TRUNCATE;
}

static mt_status cut(cutter *c, int64_t plane_index, int64_t from, int64_t to)
{
    samples *t = c->table;
    int64_t n = to - from;
    if (n < 2) /* a token file may begin with an end token */
        return MT_OK;
    t->longest = n > t->longest ? n : t->longest;
    if (n - 1 <= c->inputs)
        return add(c, plane_index, from, to);
    doc_long policy = policy_of(c, plane_index, from);
    if (policy == LONG_DROP) {
        t->dropped++;
        return MT_OK;
    }
    t->cut++;
    if (policy == LONG_TRUNCATE)
        return add(c, plane_index, from, from + c->inputs + 1);
    mt_status status = MT_OK;
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

/* Part of a token file, in memory. */
typedef struct window {
    const plane *plane;
    void *data;       /* WINDOW tokens of 4 bytes */
    int64_t first, n; /* tokens that are there */
} window;

enum { WINDOW = 1 << 18 };

static uint32_t window_token(const window *w, int64_t i)
{
    return w->plane->width == 2 ? ((const uint16_t *)w->data)[i] : ((const uint32_t *)w->data)[i];
}

/* Makes the window hold token `at`. */
static mt_status window_move(window *w, int64_t at)
{
    int64_t left = w->plane->n - at, n = left < WINDOW ? left : WINDOW;
    if (at >= w->first && at < w->first + w->n)
        return MT_OK;
    mt_status status = token_file_read(w->plane->file, at, n, w->data);
    w->first = at;
    w->n = status ? 0 : n;
    return status;
}

/* Looks for the end token from `at` on; the place behind it, or the window's end. */
static int64_t window_scan(const window *w, int64_t at, bool *ret_found, uint32_t *largest)
{
    uint32_t end = (uint32_t)w->plane->end; /* none: no id is as large */
    int64_t i = at - w->first;
    for (; i + SCAN_BLOCK <= w->n; i += SCAN_BLOCK)
        if (w->plane->width == 2 ? scan_16((const uint16_t *)w->data + i, end, largest)
                                 : scan_32((const uint32_t *)w->data + i, end, largest))
            break;
    while (i < w->n && !*ret_found) {
        uint32_t id = window_token(w, i++);
        *largest = id > *largest ? id : *largest;
        *ret_found = id == end;
    }
    return w->first + i;
}

/* The end of the document that begins at token `at` of a token file, behind its end token; notes
 * the largest id on the way. */
static mt_status find_end(window *w, int64_t at, uint32_t *largest, int64_t *ret)
{
    bool found = false;
    while (at < w->plane->n && !found) {
        mt_status status = window_move(w, at);
        if (status)
            return status;
        at = window_scan(w, at, &found, largest);
    }
    *ret = at;
    return MT_OK;
}

static mt_status cut_token_file(cutter *c, int64_t plane_index)
{
    const plane *p = &c->source->planes[plane_index];
    window w = { .plane = p, .data = malloc(WINDOW * sizeof(uint32_t)) };
    mt_status status = w.data ? MT_OK : mt_fail_nomem();
    doc_long policy = c->policy;
    uint32_t largest = 0;
    if (p->end < 0) /* one stream of windows, not one long document */
        c->policy = LONG_SPLIT;
    for (int64_t at = 0, end = 0; at < p->n && !status; at = end) {
        status = find_end(&w, at, &largest, &end);
        if (!status)
            status = cut(c, plane_index, at, end);
    }
    if (largest >= c->table->vocab)
        c->table->vocab = (int64_t)largest + 1;
    if (!status && largest >= INT32_MAX)
        status = mt_fail(MT_ERR_FORMAT, "%s: holds ids above 2^31 - 1; is data.dtype right?",
                         p->file->path);
    c->policy = policy;
    free(w.data);
    return status;
}

static mt_status cut_cache(cutter *c, int64_t plane_index)
{
    const plane *p = &c->source->planes[plane_index];
    mt_status status = MT_OK;
    for (int64_t i = 0; i < p->documents && !status; i++)
        status = cut(c, plane_index, (int64_t)p->offsets[i], (int64_t)p->offsets[i + 1]);
    c->table->vocab = c->source->cache.facts.vocab;
    return status;
}

mt_status samples_build(const source *s, int64_t inputs, doc_long policy, const char *folder,
                        samples *ret)
{
    samples t = { .fd = -1 };
    cutter c = { s, inputs, policy, folder, &t };
    mt_status status = MT_OK;
    for (int64_t i = 0; i < s->n_planes && !status; i++)
        status = s->planes[i].file ? cut_token_file(&c, i) : cut_cache(&c, i);
    if (status)
        samples_free(&t);
    else
        *ret = t;
    return status;
}
