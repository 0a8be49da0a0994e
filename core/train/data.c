/* SPDX-License-Identifier: Apache-2.0
 *
 * Gathering packed micro-batches into steps, and reading ahead.
 *
 * Steps are packed into a ring of slots, either by data_next itself or by the prefetch thread. Two
 * slots belong to the caller: the step returned last and the one before it. The thread owns the
 * stream and its packer; what both sides touch is behind the lock.
 */
#include "data.h"

#include "../base/status.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOTS = 4, HELD = 2 };

/* One packed step. The arrays of all its micro-batches are cut from one block. */
typedef struct slot {
    step_batch step;
    micro_batch *micro; /* [micro_batches] */
    int32_t *block;
    data_position after;   /* where the stream stands once this step is trained */
    double documents_used; /* of that position's epoch */
    mt_status status;      /* MT_OK, MT_END or an error; the last two come once and stay */
} slot;

struct data_source {
    const mt_data *iface;
    void *stream;
    data_options options;
    packer *pack;
    slot slot[SLOTS];
    data_position start; /* position before the first step */
    bool started;
    int64_t taken; /* steps given to the caller */

    bool has_thread;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* either side made progress */
    int64_t packed;      /* steps in the ring so far; the newest may carry a status */
    bool stop;
    char text[2048]; /* error text of the thread, once a slot has an error */
};

/* ---- steps ----------------------------------------------------------------------------------- */

/* MT_END only when there is not a single micro-batch for it. */
static mt_status pack_step(data_source *d, slot *s)
{
    step_batch *step = &s->step;
    *step = (step_batch){ .micro = s->micro };
    mt_status status = MT_OK;
    while (!status && step->n < d->options.micro_batches) {
        micro_batch *b = &s->micro[step->n];
        if ((status = packer_next(d->pack, b)))
            break;
        step->n++;
        step->tokens += b->tokens;
        step->n_targets += b->n_targets;
    }
    /* A validation stream's last step may be partial; its end is met again by the next call. */
    if (status == MT_END && step->n > 0)
        status = MT_OK;
    if (!status) {
        s->after = packer_tell(d->pack);
        s->documents_used = packer_documents_used(d->pack);
    }
    return status;
}

/* ---- the ring ------------------------------------------------------------------------------- */

static void *prefetch(void *arg)
{
    data_source *d = arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        while (!d->stop && d->packed - d->taken >= SLOTS - HELD)
            pthread_cond_wait(&d->wake, &d->lock);
        if (d->stop)
            break;
        slot *s = &d->slot[d->packed % SLOTS];
        pthread_mutex_unlock(&d->lock);
        mt_status status = pack_step(d, s);
        pthread_mutex_lock(&d->lock);
        s->status = status;
        if (status < 0)
            snprintf(d->text, sizeof d->text, "%s", status_text());
        d->packed++;
        pthread_cond_broadcast(&d->wake);
        if (status)
            break;
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Signals stay with the thread that runs the training loop. */
static mt_status start_thread(data_source *d)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    int rc = pthread_create(&d->thread, NULL, prefetch, d);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc)
        return status_set(MT_ERR_NOMEM, "data: cannot start the prefetch thread: %s", strerror(rc));
    d->has_thread = true;
    return MT_OK;
}

/* The slot after those already taken, packed now or by the thread. */
static slot *next_slot(data_source *d)
{
    slot *s = &d->slot[d->taken % SLOTS];
    if (!d->has_thread) {
        if (d->packed == d->taken) {
            s->status = pack_step(d, s);
            if (s->status < 0)
                snprintf(d->text, sizeof d->text, "%s", status_text());
            d->packed++;
        }
        return s;
    }
    pthread_mutex_lock(&d->lock);
    while (d->packed == d->taken)
        pthread_cond_wait(&d->wake, &d->lock);
    pthread_mutex_unlock(&d->lock);
    return s;
}

