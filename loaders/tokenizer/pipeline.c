/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads the stages of the pipeline: normalizer, pre_tokenizer, post_processor, decoder. What is not
 * offered is refused by name: a stage passed over would give other tokens without a word.
 */
#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

/* The split of GPT-2, which ByteLevel brings along. */
#define GPT2_PATTERN                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

enum { MAX_NESTING = 8, MAX_STAGES = 64 };

typedef struct stage {
    const char *type;
    mt_status (*read)(const tok_file *f, tok_place at, const json_t *in, int32_t option);
    int32_t option;
} stage;

/* Makes room for one more in a list that is short. */
static void *append(void **list, int64_t *n, size_t size)
{
    void *grown = realloc(*list, (size_t)(*n + 1) * size);
    if (!grown) {
        mt_fail_nomem();
        return NULL;
    }
    *list = grown;
    return memset((char *)grown + (size_t)(*n)++ * size, 0, size);
}

static mt_status unknown_type(const tok_file *f, tok_place at, const char *type,
                              const stage *stages)
{
    char known[512] = "";
    size_t n = 0;
    for (const stage *s = stages; s->type; s++)
        n += (size_t)snprintf(known + n, sizeof known - n, "%s, ", s->type);
    return tok_reject(f, MT_ERR_UNSUPPORTED, tok_place_member(at, "type"),
                      "'%.60s' is not offered; expected one of %sor Sequence", type, known);
}

/* Reads a stage, or those of a Sequence, whose list is called `list_key`. */
static mt_status read_stages(const tok_file *f, tok_place at, const json_t *in, const stage *stages,
                             const char *list_key, int depth)
{
    const char *type = json_string_value(json_object_get(in, "type"));
    if (!json_is_object(in))
        return tok_unexpected(f, at, in, "an object");
    if (!type)
        return tok_unexpected(f, tok_place_member(at, "type"), json_object_get(in, "type"),
                              "the name of a stage");
    if (f->t->n_norms + f->t->n_splits + f->t->n_decodes > MAX_STAGES)
        return tok_reject(f, MT_ERR_UNSUPPORTED, at, "more than %d stages are not offered",
                          MAX_STAGES);
    for (const stage *s = stages; s->type; s++)
        if (strcmp(type, s->type) == 0)
            return s->read(f, at, in, s->option);
    if (strcmp(type, "Sequence") != 0)
        return unknown_type(f, at, type, stages);
    if (depth == MAX_NESTING)
        return tok_reject(f, MT_ERR_FORMAT, at, "sequences nested more than %d deep", MAX_NESTING);
    json_t *list = NULL;
    mt_status status = tok_get_list(f, at, in, list_key, &list);
    for (size_t i = 0; !status && i < json_array_size(list); i++)
        status = read_stages(f, tok_place_index(tok_place_member(at, list_key), i),
                             json_array_get(list, i), stages, list_key, depth + 1);
    return status;
}

static mt_status read_all(const tok_file *f, const json_t *root, const char *key,
                          const stage *stages, const char *list_key)
{
    if (!tok_has(root, key))
        return MT_OK;
    return read_stages(f, tok_place_member((tok_place){ "" }, key), json_object_get(root, key),
                       stages, list_key, 0);
}

/* ---- patterns ------------------------------------------------------------------------------- */

static mt_status compile(const tok_file *f, tok_place at, tok_text regex, tok_pattern *ret)
{
    char why[256];
    tok_pattern p = { .kind = TOK_REGEX };
    mt_status status = tok_regex_create(regex, &p.regex, why);
    if (status == MT_ERR_FORMAT)
        return tok_reject(f, status, at, "the regular expression '%.200s' is refused: %s", regex.p,
                          why);
    if (!status)
        *ret = p;
    return status;
}

/* { "String": "..." } or { "Regex": "..." } */
static mt_status read_pattern(const tok_file *f, tok_place at, const json_t *in, tok_pattern *ret)
{
    json_t *pattern = NULL;
    tok_text text;
    mt_status status = tok_get_object(f, at, in, "pattern", &pattern);
    if (status)
        return status;
    at = tok_place_member(at, "pattern");
    bool is_regex = tok_has(pattern, "Regex");
    if (!is_regex && !tok_has(pattern, "String"))
        return tok_reject(f, MT_ERR_FORMAT, at, "expected 'String' or 'Regex' in it");
    if ((status = tok_get_text(f, at, pattern, is_regex ? "Regex" : "String", &text)))
        return status;
    if (text.n == 0)
        return tok_reject(f, MT_ERR_FORMAT, at,
                          "found an empty pattern, expected one that matches "
                          "something");
    if (is_regex)
        return compile(f, tok_place_member(at, "Regex"), text, ret);
    *ret = (tok_pattern){ .kind = TOK_LITERAL, .literal = text };
    return MT_OK;
}

