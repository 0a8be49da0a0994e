/* SPDX-License-Identifier: Apache-2.0
 *
 * Export without a store: masters are read from the files whenever they are asked for.
 */
#include "export.h"

#include "../base/log.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "card.h"
#include "checkpoint_files.h"
#include "files.h"
#include "human.h"
#include "weights_pass.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define TOKENIZER_FILE "tokenizer.json"

/* ---- masters that stand in files ------------------------------------------------------------- */

enum { WINDOWS = 4 };

/* One matrix of a parameter whose rows do not stand in the file as they stand in the model. */
typedef struct window {
    float *data;
    int32_t param;
    int64_t matrix, elems;
    int64_t used; /* when, to replace the one unused for longest */
} window;

typedef struct file_masters {
    const weights_match *match;
    const mt_weights *format;
    const void *reader;
    const json_t *sums;      /* of a checkpoint's tensors; NULL for other folders */
    tensor_piece **by_param; /* [n_pieces] sorted by parameter */
    int64_t *first_piece;    /* [n_params + 1] into by_param */
    window windows[WINDOWS];
    int64_t clock;
    weights_buffer buffer;
    mt_status status; /* of the first failure; what is read after it is not used */
} file_masters;

static int by_param(const void *a, const void *b)
{
    const tensor_piece *x = *(tensor_piece *const *)a, *y = *(tensor_piece *const *)b;
    return (x->param > y->param) - (x->param < y->param);
}

static void file_masters_finish(file_masters *f)
{
    for (int i = 0; i < WINDOWS; i++)
        free(f->windows[i].data);
    weights_buffer_finish(&f->buffer);
    free(f->by_param);
    free(f->first_piece);
}

static mt_status file_masters_init(file_masters *f, const weights_match *match,
                                   const mt_weights *format, const void *reader)
{
    const tensor_map *map = match->map;
    size_t params = (size_t)map->m->n_params + 1;
    *f = (file_masters){ .match = match, .format = format, .reader = reader };
    f->by_param = malloc(((size_t)map->n_pieces + 1) * sizeof(tensor_piece *));
    f->first_piece = calloc(params + 1, sizeof *f->first_piece);
    if (!f->by_param || !f->first_piece) {
        file_masters_finish(f);
        return status_nomem("the names of weights", (size_t)map->n_pieces * sizeof(tensor_piece *));
    }
    for (int64_t i = 0; i < map->n_pieces; i++) {
        f->by_param[i] = &map->pieces[i];
        f->first_piece[map->pieces[i].param + 1]++;
    }
    qsort(f->by_param, (size_t)map->n_pieces, sizeof(tensor_piece *), by_param);
    for (size_t p = 1; p < params; p++)
        f->first_piece[p] += f->first_piece[p - 1];
    mt_status status = weights_buffer_init(&f->buffer, WEIGHTS_PIECE);
    if (status)
        file_masters_finish(f);
    return status;
}

static mt_dtype dtype_of(const file_masters *f, int64_t tensor)
{
    mt_tensor_info info = { 0 };
    f->format->info(f->reader, f->match->index[tensor], &info);
    return info.dtype;
}

static void set_in_window(void *arg, int32_t param, int64_t first, int64_t n, const float *src)
{
    const window *w = arg;
    if (param == w->param) /* a shared tensor brings rows of other parameters too */
        memcpy(w->data + (first - w->matrix * w->elems), src, (size_t)n * sizeof *src);
}

