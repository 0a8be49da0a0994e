/* SPDX-License-Identifier: Apache-2.0
 *
 * The XXH3-64 of bytes that come in blocks, by several threads at the same time: each waits until
 * what stands before its block has been added. Blocks have to be begun in their order; then the
 * first that is missing is always on its way, and nobody waits for ever.
 */
#ifndef MT_CORE_ORDERED_HASH_H
#define MT_CORE_ORDERED_HASH_H

#include <megatrain/base.h>
#include <pthread.h>
#include <xxhash.h>

typedef struct ordered_hash {
    XXH3_state_t *state;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t turn;
    int64_t at; /* bytes added */
    bool given_up;
} ordered_hash;

mt_status ordered_hash_init(ordered_hash *h);
void ordered_hash_finish(ordered_hash *h); /* accepts one that is all zero */

/* Adds bytes at .. at+n-1, after those before them. False when it was given up meanwhile. [any] */
bool ordered_hash_add(ordered_hash *h, int64_t at, const void *data, int64_t n);

/* A block will not come: whoever waits for it goes on. [any] */
void ordered_hash_give_up(ordered_hash *h);

/* Once all was added. */
uint64_t ordered_hash_digest(const ordered_hash *h);

#endif
