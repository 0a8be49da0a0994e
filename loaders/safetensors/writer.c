/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing safetensors: tensors in order, straight to the file, never more than the caller's piece
 * in memory. Files carry temporary names until finish, which makes them durable and renames them.
 */
#include "safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WRITEBACK = 64 << 20 };

typedef struct st_out {
    char *name;       /* final name in the folder */
    char *temp;       /* its name until finish */
    int64_t first, n; /* tensors of the list */
    bool made;        /* `temp` exists */
} st_out;

typedef struct st_writer {
    char *folder, *stem;
    int dir; /* the folder */
    mt_tensor_info *list;
    int64_t n;
    st_out *files; /* shards in order; the index, where there is one, is last */
    int32_t n_files, n_shards;
    int32_t shard;           /* being written */
    int fd;                  /* of `shard`, -1 when it is not open */
    int64_t flushed, size;   /* bytes of `shard`: on their way to the disk, written */
    int64_t tensor, written; /* next byte: of which tensor, how many it already has */
    bool failed;
} st_writer;

static mt_status io_fail(const st_writer *w, const char *file, const char *doing)
{
    int e = errno;
    bool full = e == ENOSPC || e == EDQUOT || e == EFBIG;
    return mt_fail(MT_ERR_IO, "%s/%s: cannot %s: %s%s", w->folder, file, doing, strerror(e),
                   full ? "; free some space or choose another folder" : "");
}

static mt_status write_all(const st_writer *w, int fd, const char *file, const void *data, size_t n)
{
    const char *p = data;
    while (n > 0) {
        ssize_t put = write(fd, p, n > (1u << 30) ? 1u << 30 : n);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0) {
            if (put == 0)
                errno = EIO;
            return io_fail(w, file, "write");
        }
        p += put;
        n -= (size_t)put;
    }
    return MT_OK;
}

/* Durable, then closed. Some file systems report a failed write only here. The pages are given
 * back: nobody reads them soon, and at a save memory is short. */
static mt_status sync_close(const st_writer *w, int fd, const char *file)
{
    mt_status status = fsync(fd) < 0 ? io_fail(w, file, "flush") : MT_OK;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (close(fd) < 0 && !status)
        status = io_fail(w, file, "close");
    return status;
}

/* ---- laying out the shards ------------------------------------------------------------------ */

static mt_status check_list(const mt_tensor_info *list, int64_t n)
{
    mt_status status = MT_OK;
    json_t *names = json_object();
    if (!names)
        return mt_fail_nomem();
    for (int64_t i = 0; i < n && !status; i++) {
        const mt_tensor_info *t = &list[i];
        int64_t bytes = mt_dtype_size(t->dtype);
        bool bad = !t->name || !*t->name || strcmp(t->name, ST_METADATA) == 0 || t->ndim < 0 ||
                   t->ndim > MT_TENSOR_MAX_DIMS || !st_dtype_by_dtype(t->dtype);
        for (int32_t d = 0; !bad && d < t->ndim; d++)
            bad = t->dim[d] < 0 || __builtin_mul_overflow(bytes, t->dim[d], &bytes);
        if (bad || bytes != t->bytes)
            status =
                mt_fail(MT_ERR_INVALID,
                        "safetensors: tensor %lld ('%s') cannot be written: name, dtype, shape "
                        "or its %lld bytes are not consistent",
                        (long long)i, t->name ? t->name : "", (long long)t->bytes);
        else if (json_object_get(names, t->name))
            status = mt_fail(MT_ERR_INVALID, "safetensors: tensor '%s' is listed twice", t->name);
        else if (json_object_set_new(names, t->name, json_true()) < 0)
            status = mt_fail(MT_ERR_INVALID, "safetensors: name of tensor %lld is not UTF-8",
                             (long long)i);
    }
    json_decref(names);
    return status;
}

