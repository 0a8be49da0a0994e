/* SPDX-License-Identifier: Apache-2.0
 *
 * Rendering: a conversation to the text that the model's template would give, with the places of
 * special tokens and of answers.
 */
#include "chat.h"

#include <stdlib.h>

typedef struct view {
    const char *p;
    int64_t n;
} view;

typedef enum role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL, ROLE_NONE } role;

/* What stands for the names in braces. */
typedef struct slots {
    view content, system, reasoning;
} slots;

typedef struct rendering {
    const chat *c;
    const mt_message *messages;
    int64_t n;
    bool prompt;
    int64_t query; /* index of the last message that asks for something: a user's */
    chat_text *t;
} rendering;

/* ---- text ------------------------------------------------------------------------------------ */

static bool grow(chat_text *t, void **items, int64_t *capacity, int64_t n, size_t size)
{
    if (n <= *capacity)
        return true;
    int64_t wanted = n + n / 2 + 64;
    void *grown = t->failed ? NULL : realloc(*items, (size_t)wanted * size);
    if (!grown) {
        t->failed = true;
        return false;
    }
    *items = grown;
    *capacity = wanted;
    return true;
}

static void put(chat_text *t, const char *p, int64_t n)
{
    if (n == 0 || !grow(t, (void **)&t->bytes, &t->capacity, t->n + n, 1))
        return;
    memcpy(t->bytes + t->n, p, (size_t)n);
    t->n += n;
}

static void put_token(chat_text *t, const char *p, int64_t n)
{
    if (grow(t, (void **)&t->cuts, &t->cuts_capacity, t->n_cuts + 1, sizeof *t->cuts))
        t->cuts[t->n_cuts++] = t->n;
    put(t, p, n);
}

static void put_answer(chat_text *t, int64_t begin, int64_t end)
{
    if (grow(t, (void **)&t->answers, &t->answers_capacity, t->n_answers + 1, sizeof *t->answers))
        t->answers[t->n_answers++] = (chat_span){ begin, end };
}

void chat_text_free(chat_text *t)
{
    free(t->bytes);
    free(t->cuts);
    free(t->answers);
    *t = (chat_text){ 0 };
}

/* ---- white space, by Python's idea of it ----------------------------------------------------- */

/* Bytes of the white space character at the start of p, 0 if there is none. */
static int64_t space_at(const char *text, int64_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    if (n >= 1 && (p[0] == ' ' || (p[0] >= 0x09 && p[0] <= 0x0d) || (p[0] >= 0x1c && p[0] <= 0x1f)))
        return 1;
    if (n >= 2 && p[0] == 0xc2 && (p[1] == 0x85 || p[1] == 0xa0))
        return 2;
    if (n < 3)
        return 0;
    uint32_t code = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2];
    bool space = code == 0xe19a80 /* U+1680 */ || (code >= 0xe28080 && code <= 0xe2808a) ||
                 code == 0xe280a8 || code == 0xe280a9 || code == 0xe280af || code == 0xe2819f ||
                 code == 0xe38080;
    return space ? 3 : 0;
}

static int64_t space_before(const char *end, int64_t n)
{
    for (int64_t size = 1; size <= 3 && size <= n; size++)
        if (space_at(end - size, size) == size)
            return size;
    return 0;
}

static view trim(view v)
{
    for (int64_t k; (k = space_at(v.p, v.n)) > 0; v.n -= k)
        v.p += k;
    for (int64_t k; (k = space_before(v.p + v.n, v.n)) > 0;)
        v.n -= k;
    return v;
}

static view trim_lines_before(view v)
{
    for (; v.n && *v.p == '\n'; v.n--)
        v.p++;
    return v;
}

static view trim_lines_after(view v)
{
    while (v.n && v.p[v.n - 1] == '\n')
        v.n--;
    return v;
}

/* ---- patterns -------------------------------------------------------------------------------- */

static bool starts_with(const char *p, const char *end, const char *word)
{
    size_t n = strlen(word);
    return (size_t)(end - p) >= n && memcmp(p, word, n) == 0;
}

static const chat_token *token_at(const chat *c, const char *p, const char *end)
{
    for (int32_t i = 0; i < c->n_tokens; i++)
        if (starts_with(p, end, c->token[i].text))
            return &c->token[i];
    return NULL;
}

