/* SPDX-License-Identifier: Apache-2.0
 *
 * Learning rate schedules.
 */
#include "schedule.h"

#include <math.h>

static double cosine(double progress)
{
    return 0.5 * (1.0 + cos(3.14159265358979323846 * progress));
}

/* How far `step` is from `first` to `last`, within [0, 1]. */
static double progress(int64_t step, int64_t first, int64_t last)
{
    if (step >= last)
        return 1.0;
    return step <= first ? 0.0 : (double)(step - first) / (double)(last - first);
}

schedule schedule_of_run(const run_manifest *run, int64_t total)
{
    schedule s = { .kind = run->lr_scheduler_type,
                   .peak = run->learning_rate,
                   .min_ratio = run->min_lr_ratio,
                   .warmup = run->warmup_steps,
                   .total = total };
    if (s.warmup == 0)
        s.warmup = (int64_t)ceil(run->warmup_ratio * (double)total);
    s.decay = (int64_t)ceil(run->wsd_decay_ratio * (double)total);
    return s;
}

double schedule_lr(const schedule *s, int64_t step)
{
    if (step < s->warmup)
        return s->peak * (double)step / (double)s->warmup;

    double share = 1.0;
    switch (s->kind) {
    case RUN_CONSTANT:
        return s->peak;
    case RUN_LINEAR:
        share = 1.0 - progress(step, s->warmup, s->total);
        break;
    case RUN_COSINE:
        share = cosine(progress(step, s->warmup, s->total));
        break;
    case RUN_WSD:
        /* A decay that would reach into the warm-up starts where that ends. */
        share = cosine(progress(
            step, s->total - s->decay > s->warmup ? s->total - s->decay : s->warmup, s->total));
        break;
    }
    return s->peak * (share * (1.0 - s->min_ratio) + s->min_ratio);
}

const char *schedule_name(run_schedule kind)
{
    static const char *const name[] = { "constant", "linear", "cosine", "wsd" };
    return (unsigned)kind < sizeof name / sizeof name[0] ? name[kind] : "unknown";
}
