/* SPDX-License-Identifier: Apache-2.0
 *
 * Pieces of documents in order: which ones are validation, how an epoch is shuffled, which rank
 * sees what. Everything is a function of (seed, epoch, index): seeking is exact and free.
 */
#include "text.h"

#include <math.h>
#include <megatrain/order.h>
#include <stdlib.h>

typedef struct text_stream {
    text_corpus corpus;
    mt_split split;
    uint64_t seed;
    int32_t rank, world;
    int64_t inputs;   /* most inputs of a piece: max_seq_len */
    int64_t held_out; /* pieces of this corpus that are validation */
    int64_t pieces;   /* of this split, all ranks */
    int64_t mine;     /* of this rank in an epoch */
    int64_t targets;  /* of this rank in an epoch */
    int64_t epoch, index;
    int32_t *tokens; /* [inputs + 1] */
    uint8_t *bytes;  /* [inputs + 1] */
} text_stream;

/* ---- order ---------------------------------------------------------------------------------- */

/* Piece `i` of the split, counted in corpus order, as a piece of the corpus. */
static int64_t piece_of_split(const text_stream *t, int64_t i)
{
    return mt_order_split(t->corpus.n_pieces, t->held_out, t->split == MT_SPLIT_VALIDATION, i);
}

/* Piece of the corpus at position `index` of this rank's epoch. */
static int64_t piece_at(const text_stream *t, int64_t epoch, int64_t index)
{
    int64_t i = index * t->world + t->rank;
    if (t->split == MT_SPLIT_TRAIN)
        i = mt_order_permute(mt_order_key(t->seed, epoch), t->pieces, i);
    return piece_of_split(t, i);
}

static const text_doc *doc_of_piece(const text_corpus *c, int64_t piece)
{
    int64_t low = 0, high = c->n_docs - 1;
    while (low < high) {
        int64_t mid = low + (high - low + 1) / 2;
        if (c->docs[mid].first_piece <= piece)
            low = mid;
        else
            high = mid - 1;
    }
    return &c->docs[low];
}

/* The document that a piece belongs to, where in it the piece starts, and how long it is. */
static const text_doc *locate(const text_stream *t, int64_t piece, int64_t *ret_start,
                              int64_t *ret_n)
{
    const text_doc *d = doc_of_piece(&t->corpus, piece);
    int64_t start = (piece - d->first_piece) * t->inputs;
    int64_t left = d->n - start;
    *ret_start = start;
    *ret_n = left < t->inputs + 1 ? left : t->inputs + 1;
    return d;
}

/* ---- the interface -------------------------------------------------------------------------- */

/* Target tokens of this rank in an epoch. With several ranks of a shuffled split who gets the
 * shorter pieces changes from epoch to epoch: then it is the mean, rounded. */
static int64_t count_targets(const text_stream *t)
{
    int64_t start, n, sum = 0;
    bool fixed = t->split == MT_SPLIT_VALIDATION;
    for (int64_t i = fixed ? t->rank : 0; i < t->pieces; i += fixed ? t->world : 1) {
        locate(t, piece_of_split(t, i), &start, &n);
        sum += n - 1;
    }
    return fixed || t->world == 1 ? sum
                                  : llround((double)sum * (double)t->mine / (double)t->pieces);
}

static mt_status read_keys(const mt_config *c, const char **ret_separator, double *ret_split)
{
    mt_status status;
    if ((status = mt_config_string(c, "document_separator", "none", ret_separator)) ||
        (status = mt_config_float(c, "validation_split", 0.05, ret_split)))
        return status;
    if (!**ret_separator)
        return c->reject(c, "document_separator",
                         "is empty; expected none, blank_line or the text between documents");
    if (!(*ret_split >= 0 && *ret_split <= 0.5))
        return c->reject(c, "validation_split",
                         "is %g; expected a fraction from 0 (no validation) to 0.5", *ret_split);
    if (c->has(c, "validation_split") && c->has(c, "validation_files"))
        return c->reject(c, "validation_split",
                         "cannot be given together with validation_files; remove one of the two");
    return MT_OK;
}

/* A corpus that is split gives at least one piece to each side; one of a single piece cannot be
 * split and is all training. */
static mt_status choose_split(text_stream *t, const mt_config *c, double split)
{
    int64_t all = t->corpus.n_pieces;
    if (c->has(c, "validation_files")) {
        t->held_out = t->split == MT_SPLIT_VALIDATION ? all : 0;
    } else {
        t->held_out = mt_order_held_out(all, split);
        if (split > 0 && all < 2 && t->split == MT_SPLIT_VALIDATION)
            mt_log(MT_LOG_WARNING,
                   "data: the text is shorter than max_seq_len and cannot be split; there is no "
                   "validation data (give validation_files)");
    }
    t->pieces = t->split == MT_SPLIT_VALIDATION ? t->held_out : all - t->held_out;
    t->mine = t->pieces > t->rank ? (t->pieces - t->rank + t->world - 1) / t->world : 0;
    if (t->split == MT_SPLIT_TRAIN && t->pieces < t->world)
        return c->reject(c, "files",
                         "hold %lld pieces of up to %lld tokens, too few for %d ranks; give more "
                         "text or a smaller max_seq_len",
                         (long long)t->pieces, (long long)t->inputs, t->world);
    return MT_OK;
}

