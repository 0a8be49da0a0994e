/* SPDX-License-Identifier: Apache-2.0
 *
 * Copy-in: which piece's weights lie in which buffer, when they are fetched, and a group's batches
 * with the table rows that they use. Runs on the main thread.
 */
#include "internal.h"

#include "../base/status.h"

#include <stdlib.h>
#include <string.h>

/* ---- a group's batches ----------------------------------------------------------------------- */

static void mark_rows(engine *e, const micro_batch *mb)
{
    for (int64_t t = 0; t < mb->tokens; t++)
        e->row_of[mb->ids[t]] = 0;
}

/* Lists the token ids that are marked, ascending, and writes every token's place in that list into
 * that stream of the set's batches. Nothing is marked any more. Returns how many there are. */
static int64_t list_rows(engine *e, group_set *s, int32_t *rows, int64_t stream)
{
    int32_t *row_of = e->row_of;
    int64_t n = 0;
    for (int64_t id = 0; id < e->m->vocab; id++)
        if (row_of[id] >= 0) {
            rows[n] = (int32_t)id;
            row_of[id] = (int32_t)n++;
        }
    for (int64_t b = 0; b < s->range.n; b++) {
        int32_t *to = s->host + b * e->l.micro_elems + stream * e->l.stream_elems;
        for (int64_t t = 0; t < s->micro[b]->tokens; t++)
            to[t] = row_of[s->micro[b]->ids[t]];
    }
    for (int64_t r = 0; r < n; r++)
        row_of[rows[r]] = -1;
    return n;
}

static void index_rows(engine *e, group_set *s)
{
    for (int64_t b = 0; b < s->range.n; b++)
        mark_rows(e, s->micro[b]);
    s->n_rows = s->n_grad_rows = list_rows(e, s, s->rows, STREAM_ROWS);
    if (!e->p->device_sums || !e->step.seq.backward)
        return;
    for (int64_t b = 0; b < e->step.batch->n; b++)
        mark_rows(e, &e->step.batch->micro[b]);
    s->n_grad_rows = list_rows(e, s, s->grad_rows, STREAM_GRAD_ROWS);
}

/* Packs the rows in use of every gathered table. The workers do it: it is the one copy of weights
 * that host memory pays for twice, and where an update is under way they make it of those rows. */
static void pack_rows(engine *e, int32_t set)
{
    const group_set *s = &e->set[set];
    for (int32_t u = 0; u < e->m->n_units; u++) {
        const model_unit *unit = &e->m->units[u];
        for (uint32_t k = 0; e->unit[u].gathers && k < unit->t->n_params; k++) {
            int64_t cols = unit->t->params[k].info.cols;
            if (!unit->t->params[k].gathered)
                continue;
            pool_wait_table(e, unit->slot[k]);
            int64_t rows = LAYOUT_PACK_ELEMS / cols > 0 ? LAYOUT_PACK_ELEMS / cols : 1;
            pool_submit(e, &(work){ .kind = WORK_GATHER,
                                    .param = unit->slot[k],
                                    .end = s->n_rows * cols,
                                    .slice = rows * cols,
                                    .set = set,
                                    .pack_offset = e->pack_offset[e->unit[u].slot_base + k] });
        }
    }
    pool_wait_gathers(e);
}

