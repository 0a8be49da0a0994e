/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin's entry: hands out the CPU backend, and keeps what the host offers.
 */
#include "device.h"

#include <megatrain/plugin.h>
#include <stdio.h>

MT_PLUGIN("cpu", "1.0.0", "Apache-2.0", MT_BACKEND_INTERFACE, &cpu_backend)

void cpu_set_error(const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    mt_plugin_host->set_error("%s", text);
}

void cpu_log(mt_log_level level, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    mt_plugin_host->log(level, "%s", text);
}
