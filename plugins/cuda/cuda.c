/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin's entry: hands out the CUDA backend, and keeps what the host offers.
 */
#include "cuda.h"

#include <megatrain/plugin.h>
#include <stdio.h>

static const mt_host *plugin_host;

static mt_status plugin_init(const mt_host *host)
{
    plugin_host = host;
    return MT_OK;
}

static const void *plugin_interface(const char *id)
{
    return strcmp(id, MT_BACKEND_INTERFACE) == 0 ? &cuda_backend : NULL;
}

MT_EXPORT const mt_plugin *mt_plugin_entry_v1(uint32_t host_major, uint32_t host_minor)
{
    static const mt_plugin plugin = {
        .magic = MT_PLUGIN_MAGIC,
        .struct_size = sizeof(mt_plugin),
        .abi_major = MT_ABI_MAJOR,
        .abi_minor = MT_ABI_MINOR,
        .pointer_size = sizeof(void *),
        .build_flags = MT_BUILD_FLAGS,
        .cudart_major = CUDART_VERSION / 1000,
        .name = "cuda",
        .version = "1.0.0",
        .licence = "Apache-2.0",
        .init = plugin_init,
        .get_interface = plugin_interface,
    };
    (void)host_major;
    (void)host_minor;
    return &plugin;
}

void cuda_set_error(const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    plugin_host->set_error("%s", text);
}

void cuda_log(mt_log_level level, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    plugin_host->log(level, "%s", text);
}
