/* SPDX-License-Identifier: Apache-2.0
 *
 * From a graph to programs: where every value lives, which gradients share memory, and how much
 * scratch that takes. Three programs: a training forward, its backward, and inference.
 */
#include "../base/status.h"
#include "program.h"

#include <stdlib.h>

enum { REGION_ALIGN = 256, PROGRAM_FORWARD = 0, PROGRAM_BACKWARD = 1, PROGRAM_INFER = 2 };

/* A piece of REGION_WORK and the steps during which it must stay. One that must stay from a stage
 * to the next is carried instead: other micro-batches use REGION_WORK in between. */
typedef struct piece {
    int64_t bytes, offset;
    int32_t first, last; /* steps, inclusive */
    bool carried;
} piece;

/* Where a value, or a gradient, is. */
typedef struct place {
    int32_t where;  /* region; REGION_NONE: nowhere yet */
    int64_t offset; /* for REGION_SAVED and REGION_WEIGHTS; unused for REGION_WORK */
    int32_t piece;  /* for REGION_WORK: index of its piece */
} place;

typedef struct maker {
    tpl_plan *p;
    const struct tpl_graph *g;
    arena mem; /* everything here but the steps */
    graph_choice choice;
    place *saved_at; /* [n_values] places that hold across forward and backward */

    /* the program that is being made */
    struct tpl_program *prog;
    int32_t cap_steps;
    place *at; /* [n_values] of this program */
    piece *pieces;
    int32_t n_pieces, cap_pieces;
    mt_status status;
    bool cut;        /* at the experts */
    tpl_stage stage; /* of the steps that are being made */

    /* backward only */
    bool *made;       /* [n_nodes] recomputed already */
    place *grad;      /* [n_values] gradient of each activation */
    bool *written;    /* [n_values] the gradient holds something */
    bool *consumed;   /* [n_values] its producer's backward has run */
    bool *param_done; /* [n_params] gradient written by this program or by forward */
} maker;

static int64_t align_up(int64_t x, int64_t to)
{
    return (x + to - 1) / to * to;
}

static mt_dtype kind_dtype(mt_dtype compute, mt_kind kind)
{
    if (kind == MT_KIND_COMPUTE)
        return compute;
    if (kind == MT_KIND_INDEX)
        return MT_I32;
    return compute == MT_F64 ? MT_F64 : MT_F32;
}

static int64_t bound_rows(const tpl_bounds *b, mt_rows r)
{
    return r.per_token * b->tokens + r.per_document * b->documents + r.fixed;
}

static int64_t value_bytes(const tpl_plan *p, mt_val v)
{
    const mt_shape *s = &p->t->graph->values[v].shape;
    return align_up(bound_rows(&p->bounds, s->rows) * s->cols *
                        mt_dtype_size(kind_dtype(p->bounds.compute, s->kind)),
                    REGION_ALIGN);
}

/* ---- pieces of work memory --------------------------------------------------------------------
 */

static int32_t add_piece(maker *k, int64_t bytes, int32_t first)
{
    if (k->n_pieces == k->cap_pieces) {
        int32_t cap = k->cap_pieces ? 2 * k->cap_pieces : 64;
        piece *next = arena_array(&k->mem, (size_t)cap, sizeof *next);
        if (!next) {
            k->status = MT_ERR_NOMEM;
            return 0;
        }
        if (k->n_pieces)
            memcpy(next, k->pieces, (size_t)k->n_pieces * sizeof *next);
        k->pieces = next;
        k->cap_pieces = cap;
    }
    k->pieces[k->n_pieces] = (piece){ .bytes = bytes, .first = first, .last = first, .offset = -1 };
    return k->n_pieces++;
}

static int by_size(const void *a, const void *b, void *arg)
{
    const piece *pieces = arg;
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (pieces[x].bytes != pieces[y].bytes)
        return pieces[x].bytes < pieces[y].bytes ? 1 : -1;
    return x < y ? -1 : 1;
}