mt_status text_open(const mt_data_request *request, void **ret_stream)
{
    const mt_config *config = request->config;
    int64_t max_seq_len = request->max_seq_len;
    int32_t rank = request->rank, world = request->world;
    if (max_seq_len < 1 || max_seq_len > INT32_MAX - 1 || world < 1 || rank < 0 || rank >= world)
        return mt_fail(MT_ERR_INVALID,
                       "text: max_seq_len %lld, rank %d of %d; expected 1 to 2^31 - 2, and a "
                       "rank below their number",
                       (long long)max_seq_len, rank, world);
    const char *separator;
    double fraction;
    mt_status status = read_keys(config, &separator, &fraction);
    if (status)
        return status;
    text_stream *t = calloc(1, sizeof *t);
    if (!t)
        return mt_fail_nomem();
    t->split = request->split;
    t->seed = request->seed;
    t->rank = rank;
    t->world = world;
    t->inputs = max_seq_len;
    (void)config->has(config, "files"); /* known, also where validation_files stand for it */
    bool files = request->split == MT_SPLIT_VALIDATION && config->has(config, "validation_files");
    /* Only a run that trains may not measure what it was trained on by mistake. */
    if (request->split == MT_SPLIT_TRAIN && config->has(config, "validation_files") &&
        (status = text_check_apart(config)))
        goto out;
    status = text_corpus_open(config, files ? "validation_files" : "files", separator, max_seq_len,
                              &t->corpus);
    if (status)
        goto out;
    if ((status = choose_split(t, config, fraction)))
        goto out;
    t->targets = count_targets(t);
    t->tokens = malloc((size_t)(max_seq_len + 1) * sizeof *t->tokens);
    t->bytes = malloc((size_t)(max_seq_len + 1));
    if (!t->tokens || !t->bytes)
        status = mt_fail_nomem();
out:
    if (status)
        text_close(t);
    else
        *ret_stream = t;
    return status;
}

void text_close(void *stream)
{
    text_stream *t = stream;
    if (!t)
        return;
    text_corpus_close(&t->corpus);
    free(t->tokens);
    free(t->bytes);
    free(t);
}

void text_size(const void *stream, int64_t *ret_documents, int64_t *ret_tokens)
{
    const text_stream *t = stream;
    *ret_documents = t->mine;
    *ret_tokens = t->targets;
}

mt_status text_next(void *stream, mt_document *ret)
{
    text_stream *t = stream;
    if (t->index == t->mine) {
        if (t->split == MT_SPLIT_VALIDATION)
            return MT_END;
        t->epoch++;
        t->index = 0;
    }
    int64_t piece = piece_at(t, t->epoch, t->index++);
    int64_t start, n;
    const text_doc *doc = locate(t, piece, &start, &n);
    mt_status status = text_corpus_read(&t->corpus, doc, start, n, t->bytes);
    if (status)
        return status;
    for (int64_t i = 0; i < n; i++)
        t->tokens[i] = t->bytes[i];
    *ret = (mt_document){ .tokens = t->tokens, .n = n, .id = piece };
    return MT_OK;
}

void text_tell(const void *stream, int64_t *ret_epoch, int64_t *ret_index)
{
    const text_stream *t = stream;
    bool turn = t->split == MT_SPLIT_TRAIN && t->index == t->mine;
    *ret_epoch = turn ? t->epoch + 1 : t->epoch;
    *ret_index = turn ? 0 : t->index;
}

mt_status text_seek(void *stream, int64_t epoch, int64_t index)
{
    text_stream *t = stream;
    if (epoch < 0 || index < 0 || index > t->mine || (t->split == MT_SPLIT_VALIDATION && epoch > 0))
        return mt_fail(MT_ERR_INVALID,
                       "text: cannot go to document %lld of epoch %lld: an epoch has %lld "
                       "documents; the data is not that of the checkpoint",
                       (long long)index, (long long)epoch, (long long)t->mine);
    t->epoch = epoch;
    t->index = index;
    return MT_OK;
}

int64_t text_vocab_size(const void *stream)
{
    (void)stream;
    return TEXT_VOCAB;
}

uint64_t text_fingerprint(const void *stream)
{
    return text_corpus_hash(&((const text_stream *)stream)->corpus);
}