void stream_prepare(engine *e, const micro_batch *const *micro, micro_range range, int64_t key,
                    bool with_targets)
{
    int32_t index = (int32_t)(key % LAYOUT_SETS);
    group_set *s = &e->set[index];
    int64_t stream = e->l.stream_elems;
    /* The group that used this set before must have left it: on the device, and with its table
     * gradients on the host. */
    e->b->event_sync(e->dev, s->done);
    lander_wait(e, s->landing);
    pool_wait_set(e, index);

    s->key = key;
    s->range = range;
    for (int64_t b = 0; b < range.n; b++) {
        const micro_batch *mb = s->micro[b] = micro[b];
        int32_t *to = s->host + b * e->l.micro_elems;
        size_t bytes = (size_t)mb->tokens * 4;
        memcpy(to + STREAM_IDS * stream, mb->ids, bytes);
        if (with_targets)
            memcpy(to + STREAM_TARGETS * stream, mb->targets, bytes);
        else
            memset(to + STREAM_TARGETS * stream, 0xff, bytes);
        memcpy(to + STREAM_POSITIONS * stream, mb->positions, bytes);
        memcpy(to + e->l.streams * stream, mb->doc_starts, (size_t)(mb->documents + 1) * 4);
    }
    if (e->row_of) {
        index_rows(e, s);
        pack_rows(e, index);
    }
    chaos_delay(e, e->q_in, &e->rng);
    s->batch_in = time_begin(e, e->q_in, TRACK_IN, EVENT_BATCH_IN, -1, -1);
    for (int64_t b = 0; b < range.n; b++) {
        int64_t at = b * e->l.micro_elems;
        int64_t elems = e->l.streams * stream + micro[b]->documents + 1;
        e->b->copy_in(e->dev, e->q_in, s->dev + at, s->host + at, elems * 4);
        enqueued(e, e->q_in);
    }
    time_end(e, e->q_in, s->batch_in);
    e->b->event_record(e->dev, s->loaded, e->q_in);
}

void stream_batch(const engine *e, const group_set *s, int64_t i, mt_batch *ret)
{
    const micro_batch *mb = s->micro[i];
    const int32_t *dev = s->dev + i * e->l.micro_elems;
    const int32_t *host = s->host + i * e->l.micro_elems;
    int64_t stream = e->l.stream_elems;
    *ret = (mt_batch){ .tokens = mb->tokens,
                       .documents = mb->documents,
                       .max_document = mb->max_document,
                       .ids = dev + STREAM_IDS * stream,
                       .rows = dev + STREAM_ROWS * stream,
                       .targets = dev + STREAM_TARGETS * stream,
                       .positions = dev + STREAM_POSITIONS * stream,
                       .doc_starts = dev + e->l.streams * stream,
                       .host_doc_starts = host + e->l.streams * stream };
}

const int32_t *stream_grad_rows(const engine *e, const group_set *s, int64_t i)
{
    const int32_t *dev = s->dev + i * e->l.micro_elems;
    return e->p->device_sums ? dev + STREAM_GRAD_ROWS * e->l.stream_elems : NULL;
}

/* ---- the order of compute -------------------------------------------------------------------- */

const visit *stream_visit_at(const engine *e, const sequence *s, int64_t pos)
{
    return &e->visit[pos % s->group_length];
}

static int32_t piece_at(const engine *e, const sequence *s, int64_t pos)
{
    return stream_visit_at(e, s, pos)->piece;
}

static int64_t key_at(const sequence *s, int64_t pos)
{
    return s->first_key + pos / s->group_length;
}

bool stream_reads(const engine *e, const sequence *s, int64_t pos)
{
    const tpl_plan *t = e->p->tpl[e->piece[piece_at(e, s, pos)].unit];
    return pos % s->group_length < e->l.n_forward || t->n_segments > 1 || t->backward_reads;
}

static int64_t next_use(const engine *e, const sequence *s, int32_t piece, int64_t from)
{
    int64_t end = s->n_groups * s->group_length;
    for (int64_t pos = from; pos < end && pos < from + 2 * s->group_length; pos++)
        if (piece_at(e, s, pos) == piece && stream_reads(e, s, pos))
            return pos;
    return INT64_MAX;
}

/* Must what is fetched for `pos` wait for updates? Masters do not change from a step's first
 * forward to the landing of their own gradients, which follows their last use; updates of one
 * segment of a parameter must not hold up the fetch of another. */
static bool may_be_stale(const engine *e, const sequence *s, int64_t pos)
{
    return !s->backward || pos < e->l.n_forward;
}

/* ---- experts without tokens ------------------------------------------------------------------ */

static bool is_idle(const engine *e, int32_t piece, micro_range r)
{
    const piece_info *p = &e->piece[piece];
    const tpl_plan *t = e->p->tpl[p->unit];
    int32_t each = t->t->experts / t->t->parts * t->bounds.segment_parts;
    int32_t first = (p->segment - 1) * each;
    int32_t end = first + each < t->t->experts ? first + each : t->t->experts;
    return experts_idle(e, p->unit, first, end, r);
}