/* Gives every piece, carried or not, an offset so that no two of that kind that live at the same
 * time overlap: largest first, each at the lowest offset that is free. Returns the total. */
static int64_t pack_pieces(maker *k, bool carried)
{
    int32_t n = 0;
    int32_t *order = arena_array(&k->mem, (size_t)k->n_pieces + 1, sizeof *order);
    if (!order) {
        k->status = MT_ERR_NOMEM;
        return 0;
    }
    for (int32_t i = 0; i < k->n_pieces; i++)
        if (k->pieces[i].carried == carried)
            order[n++] = i;
    qsort_r(order, (size_t)n, sizeof *order, by_size, k->pieces);
    int64_t total = 0;
    for (int32_t i = 0; i < n; i++) {
        piece *a = &k->pieces[order[i]];
        int64_t offset = 0;
        for (bool moved = true; moved;) {
            moved = false;
            for (int32_t j = 0; j < i; j++) {
                const piece *b = &k->pieces[order[j]];
                bool together = a->first <= b->last && b->first <= a->last;
                if (together && offset < b->offset + b->bytes && b->offset < offset + a->bytes) {
                    offset = b->offset + b->bytes;
                    moved = true;
                }
            }
        }
        a->offset = offset;
        if (offset + a->bytes > total)
            total = offset + a->bytes;
    }
    return total;
}

/* Finds what is carried. It stays for all of its first and last stage, since the experts' stage
 * runs once for each segment. */
static void find_carried(maker *k)
{
    const struct tpl_program *prog = k->prog;
    for (int32_t i = 0; i < k->n_pieces; i++) {
        piece *p = &k->pieces[i];
        tpl_stage first = prog->steps[p->first].stage, last = prog->steps[p->last].stage;
        if (first == last)
            continue;
        p->carried = true;
        while (p->first > 0 && prog->steps[p->first - 1].stage == first)
            p->first--;
        while (p->last < prog->n_steps - 1 && prog->steps[p->last + 1].stage == last)
            p->last++;
    }
}

/* ---- references -------------------------------------------------------------------------------
 */

static ref make_ref(const maker *k, mt_val v, const place *at)
{
    const value *val = &k->g->values[v];
    mt_val base = graph_base(k->g, v);
    mt_dtype dtype = kind_dtype(k->p->bounds.compute, val->shape.kind);
    ref r = { .where = at->where,
              .dtype = dtype,
              .offset = at->where == REGION_WORK ? at->piece : at->offset,
              .rows = val->shape.rows,
              .cols = val->shape.cols,
              .ld = k->g->values[base].shape.cols };
    /* Until pieces are packed, a work reference's offset is its piece; the column comes on top. */
    if (val->base >= 0) {
        if (at->where == REGION_WORK)
            r.offset |= (val->col * mt_dtype_size(dtype)) << 32;
        else
            r.offset += val->col * mt_dtype_size(dtype);
    }
    return r;
}

static void touch(maker *k, const place *at, int32_t step_index)
{
    if (at->where == REGION_WORK)
        k->pieces[at->piece].last = step_index;
}

/* Reference to a value that exists already. */
static ref use_value(maker *k, mt_val v, int32_t step_index)
{
    const value *val = &k->g->values[v];
    const tpl_plan *p = k->p;
    if (val->source == VALUE_PARAM) {
        const tpl_param *param = &k->g->params[val->index];
        const tpl_segment *s = &p->segment[0];
        int64_t offset = p->slot_offset[val->index];
        place at = { REGION_WEIGHTS, offset * mt_dtype_size(p->bounds.compute), 0 };
        if (val->shape.kind == MT_KIND_STAT && s->f32_elems)
            at.offset = s->f32_at + (offset - s->f32_first) * (int64_t)sizeof(float);
        ref r = make_ref(k, v, &at);
        if (param->gathered)
            r.rows = (mt_rows){ 0, 0, p->bounds.gather_rows };
        return r;
    }
    mt_val base = graph_base(k->g, v);
    touch(k, &k->at[base], step_index);
    return make_ref(k, v, &k->at[base]);
}

