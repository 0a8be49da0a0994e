/* SPDX-License-Identifier: Apache-2.0
 *
 * Per-thread error text.
 */
#include "status.h"

#include <stdio.h>

enum { TEXT_SIZE = 2048 };

static _Thread_local char text[TEXT_SIZE];

mt_status status_vset(mt_status code, const char *fmt, va_list args)
{
    /* Formatted aside first: an argument may be the present text itself. */
    char next[TEXT_SIZE];
    vsnprintf(next, sizeof next, fmt, args);
    memcpy(text, next, sizeof text);
    return code;
}

mt_status status_set(mt_status code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    status_vset(code, fmt, args);
    va_end(args);
    return code;
}

mt_status status_prefix(mt_status code, const char *fmt, ...)
{
    char context[TEXT_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(context, sizeof context, fmt, args);
    va_end(args);
    return status_set(code, "%s: %s", context, text);
}

const char *status_text(void)
{
    return text;
}

mt_status status_nomem(const char *what, size_t bytes)
{
    return status_set(MT_ERR_NOMEM, "out of memory: %zu bytes for %s", bytes, what);
}
