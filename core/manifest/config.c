/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading a config: paths into its tree (node.c), views of sections, overrides, and which keys were
 * asked for.
 */
#include "../base/status.h"
#include "../base/text.h"
#include "node.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PLACE_SIZE = 512, PATH_SIZE = 512, LIST_SIZE = 1024 };

typedef struct view {
    mt_config pub; /* first */
    config *doc;
    const char *path; /* "" for the root */
} view;

/* ---- paths ---------------------------------------------------------------------------------- */

/* Remembers that a map was asked for a key that it does not have. */
static void note_missed(config *c, node *map, const char *key)
{
    for (int64_t i = 0; i < map->n_missed; i++)
        if (strcmp(map->missed[i], key) == 0)
            return;
    int64_t n = map->n_missed;
    if ((n & (n - 1)) == 0) { /* full at every power of two */
        const char **grown = arena_array(&c->arena, n ? (size_t)n * 2 : 1, sizeof *grown);
        if (!grown)
            return; /* only a suggestion is lost */
        if (n)
            memcpy(grown, map->missed, (size_t)n * sizeof *grown);
        map->missed = grown;
    }
    const char *copy = arena_strdup(&c->arena, key);
    if (copy)
        map->missed[map->n_missed++] = copy;
}

/* Cuts the first segment off a dotted path; false at its end or when it is too long. */
static bool next_segment(const char **path, char *segment, size_t size)
{
    if (!**path)
        return false;
    size_t n = strcspn(*path, ".");
    if (n >= size)
        return false;
    memcpy(segment, *path, n);
    segment[n] = '\0';
    *path += n;
    *path += **path == '.';
    return true;
}

static bool list_index(const char *segment, int64_t n, int64_t *ret)
{
    size_t digits = strspn(segment, "0123456789");
    if (digits == 0 || digits > 9 || segment[digits])
        return false;
    *ret = atoll(segment);
    return *ret < n;
}

/* Walks down from `from`. NULL when the path leads nowhere. *ret_around, when not NULL, is the
 * mark of the last thing that exists on the way, a map's key where there is one. */
static node *walk(config *c, node *from, const char *path, bool asking, node_mark *ret_around)
{
    char segment[PATH_SIZE];
    node *n = from;
    node_mark around = from->mark;
    while (n && *path) {
        if (!next_segment(&path, segment, sizeof segment)) {
            n = NULL;
            break;
        }
        node_item *item = NULL;
        int64_t index;
        if (n->kind == NODE_MAP) {
            item = node_find(n, segment);
            if (!item && asking)
                note_missed(c, n, segment);
        } else if (n->kind == NODE_LIST && list_index(segment, n->n, &index)) {
            item = &n->items[index];
        }
        n = item ? item->value : NULL;
        if (item) {
            item->asked |= asking;
            around = item->key ? item->mark : item->value->mark;
        }
    }
    if (ret_around)
        *ret_around = around;
    return n;
}

static void join_path(const char *path, const char *key, char *ret, size_t size)
{
    if (!key || !*key)
        snprintf(ret, size, "%s", path);
    else
        snprintf(ret, size, "%s%s%s", path, *path ? "." : "", key);
}

/* ---- views ---------------------------------------------------------------------------------- */

node *config_node(const mt_config *pub, const char *key)
{
    const view *v = (const view *)pub;
    char path[PATH_SIZE];
    join_path(v->path, key, path, sizeof path);
    return walk(v->doc, v->doc->root, path, true, NULL);
}

node_mark config_mark(const mt_config *pub, const char *key)
{
    const view *v = (const view *)pub;
    char path[PATH_SIZE];
    node_mark around;
    join_path(v->path, key, path, sizeof path);
    node *n = walk(v->doc, v->doc->root, path, false, &around);
    return n ? n->mark : around;
}

mt_status config_wrong(const mt_config *pub, const char *key, const node *n, const char *expected)
{
    const view *v = (const view *)pub;
    char path[PATH_SIZE], place[PLACE_SIZE], found[128];
    join_path(v->path, key, path, sizeof path);
    return status_set(MT_ERR_INVALID, "%s: '%s' must be %s, found %s",
                      node_place(n->mark, place, sizeof place), path, expected,
                      node_describe(n, found, sizeof found));
}

