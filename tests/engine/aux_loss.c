/* SPDX-License-Identifier: Apache-2.0
 *
 * The loss that routers add over all layers: what it sums up over the units of a model has the same
 * bits however a step is run, and depends on each micro-batch by itself.
 */
#include "world.h"

#include "../check.h"
#include "core/base/status.h"

#include <math.h>

static const struct {
    const char *plugin, *manifest;
} models[] = { { "mistral", "mixtral" }, { "gpt_oss", "gpt_oss" }, { "qwen", "qwen3_next" } };
enum { MODELS = sizeof models / sizeof *models, MICRO = 4 };

static world_options options(int kind)
{
    world_options o = { .plugin = models[kind].plugin, .manifest = models[kind].manifest };
    o.request.training = true;
    o.request.gradients = PLAN_GRADIENTS_DEVICE; /* whose sums do not depend on groups */
    return o;
}

/* Steps with an evaluation in between: it must leave nothing behind. */
static world_outcome train(const world_options *o)
{
    world_outcome sum = { 0 };
    world w;
    world_open(o, &w);
    for (int i = 1; i <= 3; i++) {
        step_batch *b = world_batch((uint64_t)i, MICRO - i % 2, 24 - i % 2 * 5, 3, WORLD_VOCAB);
        engine_result r = world_step(&w, b, i, 2e-3);
        CHECK(r.updated && r.aux_loss_sum > 0, "step %d: auxiliary loss %g", i, r.aux_loss_sum);
        world_add(&sum, &r);
        if (i == 2)
            sum.loss += world_loss(&w, b);
        world_batch_free(b);
    }
    world_hash(&w, &sum);
    world_close(&w);
    return sum;
}

/* Against a serial run in one group that keeps everything. */
static void no_way_to_run_changes_a_bit(void)
{
    for (int kind = 0; kind < MODELS; kind++)
        for (mt_dtype dtype = MT_F32; dtype <= MT_BF16; dtype++) {
            world_options o = options(kind);
            o.request.compute = dtype;
            o.serial = true;
            world_outcome want = train(&o);
            for (int mode = 0; mode < 9; mode++) {
                o.serial = mode == 0;
                o.request.policy = mode % TPL_POLICIES;
                o.request.groups = 1 << mode / 3;
                o.request.segment_bytes = mode % 2; /* 1: cut as finely as may be */
                o.chaos = (uint64_t)mode;
                world_outcome got = train(&o);
                CHECK(world_same(&got, &want), "%s %s mode %d: %s", models[kind].manifest,
                      mt_dtype_name(dtype), mode, world_compare(&got, &want));
            }
        }
}

/* Forward and backward of micro-batches [first, first + n) alone, but counted among all targets. */
static double aux_loss_of(const step_batch *b, int64_t first, int64_t n)
{
    world_options o = options(0);
    world w;
    world_open(&o, &w);
    float *all = calloc((size_t)w.m->total_params, sizeof *all);
    float **part = calloc((size_t)w.m->n_params, sizeof *part);
    double loss, aux_loss = NAN;
    step_batch some = { .n = n, .micro = b->micro + first };
    for (int64_t i = 0; i < n; i++)
        some.n_targets += some.micro[i].n_targets;
    for (int32_t i = 0; all && part && i < w.m->n_params; i++)
        part[i] = all + world_offset(&w, i);
    if (!all || !part || engine_gradients(w.e, &some, &loss, &aux_loss, part) < 0)
        world_fail("engine_gradients");
    free(all);
    free(part);
    world_close(&w);
    return aux_loss;
}

static void micro_batches_do_not_see_each_other(void)
{
    step_batch *b = world_batch(5, MICRO, 24, 3, WORLD_VOCAB);
    double sum = 0, all = aux_loss_of(b, 0, MICRO);
    for (int64_t i = 0; i < MICRO; i++)
        sum += aux_loss_of(b, i, 1);
    CHECK(fabs(sum - all) < 1e-12 * all, "%.17g in one step, %.17g in four", all, sum);
    world_batch_free(b);
}

int main(void)
{
    RUN(no_way_to_run_changes_a_bit);
    RUN(micro_batches_do_not_see_each_other);
    return check_done();
}
