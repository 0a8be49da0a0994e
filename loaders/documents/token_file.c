/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening token files.
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

/* Fills width, n and where tokens begin by the header, if there is one. */
static mt_status read_header(token_file *f, bool *ret_found)
{
    int32_t h[3] = { 0 };
    *ret_found = false;
    if (f->file.size < HEADER_BYTES)
        return MT_OK;
    mt_status status = doc_file_read(&f->file, 0, sizeof h, h);
    if (status)
        return status;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (h[0] != known[i].magic)
            continue;
        if (h[1] != known[i].version)
            return mt_fail(MT_ERR_UNSUPPORTED, "%s: version %d of a token file; expected %d",
                           f->file.path, h[1], known[i].version);
        uint64_t wanted = HEADER_BYTES + (uint64_t)(uint32_t)h[2] * (uint64_t)known[i].width;
        if (wanted != f->file.size)
            return mt_fail(MT_ERR_FORMAT,
                           "%s: %zu bytes, but its header says %u tokens, which are %llu; is the "
                           "file whole?",
                           f->file.path, f->file.size, (uint32_t)h[2], (unsigned long long)wanted);
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
                         f->file.path);
    f->width = (int32_t)mt_dtype_size(o->dtype);
    if (f->file.size % (size_t)f->width)
        return mt_fail(MT_ERR_FORMAT, "%s: %zu bytes are no whole number of %s", f->file.path,
                       f->file.size, o->dtype_name);
    f->n = (int64_t)(f->file.size / (size_t)f->width);
    return MT_OK;
}

mt_status token_file_open(const mt_config *config, const doc_options *o, const char *path,
                          token_file *ret)
{
    token_file f = { .file = { .path = strdup(path) } };
    struct stat st;
    if (!f.file.path)
        return mt_fail_nomem();
    f.file.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f.file.fd < 0 || fstat(f.file.fd, &st) < 0) {
        mt_status status = mt_fail(MT_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
        token_file_close(&f);
        return status;
    }
    f.file.size = (size_t)st.st_size;
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
    doc_file_close(&f->file);
}

mt_status token_file_hash(const token_file *t, uint64_t *ret)
{
    const doc_file *f = &t->file;
    const size_t whole = 256 << 20, size = 64 << 10, blocks = whole / size;
    mt_status status = MT_OK;
    uint64_t hash = f->size;
    if (f->size <= whole)
        return doc_file_hash(f, 0, ret);
    void *block = malloc(size);
    if (!block)
        return mt_fail_nomem();
    for (size_t i = 0; i < blocks && !status; i++) {
        if (!(status = doc_file_read(f, (f->size - size) / (blocks - 1) * i, size, block)))
            hash = XXH3_64bits_withSeed(block, size, hash);
    }
    free(block);
    if (!status)
        *ret = hash;
    return status;
}
