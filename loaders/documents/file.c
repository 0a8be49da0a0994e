/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading files, all of what is asked for or an error.
 */
#include "file.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

void doc_file_close(doc_file *f)
{
    if (f->path && f->fd >= 0)
        close(f->fd);
    free(f->path);
    *f = (doc_file){ .fd = -1 };
}

mt_status doc_file_changed(const doc_file *f, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return mt_fail(MT_ERR_IO, "%s: %s; %s", f->path, text,
                   f->remedy ? f->remedy
                             : "leave the data alone while it is trained on, and resume with what "
                               "it was");
}

mt_status doc_file_read(const doc_file *f, size_t at, size_t n, void *ret)
{
    char *p = ret;
    while (n > 0) {
        ssize_t got = pread(f->fd, p, n, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mt_fail(MT_ERR_IO, "%s: cannot read at byte %zu: %s%s%s", f->path, at,
                           strerror(errno), f->remedy ? "; " : "", f->remedy ? f->remedy : "");
        if (got == 0)
            return doc_file_changed(f, "has become shorter than the %zu bytes that it had",
                                    f->size);
        p += got;
        at += (size_t)got;
        n -= (size_t)got;
    }
    return MT_OK;
}

enum { BLOCK = 1 << 20 };

mt_status doc_file_hash(const doc_file *f, size_t from, uint64_t *ret)
{
    mt_status status = MT_OK;
    char *block = malloc(BLOCK);
    XXH3_state_t *state = XXH3_createState();
    if (!block || !state)
        status = mt_fail_nomem();
    else
        XXH3_64bits_reset(state);
    for (size_t at = from; at < f->size && !status; at += BLOCK) {
        size_t n = f->size - at < BLOCK ? f->size - at : BLOCK;
        if (!(status = doc_file_read(f, at, n, block)))
            XXH3_64bits_update(state, block, n);
    }
    if (!status)
        *ret = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    free(block);
    return status;
}

mt_status doc_window_open(const doc_file *f, doc_window *ret)
{
    char *data = malloc(BLOCK);
    if (!data)
        return mt_fail_nomem();
    *ret = (doc_window){ .file = f, .data = data };
    return MT_OK;
}

void doc_window_close(doc_window *w)
{
    free(w->data);
    *w = (doc_window){ 0 };
}

mt_status doc_window_at(doc_window *w, size_t at, size_t end, const void **ret, size_t *ret_n)
{
    if (at < w->first || at >= w->first + w->n) {
        size_t left = w->file->size - at, n = left < BLOCK ? left : BLOCK;
        w->n = 0;
        mt_status status = doc_file_read(w->file, at, n, w->data);
        if (status)
            return status;
        w->first = at;
        w->n = n;
    }
    size_t held = w->first + w->n - at;
    *ret = w->data + (at - w->first);
    *ret_n = held < end - at ? held : end - at;
    return MT_OK;
}
