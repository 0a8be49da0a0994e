/* SPDX-License-Identifier: Apache-2.0
 *
 * The training run: from a session with a plan to a finished, or stopped and resumable, run folder.
 */
#ifndef MT_CORE_LOOP_H
#define MT_CORE_LOOP_H

#include "run_folder.h"
#include "session.h"

typedef struct train_outcome {
    int64_t step, steps;              /* done, of */
    int64_t skipped;                  /* of those done: with numbers that were not finite */
    double loss;                      /* of the last step; NaN when none was done */
    double validation_loss;           /* NaN when there was no evaluation */
    double packing_efficiency;        /* of the steps done since the start or resume; NaN: none */
    char checkpoint[RUN_FOLDER_PATH]; /* the newest; "" when there is none */
} train_outcome;

/* Steps that the run has, at least 1; 0: nobody knows, as epochs are to be trained of data that was
 * not read. [pure] */
int64_t train_count_steps(const session *s, const run_manifest *run);

/* Fails where the run folder, the export or the trace cannot be written, or what is to be resumed
 * from is not there: to be known before text is tokenised and steps are trained. [main] */
mt_status train_check_places(const run_manifest *run, const session_engine_options *options);

/* Trains as `run` says, in a session that has device, model, optimizer, data and plan but no store
 * or engine yet. Ends with MT_OK, or with MT_ERR_STOPPED when a signal was caught and what was done
 * has been saved; `ret` is filled in both cases. [main] */
mt_status train_run(session *s, run_manifest *run, const session_engine_options *options,
                    train_outcome *ret);

/* Mean loss over the validation split (at most run->eval_batches steps' worth of it when that is
 * not 0) with the present weights. Stops early when `stop` is not NULL and becomes true:
 * MT_ERR_STOPPED. [main] */
mt_status train_evaluate(session *s, const run_manifest *run, double *ret_loss,
                         int64_t *ret_targets, bool (*stop)(void));

#endif
