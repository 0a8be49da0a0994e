/* SPDX-License-Identifier: Apache-2.0
 *
 * A family against Hugging Face transformers in FP32, from the folders that make_fixtures.py
 * writes: loss, logits and the gradient of every parameter; first unit by unit, without the engine,
 * then streamed, in several packings, groups and activation policies, and token by token.
 *
 *     oracle-family PLUGIN_DIR FIXTURES_DIR/FAMILY [DEVICE [bf16]]
 *
 * With bf16 the device computes in BF16, by the engine only. Where the reference is that of a model
 * with experts, a score that rounds may send a token elsewhere: then only the loss is compared.
 */
#include "../../core/base/status.h"
#include "../../core/engine/engine.h"
#include "../../core/manifest/run.h"
#include "../../core/train/checkpoint.h"
#include "../../plugins/host/registry.h"
#include "../check.h"
#include "expected.h"
#include "units.h"

#include <dirent.h>
#include <math.h>

static const expected_bounds fp32_bounds = {
    .loss = 1e-5, .aux_loss = 1e-5, .logits = 1e-5, .grads = 1e-4
};
static const expected_bounds bf16_bounds = { .loss = 2e-3, .logits = 6e-2, .grads = 2e-1 };
static const expected_bounds bf16_routed_bounds = {
    .loss = 2e-3, .aux_loss = 2e-3, .logits = INFINITY, .grads = INFINITY
};

static const char *fixtures;
static const mt_backend *backend;
static void *device;
static mt_dtype compute = MT_F32;
static const mt_weights *weights;

/* A model with its weights, and what is expected of it. */
typedef struct subject {
    model_source source;
    model *m;
    store *s; /* without states, with a gradient plane */
    expected e;
    double **grads; /* what is compared */
    int64_t longest;
    double worst_loss, worst_aux_loss, worst_logits, worst_grads;
} subject;

static void subject_finish(subject *s)
{
    if (s->m) {
        expected_grads_destroy(s->grads, s->m);
        expected_finish(&s->e, s->m);
    }
    store_destroy(s->s);
    model_destroy(s->m);
    if (s->source.config)
        model_source_close(&s->source);
}

static bool has_experts(const model *m)
{
    for (int32_t p = 0; p < m->n_params; p++)
        if (m->params[p].info->stack > 1)
            return true;
    return false;
}

static mt_status subject_init(subject *s, const char *name)
{
    char folder[4096], values[4200];
    const void *arch = NULL;
    mt_status st;
    *s = (subject){ 0 };
    snprintf(folder, sizeof folder, "%s/%s", fixtures, name);
    snprintf(values, sizeof values, "%s/expected.safetensors", folder);
    if ((st = model_source_open(folder, &s->source)) ||
        (st = registry_find(PLUGIN_ARCH, s->source.model_type, MT_ARCH_INTERFACE, &arch, NULL)) ||
        (st = model_create(arch, s->source.hyper, &s->m)) ||
        (st = store_create(s->m, NULL, 0, true, backend, device, &s->s)) ||
        (st = weights_load(s->s, s->source.weights, weights, NULL)) ||
        (st = expected_read(values, weights, s->m, &s->e)))
        return st;
    s->e.bounds = compute == MT_F32   ? fp32_bounds
                  : has_experts(s->m) ? bf16_routed_bounds
                                      : bf16_bounds;
    for (int64_t d = 0; d < s->e.documents; d++) {
        int64_t n = s->e.doc_starts[d + 1] - s->e.doc_starts[d];
        s->longest = n > s->longest ? n : s->longest;
    }
    s->grads = expected_grads_create(s->m);
    return s->grads ? MT_OK : status_nomem("gradients", (size_t)s->m->total_params * 8);
}

static void check_loss(subject *s, const char *what, double loss_sum)
{
    s->worst_loss = fmax(s->worst_loss, expected_check_loss(&s->e, what, loss_sum));
}

static void check_aux_loss(subject *s, const char *what, double aux_loss_sum)
{
    s->worst_aux_loss = fmax(s->worst_aux_loss, expected_check_aux_loss(&s->e, what, aux_loss_sum));
}