/* Renders bytes [from, to) of a pattern. */
static void put_range(const chat *c, chat_text *t, const char *pattern, int64_t from, int64_t to,
                      const slots *s)
{
    const char *p = pattern + from, *end = pattern + to;
    const struct {
        const char *name;
        const view *v;
    } names[] = { { "{content}", &s->content },
                  { "{system}", &s->system },
                  { "{reasoning}", &s->reasoning } };
    while (p < end) {
        const char *start = p;
        for (size_t i = 0; i < sizeof names / sizeof *names && p == start; i++)
            if (starts_with(p, end, names[i].name)) {
                put(t, names[i].v->p, names[i].v->n);
                p += strlen(names[i].name);
            }
        if (p != start)
            continue;
        if (starts_with(p, end, "{bos}") || starts_with(p, end, "{eos}")) {
            const char *text = p[1] == 'b' ? c->bos : c->eos;
            if (*text)
                put_token(t, text, (int64_t)strlen(text));
            p += 5;
            continue;
        }
        const chat_token *token = token_at(c, p, end);
        if (token)
            put_token(t, token->text, token->n);
        else
            put(t, p, 1);
        p += token ? token->n : 1;
    }
}

static void put_pattern(const rendering *r, const char *pattern, const slots *s)
{
    if (pattern)
        put_range(r->c, r->t, pattern, 0, (int64_t)strlen(pattern), s);
}

/* A prompt that holds more than the start of the pattern, such as an empty thought, has given all
 * of that where the turn begins so. */
static void put_answer_turn(const rendering *r, const chat_answer *a, const slots *s, bool trained)
{
    chat_text *t = r->t;
    const char *prompt = r->c->format->prompt ? r->c->format->prompt : "";
    int64_t turn = t->n, given = (int64_t)strlen(prompt);
    put_range(r->c, t, a->pattern, 0, a->begin, s);
    int64_t begin = t->n;
    put_range(r->c, t, a->pattern, a->begin, a->end, s);
    if (t->n - turn > given && memcmp(t->bytes + turn, prompt, (size_t)given) == 0)
        begin = turn + given;
    if (trained)
        put_answer(t, begin, t->n);
    put_range(r->c, t, a->pattern, a->end, a->n, s);
}

/* ---- which messages a format can express ----------------------------------------------------- */

static role role_of(const mt_message *m)
{
    static const struct {
        const char *name;
        role role;
    } names[] = { { "system", ROLE_SYSTEM },
                  { "developer", ROLE_SYSTEM },
                  { "user", ROLE_USER },
                  { "assistant", ROLE_ASSISTANT },
                  { "tool", ROLE_TOOL } };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(m->role, names[i].name) == 0)
            return names[i].role;
    return ROLE_NONE;
}

static mt_status check_message(const rendering *r, int64_t i, int64_t turn)
{
    const chat_format *f = r->c->format;
    const mt_message *m = &r->messages[i];
    long long at = (long long)i + 1;
    switch (role_of(m)) {
    case ROLE_SYSTEM:
        if (f->placement == CHAT_SYSTEM_NONE)
            return mt_fail(MT_ERR_UNSUPPORTED,
                           "message %lld: chat format '%s' has no system messages; say it in the "
                           "first user's message",
                           at, f->name);
        if (i > 0 && f->placement != CHAT_SYSTEM_TURN)
            return mt_fail(MT_ERR_UNSUPPORTED,
                           "message %lld: in chat format '%s' a system message can only be the "
                           "first one",
                           at, f->name);
        return MT_OK;
    case ROLE_TOOL:
        if (!f->tool)
            return mt_fail(MT_ERR_UNSUPPORTED,
                           "message %lld: chat format '%s' has no tool results here", at, f->name);
        if (i == 0)
            return mt_fail(MT_ERR_INVALID, "message 1: a tool's result that nobody asked for");
        return MT_OK;
    case ROLE_USER:
    case ROLE_ASSISTANT:
        if ((f->flags & CHAT_ALTERNATE) && (role_of(m) == ROLE_USER) != (turn % 2 == 0))
            return mt_fail(MT_ERR_INVALID,
                           "message %lld: role '%s', but in chat format '%s' user and assistant "
                           "take turns, the user first",
                           at, m->role, f->name);
        return MT_OK;
    default:
        return mt_fail(MT_ERR_INVALID,
                       "message %lld: role '%s'; expected system, user, assistant or tool", at,
                       m->role);
    }
}

