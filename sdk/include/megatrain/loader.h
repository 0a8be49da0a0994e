/* SPDX-License-Identifier: Apache-2.0
 *
 * Interfaces of loaders: "megatrain.weights/1" reads and writes named tensors,
 * "megatrain.data/1" yields documents, "megatrain.tokenizer/1" maps text to tokens and back.
 * One plugin may provide several of them.
 */
#ifndef MEGATRAIN_LOADER_H
#define MEGATRAIN_LOADER_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_WEIGHTS_INTERFACE   "megatrain.weights/1"
#define MT_DATA_INTERFACE      "megatrain.data/1"
#define MT_TOKENIZER_INTERFACE "megatrain.tokenizer/1"

enum { MT_TENSOR_MAX_DIMS = 8 };

/* ---- weights -------------------------------------------------------------------------------- */

typedef struct mt_tensor_info {
    const char *name; /* lives as long as the reader, or as the caller's list when writing */
    mt_dtype dtype;
    int32_t ndim; /* 0: a scalar */
    int64_t dim[MT_TENSOR_MAX_DIMS];
    int64_t bytes;
} mt_tensor_info;

typedef struct mt_weights {
    uint32_t struct_size;
    uint32_t reserved;

    /* Does `path` (a folder or a file) look like this format? Cheap; opens at most an index. [main]
     */
    bool (*probe)(const char *path);
    /* Opens and validates everything that can be checked without reading the data: headers, shards
     * that an index names, offsets, sizes. `path` is a folder, a file, or FOLDER/STEM of a set that
     * create has written there. [main] */
    mt_status (*open)(const char *path, void **ret_reader);
    void (*close)(void *reader); /* accepts NULL [main] */
    /* Number of tensors. One that is quantised is shown, and read, as the BF16 that it stands for,
     * where the format knows how; its scales are then not shown. */
    int64_t (*count)(const void *reader);                                      /* [any] */
    mt_status (*info)(const void *reader, int64_t index, mt_tensor_info *ret); /* [any] */
    /* Name of the file that holds tensor `index`, for messages. */
    const char *(*file)(const void *reader, int64_t index); /* [any] */
    /* Copies `n` bytes from byte `offset` of the tensor's data to dst. [any] */
    mt_status (*read)(const void *reader, int64_t index, int64_t offset, int64_t n, void *dst);

    /* Starts a new set of files in the existing `folder`, named from `stem` ("model"); tensors are
     * written in the order of `list`; a file is closed when it would pass `shard_bytes` (0: one
     * file). Nothing that stands in the folder is replaced before finish. [main] */
    mt_status (*create)(const char *folder, const char *stem, const mt_tensor_info *list, int64_t n,
                        int64_t shard_bytes, void **ret_writer);
    /* Appends n bytes to tensor `index`; tensors and bytes come in order. [main] */
    mt_status (*write)(void *writer, int64_t index, const void *data, int64_t n);
    /* Completes all files and makes them durable (fsync). The writer is gone, also on failure.
     * [main] */
    mt_status (*finish)(void *writer);
    /* Gives up: removes what was written. Accepts NULL. [main] */
    void (*abort)(void *writer);
} mt_weights;

/* ---- data ----------------------------------------------------------------------------------- */

typedef int32_t mt_split;
enum { MT_SPLIT_TRAIN = 0, MT_SPLIT_VALIDATION = 1 };

/* A document: n tokens of which the first n-1 are inputs and the last n-1 are targets. */
typedef struct mt_document {
    const int32_t *tokens;    /* [n], valid until the next call on the same stream */
    const uint8_t *loss_mask; /* [n], 1 where the token is trained as a target; NULL: all */
    int64_t n;
    int64_t id; /* stable id of the sample, for resume tests and logs */
} mt_document;

typedef struct mt_data {
    uint32_t struct_size;
    uint32_t reserved;
    /* Opens the stream of one split. Reads its keys from the run manifest's `data` section.
     * Ranks see disjoint parts of every epoch; the order depends on seed and epoch only. No
     * document is longer than max_seq_len + 1 tokens: longer text is cut so that every token is a
     * target once. [main] */
    mt_status (*open)(const mt_config *config, mt_split split, int64_t max_seq_len, uint64_t seed,
                      int32_t rank, int32_t world, void **ret_stream);
    void (*close)(void *stream); /* accepts NULL [main] */
    /* Number of documents and of target tokens in one epoch of this rank. [any] */
    void (*size)(const void *stream, int64_t *ret_documents, int64_t *ret_tokens);
    /* The next document. Training streams go on with the next epoch for ever; a validation stream
     * returns MT_END after its only epoch, in an order that never changes. [loader] */
    mt_status (*next)(void *stream, mt_document *ret);
    /* Position before the document that `next` would return: epoch and index in it. [loader] */
    void (*tell)(const void *stream, int64_t *ret_epoch, int64_t *ret_index);
    mt_status (*seek)(void *stream, int64_t epoch, int64_t index);
    /* Smallest vocabulary that holds every token of the stream. [any] */
    int64_t (*vocab_size)(const void *stream);
} mt_data;

typedef struct mt_tokenizer {
    uint32_t struct_size;
    uint32_t reserved;
    /* `path` is a folder or file with the tokenizer's data, NULL for a built-in one. [main] */
    mt_status (*open)(const char *path, void **ret_tokenizer);
    void (*close)(void *tokenizer); /* accepts NULL */
    int64_t (*vocab_size)(const void *tokenizer);
    /* Token that ends a document, -1 for none. */
    int32_t (*end_token)(const void *tokenizer);
    /* Encodes n bytes of UTF-8. Writes at most `capacity` tokens, returns how many there are. [any]
     */
    int64_t (*encode)(const void *tokenizer, const char *text, int64_t n, int32_t *ret_tokens,
                      int64_t capacity);
    /* Decodes to bytes; same convention. Cut UTF-8 at the end is the caller's concern. [any] */
    int64_t (*decode)(const void *tokenizer, const int32_t *tokens, int64_t n, char *ret_text,
                      int64_t capacity);
} mt_tokenizer;

#ifdef __cplusplus
}
#endif
#endif
