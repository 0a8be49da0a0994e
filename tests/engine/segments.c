/* SPDX-License-Identifier: Apache-2.0
 *
 * Units that are streamed by their experts: the same bits as whole ones, in less memory.
 */
#include "world.h"

#include "../check.h"
#include "core/base/status.h"
#include "core/engine/internal.h"

#include <math.h>

static const struct {
    const char *plugin, *manifest;
    int32_t parts;
    bool balances; /* its routers add a loss */
} models[] = { { "mistral", "mixtral", 8, true },       { "qwen", "qwen2_moe", 6, false },
               { "deepseek", "deepseek_v2", 10, true }, { "deepseek", "deepseek_v3", 16, false },
               { "gpt_oss", "gpt_oss", 4, true },       { "qwen", "qwen3_next", 6, true } };
enum { MODELS = sizeof models / sizeof *models, STEPS = 3 };

static world_options options(int kind)
{
    world_options o = { .plugin = models[kind].plugin, .manifest = models[kind].manifest };
    o.request.training = true;
    return o;
}

/* A few steps of 3 or 4 micro-batches, the second one of so many words, with an evaluation in
 * between; ret_segments: the most of a unit. */
static world_outcome train(const world_options *o, int32_t words, int32_t *ret_segments)
{
    world_outcome sum = { 0 };
    world w;
    world_open(o, &w);
    *ret_segments = 0;
    for (int32_t u = 0; u < w.m->n_units; u++)
        if (w.p->tpl[u]->n_segments > *ret_segments)
            *ret_segments = w.p->tpl[u]->n_segments;
    for (int i = 1; i <= STEPS; i++) {
        step_batch *b =
            world_batch((uint64_t)i, 3 + i % 2, 24 - i % 2 * 5, 3, i == 2 ? words : WORLD_VOCAB);
        engine_result r = world_step(&w, b, i, 2e-3);
        CHECK(r.updated && isfinite(r.loss_sum), "step %d", i);
        world_add(&sum, &r);
        if (i == 2)
            sum.loss += world_loss(&w, b);
        world_batch_free(b);
    }
    world_hash(&w, &sum);
    int64_t bytes[PLAN_TIERS];
    engine_bytes(w.e, bytes);
    for (int t = 0; t < PLAN_TIERS; t++)
        CHECK(bytes[t] == w.p->tier_bytes[t], "tier %d: %lld, planned %lld", t, (long long)bytes[t],
              (long long)w.p->tier_bytes[t]);
    world_close(&w);
    return sum;
}

/* Mode: a way to train. Every policy, dtype, clipping, number of groups and place of gradients
 * takes its turn with every model. */
static world_options in_mode(int kind, int mode)
{
    static const plan_gradients place[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_DEVICE,
                                            PLAN_GRADIENTS_HELD };
    world_options o = options(kind);
    o.request.policy = mode % TPL_POLICIES;
    o.request.compute = mode & 1 ? MT_BF16 : MT_F32;
    o.request.max_grad_norm = mode & 2 ? -1 : 0.5;
    o.request.groups = 1 + (mode >> 2 & 1);
    o.request.gradients = place[(mode + mode / 3) % 3];
    o.request.gradient_dtype = mode % 7 < 2 ? MT_BF16 : MT_F32;
    o.request.weight_buffers = 2 + (mode % 4 == 3);
    return o;
}

static void segmented_equals_whole(void)
{
    enum { MODES = 9 };
    for (int kind = 0; kind < MODELS; kind++)
        for (int mode = 0; mode < MODES; mode++) {
            world_options o = in_mode(kind, mode);
            o.serial = mode % 3 == 0;
            int32_t segments;
            world_outcome want = train(&o, WORLD_VOCAB, &segments);
            CHECK(segments == 1);
            CHECK((want.aux_loss > 0) == models[kind].balances, "%s: auxiliary loss %g",
                  models[kind].manifest, want.aux_loss);
            /* One part at a time, and several, of which the last segment has fewer. */
            for (int size = 0; size < 2; size++) {
                world_options cut = o;
                cut.request.segment_bytes = size ? 24 << 10 : 1;
                cut.serial = size;
                cut.chaos = size ? 0 : (uint64_t)mode + 1;
                world_outcome got = train(&cut, WORLD_VOCAB, &segments);
                CHECK(size ? segments > 1 : segments == 1 + models[kind].parts,
                      "%s mode %d: %d segments", models[kind].manifest, mode, segments);
                CHECK(world_same(&got, &want), "%s mode %d size %d: %s", models[kind].manifest,
                      mode, size, world_compare(&got, &want));
            }
        }
}

