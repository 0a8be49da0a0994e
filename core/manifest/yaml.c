/* SPDX-License-Identifier: Apache-2.0
 *
 * YAML by libyaml's events, in and out. Scalars follow the YAML 1.2 core schema (node_resolve).
 */
#include "../base/status.h"
#include "node.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <yaml.h>

enum { PLACE_SIZE = 512 };

typedef struct anchor {
    struct anchor *next;
    const char *name;
    node *value; /* NULL while it is being read: an alias inside itself */
} anchor;

typedef struct reader {
    config *c;
    const char *label, *text;
    size_t n;
    bool marks;
    yaml_parser_t parser;
    anchor *anchors;
} reader;

static node_mark mark_of(const reader *r, yaml_mark_t m)
{
    if (!r->marks)
        return (node_mark){ r->label, 0, 0 };
    return (node_mark){ r->label, (int32_t)m.line + 1, (int32_t)m.column + 1 };
}

static node_mark mark_of_byte(const reader *r, size_t byte)
{
    yaml_mark_t m = { 0 };
    for (size_t i = 0; i < byte && i < r->n; i++) {
        bool ends = r->text[i] == '\n', begins = (r->text[i] & 0xc0) != 0x80;
        m.line += ends;
        m.column = ends ? 0 : m.column + begins;
    }
    return mark_of(r, m);
}