static step *add_step(maker *k)
{
    if (k->prog->n_steps == k->cap_steps) {
        int32_t cap = k->cap_steps ? 2 * k->cap_steps : 32;
        step *next = realloc(k->prog->steps, (size_t)cap * sizeof *next);
        if (!next) {
            k->status = status_nomem("a template plan", (size_t)cap * sizeof *next);
            return NULL;
        }
        k->prog->steps = next;
        k->cap_steps = cap;
    }
    step *s = &k->prog->steps[k->prog->n_steps++];
    memset(s, 0, sizeof *s);
    s->stage = k->stage;
    return s;
}

/* Asks the kernel for its scratch, for the given passes. */
static void add_scratch(maker *k, step *s, int32_t index, const mt_pass *passes, int n_passes)
{
    if (!s->kernel->workspace)
        return;
    for (int i = 0; i < n_passes; i++) {
        mt_op_call call;
        mt_batch batch = { .tokens = k->p->bounds.tokens,
                           .documents = k->p->bounds.documents,
                           .max_document = k->p->bounds.tokens,
                           .n_logit_rows = k->p->bounds.tokens };
        program_fill_call(k->p, s, NULL, &batch, passes[i], &call);
        int64_t bytes =
            align_up(s->kernel->workspace(k->p->device, &call, s->backward), REGION_ALIGN);
        if (bytes > s->work_bytes)
            s->work_bytes = bytes;
    }
    if (s->work_bytes)
        s->work_offset = add_piece(k, s->work_bytes, index);
}

static const mt_kernel *find_kernel(maker *k, const node *n)
{
    const mt_kernel *kernel = k->p->backend->kernel(k->p->device, n->def->name);
    if (!kernel && k->status == MT_OK)
        k->status =
            status_set(MT_ERR_UNSUPPORTED, "template '%s': backend '%s' has no kernel for '%s'",
                       k->p->t->name, k->p->backend->kind, n->def->name);
    return kernel;
}

/* Where a result that a step is about to write goes. */
static place place_result(maker *k, mt_val v, int32_t index, int program)
{
    const value *val = &k->g->values[v];
    if (val->output >= 0 && program != PROGRAM_BACKWARD)
        return (place){ REGION_OUT + val->output, 0, 0 };
    if (program == PROGRAM_FORWARD && k->choice.saved[v])
        return k->saved_at[v];
    return (place){ REGION_WORK, 0, add_piece(k, value_bytes(k->p, v), index) };
}

/* Gradient reference of a parameter operand. */
static ref param_grad(maker *k, mt_val v, uint32_t bit, step *s)
{
    const value *val = &k->g->values[v];
    const tpl_plan *p = k->p;
    mt_dtype stat = kind_dtype(p->bounds.compute, MT_KIND_STAT);
    bool gathered = k->g->params[val->index].gathered;
    ref r = { .where = REGION_GRADS,
              .dtype = stat,
              .offset = p->slot_offset[val->index] * mt_dtype_size(stat),
              .rows = gathered ? (mt_rows){ 0, 0, p->bounds.gather_rows } : val->shape.rows,
              .cols = val->shape.cols,
              .ld = val->shape.cols };
    if (k->param_done[val->index])
        s->accumulate |= 1u << bit;
    else
        s->accumulate_later |= 1u << bit;
    k->param_done[val->index] = true;
    return r;
}

/* Memory for what the node keeps between calls; rows of a state do not follow the micro-batch. */
static void place_state(maker *k, const node *n, step *s)
{
    const tpl_bounds *b = &k->p->bounds;
    for (uint32_t i = 0; i < n->shape.n_state; i++) {
        const mt_shape *t = &n->shape.state[i];
        int64_t rows = bound_rows(&(tpl_bounds){ .tokens = b->context, .documents = 1 }, t->rows);
        mt_dtype dtype = kind_dtype(b->compute, t->kind);
        s->state[i] = (ref){ .where = REGION_STATE,
                             .dtype = dtype,
                             .offset = k->p->state_bytes,
                             .rows = { 0, 0, rows },
                             .cols = t->cols,
                             .ld = t->cols };
        k->p->state_bytes += align_up(rows * t->cols * mt_dtype_size(dtype), REGION_ALIGN);
    }
}

