/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals that ask a run to stop.
 */
#ifndef MT_CORE_SIGNALS_H
#define MT_CORE_SIGNALS_H

#include <stdbool.h>

/* Catches SIGINT, SIGTERM and SIGHUP: the first asks the run to stop after its step, one that
 * comes at least a second later ends the process at once with status 75; those between say nothing
 * new. A closed pipe becomes an error of the writing call. [main] */
void train_catch_signals(void);
bool train_stop_requested(void);

#endif
