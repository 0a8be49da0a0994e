/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON files in, by jansson, and the messages about what is wrong in them.
 */
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- messages ------------------------------------------------------------------------------- */

tok_place tok_place_member(tok_place in, const char *key)
{
    tok_place p;
    snprintf(p.s, sizeof p.s, "%.120s%s%.36s", in.s, in.s[0] ? "." : "", key);
    return p;
}

tok_place tok_place_index(tok_place in, size_t i)
{
    tok_place p;
    snprintf(p.s, sizeof p.s, "%.130s[%zu]", in.s, i);
    return p;
}

/* What a value is, in words. */
static void describe(const json_t *v, char ret[96])
{
    const char *kind = "nothing";
    if (v)
        switch (json_typeof(v)) {
        case JSON_OBJECT:
            kind = "an object";
            break;
        case JSON_ARRAY:
            kind = "a list";
            break;
        case JSON_STRING:
            snprintf(ret, 96, "the text '%.60s'", json_string_value(v));
            return;
        case JSON_INTEGER:
            snprintf(ret, 96, "the number %lld", (long long)json_integer_value(v));
            return;
        case JSON_REAL:
            snprintf(ret, 96, "the number %g", json_real_value(v));
            return;
        case JSON_TRUE:
            kind = "true";
            break;
        case JSON_FALSE:
            kind = "false";
            break;
        case JSON_NULL:
            kind = "null";
            break;
        }
    snprintf(ret, 96, "%s", kind);
}

mt_status tok_unexpected(const tok_file *f, tok_place at, const json_t *found, const char *expected)
{
    char what[96];
    describe(found, what);
    return mt_fail(MT_ERR_FORMAT, "%s: %s: found %s, expected %s", f->path, at.s, what, expected);
}

mt_status tok_reject(const tok_file *f, mt_status code, tok_place at, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return mt_fail(code, "%s: %s: %s", f->path, at.s, text);
}

/* ---- members -------------------------------------------------------------------------------- */

bool tok_has(const json_t *in, const char *key)
{
    const json_t *v = json_object_get(in, key);
    return v && !json_is_null(v);
}

mt_status tok_get_object(const tok_file *f, tok_place at, const json_t *in, const char *key,
                         json_t **ret)
{
    json_t *v = json_object_get(in, key);
    if (!json_is_object(v))
        return tok_unexpected(f, tok_place_member(at, key), v, "an object");
    *ret = v;
    return MT_OK;
}

mt_status tok_get_list(const tok_file *f, tok_place at, const json_t *in, const char *key,
                       json_t **ret)
{
    json_t *v = json_object_get(in, key);
    if (!json_is_array(v))
        return tok_unexpected(f, tok_place_member(at, key), v, "a list");
    *ret = v;
    return MT_OK;
}

mt_status tok_get_text(const tok_file *f, tok_place at, const json_t *in, const char *key,
                       tok_text *ret)
{
    const json_t *v = json_object_get(in, key);
    if (!json_is_string(v))
        return tok_unexpected(f, tok_place_member(at, key), v, "a text");
    tok_text t = { json_string_value(v), (int64_t)json_string_length(v) };
    t = tok_arena_copy(&f->t->arena, t);
    if (!t.p)
        return mt_fail_nomem();
    *ret = t;
    return MT_OK;
}

mt_status tok_get_count(const tok_file *f, tok_place at, const json_t *in, const char *key,
                        int64_t *ret)
{
    const json_t *v = json_object_get(in, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return tok_unexpected(f, tok_place_member(at, key), v, "a whole number from 0 on");
    *ret = json_integer_value(v);
    return MT_OK;
}

mt_status tok_get_bool(const tok_file *f, tok_place at, const json_t *in, const char *key,
                       bool *ret)
{
    if (!tok_has(in, key))
        return MT_OK;
    const json_t *v = json_object_get(in, key);
    if (!json_is_boolean(v))
        return tok_unexpected(f, tok_place_member(at, key), v, "true or false");
    *ret = json_is_true(v);
    return MT_OK;
}

/* ---- files ---------------------------------------------------------------------------------- */

/* Read, not mapped: a file that shrinks meanwhile, or that its disk fails to bring, is then an
 * error and no SIGBUS. */
static mt_status read_bytes(const char *path, int fd, size_t n, char *ret)
{
    for (size_t at = 0; at < n;) {
        ssize_t got = pread(fd, ret + at, n - at, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mt_fail(MT_ERR_IO, "%s: cannot read at byte %zu: %s", path, at, strerror(errno));
        if (got == 0)
            return mt_fail(MT_ERR_IO,
                           "%s: has become shorter than the %zu bytes that it had; try again once "
                           "it is complete",
                           path, n);
        at += (size_t)got;
    }
    return MT_OK;
}

static mt_status read_file(const char *path, char **ret, size_t *ret_n)
{
    struct stat st;
    char *bytes = NULL;
    mt_status status = MT_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        status = mt_fail(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO, "%s: cannot open: %s",
                         path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = mt_fail(MT_ERR_INVALID, "%s: not a regular file; expected a JSON file", path);
    else if (st.st_size == 0)
        status = mt_fail(MT_ERR_FORMAT, "%s: empty; expected a JSON object", path);
    else if (!(bytes = malloc((size_t)st.st_size)))
        status = mt_fail_nomem();
    else
        status = read_bytes(path, fd, (size_t)st.st_size, bytes);
    if (fd >= 0)
        close(fd);
    if (status) {
        free(bytes);
        return status;
    }
    *ret = bytes;
    *ret_n = (size_t)st.st_size;
    return MT_OK;
}

mt_status tok_read_json(const char *path, json_t **ret, uint64_t *ret_hash)
{
    char *bytes = NULL;
    size_t n = 0;
    mt_status status = read_file(path, &bytes, &n);
    if (status)
        return status;
    json_error_t error;
    json_t *json = mt_json_loadb(bytes, n, JSON_ALLOW_NUL, &error);
    if (!json)
        status = mt_fail(MT_ERR_FORMAT, "%s:%d:%d: %s; is the file complete?", path, error.line,
                         error.column, error.text);
    else if (!json_is_object(json))
        status =
            mt_fail(MT_ERR_FORMAT, "%s: expected an object at the top, found something else", path);
    if (!status && ret_hash)
        *ret_hash = XXH3_64bits(bytes, n);
    free(bytes);
    if (status)
        json_decref(json);
    else
        *ret = json;
    return status;
}