/* Emits the forward call of a node. */
static void emit_forward(maker *k, int32_t node_index, int program)
{
    const node *n = &k->g->nodes[node_index];
    static const mt_pass train[] = { MT_PASS_TRAIN };
    static const mt_pass infer[] = { MT_PASS_EVAL, MT_PASS_PREFILL, MT_PASS_DECODE };
    int32_t index = k->prog->n_steps;
    step *s = add_step(k);
    if (!s)
        return;
    s->node = node_index;
    if (!(s->kernel = find_kernel(k, n)))
        return;
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            s->in[i] = use_value(k, n->in[i], index);
    for (uint32_t i = 0; i < n->n_out; i++) {
        k->at[n->out[i]] = place_result(k, n->out[i], index, program);
        s->out[i] = make_ref(k, n->out[i], &k->at[n->out[i]]);
    }
    for (uint32_t i = 0; i < n->n_aux; i++) {
        k->at[n->aux[i]] = place_result(k, n->aux[i], index, program);
        s->aux[i] = make_ref(k, n->aux[i], &k->at[n->aux[i]]);
    }
    if (program == PROGRAM_FORWARD && (n->def->flags & MT_OP_GRAD_IN_FORWARD))
        for (uint32_t i = 0; i < n->n_in; i++)
            if (n->in[i] != MT_NONE && k->g->values[n->in[i]].source == VALUE_PARAM &&
                graph_needs_grad(k->g, n->in[i]))
                s->d_in[i] = param_grad(k, n->in[i], i, s);
    if (program == PROGRAM_INFER && k->p->bounds.context)
        place_state(k, n, s);
    if (program == PROGRAM_INFER)
        add_scratch(k, s, index, infer, 3);
    else
        add_scratch(k, s, index, train, 1);
}

/* ---- backward ---------------------------------------------------------------------------------
 */

/* Recomputes what the value needs, in forward order. */
static void ensure(maker *k, mt_val v)
{
    v = graph_base(k->g, v);
    const value *val = &k->g->values[v];
    if (val->node < 0 || k->choice.saved[v] || val->output >= 0 || k->made[val->node])
        return;
    k->made[val->node] = true;
    const node *n = &k->g->nodes[val->node];
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            ensure(k, n->in[i]);
    emit_forward(k, val->node, PROGRAM_BACKWARD);
}

static bool same_place(const place *a, const place *b)
{
    if (a->where != b->where || a->where == REGION_NONE)
        return false;
    return a->where == REGION_WORK ? a->piece == b->piece : a->offset == b->offset;
}

/* Does any other value still need what its gradient holds in this very place? */
static bool shared(const maker *k, mt_val v)
{
    for (mt_val u = 0; u < k->g->n_values; u++)
        if (u != v && k->g->values[u].base < 0 && k->written[u] && !k->consumed[u] &&
            same_place(&k->grad[u], &k->grad[v]))
            return true;
    return false;
}

/* Memory for the gradient of base value v, if it has none. */
static void place_grad(maker *k, mt_val v, int32_t index)
{
    if (k->grad[v].where != REGION_NONE)
        return;
    const value *val = &k->g->values[v];
    if (val->source == VALUE_INPUT)
        k->grad[v] = (place){ REGION_D_IN + val->index, 0, 0 };
    else
        k->grad[v] = (place){ REGION_WORK, 0, add_piece(k, value_bytes(k->p, v), index) };
}

/* Gives v a gradient memory of its own with the same content, because others still need the
 * present one and v's is about to change. */
static void unshare(maker *k, mt_val v)
{
    int32_t index = k->prog->n_steps;
    step *s = add_step(k);
    if (!s)
        return;
    s->node = -1;
    touch(k, &k->grad[v], index);
    s->in[0] = make_ref(k, v, &k->grad[v]);
    k->grad[v].where = REGION_NONE;
    place_grad(k, v, index);
    s->out[0] = make_ref(k, v, &k->grad[v]);
}

