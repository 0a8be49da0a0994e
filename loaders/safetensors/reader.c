/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading safetensors: one file, or the shards that an index names. Everything that headers say is
 * checked against the files before the first tensor is read. Data is read with pread, not mapped: a
 * file that shrinks or a disk that fails is then an error and no SIGBUS.
 *
 * Format: u64 little-endian header length, that many bytes of JSON, then the tensors' data without
 * gaps (safetensors/src/tensor.rs).
 */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <megatrain/json.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static bool has_suffix(const char *s, const char *suffix)
{
    size_t n = strlen(s), k = strlen(suffix);
    return n > k && strcmp(s + n - k, suffix) == 0;
}

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* ---- one shard ------------------------------------------------------------------------------ */

static mt_status read_at(const st_shard *s, int64_t offset, int64_t n, void *dst)
{
    char *p = dst;
    while (n > 0) {
        ssize_t got = pread(s->fd, p, n > (1 << 30) ? 1 << 30 : (size_t)n, offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mt_fail(MT_ERR_IO, "%s: cannot read at byte %lld: %s", s->path,
                           (long long)offset, strerror(errno));
        if (got == 0)
            return mt_fail(MT_ERR_IO,
                           "%s: ends at byte %lld, but had %lld bytes when it was opened; it was "
                           "changed meanwhile: restore it",
                           s->path, (long long)offset, (long long)s->size);
        p += got;
        offset += got;
        n -= got;
    }
    return MT_OK;
}

/* An integer >= 0 that fits int64, else -1. */
static int64_t json_size(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) >= 0 ? json_integer_value(v) : -1;
}

/* Fills `t` from one entry of a header, and checks what the entry alone can tell. */
static mt_status parse_tensor(const st_shard *s, const char *name, const json_t *entry,
                              st_tensor *t)
{
    const json_t *dtype = json_object_get(entry, "dtype");
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) ||
        json_array_size(offsets) != 2)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: tensor '%s': expected \"dtype\" (a string), \"shape\" (a list) and "
                       "\"data_offsets\" (two numbers); the file is damaged: fetch it again",
                       s->path, name);
    t->type = st_dtype_by_name(json_string_value(dtype));
    if (!t->type)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: tensor '%s': unknown dtype '%s'; expected one of the format's dtypes "
                       "(F32, BF16, F16, ...)",
                       s->path, name, json_string_value(dtype));
    size_t ndim = json_array_size(shape);
    if (ndim > MT_TENSOR_MAX_DIMS)
        return mt_fail(MT_ERR_UNSUPPORTED, "%s: tensor '%s': %zu dimensions, expected at most %d",
                       s->path, name, ndim, MT_TENSOR_MAX_DIMS);
    t->ndim = (int32_t)ndim;
    int64_t bits = t->type->bits;
    bool overflow = false;
    for (size_t i = 0; i < ndim; i++) {
        t->dim[i] = json_size(json_array_get(shape, i));
        if (t->dim[i] < 0)
            return mt_fail(MT_ERR_FORMAT,
                           "%s: tensor '%s': dimension %zu is not a whole number >= 0; the file is "
                           "damaged: fetch it again",
                           s->path, name, i);
        overflow |= __builtin_mul_overflow(bits, t->dim[i], &bits);
    }
    /* A zero dimension makes the tensor empty, but must not hide an overflow before it. */
    if (overflow)
        return mt_fail(MT_ERR_FORMAT, "%s: tensor '%s': its shape exceeds 2^63 bits", s->path,
                       name);
    if (bits % 8)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: tensor '%s': %lld bits of %s do not end on a byte boundary", s->path,
                       name, (long long)bits, t->type->name);
    t->begin = json_size(json_array_get(offsets, 0));
    t->end = json_size(json_array_get(offsets, 1));
    if (t->begin < 0 || t->end < t->begin)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: tensor '%s': data_offsets are not two numbers in order; the file is "
                       "damaged: fetch it again",
                       s->path, name);
    if (t->end - t->begin != bits / 8)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: tensor '%s': data_offsets span %lld bytes, but its shape and dtype %s "
                       "need %lld; the file is damaged: fetch it again",
                       s->path, name, (long long)(t->end - t->begin), t->type->name,
                       (long long)(bits / 8));
    t->name = strdup(name);
    return t->name ? MT_OK : mt_fail_nomem();
}

