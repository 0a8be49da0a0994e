/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of tensors, handed out to all processors. Tensors may be large or many and small, so
 * blocks of several of them make up what is handed out at once. They are read in the order of the
 * files, which is how disks read fastest; those that are written take turns, several files at a
 * time, since a file system lets one thread at a time into a file.
 */
#include "weights_pass.h"

#include "../base/ordered_hash.h"
#include "../base/parallel.h"
#include "../base/status.h"
#include "weights_io.h"

#include <stddef.h>
#include <stdlib.h>

/* Bytes of files whose blocks are handed out at once. */
enum { BATCH_BYTES = 1 << 30 };

typedef struct passing {
    weights_item *item;
    weights_transfer x; /* of masters */
    ordered_hash hash;
} passing;

typedef struct pass_block {
    int64_t passing; /* of the batch */
    int64_t turn;    /* how many of this tensor come before it */
    weights_block block;
} pass_block;

typedef struct batch {
    const weights_way *way;
    bool ordered; /* the writer takes tensors and bytes in their order only */
    bool serial;
    weights_lanes lanes;
    passing *passing;
    pass_block *blocks;
    int64_t n_passing, n_blocks, cap_passing, cap_blocks;
} batch;

/* ---- one block ------------------------------------------------------------------------------- */

static int64_t block_bytes(const passing *p, const weights_block *k)
{
    return k->n * mt_dtype_size(p->item->dtype);
}

/* Adds the block's bytes; who adds the last ones of a tensor has them checked. */
static mt_status add_to_sum(const weights_way *way, passing *p, const weights_block *k,
                            const void *bytes)
{
    const weights_item *t = p->item;
    int64_t size = mt_dtype_size(t->copied ? t->source_dtype : t->dtype);
    int64_t end = t->bytes / mt_dtype_size(t->dtype);
    if (!way->sums || !ordered_hash_add(&p->hash, k->at * size, bytes, k->n * size) ||
        k->at + k->n < end)
        return MT_OK;
    p->item->sum = ordered_hash_digest(&p->hash);
    return way->check ? way->check(way->arg, p->item) : MT_OK;
}

static mt_status read_block(const weights_way *way, passing *p, const weights_block *k,
                            weights_buffer *b)
{
    const weights_item *t = p->item;
    int64_t size = mt_dtype_size(t->dtype);
    if (t->plane) {
        char *to = (char *)t->plane + k->at * size;
        mt_status status = way->format->read(way->reader, t->index, k->at * size, k->n * size, to);
        return status ? status : add_to_sum(way, p, k, to);
    }
    mt_status status =
        weights_read_piece(way->format, way->reader, t->index, t->dtype, k->at, k->n, b);
    if (!status)
        status = add_to_sum(way, p, k, weights_piece_bytes(b, t->dtype));
    if (!status)
        weights_move_block(&p->x, k, b);
    return status;
}

static mt_status copy_block(const weights_way *way, passing *p, const weights_block *k,
                            weights_buffer *b, const void **ret_bytes)
{
    const weights_item *t = p->item;
    mt_status status =
        weights_read_piece(way->format, way->reader, t->source, t->source_dtype, k->at, k->n, b);
    if (!status)
        status = add_to_sum(way, p, k, weights_piece_bytes(b, t->source_dtype));
    if (!status)
        *ret_bytes = weights_from_f32(b, k->n, t->dtype);
    return status;
}

static mt_status write_block(const weights_way *way, bool ordered, passing *p,
                             const weights_block *k, weights_buffer *b)
{
    const weights_item *t = p->item;
    int64_t at = k->at * mt_dtype_size(t->dtype), n = block_bytes(p, k);
    const void *bytes = t->plane ? (const char *)t->plane + at : NULL;
    mt_status status = MT_OK;
    if (t->copied) {
        status = copy_block(way, p, k, b, &bytes);
    } else {
        if (!bytes) {
            weights_move_block(&p->x, k, b);
            bytes = weights_from_f32(b, k->n, t->dtype);
        }
        status = add_to_sum(way, p, k, bytes);
    }
    if (status)
        return status;
    return ordered ? way->format->write(way->writer, t->index, bytes, n)
                   : way->format->write_at(way->writer, t->index, at, bytes, n);
}

static mt_status pass_block_of(void *arg, int64_t i, int32_t thread)
{
    batch *b = arg;
    const pass_block *k = &b->blocks[i];
    passing *p = &b->passing[k->passing];
    weights_buffer *lane = &b->lanes.lane[thread];
    mt_status status = b->way->writer ? write_block(b->way, b->ordered, p, &k->block, lane)
                                      : read_block(b->way, p, &k->block, lane);
    if (status && b->way->sums)
        ordered_hash_give_up(&p->hash);
    if (b->way->progress)
        progress_add(b->way->progress, block_bytes(p, &k->block));
    return status;
}

/* ---- a batch --------------------------------------------------------------------------------- */

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

static mt_status add_block(batch *b, const pass_block *block)
{
    pass_block *list = grow(b->blocks, b->n_blocks, &b->cap_blocks, sizeof *list);
    if (!list)
        return status_nomem("the blocks of weights", (size_t)b->n_blocks * sizeof *list);
    b->blocks = list;
    b->blocks[b->n_blocks++] = *block;
    return MT_OK;
}

