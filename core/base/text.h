/* SPDX-License-Identifier: Apache-2.0
 *
 * How alike two words are: what "did you mean" needs; sizes as people write them; how texts begin,
 * and how they grow.
 */
#ifndef MT_CORE_TEXT_H
#define MT_CORE_TEXT_H

#include <megatrain/base.h>

/* Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b` (optimal
 * string alignment). Words are cut to 63 bytes. [pure] */
int32_t text_distance(const char *a, const char *b);

/* Index of the candidate nearest to `word`, the first of equals; -1 when none is so near that it
 * was likely meant (at most a third of the longer word's letters differ, and at least one may).
 * NULL candidates are passed over. [pure] */
int64_t text_nearest(const char *word, const char *const *candidates, int64_t n);

/* Reads a size in bytes: a number and a unit, such as 24GiB, 512MB or 100 B. [pure] */
bool text_bytes(const char *text, int64_t *ret);

/* Takes the mark of byte order (U+FEFF) that some editors write off the start of a text of UTF-8,
 * to which it does not belong; the NUL behind the n bytes moves along. Returns what is left of n.
 * [pure] */
size_t text_drop_mark(char *text, size_t n);

/* Appends to a string that has `size` bytes of room; what does not fit is cut. */
void text_append(char *text, size_t size, const char *fmt, ...) MT_PRINTF(3, 4);

#endif