/* May v's gradient simply be the memory that holds the gradient of `of`? */
static bool may_alias(const maker *k, mt_val v, mt_val of)
{
    const value *val = &k->g->values[v];
    const place *at = &k->grad[of];
    if (val->base >= 0 || val->output >= 0 || k->grad[v].where != REGION_NONE)
        return false;
    if (k->g->values[of].base >= 0)
        return false;
    if (val->source != VALUE_INPUT)
        return true;
    /* An input's gradient ends up outside, in memory that no other input's has. */
    if (at->where < REGION_D_OUT || at->where >= REGION_D_IN)
        return false;
    for (mt_val u = 0; u < k->g->n_values; u++)
        if (u != v && k->g->values[u].source == VALUE_INPUT && same_place(&k->grad[u], at))
            return false;
    return true;
}

/* Emits the backward call of a node for the operands in `wanted`. */
static void emit_backward(maker *k, int32_t node_index, uint32_t wanted)
{
    const node *n = &k->g->nodes[node_index];
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE && (n->shape.backward_in >> i & 1))
            ensure(k, n->in[i]);
    for (uint32_t i = 0; i < n->n_out; i++)
        if (n->shape.backward_out >> i & 1)
            ensure(k, n->out[i]);
    for (uint32_t i = 0; i < n->n_aux; i++)
        ensure(k, n->aux[i]);
    for (uint32_t i = 0; i < n->n_in; i++) {
        mt_val v = n->in[i];
        if ((wanted >> i & 1) && k->g->values[v].source != VALUE_PARAM && k->written[v] &&
            k->g->values[v].base < 0 && shared(k, v))
            unshare(k, v);
    }

    int32_t index = k->prog->n_steps;
    step *s = add_step(k);
    if (!s)
        return;
    s->node = node_index;
    s->backward = true;
    if (!(s->kernel = find_kernel(k, n)))
        return;
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE && (n->shape.backward_in >> i & 1))
            s->in[i] = use_value(k, n->in[i], index);
    for (uint32_t i = 0; i < n->n_out; i++) {
        mt_val base = graph_base(k->g, n->out[i]);
        if (n->shape.backward_out >> i & 1)
            s->out[i] = use_value(k, n->out[i], index);
        if (k->grad[base].where != REGION_NONE) {
            touch(k, &k->grad[base], index);
            s->d_out[i] = make_ref(k, n->out[i], &k->grad[base]);
        }
    }
    for (uint32_t i = 0; i < n->n_aux; i++)
        s->aux[i] = use_value(k, n->aux[i], index);
    for (uint32_t i = 0; i < n->n_in; i++) {
        if (!(wanted >> i & 1))
            continue;
        mt_val v = n->in[i];
        if (k->g->values[v].source == VALUE_PARAM) {
            s->d_in[i] = param_grad(k, v, i, s);
            continue;
        }
        mt_val base = graph_base(k->g, v);
        place_grad(k, base, index);
        touch(k, &k->grad[base], index);
        s->d_in[i] = make_ref(k, v, &k->grad[base]);
        if (k->written[v])
            s->accumulate |= 1u << i;
        k->written[v] = k->written[base] = true;
    }
    static const mt_pass train[] = { MT_PASS_TRAIN };
    add_scratch(k, s, index, train, 1);
}

