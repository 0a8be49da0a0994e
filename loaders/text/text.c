/* SPDX-License-Identifier: Apache-2.0
 *
 * The text plugin: its entry, its two interface tables, and the byte tokenizer.
 */
#include "text.h"

#include <megatrain/plugin.h>

/* ---- the byte tokenizer: a token is a byte -------------------------------------------------- */

static bool bytes_probe(const char *path)
{
    (void)path;
    return false;
}

static mt_status bytes_open(const char *path, void **ret_tokenizer)
{
    static char stateless;
    if (path)
        return mt_fail(MT_ERR_UNSUPPORTED,
                       "%s: the byte tokenizer reads no files; leave the path out", path);
    *ret_tokenizer = &stateless;
    return MT_OK;
}

static void bytes_close(void *tokenizer)
{
    (void)tokenizer;
}

static int64_t bytes_vocab_size(const void *tokenizer)
{
    (void)tokenizer;
    return TEXT_VOCAB;
}

static int32_t bytes_special(const void *tokenizer, mt_special which)
{
    (void)tokenizer;
    (void)which;
    return -1;
}

static int32_t bytes_token_id(const void *tokenizer, const char *text, int64_t n)
{
    (void)tokenizer;
    return n == 1 ? (uint8_t)text[0] : -1;
}

static int64_t bytes_encode(const void *tokenizer, const char *text, int64_t n, uint32_t flags,
                            int32_t *ret_tokens, int64_t capacity)
{
    (void)tokenizer;
    (void)flags;
    for (int64_t i = 0; i < n && i < capacity; i++)
        ret_tokens[i] = (uint8_t)text[i];
    return n;
}

/* A model's vocabulary may be larger than 256: what is no byte shows as U+FFFD. */
static int64_t bytes_decode(const void *tokenizer, const int32_t *tokens, int64_t n, uint32_t flags,
                            char *ret_text, int64_t capacity)
{
    static const char unknown[] = "\xef\xbf\xbd";
    (void)tokenizer;
    (void)flags;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        bool known = tokens[i] >= 0 && tokens[i] < TEXT_VOCAB;
        char byte = (char)tokens[i];
        const char *piece = known ? &byte : unknown;
        int64_t size = known ? 1 : (int64_t)sizeof unknown - 1;
        for (int64_t k = 0; k < size; k++, at++)
            if (at < capacity)
                ret_text[at] = piece[k];
    }
    return at;
}

static uint64_t bytes_fingerprint(const void *tokenizer)
{
    (void)tokenizer;
    return TEXT_VOCAB;
}

/* ---- the plugin ----------------------------------------------------------------------------- */

static const mt_data text_data = {
    .struct_size = sizeof(mt_data),
    .open = text_open,
    .close = text_close,
    .size = text_size,
    .next = text_next,
    .tell = text_tell,
    .seek = text_seek,
    .vocab_size = text_vocab_size,
    .fingerprint = text_fingerprint,
};

static const mt_tokenizer text_tokenizer = {
    .struct_size = sizeof(mt_tokenizer),
    .probe = bytes_probe,
    .open = bytes_open,
    .close = bytes_close,
    .vocab_size = bytes_vocab_size,
    .special = bytes_special,
    .token_id = bytes_token_id,
    .encode = bytes_encode,
    .decode = bytes_decode,
    .fingerprint = bytes_fingerprint,
};

MT_PLUGIN_WITH("text", "1.0.0", "Apache-2.0", NULL, 0, { MT_DATA_INTERFACE, &text_data },
               { MT_TOKENIZER_INTERFACE, &text_tokenizer })
