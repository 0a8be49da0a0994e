/* SPDX-License-Identifier: Apache-2.0
 *
 * What `megatrain tokenize` and its writer of token files share.
 */
#ifndef MT_CORE_CLI_TOKENIZE_H
#define MT_CORE_CLI_TOKENIZE_H

#include <megatrain/loader.h>

typedef struct tokenize_tools {
    const mt_tokenizer *iface;
    void *tokenizer;
    uint32_t flags; /* of encode */
} tokenize_tools;

/* Ids in memory that grows as they need it. */
typedef struct tokenize_ids {
    int32_t *id;
    int64_t n, cap;
} tokenize_ids;

/* Appends the ids of a text. */
mt_status tokenize_add(const tokenize_tools *t, const char *text, int64_t n, tokenize_ids *ids);
void tokenize_free(tokenize_ids *ids);

/* Both magic numbers of token files have these bytes, and no text has. */
#define TOKEN_FILE_MARK "\x34\x01"

/* Writes the documents of a text to `path` in llm.c's format; the file appears complete or not at
 * all. `separator` is none, blank_line, or a literal text that stands between documents; with
 * `jsonl` each line is an object with its document at "text". `name` is what messages call the
 * text. Documents end with the end token, unless flags lack MT_ENCODE_ADD_SPECIAL. */
typedef struct tokenize_bin {
    const char *path, *name, *separator;
    bool jsonl;
} tokenize_bin;

mt_status tokenize_write_bin(const tokenize_tools *t, const tokenize_bin *o, const char *text,
                             int64_t n, int64_t *ret_documents, int64_t *ret_tokens);

/* Shows the documents of a file, or of the standard input, as training sees them, with what is
 * trained marked. */
typedef struct tokenize_labels {
    const char *tokenizer;   /* a file or a folder */
    const char *chat_format; /* NULL: the model's, unless the keys name one */
    const char *file;        /* NULL: the standard input, JSON where it begins like it, else text */
    char **keys;             /* [n_keys] "key=value", of the manifest's section `data` */
    int n_keys;
    int64_t most; /* documents to show */
} tokenize_labels;

mt_status tokenize_show_labels(const tokenize_labels *o);

#endif