/* The window that holds this matrix, filled when it is new. */
static const window *open_window(file_masters *f, int32_t param, int64_t matrix)
{
    const tensor_map *map = f->match->map;
    window *w = &f->windows[0];
    for (int i = 0; i < WINDOWS; i++) {
        window *k = &f->windows[i];
        if (k->data && k->param == param && k->matrix == matrix) {
            k->used = ++f->clock;
            return k;
        }
        if (k->used < w->used)
            w = k;
    }
    const mt_param_info *info = map->m->params[param].info;
    int64_t elems = tpl_matrix_rows(info) * tpl_matrix_cols(info);
    free(w->data);
    *w = (window){ malloc((size_t)elems * sizeof(float)), param, matrix, elems, ++f->clock };
    if (!w->data) {
        f->status = status_nomem("a matrix of the weights", (size_t)elems * sizeof(float));
        return NULL;
    }
    const weights_masters to = { w, NULL, set_in_window };
    for (int64_t i = f->first_piece[param]; i < f->first_piece[param + 1] && !f->status; i++) {
        const tensor_piece *piece = f->by_param[i];
        if (piece->matrix >= 0 && piece->matrix != matrix)
            continue;
        f->status = weights_read_tensor(&to, map, piece->tensor, piece->matrix < 0 ? matrix : 0, 1,
                                        f->format, f->reader, f->match->index[piece->tensor],
                                        dtype_of(f, piece->tensor), &f->buffer);
    }
    return f->status ? NULL : w;
}

/* Reads first .. first+n, which lies in one linear tensor, from the file. */
static void read_linear(file_masters *f, const mapped_tensor *t, int64_t tensor, int64_t first,
                        int64_t n, float *ret)
{
    mt_dtype dtype = dtype_of(f, tensor);
    int64_t step = weights_piece_elems(&f->buffer, dtype);
    for (int64_t at = 0; at < n && !f->status; at += step) {
        int64_t part = n - at < step ? n - at : step;
        f->status = weights_read_piece(f->format, f->reader, f->match->index[tensor], dtype,
                                       first - t->first + at, part, &f->buffer);
        if (!f->status)
            memcpy(ret + at, f->buffer.value, (size_t)part * sizeof *ret);
    }
}

/* The linear tensor that holds element `first`, -1 when the tensor that does is not linear; and how
 * many elements from `first` on it holds. */
static int64_t linear_at(const file_masters *f, int32_t param, int64_t first, int64_t *ret_n)
{
    const tensor_map *map = f->match->map;
    for (int64_t i = f->first_piece[param]; i < f->first_piece[param + 1]; i++) {
        const mapped_tensor *t = &map->tensors[f->by_param[i]->tensor];
        int64_t end = t->first + tensor_elems(t);
        if (!t->linear || first < t->first || first >= end)
            continue;
        *ret_n = end - first;
        return f->by_param[i]->tensor;
    }
    return -1;
}

static void get_from_file(void *arg, int32_t param, int64_t first, int64_t n, float *ret)
{
    file_masters *f = arg;
    const tensor_map *map = f->match->map;
    const mt_param_info *info = map->m->params[param].info;
    int64_t each = tpl_matrix_rows(info) * tpl_matrix_cols(info);
    for (int64_t done = 0; done < n && !f->status;) {
        int64_t at = first + done, most = n - done, held = 0;
        int64_t tensor = linear_at(f, param, at, &held);
        if (tensor < 0)
            held = each - at % each;
        int64_t part = held < most ? held : most;
        if (tensor >= 0) {
            read_linear(f, &map->tensors[tensor], tensor, at, part, ret + done);
        } else {
            const window *w = open_window(f, param, at / each);
            if (w)
                memcpy(ret + done, w->data + at % each, (size_t)part * sizeof *ret);
        }
        done += part;
    }
}

/* ---- one tensor ------------------------------------------------------------------------------ */

/* The tensor of the file that is this one, name, rows and all; -1 when it stands there otherwise.
 */
static int64_t find_same(const tensor_map *there, const mapped_tensor *t)
{
    int64_t at = tensor_map_find(there, t->name);
    if (at < 0)
        return -1;
    const mapped_tensor *u = &there->tensors[at];
    bool same = u->n_pieces == t->n_pieces && u->flags == t->flags;
    for (int32_t i = 0; i < t->n_pieces && same; i++)
        same = u->pieces[i].param == t->pieces[i].param &&
               u->pieces[i].matrix == t->pieces[i].matrix &&
               u->pieces[i].source == t->pieces[i].source;
    return same ? at : -1;
}

/* What the device gets in FP32 in any precision, such as a router's correction bias, says too
 * little in BF16. */
