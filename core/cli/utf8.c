/* SPDX-License-Identifier: Apache-2.0
 *
 * An incremental UTF-8 decoder (Unicode 15, table 3-7: no overlong forms, no surrogates).
 */
#include "utf8.h"

#include <string.h>

/* Bytes of the character that starts with `lead`; 0 when none does. */
static int length_of(unsigned char lead)
{
    if (lead < 0x80)
        return 1;
    if (lead >= 0xc2 && lead <= 0xdf)
        return 2;
    if (lead >= 0xe0 && lead <= 0xef)
        return 3;
    return lead >= 0xf0 && lead <= 0xf4 ? 4 : 0;
}

/* May `byte` come second after `lead`, or later? */
static int continues(unsigned char lead, int at, unsigned char byte)
{
    unsigned char low = 0x80, high = 0xbf;
    if (at == 1) {
        low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : low;
        high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : high;
    }
    return byte >= low && byte <= high;
}

/* C0, DEL and C1. */
static bool is_control(const utf8_stream *s)
{
    unsigned char a = s->held[0];
    if (s->n == 1)
        return (a < 0x20 && a != '\n' && a != '\t') || a == 0x7f;
    return s->n == 2 && a == 0xc2 && s->held[1] < 0xa0;
}

static int replacement(char *ret)
{
    memcpy(ret, "\xef\xbf\xbd", 3);
    return 3;
}

int utf8_end(utf8_stream *s, char *ret)
{
    int n = s->n > 0 ? replacement(ret) : 0;
    s->n = 0;
    return n;
}

int utf8_put(utf8_stream *s, unsigned char byte, char *ret)
{
    int n = 0;
    if (s->n > 0 && !continues(s->held[0], s->n, byte))
        n = utf8_end(s, ret);
    if (s->n == 0 && length_of(byte) == 0)
        return n + replacement(ret + n);
    s->held[s->n & 3] = byte; /* n < 4: a fourth byte always completes */
    s->n++;
    if (s->n == length_of(s->held[0])) {
        if (s->for_terminal && is_control(s))
            return n + utf8_end(s, ret + n);
        memcpy(ret + n, s->held, (size_t)s->n);
        n += s->n;
        s->n = 0;
    }
    return n;
}
