/* SPDX-License-Identifier: Apache-2.0
 *
 * A template: one layer described without weights, and what the core derives from it. Built once
 * from an architecture's build function; holds no pointer to any weight. Thread-safe once built.
 */
#ifndef MT_CORE_TEMPLATE_H
#define MT_CORE_TEMPLATE_H

#include <megatrain/arch.h>
#include <megatrain/backend.h>

/* What backward finds saved, and what it recomputes. All three give the same bits. */
typedef enum tpl_policy {
    TPL_KEEP = 0,   /* every tensor that backward reads */
    TPL_SELECT = 1, /* outputs of GEMMs and attention; cheap operations are recomputed */
    TPL_INPUT = 2   /* only the unit's input; everything is recomputed once */
} tpl_policy;
enum { TPL_POLICIES = 3 };

/* "keep", "select", "input". */
const char *tpl_policy_name(tpl_policy p);

/* The parts of a program that is cut at the experts, in order of execution; in backward `before` is
 * what comes before the experts' backward. A program that is not cut is all `before`. */
typedef enum tpl_stage { TPL_BEFORE = 0, TPL_EXPERTS = 1, TPL_AFTER = 2 } tpl_stage;
enum { TPL_STAGES = 3 };

/* Alignment, in elements, of parameters that start a group in the flat layout. */
enum { TPL_PARAM_ALIGN = 64 };

/* A parameter slot. In the unit's flat buffer, slots that the unit owns come first and in the same
 * order and at the same element offsets as in the host store; aliases follow. */
typedef struct tpl_param {
    mt_param_info info; /* lives with the template; always with a layout, without defaults */
    int64_t offset;     /* elements from the start of the flat layout */
    int64_t elems;      /* rows * cols, or cols for a vector */
    bool gathered;      /* rows are picked by the batch; last among the owned slots */
    int32_t parts;      /* equal parts in which it may be streamed: t->parts, or 1 */
} tpl_param;

/* A parameter as sources (mt_source) see it: so many matrices of so many rows and columns. A vector
 * is a matrix of one column, a parameter that is no stack one matrix. [pure] */
int64_t tpl_matrices(const mt_param_info *p);
int64_t tpl_matrix_rows(const mt_param_info *p);
int64_t tpl_matrix_cols(const mt_param_info *p);
/* Does it consist of vectors? */
bool tpl_is_vector(const mt_param_info *p);

typedef struct tpl {
    const char *name;
    uint32_t n_params;
    const tpl_param *params;
    int64_t own_elems;    /* flat elements that the unit owns, padding included */
    int64_t flat_elems;   /* own_elems + aliases */
    uint32_t n_in, n_out; /* the tuple that it takes and passes on */
    int64_t in_cols[MT_UNIT_MAX_IO], out_cols[MT_UNIT_MAX_IO];
    bool makes_loss;             /* output 0 is the loss, [T, 1] in the statistics dtype */
    bool adds_loss;              /* an operation emits one beside it (MT_OP_EMITS_LOSS) */
    int64_t tally;               /* doubles of the model's tally (mt_op_shape); 0: it uses none */
    double gemm_flops_per_token; /* forward */
    double scan_flops_per_token; /* forward, of recurrences */
    double recompute_gemm_flops[TPL_POLICIES]; /* per token, that backward adds under each policy */
    double recompute_scan_flops[TPL_POLICIES];
    double recompute_attn_flops[TPL_POLICIES]; /* per pair, likewise */
    double attn_flops_per_pair;                /* forward, summed over attention operations */
    int64_t attn_window;                       /* the widest; 0: unlimited */
    int32_t parts;     /* equal parts of the experts, each of which may be a segment; 1: none may */
    int32_t experts;   /* to which one router sends rows; 0: there are none, or several routers */
    int32_t bias_slot; /* of the bias that is added to that router's scores; -1: there is none, or
                          it is another unit's */
    struct tpl_graph *graph; /* private */
} tpl;

/* Builds and derives. Errors name the template and the operation. [main] */
mt_status tpl_create(const char *name, mt_build_fn build, const void *arch, const void *arg,
                     tpl **ret);
void tpl_destroy(tpl *t); /* accepts NULL */

/* Elements of one part of all stacks together; 0 where t->parts is 1. [pure] */
int64_t tpl_part_elems(const tpl *t);

/* ---- a plan: offsets and bytes for given bounds ---------------------------------------------- */

typedef struct tpl_bounds {
    int64_t tokens;        /* most tokens of a micro-batch */
    int64_t documents;     /* most documents of a micro-batch */
    int64_t gather_rows;   /* most distinct rows of a gathered table on the device at once */
    mt_dtype compute;      /* MT_F32, MT_BF16; MT_F64 in gradient checks */
    int64_t context;       /* most tokens of a document that is generated; 0: none is */
    int32_t segment_parts; /* parts of the experts that are streamed together; 0: all of the unit */
} tpl_bounds;

/* Elements [first, first + n) of a slot in a segment, `parts` parts of it. */
typedef struct tpl_slice {
    int32_t slot, parts;
    int64_t first, n;
    int64_t at;  /* elements from the start of the segment */
    int32_t sum; /* number of its first part among all parts of the unit */
} tpl_slice;

/* What is on the device at once, by ascending `at`. */
typedef struct tpl_segment {
    int64_t elems; /* with padding */
    int32_t n_slices;
    tpl_slice *slice;
    /* Where the compute dtype is BF16: elements [f32_first, f32_first + f32_elems), from the start
     * of slot `f32_slot` on, are wanted in FP32 too, from byte `f32_at` of the buffer on. */
    int64_t f32_first, f32_elems, f32_at;
    int32_t f32_slot;
    int64_t bytes; /* of weights */
} tpl_segment;

