/* SPDX-License-Identifier: Apache-2.0
 *
 * Saving a checkpoint: everything goes to a temporary folder, is made durable, and appears under
 * its name by one rename. state.json is written last: a folder without it is not a checkpoint.
 */
#include "checkpoint.h"

#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"
#include "checkpoint_files.h"
#include "files.h"
#include "human.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TEMP_PREFIX ".tmp-"

static mt_status make_path(char ret[PATH_MAX], const char *fmt, ...) MT_PRINTF(2, 3);

static mt_status make_path(char ret[PATH_MAX], const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(ret, PATH_MAX, fmt, args);
    va_end(args);
    if (n < 0 || n >= PATH_MAX)
        return status_set(MT_ERR_INVALID, "%.60s...: the path is longer than %d bytes", ret,
                          PATH_MAX - 1);
    return MT_OK;
}

/* The step in "step-000042", -1 for any other name. */
static int64_t step_of(const char *name)
{
    char canonical[40];
    if (strncmp(name, "step-", 5) != 0)
        return -1;
    long long step = strtoll(name + 5, NULL, 10);
    snprintf(canonical, sizeof canonical, "step-%06lld", step);
    return step >= 0 && strcmp(name, canonical) == 0 ? step : -1;
}

/* ---- space ---------------------------------------------------------------------------------- */

static int64_t needed_bytes(const store *s, const checkpoint_options *o, const tensor_map *map)
{
    int64_t bytes = 1 << 20, each = mt_dtype_size(o->weights_dtype);
    for (int64_t t = 0; t < map->n; t++)
        bytes += tensor_elems(&map->tensors[t]) * each + 1024; /* headers, checksums */
    for (int32_t p = 0; p < s->m->n_params && !o->weights_only; p++)
        for (uint32_t k = 0; k < s->n_states && !(s->m->params[p].flags & MT_PARAM_FROZEN); k++)
            bytes += s->m->params[p].elems * mt_dtype_size(s->states[k].dtype) + 1024;
    return bytes;
}

static mt_status check_space(const store *s, const checkpoint_options *o, const tensor_map *map)
{
    int64_t need = needed_bytes(s, o, map), have = files_free_bytes(o->folder);
    if (have < 0 || need <= have)
        return MT_OK;
    return status_set(MT_ERR_IO,
                      "%s: a checkpoint needs %s, %s are free; free some space, lower "
                      "checkpoint.save_total_limit, set checkpoint.weights_only, or choose another "
                      "output_dir",
                      o->folder, human_bytes(need).s, human_bytes(have).s);
}

mt_status checkpoint_bytes(const store *s, const checkpoint_options *o, int64_t *ret)
{
    tensor_map *map = NULL;
    mt_status status = tensor_map_create(s->m, NULL, &map);
    if (!status)
        *ret = needed_bytes(s, o, map);
    tensor_map_destroy(map);
    return status;
}

/* ---- state.json ----------------------------------------------------------------------------- */

static mt_status write_state_file(const store *s, const checkpoint_state *state,
                                  const checkpoint_options *o, const char *folder, json_t *weights,
                                  json_t *states)
{
    char path[PATH_MAX];
    mt_status status = make_path(path, "%s/" CHECKPOINT_STATE_FILE, folder);
    if (status)
        return status;
    json_t *root = checkpoint_state_pack(state), *specs = json_array();
    bool ok = root && specs;
    for (uint32_t k = 0; ok && k < s->n_states && !o->weights_only; k++)
        ok =
            json_array_append_new(specs, json_pack("{s:s, s:s}", "name", s->states[k].name, "dtype",
                                                   mt_dtype_name(s->states[k].dtype))) == 0;
    ok = ok &&
         json_object_set_new(root, "model_type", json_string(o->model_type ? o->model_type : "")) ==
             0 &&
         json_object_set_new(root, "weights_dtype", json_string(mt_dtype_name(o->weights_dtype))) ==
             0 &&
         json_object_set_new(root, "weights_only", json_boolean(o->weights_only)) == 0 &&
         json_object_set(root, "states", specs) == 0 &&
         json_object_set(root, "weights", weights) == 0 &&
         json_object_set(root, "optimizer", states) == 0;
    char sum[17];
    if (ok && (status = checkpoint_state_sum(root, sum)))
        goto out;
    ok = ok && json_object_set_new(root, "checksum", json_string(sum)) == 0;
    char *text = ok ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) : NULL;
    if (text)
        status = files_write(path, text, strlen(text));
    else
        status = status_nomem("state.json", 0);
    free(text);
