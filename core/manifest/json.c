/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON in by jansson, out by hand: doubles are written as the shortest text that reads back as the
 * same number, which jansson does not offer. JSON nodes have no line and column.
 */
#include "../base/status.h"
#include "node.h"

#include <errno.h>
#include <math.h>
#include <megatrain/json.h>
#include <stdio.h>
#include <stdlib.h>

static mt_status convert(config *c, const json_t *from, node_mark mark, int32_t depth, node **ret);

static mt_status convert_map(config *c, const json_t *from, node_mark mark, int32_t depth, node *n)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)from, key, value)
    {
        node *below = NULL;
        const char *copy = arena_strdup(&c->arena, key);
        mt_status s = copy ? convert(c, value, mark, depth + 1, &below) : MT_ERR_NOMEM;
        if (s != MT_OK)
            return s;
        if (!node_append(c, n, copy, mark, below))
            return MT_ERR_NOMEM;
    }
    return MT_OK;
}

static mt_status convert_list(config *c, const json_t *from, node_mark mark, int32_t depth, node *n)
{
    for (size_t i = 0; i < json_array_size(from); i++) {
        node *below = NULL;
        mt_status s = convert(c, json_array_get(from, i), mark, depth + 1, &below);
        if (s != MT_OK)
            return s;
        if (!node_append(c, n, NULL, mark, below))
            return MT_ERR_NOMEM;
    }
    return MT_OK;
}

static mt_status convert_scalar(config *c, const json_t *from, node *n)
{
    char text[64];
    switch (json_typeof(from)) {
    case JSON_STRING:
        n->kind = NODE_STRING;
        n->plain = false;
        n->text = arena_strdup(&c->arena, json_string_value(from));
        break;
    case JSON_INTEGER:
        n->kind = NODE_INT;
        n->integer = json_integer_value(from);
        n->number = (double)n->integer;
        n->text = arena_printf(&c->arena, "%lld", (long long)n->integer);
        break;
    case JSON_REAL:
        n->kind = NODE_FLOAT;
        n->number = json_real_value(from);
        n->text = arena_strdup(&c->arena, node_format_float(n->number, text, sizeof text));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        n->kind = NODE_BOOL;
        n->boolean = json_is_true(from);
        n->text = n->boolean ? "true" : "false";
        break;
    default:
        n->text = "null";
    }
    return n->text ? MT_OK : MT_ERR_NOMEM;
}

static mt_status convert(config *c, const json_t *from, node_mark mark, int32_t depth, node **ret)
{
    if (depth > NODE_MAX_DEPTH)
        return status_set(MT_ERR_FORMAT, "%s: nested more than %d deep", mark.label,
                          NODE_MAX_DEPTH);
    node *n = node_create(c, NODE_NULL, mark);
    if (!n)
        return MT_ERR_NOMEM;
    n->plain = true;
    mt_status s;
    if (json_is_object(from)) {
        n->kind = NODE_MAP;
        s = convert_map(c, from, mark, depth, n);
    } else if (json_is_array(from)) {
        n->kind = NODE_LIST;
        s = convert_list(c, from, mark, depth, n);
    } else {
        s = convert_scalar(c, from, n);
    }
    if (s == MT_OK)
        *ret = n;
    return s;
}

mt_status config_read_json(const char *path, config **ret)
{
    mt_status s;
    char *text = NULL;
    size_t n = 0;
    node_mark mark;
    json_error_t error;
    json_t *json = NULL;
    config *c = config_new(path, &mark);
    if (!c)
        return MT_ERR_NOMEM;
    s = config_read_file(path, &text, &n);
    if (s != MT_OK)
        goto out;
    json = mt_json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    if (!json) {
        s = status_set(MT_ERR_FORMAT, "%s:%d:%d: %s", path, error.line, error.column, error.text);
        goto out;
    }
    if (!json_is_object(json)) {
        s = status_set(MT_ERR_FORMAT, "%s: expected an object at the top, found something else",
                       path);
        goto out;
    }
    s = convert(c, json, mark, 0, &c->root);
    if (s != MT_OK)
        goto out;
    *ret = c;
    c = NULL;
out:
    json_decref(json);
    free(text);
    config_destroy(c);
    return s;
}

/* ---- writing -------------------------------------------------------------------------------- */

static void write_string(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s; s++) {
        unsigned char ch = (unsigned char)*s;
        if (ch == '"' || ch == '\\')
            fprintf(f, "\\%c", ch);
        else if (ch == '\n')
            fputs("\\n", f);
        else if (ch < 0x20)
            fprintf(f, "\\u%04x", ch);
        else
            fputc(ch, f);
    }
    fputc('"', f);
}

/* `path` names the file, `key` the value for messages. */
static mt_status write_node(FILE *f, const node *n, int32_t indent, const char *path,
                            const char *key)
{
    char text[64];
    bool is_map = n->kind == NODE_MAP;
    switch (n->kind) {
    case NODE_NULL:
        fputs("null", f);
        return MT_OK;
    case NODE_BOOL:
        fputs(n->boolean ? "true" : "false", f);
        return MT_OK;
    case NODE_INT:
        fprintf(f, "%lld", (long long)n->integer);
        return MT_OK;
    case NODE_FLOAT:
        if (!isfinite(n->number))
            return status_set(MT_ERR_INVALID, "%s: '%s' is %s, which JSON cannot hold", path, key,
                              n->text);
        fputs(node_format_float(n->number, text, sizeof text), f);
        return MT_OK;
    case NODE_STRING:
        write_string(f, n->text);
        return MT_OK;
    case NODE_LIST:
    case NODE_MAP:
        break;
    }
    fputc(is_map ? '{' : '[', f);
    for (int64_t i = 0; i < n->n; i++) {
        fprintf(f, "%s\n%*s", i ? "," : "", indent + 2, "");
        if (is_map) {
            write_string(f, n->items[i].key);
            fputs(": ", f);
        }
        mt_status s =
            write_node(f, n->items[i].value, indent + 2, path, is_map ? n->items[i].key : key);
        if (s != MT_OK)
            return s;
    }
    if (n->n)
        fprintf(f, "\n%*s", indent, "");
    fputc(is_map ? '}' : ']', f);
    return MT_OK;
}

mt_status node_write_json(const node *root, const char *path)
{
    FILE *f = fopen(path, "wbe");
    if (!f)
        return status_set(MT_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    mt_status s = write_node(f, root, 0, path, "");
    fputc('\n', f);
    if (s != MT_OK) {
        fclose(f);
        return s;
    }
    return node_close_file(f, path);
}

mt_status config_write_json(const config *c, const char *path)
{
    return node_write_json(c->root, path);
}
