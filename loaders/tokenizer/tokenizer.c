/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin and its interface table.
 */
#include "tokenizer.h"

#include <megatrain/plugin.h>
#include <stdio.h>
#include <sys/stat.h>

/* A folder with a tokenizer.json, or a file of that name. */
static bool probe(const char *path)
{
    char file[4096];
    struct stat st;
    if (stat(path, &st) < 0)
        return false;
    if (S_ISDIR(st.st_mode)) {
        snprintf(file, sizeof file, "%s/tokenizer.json", path);
        return stat(file, &st) == 0 && S_ISREG(st.st_mode);
    }
    const char *slash = strrchr(path, '/');
    return strcmp(slash ? slash + 1 : path, "tokenizer.json") == 0;
}

static mt_status open_tokenizer(const char *path, void **ret_tokenizer)
{
    tokenizer *t = NULL;
    if (!path)
        return mt_fail(MT_ERR_INVALID,
                       "the tokenizer 'tokenizer' needs a tokenizer.json or a folder with one");
    mt_status status = tok_load(path, &t);
    if (!status)
        *ret_tokenizer = t;
    return status;
}

static void close_tokenizer(void *tok)
{
    tok_destroy(tok);
}

static int64_t vocab_size(const void *tok)
{
    return ((const tokenizer *)tok)->vocab.size;
}

static int32_t special(const void *tok, mt_special which)
{
    return which >= 0 && which < 4 ? ((const tokenizer *)tok)->special[which] : -1;
}

/* Added tokens are written as they are; those of a byte-level model in its alphabet. */
static int32_t token_id(const void *tok, const char *text, int64_t n)
{
    const tokenizer *t = tok;
    int32_t id = tok_table_find(&t->vocab.by_text, (tok_text){ text, n });
    if (!t->bpe.bytes || (id >= 0 && t->vocab.flags[id] & TOK_ADDED))
        return id;
    tok_buf written = { 0 };
    int32_t of_bytes = -1;
    if (tok_add_byte_chars(&written, (tok_text){ text, n }))
        of_bytes = tok_table_find(&t->vocab.by_text, tok_buf_text(&written));
    tok_buf_finish(&written);
    return of_bytes >= 0 ? of_bytes : id;
}

static uint64_t fingerprint(const void *tok)
{
    return ((const tokenizer *)tok)->fingerprint;
}

static const mt_tokenizer table = {
    .struct_size = sizeof(mt_tokenizer),
    .probe = probe,
    .open = open_tokenizer,
    .close = close_tokenizer,
    .vocab_size = vocab_size,
    .special = special,
    .token_id = token_id,
    .encode = tok_encode,
    .decode = tok_decode_ids,
    .fingerprint = fingerprint,
};

MT_PLUGIN_WITH("tokenizer", "1.0.0", "Apache-2.0", tok_regex_init, 0,
               { MT_TOKENIZER_INTERFACE, &table })
