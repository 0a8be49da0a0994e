/* SPDX-License-Identifier: Apache-2.0
 *
 * How the tensors of a file fit a model: every parameter is filled exactly once, and every tensor
 * is used, ignored on purpose, or an error.
 */
#include "weights.h"

#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- names in the file ---------------------------------------------------------------------- */

/* Text models are also saved as a part of a vision-language model; both wrappings are taken off:
 * "language_model.model.X", "language_model.lm_head.X" and "model.language_model.X". NULL: neither,
 * or too long to be a parameter's name. */
static const char *unwrap(const char *name, char bare[512])
{
    static const char outer[] = "language_model.", inner[] = "model.language_model.";
    int n = 512;
    if (strncmp(name, outer, sizeof outer - 1) == 0)
        n = snprintf(bare, 512, "%s", name + sizeof outer - 1);
    else if (strncmp(name, inner, sizeof inner - 1) == 0)
        n = snprintf(bare, 512, "model.%s", name + sizeof inner - 1);
    return n < 512 ? bare : NULL;
}

bool weights_ignored(const model *m, const char *name)
{
    char bare[512];
    const char *inner = unwrap(name, bare);
    return model_ignores(m, name) || (inner && model_ignores(m, inner));
}

/* A name that a tensor answers to. */
typedef struct known_name {
    const char *name;
    int64_t index;
} known_name;

typedef struct name_list {
    known_name *list; /* sorted */
    int64_t n;
} name_list;

static int by_name(const void *a, const void *b)
{
    const known_name *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x->index > y->index) - (x->index < y->index);
}

static mt_status list_names(const mt_weights *format, const void *reader, int64_t count, arena *mem,
                            name_list *ret)
{
    name_list l = { arena_array(mem, (size_t)count * 2 + 1, sizeof *l.list), 0 };
    if (!l.list)
        return MT_ERR_NOMEM;
    for (int64_t i = 0; i < count; i++) {
        mt_tensor_info info;
        char bare[512];
        mt_status status = format->info(reader, i, &info);
        if (status)
            return status;
        l.list[l.n++] = (known_name){ info.name, i };
        if (!unwrap(info.name, bare))
            continue;
        const char *copy = arena_strdup(mem, bare);
        if (!copy)
            return MT_ERR_NOMEM;
        l.list[l.n++] = (known_name){ copy, i };
    }
    qsort(l.list, (size_t)l.n, sizeof *l.list, by_name);
    *ret = l;
    return MT_OK;
}

/* The first entry of that name, NULL when there is none. */
static const known_name *find_name(const name_list *l, const char *name)
{
    int64_t low = 0, high = l->n;
    while (low < high) {
        int64_t at = low + (high - low) / 2;
        if (strcmp(l->list[at].name, name) < 0)
            low = at + 1;
        else
            high = at;
    }
    return low < l->n && strcmp(l->list[low].name, name) == 0 ? &l->list[low] : NULL;
}

/* ---- layouts -------------------------------------------------------------------------------- */

/* How much of a layout is there. */
typedef struct presence {
    const name_list *names;
    int64_t wanted, there;
    char missing[512]; /* the first one; "" when all are there */
} presence;

static mt_status look_for(void *arg, const char *name, const mt_source *s, int32_t matrix)
{
    (void)s;
    (void)matrix;
    presence *p = arg;
    p->wanted++;
    if (find_name(p->names, name))
        p->there++;
    else if (!p->missing[0])
        snprintf(p->missing, sizeof p->missing, "%s", name);
    return MT_OK;
}

static mt_status look_at(const model_param *p, uint32_t layout, const name_list *names,
                         presence *ret)
{
    *ret = (presence){ .names = names };
    return tensor_map_each_name(p, &p->info->layouts[layout], look_for, ret);
}

/* Picks the layouts; one that is not complete is the one of which most is there. */
static mt_status choose(weights_match *w, const model *m, const name_list *names, uint32_t *layout)
{
    for (int32_t p = 0; p < m->n_params; p++) {
        bool complete = false;
        double best = -1;
        for (uint32_t k = 0; k < m->params[p].info->n_layouts && !complete; k++) {
            presence found;
            mt_status status = look_at(&m->params[p], k, names, &found);
            if (status)
                return status;
            complete = found.there == found.wanted;
            double part = (double)found.there / (double)found.wanted;
            if (part > best) {
                best = part;
                layout[p] = k;
            }
        }
        if (!complete && !w->missing++)
            w->first_missing = p;
    }
    return MT_OK;
}

