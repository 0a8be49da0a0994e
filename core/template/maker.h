/* SPDX-License-Identifier: Apache-2.0
 *
 * The maker of a template's programs: what plan.c, which makes them, shares with maker.c (values,
 * memory and steps) and backward.c (gradients).
 */
#ifndef MT_CORE_TEMPLATE_MAKER_H
#define MT_CORE_TEMPLATE_MAKER_H

#include "program.h"

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

static inline int64_t align_up(int64_t x, int64_t to)
{
    return (x + to - 1) / to * to;
}

/* ---- values and memory (maker.c) ------------------------------------------------------------- */

/* The dtype of a kind of value where the program computes in `compute`. */
mt_dtype maker_dtype(mt_dtype compute, mt_kind kind);
/* Bytes of a value at the plan's bounds, aligned. */
int64_t maker_value_bytes(const tpl_plan *p, mt_val v);

/* A new piece of work memory that is needed from step `first` on; its index. */
int32_t maker_add_piece(maker *k, int64_t bytes, int32_t first);
/* Finds what is carried. */
void maker_find_carried(maker *k);
/* Gives every piece, carried or not, its offset; returns the total. */
int64_t maker_pack_pieces(maker *k, bool carried);

/* The memory at `at` stays until step `step_index`. */
void maker_touch(maker *k, const place *at, int32_t step_index);
/* A reference to value v at a place. Until pieces are packed, the offset of one in REGION_WORK is
 * its piece, with the column above 32 bits. */
ref maker_ref(const maker *k, mt_val v, const place *at);
/* A reference to a value that exists already. */
ref maker_use_value(maker *k, mt_val v, int32_t step_index);
/* Where the gradient of parameter v goes, operand `bit` of step s. */
ref maker_param_grad(maker *k, mt_val v, uint32_t bit, step *s);

/* ---- steps (maker.c) ------------------------------------------------------------------------- */

/* NULL where memory is out; k->status says so. Good until the next one is added. */
step *maker_add_step(maker *k);
/* NULL where the backend has none; k->status says so. */
const mt_kernel *maker_find_kernel(maker *k, const node *n);
/* Asks the kernel for its scratch, for the given passes. */
void maker_add_scratch(maker *k, step *s, int32_t index, const mt_pass *passes, int n_passes);
/* The forward call of a node, in the program PROGRAM_... */
void maker_emit_forward(maker *k, int32_t node_index, int program);

/* ---- gradients (backward.c) ------------------------------------------------------------------ */

/* The backward call of a node, after what it needs has been made again. */
void maker_emit_backward(maker *k, int32_t node_index);
/* Makes again, before the experts' turn, what their backward takes from the dense part. */
void maker_ensure_dense(maker *k);

#endif