static mt_status bad(node_mark mark, const char *fmt, ...) MT_PRINTF(2, 3);
static mt_status bad(node_mark mark, const char *fmt, ...)
{
    char place[PLACE_SIZE], why[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    return status_set(MT_ERR_FORMAT, "%s: %s", node_place(mark, place, sizeof place), why);
}

/* Is there a tab in the indentation of the line at `mark`, or right at it? */
static bool tab_at(const reader *r, yaml_mark_t mark)
{
    const char *p = r->text, *end = r->text + r->n;
    for (size_t line = 0; line < mark.line && p < end; p++)
        line += *p == '\n';
    while (p < end && *p == ' ')
        p++;
    return p < end && *p == '\t';
}

/* Did a plain value begin with what has a meaning of its own in YAML, as patterns over files do? */
static bool wants_quotes(const reader *r)
{
    const yaml_parser_t *p = &r->parser;
    size_t at = p->problem_mark.index;
    return (p->context && strstr(p->context, "alias")) || (at < r->n && strchr("@%`", r->text[at]));
}

static mt_status syntax_error(const reader *r)
{
    const yaml_parser_t *p = &r->parser;
    node_mark mark = mark_of(r, p->problem_mark);
    switch (p->error) {
    case YAML_MEMORY_ERROR:
        return status_nomem("the YAML reader", r->n);
    case YAML_READER_ERROR:
        return bad(mark_of_byte(r, p->problem_offset), "%s; text in UTF-8 is expected", p->problem);
    default:
        if (tab_at(r, p->problem_mark))
            return bad(mark, "a tab cannot indent; use spaces");
        if (wants_quotes(r))
            return bad(mark, "%s; a value that begins with one of * @ %% ` wants quotes around it",
                       p->problem);
        if (p->context && r->marks)
            return bad(mark, "%s (%s that starts in line %zu)", p->problem, p->context,
                       p->context_mark.line + 1);
        return bad(mark, "%s", p->problem);
    }
}

static mt_status next_event(reader *r, yaml_event_t *ret)
{
    return yaml_parser_parse(&r->parser, ret) ? MT_OK : syntax_error(r);
}

static node *copy_node(config *c, const node *from, node_mark mark)
{
    node *n = node_create(c, from->kind, mark);
    if (!n)
        return NULL;
    n->plain = from->plain;
    n->text = from->text;
    n->boolean = from->boolean;
    n->integer = from->integer;
    n->number = from->number;
    for (int64_t i = 0; i < from->n; i++) {
        const node_item *item = &from->items[i];
        node *below = copy_node(c, item->value, item->value->mark);
        if (!below || !node_append(c, n, item->key, item->mark, below))
            return NULL;
    }
    return n;
}

/* An alias becomes a copy, so that the tree stays a tree: overrides and the record of what was
 * asked for concern one place only. */
static mt_status read_alias(reader *r, const yaml_event_t *e, node **ret)
{
    const char *name = (const char *)e->data.alias.anchor;
    node_mark mark = mark_of(r, e->start_mark);
    for (const anchor *a = r->anchors; a; a = a->next) {
        if (strcmp(a->name, name) != 0)
            continue;
        if (!a->value)
            return bad(mark, "alias '*%s' stands inside its own anchor", name);
        node *n = copy_node(r->c, a->value, mark);
        if (!n)
            return MT_ERR_NOMEM;
        *ret = n;
        return MT_OK;
    }
    return bad(mark,
               "alias '*%s' has no anchor '&%s' above it; a pattern that begins with * wants "
               "quotes around it",
               name, name);
}

static mt_status new_anchor(reader *r, const yaml_char_t *name, anchor **ret)
{
    *ret = NULL;
    if (!name)
        return MT_OK;
    anchor *a = arena_alloc(&r->c->arena, sizeof *a);
    if (!a || !(a->name = arena_strdup(&r->c->arena, (const char *)name)))
        return MT_ERR_NOMEM;
    a->next = r->anchors;
    r->anchors = a;
    *ret = a;
    return MT_OK;
}

static mt_status read_scalar(reader *r, const yaml_event_t *e, node **ret)
{
    node_mark mark = mark_of(r, e->start_mark);
    const char *tag = (const char *)e->data.scalar.tag;
    bool is_string = tag && strcmp(tag, YAML_STR_TAG) == 0;
    if (tag && !is_string && strcmp(tag, "!") != 0)
        return bad(mark, "tag '%s' is not supported", tag);
    const char *value = (const char *)e->data.scalar.value;
    if (strlen(value) != e->data.scalar.length)
        return bad(mark, "a string cannot contain a NUL character");
    const char *text = arena_strdup(&r->c->arena, value);
    node *n = node_create(r->c, NODE_STRING, mark);
    if (!n || !text)
        return MT_ERR_NOMEM;
    n->text = text;
    if (e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE && !tag)
        node_resolve(n, text);
    *ret = n;
    return MT_OK;
}

static mt_status read_node(reader *r, yaml_event_t *e, int32_t depth, node **ret);

/* Every key is compared with those before it. */
enum { MOST_KEYS = 4096 };

static mt_status read_key(reader *r, const yaml_event_t *e, const node *map, const char **ret)
{
    node_mark mark = mark_of(r, e->start_mark);
    node *key = NULL;
    if (e->type != YAML_SCALAR_EVENT)
        return bad(mark, "a key must be a string");
    mt_status s = read_scalar(r, e, &key);
    if (s != MT_OK)
        return s;
    if (key->kind != NODE_STRING)
        return bad(mark, "a key must be a string; put '%s' in quotes", key->text);
    if (key->plain && strcmp(key->text, "<<") == 0)
        return bad(mark, "merge keys ('<<') are not part of YAML 1.2; write the keys out");
    if (map->n >= MOST_KEYS)
        return bad(mark, "more than %d keys in one map; is this a manifest?", MOST_KEYS);
    const node_item *twin = node_find(map, key->text);
    if (twin && r->marks)
        return bad(mark, "key '%s' stands here a second time; it is already in line %d", key->text,
                   twin->mark.line);
    if (twin)
        return bad(mark, "key '%s' stands here twice", key->text);
    *ret = key->text;
    return MT_OK;
}

/* The rest of a list or a map whose start event has been read. */
static mt_status read_items(reader *r, node *parent, int32_t depth)
{
    bool is_map = parent->kind == NODE_MAP;
    yaml_event_type_t end = is_map ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT;
    for (;;) {
        yaml_event_t e;
        node *value = NULL;
        const char *key = NULL;
        mt_status s = next_event(r, &e);
        if (s != MT_OK)
            return s;
        bool done = e.type == end;
        node_mark key_mark = mark_of(r, e.start_mark);
        if (!done && is_map) {
            s = read_key(r, &e, parent, &key);
            yaml_event_delete(&e);
            if (s == MT_OK)
                s = next_event(r, &e);
            if (s != MT_OK)
                return s;
        }
        if (!done)
            s = read_node(r, &e, depth + 1, &value);
        yaml_event_delete(&e);
        if (s != MT_OK || done)
            return s;
        if (!node_append(r->c, parent, key, key_mark, value))
            return MT_ERR_NOMEM;
    }
}

static mt_status read_node(reader *r, yaml_event_t *e, int32_t depth, node **ret)
{
    node_mark mark = mark_of(r, e->start_mark);
    node *n = NULL;
    anchor *a = NULL;
    mt_status s;
    if (depth > NODE_MAX_DEPTH)
        return bad(mark, "nested more than %d deep", NODE_MAX_DEPTH);
    if (e->type == YAML_ALIAS_EVENT)
        return read_alias(r, e, ret);
    if (e->type == YAML_SCALAR_EVENT) {
        s = new_anchor(r, e->data.scalar.anchor, &a);
        if (s == MT_OK)
            s = read_scalar(r, e, &n);
    } else {
        bool is_map = e->type == YAML_MAPPING_START_EVENT;
        const yaml_char_t *tag = is_map ? e->data.mapping_start.tag : e->data.sequence_start.tag;
        if (tag)
            return bad(mark, "tag '%s' is not supported", tag);
        s = new_anchor(r, is_map ? e->data.mapping_start.anchor : e->data.sequence_start.anchor,
                       &a);
        if (s == MT_OK && !(n = node_create(r->c, is_map ? NODE_MAP : NODE_LIST, mark)))
            s = MT_ERR_NOMEM;
        if (s == MT_OK)
            s = read_items(r, n, depth);
    }
    if (s != MT_OK)
        return s;
    if (a)
        a->value = n;
    *ret = n;
    return MT_OK;
}

/* Reads up to the end of the stream; a second document is an error. */
static mt_status read_stream(reader *r, node **ret)
{
    node *root = NULL;
    int32_t documents = 0;
    for (;;) {
        yaml_event_t e;
        mt_status s = next_event(r, &e);
        if (s != MT_OK)
            return s;
        bool done = e.type == YAML_STREAM_END_EVENT;
        if (e.type == YAML_DOCUMENT_START_EVENT && documents++ > 0)
            s = bad(mark_of(r, e.start_mark), "a second document starts here; expected one");
        else if (e.type == YAML_SCALAR_EVENT || e.type == YAML_ALIAS_EVENT ||
                 e.type == YAML_SEQUENCE_START_EVENT || e.type == YAML_MAPPING_START_EVENT)
            s = read_node(r, &e, 0, &root);
        yaml_event_delete(&e);
        if (s != MT_OK)
            return s;
        if (done) {
            *ret = root;
            return MT_OK;
        }
    }
}

mt_status yaml_parse(config *c, const char *text, size_t n, const char *label, bool marks,
                     node **ret)
{
    reader r = { .c = c, .label = label, .text = text, .n = n, .marks = marks };
    if (!yaml_parser_initialize(&r.parser))
        return status_nomem("the YAML reader", sizeof r.parser);
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, n);
    mt_status s = read_stream(&r, ret);
    yaml_parser_delete(&r.parser);
    return s;
}

