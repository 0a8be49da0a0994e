/* SPDX-License-Identifier: Apache-2.0
 *
 * What a JSON record says, by its format: turns of a conversation, a prompt with its completion, a
 * text, or token ids. Nothing is tokenised here.
 */
#ifndef DOCUMENTS_RECORD_H
#define DOCUMENTS_RECORD_H

#include "documents.h"

#include <megatrain/json.h>

enum { REASON_SIZE = 1024 };

typedef struct text_piece {
    const char *text;
    int64_t n; /* bytes */
} text_piece;

typedef enum record_kind { RECORD_TURNS, RECORD_PROMPT, RECORD_TEXT, RECORD_IDS } record_kind;

/* Everything that it points to belongs to `root` or to the record itself. */
typedef struct record {
    record_kind kind;
    mt_message *turns; /* RECORD_TURNS: `trained` where the data wants the turn trained */
    int64_t n_turns, cap_turns;
    text_piece prompt, completion; /* RECORD_PROMPT; RECORD_TEXT: completion only */
    const json_t *ids, *labels, *mask;
    json_t *root;
} record;

typedef struct record_shape {
    doc_format format; /* not FORMAT_AUTO */
    const char *column[COLUMNS];
} record_shape;

/* The names of a dataset's columns, usual ones where it has none of its own. */
void record_shape_init(const doc_dataset *d, record_shape *ret);

/* The format of a record by its keys; FORMAT_AUTO when it is none of the known ones, with the keys
 * in `found`. */
doc_format record_detect(const record_shape *shape, const json_t *root, char *found, size_t size);

/* Parses n bytes; NULL with the reason when they are no JSON object. */
json_t *record_parse(const char *text, int64_t n, char reason[REASON_SIZE]);

/* Fills `r`, whose buffers are used again, from r->root. MT_ERR_FORMAT with the reason for a record
 * that is not as its format says or uses what is not offered. [any] */
mt_status record_read(const record_shape *shape, record *r, char reason[REASON_SIZE]);
void record_clear(record *r); /* releases root, keeps buffers */
void record_finish(record *r);

#endif
