/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads a tokenizer.json: the model with its vocabulary and merges, and the added tokens; the
 * stages around them are read by pipeline.c.
 */
#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* Changes when the same file would give other tokens than before. */
enum { REVISION = 1 };

static const tok_place top = { "" }, model_place = { "model" }, vocab_place = { "model.vocab" },
                       merges_place = { "model.merges" }, added_place = { "added_tokens" };

/* ---- vocabulary ----------------------------------------------------------------------------- */

static bool is_id(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= TOK_MAX_ID;
}

static const char an_id[] = "an id, a whole number from 0 to 16777215";

static mt_status find_size(const tok_file *f, json_t *vocab, json_t *added, int64_t *ret)
{
    int64_t size = 0;
    const char *key;
    json_t *id, *entry;
    size_t i;
    json_object_foreach(vocab, key, id)
    {
        if (!is_id(id))
            return tok_unexpected(f, tok_place_member(vocab_place, key), id, an_id);
        size = json_integer_value(id) >= size ? json_integer_value(id) + 1 : size;
    }
    json_array_foreach(added, i, entry)
    {
        id = json_object_get(entry, "id");
        if (!is_id(id))
            return tok_unexpected(f, tok_place_member(tok_place_index(added_place, i), "id"), id,
                                  an_id);
        size = json_integer_value(id) >= size ? json_integer_value(id) + 1 : size;
    }
    if (size == 0)
        return tok_reject(f, MT_ERR_FORMAT, vocab_place, "found no token, expected at least one");
    *ret = size;
    return MT_OK;
}

static mt_status read_vocab(const tok_file *f, json_t *vocab, json_t *added)
{
    tok_vocab *v = &f->t->vocab;
    mt_status status = find_size(f, vocab, added, &v->size);
    if (status)
        return status;
    v->text = calloc((size_t)v->size, sizeof *v->text);
    v->flags = calloc((size_t)v->size, sizeof *v->flags);
    if (!v->text || !v->flags)
        return mt_fail_nomem();
    int64_t tokens = (int64_t)(json_object_size(vocab) + json_array_size(added));
    if ((status = tok_table_init(&v->by_text, tokens, v->text)))
        return status;
    const char *key;
    json_t *value;
    json_object_foreach(vocab, key, value)
    {
        int64_t id = json_integer_value(value);
        if (v->text[id].p)
            return tok_reject(f, MT_ERR_FORMAT, tok_place_member(vocab_place, key),
                              "has the id %lld, which '%.60s' has too", (long long)id,
                              v->text[id].p);
        v->text[id] = tok_arena_copy(&f->t->arena, tok_literal(key));
        if (!v->text[id].p)
            return mt_fail_nomem();
        v->flags[id] = TOK_OF_MODEL;
        tok_table_add(&v->by_text, (int32_t)id);
    }
    return MT_OK;
}

/* ---- merges --------------------------------------------------------------------------------- */

/* "left right", or ["left", "right"] as newer files have it. */
static bool split_merge(const json_t *merge, tok_text *ret_left, tok_text *ret_right)
{
    if (json_is_string(merge)) {
        const char *s = json_string_value(merge), *space = strchr(s, ' ');
        if (!space || strchr(space + 1, ' '))
            return false;
        *ret_left = (tok_text){ s, space - s };
        *ret_right = tok_literal(space + 1);
        return true;
    }
    const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
    if (json_array_size(merge) != 2 || !json_is_string(left) || !json_is_string(right))
        return false;
    *ret_left = tok_literal(json_string_value(left));
    *ret_right = tok_literal(json_string_value(right));
    return true;
}

static int32_t find_in_model(const tokenizer *t, tok_text text)
{
    int32_t id = tok_table_find(&t->vocab.by_text, text);
    return id >= 0 && t->vocab.flags[id] & TOK_OF_MODEL ? id : -1;
}

static mt_status missing_token(const tok_file *f, tok_place at, tok_text text)
{
    return tok_reject(f, MT_ERR_FORMAT, at, "'%.*s' is no token of model.vocab",
                      (int)(text.n < 100 ? text.n : 100), text.p);
}

