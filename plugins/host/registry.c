/* SPDX-License-Identifier: Apache-2.0
 *
 * The list of plugins, and who provides what. The one global of the program.
 */
#include "registry.h"

#include "../../core/base/log.h"
#include "../../core/base/status.h"
#include "../../core/base/text.h"
#include "host.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static struct {
    arena arena;
    plugin_entry **entries;
    int32_t n, capacity;
    plugin_folder *folders;
    int32_t n_folders;
} registry;

/* ---- host services -------------------------------------------------------------------------- */

static void host_set_error(const char *fmt, ...) MT_PRINTF(1, 2);
static void host_set_error(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    status_vset(MT_ERR_INVALID, fmt, args);
    va_end(args);
}

static const mt_host host = { sizeof host,    MT_ABI_MAJOR, MT_ABI_MINOR,
                              host_set_error, log_write,    status_text };

/* ---- the list ------------------------------------------------------------------------------- */

const char *plugin_kind_name(plugin_kind k)
{
    static const char *const name[PLUGIN_KINDS] = { "arch", "optim", "loader", "backend" };
    return k >= 0 && k < PLUGIN_KINDS ? name[k] : "unknown";
}

static plugin_entry *add_entry(const plugin_record *record)
{
    if (registry.n == registry.capacity) {
        int32_t capacity = registry.capacity ? 2 * registry.capacity : 16;
        plugin_entry **grown =
            arena_array(&registry.arena, (size_t)capacity, sizeof(plugin_entry *));
        if (!grown)
            return NULL;
        if (registry.n)
            memcpy(grown, registry.entries, (size_t)registry.n * sizeof(plugin_entry *));
        registry.entries = grown;
        registry.capacity = capacity;
    }
    plugin_entry *e = arena_alloc(&registry.arena, sizeof *e);
    if (!e)
        return NULL;
    e->record = *record;
    registry.entries[registry.n++] = e;
    return e;
}

static bool provides(const plugin_record *r, const char *what)
{
    for (int32_t i = 0; r->provides[i]; i++)
        if (strcmp(r->provides[i], what) == 0)
            return true;
    return false;
}

static plugin_entry *find_provider(plugin_kind kind, const char *what)
{
    for (int32_t i = 0; i < registry.n; i++) {
        plugin_entry *e = registry.entries[i];
        if (e->record.kind == kind && provides(&e->record, what))
            return e;
    }
    return NULL;
}

static mt_status add_manifest(const char *path)
{
    plugin_record r;
    mt_status s = discover_manifest(&registry.arena, path, &r);
    if (s == MT_ERR_NOMEM)
        return s;
    if (s != MT_OK) {
        log_write(MT_LOG_WARNING, "plugin left out: %s", status_text());
        return MT_OK;
    }
    for (int32_t i = 0; i < registry.n; i++) {
        plugin_record *first = &registry.entries[i]->record;
        if (strcmp(first->name, r.name) != 0)
            continue;
        if (!first->shadows)
            first->shadows = r.path;
        /* A build beside an installation hides all of its plugins, which nobody wonders at. */
        log_write(strcmp(first->version, r.version) == 0 ? MT_LOG_DEBUG : MT_LOG_INFO,
                  "plugin '%s': %s (version %s) shadows %s (version %s)", r.name, first->path,
                  first->version, r.path, r.version);
        return MT_OK;
    }
    for (int32_t i = 0; r.provides[i]; i++) {
        const plugin_entry *first = find_provider(r.kind, r.provides[i]);
        if (first)
            log_write(MT_LOG_DEBUG, "%s '%s': plugin '%s' comes before plugin '%s'",
                      plugin_kind_name(r.kind), r.provides[i], first->record.name, r.name);
    }
    return add_entry(&r) ? MT_OK : MT_ERR_NOMEM;
}

static int is_manifest(const struct dirent *d)
{
    size_t n = strlen(d->d_name);
    return d->d_name[0] != '.' && n > 5 && strcmp(d->d_name + n - 5, ".yaml") == 0;
}

/* A folder that was named on the command line is not passed over: naming it had no effect. */
static mt_status pass_over(const plugin_folder *folder, mt_status why)
{
    if (folder->explicitly)
        return why;
    log_write(MT_LOG_WARNING, "%s; it is not searched", status_text());
    return MT_OK;
}

static mt_status search_folder(const plugin_folder *folder)
{
    struct dirent **found;
    mt_status s = discover_check_folder(folder->path);
    if (s != MT_OK)
        return pass_over(folder, s);
    int n = scandir(folder->path, &found, is_manifest, alphasort);
    if (n < 0)
        return pass_over(folder, status_set(MT_ERR_IO, "plugin folder %s: cannot list: %s",
                                            folder->path, strerror(errno)));
    for (int i = 0; i < n; i++) {
        char path[HOST_PATH_SIZE];
        int length = snprintf(path, sizeof path, "%s/%s", folder->path, found[i]->d_name);
        if (s == MT_OK && length < (int)sizeof path)
            s = add_manifest(path);
        free(found[i]);
    }
    free(found);
    return s;
}

mt_status registry_init(const char *const *dirs, int32_t n_dirs)
{
    mt_status s =
        discover_folders(&registry.arena, dirs, n_dirs, &registry.folders, &registry.n_folders);
    for (int32_t i = 0; s == MT_OK && i < registry.n_folders; i++)
        s = search_folder(&registry.folders[i]);
    if (s != MT_OK)
        registry_finish();
    return s;
}

