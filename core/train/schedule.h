/* SPDX-License-Identifier: Apache-2.0
 *
 * Learning rate schedules: pure functions of the step. Names and shapes are those of Hugging Face's
 * trainers (transformers/optimization.py), so that a manifest carries over.
 */
#ifndef MT_CORE_SCHEDULE_H
#define MT_CORE_SCHEDULE_H

#include "../manifest/run.h"

typedef struct schedule {
    run_schedule kind;
    double peak;      /* learning_rate */
    double min_ratio; /* the floor, as a share of `peak`; warm-up starts from 0 whatever it is */
    int64_t warmup;   /* steps */
    int64_t total;    /* steps of the run */
    int64_t decay;    /* wsd: the last steps, over which it decays */
} schedule;

/* The schedule of a run of `total` steps. warmup_ratio counts, rounded up, where warmup_steps is 0.
 * [pure] */
schedule schedule_of_run(const run_manifest *run, int64_t total);

/* Learning rate of step `step`, counted from 0: peak * step / warmup while it warms up, then
 * constant, linear, half a cosine, or flat and then half a cosine over the last `decay` steps
 * (wsd). Past `total` it stays where it ended. [pure] */
double schedule_lr(const schedule *s, int64_t step);

/* "constant", "linear", "cosine", "wsd". */
const char *schedule_name(run_schedule kind);

#endif
