/* SPDX-License-Identifier: Apache-2.0
 *
 * Doubles of the model and the store for tests of checkpoints: three units (embedding, one layer,
 * head) with or without a tied head, filled in by hand, and planes in ordinary memory. They are
 * defined under the names of the real ones, so that nothing but checkpoints and weights is tested
 * here. Include it once in a program.
 */
#ifndef TEST_DATA_SMALL_MODEL_H
#define TEST_DATA_SMALL_MODEL_H

#include "../../core/host/store.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <xxhash.h>

enum { SMALL_VOCAB = 32, SMALL_HIDDEN = 16, SMALL_PARAMS = 5, SMALL_UNITS = 3 };

/* ---- the model ------------------------------------------------------------------------------ */

typedef struct small_model {
    model base;
    model_param params[SMALL_PARAMS];
    model_unit units[SMALL_UNITS];
    tpl tpls[SMALL_UNITS];
    tpl_param slots[SMALL_UNITS][2];
    int32_t slot[SMALL_UNITS][2];
    /* What each parameter declares: a tensor of its own name. */
    mt_param_info info[SMALL_PARAMS];
    mt_param_layout layout[SMALL_PARAMS];
    mt_source source[SMALL_PARAMS];
} small_model;

int32_t model_find_param(const model *m, const char *name)
{
    for (int32_t p = 0; p < m->n_params; p++)
        if (strcmp(m->params[p].name, name) == 0)
            return p;
    return -1;
}

bool model_ignores(const model *m, const char *name)
{
    (void)m;
    return fnmatch("*.rotary_emb.inv_freq", name, 0) == 0;
}

void model_destroy(model *m)
{
    free(m);
}

/* A parameter that `unit` owns, at the next aligned place of its flat layout. */
static inline void small_param(small_model *s, int32_t unit, const char *name, int64_t rows,
                               int64_t cols)
{
    tpl *t = &s->tpls[unit];
    int32_t p = s->base.n_params++;
    s->source[p] = (mt_source){ .name = name, .n_rows = rows ? rows : cols, .block = 1, .step = 1 };
    s->layout[p] = (mt_param_layout){ &s->source[p], 1, 0 };
    s->info[p] = (mt_param_info){ .struct_size = sizeof(mt_param_info),
                                  .name = name,
                                  .rows = rows,
                                  .cols = cols,
                                  .layouts = &s->layout[p],
                                  .n_layouts = 1 };
    s->params[p] = (model_param){ .name = name,
                                  .prefix = "",
                                  .info = &s->info[p],
                                  .unit = unit,
                                  .flags = rows ? 0 : MT_PARAM_NO_DECAY,
                                  .offset = t->own_elems,
                                  .elems = (rows ? rows : 1) * cols,
                                  .rows = rows,
                                  .cols = cols };
    s->slots[unit][t->n_params] =
        (tpl_param){ .offset = t->own_elems, .elems = s->params[p].elems };
    s->slot[unit][t->n_params++] = p;
    t->own_elems += (s->params[p].elems + TPL_PARAM_ALIGN - 1) / TPL_PARAM_ALIGN * TPL_PARAM_ALIGN;
    t->flat_elems = t->own_elems;
}

static inline model *small_model_create_sized(bool tied, int64_t vocab, int64_t hidden)
{
    small_model *s = calloc(1, sizeof *s);
    if (!s)
        exit(1);
    s->base.n_units = SMALL_UNITS;
    s->base.units = s->units;
    s->base.params = s->params;
    s->base.vocab = vocab;
    for (int32_t u = 0; u < SMALL_UNITS; u++) {
        s->tpls[u].params = s->slots[u];
        s->units[u] = (model_unit){ .t = &s->tpls[u], .tpl_index = u, .slot = s->slot[u] };
    }
    small_param(s, 0, "model.embed_tokens.weight", vocab, hidden);
    small_param(s, 1, "model.layers.0.input_layernorm.weight", 0, hidden);
    small_param(s, 1, "model.layers.0.proj.weight", hidden, hidden);
    small_param(s, 2, "model.norm.weight", 0, hidden);
    if (tied) {
        tpl *head = &s->tpls[2];
        s->slots[2][head->n_params].info.flags = MT_PARAM_ALIAS;
        s->slot[2][head->n_params++] = 0;
    } else {
        small_param(s, 2, "lm_head.weight", vocab, hidden);
    }
    return &s->base;
}

static inline model *small_model_create(bool tied)
{
    return small_model_create_sized(tied, SMALL_VOCAB, SMALL_HIDDEN);
}

/* ---- the store ------------------------------------------------------------------------------ */

static inline store *small_store_create(const model *m, const mt_state_spec *states, uint32_t n)
{
    store *s = calloc(1, sizeof *s);
    store_unit *units = calloc((size_t)m->n_units, sizeof *units);
    if (!s || !units)
        exit(1);
    *s = (store){ .m = m, .n_units = m->n_units, .units = units, .n_states = n };
    for (uint32_t k = 0; k < n; k++)
        s->states[k] = states[k];
    for (int32_t u = 0; u < m->n_units; u++) {
        size_t elems = (size_t)m->units[u].t->own_elems;
        units[u] = (store_unit){ .elems = (int64_t)elems,
                                 .hi = calloc(elems, sizeof(uint16_t)),
                                 .lo = calloc(elems, sizeof(int16_t)) };
        for (uint32_t k = 0; k < n; k++)
            units[u].state[k] = calloc(elems, (size_t)mt_dtype_size(states[k].dtype));
    }
    return s;
}

void store_destroy(store *s)
{
    for (int32_t u = 0; s && u < s->n_units; u++) {
        free(s->units[u].hi);
        free(s->units[u].lo);
        for (uint32_t k = 0; k < s->n_states; k++)
            free(s->units[u].state[k]);
    }
    free(s ? s->units : NULL);
    free(s);
}

void store_get(const store *s, int32_t param, int64_t first, int64_t n, float *ret)
{
    const model_param *p = &s->m->params[param];
    const store_unit *u = &s->units[p->unit];
    for (int64_t i = 0; i < n; i++)
        ret[i] = mt_join_f32(u->hi[p->offset + first + i], u->lo[p->offset + first + i]);
}

void store_set(store *s, int32_t param, int64_t first, int64_t n, const float *src)
{
    const model_param *p = &s->m->params[param];
    store_unit *u = &s->units[p->unit];
    for (int64_t i = 0; i < n; i++)
        mt_split_f32(src[i], &u->hi[p->offset + first + i], &u->lo[p->offset + first + i]);
}

void *store_state(const store *s, int32_t param, uint32_t state)
{
    const model_param *p = &s->m->params[param];
    return (uint8_t *)s->units[p->unit].state[state] +
           p->offset * mt_dtype_size(s->states[state].dtype);
}

uint64_t store_hash(const store *s)
{
    uint64_t h = 0;
    for (int32_t u = 0; u < s->n_units; u++) {
        size_t elems = (size_t)s->units[u].elems;
        h = XXH3_64bits_withSeed(s->units[u].hi, elems * 2, h);
        h = XXH3_64bits_withSeed(s->units[u].lo, elems * 2, h);
        for (uint32_t k = 0; k < s->n_states; k++)
            h = XXH3_64bits_withSeed(s->units[u].state[k],
                                     elems * (size_t)mt_dtype_size(s->states[k].dtype), h);
    }
    return h;
}

#endif
