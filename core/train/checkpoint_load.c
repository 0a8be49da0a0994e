/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading a checkpoint: state.json says what must be there, in which dtypes, with which checksums;
 * whatever differs is named.
 */
#include "../base/status.h"
#include "../base/text.h"
#include "checkpoint.h"
#include "checkpoint_files.h"
#include "files.h"
#include "weights_pass.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <megatrain/json.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- state.json ----------------------------------------------------------------------------- */

/* JSON knows neither infinity nor NaN: they are written as text. */
static json_t *pack_real(double x)
{
    return isfinite(x) ? json_real(x) : json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

/* NaN where there is nothing. */
static double unpack_real(const json_t *x)
{
    if (json_is_string(x))
        return strtod(json_string_value(x), NULL);
    return json_is_number(x) ? json_number_value(x) : NAN;
}

json_t *checkpoint_state_pack(const checkpoint_state *s)
{
    char seed[32], fingerprint[17];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)s->seed);
    snprintf(fingerprint, sizeof fingerprint, "%016llx", (unsigned long long)s->fingerprint);
    return json_pack("{s:s, s:i, s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:s}, s:s, "
                     "s:o, s:I, s:I, s:I, s:o, s:o}",
                     "format", CHECKPOINT_FORMAT, "version", CHECKPOINT_VERSION, "step",
                     (json_int_t)s->step, "optimizer_step", (json_int_t)s->optimizer_step, "tokens",
                     (json_int_t)s->tokens, "targets", (json_int_t)s->targets, "data", "epoch",
                     (json_int_t)s->data.epoch, "index", (json_int_t)s->data.index, "offset",
                     (json_int_t)s->data.offset, "micro_tokens", (json_int_t)s->data.micro_tokens,
                     "epoch_documents", (json_int_t)s->epoch_documents, "epoch_tokens",
                     (json_int_t)s->epoch_tokens, "fingerprint", fingerprint, "seed", seed,
                     "best_validation_loss", pack_real(s->best_validation_loss), "skipped_in_a_row",
                     (json_int_t)s->skipped_in_a_row, "best_step", (json_int_t)s->best_step,
                     "evaluations_since_best", (json_int_t)s->evaluations_since_best, "loss",
                     pack_real(s->loss), "validation_loss", pack_real(s->validation_loss));
}

mt_status checkpoint_state_unpack(const json_t *root, const char *path, checkpoint_state *ret)
{
    json_error_t error;
    json_int_t step, optimizer_step, tokens, targets, epoch, index, offset, documents, epoch_tokens,
        skipped, micro_tokens = 0, best_step = 0, since_best = 0;
    const char *seed, *fingerprint = "0";
    json_t *best, *loss = NULL, *validation = NULL;
    if (json_unpack_ex((json_t *)root, &error, 0,
                       "{s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I, s?I, s:I, s:I, s?s}, s:s, s:o, s:I, "
                       "s?I, s?I, s?o, s?o}",
                       "step", &step, "optimizer_step", &optimizer_step, "tokens", &tokens,
                       "targets", &targets, "data", "epoch", &epoch, "index", &index, "offset",
                       &offset, "micro_tokens", &micro_tokens, "epoch_documents", &documents,
                       "epoch_tokens", &epoch_tokens, "fingerprint", &fingerprint, "seed", &seed,
                       "best_validation_loss", &best, "skipped_in_a_row", &skipped, "best_step",
                       &best_step, "evaluations_since_best", &since_best, "loss", &loss,
                       "validation_loss", &validation) < 0)
        return status_set(MT_ERR_FORMAT, "%s/" CHECKPOINT_STATE_FILE ": %s; the file is damaged",
                          path, error.text);
    char *end;
    errno = 0;
    unsigned long long seed_value = strtoull(seed, &end, 10);
    if (errno || *end || end == seed)
        return status_set(MT_ERR_FORMAT,
                          "%s/" CHECKPOINT_STATE_FILE ": seed '%s' is not a number; the file is "
                          "damaged",
                          path, seed);
    *ret = (checkpoint_state){ .step = step,
                               .optimizer_step = optimizer_step,
                               .tokens = tokens,
                               .targets = targets,
                               .data = { epoch, index, offset, micro_tokens },
                               .epoch_documents = documents,
                               .epoch_tokens = epoch_tokens,
                               .fingerprint = strtoull(fingerprint, NULL, 16),
                               .seed = seed_value,
                               .best_validation_loss = unpack_real(best),
                               .loss = unpack_real(loss),
                               .validation_loss = unpack_real(validation),
                               .skipped_in_a_row = skipped,
                               .best_step = best_step,
                               .evaluations_since_best = since_best };
    return MT_OK;
}

