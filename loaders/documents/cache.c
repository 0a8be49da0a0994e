/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing, checking and opening token caches.
 */
#include "cache.h"
#include "folder.h"

#include <fcntl.h>
#include <unistd.h>

/* Raised whenever the same input would give other content. */
enum { CACHE_VERSION = 2 };
#define CACHE_MAGIC "MTTOKENS"

enum { PATH_SIZE = FOLDER_PATH, BUFFER = 1 << 20 };

typedef struct cache_header {
    char magic[8];
    uint32_t version, size; /* of the header */
    uint64_t key;
    cache_facts facts;
    uint64_t payload_hash; /* of all that follows the header */
    uint64_t header_hash;  /* of all that stands before it */
} cache_header;

/* Bytes of a file up to its parts and to its end. */
typedef struct layout {
    uint64_t trained, offsets, end;
} layout;

static layout lay_out(const cache_facts *f)
{
    layout l;
    l.trained = (sizeof(cache_header) + (uint64_t)f->tokens * (uint64_t)f->width + 7) / 8 * 8;
    l.offsets = l.trained + ((uint64_t)f->tokens + 63) / 64 * 8;
    l.end = l.offsets + ((uint64_t)f->documents + 1) * sizeof(uint64_t);
    return l;
}

static uint64_t hash_header(const cache_header *h)
{
    return XXH3_64bits(h, offsetof(cache_header, header_hash));
}

/* ---- reading -------------------------------------------------------------------------------- */

static bool cache_path(const char *folder, uint64_t key, char path[PATH_SIZE])
{
    return (size_t)snprintf(path, PATH_SIZE, "%s/%016llx.tokens", folder, (unsigned long long)key) <
           PATH_SIZE;
}

/* Takes the descriptor. `path` is "" for a file without a name. */
static mt_status set_file(int fd, size_t size, const char *path, cache *c)
{
    const char *name = *path ? path : "the token cache in temporary files";
    c->file = (doc_file){ .fd = fd,
                          .size = size,
                          .path = strdup(name),
                          .remedy = *path ? "remove it, and it is made anew"
                                          : "choose a folder for it with data.cache" };
    if (c->file.path)
        return MT_OK;
    if (fd >= 0)
        close(fd);
    return mt_fail_nomem();
}

static void set_facts(cache *c, const cache_facts *facts, uint64_t hash)
{
    const layout l = lay_out(facts);
    c->facts = *facts;
    c->hash = hash;
    c->tokens = sizeof(cache_header);
    c->trained = l.trained;
    c->offsets = l.offsets;
}

/* NULL when header and size agree with each other and with the key, else what is wrong. */
static const char *check_header(const cache_header *h, uint64_t size, uint64_t key)
{
    if (memcmp(h->magic, CACHE_MAGIC, sizeof h->magic) != 0 || h->header_hash != hash_header(h))
        return "its header is damaged";
    if (h->version != CACHE_VERSION || h->size != sizeof *h)
        return "it is of another version";
    if (h->key != key)
        return "it belongs to other data";
    if (h->facts.tokens < 0 || h->facts.documents < 0 || lay_out(&h->facts).end != size)
        return "it has not the size that its header says";
    return NULL;
}

/* The payload's hash, computed or remembered for this very file. */
static mt_status hash_payload(const char *folder, const cache *c, const struct stat *st,
                              uint64_t *ret)
{
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return mt_fail_nomem();
    XXH3_64bits_reset(state);
    folder_stamp(state, st);
    uint64_t stamp = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    bool settled = folder_settled(st);
    if (settled && folder_recall(folder, stamp, ret))
        return MT_OK;
    mt_status status = doc_file_hash(&c->file, sizeof(cache_header), ret);
    if (!status && settled)
        folder_remember(folder, stamp, *ret);
    return status;
}

/* Says what is wrong with the open file as a cache of `key`: NULL for nothing. */
static mt_status check_file(const char *folder, uint64_t key, cache *c, const char **ret_wrong)
{
    struct stat st;
    uint64_t hash = 0;
    cache_header h;
    if (fstat(c->file.fd, &st) < 0 || (uint64_t)st.st_size < sizeof h) {
        *ret_wrong = "it is cut";
        return MT_OK;
    }
    c->file.size = (size_t)st.st_size;
    mt_status status = doc_file_read(&c->file, 0, sizeof h, &h);
    if (status)
        return status;
    *ret_wrong = check_header(&h, c->file.size, key);
    if (*ret_wrong || (status = hash_payload(folder, c, &st, &hash)))
        return status;
    set_facts(c, &h.facts, h.payload_hash);
    *ret_wrong = hash == c->hash ? NULL : "its content is damaged";
    return MT_OK;
}

