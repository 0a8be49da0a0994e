/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain plugins: what is found, what one says, and whether one works (plugin_check.c).
 */
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "cli.h"
#include "plugin_check.h"

#include <stdio.h>

enum { DEFAULT_TIMEOUT = 60, MAX_TIMEOUT = 24 * 60 * 60 };

static void print_provides(const plugin_record *r)
{
    for (const char *const *p = r->provides; p && *p; p++)
        printf("%s%s", p == r->provides ? "" : ", ", *p);
}

static int list_plugins(void)
{
    if (registry_count() == 0) {
        puts("no plugin found; --plugin-dir DIR names a folder with plugins");
        return CLI_OK;
    }
    printf("%-14s %-8s %-8s %-5s %s\n", "name", "kind", "version", "abi", "provides");
    for (int32_t i = 0; i < registry_count(); i++) {
        const plugin_record *r = registry_get(i);
        char abi[24];
        snprintf(abi, sizeof abi, "%u.%u", r->abi_major, r->abi_minor);
        printf("%-14s %-8s %-8s %-5s ", r->name, plugin_kind_name(r->kind), r->version, abi);
        print_provides(r);
        putchar('\n');
    }
    return CLI_OK;
}

static int show_plugin(const cli_command *self, const char *name)
{
    const char *names[256] = { NULL };
    int n = 0;
    for (int32_t i = 0; i < registry_count(); i++) {
        const plugin_record *r = registry_get(i);
        if (n < 255)
            names[n++] = r->name;
        if (strcmp(r->name, name) != 0)
            continue;
        printf("name         %s\nkind         %s\nversion      %s\nlicence      %s\n"
               "description  %s\nabi          %u.%u (this host: %d.%d)\nprovides     ",
               r->name, plugin_kind_name(r->kind), r->version, r->licence, r->description,
               r->abi_major, r->abi_minor, MT_ABI_MAJOR, MT_ABI_MINOR);
        print_provides(r);
        printf("\nmanifest     %s\nobject       %s\n", r->manifest_path, r->path);
        if (r->shadows)
            printf("shadows      %s\n", r->shadows);
        return CLI_OK;
    }
    const char *nearest = cli_nearest(name, names);
    log_write(MT_LOG_ERROR,
              "there is no plugin '%s'%s%s%s; `megatrain %s list` shows what there is", name,
              nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "",
              self->name);
    return CLI_FAILED;
}

static int run_plugins(const cli_command *self, int argc, char **argv)
{
    static const char *const verbs[] = { "list", "info", "check", NULL };
    cli_list dirs = { 0 };
    int64_t timeout = INT64_MIN; /* not given */
    const cli_option options[] = { { "timeout", CLI_INT, &timeout, "SECONDS",
                                     "check: for each test (60)" },
                                   CLI_PLUGIN_DIR(&dirs),
                                   { 0 } };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc != CLI_GO_ON)
        return rc;
    const char *verb = words ? argv[0] : "list";
    bool list = strcmp(verb, "list") == 0, info = strcmp(verb, "info") == 0;
    bool check = strcmp(verb, "check") == 0;
    if (!list && !info && !check)
        return cli_unknown(self, verb, verbs);
    if (list && words > 1)
        return cli_usage(self, "list takes no argument, but '%s' was given", argv[1]);
    if (!list && words != 2)
        return cli_usage(self, info ? "info needs one plugin's name" : "check needs one file");
    if (!check && timeout != INT64_MIN)
        return cli_usage(self, "--timeout is for check");
    timeout = timeout == INT64_MIN ? DEFAULT_TIMEOUT : timeout;
    if (timeout < 1 || timeout > MAX_TIMEOUT)
        return cli_usage(self, "--timeout must be from 1 to %d seconds, not %lld", MAX_TIMEOUT,
                         (long long)timeout);

    mt_status st = cli_find_plugins(&dirs);
    if (st != MT_OK)
        rc = cli_exit(st);
    else if (list)
        rc = list_plugins();
    else if (info)
        rc = show_plugin(self, argv[1]);
    else
        rc = plugin_check(argv[1], (unsigned)timeout) ? CLI_OK : CLI_FAILED;
    registry_finish();
    return rc;
}

const cli_command cli_plugins = {
    .name = "plugins",
    .words = "[list | info NAME | check FILE.so] [options]",
    .brief = "list plugins, describe one, or check whether one works",
    .help = "list shows every plugin found; info shows what the manifest of one says. check loads\n"
            "FILE.so, compares it with the manifest beside it, and tests what it provides, each\n"
            "test in a process of its own: for an architecture, finite differences against the\n"
            "derived gradients of every template in FP64; for an optimizer, updates of whole\n"
            "tensors against those of ranges. The list `check` in its manifest gives the\n"
            "hyper-parameters to test at.",
    .example = "example: check a plugin that you have just built\n"
               "  megatrain plugins check build/my_arch.so",
    .run = run_plugins,
};
