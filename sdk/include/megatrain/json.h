/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading JSON that other programs wrote, by jansson (2.11 or later; who includes this links it).
 *
 * jansson refuses a whole file for one integer of more than 64 bits, and such integers are common:
 * tokenizer_config.json has "model_max_length": 1000000000000000019884624838656 wherever no length
 * was set. Here they become reals. A whole number that fits stays one, so that who expects a whole
 * number refuses exactly those that do not.
 */
#ifndef MEGATRAIN_JSON_H
#define MEGATRAIN_JSON_H

#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Is the number at p, `n` characters long, an integer that needs more than 64 bits? */
static inline bool mt_json_is_wide_(const char *p, size_t n)
{
    size_t sign = *p == '-';
    for (size_t i = sign; i < n; i++)
        if (p[i] < '0' || p[i] > '9')
            return false;
    if (n - sign < 19)
        return false;
    errno = 0;
    (void)strtoll(p, NULL, 10); /* ends where the digits do */
    return errno == ERANGE;
}

/* Writes the last two digits of every such integer as "e2": 18 or more digits stay, all that a
 * double tells apart but for the last bit, and places in messages stay right. A NUL follows text.
 */
static inline void mt_json_narrow_(char *text, size_t n)
{
    for (size_t i = 0; i < n;) {
        if (text[i] == '"') {
            for (i++; i < n && text[i] != '"'; i++)
                i += text[i] == '\\';
            i++;
            continue;
        }
        size_t start = i;
        while (i < n && text[i] && strchr("+-.0123456789eE", text[i]))
            i++;
        if (i == start)
            i++;
        else if (mt_json_is_wide_(text + start, i - start))
            memcpy(text + i - 2, "e2", 2);
    }
}

/* As json_loadb, but for integers of more than 64 bits. Text without them is read once, as fast as
 * by jansson. `error` is not NULL. [any] */
static inline json_t *mt_json_loadb(const char *text, size_t n, size_t flags, json_error_t *error)
{
    json_t *root = json_loadb(text, n, flags, error);
    if (root || json_error_code(error) != json_error_numeric_overflow)
        return root;
    char *copy = (char *)malloc(n + 1);
    if (!copy)
        return NULL;
    memcpy(copy, text, n);
    copy[n] = '\0';
    mt_json_narrow_(copy, n);
    root = json_loadb(copy, n, flags, error);
    free(copy);
    return root;
}

/* A file's content; NULL, with errno, when it cannot be read. */
static inline char *mt_json_content_(const char *path, size_t *ret_n)
{
    char *text = NULL;
    size_t n = 0, room = 0;
    bool good = false;
    FILE *f = fopen(path, "rb");
    if (!f)
        return NULL;
    for (;;) {
        if (n == room) {
            room = room ? 2 * room : 65536;
            char *grown = (char *)realloc(text, room);
            if (!grown)
                break;
            text = grown;
        }
        size_t got = fread(text + n, 1, room - n, f);
        n += got;
        if (got == 0) {
            good = !ferror(f);
            break;
        }
    }
    int e = errno;
    fclose(f);
    if (good) {
        *ret_n = n;
        return text;
    }
    free(text);
    errno = e;
    return NULL;
}

/* As json_load_file, but for integers of more than 64 bits. `error` is not NULL; where the file
 * cannot be read its text says why, and its line is 0. [any] */
static inline json_t *mt_json_load_file(const char *path, size_t flags, json_error_t *error)
{
    size_t n = 0;
    char *text = mt_json_content_(path, &n);
    if (!text) {
        memset(error, 0, sizeof *error);
        snprintf(error->text, sizeof error->text, "cannot read: %s", strerror(errno));
        return NULL;
    }
    json_t *root = mt_json_loadb(text, n, flags, error);
    free(text);
    return root;
}

/* "PATH:LINE:COLUMN", or PATH alone where nothing was read, behind which error->text fits. Returns
 * `ret`. [pure] */
static inline const char *mt_json_place(const char *path, const json_error_t *error, char *ret,
                                        size_t size)
{
    if (error->line > 0)
        snprintf(ret, size, "%s:%d:%d", path, error->line, error->column);
    else
        snprintf(ret, size, "%s", path);
    return ret;
}

#ifdef __cplusplus
}
#endif
#endif