static mt_status get_char(const tok_file *f, tok_place at, const json_t *in, const char *key,
                          tok_text *ret)
{
    tok_text text;
    uint32_t c;
    mt_status status = tok_get_text(f, at, in, key, &text);
    if (!status && (text.n == 0 || tok_char(text.p, &c) != text.n))
        status = tok_unexpected(f, tok_place_member(at, key), json_object_get(in, key),
                                "a single character");
    if (!status)
        *ret = text;
    return status;
}

/* ---- normalizer ----------------------------------------------------------------------------- */

static tok_norm *add_norm(const tok_file *f, tok_norm_kind kind, int32_t option)
{
    tok_norm *s = append((void **)&f->t->norms, &f->t->n_norms, sizeof *s);
    if (s) {
        s->kind = kind;
        s->option = option;
    }
    return s;
}

static mt_status read_form(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)at;
    (void)in;
    return add_norm(f, TOK_NORM_FORM, option) ? MT_OK : MT_ERR_NOMEM;
}

static mt_status read_plain_norm(const tok_file *f, tok_place at, const json_t *in, int32_t kind)
{
    (void)at;
    (void)in;
    return add_norm(f, (tok_norm_kind)kind, 0) ? MT_OK : MT_ERR_NOMEM;
}

static mt_status read_prepend(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    tok_norm *s = add_norm(f, TOK_NORM_PREPEND, option);
    return s ? tok_get_text(f, at, in, "prepend", &s->content) : MT_ERR_NOMEM;
}

static mt_status read_replace(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    tok_norm *s = add_norm(f, TOK_NORM_REPLACE, option);
    if (!s)
        return MT_ERR_NOMEM;
    mt_status status = read_pattern(f, at, in, &s->pattern);
    return status ? status : tok_get_text(f, at, in, "content", &s->content);
}

static mt_status read_strip(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    bool left = true, right = true;
    tok_norm *s = add_norm(f, TOK_NORM_STRIP, option);
    if (!s)
        return MT_ERR_NOMEM;
    mt_status status = tok_get_bool(f, at, in, "strip_left", &left);
    if (!status)
        status = tok_get_bool(f, at, in, "strip_right", &right);
    s->option = (left ? TOK_STRIP_LEFT : 0) | (right ? TOK_STRIP_RIGHT : 0);
    return status;
}

mt_status tok_read_normalizer(const tok_file *f, const json_t *root)
{
    enum { NFC = UTF8PROC_STABLE | UTF8PROC_COMPOSE, NFD = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE };
    static const stage stages[] = {
        { "NFC", read_form, NFC },
        { "NFD", read_form, NFD },
        { "NFKC", read_form, NFC | UTF8PROC_COMPAT },
        { "NFKD", read_form, NFD | UTF8PROC_COMPAT },
        { "Lowercase", read_plain_norm, TOK_NORM_LOWERCASE },
        { "StripAccents", read_plain_norm, TOK_NORM_STRIP_ACCENTS },
        { "ByteLevel", read_plain_norm, TOK_NORM_BYTE_LEVEL },
        { "Prepend", read_prepend, 0 },
        { "Replace", read_replace, 0 },
        { "Strip", read_strip, 0 },
        { 0 },
    };
    return read_all(f, root, "normalizer", stages, "normalizers");
}

/* ---- pre-tokenizer -------------------------------------------------------------------------- */

static tok_split *add_split(const tok_file *f, tok_split_kind kind)
{
    tok_split *s = append((void **)&f->t->splits, &f->t->n_splits, sizeof *s);
    if (s) {
        s->kind = kind;
        s->behavior = TOK_ISOLATED;
    }
    return s;
}