static mt_status read_merge(const tok_file *f, const json_t *merge, size_t rank, tok_buf *made)
{
    tok_bpe *b = &f->t->bpe;
    tok_place at = tok_place_index(merges_place, rank);
    tok_text left, right, tail;
    if (!split_merge(merge, &left, &right))
        return tok_unexpected(f, at, merge, "two tokens: \"left right\" or [\"left\", \"right\"]");
    int32_t left_id = find_in_model(f->t, left), right_id = find_in_model(f->t, right);
    if (left_id < 0 || right_id < 0)
        return missing_token(f, at, left_id < 0 ? left : right);
    int64_t prefix = b->prefix.n < right.n ? b->prefix.n : right.n;
    tail = (tok_text){ right.p + prefix, right.n - prefix };
    made->n = 0;
    if (!tok_buf_add(made, left.p, left.n) || !tok_buf_add(made, tail.p, tail.n))
        return mt_fail_nomem();
    int32_t id = find_in_model(f->t, tok_buf_text(made));
    if (id < 0)
        return missing_token(f, at, tok_buf_text(made));
    tok_bpe_add_merge(b, left_id, right_id, (int32_t)rank, id);
    return MT_OK;
}

static mt_status read_merges(const tok_file *f, json_t *merges)
{
    tok_buf made = { 0 };
    json_t *merge;
    size_t rank;
    mt_status status = tok_bpe_reserve_merges(&f->t->bpe, (int64_t)json_array_size(merges));
    json_array_foreach(merges, rank, merge)
    {
        if (status)
            break;
        status = read_merge(f, merge, rank, &made);
    }
    tok_buf_finish(&made);
    return status;
}

/* ---- the model ------------------------------------------------------------------------------ */

static mt_status check_kind(const tok_file *f, const json_t *model)
{
    const char *type = json_string_value(json_object_get(model, "type"));
    tok_place at = tok_place_member(model_place, "type");
    /* The oldest files do not say; only BPE has merges. */
    if ((!type && json_object_get(model, "merges")) || (type && strcmp(type, "BPE") == 0))
        return MT_OK;
    if (!type)
        return tok_unexpected(f, at, json_object_get(model, "type"), "'BPE'");
    return tok_reject(f, MT_ERR_UNSUPPORTED, at,
                      "'%.60s' is not offered, only BPE is; tokenize the text with the model's own "
                      "tools and train on token files",
                      type);
}

static mt_status check_dropout(const tok_file *f, const json_t *model)
{
    const json_t *v = json_object_get(model, "dropout");
    if (!v || json_is_null(v) || (json_is_number(v) && json_number_value(v) == 0))
        return MT_OK;
    return tok_unexpected(f, tok_place_member(model_place, "dropout"), v,
                          "null or 0: merges that are left out at random are not offered");
}

static mt_status read_affix(const tok_file *f, const json_t *model, const char *key, tok_text *ret)
{
    return tok_has(model, key) ? tok_get_text(f, model_place, model, key, ret) : MT_OK;
}

static mt_status read_unknown(const tok_file *f, const json_t *model)
{
    tok_text unk;
    f->t->bpe.unk = -1;
    if (!tok_has(model, "unk_token"))
        return MT_OK;
    mt_status status = tok_get_text(f, model_place, model, "unk_token", &unk);
    if (status || unk.n == 0)
        return status;
    f->t->bpe.unk = find_in_model(f->t, unk);
    return f->t->bpe.unk < 0 ? missing_token(f, tok_place_member(model_place, "unk_token"), unk)
                             : MT_OK;
}

static mt_status read_model(const tok_file *f, const json_t *root, bool *ret_byte_fallback)
{
    tok_bpe *b = &f->t->bpe;
    json_t *model = NULL, *vocab = NULL, *merges = NULL;
    json_t *added = json_object_get(root, "added_tokens");
    if (added && !json_is_null(added) && !json_is_array(added))
        return tok_unexpected(f, added_place, added, "a list");
    mt_status status = tok_get_object(f, top, root, "model", &model);
    if (!status)
        status = check_kind(f, model);
    if (!status)
        status = check_dropout(f, model);
    if (!status)
        status = tok_get_object(f, model_place, model, "vocab", &vocab);
    if (!status)
        status = tok_get_list(f, model_place, model, "merges", &merges);
    if (!status)
        status = tok_get_bool(f, model_place, model, "byte_fallback", ret_byte_fallback);
    if (!status)
        status = tok_get_bool(f, model_place, model, "fuse_unk", &b->fuse_unk);
    if (!status)
        status = tok_get_bool(f, model_place, model, "ignore_merges", &b->ignore_merges);
    if (!status)
        status = read_affix(f, model, "continuing_subword_prefix", &b->prefix);
    if (!status)
        status = read_affix(f, model, "end_of_word_suffix", &b->suffix);
    if (!status)
        status = read_vocab(f, vocab, added);
    if (!status)
        status = read_unknown(f, model);
    return status ? status : read_merges(f, merges);
}

/* ---- added tokens --------------------------------------------------------------------------- */

