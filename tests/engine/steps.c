/* SPDX-License-Identifier: Apache-2.0
 *
 * What a step computes: the same gradients however its batch is cut and whatever is kept, the
 * norm, tied parameters, and nothing at all when a number is not finite.
 */
#include "world.h"

#include "../check.h"
#include "core/base/status.h"

#include <math.h>
#include <unistd.h>

static world_options training(mt_dtype compute)
{
    world_options o = { 0 };
    o.request.training = true;
    o.request.compute = compute;
    return o;
}

static void step(world *w, const step_batch *b, int64_t i, engine_result *ret)
{
    *ret = world_step(w, b, i, 2e-3);
}

static uint64_t hash_after(const world_options *o, int n)
{
    world w;
    world_open(o, &w);
    for (int i = 1; i <= n; i++) {
        step_batch *b = world_batch((uint64_t)i, 4, 24, 3, WORLD_VOCAB);
        engine_result r;
        step(&w, b, i, &r);
        world_batch_free(b);
    }
    engine_drain(w.e);
    uint64_t h = store_hash(w.s);
    world_close(&w);
    return h;
}

static void policies_give_the_same_bits(void)
{
    for (int c = 0; c < 2; c++) {
        world_options o = training(c ? MT_BF16 : MT_F32);
        uint64_t keep = 0;
        for (int32_t policy = 0; policy < TPL_POLICIES; policy++) {
            o.request.policy = policy;
            uint64_t h = hash_after(&o, 3);
            keep = policy == 0 ? h : keep;
            CHECK(h == keep, "compute %d policy %d", c, policy);
        }
    }
}

static uint64_t hash_in(world_options o, int64_t groups, plan_gradients sums, double clip)
{
    o.request.groups = groups;
    o.request.gradients = sums;
    o.request.max_grad_norm = clip;
    return hash_after(&o, o.vocab ? 1 : 3);
}

/* What is summed on the device is summed in the order of the micro-batches, however they are
 * grouped; and a clipping that does nothing changes nothing, though gradients take another way. */
static void device_sums_do_not_depend_on_groups(void)
{
    for (int mode = 0; mode < 10; mode++) {
        world_options o = training(mode & 1 ? MT_BF16 : MT_F32);
        o.tied = mode & 2;
        o.request.gradient_dtype = mode & 4 ? MT_BF16 : MT_F32;
        if (mode >= 8) { /* tables of several slices, some of which no token belongs to */
            o.vocab = 17000;
            o.tied = mode & 1;
            o.request.gradient_dtype = mode & 1 ? MT_F32 : MT_BF16;
        }
        uint64_t want = hash_in(o, 1, PLAN_GRADIENTS_HOST, 1e9);
        CHECK(hash_in(o, 1, PLAN_GRADIENTS_HOST, -1) == want, "mode %d", mode);
        for (int64_t groups = 1; groups <= 4; groups += groups == 1 ? 2 : 1) {
            CHECK(hash_in(o, groups, PLAN_GRADIENTS_DEVICE, 1e9) == want, "mode %d groups %d", mode,
                  (int)groups);
            CHECK(hash_in(o, groups, PLAN_GRADIENTS_DEVICE, -1) == want, "mode %d groups %d", mode,
                  (int)groups);
            CHECK(hash_in(o, groups, PLAN_GRADIENTS_HELD, 1e9) == want, "mode %d groups %d", mode,
                  (int)groups);
        }
        /* The norm has the same bits too, wherever gradients wait for it. */
        want = hash_in(o, 1, PLAN_GRADIENTS_HOST, 0.1);
        CHECK(hash_in(o, 1, PLAN_GRADIENTS_HELD, 0.1) == want, "mode %d", mode);
        CHECK(hash_in(o, 3, PLAN_GRADIENTS_HELD, 0.1) == want, "mode %d", mode);
        uint64_t host = hash_in(o, 3, PLAN_GRADIENTS_HOST, 1e9);
        CHECK(hash_in(o, 3, PLAN_GRADIENTS_HOST, -1) == host, "mode %d", mode);
    }
}

