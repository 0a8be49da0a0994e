/* SPDX-License-Identifier: Apache-2.0
 *
 * From what a record says to tokens, and which of them are trained.
 */
#ifndef DOCUMENTS_ENCODE_H
#define DOCUMENTS_ENCODE_H

#include "record.h"

/* Tokens of one document after the other; trained[i] is 1 where token i is a target. The first
 * token of a document is none: its mark is 1 where the document is text or token ids, which may be
 * split where it is long, and 0 where it is a conversation or a completion. */
typedef struct token_list {
    int32_t *ids;
    uint8_t *trained;
    int64_t n, capacity;
} token_list;

void token_list_finish(token_list *l);

enum { MOST_BEGIN = 4 };

/* Shared by all threads. */
typedef struct encoder {
    const mt_tokenizer *tokenizer; /* NULL: only token ids can be read */
    const void *tokens;
    int64_t vocab;                      /* of the tokenizer; 0: unknown */
    int32_t begin[MOST_BEGIN], n_begin; /* what the tokenizer puts before a text */
    int32_t end;                        /* ends a document; -1: nothing does */
    const mt_chat *chat;                /* NULL: no conversations */
    const void *conversation;
    void *own; /* a conversation opened here */
    doc_train_on train_on;
} encoder;

mt_status encoder_init(const mt_data_request *request, const doc_options *o, encoder *ret);
void encoder_finish(encoder *e);

/* Hash of all that decides which tokens a record becomes. [main] */
uint64_t encoder_fingerprint(const encoder *e);

/* The conversation of alpaca records: the model's, or the format "alpaca" where it has none. */
mt_status encoder_use_alpaca(encoder *e);

/* Appends the document of a record, or of a stretch of text. The first token of a document is never
 * a target. MT_ERR_FORMAT with the reason where the record cannot be a document; other errors are
 * no fault of the record and come with the reason too. [any] */
mt_status encode_record(const encoder *e, record *r, token_list *out, char reason[REASON_SIZE]);
mt_status encode_text(const encoder *e, text_piece text, token_list *out, char reason[REASON_SIZE]);

#endif
