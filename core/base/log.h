/* SPDX-License-Identifier: Apache-2.0
 *
 * Log lines on stderr, and the one live progress line of a terminal that they must not tear.
 */
#ifndef MT_CORE_LOG_H
#define MT_CORE_LOG_H

#include <megatrain/base.h>

/* Lines above `level` are dropped; the default is MT_LOG_INFO. [main] */
void log_set_level(mt_log_level level);

/* Writes one line to stderr; warnings and errors are marked as such. [any] */
void log_write(mt_log_level level, const char *fmt, ...) MT_PRINTF(2, 3);
void log_vwrite(mt_log_level level, const char *fmt, va_list args) MT_PRINTF(2, 0);

/* Replaces the live line (terminals only; elsewhere a no-op). NULL clears it. [any] */
void log_live(const char *line);

/* Is there a terminal that shows a live line? */
bool log_has_terminal(void);

#endif