/* Largest difference, relative to the largest gradient of all. */
static double difference(const float *a, const float *b, int64_t n)
{
    double worst = 0, scale = 0;
    for (int64_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        scale = fmax(scale, fabs((double)a[i]));
    }
    return worst / scale;
}

/* Gradients that leave as BF16 are those in FP32, rounded once; several contributions of a step are
 * rounded each and added in FP32. */
static void bf16_gradients_are_rounded_once(void)
{
    for (int mode = 0; mode < 8; mode++) {
        world_options o = training(MT_F32);
        world exact, rounded, host;
        o.tied = mode & 1;
        o.request.groups = mode & 2 ? 4 : 1;
        o.request.gradients = PLAN_GRADIENTS_DEVICE;
        world_open(&o, &exact);
        o.request.gradient_dtype = MT_BF16;
        o.request.gradients = mode & 4 ? PLAN_GRADIENTS_HELD : PLAN_GRADIENTS_DEVICE;
        world_open(&o, &rounded);
        o.request.gradients = PLAN_GRADIENTS_HOST;
        world_open(&o, &host);
        step_batch *b = world_batch(4, 4, 24, 3, WORLD_VOCAB);
        double l0, l1, sum = 0;
        float *x = world_gradients(&exact, b, &l0), *y = world_gradients(&rounded, b, &l1);
        float *z = world_gradients(&host, b, &l1);
        int32_t embed = model_find_param(exact.m, "embed.weight");
        int64_t from = world_offset(&exact, embed), to = from + exact.m->params[embed].elems;
        int wrong = 0, different = 0;
        for (int64_t i = 0; i < exact.m->total_params; i++) {
            float want = mt_bf16_to_f32(mt_f32_to_bf16(x[i]));
            bool two = o.tied && i >= from && i < to;
            wrong += two ? fabs((double)y[i] - (double)x[i]) > 0.01 * fabs((double)x[i]) + 1e-3
                         : y[i] != want;
            different += y[i] != x[i];
            sum += (double)y[i] * (double)y[i];
        }
        CHECK(l0 == l1 && wrong == 0 && different > 0, "mode %d: %d wrong, %d rounded", mode, wrong,
              different);
        CHECK(difference(x, z, exact.m->total_params) < 0.01, "mode %d", mode);
        CHECK(mode & 2 || difference(y, z, exact.m->total_params) == 0, "mode %d", mode);
        /* The norm is of what is applied. */
        engine_result r;
        step(&rounded, b, 1, &r);
        CHECK(fabs(r.grad_norm - sqrt(sum)) < 1e-9 * sqrt(sum), "mode %d: %.12g %.12g", mode,
              r.grad_norm, sqrt(sum));
        free(x);
        free(y);
        free(z);
        world_batch_free(b);
        world_close(&exact);
        world_close(&rounded);
        world_close(&host);
    }
}

static void cutting_a_step_changes_nothing(void)
{
    static const int64_t one[] = { 12 }, even[] = { 3, 3, 3, 3 }, ragged[] = { 5, 1, 6 },
                         pairs[] = { 2, 2, 2, 2, 2, 2 },
                         each[] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    static const struct {
        const int64_t *documents;
        int64_t n;
    } cut[] = { { one, 1 }, { even, 4 }, { ragged, 3 }, { pairs, 6 }, { each, 12 } };
    for (int tied = 0; tied < 2; tied++) {
        step_batch *b = world_batch(9, 4, 24, 3, WORLD_VOCAB);
        float *want = NULL;
        double want_loss = 0;
        for (size_t c = 0; c < sizeof cut / sizeof *cut; c++)
            for (int64_t groups = 1; groups <= 4 && groups <= cut[c].n; groups *= 2) {
                world_options o = training(MT_F32);
                world w;
                o.tied = tied;
                o.request.micro_tokens = 96;
                o.request.micro_documents = 12;
                o.request.micro_batches = cut[c].n;
                o.request.groups = groups;
                o.request.gradients = c % 2 ? PLAN_GRADIENTS_HOST : PLAN_GRADIENTS_DEVICE;
                world_open(&o, &w);
                step_batch *piece = world_recut(b, cut[c].documents, cut[c].n);
                double loss;
                float *got = world_gradients(&w, piece, &loss);
                if (!want) {
                    want = got;
                    want_loss = loss;
                    world_batch_free(piece);
                    world_close(&w);
                    continue;
                }
                double d = difference(want, got, w.m->total_params);
                CHECK(d < 2e-6, "cut %d groups %d: %g", (int)c, (int)groups, d);
                CHECK(fabs(loss - want_loss) < 1e-5 * want_loss, "%g %g", loss, want_loss);
                free(got);
                world_batch_free(piece);
                world_close(&w);
            }
        free(want);
        world_batch_free(b);
    }
}

