/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading an answer: what a model wrote after the generation prompt, whole or as far as it has
 * come, by the patterns that rendering uses.
 */
#include "chat.h"

typedef struct part {
    const char *p;
    int64_t n;
} part;

/* The literal parts of an answer's pattern. */
typedef struct shape {
    part before; /* the first of {reasoning} and {content} */
    part between;
    part after; /* the content, up to the end-of-turn token */
    bool thinks;
} shape;

static shape shape_of(const chat_answer *a)
{
    static const char content[] = "{content}", reasoning[] = "{reasoning}";
    const char *start = a->pattern + a->begin, *close = a->pattern + a->close;
    const char *c = strstr(start, content), *r = strstr(start, reasoning);
    shape s = { .thinks = r && r < c };
    if (s.thinks) {
        s.before = (part){ start, r - start };
        r += sizeof reasoning - 1;
        s.between = (part){ r, c - r };
    } else {
        s.before = (part){ start, c - start };
    }
    c += sizeof content - 1;
    s.after = (part){ c, close - c };
    return s;
}

static bool starts_with(part text, part with)
{
    return text.n >= with.n && memcmp(text.p, with.p, (size_t)with.n) == 0;
}

/* Could the text become one that starts so? */
static bool may_start_with(part text, part with)
{
    return text.n < with.n && memcmp(text.p, with.p, (size_t)text.n) == 0;
}

/* Without what may be the beginning of `next`. */
static part hold_back(part text, part next)
{
    for (int64_t k = next.n < text.n ? next.n : text.n; k > 0; k--)
        if (memcmp(text.p + text.n - k, next.p, (size_t)k) == 0)
            return (part){ text.p, text.n - k };
    return text;
}

static void set_content(mt_message *ret, part text, const shape *s)
{
    text = hold_back(text, s->after);
    ret->content = text.p;
    ret->n_content = text.n;
}

/* Reads `rest`, what follows the start of a thought. */
static void parse_thought(part rest, const shape *s, mt_message *ret)
{
    const char *end = memmem(rest.p, (size_t)rest.n, s->between.p, (size_t)s->between.n);
    part thought = end ? (part){ rest.p, end - rest.p } : hold_back(rest, s->between);
    ret->reasoning = thought.p;
    ret->n_reasoning = thought.n;
    if (end)
        set_content(ret, (part){ end + s->between.n, rest.p + rest.n - end - s->between.n }, s);
}

void chat_parse(const void *self, const char *p, int64_t n, mt_message *ret)
{
    const chat *c = self;
    const chat_answer *patterns[] = { &c->thought, &c->assistant };
    const char *prompt = c->format->prompt ? c->format->prompt : "";
    part text = { p, n };
    *ret = (mt_message){ .role = "assistant", .content = p };
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        if (!patterns[i]->pattern)
            continue;
        shape s = shape_of(patterns[i]);
        if (s.thinks && prompt[patterns[i]->begin])
            continue; /* the prompt has closed the thought */
        if (may_start_with(text, s.before))
            return;
        bool starts = starts_with(text, s.before);
        part rest = { p + s.before.n, n - s.before.n };
        if (s.thinks && starts) {
            parse_thought(rest, &s, ret);
            return;
        }
        if (!s.thinks)
            set_content(ret, starts ? rest : text, &s);
    }
}
