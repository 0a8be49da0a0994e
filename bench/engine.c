/* SPDX-License-Identifier: Apache-2.0
 *
 * How well steps of several model sizes keep the compute queue busy: tokens a second, what compute
 * waited for, and how much of its time the GEMMs alone would take at their measured speed.
 *
 *     bench-engine [STEPS [fp32|bf16 [THREADS]]]     (MT_TEST_CPU_PLUGIN names the backend)
 */
#include "tests/engine/world.h"

#include "core/base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct size {
    int32_t hidden, blocks, vocab;
    int64_t tokens;
} size;

static void print_line(void *arg, const char *text)
{
    (void)arg;
    printf("  %s\n", text);
}

static void bench(const size *s, int64_t steps, mt_dtype compute)
{
    enum { MICRO_BATCHES = 4 };
    void *device;
    const mt_backend *b = world_backend(&device);
    plan_profile f;
    if (plan_measure(b, device, compute, &f) < 0)
        world_fail("plan_measure");
    world_options o = { .hidden = s->hidden, .blocks = s->blocks, .vocab = s->vocab };
    o.request.training = true;
    o.request.compute = compute;
    o.request.micro_tokens = s->tokens;
    o.request.micro_batches = MICRO_BATCHES;
    world w;
    world_open(&o, &w);
    step_batch *batch = world_batch(1, MICRO_BATCHES, s->tokens, 2, s->vocab);
    engine_result sum = { 0 }, r;
    for (int64_t i = 0; i <= steps; i++) {
        engine_step_params p = { i + 1, 1e-4, 1 };
        if (engine_step(w.e, batch, &p, &r) < 0)
            world_fail("engine_step");
        if (i == 0)
            continue; /* the first step touches memory */
        sum.seconds += r.seconds;
        sum.compute_seconds += r.compute_seconds;
        for (int k = 0; k < ENGINE_WAITS; k++)
            sum.wait_seconds[k] += r.wait_seconds[k];
    }
    double flops = 0;
    for (int32_t u = 0; u < w.m->n_units; u++)
        flops += 3 * w.m->units[u].t->gemm_flops_per_token;
    flops *= (double)(batch->tokens * steps);
    const double *wait = sum.wait_seconds;
    printf("%.2f M parameters, %lld tokens a step: %.0f tokens/s\n",
           (double)w.m->total_params * 1e-6, (long long)batch->tokens,
           (double)(batch->tokens * steps) / sum.seconds);
    printf("  compute busy %.1f%%; waits: weights %.1f%%, gradients %.1f%%, optimizer %.1f%%, data "
           "%.1f%%\n",
           100 * sum.compute_seconds / sum.seconds, 100 * wait[ENGINE_WAIT_WEIGHTS] / sum.seconds,
           100 * wait[ENGINE_WAIT_GRADIENTS] / sum.seconds,
           100 * wait[ENGINE_WAIT_OPTIMIZER] / sum.seconds,
           100 * wait[ENGINE_WAIT_DATA] / sum.seconds);
    printf("  GEMMs at their measured %.1f GFLOP/s: %.1f%% of compute\n", f.gemm_flops * 1e-9,
           100 * flops / f.gemm_flops / sum.compute_seconds);
    plan_print(w.p, true, print_line, NULL);
    world_batch_free(batch);
    world_close(&w);
}

int main(int argc, char **argv)
{
    static const size sizes[] = {
        { 64, 2, 512, 128 }, { 128, 4, 1024, 256 }, { 256, 6, 4096, 256 }, { 512, 8, 8192, 256 }
    };
    int64_t steps = argc > 1 ? atoll(argv[1]) : 3;
    mt_dtype compute = argc > 2 && strcmp(argv[2], "bf16") == 0 ? MT_BF16 : MT_F32;
    world_threads = argc > 3 ? atoi(argv[3]) : 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        bench(&sizes[i], steps < 1 ? 1 : steps, compute);
    return 0;
}