/* Cuts the list into shards and names all files. A tensor larger than a shard gets its own. */
static mt_status lay_out(st_writer *w, int64_t shard_bytes)
{
    w->files = calloc((size_t)w->n + 2, sizeof *w->files);
    if (!w->files)
        return mt_fail_nomem();
    int64_t bytes = 0;
    w->n_shards = 1;
    for (int64_t i = 0; i < w->n; i++) {
        st_out *f = &w->files[w->n_shards - 1];
        if (shard_bytes > 0 && f->n > 0 && w->list[i].bytes > shard_bytes - bytes) {
            f = &w->files[w->n_shards++];
            f->first = i;
            bytes = 0;
        }
        f->n++;
        bytes += w->list[i].bytes;
    }
    w->n_files = w->n_shards + (w->n_shards > 1);
    for (int32_t i = 0; i < w->n_files; i++) {
        st_out *f = &w->files[i];
        if (w->n_shards == 1)
            f->name = st_format("%s" ST_SUFFIX, w->stem);
        else if (i < w->n_shards)
            f->name = st_format("%s-%05d-of-%05d" ST_SUFFIX, w->stem, i + 1, w->n_shards);
        else
            f->name = st_format("%s" ST_INDEX_SUFFIX, w->stem);
        f->temp = f->name ? st_format("%s.tmp-%ld", f->name, (long)getpid()) : NULL;
        if (!f->temp)
            return MT_ERR_NOMEM;
    }
    return MT_OK;
}