static mt_dtype export_dtype(const model *m, const mapped_tensor *t, mt_dtype asked)
{
    bool exact = m->params[t->pieces[0].param].info->flags & MT_PARAM_STREAM_F32;
    return exact ? MT_F32 : asked;
}

/* Of a checkpoint, the bytes must be those that were saved. */
static mt_status check_item(void *arg, const weights_item *item)
{
    const file_masters *f = arg;
    mt_tensor_info info = { 0 };
    mt_status status = f->format->info(f->reader, item->source, &info);
    return status ? status
                  : checkpoint_check_sum(f->sums, info.name, item->sum,
                                         f->format->file(f->reader, item->source));
}

/* One tensor that is not copied. */
static mt_status write_made(weights_way *way, file_masters *f, weights_item *item)
{
    way->sums = false;
    mt_status status = weights_pass(way, item, 1);
    way->sums = f->sums;
    return status ? status : f->status;
}

/* Tensors that stand in a file as they are to stand are copied, by all processors where the format
 * allows it, the others made from the masters one after the other: those of files are one thread's.
 * A format that takes tensors in their order only gets them so. */
static mt_status write_from_files(weights_way *way, file_masters *f, weights_item *items, int64_t n)
{
    const bool ordered = !weights_written_anywhere(f->format);
    weights_item *copied = calloc((size_t)n + 1, sizeof *copied);
    int64_t n_copied = 0;
    mt_status status = MT_OK;
    if (!copied)
        return status_nomem("the list of tensors", (size_t)n * sizeof *copied);
    way->reader = f->reader;
    way->sums = f->sums;
    way->check = check_item;
    way->arg = f;
    for (int64_t t = 0; t < n; t++) {
        int64_t same = find_same(f->match->map, &way->map->tensors[t]);
        if ((items[t].copied = same >= 0)) {
            items[t].source = f->match->index[same];
            items[t].source_dtype = dtype_of(f, same);
            copied[n_copied++] = items[t];
        }
    }
    if (!ordered)
        status = weights_pass(way, copied, n_copied);
    way->serial = true;
    for (int64_t t = 0; t < n && !status; t++) {
        if (!items[t].copied)
            status = write_made(way, f, &items[t]);
        else if (ordered)
            status = weights_pass(way, &items[t], 1);
    }
    free(copied);
    return status;
}

/* Writes all tensors of the model from masters, which are those of `f` where that is not NULL. */
static mt_status write_tensors(const model *m, const weights_masters *from, file_masters *f,
                               const mt_weights *format, const char *folder,
                               const export_options *o, int64_t *ret_bytes)
{
    tensor_map *map = NULL;
    mt_tensor_info *list = NULL;
    weights_item *items = NULL;
    progress p;
    int64_t bytes = 0;
    mt_status status = tensor_map_create(m, NULL, &map);
    if (status)
        return status;
    weights_way way = {
        .format = format, .masters = *from, .map = map, .progress = &p, .stop = o->stop
    };
    list = calloc((size_t)map->n + 1, sizeof *list);
    items = calloc((size_t)map->n + 1, sizeof *items);
    if (!list || !items) {
        status = status_nomem("the list of tensors", (size_t)map->n * sizeof *list);
        goto out;
    }
    for (int64_t t = 0; t < map->n; t++) {
        const mapped_tensor *q = &map->tensors[t];
        list[t] = tensor_info(q, export_dtype(m, q, o->dtype));
        items[t] = (weights_item){
            .index = t, .dtype = list[t].dtype, .tensor = t, .bytes = list[t].bytes
        };
        bytes += list[t].bytes;
    }
    progress_begin(&p, "exporting", bytes);
    status = format->create(folder, "model", list, map->n, o->shard_bytes, &way.writer);
    if (!status)
        status = f ? write_from_files(&way, f, items, map->n) : weights_pass(&way, items, map->n);
    progress_end(&p);
    if (!status) {
        status = format->finish(way.writer);
        way.writer = NULL;
    }
    if (!status)
        *ret_bytes = bytes;
out:
    if (way.writer)
        format->abort(way.writer);
    free(items);
    free(list);
    tensor_map_destroy(map);
    return status;
}