mt_status config_blame(const mt_config *c, const char *key)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", status_text());
    return c->reject(c, key, "cannot be had: %s", text);
}

/* A key beside the missing one at `path` that nobody has asked for and that is like it. */
static const char *key_alike(const view *v, const char *path)
{
    char map[PATH_SIZE];
    const char *dot = strrchr(path, '.'), *key = dot ? dot + 1 : path, *alike = NULL;
    snprintf(map, sizeof map, "%.*s", dot ? (int)(dot - path) : 0, path);
    const node *n = walk(v->doc, v->doc->root, map, false, NULL);
    const char **names = n && n->kind == NODE_MAP ? calloc((size_t)n->n + 1, sizeof *names) : NULL;
    int64_t count = 0;
    for (int64_t i = 0; names && i < n->n; i++)
        if (!n->items[i].asked)
            names[count++] = n->items[i].key;
    int64_t best = names ? text_nearest(key, names, count) : -1;
    if (best >= 0)
        alike = names[best];
    free(names);
    return alike;
}

/* The value at `key`, or NULL with the error text of an absent one. */
static node *present(const mt_config *pub, const char *key)
{
    node *n = config_node(pub, key);
    if (n && n->kind != NODE_NULL)
        return n;
    char path[PATH_SIZE], place[PLACE_SIZE];
    join_path(((const view *)pub)->path, key, path, sizeof path);
    const char *alike = n ? NULL : key_alike((const view *)pub, path);
    status_set(MT_ERR_NOT_FOUND, "%s: key '%s' is %s%s%s%s",
               node_place(config_mark(pub, key), place, sizeof place), path,
               n ? "null, but a value is needed" : "missing", alike ? "; is it meant by '" : "",
               alike ? alike : "", alike ? "'?" : "");
    return NULL;
}

static bool view_has(const mt_config *pub, const char *key)
{
    const node *n = config_node(pub, key);
    return n && n->kind != NODE_NULL;
}

static bool view_is_null(const mt_config *pub, const char *key)
{
    const node *n = config_node(pub, key);
    return n && n->kind == NODE_NULL;
}

static mt_status view_get_int(const mt_config *pub, const char *key, int64_t *ret)
{
    const node *n = present(pub, key);
    if (!n)
        return MT_ERR_NOT_FOUND;
    if (!node_integer(n, ret))
        return config_wrong(pub, key, n, "a whole number of at most 64 bits");
    return MT_OK;
}

static mt_status view_get_float(const mt_config *pub, const char *key, double *ret)
{
    const node *n = present(pub, key);
    if (!n)
        return MT_ERR_NOT_FOUND;
    if (n->kind != NODE_INT && n->kind != NODE_FLOAT)
        return config_wrong(pub, key, n, "a number");
    if (!isfinite(n->number))
        return config_wrong(pub, key, n, "a finite number");
    *ret = n->number;
    return MT_OK;
}

static mt_status view_get_bool(const mt_config *pub, const char *key, bool *ret)
{
    const node *n = present(pub, key);
    if (!n)
        return MT_ERR_NOT_FOUND;
    if (n->kind != NODE_BOOL)
        return config_wrong(pub, key, n, "true or false");
    *ret = n->boolean;
    return MT_OK;
}

static mt_status view_get_string(const mt_config *pub, const char *key, const char **ret)
{
    const node *n = present(pub, key);
    if (!n)
        return MT_ERR_NOT_FOUND;
    if (n->kind != NODE_STRING)
        return config_wrong(pub, key, n,
                            "a string (put it in quotes when it looks like something else)");
    *ret = n->text;
    return MT_OK;
}

static int64_t view_length(const mt_config *pub, const char *key)
{
    const node *n = config_node(pub, key);
    return n && n->kind == NODE_LIST ? n->n : 0;
}

bool config_is_empty_list(const mt_config *pub, const char *key)
{
    const node *n = config_node(pub, key);
    return n && n->kind == NODE_LIST && n->n == 0;
}

