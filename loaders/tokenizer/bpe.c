/* SPDX-License-Identifier: Apache-2.0
 *
 * Byte pair encoding (Sennrich et al. 2016, arXiv 1508.07909): of all neighbours that may merge,
 * those of the lowest rank do, the leftmost first, until none is left.
 *
 * Short pieces are merged in place, long ones with a heap in O(n log n). Where a tokenizer does not
 * cut its text into words (SentencePiece's), pieces are cut here, between two characters that no
 * token joins: that changes no token and lets the cache of pieces work.
 */
#include "tokenizer.h"

#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- merges --------------------------------------------------------------------------------- */

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static uint64_t pair_hash(uint64_t pair)
{
    pair *= 0x9e3779b97f4a7c15u;
    return pair ^ pair >> 32;
}

mt_status tok_bpe_reserve_merges(tok_bpe *b, int64_t n)
{
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)n)
        slots *= 2;
    b->merges = malloc(slots * sizeof *b->merges);
    if (!b->merges)
        return mt_fail_nomem();
    b->mask = slots - 1;
    for (uint64_t i = 0; i < slots; i++)
        b->merges[i] = (tok_merge){ .rank = -1 };
    return MT_OK;
}

void tok_bpe_add_merge(tok_bpe *b, int32_t left, int32_t right, int32_t rank, int32_t id)
{
    uint64_t pair = pair_of(left, right), at = pair_hash(pair) & b->mask;
    while (b->merges[at].rank >= 0 && b->merges[at].pair != pair)
        at = (at + 1) & b->mask;
    b->merges[at] = (tok_merge){ pair, rank, id };
}

/* The merge of two tokens, NULL where they have none. */
static const tok_merge *find_merge(const tok_bpe *b, int32_t left, int32_t right)
{
    uint64_t pair = pair_of(left, right), at = pair_hash(pair) & b->mask;
    for (; b->merges[at].rank >= 0; at = (at + 1) & b->mask)
        if (b->merges[at].pair == pair)
            return &b->merges[at];
    return NULL;
}

/* ---- what init derives ---------------------------------------------------------------------- */

static int32_t find_in_model(const tok_bpe *b, tok_text text)
{
    int32_t id = tok_table_find(&b->vocab->by_text, text);
    return id >= 0 && b->vocab->flags[id] & TOK_OF_MODEL ? id : -1;
}

static void find_byte_tokens(tok_bpe *b)
{
    for (int i = 0; i < 256; i++) {
        char text[8];
        tok_buf letter = { .p = text, .cap = sizeof text };
        tok_buf_add_char(&letter, tok_byte_char((uint8_t)i));
        b->byte_id[i] = find_in_model(b, tok_buf_text(&letter));
    }
}

static void find_fallback(tok_bpe *b, bool byte_fallback)
{
    static const char digits[] = "0123456789ABCDEF";
    int found = 0;
    for (int i = 0; i < 256; i++) {
        char text[] = { '<', '0', 'x', digits[i >> 4], digits[i & 15], '>' };
        b->fallback[i] = byte_fallback ? find_in_model(b, (tok_text){ text, sizeof text }) : -1;
        found += b->fallback[i] >= 0;
    }
    b->has_fallback = found > 0;
    b->is_total = found == 256;
    for (uint64_t i = 0; b->is_total && i <= b->mask; i++) {
        const tok_merge *m = &b->merges[i];
        tok_text left = { 0 }, right = { 0 };
        if (m->rank >= 0) {
            left = b->vocab->text[m->pair >> 32];
            right = b->vocab->text[(uint32_t)m->pair];
        }
        if ((left.n == 6 && memcmp(left.p, "<0x", 3) == 0) ||
            (right.n == 6 && memcmp(right.p, "<0x", 3) == 0))
            b->is_total = false;
    }
}

enum { PAGE = 256 };

/* Tokens of one character, by the character. */
static mt_status find_char_tokens(tok_bpe *b, tok_arena *arena)
{
    b->char_id = tok_arena_alloc(arena, TOK_CHARS / PAGE * sizeof *b->char_id);
    if (!b->char_id)
        return mt_fail_nomem();
    for (int64_t id = 0; id < b->vocab->size; id++) {
        tok_text t = b->vocab->text[id];
        uint32_t c;
        if (!(b->vocab->flags[id] & TOK_OF_MODEL) || t.n == 0 || t.n > 4 ||
            tok_char(t.p, &c) != t.n)
            continue;
        int32_t **page = &b->char_id[c / PAGE];
        if (!*page) {
            if (!(*page = tok_arena_alloc(arena, PAGE * sizeof **page)))
                return mt_fail_nomem();
            memset(*page, 0xff, PAGE * sizeof **page);
        }
        (*page)[c % PAGE] = (int32_t)id;
    }
    return MT_OK;
}