static mt_status write_weights(const model *m, const weights_match *match, const mt_weights *format,
                               const void *reader, const json_t *sums, const char *folder,
                               const export_options *o, int64_t *ret_bytes)
{
    file_masters f;
    mt_status status = file_masters_init(&f, match, format, reader);
    if (status)
        return status;
    f.sums = sums;
    const weights_masters from = { &f, get_from_file, NULL };
    status = weights_check_unused(m, &from, match, format, reader);
    if (!status)
        status = f.status;
    if (!status)
        status = write_tensors(m, &from, &f, format, folder, o, ret_bytes);
    file_masters_finish(&f);
    return status;
}

/* ---- random weights -------------------------------------------------------------------------- */

typedef struct random_masters {
    const model *m;
    uint64_t seed;
} random_masters;

static void get_random(void *arg, int32_t param, int64_t first, int64_t n, float *ret)
{
    const random_masters *r = arg;
    model_draw(&r->m->params[param], r->seed, first, n, ret);
}

static mt_status write_random(const model *m, const mt_weights *format, const char *folder,
                              const export_options *o, int64_t *ret_bytes)
{
    random_masters r = { m, o->seed };
    const weights_masters from = { &r, get_random, NULL };
    return write_tensors(m, &from, NULL, format, folder, o, ret_bytes);
}

/* ---- weights of files ------------------------------------------------------------------------ */

/* The checksums that a checkpoint's state has; NULL for any other folder. */
static mt_status read_sums(const char *path, json_t **ret_state)
{
    mt_status status = checkpoint_read_state(path, ret_state);
    return status == MT_ERR_NOT_FOUND ? MT_OK : status;
}

static mt_status export_weights(const model *m, const char *path, const mt_weights *format,
                                const char *folder, const export_options *o, int64_t *ret_bytes)
{
    void *reader = NULL;
    json_t *state = NULL;
    weights_match *match = NULL;
    mt_status status = format->open(path, &reader);
    if (status)
        return status;
    if (!(status = read_sums(path, &state)) &&
        !(status = weights_match_create(m, format, reader, &match)))
        status = weights_match_complete(match, format, reader, path);
    for (int64_t i = 0; !status && i < match->count; i++)
        if (match->tensor[i] >= 0)
            status = weights_check_tensor(match, format, reader, i);
    if (!status)
        status = write_weights(m, match, format, reader, json_object_get(state, "weights"), folder,
                               o, ret_bytes);
    weights_match_destroy(match);
    json_decref(state);
    format->close(reader);
    return status;
}

/* ---- the folder ------------------------------------------------------------------------------ */

static mt_status copy_file(const char *from, const char *name, const char *folder)
{
    char source[PATH_MAX], target[PATH_MAX];
    if (snprintf(source, sizeof source, "%s/%s", from, name) >= (int)sizeof source ||
        snprintf(target, sizeof target, "%s/%s", folder, name) >= (int)sizeof target)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", folder);
    return files_is_file(source) ? files_copy(source, target) : MT_OK;
}

/* A file alone is the tokenizer whatever it is called, and stands with what lies beside it only
 * where it has the name that folders have. */
static mt_status copy_tokenizer_file(const char *path, const char *folder)
{
    char target[PATH_MAX];
    if (snprintf(target, sizeof target, "%s/" TOKENIZER_FILE, folder) >= (int)sizeof target)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", folder);
    return files_copy(path, target);
}

mt_status export_copy_files(const char *base, const char *tokenizer, const char *folder)
{
    static const char *const names[] = {
        TOKENIZER_FILE,        "tokenizer_config.json",
        "tokenizer.model",     "vocab.json",
        "merges.txt",          "added_tokens.json",
        "chat_template.jinja", "special_tokens_map.json",
        "chat_template.json",
    };
    char beside[PATH_MAX];
    const char *from = tokenizer && *tokenizer ? tokenizer : base;
    mt_status status = MT_OK;
    if (from && !files_is_folder(from)) {
        const char *slash = strrchr(from, '/'), *name = slash ? slash + 1 : from;
        if (strcmp(name, TOKENIZER_FILE) != 0) {
            status = copy_tokenizer_file(from, folder);
            from = NULL;
        } else {
            snprintf(beside, sizeof beside, "%.*s", slash ? (int)(slash - from) : 1,
                     slash ? from : ".");
            from = beside;
        }
    }
    for (size_t i = 0; from && i < sizeof names / sizeof *names && !status; i++)
        status = copy_file(from, names[i], folder);
    if (base && !status)
        status = copy_file(base, "generation_config.json", folder);
    return status;
}