static mt_status add_blocks(batch *b, const passing *p)
{
    const weights_item *t = p->item;
    int64_t most = weights_piece_elems(&b->lanes.lane[0], t->copied ? t->source_dtype : t->dtype);
    int64_t end = t->bytes / mt_dtype_size(t->dtype);
    mt_status status = MT_OK;
    pass_block k = { .passing = b->n_passing };
    for (int64_t at = 0; at < end && !status; at += k.block.n, k.turn++) {
        if (t->plane || t->copied)
            k.block = (weights_block){ .at = at, .n = end - at < most ? end - at : most };
        else
            k.block = weights_block_at(p->x.t, at, end, most);
        status = add_block(b, &k);
    }
    return status;
}

static mt_status add_item(batch *b, weights_item *item)
{
    const weights_way *way = b->way;
    passing *list = grow(b->passing, b->n_passing, &b->cap_passing, sizeof *list);
    if (!list)
        return status_nomem("the list of weights", (size_t)b->n_passing * sizeof *list);
    b->passing = list;
    passing *p = &list[b->n_passing];
    *p = (passing){ .item = item };
    mt_status status = MT_OK;
    if (!item->plane && !item->copied)
        status = weights_transfer_init(&p->x, &way->masters, way->map, item->tensor,
                                       way->writer != NULL);
    if (!status)
        status = add_blocks(b, p);
    b->n_passing++;
    return status;
}

/* Once the list is whole: a lock must not be moved. */
static mt_status begin_sum(const weights_way *way, passing *p)
{
    mt_status status = ordered_hash_init(&p->hash);
    if (!status && p->item->bytes == 0) /* no block has its sum checked */
        status = add_to_sum(way, p, &(weights_block){ 0 }, "");
    return status;
}

static void clear(batch *b)
{
    for (int64_t i = 0; i < b->n_passing; i++) {
        weights_transfer_finish(&b->passing[i].x);
        ordered_hash_finish(&b->passing[i].hash);
    }
    b->n_passing = b->n_blocks = 0;
}

static int by_turn(const void *a, const void *b)
{
    const pass_block *x = a, *y = b;
    if (x->turn != y->turn)
        return x->turn < y->turn ? -1 : 1;
    return (x->passing > y->passing) - (x->passing < y->passing);
}

static mt_status run(batch *b)
{
    mt_status status = MT_OK;
    for (int64_t i = 0; i < b->n_passing && b->way->sums && !status; i++)
        status = begin_sum(b->way, &b->passing[i]);
    if (b->way->writer && !b->serial)
        qsort(b->blocks, (size_t)b->n_blocks, sizeof *b->blocks, by_turn);
    if (!b->serial && !status)
        status = parallel_run(b->lanes.n, b->n_blocks, pass_block_of, b);
    for (int64_t i = 0; i < b->n_blocks && b->serial && !status; i++)
        status = pass_block_of(b, i, 0);
    clear(b);
    return status;
}

/* ---- the order ------------------------------------------------------------------------------- */

/* The order of the list, or such that a few stretches of it, equal in bytes, take turns. */
static mt_status order_items(const weights_item *items, int64_t n, bool turns, int64_t **ret)
{
    enum { STRETCHES = 4 };
    int64_t next[STRETCHES], end[STRETCHES], passed[STRETCHES] = { 0 }, total = 0, before = 0;
    const int64_t stretches = turns ? STRETCHES : 1;
    int64_t *order = calloc((size_t)n + 1, sizeof *order);
    if (!order)
        return status_nomem("the order of weights", (size_t)n * sizeof *order);
    for (int64_t i = 0; i < n; i++)
        total += items[i].bytes;
    for (int64_t k = 0, i = 0; k < stretches; k++) {
        next[k] = i;
        for (; i < n && (k + 1 == stretches || before < total / stretches * (k + 1)); i++)
            before += items[i].bytes;
        end[k] = i;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t least = -1;
        for (int64_t k = 0; k < stretches; k++)
            if (next[k] < end[k] && (least < 0 || passed[k] < passed[least]))
                least = k;
        order[i] = next[least]++;
        passed[least] += items[order[i]].bytes;
    }
    *ret = order;
    return MT_OK;
}

/* ---- all of them ----------------------------------------------------------------------------- */

bool weights_written_anywhere(const mt_weights *format)
{
    return format->struct_size >= offsetof(mt_weights, write_at) + sizeof format->write_at &&
           format->write_at;
}

mt_status weights_ask(const weights_way *way)
{
    return way->stop && way->stop() ? status_set(MT_ERR_STOPPED, "stopped by a signal") : MT_OK;
}

mt_status weights_pass(const weights_way *way, weights_item *items, int64_t n)
{
    const bool ordered = way->writer && !weights_written_anywhere(way->format);
    batch b = { .way = way, .ordered = ordered, .serial = way->serial || ordered };
    int64_t bytes = 0, *order = NULL;
    mt_status status =
        weights_lanes_init(&b.lanes, b.serial ? 1 : parallel_io_threads(PARALLEL_MAX_THREADS));
    if (!status)
        status = order_items(items, n, way->writer && !b.serial, &order);
    for (int64_t i = 0; i < n && !status; i++) {
        weights_item *item = &items[order[i]];
        status = add_item(&b, item);
        if (!status && ((bytes += item->bytes) >= BATCH_BYTES || i + 1 == n)) {
            status = run(&b);
            bytes = 0;
            if (!status)
                status = weights_ask(way);
        }
    }
    clear(&b);
    weights_lanes_finish(&b.lanes);
    free(b.passing);
    free(b.blocks);
    free(order);
    return status;
}
