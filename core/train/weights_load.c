/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading a whole model: blocks of tensors are read and converted by all processors at the same
 * time, in the order of the files, which is how disks read fastest. Tensors may be large or many
 * and small, so blocks of several of them make up what is handed out at once.
 */
#include "../base/parallel.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "checkpoint.h"
#include "weights_io.h"

#include <stdlib.h>

/* Bytes of files whose blocks are handed out at once. */
enum { BATCH_BYTES = 512 << 20 };

typedef struct load_block {
    int64_t transfer; /* of the batch */
    int64_t index;    /* of the tensor in the file */
    mt_dtype dtype;
    weights_block block;
} load_block;

typedef struct batch {
    weights_transfer *transfers;
    load_block *blocks;
    int64_t n_transfers, n_blocks, cap_transfers, cap_blocks;
} batch;

typedef struct loading {
    const weights_match *match;
    const mt_weights *format;
    const void *reader;
    weights_masters masters;
    weights_lanes lanes;
    batch batch;
    progress progress;
} loading;

/* Makes room for one more; NULL when there is no memory. */
static void *grow(void *list, int64_t n, int64_t *cap, size_t size)
{
    if (n < *cap)
        return list;
    int64_t more = *cap ? *cap * 2 : 64;
    void *grown = realloc(list, (size_t)more * size);
    if (grown)
        *cap = more;
    return grown;
}

static mt_status add_block(batch *b, const load_block *block)
{
    load_block *list = grow(b->blocks, b->n_blocks, &b->cap_blocks, sizeof *list);
    if (!list)
        return status_nomem("the blocks of weights", (size_t)b->n_blocks * sizeof *list);
    b->blocks = list;
    b->blocks[b->n_blocks++] = *block;
    return MT_OK;
}

static mt_status add_tensor(loading *l, int64_t index, const mt_tensor_info *info)
{
    batch *b = &l->batch;
    weights_transfer *list = grow(b->transfers, b->n_transfers, &b->cap_transfers, sizeof *list);
    if (!list)
        return status_nomem("the list of weights", (size_t)b->n_transfers * sizeof *list);
    b->transfers = list;
    weights_transfer *x = &list[b->n_transfers];
    mt_status status =
        weights_transfer_init(x, &l->masters, l->match->map, l->match->tensor[index], false);
    if (status)
        return status;
    load_block k = { .transfer = b->n_transfers++, .index = index, .dtype = info->dtype };
    int64_t most = weights_piece_elems(&l->lanes.lane[0], info->dtype);
    for (int64_t at = 0, end = tensor_elems(x->t); at < end && !status; at += k.block.n) {
        k.block = weights_block_at(x->t, at, end, most);
        status = add_block(b, &k);
    }
    return status;
}

static mt_status load_block_of(void *arg, int64_t i, int32_t thread)
{
    loading *l = arg;
    const load_block *k = &l->batch.blocks[i];
    weights_buffer *b = &l->lanes.lane[thread];
    mt_status status =
        weights_read_piece(l->format, l->reader, k->index, k->dtype, k->block.at, k->block.n, b);
    if (status)
        return status;
    weights_move_block(&l->batch.transfers[k->transfer], &k->block, b);
    progress_add(&l->progress, k->block.n * mt_dtype_size(k->dtype));
    return MT_OK;
}

static mt_status load_batch(loading *l)
{
    batch *b = &l->batch;
    mt_status status = parallel_for(b->n_blocks, load_block_of, l);
    for (int64_t i = 0; i < b->n_transfers; i++)
        weights_transfer_finish(&b->transfers[i]);
    b->n_transfers = b->n_blocks = 0;
    return status;
}

/* All that can be wrong with shapes and dtypes comes before the first byte is read. */
static mt_status check_tensors(const loading *l, int64_t *ret_bytes)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < l->match->count; i++) {
        mt_tensor_info info;
        if (l->match->tensor[i] < 0)
            continue;
        mt_status status = weights_check_tensor(l->match, l->format, l->reader, i);
        if (!status)
            status = l->format->info(l->reader, i, &info);
        if (status)
            return status;
        bytes += info.bytes;
    }
    *ret_bytes = bytes;
    return MT_OK;
}

static mt_status load_tensors(loading *l)
{
    mt_status status = MT_OK;
    int64_t bytes = 0;
    for (int64_t i = 0; i < l->match->count && !status; i++) {
        mt_tensor_info info;
        if (l->match->tensor[i] < 0)
            continue;
        if ((status = l->format->info(l->reader, i, &info)) || (status = add_tensor(l, i, &info)))
            break;
        if ((bytes += info.bytes) >= BATCH_BYTES) {
            status = load_batch(l);
            bytes = 0;
        }
    }
    return status ? status : load_batch(l);
}

static mt_status load_matched(loading *l, store *s, int64_t *ret_bytes)
{
    int64_t bytes = 0;
    mt_status status = check_tensors(l, &bytes);
    if (!status)
        status = weights_lanes_init(&l->lanes, parallel_threads(PARALLEL_MAX_THREADS));
    if (!status) {
        progress_begin(&l->progress, "loading weights", bytes);
        status = load_tensors(l);
        progress_end(&l->progress);
    }
    /* Only now, because a tied copy is compared with the owner, which may come later. */
    if (!status)
        status = weights_check_unused(s->m, &l->masters, l->match, l->format, l->reader);
    if (!status && ret_bytes)
        *ret_bytes = bytes;
    for (int64_t i = 0; i < l->batch.n_transfers; i++)
        weights_transfer_finish(&l->batch.transfers[i]);
    weights_lanes_finish(&l->lanes);
    free(l->batch.transfers);
    free(l->batch.blocks);
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
    loading l = {
        .match = match, .format = format, .reader = reader, .masters = weights_of_store(s)
    };
    status = load_matched(&l, s, ret_bytes);
out:
    weights_match_destroy(match);
    format->close(reader);
    return status;
}