void registry_finish(void)
{
    for (int32_t i = registry.n - 1; i >= 0; i--) {
        const mt_plugin *p = registry.entries[i]->record.plugin;
        if (p && p->deinit)
            p->deinit();
    }
    arena_finish(&registry.arena);
    memset(&registry, 0, sizeof registry);
}

int32_t registry_count(void)
{
    return registry.n;
}

const plugin_record *registry_get(int32_t index)
{
    return index >= 0 && index < registry.n ? &registry.entries[index]->record : NULL;
}

/* ---- loading -------------------------------------------------------------------------------- */

/* A plugin is tried once; a refusal stays. */
static mt_status load(plugin_entry *e)
{
    if (e->record.plugin)
        return MT_OK;
    if (e->refused != MT_OK)
        return status_set(e->refused, "%s", e->refusal);
    mt_status s = handshake(&e->record, &host);
    if (s == MT_OK) {
        log_write(MT_LOG_DEBUG, "plugin '%s' %s loaded from %s", e->record.name, e->record.version,
                  e->record.path);
        return MT_OK;
    }
    e->refusal = arena_strdup(&registry.arena, status_text());
    e->refused = e->refusal ? s : MT_OK;
    return s;
}

const void *registry_interface(const plugin_record *r, const char *interface_id)
{
    return r && r->plugin ? r->plugin->get_interface(interface_id) : NULL;
}

static mt_status not_found(plugin_kind kind, const char *what)
{
    char list[1024] = "", near[128] = "";
    int32_t n = 0;
    for (int32_t i = 0; i < registry.n; i++)
        for (int32_t k = 0; registry.entries[i]->record.provides[k]; k++)
            n += registry.entries[i]->record.kind == kind;
    const char **all = calloc(n > 0 ? (size_t)n : 1, sizeof *all);
    if (!all)
        return status_nomem("a list of plugins", (size_t)n * sizeof *all);
    n = 0;
    for (int32_t i = 0; i < registry.n; i++) {
        const plugin_record *r = &registry.entries[i]->record;
        for (int32_t k = 0; r->kind == kind && r->provides[k]; k++) {
            if (find_provider(kind, r->provides[k]) != registry.entries[i])
                continue; /* an earlier plugin has said it */
            text_append(list, sizeof list, "%s%s", n ? ", " : "", r->provides[k]);
            all[n++] = r->provides[k];
        }
    }
    int64_t best = text_nearest(what, all, n);
    if (best >= 0)
        snprintf(near, sizeof near, "; did you mean '%s'?", all[best]);
    free(all);
    if (n == 0) {
        for (int32_t i = 0; i < registry.n_folders; i++)
            text_append(list, sizeof list, "%s%s", i ? ", " : "", registry.folders[i].path);
        return status_set(MT_ERR_NOT_FOUND,
                          "no plugin provides %s '%s': there is none of this kind in: %s; name "
                          "more folders with --plugin-dir or in MEGATRAIN_PLUGIN_PATH",
                          plugin_kind_name(kind), what, *list ? list : "(no folder)");
    }
    /* A device is looked for just to see whether it is there. */
    const char *more = kind == PLUGIN_BACKEND ? ""
                                              : " (those of other plugins with --plugin-dir DIR or "
                                                "MEGATRAIN_PLUGIN_PATH)";
    return status_set(MT_ERR_NOT_FOUND, "no plugin provides %s '%s'; there is: %s%s%s",
                      plugin_kind_name(kind), what, list, more, near);
}

mt_status registry_find(plugin_kind kind, const char *what, const char *interface_id,
                        const void **ret_interface, const plugin_record **ret_record)
{
    plugin_entry *e = find_provider(kind, what);
    if (!e)
        return not_found(kind, what);
    mt_status s = load(e);
    if (s != MT_OK)
        return s;
    const void *table = registry_interface(&e->record, interface_id);
    if (!table)
        return status_set(MT_ERR_UNSUPPORTED, "plugin '%s' (%s) does not offer %s", e->record.name,
                          e->record.path, interface_id);
    if (ret_interface)
        *ret_interface = table;
    if (ret_record)
        *ret_record = &e->record;
    return MT_OK;
}

mt_status registry_load_file(const char *path, const plugin_record **ret_record)
{
    char file[HOST_PATH_SIZE], manifest[HOST_PATH_SIZE];
    plugin_record r;
    size_t n = strlen(path);
    if (n < 4 || strcmp(path + n - 3, ".so") != 0 || n + 5 > sizeof manifest)
        return status_set(MT_ERR_INVALID, "plugin %s: expected a shared object NAME.so", path);
    /* Of a name without a folder dlopen looks in those of the system's libraries. */
    if (!strchr(path, '/')) {
        n = (size_t)snprintf(file, sizeof file, "./%s", path);
        path = file;
    }
    plugin_entry *e = NULL;
    for (int32_t i = 0; i < registry.n && !e; i++)
        if (strcmp(registry.entries[i]->record.path, path) == 0)
            e = registry.entries[i];
    if (!e) {
        snprintf(manifest, sizeof manifest, "%.*s.yaml", (int)(n - 3), path);
        mt_status s = discover_manifest(&registry.arena, manifest, &r);
        if (s != MT_OK)
            return status_prefix(s, "plugin %s", path);
        e = add_entry(&r);
        if (!e)
            return MT_ERR_NOMEM;
    }
    mt_status s = load(e);
    if (s == MT_OK)
        *ret_record = &e->record;
    return s;
}