/* With ignore_merges a piece that is a token is that token. Pieces come as bytes, tokens are
 * written in the byte-level alphabet: a table of what they stand for. */
static mt_status find_whole(tok_bpe *b, tok_arena *arena)
{
    const tok_vocab *v = b->vocab;
    b->whole_text = calloc((size_t)v->size + 1, sizeof *b->whole_text);
    if (!b->whole_text)
        return mt_fail_nomem();
    mt_status status = tok_table_init(&b->whole, v->size, b->whole_text);
    for (int64_t id = 0; id < v->size && !status; id++) {
        if (!(v->flags[id] & TOK_OF_MODEL) || v->text[id].n == 0)
            continue;
        char *p = tok_arena_alloc(arena, (size_t)v->text[id].n);
        if (!p)
            return mt_fail_nomem();
        int64_t n = 0;
        for (int64_t i = 0; i < v->text[id].n && n >= 0;) {
            uint32_t c;
            i += tok_char(v->text[id].p + i, &c);
            int byte = tok_char_byte(c);
            if (byte < 0)
                n = -1;
            else
                p[n++] = (char)byte;
        }
        if (n < 0)
            continue; /* no piece can be this token */
        b->whole_text[id] = (tok_text){ p, n };
        tok_table_add(&b->whole, (int32_t)id);
    }
    return status;
}

static uint32_t joined_hash(const tok_bpe *b, uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 21 | right) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> b->joined_shift);
}

/* Marks the neighbours within every token that a merge makes. */
static mt_status find_joined(tok_bpe *b, int64_t merges)
{
    uint32_t bits = 12;
    while (bits < 22 && (1ll << bits) < 16 * merges)
        bits++;
    b->joined_shift = 64 - bits;
    b->joined = calloc((size_t)1 << (bits - 6), sizeof *b->joined);
    if (!b->joined)
        return mt_fail_nomem();
    for (uint64_t i = 0; i <= b->mask; i++) {
        if (b->merges[i].rank < 0)
            continue;
        tok_text t = b->vocab->text[b->merges[i].id];
        uint32_t before = 0, c;
        for (int64_t at = 0; at < t.n; before = c) {
            int n = tok_char(t.p + at, &c);
            if (at) {
                uint32_t h = joined_hash(b, before, c);
                b->joined[h >> 6] |= 1ull << (h & 63);
            }
            at += n;
        }
    }
    return MT_OK;
}

mt_status tok_bpe_init(tok_bpe *b, tok_arena *arena, bool byte_fallback)
{
    find_byte_tokens(b);
    find_fallback(b, byte_fallback);
    mt_status status = b->bytes ? MT_OK : find_char_tokens(b, arena);
    if (!status && b->bytes && b->ignore_merges)
        status = find_whole(b, arena);
    /* Cutting is exact only where a symbol does not depend on its place in the piece. */
    bool by_place = b->ignore_merges || b->prefix.n || b->suffix.n;
    if (!status && !b->bytes && !by_place)
        status = find_joined(b, (int64_t)(b->mask + 1) / 2);
    return status;
}

void tok_bpe_finish(tok_bpe *b)
{
    free(b->merges);
    free(b->joined);
    free(b->whole_text);
    tok_table_finish(&b->whole);
}

/* ---- scratch -------------------------------------------------------------------------------- */

/* A piece and its tokens, where both are short. */
typedef struct tok_cached {
    uint8_t n, n_ids; /* n 0: free */
    char text[30];
    int32_t id[8];
} tok_cached;

enum { CACHE = 1 << 14, CACHE_TEXT = sizeof((tok_cached *)0)->text, CACHE_IDS = 8, MANY = 1 << 16 };

static void free_symbols(tok_bpe_scratch *s)
{
    free(s->id);
    free(s->prev);
    free(s->next);
    free(s->heap);
    s->id = s->prev = s->next = NULL;
    s->heap = NULL;
    s->cap = s->heap_cap = 0;
}

void tok_bpe_scratch_trim(tok_bpe_scratch *s)
{
    if (s->cap > MANY)
        free_symbols(s);
}

void tok_bpe_scratch_finish(tok_bpe_scratch *s)
{
    free_symbols(s);
    free(s->cache);
}