static int by_offset(const void *a, const void *b)
{
    const st_tensor *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The data must be covered exactly: no hole, no overlap, nothing behind the last tensor. */
static mt_status check_cover(const st_shard *s, const st_tensor *t, int64_t n)
{
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        if (t[i].begin != at)
            return mt_fail(MT_ERR_FORMAT,
                           "%s: tensor '%s' starts at byte %lld of the data, expected %lld (%s); "
                           "the file is damaged: fetch it again",
                           s->path, t[i].name, (long long)t[i].begin, (long long)at,
                           t[i].begin > at ? "a hole before it" : "it overlaps the one before");
        at = t[i].end;
    }
    if (at != s->size - s->data)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: the header describes %lld bytes of data, the file has %lld; %s: fetch "
                       "it again",
                       s->path, (long long)at, (long long)(s->size - s->data),
                       at > s->size - s->data ? "it is truncated" : "something follows the data");
    return MT_OK;
}

static mt_status add_header(st_reader *r, int32_t shard, const json_t *header)
{
    const st_shard *s = &r->shards[shard];
    int64_t first = r->n_tensors, need = first + (int64_t)json_object_size(header);
    if (need > r->cap_tensors) {
        st_tensor *grown = realloc(r->tensors, (size_t)need * sizeof *grown);
        if (!grown)
            return mt_fail_nomem();
        r->tensors = grown;
        r->cap_tensors = need;
    }
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)header, name, entry)
    {
        if (strcmp(name, ST_METADATA) == 0)
            continue;
        st_tensor *t = &r->tensors[r->n_tensors];
        memset(t, 0, sizeof *t);
        t->shard = shard;
        mt_status status = parse_tensor(s, name, entry, t);
        if (status)
            return status;
        r->n_tensors++;
    }
    if (r->n_tensors > first)
        qsort(r->tensors + first, (size_t)(r->n_tensors - first), sizeof *r->tensors, by_offset);
    return check_cover(s, r->tensors + first, r->n_tensors - first);
}

static mt_status open_shard(st_reader *r, int32_t shard)
{
    st_shard *s = &r->shards[shard];
    mt_status status = MT_ERR_IO;
    json_t *header = NULL;
    char *text = NULL;

    s->fd = open(s->path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (s->fd < 0 || fstat(s->fd, &st) < 0)
        return mt_fail(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO, "%s: cannot open: %s",
                       s->path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return mt_fail(MT_ERR_FORMAT, "%s: not a regular file", s->path);
    s->size = st.st_size;
    if (s->size < 8)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: %lld bytes, too short for a safetensors file: fetch it again", s->path,
                       (long long)s->size);
    uint8_t head[8];
    if ((status = read_at(s, 0, 8, head)))
        return status;
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--)
        n = n << 8 | head[i];
    if (n > ST_MAX_HEADER)
        return mt_fail(
            MT_ERR_FORMAT,
            "%s: header of %llu bytes, expected at most %u; not a safetensors file, or a "
            "damaged one",
            s->path, (unsigned long long)n, ST_MAX_HEADER);
    if ((int64_t)n > s->size - 8)
        return mt_fail(MT_ERR_FORMAT,
                       "%s: header of %llu bytes, but only %lld bytes follow; the file is "
                       "truncated: fetch it again",
                       s->path, (unsigned long long)n, (long long)s->size - 8);
    s->data = 8 + (int64_t)n;
    text = malloc((size_t)n + 1);
    if (!text)
        return mt_fail_nomem();
    if ((status = read_at(s, 8, (int64_t)n, text)))
        goto out;
    json_error_t error;
    header = mt_json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(header)) {
        status =
            mt_fail(MT_ERR_FORMAT, "%s: bad header: %s (byte %d); expected a JSON object", s->path,
                    header ? "another JSON type" : error.text, header ? 0 : error.position);
        goto out;
    }
    status = add_header(r, shard, header);
