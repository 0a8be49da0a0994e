/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of an optimizer over a matrix and a vector, each updated as a whole and range by range: the
 * host cuts tensors differently from machine to machine, and results must not show it.
 */
#include "plugin_check.h"

#include "../base/rng.h"
#include "../base/status.h"

#include <math.h>
#include <string.h>

enum { ROWS = 6, COLS = 35, ELEMS = ROWS * COLS, STEPS = 3 };
enum { BEHIND = 16, ROOM = ELEMS + BEHIND }; /* nothing may be written behind a range */
enum { MAX_DTYPE_SIZE = 8 };

/* A tensor on the host. */
typedef struct tensor {
    uint16_t hi[ROOM];
    int16_t lo[ROOM];
    _Alignas(16) char state[MT_OPTIM_MAX_STATES][ROOM * MAX_DTYPE_SIZE];
} tensor;

typedef struct trial {
    const mt_optim *optim;
    void *self;
    mt_state_spec states[MT_OPTIM_MAX_STATES];
    uint32_t n_states;
    int64_t rows;
    float grad[ROOM];
    tensor whole, cut;
} trial;

static void draw(tensor *t)
{
    float x[ROOM];
    rng_normals(rng_key(1, "weight"), 0, ROOM, x);
    memset(t, 0, sizeof *t);
    for (int32_t i = 0; i < ROOM; i++)
        mt_split_f32(x[i], &t->hi[i], &t->lo[i]);
}

static mt_status update(const trial *c, tensor *t, int64_t step, int64_t first, int64_t n)
{
    mt_update u = { .struct_size = sizeof u,
                    .rows = c->rows,
                    .cols = ELEMS / c->rows,
                    .first = first,
                    .n = n,
                    .hi = t->hi + first,
                    .lo = t->lo + first,
                    .grad = c->grad + first,
                    .step = step,
                    .lr = 1e-3,
                    .grad_scale = 0.5 };
    for (uint32_t s = 0; s < c->n_states; s++)
        u.state[s] = t->state[s] + first * mt_dtype_size(c->states[s].dtype);
    return c->optim->update(c->self, &u);
}

/* Elements of the range that begins at `first`. */
static int64_t range(const trial *c, int64_t first)
{
    if (c->optim->granularity == MT_GRAIN_ELEMENT)
        return first + 1 + first % 41 > ELEMS ? ELEMS - first : 1 + first % 41;
    return c->optim->granularity == MT_GRAIN_ROW ? ELEMS / c->rows : ELEMS;
}

/* From the last range to the first, as workers may come to them in any order. */
static mt_status update_cut(trial *c, int64_t step)
{
    int64_t firsts[ELEMS], n = 0;
    for (int64_t first = 0; first < ELEMS; first += range(c, first))
        firsts[n++] = first;
    mt_status st = MT_OK;
    while (n-- > 0 && st == MT_OK)
        st = update(c, &c->cut, step, firsts[n], range(c, firsts[n]));
    return st;
}

static mt_status compare(const trial *c, int64_t step)
{
    const tensor *a = &c->whole, *b = &c->cut;
    for (int32_t i = 0; i < ROOM; i++) {
        bool same = a->hi[i] == b->hi[i] && a->lo[i] == b->lo[i];
        const char *plane = "the weight";
        for (uint32_t s = 0; s < c->n_states && same; s++) {
            int64_t size = mt_dtype_size(c->states[s].dtype);
            plane = c->states[s].name;
            same = memcmp(a->state[s] + i * size, b->state[s] + i * size, (size_t)size) == 0;
        }
        if (!same)
            return status_set(MT_ERR_INVALID,
                              "step %lld of a tensor of %lld x %lld: element %d of %s depends on "
                              "how the tensor is cut into ranges",
                              (long long)step, (long long)c->rows, (long long)(ELEMS / c->rows), i,
                              plane);
        if (!isfinite(mt_join_f32(a->hi[i], a->lo[i])))
            return status_set(MT_ERR_INVALID,
                              "step %lld: element %d of the weight becomes %g, of a gradient of %g",
                              (long long)step, i, (double)mt_join_f32(a->hi[i], a->lo[i]),
                              (double)c->grad[i]);
    }
    return MT_OK;
}

/* Behind the tensor everything must be as it was drawn. */
static mt_status check_behind(const trial *c, const tensor *t)
{
    tensor drawn;
    draw(&drawn);
    bool same = memcmp(t->hi + ELEMS, drawn.hi + ELEMS, BEHIND * sizeof *t->hi) == 0 &&
                memcmp(t->lo + ELEMS, drawn.lo + ELEMS, BEHIND * sizeof *t->lo) == 0;
    for (uint32_t s = 0; s < c->n_states; s++) {
        int64_t size = mt_dtype_size(c->states[s].dtype);
        same &= memcmp(t->state[s] + ELEMS * size, drawn.state[s] + ELEMS * size,
                       (size_t)(BEHIND * size)) == 0;
    }
    return same ? MT_OK
                : status_set(MT_ERR_INVALID, "an update writes behind the range that it was given");
}

static mt_status run_steps(trial *c, int64_t rows)
{
    mt_status st = MT_OK;
    c->rows = rows;
    draw(&c->whole);
    draw(&c->cut);
    for (int64_t step = 1; step <= STEPS && st == MT_OK; step++) {
        rng_normals(rng_key((uint64_t)step, "gradient"), 0, ROOM, c->grad);
        st = update(c, &c->whole, step, 0, ELEMS);
        if (st == MT_OK)
            st = update_cut(c, step);
        if (st == MT_OK)
            st = check_behind(c, &c->whole);
        if (st == MT_OK)
            st = compare(c, step);
    }
    return st;
}

mt_status plugin_check_updates(const mt_optim *optim, const mt_config *keys)
{
    trial c = { .optim = optim };
    mt_status st = optim->create(keys, &c.self);
    if (st != MT_OK)
        return st;
    c.n_states = optim->state_specs(c.self, c.states);
    if (c.n_states > MT_OPTIM_MAX_STATES)
        st = status_set(MT_ERR_INVALID, "%u state planes; expected at most %d", c.n_states,
                        MT_OPTIM_MAX_STATES);
    for (uint32_t s = 0; s < c.n_states && st == MT_OK; s++)
        if (!c.states[s].name || mt_dtype_size(c.states[s].dtype) < 1 ||
            mt_dtype_size(c.states[s].dtype) > MAX_DTYPE_SIZE)
            st = status_set(MT_ERR_INVALID, "state plane %u has no name or no dtype that is known",
                            s);
    if (st == MT_OK)
        st = run_steps(&c, ROWS);
    if (st == MT_OK)
        st = run_steps(&c, 1);
    optim->destroy(c.self);
    return st;
}
