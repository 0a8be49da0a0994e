/* SPDX-License-Identifier: Apache-2.0
 *
 * Which samples an epoch consists of, in which order, and which of them are this rank's. Everything
 * is a function of (seed, epoch, index): seeking is exact and free.
 *
 * A dataset of n samples and weight w gives round(w n) of them, at least one, to each epoch. It is
 * gone through again and again, in a new order each time, and every epoch goes on where the one
 * before stopped: of weight 2 an epoch sees every sample twice, of weight 0.5 two epochs see every
 * one once.
 */
#include "stream.h"
#include "samples.h"

#include <math.h>
#include <megatrain/order.h>

typedef struct dataset {
    source source;
    samples samples;
    int64_t held_out; /* samples that are validation */
    int64_t n;        /* of this split */
    int64_t an_epoch; /* of them in each epoch, all ranks */
    int64_t first_id; /* of its samples, which are numbered through */
} dataset;

typedef struct stream {
    dataset *datasets;
    int64_t n_datasets;
    mt_split split;
    uint64_t seed;
    int32_t rank, world;
    bool shuffle;
    int64_t all, mine; /* samples in an epoch, of all ranks and of this one */
    int64_t tokens;    /* inputs in an epoch of this rank: the sum of n - 1 */
    int64_t epoch, index;
    int32_t *ids;     /* [longest sample] */
    uint8_t *trained; /* the same, and what shares bytes of marks with it */
    void *raw;        /* the same, as the file has them */
    uint8_t *bits;    /* the marks of the same, as the file has them */
    uint8_t *mask;    /* of the last sample, in `trained`; NULL: all of it is trained */
} stream;

/* ---- order ---------------------------------------------------------------------------------- */

/* Which of a dataset's samples the k-th of this split is. */
static int64_t index_of(const stream *t, const dataset *d, int64_t k)
{
    bool held_out = t->split == MT_SPLIT_VALIDATION;
    return mt_order_split(d->samples.n, d->held_out, held_out, k);
}

/* A sample by its place in the epoch, counted over all datasets and ranks: which one of *ret_d. */
static int64_t sample_at(const stream *t, int64_t epoch, int64_t place, const dataset **ret_d)
{
    bool training = t->split == MT_SPLIT_TRAIN, shuffle = training && t->shuffle;
    if (shuffle)
        place = mt_order_permute(mt_order_key(t->seed, epoch), t->all, place);
    const dataset *d = t->datasets;
    for (; place >= d->an_epoch; d++)
        place -= d->an_epoch;
    *ret_d = d;
    if (training) {
        place += epoch * d->an_epoch;
        int64_t pass = place / d->n;
        place %= d->n;
        if (shuffle)
            place = mt_order_permute(
                mt_order_key(t->seed ^ mt_order_mix((uint64_t)(d - t->datasets) + 1), pass), d->n,
                place);
    }
    return index_of(t, d, place);
}

/* The sum of n - 1 over every `step`-th sample of a dataset's split, from the `first` one on. */
static mt_status sum_inputs(const stream *t, const dataset *d, int64_t first, int64_t step,
                            int64_t *ret)
{
    doc_window w = { 0 };
    int64_t sum = 0;
    mt_status status = d->samples.items ? MT_OK : doc_window_open(&d->samples.file, &w);
    for (int64_t k = first; k < d->n && !status; k += step) {
        sample s = { 0 };
        status = samples_get(&d->samples, index_of(t, d, k), &w, &s);
        sum += (int64_t)s.n - 1;
    }
    doc_window_close(&w);
    *ret = sum;
    return status;
}

/* Inputs of this rank in an epoch. Where that changes from epoch to epoch, since other samples are
 * chosen or dealt to it, it is the mean, rounded. */
static mt_status count_tokens(stream *t)
{
    const bool exact = t->split == MT_SPLIT_VALIDATION;
    int64_t before = 0, total = 0, sum;
    double mean = 0;
    for (int64_t i = 0; i < t->n_datasets; i++) {
        const dataset *d = &t->datasets[i];
        int64_t first = exact ? ((t->rank - before) % t->world + t->world) % t->world : 0;
        mt_status status = sum_inputs(t, d, first, exact ? t->world : 1, &sum);
        if (status)
            return status;
        total += sum;
        before += d->an_epoch;
        if (d->n > 0)
            mean += (double)sum / (double)d->n * (double)d->an_epoch;
    }
    if (exact)
        t->tokens = total;
    else
        t->tokens = t->all ? llround(mean * (double)t->mine / (double)t->all) : 0;
    return MT_OK;
}