bool stream_skips(const engine *e, const sequence *s, int64_t pos)
{
    int32_t piece = piece_at(e, s, pos);
    const unit_info *u = &e->unit[e->piece[piece].unit];
    int64_t key = key_at(s, pos);
    bool forward = s->backward && pos % s->group_length < e->l.n_forward;
    if (forward || e->piece[piece].segment == 0 || u->offsets_key != key ||
        !e->b->event_query(e->dev, u->offsets_there))
        return false;
    return is_idle(e, piece, e->set[key % LAYOUT_SETS].range);
}

/* ---- weight buffers -------------------------------------------------------------------------- */

static bool holds(const engine *e, const weight_buffer *w, int32_t piece, int64_t key)
{
    return w->piece == piece && w->version == e->s->version &&
           (!e->unit[e->piece[piece].unit].gathers || w->key == key);
}

static weight_buffer *find_resident(engine *e, const sequence *s, int64_t pos)
{
    for (int32_t i = 0; i < e->p->weight_buffers; i++)
        if (holds(e, &e->weights[i], piece_at(e, s, pos), key_at(s, pos)))
            return &e->weights[i];
    return NULL;
}

/* The buffer whose contents are needed last, as seen from `from`, if that is after `pos`. Not
 * `busy`, which compute reads at present, as long as there is another: a copy into it could not
 * begin before that is over. */
static weight_buffer *find_victim(engine *e, const sequence *s, int64_t from, int64_t pos,
                                  weight_buffer *busy)
{
    weight_buffer *best = NULL;
    int64_t farthest = pos, busy_use = pos;
    for (int32_t i = 0; i < e->p->weight_buffers; i++) {
        weight_buffer *w = &e->weights[i];
        int64_t use = INT64_MAX;
        if (w->piece >= 0 && holds(e, w, w->piece, key_at(s, from)))
            use = next_use(e, s, w->piece, from);
        if (w == busy) {
            busy_use = use;
        } else if (use > farthest) {
            best = w;
            farthest = use;
        }
    }
    return best ? best : busy_use > pos ? busy : NULL;
}

/* Brings n masters to the device in FP32. */
static void join_planes(engine *e, float *dst, const uint16_t *hi, const int16_t *lo, int64_t n)
{
    for (int64_t i = 0; i < n; i += LAYOUT_JOIN_ELEMS) {
        int64_t piece = n - i < LAYOUT_JOIN_ELEMS ? n - i : LAYOUT_JOIN_ELEMS;
        e->b->copy_in_join(e->dev, e->q_in, dst + i, hi + i, lo + i, piece, e->region[LAYOUT_JOIN]);
        enqueued(e, e->q_in);
    }
}

/* Brings n masters to the device as elements `at`.. of a buffer, in the compute dtype. */
static void copy_planes(engine *e, const weight_buffer *w, int64_t at, const uint16_t *hi,
                        const int16_t *lo, int64_t n)
{
    char *dst = (char *)w->data + at * e->esize;
    chaos_delay(e, e->q_in, &e->rng);
    e->traffic.in_bytes += n * e->esize;
    if (e->esize == 2) {
        e->b->copy_in(e->dev, e->q_in, dst, hi, n * 2);
        enqueued(e, e->q_in);
        return;
    }
    join_planes(e, (float *)dst, hi, lo, n);
}

/* What a segment has in FP32 although the device computes in BF16. */
static void copy_f32(engine *e, const weight_buffer *w, const tpl_segment *s)
{
    if (s->f32_elems == 0)
        return;
    const model_unit *unit = &e->m->units[e->piece[w->piece].unit];
    const model_param *p = &e->m->params[unit->slot[s->f32_slot]];
    const store_unit *u = &e->s->units[p->unit];
    e->traffic.in_bytes += s->f32_elems * 4;
    join_planes(e, (float *)(void *)((char *)w->data + s->f32_at), u->hi + p->offset,
                u->lo + p->offset, s->f32_elems);
}

