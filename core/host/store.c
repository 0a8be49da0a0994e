/* SPDX-License-Identifier: Apache-2.0
 *
 * The host store's regions: where each plane lies, exact access to masters, random
 * initialisation and hashing. Who fills or updates it is not decided here.
 */
#include "store.h"

#include "../base/log.h"
#include "../base/rng.h"
#include "../base/status.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
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

/* ---- progress --------------------------------------------------------------------------------
 */

typedef struct progress {
    const char *what;
    int64_t total, before; /* bytes; those of earlier loops */
    double next;           /* when to speak again, s */
} progress;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

enum { PROGRESS_SECONDS = 2 };

static void progress_tell(progress *p, int64_t done)
{
    double at = now();
    if (p->next == 0)
        p->next = at + PROGRESS_SECONDS; /* what is over before is not worth a word */
    if (at < p->next)
        return;
    char text[160];
    double gib = 1.0 / (1 << 30);
    done = p->before + done < p->total ? p->before + done : p->total;
    snprintf(text, sizeof text, "%s: %.1f of %.1f GiB", p->what, (double)done * gib,
             (double)p->total * gib);
    if (log_has_terminal())
        log_live(text);
    else
        log_write(MT_LOG_INFO, "%s", text);
    p->next = at + (log_has_terminal() ? 0.2 : PROGRESS_SECONDS);
}

static void progress_end(const progress *p)
{
    if (p->next > 0 && log_has_terminal())
        log_live(NULL);
}

/* ---- parallel loops over the region ----------------------------------------------------------
 */

typedef struct chunked {
    void (*body)(void *arg, int64_t chunk);
    void *arg;
    int64_t n;
    _Atomic int64_t next;
} chunked;

static void *chunked_run(void *arg)
{
    chunked *c = arg;
    for (int64_t i; (i = atomic_fetch_add(&c->next, 1)) < c->n;)
        c->body(c->arg, i);
    return NULL;
}

/* Runs body(arg, 0 .. n-1), each once, on as many threads as can be had; the chunks are independent
 * of each other, so fewer threads only take longer. */
static void chunked_for(int64_t n, void (*body)(void *, int64_t), void *arg, progress *p,
                        int64_t chunk_bytes)
{
    enum { MAX_THREADS = 16 };
    pthread_t thread[MAX_THREADS];
    chunked c = { .body = body, .arg = arg, .n = n };
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int want = online > MAX_THREADS ? MAX_THREADS : online < 1 ? 1 : (int)online;
    int started = 0;
    while (started < want - 1 && started < n - 1 &&
           pthread_create(&thread[started], NULL, chunked_run, &c) == 0)
        started++;
    for (int64_t i; (i = atomic_fetch_add(&c.next, 1)) < c.n;) {
        body(arg, i);
        progress_tell(p, (i + 1) * chunk_bytes);
    }
    for (int i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
}

enum { TOUCH_CHUNK = 64 << 20 };

static void touch_chunk(void *arg, int64_t i)
{
    const store_region *r = arg;
    int64_t first = i * TOUCH_CHUNK;
    int64_t n = r->bytes - first < TOUCH_CHUNK ? r->bytes - first : TOUCH_CHUNK;
    memset((char *)r->data + first, 0, (size_t)n);
}

/* ---- life ------------------------------------------------------------------------------------
 */

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
    progress p = { "preparing host memory", store_bytes(s->m, s->states, s->n_states, grad_plane),
                   0, 0 };
    mt_status st = MT_OK;
    progress_tell(&p, 0);
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
        chunked_for((r->bytes + TOUCH_CHUNK - 1) / TOUCH_CHUNK, touch_chunk, r, &p, TOUCH_CHUNK);
        p.before += r->bytes;
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

/* ---- access ----------------------------------------------------------------------------------
 */

void store_get(const store *s, int32_t param, int64_t first, int64_t n, float *ret)
{
    const model_param *p = &s->m->params[param];
    const uint16_t *hi = s->units[p->unit].hi + p->offset + first;
    const int16_t *lo = s->units[p->unit].lo + p->offset + first;
    for (int64_t i = 0; i < n; i++)
        ret[i] = mt_join_f32(hi[i], lo[i]);
}

void store_set(store *s, int32_t param, int64_t first, int64_t n, const float *src)
{
    const model_param *p = &s->m->params[param];
    uint16_t *hi = s->units[p->unit].hi + p->offset + first;
    int16_t *lo = s->units[p->unit].lo + p->offset + first;
    for (int64_t i = 0; i < n; i++)
        mt_split_f32(src[i], &hi[i], &lo[i]);
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

/* ---- random initialisation -------------------------------------------------------------------
 */

enum { INIT_CHUNK = 1 << 18 };

/* A prime, so that the rows of a matrix differ. */
enum { PATTERN = 65521 };

typedef struct init_job {
    store *s;
    uint64_t seed;
    const float *pattern; /* [PATTERN] standard normals; NULL: draw every element */
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

static void init_chunk(void *arg, int64_t chunk)
{
    enum { PIECE = 256 };
    const init_job *job = arg;
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
        for (int64_t k = 0; k < n; k++)
            mt_split_f32(x[k], &hi[i + k], &lo[i + k]);
    }
}

static void init_all(init_job *job)
{
    store *s = job->s;
    int64_t chunks = 0;
    progress p = { "drawing weights", s->weight_bytes, 0, 0 };
    for (int32_t i = 0; i < s->m->n_params; i++)
        chunks += init_chunks(&s->m->params[i]);
    progress_tell(&p, 0);
    chunked_for(chunks, init_chunk, job, &p, INIT_CHUNK * 4);
    progress_end(&p);
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
