/* SPDX-License-Identifier: Apache-2.0
 *
 * A model's units as a table lists them: neighbours that are alike on one line, and what repeats
 * (a layer with a window, one without, and so on) once.
 */
#ifndef MT_CORE_UNIT_RUNS_H
#define MT_CORE_UNIT_RUNS_H

#include <megatrain/base.h>

/* A line: the units first..last are alike. Where lines repeat, `times` of the last of them is above
 * 1: the `lines` lines up to this one stand for all units up to `until`. */
typedef struct unit_run {
    int32_t first, last;
    int32_t times, lines, until;
} unit_run;

/* Are two units alike, as far as the table shows them? */
typedef bool (*unit_alike)(const void *arg, int32_t a, int32_t b);

/* Fills ret [n_units] and returns the number of lines. [pure] */
int32_t unit_runs(int32_t n_units, unit_alike alike, const void *arg, unit_run *ret);

#endif
