/* SPDX-License-Identifier: Apache-2.0
 *
 * Where plugins are looked for, whom their files may belong to, and what their manifests say.
 * Nothing here loads code.
 */
#include "../../core/base/log.h"
#include "../../core/base/status.h"
#include "../../core/manifest/node.h"
#include "host.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- folders -------------------------------------------------------------------------------- */

typedef struct folder_list {
    arena *a;
    plugin_folder *items;
    int32_t n, capacity;
} folder_list;

static mt_status add_folder(folder_list *l, const char *path, bool explicitly)
{
    char *real = realpath(path, NULL);
    mt_status s = MT_OK;
    if (!real)
        return explicitly
                   ? status_set(MT_ERR_NOT_FOUND, "plugin folder %s: %s", path, strerror(errno))
                   : MT_OK;
    for (int32_t i = 0; i < l->n; i++)
        if (strcmp(l->items[i].path, real) == 0)
            goto out;
    if (l->n == l->capacity) {
        int32_t capacity = l->capacity ? 2 * l->capacity : 8;
        plugin_folder *items = arena_array(l->a, (size_t)capacity, sizeof *items);
        if (!items) {
            s = MT_ERR_NOMEM;
            goto out;
        }
        if (l->n)
            memcpy(items, l->items, (size_t)l->n * sizeof *items);
        l->items = items;
        l->capacity = capacity;
    }
    const char *copy = arena_strdup(l->a, real);
    if (copy)
        l->items[l->n++] = (plugin_folder){ copy, explicitly };
    else
        s = MT_ERR_NOMEM;
out:
    free(real);
    return s;
}

/* Entries of MEGATRAIN_PLUGIN_PATH. The working directory, in whatever guise, is never searched. */
static mt_status add_path_variable(folder_list *l)
{
    static const char variable[] = "MEGATRAIN_PLUGIN_PATH";
    const char *value = getenv(variable);
    if (!value || !*value)
        return MT_OK;
    if (getauxval(AT_SECURE)) {
        log_write(MT_LOG_WARNING, "%s is ignored: the process runs with raised rights", variable);
        return MT_OK;
    }
    while (true) {
        size_t n = strcspn(value, ":");
        char path[HOST_PATH_SIZE];
        if (n == 0 || *value != '/' || n >= sizeof path) {
            log_write(MT_LOG_WARNING, "%s: entry '%.*s' is ignored: expected an absolute path",
                      variable, (int)n, value);
        } else {
            memcpy(path, value, n);
            path[n] = '\0';
            mt_status s = add_folder(l, path, false);
            if (s != MT_OK)
                return s;
        }
        if (!value[n])
            return MT_OK;
        value += n + 1;
    }
}

static mt_status add_user_folder(folder_list *l)
{
    char path[HOST_PATH_SIZE];
    const char *data = secure_getenv("XDG_DATA_HOME"), *home = secure_getenv("HOME");
    int n = 0;
    if (data && *data == '/')
        n = snprintf(path, sizeof path, "%s/megatrain/plugins", data);
    else if (home && *home == '/')
        n = snprintf(path, sizeof path, "%s/.local/share/megatrain/plugins", home);
    return n > 0 && n < (int)sizeof path ? add_folder(l, path, false) : MT_OK;
}

/* The plugins that came with this program: beside it in a build tree, in the library folder of the
 * same prefix (which may have been moved), or where it was configured to be installed. */
static mt_status add_installed_folders(folder_list *l)
{
    static const char *const below[] = { "plugins", "../" MT_LIBDIR "/megatrain/plugins" };
    char program[HOST_PATH_SIZE], path[2 * HOST_PATH_SIZE];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    mt_status s = MT_OK;
    if (n > 0) {
        program[n] = '\0';
        char *slash = strrchr(program, '/');
        if (slash)
            *slash = '\0';
        for (size_t i = 0; s == MT_OK && i < sizeof below / sizeof *below; i++) {
            snprintf(path, sizeof path, "%s/%s", program, below[i]);
            s = add_folder(l, path, false);
        }
    }
    return s == MT_OK ? add_folder(l, MT_PLUGINDIR, false) : s;
}

mt_status discover_folders(arena *a, const char *const *dirs, int32_t n_dirs, plugin_folder **ret,
                           int32_t *ret_n)
{
    folder_list l = { .a = a };
    mt_status s = MT_OK;
    for (int32_t i = 0; s == MT_OK && i < n_dirs; i++)
        s = add_folder(&l, dirs[i], true);
    if (s == MT_OK)
        s = add_path_variable(&l);
    if (s == MT_OK)
        s = add_user_folder(&l);
    if (s == MT_OK)
        s = add_installed_folders(&l);
    if (s != MT_OK)
        return s;
    *ret = l.items;
    *ret_n = l.n;
    return MT_OK;
}

/* ---- ownership ------------------------------------------------------------------------------ */

static mt_status check_reach(const char *what, const char *path, const struct stat *st)
{
    if (st->st_uid != 0 && st->st_uid != geteuid())
        return status_set(MT_ERR_UNSUPPORTED,
                          "%s %s belongs to user %u; expected root or the present user (%u)", what,
                          path, (unsigned)st->st_uid, (unsigned)geteuid());
    if (st->st_mode & (S_IWGRP | S_IWOTH))
        return status_set(MT_ERR_UNSUPPORTED,
                          "%s %s is writable by %s (mode %03o); make it safe with: chmod go-w %s",
                          what, path, st->st_mode & S_IWOTH ? "everyone" : "its group",
                          (unsigned)(st->st_mode & 0777), path);
    return MT_OK;
}

