/* SPDX-License-Identifier: Apache-2.0
 *
 * A conversation. Every turn renders it anew, so that a model is given what its format says, also
 * where that takes something back from earlier turns (thoughts); the engine is fed what is new.
 */
#include "conversation.h"

#include "../base/log.h"
#include "../base/status.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- messages -------------------------------------------------------------------------------- */

static char *copy(const char *p, int64_t n)
{
    char *text = malloc((size_t)n + 1);
    if (!text)
        return NULL;
    memcpy(text, p, (size_t)n);
    text[n] = 0;
    return text;
}

/* Copies the texts of `m`; the role is a literal. */
static mt_status add(conversation *c, mt_message m)
{
    if (c->n == c->capacity) {
        int64_t capacity = 2 * c->capacity + 8;
        mt_message *grown = realloc(c->messages, (size_t)capacity * sizeof *grown);
        if (!grown)
            return status_nomem("a conversation", (size_t)capacity * sizeof *grown);
        c->messages = grown;
        c->capacity = capacity;
    }
    char *content = copy(m.content, m.n_content);
    char *reasoning = m.reasoning ? copy(m.reasoning, m.n_reasoning) : NULL;
    if (!content || (m.reasoning && !reasoning)) {
        free(content);
        free(reasoning);
        return status_nomem("a message", (size_t)(m.n_content + m.n_reasoning));
    }
    m.content = content;
    m.reasoning = reasoning;
    c->messages[c->n++] = m;
    return MT_OK;
}

mt_status conversation_add(conversation *c, const char *role, const char *text, int64_t n)
{
    mt_status st = add(c, (mt_message){ .role = role, .content = text, .n_content = n });
    if (st == MT_OK && strcmp(role, "system") == 0)
        c->first = c->n;
    return st;
}

static void drop_to(conversation *c, int64_t n)
{
    while (c->n > n) {
        c->n--;
        free((char *)c->messages[c->n].content);
        free((char *)c->messages[c->n].reasoning);
    }
}

void conversation_clear(conversation *c)
{
    drop_to(c, c->first);
}

void conversation_close(conversation *c)
{
    drop_to(c, 0);
    free(c->messages);
    free(c->text);
    *c = (conversation){ 0 };
}

mt_status conversation_tokens(const conversation *c, int32_t **ret, int64_t *ret_n)
{
    const session *s = c->g->s;
    int64_t n = s->chat->encode(s->conversation, c->messages, c->n, true, NULL, NULL, 0);
    if (n < 0)
        return (mt_status)n;
    int32_t *tokens = calloc((size_t)n + 1, sizeof *tokens);
    if (!tokens)
        return status_nomem("the prompt", (size_t)n * sizeof *tokens);
    s->chat->encode(s->conversation, c->messages, c->n, true, tokens, NULL, n);
    *ret = tokens;
    *ret_n = n;
    return MT_OK;
}

/* ---- an answer ------------------------------------------------------------------------------- */

/* What has come of a part since it was last shown. */
static void show_part(conversation *c, const char *p, int64_t n, int64_t *shown)
{
    if (n <= *shown)
        return;
    token_text_show(&c->out, p + *shown, n - *shown);
    *shown = n;
    fflush(stdout);
}

static void show_thought(conversation *c, const mt_message *m)
{
    if (!c->dim || !m->reasoning || m->n_reasoning <= c->shown_reasoning)
        return;
    fputs("\033[2m", stdout);
    show_part(c, m->reasoning, m->n_reasoning, &c->shown_reasoning);
    fputs("\033[0m", stdout);
    fflush(stdout);
}

static mt_status append_text(conversation *c, const char *p, int64_t n)
{
    if (c->n_text + n > c->text_capacity) {
        int64_t capacity = 2 * (c->n_text + n) + 256;
        char *grown = realloc(c->text, (size_t)capacity);
        if (!grown)
            return status_nomem("an answer", (size_t)capacity);
        c->text = grown;
        c->text_capacity = capacity;
    }
    memcpy(c->text + c->n_text, p, (size_t)n);
    c->n_text += n;
    return MT_OK;
}

