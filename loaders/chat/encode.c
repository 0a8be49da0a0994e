/* SPDX-License-Identifier: Apache-2.0
 *
 * A rendered conversation to tokens, and its answers to a mask.
 *
 * The tokens are those of the whole text. A tokenizer splits a text at its special tokens before
 * anything else, so encoding it in stretches that begin with those of the format gives the same
 * tokens, and an answer's borders are found within one stretch.
 */
#include "chat.h"

#include <stdlib.h>

/* Tokens of a text, in room that grows to the longest. */
typedef struct id_list {
    int32_t *ids;
    int64_t room;
} id_list;

/* What is being written: the caller's arrays, with a count that goes on past their end. */
typedef struct output {
    const chat *c;
    const chat_text *text;
    int32_t *tokens;
    uint8_t *trained;
    int64_t n, capacity;
    id_list stretch; /* the one at hand */
    id_list prefix;  /* its part before a border */
} output;

/* Bytes of a token within a text. Decoded twice minus once, so that a space which the tokenizer
 * drops at the start of a text is counted. */
static int64_t token_bytes(const chat *c, int32_t id)
{
    const int32_t twice[2] = { id, id };
    int64_t two = c->tokenizer->decode(c->tokens, twice, 2, 0, NULL, 0);
    int64_t one = c->tokenizer->decode(c->tokens, twice, 1, 0, NULL, 0);
    return two < 0 || one < 0 ? 0 : two - one;
}

/* Normalisation may make more tokens of a text than it has bytes: then it is encoded once more. */
static int64_t encode(const chat *c, const char *p, int64_t bytes, id_list *ret)
{
    int64_t wanted = bytes + 64;
    for (;;) {
        if (ret->room < wanted) {
            int32_t *grown = realloc(ret->ids, (size_t)wanted * sizeof *grown);
            if (!grown)
                return mt_fail_nomem();
            ret->ids = grown;
            ret->room = wanted;
        }
        int64_t n = c->tokenizer->encode(c->tokens, p, bytes, 0, ret->ids, ret->room);
        if (n <= ret->room)
            return n;
        wanted = n;
    }
}

/* Index of the first of the stretch's `n` tokens that starts at or after byte `at` of it; below 0:
 * an mt_status. The text before the border is encoded by itself; where that is how the stretch
 * begins, the border lies between tokens, else bytes are counted from where the two part. */
static int64_t token_at_byte(output *o, const char *p, int64_t bytes, int64_t at, int64_t n)
{
    if (at == 0 || at == bytes)
        return at == 0 ? 0 : n;
    int64_t n_prefix = encode(o->c, p, at, &o->prefix), i = 0;
    if (n_prefix < 0)
        return n_prefix;
    while (i < n && i < n_prefix && o->stretch.ids[i] == o->prefix.ids[i])
        i++;
    int64_t left = 0;
    for (int64_t k = i; k < n_prefix; k++)
        left += token_bytes(o->c, o->prefix.ids[k]);
    for (; i < n && left > 0; i++)
        left -= token_bytes(o->c, o->stretch.ids[i]);
    return i;
}

/* Marks the tokens of answers within bytes [from, to) of the text, which are stretch[0..n). */
static int64_t mark_answers(output *o, int64_t from, int64_t to, int64_t n, int64_t *answer)
{
    const chat_text *t = o->text;
    const char *p = t->bytes + from;
    while (*answer < t->n_answers && t->answers[*answer].begin < to) {
        const chat_span *s = &t->answers[*answer];
        int64_t begin = s->begin > from ? s->begin - from : 0;
        int64_t end = s->end < to ? s->end - from : to - from;
        int64_t a = token_at_byte(o, p, to - from, begin, n);
        int64_t b = a < 0 ? a : token_at_byte(o, p, to - from, end, n);
        if (b < 0)
            return b;
        for (int64_t i = a; i < b && o->n + i < o->capacity; i++)
            o->trained[o->n + i] = 1;
        if (s->end > to)
            break;
        ++*answer;
    }
    return MT_OK;
}

static int64_t encode_stretch(output *o, int64_t from, int64_t to, int64_t *answer)
{
    int64_t n = encode(o->c, o->text->bytes + from, to - from, &o->stretch);
    if (n < 0)
        return n;
    for (int64_t i = 0; i < n && o->n + i < o->capacity; i++) {
        o->tokens[o->n + i] = o->stretch.ids[i];
        if (o->trained)
            o->trained[o->n + i] = 0;
    }
    int64_t st = o->trained ? mark_answers(o, from, to, n, answer) : MT_OK;
    o->n += n;
    return st;
}

int64_t chat_encode(const void *self, const mt_message *messages, int64_t n, bool prompt,
                    int32_t *ret_tokens, uint8_t *ret_trained, int64_t capacity)
{
    chat_text text = { 0 };
    output o = {
        .c = self, .text = &text, .tokens = ret_tokens, .trained = ret_trained, .capacity = capacity
    };
    int64_t answer = 0, from = 0;
    int64_t st = chat_render(self, messages, n, prompt, &text);
    if (st != MT_OK)
        goto out;
    for (int64_t i = 0; i <= text.n_cuts && st == MT_OK; i++) {
        int64_t to = i < text.n_cuts ? text.cuts[i] : text.n;
        if (to > from)
            st = encode_stretch(&o, from, to, &answer);
        from = to;
    }
out:
    free(o.stretch.ids);
    free(o.prefix.ids);
    chat_text_free(&text);
    return st == MT_OK ? o.n : st;
}
