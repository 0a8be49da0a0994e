/* SPDX-License-Identifier: Apache-2.0
 *
 * The token cache: one file a dataset, written once, then read.
 *
 * A file is a header, then the tokens (2 or 4 bytes each), one bit a token (trained, with
 * encode.h's mark of documents), and the offset of each document's first token (8 bytes, with the
 * number of tokens at the end); each part begins at a multiple of 8 bytes. All numbers are
 * little-endian.
 */
#ifndef DOCUMENTS_CACHE_H
#define DOCUMENTS_CACHE_H

#include "documents.h"
#include "file.h"

/* What was found while the documents were made. */
typedef struct cache_facts {
    int64_t documents, tokens, trained;
    int64_t skipped;   /* malformed records */
    int64_t untrained; /* documents without a token to train on, left out */
    int64_t vocab;     /* one more than the largest id */
    int32_t format;    /* doc_format of JSON records; FORMAT_AUTO: there were none */
    int32_t width;     /* bytes of a token: 2 or 4 */
} cache_facts;

typedef struct cache {
    cache_facts facts;
    uint64_t hash; /* of tokens, marks and offsets */
    doc_file file;
    size_t tokens, trained, offsets; /* bytes of the file before each part */
} cache;

/* Opens FOLDER/KEY.tokens. MT_ERR_NOT_FOUND when there is none that can be used: one that is
 * damaged is removed, with a warning. [main] */
mt_status cache_open(const char *folder, uint64_t key, cache *ret);
void cache_close(cache *c);

typedef struct cache_writer cache_writer;

/* Starts the file of `key`, whose lock is held (folder.h), over what an earlier process may have
 * left of it; in a NULL folder, one without a name. [main] */
mt_status cache_create(const char *folder, uint64_t key, int32_t width, cache_writer **ret);
/* Appends a document of n tokens, at least one. */
mt_status cache_append(cache_writer *w, const int32_t *ids, const uint8_t *trained, int64_t n);
/* Completes the file and opens it; of `facts`, those that the writer does not know itself. The
 * writer is gone, also on failure. */
mt_status cache_finish(cache_writer *w, const cache_facts *facts, cache *ret);
void cache_abort(cache_writer *w); /* removes what was written; accepts NULL */

#endif