/* Experts of the stack `param` that any gradient is not zero of. */
static int experts_with_gradient(const world *w, int32_t param, const float *all)
{
    const model_param *p = &w->m->params[param];
    int64_t each = p->elems / p->info->stack;
    const float *g = all + world_offset(w, param);
    int n = 0;
    for (int64_t e = 0; e < p->info->stack; e++) {
        bool any = false;
        for (int64_t i = 0; i < each; i++)
            any |= g[e * each + i] != 0;
        n += any;
    }
    return n;
}

/* A batch of one word: every token goes to the same two experts. */
static void experts_without_tokens_have_no_gradient(plan_gradients place, int64_t groups)
{
    world_options o = options(0);
    world whole, cut;
    o.request.gradients = place;
    o.request.groups = groups;
    world_open(&o, &whole);
    o.request.segment_bytes = 1;
    o.chaos = 3;
    world_open(&o, &cut);
    step_batch *b = world_batch(1, 4, 24, 3, 1);
    double l0, l1;
    float *x = world_gradients(&whole, b, &l0), *y = world_gradients(&cut, b, &l1);
    CHECK(l0 == l1, "%.17g %.17g", l0, l1);
    CHECK(memcmp(x, y, (size_t)whole.m->total_params * sizeof *x) == 0);
    int stacks = 0;
    for (int32_t i = 0; i < cut.m->n_params; i++)
        if (cut.m->params[i].info->stack) {
            CHECK(experts_with_gradient(&cut, i, y) == 2, "%s: %d", cut.m->params[i].name,
                  experts_with_gradient(&cut, i, y));
            stacks++;
        }
    CHECK(stacks == 4, "%d", stacks);
    free(x);
    free(y);
    world_batch_free(b);
    world_close(&whole);
    world_close(&cut);
}

/* Gradients that the host is told are zero do what zeros that cross the bus do: to moments that are
 * not zero, to those of other groups, in either width. A unit that is not cut has slices that are
 * larger than all of its experts, so that its gradients cross where they go by slabs. */
static void zeros_need_not_cross(void)
{
    static const struct {
        int64_t groups;
        plan_gradients crosses, other;
    } way[] = { { 1, PLAN_GRADIENTS_HELD, PLAN_GRADIENTS_HOST },
                { 1, PLAN_GRADIENTS_HELD, PLAN_GRADIENTS_HELD },
                { 2, PLAN_GRADIENTS_HELD, PLAN_GRADIENTS_DEVICE },
                { 2, PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_HOST } };
    for (int kind = 0; kind < MODELS; kind++)
        for (int mode = 0; mode < 16; mode++) {
            world_options o = options(kind);
            o.request.max_grad_norm = mode & 1 ? 0.5 : -1;
            o.request.gradient_dtype = mode & 2 ? MT_BF16 : MT_F32;
            o.request.groups = way[mode >> 2].groups;
            o.request.gradients = way[mode >> 2].crosses;
            int32_t segments;
            world_outcome want = train(&o, 1, &segments);
            o.request.gradients = way[mode >> 2].other;
            o.request.segment_bytes = 1;
            o.chaos = (uint64_t)mode + 1;
            world_outcome got = train(&o, 1, &segments);
            CHECK(world_same(&got, &want), "%s mode %d: %s", models[kind].manifest, mode,
                  world_compare(&got, &want));
        }
}