/* Elements that lie together on the host and on the device. */
typedef struct run {
    int32_t owner; /* unit in whose planes they are; -1: among the packed rows of a set */
    int64_t from;  /* elements into those */
    int64_t at, n; /* elements into the buffer */
} run;

static run run_of(const engine *e, const weight_buffer *w, const tpl_slice *slice)
{
    int32_t u = e->piece[w->piece].unit;
    const tpl_param *slot = &e->m->units[u].t->params[slice->slot];
    const model_param *p = &e->m->params[e->m->units[u].slot[slice->slot]];
    if (slot->gathered) {
        int64_t rows = e->set[w->key % LAYOUT_SETS].n_rows;
        return (run){ -1, e->pack_offset[e->unit[u].slot_base + slice->slot], slice->at,
                      rows * slot->info.cols };
    }
    return (run){ p->unit, p->offset + slice->first, slice->at, slice->n };
}

static void copy_run(engine *e, const weight_buffer *w, const run *r)
{
    const group_set *set = &e->set[w->key % LAYOUT_SETS];
    const store_unit *u = r->owner >= 0 ? &e->s->units[r->owner] : NULL;
    const uint16_t *hi = u ? u->hi : set->hi;
    const int16_t *lo = u ? u->lo : set->lo;
    copy_planes(e, w, r->at, hi + r->from, lo ? lo + r->from : NULL, r->n);
}

static void begin_copy(engine *e, weight_buffer *w)
{
    w->copy_in = time_begin(e, e->q_in, TRACK_IN, EVENT_COPY_IN, e->piece[w->piece].unit, -1);
}

/* Until the parameter's masters are up to date, while what comes before it is on its way. */
static void await_update(engine *e, weight_buffer *w, int32_t param)
{
    time_end(e, e->q_in, w->copy_in);
    w->blocked_from = w->blocked_from ? w->blocked_from : time_now();
    pool_wait_update(e, param);
    w->blocked_to = time_now();
    begin_copy(e, w);
}

/* Brings a piece to the device, neighbours and the padding between them as one copy, but for what
 * is still being updated: packed rows never are. */
static void copy_piece(engine *e, weight_buffer *w, bool stale)
{
    const tpl_segment *s = piece_segment(e, w->piece);
    run r = { 0 };
    for (int32_t i = 0; i < s->n_slices; i++) {
        run next = run_of(e, w, &s->slice[i]);
        int32_t param = piece_param(e, w->piece, &s->slice[i]);
        if (stale && next.owner >= 0 && pool_is_updating(e, param)) {
            if (r.n > 0)
                copy_run(e, w, &r);
            r = next;
            await_update(e, w, param);
            continue;
        }
        if (r.n > 0 && next.owner >= 0 && next.owner == r.owner &&
            next.from - r.from == next.at - r.at) {
            r.n = next.at - r.at + next.n;
            continue;
        }
        if (r.n > 0)
            copy_run(e, w, &r);
        r = next;
    }
    if (r.n > 0)
        copy_run(e, w, &r);
    copy_f32(e, w, s);
}

static void fetch(engine *e, const sequence *s, int64_t pos, weight_buffer *w)
{
    int32_t piece = piece_at(e, s, pos);
    w->blocked_from = w->blocked_to = 0;
    w->piece = piece;
    w->key = key_at(s, pos);
    w->version = e->s->version;
    e->b->event_wait(e->dev, e->q_in, w->used);
    chaos_poison(e, e->q_in, w->data, e->l.weight_stride);
    begin_copy(e, w);
    copy_piece(e, w, may_be_stale(e, s, pos));
    time_end(e, e->q_in, w->copy_in);
    e->b->event_record(e->dev, w->loaded, e->q_in);
}

weight_buffer *stream_acquire(engine *e, const sequence *s, int64_t pos)
{
    weight_buffer *w = find_resident(e, s, pos);
    if (!w) {
        w = find_victim(e, s, pos, pos, NULL);
        fetch(e, s, pos, w);
    }
    e->b->event_wait(e->dev, e->q_compute, w->loaded);
    return w;
}

