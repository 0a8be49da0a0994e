/* SPDX-License-Identifier: Apache-2.0
 *
 * The three ways of packing behind one interface. A position is a function of the stream alone: a
 * window is found again by its first document, since where it ends depends on what follows only.
 */
#include "packing.h"

#include "../base/log.h"
#include "../base/status.h"
#include "packing_window.h"

#include <stdlib.h>

/* A window holds this many tokens, or micro-batches where those are large: enough that what the
 * last micro-batch leaves empty is little. */
enum { WINDOW_TOKENS = 1 << 20, WINDOW_BATCHES = 16 };

struct packer {
    const mt_data *iface;
    void *stream;
    packing_mode mode;
    int64_t micro_tokens;
    int64_t target_epoch; /* of the last target seen */
    int64_t left_out;     /* documents or micro-batches without any target */
    int64_t next_warning; /* value of left_out at which the next warning is due */
    bool started;
    /* best fit */
    window window;
    data_position at;  /* of the window, or of `doc` */
    int64_t documents; /* of the stream that the window spans */
    /* the others: the document that is being packed */
    mt_document doc;
    bool has_doc; /* it still has inputs */
};

mt_status packer_create(const mt_data *iface, void *stream, packing_mode mode, int64_t micro_tokens,
                        packer **ret)
{
    packer *p = calloc(1, sizeof *p);
    if (!p)
        return status_nomem("packing", sizeof *p);
    p->iface = iface;
    p->stream = stream;
    p->mode = mode;
    p->micro_tokens = micro_tokens;
    p->next_warning = 1;
    window_init(&p->window, micro_tokens);
    *ret = p;
    return MT_OK;
}

void packer_destroy(packer *p)
{
    if (!p)
        return;
    window_finish(&p->window);
    free(p);
}

static void count_left_out(packer *p)
{
    if (++p->left_out < p->next_warning)
        return;
    const char *what = p->mode == PACKING_BEST_FIT ? "document" : "micro-batch";
    const char *plural = p->mode == PACKING_BEST_FIT ? "s" : "es";
    log_write(MT_LOG_WARNING,
              "data: %lld %s%s without a token to train on so far; left out (is the loss mask "
              "right?)",
              (long long)p->left_out, what, p->left_out > 1 ? plural : "");
    p->next_warning *= 10;
}

/* The next document of the stream, whose place goes to `at`. */
static mt_status read_document(packer *p, data_position *at, mt_document *ret)
{
    p->iface->tell(p->stream, &at->epoch, &at->index);
    if (!p->started) {
        p->target_epoch = at->epoch;
        p->started = true;
    }
    if (at->epoch > p->target_epoch + 1)
        return status_set(MT_ERR_INVALID,
                          "data: a whole epoch has no token to train on; expected at least one "
                          "target (is everything masked?)");
    return p->iface->next(p->stream, ret);
}

/* ---- best fit -------------------------------------------------------------------------------- */

static bool window_is_full(const packer *p)
{
    int64_t most = WINDOW_BATCHES * p->micro_tokens;
    int64_t epoch = 0, index = 0;
    p->iface->tell(p->stream, &epoch, &index);
    return epoch != p->at.epoch ||
           p->window.tokens >= (most > WINDOW_TOKENS ? most : WINDOW_TOKENS);
}

/* The next window with something in it. */
static mt_status fill_window(packer *p)
{
    mt_status status = MT_OK;
    do {
        window_clear(&p->window);
        p->documents = 0;
        p->iface->tell(p->stream, &p->at.epoch, &p->at.index);
        do {
            mt_document d = { 0 };
            data_position at;
            int64_t targets = 0;
            status = read_document(p, &at, &d);
            if (!status)
                status = window_add(&p->window, &d, &targets);
            if (status)
                break;
            p->documents++;
            if (targets > 0)
                p->target_epoch = at.epoch;
            else if (d.n > 1)
                count_left_out(p);
        } while (!window_is_full(p));
        if (status < 0 || (status == MT_END && p->window.n == 0))
            return status;
        status = window_pack(&p->window);
    } while (!status && p->window.n == 0);
    return status;
}

static mt_status next_fit(packer *p, micro_batch *b)
{
    mt_status status = p->window.used < p->window.bins ? MT_OK : fill_window(p);
    if (!status)
        window_take(&p->window, b);
    return status;
}

mt_status packing_count_epoch(const mt_data *iface, void *stream, int64_t micro_tokens,
                              int64_t *ret)
{
    packer *p = NULL;
    int64_t n = 0, epoch = 0, now = 0, index = 0;
    mt_status status = packer_create(iface, stream, PACKING_BEST_FIT, micro_tokens, &p);
    if (status)
        return status;
    p->next_warning = INT64_MAX; /* training warns */
    iface->tell(stream, &epoch, &index);
    while (!status && !(status = fill_window(p)) && p->at.epoch == epoch) {
        n += p->window.bins;
        iface->tell(stream, &now, &index);
        if (now != epoch)
            break;
    }
    packer_destroy(p);
    if (status < 0)
        return status;
    *ret = n;
    return MT_OK;
}