/* The id of an added token: the vocabulary's where it has the text, the file's otherwise. */
static mt_status place_added(const tok_file *f, tok_place at, tok_added *a, int64_t file_id)
{
    tok_vocab *v = &f->t->vocab;
    int32_t id = tok_table_find(&v->by_text, a->content);
    if (id >= 0 && id != file_id)
        mt_log(MT_LOG_WARNING, "%s: %s: '%s' has the id %lld, but %d in the vocabulary; %d counts",
               f->path, at.s, a->content.p, (long long)file_id, id, id);
    if (id < 0) {
        id = (int32_t)file_id;
        if (v->text[id].p)
            return tok_reject(f, MT_ERR_FORMAT, at, "'%.60s' has the id %d, which '%.60s' has too",
                              a->content.p, id, v->text[id].p);
        v->text[id] = a->content;
        tok_table_add(&v->by_text, id);
    }
    a->id = id;
    v->flags[id] |= (uint8_t)(TOK_ADDED | (a->special ? TOK_SPECIAL : 0));
    return MT_OK;
}

static mt_status read_added(const tok_file *f, tok_place at, const json_t *in, tok_added *ret)
{
    tok_added a = { .normalized = true };
    mt_status status = tok_get_text(f, at, in, "content", &a.content);
    if (!status)
        status = tok_get_bool(f, at, in, "special", &a.special);
    if (!status)
        status = tok_get_bool(f, at, in, "normalized", &a.normalized);
    if (!status)
        status = tok_get_bool(f, at, in, "lstrip", &a.lstrip);
    if (!status)
        status = tok_get_bool(f, at, in, "rstrip", &a.rstrip);
    if (!status)
        status = tok_get_bool(f, at, in, "single_word", &a.single_word);
    a.pattern = a.content;
    if (!status)
        *ret = a;
    return status;
}

static mt_status read_all_added(const tok_file *f, const json_t *root)
{
    json_t *list = json_object_get(root, "added_tokens"), *entry;
    size_t i;
    f->t->added = calloc(json_array_size(list) + 1, sizeof *f->t->added);
    if (!f->t->added)
        return mt_fail_nomem();
    json_array_foreach(list, i, entry)
    {
        tok_place at = tok_place_index(added_place, i);
        tok_added a;
        mt_status status = read_added(f, at, entry, &a);
        if (!status && a.content.n == 0)
            continue;
        if (!status)
            status = place_added(f, at, &a, json_integer_value(json_object_get(entry, "id")));
        if (status)
            return status;
        f->t->added[f->t->n_added++] = a;
    }
    return MT_OK;
}

/* Normalizers run over the content of tokens that say so, as over any text. */
static mt_status index_added(tokenizer *t)
{
    tok_buf buf[2] = { 0 };
    tok_region *region = tok_region_create();
    mt_status status = region ? MT_OK : mt_fail_nomem();
    for (int64_t i = 0; i < t->n_added && !status; i++) {
        tok_added *a = &t->added[i];
        if (a->normalized) {
            status = tok_normalize(t->norms, t->n_norms, a->content, region, buf, &a->pattern);
            if (!status && !(a->pattern = tok_arena_copy(&t->arena, a->pattern)).p)
                status = mt_fail_nomem();
        }
        if (!status && a->pattern.n)
            status = tok_trie_add(a->normalized ? &t->normalized : &t->raw, a->pattern, (int32_t)i);
    }
    tok_region_destroy(region);
    tok_buf_finish(&buf[0]);
    tok_buf_finish(&buf[1]);
    return status;
}

/* ---- the file ------------------------------------------------------------------------------- */

/* Where the last step writes bytes as characters, the merges may as well start from bytes. */
static void take_bytes(tokenizer *t, bool byte_fallback)
{
    tok_bpe *b = &t->bpe;
    if (t->n_splits == 0 || t->splits[t->n_splits - 1].kind != TOK_SPLIT_BYTE_LEVEL ||
        byte_fallback || b->prefix.n || b->suffix.n)
        return;
    t->n_splits--;
    b->bytes = true;
}

static mt_status read_file(const tok_file *f, const json_t *root)
{
    tokenizer *t = f->t;
    bool byte_fallback = false;
    t->bpe.vocab = &t->vocab;
    mt_status status = read_model(f, root, &byte_fallback);
    if (!status)
        status = read_all_added(f, root);
    if (!status)
        status = tok_read_normalizer(f, root);
    if (!status)
        status = tok_read_pre_tokenizer(f, root);
    if (!status)
        status = tok_read_post_processor(f, root);
    if (!status)
        status = tok_read_decoder(f, root);
    if (!status)
        status = index_added(t);
    if (!status)
        status = tok_decode_prepare(t);
    if (status)
        return status;
    take_bytes(t, byte_fallback);
    return tok_bpe_init(&t->bpe, &t->arena, byte_fallback);
}

