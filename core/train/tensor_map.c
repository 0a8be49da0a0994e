/* SPDX-License-Identifier: Apache-2.0
 *
 * From the layouts that parameters declare to the list of tensors that a checkpoint has.
 */
#include "tensor_map.h"

#include "../base/status.h"

#include <stdio.h>
#include <stdlib.h>

mt_status tensor_map_each_name(const model_param *p, const mt_param_layout *layout,
                               mt_status (*fn)(void *arg, const char *name, const mt_source *s,
                                               int32_t matrix),
                               void *arg)
{
    int64_t matrices = tpl_matrices(p->info);
    char name[1024];
    for (int32_t e = 0; e < matrices; e++)
        for (uint32_t i = 0; i < layout->n_sources; i++) {
            const mt_source *s = &layout->sources[i];
            const char *index = strstr(s->name, "{}");
            int n = 0;
            if (index)
                n = snprintf(name, sizeof name, "%s%.*s%d%s", p->prefix, (int)(index - s->name),
                             s->name, e, index + 2);
            else if (e == 0)
                n = snprintf(name, sizeof name, "%s%s", p->prefix, s->name);
            else
                continue;
            if (n >= (int)sizeof name)
                return status_set(MT_ERR_INVALID, "%s: the tensor's name is too long", name);
            mt_status status = fn(arg, name, s, index ? e : -1);
            if (status)
                return status;
        }
    return MT_OK;
}

/* ---- pieces --------------------------------------------------------------------------------- */

typedef struct collector {
    tensor_map *t;
    const char **name; /* [n_pieces] */
    int64_t cap;
    int32_t param;
} collector;

static mt_status add_piece(void *arg, const char *name, const mt_source *s, int32_t matrix)
{
    collector *c = arg;
    tensor_map *t = c->t;
    if (t->n_pieces == c->cap) {
        int64_t cap = c->cap ? 2 * c->cap : 256;
        tensor_piece *pieces = realloc(t->pieces, (size_t)cap * sizeof *pieces);
        if (pieces)
            t->pieces = pieces;
        const char **names = realloc((void *)c->name, (size_t)cap * sizeof *names);
        if (names)
            c->name = names;
        if (!pieces || !names)
            return status_nomem("the names of tensors", (size_t)cap * sizeof *pieces);
        c->cap = cap;
    }
    char *copy = arena_strdup(&t->mem, name);
    if (!copy)
        return MT_ERR_NOMEM;
    c->name[t->n_pieces] = copy;
    t->pieces[t->n_pieces++] = (tensor_piece){ .param = c->param, .matrix = matrix, .source = s };
    return MT_OK;
}

typedef struct named {
    const char *name;
    int64_t at; /* a piece, or a tensor */
} named;

static int by_name(const void *a, const void *b)
{
    const named *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

static int by_tensor(const void *a, const void *b)
{
    const tensor_piece *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->source->from_row > y->source->from_row) -
           (x->source->from_row < y->source->from_row);
}

/* Pieces of one name become one tensor; tensors stand where their first piece stood. Fills names
 * and pieces of the tensors. */
static mt_status group(tensor_map *t, const char *const *name)
{
    named *list = calloc((size_t)t->n_pieces + 1, sizeof *list);
    int64_t *leader = calloc((size_t)t->n_pieces + 1, sizeof *leader);
    mt_status status = MT_OK;
    if (!list || !leader) {
        status = status_nomem("the names of tensors", (size_t)t->n_pieces * sizeof *list);
        goto out;
    }
    for (int64_t i = 0; i < t->n_pieces; i++)
        list[i] = (named){ name[i], i };
    qsort(list, (size_t)t->n_pieces, sizeof *list, by_name);
    for (int64_t i = 0; i < t->n_pieces; i++) {
        bool same = i > 0 && strcmp(list[i - 1].name, list[i].name) == 0;
        leader[list[i].at] = same ? leader[list[i - 1].at] : list[i].at;
        t->n += !same;
    }
    t->tensors = arena_array(&t->mem, (size_t)t->n + 1, sizeof *t->tensors);
    t->by_name = arena_array(&t->mem, (size_t)t->n + 1, sizeof *t->by_name);
    if (!t->tensors || !t->by_name) {
        status = MT_ERR_NOMEM;
        goto out;
    }
    int64_t n = 0;
    for (int64_t i = 0; i < t->n_pieces; i++)
        if (leader[i] == i) {
            t->tensors[n].name = name[i];
            t->pieces[i].tensor = n++;
        } else {
            t->pieces[i].tensor = t->pieces[leader[i]].tensor;
        }
    n = 0;
    for (int64_t i = 0; i < t->n_pieces; i++)
        if (leader[list[i].at] == list[i].at)
            t->by_name[n++] = t->pieces[list[i].at].tensor;
    /* Only now: until here, pieces and names stand in the same order. */
    qsort(t->pieces, (size_t)t->n_pieces, sizeof *t->pieces, by_tensor);
    for (int64_t i = 0; i < t->n_pieces; i++) {
        mapped_tensor *q = &t->tensors[t->pieces[i].tensor];
        if (!q->n_pieces++)
            q->pieces = &t->pieces[i];
    }
out:
    free(list);
    free(leader);
    return status;
}

/* ---- shapes --------------------------------------------------------------------------------- */

