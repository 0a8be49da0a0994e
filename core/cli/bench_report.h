/* SPDX-License-Identifier: Apache-2.0
 *
 * What `bench step` found, as a table and as JSON.
 */
#ifndef MT_CORE_BENCH_REPORT_H
#define MT_CORE_BENCH_REPORT_H

#include "../train/session.h"

/* One step size. */
typedef struct step_bench {
    int64_t tokens, steps;
    plan *plan;          /* owned; NULL: refused */
    char refused[2048];  /* why */
    double best, median; /* seconds of a step */
    double loss;         /* mean over the last step's targets, nats */
    engine_result sum;   /* over the timed steps */
    int64_t bytes[PLAN_TIERS];
} step_bench;

typedef struct step_report {
    const char *model;
    const session *s;
    const run_manifest *run;
    step_bench *size;
    int32_t n;
} step_report;

/* Print to the standard output. [main] */
void report_begin(const step_report *r);
void report_size(const step_report *r, const step_bench *b);

/* Writes everything as one JSON object; docs/cli.md lists the keys. [main] */
mt_status report_write(const step_report *r, const char *path);

void report_finish(step_report *r);

#endif
