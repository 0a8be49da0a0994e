/* SPDX-License-Identifier: Apache-2.0
 *
 * Is a model still the one that it was? The hyper-parameters that its architecture asks for are
 * compared, key by key; what stands there for people and other programs is not.
 */
#include "../base/status.h"
#include "../base/text.h"
#include "node.h"
#include "run.h"

#include <stdio.h>

enum { NAMED = 8, VALUE_SIZE = 96, TEXT_SIZE = 1400 };

typedef struct comparison {
    char text[TEXT_SIZE]; /* the differences so far */
    int64_t n;
    node_mark first; /* where the first one stands now */
} comparison;

static bool is_same(const node *a, const node *b)
{
    if (!a || !b)
        return a == b;
    bool numbers = (a->kind == NODE_INT || a->kind == NODE_FLOAT) &&
                   (b->kind == NODE_INT || b->kind == NODE_FLOAT);
    if (numbers)
        return a->number == b->number;
    if (a->kind != b->kind)
        return false;
    if (a->kind == NODE_BOOL)
        return a->boolean == b->boolean;
    if (a->kind == NODE_STRING)
        return strcmp(a->text, b->text) == 0;
    bool same = a->n == b->n;
    for (int64_t i = 0; i < a->n && same; i++) {
        const node_item *item = &a->items[i];
        const node_item *other = a->kind == NODE_MAP ? node_find(b, item->key) : &b->items[i];
        same = other && is_same(item->value, other->value);
    }
    return same;
}

static void describe(const node *n, char ret[VALUE_SIZE])
{
    if (!n)
        snprintf(ret, VALUE_SIZE, "not given");
    else if (n->kind == NODE_INT || n->kind == NODE_FLOAT)
        snprintf(ret, VALUE_SIZE, "%.60s", n->text);
    else if (n->kind == NODE_STRING)
        snprintf(ret, VALUE_SIZE, "\"%.60s\"", n->text);
    else if (n->kind == NODE_LIST || n->kind == NODE_MAP)
        snprintf(ret, VALUE_SIZE, "a %s of %lld", n->kind == NODE_LIST ? "list" : "map",
                 (long long)n->n);
    else
        snprintf(ret, VALUE_SIZE, "%s",
                 n->kind == NODE_NULL ? "null"
                 : n->boolean         ? "true"
                                      : "false");
}

static void add(comparison *c, const char *path, const node *now, const node *then, node_mark mark)
{
    char is[VALUE_SIZE], was[VALUE_SIZE];
    if (c->n++ == 0)
        c->first = mark;
    if (c->n > NAMED)
        return;
    describe(now, is);
    describe(then, was);
    text_append(c->text, TEXT_SIZE, "%s'%.80s' is %s, but was %s", c->n > 1 ? "; " : "", path, is,
                was);
}

static void compare_maps(comparison *c, const char *path, const node *now, const node *then);

/* Of lists of one length, which elements differ. */
static void compare_lists(comparison *c, const char *path, const node *now, const node *then)
{
    for (int64_t i = 0; i < now->n; i++) {
        char full[256];
        const node *a = now->items[i].value, *b = then->items[i].value;
        snprintf(full, sizeof full, "%.200s.%lld", path, (long long)i);
        if (!is_same(a, b))
            add(c, full, a, b, a->mark);
    }
}

static void compare(comparison *c, const char *path, const char *key, const node_item *now,
                    const node_item *then, node_mark around)
{
    char full[256];
    const node *a = now ? now->value : NULL, *b = then ? then->value : NULL;
    snprintf(full, sizeof full, "%s%s%s", path, *path ? "." : "", key);
    if (a && b && a->kind == NODE_MAP && b->kind == NODE_MAP)
        compare_maps(c, full, a, b);
    else if (a && b && a->kind == NODE_LIST && b->kind == NODE_LIST && a->n == b->n)
        compare_lists(c, full, a, b);
    else if (!is_same(a, b))
        add(c, full, a, b, now ? now->mark : around);
}

/* Keys that were asked for, whether they are there or not. */
static void compare_maps(comparison *c, const char *path, const node *now, const node *then)
{
    for (int64_t i = 0; i < now->n; i++) {
        const node_item *item = &now->items[i];
        if (item->asked && (*path || !model_source_is_fact(item->key)))
            compare(c, path, item->key, item, node_find(then, item->key), now->mark);
    }
    for (int64_t i = 0; i < now->n_missed; i++) {
        const char *key = now->missed[i];
        if (!node_find(now, key) && (*path || !model_source_is_fact(key)))
            compare(c, path, key, NULL, node_find(then, key), now->mark);
    }
}

mt_status model_source_check_same(const model_source *now, const model_source *then)
{
    comparison c = { 0 };
    char place[512], more[64] = "";
    compare_maps(&c, "", config_node(now->hyper, ""), config_node(then->hyper, ""));
    if (c.n == 0)
        return MT_OK;
    if (c.n > NAMED)
        snprintf(more, sizeof more, "; and %lld more", (long long)(c.n - NAMED));
    return status_set(MT_ERR_INVALID, "%s: %s%s", node_place(c.first, place, sizeof place), c.text,
                      more);
}
