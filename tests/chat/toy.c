/* SPDX-License-Identifier: Apache-2.0
 *
 * The toy tokenizer.
 */
#include "toy.h"

/* Of all families, so that look-alikes in contents are tokens. Ids from 256. */
static const char *const specials[] = {
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|startoftext|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
};

enum { N_SPECIALS = sizeof specials / sizeof *specials, FIRST_SPECIAL = 256, FIRST_WORD = 512 };

/* The id of a text that stands at p, or of its first byte. */
static int32_t match(const toy *t, const char *p, int64_t n, int64_t *ret_bytes)
{
    for (int32_t i = 0; i < N_SPECIALS; i++) {
        size_t k = strlen(specials[i]);
        if ((size_t)n >= k && memcmp(p, specials[i], k) == 0) {
            *ret_bytes = (int64_t)k;
            return FIRST_SPECIAL + i;
        }
    }
    int32_t best = (uint8_t)*p;
    *ret_bytes = 1;
    for (int32_t i = 0; t->words && t->words[i]; i++) {
        size_t k = strlen(t->words[i]);
        if ((size_t)n >= k && (int64_t)k > *ret_bytes && memcmp(p, t->words[i], k) == 0) {
            best = FIRST_WORD + i;
            *ret_bytes = (int64_t)k;
        }
    }
    return best;
}

static int64_t vocab_size(const void *self)
{
    const toy *t = self;
    int64_t n = FIRST_WORD;
    for (int32_t i = 0; t->words && t->words[i]; i++)
        n++;
    return n;
}

static int32_t token_id(const void *self, const char *text, int64_t n)
{
    int64_t bytes = 0;
    int32_t id = n > 0 ? match(self, text, n, &bytes) : -1;
    return bytes == n ? id : -1;
}

static int32_t special(const void *self, mt_special which)
{
    const toy *t = self;
    const char *text = which == MT_SPECIAL_BEGIN ? t->bos : which == MT_SPECIAL_END ? t->eos : "";
    return token_id(t, text, (int64_t)strlen(text));
}

static int64_t encode(const void *self, const char *text, int64_t n, uint32_t flags,
                      int32_t *ret_tokens, int64_t capacity)
{
    (void)flags;
    int64_t count = 0, bytes = 0;
    for (int64_t at = 0; at < n; at += bytes, count++) {
        int32_t id = match(self, text + at, n - at, &bytes);
        if (count < capacity)
            ret_tokens[count] = id;
    }
    return count;
}

static int64_t decode(const void *self, const int32_t *tokens, int64_t n, uint32_t flags,
                      char *ret_text, int64_t capacity)
{
    const toy *t = self;
    int64_t at = 0;
    (void)flags;
    for (int64_t i = 0; i < n; i++) {
        char byte = (char)tokens[i];
        const char *p = tokens[i] >= FIRST_WORD      ? t->words[tokens[i] - FIRST_WORD]
                        : tokens[i] >= FIRST_SPECIAL ? specials[tokens[i] - FIRST_SPECIAL]
                                                     : &byte;
        int64_t bytes = tokens[i] < FIRST_SPECIAL ? 1 : (int64_t)strlen(p);
        for (int64_t k = 0; k < bytes; k++, at++)
            if (at < capacity)
                ret_text[at] = p[k];
    }
    return at;
}

static uint64_t fingerprint(const void *self)
{
    (void)self;
    return 1;
}

const mt_tokenizer toy_tokenizer = {
    .struct_size = sizeof(mt_tokenizer),
    .vocab_size = vocab_size,
    .special = special,
    .token_id = token_id,
    .encode = encode,
    .decode = decode,
    .fingerprint = fingerprint,
};
