/* SPDX-License-Identifier: Apache-2.0
 *
 * A tokenizer and a chat format that can be followed by eye: a token is a byte or one of a few
 * special ones, and "ab" is one token. What is trained shows in brackets when it is written out.
 */
#ifndef TEST_DATA_TOY_LANGUAGE_H
#define TEST_DATA_TOY_LANGUAGE_H

#include "support.h"

/* Padding has the id of the end token, as in many models: nothing may be masked by it. */
enum { TOY_BEGIN = 256, TOY_END, TOY_AB, TOY_OPEN, TOY_CLOSE, TOY_VOCAB };

typedef struct toy {
    bool begins;                                /* texts begin with TOY_BEGIN when asked for */
    bool ends;                                  /* and end with TOY_END */
    uint64_t fingerprint;                       /* of tokenizer and chat format */
    int64_t encoded;                            /* texts so far; counted by several threads */
    void (*meets)(const char *text, int64_t n); /* called with every text, if set */
} toy;

static inline int64_t toy_vocab_size(const void *t)
{
    (void)t;
    return TOY_VOCAB;
}

static inline int32_t toy_special(const void *t, mt_special which)
{
    (void)t;
    return which == MT_SPECIAL_BEGIN ? TOY_BEGIN : which == MT_SPECIAL_UNKNOWN ? -1 : TOY_END;
}

static inline void toy_put(int32_t *ids, int64_t capacity, int64_t *n, int32_t id)
{
    if (*n < capacity)
        ids[*n] = id;
    ++*n;
}

static inline int64_t toy_encode(const void *t_, const char *text, int64_t n, uint32_t flags,
                                 int32_t *ids, int64_t capacity)
{
    static const struct {
        const char *text;
        int32_t id;
    } words[] = { { "<s>", TOY_BEGIN }, { "</s>", TOY_END }, { "ab", TOY_AB } };
    const toy *t = t_;
    int64_t k = 0;
    __atomic_fetch_add(&((toy *)(uintptr_t)t)->encoded, 1, __ATOMIC_RELAXED);
    if (t->meets)
        t->meets(text, n);
    if ((flags & MT_ENCODE_ADD_SPECIAL) && t->begins)
        toy_put(ids, capacity, &k, TOY_BEGIN);
    for (int64_t i = 0; i < n;) {
        int32_t id = (uint8_t)text[i];
        int64_t length = 1;
        for (size_t w = 0; w < 3; w++) {
            int64_t m = (int64_t)strlen(words[w].text);
            if (i + m <= n && memcmp(text + i, words[w].text, (size_t)m) == 0) {
                id = words[w].id;
                length = m;
            }
        }
        toy_put(ids, capacity, &k, id);
        i += length;
    }
    if ((flags & MT_ENCODE_ADD_SPECIAL) && t->ends)
        toy_put(ids, capacity, &k, TOY_END);
    return k;
}

static inline const char *toy_text(int32_t id, char byte[2])
{
    static const char *const names[] = { "<s>", "</s>", "ab", "{", "}" };
    byte[0] = (char)id;
    byte[1] = '\0';
    return id < 256 ? byte : names[id - 256];
}

static inline int64_t toy_decode(const void *t, const int32_t *ids, int64_t n, uint32_t flags,
                                 char *text, int64_t capacity)
{
    (void)t, (void)flags;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        char byte[2];
        for (const char *p = toy_text(ids[i], byte); *p; p++, at++)
            if (at < capacity)
                text[at] = *p;
    }
    return at;
}

static inline uint64_t toy_fingerprint(const void *t)
{
    return ((const toy *)t)->fingerprint;
}

static const mt_tokenizer toy_tokenizer = { .struct_size = sizeof(mt_tokenizer),
                                            .vocab_size = toy_vocab_size,
                                            .special = toy_special,
                                            .encode = toy_encode,
                                            .decode = toy_decode,
                                            .fingerprint = toy_fingerprint };

/* <s>{user\nHi}\n{assistant\nHello}\n: the answer and its closing token may be trained. An
 * assistant must not speak first. */
static inline int64_t toy_render(const void *t, const mt_message *m, int64_t n, bool prompt,
                                 int32_t *ids, uint8_t *trained, int64_t capacity)
{
    (void)t, (void)prompt;
    int64_t k = 0;
    toy_put(ids, capacity, &k, TOY_BEGIN);
    if (n > 0 && strcmp(m[0].role, "assistant") == 0)
        return status_set(MT_ERR_INVALID, "toy chat: the assistant speaks first");
    for (int64_t i = 0; i < k && i < capacity; i++)
        trained[i] = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t from = k, answer;
        toy_put(ids, capacity, &k, TOY_OPEN);
        for (const char *p = m[i].role; *p; p++)
            toy_put(ids, capacity, &k, (uint8_t)*p);
        toy_put(ids, capacity, &k, '\n');
        answer = k;
        for (int64_t j = 0; j < m[i].n_reasoning && m[i].reasoning; j++)
            toy_put(ids, capacity, &k, (uint8_t)m[i].reasoning[j]);
        if (m[i].reasoning)
            toy_put(ids, capacity, &k, '|');
        for (int64_t j = 0; j < m[i].n_content; j++)
            toy_put(ids, capacity, &k, (uint8_t)m[i].content[j]);
        toy_put(ids, capacity, &k, TOY_CLOSE);
        int64_t end = k;
        toy_put(ids, capacity, &k, '\n');
        for (int64_t j = from; j < k && j < capacity; j++)
            trained[j] = m[i].trained && j >= answer && j < end;
    }
    return k;
}

static inline mt_status toy_open(const char *format, const mt_tokenizer *tokenizer,
                                 const void *tokens, void **ret)
{
    (void)tokenizer;
    if (strcmp(format, "alpaca") != 0)
        return status_set(MT_ERR_NOT_FOUND, "toy chat: no '%s'", format);
    *ret = (void *)(uintptr_t)tokens;
    return MT_OK;
}

static inline void toy_close(void *t)
{
    (void)t;
}

static const mt_chat toy_chat = { .struct_size = sizeof(mt_chat),
                                  .open = toy_open,
                                  .close = toy_close,
                                  .encode = toy_render,
                                  .fingerprint = toy_fingerprint };

/* Appends a document to `text`; runs of trained tokens stand in brackets. */
static inline void toy_write(const mt_document *d, char *text, size_t size)
{
    bool inside = false;
    size_t n = strlen(text);
    for (int64_t i = 0; i <= d->n && n + 8 < size; i++) {
        char byte[2];
        bool trained = i < d->n && (d->loss_mask ? d->loss_mask[i] != 0 : i > 0);
        if (trained != inside)
            n += (size_t)snprintf(text + n, size - n, "%s", trained ? "[" : "]");
        inside = trained;
        if (i < d->n)
            n += (size_t)snprintf(text + n, size - n, "%s", toy_text(d->tokens[i], byte));
    }
}

#endif