/* What stands in one document of a micro-batch is nothing to the others: with the first one's
 * targets ignored, neither loss nor any gradient depends on its tokens. */
static void documents_do_not_see_each_other(void)
{
    for (int tied = 0; tied < 2; tied++) {
        world_options o = training(MT_F32);
        world w;
        o.tied = tied;
        o.request.micro_batches = 1;
        world_open(&o, &w);
        step_batch *b = world_batch(11, 1, 24, 3, WORLD_VOCAB);
        micro_batch *m = &b->micro[0];
        CHECK(m->documents > 1, "%d documents", (int)m->documents);
        for (int32_t t = 0; t < m->doc_starts[1]; t++) {
            bool counted = m->targets[t] >= 0;
            m->n_targets -= counted;
            b->n_targets -= counted;
            m->targets[t] = -100;
        }
        double before, after;
        float *want = world_gradients(&w, b, &before);
        for (int32_t t = 0; t < m->doc_starts[1]; t++)
            m->ids[t] = (m->ids[t] + 1 + t) % WORLD_VOCAB;
        float *got = world_gradients(&w, b, &after);
        CHECK(before == after, "tied %d: loss %.17g, with another neighbour %.17g", tied, before,
              after);
        CHECK(difference(want, got, w.m->total_params) == 0, "tied %d: %g", tied,
              difference(want, got, w.m->total_params));
        /* The other way round it must differ, or nothing was compared. */
        m->ids[m->doc_starts[1]] = (m->ids[m->doc_starts[1]] + 1) % WORLD_VOCAB;
        free(got);
        got = world_gradients(&w, b, &after);
        CHECK(before != after && difference(want, got, w.m->total_params) > 0, "tied %d", tied);
        free(want);
        free(got);
        world_batch_free(b);
        world_close(&w);
    }
}

static void a_tied_gradient_is_the_sum(void)
{
    world_options o = training(MT_F32);
    world tied, untied;
    o.tied = true;
    world_open(&o, &tied);
    o.tied = false;
    world_open(&o, &untied);
    int32_t head = model_find_param(untied.m, "head.weight");
    int32_t embed = model_find_param(untied.m, "embed.weight");
    int64_t n = untied.m->params[head].elems;
    float *w = malloc((size_t)n * sizeof *w);
    store_get(untied.s, embed, 0, n, w);
    store_set(untied.s, head, 0, n, w);
    step_batch *b = world_batch(4, 4, 24, 3, WORLD_VOCAB);
    double l0, l1;
    float *g0 = world_gradients(&tied, b, &l0), *g1 = world_gradients(&untied, b, &l1);
    CHECK(l0 == l1, "%.17g %.17g", l0, l1);
    const float *t = g0 + world_offset(&tied, model_find_param(tied.m, "embed.weight"));
    const float *h = g1 + world_offset(&untied, head), *e = g1 + world_offset(&untied, embed);
    int differ = 0, both = 0;
    for (int64_t i = 0; i < n; i++) {
        differ += t[i] != h[i] + e[i];
        both += h[i] != 0 && e[i] != 0;
    }
    CHECK(differ == 0 && both > 0, "%d of %d differ", differ, (int)n);
    free(g0);
    free(g1);
    free(w);
    world_batch_free(b);
    world_close(&tied);
    world_close(&untied);
}

