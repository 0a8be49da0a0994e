/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening formats, those of the table and the user's own, over a tokenizer; and the plugin.
 */
#include "chat.h"

#include <megatrain/plugin.h>

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

/* Part of every fingerprint: raise it when the same format comes to give other tokens. */
enum { CHAT_VERSION = 1 };

enum { MAX_FORMATS = 64 };

static const char *format_names[MAX_FORMATS];

/* ---- special tokens -------------------------------------------------------------------------- */

/* The text of a token with a role; "" where the tokenizer has none. */
static mt_status text_of_special(const chat *c, mt_special which, char **ret)
{
    int32_t id = c->tokenizer->special(c->tokens, which);
    int64_t n = id < 0 ? 0 : c->tokenizer->decode(c->tokens, &id, 1, 0, NULL, 0);
    if (n < 0)
        return (mt_status)n;
    char *text = calloc((size_t)n + 1, 1);
    if (!text)
        return mt_fail_nomem();
    if (n > 0)
        c->tokenizer->decode(c->tokens, &id, 1, 0, text, n);
    *ret = text;
    return MT_OK;
}

static mt_status add_token(chat *c, const char *text)
{
    int64_t n = (int64_t)strlen(text);
    int32_t id = c->tokenizer->token_id(c->tokens, text, n), made[2] = { -1, -1 };
    if (id < 0)
        return mt_fail(MT_ERR_INVALID,
                       "chat format '%s' needs the token '%s', which the tokenizer does not "
                       "have; use the model's own format or tokenizer",
                       c->format->name, text);
    if (c->tokenizer->encode(c->tokens, text, n, 0, made, 2) != 1 || made[0] != id)
        return mt_fail(MT_ERR_INVALID,
                       "chat format '%s' needs the token '%s', but the tokenizer does not "
                       "recognise it in a text: it is not among its special tokens",
                       c->format->name, text);
    int32_t at = c->n_tokens++;
    for (; at > 0 && c->token[at - 1].n < n; at--)
        c->token[at] = c->token[at - 1];
    c->token[at] = (chat_token){ text, n };
    return MT_OK;
}

static bool uses(const chat_format *f, const char *name)
{
    const char *const all[] = { f->begin, f->system, f->user, f->assistant, f->last, f->thought };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] && strstr(all[i], name))
            return true;
    return false;
}

static mt_status find_tokens(chat *c)
{
    const chat_format *f = c->format;
    mt_status st = text_of_special(c, MT_SPECIAL_BEGIN, &c->bos);
    if (st == MT_OK)
        st = text_of_special(c, MT_SPECIAL_END, &c->eos);
    if (st == MT_OK && !*c->eos && uses(f, "{eos}"))
        return mt_fail(MT_ERR_INVALID,
                       "chat format '%s' ends an answer with the end-of-text token, but the "
                       "tokenizer has none",
                       f->name);
    for (int32_t i = 0; i < CHAT_MAX_TOKENS && f->tokens[i] && st == MT_OK; i++)
        st = add_token(c, f->tokens[i]);
    return st;
}

/* ---- patterns -------------------------------------------------------------------------------- */

/* Finds the last special token of a pattern, the end-of-turn token; NULL where there is none. */
static const char *find_close(const chat *c, const char *pattern, int64_t *ret_at, int64_t *ret_end)
{
    for (int64_t at = (int64_t)strlen(pattern) - 1; at >= 0; at--) {
        if (strncmp(pattern + at, "{eos}", 5) == 0) {
            *ret_at = at;
            *ret_end = at + 5;
            return c->eos;
        }
        for (int32_t k = 0; k < c->n_tokens; k++)
            if (strncmp(pattern + at, c->token[k].text, (size_t)c->token[k].n) == 0) {
                *ret_at = at;
                *ret_end = at + c->token[k].n;
                return c->token[k].text;
            }
    }
    return NULL;
}

/* The answer begins where the pattern parts from the generation prompt. */
static chat_answer divide(const chat *c, const char *pattern)
{
    chat_answer a = { .pattern = pattern };
    const char *prompt = c->format->prompt ? c->format->prompt : "";
    if (!pattern)
        return a;
    while (prompt[a.begin] && prompt[a.begin] == pattern[a.begin])
        a.begin++;
    a.n = a.close = a.end = (int64_t)strlen(pattern);
    find_close(c, pattern, &a.close, &a.end);
    return a;
}

static void add_stop(chat *c, int32_t id)
{
    for (int64_t i = 0; i < c->n_stops; i++)
        if (c->stops[i] == id)
            return;
    if (id >= 0)
        c->stops[c->n_stops++] = id;
}

