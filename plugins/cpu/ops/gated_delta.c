/* SPDX-License-Identifier: Apache-2.0
 *
 * gated_delta: the cut into tasks and where everything lies. The arithmetic is in gated_delta.inc:
 * chunks of MT_DELTA_CHUNK tokens as matrix products (arXiv 2412.06464, section 3.3), in FP32, or
 * in FP64 for FP64. Forward is a task for each document and v head; backward for each document and
 * k head, whose v heads share the gradients of q and k.
 */
#include "sum_rows.h"

#include <math.h>

enum { IN_Q, IN_K, IN_V, IN_G, IN_BETA };
enum { CHUNK = MT_DELTA_CHUNK };

/* A task: head `k_head` of one document, tokens [first, end). */
typedef struct delta {
    const mt_op_call *c;
    const mt_delta_attr *a;
    cpu_gemm_fn *gemm;
    int64_t document, first, end;
    int64_t k_head;
    int64_t group; /* v heads of a k head */
} delta;

static delta delta_of(cpu_isa isa, const mt_op_call *c, int64_t document, int64_t k_head)
{
    const mt_delta_attr *a = c->attr;
    return (delta){ .c = c,
                    .a = a,
                    .gemm = cpu_gemm_for(isa),
                    .document = document,
                    .first = c->batch.doc_starts[document],
                    .end = c->batch.doc_starts[document + 1],
                    .k_head = k_head,
                    .group = a->v_heads / a->k_heads };
}

/* Elements from the start of aux to the state of `v_head` before the chunk that starts at `t`. */
static int64_t checkpoint(const delta *d, int64_t t, int64_t v_head)
{
    int64_t slot = mt_delta_slot(d->document, d->first) + (t - d->first) / CHUNK;
    return (slot * d->a->v_heads + v_head) * d->a->k_dim * d->a->v_dim;
}

#define REAL       float
#define REAL_DTYPE MT_F32
#define MATH(fn)   fn##f
#define FORM(name) name##_f32
#include "gated_delta.inc"

#define REAL       double
#define REAL_DTYPE MT_F64
#define MATH(fn)   fn
#define FORM(name) name##_f64
#include "gated_delta.inc"

static int64_t delta_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    (void)phase;
    const mt_delta_attr *a = c->attr;
    return c->batch.documents * (backward ? a->k_heads : a->v_heads);
}

static void delta_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task,
                      void *scratch)
{
    (void)phase;
    const mt_delta_attr *a = c->attr;
    bool wide = c->in[IN_V].dtype == MT_F64;
    if (backward) {
        delta d = delta_of(isa, c, task / a->k_heads, task % a->k_heads);
        (wide ? backward_f64 : backward_f32)(&d, scratch);
    } else {
        int64_t v_head = task % a->v_heads;
        delta d = delta_of(isa, c, task / a->v_heads, v_head / (a->v_heads / a->k_heads));
        (wide ? forward_f64 : forward_f32)(&d, v_head, scratch);
    }
}

static int64_t delta_scratch(const mt_op_call *c, bool backward)
{
    const mt_delta_attr *a = c->attr;
    return c->in[IN_V].dtype == MT_F64 ? scratch_f64(a, backward) * (int64_t)sizeof(double)
                                       : scratch_f32(a, backward) * (int64_t)sizeof(float);
}

const cpu_op cpu_op_gated_delta = {
    .name = "gated_delta",
    .tasks = delta_tasks,
    .scratch = delta_scratch,
    .run_scratch = delta_run,
};
