/* SPDX-License-Identifier: Apache-2.0
 *
 * The text loader: plain text files as streams of bytes, one token a byte.
 *
 * corpus.c reads the files and finds the documents in them; stream.c cuts documents into pieces,
 * splits off the validation pieces, and orders and deals the rest; text.c is the plugin and the
 * byte tokenizer.
 *
 * Keys of the run manifest's `data` section:
 *   files               a file, a pattern (glob) or a list of them; relative to the working
 *                       directory; matches of a pattern are sorted
 *   validation_files    the same; no file may be in both
 *   validation_split    0 to 0.5, default 0.05: without validation_files, this part of the pieces
 *                       is validation, as the tails of up to eight equal stretches of the corpus;
 *                       at least one piece unless it is 0 or there is only one piece
 *   document_separator  none (default: a file is a document), blank_line, or a literal text
 */
#ifndef TEXT_H
#define TEXT_H

#include <megatrain/loader.h>
#include <megatrain/report.h>

enum { TEXT_VOCAB = 256 };

/* A document: a stretch of a file. */
typedef struct text_doc {
    int64_t start, n;    /* bytes */
    int64_t file;        /* that it lies in */
    int64_t first_piece; /* number of pieces of the documents before this one */
} text_doc;

typedef struct text_file {
    int64_t size; /* when it was opened */
    int fd;       /* open while few are; else -1, and opened for every read */
    char *path;
} text_file;

typedef struct text_corpus {
    text_file *files;
    int64_t n_files;
    text_doc *docs; /* each of at least 2 bytes, so that it has a target */
    int64_t n_docs, cap_docs;
    int64_t n_pieces; /* of all documents */
    int64_t skipped;  /* documents of a single byte: nothing to predict */
} text_corpus;

/* Reads key `key` (a file, a pattern, or a list of them) of the data section, opens the files and
 * finds the documents. `separator` is "none", "blank_line" or a literal text. Pieces hold at most
 * `inputs` + 1 bytes and share one byte with the next. */
mt_status text_corpus_open(const mt_config *config, const char *key, const char *separator,
                           int64_t inputs, text_corpus *ret);
void text_corpus_close(text_corpus *c);

/* Bytes start .. start+n-1 of the document. Fails where its file has become shorter. [any] */
mt_status text_corpus_read(const text_corpus *c, const text_doc *doc, int64_t start, int64_t n,
                           uint8_t *ret);

/* Hash of what is in the files, in their order; samples those that are large. 0: it cannot be had.
 */
uint64_t text_corpus_hash(const text_corpus *c);

/* Fails when a file is chosen by both keys: validation would measure what was trained on. */
mt_status text_check_apart(const mt_config *config);

/* The data interface. */
mt_status text_open(const mt_data_request *request, void **ret_stream);
void text_close(void *stream);
void text_size(const void *stream, int64_t *ret_documents, int64_t *ret_tokens);
mt_status text_next(void *stream, mt_document *ret);
void text_tell(const void *stream, int64_t *ret_epoch, int64_t *ret_index);
mt_status text_seek(void *stream, int64_t epoch, int64_t index);
int64_t text_vocab_size(const void *stream);
uint64_t text_fingerprint(const void *stream);

#endif
