/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files (.bin): those of llm.c, which say in a header what they hold, and bare arrays of
 * 16- or 32-bit numbers as nanoGPT writes them.
 */
#ifndef DOCUMENTS_TOKEN_FILE_H
#define DOCUMENTS_TOKEN_FILE_H

#include "documents.h"
#include "file.h"

typedef struct token_file {
    int32_t width; /* bytes of a token: 2 or 4 */
    int64_t n;     /* tokens */
    size_t first;  /* byte at which they begin */
    doc_file file;
} token_file;

/* Opens a file. Without a header it needs the `dtype` key. [main] */
mt_status token_file_open(const mt_config *config, const doc_options *o, const char *path,
                          token_file *ret);
void token_file_close(token_file *f);

/* A hash of the content: of all of it, or of samples of a large one. */
mt_status token_file_hash(const token_file *f, uint64_t *ret);

#endif
