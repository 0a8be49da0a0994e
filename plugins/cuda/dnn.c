/* SPDX-License-Identifier: Apache-2.0
 *
 * The cuDNN library, opened while the program runs; its plans for attention, one a shape; running
 * them. Whatever is refused on the way leaves the own kernels in charge, and a line in the log.
 */
#include "dnn_graph.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Before 9.10 masks take other values; before 9.18 backward of ragged tensors reads workspace that
 * nothing wrote. Plans are proven on Hopper only. */
enum {
    DNN_OLDEST_VERSION = 91000,
    DNN_CLEAN_WORK_VERSION = 91800,
    DNN_CAPABILITY_FROM = 90,
    DNN_CAPABILITY_TO = 99
};

enum { DNN_BUILDERS = 4 }; /* threads that build plans, each with a handle of its own */

struct dnn_plan {
    dnn_plan *next;
    dnn_shape shape;
    dnn_graph graph;
    cudnnBackendDescriptor_t plan; /* NULL: cuDNN has none for this shape */
    int64_t work;
};

struct cuda_dnn {
    void *library;
    dnn_api api;
    cudnnHandle_t handle;                /* that plans run with */
    cudnnHandle_t builder[DNN_BUILDERS]; /* that they are made with; NULL: not needed yet */
    size_t version;
    dnn_plan *plans;
};

/* ---- the library ----------------------------------------------------------------------------- */

static bool switched_off(void)
{
    const char *value = getenv("MEGATRAIN_CUDNN");
    return value && strcmp(value, "0") == 0;
}

