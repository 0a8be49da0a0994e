/* SPDX-License-Identifier: Apache-2.0
 *
 * Recognising what users name in place of a run manifest or a model.
 */
#include "mistaken.h"

#include "../base/status.h"
#include "../base/text.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_SIZE = 4096 };

static bool ends_in(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

static bool exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static bool holds(const char *folder, const char *name)
{
    char path[PATH_SIZE];
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path &&
           stat(path, &st) == 0;
}

/* The end of a binary file's name, from its last dot on; NULL where `path` is something else. YAML
 * and JSON have no NUL bytes, and all formats of weights have some near their start. */
static const char *binary_kind(const char *path)
{
    char head[64];
    struct stat st;
    FILE *f = stat(path, &st) == 0 && S_ISREG(st.st_mode) ? fopen(path, "rbe") : NULL;
    if (!f)
        return NULL;
    size_t n = fread(head, 1, sizeof head, f);
    fclose(f);
    const char *dot = strrchr(path, '.');
    return !memchr(head, 0, n) ? NULL : dot && !strchr(dot, '/') ? dot : "no ending";
}

/* May it be what was meant by a run manifest, or by a model? */
typedef bool may_mean(const char *folder, const char *name);

static bool is_manifest(const char *folder, const char *name)
{
    (void)folder;
    return ends_in(name, ".yaml") || ends_in(name, ".yml");
}

static bool is_model(const char *folder, const char *name)
{
    char path[PATH_SIZE];
    return is_manifest(folder, name) || ends_in(name, ".json") ||
           (*name != '.' && snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path &&
            is_folder(path));
}

/* What lies beside `path`, where nothing is, may be meant and has a name like it; false: there is
 * none. */
static bool find_alike(const char *path, may_mean *may, char ret[NAME_MAX + 1])
{
    enum { MOST = 256 };
    char folder[PATH_SIZE], *names[MOST];
    const char *slash = strrchr(path, '/');
    int64_t n = 0;
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 1,
             slash ? path : ".");
    DIR *d = opendir(folder);
    for (struct dirent *e; d && n < MOST && (e = readdir(d));)
        if (may(folder, e->d_name) && (names[n] = strdup(e->d_name)))
            n++;
    if (d)
        closedir(d);
    int64_t nearest = text_nearest(slash ? slash + 1 : path, (const char *const *)names, n);
    if (nearest >= 0)
        snprintf(ret, NAME_MAX + 1, "%s", names[nearest]);
    for (int64_t i = 0; i < n; i++)
        free(names[i]);
    return nearest >= 0;
}

/* "ORGANISATION/MODEL" of a name on the hub, or of its address there; NULL for anything else, which
 * what would lie in a folder that is there is taken for. */
static const char *hub_name(const char *path)
{
    static const char address[] = "https://huggingface.co/";
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (strncmp(path, address, sizeof address - 1) == 0)
        path += sizeof address - 1;
    size_t before = strspn(path, letters);
    const char *model = path + before + 1;
    char organisation[PATH_SIZE];
    snprintf(organisation, sizeof organisation, "%.*s", (int)before, path);
    if (before == 0 || path[before] != '/' || *path == '.' || !*model ||
        model[strspn(model, letters)] || ends_in(path, ".yaml") || ends_in(path, ".json") ||
        is_folder(organisation))
        return NULL;
    return path;
}

bool mistaken_home(const char *path)
{
    return path[0] == '~' && (path[1] == '/' || !path[1]);
}

/* What mistaken_name adds, but for names that are alike. */
static const char *not_here(const char *path, char ret[MISTAKEN_TEXT])
{
    const char *name = hub_name(path), *model = name ? strchr(name, '/') + 1 : NULL;
    *ret = '\0';
    if (mistaken_home(path))
        snprintf(ret, MISTAKEN_TEXT, "; only a shell knows what ~ is: write the path out");
    if (name)
        snprintf(ret, MISTAKEN_TEXT,
                 "; models are local folders, nothing here goes to the network: fetch this one by "
                 "`hf download %s --local-dir %s` (or `huggingface-cli download`), and name %s",
                 name, model, model);
    return ret;
}

mt_status mistaken_for_run(const char *path)
{
    char hub[MISTAKEN_TEXT], alike[NAME_MAX + 1];
    const char *slash = strrchr(path, '/');
    const char *kind = binary_kind(path);
    if (kind)
        return status_set(MT_ERR_INVALID,
                          "%s: is a binary file (%s); expected a run manifest, a YAML file", path,
                          kind);
    if (!exists(path) && find_alike(path, is_manifest, alike))
        return status_set(MT_ERR_NOT_FOUND, "%s: there is no such file; did you mean %.*s%s?", path,
                          slash ? (int)(slash - path) + 1 : 0, path, alike);
    if (!exists(path) && *not_here(path, hub))
        return status_set(MT_ERR_NOT_FOUND,
                          "%s: there is no such file; expected a run manifest, a YAML file%s as "
                          "'model:' there",
                          path, hub);
    if (!is_folder(path))
        return MT_OK;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (holds(path, "run.yaml"))
        return status_set(MT_ERR_INVALID, "%s: is a run folder; name its manifest, %.*s/run.yaml",
                          path, (int)n, path);
    if (holds(path, "config.json"))
        return status_set(
            MT_ERR_INVALID,
            "%s: is a model; name it as 'model:' in a run manifest, and that manifest "
            "here",
            path);
    if (holds(path, "adapter_config.json"))
        return mistaken_folder(path);
    return status_set(MT_ERR_INVALID, "%s: is a folder; expected a run manifest, a YAML file",
                      path);
}

mt_status mistaken_for_model(const char *path)
{
    const char *kind = binary_kind(path), *slash = strrchr(path, '/');
    char folder[PATH_SIZE];
    if (!kind)
        return MT_OK;
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    if (holds(folder, "config.json"))
        return status_set(MT_ERR_INVALID, "%s: is one file of a model (%s); name its folder, %s",
                          path, kind, folder);
    return status_set(MT_ERR_UNSUPPORTED,
                      "%s: is a binary file (%s), and models in one file are not read; name a "
                      "Hugging Face folder (with config.json), a checkpoint, or a model manifest",
                      path, kind);
}

mt_status mistaken_folder(const char *path)
{
    if (holds(path, "adapter_config.json"))
        return status_set(
            MT_ERR_UNSUPPORTED,
            "%s: is an adapter such as LoRA's (adapter_config.json); adapters are not "
            "offered: merge it into its base model, and name the merged model's "
            "folder",
            path);
    return status_set(MT_ERR_NOT_FOUND,
                      "%s: no config.json in this folder; expected a Hugging Face model folder or "
                      "a checkpoint",
                      path);
}

const char *mistaken_name(const char *path, char ret[MISTAKEN_TEXT])
{
    char alike[NAME_MAX + 1];
    const char *slash = strrchr(path, '/');
    if (!*not_here(path, ret) && find_alike(path, is_model, alike))
        snprintf(ret, MISTAKEN_TEXT, "; did you mean %.*s%s?", slash ? (int)(slash - path) + 1 : 0,
                 path, alike);
    return ret;
}
