/* SPDX-License-Identifier: Apache-2.0
 *
 * From text to tokens: the stages one after the other, each handing its pieces on to the next as it
 * finds them, so that no list of pieces is ever made.
 */
#include "tokenizer.h"

#include <stdlib.h>

/* What one call needs; kept for the next one. */
typedef struct tok_scratch {
    struct tok_scratch *next;
    tok_buf repaired, norm[2];
    tok_buf *step; /* [n_splits] */
    int64_t n_steps;
    tok_region *region;
    tok_bpe_scratch bpe;
} tok_scratch;

typedef struct encoder {
    const tokenizer *t;
    tok_scratch *s;
    tok_output out;
    bool literal; /* special tokens in the text are mere text */
} encoder;

/* A part of the text on its way; `first`: it begins where the text does. */
typedef struct piece {
    tok_text text;
    bool first;
} piece;

/* ---- scratch -------------------------------------------------------------------------------- */

static void destroy_scratch(tok_scratch *s)
{
    if (!s)
        return;
    tok_buf_finish(&s->repaired);
    tok_buf_finish(&s->norm[0]);
    tok_buf_finish(&s->norm[1]);
    for (int64_t i = 0; s->step && i < s->n_steps; i++)
        tok_buf_finish(&s->step[i]);
    free(s->step);
    tok_region_destroy(s->region);
    tok_bpe_scratch_finish(&s->bpe);
    free(s);
}

static tok_scratch *create_scratch(int64_t n_steps)
{
    tok_scratch *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->n_steps = n_steps;
    s->step = calloc((size_t)n_steps + 1, sizeof *s->step);
    s->region = tok_region_create();
    if (s->step && s->region)
        return s;
    destroy_scratch(s);
    return NULL;
}

static tok_scratch *take_scratch(tokenizer *t)
{
    pthread_mutex_lock(&t->lock);
    tok_scratch *s = t->idle;
    if (s)
        t->idle = s->next;
    pthread_mutex_unlock(&t->lock);
    return s ? s : create_scratch(t->n_splits);
}

static void give_scratch(tokenizer *t, tok_scratch *s)
{
    tok_bpe_scratch_trim(&s->bpe);
    pthread_mutex_lock(&t->lock);
    s->next = t->idle;
    t->idle = s;
    pthread_mutex_unlock(&t->lock);
}

void tok_scratch_destroy_all(tokenizer *t)
{
    while (t->idle) {
        tok_scratch *next = t->idle->next;
        destroy_scratch(t->idle);
        t->idle = next;
    }
}

/* ---- cutting -------------------------------------------------------------------------------- */

static mt_status cut(encoder *e, int64_t step, piece p);

/* Joins matches and gaps as the behavior says and hands the results on. */
typedef struct joiner {
    encoder *e;
    int64_t step;
    piece whole;
    tok_behavior behavior;
    int64_t start, end; /* what is held back, while it may still grow */
    bool holds, was_match;
} joiner;

static mt_status hand_on(joiner *j, int64_t start, int64_t end)
{
    if (start == end)
        return MT_OK;
    return cut(j->e, j->step + 1,
               (piece){ { j->whole.text.p + start, end - start }, j->whole.first && start == 0 });
}

/* Does the stretch that comes belong to the one that is held back? */
static bool joins(const joiner *j, bool is_match)
{
    if (!j->holds)
        return false;
    switch (j->behavior) {
    case TOK_CONTIGUOUS:
        return is_match == j->was_match;
    case TOK_MERGED_WITH_PREVIOUS:
        return is_match && !j->was_match;
    case TOK_MERGED_WITH_NEXT:
        return !is_match && j->was_match;
    default:
        return false;
    }
}

static mt_status add_stretch(joiner *j, int64_t start, int64_t end, bool is_match)
{
    if (j->behavior == TOK_ISOLATED)
        return hand_on(j, start, end);
    if (j->behavior == TOK_REMOVED)
        return is_match ? MT_OK : hand_on(j, start, end);
    mt_status status = MT_OK;
    if (joins(j, is_match)) {
        j->end = end;
    } else {
        if (j->holds)
            status = hand_on(j, j->start, j->end);
        j->start = start;
        j->end = end;
        j->holds = true;
    }
    j->was_match = is_match;
    return status;
}

static mt_status split(encoder *e, int64_t step, piece p)
{
    const tok_split *s = &e->t->splits[step];
    joiner j = { .e = e, .step = step, .whole = p, .behavior = s->behavior };
    tok_search search = { .text = p.text, .last_end = -1, .region = e->s->region };
    mt_status status = MT_OK;
    int64_t at = 0, start = 0, end = 0;
    while (!status && tok_pattern_next(&s->pattern, &search, &start, &end)) {
        if (at < start)
            status = add_stretch(&j, at, start, s->invert);
        if (!status)
            status = add_stretch(&j, start, end, !s->invert);
        at = end;
    }
    if (search.status)
        return search.status;
    if (!status && at < p.text.n)
        status = add_stretch(&j, at, p.text.n, s->invert);
    return !status && j.holds ? hand_on(&j, j.start, j.end) : status;
}

static bool starts_with(tok_text t, tok_text prefix)
{
    return t.n >= prefix.n && memcmp(t.p, prefix.p, (size_t)prefix.n) == 0;
}

