/* SPDX-License-Identifier: Apache-2.0
 *
 * Talking with a model: the turns so far, and the next one.
 */
#ifndef MT_CORE_CLI_CONVERSATION_H
#define MT_CORE_CLI_CONVERSATION_H

#include "generation.h"
#include "token_text.h"

typedef struct conversation {
    generation *g;      /* its session has a chat format */
    int64_t max_tokens; /* of an answer */
    bool raw;           /* answers are shown as they come, thoughts included */
    bool dim;           /* thoughts are shown, dimmed; else they are left out */
    mt_message *messages;
    int64_t n, capacity;
    int64_t first; /* messages that a new beginning keeps: the system's */
    /* the answer at hand */
    char *text; /* its tokens, special ones too */
    int64_t n_text, text_capacity;
    int64_t shown_reasoning, shown_content; /* bytes */
    utf8_stream out;
} conversation;

/* Adds a copy of a system or user message. A conversation that starts as { .g = ... } is closed
 * whatever happens. */
mt_status conversation_add(conversation *c, const char *role, const char *text, int64_t n);

/* The tokens up to where the assistant is to begin, which the caller frees. */
mt_status conversation_tokens(const conversation *c, int32_t **ret, int64_t *ret_n);

/* Makes and shows the assistant's answer and adds it. When that fails, the last message is dropped:
 * after MT_ERR_INVALID (the conversation has become too long) one can go on with another. */
mt_status conversation_answer(conversation *c, int64_t *ret_made);

/* Begins anew, after the system message. */
void conversation_clear(conversation *c);
void conversation_close(conversation *c);

/* Reads the user's messages from the terminal, and answers, until /exit or the end of input. */
mt_status conversation_talk(conversation *c);

#endif
