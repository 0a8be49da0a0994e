/* SPDX-License-Identifier: Apache-2.0
 *
 * Best-fit decreasing (Johnson 1973) decides how many micro-batches a window takes: at most 11/9 of
 * the fewest possible, in practice within a few per mille. Always choosing the emptiest of that
 * many spreads the documents evenly, so that the micro-batches of a step cost the same; where the
 * last ones no longer fit that way, the best-fit layout itself is used. Both are functions of the
 * documents' lengths and order alone.
 */
#include "packing_window.h"

#include "../base/status.h"

#include <limits.h>
#include <stdlib.h>

void window_init(window *w, int64_t micro_tokens)
{
    *w = (window){ .micro_tokens = micro_tokens };
}

void window_finish(window *w)
{
    free(w->ids);
    free(w->targets);
    free(w->pieces);
    free(w->order);
    free(w->first_of);
}

void window_clear(window *w)
{
    w->tokens = w->n = w->bins = w->used = 0;
}

/* ---- documents ------------------------------------------------------------------------------- */

static bool grow(void *array, int64_t room, size_t each)
{
    void *grown = realloc(*(void **)array, (size_t)room * each);
    if (grown)
        *(void **)array = grown;
    return grown != NULL;
}

static mt_status need_room(window *w, int64_t tokens, int64_t pieces)
{
    int64_t room = w->room, most = w->pieces_room;
    while (room < w->tokens + tokens)
        room = room ? 2 * room : 4096;
    while (most < w->n + pieces)
        most = most ? 2 * most : 64;
    if ((room > w->room &&
         (!grow(&w->ids, room, sizeof *w->ids) || !grow(&w->targets, room, sizeof *w->targets))) ||
        (most > w->pieces_room &&
         (!grow(&w->pieces, most, sizeof *w->pieces) || !grow(&w->order, most, sizeof *w->order) ||
          !grow(&w->first_of, most + 1, sizeof *w->first_of))))
        return status_nomem("a window of documents to pack", (size_t)room * 2 * sizeof *w->ids);
    w->room = room;
    w->pieces_room = most;
    return MT_OK;
}

/* Inputs from .. from+n of the document, if they have a target. */
static int64_t add_piece(window *w, const mt_document *d, int64_t from, int64_t n)
{
    int64_t n_targets = 0, at = w->tokens;
    for (int64_t i = 0; i < n; i++) {
        int64_t target = from + i + 1;
        bool trained = !d->loss_mask || d->loss_mask[target];
        w->ids[at + i] = d->tokens[from + i];
        w->targets[at + i] = trained ? d->tokens[target] : -100;
        n_targets += trained;
    }
    if (n_targets == 0)
        return 0;
    w->pieces[w->n++] = (window_piece){ .first = at, .n = n, .n_targets = n_targets };
    w->tokens += n;
    return n_targets;
}

mt_status window_add(window *w, const mt_document *d, int64_t *ret_targets)
{
    int64_t inputs = d->n - 1, step = w->micro_tokens, targets = 0;
    mt_status status = inputs > 0 ? need_room(w, inputs, (inputs + step - 1) / step) : MT_OK;
    for (int64_t from = 0; from < inputs && !status; from += step)
        targets += add_piece(w, d, from, inputs - from < step ? inputs - from : step);
    if (!status)
        *ret_targets = targets;
    return status;
}

/* ---- best fit -------------------------------------------------------------------------------- */

/* Micro-batches by the room that is left in them: a list for every amount, and a bit where the list
 * is not empty. */
typedef struct shelves {
    int32_t *head; /* [micro_tokens + 1], -1: empty */
    int32_t *next; /* [micro-batches] */
    uint64_t *some;
    int64_t words;
} shelves;

static void put(shelves *s, int64_t left, int32_t bin)
{
    s->next[bin] = s->head[left];
    s->head[left] = bin;
    s->some[left / 64] |= UINT64_C(1) << left % 64;
}

/* Takes the micro-batch with the least room of at least n; -1: there is none. ret_left: its room.
 */
static int32_t take_best(shelves *s, int64_t n, int64_t *ret_left)
{
    uint64_t word = s->some[n / 64] & ~UINT64_C(0) << n % 64;
    int64_t i = n / 64;
    while (!word && ++i < s->words)
        word = s->some[i];
    if (!word)
        return -1;
    int64_t left = i * 64 + __builtin_ctzll(word);
    int32_t bin = s->head[left];
    s->head[left] = s->next[bin];
    if (s->head[left] < 0)
        s->some[i] &= ~(UINT64_C(1) << left % 64);
    *ret_left = left;
    return bin;
}

/* Sets `bin` of every piece, in the order of `by_length`, for micro-batches of `size` tokens;
 * returns how many there are. */
