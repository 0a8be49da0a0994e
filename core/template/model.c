/* SPDX-License-Identifier: Apache-2.0
 *
 * A model from an architecture's configure(): its templates are built, its units named, every
 * parameter listed once.
 */
#include "model.h"

#include "../base/arena.h"
#include "../base/status.h"
#include "rope.h"

#include <fnmatch.h>
#include <stdlib.h>

typedef struct pending_tpl {
    const char *name;
    mt_build_fn build;
    const void *arg;
} pending_tpl;

typedef struct pending_unit {
    const char *name, *prefix;
    int32_t tpl;
} pending_unit;

struct model_owner {
    arena mem;
    const mt_arch *arch;
    void *state;
};

/* What configure() talks to. */
typedef struct maker {
    mt_model api; /* first */
    model *m;
    arena *mem;
    pending_tpl *tpls;
    pending_unit *units;
    int32_t n_tpls, n_units, cap_tpls, cap_units, cap_ignore;
    mt_status status; /* sticky */
} maker;

static void *grow(maker *k, void *array, int32_t count, int32_t *capacity, size_t size)
{
    if (count < *capacity)
        return array;
    int32_t next = *capacity ? 2 * *capacity : 64;
    void *p = arena_array(k->mem, (size_t)next, size);
    if (!p) {
        k->status = MT_ERR_NOMEM;
        return NULL;
    }
    if (count)
        memcpy(p, array, (size_t)count * size);
    *capacity = next;
    return p;
}

static int32_t add_template(mt_model *mm, const char *name, mt_build_fn build, const void *arg)
{
    maker *k = (maker *)mm;
    if (k->status != MT_OK)
        return -1;
    pending_tpl *tpls = grow(k, k->tpls, k->n_tpls, &k->cap_tpls, sizeof *tpls);
    char *copy = tpls ? arena_strdup(k->mem, name) : NULL;
    if (!copy) {
        k->status = MT_ERR_NOMEM;
        return -1;
    }
    k->tpls = tpls;
    tpls[k->n_tpls] = (pending_tpl){ copy, build, arg };
    return k->n_tpls++;
}

/* A wrong number of layers must not eat the memory before anything can be refused. */
enum { MAX_UNITS = 1 << 16 };

static void add_unit(mt_model *mm, const char *name, int32_t tpl_index, const char *prefix)
{
    maker *k = (maker *)mm;
    if (k->status != MT_OK)
        return;
    if (tpl_index < 0 || tpl_index >= k->n_tpls) {
        k->status =
            status_set(MT_ERR_INVALID, "unit '%s': there is no template %d", name, tpl_index);
        return;
    }
    if (k->n_units == MAX_UNITS) {
        k->status = status_set(MT_ERR_INVALID,
                               "unit '%s' is one more than the %d that a model may "
                               "have; is the number of layers right?",
                               name, MAX_UNITS);
        return;
    }
    pending_unit *units = grow(k, k->units, k->n_units, &k->cap_units, sizeof *units);
    if (!units)
        return;
    k->units = units;
    units[k->n_units] =
        (pending_unit){ arena_strdup(k->mem, name), arena_strdup(k->mem, prefix), tpl_index };
    if (!units[k->n_units].name || !units[k->n_units].prefix)
        k->status = MT_ERR_NOMEM;
    else
        k->n_units++;
}

static void set_vocab(mt_model *mm, int64_t vocab)
{
    ((maker *)mm)->m->vocab = vocab;
}

static void set_max_positions(mt_model *mm, int64_t n)
{
    ((maker *)mm)->m->max_positions = n;
}

static mt_status rope(mt_model *mm, const mt_config *c, double theta, int64_t head_dim,
                      mt_rope_attr *ret)
{
    mt_rope_spec spec = { .struct_size = sizeof spec, .theta = theta };
    (void)mm;
    return rope_from_config(c, &spec, head_dim, ret);
}

static mt_status rope_of(mt_model *mm, const mt_config *c, const mt_rope_spec *spec,
                         int64_t head_dim, mt_rope_attr *ret)
{
    mt_rope_spec known = { 0 }; /* a plugin may know fewer members, or more */
    (void)mm;
    memcpy(&known, spec, spec->struct_size < sizeof known ? spec->struct_size : sizeof known);
    return rope_from_config(c, &known, head_dim, ret);
}

