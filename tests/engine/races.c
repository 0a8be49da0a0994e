/* SPDX-License-Identifier: Apache-2.0
 *
 * Overlapped runs against serial ones, bit for bit, with random delays and poisoned buffers.
 * `races SEEDS STEPS` spreads STEPS steps per seed over every mode.
 */
#include "world.h"

#include "../check.h"
#include "core/base/status.h"

#include <math.h>

static int64_t seeds = 3, steps = 200;

static world_outcome train(const world_options *o, int64_t n, uint64_t data)
{
    world_outcome sum = { 0 };
    world w;
    world_open(o, &w);
    for (int64_t i = 1; i <= n; i++) {
        /* Full and partial steps by turns: groups of unequal size, sets that are reused. */
        step_batch *b =
            world_batch(data + (uint64_t)i, i % 3 == 2 ? 3 : 4, 24 - i % 2 * 5, 3, WORLD_VOCAB);
        engine_result r = world_step(&w, b, i, 1e-3);
        CHECK(r.updated && isfinite(r.loss_sum), "step %d", (int)i);
        world_add(&sum, &r);
        if (i % 7 == 3)
            sum.loss += world_loss(&w, b);
        world_batch_free(b);
    }
    world_hash(&w, &sum);
    world_close(&w);
    return sum;
}

static void overlapped_equals_serial(void)
{
    enum { MODES = 72 };
    static const struct {
        plan_gradients sums;
        mt_dtype dtype;
    } grads[] = { { PLAN_GRADIENTS_DEVICE, MT_F32 },  { PLAN_GRADIENTS_HOST, MT_BF16 },
                  { PLAN_GRADIENTS_DEVICE, MT_BF16 }, { PLAN_GRADIENTS_HELD, MT_F32 },
                  { PLAN_GRADIENTS_HELD, MT_BF16 },   { PLAN_GRADIENTS_HELD, MT_F32 } };
    int64_t n = (steps + MODES - 1) / MODES;
    n = n < 4 ? 4 : n;
    for (int mode = 0; mode < MODES; mode++) {
        world_options o = { .tied = mode & 1 };
        o.request.training = true;
        o.request.compute = mode & 2 ? MT_BF16 : MT_F32;
        o.request.max_grad_norm = mode & 4 ? -1 : 1;
        o.frozen_norms = mode % 5 == 0;
        o.request.groups = (int64_t[]){ 1, 2, 4 }[mode % 24 >> 3];
        o.request.policy = (mode < 24 ? mode : mode / 3) % TPL_POLICIES;
        int g = mode % 3 + (mode < 48 ? 0 : 3);
        o.request.gradients = mode < 24 ? PLAN_GRADIENTS_HOST : grads[g].sums;
        o.request.gradient_dtype = mode < 24 ? MT_F32 : grads[g].dtype;
        o.request.weight_buffers = 2 + mode % 3;
        o.apart = mode & 4; /* gradients may then wait for the optimizer on the device */
        o.serial = true;
        world_outcome want = train(&o, n, 100);
        for (int64_t seed = 1; seed <= seeds; seed++) {
            o.serial = false;
            o.chaos = (uint64_t)seed;
            o.threads = 1 + (int32_t)(seed % 3);
            world_outcome got = train(&o, n, 100);
            CHECK(world_same(&got, &want), "mode %d seed %d: %s", mode, (int)seed,
                  world_compare(&got, &want));
        }
    }
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        seeds = atoll(argv[1]);
        steps = atoll(argv[2]);
    }
    RUN(overlapped_equals_serial);
    return check_done();
}
