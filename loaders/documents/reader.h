/* SPDX-License-Identifier: Apache-2.0
 *
 * From files to records, in order and with bounded memory: lines of JSON, elements of a JSON array,
 * stretches of text. What is in a record is not looked at here.
 */
#ifndef DOCUMENTS_READER_H
#define DOCUMENTS_READER_H

#include "documents.h"

/* What a file holds, by the end of its name. */
typedef enum file_kind {
    FILE_JSON,   /* .json, .jsonl, .ndjson: records, one a line or in one array */
    FILE_TEXT,   /* any other */
    FILE_TOKENS, /* .bin */
    FILE_REFUSED /* compressed, binary or tabular: FILE.parquet, FILE.csv, ... */
} file_kind;

file_kind reader_kind(const char *path);

/* Does the dataset's format say that its files hold JSON, whatever they are called? */
static inline bool reader_all_json(const doc_dataset *d)
{
    return d->format != FORMAT_AUTO && d->format != FORMAT_TEXT;
}

/* A record as it stands in its file. */
typedef struct raw_record {
    const char *text; /* not ending in NUL; until the next call of reader_next */
    int64_t n;        /* bytes */
    int64_t file;     /* index in the list */
    int64_t line;     /* that it begins on, from 1 */
    bool json;        /* else text */
} raw_record;

typedef struct reader reader;

/* `all_json`: files of every name hold JSON. The list outlives the reader. */
mt_status reader_open(const mt_files *files, const char *separator, bool all_json, reader **ret);
void reader_close(reader *r); /* accepts NULL */

/* The next record; MT_END after the last. */
mt_status reader_next(reader *r, raw_record *ret);

/* Bytes read so far. */
int64_t reader_bytes(const reader *r);

#endif