static mt_status stop_at_first(void *arg, const char *folder, const char *name)
{
    (void)arg;
    (void)folder;
    (void)name;
    return MT_END;
}

/* Renaming would put the folder in the link's place, and not where it leads to. */
static mt_status check_no_link(const char *folder)
{
    char path[PATH_MAX];
    struct stat info;
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/')
        n--;
    snprintf(path, sizeof path, "%.*s", (int)n, folder);
    if (lstat(path, &info) < 0 || !S_ISLNK(info.st_mode))
        return MT_OK;
    return status_set(MT_ERR_INVALID,
                      "%s: is a symbolic link; name the folder itself, or remove the link", path);
}

/* What a file system is mounted at, and what is named by a dot, is there to stay. */
static mt_status check_renamable(const char *folder)
{
    struct statx info;
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/')
        n--;
    bool dot = folder[n - 1] == '.' && (n == 1 || folder[n - 2] == '/' ||
                                        (folder[n - 2] == '.' && (n == 2 || folder[n - 3] == '/')));
    bool mounted =
        statx(AT_FDCWD, folder, 0, 0, &info) == 0 && info.stx_attributes & STATX_ATTR_MOUNT_ROOT;
    if (!dot && !mounted)
        return MT_OK;
    return status_set(MT_ERR_INVALID,
                      "%s: cannot be replaced by the finished export, since %s; name a new folder, "
                      "which may lie in it",
                      folder, dot ? "it is named by a dot" : "a file system is mounted there");
}

/* Nothing of the user's may be replaced or mixed with. */
mt_status export_check_folder(const char *folder, bool replace)
{
    mt_status status = check_no_link(folder);
    if (!status)
        status = check_renamable(folder);
    if (status)
        return status;
    status = files_each(folder, stop_at_first, NULL);
    if (status == MT_ERR_NOT_FOUND)
        return files_check_folder(folder);
    if (status != MT_END)
        return status;
    if (replace && card_is_ours(folder))
        return MT_OK;
    return status_set(MT_ERR_INVALID,
                      "%s: the folder is not empty; export to a new one, or remove it first",
                      folder);
}

/* What lies in a checkpoint goes with it when its time is over, and what lies in a model folder is
 * taken for a part of it. */
static mt_status check_outside(const char *weights, const char *folder)
{
    char path[PATH_MAX], *inner = NULL, *outer = NULL;
    if (!weights || !(outer = realpath(weights, NULL)))
        return MT_OK;
    snprintf(path, sizeof path, "%s", folder);
    while (!(inner = realpath(path, NULL)) && strrchr(path, '/') && strrchr(path, '/') != path)
        *strrchr(path, '/') = '\0';
    if (!inner) /* a new name in the working directory, or below the root */
        inner = realpath(*path == '/' ? "/" : ".", NULL);
    size_t n = strlen(outer);
    bool inside = inner && strncmp(inner, outer, n) == 0 && (!inner[n] || inner[n] == '/');
    free(inner);
    free(outer);
    return inside ? status_set(MT_ERR_INVALID,
                               "%s lies in %s itself, which is exported; name a folder elsewhere",
                               folder, weights)
                  : MT_OK;
}

