/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and checking token files.
 */
#include "token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

/* llm.c's header: 256 numbers of 32 bits, of which three mean something: what it is, its version,
 * and how many tokens follow. */
enum { HEADER_NUMBERS = 256, HEADER_BYTES = HEADER_NUMBERS * 4 };
static const struct {
    int32_t magic, version, width;
} known[] = { { 20240520, 1, 2 }, { 20240801, 7, 4 } };

/* Fills width, n and tokens by the header, if there is one. */
static mt_status read_header(token_file *f, bool *ret_found)
{
    int32_t h[3] = { 0 };
    *ret_found = false;
    if (f->size < HEADER_BYTES)
        return MT_OK;
    memcpy(h, f->base, sizeof h);
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
        f->tokens = (const char *)f->base + HEADER_BYTES;
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
    f->tokens = f->base;
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
    f.base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, f.fd, 0);
    if (f.base == MAP_FAILED) {
        f.base = NULL;
        mt_status status = mt_fail(MT_ERR_IO, "%s: cannot map: %s", path, strerror(errno));
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
    if (f->base)
        munmap(f->base, f->size);
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
    *f = (token_file){ .fd = -1 };
}

uint64_t token_file_hash(const token_file *f)
{
    const size_t whole = 256 << 20, block = 64 << 10, blocks = whole / block;
    if (f->size <= whole)
        return XXH3_64bits(f->base, f->size);
    uint64_t hash = f->size;
    for (size_t i = 0; i < blocks; i++) {
        size_t at = (f->size - block) / (blocks - 1) * i;
        hash = XXH3_64bits_withSeed((const char *)f->base + at, block, hash);
    }
    return hash;
}

mt_status token_file_check(const token_file *f)
{
    struct stat st;
    if (fstat(f->fd, &st) == 0 && st.st_size >= (int64_t)f->size)
        return MT_OK;
    return mt_fail(MT_ERR_IO,
                   "%s: has become shorter than the %zu bytes that it had; leave the data alone "
                   "while it is trained on, and resume with what it was",
                   f->path, f->size);
}