mt_status cache_open(const char *folder, uint64_t key, cache *ret)
{
    char path[PATH_SIZE];
    cache c = { 0 };
    const char *wrong = NULL;
    int fd = cache_path(folder, key, path) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return MT_ERR_NOT_FOUND;
    mt_status status = set_file(fd, 0, path, &c);
    if (!status)
        status = check_file(folder, key, &c, &wrong);
    if (!status && !wrong) {
        *ret = c;
        return MT_OK;
    }
    cache_close(&c);
    if (status)
        return status;
    mt_log(MT_LOG_WARNING, "%s: %s; made anew", path, wrong);
    unlink(path);
    return MT_ERR_NOT_FOUND;
}

void cache_close(cache *c)
{
    doc_file_close(&c->file);
    *c = (cache){ 0 };
}

/* ---- writing -------------------------------------------------------------------------------- */

/* The tokens go to the file itself, the two other parts to files of their own and behind the
 * tokens at the end: none of them is ever in memory as a whole. */
struct cache_writer {
    const char *folder;
    char path[PATH_SIZE], part[PATH_SIZE]; /* "": a file without a name */
    FILE *file, *trained, *offsets;
    XXH3_state_t *hash;
    uint64_t key;
    cache_facts facts;
    uint64_t bits; /* of the last, incomplete word */
    void *narrow;  /* [BUFFER] */
};

static FILE *open_scratch(const char *folder)
{
    int fd = folder_scratch(folder);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w+");
    if (!f && fd >= 0)
        close(fd);
    return f;
}

static FILE *open_part(cache_writer *w)
{
    snprintf(w->part, sizeof w->part, "%.*s.part", PATH_SIZE - 6, w->path);
    unlink(w->part); /* what a killed process left, or a link that would be written through */
    FILE *f = fopen(w->part, "w+xe");
    if (!f)
        w->part[0] = '\0';
    return f;
}

mt_status cache_create(const char *folder, uint64_t key, int32_t width, cache_writer **ret)
{
    mt_status status = MT_OK;
    cache_writer *w = calloc(1, sizeof *w);
    if (!w)
        return mt_fail_nomem();
    w->folder = folder;
    w->key = key;
    w->facts.width = width;
    w->hash = XXH3_createState();
    w->narrow = malloc(BUFFER);
    if (!w->hash || !w->narrow) {
        status = mt_fail_nomem();
        goto out;
    }
    XXH3_64bits_reset(w->hash);
    if (folder && !cache_path(folder, key, w->path)) {
        status = mt_fail(MT_ERR_INVALID, "data.cache: the path is too long: %.60s...", folder);
        goto out;
    }
    w->file = folder ? open_part(w) : open_scratch(NULL);
    w->trained = open_scratch(folder);
    w->offsets = open_scratch(folder);
    const cache_header empty = { .size = 0 };
    if (!w->file || !w->trained || !w->offsets || fwrite(&empty, sizeof empty, 1, w->file) != 1)
        status = folder_error(folder, "create");
out:
    if (status)
        cache_abort(w);
    else
        *ret = w;
    return status;
}

static mt_status put(cache_writer *w, const void *data, size_t n)
{
    XXH3_64bits_update(w->hash, data, n);
    return n == 0 || fwrite(data, n, 1, w->file) == 1 ? MT_OK : folder_error(w->folder, "write");
}

static mt_status put_tokens(cache_writer *w, const int32_t *ids, int64_t n)
{
    if (w->facts.width == 4)
        return put(w, ids, (size_t)n * sizeof *ids);
    enum { MOST = BUFFER / sizeof(uint16_t) };
    uint16_t *narrow = w->narrow;
    mt_status status = MT_OK;
    while (n > 0 && !status) {
        int64_t k = n < MOST ? n : MOST;
        for (int64_t i = 0; i < k; i++)
            narrow[i] = (uint16_t)ids[i];
        status = put(w, narrow, (size_t)k * sizeof *narrow);
        ids += k;
        n -= k;
    }
    return status;
}