static int32_t fit(window *w, shelves *s, const int64_t *by_length, int64_t size)
{
    int32_t bins = 0;
    for (int64_t i = 0; i <= size; i++)
        s->head[i] = -1;
    memset(s->some, 0, (size_t)s->words * sizeof *s->some);
    for (int64_t i = 0; i < w->n; i++) {
        window_piece *p = &w->pieces[by_length[i]];
        int64_t left = size;
        p->bin = take_best(s, p->n, &left);
        if (p->bin < 0)
            p->bin = bins++;
        put(s, left - p->n, p->bin);
    }
    return bins;
}

/* As few micro-batches as best fit takes, of the smallest size that it finds. */
static mt_status fit_evenly(window *w, const int64_t *by_length, int32_t *ret_bins)
{
    int64_t n = w->micro_tokens + 1;
    shelves s = { .words = (n + 63) / 64 };
    s.head = malloc((size_t)n * sizeof *s.head);
    s.next = malloc((size_t)w->n * sizeof *s.next);
    s.some = malloc((size_t)s.words * sizeof *s.some);
    mt_status status =
        s.head && s.next && s.some ? MT_OK : status_nomem("packing", (size_t)n * sizeof *s.head);
    if (!status) {
        int32_t bins = fit(w, &s, by_length, w->micro_tokens);
        int64_t mean = (w->tokens + bins - 1) / bins, longest = w->pieces[by_length[0]].n;
        int64_t low = mean > longest ? mean : longest, good = w->micro_tokens;
        while (low < good) {
            int64_t middle = low + (good - low) / 2;
            if (fit(w, &s, by_length, middle) <= bins)
                good = middle;
            else
                low = middle + 1;
        }
        *ret_bins = fit(w, &s, by_length, good);
    }
    free(s.head);
    free(s.next);
    free(s.some);
    return status;
}

/* ---- the layout ------------------------------------------------------------------------------ */

static int longest_first(const void *a, const void *b, void *arg)
{
    const window_piece *pieces = arg;
    int64_t i = *(const int64_t *)a, k = *(const int64_t *)b;
    if (pieces[i].n != pieces[k].n)
        return pieces[i].n > pieces[k].n ? -1 : 1;
    return (i > k) - (i < k);
}

/* Numbers the micro-batches by their first document in the stream, so that the order in which they
 * are trained is as random as that of the stream, and sorts the pieces by them. */
static mt_status number(window *w)
{
    int32_t *number_of = malloc((size_t)w->bins * sizeof *number_of), next = 0;
    if (!number_of)
        return status_nomem("packing", (size_t)w->bins * sizeof *number_of);
    for (int64_t b = 0; b < w->bins; b++)
        number_of[b] = -1;
    memset(w->first_of, 0, (size_t)(w->bins + 1) * sizeof *w->first_of);
    for (int64_t i = 0; i < w->n; i++) {
        window_piece *p = &w->pieces[i];
        if (number_of[p->bin] < 0)
            number_of[p->bin] = next++;
        p->bin = number_of[p->bin];
        w->first_of[p->bin + 1]++;
    }
    free(number_of);
    for (int64_t b = 0; b < w->bins; b++)
        w->first_of[b + 1] += w->first_of[b];
    /* Filling from the back leaves each first_of at the first of its micro-batch. */
    for (int64_t i = w->n - 1; i >= 0; i--)
        w->order[--w->first_of[w->pieces[i].bin + 1]] = i;
    memmove(w->first_of, w->first_of + 1, (size_t)w->bins * sizeof *w->first_of);
    w->first_of[w->bins] = w->n;
    return MT_OK;
}

mt_status window_pack(window *w)
{
    if (w->n > INT32_MAX)
        return status_set(MT_ERR_INVALID, "data: more than 2^31 documents in a window");
    int32_t bins = 0;
    for (int64_t i = 0; i < w->n; i++)
        w->order[i] = i;
    w->bins = w->used = 0;
    if (w->n == 0)
        return MT_OK;
    qsort_r(w->order, (size_t)w->n, sizeof *w->order, longest_first, w->pieces);
    mt_status status = fit_evenly(w, w->order, &bins);
    w->bins = bins;
    return status ? status : number(w);
}

void window_take(window *w, micro_batch *b)
{
    b->tokens = b->documents = b->max_document = b->n_targets = 0;
    b->doc_starts[0] = 0;
    for (int64_t i = w->first_of[w->used]; i < w->first_of[w->used + 1]; i++) {
        const window_piece *p = &w->pieces[w->order[i]];
        memcpy(b->ids + b->tokens, w->ids + p->first, (size_t)p->n * sizeof *b->ids);
        memcpy(b->targets + b->tokens, w->targets + p->first, (size_t)p->n * sizeof *b->targets);
        for (int64_t t = 0; t < p->n; t++)
            b->positions[b->tokens + t] = (int32_t)t;
        b->tokens += p->n;
        b->n_targets += p->n_targets;
        b->max_document = p->n > b->max_document ? p->n : b->max_document;
        b->doc_starts[++b->documents] = (int32_t)b->tokens;
    }
    w->used++;
}
