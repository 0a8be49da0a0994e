/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases of operations, for every backend. What a pointer is given for (attr, documents, numbers)
 * must outlive the case. `starts` are the cumulative beginnings of documents, one more than there
 * are documents.
 */
#ifndef MT_TEST_OP_CASES_H
#define MT_TEST_OP_CASES_H

#include "op.h"

/* x [t, k] times w [n, k], and a bias [n]. */
op_case linear_case(int64_t t, int64_t n, int64_t k, bool bias);
/* The same without a bias, y in the statistics dtype. */
op_case exact_linear_case(int64_t t, int64_t n, int64_t k);
/* Tokens take the rows of a table [table_rows, cols] that `rows` names. */
op_case embedding_case(int64_t t, const int32_t *rows, int64_t table_rows, int64_t cols);

/* ---- mixtures of experts --------------------------------------------------------------------- */

op_case router_case(const mt_router_attr *a, int64_t t, int64_t experts, bool bias);
/* slots [t, k] is a permutation of the t k rows. */
op_case dispatch_case(int64_t t, int64_t k, int64_t cols, const int32_t *slots);
op_case combine_case(int64_t t, int64_t k, int64_t cols, const int32_t *slots);
/* Rows [offsets[e], offsets[e + 1]) of x [.., k] times the w [n, k] of expert e. */
op_case grouped_case(const int32_t *offsets, int64_t experts, int64_t n, int64_t k, bool bias);
/* slots [t, k], offsets [experts + 1], targets [t]; tally, of a mode that has one, what other
 * layers left. */
op_case balance_case(const mt_balance_attr *a, const int32_t *starts, int64_t documents,
                     int64_t experts, int64_t k, const int32_t *slots, const int32_t *offsets,
                     const int32_t *targets, const double *tally);

/* ---- columns --------------------------------------------------------------------------------- */

op_case slice_case(const mt_slice_attr *a, int64_t t, int64_t cols);
/* Parts of up to three values, as a->cols says. */
op_case concat_case(const mt_concat_attr *a, int64_t t);

/* ---- attention and the loss ------------------------------------------------------------------ */

op_case attention_case(const int32_t *starts, int64_t documents, const mt_attn_attr *a, bool sinks);

/* Every fifth target is ignored. */
void some_targets(int32_t *targets, int64_t t, int64_t vocab);
op_case xent_case(int64_t t, int64_t hidden, int64_t vocab, const mt_xent_attr *a,
                  const int32_t *targets);

/* ---- gated delta nets ------------------------------------------------------------------------ */

op_case conv_case(const int32_t *starts, int64_t documents, int64_t cols, int64_t width);
/* stat: a_log and dt_bias are streamed in the statistics dtype. */
op_case decay_case(int64_t t, int64_t heads, bool stat);
op_case delta_case(const int32_t *starts, int64_t documents, const mt_delta_attr *a);

/* What check_generation keeps for them. */
op_value conv_state(const op_case *conv);
op_value delta_state(const mt_delta_attr *a);
/* Keys and values of `capacity` tokens. */
op_value attention_state(const mt_attn_attr *a, int part, int64_t capacity);

#endif