static bool put_word(cache_writer *w)
{
    bool good = fwrite(&w->bits, sizeof w->bits, 1, w->trained) == 1;
    w->bits = 0;
    return good;
}

mt_status cache_append(cache_writer *w, const int32_t *ids, const uint8_t *trained, int64_t n)
{
    cache_facts *f = &w->facts;
    bool good = true;
    uint64_t start = (uint64_t)f->tokens;
    for (int64_t i = 0; i < n; i++) {
        f->vocab = ids[i] >= f->vocab ? (int64_t)ids[i] + 1 : f->vocab;
        f->trained += i > 0 && trained[i];
        w->bits |= (uint64_t)trained[i] << (f->tokens % 64);
        if (++f->tokens % 64 == 0)
            good &= put_word(w);
    }
    f->documents++;
    good &= fwrite(&start, sizeof start, 1, w->offsets) == 1;
    return good ? put_tokens(w, ids, n) : folder_error(w->folder, "write");
}

static mt_status put_file(cache_writer *w, FILE *from)
{
    mt_status status = MT_OK;
    if (fflush(from) != 0)
        return folder_error(w->folder, "write");
    rewind(from);
    size_t n;
    while (!status && (n = fread(w->narrow, 1, BUFFER, from)) > 0)
        status = put(w, w->narrow, n);
    return status || !ferror(from) ? status : folder_error(w->folder, "read back");
}

static mt_status put_parts(cache_writer *w)
{
    static const char zeros[8];
    const cache_facts *f = &w->facts;
    uint64_t end = (uint64_t)f->tokens;
    bool good = f->tokens % 64 == 0 || put_word(w);
    good &= fwrite(&end, sizeof end, 1, w->offsets) == 1;
    if (!good)
        return folder_error(w->folder, "write");
    uint64_t filled = sizeof(cache_header) + (uint64_t)f->tokens * (uint64_t)f->width;
    mt_status status = put(w, zeros, (size_t)(lay_out(f).trained - filled));
    if (!status)
        status = put_file(w, w->trained);
    return status ? status : put_file(w, w->offsets);
}

static mt_status put_header(cache_writer *w)
{
    cache_header h;
    memset(&h, 0, sizeof h); /* padding too: it is hashed */
    memcpy(h.magic, CACHE_MAGIC, sizeof h.magic);
    h.version = CACHE_VERSION;
    h.size = sizeof h;
    h.key = w->key;
    h.facts = w->facts;
    h.payload_hash = XXH3_64bits_digest(w->hash);
    h.header_hash = hash_header(&h);
    if (fseek(w->file, 0, SEEK_SET) != 0 || fwrite(&h, sizeof h, 1, w->file) != 1 ||
        fflush(w->file) != 0)
        return folder_error(w->folder, "write");
    return MT_OK;
}

mt_status cache_finish(cache_writer *w, const cache_facts *facts, cache *ret)
{
    cache c = { 0 };
    w->facts.skipped = facts->skipped;
    w->facts.untrained = facts->untrained;
    w->facts.format = facts->format;
    mt_status status = put_parts(w);
    if (!status)
        status = put_header(w);
    if (!status)
        status = set_file(fcntl(fileno(w->file), F_DUPFD_CLOEXEC, 0), lay_out(&w->facts).end,
                          w->path, &c);
    if (!status && c.file.fd < 0)
        status = folder_error(w->folder, "open");
    if (!status && w->part[0] && rename(w->part, w->path) < 0)
        status = folder_error(w->folder, "rename");
    if (status) {
        cache_close(&c);
    } else {
        w->part[0] = '\0';
        set_facts(&c, &w->facts, XXH3_64bits_digest(w->hash));
        *ret = c;
    }
    cache_abort(w);
    return status;
}

void cache_abort(cache_writer *w)
{
    if (!w)
        return;
    if (w->part[0])
        unlink(w->part);
    FILE *const files[] = { w->file, w->trained, w->offsets };
    for (int i = 0; i < 3; i++)
        if (files[i])
            fclose(files[i]);
    XXH3_freeState(w->hash);
    free(w->narrow);
    free(w);
}