out:
    json_decref(header);
    free(text);
    return status;
}

/* ---- an index and its shards ---------------------------------------------------------------- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Shards are opened in the order of their names, so that tensors have a stable order. */
static mt_status open_shards(st_reader *r, const char *index, const json_t *map)
{
    size_t n = json_object_size(map), n_names = 0;
    size_t folder = strrchr(index, '/') ? (size_t)(strrchr(index, '/') - index) + 1 : 0;
    mt_status status = MT_OK;
    const char **names = calloc(n + 1, sizeof *names);
    if (!names)
        return mt_fail_nomem();
    const char *tensor;
    json_t *file;
    json_object_foreach((json_t *)map, tensor, file)
    {
        const char *name = json_string_value(file);
        if (!name || !*name || strchr(name, '/')) {
            status = mt_fail(MT_ERR_FORMAT,
                             "%s: weight_map of '%s' is %s%s; expected the name of a file beside "
                             "the index",
                             index, tensor, name ? name : "no text", name && !*name ? "empty" : "");
            goto out;
        }
        names[n_names++] = name;
    }
    qsort(names, n_names, sizeof *names, by_text);
    size_t unique = 0;
    for (size_t i = 0; i < n_names; i++)
        if (!unique || strcmp(names[unique - 1], names[i]) != 0)
            names[unique++] = names[i];
    r->shards = calloc(unique + 1, sizeof *r->shards);
    if (!r->shards) {
        status = mt_fail_nomem();
        goto out;
    }
    for (size_t i = 0; i < unique; i++) {
        st_shard *s = &r->shards[r->n_shards];
        s->fd = -1;
        s->path = st_format("%.*s%s", (int)folder, index, names[i]);
        if (!s->path) {
            status = MT_ERR_NOMEM;
            goto out;
        }
        r->n_shards++;
        if (!is_file(s->path)) {
            status = mt_fail(MT_ERR_NOT_FOUND,
                             "%s: missing, but %s names it; fetch the file, or the whole folder, "
                             "again",
                             s->path, index);
            goto out;
        }
        if ((status = open_shard(r, r->n_shards - 1)))
            goto out;
    }
out:
    free(names);
    return status;
}

/* The index and the shards' headers must agree in both directions: a shard of another save may well
 * have tensors of the same names and shapes. */
static mt_status check_index(const st_reader *r, const char *index, const json_t *map)
{
    json_t *seen = json_object();
    mt_status status = MT_OK;
    if (!seen)
        return mt_fail_nomem();
    for (int64_t i = 0; i < r->n_tensors && !status; i++) {
        const st_tensor *t = &r->tensors[i];
        const char *path = r->shards[t->shard].path;
        const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        const char *want = json_string_value(json_object_get(map, t->name));
        if (!want)
            status = mt_fail(MT_ERR_FORMAT,
                             "%s: tensor '%s' is not in %s; index and shards are not of one save: "
                             "fetch the folder again",
                             path, t->name, index);
        else if (strcmp(want, base) != 0)
            status = mt_fail(MT_ERR_FORMAT,
                             "%s: has tensor '%s', which %s places in %s; index and shards are not "
                             "of one save: fetch the folder again",
                             path, t->name, index, want);
        else if (json_object_set_new(seen, t->name, json_true()) < 0)
            status = mt_fail_nomem();
    }
    const char *name;
    json_t *file;
    if (!status) {
        json_object_foreach((json_t *)map, name, file)
        {
            if (json_object_get(seen, name))
                continue;
            status = mt_fail(MT_ERR_FORMAT,
                             "%s: tensor '%s' is missing from %s, where the index places it; fetch "
                             "the folder again",
                             index, name, json_string_value(file));
            break;
        }
    }
    json_decref(seen);
    return status;
}

