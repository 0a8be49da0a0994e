/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing safetensors: straight to the place in the file that the list gives every tensor, by one
 * thread in order or by several at once, never more than the callers' pieces in memory. A shard is
 * opened with its first byte and flushed and closed with its last. Files carry temporary names
 * until finish, which makes them durable and renames them.
 */
#include "safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WRITEBACK = 64 << 20 };

typedef struct st_out {
    char *name;        /* final name in the folder */
    char *temp;        /* its name until finish */
    int64_t first, n;  /* tensors of the list */
    bool made;         /* `temp` exists */
    int fd;            /* -1: not open */
    int64_t data;      /* where the tensors' data starts */
    int64_t bytes;     /* of that data */
    int64_t written;   /* of them, so far */
    int64_t unflushed; /* of them, since the disk was last told to begin */
} st_out;

/* A tensor's place, and how much of it is there. */
typedef struct st_slot {
    int32_t shard;
    int64_t begin; /* bytes from the start of the shard's data */
    int64_t written;
} st_slot;

typedef struct st_writer {
    char *folder, *stem;
    int dir; /* the folder */
    mt_tensor_info *list;
    st_slot *slots; /* [n] */
    int64_t n;
    st_out *files; /* shards in order; the index, where there is one, is last */
    int32_t n_files, n_shards;
    int64_t tensor; /* the one that `write` comes to next */
    /* Of all that changes while tensors are written. */
    pthread_mutex_t lock;
    bool failed;
    int error; /* errno of the first failure, with the file; 0: it was of another kind */
    const char *failed_file, *failed_doing;
} st_writer;

static mt_status io_fail(const st_writer *w, const char *file, const char *doing)
{
    int e = errno;
    bool full = e == ENOSPC || e == EDQUOT || e == EFBIG;
    mt_fail(MT_ERR_IO, "%s/%s: cannot %s: %s%s", w->folder, file, doing, strerror(e),
            full ? "; free some space or choose another folder" : "");
    errno = e;
    return MT_ERR_IO;
}

/* The failure that other threads' writes met, so that each of them gives the same reason. */
static mt_status fail_again(const st_writer *w)
{
    if (!w->error)
        return mt_fail(MT_ERR_INVALID, "%s: an earlier write failed", w->folder);
    errno = w->error;
    return io_fail(w, w->failed_file, w->failed_doing);
}