static void ignore_tensor(mt_model *mm, const char *pattern)
{
    maker *k = (maker *)mm;
    if (k->status != MT_OK)
        return;
    const char **list = grow(k, (void *)k->m->ignore, k->m->n_ignore, &k->cap_ignore, sizeof *list);
    if (!list)
        return;
    k->m->ignore = list;
    if (!(list[k->m->n_ignore] = arena_strdup(k->mem, pattern)))
        k->status = MT_ERR_NOMEM;
    else
        k->m->n_ignore++;
}

static const mt_model_api api = { sizeof(mt_model_api), add_template, add_unit,      set_vocab,
                                  set_max_positions,    rope,         ignore_tensor, rope_of };

/* ---- units and parameters -------------------------------------------------------------------- */

static bool same_tuple(const tpl *below, const tpl *above)
{
    if (below->n_out != above->n_in)
        return false;
    for (uint32_t i = 0; i < above->n_in; i++)
        if (below->out_cols[i] != above->in_cols[i])
            return false;
    return true;
}

static mt_status check_chain(const model *m)
{
    const tpl *first = m->units[0].t, *last = m->units[m->n_units - 1].t;
    if (first->n_in != 0)
        return status_set(MT_ERR_INVALID,
                          "unit '%s' comes first but takes %u values; the first unit "
                          "starts from the batch's tokens",
                          m->units[0].name, first->n_in);
    if (!last->makes_loss)
        return status_set(MT_ERR_INVALID, "unit '%s' comes last but its output 0 is not a loss",
                          m->units[m->n_units - 1].name);
    for (int32_t i = 1; i < m->n_units; i++) {
        if (m->units[i - 1].t->makes_loss)
            return status_set(MT_ERR_INVALID, "unit '%s' forms a loss but is not the last one",
                              m->units[i - 1].name);
        if (!same_tuple(m->units[i - 1].t, m->units[i].t))
            return status_set(MT_ERR_INVALID,
                              "unit '%s' passes on %u values (the first of %lld columns) "
                              "but unit '%s' takes %u (the first of %lld columns)",
                              m->units[i - 1].name, m->units[i - 1].t->n_out,
                              (long long)m->units[i - 1].t->out_cols[0], m->units[i].name,
                              m->units[i].t->n_in, (long long)m->units[i].t->in_cols[0]);
    }
    return MT_OK;
}

/* There is one tally, and every unit that uses it means the same by it. */
static mt_status find_tally(model *m)
{
    int32_t first = -1;
    for (int32_t u = 0; u < m->n_units; u++) {
        int64_t tally = m->units[u].t->tally;
        if (tally && m->tally && tally != m->tally)
            return status_set(MT_ERR_INVALID,
                              "units '%s' and '%s' share sums over layers, of %lld and of %lld "
                              "numbers; a loss over all layers needs equally many experts in each",
                              m->units[first].name, m->units[u].name, (long long)m->tally,
                              (long long)tally);
        if (tally && !m->tally) {
            m->tally = tally;
            first = u;
        }
    }
    return MT_OK;
}

/* So that no sum of sizes leaves 64 bits: a thousand times what has ever been trained. */
static const int64_t most_params = INT64_C(1) << 50;

/* Lists the parameters that unit u owns. */
static mt_status list_own(maker *k, int32_t u)
{
    model *m = k->m;
    model_unit *unit = &m->units[u];
    unit->slot = arena_array(k->mem, unit->t->n_params + 1, sizeof *unit->slot);
    if (!unit->slot)
        return MT_ERR_NOMEM;
    for (uint32_t i = 0; i < unit->t->n_params; i++) {
        const tpl_param *p = &unit->t->params[i];
        unit->slot[i] = -1;
        if (p->info.flags & MT_PARAM_ALIAS)
            continue;
        char *name = arena_printf(k->mem, "%s%s", k->units[u].prefix, p->info.name);
        if (!name)
            return MT_ERR_NOMEM;
        if (p->elems > most_params - m->total_params)
            return status_set(MT_ERR_INVALID,
                              "with '%s' the model has more than %lld parameters; are its sizes "
                              "right?",
                              name, (long long)most_params);
        m->params[m->n_params] = (model_param){ .name = name,
                                                .prefix = k->units[u].prefix,
                                                .info = &p->info,
                                                .unit = u,
                                                .flags = p->info.flags,
                                                .offset = p->offset,
                                                .elems = p->elems,
                                                .rows = p->info.rows,
                                                .cols = p->info.cols,
                                                .init = p->info.init,
                                                .init_std = p->info.init_std,
                                                .gathered = p->gathered };
        m->total_params += p->elems;
        unit->slot[i] = m->n_params++;
    }
    m->store_elems += unit->t->own_elems;
    return MT_OK;
}

