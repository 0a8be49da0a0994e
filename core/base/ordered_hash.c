/* SPDX-License-Identifier: Apache-2.0
 *
 * A hash whose bytes come from several threads in turn.
 */
#include "ordered_hash.h"

#include "status.h"

mt_status ordered_hash_init(ordered_hash *h)
{
    *h = (ordered_hash){ .state = XXH3_createState() };
    if (!h->state)
        return status_nomem("a checksum", 1024);
    XXH3_64bits_reset(h->state);
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->turn, NULL);
    return MT_OK;
}

void ordered_hash_finish(ordered_hash *h)
{
    if (!h->state)
        return;
    XXH3_freeState(h->state);
    pthread_mutex_destroy(&h->lock);
    pthread_cond_destroy(&h->turn);
    *h = (ordered_hash){ 0 };
}

bool ordered_hash_add(ordered_hash *h, int64_t at, const void *data, int64_t n)
{
    pthread_mutex_lock(&h->lock);
    while (h->at != at && !h->given_up)
        pthread_cond_wait(&h->turn, &h->lock);
    bool mine = h->at == at;
    pthread_mutex_unlock(&h->lock);
    if (!mine)
        return false;
    XXH3_64bits_update(h->state, data, (size_t)n); /* only who has the turn comes here */
    pthread_mutex_lock(&h->lock);
    h->at += n;
    pthread_cond_broadcast(&h->turn);
    pthread_mutex_unlock(&h->lock);
    return true;
}

void ordered_hash_give_up(ordered_hash *h)
{
    pthread_mutex_lock(&h->lock);
    h->given_up = true;
    pthread_cond_broadcast(&h->turn);
    pthread_mutex_unlock(&h->lock);
}

uint64_t ordered_hash_digest(const ordered_hash *h)
{
    return XXH3_64bits_digest(h->state);
}
