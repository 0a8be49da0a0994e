/* SPDX-License-Identifier: Apache-2.0
 *
 * Exact bytes of every region of an engine.
 */
#include "layout.h"

#include <string.h>

const char *layout_region_name(layout_region r)
{
    static const char *const name[LAYOUT_REGIONS] = {
        [LAYOUT_WEIGHTS] = "weight buffers",
        [LAYOUT_GRADS] = "gradient buffers",
        [LAYOUT_GRAD_SUMS] = "gradient sums",
        [LAYOUT_ACTIVATIONS] = "boundary activations",
        [LAYOUT_ACTIVATION_GRADS] = "boundary gradients",
        [LAYOUT_SAVED] = "saved activations",
        [LAYOUT_CARRIED] = "activations between segments",
        [LAYOUT_TALLIES] = "sums over units",
        [LAYOUT_WORK] = "workspace",
        [LAYOUT_BATCH] = "batches",
        [LAYOUT_LOSS] = "token losses",
        [LAYOUT_JOIN] = "FP32 join scratch",
        [LAYOUT_REDUCTIONS] = "reductions",
        [LAYOUT_STATE] = "generation state",
        [LAYOUT_LOGITS] = "logits",
        [LAYOUT_MASTERS] = "master weights",
        [LAYOUT_STATES] = "optimizer states",
        [LAYOUT_GRAD_PLANE] = "gradient plane",
        [LAYOUT_NARROW_PLANE] = "BF16 gradient plane",
        [LAYOUT_SLAB] = "gradient slabs",
        [LAYOUT_BLOCKS] = "workers' blocks",
        [LAYOUT_SHARED_GRADS] = "shared gradients",
        [LAYOUT_GATHERED] = "embedding staging",
        [LAYOUT_ROW_INDEX] = "embedding row index",
        [LAYOUT_HOST_BATCH] = "batch staging",
        [LAYOUT_HOST_LOSS] = "token loss staging",
        [LAYOUT_HOST_AUX_LOSS] = "auxiliary loss staging",
        [LAYOUT_HOST_REDUCTIONS] = "reduction staging",
        [LAYOUT_HOST_LOGITS] = "logit staging",
        [LAYOUT_HOST_OFFSETS] = "rows of experts",
        [LAYOUT_TIMELINE] = "timeline",
    };
    return name[r];
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t layout_slice(const model_param *p, int64_t slab_elems)
{
    if (p->rows == 0 || p->cols > slab_elems)
        return min64(slab_elems, p->elems);
    return min64(slab_elems / p->cols * p->cols, p->elems);
}

int32_t layout_contributors(const model *m, int32_t param)
{
    int32_t n = 0;
    for (int32_t u = 0; u < m->n_units; u++)
        for (uint32_t s = 0; s < m->units[u].t->n_params; s++)
            n += m->units[u].slot[s] == param;
    return n;
}

int64_t layout_out_bytes(const tpl_plan *t)
{
    int64_t bytes = 0;
    for (uint32_t i = 0; i < t->t->n_out; i++)
        bytes += layout_align(t->out_bytes[i]);
    return bytes;
}

int64_t layout_sum_bytes(const tpl_segment *s)
{
    return layout_align(s->elems * 4);
}

int64_t layout_offsets_bytes(const tpl *t)
{
    return t->experts > 0 ? layout_align((t->experts + 1) * 4) : 0;
}

/* What is streamed, and how often. The last unit's forward is part of its backward. */
static void lay_out_visits(const plan *p, layout *l)
{
    for (int32_t u = 0; u < p->m->n_units; u++) {
        int32_t n = p->tpl[u]->n_segments;
        l->n_pieces += n;
        l->n_visits += u < p->m->n_units - 1 ? (n > 1 ? n + 1 : 1) : 0;
    }
    l->n_forward = l->n_pieces;
    l->n_visits += l->n_forward;
}

int64_t layout_leave_bytes(const tpl_segment *s, int64_t grad_size)
{
    return layout_align(layout_sum_bytes(s) / 4 * grad_size);
}

/* What forward saves for unit u in a group. */
static int64_t saved_bytes(const plan *p, int32_t u)
{
    bool last = u == p->m->n_units - 1; /* one micro-batch after the other */
    return layout_align(p->tpl[u]->saved_bytes) * (last ? 1 : p->group_batches);
}

int64_t layout_park(const plan *p, int64_t grad_size, int64_t *ret_at)
{
    int64_t end = 0, own = 0, piece = 0;
    for (int32_t u = 0; u < p->m->n_units; u++) {
        end += saved_bytes(p, u);
        piece += p->tpl[u]->n_segments;
    }
    /* From the top down: what lies from `begin` to `end` is free. */
    int64_t begin = end;
    for (int32_t u = p->m->n_units - 1; u >= 0; begin -= saved_bytes(p, u--)) {
        for (int32_t i = p->tpl[u]->n_segments - 1; i >= 0; i--) {
            int64_t bytes = layout_leave_bytes(&p->tpl[u]->segment[i], grad_size);
            bool fits = end - begin >= bytes;
            end -= fits ? bytes : 0;
            own += fits ? 0 : bytes;
            piece--;
            if (ret_at)
                ret_at[piece] = fits ? end : -1;
        }
    }
    return own;
}

/* Gradients on the device and on their way to the optimizer. */
static void lay_out_grads(const plan *p, layout *l)
{
    const model *m = p->m;
    bool narrow = l->grad_size == 2;
    int64_t slab = 1, sums = 0, leave = 0, trained = 0;
    for (int32_t u = 0; u < m->n_units; u++)
        for (int32_t i = 0; i < p->tpl[u]->n_segments; i++) {
            const tpl_segment *s = &p->tpl[u]->segment[i];
            l->sum_stride = max64(l->sum_stride, layout_sum_bytes(s));
            l->grad_stride = max64(l->grad_stride, layout_leave_bytes(s, l->grad_size));
            sums += layout_sum_bytes(s);
            leave += layout_leave_bytes(s, l->grad_size);
        }
    l->leave_sums = p->device_sums && !narrow;
    int64_t two = LAYOUT_GRAD_BUFFERS * l->grad_stride;
    int64_t apart = layout_park(p, l->grad_size, NULL);
    bool may_park = p->deep && p->groups == 1 && !p->device_sums, behind = may_park && apart <= two;
    l->parked = behind || (p->deep && l->leave_sums);
    l->parked_bytes = behind ? leave - apart : 0;
    l->park_apart = may_park ? apart : 0;
    l->own_grads = p->held || l->leave_sums || behind;
    l->n_grads = l->own_grads ? l->n_pieces : LAYOUT_GRAD_BUFFERS;
    l->leave_bytes = behind ? apart : l->own_grads ? leave : two;
    if (p->device_sums)
        l->bytes[LAYOUT_GRAD_SUMS] = sums;
    if (!l->leave_sums)
        l->bytes[LAYOUT_GRADS] = l->leave_bytes;
    if (narrow && !p->device_sums)
        l->bytes[LAYOUT_GRADS] += l->sum_stride; /* one: rounded before the next piece's turn */

    for (int32_t i = 0; i < m->n_params; i++) {
        const model_param *q = &m->params[i];
        if (q->flags & MT_PARAM_FROZEN)
            continue;
        trained += q->elems;
        slab = max64(slab, min64(q->elems, LAYOUT_SLAB_ELEMS));
        slab = max64(slab, q->cols);
        bool shared = layout_contributors(m, i) > 1;
        if (shared && !l->grad_plane)
            l->bytes[LAYOUT_SHARED_GRADS] += layout_align(q->elems * 4);
        if (!shared && l->narrow_plane)
            l->bytes[LAYOUT_NARROW_PLANE] += layout_align(q->elems * 2);
    }
    l->slab_elems = layout_align(slab * 4) / 4;
    l->trained_elems = trained;
    l->block_elems = p->request.grain == MT_GRAIN_ELEMENT ? LAYOUT_BLOCK_ELEMS : l->slab_elems;
    l->bytes[LAYOUT_BLOCKS] = layout_align(p->workers * l->block_elems * 4);
}

/* What slabs and the staging of embeddings take together is bounded where there are many. */
static void lay_out_slabs(const plan *p, layout *l)
{
    int64_t slab = l->slab_elems * l->grad_size;
    int64_t room = l->trained_elems * l->grad_size / LAYOUT_DEEP_SHARE - l->bytes[LAYOUT_GATHERED];
    int64_t many = room / slab - (p->slab_cut + slab - 1) / slab;
    l->n_slabs = p->deep ? max64(LAYOUT_SLABS, many) : LAYOUT_SLABS;
    l->bytes[LAYOUT_SLAB] = l->n_slabs * slab;
}

/* Weights and what goes with each parameter. */
static void lay_out_params(const plan *p, const mt_backend *backend, void *device, layout *l)
{
    const model *m = p->m;
    const plan_request *r = &p->request;
    int64_t esize = mt_dtype_size(r->compute);
    int64_t join = 0, sum = 0;
    for (int32_t u = 0; u < m->n_units; u++) {
        const tpl *t = m->units[u].t;
        l->weight_stride = max64(l->weight_stride, layout_align(p->tpl[u]->buffer_bytes));
        l->n_slots += t->n_params;
        l->n_sums += p->tpl[u]->n_sums;
        for (uint32_t s = 0; s < t->n_params; s++) {
            const tpl_param *slot = &t->params[s];
            int64_t n = slot->elems;
            if (slot->gathered) {
                l->gather_cols += slot->info.cols;
                n = l->gather_rows * slot->info.cols;
            }
            sum = max64(sum, backend->sum_squares_scratch(device, n));
        }
        join = max64(join, r->compute == MT_F32 ? p->tpl[u]->buffer_elems
                                                : p->tpl[u]->segment[0].f32_elems);
    }
    for (int32_t i = 0; i < m->n_params; i++) {
        const model_param *q = &m->params[i];
        int64_t slice = layout_slice(q, l->slab_elems);
        l->n_blocks += (q->elems + slice - 1) / slice;
    }
    if (join > 0)
        l->join_bytes =
            layout_align(max64(0, backend->join_scratch(device, min64(join, LAYOUT_JOIN_ELEMS))));
    l->sum_scratch = layout_align(sum);

    l->bytes[LAYOUT_WEIGHTS] = p->weight_buffers * l->weight_stride;
    l->bytes[LAYOUT_JOIN] = l->join_bytes;
    if (l->gather_cols) {
        int64_t weights = layout_align(l->pack_rows * l->gather_cols * 2);
        l->bytes[LAYOUT_GATHERED] = LAYOUT_SETS * weights * (esize / 2);
        l->bytes[LAYOUT_ROW_INDEX] =
            layout_align(m->vocab * 4) + LAYOUT_SETS * layout_align(l->pack_rows * 4);
        if (p->device_sums)
            l->bytes[LAYOUT_ROW_INDEX] += LAYOUT_SETS * layout_align(l->gather_rows * 4);
    }
    if (r->training) {
        l->bytes[LAYOUT_REDUCTIONS] = layout_align(l->n_sums * 8) + l->sum_scratch;
        l->bytes[LAYOUT_HOST_REDUCTIONS] =
            layout_align(l->n_sums * 8) + layout_align(l->n_blocks * 8);
    }
}

/* Does a unit that is cut form a gradient of its input elsewhere than in that of its output? */
static bool cut_out_of_place(const tpl_plan *t)
{
    for (uint32_t i = 0; i < t->t->n_in && t->n_segments > 1; i++)
        if (t->d_in_place[i] < 0)
            return true;
    return false;
}

/* Activations and scratch of the units. */
static void lay_out_values(const plan *p, layout *l)
{
    const plan_request *r = &p->request;
    int32_t n_units = p->m->n_units;
    int64_t most = 0, widest = 0, tuple = 0, work = 0, saved = 0, outs = 0, spare = 1;
    for (int32_t u = 0; u < n_units; u++) {
        const tpl_plan *t = p->tpl[u];
        bool last = u == n_units - 1;
        work = max64(work, t->work_bytes[0]);
        if (r->training)
            work = max64(work, t->work_bytes[1]);
        if (r->context)
            work = max64(work, t->generate_work_bytes);
        saved += saved_bytes(p, u);
        if (r->training || r->context)
            l->bytes[LAYOUT_HOST_OFFSETS] += layout_offsets_bytes(t->t) * r->micro_batches;
        l->n_aux_losses += t->t->adds_loss;
        if (last)
            break;
        l->carried_stride = max64(l->carried_stride, layout_align(t->carry_bytes));
        /* All its micro-batches then hold both. */
        spare = cut_out_of_place(t) ? p->group_batches : spare;
        outs += layout_out_bytes(t);
        most = max64(most, layout_out_bytes(t));
        tuple = max64(tuple, t->t->n_out);
        for (uint32_t i = 0; i < t->t->n_out; i++)
            widest = max64(widest, layout_align(t->out_bytes[i]));
    }
    l->activation_stride = most;
    l->value_stride = widest;
    l->n_values = tuple * (p->group_batches + spare);
    l->bytes[LAYOUT_CARRIED] = l->carried_stride * p->group_batches;
    l->tally_stride = layout_align(p->m->tally * (int64_t)sizeof(double));
    l->bytes[LAYOUT_TALLIES] = l->tally_stride * p->group_batches;
    l->bytes[LAYOUT_WORK] = layout_align(work);
    l->bytes[LAYOUT_LOSS] = layout_align(p->tpl[n_units - 1]->out_bytes[0]);
    if (r->training) {
        l->bytes[LAYOUT_ACTIVATIONS] = outs * p->group_batches;
        l->bytes[LAYOUT_ACTIVATION_GRADS] = l->n_values * widest;
        l->bytes[LAYOUT_SAVED] = saved;
        l->bytes[LAYOUT_HOST_AUX_LOSS] = layout_align(l->n_aux_losses * r->micro_batches * 4);
    } else {
        l->bytes[LAYOUT_ACTIVATIONS] = 2 * most * p->group_batches;
    }
}

void layout_make(const plan *p, const mt_backend *backend, void *device, layout *ret)
{
    const plan_request *r = &p->request;
    const model *m = p->m;
    layout l = { .tokens = p->tpl[0]->bounds.tokens,
                 .documents = p->tpl[0]->bounds.documents,
                 .gather_rows = p->tpl[0]->bounds.gather_rows,
                 .grad_size = mt_dtype_size(r->gradient_dtype),
                 .grad_plane = plan_needs_grad_plane(p) };
    l.narrow_plane = r->training && r->max_grad_norm > 0 && !l.grad_plane && !p->held;
    l.slab_elems = LAYOUT_SLAB_ELEMS;
    l.pack_rows = l.gather_rows;
    if (p->device_sums) /* whose rows are those of the whole step */
        l.pack_rows = min64(l.gather_rows, p->group_batches * r->micro_tokens);
    lay_out_visits(p, &l);
    if (r->training)
        lay_out_grads(p, &l);
    lay_out_params(p, backend, device, &l);
    if (r->training)
        lay_out_slabs(p, &l);
    lay_out_values(p, &l);

    l.stream_elems = layout_align(l.tokens * 4) / 4;
    l.streams = p->device_sums ? STREAM_GRAD_ROWS + 1 : STREAM_GRAD_ROWS;
    l.micro_elems = l.streams * l.stream_elems + layout_align((l.documents + 1) * 4) / 4;
    l.bytes[LAYOUT_BATCH] = LAYOUT_SETS * p->group_batches * l.micro_elems * 4;
    l.bytes[LAYOUT_HOST_BATCH] = l.bytes[LAYOUT_BATCH];
    l.bytes[LAYOUT_HOST_LOSS] =
        layout_align((r->training ? r->micro_batches : p->group_batches) * l.tokens * 4);
    if (r->context) {
        for (int32_t u = 0; u < m->n_units; u++)
            l.bytes[LAYOUT_STATE] += layout_align(p->tpl[u]->state_bytes);
        /* The rows that are asked for travel with the logits. */
        l.bytes[LAYOUT_LOGITS] = LAYOUT_LOGIT_ROWS * m->vocab * 4 + 256;
        l.bytes[LAYOUT_LOGITS] = layout_align(l.bytes[LAYOUT_LOGITS]);
        l.bytes[LAYOUT_HOST_LOGITS] = l.bytes[LAYOUT_LOGITS];
    }
    /* Of two steps: what each micro-batch takes of every visit, its copies, and what workers do. */
    int64_t events = p->groups * (l.n_visits * (p->group_batches + 4) +
                                  l.pack_rows * l.gather_cols / LAYOUT_PACK_ELEMS) +
                     l.n_blocks * (1 + (p->device_sums ? 1 : p->groups));
    l.n_events = max64(LAYOUT_MIN_EVENTS, 2 * events);
    l.bytes[LAYOUT_TIMELINE] = layout_align(l.n_events * 16);

    for (int32_t u = 0; u < m->n_units; u++) {
        int64_t n = m->units[u].t->own_elems;
        l.bytes[LAYOUT_MASTERS] += 2 * layout_align(n * 2);
        if (!r->training || !model_unit_trains(m, u))
            continue;
        for (uint32_t s = 0; s < r->n_states; s++)
            l.bytes[LAYOUT_STATES] += layout_align(n * mt_dtype_size(r->states[s].dtype));
        if (l.grad_plane)
            l.bytes[LAYOUT_GRAD_PLANE] += layout_align(n * 4);
    }
    *ret = l;
}