out:
    json_decref(specs);
    json_decref(root);
    return status;
}

/* ---- folders -------------------------------------------------------------------------------- */

/* What an interrupted save or rotation left. What cannot be removed, for it is another user's, say,
 * is in nobody's way. */
static mt_status remove_stale(void *arg, const char *folder, const char *name)
{
    (void)arg;
    char path[PATH_MAX];
    if (strncmp(name, TEMP_PREFIX, sizeof TEMP_PREFIX - 1) != 0)
        return MT_OK;
    mt_status status = make_path(path, "%s/%s", folder, name);
    if (!status && files_remove_tree(path))
        log_write(MT_LOG_WARNING, "checkpoint: %s", status_text());
    return status;
}

typedef struct step_list {
    int64_t *steps;
    int64_t n, cap;
} step_list;

static mt_status collect_step(void *arg, const char *folder, const char *name)
{
    step_list *l = arg;
    char path[PATH_MAX];
    int64_t step = step_of(name);
    if (step < 0)
        return MT_OK;
    mt_status status = make_path(path, "%s/%s/" CHECKPOINT_STATE_FILE, folder, name);
    if (status || !files_may_be_file(path))
        return status;
    if (l->n == l->cap) {
        int64_t cap = l->cap ? 2 * l->cap : 16;
        int64_t *grown = realloc(l->steps, (size_t)cap * sizeof *grown);
        if (!grown)
            return status_nomem("the list of checkpoints", (size_t)cap * sizeof *grown);
        l->steps = grown;
        l->cap = cap;
    }
    l->steps[l->n++] = step;
    return MT_OK;
}

