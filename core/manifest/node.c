/* SPDX-License-Identifier: Apache-2.0
 *
 * The tree of a config: nodes, what scalars mean, how nodes are shown in messages; and reading and
 * closing the files that trees come from and go to.
 */
#include "node.h"
#include "../base/status.h"
#include "../base/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PLACE_SIZE = 512 };

config *config_new(const char *label, node_mark *ret_mark)
{
    config *c = calloc(1, sizeof *c);
    if (!c) {
        status_nomem("a config", sizeof *c);
        return NULL;
    }
    const char *copy = arena_strdup(&c->arena, label);
    if (!copy) {
        config_destroy(c);
        return NULL;
    }
    *ret_mark = (node_mark){ copy, 0, 0 };
    return c;
}

void config_destroy(config *c)
{
    if (!c)
        return;
    arena_finish(&c->arena);
    free(c);
}

node *node_create(config *c, node_kind kind, node_mark mark)
{
    char place[PLACE_SIZE];
    if (c->n_nodes >= NODE_MAX_COUNT) {
        status_set(MT_ERR_FORMAT, "%s: more than %d values (do aliases repeat each other?)",
                   node_place(mark, place, sizeof place), NODE_MAX_COUNT);
        return NULL;
    }
    node *n = arena_alloc(&c->arena, sizeof *n);
    if (!n)
        return NULL;
    c->n_nodes++;
    n->kind = kind;
    n->mark = mark;
    return n;
}

bool node_append(config *c, node *parent, const char *key, node_mark key_mark, node *value)
{
    if (parent->n == parent->capacity) {
        int64_t capacity = parent->capacity ? parent->capacity * 2 : 8;
        node_item *items = arena_array(&c->arena, (size_t)capacity, sizeof *items);
        if (!items)
            return false;
        if (parent->n)
            memcpy(items, parent->items, (size_t)parent->n * sizeof *items);
        parent->items = items;
        parent->capacity = capacity;
    }
    parent->items[parent->n++] = (node_item){ key, key_mark, false, value };
    return true;
}

node_item *node_find(const node *map, const char *key)
{
    for (int64_t i = 0; map->kind == NODE_MAP && i < map->n; i++)
        if (strcmp(map->items[i].key, key) == 0)
            return &map->items[i];
    return NULL;
}

bool node_inherit(config *c, node *map, const node *below, const char *const *skip)
{
    for (int64_t i = 0; i < below->n; i++) {
        const node_item *item = &below->items[i];
        bool skipped = node_find(map, item->key) != NULL;
        for (int32_t k = 0; skip[k]; k++)
            skipped |= strcmp(skip[k], item->key) == 0;
        if (!skipped && !node_append(c, map, item->key, item->mark, item->value))
            return false;
    }
    return true;
}

static bool all_digits(const char *s, const char *set)
{
    return *s && s[strspn(s, set)] == '\0';
}

/* [-+]? ( \. [0-9]+ | [0-9]+ ( \. [0-9]* )? ) ( [eE] [-+]? [0-9]+ )? */
static bool looks_like_float(const char *s)
{
    static const char digits[] = "0123456789";
    s += *s == '-' || *s == '+';
    size_t whole = strspn(s, digits), part = 0;
    s += whole;
    if (*s == '.') {
        part = strspn(++s, digits);
        s += part;
    }
    if (!whole && !part)
        return false;
    if (*s == 'e' || *s == 'E') {
        s++;
        s += *s == '-' || *s == '+';
        return all_digits(s, digits);
    }
    return *s == '\0';
}

static bool is_one_of(const char *s, const char *a, const char *b, const char *c)
{
    return strcmp(s, a) == 0 || strcmp(s, b) == 0 || strcmp(s, c) == 0;
}

static bool resolve_integer(node *n, const char *text)
{
    const char *digits = text + (*text == '-' || *text == '+');
    int base = all_digits(digits, "0123456789") ? 10 : 0;
    if (!base && strncmp(text, "0x", 2) == 0 && all_digits(text + 2, "0123456789abcdefABCDEF"))
        base = 16;
    if (!base && strncmp(text, "0o", 2) == 0 && all_digits(text + 2, "01234567"))
        base = 8;
    if (!base)
        return false;
    errno = 0;
    int64_t value = strtoll(base == 8 ? text + 2 : text, NULL, base);
    if (errno) /* beyond 64 bits: a float, which no integer key accepts */
        return false;
    n->kind = NODE_INT;
    n->integer = value;
    n->number = (double)value;
    return true;
}

