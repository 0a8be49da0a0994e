/* SPDX-License-Identifier: Apache-2.0
 *
 * A trie of added tokens: thousands of them are looked for in one walk over the text.
 */
#include "tokenizer.h"

#include <stdlib.h>

/* Node 0 is no node. Children of a node are a list. */
struct tok_trie_node {
    int32_t child, sibling;
    int32_t value; /* -1: nothing ends here */
    uint8_t byte;
};

static int32_t new_node(tok_trie *t, uint8_t byte)
{
    if (t->n + 2 > t->cap) {
        int32_t cap = t->cap ? 2 * t->cap : 256;
        struct tok_trie_node *grown = realloc(t->nodes, (size_t)cap * sizeof *grown);
        if (!grown)
            return 0;
        t->nodes = grown;
        t->cap = cap;
    }
    t->nodes[++t->n] = (struct tok_trie_node){ .value = -1, .byte = byte };
    return t->n;
}

static int32_t child_of(const tok_trie *t, int32_t node, uint8_t byte)
{
    int32_t at = t->nodes[node].child;
    while (at && t->nodes[at].byte != byte)
        at = t->nodes[at].sibling;
    return at;
}

mt_status tok_trie_add(tok_trie *t, tok_text pattern, int32_t value)
{
    uint8_t first = (uint8_t)pattern.p[0];
    int32_t at = t->root[first];
    if (!at && !(at = t->root[first] = new_node(t, first)))
        return mt_fail_nomem();
    for (int64_t i = 1; i < pattern.n; i++) {
        uint8_t byte = (uint8_t)pattern.p[i];
        int32_t next = child_of(t, at, byte);
        if (!next) {
            if (!(next = new_node(t, byte)))
                return mt_fail_nomem();
            t->nodes[next].sibling = t->nodes[at].child;
            t->nodes[at].child = next;
        }
        at = next;
    }
    t->nodes[at].value = value;
    return MT_OK;
}

void tok_trie_finish(tok_trie *t)
{
    free(t->nodes);
    *t = (tok_trie){ 0 };
}

int32_t tok_trie_find(const tok_trie *t, tok_text text, int64_t from, int64_t *ret_start,
                      int64_t *ret_end)
{
    if (!t->n)
        return -1;
    for (; from < text.n; from++) {
        int32_t at = t->root[(uint8_t)text.p[from]], value = -1;
        for (int64_t i = from + 1; at; i++) {
            if (t->nodes[at].value >= 0) {
                value = t->nodes[at].value;
                *ret_end = i;
            }
            at = i < text.n ? child_of(t, at, (uint8_t)text.p[i]) : 0;
        }
        if (value >= 0) {
            *ret_start = from;
            return value;
        }
    }
    return -1;
}
