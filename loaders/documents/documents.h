/* SPDX-License-Identifier: Apache-2.0
 *
 * The documents loader: conversations, instructions and text of .jsonl, .json and text files, made
 * into tokens once and kept in a cache that training reads; and .bin files of tokens.
 *
 *     options    the keys of the run manifest's `data` section
 *     reader     files  -> records (a line, an element of a JSON array, a stretch of text)
 *     record     JSON   -> turns, prompt and completion, or token ids
 *     encode     those  -> tokens, and which of them are trained
 *     build      all of a dataset in several threads, into a cache file
 *     cache      that file
 *     folder     where it lies, and what other files held when they were last read
 *     token_file .bin files
 *     file       reading what is kept in files, and going through it
 *     source     a dataset as tokens, of the cache or of .bin files
 *     samples    tokens -> samples of at most max_seq_len + 1
 *     stream     datasets, weights, splits, ranks, order: the interface
 */
#ifndef DOCUMENTS_H
#define DOCUMENTS_H

#include <megatrain/files.h>
#include <megatrain/loader.h>

/* How the records of a dataset look. */
typedef enum doc_format {
    FORMAT_AUTO,
    FORMAT_MESSAGES,
    FORMAT_SHAREGPT,
    FORMAT_ALPACA,
    FORMAT_PROMPT,
    FORMAT_TEXT,
    FORMAT_TOKENIZED,
    FORMATS
} doc_format;

/* Names as in manifests, in the order of the enumeration. */
extern const char *const doc_format_names[FORMATS + 1];

/* What a record calls its fields, and what conversations call who speaks. */
typedef enum doc_column {
    COLUMN_TEXT,
    COLUMN_PROMPT,
    COLUMN_COMPLETION,
    COLUMN_INSTRUCTION,
    COLUMN_INPUT,
    COLUMN_OUTPUT,
    COLUMN_HISTORY,
    COLUMN_SYSTEM,
    COLUMN_MESSAGES,
    COLUMN_CONVERSATIONS,
    COLUMN_ROLE,
    COLUMN_CONTENT,
    COLUMN_REASONING,
    COLUMN_INPUT_IDS,
    COLUMN_LABELS,
    COLUMN_ATTENTION_MASK,
    COLUMN_USER,
    COLUMN_ASSISTANT,
    COLUMNS
} doc_column;

/* Their usual names, which are also the keys of `columns`. */
extern const char *const doc_column_names[COLUMNS];

typedef enum doc_train_on { TRAIN_ASSISTANT, TRAIN_LAST, TRAIN_ALL } doc_train_on;
typedef enum doc_long { LONG_AUTO, LONG_SPLIT, LONG_TRUNCATE, LONG_DROP } doc_long;

/* Files that are read alike. */
typedef struct doc_dataset {
    const char *key; /* of its files, for messages: "files", "datasets.0.files" */
    char key_text[64];
    mt_files files;
    doc_format format;
    const char *columns[COLUMNS]; /* NULL: as usual */
    double weight;                /* times that an epoch sees each document */
} doc_dataset;

typedef struct doc_options {
    doc_dataset *train;
    int64_t n_train;
    doc_dataset validation; /* no files: split off the others */
    double validation_split;
    doc_train_on train_on;
    doc_long long_documents;
    bool skip_errors, shuffle;
    const char *separator;  /* "none", "blank_line", or a literal text */
    const char *cache;      /* "auto", "off", or a folder */
    const char *dtype_name; /* of .bin files without a header; NULL: not given */
    mt_dtype dtype;
    int64_t end_token; /* that ends documents of .bin files; END_TOKEN_... */
    int64_t workers;   /* threads; 0: as many as the process may use */
} doc_options;

enum { END_TOKEN_AUTO = -1, END_TOKEN_NONE = -2 };

/* Reads the data section. ret_options is always the caller's to finish. */
mt_status doc_options_read(const mt_data_request *request, doc_options *ret);
void doc_options_finish(doc_options *o);

/* Room for one more element of `size` bytes in an array of n elements. */
mt_status doc_grow(void **array, int64_t n, int64_t *capacity, size_t size);

/* "1.2 GB" */
typedef struct doc_size {
    char s[24];
} doc_size;
doc_size doc_bytes(int64_t bytes);

#endif
