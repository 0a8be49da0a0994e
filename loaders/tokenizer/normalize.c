/* SPDX-License-Identifier: Apache-2.0
 *
 * Normalizers: how a text is rewritten before it is cut into pieces.
 */
#include "tokenizer.h"

#include <stdlib.h>
#include <utf8proc.h>

/* A normal form makes a text at most 18 times as long. What grows more is a mistake, or meant to
 * fill the memory. */
enum { MOST_GROWTH = 64 };

/* ASCII is in every normal form already. */
static int64_t ascii_prefix(tok_text t)
{
    int64_t i = 0;
    uint64_t word;
    while (t.n - i >= 8 && (memcpy(&word, t.p + i, 8), (word & 0x8080808080808080u) == 0))
        i += 8;
    while (i < t.n && (uint8_t)t.p[i] < 0x80)
        i++;
    return i;
}

/* One stretch of text that no normal form joins with what stands around it. */
static mt_status add_form(int32_t option, tok_text t, tok_buf *ret)
{
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)t.p, (utf8proc_ssize_t)t.n, &made,
                                      (utf8proc_option_t)option);
    if (n < 0)
        return n == UTF8PROC_ERROR_NOMEM
                   ? mt_fail_nomem()
                   : mt_fail(MT_ERR_INTERNAL, "tokenizer: normalisation failed: %s",
                             utf8proc_errmsg(n));
    bool ok = tok_buf_add(ret, (const char *)made, (int64_t)n);
    free(made);
    return ok ? MT_OK : mt_fail_nomem();
}

/* An ASCII character may combine with a mark that follows, but never with ASCII: stretches are cut
 * before the last character of a run of ASCII, and behind the first one of the next. */
static mt_status add_forms(int32_t option, tok_text t, tok_buf *ret)
{
    while (t.n) {
        int64_t plain = ascii_prefix(t);
        int64_t keep = plain == t.n ? plain : plain ? plain - 1 : 0;
        if (!tok_buf_add(ret, t.p, keep))
            return mt_fail_nomem();
        t.p += keep;
        t.n -= keep;
        if (!t.n)
            return MT_OK;
        int64_t n = plain ? 1 : 0;
        while (n < t.n && (uint8_t)t.p[n] >= 0x80)
            n++;
        mt_status status = add_form(option, (tok_text){ t.p, n }, ret);
        if (status)
            return status;
        t.p += n;
        t.n -= n;
    }
    return MT_OK;
}

static bool add_lowercase(tok_text t, tok_buf *ret)
{
    uint32_t c;
    for (int64_t i = 0; i < t.n;) {
        i += tok_char(t.p + i, &c);
        /* The one character whose small form is two. */
        bool ok = c == 0x130 ? tok_buf_add(ret, "i\xcc\x87", 3)
                             : tok_buf_add_char(ret, (uint32_t)utf8proc_tolower((int32_t)c));
        if (!ok)
            return false;
    }
    return true;
}

static bool add_without_accents(tok_text t, tok_buf *ret)
{
    uint32_t c;
    for (int64_t i = 0; i < t.n;) {
        int n = tok_char(t.p + i, &c);
        if (!tok_is_mark(c) && !tok_buf_add(ret, t.p + i, n))
            return false;
        i += n;
    }
    return true;
}

static tok_text strip(tok_text t, int32_t sides)
{
    uint32_t c;
    while (sides & TOK_STRIP_LEFT && t.n) {
        int n = tok_char(t.p, &c);
        if (!tok_is_space(c))
            break;
        t.p += n;
        t.n -= n;
    }
    while (sides & TOK_STRIP_RIGHT && t.n && tok_is_space(tok_char_before(t.p, t.p + t.n)))
        do
            t.n--;
        while (((uint8_t)t.p[t.n] & 0xc0) == 0x80);
    return t;
}

static mt_status run_step(const tok_norm *s, tok_text t, tok_region *region, tok_buf *to)
{
    bool ok = true;
    switch (s->kind) {
    case TOK_NORM_FORM:
        return add_forms(s->option, t, to);
    case TOK_NORM_LOWERCASE:
        ok = add_lowercase(t, to);
        break;
    case TOK_NORM_PREPEND:
        ok = (t.n == 0 || tok_buf_add(to, s->content.p, s->content.n)) && tok_buf_add(to, t.p, t.n);
        break;
    case TOK_NORM_REPLACE:
        return tok_pattern_replace(&s->pattern, s->content, t, region, to);
    case TOK_NORM_STRIP_ACCENTS:
        ok = add_without_accents(t, to);
        break;
    case TOK_NORM_BYTE_LEVEL:
        ok = tok_add_byte_chars(to, t);
        break;
    case TOK_NORM_STRIP:
        break;
    }
    return ok ? MT_OK : mt_fail_nomem();
}

/* Does the step leave `t` as it is? Only where that is cheap to know. */
static bool is_idle(const tok_norm *s, tok_text t)
{
    return s->kind == TOK_NORM_FORM && ascii_prefix(t) == t.n;
}

mt_status tok_normalize(const tok_norm *steps, int64_t n, tok_text t, tok_region *region,
                        tok_buf buf[2], tok_text *ret)
{
    int into = 0;
    const int64_t most = MOST_GROWTH * t.n + (1 << 16);
    for (int64_t i = 0; i < n; i++) {
        if (is_idle(&steps[i], t))
            continue;
        if (steps[i].kind == TOK_NORM_STRIP) {
            t = strip(t, steps[i].option);
            continue;
        }
        buf[into].n = 0;
        mt_status status = run_step(&steps[i], t, region, &buf[into]);
        if (status)
            return status;
        t = tok_buf_text(&buf[into]);
        if (t.n > most)
            return mt_fail(MT_ERR_FORMAT,
                           "step %lld of the normalizer makes a text longer than %d times what it "
                           "was; no normal form is, so look at the file's normalizer",
                           (long long)i + 1, (int)MOST_GROWTH);
        into = !into;
    }
    *ret = t;
    return MT_OK;
}