mt_status config_parse_yaml(const char *text, size_t n, const char *label, config **ret)
{
    node_mark mark;
    config *c = config_new(label, &mark);
    if (!c)
        return MT_ERR_NOMEM;
    mt_status s = yaml_parse(c, text, n, mark.label, true, &c->root);
    if (s == MT_OK && (!c->root || c->root->kind == NODE_NULL)) {
        s = status_set(MT_ERR_FORMAT, "%s: is empty; expected a map of keys", label);
    } else if (s == MT_OK && c->root->kind != NODE_MAP) {
        char found[128];
        s = bad(c->root->mark, "expected a map of keys, found %s",
                node_describe(c->root, found, sizeof found));
    }
    if (s != MT_OK) {
        config_destroy(c);
        return s;
    }
    *ret = c;
    return MT_OK;
}

mt_status config_read_yaml(const char *path, config **ret)
{
    char *text;
    size_t n;
    mt_status s = config_read_file(path, &text, &n);
    if (s != MT_OK)
        return s;
    s = config_parse_yaml(text, n, path, ret);
    free(text);
    return s;
}

/* ---- writing -------------------------------------------------------------------------------- */

static bool emit(yaml_emitter_t *w, yaml_event_t *e, int made)
{
    return made && yaml_emitter_emit(w, e);
}