/* ---- opening -------------------------------------------------------------------------------- */

static const char *cache_folder(const mt_data_request *r, const doc_options *o)
{
    if (strcmp(o->cache, "off") == 0)
        return NULL;
    return strcmp(o->cache, "auto") == 0 ? r->cache_folder : o->cache;
}

/* One line on what a dataset is, and warnings on what was left out of it. Validation is opened for
 * every evaluation anew and says nothing. */
static void report(const dataset *d, const char *key)
{
    const samples *t = &d->samples;
    const source *s = &d->source;
    mt_log(MT_LOG_INFO,
           "data: %s: %s: %lld sample%s, %lld tokens (%lld trained), %.0f in the mean; longest "
           "document %lld",
           key, s->format, (long long)t->n, t->n == 1 ? "" : "s", (long long)t->tokens,
           (long long)t->targets, t->n ? (double)t->tokens / (double)t->n : 0.0,
           (long long)t->longest);
    if (s->skipped)
        mt_log(MT_LOG_WARNING, "data: %s: malformed records, skipped: %lld", key,
               (long long)s->skipped);
    if (s->untrained + t->empty)
        mt_log(MT_LOG_WARNING, "data: %s: samples without a token to train on, left out: %lld", key,
               (long long)(s->untrained + t->empty));
    if (t->dropped)
        mt_log(MT_LOG_WARNING, "data: %s: documents longer than max_seq_len, left out: %lld", key,
               (long long)t->dropped);
    if (t->cut)
        mt_log(MT_LOG_INFO, "data: %s: documents longer than max_seq_len, cut: %lld", key,
               (long long)t->cut);
}

static mt_status open_dataset(stream *t, const mt_data_request *r, const doc_options *o,
                              const doc_dataset *from)
{
    const char *folder = cache_folder(r, o);
    dataset *d = &t->datasets[t->n_datasets];
    mt_status status = source_open(r, o, from, folder, &d->source);
    if (!status)
        status = samples_build(&d->source, r->max_seq_len, o->long_documents, folder, &d->samples);
    if (status) {
        source_close(&d->source);
        return status;
    }
    t->n_datasets++;
    int64_t n = d->samples.n;
    if (from != &o->validation)
        d->held_out = mt_order_held_out(n, o->validation_split);
    else
        d->held_out = n;
    d->n = t->split == MT_SPLIT_VALIDATION ? d->held_out : n - d->held_out;
    d->an_epoch = d->n;
    if (t->split == MT_SPLIT_TRAIN && d->n > 0)
        d->an_epoch = llround(fmax(1, (double)d->n * from->weight));
    if (t->n_datasets > 1)
        d->first_id = d[-1].first_id + d[-1].samples.n;
    t->all += d->an_epoch;
    if (t->split == MT_SPLIT_TRAIN)
        report(d, from->key);
    if (n == 0)
        return r->config->reject(
            r->config, from->key,
            "hold no sample with a token to train on; expected at least one (is the "
            "answer of every document beyond max_seq_len?)");
    return MT_OK;
}

/* Keys that say something about data that is not there would be ignored in silence. */
static mt_status check_keys(const stream *t, const mt_config *c)
{
    bool text = false, records = false, turns = false, bare = false;
    for (int64_t i = 0; i < t->n_datasets; i++) {
        const source *s = &t->datasets[i].source;
        turns |= s->conversations || strcmp(s->format, doc_format_names[FORMAT_TOKENIZED]) == 0;
        bare |= s->n_files > 0;
        text |= s->text;
        records |= s->records;
    }
    if (c->has(c, "train_on") && !turns)
        return c->reject(c, "train_on",
                         "says what is trained of conversations and completions; there are none");
    if (c->has(c, "dtype") && !bare)
        return c->reject(c, "dtype", "belongs to token files (.bin); there are none");
    if (c->has(c, "end_token") && !bare)
        return c->reject(c, "end_token", "belongs to token files (.bin); there are none");
    if (c->has(c, "document_separator") && !text)
        return c->reject(c, "document_separator", "belongs to text files; there are none");
    if (c->has(c, "columns") && !records)
        return c->reject(c, "columns", "belongs to records of JSON; there are none");
    return MT_OK;
}

