/* SPDX-License-Identifier: Apache-2.0
 *
 * An arena for the many small things that live and die with one object (names, graphs, configs).
 */
#ifndef MT_CORE_ARENA_H
#define MT_CORE_ARENA_H

#include <megatrain/base.h>

typedef struct arena {
    struct arena_block *blocks;
} arena;

/* An arena starts as { 0 }. Memory is zeroed and aligned for any type; NULL when out of memory
 * (the error text is set). */
void *arena_alloc(arena *a, size_t bytes);
void *arena_array(arena *a, size_t count, size_t size);
char *arena_strdup(arena *a, const char *s);
char *arena_printf(arena *a, const char *fmt, ...) MT_PRINTF(2, 3);
void arena_finish(arena *a);

#endif
