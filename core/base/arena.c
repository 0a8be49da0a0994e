/* SPDX-License-Identifier: Apache-2.0
 *
 * Bump allocation in a list of blocks.
 */
#include "arena.h"

#include "status.h"

#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCK_BYTES = 64 * 1024 };

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    alignas(max_align_t) unsigned char data[];
};

void *arena_alloc(arena *a, size_t bytes)
{
    size_t align = alignof(max_align_t);
    if (bytes > SIZE_MAX / 2) {
        status_nomem("an arena", bytes);
        return NULL;
    }
    bytes = (bytes + align - 1) / align * align;
    if (bytes == 0)
        bytes = align;
    struct arena_block *b = a->blocks;
    if (!b || b->size - b->used < bytes) {
        size_t size = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
        b = calloc(1, sizeof *b + size);
        if (!b) {
            status_nomem("an arena", size);
            return NULL;
        }
        b->size = size;
        b->next = a->blocks;
        a->blocks = b;
    }
    void *p = b->data + b->used;
    b->used += bytes;
    return p;
}

void *arena_array(arena *a, size_t count, size_t size)
{
    if (size && count > SIZE_MAX / 2 / size) {
        status_nomem("an arena", SIZE_MAX);
        return NULL;
    }
    return arena_alloc(a, count * size);
}

char *arena_strdup(arena *a, const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = arena_alloc(a, n);
    return p ? memcpy(p, s, n) : NULL;
}

char *arena_printf(arena *a, const char *fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    char *p = n < 0 ? NULL : arena_alloc(a, (size_t)n + 1);
    if (p)
        vsnprintf(p, (size_t)n + 1, fmt, again);
    va_end(again);
    va_end(args);
    return p;
}

void arena_finish(arena *a)
{
    while (a->blocks) {
        struct arena_block *next = a->blocks->next;
        free(a->blocks);
        a->blocks = next;
    }
}