mt_status checkpoint_state_sum(const json_t *root, char ret[17])
{
    json_t *copy = json_copy((json_t *)root);
    if (copy)
        json_object_del(copy, "checksum");
    char *text =
        copy ? json_dumps(copy, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(copy);
    if (!text)
        return status_nomem("the checksum of " CHECKPOINT_STATE_FILE, 0);
    snprintf(ret, 17, "%016llx", (unsigned long long)XXH3_64bits(text, strlen(text)));
    free(text);
    return MT_OK;
}

static mt_status check_state_sum(const json_t *root, const char *path)
{
    char sum[17];
    mt_status status = checkpoint_state_sum(root, sum);
    if (status)
        return status;
    const char *want = json_string_value(json_object_get(root, "checksum"));
    if (want && strcmp(want, sum) == 0)
        return MT_OK;
    return status_set(MT_ERR_FORMAT,
                      "%s/" CHECKPOINT_STATE_FILE ": its values have checksum %s, expected %s; the "
                      "file is damaged or was changed: use another checkpoint",
                      path, sum, want ? want : "none");
}

mt_status checkpoint_read_state(const char *folder, json_t **ret)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/" CHECKPOINT_STATE_FILE, folder) >= (int)sizeof path)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", folder);
    if (!files_may_be_file(path))
        return status_set(MT_ERR_NOT_FOUND,
                          "%s: no " CHECKPOINT_STATE_FILE " in it: not a complete checkpoint; "
                          "choose another one",
                          folder);
    json_error_t error;
    char place[PATH_MAX + 32];
    json_t *root = mt_json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!root && error.line <= 0)
        return status_set(MT_ERR_IO, "%s: %s", path, error.text);
    if (!root)
        return status_set(MT_ERR_FORMAT, "%s: %s; the file is damaged",
                          mt_json_place(path, &error, place, sizeof place), error.text);
    const char *format = json_string_value(json_object_get(root, "format"));
    json_int_t version = json_integer_value(json_object_get(root, "version"));
    if (format && strcmp(format, CHECKPOINT_FORMAT) == 0 && version == CHECKPOINT_VERSION) {
        *ret = root;
        return MT_OK;
    }
    mt_status status = status_set(
        MT_ERR_UNSUPPORTED, "%s: format '%s' version %lld; expected '%s' version %d", path,
        format ? format : "", (long long)version, CHECKPOINT_FORMAT, CHECKPOINT_VERSION);
    json_decref(root);
    return status;
}

/* "m (fp32), v (fp32)", or "none". */
static const char *name_states(char text[256], const json_t *list)
{
    size_t i;
    json_t *e;
    snprintf(text, 256, "%s", json_array_size(list) ? "" : "none");
    json_array_foreach((json_t *)list, i, e)
    {
        const char *name = json_string_value(json_object_get(e, "name"));
        const char *dtype = json_string_value(json_object_get(e, "dtype"));
        text_append(text, 256, "%s%s (%s)", i ? ", " : "", name ? name : "?", dtype ? dtype : "?");
    }
    return text;
}