static mt_status check_messages(const rendering *r)
{
    if (r->n < 1)
        return mt_fail(MT_ERR_INVALID, "a conversation without messages");
    int64_t turn = 0;
    for (int64_t i = 0; i < r->n; i++) {
        mt_status st = check_message(r, i, turn);
        if (st != MT_OK)
            return st;
        turn += role_of(&r->messages[i]) != ROLE_SYSTEM;
    }
    if (turn == 0 && r->c->format->joined)
        return mt_fail(MT_ERR_INVALID,
                       "a system message alone; in chat format '%s' it is part of a user's",
                       r->c->format->name);
    return MT_OK;
}

/* ---- turns ----------------------------------------------------------------------------------- */

static view content_of(const mt_message *m)
{
    return (view){ m->content ? m->content : "", m->content ? m->n_content : 0 };
}

static void put_system(const rendering *r, view content, bool first)
{
    const chat_format *f = r->c->format;
    if (f->flags & CHAT_TRIM_SYSTEM)
        content = trim(content);
    if (content.n == 0 && (f->flags & CHAT_SKIP_EMPTY_SYSTEM))
        return;
    const slots s = { .content = content };
    put_pattern(r, first && f->first_system ? f->first_system : f->system, &s);
}

/* Is the first message a system message that belongs into message i? */
static bool takes_system(const rendering *r, int64_t i)
{
    chat_system placement = r->c->format->placement;
    if (role_of(&r->messages[0]) != ROLE_SYSTEM)
        return false;
    return (placement == CHAT_SYSTEM_FIRST_USER && i == 1) ||
           (placement == CHAT_SYSTEM_LAST_USER && i == r->query);
}

static void put_user(const rendering *r, int64_t i)
{
    const chat_format *f = r->c->format;
    chat_text joined = { 0 };
    slots s = { .content = content_of(&r->messages[i]) };
    if (f->flags & CHAT_TRIM_USER)
        s.content = trim(s.content);
    if (takes_system(r, i)) {
        s.system = content_of(&r->messages[0]);
        put_range(r->c, &joined, f->joined, 0, (int64_t)strlen(f->joined), &s);
        r->t->failed |= joined.failed;
        s.content = (view){ joined.bytes ? joined.bytes : "", joined.n };
    }
    if (f->flags & CHAT_TRIM_JOINED)
        s.content = trim(s.content);
    put_pattern(r, f->user, &s);
    chat_text_free(&joined);
}

/* Cuts what was thought from the content, as the templates do: they split at every </think>. */
static void cut_thought(view *content, view *ret_reasoning)
{
    static const char close[] = "</think>", open[] = "<think>";
    const char *first = memmem(content->p, (size_t)content->n, close, sizeof close - 1);
    if (!first)
        return;
    const char *end = content->p + content->n, *last = first;
    for (const char *next = first; next; next = memmem(last, (size_t)(end - last), close, 8))
        last = next + sizeof close - 1;
    view thought = trim_lines_after((view){ content->p, first - content->p });
    for (const char *at;
         (at = memmem(thought.p, (size_t)thought.n, open, sizeof open - 1)) != NULL;) {
        at += sizeof open - 1;
        thought = (view){ at, thought.p + thought.n - at };
    }
    *ret_reasoning = trim_lines_before(thought);
    *content = (view){ last, end - last };
}

/* As Qwen's templates cut it. */
static void cut_qwen_thought(slots *s)
{
    int64_t whole = s->content.n;
    cut_thought(&s->content, &s->reasoning);
    if (s->content.n != whole)
        s->content = trim_lines_before(s->content);
}