/* Which tensor of the file is which one of the map; two that are the same one are an error. */
static mt_status pair(weights_match *w, const mt_weights *format, const void *reader,
                      const name_list *names)
{
    const tensor_map *map = w->map;
    for (int64_t i = 0; i < w->count; i++)
        w->tensor[i] = -1;
    for (int64_t t = 0; t < map->n; t++) {
        const known_name *found = find_name(names, map->tensors[t].name);
        w->index[t] = found ? found->index : -1;
        if (!found)
            continue;
        w->tensor[found->index] = t;
        const known_name *next = found + 1;
        if (next == names->list + names->n || strcmp(next->name, found->name) != 0)
            continue;
        mt_tensor_info a, b;
        mt_status status = format->info(reader, found->index, &a);
        if (!status)
            status = format->info(reader, next->index, &b);
        return status ? status
                      : status_set(MT_ERR_FORMAT,
                                   "%s: tensors '%s' and '%s' both are '%s' of the model; expected "
                                   "one",
                                   format->file(reader, next->index), a.name, b.name, found->name);
    }
    return MT_OK;
}

mt_status weights_match_create(const model *m, const mt_weights *format, const void *reader,
                               weights_match **ret)
{
    weights_match *w = calloc(1, sizeof *w);
    uint32_t *layout = calloc((size_t)m->n_params + 1, sizeof *layout);
    arena mem = { 0 };
    name_list names;
    mt_status status;
    if (!w || !layout) {
        status = status_nomem("the names of weights", (size_t)m->n_params * sizeof *layout);
        goto out;
    }
    w->count = format->count(reader);
    if ((status = list_names(format, reader, w->count, &mem, &names)) ||
        (status = choose(w, m, &names, layout)) || (status = tensor_map_create(m, layout, &w->map)))
        goto out;
    w->tensor = calloc((size_t)w->count + 1, sizeof *w->tensor);
    w->index = calloc((size_t)w->map->n + 1, sizeof *w->index);
    if (!w->tensor || !w->index) {
        status = status_nomem("the names of weights", (size_t)w->map->n * sizeof *w->index);
        goto out;
    }
    status = pair(w, format, reader, &names);
out:
    arena_finish(&mem);
    free(layout);
    if (status)
        weights_match_destroy(w);
    else
        *ret = w;
    return status;
}

void weights_match_destroy(weights_match *w)
{
    if (!w)
        return;
    tensor_map_destroy(w->map);
    free(w->tensor);
    free(w->index);
    free(w);
}

static mt_status name_layouts(const model_param *p, const name_list *names, const char *path)
{
    char tried[700] = "";
    for (uint32_t k = 0; k < p->info->n_layouts; k++) {
        const mt_param_layout *l = &p->info->layouts[k];
        presence found;
        mt_status status = look_at(p, k, names, &found);
        if (status)
            return status;
        text_append(tried, sizeof tried, "%s'%s'%s (%lld of %lld tensors there, '%s' is not)",
                    k ? "; " : "", l->sources[0].name, l->n_sources > 1 ? " ..." : "",
                    (long long)found.there, (long long)found.wanted, found.missing);
    }
    return status_set(MT_ERR_FORMAT,
                      "%s: parameter '%s' stands there in none of its layouts: %s; are weights and "
                      "configuration of one model, and are all files there?",
                      path, p->name, tried);
}

mt_status weights_match_complete(const weights_match *w, const mt_weights *format,
                                 const void *reader, const char *path)
{
    const model *m = w->map->m;
    if (!w->missing)
        return MT_OK;
    const model_param *p = &m->params[w->first_missing];
    arena mem = { 0 };
    name_list names;
    mt_status status = list_names(format, reader, w->count, &mem, &names);
    presence found = { 0 };
    if (!status)
        status = look_at(p, 0, &names, &found);
    if (!status && (p->info->n_layouts > 1 || found.wanted > 1))
        status = name_layouts(p, &names, path);
    arena_finish(&mem);
    if (status)
        return status;
    char more[64] = "";
    if (w->missing > 1)
        snprintf(more, sizeof more, " and %d more of %d", w->missing - 1, m->n_params);
    return status_set(MT_ERR_FORMAT,
                      "%s: tensor '%s'%s is missing; are weights and configuration of one model, "
                      "and are all files there?",
                      path, found.missing, more);
}

/* ---- tensors that no parameter asks for ------------------------------------------------------ */

/* The parameter that some unit uses as an alias and that has this tensor's shape, -1 for none. */
static int32_t find_aliased(const model *m, const mt_tensor_info *info)
{
    for (int32_t u = 0; u < m->n_units; u++) {
        const tpl *t = m->units[u].t;
        for (uint32_t k = 0; k < t->n_params; k++) {
            const model_param *p = &m->params[m->units[u].slot[k]];
            if ((t->params[k].info.flags & MT_PARAM_ALIAS) && info->ndim == 2 &&
                info->dim[0] == p->rows && info->dim[1] == p->cols)
                return m->units[u].slot[k];
        }
    }
    return -1;
}