static void the_norm_covers_each_parameter_once(void)
{
    static const plan_gradients where[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_DEVICE,
                                            PLAN_GRADIENTS_HELD };
    for (int mode = 0; mode < 12; mode++) {
        world_options o = training(MT_F32);
        world w;
        o.tied = mode & 1;
        o.request.groups = mode & 2 ? 2 : 1;
        o.request.gradients = where[mode / 4];
        world_open(&o, &w);
        step_batch *b = world_batch(4, 4, 24, 3, WORLD_VOCAB);
        double loss, sum = 0;
        float *g = world_gradients(&w, b, &loss);
        for (int64_t i = 0; i < w.m->total_params; i++)
            sum += (double)g[i] * g[i];
        engine_result r;
        step(&w, b, 1, &r);
        CHECK(r.loss_sum == loss, "%.17g %.17g", r.loss_sum, loss);
        CHECK(fabs(r.grad_norm - sqrt(sum)) < 1e-6 * sqrt(sum), "mode %d: %.9g %.9g", mode,
              r.grad_norm, sqrt(sum));
        free(g);
        world_batch_free(b);
        world_close(&w);
    }
}

static void set_one(world *w, const char *name, int64_t i, float x)
{
    store_set(w->s, model_find_param(w->m, name), i, 1, &x);
}

static void an_infinite_weight_changes_no_state(void)
{
    for (int mode = 0; mode < 24; mode++) {
        world_options o = training(mode & 1 ? MT_BF16 : MT_F32);
        world w;
        bool held = mode >= 16 && mode < 20;
        o.apart = mode >= 20; /* gradients wait on the device */
        o.slow_update_ns = o.apart ? 100 * 1000 : 0;
        o.request.max_grad_norm = (mode & 2 && !held) || o.apart ? -1 : 1;
        o.request.groups = (held && mode & 2) || o.apart ? 1 : 2;
        o.request.gradients = held                   ? PLAN_GRADIENTS_HELD
                              : mode & 4 && !o.apart ? PLAN_GRADIENTS_DEVICE
                                                     : PLAN_GRADIENTS_HOST;
        o.request.gradient_dtype = mode & (held ? 1 : o.apart ? 2 : 8) ? MT_BF16 : MT_F32;
        world_open(&o, &w);
        step_batch *b = world_batch(4, 4, 24, 3, WORLD_VOCAB);
        set_one(&w, "layers.1.up.weight", 3, INFINITY);
        uint64_t before = store_hash(w.s);
        engine_result r;
        step(&w, b, 1, &r);
        engine_drain(w.e);
        CHECK(!r.updated && !isfinite(r.loss_sum), "mode %d", mode);
        CHECK(store_hash(w.s) == before, "mode %d", mode);
        /* The next step trains as if nothing had been. */
        set_one(&w, "layers.1.up.weight", 3, 0.25f);
        before = store_hash(w.s);
        step(&w, b, 1, &r);
        engine_drain(w.e);
        CHECK(r.updated && store_hash(w.s) != before, "mode %d", mode);
        world_batch_free(b);
        world_close(&w);
    }
}

/* Block 0 gets a finite output and an infinite gradient: its attention's values are huge, but what
 * multiplies them is zero. */
static void make_gradient_overflow(world *w)
{
    int32_t o = model_find_param(w->m, "layers.0.o.weight");
    int32_t bias = model_find_param(w->m, "layers.0.v.bias");
    int32_t embed = model_find_param(w->m, "embed.weight");
    for (int64_t i = 0; i < w->m->params[o].elems; i++)
        set_one(w, "layers.0.o.weight", i, 0);
    for (int64_t i = 0; i < w->m->params[bias].elems; i++)
        set_one(w, "layers.0.v.bias", i, 1e37f);
    for (int64_t i = 0; i < w->m->params[embed].elems; i++) {
        float x;
        store_get(w->s, embed, i, 1, &x);
        set_one(w, "embed.weight", i, x * 1e-7f);
    }
}