/* ---- in the order of the stream -------------------------------------------------------------- */

/* Makes p->doc a document with inputs left. */
static mt_status need_document(packer *p)
{
    while (!p->has_doc) {
        p->at.offset = 0;
        mt_status status = read_document(p, &p->at, &p->doc);
        if (status)
            return status;
        p->has_doc = p->doc.n > 1;
    }
    return MT_OK;
}

/* Appends up to `room` inputs of the present document to the micro-batch as a document. */
static void append_piece(packer *p, micro_batch *b, int64_t room)
{
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

static mt_status next_in_order(packer *p, micro_batch *b)
{
    for (;;) {
        b->tokens = b->documents = b->max_document = b->n_targets = 0;
        b->doc_starts[0] = 0;
        do {
            mt_status status = need_document(p);
            if (status == MT_END && b->tokens > 0)
                break;
            if (status)
                return status;
            append_piece(p, b, p->micro_tokens - b->tokens);
        } while (p->mode == PACKING_SEQUENTIAL && b->tokens < p->micro_tokens);
        if (b->n_targets > 0)
            return MT_OK;
        count_left_out(p);
    }
}

mt_status packer_next(packer *p, micro_batch *b)
{
    return p->mode == PACKING_BEST_FIT ? next_fit(p, b) : next_in_order(p, b);
}

/* ---- positions ------------------------------------------------------------------------------- */

static bool inside(const packer *p)
{
    return p->mode == PACKING_BEST_FIT ? p->window.used < p->window.bins : p->has_doc;
}

data_position packer_tell(const packer *p)
{
    data_position at = p->at;
    if (p->mode == PACKING_BEST_FIT) {
        at.offset = p->window.used;
        at.micro_tokens = at.offset > 0 ? p->micro_tokens : 0;
    }
    if (!inside(p)) {
        p->iface->tell(p->stream, &at.epoch, &at.index);
        at.offset = at.micro_tokens = 0;
    }
    return at;
}

double packer_documents_used(const packer *p)
{
    data_position at = packer_tell(p);
    double share = 0;
    if (inside(p))
        share = p->mode == PACKING_BEST_FIT ? (double)p->documents / (double)p->window.bins
                                            : 1 / (double)(p->doc.n - 1);
    return (double)at.index + (double)at.offset * share;
}

static mt_status no_such_place(data_position to, const char *what)
{
    return status_set(MT_ERR_INVALID,
                      "data: cannot go to %s %lld of document %lld in epoch %lld: there is no such "
                      "place; the data is not that of the checkpoint",
                      what, (long long)to.offset, (long long)to.index, (long long)to.epoch);
}

/* Offsets into a window mean something only with micro-batches of the same size. */
static mt_status check_kind(const packer *p, data_position to)
{
    int64_t here = p->mode == PACKING_BEST_FIT ? p->micro_tokens : 0;
    if (to.offset == 0 || here == to.micro_tokens)
        return MT_OK;
    if (to.micro_tokens == 0)
        return status_set(MT_ERR_INVALID,
                          "data: the position is inside a document, where packing: best_fit does "
                          "not stop; go on with packing: sequential (or none), as before");
    return status_set(MT_ERR_INVALID,
                      "data: the position is inside a window that was packed into micro-batches of "
                      "%lld tokens; go on with packing: best_fit and that micro_batch_size times "
                      "max_seq_len",
                      (long long)to.micro_tokens);
}

mt_status packer_seek(packer *p, data_position to)
{
    mt_status status = check_kind(p, to);
    if (!status)
        status = p->iface->seek(p->stream, to.epoch, to.index);
    if (status)
        return status;
    p->has_doc = false;
    p->started = true;
    p->target_epoch = to.epoch;
    window_clear(&p->window);
    if (to.offset == 0)
        return MT_OK;
    status = p->mode == PACKING_BEST_FIT ? fill_window(p) : need_document(p);
    if (status < 0)
        return status;
    bool there =
        status == MT_OK && to.offset > 0 && p->at.epoch == to.epoch && p->at.index == to.index;
    if (p->mode == PACKING_BEST_FIT) {
        if (!there || to.offset >= p->window.bins)
            return no_such_place(to, "micro-batch");
        p->window.used = to.offset;
    } else {
        if (!there || to.offset >= p->doc.n - 1)
            return no_such_place(to, "token");
        p->at.offset = to.offset;
    }
    return MT_OK;
}