static mt_status open_index(st_reader *r, const char *index)
{
    json_error_t error;
    char place[PATH_MAX + 32];
    json_t *root = mt_json_load_file(index, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return mt_fail(error.line > 0 ? MT_ERR_FORMAT : MT_ERR_IO, "%s: %s",
                       mt_json_place(index, &error, place, sizeof place), error.text);
    const json_t *map = json_object_get(root, "weight_map");
    mt_status status;
    if (!json_is_object(map))
        status =
            mt_fail(MT_ERR_FORMAT,
                    "%s: no \"weight_map\" object; expected the index of a sharded model", index);
    else if (!(status = open_shards(r, index, map)))
        status = check_index(r, index, map);
    json_decref(root);
    return status;
}

static mt_status open_single(st_reader *r, const char *path)
{
    r->shards = calloc(1, sizeof *r->shards);
    if (!r->shards)
        return mt_fail_nomem();
    r->shards[0].fd = -1;
    if (!(r->shards[0].path = st_format("%s", path)))
        return MT_ERR_NOMEM;
    r->n_shards = 1;
    return open_shard(r, 0);
}

/* An index beside a single file of the same stem is two models in one place, unless the index
 * names that very file. */
static mt_status check_single(const st_reader *r, const char *single, const char *index)
{
    if (!is_file(single))
        return MT_OK;
    for (int32_t i = 0; i < r->n_shards; i++)
        if (strcmp(r->shards[i].path, single) == 0)
            return MT_OK;
    return mt_fail(MT_ERR_FORMAT,
                   "%s and %s stand side by side, and the index does not name that file; remove "
                   "the one that is out of date",
                   single, index);
}

/* ---- the interface -------------------------------------------------------------------------- */

/* What `path` means: a file, an index, a folder with files of stem "model", or FOLDER/STEM. Fills
 * the names of the single file and of the index that are to be looked for; NULL: not that one. */
static mt_status resolve(const char *path, char **ret_single, char **ret_index)
{
    char *single = NULL, *index = NULL;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (has_suffix(path, ST_INDEX_SUFFIX)) {
        index = st_format("%s", path);
    } else if (is_folder(path)) {
        single = st_format("%.*s/model" ST_SUFFIX, (int)n, path);
        index = st_format("%.*s/model" ST_INDEX_SUFFIX, (int)n, path);
    } else if (is_file(path) || has_suffix(path, ST_SUFFIX)) {
        single = st_format("%s", path);
    } else {
        single = st_format("%.*s" ST_SUFFIX, (int)n, path);
        index = st_format("%.*s" ST_INDEX_SUFFIX, (int)n, path);
    }
    if (!single && !index)
        return MT_ERR_NOMEM;
    *ret_single = single;
    *ret_index = index;
    return MT_OK;
}

bool st_probe(const char *path)
{
    char *single = NULL, *index = NULL;
    if (resolve(path, &single, &index))
        return false;
    bool yes =
        (index && is_file(index)) || (single && has_suffix(single, ST_SUFFIX) && is_file(single));
    free(single);
    free(index);
    return yes;
}

/* Decides how tensors are shown, by the configuration that stands beside the files. */
static mt_status show(st_reader *r)
{
    const char *path = r->n_shards ? r->shards[0].path : "", *slash = strrchr(path, '/');
    char *folder = st_format("%.*s", slash ? (int)(slash - path) + 1 : 0, path);
    if (!folder)
        return MT_ERR_NOMEM;
    mt_status status = st_make_views(r, folder);
    free(folder);
    return status;
}

mt_status st_open(const char *path, void **ret_reader)
{
    char *single = NULL, *index = NULL;
    mt_status status;
    st_reader *r = calloc(1, sizeof *r);
    if (!r)
        return mt_fail_nomem();
    if ((status = resolve(path, &single, &index)))
        goto out;
    if (index && is_file(index)) {
        status = open_index(r, index);
        if (!status && single)
            status = check_single(r, single, index);
    } else if (single && is_file(single)) {
        status = open_single(r, single);
    } else {
        status = mt_fail(MT_ERR_NOT_FOUND,
                         "%s: no safetensors weights: found neither %s%s%s; give a folder with "
                         "model" ST_SUFFIX " or its index, or a file",
                         path, single ? single : index, single && index ? " nor " : "",
                         single && index ? index : "");
    }
    if (!status)
        status = show(r);
out:
    free(single);
    free(index);
    if (status)
        st_close(r);
    else
        *ret_reader = r;
    return status;
}

void st_close(void *reader)
{
    st_reader *r = reader;
    if (!r)
        return;
    for (int32_t i = 0; i < r->n_shards; i++) {
        if (r->shards[i].fd >= 0)
            close(r->shards[i].fd);
        free(r->shards[i].path);
    }
    for (int64_t i = 0; i < r->n_tensors; i++)
        free(r->tensors[i].name);
    free(r->shards);
    free(r->tensors);
    free(r->views);
    free(r->tables);
    st_pool_destroy(r->once);
    free(r);
}

int64_t st_count(const void *reader)
{
    return ((const st_reader *)reader)->n_views;
}

static const st_view *find(const st_reader *r, int64_t index)
{
    if (index >= 0 && index < r->n_views)
        return &r->views[index];
    mt_fail(MT_ERR_INVALID, "safetensors: tensor %lld of %lld", (long long)index,
            (long long)r->n_views);
    return NULL;
}

mt_status st_info(const void *reader, int64_t index, mt_tensor_info *ret)
{
    const st_reader *r = reader;
    const st_view *v = find(r, index);
    if (!v)
        return MT_ERR_INVALID;
    const st_tensor *t = &r->tensors[v->tensor];
    memset(ret, 0, sizeof *ret);
    ret->name = t->name;
    ret->dtype = v->kind == ST_PLAIN ? t->type->dtype : MT_BF16;
    ret->ndim = v->ndim;
    memcpy(ret->dim, v->dim, sizeof ret->dim);
    ret->bytes = t->end - t->begin;
    if (v->kind == ST_MXFP4)
        ret->bytes *= 4;
    if (v->kind == ST_FP8)
        ret->bytes *= 2;
    return MT_OK;
}

const char *st_file(const void *reader, int64_t index)
{
    const st_reader *r = reader;
    return index >= 0 && index < r->n_views
               ? r->shards[r->tensors[r->views[index].tensor].shard].path
               : "";
}

mt_status st_read_raw(const st_reader *r, const st_tensor *t, int64_t offset, int64_t n, void *dst)
{
    const st_shard *s = &r->shards[t->shard];
    int64_t at = s->data + t->begin + offset;
    return r->once && st_direct_read(r->once, s->fd, at, n, dst) ? MT_OK : read_at(s, at, n, dst);
}

void st_read_once(void *reader)
{
    st_reader *r = reader;
    if (!r->once)
        r->once = st_pool_create(); /* without, all is read in the ordinary way */
}

mt_status st_read(const void *reader, int64_t index, int64_t offset, int64_t n, void *dst)
{
    const st_reader *r = reader;
    const st_view *v = find(r, index);
    mt_tensor_info info;
    if (!v || st_info(reader, index, &info))
        return MT_ERR_INVALID;
    const st_tensor *t = &r->tensors[v->tensor];
    const char *path = r->shards[t->shard].path;
    if (info.dtype < 0)
        return mt_fail(MT_ERR_UNSUPPORTED,
                       "%s: tensor '%s' has dtype %s, which MegaTrain does not read; convert the "
                       "weights to BF16 first",
                       path, t->name, t->type->name);
    if (offset < 0 || n < 0 || offset > info.bytes || n > info.bytes - offset)
        return mt_fail(MT_ERR_INVALID,
                       "%s: tensor '%s': asked for bytes %lld to %lld, but it has %lld", path,
                       t->name, (long long)offset, (long long)(offset + n), (long long)info.bytes);
    return v->kind == ST_PLAIN ? st_read_raw(r, t, offset, n, dst)
                               : st_read_dequantised(r, v, offset, n, dst);
}