mt_status data_next(data_source *d, const step_batch **ret)
{
    if (!d->started) {
        d->start = packer_tell(d->pack);
        if (d->options.prefetch) {
            mt_status status = start_thread(d);
            if (status)
                return status;
        }
        d->started = true;
    }
    slot *s = next_slot(d);
    if (s->status) /* not taken: the next call finds it again */
        return s->status < 0 ? status_set(s->status, "%s", d->text) : s->status;
    pthread_mutex_lock(&d->lock);
    d->taken++;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
    *ret = &s->step;
    return MT_OK;
}

/* ---- positions ------------------------------------------------------------------------------ */

data_position data_tell(const data_source *d)
{
    if (d->taken)
        return d->slot[(d->taken - 1) % SLOTS].after;
    return d->started ? d->start : packer_tell(d->pack);
}

double data_epochs(const data_source *d, int64_t epoch_documents)
{
    if (d->taken == 0)
        return (double)data_tell(d).epoch;
    const slot *s = &d->slot[(d->taken - 1) % SLOTS];
    return (double)s->after.epoch + s->documents_used / (double)epoch_documents;
}

mt_status data_seek(data_source *d, data_position p)
{
    if (d->started)
        return status_set(MT_ERR_INVALID, "data: a stream that was read from cannot be moved");
    return packer_seek(d->pack, p);
}

int64_t data_max_documents(const data_source *d)
{
    return d->options.packing == PACKING_NONE ? 1 : d->options.micro_tokens;
}

/* ---- opening and closing -------------------------------------------------------------------- */

/* One block a slot: ids, targets, positions and doc_starts of every micro-batch. */
static mt_status alloc_slot(data_source *d, slot *s)
{
    size_t tokens = (size_t)d->options.micro_tokens, n = (size_t)d->options.micro_batches;
    size_t starts = (size_t)data_max_documents(d) + 1, each = 3 * tokens + starts, bytes;
    if (__builtin_mul_overflow(each * sizeof *s->block, n, &bytes))
        bytes = SIZE_MAX;
    s->micro = calloc(n, sizeof *s->micro);
    s->block = malloc(bytes);
    if (!s->micro || !s->block)
        return status_set(
            MT_ERR_NOMEM,
            "out of memory: %zu bytes for the tokens of a step of %lld micro-batches; "
            "lower train.gradient_accumulation_steps or train.tokens_per_step",
            bytes, (long long)n);
    for (size_t i = 0; i < n; i++) {
        int32_t *p = s->block + i * each;
        s->micro[i] = (micro_batch){ .ids = p,
                                     .targets = p + tokens,
                                     .positions = p + 2 * tokens,
                                     .doc_starts = p + 3 * tokens };
    }
    return MT_OK;
}

mt_status data_open(const mt_data *iface, void *stream, const data_options *options,
                    data_source **ret)
{
    data_source *d = NULL;
    mt_status status = MT_OK;
    if (options->micro_tokens < 1 || options->micro_tokens > INT32_MAX - 1 ||
        options->micro_batches < 1 || options->micro_batches > INT32_MAX)
        status = status_set(MT_ERR_INVALID,
                            "data: %lld micro-batches of %lld tokens; expected at least one of "
                            "each, and less than 2^31",
                            (long long)options->micro_batches, (long long)options->micro_tokens);
    else if (!(d = calloc(1, sizeof *d)))
        status = status_nomem("the data source", sizeof *d);
    if (status) {
        iface->close(stream);
        return status;
    }
    d->iface = iface;
    d->stream = stream;
    d->options = *options;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->wake, NULL);
    status = packer_create(iface, stream, options->packing, options->micro_tokens, &d->pack);
    for (int i = 0; i < SLOTS && !status; i++)
        status = alloc_slot(d, &d->slot[i]);
    if (status)
        data_close(d);
    else
        *ret = d;
    return status;
}

void data_close(data_source *d)
{
    if (!d)
        return;
    if (d->has_thread) {
        pthread_mutex_lock(&d->lock);
        d->stop = true;
        pthread_cond_broadcast(&d->wake);
        pthread_mutex_unlock(&d->lock);
        pthread_join(d->thread, NULL);
    }
    packer_destroy(d->pack);
    d->iface->close(d->stream);
    for (int i = 0; i < SLOTS; i++) {
        free(d->slot[i].micro);
        free(d->slot[i].block);
    }
    pthread_cond_destroy(&d->wake);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
