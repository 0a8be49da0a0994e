/* SPDX-License-Identifier: Apache-2.0
 *
 * metrics.jsonl: one JSON object a line, for every step and every evaluation.
 */
#ifndef MT_CORE_METRICS_H
#define MT_CORE_METRICS_H

#include "../engine/engine.h"

typedef struct metrics metrics;

/* One step. Unless stated, figures are of this step alone. */
typedef struct metrics_step {
    int64_t step; /* 1 for the first */
    double loss;  /* mean over the step's targets, nats */
    bool has_aux_loss;
    double aux_loss;  /* what routers add to that, coefficient included */
    double grad_norm; /* before clipping */
    double lr;
    int64_t tokens, targets;
    int64_t total_tokens;      /* since the run began */
    double packing_efficiency; /* tokens as a share of what the micro-batches could hold */
    double epoch;              /* epochs done, with the fraction of the present one */
    double seconds;            /* wall time since the step before ended */
    double model_flops;        /* of the model, without recompute */
    double wait[ENGINE_WAITS]; /* seconds that the compute queue stood still */
    int64_t bytes[PLAN_TIERS]; /* allocated by the engine and the store */
    int64_t rss;               /* bytes of the process that are resident */
    double router_violation;   /* see engine_result; NaN: no experts, and nothing is written */
    bool updated;
} metrics_step;

typedef struct metrics_eval {
    int64_t step; /* after how many steps */
    double loss;  /* mean over all targets of the validation batches, nats */
    int64_t targets;
    double seconds;
} metrics_eval;

/* What the file is cut to on resume. */
typedef struct metrics_resume {
    int64_t step;     /* of the checkpoint; lines after it are cut off */
    bool eval_is_due; /* does this run evaluate after that step? */
} metrics_resume;

/* Opens PATH, makes it where there is none, and locks it: a second process in the same run folder
 * is refused. Nothing is written or cut yet. [main] */
mt_status metrics_open(const char *path, metrics **ret);

/* A run that starts anew gives no `resume` and gets an empty file. A resumed one gets the lines up
 * to its checkpoint, less an evaluation that only the end of the interrupted run has written there.
 * ret_has_eval: the last line kept is the evaluation at resume->step. Before the first write.
 * [main] */
mt_status metrics_cut(metrics *m, const metrics_resume *resume, bool *ret_has_eval);
/* Tries once more what could not be written, and warns of what is lost. Accepts NULL. [main] */
void metrics_close(metrics *m);

/* Write a line at once. Numbers that are not finite are written as null. A file that cannot be
 * written is warned of when that begins and when it is over; meanwhile lines wait in memory, and
 * are tried again with the next one. [main] */
void metrics_write_step(metrics *m, const metrics_step *s);
void metrics_write_eval(metrics *m, const metrics_eval *e);

#endif
