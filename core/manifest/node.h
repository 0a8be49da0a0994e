/* SPDX-License-Identifier: Apache-2.0
 *
 * The tree behind a config, shared by its readers and writers. Private to this folder.
 */
#ifndef MT_CORE_NODE_H
#define MT_CORE_NODE_H

#include "../base/arena.h"
#include "config.h"

enum {
    NODE_MAX_DEPTH = 100,
    NODE_MAX_COUNT = 1000000 /* of a document: aliases of aliases cannot grow without end */
};

typedef enum node_kind {
    NODE_NULL,
    NODE_BOOL,
    NODE_INT,
    NODE_FLOAT,
    NODE_STRING,
    NODE_LIST,
    NODE_MAP
} node_kind;

/* Where a node was written. Lines and columns count from 1; line 0: the reader has no marks. */
typedef struct node_mark {
    const char *label; /* file name, or "argument 'a.b=c'" */
    int32_t line, column;
} node_mark;

typedef struct node node;

typedef struct node_item {
    const char *key; /* NULL in a list */
    node_mark mark;  /* of the key */
    bool asked;
    node *value;
} node_item;

struct node {
    node_kind kind;
    bool plain; /* a scalar written without quotes; `text` reads back as the same value */
    node_mark mark;
    const char *text; /* scalars: as written */
    bool boolean;
    int64_t integer;
    double number; /* of integers too */
    node_item *items;
    int64_t n, capacity;
    /* Keys of a map that were asked for and are not there, for suggestions. */
    const char **missed;
    int64_t n_missed;
};

struct config {
    arena arena;
    node *root; /* a map */
    int64_t n_nodes;
};

/* A new node; NULL when out of memory or over NODE_MAX_COUNT (the error text is set). */
node *node_create(config *c, node_kind kind, node_mark mark);

/* Appends to a list (key NULL) or a map; false when out of memory. */
bool node_append(config *c, node *parent, const char *key, node_mark key_mark, node *value);

/* The item of a map, NULL when there is none. */
node_item *node_find(const node *map, const char *key);

/* Gives a plain scalar its kind and value by the YAML 1.2 core schema. `text` must outlive it. */
void node_resolve(node *n, const char *text);

/* "the string \"abc\"", "the number 3", "a list". */
const char *node_describe(const node *n, char *buffer, size_t size);

/* The shortest text that reads back as exactly `x` and never as an integer. */
const char *node_format_float(double x, char *buffer, size_t size);

/* "FILE:LINE:COLUMN", or the label alone where there are no marks. */
const char *node_place(node_mark mark, char *buffer, size_t size);

/* Parses one YAML document into `c`; label lives as long as c. With `marks` false, nodes get the
 * label only. An empty document gives NULL in *ret. */
mt_status yaml_parse(config *c, const char *text, size_t n, const char *label, bool marks,
                     node **ret);

/* An empty config with a copy of the label, and its root's mark. */
config *config_new(const char *label, node_mark *ret_mark);

/* Flushes a FILE *, makes it durable and closes it, also on failure. */
mt_status node_close_file(void *file, const char *path);

/* Value of a scalar as a whole number; false when it is none or out of range. */
bool node_integer(const node *n, int64_t *ret);

/* The node behind a view and a key below it (NULL or "": the section itself); NULL when absent.
 * Counts as asking for it. */
node *config_node(const mt_config *view, const char *key);

/* Place of what is at `key`, or of the nearest section around it. */
node_mark config_mark(const mt_config *view, const char *key);

/* As config_check_unused, leaving out the sections named in `skip` (NULL-terminated). */
mt_status config_check_unused_but(config *c, const char *path, const char *const *skip);

/* Merges the keys of `below` that `map` lacks, except those in `skip`. */
bool node_inherit(config *c, node *map, const node *below, const char *const *skip);

mt_status node_write_json(const node *root, const char *path);

/* Fails with "FILE:LINE:COLUMN: 'KEY' must be EXPECTED, found WHAT". `n` is what stands at key. */
mt_status config_wrong(const mt_config *c, const char *key, const node *n, const char *expected);

#endif
