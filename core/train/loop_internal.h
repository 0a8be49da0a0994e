/* SPDX-License-Identifier: Apache-2.0
 *
 * A training run on its way: what loop.c, loop_begin.c and loop_save.c share.
 */
#ifndef MT_CORE_LOOP_INTERNAL_H
#define MT_CORE_LOOP_INTERNAL_H

#include "checkpoint.h"
#include "loop.h"
#include "metrics.h"
#include "schedule.h"

typedef struct loop {
    session *s;
    run_manifest *run;
    run_folder folder;
    const mt_weights *format;
    schedule schedule;
    checkpoint_state state;
    metrics *metrics;
    int64_t saved_step;         /* of the newest checkpoint; -1: none */
    char good[RUN_FOLDER_PATH]; /* the newest checkpoint not made amid skipped steps */
    double packed,
        room;         /* tokens of the steps done here, and what their micro-batches could hold */
    bool data_failed; /* what failed is the data or an evaluation: weights and states are good */
    double ended;     /* when the step before ended */
    double step_time; /* moving average, seconds; 0 before the second step done here */
    bool told_cost;   /* what saves take of the time */
} loop;

/* All steps are done, or too many evaluations in a row were no better than the best. */
bool loop_is_finished(const loop *l);
bool loop_eval_is_due(const loop *l, int64_t step);
/* Evaluates now, writes it down, and remembers the best. */
mt_status loop_evaluate(loop *l);

/* How the state as it is now is saved. */
checkpoint_options loop_save_options(const loop *l);
/* Saves it, and says what that took. */
mt_status loop_save(loop *l);
/* Steps between saves with which these take 2% of the time or less: 1, 2 or 5 times a power of ten;
 * 0 where they take no more than 5% as it is. [pure] */
int64_t loop_advise_save_steps(double save_seconds, double step_seconds, int64_t save_steps);
/* Where the finished run is exported to; false: nowhere. */
bool loop_export_folder(const run_manifest *run, char ret[RUN_FOLDER_PATH]);

/* Weights, states and position of a new or of a resumed run. */
mt_status loop_begin(loop *l);

#endif