static void check_grads(subject *s, const char *what)
{
    s->worst_grads = fmax(s->worst_grads, expected_check_grads(&s->e, what, s->m, s->grads));
}

/* ---- how the documents are packed ------------------------------------------------------------ */

typedef struct packing {
    const char *name;
    int64_t per_micro; /* documents of a micro-batch; the last one may have fewer */
    int64_t groups;    /* 0: as many as micro-batches */
    int32_t policy;    /* tpl_policy */
    bool serial;
} packing;

/* Where it matters to the loss, micro-batches are those of the reference. */
static mt_status pack(const expected *e, int64_t per_micro, step_batch *ret)
{
    int64_t first[64], n = 0;
    for (; n < e->micro_batches; n++)
        first[n] = e->micro_starts[n];
    for (int64_t d = 0; !e->micro_batches && d < e->documents && n < 64; d += per_micro)
        first[n++] = d;
    return expected_batch(e, first, n, ret);
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* Feeds n tokens at positions used..; ret [n, vocab]. */
typedef mt_status (*generate_fn)(void *runner, const int32_t *tokens, int64_t n, int64_t used,
                                 double *ret);

/* Every document, at first `prefix` of its tokens at once (all: whole), the rest one by one. */
static void check_logits(subject *s, const char *what, bool whole, generate_fn generate,
                         void *runner)
{
    const expected *e = &s->e;
    double *logits = malloc((size_t)(s->longest * e->vocab) * sizeof *logits);
    CHECK(logits, "out of memory");
    for (int64_t d = 0; logits && d < e->documents; d++) {
        const int32_t *ids = e->ids + e->doc_starts[d];
        int64_t n = e->doc_starts[d + 1] - e->doc_starts[d], prefix = whole ? n : (n + 1) / 2;
        mt_status st = generate(runner, ids, prefix, 0, logits);
        for (int64_t i = prefix; i < n && !st; i++)
            st = generate(runner, ids + i, 1, i, logits + i * e->vocab);
        CHECK(!st, "%s: document %d: %s", what, (int)d, status_text());
        if (st)
            break;
        double error =
            expected_error(logits, e->logits + e->doc_starts[d] * e->vocab, n * e->vocab);
        CHECK(error <= s->e.bounds.logits, "%s: logits of document %d (%d tokens) are off by %.2e",
              what, (int)d, (int)n, error);
        s->worst_logits = fmax(s->worst_logits, error);
    }
    free(logits);
}

/* ---- without the engine ---------------------------------------------------------------------- */

static mt_status generate_by_units(void *runner, const int32_t *tokens, int64_t n, int64_t used,
                                   double *ret)
{
    return units_generate(runner, tokens, n, used, ret);
}

static void check_units(subject *s, mt_dtype precision, const packing *how)
{
    char what[96];
    snprintf(what, sizeof what, "units, %s, %s", mt_dtype_name(precision), how->name);
    step_batch batch = { 0 };
    units *u = NULL;
    units_config setup = { .store = s->s,
                           .backend = backend,
                           .device = device,
                           .compute = precision,
                           .policy = (tpl_policy)how->policy,
                           .max_tokens = s->e.tokens,
                           .max_documents = s->e.documents };
    double sum = 0, aux_sum = 0;
    mt_status st = pack(&s->e, how->per_micro, &batch);
    if (!st)
        st = units_create(&setup, &u);
    if (!st)
        st = units_gradients(u, &batch, &sum, &aux_sum, s->grads);
    CHECK(!st, "%s: %s", what, status_text());
    if (!st) {
        check_loss(s, what, sum);
        check_aux_loss(s, what, aux_sum);
        check_grads(s, what);
        st = units_eval(u, &batch, &sum);
        CHECK(!st, "%s: eval: %s", what, status_text());
        check_loss(s, "eval by units", sum);
        check_logits(s, what, true, generate_by_units, u);
        check_logits(s, what, false, generate_by_units, u);
    }
    units_destroy(u);
    expected_batch_finish(&batch);
}

/* Moves every trained parameter by up to `step` along a random direction, fixed by `seed`; what
 * the masters hold in the end goes to ret[param]. */
static void displace(const subject *s, double step, uint32_t seed, double *const *ret)
{
    for (int32_t p = 0; p < s->m->n_params; p++) {
        int64_t n = s->m->params[p].elems;
        bool frozen = s->m->params[p].flags & MT_PARAM_FROZEN;
        for (int64_t i = 0; i < n; i++) {
            float w;
            seed = seed * 1664525u + 1013904223u;
            double along = (double)(seed >> 8) / (1 << 23) - 1;
            store_get(s->s, p, i, 1, &w);
            w += frozen ? 0 : (float)(step * along);
            store_set(s->s, p, i, 1, &w);
            ret[p][i] = (double)w;
        }
    }
}

/* Loss and auxiliary loss, and the gradient of their sum. */
static double whole_loss(const subject *s, tpl_policy policy, double *const *ret_grads)
{
    units *u = NULL;
    step_batch batch = { 0 };
    units_config setup = { .store = s->s,
                           .backend = backend,
                           .device = device,
                           .compute = MT_F64,
                           .policy = policy,
                           .max_tokens = s->e.tokens,
                           .max_documents = s->e.documents };
    double sum = NAN, aux_sum = NAN;
    mt_status st = pack(&s->e, 1, &batch);
    if (!st)
        st = units_create(&setup, &u);
    if (!st)
        st = units_gradients(u, &batch, &sum, &aux_sum, ret_grads);
    CHECK(!st, "%s", status_text());
    units_destroy(u);
    expected_batch_finish(&batch);
    return (sum + aux_sum) / (double)s->e.n_targets;
}

/* The gradient through all units against a difference in FP64: what one layer with experts adds to
 * the loss depends on all of them, which no template by itself shows. */
static void check_difference(subject *s)
{
    const double step = 2e-6; /* no token changes its experts */
    double **low = expected_grads_create(s->m), **high = expected_grads_create(s->m);
    double **unused = expected_grads_create(s->m);
    CHECK(low && high && unused, "out of memory");
    for (int policy = 0; policy < TPL_POLICIES && low && high && unused; policy++) {
        double slope = 0;
        whole_loss(s, (tpl_policy)policy, s->grads);
        displace(s, -step, 1, low);
        double below = whole_loss(s, (tpl_policy)policy, unused);
        displace(s, 2 * step, 1, high);
        double above = whole_loss(s, (tpl_policy)policy, unused);
        displace(s, -step, 1, unused);
        for (int32_t p = 0; p < s->m->n_params; p++)
            for (int64_t i = 0; i < s->m->params[p].elems; i++)
                slope += s->grads[p][i] * (high[p][i] - low[p][i]);
        CHECK(fabs(above - below - slope) < 1e-5 * fabs(slope),
              "%s: the loss changes by %.9g, the gradient says %.9g",
              tpl_policy_name((tpl_policy)policy), above - below, slope);
    }
    expected_grads_destroy(low, s->m);
    expected_grads_destroy(high, s->m);
    expected_grads_destroy(unused, s->m);
}

/* ---- by the engine --------------------------------------------------------------------------- */

/* Gradients only: no update is ever asked for. */
static mt_status no_update(const void *optim, const mt_update *u)
{
    (void)optim;
    (void)u;
    return status_set(MT_ERR_INTERNAL, "an update where only gradients were asked for");
}

static const mt_optim no_optim = { .struct_size = sizeof(mt_optim),
                                   .granularity = MT_GRAIN_ELEMENT,
                                   .update = no_update };

/* Only the choice of what is PLAN_AUTO depends on it. */
static const plan_profile profile = { 1e10, 1e10, 1e10, 1e10, 1e10, 1e10, 0, 0, 0, 0 };

static mt_status start_engine(const subject *s, const plan_request *request, bool serial,
                              plan **ret_plan, engine **ret)
{
    mt_status st = plan_create(s->m, request, &profile, backend, device, ret_plan);
    if (st)
        return st;
    engine_config setup = { .plan = *ret_plan,
                            .store = s->s,
                            .backend = backend,
                            .device = device,
                            .optim = request->training ? &no_optim : NULL,
                            .serial = serial };
    return engine_create(&setup, ret);
}

static mt_status engine_grads(engine *e, const subject *s, const step_batch *batch, double *ret_sum,
                              double *ret_aux_sum)
{
    int32_t n = s->m->n_params;
    float **grads = calloc((size_t)n, sizeof *grads);
    mt_status st = grads ? MT_OK : status_nomem("gradients", (size_t)n * sizeof *grads);
    for (int32_t p = 0; p < n && !st; p++)
        if (!(grads[p] = calloc((size_t)s->m->params[p].elems, sizeof **grads)))
            st = status_nomem("gradients", (size_t)s->m->params[p].elems * sizeof **grads);
    if (!st)
        st = engine_gradients(e, batch, ret_sum, ret_aux_sum, grads);
    for (int32_t p = 0; p < n && !st; p++)
        for (int64_t i = 0; i < s->m->params[p].elems; i++)
            s->grads[p][i] = (double)grads[p][i];
    for (int32_t p = 0; grads && p < n; p++)
        free(grads[p]);
    free(grads);
    return st;
}

static void check_engine(subject *s, const packing *how)
{
    char what[96];
    snprintf(what, sizeof what, "engine, %s", how->name);
    plan *p = NULL;
    engine *e = NULL;
    step_batch batch = { 0 };
    double sum = 0, aux_sum = 0;
    mt_status st = pack(&s->e, how->per_micro, &batch);
    if (!st) {
        plan_request request = { .compute = compute,
                                 .micro_tokens = s->e.tokens,
                                 .micro_batches = batch.n,
                                 .micro_documents = s->e.documents,
                                 .max_seq_len = s->e.tokens,
                                 .groups = how->groups ? how->groups : batch.n,
                                 .policy = how->policy,
                                 .weight_buffers = PLAN_AUTO,
                                 .device_limit = PLAN_AUTO,
                                 .host_limit = PLAN_AUTO,
                                 .max_grad_norm = 1,
                                 .training = true,
                                 .workers = 1 };
        st = start_engine(s, &request, how->serial, &p, &e);
    }
    /* Twice: what one step leaves behind must not reach the next. */
    for (int i = 0; i < 2 && !st; i++) {
        st = engine_grads(e, s, &batch, &sum, &aux_sum);
        if (st)
            break;
        check_loss(s, what, sum);
        check_aux_loss(s, what, aux_sum);
        check_grads(s, what);
    }
    if (!st && !(st = engine_eval(e, &batch, &sum)))
        check_loss(s, "engine, eval", sum);
    CHECK(!st, "%s: %s", what, status_text());
    engine_destroy(e);
    plan_destroy(p);
    expected_batch_finish(&batch);
}

typedef struct generator {
    engine *e;
    int64_t vocab;
    float *logits; /* [longest + 1, vocab] */
} generator;

static mt_status generate_by_engine(void *runner, const int32_t *tokens, int64_t n, int64_t used,
                                    double *ret)
{
    generator *g = runner;
    float *last = g->logits, *all = g->logits + g->vocab;
    mt_status st = engine_generate(g->e, tokens, n, used, last, all);
    if (st)
        return st;
    if (memcmp(last, all + (n - 1) * g->vocab, (size_t)g->vocab * sizeof *last) != 0)
        return status_set(MT_ERR_INTERNAL, "the last token's logits differ from themselves");
    for (int64_t i = 0; i < n * g->vocab; i++)
        ret[i] = (double)all[i];
    return MT_OK;
}

static void check_generation(subject *s)
{
    plan *p = NULL;
    generator g = { .vocab = s->m->vocab };
    plan_request request = { .compute = compute,
                             .micro_tokens = s->longest,
                             .micro_batches = 1,
                             .micro_documents = 1,
                             .max_seq_len = s->longest,
                             .groups = 1,
                             .policy = PLAN_AUTO,
                             .weight_buffers = PLAN_AUTO,
                             .device_limit = PLAN_AUTO,
                             .host_limit = PLAN_AUTO,
                             .context = s->longest,
                             .workers = 1 };
    mt_status st = start_engine(s, &request, false, &p, &g.e);
    g.logits = malloc((size_t)((s->longest + 1) * g.vocab) * sizeof *g.logits);
    CHECK(!st && g.logits, "engine for generation: %s", status_text());
    if (!st && g.logits) {
        check_logits(s, "engine, prefill", true, generate_by_engine, &g);
        check_logits(s, "engine, prefill and decode", false, generate_by_engine, &g);
    }
    free(g.logits);
    engine_destroy(g.e);
    plan_destroy(p);
}

/* ---- cases ----------------------------------------------------------------------------------- */

static void check_case(const char *name)
{
    static const packing by_units[] = {
        { "packed, keep", 100, 1, TPL_KEEP, false },
        { "documents alone, input", 1, 1, TPL_INPUT, false },
    };
    static const packing by_engine[] = {
        { "packed, keep", 100, 1, TPL_KEEP, false },
        { "two by two, select", 2, 1, TPL_SELECT, false },
        { "documents alone, one group each", 1, 0, TPL_INPUT, false },
        { "two by two, groups, serial", 2, 0, TPL_KEEP, true },
    };
    subject s;
    mt_status st = subject_init(&s, name);
    CHECK(!st, "%s: %s", name, status_text());
    if (!st) {
        for (size_t i = 0; compute == MT_F32 && i < sizeof by_units / sizeof *by_units; i++) {
            check_units(&s, MT_F32, &by_units[i]);
            check_units(&s, MT_F64, &by_units[i]);
        }
        for (size_t i = 0; i < sizeof by_engine / sizeof *by_engine; i++)
            check_engine(&s, &by_engine[i]);
        check_generation(&s);
        if (compute == MT_F32 && model_adds_loss(s.m))
            check_difference(&s);
        fprintf(stderr,
                "largest errors: loss %.1e, auxiliary loss %.1e, logits %.1e, gradients %.1e\n",
                s.worst_loss, s.worst_aux_loss, s.worst_logits, s.worst_grads);
    }
    subject_finish(&s);
}

/* Every folder of the family is a case. */
static void check_family(void)
{
    struct dirent **list = NULL;
    int n = scandir(fixtures, &list, NULL, alphasort), cases = 0;
    CHECK(n >= 0, "%s: cannot be read", fixtures);
    for (int i = 0; i < n; i++) {
        if (list[i]->d_name[0] != '.') {
            fprintf(stderr, "       %s: ", list[i]->d_name);
            check_case(list[i]->d_name);
            cases++;
        }
        free(list[i]);
    }
    free(list);
    CHECK(cases > 0, "%s: no case", fixtures);
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 5 || (argc == 5 && strcmp(argv[4], "bf16") != 0)) {
        fprintf(stderr, "usage: %s PLUGIN_DIR FIXTURES_DIR/FAMILY [DEVICE [bf16]]\n", argv[0]);
        return 2;
    }
    fixtures = argv[2];
    const char *dirs[] = { argv[1] }, *kind = argc > 3 ? argv[3] : "cpu";
    compute = argc > 4 ? MT_BF16 : MT_F32;
    const void *table = NULL;
    mt_status st = registry_init(dirs, 1);
    if (!st && !(st = registry_find(PLUGIN_BACKEND, kind, MT_BACKEND_INTERFACE, &table, NULL))) {
        backend = table;
        st = backend->open(0, 2, &device);
    }
    if (!st &&
        !(st = registry_find(PLUGIN_LOADER, "safetensors", MT_WEIGHTS_INTERFACE, &table, NULL)))
        weights = table;
    if (st) {
        fprintf(stderr, "%s\n", status_text());
        return 1;
    }
    RUN(check_family);
    backend->close(device);
    registry_finish();
    return check_done();
}
