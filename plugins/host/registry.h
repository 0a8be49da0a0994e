/* SPDX-License-Identifier: Apache-2.0
 *
 * Discovery, handshake and registry of plugins. Manifests are read first; a shared object is loaded
 * when something that it provides is asked for, and never unloaded.
 */
#ifndef MT_PLUGIN_REGISTRY_H
#define MT_PLUGIN_REGISTRY_H

#include <megatrain/plugin.h>

typedef enum plugin_kind {
    PLUGIN_ARCH,
    PLUGIN_OPTIM,
    PLUGIN_LOADER,
    PLUGIN_BACKEND,
    PLUGIN_KINDS
} plugin_kind;

/* "arch", "optim", "loader", "backend". */
const char *plugin_kind_name(plugin_kind k);

/* What a manifest says. Strings live as long as the process. */
typedef struct plugin_record {
    const char *name, *version, *licence, *description;
    plugin_kind kind;
    uint32_t abi_major, abi_minor;
    const char *const
        *provides; /* model types, optimizer names, formats or device kinds; NULL-terminated */
    const char *manifest_path;
    const char *path;        /* the shared object */
    const mt_plugin *plugin; /* NULL until loaded */
    const char *shadows;     /* path of a later one of the same name, or NULL */
} plugin_record;

/* Searches, in this order: `dirs` (--plugin-dir), MEGATRAIN_PLUGIN_PATH (ignored when the process
 * is elevated), the user's data folder, the installed plugin folder. A bad manifest is a warning
 * and the plugin is left out; so is a folder that cannot be searched, but for those of `dirs`,
 * where it is an error. Called once, before any other. [main] */
mt_status registry_init(const char *const *dirs, int32_t n_dirs);
void registry_finish(void);

int32_t registry_count(void);
const plugin_record *registry_get(int32_t index);

/* The interface table `interface_id` of the plugin of `kind` that provides `what`, loading it when
 * needed. Fails with MT_ERR_NOT_FOUND (text: what there is, and the nearest name) or with the
 * reason why the plugin was refused. [main] */
mt_status registry_find(plugin_kind kind, const char *what, const char *interface_id,
                        const void **ret_interface, const plugin_record **ret_record);

/* Loads one shared object by its path (its manifest must lie beside it); checks ownership, manifest
 * and handshake. For `plugins check` and tests. [main] */
mt_status registry_load_file(const char *path, const plugin_record **ret_record);

/* Interface of a loaded plugin; NULL when it does not provide it. */
const void *registry_interface(const plugin_record *r, const char *interface_id);

#endif