/* What a step moves. */
static engine_result moves(const world_options *o, int32_t vocab)
{
    world w;
    world_open(o, &w);
    step_batch *b = world_batch(1, 4, 24, 3, vocab);
    engine_result r = world_step(&w, b, 1, 1e-3);
    world_batch_free(b);
    world_close(&w);
    return r;
}

/* Six of eight experts of two layers are not fetched for backward, nor are rows of words that are
 * not used; the dense part of a layer may then stay. In a serial run every event is at hand at
 * once. */
static void experts_without_tokens_are_not_fetched(void)
{
    world_options o = options(0);
    const int64_t expert = 3 * 32 * 24 * 4, dense = 4 * 4096, rows = 2 * WORLD_VOCAB * 32 * 4;
    o.serial = true;
    o.request.segment_bytes = 1;
    int64_t less = moves(&o, WORLD_VOCAB).copy_in_bytes - moves(&o, 1).copy_in_bytes;
    CHECK(less >= 12 * expert && less <= 12 * expert + 2 * dense + rows, "%lld bytes less",
          (long long)less);
}

/* Nor do their gradients leave, whole units' neither. */
static void gradients_of_zero_do_not_leave(void)
{
    const int64_t expert = 3 * 32 * 24 * 4, rows = WORLD_VOCAB * 32 * 4;
    for (int mode = 0; mode < 3; mode++) {
        world_options o = options(0);
        o.request.segment_bytes = mode > 0;
        o.request.max_grad_norm = mode == 2 ? -1 : 1;
        int64_t less = moves(&o, WORLD_VOCAB).copy_out_bytes - moves(&o, 1).copy_out_bytes;
        CHECK(less >= 12 * expert && less <= 12 * expert + rows, "mode %d: %lld bytes less", mode,
              (long long)less);
    }
}

static void two_of_eight_experts(void)
{
    static const plan_gradients place[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_DEVICE,
                                            PLAN_GRADIENTS_HELD };
    for (int i = 0; i < 3; i++)
        for (int64_t groups = 1; groups <= 2; groups++)
            experts_without_tokens_have_no_gradient(place[i], groups);
}

static int64_t device_bytes(const model *m, world_options o, int64_t segment_bytes)
{
    plan *p;
    o.request.segment_bytes = segment_bytes;
    if (world_plan(&o, m, &p) < 0)
        world_fail("world_plan");
    int64_t bytes = p->tier_bytes[PLAN_DEVICE];
    plan_destroy(p);
    return bytes;
}

/* ---- generation ------------------------------------------------------------------------------ */

enum { PROMPT = 7, SEQUENCE = 20 };

static world_options generating(int kind)
{
    world_options o = { .plugin = models[kind].plugin, .manifest = models[kind].manifest };
    o.request.context = SEQUENCE;
    return o;
}

/* Logits of every token of a sequence: a prompt, then one token at a time. */
static void generate(world *w, float *ret)
{
    step_batch *b = world_batch(5, 1, SEQUENCE, 1, WORLD_VOCAB);
    const int32_t *ids = b->micro[0].ids;
    float last[WORLD_VOCAB];
    if (engine_generate(w->e, ids, PROMPT, 0, last, ret) < 0)
        world_fail("engine_generate");
    for (int64_t t = PROMPT; t < SEQUENCE; t++)
        if (engine_generate(w->e, ids + t, 1, t, ret + t * WORLD_VOCAB, NULL) < 0)
            world_fail("engine_generate");
    world_batch_free(b);
}

static void segmented_generation_equals_whole(void)
{
    static float want[SEQUENCE * WORLD_VOCAB], got[SEQUENCE * WORLD_VOCAB];
    for (int kind = 0; kind < MODELS; kind++)
        for (int mode = 0; mode < 4; mode++) {
            world_options o = generating(kind);
            world w;
            o.request.compute = mode & 1 ? MT_BF16 : MT_F32;
            world_open(&o, &w);
            generate(&w, want);
            world_close(&w);
            o.serial = mode == 0;
            o.chaos = mode == 0 ? 0 : (uint64_t)mode;
            o.request.segment_bytes = mode & 2 ? 24 << 10 : 1;
            o.request.weight_buffers = mode == 3 ? 4 : 2;
            world_open(&o, &w);
            for (int again = 0; again < 2; again++) {
                generate(&w, got);
                CHECK(memcmp(got, want, sizeof got) == 0, "%s mode %d, time %d",
                      models[kind].manifest, mode, again);
            }
            step_batch *b = world_batch(8, 1, SEQUENCE, 2, WORLD_VOCAB);
            CHECK(isfinite(world_loss(&w, b)), "an evaluation in between");
            world_batch_free(b);
            generate(&w, got);
            CHECK(memcmp(got, want, sizeof got) == 0, "%s mode %d, after an evaluation",
                  models[kind].manifest, mode);
            world_close(&w);
        }
}

