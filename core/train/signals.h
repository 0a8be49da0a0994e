/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals that ask a run to stop.
 */
#ifndef MT_CORE_SIGNALS_H
#define MT_CORE_SIGNALS_H

#include <stdbool.h>

/* Catches SIGINT, SIGTERM and SIGHUP, each of which ends the process at once with status 75: what
 * comes before the first step may take hours, and leaves nothing that is worth finishing. A closed
 * pipe becomes an error of the writing call. [main] */
void train_catch_signals(void);

/* From now on the first signal asks the run to stop after its step, one that comes at least a
 * second later ends the process; those between say nothing new. [main] */
void train_finish_on_signal(void);
bool train_stop_requested(void);

#endif
