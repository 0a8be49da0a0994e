/* SPDX-License-Identifier: Apache-2.0
 *
 * Text that arrives in bytes, shown as valid UTF-8.
 */
#ifndef MT_CORE_UTF8_H
#define MT_CORE_UTF8_H

#include <stdbool.h>

/* Bytes of a character that is not complete yet. Starts as { .for_terminal = ... }. */
typedef struct utf8_stream {
    bool for_terminal; /* control characters, which could take the terminal over, are shown as
                          U+FFFD too, but for new lines and tabs */
    unsigned char held[4];
    int n;
} utf8_stream;

enum { UTF8_ROOM = 12 };

/* Takes one byte and writes what can be shown now, at most UTF8_ROOM bytes, to `ret`: whole
 * characters, and U+FFFD for bytes that belong to none. Returns how many bytes. [pure] */
int utf8_put(utf8_stream *s, unsigned char byte, char *ret);

/* The stream is over: what to show for a character that was cut. */
int utf8_end(utf8_stream *s, char *ret);

#endif
