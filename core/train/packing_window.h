/* SPDX-License-Identifier: Apache-2.0
 *
 * A window of whole documents and how they are laid out in micro-batches, best fit.
 */
#ifndef MT_CORE_PACKING_WINDOW_H
#define MT_CORE_PACKING_WINDOW_H

#include "../engine/batch.h"

#include <megatrain/loader.h>

typedef struct window_piece {
    int64_t first; /* of its tokens in the window */
    int64_t n;     /* inputs */
    int64_t n_targets;
    int32_t bin; /* the micro-batch that it is in */
} window_piece;

typedef struct window {
    int64_t micro_tokens;
    int32_t *ids, *targets; /* [tokens]; -100: no target */
    int64_t tokens, room;
    window_piece *pieces; /* [n] in the order of the stream */
    int64_t n, pieces_room;
    int64_t *order;     /* [n] pieces by micro-batch, then by place in the stream */
    int64_t *first_of;  /* [bins + 1] into order */
    int64_t bins, used; /* micro-batches, and how many of them were taken */
} window;

void window_init(window *w, int64_t micro_tokens);
void window_finish(window *w);

/* Takes everything out. */
void window_clear(window *w);

/* Appends a document's inputs, a long one in pieces of micro_tokens. ret_targets: how many targets
 * it has; one without any is not taken in. */
mt_status window_add(window *w, const mt_document *d, int64_t *ret_targets);

/* Lays the pieces out; `bins` says in how many micro-batches. */
mt_status window_pack(window *w);

/* Copies micro-batch number `used`, and counts it. */
void window_take(window *w, micro_batch *b);

#endif