/* The checkpoint must hold the states that this run's optimizer keeps, in the same dtypes. */
static mt_status check_states(const store *s, const json_t *root, const char *path)
{
    const json_t *list = json_object_get(root, "states");
    if (json_is_true(json_object_get(root, "weights_only")))
        return status_set(
            MT_ERR_INVALID,
            "%s: saved with checkpoint.weights_only, so there are no optimizer states "
            "to resume from; give it as `model:` to start anew from these weights",
            path);
    bool same = json_array_size(list) == s->n_states;
    json_t *mine = json_array();
    for (uint32_t k = 0; k < s->n_states && mine; k++)
        json_array_append_new(mine, json_pack("{s:s, s:s}", "name", s->states[k].name, "dtype",
                                              mt_dtype_name(s->states[k].dtype)));
    same = same && mine && json_equal(mine, (json_t *)list);
    mt_status status = MT_OK;
    char found[256], expected[256];
    if (!same)
        status = status_set(MT_ERR_INVALID,
                            "%s: holds the optimizer states %s, this run's optimizer keeps %s; "
                            "resume with the same optimizer and state dtypes, or give it as "
                            "`model:` to start anew from these weights",
                            path, name_states(found, list), name_states(expected, mine));
    json_decref(mine);
    return status;
}

/* ---- tensors -------------------------------------------------------------------------------- */

mt_status checkpoint_check_sum(const json_t *sums, const char *name, uint64_t sum, const char *file)
{
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sum);
    const char *want = json_string_value(json_object_get(sums, name));
    if (want && strcmp(want, text) == 0)
        return MT_OK;
    return status_set(MT_ERR_FORMAT,
                      "%s: tensor '%s' has checksum %s, expected %s (" CHECKPOINT_STATE_FILE
                      "); the file is damaged: use another checkpoint",
                      file, name, text, want ? want : "none");
}

static mt_status check_dtype(const mt_tensor_info *info, mt_dtype want, const char *file)
{
    if (info->dtype == want)
        return MT_OK;
    return status_set(MT_ERR_FORMAT, "%s: tensor '%s' is %s, expected %s", file, info->name,
                      mt_dtype_name(info->dtype), mt_dtype_name(want));
}

/* Once state.json is known to list what the model has, a file that differs is damaged. */
static mt_status unknown_tensor(const mt_tensor_info *info, const char *file)
{
    return status_set(MT_ERR_FORMAT,
                      "%s: tensor '%s' is not one of those that " CHECKPOINT_STATE_FILE
                      " lists; the file is damaged: use another checkpoint",
                      file, info->name);
}

/* Readers refuse a name that comes twice, so as many as expected, all known, are all. */
static mt_status check_count(int64_t found, int64_t expected, const char *what, const char *path)
{
    if (found == expected)
        return MT_OK;
    return status_set(MT_ERR_FORMAT,
                      "%s: its files hold %lld %s, " CHECKPOINT_STATE_FILE
                      " lists %lld; it is damaged: use another checkpoint",
                      path, (long long)found, what, (long long)expected);
}

/* The checkpoint is good, but of another model. */
static mt_status other_model(const char *path, const char *found)
{
    return status_set(MT_ERR_INVALID,
                      "%s: %s; go on with the model that the checkpoint was made with, or begin "
                      "with this one in another output_dir",
                      path, found);
}

/* state.json lists the tensors of the files: with others, the model is another one. */
static mt_status check_model(const tensor_map *map, const json_t *root, const char *path)
{
    json_t *sums = json_object_get(root, "weights"), *sum;
    const char *name;
    char found[1200];
    for (int64_t t = 0; t < map->n; t++)
        if (!json_object_get(sums, map->tensors[t].name)) {
            snprintf(found, sizeof found, "it has no tensor '%.1000s', which the model needs",
                     map->tensors[t].name);
            return other_model(path, found);
        }
    json_object_foreach(sums, name, sum)
    {
        if (tensor_map_find(map, name) >= 0)
            continue;
        snprintf(found, sizeof found, "its tensor '%.1000s' belongs to nothing in the model", name);
        return other_model(path, found);
    }
    return MT_OK;
}

static mt_status check_shape(const mt_tensor_info *want, const mt_tensor_info *info,
                             const char *file, const char *path)
{
    char found[1200];
    if (weights_check_shape(want, info, file) == MT_OK)
        return MT_OK;
    snprintf(found, sizeof found, "%.1100s", status_text());
    return other_model(path, found);
}

/* States are of parameters that are trained: fewer or more of them freeze. */
static mt_status other_states(const char *path, const char *found)
{
    return status_set(MT_ERR_INVALID,
                      "%s: %s; go on with the train.freeze that the checkpoint was made with, or "
                      "start anew from its weights (model: %s) in another output_dir",
                      path, found, path);
}

