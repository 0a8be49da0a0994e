/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening datasets.
 */
#include "source.h"
#include "build.h"
#include "folder.h"
#include "reader.h"

/* ---- keys of caches ------------------------------------------------------------------------- */

static void add_number(XXH3_state_t *s, uint64_t x)
{
    XXH3_64bits_update(s, &x, sizeof x);
}

static void add_text(XXH3_state_t *s, const char *text)
{
    XXH3_64bits_update(s, text, strlen(text) + 1);
}

/* Everything that decides what is in a cache. max_seq_len does not: documents are kept whole. */
static mt_status make_key(const doc_options *o, const doc_dataset *d, const encoder *e,
                          const char *folder, uint64_t *ret, uint64_t *ret_content)
{
    uint64_t content;
    mt_status status = folder_hash_files(folder, &d->files, &content);
    if (status)
        return status;
    XXH3_state_t *s = XXH3_createState();
    if (!s)
        return mt_fail_nomem();
    XXH3_64bits_reset(s);
    add_number(s, content);
    for (int64_t i = 0; i < d->files.n; i++)
        add_number(s, reader_kind(d->files.items[i].path));
    add_number(s, encoder_fingerprint(e));
    add_number(s, d->format);
    for (int i = 0; i < COLUMNS; i++)
        add_text(s, d->columns[i] ? d->columns[i] : "");
    add_number(s, o->skip_errors);
    add_text(s, o->separator);
    *ret = XXH3_64bits_digest(s);
    *ret_content = content;
    XXH3_freeState(s);
    return MT_OK;
}

/* ---- what a dataset holds ------------------------------------------------------------------- */

/* Are the files token files? They cannot be mixed with others. */
static mt_status check_kinds(const mt_config *c, const doc_dataset *d, bool *ret_tokens)
{
    int64_t tokens = 0;
    for (int64_t i = 0; i < d->files.n; i++) {
        const char *path = d->files.items[i].path;
        file_kind kind = reader_kind(path);
        if (kind == FILE_REFUSED)
            return c->reject(c, d->key,
                             "'%s' is of a kind that is not read; expected .jsonl, .json, .txt or "
                             ".bin: unpack it, or convert it to JSON lines",
                             path);
        tokens += kind == FILE_TOKENS;
    }
    if (tokens > 0 && tokens < d->files.n)
        return c->reject(c, d->key,
                         "mixes token files (.bin) with others; put them in datasets of their own");
    if (tokens > 0 && d->format != FORMAT_AUTO)
        return c->reject(c, "format", "is '%s', but token files (.bin) have no records",
                         doc_format_names[d->format]);
    *ret_tokens = tokens > 0;
    return MT_OK;
}

static int32_t end_token(const mt_data_request *r, const doc_options *o)
{
    if (o->end_token >= 0)
        return (int32_t)o->end_token;
    if (o->end_token == END_TOKEN_NONE || !r->tokenizer)
        return -1;
    return r->tokenizer->special(r->tokens, MT_SPECIAL_END);
}

static mt_status open_token_files(const mt_data_request *r, const doc_options *o,
                                  const doc_dataset *d, source *s)
{
    s->files = calloc((size_t)d->files.n, sizeof *s->files);
    s->planes = calloc((size_t)d->files.n, sizeof *s->planes);
    if (!s->files || !s->planes)
        return mt_fail_nomem();
    s->format = "token files";
    for (int64_t i = 0; i < d->files.n; i++) {
        token_file *f = &s->files[i];
        mt_status status = token_file_open(r->config, o, d->files.items[i].path, f);
        if (status)
            return status;
        s->n_files++;
        s->planes[s->n_planes++] = (plane){ .file = &f->file,
                                            .width = f->width,
                                            .n = f->n,
                                            .end = end_token(r, o),
                                            .tokens = f->first };
    }
    return MT_OK;
}

/* Tokenises, unless another process has just done it. */
static mt_status make_cache(const build_request *b, cache *ret)
{
    int lock = -1;
    if (!b->folder)
        return build_cache(b, ret);
    mt_status status = folder_lock(b->folder, b->key, &lock);
    if (status)
        return status;
    status = cache_open(b->folder, b->key, ret);
    if (status == MT_ERR_NOT_FOUND) {
        folder_prune(b->folder);
        status = build_cache(b, ret);
    }
    folder_unlock(b->folder, b->key, lock);
    return status;
}

static mt_status open_cache(const mt_data_request *r, const doc_options *o, const doc_dataset *d,
                            const char *folder, source *s)
{
    encoder e = { 0 };
    uint64_t key = 0, content = 0;
    mt_status status = encoder_init(r, o, &e);
    if (status)
        return status;
    if (folder)
        status = make_key(o, d, &e, folder, &key, &content);
    if (!status)
        status = folder ? cache_open(folder, key, &s->cache) : MT_ERR_NOT_FOUND;
    if (status == MT_ERR_NOT_FOUND) {
        const build_request build = { r->config, o, d, &e, folder, key, content };
        status = make_cache(&build, &s->cache);
    }
    if (!status && folder)
        folder_use(folder, key, &d->files);
    encoder_finish(&e);
    return status;
}

static mt_status use_cache(const doc_dataset *d, source *s)
{
    const cache *c = &s->cache;
    doc_format format = (doc_format)c->facts.format;
    s->planes = calloc(1, sizeof *s->planes);
    if (!s->planes)
        return mt_fail_nomem();
    s->n_planes = 1;
    s->planes[0] = (plane){ .width = c->facts.width,
                            .n = c->facts.tokens,
                            .documents = c->facts.documents,
                            .tokens = c->tokens,
                            .trained = c->trained,
                            .offsets = c->offsets };
    s->format = format == FORMAT_AUTO ? "text files" : doc_format_names[format];
    for (int64_t i = 0; i < d->files.n; i++) {
        bool json = reader_all_json(d) || reader_kind(d->files.items[i].path) == FILE_JSON;
        s->records |= json;
        s->text |= !json;
    }
    s->skipped = c->facts.skipped;
    s->untrained = c->facts.untrained;
    s->conversations = format == FORMAT_MESSAGES || format == FORMAT_SHAREGPT ||
                       format == FORMAT_ALPACA || format == FORMAT_PROMPT;
    return MT_OK;
}

mt_status source_open(const mt_data_request *request, const doc_options *o, const doc_dataset *d,
                      const char *folder, source *ret)
{
    source s = { 0 };
    bool tokens = false;
    mt_status status = check_kinds(request->config, d, &tokens);
    if (!status)
        status =
            tokens ? open_token_files(request, o, d, &s) : open_cache(request, o, d, folder, &s);
    if (!status && !tokens)
        status = use_cache(d, &s);
    if (status) {
        source_close(&s);
        return status;
    }
    *ret = s;
    if (!tokens)
        ret->planes[0].file = &ret->cache.file;
    return MT_OK;
}

mt_status source_hash(const source *s, uint64_t *ret)
{
    uint64_t hash = s->cache.hash;
    for (int64_t i = 0; i < s->n_files; i++) {
        uint64_t parts[] = { hash, 0, (uint64_t)(int64_t)s->planes[i].end };
        mt_status status = token_file_hash(&s->files[i], &parts[1]);
        if (status)
            return status;
        hash = XXH3_64bits(parts, sizeof parts);
    }
    *ret = hash;
    return MT_OK;
}

void source_close(source *s)
{
    for (int64_t i = 0; i < s->n_files; i++)
        token_file_close(&s->files[i]);
    free(s->files);
    free(s->planes);
    cache_close(&s->cache);
    *s = (source){ 0 };
}
