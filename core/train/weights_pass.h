/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole tensors between files and memory, by all processors at the same time: what loading a model,
 * loading and saving a checkpoint, and export share.
 */
#ifndef MT_CORE_WEIGHTS_PASS_H
#define MT_CORE_WEIGHTS_PASS_H

#include "../base/progress.h"
#include "weights.h"

/* A tensor that is to pass. */
typedef struct weights_item {
    int64_t index;  /* in the reader or the writer */
    mt_dtype dtype; /* in the file */
    int64_t tensor; /* of the map, whose masters it is; unused with a plane */
    void *plane;    /* not NULL: no masters, but `bytes` bytes as they stand in the file */
    bool copied;    /* from the reader to the writer, element by element; no masters either */
    int64_t source; /* in the reader, where it is copied */
    mt_dtype source_dtype;
    int64_t bytes; /* in the file: of the writer, where it is copied */
    uint64_t sum;  /* result, with `sums`: XXH3-64 of the bytes in the file: the reader's, then */
} weights_item;

typedef struct weights_way {
    const mt_weights *format;
    const void *reader; /* to memory ... */
    void *writer;       /* ... or to a file: one of the two, both where tensors are copied */
    weights_masters masters;
    const tensor_map *map;
    bool serial; /* masters are one thread's */
    bool sums;   /* fill weights_item.sum */
    /* Is the sum the right one? Called once a tensor, by any thread. NULL: nobody asks. */
    mt_status (*check)(void *arg, const weights_item *item);
    void *arg;
    progress *progress; /* gets the bytes that have passed */
    /* Asked between batches; true ends the pass with MT_ERR_STOPPED. NULL: nobody ends it. */
    bool (*stop)(void);
} weights_way;

/* Passes items[n], which stand in the order of the files, in blocks of at most half a million
 * elements through 4 MB of each thread's own. A writer that takes blocks in order only gets them
 * from the calling thread. Stops at the first failure. [main] */
mt_status weights_pass(const weights_way *way, weights_item *items, int64_t n);

/* Can blocks of a format's files be written in any order, and by several threads? */
bool weights_written_anywhere(const mt_weights *format);

/* MT_ERR_STOPPED where way->stop says so, else MT_OK. */
mt_status weights_ask(const weights_way *way);

#endif
