/* SPDX-License-Identifier: Apache-2.0
 *
 * What the forms of attention share: where queries, keys and values lie, which keys a query sees,
 * and how the work is cut.
 */
#ifndef MT_CPU_ATTENTION_H
#define MT_CPU_ATTENTION_H

#include "../rows.h"

enum { ATTN_Q = 0, ATTN_K = 1, ATTN_V = 2, ATTN_SINKS = 3 };
enum { ATTN_QUERIES = 64, ATTN_KEYS = 128 }; /* rows of a task, and of a block inside it */

/* One call, seen by row numbers of the keys. In decode the keys are the kept ones and query row i
 * is key row `first` + i; otherwise first = 0. */
typedef struct attn {
    const mt_op_call *c;
    const mt_attn_attr *attr;
    mt_tensor k, v;
    int64_t tokens; /* query rows */
    int64_t first;
    int64_t group; /* query heads of one key head */
    int64_t query_blocks, key_blocks;
    bool one_document; /* decode: doc_starts does not apply */
} attn;

attn attn_of(const mt_op_call *c, bool backward);

/* Query row i sees key rows [lo, hi). `lo` never falls as i grows. */
void attn_sees(const attn *a, int64_t i, int64_t *ret_lo, int64_t *ret_hi);
/* Fills lo[0..n), hi[0..n) for query rows from `row` on. */
void attn_sees_block(const attn *a, int64_t row, int64_t n, int64_t *lo, int64_t *hi);
/* One past the last query row that sees key row j (train passes). */
int64_t attn_seen_until(const attn *a, int64_t j);

/* The natural log of the sum, and dO . O, of query row i and head h; in the statistics dtype. */
static inline int64_t attn_stat(const attn *a, int64_t i, int64_t h)
{
    return i * a->c->aux[0].ld + h;
}

static inline int64_t attn_delta(const attn *a, int64_t i, int64_t h)
{
    return i * a->attr->heads + h;
}

/* A task: ATTN_QUERIES query rows of one head, or ATTN_KEYS key rows of one key head. */
typedef void attn_task_fn(const attn *a, const cpu_rows *rows, int64_t row, int64_t n, int64_t head,
                          void *scratch);

/* A form of attention. delta: dO . O of some rows, all heads. */
typedef struct attn_form {
    attn_task_fn *forward, *delta, *grad_queries, *grad_keys;
} attn_form;

extern const attn_form attn_reference_f32, attn_reference_f64, attn_reference_bf16, attn_fast;

#endif