static bool is_file(const char *folder, const char *name)
{
    char path[4096];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

static bool ends_with(const char *path, const char *end)
{
    size_t n = strlen(path), k = strlen(end);
    return n >= k && strcmp(path + n - k, end) == 0;
}

/* Names what is there instead of a tokenizer.json, and how to make one of it. */
static mt_status explain_absence(const char *folder)
{
    static const char *const others[] = { "tokenizer.model", "tekken.json", "vocab.json",
                                          "tokenizer.tiktoken" };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (is_file(folder, others[i]))
            return mt_fail(
                MT_ERR_UNSUPPORTED,
                "%s: holds %s but no tokenizer.json, which alone is read; make one with Python's "
                "transformers: AutoTokenizer.from_pretrained('%s')"
                ".save_pretrained('%s')",
                folder, others[i], folder, folder);
    return mt_fail(MT_ERR_NOT_FOUND, "%s: holds no tokenizer.json", folder);
}

/* The tokenizer.json that `path` means, and the folder it lies in. */
static mt_status find_file(const char *path, char ret_file[4096], char ret_folder[4096])
{
    struct stat st;
    if (stat(path, &st) < 0)
        return mt_fail(MT_ERR_NOT_FOUND,
                       "%s: there is no such file or folder; expected a tokenizer.json or a "
                       "folder with one",
                       path);
    if (S_ISDIR(st.st_mode)) {
        snprintf(ret_folder, 4096, "%s", path);
        if (!is_file(path, "tokenizer.json"))
            return explain_absence(path);
        snprintf(ret_file, 4096, "%s/tokenizer.json", path);
        return MT_OK;
    }
    const char *slash = strrchr(path, '/');
    snprintf(ret_folder, 4096, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    snprintf(ret_file, 4096, "%s", path);
    if (ends_with(path, ".json"))
        return MT_OK;
    if (ends_with(path, ".model") || ends_with(path, ".tiktoken"))
        return explain_absence(ret_folder);
    return mt_fail(MT_ERR_INVALID,
                   "%s: is no tokenizer.json; expected one, or a folder that has one", path);
}

/* The file decides, and what is put around a text. */
static uint64_t fingerprint(const tokenizer *t, uint64_t file)
{
    uint64_t hash = XXH3_64bits_withSeed(t->special, sizeof t->special, file ^ REVISION);
    if (t->n_before)
        hash = XXH3_64bits_withSeed(t->before, (size_t)t->n_before * sizeof *t->before, hash);
    /* One behind the text is another than one before it. */
    return t->n_after ? XXH3_64bits_withSeed(t->after, (size_t)t->n_after * sizeof *t->after, ~hash)
                      : hash;
}

static tokenizer *create(void)
{
    tokenizer *t = calloc(1, sizeof *t);
    if (t)
        pthread_mutex_init(&t->lock, NULL);
    return t;
}

static void free_patterns(tokenizer *t)
{
    for (int64_t i = 0; i < t->n_norms; i++)
        tok_regex_destroy(t->norms[i].pattern.regex);
    for (int64_t i = 0; i < t->n_splits; i++)
        tok_regex_destroy(t->splits[i].pattern.regex);
    for (int64_t i = 0; i < t->n_decodes; i++)
        tok_regex_destroy(t->decodes[i].pattern.regex);
}

void tok_destroy(tokenizer *t)
{
    if (!t)
        return;
    tok_scratch_destroy_all(t);
    pthread_mutex_destroy(&t->lock);
    free_patterns(t);
    tok_bpe_finish(&t->bpe);
    tok_trie_finish(&t->raw);
    tok_trie_finish(&t->normalized);
    tok_vocab_finish(&t->vocab);
    free(t->added);
    free(t->norms);
    free(t->splits);
    free(t->decodes);
    free(t->before);
    free(t->after);
    tok_arena_finish(&t->arena);
    free(t);
}

mt_status tok_load(const char *path, tokenizer **ret)
{
    char file[4096], folder[4096];
    json_t *root = NULL;
    tokenizer *t = NULL;
    uint64_t hash = 0;
    mt_status status = find_file(path, file, folder);
    if (!status)
        status = tok_read_json(file, &root, &hash);
    if (status)
        return status;
    if (!(t = create())) {
        status = mt_fail_nomem();
        goto out;
    }
    status = read_file(&(tok_file){ file, t }, root);
    if (!status)
        status = tok_load_special(t, folder);
    if (!status) {
        t->fingerprint = fingerprint(t, hash);
        *ret = t;
        t = NULL;
    }
out:
    json_decref(root);
    tok_destroy(t);
    return status;
}