static mt_status view_reject(const mt_config *pub, const char *key, const char *fmt, ...)
{
    char why[1024], path[PATH_SIZE], place[PLACE_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    join_path(((const view *)pub)->path, key, path, sizeof path);
    return status_set(MT_ERR_INVALID, "%s: '%s' %s",
                      node_place(config_mark(pub, key), place, sizeof place), path, why);
}

const mt_config *config_section(config *c, const char *path)
{
    view *v = arena_alloc(&c->arena, sizeof *v);
    const char *copy = arena_strdup(&c->arena, path);
    if (!v || !copy)
        return NULL;
    *v = (view){ { sizeof(mt_config), view_has, view_get_int, view_get_float, view_get_bool,
                   view_get_string, view_length, view_reject, view_is_null },
                 c,
                 copy };
    walk(c, c->root, path, true, NULL);
    return &v->pub;
}

const mt_config *config_map(const mt_config *c, const char *key)
{
    const view *v = (const view *)c;
    const node *n = config_node(c, key);
    char path[PATH_SIZE];
    join_path(v->path, key, path, sizeof path);
    return n && n->kind == NODE_MAP ? config_section(v->doc, path) : NULL;
}

mt_status config_bytes(const mt_config *c, const char *key, int64_t *ret)
{
    const char *expected = "a size such as 24GiB, 512MB or a number of bytes";
    const node *n = present(c, key);
    if (!n)
        return MT_ERR_NOT_FOUND;
    if (n->kind == NODE_INT || n->kind == NODE_FLOAT) {
        int64_t bytes;
        if (!node_integer(n, &bytes) || bytes < 0)
            return config_wrong(c, key, n, expected);
        *ret = bytes;
        return MT_OK;
    }
    if (n->kind != NODE_STRING || !text_bytes(n->text, ret))
        return config_wrong(c, key, n, expected);
    return MT_OK;
}

/* ---- keys ----------------------------------------------------------------------------------- */

const char *config_key(const config *c, const char *path, int64_t index)
{
    /* Nothing is changed when not asking; walk has one signature for both. */
    const node *n = walk((config *)c, c->root, path, false, NULL);
    return n && n->kind == NODE_MAP && index >= 0 && index < n->n ? n->items[index].key : NULL;
}

/* A key with its usual abbreviation written out; the key itself where it has none. */
static const char *write_out(const char *key, char ret[PATH_SIZE])
{
    static const char *const shorts[][2] = { { "lr", "learning_rate" }, { "wd", "weight_decay" } };
    for (size_t i = 0; i < sizeof shorts / sizeof *shorts; i++) {
        size_t n = strlen(shorts[i][0]);
        if (strncmp(key, shorts[i][0], n) != 0 || (key[n] && key[n] != '_'))
            continue;
        snprintf(ret, PATH_SIZE, "%s%s", shorts[i][1], key + n);
        return ret;
    }
    return key;
}

static mt_status unknown_key(const node *map, const node_item *item, const char *path)
{
    char place[PLACE_SIZE], full[PATH_SIZE];
    const char *key = item->key, *near = NULL;
    char list[LIST_SIZE] = "";
    const char **known = calloc((size_t)(map->n + map->n_missed), sizeof *known);
    if (known) {
        int64_t n = 0;
        for (int64_t i = 0; i < map->n; i++)
            if (map->items[i].asked)
                known[n++] = map->items[i].key;
        for (int64_t i = 0; i < map->n_missed; i++)
            known[n++] = map->missed[i];
        int64_t best = text_nearest(write_out(key, full), known, n);
        near = best >= 0 ? known[best] : NULL;
        for (int64_t i = 0; i < n; i++)
            text_append(list, sizeof list, "%s%s", i ? ", " : "; known: ", known[i]);
        free(known);
    }
    char where[PATH_SIZE];
    snprintf(where, sizeof where, "%s%s%s", *path ? " in '" : "", path, *path ? "'" : "");
    node_place(item->mark, place, sizeof place);
    if (near)
        return status_set(MT_ERR_INVALID, "%s: unknown key '%s'%s; did you mean '%s'?", place, key,
                          where, near);
    return status_set(MT_ERR_INVALID, "%s: unknown key '%s'%s%s", place, key, where, list);
}

static mt_status check_unused(const node *n, const char *path, const char *const *skip)
{
    for (int64_t i = 0; i < n->n; i++) {
        const node_item *item = &n->items[i];
        char below[PATH_SIZE], index[24];
        bool skipped = false;
        for (int32_t k = 0; item->key && skip && skip[k]; k++)
            skipped |= strcmp(skip[k], item->key) == 0;
        if (skipped)
            continue;
        if (item->key && !item->asked)
            return unknown_key(n, item, path);
        snprintf(index, sizeof index, "%lld", (long long)i);
        join_path(path, item->key ? item->key : index, below, sizeof below);
        mt_status s = check_unused(item->value, below, NULL);
        if (s != MT_OK)
            return s;
    }
    return MT_OK;
}

mt_status config_check_unused_but(config *c, const char *path, const char *const *skip)
{
    const node *n = walk(c, c->root, path, false, NULL);
    return n ? check_unused(n, path, skip) : MT_OK;
}

mt_status config_check_unused(config *c, const char *path)
{
    return config_check_unused_but(c, path, NULL);
}

mt_status config_check_section(const mt_config *c)
{
    const view *v = (const view *)c;
    return config_check_unused(v->doc, v->path);
}

/* ---- overrides ------------------------------------------------------------------------------ */

static mt_status override_at(config *c, const char *label, const char *path, node *value)
{
    node_mark mark = { label, 0, 0 };
    char segment[PATH_SIZE], found[128];
    node *n = c->root;
    for (;;) {
        if (!next_segment(&path, segment, sizeof segment) || !*segment)
            return status_set(MT_ERR_INVALID, "%s: the key has an empty part; expected section.key",
                              label);
        node_item *item = NULL;
        int64_t index;
        if (n->kind == NODE_NULL) { /* `train:` with nothing below it */
            n->kind = NODE_MAP;
            n->plain = false;
        }
        if (n->kind == NODE_MAP) {
            item = node_find(n, segment);
        } else if (n->kind == NODE_LIST && list_index(segment, n->n, &index)) {
            item = &n->items[index];
        } else if (n->kind == NODE_LIST) {
            return status_set(MT_ERR_INVALID, "%s: '%s' is no element of a list of %lld", label,
                              segment, (long long)n->n);
        } else {
            return status_set(MT_ERR_INVALID, "%s: '%s' would be below %s, not below a section",
                              label, segment, node_describe(n, found, sizeof found));
        }
        if (!item) {
            const char *key = arena_strdup(&c->arena, segment);
            node *below = *path ? node_create(c, NODE_MAP, mark) : value;
            if (!key || !below || !node_append(c, n, key, mark, below))
                return MT_ERR_NOMEM;
            item = &n->items[n->n - 1];
        }
        if (!*path) {
            item->value = value;
            item->mark = mark;
            return MT_OK;
        }
        n = item->value;
    }
}

mt_status config_override(config *c, const char *assignment)
{
    const char *equals = strchr(assignment, '=');
    if (!equals || equals == assignment)
        return status_set(MT_ERR_INVALID, "argument '%s': expected key=value", assignment);
    const char *label = arena_printf(&c->arena, "argument '%s'", assignment);
    char *path = arena_printf(&c->arena, "%.*s", (int)(equals - assignment), assignment);
    if (!label || !path)
        return MT_ERR_NOMEM;
    size_t length = strlen(path);
    if (path[length - 1] == '.')
        return status_set(MT_ERR_INVALID, "%s: the key has an empty part; expected section.key",
                          label);
    /* A pattern over files: there is nothing that an alias could stand for. */
    if (equals[1] == '*')
        return config_set_text(c, path, equals + 1, label);
    node *value = NULL;
    mt_status s = yaml_parse(c, equals + 1, strlen(equals + 1), label, false, &value);
    if (s != MT_OK)
        return s;
    if (!value) {
        value = node_create(c, NODE_NULL, (node_mark){ label, 0, 0 });
        if (!value)
            return MT_ERR_NOMEM;
        node_resolve(value, "");
    }
    return override_at(c, label, path, value);
}

mt_status config_set_text(config *c, const char *path, const char *text, const char *label)
{
    label = arena_strdup(&c->arena, label);
    node *value = label ? node_create(c, NODE_STRING, (node_mark){ label, 0, 0 }) : NULL;
    if (!value || !(value->text = arena_strdup(&c->arena, text)))
        return MT_ERR_NOMEM;
    return override_at(c, label, path, value);
}