static mt_status open_datasets(stream *t, const mt_data_request *r, const doc_options *o)
{
    bool apart = o->validation.files.n > 0 && t->split == MT_SPLIT_VALIDATION;
    int64_t n = apart ? 1 : o->n_train;
    t->datasets = calloc((size_t)n, sizeof *t->datasets);
    if (!t->datasets)
        return mt_fail_nomem();
    mt_status status = MT_OK;
    for (int64_t i = 0; i < n && !status; i++)
        status = open_dataset(t, r, o, apart ? &o->validation : &o->train[i]);
    if (!status && !apart)
        status = check_keys(t, r->config);
    if (status)
        return status;
    t->mine = t->all > t->rank ? (t->all - t->rank + t->world - 1) / t->world : 0;
    if (t->split == MT_SPLIT_TRAIN && t->all < t->world)
        return r->config->reject(r->config, o->train[0].key,
                                 "hold %lld samples, too few for %d ranks; give more data",
                                 (long long)t->all, t->world);
    return count_tokens(t);
}

static mt_status allocate(stream *t)
{
    int64_t longest = 1;
    for (int64_t i = 0; i < t->n_datasets; i++)
        longest = t->datasets[i].samples.most > longest ? t->datasets[i].samples.most : longest;
    t->ids = malloc((size_t)longest * sizeof *t->ids);
    t->trained = malloc((size_t)longest + 16);
    t->raw = malloc((size_t)longest * sizeof *t->ids);
    t->bits = malloc((size_t)longest / 8 + 2);
    return t->ids && t->trained && t->raw && t->bits ? MT_OK : mt_fail_nomem();
}

mt_status stream_open(const mt_data_request *request, void **ret_stream)
{
    const mt_data_request *r = request;
    if (r->max_seq_len < 1 || r->max_seq_len > INT32_MAX - 1 || r->world < 1 || r->rank < 0 ||
        r->rank >= r->world)
        return mt_fail(MT_ERR_INVALID,
                       "data: max_seq_len %lld, rank %d of %d; expected 1 to 2^31 - 2, and a rank "
                       "below their number",
                       (long long)r->max_seq_len, r->rank, r->world);
    doc_options o = { 0 };
    stream *t = calloc(1, sizeof *t);
    if (!t)
        return mt_fail_nomem();
    t->split = r->split;
    t->seed = r->seed;
    t->rank = r->rank;
    t->world = r->world;
    mt_status status = doc_options_read(r, &o);
    t->shuffle = o.shuffle;
    if (!status)
        status = open_datasets(t, r, &o);
    if (!status)
        status = allocate(t);
    doc_options_finish(&o);
    if (status)
        stream_close(t);
    else
        *ret_stream = t;
    return status;
}

void stream_close(void *stream_)
{
    stream *t = stream_;
    if (!t)
        return;
    for (int64_t i = 0; i < t->n_datasets; i++) {
        source_close(&t->datasets[i].source);
        samples_free(&t->datasets[i].samples);
    }
    free(t->datasets);
    free(t->ids);
    free(t->trained);
    free(t->raw);
    free(t->bits);
    free(t);
}

/* ---- reading -------------------------------------------------------------------------------- */

void stream_size(const void *stream_, int64_t *ret_documents, int64_t *ret_tokens)
{
    const stream *t = stream_;
    *ret_documents = t->mine;
    *ret_tokens = t->tokens;
}