static mt_status write_all(const st_writer *w, int fd, const char *file, const void *data, size_t n,
                           int64_t at)
{
    const char *p = data;
    while (n > 0) {
        ssize_t put = pwrite(fd, p, n > (1u << 30) ? 1u << 30 : n, at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0) {
            if (put == 0)
                errno = EIO;
            return io_fail(w, file, "write");
        }
        p += put;
        at += put;
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
    w->slots = calloc((size_t)w->n + 1, sizeof *w->slots);
    if (!w->files || !w->slots)
        return mt_fail_nomem();
    for (int64_t i = 0; i < w->n + 2; i++)
        w->files[i].fd = -1;
    w->n_shards = 1;
    for (int64_t i = 0; i < w->n; i++) {
        st_out *f = &w->files[w->n_shards - 1];
        if (shard_bytes > 0 && f->n > 0 && w->list[i].bytes > shard_bytes - f->bytes) {
            f = &w->files[w->n_shards++];
            f->first = i;
        }
        w->slots[i] = (st_slot){ .shard = w->n_shards - 1, .begin = f->bytes };
        f->n++;
        f->bytes += w->list[i].bytes;
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
    json_t *header = json_pack("{s:{s:s}}", ST_METADATA, "format", "pt");
    bool ok = header != NULL;
    for (int64_t i = f->first; ok && i < f->first + f->n; i++)
        ok = json_object_set_new(header, w->list[i].name,
                                 tensor_entry(&w->list[i], w->slots[i].begin)) == 0;
    if (ok)
        text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    return text;
}

/* ---- writing -------------------------------------------------------------------------------- */

static mt_status create_file(st_writer *w, st_out *f)
{
    f->fd = openat(w->dir, f->temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0)
        return io_fail(w, f->temp, "create");
    f->made = true;
    return MT_OK;
}

static mt_status close_file(const st_writer *w, st_out *f)
{
    int fd = f->fd;
    f->fd = -1;
    return sync_close(w, fd, f->name);
}

/* Creates the file and writes its header. */
static mt_status start_shard(st_writer *w, st_out *f)
{
    mt_status status = create_file(w, f);
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
    f->data = (int64_t)(sizeof head + padded);
    status = write_all(w, f->fd, f->name, head, sizeof head, 0);
    if (!status)
        status = write_all(w, f->fd, f->name, text, used, sizeof head);
    if (!status)
        status =
            write_all(w, f->fd, f->name, "       ", padded - used, (int64_t)(sizeof head + used));
    free(text);
    return status;
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
    pthread_mutex_init(&w->lock, NULL);
    w->dir = -1;
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
    status = start_shard(w, &w->files[0]);
out:
    if (status)
        st_abort(w);
    else
        *ret_writer = w;
    return status;
}

/* Counts the bytes that are about to be written, and opens their file. `ret_flush`: is it time to
 * tell the disk to begin? That keeps it busy, instead of letting dirty pages pile up until fsync.
 */
static mt_status begin_write(st_writer *w, int64_t index, int64_t offset, int64_t n,
                             bool *ret_flush)
{
    if (w->failed)
        return fail_again(w);
    if (index < 0 || index >= w->n)
        return mt_fail(MT_ERR_INVALID, "%s: bytes given for tensor %lld of %lld", w->folder,
                       (long long)index, (long long)w->n);
    st_slot *slot = &w->slots[index];
    int64_t bytes = w->list[index].bytes;
    if (offset < 0 || n < 0 || offset > bytes || n > bytes - offset || n > bytes - slot->written)
        return mt_fail(MT_ERR_INVALID,
                       "%s: %lld bytes given for tensor '%s' from byte %lld on; it has %lld, of "
                       "which %lld were given before",
                       w->folder, (long long)n, w->list[index].name, (long long)offset,
                       (long long)bytes, (long long)slot->written);
    slot->written += n;
    st_out *f = &w->files[slot->shard];
    f->unflushed += n;
    *ret_flush = f->unflushed >= WRITEBACK;
    if (*ret_flush)
        f->unflushed = 0;
    return f->made ? MT_OK : start_shard(w, f);
}

/* Notes the first failure; the lock is held. */
static void note_failure(st_writer *w, mt_status status, const st_out *f, const char *doing,
                         int error)
{
    if (!status || w->failed)
        return;
    w->failed = true;
    w->error = status == MT_ERR_IO ? error : 0;
    w->failed_file = f->name;
    w->failed_doing = doing;
}

/* The thread that writes the last bytes of a file finds it complete: nobody else uses it then. */
static bool end_write(st_writer *w, st_out *f, int64_t n, mt_status status, const char *doing,
                      int error)
{
    pthread_mutex_lock(&w->lock);
    note_failure(w, status, f, doing, error);
    f->written += n;
    bool complete = !w->failed && f->written == f->bytes;
    pthread_mutex_unlock(&w->lock);
    return complete;
}

mt_status st_write_at(void *writer, int64_t index, int64_t offset, const void *data, int64_t n)
{
    st_writer *w = writer;
    bool flush = false;
    pthread_mutex_lock(&w->lock);
    mt_status status = begin_write(w, index, offset, n, &flush);
    bool known = index >= 0 && index < w->n;
    st_out *f = &w->files[known ? w->slots[index].shard : 0];
    note_failure(w, status, f, "begin", errno);
    pthread_mutex_unlock(&w->lock);
    if (status || n == 0)
        return status;
    status =
        write_all(w, f->fd, f->name, data, (size_t)n, f->data + w->slots[index].begin + offset);
    int error = errno;
    if (flush && !status) /* only a hint: its failure means nothing */
        sync_file_range(f->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
    if (!end_write(w, f, n, status, "write", error))
        return status;
    status = close_file(w, f);
    end_write(w, f, 0, status, "flush", errno);
    return status;
}

mt_status st_write(void *writer, int64_t index, const void *data, int64_t n)
{
    st_writer *w = writer;
    while (w->tensor < w->n && w->slots[w->tensor].written == w->list[w->tensor].bytes)
        w->tensor++;
    if (n == 0 || w->failed || index == w->tensor)
        return st_write_at(w, index, index >= 0 && index < w->n ? w->slots[index].written : 0, data,
                           n);
    w->failed = true;
    return mt_fail(
        MT_ERR_INVALID,
        "%s: %lld bytes given for tensor %lld; expected tensor %lld, which lacks %lld "
        "bytes",
        w->folder, (long long)n, (long long)index, (long long)w->tensor,
        w->tensor < w->n ? (long long)(w->list[w->tensor].bytes - w->slots[w->tensor].written) : 0);
}

/* ---- finishing ------------------------------------------------------------------------------ */

static mt_status write_index(st_writer *w)
{
    st_out *f = &w->files[w->n_shards];
    mt_status status = MT_OK;
    char *text = NULL;
    int64_t total = 0;
    json_t *map = json_object();
    json_t *root = json_object();
    bool ok = map && root;
    for (int64_t i = 0; ok && i < w->n; i++) {
        total += w->list[i].bytes;
        ok = json_object_set_new(map, w->list[i].name,
                                 json_string(w->files[w->slots[i].shard].name)) == 0;
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
    if (!(status = create_file(w, f)) &&
        !(status = write_all(w, f->fd, f->name, text, strlen(text), 0)))
        status = close_file(w, f);
    free(text);
    return status;
}

/* Closes what is open still: shards of nothing but empty tensors. */
static mt_status close_shards(st_writer *w)
{
    mt_status status = MT_OK;
    for (int32_t i = 0; i < w->n_shards && !status; i++) {
        st_out *f = &w->files[i];
        if (!f->made)
            status = start_shard(w, f);
        if (!status && f->fd >= 0)
            status = close_file(w, f);
    }
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
    int64_t t = 0;
    while (t < w->n && w->slots[t].written == w->list[t].bytes)
        t++;
    mt_status status;
    if (w->failed)
        status = fail_again(w);
    else if (t < w->n)
        status = mt_fail(MT_ERR_INVALID, "%s: tensor '%s' lacks %lld bytes", w->folder,
                         w->list[t].name, (long long)(w->list[t].bytes - w->slots[t].written));
    else if (!(status = close_shards(w)) && !(status = w->n_shards > 1 ? write_index(w) : MT_OK))
        status = rename_all(w);
    st_abort(w);
    return status;
}

void st_abort(void *writer)
{
    st_writer *w = writer;
    if (!w)
        return;
    for (int32_t i = 0; w->files && i < w->n_files; i++) {
        st_out *f = &w->files[i];
        if (f->fd >= 0)
            close(f->fd);
        if (f->made)
            unlinkat(w->dir, f->temp, 0);
        free(f->name);
        free(f->temp);
    }
    if (w->dir >= 0)
        close(w->dir);
    pthread_mutex_destroy(&w->lock);
    free(w->files);
    free(w->slots);
    free(w->list);
    free(w->folder);
    free(w->stem);
    free(w);
}
