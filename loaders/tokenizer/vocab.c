/* SPDX-License-Identifier: Apache-2.0
 *
 * Texts of tokens to ids.
 */
#include "tokenizer.h"

#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

mt_status tok_table_init(tok_table *t, int64_t entries, const tok_text *texts)
{
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)entries)
        slots *= 2;
    t->slots = calloc(slots, sizeof *t->slots);
    if (!t->slots)
        return mt_fail_nomem();
    t->mask = slots - 1;
    t->texts = texts;
    return MT_OK;
}

void tok_table_finish(tok_table *t)
{
    free(t->slots);
    *t = (tok_table){ 0 };
}

/* The slot that holds `text`, or the free one where it belongs. */
static int32_t *slot_of(const tok_table *t, tok_text text)
{
    uint64_t at = XXH3_64bits(text.p, (size_t)text.n) & t->mask;
    while (t->slots[at] && !tok_same(t->texts[t->slots[at] - 1], text))
        at = (at + 1) & t->mask;
    return &t->slots[at];
}

void tok_table_add(tok_table *t, int32_t id)
{
    *slot_of(t, t->texts[id]) = id + 1;
}

int32_t tok_table_find(const tok_table *t, tok_text text)
{
    return *slot_of(t, text) - 1;
}

void tok_vocab_finish(tok_vocab *v)
{
    free(v->text);
    free(v->flags);
    tok_table_finish(&v->by_text);
}
