/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs: a plan's straight-line code. A step is one kernel call whose operands are references,
 * a region and an offset in it; binding turns them into pointers. Private to core/template.
 */
#ifndef MT_CORE_PROGRAM_H
#define MT_CORE_PROGRAM_H

#include "graph.h"

/* Memory that a binding gives a base for. */
typedef enum region {
    REGION_NONE, /* absent operand */
    REGION_WEIGHTS,
    REGION_GRADS,
    REGION_SAVED,
    REGION_WORK,
    REGION_STATE,
    REGION_CARRY,
    REGION_IN,
    REGION_OUT = REGION_IN + MT_UNIT_MAX_IO,
    REGION_D_OUT = REGION_OUT + MT_UNIT_MAX_IO,
    REGION_D_IN = REGION_D_OUT + MT_UNIT_MAX_IO,
    REGIONS = REGION_D_IN + MT_UNIT_MAX_IO
} region;

typedef struct ref {
    int32_t where; /* region */
    mt_dtype dtype;
    int64_t offset; /* bytes */
    mt_rows rows;
    int64_t cols, ld;
} ref;

typedef struct step {
    int32_t node; /* -1: copy in[0] to out[0], whole tensors */
    bool backward;
    tpl_stage stage;
    uint32_t accumulate; /* bit i: d_in[i] is added to */
    uint32_t
        accumulate_later; /* bit i: d_in[i] is added to after the first micro-batch of a group */
    ref in[MT_OP_MAX_IN], out[MT_OP_MAX_OUT], aux[MT_OP_MAX_AUX];
    ref d_out[MT_OP_MAX_OUT], d_in[MT_OP_MAX_IN];
    ref state[MT_OP_MAX_STATE];      /* inference, where the plan has a context */
    int64_t work_offset, work_bytes; /* the kernel's scratch, in REGION_WORK */
    const mt_kernel *kernel;
} step;

struct tpl_program {
    int32_t n_steps;
    step *steps;
};

/* Fills a call with everything but pointers, at the plan's bounds: what workspace() looks at. Bases
 * may be NULL; then present operands point to a dummy. */
void program_fill_call(const tpl_plan *p, const step *s, void *const *base, const mt_batch *batch,
                       mt_pass pass, mt_op_call *ret);

/* Where every slot lies in which segment: fills those members of p. */
mt_status segment_lay_out(tpl_plan *p);

/* Bytes that the operations between experts' products read and write in one run of the program. */
int64_t segment_between_bytes(const tpl_plan *p, const struct tpl_program *prog);

/* Narrows a call of an operation by expert to the experts of a segment. */
void segment_take_experts(const tpl_plan *p, int32_t segment, mt_op_call *c);

#endif