static mt_status read_behavior(const tok_file *f, tok_place at, const json_t *in, tok_behavior *ret)
{
    static const char *const names[] = { "Removed", "Isolated", "MergedWithPrevious",
                                         "MergedWithNext", "Contiguous" };
    const json_t *v = json_object_get(in, "behavior");
    for (int i = 0; json_is_string(v) && i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(json_string_value(v), names[i]) == 0) {
            *ret = (tok_behavior)i;
            return MT_OK;
        }
    return tok_unexpected(f, tok_place_member(at, "behavior"), v,
                          "Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

static mt_status read_split(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)option;
    tok_split *s = add_split(f, TOK_SPLIT);
    if (!s)
        return MT_ERR_NOMEM;
    mt_status status = read_pattern(f, at, in, &s->pattern);
    if (!status)
        status = read_behavior(f, at, in, &s->behavior);
    return status ? status : tok_get_bool(f, at, in, "invert", &s->invert);
}

static mt_status read_byte_level(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)option;
    bool prefix = true, regex = true;
    tok_split *s;
    mt_status status = tok_get_bool(f, at, in, "add_prefix_space", &prefix);
    if (!status)
        status = tok_get_bool(f, at, in, "use_regex", &regex);
    if (!status && prefix) {
        if (!(s = add_split(f, TOK_SPLIT_PREFIX)))
            return MT_ERR_NOMEM;
        s->content = tok_literal(" ");
    }
    if (!status && regex) {
        if (!(s = add_split(f, TOK_SPLIT)))
            return MT_ERR_NOMEM;
        status = compile(f, at, tok_literal(GPT2_PATTERN), &s->pattern);
    }
    if (!status && !add_split(f, TOK_SPLIT_BYTE_LEVEL))
        return MT_ERR_NOMEM;
    return status;
}

typedef enum prepend_scheme { ALWAYS, FIRST, NEVER } prepend_scheme;

/* Files older than prepend_scheme say add_prefix_space. */
static mt_status read_scheme(const tok_file *f, tok_place at, const json_t *in, prepend_scheme *ret)
{
    static const char *const names[] = { "always", "first", "never" };
    bool prefix = true;
    mt_status status = tok_get_bool(f, at, in, "add_prefix_space", &prefix);
    if (status)
        return status;
    *ret = prefix ? ALWAYS : NEVER;
    if (!tok_has(in, "prepend_scheme"))
        return MT_OK;
    const json_t *v = json_object_get(in, "prepend_scheme");
    for (int i = 0; json_is_string(v) && i < 3; i++)
        if (strcmp(json_string_value(v), names[i]) == 0) {
            *ret = (prepend_scheme)i;
            return MT_OK;
        }
    return tok_unexpected(f, tok_place_member(at, "prepend_scheme"), v, "always, first or never");
}

static mt_status read_metaspace(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)option;
    tok_text replacement;
    prepend_scheme scheme;
    bool cut = true;
    tok_split *s;
    mt_status status = get_char(f, at, in, "replacement", &replacement);
    if (!status)
        status = read_scheme(f, at, in, &scheme);
    if (!status)
        status = tok_get_bool(f, at, in, "split", &cut);
    if (status)
        return status;
    if (!(s = add_split(f, TOK_SPLIT_SPACES)))
        return MT_ERR_NOMEM;
    s->pattern = (tok_pattern){ .kind = TOK_LITERAL, .literal = tok_literal(" ") };
    s->content = replacement;
    if (scheme != NEVER) {
        if (!(s = add_split(f, TOK_SPLIT_PREFIX)))
            return MT_ERR_NOMEM;
        s->content = replacement;
        s->first_only = scheme == FIRST;
    }
    if (cut) {
        if (!(s = add_split(f, TOK_SPLIT)))
            return MT_ERR_NOMEM;
        s->pattern = (tok_pattern){ .kind = TOK_LITERAL, .literal = replacement };
        s->behavior = TOK_MERGED_WITH_NEXT;
    }
    return MT_OK;
}

static mt_status read_digits(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)option;
    bool each = false;
    tok_split *s = add_split(f, TOK_SPLIT);
    if (!s)
        return MT_ERR_NOMEM;
    mt_status status = tok_get_bool(f, at, in, "individual_digits", &each);
    s->pattern.kind = TOK_NUMERIC;
    s->behavior = each ? TOK_ISOLATED : TOK_CONTIGUOUS;
    return status;
}

static mt_status read_punctuation(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)option;
    tok_split *s = add_split(f, TOK_SPLIT);
    if (!s)
        return MT_ERR_NOMEM;
    s->pattern.kind = TOK_PUNCTUATION;
    return tok_has(in, "behavior") ? read_behavior(f, at, in, &s->behavior) : MT_OK;
}

