/* SPDX-License-Identifier: Apache-2.0
 *
 * Edit distance in three rows; sizes with units; texts.
 */
#include "text.h"

#include <stdio.h>
#include <stdlib.h>

enum { WORD_MAX = 63 };

static int32_t least(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

int32_t text_distance(const char *a, const char *b)
{
    int32_t n = (int32_t)strnlen(a, WORD_MAX), m = (int32_t)strnlen(b, WORD_MAX);
    int32_t rows[3][WORD_MAX + 1];
    int32_t *before = rows[0], *last = rows[1], *row = rows[2];

    for (int32_t j = 0; j <= m; j++)
        last[j] = j;
    for (int32_t i = 1; i <= n; i++) {
        row[0] = i;
        for (int32_t j = 1; j <= m; j++) {
            row[j] = least(last[j - 1] + (a[i - 1] != b[j - 1]), least(last[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = least(row[j], before[j - 2] + 1);
        }
        int32_t *free_row = before;
        before = last;
        last = row;
        row = free_row;
    }
    return last[m];
}

int64_t text_nearest(const char *word, const char *const *candidates, int64_t n)
{
    int64_t best = -1;
    int32_t best_distance = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!candidates[i])
            continue;
        int32_t length = (int32_t)strnlen(word, WORD_MAX);
        int32_t other = (int32_t)strnlen(candidates[i], WORD_MAX);
        int32_t allowed = (length > other ? length : other) / 3;
        int32_t distance = text_distance(word, candidates[i]);
        if (distance > (allowed > 1 ? allowed : 1) || distance >= other)
            continue;
        if (best < 0 || distance < best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    return best;
}

bool text_bytes(const char *text, int64_t *ret)
{
    static const struct {
        const char *name;
        double bytes;
    } units[] = {
        { "B", 1 },        { "KB", 1e3 },     { "MB", 1e6 },     { "GB", 1e9 },     { "TB", 1e12 },
        { "KiB", 0x1p10 }, { "MiB", 0x1p20 }, { "GiB", 0x1p30 }, { "TiB", 0x1p40 },
    };
    size_t digits = strspn(text, "0123456789.");
    char *end;
    double value = strtod(text, &end);
    if (digits == 0 || end != text + digits)
        return false;
    end += strspn(end, " ");
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        double bytes = value * units[i].bytes;
        if (strcmp(end, units[i].name) == 0 && bytes < 0x1p63) {
            *ret = (int64_t)bytes;
            return true;
        }
    }
    return false;
}

size_t text_drop_mark(char *text, size_t n)
{
    static const char mark[] = "\xef\xbb\xbf";
    const size_t k = sizeof mark - 1;
    if (n < k || memcmp(text, mark, k) != 0)
        return n;
    memmove(text, text + k, n - k + 1);
    return n - k;
}

void text_append(char *text, size_t size, const char *fmt, ...)
{
    size_t n = strlen(text);
    va_list args;
    va_start(args, fmt);
    vsnprintf(text + n, size - n, fmt, args);
    va_end(args);
}