static bool emit_scalar(yaml_emitter_t *w, const char *text, bool plain)
{
    yaml_event_t e;
    node probe = { 0 };
    node_resolve(&probe, text);
    /* A string that would read back as something else must be quoted. */
    bool quote = !plain && probe.kind != NODE_STRING;
    return emit(w, &e,
                yaml_scalar_event_initialize(
                    &e, NULL, NULL, (const yaml_char_t *)text, (int)strlen(text), 1, 1,
                    quote ? YAML_DOUBLE_QUOTED_SCALAR_STYLE : YAML_ANY_SCALAR_STYLE));
}

static bool emit_node(yaml_emitter_t *w, const node *n)
{
    yaml_event_t e;
    if (n->kind != NODE_LIST && n->kind != NODE_MAP)
        return emit_scalar(w, n->kind == NODE_NULL ? "null" : n->text, n->kind != NODE_STRING);
    bool is_map = n->kind == NODE_MAP;
    bool scalars = true;
    for (int64_t i = 0; i < n->n; i++)
        scalars &= n->items[i].value->kind < NODE_LIST;
    int made =
        is_map ? yaml_mapping_start_event_initialize(&e, NULL, NULL, 1, YAML_BLOCK_MAPPING_STYLE)
               : yaml_sequence_start_event_initialize(&e, NULL, NULL, 1,
                                                      scalars ? YAML_FLOW_SEQUENCE_STYLE
                                                              : YAML_BLOCK_SEQUENCE_STYLE);
    if (!emit(w, &e, made))
        return false;
    for (int64_t i = 0; i < n->n; i++)
        if ((is_map && !emit_scalar(w, n->items[i].key, false)) || !emit_node(w, n->items[i].value))
            return false;
    return emit(w, &e,
                is_map ? yaml_mapping_end_event_initialize(&e)
                       : yaml_sequence_end_event_initialize(&e));
}

mt_status config_write_yaml(const config *c, const char *path)
{
    yaml_emitter_t w;
    yaml_event_t e;
    FILE *f = fopen(path, "wbe");
    if (!f)
        return status_set(MT_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    if (!yaml_emitter_initialize(&w)) {
        fclose(f);
        return status_nomem("the YAML writer", sizeof w);
    }
    yaml_emitter_set_output_file(&w, f);
    yaml_emitter_set_unicode(&w, 1);
    yaml_emitter_set_width(&w, -1);
    bool good = emit(&w, &e, yaml_stream_start_event_initialize(&e, YAML_UTF8_ENCODING)) &&
                emit(&w, &e, yaml_document_start_event_initialize(&e, NULL, NULL, NULL, 1)) &&
                emit_node(&w, c->root) && emit(&w, &e, yaml_document_end_event_initialize(&e, 1)) &&
                emit(&w, &e, yaml_stream_end_event_initialize(&e));
    bool nomem = !good && w.error == YAML_MEMORY_ERROR;
    yaml_emitter_delete(&w);
    mt_status s = node_close_file(f, path);
    if (nomem)
        return status_nomem("the YAML writer", sizeof w);
    if (s == MT_OK && !good)
        return status_set(MT_ERR_IO, "%s: cannot write the YAML text", path);
    return s;
}
