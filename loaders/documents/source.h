/* SPDX-License-Identifier: Apache-2.0
 *
 * A dataset as documents of tokens: of its token cache, made when there is none, or of its token
 * files.
 */
#ifndef DOCUMENTS_SOURCE_H
#define DOCUMENTS_SOURCE_H

#include "cache.h"
#include "encode.h"
#include "token_file.h"

/* Documents one after the other, in a file. */
typedef struct plane {
    const doc_file *file;
    int32_t width; /* bytes of a token: 2 or 4 */
    int64_t n;     /* tokens */
    int64_t documents;
    int32_t end; /* token files: what documents end with; -1: the plane is one long document */
    /* Bytes of the file before each part. */
    size_t tokens;
    size_t trained; /* a bit a token, bit i of byte i / 8; 0: all are trained */
    size_t offsets; /* uint64_t [documents + 1]; 0: documents end at end tokens */
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

/* Opens a dataset. `folder` is for caches, NULL for none. *ret stays where it is: its planes point
 * into it. [main] */
mt_status source_open(const mt_data_request *request, const doc_options *o, const doc_dataset *d,
                      const char *folder, source *ret);
void source_close(source *s);

/* A hash of the tokens and of what is trained of them. [main] */
mt_status source_hash(const source *s, uint64_t *ret);

#endif