mt_status discover_check_folder(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return status_set(MT_ERR_IO, "plugin folder %s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return status_set(MT_ERR_INVALID, "plugin folder %s is not a folder", path);
    return check_reach("plugin folder", path, &st);
}

static mt_status check_folder_of(const char *path)
{
    char folder[HOST_PATH_SIZE];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof folder)
        return status_set(MT_ERR_INVALID, "plugin %s: the path is too long", path);
    memcpy(folder, path, n);
    folder[n] = '\0';
    return discover_check_folder(!slash ? "." : n ? folder : "/");
}

mt_status discover_check_owner(const char *path)
{
    struct stat st;
    char *real = realpath(path, NULL);
    if (!real)
        return status_set(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO, "plugin %s: %s", path,
                          strerror(errno));
    /* A link can be replaced where it lies, the file where it leads to. */
    mt_status s = check_folder_of(path);
    if (s == MT_OK)
        s = check_folder_of(real);
    if (s == MT_OK && stat(real, &st) != 0)
        s = status_set(MT_ERR_IO, "plugin %s: %s", real, strerror(errno));
    else if (s == MT_OK && !S_ISREG(st.st_mode))
        s = status_set(MT_ERR_UNSUPPORTED, "plugin %s is not a regular file", real);
    else if (s == MT_OK)
        s = check_reach("plugin", real, &st);
    free(real);
    return s;
}

/* ---- manifests ------------------------------------------------------------------------------ */

static mt_status read_text(arena *a, const mt_config *c, const char *key, const char **ret)
{
    const char *text;
    mt_status s = c->get_string(c, key, &text);
    if (s != MT_OK)
        return s;
    if (!*text)
        return c->reject(c, key, "is empty");
    *ret = arena_strdup(a, text);
    return *ret ? MT_OK : MT_ERR_NOMEM;
}

static mt_status read_kind(const mt_config *c, plugin_kind *ret)
{
    const char *kind;
    mt_status s = c->get_string(c, "kind", &kind);
    if (s != MT_OK)
        return s;
    for (int32_t i = 0; i < PLUGIN_KINDS; i++) {
        if (strcmp(plugin_kind_name((plugin_kind)i), kind) == 0) {
            *ret = (plugin_kind)i;
            return MT_OK;
        }
    }
    return c->reject(c, "kind", "is \"%s\"; expected arch, optim, loader or backend", kind);
}

static mt_status read_abi(const mt_config *c, plugin_record *ret)
{
    const char *abi;
    char end;
    unsigned major, minor;
    mt_status s = c->get_string(c, "abi", &abi);
    if (s != MT_OK)
        return s;
    if (sscanf(abi, "%5u.%5u%c", &major, &minor, &end) != 2)
        return c->reject(c, "abi", "is \"%s\"; expected MAJOR.MINOR such as \"%d.%d\"", abi,
                         MT_ABI_MAJOR, MT_ABI_MINOR);
    ret->abi_major = major;
    ret->abi_minor = minor;
    return MT_OK;
}

static mt_status read_provides(arena *a, const mt_config *c, plugin_record *ret)
{
    int64_t n = c->length(c, "provides");
    if (n == 0)
        return c->reject(c, "provides", "must be a list of at least one name");
    const char **list = arena_array(a, (size_t)n + 1, sizeof *list);
    if (!list)
        return MT_ERR_NOMEM;
    for (int64_t i = 0; i < n; i++) {
        char key[32];
        snprintf(key, sizeof key, "provides.%lld", (long long)i);
        mt_status s = read_text(a, c, key, &list[i]);
        if (s != MT_OK)
            return s;
    }
    ret->provides = list;
    return MT_OK;
}

/* Read by `megatrain plugins check`. */
static const char *const tool_sections[] = { "check", NULL };

mt_status discover_manifest(arena *a, const char *manifest_path, plugin_record *ret)
{
    config *doc = NULL;
    plugin_record r = { 0 };
    mt_status s = config_read_yaml(manifest_path, &doc);
    if (s != MT_OK)
        return s;
    const mt_config *c = config_section(doc, "");
    s = c ? read_text(a, c, "name", &r.name) : MT_ERR_NOMEM;
    if (s == MT_OK)
        s = read_text(a, c, "version", &r.version);
    if (s == MT_OK)
        s = read_text(a, c, "licence", &r.licence);
    if (s == MT_OK && c->has(c, "description"))
        s = read_text(a, c, "description", &r.description);
    if (s == MT_OK)
        s = read_kind(c, &r.kind);
    if (s == MT_OK)
        s = read_abi(c, &r);
    if (s == MT_OK)
        s = read_provides(a, c, &r);
    if (s == MT_OK && c->has(c, "check") && r.kind != PLUGIN_ARCH && r.kind != PLUGIN_OPTIM)
        s = c->reject(c, "check", "is for architectures and optimizers; this plugin is of kind %s",
                      plugin_kind_name(r.kind));
    if (s == MT_OK)
        s = config_check_unused_but(doc, "", tool_sections);
    config_destroy(doc);
    if (s != MT_OK)
        return s;
    if (!r.description)
        r.description = "";
    size_t stem = strlen(manifest_path) - strlen(".yaml");
    r.manifest_path = arena_strdup(a, manifest_path);
    r.path = arena_printf(a, "%.*s.so", (int)stem, manifest_path);
    if (!r.manifest_path || !r.path)
        return MT_ERR_NOMEM;
    if (access(r.path, F_OK) != 0)
        return status_set(MT_ERR_NOT_FOUND, "%s: there is no %s beside this manifest",
                          manifest_path, strrchr(r.path, '/') ? strrchr(r.path, '/') + 1 : r.path);
    *ret = r;
    return MT_OK;
}