static void backward_node(maker *k, int32_t node_index)
{
    const node *n = &k->g->nodes[node_index];
    bool in_forward = n->def->flags & MT_OP_GRAD_IN_FORWARD;
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < n->n_in; i++) {
        mt_val v = n->in[i];
        if (v == MT_NONE || (n->shape.no_grad_in >> i & 1) || !graph_needs_grad(k->g, v))
            continue;
        if (in_forward && k->g->values[v].source == VALUE_PARAM)
            continue;
        wanted |= 1u << i;
    }
    if (!wanted)
        return;
    if ((n->def->flags & MT_OP_PASS_THROUGH) && n->n_out == 1) {
        mt_val out = n->out[0];
        for (uint32_t i = 0; i < n->n_in; i++) {
            mt_val v = n->in[i];
            if (!(wanted >> i & 1) || k->g->values[v].source == VALUE_PARAM ||
                !may_alias(k, v, out))
                continue;
            k->grad[v] = k->grad[out];
            k->written[v] = true;
            wanted &= ~(1u << i);
        }
    }
    if (wanted)
        emit_backward(k, node_index, wanted);
    for (uint32_t i = 0; i < n->n_out; i++)
        k->consumed[n->out[i]] = true;
}

/* ---- whole programs ---------------------------------------------------------------------------
 */

/* Turns piece numbers into offsets. */
static void resolve_ref(const maker *k, ref *r)
{
    if (r->where != REGION_WORK)
        return;
    const piece *p = &k->pieces[r->offset & 0xffffffff];
    r->where = p->carried ? REGION_CARRY : REGION_WORK;
    r->offset = p->offset + (r->offset >> 32);
}

/* The last step of the stage that step `index` is in. */
static int32_t last_of_stage(const struct tpl_program *prog, int32_t index)
{
    while (index + 1 < prog->n_steps && prog->steps[index + 1].stage == prog->steps[index].stage)
        index++;
    return index;
}

static int64_t finish_program(maker *k, int which)
{
    /* A loss stays until its reader, outside, has had a chance. */
    place *loss = NULL;
    for (int32_t i = 0; i < k->g->n_nodes && which != PROGRAM_BACKWARD; i++)
        if (k->g->nodes[i].def->flags & MT_OP_EMITS_LOSS)
            loss = &k->at[k->g->nodes[i].out[0]];
    if (loss)
        touch(k, loss, last_of_stage(k->prog, k->pieces[loss->piece].first));
    /* And so do the offsets of experts' rows, which are carried where the unit is cut. */
    mt_val offsets = graph_offsets(k->g);
    if (which == PROGRAM_FORWARD && !k->cut && offsets != MT_NONE)
        touch(k, &k->at[offsets], k->prog->n_steps - 1);
    find_carried(k);
    int64_t total = pack_pieces(k, false), carried = pack_pieces(k, true);
    k->p->carry_bytes = carried > k->p->carry_bytes ? carried : k->p->carry_bytes;
    if (k->status != MT_OK)
        return 0;
    for (int32_t i = 0; i < k->prog->n_steps; i++) {
        step *s = &k->prog->steps[i];
        for (int j = 0; j < MT_OP_MAX_IN; j++) {
            resolve_ref(k, &s->in[j]);
            resolve_ref(k, &s->d_in[j]);
        }
        for (int j = 0; j < MT_OP_MAX_OUT; j++) {
            resolve_ref(k, &s->out[j]);
            resolve_ref(k, &s->d_out[j]);
        }
        for (int j = 0; j < MT_OP_MAX_AUX; j++)
            resolve_ref(k, &s->aux[j]);
        if (s->work_bytes)
            s->work_offset = k->pieces[s->work_offset].offset;
    }
    if (loss)
        k->p->loss_offset[which == PROGRAM_INFER] = k->pieces[loss->piece].offset;
    return total;
}

static void start_program(maker *k, int which)
{
    k->prog = k->p->program[which];
    k->cap_steps = 0;
    k->n_pieces = 0;
    for (mt_val v = 0; v < k->g->n_values; v++) {
        k->at[v] = k->saved_at[v];
        if (k->g->values[v].source == VALUE_INPUT)
            k->at[v] = (place){ REGION_IN + k->g->values[v].index, 0, 0 };
        if (which == PROGRAM_BACKWARD && k->g->values[v].output >= 0)
            k->at[v] = (place){ REGION_OUT + k->g->values[v].output, 0, 0 };
    }
}

