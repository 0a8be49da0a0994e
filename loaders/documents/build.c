/* SPDX-License-Identifier: Apache-2.0
 *
 * Records travel in batches through a ring of slots. The calling thread fills slots and writes
 * those that are done, in order; workers tokenise in between. What is in memory at once is bounded
 * by the ring, whatever the size of the files.
 */
#include "build.h"
#include "folder.h"
#include "reader.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

enum {
    BATCH_BYTES = 256 << 10, /* of text, at least, but for the last one */
    BATCH_RECORDS = 4096,    /* at most */
    MOST_WORKERS = 64,
    SLOTS_PER_WORKER = 3,
    DETECT_RECORDS = 100, /* looked at for one that is well-formed */
    MOST_WARNINGS = 5,    /* malformed records that are named; the others are counted */
    PROGRESS_SECONDS = 10
};

/* A record's place in the batch, and what became of it. */
typedef struct item {
    int64_t at, n; /* text */
    int64_t file, line;
    bool json;
    mt_status status;
    int64_t tokens; /* of its document */
} item;

typedef struct batch {
    bool done; /* tokenised */
    char *text;
    int64_t n_text, cap_text;
    item *items;
    int64_t n_items, cap_items;
    token_list tokens;        /* of all documents, one after the other */
    char reason[REASON_SIZE]; /* of the first record that failed */
} batch;

typedef struct builder {
    const build_request *request;
    record_shape shape;
    reader *in;
    cache_writer *out;
    cache_facts facts;
    int64_t total_bytes;
    time_t reported;

    pthread_t threads[MOST_WORKERS];
    int64_t n_threads;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* a slot was filled or is done */
    batch *slots;
    int64_t n_slots;
    int64_t filled, taken, written; /* batches so far; slot i % n_slots */
    bool stop;
} builder;

/* ---- tokenising ----------------------------------------------------------------------------- */

static mt_status convert(const builder *b, const batch *k, const item *i, record *scratch,
                         token_list *out, char *reason)
{
    const encoder *e = b->request->encoder;
    const char *text = k->text + i->at;
    if (!i->json)
        return encode_text(e, (text_piece){ text, i->n }, out, reason);
    record_clear(scratch);
    scratch->root = record_parse(text, i->n, reason);
    if (!scratch->root)
        return MT_ERR_FORMAT;
    mt_status status = record_read(&b->shape, scratch, reason);
    return status ? status : encode_record(e, scratch, out, reason);
}

static void convert_batch(const builder *b, batch *k, record *scratch)
{
    char reason[REASON_SIZE];
    k->reason[0] = '\0';
    k->tokens.n = 0;
    for (int64_t i = 0; i < k->n_items; i++) {
        item *it = &k->items[i];
        int64_t from = k->tokens.n;
        snprintf(reason, sizeof reason, "out of memory");
        it->status = convert(b, k, it, scratch, &k->tokens, reason);
        if (it->status) {
            k->tokens.n = from;
            if (!k->reason[0])
                memcpy(k->reason, reason, sizeof reason);
        }
        it->tokens = k->tokens.n - from;
    }
}

static void *work(void *arg)
{
    builder *b = arg;
    record scratch = { 0 };
    pthread_mutex_lock(&b->lock);
    for (;;) {
        while (!b->stop && b->taken == b->filled)
            pthread_cond_wait(&b->wake, &b->lock);
        if (b->stop)
            break;
        batch *k = &b->slots[b->taken++ % b->n_slots];
        pthread_mutex_unlock(&b->lock);
        convert_batch(b, k, &scratch);
        pthread_mutex_lock(&b->lock);
        k->done = true;
        pthread_cond_broadcast(&b->wake);
    }
    pthread_mutex_unlock(&b->lock);
    record_finish(&scratch);
    return NULL;
}

static int64_t count_workers(const doc_options *o)
{
    cpu_set_t set;
    int64_t n = o->workers;
    if (n == 0)
        n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > MOST_WORKERS ? MOST_WORKERS : n;
}