static json_t *tensor_entry(const mt_tensor_info *t, int64_t begin)
{
    json_t *shape = json_array();
    for (int32_t d = 0; d < t->ndim; d++)
        json_array_append_new(shape, json_integer(t->dim[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", st_dtype_by_dtype(t->dtype)->name, "shape",
                     shape, "data_offsets", (json_int_t)begin, (json_int_t)(begin + t->bytes));
}

static char *header_text(const st_writer *w, const st_out *f)
{
    char *text = NULL;
    int64_t at = 0;
    json_t *header = json_pack("{s:{s:s}}", ST_METADATA, "format", "pt");
    bool ok = header != NULL;
    for (int64_t i = f->first; ok && i < f->first + f->n; i++) {
        ok = json_object_set_new(header, w->list[i].name, tensor_entry(&w->list[i], at)) == 0;
        at += w->list[i].bytes;
    }
    if (ok)
        text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    return text;
}

/* ---- writing -------------------------------------------------------------------------------- */

static mt_status create_file(st_writer *w, st_out *f, int *ret_fd)
{
    int fd = openat(w->dir, f->temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return io_fail(w, f->temp, "create");
    f->made = true;
    *ret_fd = fd;
    return MT_OK;
}

static mt_status start_shard(st_writer *w)
{
    st_out *f = &w->files[w->shard];
    w->flushed = w->size = 0;
    mt_status status = create_file(w, f, &w->fd);
    if (status)
        return status;
    char *text = header_text(w, f);
    if (!text)
        return mt_fail_nomem();
    /* Spaces make the data start at a multiple of 8. */
    size_t used = strlen(text), padded = (used + 7) / 8 * 8;
    if (padded > ST_MAX_HEADER) {
        free(text);
        return mt_fail(MT_ERR_UNSUPPORTED,
                       "%s/%s: header of %zu bytes, the format allows %u; write smaller shards",
                       w->folder, f->name, padded, ST_MAX_HEADER);
    }
    uint8_t head[8];
    for (int i = 0; i < 8; i++)
        head[i] = (uint8_t)((uint64_t)padded >> (8 * i));
    status = write_all(w, w->fd, f->name, head, sizeof head);
    if (!status)
        status = write_all(w, w->fd, f->name, text, used);
    if (!status)
        status = write_all(w, w->fd, f->name, "       ", padded - used);
    free(text);
    return status;
}

/* Keeps the disk busy all the time, instead of letting dirty pages pile up until fsync. Only a
 * hint: its failure means nothing. */
static void start_writeback(st_writer *w, int64_t n)
{
    w->size += n;
    if (w->size - w->flushed < WRITEBACK)
        return;
    sync_file_range(w->fd, w->flushed, w->size - w->flushed, SYNC_FILE_RANGE_WRITE);
    w->flushed = w->size;
}

/* Closes the shards that are complete, skips empty tensors, and opens the next shard if there is
 * one. Afterwards `tensor` wants at least one byte, or everything is written. */
static mt_status advance(st_writer *w)
{
    mt_status status = MT_OK;
    for (;;) {
        while (w->tensor < w->n && w->written == w->list[w->tensor].bytes) {
            /* An empty tensor may be the only one of a shard that is not there yet. */
            if (w->tensor >= w->files[w->shard].first + w->files[w->shard].n)
                break;
            w->tensor++;
            w->written = 0;
        }
        st_out *f = &w->files[w->shard];
        if (w->tensor < f->first + f->n || w->fd < 0)
            return status;
        status = sync_close(w, w->fd, f->name);
        w->fd = -1;
        if (status || ++w->shard == w->n_shards)
            return status;
        if ((status = start_shard(w)))
            return status;
    }
}

mt_status st_create(const char *folder, const char *stem, const mt_tensor_info *list, int64_t n,
                    int64_t shard_bytes, void **ret_writer)
{
    if (!*stem || strchr(stem, '/') || n < 0 || shard_bytes < 0)
        return mt_fail(MT_ERR_INVALID,
                       "safetensors: cannot write files named from '%s'; expected a name without "
                       "'/', and sizes >= 0",
                       stem);
    mt_status status = check_list(list, n);
    if (status)
        return status;
    st_writer *w = calloc(1, sizeof *w);
    if (!w)
        return mt_fail_nomem();
    w->dir = w->fd = -1;
    w->n = n;
    w->folder = st_format("%s", folder);
    w->stem = st_format("%s", stem);
    w->list = calloc((size_t)n + 1, sizeof *w->list);
    if (!w->folder || !w->stem || !w->list) {
        status = mt_fail_nomem();
        goto out;
    }
    if (n)
        memcpy(w->list, list, (size_t)n * sizeof *list);
    w->dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (w->dir < 0) {
        status = mt_fail(MT_ERR_IO, "%s: cannot open the folder: %s", folder, strerror(errno));
        goto out;
    }
    if ((status = lay_out(w, shard_bytes)))
        goto out;
    if ((status = start_shard(w)))
        goto out;
    status = advance(w);
out:
    if (status)
        st_abort(w);
    else
        *ret_writer = w;
    return status;
}

mt_status st_write(void *writer, int64_t index, const void *data, int64_t n)
{
    st_writer *w = writer;
    if (w->failed)
        return mt_fail(MT_ERR_INVALID, "%s: an earlier write failed", w->folder);
    if (n == 0)
        return MT_OK;
    if (n < 0 || index != w->tensor || w->tensor >= w->n ||
        n > w->list[w->tensor].bytes - w->written) {
        w->failed = true;
        return mt_fail(MT_ERR_INVALID,
                       "%s: %lld bytes given for tensor %lld; expected tensor %lld, which lacks "
                       "%lld bytes",
                       w->folder, (long long)n, (long long)index, (long long)w->tensor,
                       w->tensor < w->n ? (long long)(w->list[w->tensor].bytes - w->written) : 0);
    }
    mt_status status = write_all(w, w->fd, w->files[w->shard].name, data, (size_t)n);
    w->written += n;
    start_writeback(w, n);
    if (!status)
        status = advance(w);
    w->failed = status != MT_OK;
    return status;
}

/* ---- finishing ------------------------------------------------------------------------------ */

static mt_status write_index(st_writer *w)
{
    st_out *f = &w->files[w->n_shards];
    mt_status status = MT_OK;
    char *text = NULL;
    int fd = -1;
    int64_t total = 0;
    json_t *map = json_object();
    json_t *root = json_object();
    bool ok = map && root;
    for (int32_t s = 0; s < w->n_shards; s++)
        for (int64_t i = w->files[s].first; ok && i < w->files[s].first + w->files[s].n; i++) {
            total += w->list[i].bytes;
            ok = json_object_set_new(map, w->list[i].name, json_string(w->files[s].name)) == 0;
        }
    ok = ok &&
         json_object_set_new(root, "metadata",
                             json_pack("{s:I}", "total_size", (json_int_t)total)) == 0 &&
         json_object_set(root, "weight_map", map) == 0;
    if (ok)
        text = json_dumps(root, JSON_INDENT(2));
    json_decref(map);
    json_decref(root);
    if (!text)
        return mt_fail_nomem();
    if ((status = create_file(w, f, &fd)))
        goto out;
    status = write_all(w, fd, f->name, text, strlen(text));
    if (!status) {
        status = sync_close(w, fd, f->name);
        fd = -1;
    }
out:
    if (fd >= 0)
        close(fd);
    free(text);
    return status;
}

/* Is `name` a file that a set of this stem could have, "STEM.safetensors", its index, or
 * "STEM-00001-of-00002.safetensors"? */
static bool is_of_stem(const st_writer *w, const char *name)
{
    size_t n = strlen(w->stem);
    if (strncmp(name, w->stem, n) != 0)
        return false;
    name += n;
    if (strcmp(name, ST_SUFFIX) == 0 || strcmp(name, ST_INDEX_SUFFIX) == 0)
        return true;
    static const char shape[] = "-#####-of-#####" ST_SUFFIX;
    if (strlen(name) != sizeof shape - 1)
        return false;
    for (size_t i = 0; shape[i]; i++)
        if (shape[i] == '#' ? name[i] < '0' || name[i] > '9' : name[i] != shape[i])
            return false;
    return true;
}

/* Removes files of an older set of the same stem, which would be orphans. */
static mt_status remove_older(const st_writer *w)
{
    int fd = openat(w->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) {
        mt_status status = io_fail(w, ".", "list");
        if (fd >= 0)
            close(fd);
        return status;
    }
    mt_status status = MT_OK;
    struct dirent *e;
    while (!status && (e = readdir(d))) {
        bool ours = !is_of_stem(w, e->d_name);
        for (int32_t i = 0; i < w->n_files && !ours; i++)
            ours = strcmp(w->files[i].name, e->d_name) == 0;
        if (!ours && unlinkat(w->dir, e->d_name, 0) < 0 && errno != ENOENT)
            status = io_fail(w, e->d_name, "remove the older file");
    }
    closedir(d);
    return status;
}

/* Several renames are not one atomic step. An older index goes first: a crash half way then leaves
 * a set that does not open, rather than one that mixes two saves. */
static mt_status rename_all(st_writer *w)
{
    char *index = st_format("%s" ST_INDEX_SUFFIX, w->stem);
    if (!index)
        return MT_ERR_NOMEM;
    mt_status status = MT_OK;
    if (unlinkat(w->dir, index, 0) < 0 && errno != ENOENT)
        status = io_fail(w, index, "replace");
    free(index);
    for (int32_t i = 0; i < w->n_files && !status; i++) {
        st_out *f = &w->files[i];
        if (i == w->n_shards) /* the index is next: no older single file may stand beside it */
            status = remove_older(w);
        if (!status && renameat(w->dir, f->temp, w->dir, f->name) < 0)
            status = io_fail(w, f->name, "rename into place");
        if (!status)
            f->made = false;
    }
    if (!status)
        status = remove_older(w);
    if (!status && fsync(w->dir) < 0)
        status = io_fail(w, ".", "flush the folder");
    return status;
}

mt_status st_finish(void *writer)
{
    st_writer *w = writer;
    mt_status status;
    if (w->failed)
        status = mt_fail(MT_ERR_INVALID, "%s: an earlier write failed", w->folder);
    else if (w->tensor < w->n)
        status =
            mt_fail(MT_ERR_INVALID, "%s: tensor '%s' lacks %lld bytes", w->folder,
                    w->list[w->tensor].name, (long long)(w->list[w->tensor].bytes - w->written));
    else if (!(status = w->n_shards > 1 ? write_index(w) : MT_OK))
        status = rename_all(w);
    st_abort(w);
    return status;
}

void st_abort(void *writer)
{
    st_writer *w = writer;
    if (!w)
        return;
    if (w->fd >= 0)
        close(w->fd);
    for (int32_t i = 0; w->files && i < w->n_files; i++) {
        if (w->files[i].made)
            unlinkat(w->dir, w->files[i].temp, 0);
        free(w->files[i].name);
        free(w->files[i].temp);
    }
    if (w->dir >= 0)
        close(w->dir);
    free(w->files);
    free(w->list);
    free(w->folder);
    free(w->stem);
    free(w);
}
