/* SPDX-License-Identifier: Apache-2.0
 *
 * The text plugin: its entry, its two interface tables, and the byte tokenizer.
 */
#include "text.h"

#include <megatrain/plugin.h>

#include <stdio.h>
#include <stdlib.h>

static const mt_host *host;

const mt_host *text_host(void)
{
    return host;
}

mt_status text_fail(mt_status code, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    host->set_error("%s", text);
    return code;
}

mt_status text_nomem(void)
{
    return text_fail(MT_ERR_NOMEM, "text: out of memory");
}

void text_log(mt_log_level level, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    host->log(level, "%s", text);
}

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
        return text_fail(MT_ERR_UNSUPPORTED,
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

static mt_status init(const mt_host *h)
{
    host = h;
    return MT_OK;
}

static const void *get_interface(const char *id)
{
    if (strcmp(id, MT_DATA_INTERFACE) == 0)
        return &text_data;
    return strcmp(id, MT_TOKENIZER_INTERFACE) == 0 ? (const void *)&text_tokenizer : NULL;
}

MT_EXPORT const mt_plugin *mt_plugin_entry_v1(uint32_t host_major, uint32_t host_minor)
{
    static const mt_plugin plugin = {
        .magic = MT_PLUGIN_MAGIC,
        .struct_size = sizeof(mt_plugin),
        .abi_major = MT_ABI_MAJOR,
        .abi_minor = MT_ABI_MINOR,
        .pointer_size = sizeof(void *),
        .build_flags = MT_BUILD_FLAGS,
        .name = "text",
        .version = "1.0.0",
        .licence = "Apache-2.0",
        .init = init,
        .get_interface = get_interface,
    };
    (void)host_major;
    (void)host_minor;
    return &plugin;
}
