/* SPDX-License-Identifier: Apache-2.0
 *
 * How a key of a manifest's `data` section chooses files: a name, a pattern, or a list of them.
 * Every data loader reads such keys in this way.
 */
#ifndef MEGATRAIN_FILES_H
#define MEGATRAIN_FILES_H

#include "report.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A file that was chosen; device and inode tell whether two names mean the same one. */
typedef struct mt_file {
    char *path;
    uint64_t device, inode;
    int64_t size; /* bytes */
} mt_file;

typedef struct mt_files {
    mt_file *items;
    int64_t n, capacity;
} mt_files;

static inline void mt_files_finish(mt_files *l)
{
    for (int64_t i = 0; i < l->n; i++)
        free(l->items[i].path);
    free(l->items);
    l->items = NULL;
    l->n = l->capacity = 0;
}

static inline const mt_file *mt_files_find(const mt_files *l, uint64_t device, uint64_t inode)
{
    for (int64_t i = 0; i < l->n; i++)
        if (l->items[i].device == device && l->items[i].inode == inode)
            return &l->items[i];
    return NULL;
}

static inline mt_status mt_files_append_(const char *path, const struct stat *st, mt_files *l)
{
    if (l->n == l->capacity) {
        int64_t capacity = l->capacity ? 2 * l->capacity : 16;
        mt_file *grown = (mt_file *)realloc(l->items, (size_t)capacity * sizeof *grown);
        if (!grown)
            return mt_fail_nomem();
        l->items = grown;
        l->capacity = capacity;
    }
    size_t n = strlen(path) + 1;
    mt_file *f = &l->items[l->n];
    f->path = (char *)malloc(n);
    if (!f->path)
        return mt_fail_nomem();
    memcpy(f->path, path, n);
    f->device = (uint64_t)st->st_dev;
    f->inode = (uint64_t)st->st_ino;
    f->size = (int64_t)st->st_size;
    l->n++;
    return MT_OK;
}

/* Refuses a name at which there is nothing, and says where it was looked for. */
static inline mt_status mt_files_absent_(const mt_config *c, const char *key, const char *path,
                                         int error)
{
    char folder[4096];
    if (error != ENOENT || *path == '/' || !getcwd(folder, sizeof folder))
        return c->reject(c, key, "'%s': cannot open: %s; expected a file or a pattern", path,
                         strerror(error));
    return c->reject(c, key,
                     "'%s': cannot open: %s, tried %s/%s; data files are relative to the working "
                     "directory ('model' and 'tokenizer' to the manifest)",
                     path, strerror(error), folder, path);
}

/* Appends one file. Named outright, it must be a file with content; found by a pattern, folders and
 * empty files are passed over. */
static inline mt_status mt_files_add_(const mt_config *c, const char *key, const char *path,
                                      bool by_pattern, mt_files *l)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return mt_files_absent_(c, key, path, errno);
    if (S_ISDIR(st.st_mode)) {
        if (by_pattern)
            return MT_OK;
        return c->reject(c, key,
                         "'%s' is a folder; name files, or use a pattern such as '%s/*.txt'", path,
                         path);
    }
    if (!S_ISREG(st.st_mode))
        return c->reject(c, key, "'%s' is not a regular file", path);
    if (st.st_size == 0) {
        if (!by_pattern)
            return c->reject(c, key, "'%s' is empty; expected a file with content", path);
        mt_log(MT_LOG_WARNING, "%s: empty, left out", path);
        return MT_OK;
    }
    if (mt_files_find(l, (uint64_t)st.st_dev, (uint64_t)st.st_ino))
        return c->reject(c, key, "'%s' is named more than once; remove one of the two", path);
    return mt_files_append_(path, &st, l);
}

static inline int mt_files_by_name_(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A name that stands for itself if there is such a file, a pattern otherwise. Matches are sorted by
 * their bytes, so that the order does not depend on the locale. */
static inline mt_status mt_files_add_pattern_(const mt_config *c, const char *key, const char *text,
                                              mt_files *l)
{
    struct stat st;
    if (stat(text, &st) == 0 || !strpbrk(text, "*?["))
        return mt_files_add_(c, key, text, false, l);
    glob_t found;
    int rc = glob(text, GLOB_NOSORT, NULL, &found);
    if (rc == GLOB_NOSPACE)
        return mt_fail_nomem();
    if (rc != 0)
        return c->reject(c, key, "the pattern '%s' matches no file that can be read%s", text,
                         *text == '/' ? "" : " (relative to the working directory)");
    qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, mt_files_by_name_);
    int64_t before = l->n;
    mt_status status = MT_OK;
    for (size_t i = 0; i < found.gl_pathc && !status; i++)
        status = mt_files_add_(c, key, found.gl_pathv[i], true, l);
    globfree(&found);
    if (!status && l->n == before)
        status = c->reject(c, key, "the pattern '%s' matches no file with content", text);
    return status;
}

/* Appends what `key` names, a string or a list of them. What was appended before a failure stays;
 * the list is always the caller's to finish. [main] */
static inline mt_status mt_files_choose(const mt_config *c, const char *key, mt_files *l)
{
    mt_status status = MT_OK;
    const char *text;
    int64_t n = c->has(c, key) ? c->length(c, key) : 0;
    if (n == 0) {
        if (!(status = c->get_string(c, key, &text)))
            return mt_files_add_pattern_(c, key, text, l);
        return status == MT_ERR_INVALID
                   ? c->reject(c, key, "must be a file or a pattern, or a list of at least one")
                   : status;
    }
    for (int64_t i = 0; i < n && !status; i++) {
        char item[96];
        snprintf(item, sizeof item, "%s.%lld", key, (long long)i);
        if (!(status = c->get_string(c, item, &text)))
            status = mt_files_add_pattern_(c, item, text, l);
    }
    return status;
}

/* Fails when a file of `held_out`, chosen by `key`, is among `train`, chosen by `train_key`:
 * validation would measure what was trained on. [main] */
static inline mt_status mt_files_check_apart(const mt_config *c, const mt_files *train,
                                             const char *train_key, const mt_files *held_out,
                                             const char *key)
{
    for (int64_t i = 0; i < held_out->n; i++) {
        const mt_file *f = &held_out->items[i];
        if (mt_files_find(train, f->device, f->inode))
            return c->reject(c, key, "'%s' is among '%s' too; name it in one of the two", f->path,
                             train_key);
    }
    return MT_OK;
}

#ifdef __cplusplus
}
#endif
#endif
