/* SPDX-License-Identifier: Apache-2.0
 *
 * docs/manifests.md has a row for every key that anything reads: the run manifest's schema with its
 * defaults and choices, and what the plugins of the tree ask for when they are given nothing.
 * Usage: PROGRAM docs/manifests.md PLUGIN_FOLDER
 */
#include "../../core/base/status.h"
#include "../../core/manifest/run.h"
#include "../../core/template/model.h"
#include "../check.h"

#include <dlfcn.h>
#include <megatrain/loader.h>
#include <megatrain/optim.h>
#include <megatrain/plugin.h>

static char *docs;
static const char *plugin_folder;

/* Copies the table row of `key` under the heading "## HEADING"; false when there is none. */
static bool find_row(const char *heading, const char *key, char row[1024])
{
    char text[128];
    snprintf(text, sizeof text, "\n## %s\n", heading);
    const char *from = strstr(docs, text);
    if (!from)
        return false;
    from += strlen(text);
    const char *end = strstr(from, "\n## ");
    snprintf(text, sizeof text, "\n| `%s` |", key);
    const char *at = strstr(from, text);
    if (!at || (end && at > end))
        return false;
    snprintf(row, 1024, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
    return true;
}

/* ---- the schema ------------------------------------------------------------------------------ */

static const char *heading_of(const run_key *k)
{
    return *k->section ? k->section : "Top level";
}

/* "| `key` | type | default | ...": the third cell holds the default, in backticks. */
static bool row_has_default(const char *row, const char *fallback)
{
    char text[160];
    const char *cell = row;
    for (int i = 0; i < 2 && cell; i++)
        cell = strchr(cell + 1, '|');
    const char *end = cell ? strchr(cell + 1, '|') : NULL;
    snprintf(text, sizeof text, "`%s`", fallback);
    const char *at = cell ? strstr(cell, text) : NULL;
    return at && end && at < end;
}

static void schema_is_documented(void)
{
    char row[1024];
    int32_t n;
    const run_key *keys = run_schema(&n);
    CHECK(n > 30, "%d keys", n);
    for (int32_t i = 0; i < n; i++) {
        const run_key *k = &keys[i];
        bool found = find_row(heading_of(k), k->name, row);
        CHECK(found, "section '%s' lacks key '%s'", heading_of(k), k->name);
        if (!found)
            continue;
        if (k->fallback)
            CHECK(row_has_default(row, k->fallback), "%s.%s: the default is '%s', documented: %s",
                  k->section, k->name, k->fallback, row);
        for (int32_t c = 0; k->choices && k->choices[c]; c++)
            CHECK(strstr(row, k->choices[c]), "%s.%s: choice '%s' is missing in: %s", k->section,
                  k->name, k->choices[c], row);
    }
}

static bool in_schema(const char *heading, const char *key, int length)
{
    int32_t n;
    const run_key *keys = run_schema(&n);
    for (int32_t i = 0; i < n; i++)
        if (strcmp(heading_of(&keys[i]), heading) == 0 && (int)strlen(keys[i].name) == length &&
            strncmp(keys[i].name, key, (size_t)length) == 0)
            return true;
    return false;
}

static void nothing_else_is_documented(void)
{
    static const char *const headings[] = { "Top level", "train", "memory", "log", "checkpoint" };
    for (size_t h = 0; h < sizeof headings / sizeof *headings; h++) {
        char text[128];
        snprintf(text, sizeof text, "\n## %s\n", headings[h]);
        const char *at = strstr(docs, text);
        CHECK(at, "no section '%s'", headings[h]);
        if (!at)
            continue;
        const char *end = strstr(at + 1, "\n## ");
        while ((at = strstr(at + 1, "\n| `")) && (!end || at < end)) {
            const char *key = at + strlen("\n| `");
            int length = (int)strcspn(key, "`");
            CHECK(in_schema(headings[h], key, length),
                  "section '%s' has '%.*s', which no one reads", headings[h], length, key);
        }
    }
}

/* ---- plugins --------------------------------------------------------------------------------- */

enum { MAX_ASKED = 64 };
static struct {
    char key[MAX_ASKED][64];
    int n;
} asked;

/* Keys of a map below are documented with the map. */
static void ask(const char *key)
{
    if (strchr(key, '.'))
        return;
    for (int i = 0; i < asked.n; i++)
        if (strcmp(asked.key[i], key) == 0)
            return;
    if (asked.n < MAX_ASKED)
        snprintf(asked.key[asked.n++], sizeof asked.key[0], "%s", key);
}

/* An empty section that remembers what it was asked for; it has a model type where one is set. */
static const char *spy_type;

static bool spy_has(const mt_config *c, const char *key)
{
    (void)c;
    ask(key);
    return spy_type && strcmp(key, "model_type") == 0;
}

static bool spy_is_null(const mt_config *c, const char *key)
{
    (void)c;
    return ask(key), false;
}

static mt_status spy_int(const mt_config *c, const char *key, int64_t *ret)
{
    (void)c, (void)ret;
    return ask(key), MT_ERR_NOT_FOUND;
}

static mt_status spy_float(const mt_config *c, const char *key, double *ret)
{
    (void)c, (void)ret;
    return ask(key), MT_ERR_NOT_FOUND;
}

static mt_status spy_bool(const mt_config *c, const char *key, bool *ret)
{
    (void)c, (void)ret;
    return ask(key), MT_ERR_NOT_FOUND;
}

static mt_status spy_string(const mt_config *c, const char *key, const char **ret)
{
    (void)c;
    ask(key);
    if (!spy_type || strcmp(key, "model_type") != 0)
        return MT_ERR_NOT_FOUND;
    *ret = spy_type;
    return MT_OK;
}

static int64_t spy_length(const mt_config *c, const char *key)
{
    (void)c;
    return ask(key), 0;
}

static mt_status spy_reject(const mt_config *c, const char *key, const char *fmt, ...)
{
    (void)c, (void)fmt;
    return ask(key), MT_ERR_INVALID;
}

static const mt_config spy = { sizeof(mt_config), spy_has,    spy_int,    spy_float,  spy_bool,
                               spy_string,        spy_length, spy_reject, spy_is_null };

static void ignore_error(const char *fmt, ...)
{
    (void)fmt;
}

static void ignore_log(mt_log_level level, const char *fmt, ...)
{
    (void)level, (void)fmt;
}

static const mt_host host = { sizeof(mt_host), MT_ABI_MAJOR, MT_ABI_MINOR,
                              ignore_error,    ignore_log,   NULL };

static const void *load(const char *name, const char *interface)
{
    union {
        void *object;
        const mt_plugin *(*function)(uint32_t, uint32_t);
    } entry = { NULL };
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.so", plugin_folder, name);
    void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (so)
        entry.object = dlsym(so, MT_PLUGIN_ENTRY);
    const mt_plugin *p = entry.object ? entry.function(MT_ABI_MAJOR, MT_ABI_MINOR) : NULL;
    bool good = p && p->init(&host) == MT_OK;
    CHECK(good, "%s cannot be loaded: %s", path, so ? "" : dlerror());
    asked.n = 0;
    return good ? p->get_interface(interface) : NULL;
}

static void check_asked(const char *heading, int at_least)
{
    char row[1024];
    CHECK(asked.n >= at_least, "asked for %d keys only", asked.n);
    for (int i = 0; i < asked.n; i++)
        CHECK(find_row(heading, asked.key[i], row), "section '%s' lacks key '%s'", heading,
              asked.key[i]);
}

static void adamw_is_documented(void)
{
    const mt_optim *o = load("adamw", MT_OPTIM_INTERFACE);
    void *optim = NULL;
    CHECK(o && o->create(&spy, &optim) == MT_OK, "adamw with no key at all");
    if (o)
        o->destroy(optim);
    check_asked("optimizer", 4);
}

static void data_is_documented(const char *plugin, int at_least)
{
    const mt_data *d = load(plugin, MT_DATA_INTERFACE);
    void *stream = NULL;
    const mt_data_request request = {
        .struct_size = sizeof request, .config = &spy, .max_seq_len = 16, .world = 1
    };
    CHECK(d && d->open(&request, &stream) != MT_OK, "no files to open");
    check_asked("data", at_least);
}

static void text_is_documented(void)
{
    data_is_documented("text", 4);
}

static void documents_is_documented(void)
{
    data_is_documented("documents", 15);
}

/* Every type of a family, which differ in what they ask for, with no other key at all. */
static void architectures_are_documented(void)
{
    static const char *const families[] = { "deepseek", "gemma",   "gpt_oss",
                                            "llama",    "mistral", "qwen" };
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        char heading[64];
        const mt_arch *a = load(families[f], MT_ARCH_INTERFACE);
        for (uint32_t t = 0; a && t < a->n_model_types; t++) {
            model *m = NULL;
            spy_type = a->model_types[t];
            CHECK(model_create(a, &spy, &m) == MT_OK, "%s: %s", spy_type, status_text());
            model_destroy(m);
        }
        spy_type = NULL;
        snprintf(heading, sizeof heading, "Hyper-parameters of %s", families[f]);
        check_asked(heading, 14);
    }
}

int main(int argc, char **argv)
{
    enum { MOST = 1 << 20 };
    FILE *f = argc == 3 ? fopen(argv[1], "rb") : NULL;
    docs = calloc(1, MOST + 1);
    if (!f || !docs || fread(docs, 1, MOST, f) == 0) {
        fprintf(stderr, "usage: %s docs/manifests.md PLUGIN_FOLDER\n", argv[0]);
        return 2;
    }
    fclose(f);
    plugin_folder = argv[2];
    RUN(schema_is_documented);
    RUN(nothing_else_is_documented);
    RUN(adamw_is_documented);
    RUN(text_is_documented);
    RUN(documents_is_documented);
    RUN(architectures_are_documented);
    free(docs);
    return check_done();
}
