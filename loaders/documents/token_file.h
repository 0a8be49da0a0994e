/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files (.bin): those of llm.c, which say in a header what they hold, and bare arrays of
 * 16- or 32-bit numbers as nanoGPT writes them.
 */
#ifndef DOCUMENTS_TOKEN_FILE_H
#define DOCUMENTS_TOKEN_FILE_H

#include "documents.h"

typedef struct token_file {
    int32_t width; /* bytes of a token: 2 or 4 */
    int64_t n;     /* tokens */
    size_t first;  /* byte at which they begin */
    size_t size;   /* bytes of the file when it was opened */
    int fd;
    char *path; /* for messages */
} token_file;

/* Opens a file. Without a header it needs the `dtype` key. [main] */
mt_status token_file_open(const mt_config *config, const doc_options *o, const char *path,
                          token_file *ret);
void token_file_close(token_file *f);

/* Tokens first .. first+n-1 as they stand in the file, `width` bytes each. Fails where the file has
 * become shorter. [any] */
mt_status token_file_read(const token_file *f, int64_t first, int64_t n, void *ret);

/* A hash of the content: of all of it, or of samples of a large one. */
mt_status token_file_hash(const token_file *f, uint64_t *ret);

#endif
