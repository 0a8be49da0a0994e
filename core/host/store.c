/* SPDX-License-Identifier: Apache-2.0
 *
 * The host store's regions: where each plane lies, exact access to masters, random
 * initialisation and hashing. Who fills or updates it is not decided here.
 */
#include "store.h"

#include "../base/parallel.h"
#include "../base/planes.h"
#include "../base/progress.h"
#include "../base/rng.h"
#include "../base/status.h"

#include <stdlib.h>
#include <xxhash.h>

/* Planes start at multiples of this, so that copies and SIMD never straddle two of them. */
enum { PLANE_ALIGN = 256 };

static int64_t plane_bytes(int64_t elems, int64_t size)
{
    return (elems * size + PLANE_ALIGN - 1) / PLANE_ALIGN * PLANE_ALIGN;
}

static int64_t unit_bytes(const model *m, int32_t unit, const mt_state_spec *states,
                          uint32_t n_states, bool grad_plane)
{
    int64_t n = m->units[unit].t->own_elems, bytes = 2 * plane_bytes(n, 2);
    if (!model_unit_trains(m, unit))
        return bytes;
    for (uint32_t s = 0; s < n_states; s++)
        bytes += plane_bytes(n, mt_dtype_size(states[s].dtype));
    return bytes + (grad_plane ? plane_bytes(n, 4) : 0);
}

int64_t store_bytes(const model *m, const mt_state_spec *states, uint32_t n_states, bool grad_plane)
{
    int64_t bytes = 0;
    for (int32_t u = 0; u < m->n_units; u++)
        bytes += unit_bytes(m, u, states, n_states, grad_plane);
    return bytes;
}

/* ---- memory ---------------------------------------------------------------------------------- */

enum { TOUCH_CHUNK = 64 << 20 };

typedef struct touch_job {
    const store_region *region;
    progress *progress;
} touch_job;