static void put_assistant(const rendering *r, int64_t i)
{
    const chat *c = r->c;
    const mt_message *m = &r->messages[i];
    bool last = i == r->n - 1, ends = last && !r->prompt;
    const chat_answer *a = ends && c->last.pattern ? &c->last : &c->assistant;
    slots s = { .content = content_of(m) };
    bool given = m->reasoning != NULL;
    if (given)
        s.reasoning = (view){ m->reasoning, m->n_reasoning };

    switch (c->format->thinking) {
    case CHAT_THINKING_NONE:
        break;
    case CHAT_THINKING_LAST:
        if (ends && given)
            a = &c->thought;
        break;
    case CHAT_THINKING_CUT:
        cut_thought(&s.content, &s.reasoning);
        break;
    case CHAT_THINKING_QWEN3:
        if (!given)
            cut_qwen_thought(&s);
        if (i > r->query && (last || s.reasoning.n > 0)) {
            s.reasoning = trim_lines_before(trim_lines_after(s.reasoning));
            s.content = trim_lines_before(s.content);
            a = &c->thought;
        }
        break;
    case CHAT_THINKING_QWEN3_5:
        s.content = trim(s.content);
        if (!given)
            cut_qwen_thought(&s);
        s.reasoning = trim(s.reasoning);
        if (i > r->query)
            a = &c->thought;
        break;
    }
    if (c->format->flags & CHAT_TRIM_ASSISTANT)
        s.content = trim(s.content);
    put_answer_turn(r, a, &s, m->trained);
}

/* Consecutive results of tools are one turn. */
static void put_tool(const rendering *r, int64_t i)
{
    const chat_format *f = r->c->format;
    slots s = { .content = content_of(&r->messages[i]) };
    if (f->flags & CHAT_TRIM_TOOL)
        s.content = trim(s.content);
    if (i == 0 || role_of(&r->messages[i - 1]) != ROLE_TOOL)
        put_pattern(r, f->tools_before, &s);
    put_pattern(r, f->tool, &s);
    if (i == r->n - 1 || role_of(&r->messages[i + 1]) != ROLE_TOOL)
        put_pattern(r, f->tools_after, &s);
}

/* To Qwen 3 and 3.5, a user's message that is a tool's result in disguise asks for nothing. */
static bool is_query(const chat *c, const mt_message *m)
{
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    chat_thinking thinking = c->format->thinking;
    view v = content_of(m);
    if (role_of(m) != ROLE_USER)
        return false;
    if (thinking == CHAT_THINKING_QWEN3_5)
        v = trim(v);
    else if (thinking != CHAT_THINKING_QWEN3)
        return true;
    return !(starts_with(v.p, v.p + v.n, open) && v.n >= (int64_t)sizeof close - 1 &&
             memcmp(v.p + v.n - (sizeof close - 1), close, sizeof close - 1) == 0);
}

static int64_t last_query(const rendering *r)
{
    int64_t i = r->n - 1;
    while (i >= 0 && !is_query(r->c, &r->messages[i]))
        i--;
    return i >= 0 ? i : r->n - 1;
}

mt_status chat_render(const chat *c, const mt_message *messages, int64_t n, bool prompt,
                      chat_text *ret)
{
    rendering r = { .c = c, .messages = messages, .n = n, .prompt = prompt, .t = ret };
    const chat_format *f = c->format;
    const slots none = { 0 };
    mt_status st = check_messages(&r);
    if (st != MT_OK)
        return st;
    r.query = last_query(&r);
    if (f->thinking == CHAT_THINKING_QWEN3_5 && !is_query(c, &messages[r.query]))
        return mt_fail(MT_ERR_INVALID, "in chat format '%s' a user must ask for something",
                       f->name);
    put_pattern(&r, f->begin, &none);
    if (f->default_system && role_of(&messages[0]) != ROLE_SYSTEM)
        put_system(&r, (view){ f->default_system, (int64_t)strlen(f->default_system) }, true);
    for (int64_t i = 0; i < n; i++) {
        switch (role_of(&messages[i])) {
        case ROLE_SYSTEM:
            if (!f->joined)
                put_system(&r, content_of(&messages[i]), i == 0);
            break;
        case ROLE_USER:
            put_user(&r, i);
            break;
        case ROLE_ASSISTANT:
            put_assistant(&r, i);
            break;
        default:
            put_tool(&r, i);
        }
    }
    if (prompt)
        put_pattern(&r, f->prompt, &none);
    return ret->failed ? mt_fail_nomem() : MT_OK;
}