static int64_t make_forward(maker *k, int which)
{
    start_program(k, which);
    for (int32_t i = 0; i < k->g->n_nodes && k->status == MT_OK; i++) {
        k->stage = k->cut ? k->g->nodes[i].stage : TPL_BEFORE;
        if (!k->g->nodes[i].skipped)
            emit_forward(k, i, which);
    }
    return finish_program(k, which);
}

/* Makes again, before the experts' turn, what v's node or those of the experts before it take from
 * the dense part. */
static void ensure_dense(maker *k, mt_val v)
{
    v = graph_base(k->g, v);
    const value *val = &k->g->values[v];
    if (val->node < 0 || k->choice.saved[v] || val->output >= 0)
        return;
    const node *n = &k->g->nodes[val->node];
    if (n->stage != TPL_EXPERTS) {
        ensure(k, v);
        return;
    }
    for (uint32_t i = 0; i < n->n_in; i++)
        if (n->in[i] != MT_NONE)
            ensure_dense(k, n->in[i]);
}

static void ensure_dense_of_experts(maker *k)
{
    for (int32_t i = k->g->n_nodes - 1; i >= 0; i--) {
        const node *n = &k->g->nodes[i];
        if (n->stage != TPL_EXPERTS || n->skipped)
            continue;
        for (uint32_t j = 0; j < n->n_in; j++)
            if (n->in[j] != MT_NONE && (n->shape.backward_in >> j & 1))
                ensure_dense(k, n->in[j]);
        for (uint32_t j = 0; j < n->n_out; j++)
            if (n->shape.backward_out >> j & 1)
                ensure_dense(k, n->out[j]);
        for (uint32_t j = 0; j < n->n_aux; j++)
            ensure_dense(k, n->aux[j]);
    }
}

static int64_t make_backward(maker *k)
{
    static const tpl_stage turn[TPL_STAGES] = {
        [TPL_AFTER] = TPL_BEFORE, [TPL_EXPERTS] = TPL_EXPERTS, [TPL_BEFORE] = TPL_AFTER
    };
    start_program(k, PROGRAM_BACKWARD);
    k->stage = TPL_BEFORE;
    for (int i = 0; i < MT_UNIT_MAX_IO; i++)
        if (k->g->out[i] != MT_NONE && k->g->values[k->g->out[i]].shape.kind == MT_KIND_COMPUTE) {
            k->grad[k->g->out[i]] = (place){ REGION_D_OUT + i, 0, 0 };
            k->written[k->g->out[i]] = true;
        }
    for (int32_t i = k->g->n_nodes - 1; i >= 0 && k->status == MT_OK; i--) {
        tpl_stage stage = k->cut ? turn[k->g->nodes[i].stage] : TPL_BEFORE;
        if (k->stage == TPL_BEFORE && stage == TPL_EXPERTS)
            ensure_dense_of_experts(k);
        k->stage = stage;
        if (!k->g->nodes[i].skipped)
            backward_node(k, i);
    }
    for (int i = 0; i < MT_UNIT_MAX_IO; i++) {
        k->p->d_in_place[i] = -1;
        if (k->g->in[i] == MT_NONE)
            continue;
        const place *at = &k->grad[k->g->in[i]];
        if (at->where >= REGION_D_OUT && at->where < REGION_D_IN)
            k->p->d_in_place[i] = at->where - REGION_D_OUT;
    }
    return finish_program(k, PROGRAM_BACKWARD);
}

