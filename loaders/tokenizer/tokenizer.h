/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokenizer loader: byte pair encoding as a Hugging Face tokenizer.json describes it.
 *
 * A text becomes tokens in five stages, each of which is read from the file:
 *   added.c      added tokens that stand in the text are cut out, leftmost and longest first
 *   normalize.c  what is left is rewritten (Unicode forms, replacements)
 *   encode.c     cut into pieces (regular expressions, character classes)
 *   bpe.c        pieces become tokens by merges
 * encode.c also drives them all and puts the template's special tokens around.
 * decode.c goes the other way. load.c and json.c read the file, special.c the roles of tokens from
 * the files beside it; vocab.c maps texts to ids; text.c has UTF-8 and character classes; regex.c
 * and unicode.c the engine; tokenizer.c is the plugin.
 *
 * Bytes that are no UTF-8 are encoded as U+FFFD, one for each maximal part of a sequence, as
 * Python's decode(errors="replace") makes of them. NUL is text like any other byte.
 *
 * An open tokenizer is constant but for its pool of scratch memory: calls may run on any number of
 * threads.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <megatrain/loader.h>
#include <megatrain/report.h>
#include <pthread.h>

/* Text that somebody else owns; not ended by NUL. */
typedef struct tok_text {
    const char *p;
    int64_t n; /* bytes */
} tok_text;

/* ---- growing memory (text.c) ---------------------------------------------------------------- */

typedef struct tok_buf {
    char *p;
    int64_t n, cap;
} tok_buf;

void tok_buf_finish(tok_buf *b);
bool tok_buf_reserve(tok_buf *b, int64_t more); /* false: out of memory */
bool tok_buf_add(tok_buf *b, const char *p, int64_t n);
bool tok_buf_add_char(tok_buf *b, uint32_t c);
tok_text tok_buf_text(const tok_buf *b);

/* Memory that lives as long as the tokenizer, given out piece by piece. */
typedef struct tok_arena {
    struct tok_block *blocks;
} tok_arena;

void tok_arena_finish(tok_arena *a);
void *tok_arena_alloc(tok_arena *a, size_t n); /* zeroed; NULL: out of memory */
/* A copy that ends in NUL; p is NULL when out of memory. */
tok_text tok_arena_copy(tok_arena *a, tok_text t);

/* ---- UTF-8 and characters (text.c) ---------------------------------------------------------- */

enum { TOK_CHARS = 0x110000 };

/* Decodes the character at p; the text must be valid. Returns its bytes. */
int tok_char(const char *p, uint32_t *ret_char);
/* The last character before p. */
uint32_t tok_char_before(const char *start, const char *p);
/* Bytes of the valid UTF-8 that `t` starts with. */
int64_t tok_valid(tok_text t);
/* Appends `t` with every malformed part as U+FFFD. */
bool tok_repair(tok_text t, tok_buf *ret);

bool tok_is_space(uint32_t c);   /* White_Space */
bool tok_is_word(uint32_t c);    /* letters, marks, digits, connectors, joiners: \w */
bool tok_is_numeric(uint32_t c); /* Nd, Nl, No */
bool tok_is_punctuation(uint32_t c);
bool tok_is_mark(uint32_t c); /* Mn, Mc, Me */

/* The byte-level alphabet of GPT-2: every byte as a visible character. */
uint32_t tok_byte_char(uint8_t byte);
/* The byte of such a character, -1 for any other. */
int tok_char_byte(uint32_t c);
/* Appends the text with each byte as its character. */
bool tok_add_byte_chars(tok_buf *b, tok_text t);

static inline bool tok_same(tok_text a, tok_text b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, (size_t)a.n) == 0);
}

static inline tok_text tok_literal(const char *s)
{
    return (tok_text){ s, (int64_t)strlen(s) };
}

/* ---- regular expressions (regex.c) ---------------------------------------------------------- */

/* Compiled once, searched from any thread. */
typedef struct tok_regex tok_regex;
/* What a search needs besides; one a thread. */
typedef struct tok_region tok_region;

/* Once in a process, before any other. */
mt_status tok_regex_init(void);
mt_status tok_unicode_init(void); /* (unicode.c) */
/* On failure *ret_why says what is wrong with the pattern. */
mt_status tok_regex_create(tok_text pattern, tok_regex **ret, char ret_why[256]);
void tok_regex_destroy(tok_regex *r); /* accepts NULL */
tok_region *tok_region_create(void);
void tok_region_destroy(tok_region *r); /* accepts NULL */

/* ---- patterns (regex.c) --------------------------------------------------------------------- */

typedef enum tok_pattern_kind {
    TOK_LITERAL,
    TOK_REGEX,
    TOK_NUMERIC, /* these four: each character of the class is a match of its own */
    TOK_PUNCTUATION,
    TOK_SPACE,
    TOK_WORDS /* runs of word characters, and runs of what is neither word nor space */
} tok_pattern_kind;