static mt_status touch_chunk(void *arg, int64_t i, int32_t thread)
{
    (void)thread;
    const touch_job *job = arg;
    const store_region *r = job->region;
    int64_t first = i * TOUCH_CHUNK;
    int64_t n = r->bytes - first < TOUCH_CHUNK ? r->bytes - first : TOUCH_CHUNK;
    memset((char *)r->data + first, 0, (size_t)n);
    progress_add(job->progress, n);
    return MT_OK;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Cuts units first .. end of the store's region r into planes. */
static void lay_out_units(store *s, const store_region *r, int32_t first, int32_t end,
                          bool grad_plane)
{
    char *p = r->data;
    for (int32_t u = first; u < end; u++) {
        store_unit *w = &s->units[u];
        int64_t n = w->elems = s->m->units[u].t->own_elems;
        w->hi = (uint16_t *)p;
        p += plane_bytes(n, 2);
        w->lo = (int16_t *)p;
        p += plane_bytes(n, 2);
        s->weight_bytes += 2 * plane_bytes(n, 2);
        if (!model_unit_trains(s->m, u))
            continue;
        for (uint32_t i = 0; i < s->n_states; i++) {
            w->state[i] = p;
            p += plane_bytes(n, mt_dtype_size(s->states[i].dtype));
            s->state_bytes += plane_bytes(n, mt_dtype_size(s->states[i].dtype));
        }
        if (grad_plane) {
            w->grad = (float *)p;
            p += plane_bytes(n, 4);
            s->grad_bytes += plane_bytes(n, 4);
        }
    }
}

/* One region after the other, so that a backend which pins memory shows how far it is. */
static mt_status alloc_regions(store *s, bool grad_plane, int64_t region_bytes)
{
    progress p;
    mt_status st = MT_OK;
    progress_begin(&p, "preparing host memory",
                   store_bytes(s->m, s->states, s->n_states, grad_plane));
    for (int32_t first = 0, end; first < s->n_units && st == MT_OK; first = end) {
        store_region *r = &s->regions[s->n_regions];
        for (end = first; end < s->n_units && r->bytes < region_bytes; end++)
            r->bytes += unit_bytes(s->m, end, s->states, s->n_states, grad_plane);
        st = s->backend->host_alloc(s->device, r->bytes, &r->data);
        if (st < 0) {
            st = status_prefix(st, "the host store (%.2f GiB)", (double)p.total / (1 << 30));
            break;
        }
        s->n_regions++;
        s->region_bytes += r->bytes;
        st = parallel_for((r->bytes + TOUCH_CHUNK - 1) / TOUCH_CHUNK, touch_chunk,
                          &(touch_job){ r, &p });
        lay_out_units(s, r, first, end, grad_plane);
    }
    progress_end(&p);
    return st;
}

mt_status store_create(const model *m, const mt_state_spec *states, uint32_t n_states,
                       bool grad_plane, const mt_backend *backend, void *device, store **ret)
{
    return store_create_in(m, states, n_states, grad_plane, STORE_REGION_BYTES, backend, device,
                           ret);
}

mt_status store_create_in(const model *m, const mt_state_spec *states, uint32_t n_states,
                          bool grad_plane, int64_t region_bytes, const mt_backend *backend,
                          void *device, store **ret)
{
    if (n_states > MT_OPTIM_MAX_STATES)
        return status_set(MT_ERR_INVALID, "an optimizer declares %u state planes; at most %d",
                          n_states, MT_OPTIM_MAX_STATES);
    for (uint32_t i = 0; i < n_states; i++)
        if (mt_dtype_size(states[i].dtype) == 0)
            return status_set(MT_ERR_INVALID, "state plane '%s' has an unknown dtype (%d)",
                              states[i].name, states[i].dtype);
    store *s = calloc(1, sizeof *s);
    if (!s)
        return status_nomem("the host store", sizeof *s);
    mt_status st = MT_OK;
    s->m = m;
    s->n_units = m->n_units;
    s->n_states = n_states;
    if (n_states)
        memcpy(s->states, states, n_states * sizeof *states);
    s->backend = backend;
    s->device = device;
    s->units = calloc((size_t)m->n_units, sizeof *s->units);
    s->regions = calloc((size_t)m->n_units, sizeof *s->regions);
    if (!s->units || !s->regions) {
        st = status_nomem("the host store", (size_t)m->n_units * sizeof *s->units);
        goto out;
    }
    st = alloc_regions(s, grad_plane, region_bytes);
    if (st < 0)
        goto out;
    *ret = s;
    s = NULL;
out:
    store_destroy(s);
    return st;
}

void store_destroy(store *s)
{
    if (!s)
        return;
    for (int32_t i = 0; i < s->n_regions; i++)
        s->backend->host_free(s->device, s->regions[i].data, s->regions[i].bytes);
    free(s->regions);
    free(s->units);
    free(s);
}

/* ---- access ---------------------------------------------------------------------------------- */

void store_get(const store *s, int32_t param, int64_t first, int64_t n, float *ret)
{
    const model_param *p = &s->m->params[param];
    const uint16_t *hi = s->units[p->unit].hi + p->offset + first;
    const int16_t *lo = s->units[p->unit].lo + p->offset + first;
    planes_join(hi, lo, n, ret);
}

void store_set(store *s, int32_t param, int64_t first, int64_t n, const float *src)
{
    const model_param *p = &s->m->params[param];
    uint16_t *hi = s->units[p->unit].hi + p->offset + first;
    int16_t *lo = s->units[p->unit].lo + p->offset + first;
    planes_split(src, n, hi, lo);
    s->version++;
}

void *store_state(const store *s, int32_t param, uint32_t state)
{
    const model_param *p = &s->m->params[param];
    char *plane = s->units[p->unit].state[state];
    return plane ? plane + p->offset * mt_dtype_size(s->states[state].dtype) : NULL;
}

uint64_t store_hash(const store *s)
{
    XXH3_state_t *h = XXH3_createState();
    if (!h)
        return 0;
    XXH3_64bits_reset(h);
    for (int32_t i = 0; i < s->m->n_params; i++) {
        const model_param *p = &s->m->params[i];
        const store_unit *w = &s->units[p->unit];
        XXH3_64bits_update(h, w->hi + p->offset, (size_t)p->elems * 2);
        XXH3_64bits_update(h, w->lo + p->offset, (size_t)p->elems * 2);
        for (uint32_t k = 0; k < s->n_states && w->state[k]; k++)
            XXH3_64bits_update(h, store_state(s, i, k),
                               (size_t)(p->elems * mt_dtype_size(s->states[k].dtype)));
    }
    uint64_t hash = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return hash;
}

/* ---- random initialisation ------------------------------------------------------------------- */

enum { INIT_CHUNK = 1 << 18 };

/* A prime, so that the rows of a matrix differ. */
enum { PATTERN = 65521 };

typedef struct init_job {
    store *s;
    uint64_t seed;
    const float *pattern; /* [PATTERN] standard normals; NULL: draw every element */
    progress progress;
} init_job;

static int64_t init_chunks(const model_param *p)
{
    return (p->elems + INIT_CHUNK - 1) / INIT_CHUNK;
}

static void repeat_pattern(const float *pattern, int64_t first, int64_t n, float *ret)
{
    int64_t at = first % PATTERN;
    for (int64_t i = 0; i < n; i++) {
        ret[i] = pattern[at++];
        at = at == PATTERN ? 0 : at;
    }
}

static mt_status init_chunk(void *arg, int64_t chunk, int32_t thread)
{
    (void)thread;
    enum { PIECE = 256 };
    init_job *job = arg;
    const model_param *p = job->s->m->params;
    for (; chunk >= init_chunks(p); p++)
        chunk -= init_chunks(p);
    uint64_t key = rng_key(job->seed, p->name);
    int64_t first = chunk * INIT_CHUNK;
    int64_t end = first + INIT_CHUNK < p->elems ? first + INIT_CHUNK : p->elems;
    uint16_t *hi = job->s->units[p->unit].hi + p->offset;
    int16_t *lo = job->s->units[p->unit].lo + p->offset;
    for (int64_t i = first; i < end; i += PIECE) {
        float x[PIECE];
        int64_t n = end - i < PIECE ? end - i : PIECE;
        if (p->init == MT_INIT_NORMAL && job->pattern) {
            repeat_pattern(job->pattern, (int64_t)(key % PATTERN) + i, n, x);
            for (int64_t k = 0; k < n; k++)
                x[k] *= p->init_std;
        } else {
            model_draw(p, job->seed, i, n, x);
        }
        planes_split(x, n, hi + i, lo + i);
    }
    progress_add(&job->progress, (end - first) * 4);
    return MT_OK;
}

static void init_all(init_job *job)
{
    store *s = job->s;
    int64_t chunks = 0;
    for (int32_t i = 0; i < s->m->n_params; i++)
        chunks += init_chunks(&s->m->params[i]);
    progress_begin(&job->progress, "drawing weights", s->weight_bytes);
    parallel_for(chunks, init_chunk, job);
    progress_end(&job->progress);
    s->version++;
}

void store_init_random(store *s, uint64_t seed)
{
    init_all(&(init_job){ .s = s, .seed = seed });
}

mt_status store_init_pattern(store *s)
{
    float *pattern = malloc(PATTERN * sizeof *pattern);
    if (!pattern)
        return status_nomem("initial weights", PATTERN * sizeof *pattern);
    rng_normals(rng_key(0, "pattern"), 0, PATTERN, pattern);
    init_all(&(init_job){ .s = s, .pattern = pattern });
    free(pattern);
    return MT_OK;
}
