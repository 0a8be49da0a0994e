/* SPDX-License-Identifier: Apache-2.0
 *
 * From tokens to bytes. What a token becomes on its own is found once, when the tokenizer is
 * opened; only what depends on its neighbours is left for each call.
 */
#include "tokenizer.h"

#include <stdlib.h>

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte that a token such as <0x0A> stands for, -1 for other tokens. */
static int fallback_byte(tok_text t)
{
    if (t.n != 6 || memcmp(t.p, "<0x", 3) != 0 || t.p[5] != '>')
        return -1;
    int high = hex_digit(t.p[3]), low = hex_digit(t.p[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

/* Characters back to bytes; a token with any other character stays as it is. */
static bool add_bytes(tok_text t, tok_buf *to)
{
    int64_t before = to->n;
    for (int64_t i = 0; i < t.n;) {
        uint32_t c;
        i += tok_char(t.p + i, &c);
        int byte = tok_char_byte(c);
        if (byte < 0) {
            to->n = before;
            return tok_buf_add(to, t.p, t.n);
        }
        char b = (char)byte;
        if (!tok_buf_add(to, &b, 1))
            return false;
    }
    return true;
}

static tok_text strip(const tok_decode *d, tok_text t)
{
    tok_text c = d->content;
    for (int64_t i = 0; i < d->left && t.n >= c.n && memcmp(t.p, c.p, (size_t)c.n) == 0; i++) {
        t.p += c.n;
        t.n -= c.n;
    }
    for (int64_t i = 0;
         i < d->right && t.n >= c.n && memcmp(t.p + t.n - c.n, c.p, (size_t)c.n) == 0; i++)
        t.n -= c.n;
    return t;
}

/* Spaces for the replacement, which vanishes from the first token. */
static mt_status add_spaces(const tok_decode *d, tok_text t, bool first, tok_buf *to)
{
    tok_text content = { " ", first && d->drops_at_start ? 0 : 1 };
    return tok_pattern_replace(&d->pattern, content, t, NULL, to);
}

static mt_status add(tok_buf *to, tok_text t)
{
    return tok_buf_add(to, t.p, t.n) ? MT_OK : mt_fail_nomem();
}

static mt_status run_step(const tok_decode *d, tok_text t, bool first, tok_region *region,
                          tok_buf *to)
{
    char byte;
    switch (d->kind) {
    case TOK_DECODE_BYTE_LEVEL:
        return add_bytes(t, to) ? MT_OK : mt_fail_nomem();
    case TOK_DECODE_REPLACE:
        return tok_pattern_replace(&d->pattern, d->content, t, region, to);
    case TOK_DECODE_METASPACE:
        return add_spaces(d, t, first, to);
    case TOK_DECODE_BYTE_FALLBACK:
        byte = (char)fallback_byte(t);
        return add(to, fallback_byte(t) < 0 ? t : (tok_text){ &byte, 1 });
    case TOK_DECODE_STRIP:
        return add(to, strip(d, t));
    }
    return MT_ERR_INTERNAL;
}

/* Runs n steps; *ret is `t` itself or lies in one of the two buffers. `plain`: the text was never
 * in the byte-level alphabet, though its characters may be. */
static mt_status run_steps(const tok_decode *steps, int64_t n, tok_text t, bool first, bool plain,
                           tok_region *region, tok_buf buf[2], tok_text *ret)
{
    int into = 0;
    for (int64_t i = 0; i < n; i++) {
        if (plain && steps[i].kind == TOK_DECODE_BYTE_LEVEL)
            continue;
        buf[into].n = 0;
        mt_status status = run_step(&steps[i], t, first, region, &buf[into]);
        if (status)
            return status;
        t = tok_buf_text(&buf[into]);
        into = !into;
    }
    *ret = t;
    return MT_OK;
}

/* What a token starts from: an added one from its text in the normalized text. */
static void start_texts(const tokenizer *t, tok_text *ret)
{
    memcpy(ret, t->vocab.text, (size_t)t->vocab.size * sizeof *ret);
    for (int64_t i = 0; i < t->n_added; i++)
        ret[t->added[i].id] = t->added[i].pattern;
}

static bool writes_bytes(const tokenizer *t)
{
    for (int64_t i = 0; i < t->n_norms; i++)
        if (t->norms[i].kind == TOK_NORM_BYTE_LEVEL)
            return true;
    return false;
}

static bool depends_on_start(const tokenizer *t)
{
    for (int64_t i = 0; i < t->n_each; i++)
        if (t->decodes[i].kind == TOK_DECODE_METASPACE && t->decodes[i].drops_at_start)
            return true;
    return false;
}

/* Runs the steps that see single tokens over all of `text`, in place. */
static mt_status decode_all(tokenizer *t, tok_text *text, bool first)
{
    mt_status status = MT_OK;
    tok_buf buf[2] = { 0 };
    tok_region *region = tok_region_create();
    bool added_are_plain = !writes_bytes(t);
    if (!region)
        status = mt_fail_nomem();
    for (int64_t id = 0; id < t->vocab.size && !status; id++) {
        bool plain = added_are_plain && t->vocab.flags[id] & TOK_ADDED;
        tok_text made;
        if (!text[id].p)
            continue;
        status = run_steps(t->decodes, t->n_each, text[id], first, plain, region, buf, &made);
        if (!status && !tok_same(made, text[id]) && !(text[id] = tok_arena_copy(&t->arena, made)).p)
            status = mt_fail_nomem();
    }
    tok_region_destroy(region);
    tok_buf_finish(&buf[0]);
    tok_buf_finish(&buf[1]);
    return status;
}

static mt_status prepare(tokenizer *t, bool first, tok_text **ret)
{
    tok_text *text = tok_arena_alloc(&t->arena, (size_t)t->vocab.size * sizeof *text);
    if (!text)
        return mt_fail_nomem();
    start_texts(t, text);
    *ret = text;
    return decode_all(t, text, first);
}

mt_status tok_decode_prepare(tokenizer *t)
{
    mt_status status = prepare(t, false, &t->decoded);
    return status || !depends_on_start(t) ? status : prepare(t, true, &t->decoded_first);
}

/* Bytes of the tokens up to the steps that see the whole text. */
static int64_t write_tokens(const tokenizer *t, const int32_t *tokens, int64_t n, uint32_t flags,
                            char *ret_text, int64_t capacity)
{
    int64_t at = 0;
    bool first = true;
    for (int64_t i = 0; i < n; i++) {
        int32_t id = tokens[i];
        if (id < 0 || id >= t->vocab.size || !t->decoded[id].p ||
            (flags & MT_DECODE_SKIP_SPECIAL && t->vocab.flags[id] & TOK_SPECIAL))
            continue;
        tok_text piece = first && t->decoded_first ? t->decoded_first[id] : t->decoded[id];
        if (t->joined_by_space && !first) {
            if (at < capacity)
                ret_text[at] = ' ';
            at++;
        }
        if (at < capacity && piece.n)
            memcpy(ret_text + at, piece.p,
                   (size_t)(piece.n < capacity - at ? piece.n : capacity - at));
        at += piece.n;
        first = false;
    }
    return at;
}

static int64_t finish_text(const tokenizer *t, tok_text text, char *ret_text, int64_t capacity)
{
    tok_buf buf[2] = { 0 };
    tok_region *region = tok_region_create();
    tok_text made = { 0 };
    mt_status status = region ? run_steps(t->decodes + t->n_each, t->n_decodes - t->n_each, text,
                                          true, false, region, buf, &made)
                              : mt_fail_nomem();
    int64_t n = status ? status : made.n;
    if (!status && capacity > 0 && made.n)
        memcpy(ret_text, made.p, (size_t)(made.n < capacity ? made.n : capacity));
    tok_region_destroy(region);
    tok_buf_finish(&buf[0]);
    tok_buf_finish(&buf[1]);
    return n;
}

int64_t tok_decode_ids(const void *tok, const int32_t *tokens, int64_t n, uint32_t flags,
                       char *ret_text, int64_t capacity)
{
    const tokenizer *t = tok;
    if (t->n_each == t->n_decodes)
        return write_tokens(t, tokens, n, flags, ret_text, capacity);
    int64_t bytes = write_tokens(t, tokens, n, flags, NULL, 0);
    char *text = malloc((size_t)bytes + 1);
    if (!text)
        return mt_fail_nomem();
    write_tokens(t, tokens, n, flags, text, bytes);
    int64_t made = finish_text(t, (tok_text){ text, bytes }, ret_text, capacity);
    free(text);
    return made;
}
