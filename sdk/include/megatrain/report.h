/* SPDX-License-Identifier: Apache-2.0
 *
 * How a plugin reports: errors and lines of the log, from any of its files. What the host offers
 * and the plugin's name are defined in the file that has MT_PLUGIN or MT_PLUGIN_WITH (plugin.h).
 */
#ifndef MEGATRAIN_REPORT_H
#define MEGATRAIN_REPORT_H

#include "base.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MT_PLUGIN_LOCAL __attribute__((visibility("hidden")))
#else
#define MT_PLUGIN_LOCAL
#endif

/* Set before any other call into the plugin. */
extern MT_PLUGIN_LOCAL const mt_host *mt_plugin_host;
extern MT_PLUGIN_LOCAL const char mt_plugin_name[];

/* Texts longer than this, in bytes, are cut. */
enum { MT_REPORT_SIZE = 2048 };

/* Sets the calling thread's error text and returns `code`:
 *     return mt_fail(MT_ERR_IO, "%s: cannot open: %s", path, strerror(errno)); [any] */
static inline mt_status mt_fail(mt_status code, const char *fmt, ...) MT_PRINTF(2, 3);
static inline mt_status mt_fail(mt_status code, const char *fmt, ...)
{
    char text[MT_REPORT_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    mt_plugin_host->set_error("%s", text);
    return code;
}

/* Memory is exhausted: MT_ERR_NOMEM with a text that names the plugin. [any] */
static inline mt_status mt_fail_nomem(void)
{
    return mt_fail(MT_ERR_NOMEM, "%s: out of memory", mt_plugin_name);
}

/* The calling thread's error text, such as another interface has just set it. [any] */
static inline const char *mt_error_text(void)
{
    const mt_host *h = mt_plugin_host;
    bool offered = h->struct_size > offsetof(mt_host, error) && h->error;
    return offered ? h->error() : "the reason is unknown to this version of the program";
}

/* Writes a line to the log. [any] */
static inline void mt_log(mt_log_level level, const char *fmt, ...) MT_PRINTF(2, 3);
static inline void mt_log(mt_log_level level, const char *fmt, ...)
{
    char text[MT_REPORT_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    mt_plugin_host->log(level, "%s", text);
}

#ifdef __cplusplus
}
#endif
#endif