static void an_infinite_gradient_is_never_applied(void)
{
    for (int mode = 0; mode < 8; mode++) {
        bool clip = mode & 1;
        world_options o = training(MT_F32);
        world w;
        o.apart = mode & 4; /* without clipping gradients of others wait on the device */
        o.slow_update_ns = o.apart ? 1000 * 1000 : 0;
        o.request.max_grad_norm = clip ? 1 : -1;
        o.request.gradient_dtype = mode & 2 ? MT_BF16 : MT_F32;
        world_open(&o, &w);
        step_batch *b = world_batch(4, 4, 24, 3, WORLD_VOCAB);
        make_gradient_overflow(&w);
        uint64_t before = store_hash(w.s);
        int32_t bad = model_find_param(w.m, "layers.0.o.weight");
        float x[WORLD_HIDDEN], y[WORLD_HIDDEN];
        engine_step_params p = { 1, 1e-3, w.p->request.max_grad_norm };
        engine_result r = { 0 };
        store_get(w.s, bad, 0, WORLD_HIDDEN, x);
        mt_status st = engine_step(w.e, b, &p, &r);
        CHECK(engine_drain(w.e) == MT_OK);
        if (clip) {
            CHECK(st == MT_OK && isfinite(r.loss_sum) && !isfinite(r.grad_norm) && !r.updated,
                  "%g %g", r.loss_sum, r.grad_norm);
            CHECK(store_hash(w.s) == before);
        } else {
            CHECK(st == MT_ERR_NUMERIC && strstr(status_text(), "'block.0'"), "%d %s", st,
                  status_text());
            store_get(w.s, bad, 0, WORLD_HIDDEN, y);
            CHECK(memcmp(x, y, sizeof x) == 0);
        }
        world_batch_free(b);
        world_close(&w);
    }
}

static void frozen_parameters_stay(void)
{
    world_options o = training(MT_F32);
    world w;
    o.frozen_norms = true;
    world_open(&o, &w);
    step_batch *b = world_batch(4, 4, 24, 3, WORLD_VOCAB);
    engine_result r;
    for (int i = 1; i <= 3; i++)
        step(&w, b, i, &r);
    engine_drain(w.e);
    float x[WORLD_HIDDEN];
    store_get(w.s, model_find_param(w.m, "layers.1.norm2.weight"), 0, WORLD_HIDDEN, x);
    for (int i = 0; i < WORLD_HIDDEN; i++)
        CHECK(x[i] == 1.0f);
    world_batch_free(b);
    world_close(&w);
}

static void training_lowers_the_loss(void)
{
    for (int c = 0; c < 2; c++) {
        world_options o = training(c ? MT_BF16 : MT_F32);
        world w;
        o.request.groups = 2;
        world_open(&o, &w);
        step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
        double before = world_loss(&w, b);
        engine_result r;
        for (int i = 1; i <= 40; i++)
            step(&w, b, i, &r);
        double after = world_loss(&w, b);
        CHECK(after < 0.7 * before, "%g -> %g", before, after);
        world_batch_free(b);
        world_close(&w);
    }
}

/* The sink of a head in every layer's attention, one after the other; returns how many. */
static int read_sinks(const world *w, float *ret)
{
    int n = 0;
    for (int32_t i = 0; i < w->m->n_params; i++) {
        const model_param *q = &w->m->params[i];
        const store_unit *u = &w->s->units[q->unit];
        for (int64_t k = 0; strstr(q->name, "self_attn.sinks") && k < q->elems; k++)
            ret[n++] = mt_join_f32(u->hi[q->offset + k], u->lo[q->offset + k]);
    }
    return n;
}

/* Attention sinks are trained, each by itself. */
static void sinks_move(void)
{
    enum { LAYERS = 2, HEADS = 4 };
    float before[LAYERS * HEADS], after[LAYERS * HEADS];
    world_options o = { .plugin = "gpt_oss", .manifest = "gpt_oss" };
    o.request.training = true;
    world w;
    world_open(&o, &w);
    CHECK(read_sinks(&w, before) == LAYERS * HEADS, "not a sink for every head");
    for (int i = 0; i < 3; i++) {
        step_batch *b = world_batch((uint64_t)i, 4, 24, 3, WORLD_VOCAB);
        world_step(&w, b, i, 1e-2);
        world_batch_free(b);
    }
    if (engine_drain(w.e) < 0)
        world_fail("engine_drain");
    read_sinks(&w, after);
    for (int i = 0; i < LAYERS * HEADS; i++) {
        CHECK(after[i] != before[i], "sink %d stays at %g", i, before[i]);
        CHECK(i == 0 || after[i] - before[i] != after[i - 1] - before[i - 1],
              "sinks %d and %d move by the same", i - 1, i);
    }
    world_close(&w);
}

