/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of loaders share: a configuration made of "key", "value" pairs, what a shuffled
 * order looks like, temporary folders and small files.
 */
#ifndef TEST_DATA_SUPPORT_H
#define TEST_DATA_SUPPORT_H

#include "../../core/base/log.h"
#include "../../core/base/status.h"
#include "../check.h"
#include "../plugin.h"

#include <ftw.h>
#include <megatrain/loader.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- a configuration: NULL-terminated "key", "value" pairs; lists as "key.0", "key.1" -------- */

typedef struct support_config {
    mt_config base;
    const char *const *pairs;
} support_config;

static inline const char *support_value(const mt_config *c, const char *key)
{
    const char *const *p = ((const support_config *)c)->pairs;
    for (; *p; p += 2)
        if (strcmp(p[0], key) == 0)
            return p[1];
    return NULL;
}

/* Elements of a list; those of a list of maps are "key.0.name" and so on. */
static inline int64_t support_length(const mt_config *c, const char *key)
{
    int64_t n = 0;
    for (;; n++) {
        char item[128];
        int k = snprintf(item, sizeof item, "%s.%d", key, (int)n);
        const char *const *p = ((const support_config *)c)->pairs;
        while (*p && (strncmp(p[0], item, (size_t)k) != 0 || (p[0][k] && p[0][k] != '.')))
            p += 2;
        if (!*p)
            return n;
    }
}

static inline bool support_is_null(const mt_config *c, const char *key)
{
    const char *v = support_value(c, key);
    return v && strcmp(v, "null") == 0;
}

/* A value, or a list or a map with something in it. */
static inline bool support_has(const mt_config *c, const char *key)
{
    const char *const *p = ((const support_config *)c)->pairs;
    size_t n = strlen(key);
    for (; *p; p += 2)
        if (strncmp(p[0], key, n) == 0 && p[0][n] == '.')
            return true;
    return support_value(c, key) && !support_is_null(c, key);
}

static inline mt_status support_get_string(const mt_config *c, const char *key, const char **ret)
{
    const char *v = support_value(c, key);
    if (!v)
        return status_set(MT_ERR_NOT_FOUND, "test.yaml: no '%s'", key);
    *ret = v;
    return MT_OK;
}

static inline mt_status support_get_float(const mt_config *c, const char *key, double *ret)
{
    const char *v = support_value(c, key);
    if (!v)
        return status_set(MT_ERR_NOT_FOUND, "test.yaml: no '%s'", key);
    *ret = strtod(v, NULL);
    return MT_OK;
}

static inline mt_status support_get_int(const mt_config *c, const char *key, int64_t *ret)
{
    const char *v = support_value(c, key);
    if (!v)
        return status_set(MT_ERR_NOT_FOUND, "test.yaml: no '%s'", key);
    *ret = strtoll(v, NULL, 10);
    return MT_OK;
}

static inline mt_status support_get_bool(const mt_config *c, const char *key, bool *ret)
{
    const char *v = support_value(c, key);
    if (!v)
        return status_set(MT_ERR_NOT_FOUND, "test.yaml: no '%s'", key);
    *ret = strcmp(v, "true") == 0;
    return MT_OK;
}

static inline mt_status support_reject(const mt_config *c, const char *key, const char *fmt, ...)
{
    (void)c;
    va_list args;
    va_start(args, fmt);
    status_vset(MT_ERR_INVALID, fmt, args);
    va_end(args);
    return status_prefix(MT_ERR_INVALID, "test.yaml: %s", key);
}

static inline support_config support_make_config(const char *const *pairs)
{
    return (support_config){ .base = { .struct_size = sizeof(mt_config),
                                       .has = support_has,
                                       .get_int = support_get_int,
                                       .get_float = support_get_float,
                                       .get_bool = support_get_bool,
                                       .get_string = support_get_string,
                                       .length = support_length,
                                       .reject = support_reject,
                                       .is_null = support_is_null },
                             .pairs = pairs };
}

#define SUPPORT_CONFIG(...)                                                                        \
    support_make_config((const char *const[]){ "", "", ##__VA_ARGS__, NULL })

/* ---- orders --------------------------------------------------------------------------------- */

/* The n ids of an epoch are a permutation, and look like a random one: of 103 such has one fixed
 * point and one successor in the mean. */
static inline void support_check_shuffled(const int64_t *ids, int n, int epoch)
{
    int fixed = 0, follows = 0;
    char *seen = calloc((size_t)n, 1);
    for (int i = 0; seen && i < n; i++) {
        bool known = ids[i] >= 0 && ids[i] < n;
        CHECK(known && !seen[ids[i]], "epoch %d: %d", epoch, (int)ids[i]);
        if (known)
            seen[ids[i]] = 1;
        fixed += ids[i] == i;
        follows += i > 0 && ids[i] == ids[i - 1] + 1;
    }
    CHECK(seen && fixed < 8 && follows < 8, "epoch %d: %d in place, %d in a row", epoch, fixed,
          follows);
    free(seen);
}

/* ---- files ---------------------------------------------------------------------------------- */

static inline int support_remove_(const char *path, const struct stat *st, int flag, struct FTW *f)
{
    (void)st;
    (void)flag;
    (void)f;
    return remove(path);
}

static inline void support_remove(const char *folder)
{
    nftw(folder, support_remove_, 16, FTW_DEPTH | FTW_PHYS);
}

/* Makes a new empty folder and enters it; the caller leaves with support_leave. */
static inline void support_enter(char path[64])
{
    snprintf(path, 64, "/tmp/megatrain-test-XXXXXX");
    if (!mkdtemp(path) || chdir(path) < 0) {
        perror(path);
        exit(1);
    }
}

static inline void support_leave(const char *path)
{
    if (chdir("/") == 0)
        support_remove(path);
}

static inline void support_write(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || (n && fwrite(data, 1, n, f) != n) || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

static inline char *support_read(const char *path, size_t *ret_n)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        exit(1);
    }
    fseek(f, 0, SEEK_END);
    size_t n = (size_t)ftell(f);
    rewind(f);
    char *data = malloc(n + 1);
    if (fread(data, 1, n, f) != n)
        exit(1);
    data[n] = '\0';
    fclose(f);
    *ret_n = n;
    return data;
}

static inline bool support_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

/* Does the error text hold every one of these pieces? */
static inline bool support_says(const char *piece)
{
    bool yes = strstr(status_text(), piece) != NULL;
    if (!yes)
        fprintf(stderr, "the text was: %s\n", status_text());
    return yes;
}

#endif