/* Exact bytes for these bounds; every region is used from offset 0 and 256-byte aligned. A plan
 * serves every micro-batch within its bounds. */
typedef struct tpl_plan {
    const tpl *t;
    tpl_policy policy;
    tpl_bounds bounds;
    /* Where in `work` the loss that the unit adds to the model's own is left, in the statistics
     * dtype, by a training forward and by an inference one; where the unit is cut, by `before`. -1:
     * it adds none. */
    int64_t loss_offset[2];
    int64_t
        weight_bytes;   /* flat parameters in the compute dtype (gathered ones: gather_rows rows) */
    int64_t grad_bytes; /* flat gradients in the statistics dtype */
    int64_t saved_bytes; /* a micro-batch, from its forward to its backward */
    int64_t carry_bytes; /* a micro-batch, from one stage of a pass to the next */
    int64_t
        between_bytes[2];        /* that what lies between experts' products reads and writes of a
                                  * micro-batch, forward and backward, once for every segment of them */
    bool backward_reads;         /* any parameter; an embedding's does not */
    double recompute_gemm_flops; /* per token, that backward adds */
    double recompute_scan_flops;
    double recompute_attn_flops; /* per pair, likewise */
    int64_t work_bytes[2];       /* scratch of a train/eval forward, of a backward */
    int64_t generate_work_bytes; /* scratch of prefill and decode */
    int64_t state_bytes;         /* what generation keeps of a document from call to call */
    int64_t in_bytes[MT_UNIT_MAX_IO], out_bytes[MT_UNIT_MAX_IO]; /* boundary values */
    /* d_in[i] is formed in the memory of d_out[d_in_place[i]]: give the same pointer for both;
     * -1: d_in[i] needs its own memory. */
    int32_t d_in_place[MT_UNIT_MAX_IO];
    /* [n_params] device offset of each slot in elements, in its segment (equals tpl_param.offset
     * unless a gathered slot or a cut made the layout shorter) */
    int64_t *slot_offset;
    int64_t device_elems; /* of the device layout, all segments together */
    int64_t buffer_elems; /* of the largest segment */
    int64_t buffer_bytes; /* weights of the largest segment */
    /* Segment 0 is the whole unit, or where it is cut all but the experts, which the others hold.
     */
    int32_t n_segments;
    tpl_segment *segment;
    tpl_slice *slice;               /* of all segments */
    int32_t n_sums;                 /* parts of all slices */
    struct tpl_program *program[3]; /* forward, backward, generate; private */
    const mt_backend *backend;
    void *device;
} tpl_plan;

/* Fails with MT_ERR_UNSUPPORTED when the backend lacks a kernel, naming it. [main] */
mt_status tpl_plan_create(const tpl *t, tpl_policy policy, const tpl_bounds *bounds,
                          const mt_backend *backend, void *device, tpl_plan **ret);
void tpl_plan_destroy(tpl_plan *p); /* accepts NULL */

/* ---- running --------------------------------------------------------------------------------- */

/* Bind: bases of the regions; everything else is pointer arithmetic. All device pointers. `in`,
 * `out` and `saved` must still hold in backward what forward left there. An evaluation or
 * generation pass reads neither `grads` nor `saved`. */
typedef struct tpl_binding {
    void *weights;   /* weight_bytes; those of `segment` */
    void *grads;     /* grad_bytes; train passes only; those of `segment` */
    bool accumulate; /* add to `grads`; false: the first micro-batch of a group overwrites */
    /* [tokens] where gradients of gathered tables have other rows than the tables: batch.rows of
     * operations' backward; NULL: the same ones. */
    const int32_t *grad_rows;
    void *in[MT_UNIT_MAX_IO], *out[MT_UNIT_MAX_IO];
    void *d_out[MT_UNIT_MAX_IO]; /* backward; contents are used up */
    void *d_in[MT_UNIT_MAX_IO];  /* backward; overwritten */
    void *saved;
    void *work;
    void *state;  /* state_bytes; prefill and decode only */
    int64_t used; /* prefill and decode: tokens of the document in `state` */
    /* Where the unit is cut. A pass runs `before` with segment 0, `experts` with every other
     * segment, in any order, then `after`: in forward no parameter is read there, in backward it
     * wants segment 0 again, and only there are its gradients formed. */
    tpl_stage stage;
    int32_t segment;
    void *carry; /* carry_bytes of this micro-batch */
    /* The tally of this micro-batch, tpl.tally doubles; in training and evaluation. The caller
     * clears it before the first unit's forward and keeps it to the last one's backward. */
    double *tally;
} tpl_binding;

/* Enqueue one micro-batch through the unit. Parameters that a pass over the whole template gives
 * no gradient are impossible: tpl_create refuses them. [main] */
void tpl_forward(const tpl_plan *p, void *queue, const tpl_binding *bind, const mt_batch *batch,
                 mt_pass pass);
void tpl_backward(const tpl_plan *p, void *queue, const tpl_binding *bind, const mt_batch *batch);

/* Where a forward leaves the offsets of the experts' rows, [experts + 1] int32 on the device: one
 * of training, or the stage `before` of any where the unit is cut. Where t->experts is not 0.
 * [pure] */
const void *tpl_expert_offsets(const tpl_plan *p, const tpl_binding *bind, mt_pass pass);

/* ---- operations ------------------------------------------------------------------------------ */

/* The definition of a built-in operation, NULL when there is none of that name. */
const mt_op_def *op_find(const char *name);
/* All built-in operations, for tests and tools; NULL-terminated. */
const mt_op_def *const *op_list(void);

#endif