static mt_status read_whitespace(const tok_file *f, tok_place at, const json_t *in, int32_t kind)
{
    (void)at;
    (void)in;
    tok_split *s = add_split(f, TOK_SPLIT);
    if (!s)
        return MT_ERR_NOMEM;
    s->pattern.kind = (tok_pattern_kind)kind;
    s->behavior = TOK_REMOVED;
    s->invert = kind == TOK_WORDS; /* what is no word goes */
    return MT_OK;
}

mt_status tok_read_pre_tokenizer(const tok_file *f, const json_t *root)
{
    static const stage stages[] = {
        { "ByteLevel", read_byte_level, 0 },
        { "Split", read_split, 0 },
        { "Metaspace", read_metaspace, 0 },
        { "Digits", read_digits, 0 },
        { "Punctuation", read_punctuation, 0 },
        { "Whitespace", read_whitespace, TOK_WORDS },
        { "WhitespaceSplit", read_whitespace, TOK_SPACE },
        { 0 },
    };
    return read_all(f, root, "pre_tokenizer", stages, "pretokenizers");
}

/* ---- post-processor ------------------------------------------------------------------------- */

static mt_status add_special(const tok_file *f, tok_place at, const json_t *id, bool before)
{
    const tok_vocab *v = &f->t->vocab;
    if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= v->size ||
        !v->text[json_integer_value(id)].p)
        return tok_unexpected(f, at, id, "the id of a token of the vocabulary");
    int32_t *p = before ? append((void **)&f->t->before, &f->t->n_before, sizeof *p)
                        : append((void **)&f->t->after, &f->t->n_after, sizeof *p);
    if (!p)
        return MT_ERR_NOMEM;
    *p = (int32_t)json_integer_value(id);
    return MT_OK;
}

/* Two processors would have to nest. */
static mt_status check_only_one(const tok_file *f, tok_place at)
{
    if (f->t->n_before + f->t->n_after == 0)
        return MT_OK;
    return tok_reject(f, MT_ERR_UNSUPPORTED, at,
                      "a second processor that adds tokens is not offered");
}

static mt_status read_template_token(const tok_file *f, tok_place at, const json_t *piece,
                                     const json_t *tokens, bool before)
{
    json_t *entry = NULL, *ids = NULL;
    tok_text name;
    mt_status status = tok_get_text(f, at, piece, "id", &name);
    tok_place list = { "post_processor.special_tokens" };
    if (!status)
        status = tok_get_object(f, list, tokens, name.p, &entry);
    if (!status)
        status = tok_get_list(f, tok_place_member(list, name.p), entry, "ids", &ids);
    for (size_t i = 0; !status && i < json_array_size(ids); i++)
        status = add_special(f, tok_place_index(tok_place_member(list, name.p), i),
                             json_array_get(ids, i), before);
    return status;
}

static mt_status read_template(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)option;
    json_t *single = NULL, *tokens = json_object_get(in, "special_tokens");
    mt_status status = check_only_one(f, at);
    if (!status)
        status = tok_get_list(f, at, in, "single", &single);
    bool before = true;
    at = tok_place_member(at, "single");
    for (size_t i = 0; !status && i < json_array_size(single); i++) {
        const json_t *piece = json_array_get(single, i);
        const json_t *token = json_object_get(piece, "SpecialToken");
        const json_t *text = json_object_get(piece, "Sequence");
        if (token)
            status = read_template_token(f, tok_place_index(at, i), token, tokens, before);
        else if (text && before)
            before = false;
        else
            status = tok_unexpected(f, tok_place_index(at, i), piece,
                                    "a SpecialToken, or the Sequence once");
    }
    if (!status && before)
        status = tok_reject(f, MT_ERR_FORMAT, at, "expected the Sequence A in it, found none");
    return status;
}

/* "cls": ["<s>", 0] and "sep" alike. */
static mt_status read_pair_processing(const tok_file *f, tok_place at, const json_t *in,
                                      int32_t option)
{
    (void)option;
    static const char *const keys[] = { "cls", "sep" };
    mt_status status = check_only_one(f, at);
    for (int i = 0; i < 2 && !status; i++) {
        json_t *pair = NULL;
        if (!(status = tok_get_list(f, at, in, keys[i], &pair)))
            status = add_special(f, tok_place_index(tok_place_member(at, keys[i]), 1),
                                 json_array_get(pair, 1), i == 0);
    }
    return status;
}

/* Only moves offsets, which nobody asks for here. */
static mt_status read_nothing(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)f;
    (void)at;
    (void)in;
    (void)option;
    return MT_OK;
}