void node_resolve(node *n, const char *text)
{
    n->text = text;
    n->plain = true;
    const char *unsigned_text = text + (*text == '-' || *text == '+');
    if (*text == '\0' || strcmp(text, "~") == 0 || is_one_of(text, "null", "Null", "NULL")) {
        n->kind = NODE_NULL;
    } else if (is_one_of(text, "true", "True", "TRUE")) {
        n->kind = NODE_BOOL;
        n->boolean = true;
    } else if (is_one_of(text, "false", "False", "FALSE")) {
        n->kind = NODE_BOOL;
    } else if (resolve_integer(n, text)) {
        return;
    } else if (looks_like_float(text)) {
        n->kind = NODE_FLOAT;
        n->number = strtod(text, NULL);
    } else if (is_one_of(unsigned_text, ".inf", ".Inf", ".INF")) {
        n->kind = NODE_FLOAT;
        n->number = *text == '-' ? -HUGE_VAL : HUGE_VAL;
    } else if (is_one_of(text, ".nan", ".NaN", ".NAN")) {
        n->kind = NODE_FLOAT;
        n->number = NAN;
    } else {
        n->kind = NODE_STRING;
    }
}

const char *node_describe(const node *n, char *buffer, size_t size)
{
    switch (n->kind) {
    case NODE_NULL:
        return "null";
    case NODE_BOOL:
        return n->boolean ? "true" : "false";
    case NODE_INT:
    case NODE_FLOAT:
        snprintf(buffer, size, "the number %s", n->text);
        return buffer;
    case NODE_STRING:
        snprintf(buffer, size, "the string \"%.60s\"", n->text);
        return buffer;
    case NODE_LIST:
        return "a list";
    case NODE_MAP:
        return "a map of keys";
    }
    return "nothing";
}

const char *node_format_float(double x, char *buffer, size_t size)
{
    if (isnan(x))
        return ".nan";
    if (isinf(x))
        return x < 0 ? "-.inf" : ".inf";
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(buffer, size, "%.*g", precision, x);
        if (strtod(buffer, NULL) == x)
            break;
    }
    size_t n = strlen(buffer);
    if (!strpbrk(buffer, ".e") && n + 3 <= size)
        memcpy(buffer + n, ".0", 3);
    return buffer;
}

const char *node_place(node_mark mark, char *buffer, size_t size)
{
    if (mark.line == 0)
        snprintf(buffer, size, "%s", mark.label);
    else
        snprintf(buffer, size, "%s:%d:%d", mark.label, mark.line, mark.column);
    return buffer;
}

bool node_integer(const node *n, int64_t *ret)
{
    if (n->kind == NODE_INT) {
        *ret = n->integer;
        return true;
    }
    /* 1e6 is as good as 1000000; both bounds are exact doubles. */
    if (n->kind == NODE_FLOAT && n->number == trunc(n->number) && n->number >= -0x1p63 &&
        n->number < 0x1p63) {
        *ret = (int64_t)n->number;
        return true;
    }
    return false;
}

mt_status config_read_file(const char *path, char **ret, size_t *ret_n)
{
    mt_status s = MT_OK;
    char *text = NULL;
    struct stat st;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return status_set(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO, "%s: cannot open: %s",
                          path, strerror(errno));
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        s = status_set(MT_ERR_IO, "%s: is not a regular file", path);
        goto out;
    }
    if (st.st_size > 64 * 1024 * 1024) {
        s = status_set(MT_ERR_FORMAT, "%s: %lld bytes are too many for a manifest", path,
                       (long long)st.st_size);
        goto out;
    }
    text = malloc((size_t)st.st_size + 1);
    if (!text) {
        s = status_nomem(path, (size_t)st.st_size + 1);
        goto out;
    }
    size_t n = fread(text, 1, (size_t)st.st_size, f);
    if (ferror(f)) {
        s = status_set(MT_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
        goto out;
    }
    text[n] = '\0';
    *ret = text;
    *ret_n = text_drop_mark(text, n);
    text = NULL;
out:
    free(text);
    fclose(f);
    return s;
}

mt_status node_close_file(void *file, const char *path)
{
    FILE *f = file;
    bool bad = fflush(f) != 0 || fsync(fileno(f)) != 0;
    int error = errno;
    bad |= ferror(f) != 0;
    if (fclose(f) != 0 && !bad) {
        bad = true;
        error = errno;
    }
    return bad ? status_set(MT_ERR_IO, "%s: cannot write: %s", path, strerror(error)) : MT_OK;
}
