/* SPDX-License-Identifier: Apache-2.0
 *
 * A parameter's declaration: checked, and copied with its layouts so that defaults are filled in
 * and every parameter has a layout.
 */
#include "../base/status.h"
#include "graph.h"

int64_t tpl_matrices(const mt_param_info *p)
{
    return p->stack ? p->stack : 1;
}

bool tpl_is_vector(const mt_param_info *p)
{
    return p->rows == p->stack; /* also 0 == 0 */
}

int64_t tpl_matrix_rows(const mt_param_info *p)
{
    return tpl_is_vector(p) ? p->cols : p->rows / tpl_matrices(p);
}

int64_t tpl_matrix_cols(const mt_param_info *p)
{
    return tpl_is_vector(p) ? 1 : p->cols;
}

static mt_status check(const mt_param_info *p)
{
    if (p->cols < 1 || p->rows < 0 || (p->rows > 0 && p->cols > INT64_MAX / 16 / p->rows))
        return status_set(MT_ERR_INVALID, "shape [%lld, %lld] cannot be", (long long)p->rows,
                          (long long)p->cols);
    if (p->init < MT_INIT_ZEROS || p->init > MT_INIT_LOG_DECAY || !(p->init_std >= 0.0f))
        return status_set(MT_ERR_INVALID, "unknown initialisation %d or negative deviation %g",
                          p->init, (double)p->init_std);
    if (p->stack < 0 || (p->stack > 0 && (p->rows == 0 || p->rows % p->stack)))
        return status_set(MT_ERR_INVALID, "%lld rows are no stack of %lld equal matrices",
                          (long long)p->rows, (long long)p->stack);
    if ((p->flags & MT_PARAM_STREAM_F32) && (p->flags & MT_PARAM_ALIAS))
        return status_set(MT_ERR_INVALID, "an alias cannot be streamed in FP32");
    if (p->n_layouts && (p->flags & MT_PARAM_ALIAS))
        return status_set(MT_ERR_INVALID,
                          "an alias has the layouts of the parameter that it names, none of its "
                          "own");
    return MT_OK;
}

/* Fills in what 0 stands for, and checks what the source alone can tell. */
static mt_status complete(const mt_param_info *p, mt_source *s)
{
    const int64_t rows = tpl_matrix_rows(p), most = INT64_MAX / 4;
    const uint32_t known = MT_SOURCE_TRANSPOSED | MT_SOURCE_MIDDLE_ONE;
    const char *index = strstr(s->name, "{}");
    if (!s->name[0] || (index && (!p->stack || strstr(index + 2, "{}"))))
        return status_set(MT_ERR_INVALID,
                          "source '%s': expected a name, with at most one \"{}\", and that only "
                          "for a stack",
                          s->name);
    if ((s->flags & ~known) || s->flags == known || (s->flags && tpl_is_vector(p)))
        return status_set(MT_ERR_INVALID,
                          "source '%s': flags %#x; expected one of those of mt_source, and none "
                          "for vectors",
                          s->name, s->flags);
    if (s->first_row < 0 || s->n_rows < 0 || s->first_row >= rows ||
        s->n_rows > rows - s->first_row)
        return status_set(MT_ERR_INVALID,
                          "source '%s': rows %lld .. +%lld, but each matrix has %lld rows", s->name,
                          (long long)s->first_row, (long long)s->n_rows, (long long)rows);
    if (!s->n_rows)
        s->n_rows = rows - s->first_row;
    if (!s->block)
        s->block = 1;
    if (!s->step)
        s->step = s->block;
    if (s->from_row < 0 || s->block < 1 || s->step < s->block || s->from_row > most ||
        s->step > most / s->n_rows)
        return status_set(MT_ERR_INVALID,
                          "source '%s': rows from %lld, blocks of %lld, steps of %lld; expected "
                          "none below 0 and no step within a block",
                          s->name, (long long)s->from_row, (long long)s->block, (long long)s->step);
    return MT_OK;
}

/* Every row of the parameter comes from exactly one source. */
static mt_status check_cover(const mt_param_info *p, const mt_param_layout *l)
{
    const int64_t rows = tpl_matrix_rows(p);
    int64_t at = 0;
    uint32_t used = 0;
    for (bool found = true; at < rows && found;) {
        found = false;
        for (uint32_t i = 0; i < l->n_sources && !found; i++)
            if (l->sources[i].first_row == at) {
                at += l->sources[i].n_rows;
                used++;
                found = true;
            }
    }
    if (at == rows && used == l->n_sources)
        return MT_OK;
    return status_set(
        MT_ERR_INVALID,
        "the sources of the layout '%s' fill rows twice or leave out row %lld of %lld",
        l->sources[0].name, (long long)at, (long long)rows);
}

static mt_status copy_layout(const mt_param_info *p, const mt_param_layout *from, arena *mem,
                             mt_param_layout *to)
{
    if (!from->n_sources || !from->sources)
        return status_set(MT_ERR_INVALID, "a layout without sources");
    mt_source *list = arena_array(mem, from->n_sources, sizeof *list);
    if (!list)
        return MT_ERR_NOMEM;
    for (uint32_t i = 0; i < from->n_sources; i++) {
        list[i] = from->sources[i];
        if (!(list[i].name = arena_strdup(mem, list[i].name ? list[i].name : "")))
            return MT_ERR_NOMEM;
        mt_status status = complete(p, &list[i]);
        if (status)
            return status;
    }
    *to = (mt_param_layout){ list, from->n_sources, 0 };
    return check_cover(p, to);
}

static mt_status copy(const mt_param_info *info, arena *mem, mt_param_info *ret)
{
    mt_param_info p = { 0 };
    size_t size = info->struct_size < sizeof p ? info->struct_size : sizeof p;
    memcpy(&p, info, size); /* a plugin built against an older header lacks the newer members */
    p.struct_size = sizeof p;
    mt_status status = check(&p);
    if (status)
        return status;
    if (tpl_is_vector(&p))
        p.flags |= MT_PARAM_NO_DECAY;
    if (!(p.name = arena_strdup(mem, p.name)))
        return MT_ERR_NOMEM;
    mt_source own = { .name = p.name };
    const mt_param_layout of_its_name = { &own, 1, 0 }, *from = p.layouts;
    if (!p.n_layouts) {
        p.n_layouts = 1;
        from = &of_its_name;
    }
    mt_param_layout *to = arena_array(mem, p.n_layouts, sizeof *to);
    if (!to)
        return MT_ERR_NOMEM;
    for (uint32_t i = 0; i < p.n_layouts && !status; i++)
        status = copy_layout(&p, &from[i], mem, &to[i]);
    p.layouts = to;
    if (!status)
        *ret = p;
    return status;
}

mt_status graph_copy_param(const mt_param_info *info, arena *mem, mt_param_info *ret)
{
    const char *name = info->struct_size >= offsetof(mt_param_info, stack) ? info->name : NULL;
    if (!name || !name[0])
        return status_set(MT_ERR_INVALID, "a parameter without name or struct_size");
    mt_status status = copy(info, mem, ret);
    return status == MT_ERR_INVALID ? status_prefix(status, "parameter '%s'", name) : status;
}
