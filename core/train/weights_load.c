/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading a whole model: everything is checked before the first byte is read.
 */
#include "../base/status.h"
#include "checkpoint.h"
#include "weights_pass.h"

#include <stdlib.h>

/* Lists what is to be read. All that can be wrong with shapes and dtypes is found here. */
static mt_status list_tensors(const weights_match *w, const mt_weights *format, const void *reader,
                              weights_item *items, int64_t *ret_n, int64_t *ret_bytes)
{
    int64_t n = 0, bytes = 0;
    for (int64_t i = 0; i < w->count; i++) {
        mt_tensor_info info;
        if (w->tensor[i] < 0)
            continue;
        mt_status status = weights_check_tensor(w, format, reader, i);
        if (!status)
            status = format->info(reader, i, &info);
        if (status)
            return status;
        items[n++] = (weights_item){
            .index = i, .dtype = info.dtype, .tensor = w->tensor[i], .bytes = info.bytes
        };
        bytes += info.bytes;
    }
    *ret_n = n;
    *ret_bytes = bytes;
    return MT_OK;
}

static mt_status load_matched(store *s, const weights_match *match, const mt_weights *format,
                              const void *reader, int64_t *ret_bytes)
{
    const weights_masters masters = weights_of_store(s);
    int64_t n = 0, bytes = 0;
    progress p;
    weights_item *items = calloc((size_t)match->count + 1, sizeof *items);
    if (!items)
        return status_nomem("the list of weights", (size_t)match->count * sizeof *items);
    mt_status status = list_tensors(match, format, reader, items, &n, &bytes);
    if (!status) {
        const weights_way way = { .format = format,
                                  .reader = reader,
                                  .masters = masters,
                                  .map = match->map,
                                  .progress = &p };
        progress_begin(&p, "loading weights", bytes);
        status = weights_pass(&way, items, n);
        progress_end(&p);
    }
    /* Only now, because a tied copy is compared with the owner, which may come later. */
    if (!status)
        status = weights_check_unused(s->m, &masters, match, format, reader);
    if (!status && ret_bytes)
        *ret_bytes = bytes;
    free(items);
    return status;
}

mt_status weights_load(store *s, const char *path, const mt_weights *format, int64_t *ret_bytes)
{
    void *reader = NULL;
    weights_match *match = NULL;
    mt_status status = format->open(path, &reader);
    if (status)
        return status;
    if ((status = weights_match_create(s->m, format, reader, &match)) ||
        (status = weights_match_complete(match, format, reader, path)))
        goto out;
    status = load_matched(s, match, format, reader, ret_bytes);
out:
    weights_match_destroy(match);
    format->close(reader);
    return status;
}