mt_status tok_read_post_processor(const tok_file *f, const json_t *root)
{
    static const stage stages[] = {
        { "TemplateProcessing", read_template, 0 },
        { "ByteLevel", read_nothing, 0 },
        { "RobertaProcessing", read_pair_processing, 0 },
        { "BertProcessing", read_pair_processing, 0 },
        { 0 },
    };
    return read_all(f, root, "post_processor", stages, "processors");
}

/* ---- decoder -------------------------------------------------------------------------------- */

static tok_decode *add_decode(const tok_file *f, tok_decode_kind kind)
{
    tok_decode *d = append((void **)&f->t->decodes, &f->t->n_decodes, sizeof *d);
    if (d)
        d->kind = kind;
    return d;
}

/* From here on decoders see the whole text. */
static void fuse(tokenizer *t)
{
    if (t->n_each < 0)
        t->n_each = t->n_decodes;
}

static mt_status read_fuse(const tok_file *f, tok_place at, const json_t *in, int32_t option)
{
    (void)at;
    (void)in;
    (void)option;
    fuse(f->t);
    return MT_OK;
}

static mt_status read_byte_decoder(const tok_file *f, tok_place at, const json_t *in, int32_t kind)
{
    (void)in;
    if (f->t->n_each >= 0)
        return tok_reject(f, MT_ERR_UNSUPPORTED, at,
                          "a decoder of single tokens behind one that "
                          "joins them all is not offered");
    if (!add_decode(f, (tok_decode_kind)kind))
        return MT_ERR_NOMEM;
    if (kind == TOK_DECODE_BYTE_LEVEL)
        fuse(f->t);
    return MT_OK;
}

/* Bytes that are no UTF-8 may stand in the text by now, which regular expressions cannot read. */
static bool has_bytes(const tokenizer *t)
{
    for (int64_t i = 0; i < t->n_decodes; i++)
        if (t->decodes[i].kind == TOK_DECODE_BYTE_LEVEL ||
            t->decodes[i].kind == TOK_DECODE_BYTE_FALLBACK)
            return true;
    return false;
}

static mt_status read_replace_decoder(const tok_file *f, tok_place at, const json_t *in,
                                      int32_t option)
{
    (void)option;
    bool bytes = has_bytes(f->t);
    tok_decode *d = add_decode(f, TOK_DECODE_REPLACE);
    if (!d)
        return MT_ERR_NOMEM;
    mt_status status = read_pattern(f, at, in, &d->pattern);
    if (!status && bytes && d->pattern.kind == TOK_REGEX)
        return tok_reject(f, MT_ERR_UNSUPPORTED, at,
                          "a regular expression behind a decoder of bytes is not offered");
    return status ? status : tok_get_text(f, at, in, "content", &d->content);
}

static mt_status read_strip_decoder(const tok_file *f, tok_place at, const json_t *in,
                                    int32_t option)
{
    (void)option;
    tok_decode *d = add_decode(f, TOK_DECODE_STRIP);
    if (!d)
        return MT_ERR_NOMEM;
    mt_status status = get_char(f, at, in, "content", &d->content);
    if (!status)
        status = tok_get_count(f, at, in, "start", &d->left);
    return status ? status : tok_get_count(f, at, in, "stop", &d->right);
}

static mt_status read_metaspace_decoder(const tok_file *f, tok_place at, const json_t *in,
                                        int32_t option)
{
    (void)option;
    prepend_scheme scheme = NEVER;
    tok_decode *d = add_decode(f, TOK_DECODE_METASPACE);
    if (!d)
        return MT_ERR_NOMEM;
    d->pattern.kind = TOK_LITERAL;
    mt_status status = get_char(f, at, in, "replacement", &d->pattern.literal);
    if (!status)
        status = read_scheme(f, at, in, &scheme);
    d->drops_at_start = scheme != NEVER;
    return status;
}

mt_status tok_read_decoder(const tok_file *f, const json_t *root)
{
    static const stage stages[] = {
        { "ByteLevel", read_byte_decoder, TOK_DECODE_BYTE_LEVEL },
        { "ByteFallback", read_byte_decoder, TOK_DECODE_BYTE_FALLBACK },
        { "Replace", read_replace_decoder, 0 },
        { "Strip", read_strip_decoder, 0 },
        { "Metaspace", read_metaspace_decoder, 0 },
        { "Fuse", read_fuse, 0 },
        { 0 },
    };
    f->t->n_each = -1;
    mt_status status = read_all(f, root, "decoder", stages, "decoders");
    fuse(f->t);
    f->t->joined_by_space = !tok_has(root, "decoder");
    return status;
}
