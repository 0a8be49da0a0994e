/* SPDX-License-Identifier: Apache-2.0
 *
 * UTF-8, character classes, the byte-level alphabet, and growing memory.
 */
#include "tokenizer.h"

#include <stdlib.h>
#include <utf8proc.h>

/* ---- growing memory ------------------------------------------------------------------------- */

void tok_buf_finish(tok_buf *b)
{
    free(b->p);
    *b = (tok_buf){ 0 };
}

bool tok_buf_reserve(tok_buf *b, int64_t more)
{
    if (b->cap - b->n >= more)
        return true;
    int64_t cap = b->cap ? b->cap : 256;
    while (cap - b->n < more)
        cap *= 2;
    char *grown = realloc(b->p, (size_t)cap);
    if (!grown)
        return false;
    b->p = grown;
    b->cap = cap;
    return true;
}

bool tok_buf_add(tok_buf *b, const char *p, int64_t n)
{
    if (!tok_buf_reserve(b, n))
        return false;
    if (n)
        memcpy(b->p + b->n, p, (size_t)n);
    b->n += n;
    return true;
}

bool tok_buf_add_char(tok_buf *b, uint32_t c)
{
    if (!tok_buf_reserve(b, 4))
        return false;
    b->n += utf8proc_encode_char((utf8proc_int32_t)c, (utf8proc_uint8_t *)b->p + b->n);
    return true;
}

tok_text tok_buf_text(const tok_buf *b)
{
    return (tok_text){ b->p ? b->p : "", b->n };
}

struct tok_block {
    struct tok_block *next;
    size_t n, cap;
    _Alignas(16) char data[];
};

enum { BLOCK = 1 << 18 };

void tok_arena_finish(tok_arena *a)
{
    while (a->blocks) {
        struct tok_block *next = a->blocks->next;
        free(a->blocks);
        a->blocks = next;
    }
}

void *tok_arena_alloc(tok_arena *a, size_t n)
{
    n = (n + 15) & ~(size_t)15;
    struct tok_block *b = a->blocks;
    if (!b || b->cap - b->n < n) {
        size_t cap = n > BLOCK ? n : BLOCK;
        b = calloc(1, sizeof *b + cap);
        if (!b)
            return NULL;
        b->cap = cap;
        b->next = a->blocks;
        a->blocks = b;
    }
    void *p = b->data + b->n;
    b->n += n;
    return p;
}

tok_text tok_arena_copy(tok_arena *a, tok_text t)
{
    char *p = tok_arena_alloc(a, (size_t)t.n + 1);
    if (p && t.n)
        memcpy(p, t.p, (size_t)t.n);
    return (tok_text){ p, t.n };
}

/* ---- UTF-8 ---------------------------------------------------------------------------------- */

int tok_char(const char *text, uint32_t *ret_char)
{
    const uint8_t *p = (const uint8_t *)text;
    if (p[0] < 0x80) {
        *ret_char = p[0];
        return 1;
    }
    if (p[0] < 0xe0) {
        *ret_char = (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
        return 2;
    }
    if (p[0] < 0xf0) {
        *ret_char = (p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        return 3;
    }
    *ret_char = (p[0] & 0x07u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
    return 4;
}

uint32_t tok_char_before(const char *start, const char *p)
{
    uint32_t c;
    do
        p--;
    while (p > start && ((uint8_t)*p & 0xc0) == 0x80);
    tok_char(p, &c);
    return c;
}

/* Bytes of the character at p, or, negative, of the malformed part to be replaced as one: the
 * longest prefix of a well-formed sequence, at least one byte (Unicode 15, section 3.9, "maximal
 * subpart"). */
static int measure(const uint8_t *p, const uint8_t *end)
{
    uint8_t low = 0x80, high = 0xbf;
    int n;
    if (p[0] < 0x80)
        return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4)
        return -1;
    if (p[0] < 0xe0) {
        n = 2;
    } else if (p[0] < 0xf0) {
        n = 3;
        low = p[0] == 0xe0 ? 0xa0 : low;
        high = p[0] == 0xed ? 0x9f : high; /* surrogates */
    } else {
        n = 4;
        low = p[0] == 0xf0 ? 0x90 : low;
        high = p[0] == 0xf4 ? 0x8f : high; /* U+10FFFF */
    }
    for (int i = 1; i < n; i++) {
        if (p + i == end || p[i] < low || p[i] > high)
            return -i;
        low = 0x80;
        high = 0xbf;
    }
    return n;
}

int64_t tok_valid(tok_text t)
{
    const uint8_t *p = (const uint8_t *)t.p, *start = p, *end = p + t.n;
    while (p < end) {
        uint64_t word;
        while (end - p >= 8 && (memcpy(&word, p, 8), (word & 0x8080808080808080u) == 0))
            p += 8;
        if (p == end)
            break;
        int n = measure(p, end);
        if (n < 0)
            break;
        p += n;
    }
    return p - start;
}

bool tok_repair(tok_text t, tok_buf *ret)
{
    const char *p = t.p, *end = t.p + t.n;
    while (p < end) {
        int64_t n = tok_valid((tok_text){ p, end - p });
        if (!tok_buf_add(ret, p, n))
            return false;
        p += n;
        if (p == end)
            break;
        p -= measure((const uint8_t *)p, (const uint8_t *)end);
        if (!tok_buf_add_char(ret, 0xfffd))
            return false;
    }
    return true;
}

/* ---- classes -------------------------------------------------------------------------------- */

static utf8proc_category_t category(uint32_t c)
{
    return utf8proc_category((utf8proc_int32_t)c);
}

bool tok_is_space(uint32_t c)
{
    return (c >= 0x9 && c <= 0xd) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

bool tok_is_mark(uint32_t c)
{
    utf8proc_category_t k = category(c);
    return k == UTF8PROC_CATEGORY_MN || k == UTF8PROC_CATEGORY_MC || k == UTF8PROC_CATEGORY_ME;
}

bool tok_is_numeric(uint32_t c)
{
    utf8proc_category_t k = category(c);
    return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

bool tok_is_word(uint32_t c)
{
    switch (category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    case UTF8PROC_CATEGORY_SO: /* circled and squared letters are Other_Alphabetic */
        return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
               (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
    default:
        return c == 0x200c || c == 0x200d; /* Join_Control */
    }
}

bool tok_is_punctuation(uint32_t c)
{
    if (c < 0x80)
        return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
               (c >= '{' && c <= '~');
    utf8proc_category_t k = category(c);
    return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

/* ---- the byte-level alphabet ---------------------------------------------------------------- */

/* Bytes that are visible in Latin-1 stand for themselves; the 68 others follow from U+0100 on. */
uint32_t tok_byte_char(uint8_t byte)
{
    if (byte <= 32)
        return 256u + byte;
    if (byte < 127)
        return byte;
    if (byte <= 160)
        return 256u + 33u + (byte - 127u);
    return byte == 173 ? 256u + 67u : byte;
}

int tok_char_byte(uint32_t c)
{
    if (c < 256)
        return tok_byte_char((uint8_t)c) == c ? (int)c : -1;
    if (c <= 256 + 32)
        return (int)c - 256;
    if (c <= 256 + 66)
        return (int)c - 256 - 33 + 127;
    return c == 256 + 67 ? 173 : -1;
}

bool tok_add_byte_chars(tok_buf *b, tok_text t)
{
    for (int64_t i = 0; i < t.n; i++)
        if (!tok_buf_add_char(b, tok_byte_char((uint8_t)t.p[i])))
            return false;
    return true;
}