static mt_status grow(void **p, int64_t n, size_t size)
{
    void *grown = realloc(*p, (size_t)n * size);
    if (!grown)
        return mt_fail_nomem();
    *p = grown;
    return MT_OK;
}

/* Room for n symbols; those that are there stay. */
static mt_status reserve_symbols(tok_bpe_scratch *s, int64_t n)
{
    if (n <= s->cap)
        return MT_OK;
    int64_t cap = s->cap ? 2 * s->cap : 256;
    while (cap < n)
        cap *= 2;
    mt_status status = grow((void **)&s->id, cap, sizeof *s->id);
    if (!status)
        status = grow((void **)&s->prev, cap, sizeof *s->prev);
    if (!status)
        status = grow((void **)&s->next, cap, sizeof *s->next);
    if (!status)
        s->cap = cap;
    return status;
}

/* ---- merging in place ----------------------------------------------------------------------- */

enum { IN_PLACE = 64, NO_RANK = INT32_MAX };

static int32_t rank_of(const tok_bpe *b, const int32_t *id, int64_t i, int64_t n)
{
    if (i < 0 || i + 1 >= n)
        return NO_RANK;
    const tok_merge *m = find_merge(b, id[i], id[i + 1]);
    return m ? m->rank : NO_RANK;
}

/* Merges n <= IN_PLACE symbols; returns how many are left. */
static int64_t merge_in_place(const tok_bpe *b, int32_t *id, int64_t n)
{
    int32_t rank[IN_PLACE];
    for (int64_t i = 0; i < n; i++)
        rank[i] = rank_of(b, id, i, n);
    for (;;) {
        int64_t best = 0;
        int32_t lowest = NO_RANK;
        for (int64_t i = 0; i < n; i++) {
            best = rank[i] < lowest ? i : best;
            lowest = rank[i] < lowest ? rank[i] : lowest;
        }
        if (lowest == NO_RANK)
            return n;
        id[best] = find_merge(b, id[best], id[best + 1])->id;
        n--;
        memmove(id + best + 1, id + best + 2, (size_t)(n - best - 1) * sizeof *id);
        memmove(rank + best + 1, rank + best + 2, (size_t)(n - best - 1) * sizeof *rank);
        rank[best] = rank_of(b, id, best, n);
        if (best > 0)
            rank[best - 1] = rank_of(b, id, best - 1, n);
    }
}

/* ---- merging with a heap -------------------------------------------------------------------- */

/* Candidates: rank in the upper half, place of the left symbol in the lower one, so that the
 * smallest is the next to merge. One whose symbols have changed since is found out when it comes
 * up: its place then has another rank or none. */
typedef struct heap {
    uint64_t *item;
    int64_t n;
} heap;

static void sift_down(heap *h, int64_t at)
{
    uint64_t x = h->item[at];
    for (int64_t child; (child = 2 * at + 1) < h->n; at = child) {
        if (child + 1 < h->n && h->item[child + 1] < h->item[child])
            child++;
        if (h->item[child] >= x)
            break;
        h->item[at] = h->item[child];
    }
    h->item[at] = x;
}

static void push(heap *h, uint64_t x)
{
    int64_t at = h->n++;
    for (; at > 0 && h->item[(at - 1) / 2] > x; at = (at - 1) / 2)
        h->item[at] = h->item[(at - 1) / 2];
    h->item[at] = x;
}

static uint64_t pop(heap *h)
{
    uint64_t top = h->item[0];
    h->item[0] = h->item[--h->n];
    if (h->n)
        sift_down(h, 0);
    return top;
}

static const tok_merge *merge_at(const tok_bpe *b, const tok_bpe_scratch *s, int64_t at)
{
    int32_t next = s->next[at];
    return next < 0 ? NULL : find_merge(b, s->id[at], s->id[next]);
}

static uint64_t candidate(const tok_merge *m, int64_t at)
{
    return (uint64_t)m->rank << 32 | (uint64_t)at;
}

static void push_at(const tok_bpe *b, const tok_bpe_scratch *s, heap *h, int64_t at)
{
    const tok_merge *m = at < 0 ? NULL : merge_at(b, s, at);
    if (m)
        push(h, candidate(m, at));
}

/* Merges the n symbols of the scratch; they stay linked by `next` from 0 on. A merge takes one
 * candidate out and puts at most two in, and there are n - 1 merges at most: 2 n candidates fit. */