static void unused_rows_decay_all_the_same(void)
{
    for (int mode = 0; mode < 4; mode++) {
        world_options o = training(MT_F32);
        world w;
        o.request.max_grad_norm = mode & 1 ? -1 : 1;
        o.request.gradient_dtype = mode & 2 ? MT_BF16 : MT_F32;
        world_open(&o, &w);
        step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB / 2);
        int32_t embed = model_find_param(w.m, "embed.weight");
        int64_t at = (WORLD_VOCAB - 1) * WORLD_HIDDEN;
        float x, y;
        store_get(w.s, embed, at, 1, &x);
        engine_result r;
        step(&w, b, 1, &r);
        engine_drain(w.e);
        store_get(w.s, embed, at, 1, &y);
        CHECK(fabs((double)y - (double)x * (1 - 2e-3 * 0.01)) <= fabs((double)x) * 1e-7,
              "%.9g %.9g", (double)x, (double)y);
        world_batch_free(b);
        world_close(&w);
    }
}

static inline int64_t resident_pages(void)
{
    long long size, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%lld %lld", &size, &resident) != 2)
        resident = 0;
    if (f)
        fclose(f);
    return resident;
}

static void memory_does_not_grow(void)
{
    world_options o = training(MT_F32);
    world w;
    o.request.groups = 2;
    world_open(&o, &w);
    step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
    int64_t first = 0;
    engine_result r;
    for (int i = 1; i <= 500; i++) {
        step(&w, b, i, &r);
        if (i == 200)
            first = resident_pages();
    }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* their shadow grows */
    CHECK(resident_pages() - first <= 16, "%lld pages more after 300 steps",
          (long long)(resident_pages() - first));
#endif
    world_batch_free(b);
    world_close(&w);
}

static void bad_batches_are_refused(void)
{
    world_options o = training(MT_F32);
    world w;
    world_open(&o, &w);
    uint64_t before = store_hash(w.s);
    engine_step_params p = { 1, 1e-3, 1 };
    engine_result r;
    step_batch *b = world_batch(1, 5, 24, 3, WORLD_VOCAB);
    CHECK(engine_step(w.e, b, &p, &r) == MT_ERR_INVALID && strstr(status_text(), "micro-batches"));
    b->n = 4;
    CHECK(engine_step(w.e, b, &p, &r) == MT_ERR_INVALID && strstr(status_text(), "targets"));
    b->n = 5;
    world_batch_free(b);
    b = world_batch(1, 4, 25, 3, WORLD_VOCAB);
    CHECK(engine_step(w.e, b, &p, &r) == MT_ERR_INVALID && strstr(status_text(), "25 tokens"));
    world_batch_free(b);
    b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
    b->micro[2].ids[7] = WORLD_VOCAB;
    CHECK(engine_step(w.e, b, &p, &r) == MT_ERR_INVALID && strstr(status_text(), "token 7"));
    p.max_grad_norm = 0;
    CHECK(engine_step(w.e, b, &p, &r) == MT_ERR_INVALID && strstr(status_text(), "max_grad_norm"));
    CHECK(store_hash(w.s) == before);
    world_batch_free(b);
    world_close(&w);
}