typedef struct tok_pattern {
    tok_pattern_kind kind;
    tok_text literal; /* not empty */
    tok_regex *regex;
} tok_pattern;

/* Where to go on in a text. */
typedef struct tok_search {
    tok_text text;
    int64_t from;
    int64_t last_end; /* of the match before, -1 at the start */
    tok_region *region;
    mt_status status; /* why there is no next match, where it is not the end of the matches */
} tok_search;

/* The next match; matches may be empty, but not right behind another one. */
bool tok_pattern_next(const tok_pattern *p, tok_search *s, int64_t *ret_start, int64_t *ret_end);

/* Appends `t` with every match replaced. */
mt_status tok_pattern_replace(const tok_pattern *p, tok_text content, tok_text t,
                              tok_region *region, tok_buf *ret);

/* ---- vocabulary (vocab.c) ------------------------------------------------------------------- */

enum { TOK_MAX_ID = (1 << 24) - 1 };

/* Flags of a token. */
enum { TOK_OF_MODEL = 1u << 0, TOK_ADDED = 1u << 1, TOK_SPECIAL = 1u << 2 };

/* Texts and their ids, by open addressing. */
typedef struct tok_table {
    int32_t *slots; /* id + 1; 0: free */
    uint64_t mask;
    const tok_text *texts; /* by id */
} tok_table;

mt_status tok_table_init(tok_table *t, int64_t entries, const tok_text *texts);
void tok_table_finish(tok_table *t);
void tok_table_add(tok_table *t, int32_t id); /* no other id has this text yet */
int32_t tok_table_find(const tok_table *t, tok_text text);

typedef struct tok_vocab {
    int64_t size; /* one more than the largest id */
    tok_text *text;
    uint8_t *flags;
    tok_table by_text;
} tok_vocab;

void tok_vocab_finish(tok_vocab *v);

/* ---- added tokens (added.c) ----------------------------------------------------------------- */

typedef struct tok_added {
    tok_text content;
    tok_text pattern; /* what is looked for: the content, normalized where it says so */
    int32_t id;
    bool special, normalized, lstrip, rstrip, single_word;
} tok_added;

/* A trie over bytes. */
typedef struct tok_trie {
    struct tok_trie_node *nodes;
    int32_t n, cap;
    int32_t root[256]; /* node of the first byte, 0: none */
} tok_trie;

mt_status tok_trie_add(tok_trie *t, tok_text pattern, int32_t value);
void tok_trie_finish(tok_trie *t);
/* Leftmost match from `from` on, the longest there; the value, or -1. */
int32_t tok_trie_find(const tok_trie *t, tok_text text, int64_t from, int64_t *ret_start,
                      int64_t *ret_end);

/* ---- normalizers (normalize.c) -------------------------------------------------------------- */

typedef enum tok_norm_kind {
    TOK_NORM_FORM, /* `option` holds the flags of utf8proc */
    TOK_NORM_LOWERCASE,
    TOK_NORM_PREPEND,
    TOK_NORM_REPLACE,
    TOK_NORM_STRIP, /* option: 1 left, 2 right */
    TOK_NORM_STRIP_ACCENTS,
    TOK_NORM_BYTE_LEVEL
} tok_norm_kind;

enum { TOK_STRIP_LEFT = 1, TOK_STRIP_RIGHT = 2 };

typedef struct tok_norm {
    tok_norm_kind kind;
    int32_t option;
    tok_pattern pattern;
    tok_text content;
} tok_norm;

/* Runs all steps; *ret is `t` itself or lies in one of the two buffers. */
mt_status tok_normalize(const tok_norm *steps, int64_t n, tok_text t, tok_region *region,
                        tok_buf buf[2], tok_text *ret);

/* ---- cutting into pieces (encode.c) ---------------------------------------------------------- */

typedef enum tok_behavior {
    TOK_REMOVED,
    TOK_ISOLATED,
    TOK_MERGED_WITH_PREVIOUS,
    TOK_MERGED_WITH_NEXT,
    TOK_CONTIGUOUS
} tok_behavior;

typedef enum tok_split_kind {
    TOK_SPLIT,
    TOK_SPLIT_PREFIX,    /* put `content` before a piece that does not start with it */
    TOK_SPLIT_SPACES,    /* put `content` for every space */
    TOK_SPLIT_BYTE_LEVEL /* bytes become characters of the byte-level alphabet */
} tok_split_kind;

typedef struct tok_split {
    tok_split_kind kind;
    tok_pattern pattern;
    tok_behavior behavior;
    bool invert;
    bool first_only; /* TOK_SPLIT_PREFIX: only where the text begins */
    tok_text content;
} tok_split;

/* ---- merges (bpe.c) ------------------------------------------------------------------------- */

typedef struct tok_merge {
    uint64_t pair; /* left id in the upper half */
    int32_t rank;  /* -1: free */
    int32_t id;
} tok_merge;

