/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns: regular expressions by Oniguruma, whose reading of a pattern defines what a
 * tokenizer.json means; literals and classes of characters by hand.
 */
#include "tokenizer.h"

#include <oniguruma.h>
#include <stdio.h>
#include <stdlib.h>

struct tok_regex {
    regex_t *code;
};

struct tok_region {
    OnigRegion *groups;
    OnigMatchParam *param;
};

/* How often a pattern may go back in one match: as often as Hugging Face's tokenizers allow, and
 * more in a long text. A long run of spaces is tried at each of its ends, which is no runaway
 * pattern; one that takes time exponential in the text is. */
enum { RETRIES = 10000000, RETRIES_PER_BYTE = 16 };

mt_status tok_regex_init(void)
{
    OnigEncoding use[] = { ONIG_ENCODING_UTF8 };
    if (onig_initialize(use, 1) != ONIG_NORMAL)
        return mt_fail(MT_ERR_INTERNAL, "tokenizer: the regular expression library does not start");
    return tok_unicode_init();
}

mt_status tok_regex_create(tok_text pattern, tok_regex **ret, char ret_why[256])
{
    const OnigUChar *p = (const OnigUChar *)pattern.p;
    OnigErrorInfo info;
    tok_regex *r = calloc(1, sizeof *r);
    if (!r)
        return mt_fail_nomem();
    int rc = onig_new(&r->code, p, p + pattern.n, ONIG_OPTION_NONE, ONIG_ENCODING_UTF8,
                      ONIG_SYNTAX_RUBY, &info);
    if (rc != ONIG_NORMAL) {
        OnigUChar text[ONIG_MAX_ERROR_MESSAGE_LEN];
        int n = onig_error_code_to_str(text, rc, &info);
        snprintf(ret_why, 256, "%.*s", n, (const char *)text);
        free(r);
        return MT_ERR_FORMAT;
    }
    *ret = r;
    return MT_OK;
}

void tok_regex_destroy(tok_regex *r)
{
    if (!r)
        return;
    onig_free(r->code);
    free(r);
}

tok_region *tok_region_create(void)
{
    tok_region *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->groups = onig_region_new();
    r->param = onig_new_match_param();
    if (r->groups && r->param) {
        onig_initialize_match_param(r->param);
        return r;
    }
    tok_region_destroy(r);
    return NULL;
}

void tok_region_destroy(tok_region *r)
{
    if (!r)
        return;
    if (r->groups)
        onig_region_free(r->groups, 1);
    if (r->param)
        onig_free_match_param(r->param);
    free(r);
}

/* ---- matches -------------------------------------------------------------------------------- */

static mt_status search_failed(const tok_search *s, int rc)
{
    if (rc == ONIGERR_MEMORY)
        return mt_fail_nomem();
    OnigUChar why[ONIG_MAX_ERROR_MESSAGE_LEN];
    int n = onig_error_code_to_str(why, rc);
    return mt_fail(MT_ERR_FORMAT,
                   "tokenizer: a regular expression of tokenizer.json gives up at byte %lld of a "
                   "text of %lld bytes (%.*s); simplify the expression, or leave the text out",
                   (long long)s->from, (long long)s->text.n, n, (const char *)why);
}

static bool regex_next(const tok_regex *r, tok_search *s, int64_t *ret_start, int64_t *ret_end)
{
    const OnigUChar *p = (const OnigUChar *)s->text.p, *end = p + s->text.n;
    OnigMatchParam *param = s->region->param;
    onig_set_retry_limit_in_match_of_match_param(param, RETRIES + RETRIES_PER_BYTE *
                                                                      (unsigned long)s->text.n);
    while (s->from <= s->text.n) {
        int rc = onig_search_with_param(r->code, p, end, p + s->from, end, s->region->groups,
                                        ONIG_OPTION_NONE, param);
        if (rc < 0) {
            s->status = rc == ONIG_MISMATCH ? MT_OK : search_failed(s, rc);
            return false;
        }
        int64_t start = s->region->groups->beg[0], stop = s->region->groups->end[0];
        if (start < stop || stop != s->last_end) {
            *ret_start = start;
            *ret_end = stop;
            s->from = s->last_end = stop;
            return true;
        }
        /* An empty match behind the last one: go on one character further. */
        uint32_t c;
        s->from += s->from < s->text.n ? tok_char(s->text.p + s->from, &c) : 1;
    }
    return false;
}

static bool literal_next(tok_text literal, tok_search *s, int64_t *ret_start, int64_t *ret_end)
{
    const char *at =
        memmem(s->text.p + s->from, (size_t)(s->text.n - s->from), literal.p, (size_t)literal.n);
    if (!at)
        return false;
    *ret_start = at - s->text.p;
    *ret_end = s->from = *ret_start + literal.n;
    return true;
}

static bool in_class(tok_pattern_kind kind, uint32_t c)
{
    return kind == TOK_NUMERIC ? tok_is_numeric(c)
           : kind == TOK_SPACE ? tok_is_space(c)
                               : tok_is_punctuation(c);
}

static bool class_next(tok_pattern_kind kind, tok_search *s, int64_t *ret_start, int64_t *ret_end)
{
    for (uint32_t c; s->from < s->text.n;) {
        int64_t start = s->from;
        s->from += tok_char(s->text.p + start, &c);
        if (in_class(kind, c)) {
            *ret_start = start;
            *ret_end = s->from;
            return true;
        }
    }
    return false;
}

/* 0: white space; 1: a word; 2: neither. */
static int word_class(uint32_t c)
{
    return tok_is_word(c) ? 1 : tok_is_space(c) ? 0 : 2;
}

static bool words_next(tok_search *s, int64_t *ret_start, int64_t *ret_end)
{
    int run = 0;
    while (s->from < s->text.n) {
        uint32_t c;
        int n = tok_char(s->text.p + s->from, &c), class = word_class(c);
        if (run && class != run)
            break;
        if (!run && class)
            *ret_start = s->from;
        run = class;
        s->from += n;
    }
    *ret_end = s->from;
    return run != 0;
}

bool tok_pattern_next(const tok_pattern *p, tok_search *s, int64_t *ret_start, int64_t *ret_end)
{
    switch (p->kind) {
    case TOK_LITERAL:
        return literal_next(p->literal, s, ret_start, ret_end);
    case TOK_REGEX:
        return regex_next(p->regex, s, ret_start, ret_end);
    case TOK_WORDS:
        return words_next(s, ret_start, ret_end);
    default:
        return class_next(p->kind, s, ret_start, ret_end);
    }
}

mt_status tok_pattern_replace(const tok_pattern *p, tok_text content, tok_text t,
                              tok_region *region, tok_buf *ret)
{
    tok_search s = { .text = t, .last_end = -1, .region = region };
    int64_t at = 0, start = 0, end = 0;
    while (t.n && tok_pattern_next(p, &s, &start, &end)) {
        if (!tok_buf_add(ret, t.p + at, start - at) || !tok_buf_add(ret, content.p, content.n))
            return mt_fail_nomem();
        at = end;
    }
    if (s.status)
        return s.status;
    return tok_buf_add(ret, t.p + at, t.n - at) ? MT_OK : mt_fail_nomem();
}
