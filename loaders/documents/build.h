/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes the token cache of a dataset: reads its records, tokenises them in several threads, and
 * writes the documents in the order of the records.
 */
#ifndef DOCUMENTS_BUILD_H
#define DOCUMENTS_BUILD_H

#include "cache.h"
#include "encode.h"

typedef struct build_request {
    const mt_config *config;
    const doc_options *options;
    const doc_dataset *dataset;
    encoder *encoder;   /* gets a conversation for alpaca records where the model has none */
    const char *folder; /* of caches; NULL: none is kept */
    uint64_t key;
    uint64_t content; /* hash of the files when the key was made */
} build_request;

/* Tokenises everything and maps the result. [main] */
mt_status build_cache(const build_request *request, cache *ret);

#endif