static int newest_first(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* Steps of the complete checkpoints in `folder`, newest first. */
static mt_status list_steps(const char *folder, step_list *ret)
{
    mt_status status = files_each(folder, collect_step, ret);
    if (!status && ret->n)
        qsort(ret->steps, (size_t)ret->n, sizeof *ret->steps, newest_first);
    return status;
}

mt_status checkpoint_count(const char *folder, int64_t *ret)
{
    step_list l = { 0 };
    mt_status status = list_steps(folder, &l);
    if (!status)
        *ret = l.n;
    free(l.steps);
    return status;
}

void checkpoint_list(const char *folder, char *ret, size_t size)
{
    enum { SHOWN = 4 };
    step_list l = { 0 };
    bool known = list_steps(folder, &l) == MT_OK && l.n > 0;
    snprintf(ret, size, "%s holds%s", folder, known ? "" : " no complete checkpoint");
    for (int64_t i = 0; known && i < l.n && i < SHOWN; i++)
        text_append(ret, size, "%s step-%06lld", i ? "," : "", (long long)l.steps[i]);
    if (known && l.n > SHOWN)
        text_append(ret, size, " and %lld older ones", (long long)(l.n - SHOWN));
    free(l.steps);
}

/* Removes all but the newest `keep` complete checkpoints, and the best; the one just saved counts
 * and stays. They leave by way of a temporary name, so that a half removed one is never taken for a
 * checkpoint. */
static mt_status rotate(const char *folder, int64_t keep, int64_t saved, int64_t best)
{
    step_list l = { 0 };
    mt_status status = list_steps(folder, &l);
    int64_t kept = 1;
    for (int64_t i = 0; i < l.n && !status; i++) {
        char path[PATH_MAX], temp[PATH_MAX];
        if (l.steps[i] == saved || kept++ < keep || l.steps[i] == best)
            continue;
        if ((status = make_path(path, "%s/step-%06lld", folder, (long long)l.steps[i])) ||
            (status = make_path(temp, "%s/" TEMP_PREFIX "old-step-%06lld", folder,
                                (long long)l.steps[i])))
            break;
        if (rename(path, temp) < 0)
            status = status_set(MT_ERR_IO, "%s: cannot remove: %s", path, strerror(errno));
        else
            status = files_remove_tree(temp);
    }
    free(l.steps);
    return status;
}

/* Lets the link `best` name the checkpoint of that step, where there is one. */
static mt_status link_best(const char *folder, int64_t step)
{
    char name[64], path[PATH_MAX], link[PATH_MAX], aside[PATH_MAX];
    snprintf(name, sizeof name, "step-%06lld", (long long)step);
    mt_status status = make_path(path, "%s/%s", folder, name);
    if (status || (status = make_path(link, "%s/" CHECKPOINT_BEST, folder)) ||
        (status = make_path(aside, "%s/" TEMP_PREFIX CHECKPOINT_BEST, folder)))
        return status;
    if (!files_is_folder(path))
        return MT_OK;
    if ((unlink(aside) < 0 && errno != ENOENT) || symlink(name, aside) < 0 ||
        rename(aside, link) < 0)
        return status_set(MT_ERR_IO, "%s: cannot link: %s", link, strerror(errno));
    return MT_OK;
}

/* Gives the finished folder its name. One of the same step that stands there is exchanged for it
 * in one step; where the file system cannot exchange, it steps aside first. */
static mt_status publish(const char *temp, const char *final, const char *aside)
{
    if (renameat2(AT_FDCWD, temp, AT_FDCWD, final, RENAME_NOREPLACE) == 0)
        return MT_OK;
    if (errno == EEXIST && renameat2(AT_FDCWD, temp, AT_FDCWD, final, RENAME_EXCHANGE) == 0) {
        files_discard(temp);
        return MT_OK;
    }
    if (files_is_folder(final) && rename(final, aside) < 0)
        return status_set(MT_ERR_IO, "%s: cannot replace: %s", final, strerror(errno));
    if (rename(temp, final) < 0) {
        mt_status status =
            status_set(MT_ERR_IO, "%s: cannot rename into place: %s", final, strerror(errno));
        if (files_is_folder(aside) && rename(aside, final) < 0)
            log_write(MT_LOG_ERROR, "the earlier checkpoint is now %s", aside);
        return status;
    }
    files_discard(aside);
    return MT_OK;
}

/* ---- the interface -------------------------------------------------------------------------- */

static mt_status fill_folder(const store *s, const checkpoint_state *state,
                             const checkpoint_options *o, const tensor_map *map,
                             const mt_weights *format,
                             mt_status (*write_config)(void *arg, const char *folder), void *arg,
                             const char *folder)
{
    json_t *weights = json_object(), *states = json_object();
    mt_status status = weights && states ? MT_OK : status_nomem("checksums of a checkpoint", 0);
    if (!status)
        status = checkpoint_save_tensors(s, o, map, format, folder, weights, states);
    if (!status && write_config)
        status = write_config(arg, folder);
    if (!status)
        status = files_sync_contents(folder);
    if (!status)
        status = write_state_file(s, state, o, folder, weights, states);
    if (!status)
        status = files_sync_folder(folder);
    json_decref(weights);
    json_decref(states);
    return status;
}

static mt_status save(const store *s, const checkpoint_state *state, const checkpoint_options *o,
                      const tensor_map *map, const mt_weights *format,
                      mt_status (*write_config)(void *arg, const char *folder), void *arg)
{
    char temp[PATH_MAX], final[PATH_MAX], aside[PATH_MAX];
    long long step = (long long)state->step;
    mt_status status;
    if (state->step < 0 || o->keep < 0 || o->shard_bytes < 0 ||
        !(o->weights_dtype == MT_F32 || (o->weights_dtype == MT_BF16 && o->weights_only)))
        return status_set(MT_ERR_INVALID,
                          "step %lld, %lld to keep, shards of %lld bytes, weights in %s; expected "
                          "no negative number, and fp32 (or bf16 for weights only)",
                          step, (long long)o->keep, (long long)o->shard_bytes,
                          mt_dtype_name(o->weights_dtype));
    if ((status = make_path(temp, "%s/" TEMP_PREFIX "step-%06lld", o->folder, step)) ||
        (status = make_path(final, "%s/step-%06lld", o->folder, step)) ||
        (status = make_path(aside, "%s/" TEMP_PREFIX "old-step-%06lld", o->folder, step)))
        return status;
    if ((status = files_make_folders(o->folder)) ||
        (status = files_each(o->folder, remove_stale, NULL)) ||
        (status = files_remove_tree(temp)) || (status = check_space(s, o, map)) ||
        (status = files_make_folders(temp)))
        return status;
    if ((status = fill_folder(s, state, o, map, format, write_config, arg, temp)) ||
        (status = publish(temp, final, aside))) {
        files_discard(temp);
        return status;
    }
    if ((status = files_sync_folder(o->folder)))
        return status;
    /* The checkpoint stands: what cannot be removed must not make the save fail. */
    if ((o->best_step > 0 && link_best(o->folder, o->best_step)) ||
        (o->keep > 0 && rotate(o->folder, o->keep, state->step, o->best_step)))
        log_write(MT_LOG_WARNING, "checkpoint: %s", status_text());
    return MT_OK;
}

mt_status checkpoint_save(const store *s, const checkpoint_state *state,
                          const checkpoint_options *options, const mt_weights *format,
                          mt_status (*write_config)(void *arg, const char *folder), void *arg)
{
    tensor_map *map = NULL;
    mt_status status = tensor_map_create(s->m, NULL, &map);
    if (!status)
        status = save(s, state, options, map, format, write_config, arg);
    tensor_map_destroy(map);
    return status ? status_prefix(status, "cannot save step %lld", (long long)state->step) : MT_OK;
}

mt_status checkpoint_tidy(const char *folder, int64_t best_step)
{
    mt_status status = files_each(folder, remove_stale, NULL);
    return status || best_step <= 0 ? status : link_best(folder, best_step);
}

/* The newest one of a step below `before` whose state is whole. One that cannot be read, since its
 * disk or its owner does not let us, may well be: what comes after it would be lost. */
static mt_status find_newest(const char *folder, int64_t before, char *ret, size_t size)
{
    step_list l = { 0 };
    char path[PATH_MAX];
    mt_status status = list_steps(folder, &l);
    if (!status) {
        status = status_set(MT_ERR_NOT_FOUND, "%s: no complete checkpoint", folder);
        for (int64_t i = 0; i < l.n && status; i++) {
            json_t *root;
            if (l.steps[i] >= before)
                continue;
            if ((status = make_path(path, "%s/step-%06lld", folder, (long long)l.steps[i])))
                break;
            status = checkpoint_read_state(path, &root);
            if (status == MT_ERR_IO) {
                char text[2048];
                snprintf(text, sizeof text, "%s", status_text());
                status = status_set(status,
                                    "%s; make it readable, or move %s elsewhere to go on without "
                                    "it",
                                    text, path);
                break;
            }
            if (status)
                log_write(MT_LOG_WARNING, "passed over: %s", status_text());
            else
                json_decref(root);
        }
    }
    free(l.steps);
    if (!status && strlen(path) >= size)
        status = status_set(MT_ERR_INVALID, "%s: the path is too long", path);
    if (!status)
        memcpy(ret, path, strlen(path) + 1);
    return status;
}

mt_status checkpoint_latest(const char *folder, char *ret, size_t size)
{
    return find_newest(folder, INT64_MAX, ret, size);
}

mt_status checkpoint_older(const char *path, char *ret, size_t size)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int64_t step = slash ? step_of(slash + 1) : -1;
    if (step < 0)
        return status_set(MT_ERR_NOT_FOUND, "%s: not in a folder of checkpoints", path);
    mt_status status = make_path(folder, "%.*s", (int)(slash - path), path);
    return status ? status : find_newest(folder, step, ret, size);
}

mt_status checkpoint_read(const char *path, checkpoint_state *ret)
{
    json_t *root = NULL;
    mt_status status = checkpoint_read_state(path, &root);
    if (!status)
        status = checkpoint_state_unpack(root, path, ret);
    json_decref(root);
    return status;
}
