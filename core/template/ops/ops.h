/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers that shape rules share, and the list of built-in operations: one file each.
 */
#ifndef MT_CORE_OPS_H
#define MT_CORE_OPS_H

#include "../template.h"

#define OP_DECLARE(id) extern const mt_op_def op_##id;
MT_OPERATIONS(OP_DECLARE)

/* Writes the reason of a refusal and returns MT_ERR_INVALID. */
mt_status op_refuse(char *error, size_t size, const char *fmt, ...) MT_PRINTF(3, 4);

static inline bool op_rows_are(const mt_shape *s, mt_rows rows)
{
    return s->rows.per_token == rows.per_token && s->rows.per_document == rows.per_document &&
           s->rows.fixed == rows.fixed;
}

static inline bool op_same_rows(const mt_shape *a, const mt_shape *b)
{
    return op_rows_are(a, b->rows);
}

static inline bool op_row_a_token(const mt_shape *s)
{
    return op_rows_are(s, (mt_rows){ 1, 0, 0 });
}

static inline bool op_present(const mt_shape *s)
{
    return s->cols > 0;
}

/* An activation in the compute dtype? */
static inline bool op_is_activation(const mt_shape *s)
{
    return op_present(s) && !s->is_param && s->kind == MT_KIND_COMPUTE;
}

/* int32s that another operation made? */
static inline bool op_is_index(const mt_shape *s)
{
    return op_present(s) && !s->is_param && s->kind == MT_KIND_INDEX;
}

/* A vector parameter of n elements? */
static inline bool op_is_vector(const mt_shape *s, int64_t n)
{
    return s->is_param && s->rows.fixed == 1 && s->cols == n;
}

/* The shape rule of an element-wise operation on one or two equal operands. */
mt_status op_elementwise(const mt_shape *in, uint32_t operands, mt_op_shape *ret, char *error,
                         size_t size);

#endif