static void parse(const conversation *c, mt_message *ret)
{
    const session *s = c->g->s;
    s->chat->parse(s->conversation, c->text ? c->text : "", c->n_text, ret);
}

static mt_status put(void *arg, int32_t token)
{
    conversation *c = arg;
    const session *s = c->g->s;
    char bytes[TOKEN_TEXT_ROOM];
    int64_t n = token_text(s->tokenizer, s->tokens, token, 0, bytes);
    mt_status st = append_text(c, bytes, n);
    if (st != MT_OK)
        return st;
    if (c->raw) {
        n = token_text(s->tokenizer, s->tokens, token, MT_DECODE_SKIP_SPECIAL, bytes);
        token_text_show(&c->out, bytes, n);
        fflush(stdout);
        return MT_OK;
    }
    mt_message m;
    parse(c, &m);
    show_thought(c, &m);
    if (m.n_content > 0 && c->shown_content == 0 && c->shown_reasoning > 0)
        fputs("\n\n", stdout);
    show_part(c, m.content, m.n_content, &c->shown_content);
    return MT_OK;
}

static mt_status check_length(const conversation *c, int64_t n)
{
    if (n < c->g->context)
        return MT_OK;
    return status_set(MT_ERR_INVALID,
                      "the conversation has become %lld tokens long, and there is room for %lld; "
                      "begin anew with /clear, or start with a larger --context",
                      (long long)n, (long long)c->g->context);
}

mt_status conversation_answer(conversation *c, int64_t *ret_made)
{
    const session *s = c->g->s;
    int32_t *tokens = NULL;
    int64_t n = 0, n_stops = 0;
    const int32_t *stops = s->chat->stops(s->conversation, &n_stops);
    c->n_text = c->shown_reasoning = c->shown_content = 0;
    mt_status st = conversation_tokens(c, &tokens, &n);
    if (st == MT_OK)
        st = check_length(c, n);
    if (st == MT_OK)
        st = generation_feed(c->g, tokens, n);
    free(tokens);
    if (st == MT_OK) {
        st = generation_run(c->g, stops, n_stops, c->max_tokens, put, c, ret_made);
        token_text_end(&c->out);
        putchar('\n');
        fflush(stdout);
    }
    if (st == MT_OK) {
        mt_message answer;
        parse(c, &answer);
        st = add(c, answer);
    }
    if (st != MT_OK && c->n > c->first)
        drop_to(c, c->n - 1);
    return st;
}

/* ---- at a terminal --------------------------------------------------------------------------- */

static bool is_blank(const char *p)
{
    while (isspace((unsigned char)*p))
        p++;
    return *p == 0;
}

/* One line of the user's. MT_END: it was the last. */
static mt_status take_line(conversation *c, const char *line, int64_t n)
{
    if (strcmp(line, "/exit") == 0)
        return MT_END;
    if (strcmp(line, "/clear") == 0) {
        conversation_clear(c);
        return MT_OK;
    }
    if (is_blank(line))
        return MT_OK;
    int64_t made = 0;
    mt_status st = conversation_add(c, "user", line, n);
    if (st == MT_OK)
        st = conversation_answer(c, &made);
    if (st == MT_ERR_INVALID || st == MT_ERR_UNSUPPORTED) {
        log_write(MT_LOG_ERROR, "%s", status_text());
        return MT_OK;
    }
    return st;
}

mt_status conversation_talk(conversation *c)
{
    char *line = NULL;
    size_t room = 0;
    mt_status st = MT_OK;
    log_write(MT_LOG_INFO, "chat format '%s'; /clear begins anew, /exit ends",
              c->g->s->chat_format);
    while (st == MT_OK) {
        fputs("> ", stdout);
        fflush(stdout);
        ssize_t n = getline(&line, &room, stdin);
        if (n < 0) {
            putchar('\n');
            break;
        }
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = 0;
        st = take_line(c, line, n);
    }
    free(line);
    return st == MT_END ? MT_OK : st;
}