typedef struct tok_bpe {
    const tok_vocab *vocab;
    tok_merge *merges;
    uint64_t mask;
    /* Pieces come as bytes, each of which starts as the token of its character in the byte-level
     * alphabet; else as characters. */
    bool bytes;
    bool ignore_merges, fuse_unk;
    int32_t unk;             /* -1: unknown characters vanish */
    int32_t byte_id[256];    /* first token of a byte (`bytes`), -1: none */
    int32_t **char_id;       /* [TOK_CHARS / 256] pages, NULL: no token in it; else id or -1 */
    int32_t fallback[256];   /* tokens <0xNN>, -1: none */
    bool has_fallback;       /* byte_fallback, with at least one such token */
    bool is_total;           /* all 256 of them, and no merge uses them */
    tok_text prefix, suffix; /* of later symbols; of the last one */
    tok_table whole; /* `bytes` with ignore_merges: tokens by the bytes that they stand for */
    tok_text *whole_text;
    uint64_t *joined; /* a Bloom filter of the pairs of characters that merges can join; NULL: no */
    uint32_t joined_shift;
} tok_bpe;

/* What one call needs. */
typedef struct tok_bpe_scratch {
    int32_t *id, *prev, *next; /* [cap] */
    uint64_t *heap;
    int64_t cap, heap_cap;
    struct tok_cached *cache;
} tok_bpe_scratch;

/* Everything but vocab, options and merges is derived here. */
mt_status tok_bpe_init(tok_bpe *b, tok_arena *arena, bool byte_fallback);
void tok_bpe_finish(tok_bpe *b);
mt_status tok_bpe_reserve_merges(tok_bpe *b, int64_t n);
/* A pair that is there already is replaced: the last one counts. */
void tok_bpe_add_merge(tok_bpe *b, int32_t left, int32_t right, int32_t rank, int32_t id);

typedef struct tok_output {
    int32_t *ids;
    int64_t capacity, n; /* n may be above capacity */
} tok_output;

static inline void tok_put(tok_output *o, int32_t id)
{
    if (o->n < o->capacity)
        o->ids[o->n] = id;
    o->n++;
}

mt_status tok_bpe_encode(const tok_bpe *b, tok_bpe_scratch *s, tok_text piece, tok_output *out);
/* Gives back what only a very long piece needed. */
void tok_bpe_scratch_trim(tok_bpe_scratch *s);
void tok_bpe_scratch_finish(tok_bpe_scratch *s);

/* ---- decoding (decode.c) -------------------------------------------------------------------- */

typedef enum tok_decode_kind {
    TOK_DECODE_BYTE_LEVEL,
    TOK_DECODE_REPLACE,
    TOK_DECODE_BYTE_FALLBACK,
    TOK_DECODE_STRIP,
    TOK_DECODE_METASPACE
} tok_decode_kind;

typedef struct tok_decode {
    tok_decode_kind kind;
    tok_pattern pattern;
    tok_text content;    /* of replace; the character of strip and of metaspace */
    int64_t left, right; /* of strip, characters */
    bool drops_at_start; /* of metaspace */
} tok_decode;

/* ---- the tokenizer -------------------------------------------------------------------------- */

typedef struct tokenizer {
    tok_arena arena;
    tok_vocab vocab;
    tok_added *added;
    int64_t n_added;
    tok_trie raw, normalized; /* values are indices of `added` */
    tok_norm *norms;
    int64_t n_norms;
    tok_split *splits;
    int64_t n_splits;
    tok_bpe bpe;
    int32_t *before, *after; /* what the template puts around a text */
    int64_t n_before, n_after;
    tok_decode *decodes; /* the first n_each see each token, the others the whole text */
    int64_t n_decodes, n_each;
    bool joined_by_space;    /* no decoder: tokens are joined with spaces */
    tok_text *decoded;       /* what each token becomes on its own, by id */
    tok_text *decoded_first; /* and where it comes first, if that differs; NULL: it does not */
    int32_t special[4];      /* by mt_special */
    uint64_t fingerprint;
    pthread_mutex_t lock; /* of `idle` */
    struct tok_scratch *idle;
} tokenizer;

/* Reads `path`, a tokenizer.json or a folder with one. (load.c) */
mt_status tok_load(const char *path, tokenizer **ret);
void tok_destroy(tokenizer *t); /* accepts NULL */

/* Fills t->special from the files in `folder`. (special.c) */
mt_status tok_load_special(tokenizer *t, const char *folder);

/* Members of the interface. */
int64_t tok_encode(const void *tokenizer, const char *text, int64_t n, uint32_t flags,
                   int32_t *ret_tokens, int64_t capacity);
int64_t tok_decode_ids(const void *tokenizer, const int32_t *tokens, int64_t n, uint32_t flags,
                       char *ret_text, int64_t capacity);

/* Fills t->decoded. (decode.c) */
mt_status tok_decode_prepare(tokenizer *t);
void tok_scratch_destroy_all(tokenizer *t);

#endif
