/* SPDX-License-Identifier: Apache-2.0
 *
 * Interfaces of loaders: "megatrain.weights/1" reads and writes named tensors,
 * "megatrain.data/1" yields documents, "megatrain.tokenizer/1" maps text to tokens and back,
 * "megatrain.chat/1" maps conversations to tokens. One plugin may provide several of them.
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
#define MT_CHAT_INTERFACE      "megatrain.chat/1"

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
    /* Writes n bytes at byte `offset` of tensor `index`: any tensor in any order, every byte once,
     * by several threads at a time, and not by the same writer as `write`. NULL, or behind
     * struct_size: writes come in order only, and are slower. [any] */
    mt_status (*write_at)(void *writer, int64_t index, int64_t offset, const void *data, int64_t n);
    /* A hint before the first read: every byte is read once, so that it need not stay in the page
     * cache. NULL, or behind struct_size: the format takes no hint. [main] */
    void (*read_once)(void *reader);
} mt_weights;

/* ---- tokenizers ----------------------------------------------------------------------------- */

typedef int32_t mt_special;
enum {
    MT_SPECIAL_BEGIN = 0, /* begins a document: BOS */
    MT_SPECIAL_END = 1,   /* ends a document: EOS */
    MT_SPECIAL_PAD = 2,
    MT_SPECIAL_UNKNOWN = 3
};

/* Flags of encode. Without any, special tokens that stand in the text are recognised, and none is
 * added. */
enum {
    MT_ENCODE_ADD_SPECIAL = 1u << 0, /* add what the tokenizer puts around a text (BOS, EOS) */
    MT_ENCODE_LITERAL = 1u << 1      /* special tokens that stand in the text are mere text */
};

/* Flags of decode. */
enum { MT_DECODE_SKIP_SPECIAL = 1u << 0 };

typedef struct mt_tokenizer {
    uint32_t struct_size;
    uint32_t reserved;
    /* Can this tokenizer read `path`, a folder or a file? Cheap. [main] */
    bool (*probe)(const char *path);
    /* `path` is a folder or file with the tokenizer's data, NULL for a built-in one. [main] */
    mt_status (*open)(const char *path, void **ret_tokenizer);
    void (*close)(void *tokenizer); /* accepts NULL */
    /* One more than the largest id. [any] */
    int64_t (*vocab_size)(const void *tokenizer);
    /* Id of a token with a role, -1 for none. [any] */
    int32_t (*special)(const void *tokenizer, mt_special which);
    /* Id of the token whose text is exactly this, special ones included; -1 for none. [any] */
    int32_t (*token_id)(const void *tokenizer, const char *text, int64_t n);
    /* Encodes n bytes, UTF-8 or not. Writes at most `capacity` tokens, returns how many there are;
     * below 0: an mt_status. No text of n bytes has more than n tokens, what ADD_SPECIAL adds not
     * counted, except where normalisation makes the text longer. [any] */
    int64_t (*encode)(const void *tokenizer, const char *text, int64_t n, uint32_t flags,
                      int32_t *ret_tokens, int64_t capacity);
    /* Decodes to bytes; same convention. Cut UTF-8 at the end is the caller's concern: tokens that
     * are decoded one after the other give the bytes that they give together, but for what a
     * tokenizer does at the start of a text (Llama 2 drops a space there). [any] */
    int64_t (*decode)(const void *tokenizer, const int32_t *tokens, int64_t n, uint32_t flags,
                      char *ret_text, int64_t capacity);
    /* Hash of all that decides which tokens a text becomes; part of the key of token caches. [any]
     */
    uint64_t (*fingerprint)(const void *tokenizer);
} mt_tokenizer;

/* ---- conversations -------------------------------------------------------------------------- */

/* One turn. Text is UTF-8, not necessarily ending in NUL. */
typedef struct mt_message {
    const char *role; /* "system", "user", "assistant", "tool" */
    const char *content;
    int64_t n_content;     /* bytes */
    const char *reasoning; /* what an assistant thought before it answered; NULL: none */
    int64_t n_reasoning;   /* bytes */
    bool trained;          /* its tokens are targets; an assistant's turn only */
} mt_message;