static mt_status make_programs(maker *k)
{
    tpl_plan *p = k->p;
    size_t n = (size_t)k->g->n_values + 1;
    k->saved_at = arena_array(&k->mem, n, sizeof *k->saved_at);
    k->at = arena_array(&k->mem, n, sizeof *k->at);
    k->grad = arena_array(&k->mem, n, sizeof *k->grad);
    k->written = arena_array(&k->mem, n, sizeof *k->written);
    k->consumed = arena_array(&k->mem, n, sizeof *k->consumed);
    k->made = arena_array(&k->mem, (size_t)k->g->n_nodes + 1, sizeof *k->made);
    k->param_done = arena_array(&k->mem, (size_t)k->g->n_params + 1, sizeof *k->param_done);
    if (!k->saved_at || !k->at || !k->grad || !k->written || !k->consumed || !k->made ||
        !k->param_done)
        return MT_ERR_NOMEM;
    mt_status status = graph_choose(k->g, p->policy, k->cut, &k->mem, &k->choice);
    if (status != MT_OK)
        return status;
    for (int32_t i = 0; i < k->g->n_nodes; i++)
        if (k->choice.recomputed[i]) {
            p->recompute_gemm_flops += k->g->nodes[i].shape.gemm_flops_per_token;
            p->recompute_scan_flops += k->g->nodes[i].shape.scan_flops_per_token;
            p->recompute_attn_flops += k->g->nodes[i].shape.attn_flops_per_pair;
        }
    for (mt_val v = 0; v < k->g->n_values; v++)
        if (k->choice.saved[v]) {
            k->saved_at[v] = (place){ REGION_SAVED, p->saved_bytes, 0 };
            p->saved_bytes += value_bytes(p, v);
        }
    p->work_bytes[0] = make_forward(k, PROGRAM_FORWARD);
    if (k->status == MT_OK)
        p->work_bytes[1] = make_backward(k);
    if (k->status == MT_OK)
        p->generate_work_bytes = make_forward(k, PROGRAM_INFER);
    for (int i = 0; i < 2 && k->status == MT_OK; i++)
        p->between_bytes[i] = segment_between_bytes(p, p->program[i]);
    if (p->generate_work_bytes > p->work_bytes[0])
        p->work_bytes[0] = p->generate_work_bytes; /* evaluation runs the inference program */
    return k->status;
}

mt_status tpl_plan_create(const tpl *t, tpl_policy policy, const tpl_bounds *bounds,
                          const mt_backend *backend, void *device, tpl_plan **ret)
{
    if (bounds->segment_parts < 0 || (bounds->segment_parts > 0 && t->parts == 1))
        return status_set(MT_ERR_INTERNAL, "template '%s' cannot be cut at experts", t->name);
    if (bounds->tokens < 1 || bounds->documents < 1 || (int)policy < 0 ||
        (int)policy >= (int)TPL_POLICIES)
        return status_set(MT_ERR_INTERNAL,
                          "template '%s': a plan needs at least a token and a document", t->name);
    maker k = { .g = t->graph, .cut = bounds->segment_parts > 0 };
    mt_status status = MT_ERR_NOMEM;
    tpl_plan *p = calloc(1, sizeof *p);
    if (!p)
        goto out;
    k.p = p;
    *p = (tpl_plan){ .t = t,
                     .policy = policy,
                     .bounds = *bounds,
                     .loss_offset = { -1, -1 },
                     .backend = backend,
                     .device = device };
    for (int i = 0; i < 3; i++)
        p->program[i] = calloc(1, sizeof *p->program[i]);
    if (!p->program[0] || !p->program[1] || !p->program[2])
        goto out;
    if ((status = segment_lay_out(p)) != MT_OK)
        goto out;
    for (int i = 0; i < MT_UNIT_MAX_IO; i++) {
        if (t->graph->in[i] != MT_NONE)
            p->in_bytes[i] = value_bytes(p, t->graph->in[i]);
        if (t->graph->out[i] != MT_NONE)
            p->out_bytes[i] = value_bytes(p, t->graph->out[i]);
    }
    status = make_programs(&k);

out:
    arena_finish(&k.mem);
    if (status != MT_OK) {
        tpl_plan_destroy(p);
        return p ? status : status_nomem("a template plan", sizeof *p);
    }
    *ret = p;
    return MT_OK;
}

void tpl_plan_destroy(tpl_plan *p)
{
    if (!p)
        return;
    for (int i = 0; i < 3; i++)
        if (p->program[i]) {
            free(p->program[i]->steps);
            free(p->program[i]);
        }
    free(p->slot_offset);
    free(p->segment);
    free(p->slice);
    free(p);
}