/* Does the tensor hold what the parameter now holds? Compared as the store keeps it. */
static mt_status equals_param(const model *m, const weights_masters *masters, int32_t param,
                              const mt_weights *format, const void *reader, int64_t index,
                              mt_dtype dtype, weights_buffer *b, bool *ret)
{
    int64_t elems = m->params[param].elems, step = weights_piece_elems(b, MT_F64);
    bool same = true;
    for (int64_t at = 0; at < elems && same; at += step) {
        int64_t n = elems - at < step ? elems - at : step;
        mt_status status = weights_read_piece(format, reader, index, dtype, at, n, b);
        if (status)
            return status;
        float *held = b->raw; /* its content is converted by now */
        masters->get(masters->arg, param, at, n, held);
        for (int64_t i = 0; i < n && same; i++) {
            uint16_t hi;
            int16_t lo;
            mt_split_f32(b->value[i], &hi, &lo);
            same = mt_f32_bits(mt_join_f32(hi, lo)) == mt_f32_bits(held[i]) ||
                   (held[i] != held[i] && b->value[i] != b->value[i]);
        }
    }
    *ret = same;
    return MT_OK;
}

typedef struct other_layout {
    const char *name; /* of the tensor */
    bool found;
} other_layout;

static mt_status compare_name(void *arg, const char *name, const mt_source *s, int32_t matrix)
{
    (void)s;
    (void)matrix;
    other_layout *o = arg;
    o->found |= strcmp(o->name, name) == 0;
    return MT_OK;
}

/* A tensor of a layout that was not taken: the same weights twice. */
static mt_status refuse_second_layout(const weights_match *w, const char *name, const char *file)
{
    const model *m = w->map->m;
    char bare[512];
    const char *inner = unwrap(name, bare);
    other_layout o = { inner ? inner : name, false };
    for (int32_t p = 0; p < m->n_params; p++)
        for (uint32_t k = 0; k < m->params[p].info->n_layouts; k++) {
            mt_status status = tensor_map_each_name(&m->params[p], &m->params[p].info->layouts[k],
                                                    compare_name, &o);
            if (status)
                return status;
            if (o.found)
                return status_set(MT_ERR_FORMAT,
                                  "%s: tensor '%s' holds '%s' of the model, which other tensors "
                                  "hold too; expected one of the layouts: remove the other",
                                  file, name, m->params[p].name);
        }
    return MT_OK;
}

/* A tensor that no parameter asks for: a tied model's second copy is fine if it is one, and
 * anything else would be weights that silently do nothing. */
static mt_status check_unused(const model *m, const weights_masters *masters,
                              const weights_match *w, const mt_weights *format, const void *reader,
                              int64_t index, const mt_tensor_info *info, weights_buffer *b)
{
    const char *file = format->file(reader, index);
    mt_status status = refuse_second_layout(w, info->name, file);
    if (status)
        return status;
    int32_t owner = find_aliased(m, info);
    if (owner < 0 || !weights_is_float(info->dtype))
        return status_set(MT_ERR_FORMAT,
                          "%s: tensor '%s' belongs to no parameter of the model; are weights and "
                          "configuration of one model?",
                          file, info->name);
    bool same;
    status = equals_param(m, masters, owner, format, reader, index, info->dtype, b, &same);
    if (status)
        return status;
    if (!same)
        return status_set(MT_ERR_FORMAT,
                          "%s: the model ties a weight to '%s', but tensor '%s' of the same shape "
                          "holds other values; untie them in the configuration "
                          "(tie_word_embeddings: false) or remove the tensor",
                          file, m->params[owner].name, info->name);
    log_write(MT_LOG_INFO, "%s: tensor '%s' repeats '%s', to which it is tied; not needed", file,
              info->name, m->params[owner].name);
    return MT_OK;
}

mt_status weights_check_unused(const model *m, const weights_masters *masters,
                               const weights_match *w, const mt_weights *format, const void *reader)
{
    weights_buffer b = { 0 };
    mt_status status = weights_buffer_init(&b, WEIGHTS_PIECE);
    for (int64_t i = 0; i < w->count && !status; i++) {
        mt_tensor_info info;
        if (w->tensor[i] < 0 && !(status = format->info(reader, i, &info)) &&
            !weights_ignored(m, info.name))
            status = check_unused(m, masters, w, format, reader, i, &info, &b);
    }
    weights_buffer_finish(&b);
    return status;
}

mt_status weights_check_tensor(const weights_match *w, const mt_weights *format, const void *reader,
                               int64_t index)
{
    const mapped_tensor *t = &w->map->tensors[w->tensor[index]];
    const char *file = format->file(reader, index);
    mt_tensor_info info;
    mt_status status = format->info(reader, index, &info);
    if (status)
        return status;
    if (!weights_is_float(info.dtype))
        return status_set(MT_ERR_UNSUPPORTED,
                          "%s: tensor '%s' is %s; weights are read from fp32, bf16, fp16 and fp64, "
                          "fp8_e4m3 with '_scale_inv' beside it, and MXFP4: convert (dequantise) "
                          "them first",
                          file, info.name,
                          info.dtype < 0 ? "of a dtype unknown here" : mt_dtype_name(info.dtype));
    mt_tensor_info want = tensor_info(t, info.dtype);
    return weights_check_shape(&want, &info, file);
}
