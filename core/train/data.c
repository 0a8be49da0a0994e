/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing documents into micro-batches and steps, and reading ahead.
 *
 * Steps are packed into a ring of slots, either by data_next itself or by the prefetch thread. Two
 * slots belong to the caller: the step returned last and the one before it. The thread owns the
 * stream and everything of `packer`; what both sides touch is behind the lock.
 */
#include "data.h"

#include "../base/log.h"
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
    data_position after; /* where the stream stands once this step is trained */
    mt_status status;    /* MT_OK, MT_END or an error; the last two come once and stay */
} slot;

/* The document that is being packed. */
typedef struct packer {
    mt_document doc;
    data_position at;     /* of `doc`; offset counts its inputs that are packed */
    bool has_doc;         /* `doc` still has inputs */
    int64_t target_epoch; /* epoch of the last target seen */
    int64_t left_out;     /* micro-batches without any target */
    int64_t next_warning; /* value of left_out at which the next warning is due */
} packer;

struct data_source {
    const mt_data *iface;
    void *stream;
    data_options options;
    packer pack;
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

/* ---- packing -------------------------------------------------------------------------------- */

/* Makes pack.doc a document with inputs left. */
static mt_status need_document(data_source *d)
{
    packer *p = &d->pack;
    while (!p->has_doc) {
        d->iface->tell(d->stream, &p->at.epoch, &p->at.index);
        p->at.offset = 0;
        if (p->at.epoch > p->target_epoch + 1)
            return status_set(MT_ERR_INVALID,
                              "data: a whole epoch has no token to train on; expected at least one "
                              "target (is everything masked?)");
        mt_status status = d->iface->next(d->stream, &p->doc);
        if (status)
            return status;
        p->has_doc = p->doc.n > 1;
    }
    return MT_OK;
}

/* Appends up to `room` inputs of the present document to the micro-batch as a document. */
static void pack_piece(data_source *d, micro_batch *b, int64_t room)
{
    packer *p = &d->pack;
    int64_t from = p->at.offset, left = p->doc.n - 1 - from, n = left < room ? left : room;
    for (int64_t i = 0; i < n; i++) {
        int64_t to = b->tokens + i, target = from + i + 1;
        bool trained = !p->doc.loss_mask || p->doc.loss_mask[target];
        b->ids[to] = p->doc.tokens[from + i];
        b->targets[to] = trained ? p->doc.tokens[target] : -100;
        b->positions[to] = (int32_t)i;
        b->n_targets += trained;
    }
    if (b->n_targets)
        p->target_epoch = p->at.epoch;
    b->tokens += n;
    b->doc_starts[++b->documents] = (int32_t)b->tokens;
    b->max_document = n > b->max_document ? n : b->max_document;
    p->at.offset += n;
    p->has_doc = n < left;
}

/* The next micro-batch; MT_END only when there is not a single token for it. */
static mt_status pack_micro(data_source *d, micro_batch *b)
{
    b->tokens = b->documents = b->max_document = b->n_targets = 0;
    b->doc_starts[0] = 0;
    do {
        mt_status status = need_document(d);
        if (status == MT_END && b->tokens > 0)
            break;
        if (status)
            return status;
        pack_piece(d, b, d->options.micro_tokens - b->tokens);
    } while (d->options.packing && b->tokens < d->options.micro_tokens);
    return MT_OK;
}

static void count_left_out(packer *p)
{
    if (++p->left_out < p->next_warning)
        return;
    log_write(MT_LOG_WARNING,
              "data: %lld micro-batch%s without a token to train on so far; left out (is the loss "
              "mask right?)",
              (long long)p->left_out, p->left_out > 1 ? "es" : "");
    p->next_warning *= 10;
}

static data_position present_position(const data_source *d)
{
    data_position at = d->pack.at;
    if (!d->pack.has_doc) {
        d->iface->tell(d->stream, &at.epoch, &at.index);
        at.offset = 0;
    }
    return at;
}

/* Packs one step; steps without any target are passed over. */
static mt_status pack_step(data_source *d, slot *s)
{
    step_batch *step = &s->step;
    *step = (step_batch){ .micro = s->micro };
    mt_status status = MT_OK;
    while (!status && step->n == 0) {
        for (int64_t i = 0; i < d->options.micro_batches; i++) {
            micro_batch *b = &s->micro[step->n];
            if ((status = pack_micro(d, b)))
                break;
            if (b->n_targets == 0) {
                count_left_out(&d->pack);
                continue;
            }
            step->n++;
            step->tokens += b->tokens;
            step->n_targets += b->n_targets;
        }
    }
    /* A validation stream's last step may be partial; its end is met again by the next call. */
    if (status == MT_END && step->n > 0)
        status = MT_OK;
    if (!status)
        s->after = present_position(d);
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
        d->start = present_position(d);
        d->pack.target_epoch = d->start.epoch;
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
    return d->started ? d->start : present_position(d);
}

mt_status data_seek(data_source *d, data_position p)
{
    if (d->started)
        return status_set(MT_ERR_INVALID, "data: a stream that was read from cannot be moved");
    mt_status status = d->iface->seek(d->stream, p.epoch, p.index);
    if (status)
        return status;
    packer *k = &d->pack;
    k->has_doc = false;
    if (p.offset == 0)
        return MT_OK;
    k->target_epoch = p.epoch;
    if ((status = need_document(d)) < 0)
        return status;
    if (status == MT_END || p.offset < 0 || p.offset >= k->doc.n - 1 || k->at.epoch != p.epoch ||
        k->at.index != p.index)
        return status_set(MT_ERR_INVALID,
                          "data: cannot go to token %lld of document %lld in epoch %lld: there is "
                          "no such token; the data is not that of the checkpoint",
                          (long long)p.offset, (long long)p.index, (long long)p.epoch);
    k->at.offset = p.offset;
    return MT_OK;
}

int64_t data_max_documents(const data_source *d)
{
    return d->options.packing ? d->options.micro_tokens : 1;
}

/* ---- opening and closing -------------------------------------------------------------------- */

/* One block a slot: ids, targets, positions and doc_starts of every micro-batch. */
static mt_status alloc_slot(data_source *d, slot *s)
{
    size_t tokens = (size_t)d->options.micro_tokens, n = (size_t)d->options.micro_batches;
    size_t starts = (size_t)data_max_documents(d) + 1, each = 3 * tokens + starts, bytes;
    if (__builtin_mul_overflow(each * sizeof *s->block, n, &bytes))
        return status_nomem("a step of packed tokens", SIZE_MAX);
    s->micro = calloc(n, sizeof *s->micro);
    s->block = malloc(bytes);
    if (!s->micro || !s->block)
        return status_nomem("a step of packed tokens", bytes);
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
    d->pack.next_warning = 1;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->wake, NULL);
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
    d->iface->close(d->stream);
    for (int i = 0; i < SLOTS; i++) {
        free(d->slot[i].micro);
        free(d->slot[i].block);
    }
    pthread_cond_destroy(&d->wake);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