/* A set of files that is being read: all of it is checked before the first byte is. */
typedef struct loading {
    store *s;
    const char *path;
    const mt_weights *format;
    void *reader;
    const json_t *sums;
    weights_item *items; /* [n] */
    int64_t n, bytes;
} loading;

static mt_status loading_open(loading *l, const char *files)
{
    mt_status status = l->format->open(files, &l->reader);
    if (status)
        return status;
    if (l->format->struct_size >= offsetof(mt_weights, read_once) + sizeof l->format->read_once &&
        l->format->read_once)
        l->format->read_once(l->reader);
    l->n = l->format->count(l->reader);
    l->items = calloc((size_t)l->n + 1, sizeof *l->items);
    return l->items ? MT_OK : status_nomem("the list of tensors", (size_t)l->n * sizeof *l->items);
}

static void loading_close(loading *l)
{
    l->format->close(l->reader);
    free(l->items);
}

static mt_status check_item(void *arg, const weights_item *item)
{
    const loading *l = arg;
    mt_tensor_info info;
    mt_status status = l->format->info(l->reader, item->index, &info);
    return status ? status
                  : checkpoint_check_sum(l->sums, info.name, item->sum,
                                         l->format->file(l->reader, item->index));
}

static mt_status read_all(loading *l, const tensor_map *map, progress *p)
{
    const weights_way way = { .format = l->format,
                              .reader = l->reader,
                              .masters = weights_of_store(l->s),
                              .map = map,
                              .sums = true,
                              .check = check_item,
                              .arg = l,
                              .progress = p };
    return weights_pass(&way, l->items, l->n);
}

static mt_status list_weight(loading *l, const tensor_map *map, int64_t i, mt_dtype dtype)
{
    const char *file = l->format->file(l->reader, i);
    mt_tensor_info info;
    mt_status status = l->format->info(l->reader, i, &info);
    if (status)
        return status;
    int64_t t = tensor_map_find(map, info.name);
    if (t < 0)
        return unknown_tensor(&info, file);
    mt_tensor_info want = tensor_info(&map->tensors[t], dtype);
    if ((status = check_dtype(&info, dtype, file)) ||
        (status = check_shape(&want, &info, file, l->path)))
        return status;
    l->items[i] = (weights_item){ .index = i, .dtype = dtype, .tensor = t, .bytes = info.bytes };
    l->bytes += info.bytes;
    return MT_OK;
}

/* Opens and checks the files of weights. */
static mt_status list_weights(loading *l, const tensor_map *map, const json_t *root)
{
    const char *dtype_name = json_string_value(json_object_get(root, "weights_dtype"));
    bool bf16 = dtype_name && strcmp(dtype_name, mt_dtype_name(MT_BF16)) == 0;
    l->sums = json_object_get(root, "weights");
    mt_status status = loading_open(l, l->path);
    if (!status)
        status = check_model(map, root, l->path);
    for (int64_t i = 0; i < l->n && !status; i++)
        status = list_weight(l, map, i, bf16 ? MT_BF16 : MT_F32);
    return status ? status : check_count(l->n, map->n, "weight tensors", l->path);
}

static bool is_trained(const store *s, int32_t param)
{
    return !(s->m->params[param].flags & MT_PARAM_FROZEN);
}

/* "NAME.m" -> parameter NAME and the plane m. */
static bool find_state(const store *s, const char *name, int32_t *ret_param, uint32_t *ret_state)
{
    char param[1024];
    size_t n = strlen(name);
    for (uint32_t k = 0; k < s->n_states; k++) {
        size_t tail = strlen(s->states[k].name);
        if (n <= tail + 1 || n - tail - 1 >= sizeof param || name[n - tail - 1] != '.' ||
            strcmp(name + n - tail, s->states[k].name) != 0)
            continue;
        memcpy(param, name, n - tail - 1);
        param[n - tail - 1] = '\0';
        int32_t p = model_find_param(s->m, param);
        if (p < 0 || !is_trained(s, p))
            continue;
        *ret_param = p;
        *ret_state = k;
        return true;
    }
    return false;
}