/* Signals stay with the calling thread. */
static mt_status start(builder *b)
{
    int64_t wanted = count_workers(b->request->options);
    b->n_slots = wanted * SLOTS_PER_WORKER;
    b->slots = calloc((size_t)b->n_slots, sizeof *b->slots);
    if (!b->slots)
        return mt_fail_nomem();
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    int rc = 0;
    while (b->n_threads < wanted && !rc) {
        rc = pthread_create(&b->threads[b->n_threads], NULL, work, b);
        b->n_threads += rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return b->n_threads ? MT_OK
                        : mt_fail(MT_ERR_NOMEM, "data: cannot start a thread: %s", strerror(rc));
}

static void stop(builder *b)
{
    pthread_mutex_lock(&b->lock);
    b->stop = true;
    pthread_cond_broadcast(&b->wake);
    pthread_mutex_unlock(&b->lock);
    for (int64_t i = 0; i < b->n_threads; i++)
        pthread_join(b->threads[i], NULL);
    for (int64_t i = 0; b->slots && i < b->n_slots; i++) {
        free(b->slots[i].text);
        free(b->slots[i].items);
        token_list_finish(&b->slots[i].tokens);
    }
    free(b->slots);
}

/* ---- reading -------------------------------------------------------------------------------- */

static mt_status add_record(batch *k, const raw_record *r)
{
    void *items = k->items;
    if (doc_grow(&items, k->n_items, &k->cap_items, sizeof *k->items))
        return MT_ERR_NOMEM;
    k->items = items;
    if (k->n_text + r->n > k->cap_text) {
        int64_t wanted = k->n_text + r->n + BATCH_BYTES;
        char *grown = realloc(k->text, (size_t)wanted);
        if (!grown)
            return mt_fail_nomem();
        k->text = grown;
        k->cap_text = wanted;
    }
    memcpy(k->text + k->n_text, r->text, (size_t)r->n);
    k->items[k->n_items++] =
        (item){ .at = k->n_text, .n = r->n, .file = r->file, .line = r->line, .json = r->json };
    k->n_text += r->n;
    return MT_OK;
}

/* Reads a batch into the next slot; MT_END when no record is left. */
static mt_status fill(builder *b)
{
    batch *k = &b->slots[b->filled % b->n_slots];
    mt_status status = MT_OK;
    k->n_text = k->n_items = 0;
    while (!status && k->n_text < BATCH_BYTES && k->n_items < BATCH_RECORDS) {
        raw_record r;
        status = reader_next(b->in, &r);
        if (!status)
            status = add_record(k, &r);
    }
    if (status < 0 || k->n_items == 0)
        return status;
    pthread_mutex_lock(&b->lock);
    k->done = false;
    b->filled++;
    pthread_cond_broadcast(&b->wake);
    pthread_mutex_unlock(&b->lock);
    return MT_OK;
}

/* ---- writing -------------------------------------------------------------------------------- */

/* What is said of a record that failed. Only the first reason of a batch was kept; of another one
 * that is to be named, the record is looked at again. */
static void explain(builder *b, batch *k, item *i, char *reason)
{
    record scratch = { 0 };
    token_list tokens = { 0 };
    (void)convert(b, k, i, &scratch, &tokens, reason);
    record_finish(&scratch);
    token_list_finish(&tokens);
}

/* The name of the format of a record that is well-formed in another one than all are read as;
 * NULL: it is not. */
static const char *other_format(const builder *b, const batch *k, const item *i)
{
    char text[REASON_SIZE];
    json_t *root = i->json ? record_parse(k->text + i->at, i->n, text) : NULL;
    doc_format f = root ? record_detect(&b->shape, root, text, sizeof text) : FORMAT_AUTO;
    json_decref(root);
    return f == FORMAT_AUTO || f == b->shape.format ? NULL : doc_format_names[f];
}

/* Stops at a malformed record, or counts it and goes on. */
static mt_status meet_error(builder *b, batch *k, item *i, bool first)
{
    const doc_options *o = b->request->options;
    const char *path = b->request->dataset->files.items[i->file].path;
    char reason[REASON_SIZE] = "out of memory";
    if (!o->skip_errors || i->status != MT_ERR_FORMAT || b->facts.skipped < MOST_WARNINGS) {
        if (first)
            memcpy(reason, k->reason, sizeof reason);
        else
            explain(b, k, i, reason);
    }
    if (i->status != MT_ERR_FORMAT)
        return mt_fail(i->status, "%s:%lld: %s", path, (long long)i->line, reason);
    const char *other = o->skip_errors ? NULL : other_format(b, k, i);
    if (other)
        return mt_fail(MT_ERR_FORMAT,
                       "%s:%lld: %s; the record is of the format %s, but the files are read as %s: "
                       "give those of each format an entry of their own in data.datasets",
                       path, (long long)i->line, reason, other, doc_format_names[b->shape.format]);
    if (!o->skip_errors)
        return mt_fail(MT_ERR_FORMAT,
                       "%s:%lld: %s; correct the record, or leave such ones out with "
                       "data.on_error: skip",
                       path, (long long)i->line, reason);
    if (b->facts.skipped++ < MOST_WARNINGS)
        mt_log(MT_LOG_WARNING, "%s:%lld: skipped: %s", path, (long long)i->line, reason);
    return MT_OK;
}

static bool any_trained(const uint8_t *trained, int64_t n)
{
    return n > 1 && memchr(trained + 1, 1, (size_t)n - 1);
}

static mt_status write_batch(builder *b, batch *k)
{
    mt_status status = MT_OK;
    int64_t at = 0;
    bool first = true;
    for (int64_t i = 0; i < k->n_items && !status; i++) {
        item *it = &k->items[i];
        const uint8_t *trained = k->tokens.trained + at;
        if (it->status) {
            status = meet_error(b, k, it, first);
            first = false;
        } else if (any_trained(trained, it->tokens)) {
            status = cache_append(b->out, k->tokens.ids + at, trained, it->tokens);
        } else {
            b->facts.untrained++;
        }
        at += it->tokens;
    }
    return status;
}

static void report(builder *b)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (b->reported == 0)
        b->reported = now.tv_sec;
    if (now.tv_sec - b->reported < PROGRESS_SECONDS)
        return;
    b->reported = now.tv_sec;
    mt_log(MT_LOG_INFO, "data: tokenising %s: %s of %s", b->request->dataset->key,
           doc_bytes(reader_bytes(b->in)).s, doc_bytes(b->total_bytes).s);
}