/* Steps that write the piece anew, into a buffer of their own. */
static mt_status rewrite(encoder *e, int64_t step, piece p)
{
    const tok_split *s = &e->t->splits[step];
    tok_buf *to = &e->s->step[step];
    mt_status status = MT_OK;
    bool ok = true;
    to->n = 0;
    switch (s->kind) {
    case TOK_SPLIT_PREFIX:
        if (starts_with(p.text, s->content) || (s->first_only && !p.first))
            return cut(e, step + 1, p);
        ok = tok_buf_add(to, s->content.p, s->content.n) && tok_buf_add(to, p.text.p, p.text.n);
        break;
    case TOK_SPLIT_SPACES:
        status = tok_pattern_replace(&s->pattern, s->content, p.text, e->s->region, to);
        break;
    default:
        ok = tok_add_byte_chars(to, p.text);
        break;
    }
    if (!ok)
        status = mt_fail_nomem();
    return status ? status : cut(e, step + 1, (piece){ tok_buf_text(to), p.first });
}

static mt_status cut(encoder *e, int64_t step, piece p)
{
    if (step == e->t->n_splits)
        return tok_bpe_encode(&e->t->bpe, &e->s->bpe, p.text, &e->out);
    return e->t->splits[step].kind == TOK_SPLIT ? split(e, step, p) : rewrite(e, step, p);
}

/* ---- added tokens --------------------------------------------------------------------------- */

static bool is_single_word(tok_text t, int64_t start, int64_t end)
{
    uint32_t c = 0;
    if (start > 0 && tok_is_word(tok_char_before(t.p, t.p + start)))
        return false;
    if (end < t.n)
        tok_char(t.p + end, &c);
    return end == t.n || !tok_is_word(c);
}

static int64_t skip_spaces_back(tok_text t, int64_t at)
{
    while (at > 0 && tok_is_space(tok_char_before(t.p, t.p + at)))
        do
            at--;
        while (((uint8_t)t.p[at] & 0xc0) == 0x80);
    return at;
}

static int64_t skip_spaces(tok_text t, int64_t at)
{
    uint32_t c;
    while (at < t.n) {
        int n = tok_char(t.p + at, &c);
        if (!tok_is_space(c))
            break;
        at += n;
    }
    return at;
}

typedef mt_status (*on_rest)(encoder *e, piece p);

/* Cuts the trie's tokens out of `p` and hands what is between them on. A token that may not stand
 * where it was found is passed over as a whole; shorter ones inside it are not looked for. */
static mt_status extract(encoder *e, const tok_trie *trie, piece p, on_rest rest)
{
    tok_text t = p.text;
    mt_status status = MT_OK;
    int64_t at = 0, start = 0, end = 0, from = 0;
    for (int32_t i; (i = tok_trie_find(trie, t, from, &start, &end)) >= 0;) {
        const tok_added *a = &e->t->added[i];
        from = end;
        if ((e->literal && a->special) || (a->single_word && !is_single_word(t, start, end)))
            continue;
        if (a->lstrip) {
            int64_t left = skip_spaces_back(t, start);
            start = left > at ? left : at;
        }
        if (a->rstrip)
            end = skip_spaces(t, end);
        if (at < start)
            status = rest(e, (piece){ { t.p + at, start - at }, p.first && at == 0 });
        if (status)
            return status;
        tok_put(&e->out, a->id);
        at = end;
    }
    if (at < t.n)
        status = rest(e, (piece){ { t.p + at, t.n - at }, p.first && at == 0 });
    return status;
}

static mt_status encode_normalized(encoder *e, piece p)
{
    return cut(e, 0, p);
}

static mt_status encode_raw(encoder *e, piece p)
{
    mt_status status =
        tok_normalize(e->t->norms, e->t->n_norms, p.text, e->s->region, e->s->norm, &p.text);
    return status || p.text.n == 0 ? status : extract(e, &e->t->normalized, p, encode_normalized);
}

/* ---- the interface -------------------------------------------------------------------------- */

static mt_status encode_text(encoder *e, tok_text text)
{
    if (tok_valid(text) < text.n) {
        e->s->repaired.n = 0;
        if (!tok_repair(text, &e->s->repaired))
            return mt_fail_nomem();
        text = tok_buf_text(&e->s->repaired);
    }
    return text.n ? extract(e, &e->t->raw, (piece){ text, true }, encode_raw) : MT_OK;
}

int64_t tok_encode(const void *tok, const char *text, int64_t n, uint32_t flags,
                   int32_t *ret_tokens, int64_t capacity)
{
    const tokenizer *t = tok;
    encoder e = { .t = t,
                  .s = take_scratch((tokenizer *)tok),
                  .out = { ret_tokens, capacity, 0 },
                  .literal = flags & MT_ENCODE_LITERAL };
    if (!e.s)
        return mt_fail_nomem();
    bool special = flags & MT_ENCODE_ADD_SPECIAL;
    for (int64_t i = 0; special && i < t->n_before; i++)
        tok_put(&e.out, t->before[i]);
    mt_status status = encode_text(&e, (tok_text){ text, n });
    for (int64_t i = 0; special && i < t->n_after; i++)
        tok_put(&e.out, t->after[i]);
    give_scratch((tokenizer *)tok, e.s);
    return status ? status : e.out.n;
}
