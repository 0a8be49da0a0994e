/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat formats: conversations to tokens, exactly those of a model's own template, and which of them
 * are trained.
 *
 * formats.c is the table of formats, each a handful of literal strings; text.c renders a
 * conversation; encode.c turns the text into tokens and its answers into a mask; parse.c reads what
 * a model answered; identify.c tells a template's format; own.c reads one that the user spells out;
 * chat.c opens formats and is the plugin.
 *
 * What is trained: the answer of every assistant turn that is marked so. It begins where the
 * generation prompt ends, for that is what the model will have been given, and ends with the
 * end-of-turn token; what a format puts between turns after that is not trained. A token that
 * straddles the beginning, half of it given, is not trained either.
 */
#ifndef CHAT_H
#define CHAT_H

#include <megatrain/loader.h>
#include <megatrain/report.h>

enum { CHAT_MAX_TOKENS = 12, CHAT_MAX_STOPS = 4 };

/* Where a system message may stand, and what becomes of it. */
typedef enum chat_system {
    CHAT_SYSTEM_TURN,       /* a turn of its own, anywhere */
    CHAT_SYSTEM_FIRST,      /* a turn of its own, as the first message only */
    CHAT_SYSTEM_FIRST_USER, /* the first message only; joined to the first user's */
    CHAT_SYSTEM_LAST_USER,  /* the first message only; joined to the last user's */
    CHAT_SYSTEM_NONE
} chat_system;

/* What becomes of what an assistant thought (mt_message.reasoning, or <think> in its content). */
typedef enum chat_thinking {
    CHAT_THINKING_NONE,    /* the format has no place for it */
    CHAT_THINKING_QWEN3,   /* shown after the last user's turn, empty there if there was none; cut
                              from the content of earlier turns */
    CHAT_THINKING_QWEN3_5, /* shown in every turn after the last user's; cut from earlier ones; all
                              texts lose the white space around them */
    CHAT_THINKING_LAST,    /* shown in the last turn of a conversation that ends with it */
    CHAT_THINKING_CUT      /* never shown, and cut from the content */
} chat_thinking;

enum {
    CHAT_TRIM_SYSTEM = 1u << 0, /* white space around the content goes, as Python's str.strip */
    CHAT_TRIM_USER = 1u << 1,   /* applied before a system message is joined to it ... */
    CHAT_TRIM_JOINED = 1u << 2, /* ... or after */
    CHAT_TRIM_ASSISTANT = 1u << 3,
    CHAT_TRIM_TOOL = 1u << 4,
    CHAT_ALTERNATE = 1u << 5,        /* after the system's, turns are user, assistant, user ... */
    CHAT_SKIP_EMPTY_SYSTEM = 1u << 6 /* an empty system message leaves no turn */
};

/* A format. Strings are literal but for {content}, {system}, {reasoning}, and {bos} and {eos}: the
 * texts of the tokenizer's BOS (nothing where it has none) and EOS tokens. */
typedef struct chat_format {
    const char *name;
    const char *begin;        /* of every conversation */
    const char *first_system; /* of a system message that comes first; NULL: as `system` */
    const char *system;       /* NULL: the first only */
    const char
        *default_system; /* content where the first message is not the system's; NULL: none */
    const char *joined;  /* system and user content in one: {system}, {content} */
    const char *user;
    const char *assistant;
    const char *last;         /* an assistant's turn that ends the conversation; NULL: as others */
    const char *thought;      /* an assistant's turn with what it thought; NULL: none */
    const char *tools_before; /* before, and after, a run of tool results */
    const char *tool;         /* NULL: the format has no tool results */
    const char *tools_after;
    const char *prompt; /* where the assistant is to begin */
    /* Every special token that stands in the above, {bos} and {eos} apart; NULL-terminated. */
    const char *tokens[CHAT_MAX_TOKENS];
    /* Tokens that end a turn when generating, besides EOS; none: the last one of `assistant`. */
    const char *stops[CHAT_MAX_STOPS];
    chat_system placement;
    chat_thinking thinking;
    uint32_t flags;
} chat_format;

/* The last one has no name. */
extern const chat_format chat_formats[];

/* The text of a special token. */
typedef struct chat_token {
    const char *text;
    int64_t n;
} chat_token;

/* An assistant's pattern in its three parts: given, answer, and what follows the turn. */
typedef struct chat_answer {
    const char *pattern;
    /* Offsets in the pattern: the answer is [begin, end), its end-of-turn token [close, end). */
    int64_t begin, close, end, n;
} chat_answer;

/* An open format. */
typedef struct chat {
    const chat_format *format;
    chat_format custom; /* what `format` points to when it is the user's own */
    const mt_tokenizer *tokenizer;
    const void *tokens;
    char *bos, *eos;                       /* texts, "" where there is none */
    chat_token token[CHAT_MAX_TOKENS + 2]; /* the longest first */
    int32_t n_tokens;
    chat_answer assistant, last, thought;
    int32_t stops[CHAT_MAX_STOPS + 1];
    int64_t n_stops;
    uint64_t fingerprint;
} chat;

typedef struct chat_span {
    int64_t begin, end; /* bytes */
} chat_span;

/* A rendered conversation. */
typedef struct chat_text {
    char *bytes;
    int64_t n, capacity;
    int64_t *cuts; /* offsets of the special tokens that the format put there, ascending */
    int64_t n_cuts, cuts_capacity;
    chat_span *answers; /* of the turns that are trained */
    int64_t n_answers, answers_capacity;
    bool failed; /* out of memory; checked once, at the end */
} chat_text;

/* Reads a format that the user spells out; its strings are the configuration's. */
mt_status chat_read_own(const mt_config *c, chat_format *ret);

/* Renders into `ret`, which starts as { 0 } and is freed by the caller, also on failure. */
mt_status chat_render(const chat *c, const mt_message *messages, int64_t n, bool prompt,
                      chat_text *ret);
void chat_text_free(chat_text *t);

/* The plugin's encode. */
int64_t chat_encode(const void *c, const mt_message *messages, int64_t n, bool prompt,
                    int32_t *ret_tokens, uint8_t *ret_trained, int64_t capacity);

/* The plugin's parse. */
void chat_parse(const void *c, const char *text, int64_t n, mt_message *ret);

/* The plugin's identify and resembles. */
const char *chat_identify(const char *jinja, int64_t n);
const char *chat_resembles(const char *jinja, int64_t n);

#endif