/* Fills and writes until nothing is left. */
static mt_status run(builder *b)
{
    mt_status status = MT_OK;
    bool more = true;
    for (;;) {
        while (more && b->filled - b->written < b->n_slots) {
            status = fill(b);
            if (status < 0)
                return status;
            more = status == MT_OK;
        }
        if (b->written == b->filled)
            return MT_OK;
        batch *k = &b->slots[b->written % b->n_slots];
        pthread_mutex_lock(&b->lock);
        while (!k->done)
            pthread_cond_wait(&b->wake, &b->lock);
        pthread_mutex_unlock(&b->lock);
        if ((status = write_batch(b, k)))
            return status;
        b->written++;
        report(b);
    }
}

/* ---- formats -------------------------------------------------------------------------------- */

/* The format of the first well-formed JSON record. A dataset without any keeps FORMAT_AUTO. */
static mt_status detect(builder *b)
{
    const build_request *q = b->request;
    char reason[REASON_SIZE], found[REASON_SIZE] = "";
    reader *r = NULL;
    mt_status status = reader_open(&q->dataset->files, q->options->separator, false, &r);
    bool known = false, seen = false;
    for (int i = 0; i < DETECT_RECORDS && !status && !known; i++) {
        raw_record raw;
        do
            status = reader_next(r, &raw);
        while (!status && !raw.json);
        json_t *root = status ? NULL : record_parse(raw.text, raw.n, reason);
        if (!root)
            continue;
        seen = true;
        b->shape.format = record_detect(&b->shape, root, found, sizeof found);
        known = b->shape.format != FORMAT_AUTO;
        json_decref(root);
    }
    reader_close(r);
    if (status < 0)
        return status;
    if (seen && !known && !*found)
        return q->config->reject(q->config, q->dataset->key, "begin with records without keys");
    if (seen && !known)
        return q->config->reject(q->config, q->dataset->key,
                                 "the records have the keys %s, which is no format that is known; "
                                 "expected messages, conversations, instruction and output, prompt "
                                 "and completion, text, or input_ids; name yours in data.columns",
                                 found);
    return MT_OK;
}