typedef struct mt_chat {
    uint32_t struct_size;
    uint32_t reserved;
    const char *const *formats; /* names of the formats that are built in; NULL-terminated */
    /* The format that renders exactly as this chat template does (Jinja text, as in
     * tokenizer_config.json); NULL when it is not a known one. [pure] */
    const char *(*identify)(const char *jinja, int64_t n);
    /* Opens a format over an open tokenizer, which must outlive it. Fails where the vocabulary
     * lacks a token that the format needs. [main] */
    mt_status (*open)(const char *format, const mt_tokenizer *tokenizer, const void *tokens,
                      void **ret_chat);
    void (*close)(void *chat); /* accepts NULL */
    /* The tokens of a conversation, exactly those of the model's own template, BOS included where
     * the format has one. With generation_prompt they end where the assistant is to begin.
     * ret_trained (may be NULL) gets 1 for every token that belongs to a trained turn's answer, its
     * end-of-turn token included, else 0. Writes at most `capacity` of each, returns how many there
     * are; below 0: an mt_status (roles in an order that the format cannot express). [any] */
    int64_t (*encode)(const void *chat, const mt_message *messages, int64_t n,
                      bool generation_prompt, int32_t *ret_tokens, uint8_t *ret_trained,
                      int64_t capacity);
    /* Tokens at which an assistant's turn is over. They live as long as the chat. [any] */
    const int32_t *(*stops)(const void *chat, int64_t *ret_n);
    /* Hash of the format and its version; part of the key of token caches. [any] */
    uint64_t (*fingerprint)(const void *chat);
    /* As `identify` for a template that is none of the known ones: the format whose markers stand
     * in it, so that the caller may take it and warn; NULL when there are none. [pure] */
    const char *(*resembles)(const char *jinja, int64_t n);
    /* As `open` for a format that the user wrote: a map of literal strings, whose keys the plugin
     * documents; unknown ones are the caller's to find. `format` outlives the chat. [main] */
    mt_status (*open_custom)(const mt_config *format, const mt_tokenizer *tokenizer,
                             const void *tokens, void **ret_chat);
    /* What an assistant said: takes `text` apart, the tokens after a generation prompt as they
     * decode with special tokens, without the stop token. More may be to come: what may yet turn
     * out to be the format's own is left out. `ret` gets the role, and content and reasoning as
     * places in `text`; no reasoning is NULL. [any] */
    void (*parse)(const void *chat, const char *text, int64_t n, mt_message *ret);
} mt_chat;

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

/* What a stream is opened with. The host may append members: check struct_size. Everything in it
 * outlives the stream. */
typedef struct mt_data_request {
    uint32_t struct_size;
    mt_split split;
    const mt_config *config; /* the run manifest's `data` section */
    int64_t max_seq_len;     /* tokens */
    uint64_t seed;
    int32_t rank, world;
    /* The model's tokenizer and its chat format, with the objects to call them with; NULL where the
     * model or the manifest names none. Without a conversation, `chat` may still be there to open
     * a format that the data brings along. */
    const mt_tokenizer *tokenizer;
    const void *tokens;
    const mt_chat *chat;
    const void *conversation;
    const char *cache_folder; /* for what is costly to make again; may not exist yet; NULL: none */
} mt_data_request;

typedef struct mt_data {
    uint32_t struct_size;
    uint32_t reserved;
    /* Opens the stream of one split. Ranks see disjoint parts of every epoch; the order depends on
     * seed and epoch only. No document is longer than max_seq_len + 1 tokens: longer text is cut so
     * that every token is a target once, or as the loader's keys say. [main] */
    mt_status (*open)(const mt_data_request *request, void **ret_stream);
    void (*close)(void *stream); /* accepts NULL [main] */
    /* Number of documents and of inputs in one epoch of this rank: the sum of n - 1, whether the
     * targets are trained or not, since that is what micro-batches are filled with. Where it
     * changes from epoch to epoch, the mean. [any] */
    void (*size)(const void *stream, int64_t *ret_documents, int64_t *ret_tokens);
    /* The next document. Training streams go on with the next epoch for ever; a validation stream
     * returns MT_END after its only epoch, in an order that never changes. [loader] */
    mt_status (*next)(void *stream, mt_document *ret);
    /* Position before the document that `next` would return: epoch and index in it. [loader] */
    void (*tell)(const void *stream, int64_t *ret_epoch, int64_t *ret_index);
    mt_status (*seek)(void *stream, int64_t epoch, int64_t index);
    /* Smallest vocabulary that holds every token of the stream. [any] */
    int64_t (*vocab_size)(const void *stream);
    /* Hash of the contents that the documents come from: a run is not resumed with other ones. May
     * sample what is large. NULL: there is none. [main] */
    uint64_t (*fingerprint)(const void *stream);
} mt_data;

#ifdef __cplusplus
}
#endif
#endif