static void find_stops(chat *c)
{
    const chat_format *f = c->format;
    int64_t at, end;
    const char *last = find_close(c, f->assistant, &at, &end);
    if (!f->stops[0] && last)
        add_stop(c, c->tokenizer->token_id(c->tokens, last, (int64_t)strlen(last)));
    for (int32_t i = 0; i < CHAT_MAX_STOPS && f->stops[i]; i++)
        add_stop(c, c->tokenizer->token_id(c->tokens, f->stops[i], (int64_t)strlen(f->stops[i])));
    add_stop(c, c->tokenizer->special(c->tokens, MT_SPECIAL_END));
}

/* ---- opening --------------------------------------------------------------------------------- */

static uint64_t hash_format(const chat *c)
{
    const chat_format *f = c->format;
    const char *const all[] = { f->begin,   f->first_system, f->system,    f->default_system,
                                f->joined,  f->user,         f->assistant, f->last,
                                f->thought, f->tools_before, f->tool,      f->tools_after,
                                f->prompt,  c->bos,          c->eos };
    const uint64_t numbers[] = { CHAT_VERSION, (uint64_t)f->placement, (uint64_t)f->thinking,
                                 f->flags };
    uint64_t h = XXH3_64bits(numbers, sizeof numbers);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        h = all[i] ? XXH3_64bits_withSeed(all[i], strlen(all[i]), h + 1) : h * 31;
    return h;
}

static void chat_close(void *self)
{
    chat *c = self;
    if (!c)
        return;
    free(c->bos);
    free(c->eos);
    free(c);
}

/* Opens `builtin`, or `own`, of which a copy is kept; its strings outlive the chat. */
static mt_status open_format(const chat_format *builtin, const chat_format *own,
                             const mt_tokenizer *tokenizer, const void *tokens, void **ret)
{
    chat *c = calloc(1, sizeof *c);
    if (!c)
        return mt_fail_nomem();
    c->tokenizer = tokenizer;
    c->tokens = tokens;
    c->format = builtin;
    if (own) {
        c->custom = *own;
        c->format = &c->custom;
    }
    mt_status st = find_tokens(c);
    if (st != MT_OK) {
        chat_close(c);
        return st;
    }
    c->assistant = divide(c, c->format->assistant);
    c->last = divide(c, c->format->last);
    c->thought = divide(c, c->format->thought);
    find_stops(c);
    c->fingerprint = hash_format(c);
    *ret = c;
    return MT_OK;
}

static mt_status chat_open(const char *format, const mt_tokenizer *tokenizer, const void *tokens,
                           void **ret_chat)
{
    for (const chat_format *f = chat_formats; f->name; f++)
        if (strcmp(f->name, format) == 0)
            return open_format(f, NULL, tokenizer, tokens, ret_chat);
    char known[512] = "";
    size_t n = 0;
    for (const chat_format *f = chat_formats; f->name && n < sizeof known; f++)
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", n ? ", " : "", f->name);
    return mt_fail(MT_ERR_NOT_FOUND, "unknown chat format '%s'; there are %s", format, known);
}

/* ---- the user's own format ------------------------------------------------------------------- */

static mt_status chat_open_custom(const mt_config *format, const mt_tokenizer *tokenizer,
                                  const void *tokens, void **ret_chat)
{
    chat_format own = { .name = "custom" };
    mt_status st = chat_read_own(format, &own);
    return st == MT_OK ? open_format(NULL, &own, tokenizer, tokens, ret_chat) : st;
}

/* ---- the plugin ------------------------------------------------------------------------------ */

static const int32_t *chat_stops(const void *self, int64_t *ret_n)
{
    const chat *c = self;
    *ret_n = c->n_stops;
    return c->stops;
}

static uint64_t chat_fingerprint(const void *self)
{
    return ((const chat *)self)->fingerprint;
}

static const mt_chat interface = {
    .struct_size = sizeof(mt_chat),
    .formats = format_names,
    .identify = chat_identify,
    .open = chat_open,
    .close = chat_close,
    .encode = chat_encode,
    .stops = chat_stops,
    .fingerprint = chat_fingerprint,
    .resembles = chat_resembles,
    .open_custom = chat_open_custom,
    .parse = chat_parse,
};

static mt_status list_formats(void)
{
    for (int32_t i = 0; i < MAX_FORMATS - 1 && chat_formats[i].name; i++)
        format_names[i] = chat_formats[i].name;
    return MT_OK;
}

MT_PLUGIN_WITH("chat", "1.0.0", "Apache-2.0", list_formats, 0, { MT_CHAT_INTERFACE, &interface })