static bool only_text(const mt_files *files)
{
    for (int64_t i = 0; i < files->n; i++)
        if (reader_kind(files->items[i].path) == FILE_JSON)
            return false;
    return true;
}

/* The format that was asked for or found. Of records of which none is well-formed any format says
 * what is wrong. */
static mt_status choose_format(builder *b)
{
    const build_request *q = b->request;
    record_shape_init(q->dataset, &b->shape);
    if (b->shape.format == FORMAT_AUTO && !only_text(&q->dataset->files)) {
        mt_status status = detect(b);
        if (status)
            return status;
        b->facts.format = b->shape.format;
        if (b->shape.format == FORMAT_AUTO)
            b->shape.format = FORMAT_TEXT;
    }
    b->facts.format = b->shape.format;
    if ((only_text(&q->dataset->files) || b->shape.format == FORMAT_TEXT ||
         b->shape.format == FORMAT_PROMPT) &&
        q->encoder->end < 0 && q->encoder->tokenizer)
        mt_log(MT_LOG_WARNING,
               "data: %s: the tokenizer names no end token (EOS), so that documents end without "
               "one",
               q->dataset->key);
    if (b->shape.format != FORMAT_ALPACA || q->encoder->conversation)
        return MT_OK;
    mt_status status = encoder_use_alpaca(q->encoder);
    if (q->encoder->conversation)
        mt_log(MT_LOG_INFO, "data: %s: the model has no chat format: instructions as alpaca",
               q->dataset->key);
    return status;
}

/* A cache must not outlive, under the key of what its files held, what it was made of. */
static mt_status check_files(const build_request *q)
{
    uint64_t content = 0;
    mt_status status =
        q->folder ? folder_hash_files(q->folder, &q->dataset->files, &content) : MT_OK;
    if (status || !q->folder || content == q->content)
        return status;
    return mt_fail(MT_ERR_IO,
                   "%s: changed while %s was tokenised; try again once the data is complete",
                   q->dataset->files.items[0].path, q->dataset->key);
}

mt_status build_cache(const build_request *request, cache *ret)
{
    const doc_dataset *d = request->dataset;
    builder b = { .request = request };
    bool narrow = request->encoder->vocab > 0 && request->encoder->vocab <= UINT16_MAX + 1;
    for (int64_t i = 0; i < d->files.n; i++)
        b.total_bytes += d->files.items[i].size;
    pthread_mutex_init(&b.lock, NULL);
    pthread_cond_init(&b.wake, NULL);
    mt_status status = choose_format(&b);
    if (!status)
        status = reader_open(&d->files, request->options->separator, reader_all_json(d), &b.in);
    if (!status)
        status = cache_create(request->folder, request->key, narrow ? 2 : 4, &b.out);
    if (!status)
        status = start(&b);
    if (!status)
        status = run(&b);
    if (!status)
        status = check_files(request);
    stop(&b);
    if (!status) {
        status = cache_finish(b.out, &b.facts, ret);
        b.out = NULL;
    }
    if (!status)
        mt_log(MT_LOG_INFO, "data: %s: tokenised %s%s%s", d->key, doc_bytes(b.total_bytes).s,
               request->folder ? ", kept in " : "", request->folder ? request->folder : "");
    cache_abort(b.out);
    reader_close(b.in);
    pthread_cond_destroy(&b.wake);
    pthread_mutex_destroy(&b.lock);
    return status;
}