void stream_release(engine *e, const sequence *s, int64_t pos, weight_buffer *w)
{
    if (w)
        e->b->event_record(e->dev, w->used, e->q_compute);
    int64_t end = s->n_groups * s->group_length;
    int32_t ahead = 0;
    for (int64_t next = pos + 1; ahead < e->p->weight_buffers - 1 && next < end; next++) {
        if (!stream_reads(e, s, next))
            continue;
        ahead++;
        if (find_resident(e, s, next) || stream_skips(e, s, next))
            continue;
        /* Waiting here for anything but the very next piece would hold up its compute. */
        if (key_at(s, next) >= e->next_key ||
            (ahead > 1 && may_be_stale(e, s, next) && pool_updating(e, piece_at(e, s, next))))
            break;
        weight_buffer *victim = find_victim(e, s, pos + 1, next, w);
        if (!victim)
            break;
        fetch(e, s, next, victim);
    }
}

/* ---- life ------------------------------------------------------------------------------------ */

mt_status stream_start(engine *e)
{
    mt_status st = MT_OK;
    int32_t n = e->p->weight_buffers;
    e->weights = calloc((size_t)n, sizeof *e->weights);
    if (!e->weights)
        return status_nomem("the weight buffers", (size_t)n * sizeof *e->weights);
    for (int32_t i = 0; i < n && st == MT_OK; i++) {
        weight_buffer *w = &e->weights[i];
        w->piece = -1;
        w->copy_in = -1;
        w->data = (char *)e->region[LAYOUT_WEIGHTS] + i * e->l.weight_stride;
        st = e->b->event_create(e->dev, &w->loaded);
        if (st == MT_OK)
            st = e->b->event_create(e->dev, &w->used);
    }

    char *packed = e->region[LAYOUT_GATHERED];
    char *index = e->region[LAYOUT_ROW_INDEX];
    int64_t plane = layout_align(e->l.pack_rows * e->l.gather_cols * 2);
    if (e->l.gather_cols) {
        e->row_of = (int32_t *)index;
        memset(index, 0xff, (size_t)e->m->vocab * 4);
        index += layout_align(e->m->vocab * 4);
    }
    for (int k = 0; k < LAYOUT_SETS && st == MT_OK; k++) {
        group_set *s = &e->set[k];
        int64_t batches = e->p->group_batches * e->l.micro_elems;
        s->host = (int32_t *)e->region[LAYOUT_HOST_BATCH] + k * batches;
        s->dev = (int32_t *)e->region[LAYOUT_BATCH] + k * batches;
        s->batch_in = -1;
        s->key = -1;
        s->micro = calloc((size_t)e->p->group_batches, sizeof *s->micro);
        if (!s->micro)
            return status_nomem("a group", (size_t)e->p->group_batches * sizeof *s->micro);
        if (e->l.gather_cols) {
            s->rows = s->grad_rows = (int32_t *)index;
            index += layout_align(e->l.pack_rows * 4);
            if (e->p->device_sums) {
                s->grad_rows = (int32_t *)index;
                index += layout_align(e->l.gather_rows * 4);
            }
            s->hi = (uint16_t *)packed;
            packed += plane;
            if (e->esize == 4) {
                s->lo = (int16_t *)packed;
                packed += plane;
            }
        }
        st = e->b->event_create(e->dev, &s->loaded);
        if (st == MT_OK)
            st = e->b->event_create(e->dev, &s->done);
    }
    return st;
}

void stream_stop(engine *e)
{
    for (int32_t i = 0; e->weights && i < e->p->weight_buffers; i++) {
        if (e->weights[i].loaded)
            e->b->event_destroy(e->dev, e->weights[i].loaded);
        if (e->weights[i].used)
            e->b->event_destroy(e->dev, e->weights[i].used);
    }
    free(e->weights);
    for (int k = 0; k < LAYOUT_SETS; k++) {
        if (e->set[k].loaded)
            e->b->event_destroy(e->dev, e->set[k].loaded);
        if (e->set[k].done)
            e->b->event_destroy(e->dev, e->set[k].done);
        free(e->set[k].micro);
    }
}
