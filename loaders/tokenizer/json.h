/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading members of JSON objects, with messages that name the file, the place, what was found and
 * what was expected.
 */
#ifndef TOKENIZER_JSON_H
#define TOKENIZER_JSON_H

#include "tokenizer.h"

#include <megatrain/json.h>

/* A file that is being read. */
typedef struct tok_file {
    const char *path;
    tokenizer *t;
} tok_file;

/* The path of a value within its file: "pre_tokenizer.pretokenizers[2]". */
typedef struct tok_place {
    char s[160];
} tok_place;

tok_place tok_place_member(tok_place in, const char *key);
tok_place tok_place_index(tok_place in, size_t i);

/* "FILE: PLACE: found FOUND, expected EXPECTED". `found` may be NULL: nothing is there. */
mt_status tok_unexpected(const tok_file *f, tok_place at, const json_t *found,
                         const char *expected);
/* "FILE: PLACE: " and the text. */
mt_status tok_reject(const tok_file *f, mt_status code, tok_place at, const char *fmt, ...)
    MT_PRINTF(4, 5);

/* The member is there and not null. */
bool tok_has(const json_t *in, const char *key);

/* These want a member of their type. Texts are copied to the tokenizer's memory. */
mt_status tok_get_object(const tok_file *f, tok_place at, const json_t *in, const char *key,
                         json_t **ret);
mt_status tok_get_list(const tok_file *f, tok_place at, const json_t *in, const char *key,
                       json_t **ret);
mt_status tok_get_text(const tok_file *f, tok_place at, const json_t *in, const char *key,
                       tok_text *ret);
/* From 0 on. */
mt_status tok_get_count(const tok_file *f, tok_place at, const json_t *in, const char *key,
                        int64_t *ret);
/* Leaves *ret as it is where the member is absent or null. */
mt_status tok_get_bool(const tok_file *f, tok_place at, const json_t *in, const char *key,
                       bool *ret);

/* Reads a whole JSON file, which must hold an object. *ret_hash, if wanted, is one of its bytes. */
mt_status tok_read_json(const char *path, json_t **ret, uint64_t *ret_hash);

/* Reads the stages of the pipeline out of the file's object. (pipeline.c) */
mt_status tok_read_normalizer(const tok_file *f, const json_t *root);
mt_status tok_read_pre_tokenizer(const tok_file *f, const json_t *root);
mt_status tok_read_post_processor(const tok_file *f, const json_t *root);
mt_status tok_read_decoder(const tok_file *f, const json_t *root);

#endif
