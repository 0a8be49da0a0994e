/* SPDX-License-Identifier: Apache-2.0
 *
 * Error texts: every failing function sets one line of text for its thread and returns a code.
 */
#ifndef MT_CORE_STATUS_H
#define MT_CORE_STATUS_H

#include <megatrain/base.h>

/* Sets the calling thread's error text and returns `code`:
 *     return status_set(MT_ERR_IO, "%s: cannot open: %s", path, strerror(errno)); */
mt_status status_set(mt_status code, const char *fmt, ...) MT_PRINTF(2, 3);
mt_status status_vset(mt_status code, const char *fmt, va_list args) MT_PRINTF(2, 0);

/* Puts context in front of the present text ("TEXT: " + old) and returns `code`. */
mt_status status_prefix(mt_status code, const char *fmt, ...) MT_PRINTF(2, 3);

/* The calling thread's text; "" when there is none. Valid until the next status call. */
const char *status_text(void);

/* Out of memory while allocating `bytes` for `what`; returns MT_ERR_NOMEM. */
mt_status status_nomem(const char *what, size_t bytes);

#endif