/* Serial, so that a step's updates are over when it returns. */
static void traffic_is_counted(void)
{
    for (int clip = 0; clip < 2; clip++) {
        world_options o = training(MT_F32);
        o.serial = true;
        o.request.max_grad_norm = clip ? 1 : -1;
        world w;
        world_open(&o, &w);
        step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
        bool used[WORLD_VOCAB] = { false };
        int64_t rows = 0;
        for (int64_t i = 0; i < b->n; i++)
            for (int64_t t = 0; t < b->micro[i].tokens; t++) {
                rows += !used[b->micro[i].ids[t]];
                used[b->micro[i].ids[t]] = true;
            }
        int64_t gradients = 0, again = 0; /* comes in for backward once more */
        for (int32_t i = 0; i < w.m->n_params; i++) {
            const model_param *p = &w.m->params[i];
            int64_t elems = p->gathered ? rows * p->cols : p->elems;
            gradients += elems;
            again += !p->gathered && p->unit < w.m->n_units - w.p->weight_buffers ? elems : 0;
        }
        for (int i = 1; i <= 2; i++) {
            engine_result r;
            step(&w, b, i, &r);
            CHECK(r.copy_out_bytes == 4 * gradients, "%lld", (long long)r.copy_out_bytes);
            /* Padding between parameters is streamed with them. */
            CHECK(r.copy_in_bytes >= 4 * (gradients + again), "%lld", (long long)r.copy_in_bytes);
            CHECK(r.updated_elems == w.m->total_params, "%lld", (long long)r.updated_elems);
            CHECK(r.copy_in_seconds > 0 && r.copy_out_seconds > 0 && r.update_seconds > 0);
            CHECK(r.copy_in_seconds < r.seconds && r.copy_out_seconds < r.seconds);
        }
        world_batch_free(b);
        world_close(&w);
    }
}

/* The time of updates that are still under way when a step ends, and have been without a pause, is
 * counted as far as it is over. */
static void time_of_busy_workers_is_counted(void)
{
    world_options o = training(MT_F32);
    o.apart = true;
    o.threads = 3;
    o.slow_update_ns = 20 * 1000 * 1000;
    o.request.max_grad_norm = -1;
    world w;
    world_open(&o, &w);
    step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
    for (int i = 1; i <= 3; i++) {
        engine_result r;
        step(&w, b, i, &r);
        CHECK(r.update_seconds > 0 && r.update_seconds <= r.seconds * 1.01, "%g of %g",
              r.update_seconds, r.seconds);
    }
    world_batch_free(b);
    world_close(&w);
}

/* Gradients of every unit leave once in a step; those that leave when it is over do in the next. */
static void copies_that_are_behind_are_counted_once(void)
{
    enum { STEPS = 4 };
    world_options o = training(MT_F32);
    o.apart = o.tables = true; /* updates of tables are waited for while copies go on */
    o.threads = 1;
    o.slow_update_ns = 1000 * 1000;
    o.request.max_grad_norm = -1;
    world w;
    world_open(&o, &w);
    step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
    int copies[WORLD_BLOCKS + 2] = { 0 };
    for (int i = 1; i <= STEPS; i++) {
        engine_result r;
        step(&w, b, i, &r);
        for (int32_t u = 0; u < w.m->n_units; u++) {
            engine_unit_times t;
            engine_time_unit(w.e, u, &t);
            copies[u] += t.n_copy_out;
        }
    }
    for (int32_t u = 0; u < w.m->n_units; u++)
        CHECK(copies[u] == STEPS || copies[u] == STEPS - 1, "%d copies of unit %d in %d steps",
              copies[u], u, STEPS);
    world_batch_free(b);
    world_close(&w);
}

int main(void)
{
    RUN(policies_give_the_same_bits);
    RUN(device_sums_do_not_depend_on_groups);
    RUN(bf16_gradients_are_rounded_once);
    RUN(cutting_a_step_changes_nothing);
    RUN(documents_do_not_see_each_other);
    RUN(a_tied_gradient_is_the_sum);
    RUN(the_norm_covers_each_parameter_once);
    RUN(an_infinite_weight_changes_no_state);
    RUN(an_infinite_gradient_is_never_applied);
    RUN(frozen_parameters_stay);
    RUN(sinks_move);
    RUN(unused_rows_decay_all_the_same);
    RUN(training_lowers_the_loss);
    RUN(memory_does_not_grow);
    RUN(traffic_is_counted);
    RUN(time_of_busy_workers_is_counted);
    RUN(copies_that_are_behind_are_counted_once);
    RUN(bad_batches_are_refused);
    return check_done();
}
