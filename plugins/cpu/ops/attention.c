/* SPDX-License-Identifier: Apache-2.0
 *
 * attention: masks, the cut into tasks, kept keys and values, the gradient of the sinks. The
 * arithmetic is in attention_reference.c (plain C, any dtype) and attention_fast.c (GEMMs and
 * vectors).
 */
#include "attention.h"

#include <math.h>

static int64_t parts(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

attn attn_of(const mt_op_call *c, bool backward)
{
    const mt_attn_attr *attr = c->attr;
    attn a = { .c = c, .attr = attr, .k = c->in[ATTN_K], .v = c->in[ATTN_V] };
    a.tokens = backward ? c->d_out[0].rows : c->out[0].rows;
    a.group = attr->heads / attr->kv_heads;
    a.query_blocks = parts(a.tokens, ATTN_QUERIES);
    a.key_blocks = parts(a.tokens, ATTN_KEYS);
    if (c->pass == MT_PASS_DECODE && c->state[0].data) {
        a.first = c->used;
        a.one_document = true;
        a.k = c->state[0];
        a.v = c->state[1];
        a.k.rows = a.v.rows = c->used + a.tokens;
    }
    return a;
}

/* Number of the document that token t belongs to. */
static int64_t document_of(const mt_batch *b, int64_t t)
{
    int64_t low = 0, high = b->documents;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (b->doc_starts[middle] <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

void attn_sees_block(const attn *a, int64_t row, int64_t n, int64_t *lo, int64_t *hi)
{
    const mt_batch *b = &a->c->batch;
    int64_t window = a->attr->window;
    int64_t document = a->one_document ? 0 : document_of(b, row);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = a->first + row + i, start = 0;
        if (!a->one_document) {
            while (document + 1 < b->documents && b->doc_starts[document + 1] <= at)
                document++;
            start = b->doc_starts[document];
        }
        lo[i] = window > 0 && at - window + 1 > start ? at - window + 1 : start;
        hi[i] = at + 1;
    }
}

void attn_sees(const attn *a, int64_t i, int64_t *ret_lo, int64_t *ret_hi)
{
    attn_sees_block(a, i, 1, ret_lo, ret_hi);
}

int64_t attn_seen_until(const attn *a, int64_t j)
{
    const mt_batch *b = &a->c->batch;
    int64_t end = b->doc_starts[document_of(b, j) + 1];
    return a->attr->window > 0 && j + a->attr->window < end ? j + a->attr->window : end;
}

static const attn_form *form_of(cpu_isa isa, mt_dtype dtype)
{
    if (dtype == MT_F64)
        return &attn_reference_f64;
    if (cpu_rows_for(isa))
        return &attn_fast;
    return dtype == MT_BF16 ? &attn_reference_bf16 : &attn_reference_f32;
}

/* ---- kept keys and values -------------------------------------------------------------------- */

static bool keeps(const mt_op_call *c)
{
    return c->state[0].data && (c->pass == MT_PASS_PREFILL || c->pass == MT_PASS_DECODE);
}

static void keep(const mt_op_call *c, int64_t task)
{
    int64_t to = c->pass == MT_PASS_DECODE ? c->used : 0;
    for (int part = 0; part < 2; part++) {
        const mt_tensor *t = &c->in[part ? ATTN_V : ATTN_K];
        char *kept = c->state[part].data;
        int64_t size = mt_dtype_size(t->dtype);
        int64_t end = (task + 1) * CPU_ROWS_PER_TASK;
        for (int64_t i = task * CPU_ROWS_PER_TASK; i < t->rows && i < end; i++)
            memcpy(kept + (to + i) * t->cols * size, (char *)t->data + i * t->ld * size,
                   (size_t)(t->cols * size));
    }
}

/* ---- sinks ----------------------------------------------------------------------------------- */

static bool wants_sinks(const mt_op_call *c)
{
    return c->n_in > ATTN_SINKS && c->d_in[ATTN_SINKS].data;
}

static double element(const void *p, mt_dtype dtype, int64_t i)
{
    if (dtype == MT_F32)
        return ((const float *)p)[i];
    if (dtype == MT_F64)
        return ((const double *)p)[i];
    return mt_bf16_to_f32(((const uint16_t *)p)[i]);
}

/* d sink_h = - sum over i of e^(sink_h - lse_i) (dO_i . O_i) */
static void sink_grad(const attn *a, int64_t h)
{
    const mt_op_call *c = a->c;
    mt_tensor lse = c->aux[0], d = c->d_in[ATTN_SINKS];
    double sink = element(c->in[ATTN_SINKS].data, c->in[ATTN_SINKS].dtype, h), sum = 0;
    for (int64_t i = 0; i < a->tokens; i++)
        sum -= exp(sink - element(lse.data, lse.dtype, attn_stat(a, i, h))) *
               element(c->work, lse.dtype, attn_delta(a, i, h));
    if (c->d_accumulate >> ATTN_SINKS & 1u)
        sum += element(d.data, d.dtype, h);
    if (d.dtype == MT_F64)
        ((double *)d.data)[h] = sum;
    else
        ((float *)d.data)[h] = (float)sum;
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* Forward: [keep keys and values], attention. Backward: dO . O, then all gradients. */
static int32_t attention_phases(const mt_op_call *c, bool backward)
{
    return backward || keeps(c) ? 2 : 1;
}

typedef struct grad_tasks {
    int64_t keys, queries, sinks;
} grad_tasks;

static grad_tasks grad_tasks_of(const attn *a)
{
    const mt_op_call *c = a->c;
    grad_tasks n = { 0 };
    if (c->d_in[ATTN_K].data || c->d_in[ATTN_V].data)
        n.keys = a->key_blocks * a->attr->kv_heads;
    if (c->d_in[ATTN_Q].data)
        n.queries = a->query_blocks * a->attr->heads;
    if (wants_sinks(c))
        n.sinks = a->attr->heads;
    return n;
}

static int64_t attention_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    attn a = attn_of(c, backward);
    if (!backward)
        return phase == 0 && keeps(c) ? parts(a.tokens, CPU_ROWS_PER_TASK)
                                      : a.query_blocks * a.attr->heads;
    if (phase == 0)
        return a.query_blocks;
    grad_tasks n = grad_tasks_of(&a);
    return n.keys + n.queries + n.sinks;
}

/* Rows of block `block` of `size` out of `total`. */
static int64_t rows_in(int64_t block, int64_t size, int64_t total)
{
    return total - block * size < size ? total - block * size : size;
}

static void attention_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                          int64_t task, void *scratch)
{
    attn a = attn_of(c, backward);
    const cpu_rows *rows = cpu_rows_for(isa);
    const attn_form *form = form_of(isa, a.k.dtype);
    int64_t heads = a.attr->heads, kv_heads = a.attr->kv_heads;
    if (!backward && phase == 0 && keeps(c)) {
        keep(c, task);
    } else if (!backward) {
        /* The last rows see most keys: they start first. */
        int64_t block = a.query_blocks - 1 - task / heads;
        form->forward(&a, rows, block * ATTN_QUERIES, rows_in(block, ATTN_QUERIES, a.tokens),
                      task % heads, scratch);
    } else if (phase == 0) {
        form->delta(&a, rows, task * ATTN_QUERIES, rows_in(task, ATTN_QUERIES, a.tokens), 0,
                    scratch);
    } else {
        grad_tasks n = grad_tasks_of(&a);
        if (task < n.keys) {
            int64_t block = task / kv_heads;
            form->grad_keys(&a, rows, block * ATTN_KEYS, rows_in(block, ATTN_KEYS, a.tokens),
                            task % kv_heads, scratch);
        } else if (task < n.keys + n.queries) {
            task -= n.keys;
            int64_t block = a.query_blocks - 1 - task / heads;
            form->grad_queries(&a, rows, block * ATTN_QUERIES,
                               rows_in(block, ATTN_QUERIES, a.tokens), task % heads, scratch);
        } else {
            sink_grad(&a, task - n.keys - n.queries);
        }
    }
}

/* dO . O of every row and head, in the statistics dtype (at most 8 bytes). */
static int64_t attention_workspace(const mt_op_call *c, bool backward)
{
    const mt_attn_attr *attr = c->attr;
    if (!backward)
        return 0;
    return c->d_out[0].rows * attr->heads * (c->d_out[0].dtype == MT_F64 ? 8 : 4);
}

/* attention_fast.c's blocks: operands, scores and their gradients, sums. The reference needs less
 * than that: two rows. */
static int64_t attention_scratch(const mt_op_call *c, bool backward)
{
    const mt_attn_attr *attr = c->attr;
    (void)backward;
    int64_t dims = attr->qk_dim + attr->v_dim;
    return (dims * (ATTN_QUERIES + 2 * ATTN_KEYS) + 2 * ATTN_QUERIES * ATTN_KEYS) *
           (int64_t)sizeof(float);
}

const cpu_op cpu_op_attention = {
    .name = "attention",
    .phases = attention_phases,
    .tasks = attention_tasks,
    .workspace = attention_workspace,
    .scratch = attention_scratch,
    .run_scratch = attention_run,
};