static mt_status contradiction(const tensor_map *t, const mapped_tensor *q, const char *what)
{
    return status_set(MT_ERR_INVALID,
                      "the architecture's layout of '%s' is wrong: its sources in '%s' %s; all of "
                      "a tensor's rows belong to exactly one row of a parameter each",
                      t->m->params[q->pieces[0].param].name, q->name, what);
}

void tensor_map_rows(const mapped_tensor *t, tensor_row *ret)
{
    for (int32_t i = 0; i < t->n_pieces; i++) {
        const mt_source *s = t->pieces[i].source;
        for (int64_t k = 0; k < s->n_rows; k++)
            ret[s->from_row + k / s->block * s->step + k % s->block] =
                (tensor_row){ i, s->first_row + k };
    }
}

static mt_status check_rows(const tensor_map *t, const mapped_tensor *q)
{
    bool *seen = calloc((size_t)q->rows, sizeof *seen);
    if (!seen)
        return status_nomem("the rows of a tensor", (size_t)q->rows);
    mt_status status = MT_OK;
    for (int32_t i = 0; i < q->n_pieces && !status; i++) {
        const mt_source *s = q->pieces[i].source;
        for (int64_t k = 0; k < s->n_rows && !status; k++) {
            int64_t row = s->from_row + k / s->block * s->step + k % s->block;
            if (row >= q->rows || seen[row])
                status = contradiction(t, q, "leave out rows or use some twice");
            else
                seen[row] = true;
        }
    }
    free(seen);
    return status;
}

static mt_status shape(const tensor_map *t, mapped_tensor *q)
{
    const tensor_piece *first = &q->pieces[0];
    const mt_param_info *info = t->m->params[first->param].info;
    bool vector = tpl_is_vector(info);
    q->matrices = first->matrix < 0 ? tpl_matrices(info) : 1;
    q->cols = tpl_matrix_cols(info);
    q->flags = first->source->flags;
    for (int32_t i = 0; i < q->n_pieces; i++) {
        const tensor_piece *piece = &q->pieces[i];
        const mt_param_info *other = t->m->params[piece->param].info;
        if (piece->source->flags != q->flags || tpl_matrix_cols(other) != q->cols ||
            tpl_is_vector(other) != vector || (piece->matrix < 0) != (first->matrix < 0) ||
            (first->matrix < 0 && tpl_matrices(other) != q->matrices))
            return contradiction(t, q, "differ in flags, columns or number of matrices");
        q->rows += piece->source->n_rows;
    }
    if (first->matrix < 0 && info->stack)
        q->dim[q->ndim++] = q->matrices;
    if (vector) {
        q->dim[q->ndim++] = q->rows;
    } else {
        bool t_ = q->flags & MT_SOURCE_TRANSPOSED;
        q->dim[q->ndim++] = t_ ? q->cols : q->rows;
        if (q->flags & MT_SOURCE_MIDDLE_ONE)
            q->dim[q->ndim++] = 1;
        q->dim[q->ndim++] = t_ ? q->rows : q->cols;
    }
    const mt_source *s = first->source;
    int64_t own_rows = tpl_matrix_rows(info);
    q->linear = q->n_pieces == 1 && !(q->flags & MT_SOURCE_TRANSPOSED) && s->from_row == 0 &&
                s->step == s->block && (q->matrices == 1 || s->n_rows == own_rows);
    q->first = ((first->matrix < 0 ? 0 : first->matrix) * own_rows + s->first_row) * q->cols;
    return q->linear ? MT_OK : check_rows(t, q);
}

/* ---- the map -------------------------------------------------------------------------------- */

mt_status tensor_map_create(const model *m, const uint32_t *layout, tensor_map **ret)
{
    tensor_map *t = calloc(1, sizeof *t);
    if (!t)
        return status_nomem("the names of tensors", sizeof *t);
    t->m = m;
    collector c = { .t = t };
    mt_status status = MT_OK;
    for (int32_t p = 0; p < m->n_params && !status; p++) {
        c.param = p;
        status = tensor_map_each_name(
            &m->params[p], &m->params[p].info->layouts[layout ? layout[p] : 0], add_piece, &c);
    }
    if (!status)
        status = group(t, c.name);
    for (int64_t i = 0; i < t->n && !status; i++)
        status = shape(t, &t->tensors[i]);
    free((void *)c.name);
    if (status)
        tensor_map_destroy(t);
    else
        *ret = t;
    return status;
}

void tensor_map_destroy(tensor_map *t)
{
    if (!t)
        return;
    arena_finish(&t->mem);
    free(t->pieces);
    free(t);
}

int64_t tensor_map_find(const tensor_map *t, const char *name)
{
    int64_t low = 0, high = t->n;
    while (low < high) {
        int64_t at = low + (high - low) / 2;
        int order = strcmp(t->tensors[t->by_name[at]].name, name);
        if (order == 0)
            return t->by_name[at];
        if (order < 0)
            low = at + 1;
        else
            high = at;
    }
    return -1;
}

int64_t tensor_elems(const mapped_tensor *t)
{
    return t->matrices * t->rows * t->cols;
}

mt_tensor_info tensor_info(const mapped_tensor *t, mt_dtype dtype)
{
    mt_tensor_info info = { .name = t->name,
                            .dtype = dtype,
                            .ndim = t->ndim,
                            .bytes = tensor_elems(t) * mt_dtype_size(dtype) };
    memcpy(info.dim, t->dim, sizeof t->dim);
    return info;
}