/* state.json lists the states too: those of the parameters that were trained. */
static mt_status check_trained(const store *s, const json_t *root, const char *path)
{
    json_t *sums = json_object_get(root, "optimizer"), *sum;
    const char *name;
    char found[1200], state[1100];
    int32_t p = 0;
    uint32_t k = 0;
    json_object_foreach(sums, name, sum)
    {
        if (find_state(s, name, &p, &k))
            continue;
        snprintf(found, sizeof found,
                 "it holds the optimizer state '%.1000s', which is of no parameter that is trained",
                 name);
        return other_states(path, found);
    }
    for (p = 0; p < s->m->n_params; p++)
        for (k = 0; k < s->n_states && is_trained(s, p); k++) {
            snprintf(state, sizeof state, "%.1000s.%s", s->m->params[p].name, s->states[k].name);
            if (json_object_get(sums, state))
                continue;
            snprintf(found, sizeof found,
                     "it lacks the optimizer state '%s' of a parameter that is trained", state);
            return other_states(path, found);
        }
    return MT_OK;
}

static mt_status list_state(loading *l, int64_t i)
{
    store *s = l->s;
    const char *file = l->format->file(l->reader, i);
    mt_tensor_info info;
    int32_t p = 0;
    uint32_t k = 0;
    mt_status status = l->format->info(l->reader, i, &info);
    if (status)
        return status;
    if (!find_state(s, info.name, &p, &k))
        return unknown_tensor(&info, file);
    mt_tensor_info own = checkpoint_state_info(&s->m->params[p], "", info.dtype);
    if ((status = check_dtype(&info, s->states[k].dtype, file)) ||
        (status = weights_check_shape(&own, &info, file)))
        return status;
    l->items[i] = (weights_item){
        .index = i, .dtype = info.dtype, .plane = store_state(s, p, k), .bytes = info.bytes
    };
    l->bytes += info.bytes;
    return MT_OK;
}

/* The same for the files of optimizer states; a store without states reads none. */
static mt_status list_states(loading *l, const json_t *root)
{
    char stem[PATH_MAX];
    int64_t want = 0;
    if (l->s->n_states == 0)
        return MT_OK;
    if (snprintf(stem, sizeof stem, "%s/" CHECKPOINT_STATES_STEM, l->path) >= (int)sizeof stem)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", l->path);
    l->sums = json_object_get(root, "optimizer");
    mt_status status = loading_open(l, stem);
    for (int64_t i = 0; i < l->n && !status; i++)
        status = list_state(l, i);
    for (int32_t p = 0; p < l->s->m->n_params; p++)
        want += is_trained(l->s, p) ? l->s->n_states : 0;
    return status ? status : check_count(l->n, want, "optimizer states", l->path);
}

static mt_status load_tensors(store *s, const json_t *root, const char *path,
                              const mt_weights *format)
{
    loading weights = { .s = s, .path = path, .format = format }, states = weights;
    tensor_map *map = NULL;
    progress p;
    mt_status status = tensor_map_create(s->m, NULL, &map);
    if (!status)
        status = list_weights(&weights, map, root);
    if (!status)
        status = list_states(&states, root);
    if (!status) {
        progress_begin(&p, "loading the checkpoint", weights.bytes + states.bytes);
        status = read_all(&weights, map, &p);
        if (!status)
            status = read_all(&states, map, &p);
        progress_end(&p);
    }
    loading_close(&states);
    loading_close(&weights);
    tensor_map_destroy(map);
    return status;
}

mt_status checkpoint_load(store *s, const char *path, const mt_weights *format,
                          checkpoint_state *ret)
{
    json_t *root = NULL;
    checkpoint_state state;
    mt_status status = checkpoint_read_state(path, &root);
    if (status)
        return status;
    if ((status = checkpoint_state_unpack(root, path, &state)) ||
        (status = check_state_sum(root, path)))
        goto out;
    if (s->n_states &&
        ((status = check_states(s, root, path)) || (status = check_trained(s, root, path))))
        goto out;
    status = load_tensors(s, root, path, format);
    if (!status)
        *ret = state;
out:
    json_decref(root);
    return status;
}