/* Bytes of weights that the decoding of a second token fetches. */
static int64_t decoding_fetches(world_options o)
{
    const int32_t id = 3;
    float last[WORLD_VOCAB];
    world w;
    o.serial = true;
    world_open(&o, &w);
    if (engine_generate(w.e, &id, 1, 0, last, NULL) < 0)
        world_fail("engine_generate");
    int64_t before = w.e->traffic.in_bytes;
    if (engine_generate(w.e, &id, 1, 1, last, NULL) < 0)
        world_fail("engine_generate");
    int64_t bytes = w.e->traffic.in_bytes - before;
    world_close(&w);
    return bytes;
}

/* A token takes two of each of two layers' eight experts. */
static void decoding_fetches_the_experts_it_needs(void)
{
    world_options o = generating(0);
    const int64_t expert = 3 * 32 * 24 * 4;
    int64_t whole = decoding_fetches(o);
    o.request.segment_bytes = 1;
    int64_t cut = decoding_fetches(o);
    CHECK(whole - cut == 2 * 6 * expert, "%lld bytes, %lld in segments", (long long)whole,
          (long long)cut);
}

static void generation_is_cut_where_it_does_not_fit(void)
{
    world_options o = generating(0);
    world w;
    plan *p = NULL;
    world_model(&o, &w);
    int64_t whole = device_bytes(w.m, o, 0), finest = device_bytes(w.m, o, 1);
    CHECK(finest < whole, "%lld %lld", (long long)finest, (long long)whole);
    o.request.device_limit = (whole + finest) / 2;
    CHECK(world_plan(&o, w.m, &p) == MT_ERR_NOMEM);
    o.request.segment_bytes = PLAN_AUTO;
    o.request.weight_buffers = PLAN_AUTO;
    CHECK(world_plan(&o, w.m, &p) == MT_OK, "%s", status_text());
    CHECK(p && p->tpl[1]->n_segments > 1 && p->tier_bytes[PLAN_DEVICE] <= o.request.device_limit);
    plan_destroy(p);
    o.request.device_limit = 0;
    CHECK(world_plan(&o, w.m, &p) == MT_OK && p->segment_bytes == 0 &&
          p->weight_buffers == w.m->n_units);
    plan_destroy(p);
    world_close(&w);
}

/* ---- the plan -------------------------------------------------------------------------------- */

static void a_limit_is_met_by_segments(void)
{
    world_options o = options(0);
    world w;
    plan *p = NULL;
    o.request.policy = TPL_INPUT;
    o.request.micro_tokens = 4;
    o.request.micro_batches = 2;
    world_model(&o, &w);
    int64_t whole = device_bytes(w.m, o, 0), finest = device_bytes(w.m, o, 1);
    CHECK(finest < whole, "%lld %lld", (long long)finest, (long long)whole);
    o.request.device_limit = (whole + finest) / 2;
    CHECK(world_plan(&o, w.m, &p) == MT_ERR_NOMEM && strstr(status_text(), "segment_size: auto"),
          "%s", status_text());
    o.request.segment_bytes = PLAN_AUTO;
    CHECK(world_plan(&o, w.m, &p) == MT_OK, "%s", status_text());
    if (p) {
        CHECK(p->segment_bytes > 0 && p->tpl[1]->n_segments > 1);
        CHECK(p->tier_bytes[PLAN_DEVICE] <= o.request.device_limit);
        plan_destroy(p);
        p = NULL;
    }
    /* Not finer than it has to be, and not at all where it need not be. */
    o.request.device_limit = finest;
    CHECK(world_plan(&o, w.m, &p) == MT_OK && p->tpl[1]->bounds.segment_parts == 1);
    plan_destroy(p);
    o.request.device_limit = whole;
    CHECK(world_plan(&o, w.m, &p) == MT_OK && p->segment_bytes == 0);
    plan_destroy(p);
    o.request.device_limit = finest - 1;
    CHECK(world_plan(&o, w.m, &p) == MT_ERR_NOMEM);
    world_close(&w);
}