static mt_status fill(const model_source *source, const model *m, const mt_weights *format,
                      const export_options *o, const char *folder, int64_t *ret_bytes)
{
    const char *dtype = o->dtype == MT_BF16 ? "bfloat16" : "float32";
    mt_status status = o->random ? write_random(m, format, folder, o, ret_bytes)
                                 : export_weights(m, source->weights, format, folder, o, ret_bytes);
    if (!status)
        status = model_source_write_config(source, folder, dtype, NULL, NULL);
    if (!status)
        status = export_copy_files(source->weights, o->tokenizer, folder);
    if (!status && !o->random)
        status = card_write(folder, source->weights, m, o->dtype);
    return status ? status : files_sync_contents(folder);
}

/* Makes the folder that an export is written to and locks it; what a process that was killed left
 * in it goes. */
static mt_status open_temp(const char *temp, int *ret_lock)
{
    for (;;) {
        mt_status status = check_no_link(temp);
        if (!status)
            status = files_make_folders(temp);
        if (status)
            return status;
        int fd = open(temp, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT)
            continue; /* another export has just given it its name */
        if (fd < 0)
            return status_set(MT_ERR_IO, "%s: cannot open: %s", temp, strerror(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) {
            close(fd);
            return status_set(MT_ERR_INVALID,
                              "%s: another process is exporting to the same folder; let it finish, "
                              "or stop it",
                              temp);
        }
        struct stat held, named;
        if (fstat(fd, &held) == 0 && stat(temp, &named) == 0 && held.st_ino == named.st_ino) {
            *ret_lock = fd;
            return files_empty_folder(temp);
        }
        close(fd);
    }
}

/* Gives the finished folder its name, in place of an empty one or of an earlier export. */
static mt_status publish(const char *temp, const char *folder, bool replace)
{
    if (rename(temp, folder) == 0)
        return MT_OK;
    if (replace && renameat2(AT_FDCWD, temp, AT_FDCWD, folder, RENAME_EXCHANGE) == 0) {
        files_discard(temp);
        return MT_OK;
    }
    return status_set(MT_ERR_IO, "%s: cannot rename into place: %s", folder, strerror(errno));
}

mt_status export_bytes(const model *m, mt_dtype dtype, int64_t *ret)
{
    tensor_map *map = NULL;
    mt_status status = tensor_map_create(m, NULL, &map);
    if (status)
        return status;
    int64_t bytes = 0;
    for (int64_t t = 0; t < map->n; t++)
        bytes += tensor_info(&map->tensors[t], export_dtype(m, &map->tensors[t], dtype)).bytes;
    tensor_map_destroy(map);
    *ret = bytes;
    return MT_OK;
}

/* Before the first byte: a disk that an export has filled is in everybody's way. */
static mt_status check_space(const model *m, const export_options *o, const char *temp)
{
    int64_t need = 0, have = files_free_bytes(temp);
    mt_status status = export_bytes(m, o->dtype, &need);
    if (status || have < 0 || need <= have)
        return status;
    return status_set(MT_ERR_IO,
                      "%s: the export needs %s, %s are free; free some space, or export to another "
                      "disk%s",
                      o->folder, human_bytes(need).s, human_bytes(have).s,
                      o->dtype == MT_F32 ? ", or in bf16, which takes half as much" : "");
}

mt_status export_model(const model_source *source, const model *m, const mt_weights *format,
                       const export_options *o, int64_t *ret_bytes)
{
    char temp[PATH_MAX];
    size_t n = strlen(o->folder);
    while (n > 1 && o->folder[n - 1] == '/')
        n--;
    if (snprintf(temp, sizeof temp, "%.*s.tmp-export", (int)n, o->folder) >= (int)sizeof temp)
        return status_set(MT_ERR_INVALID, "%.60s...: the path is too long", o->folder);
    int64_t bytes = 0;
    int lock = -1;
    mt_status status = export_check_folder(o->folder, o->replace);
    if (!status)
        status = check_outside(source->weights, o->folder);
    if (!status)
        status = open_temp(temp, &lock);
    if (lock < 0)
        return status;
    if (!status)
        status = check_space(m, o, temp);
    if (!status)
        status = fill(source, m, format, o, temp, &bytes);
    if (!status)
        status = publish(temp, o->folder, o->replace);
    if (!status)
        *ret_bytes = bytes;
    else
        files_discard(temp);
    close(lock);
    return status;
}