static mt_status bind_aliases(model *m, int32_t u)
{
    model_unit *unit = &m->units[u];
    for (uint32_t i = 0; i < unit->t->n_params; i++) {
        const tpl_param *p = &unit->t->params[i];
        if (!(p->info.flags & MT_PARAM_ALIAS))
            continue;
        int32_t at = model_find_param(m, p->info.name);
        if (at < 0)
            return status_set(MT_ERR_INVALID, "unit '%s' shares parameter '%s', which no unit owns",
                              unit->name, p->info.name);
        if (m->params[at].rows != p->info.rows || m->params[at].cols != p->info.cols)
            return status_set(
                MT_ERR_INVALID, "unit '%s' shares '%s' as [%lld, %lld], but it is [%lld, %lld]",
                unit->name, p->info.name, (long long)p->info.rows, (long long)p->info.cols,
                (long long)m->params[at].rows, (long long)m->params[at].cols);
        unit->slot[i] = at;
    }
    return MT_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static mt_status check_names(maker *k)
{
    const model *m = k->m;
    const char **names = arena_array(k->mem, (size_t)m->n_params + 1, sizeof *names);
    if (!names)
        return MT_ERR_NOMEM;
    for (int32_t i = 0; i < m->n_params; i++)
        names[i] = m->params[i].name;
    qsort(names, (size_t)m->n_params, sizeof *names, by_name);
    for (int32_t i = 1; i < m->n_params; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            return status_set(MT_ERR_INVALID, "two units own a parameter named '%s'", names[i]);
    return MT_OK;
}

static mt_status assemble(maker *k)
{
    model *m = k->m;
    if (k->n_units < 2)
        return status_set(MT_ERR_INVALID,
                          "the architecture declared %d units; a model has at least one "
                          "that embeds and one that forms the loss",
                          k->n_units);
    if (m->vocab < 1)
        return status_set(MT_ERR_INVALID, "the architecture set no vocabulary size");
    m->tpls = arena_array(k->mem, (size_t)k->n_tpls, sizeof(tpl *));
    m->units = arena_array(k->mem, (size_t)k->n_units, sizeof *m->units);
    if (!m->tpls || !m->units)
        return MT_ERR_NOMEM;
    for (; m->n_tpls < k->n_tpls; m->n_tpls++) {
        const pending_tpl *t = &k->tpls[m->n_tpls];
        mt_status s = tpl_create(t->name, t->build, m->owner->state, t->arg, &m->tpls[m->n_tpls]);
        if (s != MT_OK)
            return s;
    }
    m->n_units = k->n_units;
    size_t most = 0;
    for (int32_t u = 0; u < m->n_units; u++) {
        m->units[u] = (model_unit){ .name = k->units[u].name,
                                    .t = m->tpls[k->units[u].tpl],
                                    .tpl_index = k->units[u].tpl };
        most += m->units[u].t->n_params;
    }
    m->params = arena_array(k->mem, most + 1, sizeof *m->params);
    if (!m->params)
        return MT_ERR_NOMEM;
    mt_status s = check_chain(m);
    if (s == MT_OK)
        s = find_tally(m);
    for (int32_t u = 0; s == MT_OK && u < m->n_units; u++)
        s = list_own(k, u);
    if (s == MT_OK)
        s = check_names(k);
    for (int32_t u = 0; s == MT_OK && u < m->n_units; u++)
        s = bind_aliases(m, u);
    return s;
}

/* Leaves the first unit, `copies` of unit `unit`, and the last one. Copies are renamed, since every
 * parameter has a name of its own. */
static mt_status cut(maker *k, int32_t unit, int32_t copies)
{
    if (unit < 1 || unit >= k->n_units || copies < 1)
        return status_set(MT_ERR_INTERNAL, "an excerpt of %d times unit %d of %d", copies, unit,
                          k->n_units);
    const pending_unit last = k->units[k->n_units - 1], of = k->units[unit];
    copies = unit == k->n_units - 1 ? 0 : copies;
    pending_unit *units = arena_array(k->mem, (size_t)copies + 2, sizeof *units);
    if (!units)
        return MT_ERR_NOMEM;
    units[0] = k->units[0];
    for (int32_t i = 0; i < copies; i++) {
        units[i + 1] = (pending_unit){ arena_printf(k->mem, "%s.copy.%d", of.name, i),
                                       arena_printf(k->mem, "copy.%d.%s", i, of.prefix), of.tpl };
        if (!units[i + 1].name || !units[i + 1].prefix)
            return MT_ERR_NOMEM;
    }
    units[copies + 1] = last;
    k->units = units;
    k->n_units = copies + 2;
    return MT_OK;
}

/* copies > 0: an excerpt. */
static mt_status create(const mt_arch *arch, const mt_config *config, int32_t unit, int32_t copies,
                        model **ret)
{
    model *m = calloc(1, sizeof *m);
    struct model_owner *owner = calloc(1, sizeof *owner);
    if (!m || !owner) {
        free(m);
        free(owner);
        return status_nomem("a model", sizeof *m + sizeof *owner);
    }
    m->owner = owner;
    owner->arch = arch;
    maker k = { .api = { &api }, .m = m, .mem = &owner->mem };
    status_set(MT_OK, "%s", "");
    mt_status s = arch->configure(config, &k.api, &owner->state);
    if (s != MT_OK && !status_text()[0])
        s = status_set(s, "the architecture refused this configuration without saying why");
    if (s == MT_OK)
        s = k.status;
    if (s == MT_OK && copies > 0)
        s = cut(&k, unit, copies);
    if (s == MT_OK)
        s = assemble(&k);
    if (s != MT_OK) {
        model_destroy(m);
        return s;
    }
    *ret = m;
    return MT_OK;
}

mt_status model_create(const mt_arch *arch, const mt_config *config, model **ret)
{
    return create(arch, config, 0, 0, ret);
}

mt_status model_create_excerpt(const mt_arch *arch, const mt_config *config, int32_t unit,
                               int32_t copies, model **ret)
{
    return create(arch, config, unit, copies > 0 ? copies : 1, ret);
}

void model_destroy(model *m)
{
    if (!m)
        return;
    for (int32_t i = 0; i < m->n_tpls; i++)
        tpl_destroy(m->tpls[i]);
    if (m->owner->state)
        m->owner->arch->destroy(m->owner->state);
    arena_finish(&m->owner->mem);
    free(m->owner);
    free(m);
}

int32_t model_find_param(const model *m, const char *name)
{
    for (int32_t i = 0; i < m->n_params; i++)
        if (strcmp(m->params[i].name, name) == 0)
            return i;
    return -1;
}

bool model_unit_trains(const model *m, int32_t unit)
{
    for (int32_t i = 0; i < m->n_params; i++)
        if (m->params[i].unit == unit && !(m->params[i].flags & MT_PARAM_FROZEN))
            return true;
    return false;
}

bool model_adds_loss(const model *m)
{
    for (int32_t u = 0; u < m->n_units; u++)
        if (m->units[u].t->adds_loss)
            return true;
    return false;
}

bool model_bias_moves(const model *m, int32_t unit)
{
    const model_unit *u = &m->units[unit];
    return u->t->bias_slot >= 0 && !m->params[u->slot[u->t->bias_slot]].pinned;
}

bool model_ignores(const model *m, const char *name)
{
    for (int32_t i = 0; i < m->n_ignore; i++)
        if (fnmatch(m->ignore[i], name, 0) == 0)
            return true;
    return false;
}

double model_tpl_train_flops_per_token(const tpl *t, double context)
{
    /* Keys that a query sees on average: (n + 1) / 2, less where a window cuts them off. */
    double pairs = (context + 1) / 2, w = (double)t->attn_window;
    if (w > 0 && context > w)
        pairs = (w * (w + 1) / 2 + (context - w) * w) / context;
    return 3 * (t->gemm_flops_per_token + t->scan_flops_per_token + t->attn_flops_per_pair * pairs);
}

double model_train_flops_per_token(const model *m, double context)
{
    double flops = 0;
    for (int32_t u = 0; u < m->n_units; u++)
        flops += model_tpl_train_flops_per_token(m->units[u].t, context);
    return flops;
}
