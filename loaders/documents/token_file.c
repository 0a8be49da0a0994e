/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and reading token files. They are read, not mapped: a file that shrinks meanwhile is then
 * an error and no SIGBUS.
 */
#include "token_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

/* llm.c's header: 256 numbers of 32 bits, of which three mean something: what it is, its version,
 * and how many tokens follow. */
enum { HEADER_NUMBERS = 256, HEADER_BYTES = HEADER_NUMBERS * 4 };
static const struct {
    int32_t magic, version, width;
} known[] = { { 20240520, 1, 2 }, { 20240801, 7, 4 } };

static mt_status read_bytes(const token_file *f, size_t at, size_t n, void *ret)
{
    char *p = ret;
    while (n > 0) {
        ssize_t got = pread(f->fd, p, n, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mt_fail(MT_ERR_IO, "%s: cannot read at byte %zu: %s", f->path, at,
                           strerror(errno));
        if (got == 0)
            return mt_fail(MT_ERR_IO,
                           "%s: has become shorter than the %zu bytes that it had; leave the data "
                           "alone while it is trained on, and resume with what it was",
                           f->path, f->size);
        p += got;
        at += (size_t)got;
        n -= (size_t)got;
    }
    return MT_OK;
}

/* Fills width, n and where tokens begin by the header, if there is one. */
static mt_status read_header(token_file *f, bool *ret_found)
{
    int32_t h[3] = { 0 };
    *ret_found = false;
    if (f->size < HEADER_BYTES)
        return MT_OK;
    mt_status status = read_bytes(f, 0, sizeof h, h);
    if (status)
        return status;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (h[0] != known[i].magic)
            continue;
        if (h[1] != known[i].version)
            return mt_fail(MT_ERR_UNSUPPORTED, "%s: version %d of a token file; expected %d",
                           f->path, h[1], known[i].version);
        uint64_t wanted = HEADER_BYTES + (uint64_t)(uint32_t)h[2] * (uint64_t)known[i].width;
        if (wanted != f->size)
            return mt_fail(MT_ERR_FORMAT,
                           "%s: %zu bytes, but its header says %u tokens, which are %llu; is the "
                           "file whole?",
                           f->path, f->size, (uint32_t)h[2], (unsigned long long)wanted);
        f->width = known[i].width;
        f->n = (uint32_t)h[2];
        f->first = HEADER_BYTES;
        *ret_found = true;
    }
    return MT_OK;
}

/* Of a file without a header the manifest says what it holds. */
static mt_status read_bare(const mt_config *c, const doc_options *o, token_file *f)
{
    if (!o->dtype_name)
        return c->reject(c, "dtype",
                         "is missing: '%s' has no header that says how wide its tokens are; "
                         "expected uint16 (nanoGPT's) or uint32",
                         f->path);
    f->width = (int32_t)mt_dtype_size(o->dtype);
    if (f->size % (size_t)f->width)
        return mt_fail(MT_ERR_FORMAT, "%s: %zu bytes are no whole number of %s", f->path, f->size,
                       o->dtype_name);
    f->n = (int64_t)(f->size / (size_t)f->width);
    return MT_OK;
}

mt_status token_file_open(const mt_config *config, const doc_options *o, const char *path,
                          token_file *ret)
{
    token_file f = { .path = strdup(path), .fd = open(path, O_RDONLY | O_CLOEXEC) };
    struct stat st;
    if (!f.path) {
        token_file_close(&f);
        return mt_fail_nomem();
    }
    if (f.fd < 0 || fstat(f.fd, &st) < 0) {
        mt_status status = mt_fail(MT_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
        token_file_close(&f);
        return status;
    }
    f.size = (size_t)st.st_size;
    bool found = false;
    mt_status status = read_header(&f, &found);
    if (!status && !found)
        status = read_bare(config, o, &f);
    if (status)
        token_file_close(&f);
    else
        *ret = f;
    return status;
}

void token_file_close(token_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
    *f = (token_file){ .fd = -1 };
}

mt_status token_file_read(const token_file *f, int64_t first, int64_t n, void *ret)
{
    size_t width = (size_t)f->width;
    return read_bytes(f, f->first + (size_t)first * width, (size_t)n * width, ret);
}

/* All of a file, block by block. */
static mt_status hash_whole(const token_file *f, void *block, size_t size, uint64_t *ret)
{
    mt_status status = MT_OK;
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return mt_fail_nomem();
    XXH3_64bits_reset(state);
    for (size_t at = 0; at < f->size && !status; at += size) {
        size_t n = f->size - at < size ? f->size - at : size;
        if (!(status = read_bytes(f, at, n, block)))
            XXH3_64bits_update(state, block, n);
    }
    *ret = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return status;
}

mt_status token_file_hash(const token_file *f, uint64_t *ret)
{
    const size_t whole = 256 << 20, size = 64 << 10, blocks = whole / size;
    mt_status status = MT_OK;
    uint64_t hash = f->size;
    void *block = malloc(size);
    if (!block)
        return mt_fail_nomem();
    if (f->size <= whole)
        status = hash_whole(f, block, size, &hash);
    for (size_t i = 0; f->size > whole && i < blocks && !status; i++) {
        if (!(status = read_bytes(f, (f->size - size) / (blocks - 1) * i, size, block)))
            hash = XXH3_64bits_withSeed(block, size, hash);
    }
    free(block);
    if (!status)
        *ret = hash;
    return status;
}