static mt_status merge_with_heap(const tok_bpe *b, tok_bpe_scratch *s, int64_t n)
{
    if (s->heap_cap < 2 * n) {
        mt_status status = grow((void **)&s->heap, 2 * n, sizeof *s->heap);
        if (status)
            return status;
        s->heap_cap = 2 * n;
    }
    for (int64_t i = 0; i < n; i++) {
        s->prev[i] = (int32_t)i - 1;
        s->next[i] = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    heap h = { .item = s->heap };
    for (int64_t i = 0; i + 1 < n; i++) {
        const tok_merge *m = merge_at(b, s, i);
        if (m)
            h.item[h.n++] = candidate(m, i);
    }
    for (int64_t i = h.n / 2 - 1; i >= 0; i--)
        sift_down(&h, i);
    while (h.n) {
        uint64_t top = pop(&h);
        int64_t at = (int64_t)(uint32_t)top;
        if (s->id[at] < 0)
            continue; /* has become part of the symbol to its left */
        const tok_merge *m = merge_at(b, s, at);
        if (!m || m->rank != (int32_t)(top >> 32))
            continue;
        int32_t gone = s->next[at];
        s->id[at] = m->id;
        s->id[gone] = -1;
        s->next[at] = s->next[gone];
        if (s->next[at] >= 0)
            s->prev[s->next[at]] = (int32_t)at;
        push_at(b, s, &h, s->prev[at]);
        push_at(b, s, &h, at);
    }
    return MT_OK;
}

static mt_status merge_symbols(const tok_bpe *b, tok_bpe_scratch *s, int64_t n, tok_output *out)
{
    if (n <= IN_PLACE) {
        n = merge_in_place(b, s->id, n);
        for (int64_t i = 0; i < n; i++)
            tok_put(out, s->id[i]);
        return MT_OK;
    }
    mt_status status = merge_with_heap(b, s, n);
    for (int64_t i = 0; !status && i >= 0; i = s->next[i])
        tok_put(out, s->id[i]);
    return status;
}

/* ---- symbols to begin with ------------------------------------------------------------------ */

static int32_t char_token(const tok_bpe *b, uint32_t c)
{
    const int32_t *page = b->char_id[c / PAGE];
    return page ? page[c % PAGE] : -1;
}

/* The token of a character with the prefix or suffix that its place demands. */
static int32_t placed_token(const tok_bpe *b, tok_text c, bool first, bool last)
{
    char text[256];
    int64_t n = 0;
    if (b->prefix.n + c.n + b->suffix.n > (int64_t)sizeof text)
        return -1;
    const tok_text parts[] = { first ? (tok_text){ 0 } : b->prefix, c,
                               last ? b->suffix : (tok_text){ 0 } };
    for (int i = 0; i < 3; i++) {
        if (parts[i].n)
            memcpy(text + n, parts[i].p, (size_t)parts[i].n);
        n += parts[i].n;
    }
    return find_in_model(b, (tok_text){ text, n });
}

/* Writes the unknown token that is still to be written, if there is one. */
static void flush_unknown(const tok_bpe *b, tok_bpe_scratch *s, int64_t *n, bool *pending)
{
    if (*pending)
        s->id[(*n)++] = b->unk;
    *pending = false;
}

/* Writes the bytes of an unknown character as tokens; false where one of them has none. */
static bool add_fallback(const tok_bpe *b, tok_bpe_scratch *s, tok_text c, int64_t *n)
{
    for (int64_t i = 0; i < c.n; i++)
        if (b->fallback[(uint8_t)c.p[i]] < 0)
            return false;
    for (int64_t i = 0; i < c.n; i++)
        s->id[(*n)++] = b->fallback[(uint8_t)c.p[i]];
    return true;
}

/* An unknown token is written when a known one follows: bytes that stand for a character do not
 * count as one, and so may come before it. Odd, but what the reference does. */
static int64_t symbols_of_chars(const tok_bpe *b, tok_bpe_scratch *s, tok_text piece)
{
    bool placed = b->prefix.n || b->suffix.n;
    bool unknown = false;
    int64_t n = 0;
    for (int64_t i = 0; i < piece.n;) {
        uint32_t c;
        int bytes = tok_char(piece.p + i, &c);
        tok_text text = { piece.p + i, bytes };
        bool last = i + bytes == piece.n;
        int32_t id = placed ? placed_token(b, text, i == 0, last) : char_token(b, c);
        if (id >= 0) {
            flush_unknown(b, s, &n, &unknown);
            s->id[n++] = id;
        } else if (!b->has_fallback || !add_fallback(b, s, text, &n)) {
            if (!b->fuse_unk)
                flush_unknown(b, s, &n, &unknown);
            unknown = b->unk >= 0;
        }
        i += bytes;
    }
    flush_unknown(b, s, &n, &unknown);
    return n;
}

static int64_t symbols_of_bytes(const tok_bpe *b, tok_bpe_scratch *s, tok_text piece)
{
    bool unknown = false;
    int64_t n = 0;
    for (int64_t i = 0; i < piece.n; i++) {
        int32_t id = b->byte_id[(uint8_t)piece.p[i]];
        if (id >= 0) {
            flush_unknown(b, s, &n, &unknown);
            s->id[n++] = id;
        } else {
            if (!b->fuse_unk)
                flush_unknown(b, s, &n, &unknown);
            unknown = b->unk >= 0;
        }
    }
    flush_unknown(b, s, &n, &unknown);
    return n;
}

/* ---- pieces --------------------------------------------------------------------------------- */

static mt_status encode_uncached(const tok_bpe *b, tok_bpe_scratch *s, tok_text piece,
                                 tok_output *out)
{
    if (b->ignore_merges) {
        int32_t id = b->bytes ? tok_table_find(&b->whole, piece) : find_in_model(b, piece);
        if (id >= 0) {
            tok_put(out, id);
            return MT_OK;
        }
    }
    if (piece.n >= INT32_MAX)
        return mt_fail(MT_ERR_UNSUPPORTED,
                       "tokenizer: a piece of text of %lld bytes; at most 2 GiB can be one piece, "
                       "split the text",
                       (long long)piece.n);
    mt_status status = reserve_symbols(s, piece.n + 1);
    if (status)
        return status;
    int64_t n = b->bytes ? symbols_of_bytes(b, s, piece) : symbols_of_chars(b, s, piece);
    return merge_symbols(b, s, n, out);
}

static void remember(tok_cached *c, tok_text piece, const int32_t *id, int64_t n)
{
    c->n = (uint8_t)piece.n;
    c->n_ids = (uint8_t)n;
    memcpy(c->text, piece.p, (size_t)piece.n);
    memcpy(c->id, id, (size_t)n * sizeof *id);
}

static mt_status encode_cached(const tok_bpe *b, tok_bpe_scratch *s, tok_text piece,
                               tok_output *out)
{
    if (piece.n == 0)
        return MT_OK;
    if (piece.n > CACHE_TEXT)
        return encode_uncached(b, s, piece, out);
    if (!s->cache && !(s->cache = calloc(CACHE, sizeof *s->cache)))
        return mt_fail_nomem();
    tok_cached *c = &s->cache[XXH3_64bits(piece.p, (size_t)piece.n) & (CACHE - 1)];
    if (c->n == piece.n && memcmp(c->text, piece.p, (size_t)piece.n) == 0) {
        for (int i = 0; i < c->n_ids; i++)
            tok_put(out, c->id[i]);
        return MT_OK;
    }
    int32_t id[CACHE_TEXT + 1];
    tok_output own = { .ids = id, .capacity = CACHE_TEXT + 1 };
    mt_status status = encode_uncached(b, s, piece, &own);
    if (status)
        return status;
    if (own.n <= CACHE_IDS)
        remember(c, piece, id, own.n);
    for (int64_t i = 0; i < own.n; i++)
        tok_put(out, id[i]);
    return MT_OK;
}

/* Can no token reach from `left` over to `right`? A character without a token of its own becomes
 * bytes, which merge with nothing, or else may be part of a longer run of unknown ones. */
static bool is_border(const tok_bpe *b, uint32_t left, uint32_t right)
{
    bool unknown = char_token(b, left) < 0 || char_token(b, right) < 0;
    if (unknown)
        return b->is_total;
    uint32_t h = joined_hash(b, left, right);
    return !(b->joined[h >> 6] >> (h & 63) & 1);
}

mt_status tok_bpe_encode(const tok_bpe *b, tok_bpe_scratch *s, tok_text piece, tok_output *out)
{
    if (!b->joined || piece.n < 2)
        return encode_cached(b, s, piece, out);
    uint32_t left, right;
    int64_t start = 0, at = tok_char(piece.p, &left);
    while (at < piece.n) {
        int n = tok_char(piece.p + at, &right);
        if (is_border(b, left, right)) {
            mt_status status = encode_cached(b, s, (tok_text){ piece.p + start, at - start }, out);
            if (status)
                return status;
            start = at;
        }
        left = right;
        at += n;
    }
    return encode_cached(b, s, (tok_text){ piece.p + start, at - start }, out);
}
