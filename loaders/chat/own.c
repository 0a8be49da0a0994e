/* SPDX-License-Identifier: Apache-2.0
 *
 * A format that the user spells out, key by key, and what can be wrong with one.
 */
#include "chat.h"

/* ---- placeholders ---------------------------------------------------------------------------- */

/* What may stand in braces; of `begin` and the like all but the first. */
static const char *const placeholders[] = { "content", "bos", "eos", NULL };

enum { WORD = 32, SHOWN = 48 };

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/* Letters to insert, delete and substitute until `a` is `b` (Levenshtein). */
static int distance(const char *a, const char *b)
{
    int row[WORD + 1], m = (int)strlen(b);
    for (int j = 0; j <= m; j++)
        row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int above = row[j], same = diagonal + (a[i - 1] != b[j - 1]);
            int beside = (above < row[j - 1] ? above : row[j - 1]) + 1;
            row[j] = same < beside ? same : beside;
            diagonal = above;
        }
    }
    return row[m];
}

/* The placeholder that a word was meant for, NULL where it is like none. */
static const char *find_meant(const char *word, const char *const *names)
{
    const char *nearest = NULL;
    int least = WORD;
    for (; *names; names++) {
        int d = distance(word, *names);
        if (d < least && (2 * d <= (int)strlen(*names) || strstr(word, *names))) {
            least = d;
            nearest = *names;
        }
    }
    return nearest;
}

static mt_status refuse(const mt_config *c, const char *key, const char *found, size_t n,
                        const char *word, const char *const *names)
{
    const char *meant = find_meant(word, names);
    const char *list = names == placeholders ? "{content}, {bos} and {eos}" : "{bos} and {eos}";
    return c->reject(c, key, "has '%.*s', which is no placeholder; %s%s%shere are %s",
                     (int)(n < SHOWN ? n : SHOWN), found, meant ? "did you mean '{" : "",
                     meant ? meant : "", meant ? "}'? T" : "t", list);
}

static bool is_one_of(const char *word, const char *const *names)
{
    while (*names && strcmp(*names, word) != 0)
        names++;
    return *names;
}

/* What looks like a placeholder, or like a line of Jinja, and is none would be taken literally, and
 * trained on. Braces around anything else are text. */
static mt_status check_placeholders(const mt_config *c, const char *key, const char *text,
                                    const char *const *names)
{
    for (const char *p = text; p && (p = strchr(p, '{'));) {
        bool jinja = p[1] == '{' || p[1] == '%';
        const char *inner = p + (jinja ? 2 : 1), *at = inner + strspn(inner, " ");
        char word[WORD + 1];
        size_t n = 0;
        while (is_word(at[n]) && n < WORD) {
            word[n] = at[n];
            n++;
        }
        word[n] = '\0';
        const char *end = at + n + strspn(at + n, " ");
        bool braced = n > 0 && *end == '}';
        if (!jinja && !braced) {
            p++;
            continue;
        }
        if (jinja || at != inner || end != at + n || !is_one_of(word, names)) {
            const char *close = strchr(p, '}');
            size_t whole = close ? (size_t)(close - p) + 1 + (jinja && close[1] == '}') : strlen(p);
            return refuse(c, key, p, whole, word, names);
        }
        p = end + 1;
    }
    return MT_OK;
}

/* ---- keys ------------------------------------------------------------------------------------ */

static mt_status check_message(const mt_config *c, const char *key, const char *text)
{
    mt_status st = check_placeholders(c, key, text, placeholders);
    if (st || !text || strstr(text, "{content}"))
        return st;
    return c->reject(c, key, "has no {content}, so that nothing of the message would remain");
}

/* What stands around messages. */
static mt_status check_frame(const mt_config *c, const char *key, const char *text)
{
    return check_placeholders(c, key, text, placeholders + 1);
}

mt_status chat_read_own(const mt_config *c, chat_format *f)
{
    mt_status st;
    const char *end = NULL;
    bool trim = false;
    if ((st = mt_config_string(c, "begin", NULL, &f->begin)) ||
        (st = mt_config_string(c, "system", NULL, &f->system)) ||
        (st = c->get_string(c, "user", &f->user)) ||
        (st = c->get_string(c, "assistant", &f->assistant)) ||
        (st = mt_config_string(c, "generation_prompt", NULL, &f->prompt)) ||
        (st = mt_config_string(c, "end_of_turn", "{eos}", &end)) ||
        (st = mt_config_bool(c, "trim", false, &trim)) ||
        (st = check_frame(c, "begin", f->begin)) || (st = check_message(c, "system", f->system)) ||
        (st = check_message(c, "user", f->user)) ||
        (st = check_message(c, "assistant", f->assistant)) ||
        (st = check_frame(c, "generation_prompt", f->prompt)) ||
        (st = check_frame(c, "end_of_turn", end)))
        return st;
    const char *content = strstr(f->assistant, "{content}");
    if (!strstr(content, end))
        return c->reject(c, "assistant",
                         "does not have '%s' after {content}: the model would never learn to end "
                         "its turn; add it, or name another token in end_of_turn",
                         end);
    if (f->prompt && (strlen(f->prompt) > (size_t)(content - f->assistant) ||
                      strncmp(f->prompt, f->assistant, strlen(f->prompt)) != 0))
        return c->reject(c, "generation_prompt",
                         "is not how 'assistant' begins; what it gives must come before {content}");
    if (strcmp(end, "{eos}") != 0)
        f->tokens[0] = end;
    f->placement = f->system ? CHAT_SYSTEM_TURN : CHAT_SYSTEM_NONE;
    f->flags = trim ? CHAT_TRIM_SYSTEM | CHAT_TRIM_USER | CHAT_TRIM_ASSISTANT : 0;
    return MT_OK;
}
