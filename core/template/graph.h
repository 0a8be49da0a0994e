/* SPDX-License-Identifier: Apache-2.0
 *
 * The recorded graph of a template: private to core/template.
 */
#ifndef MT_CORE_GRAPH_H
#define MT_CORE_GRAPH_H

#include "../base/arena.h"
#include "template.h"

typedef enum value_source { VALUE_INPUT, VALUE_PARAM, VALUE_OUT, VALUE_AUX } value_source;

/* One value. A view is `cols` columns of another value, from column `col` on. */
typedef struct value {
    value_source source;
    mt_shape shape;
    int32_t index; /* which input, parameter slot, output or aux of its node */
    int32_t node;  /* producer; -1 for inputs and parameters */
    mt_val base;   /* >= 0: this is a view */
    int64_t col;
    int32_t output; /* which output of the unit it is, -1: none */
    int32_t uses;   /* operands that name it, outputs included */
} value;

/* One operation in order of execution. */
typedef struct node {
    const mt_op_def *def;
    tpl_stage stage;
    const void *attr;
    mt_op_shape shape;
    uint32_t n_in, n_out, n_aux;
    mt_val in[MT_OP_MAX_IN], out[MT_OP_MAX_OUT], aux[MT_OP_MAX_AUX];
    bool skipped; /* merged into an earlier sibling, or its result is a view: not executed */
} node;

struct tpl_graph {
    arena mem;
    value *values;
    int32_t n_values, cap_values;
    node *nodes;
    int32_t n_nodes, cap_nodes;
    tpl_param *params;
    int32_t n_params, cap_params;
    int32_t
        *param_group; /* slots of one group are adjacent in the layout; the group's first slot */
    mt_val in[MT_UNIT_MAX_IO], out[MT_UNIT_MAX_IO];
};

/* The value whose memory v lives in. */
static inline mt_val graph_base(const struct tpl_graph *g, mt_val v)
{
    return g->values[v].base >= 0 ? g->values[v].base : v;
}

/* Does a gradient flow to v? Parameters unless frozen, inputs, and what depends on them. */
bool graph_needs_grad(const struct tpl_graph *g, mt_val v);

/* Appends a value; -1 when out of memory. */
mt_val graph_add_value(struct tpl_graph *g, value_source source, mt_shape shape, int32_t producer,
                       int32_t index);

/* Runs siblings that share their input as one operation: merges nodes and groups parameters. */
mt_status graph_merge_siblings(struct tpl_graph *g);

/* Makes the results of view operations views where that changes nothing. After merging. */
void graph_alias_views(struct tpl_graph *g);

/* Orders nodes by stage: what does not depend on experts, the experts, what does; within each as
 * they were. The order is the same whether or not the unit is cut there, and so are all bits. */
mt_status graph_sort_stages(struct tpl_graph *g);

/* The offsets of rows that all operations by expert go by; MT_NONE where there is no such operation
 * or they go by several. */
mt_val graph_offsets(const struct tpl_graph *g);

/* Fills experts, the router's bias and parts of t, and parts of every parameter slot. After
 * sorting. */
void graph_find_experts(struct tpl_graph *g, tpl *t);

/* Assigns every parameter slot its offset; fills own_elems and flat_elems of t. */
void graph_lay_out_params(struct tpl_graph *g, tpl *t);

/* What a policy saves and recomputes. */
typedef struct graph_choice {
    bool *saved;      /* [n_values] */
    bool *recomputed; /* [n_nodes] */
} graph_choice;

/* Bytes of `ret`'s arrays come from `mem`. A unit that is cut at its experts saves what they hand
 * on, so that its backward need not begin with theirs. */
mt_status graph_choose(const struct tpl_graph *g, tpl_policy policy, bool cut, arena *mem,
                       graph_choice *ret);

/* Checks a parameter's declaration and copies it deeply into `mem`: the defaults of its sources are
 * filled in, and it has at least one layout. Errors name the parameter. */
mt_status graph_copy_param(const mt_param_info *info, arena *mem, mt_param_info *ret);

#endif
