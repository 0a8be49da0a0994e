/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain version: what this program is and what it can run on.
 */
#include "../../plugins/host/registry.h"
#include "../base/status.h"
#include "cli.h"

#include <megatrain/backend.h>
#include <stdio.h>

static void print_backend(const plugin_record *r)
{
    const void *table = NULL;
    mt_status st =
        registry_find(PLUGIN_BACKEND, r->provides[0], MT_BACKEND_INTERFACE, &table, NULL);
    const mt_backend *b = table;
    if (st == MT_OK)
        st = b->probe();
    void *device = NULL;
    if (st == MT_OK)
        st = b->open(0, 1, &device);
    if (st != MT_OK) {
        printf("backend %-6s not usable: %s\n", r->name, status_text());
        return;
    }
    mt_device_info info = { .struct_size = sizeof info };
    b->info(device, &info);
    printf("backend %-6s %s (%s)\n", r->name, info.name, info.details);
    b->close(device);
}

static int run_version(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    const cli_option options[] = { CLI_PLUGIN_DIR(&dirs), { 0 } };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON && words)
        rc = cli_usage(self, "takes no argument, but '%s' was given", argv[0]);
    if (rc != CLI_GO_ON)
        return rc;
    printf("megatrain %s, plugin ABI %d.%d\n", MT_VERSION, MT_ABI_MAJOR, MT_ABI_MINOR);
#ifdef __clang__
    const char *compiler = "";
#else
    const char *compiler = "GCC ";
#endif
    printf("built with %s%s%s%s\n", compiler, __VERSION__,
           MT_BUILD_FLAGS & MT_BUILD_ASAN ? ", AddressSanitizer" : "",
           MT_BUILD_FLAGS & MT_BUILD_TSAN ? ", ThreadSanitizer" : "");
    mt_status st = cli_find_plugins(&dirs);
    int backends = 0;
    for (int32_t i = 0; st == MT_OK && i < registry_count(); i++) {
        const plugin_record *r = registry_get(i);
        if (r->kind == PLUGIN_BACKEND) {
            print_backend(r);
            backends++;
        }
    }
    if (st == MT_OK && backends == 0)
        puts("no backend found; --plugin-dir DIR names a folder with plugins");
    rc = cli_exit(st);
    registry_finish();
    return rc;
}

const cli_command cli_version = {
    .name = "version",
    .words = "[options]",
    .brief = "show the version, the plugin ABI and the devices found",
    .help = "Shows the version, the plugin ABI that plugins must fit, how this program was built,\n"
            "and every compute backend with the device that it would use.",
    .example = "example:\n  megatrain version",
    .run = run_version,
};
