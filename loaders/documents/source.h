/* SPDX-License-Identifier: Apache-2.0
 *
 * A dataset as documents of tokens: of its token cache, made when there is none and mapped, or of
 * its token files.
 */
#ifndef DOCUMENTS_SOURCE_H
#define DOCUMENTS_SOURCE_H

#include "cache.h"
#include "encode.h"
#include "token_file.h"

/* Documents one after the other. */
typedef struct plane {
    const void *tokens; /* [n], 2 or 4 bytes each; NULL: in `file` */
    int32_t width;
    int64_t n;
    const uint8_t *trained;  /* a bit a token; NULL: all */
    const uint64_t *offsets; /* [documents + 1]; NULL: documents end at end tokens */
    int64_t documents;
    int32_t end;            /* -1: the plane is one long document */
    const token_file *file; /* NULL for a cache */
} plane;

typedef struct source {
    plane *planes;
    int64_t n_planes;
    cache cache;
    token_file *files;
    int64_t n_files;
    const char *format; /* for the log */
    int64_t skipped, untrained;
    bool records, text; /* of which kinds its files are, token files aside */
    bool conversations; /* its records are: truncated where they are long and nothing is said */
} source;

/* Opens a dataset. `folder` is for caches, NULL for none. [main] */
mt_status source_open(const mt_data_request *request, const doc_options *o, const doc_dataset *d,
                      const char *folder, source *ret);
void source_close(source *s);

/* Lets go of what opening has read through: it stays in the system's cache, but no longer counts as
 * this process's memory. */
void source_settle(const source *s);

/* A hash of the tokens and of what is trained of them. [main] */
mt_status source_hash(const source *s, uint64_t *ret);

#endif