/* Makes a byte of each bit, 0 or 1. */
static void spread_bits(const uint8_t *bits, size_t n_bytes, uint8_t *ret)
{
    for (size_t i = 0; i < n_bytes; i++) {
        uint64_t each = bits[i] * 0x0101010101010101u & 0x8040201008040201u; /* bit k in byte k */
        each = (each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
        memcpy(ret + 8 * i, &each, sizeof each);
    }
}

/* Reads the n tokens from `from` on, and their marks. */
static mt_status read_sample(stream *t, const plane *p, int64_t from, int64_t n)
{
    const size_t width = (size_t)p->width, first = (size_t)from / 8, shift = (size_t)from % 8;
    const size_t n_bytes = (shift + (size_t)n + 7) / 8;
    mt_status status =
        doc_file_read(p->file, p->tokens + (size_t)from * width, (size_t)n * width, t->raw);
    if (!status && p->trained)
        status = doc_file_read(p->file, p->trained + first, n_bytes, t->bits);
    if (status)
        return status;
    if (width == 2)
        for (int64_t i = 0; i < n; i++)
            t->ids[i] = ((const uint16_t *)t->raw)[i];
    else
        memcpy(t->ids, t->raw, (size_t)n * sizeof *t->ids);
    t->mask = p->trained ? t->trained + shift : NULL;
    if (t->mask) {
        spread_bits(t->bits, n_bytes, t->trained);
        t->mask[0] = 0; /* of a later piece it is a target of the one before */
    }
    return MT_OK;
}

/* All ids were looked at when the file was opened: larger ones came since, and would end the run as
 * a fault of whoever asked for them. */
static mt_status check_ids(const stream *t, const dataset *d, const plane *p, int64_t from,
                           int64_t n)
{
    const int64_t vocab = d->samples.vocab;
    for (int64_t i = 0; i < n; i++)
        if (t->ids[i] < 0 || t->ids[i] >= vocab)
            return doc_file_changed(
                p->file, "has become another one: token %lld is %u, and all were below %lld",
                (long long)(from + i), (uint32_t)t->ids[i], (long long)vocab);
    return MT_OK;
}

mt_status stream_next(void *stream_, mt_document *ret)
{
    stream *t = stream_;
    if (t->index == t->mine) {
        if (t->split == MT_SPLIT_VALIDATION)
            return MT_END;
        t->epoch++;
        t->index = 0;
    }
    const dataset *d;
    sample s;
    int64_t i = sample_at(t, t->epoch, t->index++ * t->world + t->rank, &d);
    mt_status status = samples_get(&d->samples, i, NULL, &s);
    if (status)
        return status;
    const plane *p = &d->source.planes[s.start >> SAMPLE_PLANE_SHIFT];
    int64_t from = (int64_t)(s.start & (((uint64_t)1 << SAMPLE_PLANE_SHIFT) - 1));
    if ((status = read_sample(t, p, from, s.n)) || (status = check_ids(t, d, p, from, s.n)))
        return status;
    *ret = (mt_document){ .tokens = t->ids, .loss_mask = t->mask, .n = s.n, .id = d->first_id + i };
    return MT_OK;
}

void stream_tell(const void *stream_, int64_t *ret_epoch, int64_t *ret_index)
{
    const stream *t = stream_;
    bool turn = t->split == MT_SPLIT_TRAIN && t->index == t->mine;
    *ret_epoch = turn ? t->epoch + 1 : t->epoch;
    *ret_index = turn ? 0 : t->index;
}

mt_status stream_seek(void *stream_, int64_t epoch, int64_t index)
{
    stream *t = stream_;
    if (epoch < 0 || index < 0 || index > t->mine || (t->split == MT_SPLIT_VALIDATION && epoch > 0))
        return mt_fail(MT_ERR_INVALID,
                       "data: cannot go to document %lld of epoch %lld: an epoch has %lld "
                       "documents; the data is not that of the checkpoint",
                       (long long)index, (long long)epoch, (long long)t->mine);
    t->epoch = epoch;
    t->index = index;
    return MT_OK;
}

int64_t stream_vocab_size(const void *stream_)
{
    const stream *t = stream_;
    int64_t vocab = 0;
    for (int64_t i = 0; i < t->n_datasets; i++)
        vocab = t->datasets[i].samples.vocab > vocab ? t->datasets[i].samples.vocab : vocab;
    return vocab;
}

/* What a position means: besides the content, how it is cut, weighted and ordered. */
uint64_t stream_fingerprint(const void *stream_)
{
    const stream *t = stream_;
    uint64_t hash = t->shuffle;
    for (int64_t i = 0; i < t->n_datasets; i++) {
        const dataset *d = &t->datasets[i];
        uint64_t content = 0;
        if (source_hash(&d->source, &content) != MT_OK)
            return 0; /* unknown: who reads the file next fails */
        hash = mt_order_mix(hash ^ content);
        hash = mt_order_mix(hash ^ (uint64_t)d->samples.n);
        hash = mt_order_mix(hash ^ (uint64_t)d->samples.tokens);
        hash = mt_order_mix(hash ^ (uint64_t)d->held_out);
        hash = mt_order_mix(hash ^ (uint64_t)d->an_epoch);
    }
    return hash ? hash : 1; /* 0 is for none */
}