static bool find_functions(cuda_dnn *c)
{
#define FIND(f)                                                                                    \
    do {                                                                                           \
        void *symbol = dlsym(c->library, #f);                                                      \
        if (!symbol) {                                                                             \
            mt_log(MT_LOG_DEBUG, "cuDNN is not used: it has no %s", #f);                           \
            return false;                                                                          \
        }                                                                                          \
        memcpy(&c->api.f, &symbol, sizeof symbol);                                                 \
    } while (0);
    DNN_FUNCTIONS(FIND)
#undef FIND
    return true;
}

static bool open_library(cuda_dnn *c, const cuda_device *d)
{
    if (d->capability < DNN_CAPABILITY_FROM || d->capability > DNN_CAPABILITY_TO) {
        mt_log(MT_LOG_DEBUG, "cuDNN is not used: compute capability %d.%d", d->capability / 10,
               d->capability % 10);
        return false;
    }
    /* Stays for good: what it loads in turn does not expect to be unloaded. */
    c->library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!c->library) {
        mt_log(MT_LOG_DEBUG, "cuDNN is not used: %s", dlerror());
        return false;
    }
    if (!find_functions(c))
        return false;
    c->version = c->api.cudnnGetVersion();
    if (c->version < DNN_OLDEST_VERSION) {
        mt_log(MT_LOG_DEBUG, "cuDNN is not used: version %zu, at least %d is needed", c->version,
               DNN_OLDEST_VERSION);
        return false;
    }
    cudnnStatus_t s = c->api.cudnnCreate(&c->handle);
    if (s != CUDNN_STATUS_SUCCESS) {
        mt_log(MT_LOG_DEBUG, "cuDNN %zu is not used: it does not start: %s", c->version,
               c->api.cudnnGetErrorString(s));
        return false;
    }
    mt_log(MT_LOG_DEBUG, "attention runs on cuDNN %zu where it has plans", c->version);
    return true;
}

static void destroy(cuda_dnn *c)
{
    while (c->plans) {
        dnn_plan *p = c->plans;
        c->plans = p->next;
        dnn_graph_finish(&p->graph);
        free(p);
    }
    for (int i = 0; i < DNN_BUILDERS; i++)
        if (c->builder[i])
            (void)c->api.cudnnDestroy(c->builder[i]);
    if (c->handle)
        (void)c->api.cudnnDestroy(c->handle);
    if (c->library)
        dlclose(c->library);
    free(c);
}

void dnn_open(cuda_device *d)
{
    cuda_dnn *c = switched_off() ? NULL : calloc(1, sizeof *c);
    if (c && open_library(c, d))
        d->dnn = c;
    else if (c)
        destroy(c);
}

void dnn_close(cuda_device *d)
{
    if (d->dnn)
        destroy(d->dnn);
    d->dnn = NULL;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* The first of the heuristic's engines that makes a plan. */
static bool plan_by(dnn_plan *p, cudnnBackendHeurMode_t mode)
{
    enum { ENGINES = 8 };
    dnn_graph *g = &p->graph;
    cudnnBackendDescriptor_t config[ENGINES], heuristic;
    int64_t found = 0, got = 0;
    g->status = CUDNN_STATUS_SUCCESS;
    heuristic = dnn_descriptor(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    DNN_SET(g, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
            &g->graph);
    DNN_SET(g, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (!dnn_finalize(g, heuristic, "a heuristic"))
        return false;
    for (int i = 0; i < ENGINES; i++)
        config[i] = dnn_descriptor(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->status != CUDNN_STATUS_SUCCESS ||
        !dnn_check(g,
                   g->api->cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                    CUDNN_TYPE_BACKEND_DESCRIPTOR, ENGINES, &found,
                                                    config),
                   "CUDNN_ATTR_ENGINEHEUR_RESULTS"))
        return false;
    if (found == 0)
        dnn_check(g, CUDNN_STATUS_NOT_SUPPORTED, "no engine");
    for (int64_t i = 0; i < found && i < ENGINES; i++) {
        g->status = CUDNN_STATUS_SUCCESS;
        cudnnBackendDescriptor_t plan = dnn_descriptor(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        DNN_SET(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                &config[i]);
        if (dnn_finalize(g, plan, "an execution plan") &&
            dnn_check(g,
                      g->api->cudnnBackendGetAttribute(plan,
                                                       CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                       CUDNN_TYPE_INT64, 1, &got, &p->work),
                      "CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE")) {
            p->plan = plan;
            return true;
        }
    }
    return false;
}

static void describe(const dnn_shape *s, char *text, size_t size)
{
    snprintf(text, size, "%s of %lld x %lld, heads %d/%d, dims %d/%d%s%s",
             s->backward ? "backward" : "forward", (long long)s->documents, (long long)s->rows,
             s->heads, s->kv_heads, s->qk_dim, s->v_dim, s->window ? ", window" : "",
             s->softcap ? ", softcap" : "");
}

static void build(const cuda_dnn *c, cudnnHandle_t handle, dnn_plan *p)
{
    static const struct {
        cudnnBackendHeurMode_t mode;
        const char *name;
    } modes[] = { { CUDNN_HEUR_MODE_A, "mode A" }, { CUDNN_HEUR_MODE_FALLBACK, "fallback" } };
    char what[160];
    const dnn_graph *g = &p->graph;
    describe(&p->shape, what, sizeof what);
    bool described = dnn_graph_init(&p->graph, &c->api, handle, &p->shape);
    for (int i = 0; i < 2; i++) {
        if (described && plan_by(p, modes[i].mode)) {
            mt_log(MT_LOG_DEBUG, "cuDNN plan for attention, %s: %lld bytes of work", what,
                   (long long)p->work);
            return;
        }
        mt_log(MT_LOG_DEBUG, "no cuDNN plan for attention, %s, %s: %s: %s: %s", what,
               described ? modes[i].name : "graph", g->failed,
               c->api.cudnnGetErrorString(g->status), g->text);
        if (!described)
            break;
    }
    dnn_graph_finish(&p->graph);
    p->plan = NULL;
}

static dnn_plan *lookup(const cuda_dnn *c, const dnn_shape *shape)
{
    for (dnn_plan *p = c->plans; p; p = p->next)
        if (memcmp(&p->shape, shape, sizeof *shape) == 0)
            return p;
    return NULL;
}

const dnn_plan *dnn_plan_find(const cuda_device *d, const dnn_shape *shape)
{
    const dnn_plan *p = d->dnn ? lookup(d->dnn, shape) : NULL;
    return p && p->plan ? p : NULL;
}

/* Plans that are built by several threads, each taking the next one. */
typedef struct site {
    const cuda_device *d;
    dnn_plan *next;
    pthread_mutex_t lock;
} site;

typedef struct builder {
    site *site;
    cudnnHandle_t handle;
    pthread_t thread;
    bool started;
} builder;

static void *build_plans(void *arg)
{
    const builder *b = arg;
    site *s = b->site;
    cuda_use(s->d);
    for (;;) {
        pthread_mutex_lock(&s->lock);
        dnn_plan *p = s->next;
        if (p)
            s->next = p->next;
        pthread_mutex_unlock(&s->lock);
        if (!p)
            return NULL;
        build(s->d->dnn, b->handle, p);
    }
}

/* The n plans of a list. */
static void build_all(const cuda_device *d, dnn_plan *first, int n)
{
    cuda_dnn *c = d->dnn;
    site s = { .d = d, .next = first };
    builder b[DNN_BUILDERS] = { 0 };
    pthread_mutex_init(&s.lock, NULL);
    for (int i = 0; i < DNN_BUILDERS && i < n; i++) {
        if (!c->builder[i] && c->api.cudnnCreate(&c->builder[i]) != CUDNN_STATUS_SUCCESS)
            c->builder[i] = NULL;
        b[i].site = &s;
        b[i].handle = c->builder[i];
        b[i].started =
            b[i].handle && i > 0 && pthread_create(&b[i].thread, NULL, build_plans, &b[i]) == 0;
    }
    /* This thread builds too, and whatever no other one does. */
    if (!b[0].handle)
        b[0].handle = c->handle;
    build_plans(&b[0]);
    for (int i = 1; i < DNN_BUILDERS; i++)
        if (b[i].started)
            pthread_join(b[i].thread, NULL);
    pthread_mutex_destroy(&s.lock);
}

void dnn_plans_make(const cuda_device *d, const dnn_shape *shapes, int n)
{
    cuda_dnn *c = d->dnn;
    dnn_plan *added = NULL, *last = NULL;
    int n_added = 0;
    for (int i = 0; c && i < n; i++) {
        dnn_plan *p = lookup(c, &shapes[i]) ? NULL : calloc(1, sizeof *p);
        if (!p)
            continue;
        p->shape = shapes[i];
        p->next = added;
        last = added ? last : p;
        added = p;
        n_added++;
    }
    if (!added)
        return;
    cuda_use(d);
    build_all(d, added, n_added);
    last->next = c->plans;
    c->plans = added;
}

int64_t dnn_plan_work(const dnn_plan *p)
{
    return p->work;
}

/* ---- running --------------------------------------------------------------------------------- */

typedef struct binding {
    int64_t uid[3 * DNN_TENSORS + DNN_MAX_SCALARS];
    void *at[3 * DNN_TENSORS + DNN_MAX_SCALARS];
    int64_t n;
} binding;

static void bind(binding *b, int64_t uid, const void *at)
{
    b->uid[b->n] = uid;
    memcpy(&b->at[b->n++], &at, sizeof at);
}

bool dnn_run(cuda_queue *q, const dnn_plan *p, const dnn_launch *launch)
{
    cuda_device *d = q->device;
    const cuda_dnn *c = d->dnn;
    const dnn_graph *g = &p->graph;
    const dnn_api *api = &c->api;
    const float scalar[] = { [DNN_SCALE] = launch->scale,
                             [DNN_SOFTCAP] = launch->softcap,
                             [DNN_WINDOW] = launch->window,
                             [DNN_LOWEST] = -INFINITY,
                             [DNN_ONE] = 1 };
    const int tensors = dnn_tensors(&p->shape);
    binding b = { .n = 0 };
    for (int i = 0; i < tensors; i++) {
        bind(&b, DNN_UID_TENSOR + i, launch->data[i]);
        if (g->starts_of[i] == i)
            bind(&b, DNN_UID_STARTS + i, launch->starts[i]);
    }
    bind(&b, DNN_UID_LENGTHS_Q, launch->lengths);
    bind(&b, DNN_UID_LENGTHS_K, launch->lengths);
    if (p->shape.backward)
        bind(&b, DNN_UID_SUMS, launch->sums);
    for (int i = 0; i < g->n_scalars; i++)
        bind(&b, DNN_UID_SCALAR + i, &scalar[g->scalar[i]]);

    if (p->shape.backward && c->version < DNN_CLEAN_WORK_VERSION && p->work > 0 &&
        !cuda_ok(d, cudaMemsetAsync(launch->work, 0, (size_t)p->work, q->stream),
                 "clearing work for cuDNN"))
        return false;
    cudnnBackendDescriptor_t pack = NULL;
    cudnnStatus_t s = api->cudnnSetStream(c->handle, q->stream);
    if (s == CUDNN_STATUS_SUCCESS)
        s = api->cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (s == CUDNN_STATUS_SUCCESS)
        s = api->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
                                          CUDNN_TYPE_INT64, b.n, b.uid);
    if (s == CUDNN_STATUS_SUCCESS)
        s = api->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                          CUDNN_TYPE_VOID_PTR, b.n, b.at);
    if (s == CUDNN_STATUS_SUCCESS)
        s = api->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                                          CUDNN_TYPE_VOID_PTR, 1, &launch->work);
    if (s == CUDNN_STATUS_SUCCESS)
        s = api->cudnnBackendFinalize(pack);
    if (s == CUDNN_STATUS_SUCCESS)
        s = api->cudnnBackendExecute(c->handle, p->plan, pack);
    if (s != CUDNN_STATUS_SUCCESS) {
        char what[160], text[128] = "";
        describe(&p->shape, what, sizeof what);
        api->cudnnGetLastErrorString(text, sizeof text);
        mt_log(MT_LOG_DEBUG, "cuDNN's attention, %s, failed: %s", what, text);
        cuda_fail(d, MT_ERR_DEVICE, "CUDA device %d (%s): cuDNN's attention, %s: %s: %s", d->index,
                  d->name, what, api->cudnnGetErrorString(s), text);
    }
    if (pack)
        (void)api->cudnnBackendDestroyDescriptor(pack);
    return s == CUDNN_STATUS_SUCCESS;
}
