/* SPDX-License-Identifier: Apache-2.0
 *
 * The documents plugin: its entry, its table, and the few helpers that all its files use.
 */
#include "documents.h"
#include "stream.h"

#include <megatrain/plugin.h>

static const mt_data documents_data = {
    .struct_size = sizeof(mt_data),
    .open = stream_open,
    .close = stream_close,
    .size = stream_size,
    .next = stream_next,
    .tell = stream_tell,
    .seek = stream_seek,
    .vocab_size = stream_vocab_size,
    .fingerprint = stream_fingerprint,
};

MT_PLUGIN("documents", "1.0.0", "Apache-2.0", MT_DATA_INTERFACE, &documents_data)

mt_status doc_grow(void **array, int64_t n, int64_t *capacity, size_t size)
{
    if (n < *capacity)
        return MT_OK;
    int64_t wanted = n < 16 ? 16 : n + n / 2;
    void *grown = realloc(*array, (size_t)wanted * size);
    if (!grown)
        return mt_fail_nomem();
    *array = grown;
    *capacity = wanted;
    return MT_OK;
}

doc_size doc_bytes(int64_t bytes)
{
    static const char *const unit[] = { "B", "kB", "MB", "GB", "TB" };
    doc_size t;
    double x = (double)bytes;
    int u = 0;
    for (; x >= 999.5 && u < 4; u++)
        x /= 1000;
    snprintf(t.s, sizeof t.s, "%.*f %s", u > 0 && x < 99.95 ? 1 : 0, x, unit[u]);
    return t;
}