/* Room that whole units would take is worth more to activations. */
static void segments_make_room_for_activations(void)
{
    world_options o = options(0);
    world w;
    plan *cut = NULL, *whole = NULL, *roomy = NULL;
    world_model(&o, &w);
    o.request.policy = TPL_KEEP;
    o.request.device_limit = device_bytes(w.m, o, 2 * 3 * 32 * 24 * 4);
    o.request.policy = PLAN_AUTO;
    if (world_plan(&o, w.m, &whole) < 0)
        world_fail("world_plan");
    CHECK(whole->policy[1] != TPL_KEEP, "policy %d", whole->policy[1]);
    o.request.segment_bytes = PLAN_AUTO;
    if (world_plan(&o, w.m, &cut) < 0)
        world_fail("world_plan");
    CHECK(cut->segment_bytes > 0 && cut->policy[1] == TPL_KEEP && cut->policy[2] == TPL_KEEP,
          "%lld bytes, policies %d %d", (long long)cut->segment_bytes, cut->policy[1],
          cut->policy[2]);
    CHECK(cut->seconds < whole->seconds, "%g %g", cut->seconds, whole->seconds);
    /* Where there is room for everything, whole units are as good. */
    o.request.device_limit = 0;
    if (world_plan(&o, w.m, &roomy) < 0)
        world_fail("world_plan");
    CHECK(roomy->segment_bytes == 0 && roomy->policy[1] == TPL_KEEP);
    plan_destroy(whole);
    plan_destroy(cut);
    plan_destroy(roomy);
    world_close(&w);
}

/* Without experts there is nothing to cut. */
static void dense_models_stay_whole(void)
{
    world_options o = { 0 };
    world w;
    plan *p;
    o.request.training = true;
    o.request.segment_bytes = 1;
    world_model(&o, &w);
    if (world_plan(&o, w.m, &p) < 0)
        world_fail("world_plan");
    for (int32_t u = 0; u < w.m->n_units; u++)
        CHECK(p->tpl[u]->n_segments == 1);
    plan_destroy(p);
    world_close(&w);
}

static void a_plan_says_what_is_cut(void *arg, const char *text)
{
    int *found = arg;
    *found += strstr(text, "segments: 2 units are streamed by their experts, in up to 9") != NULL;
    *found += strstr(text, "segments: 2 units are larger than memory.segment_size") != NULL;
}

static void the_plan_prints_segments(void)
{
    world_options o = options(0);
    world w;
    plan *p;
    int found = 0;
    o.request.segment_bytes = 1;
    world_model(&o, &w);
    if (world_plan(&o, w.m, &p) < 0)
        world_fail("world_plan");
    plan_print(p, false, a_plan_says_what_is_cut, &found);
    CHECK(found == 2, "%d lines", found);
    plan_destroy(p);
    world_close(&w);
}

int main(void)
{
    RUN(segmented_equals_whole);
    RUN(two_of_eight_experts);
    RUN(experts_without_tokens_are_not_fetched);
    RUN(zeros_need_not_cross);
    RUN(gradients_of_zero_do_not_leave);
    RUN(segmented_generation_equals_whole);
    RUN(decoding_fetches_the_experts_it_needs);
    RUN(generation_is_cut_where_it_does_not_fit);
    RUN(a_limit_is_met_by_segments);
    RUN(segments_make_room_for_activations);
    RUN(dense_models_stay_whole);
    RUN(the_plan_prints_segments);
    return check_done();
}
