/* SPDX-License-Identifier: Apache-2.0
 *
 * Every region that an engine allocates for a plan, in exact bytes. The plan adds them up and the
 * engine allocates them from the same figures, so the two cannot differ.
 */
#ifndef MT_CORE_LAYOUT_H
#define MT_CORE_LAYOUT_H

#include "plan.h"

enum {
    LAYOUT_GRAD_BUFFERS = 2, /* on the device: one leaves while the next is formed, unless every
                                piece has a buffer of its own */
    LAYOUT_SLABS = 16,       /* gradient slices on their way to the optimizer, at least */
    LAYOUT_SLAB_ELEMS = 1 << 19,
    LAYOUT_BLOCK_ELEMS = 1 << 14, /* gradients that stay in a worker's cache */
    LAYOUT_DEEP_SHARE = 16,       /* with plan.deep: of so many bytes of gradients one has room */
    LAYOUT_FLIGHT = 16,           /* copies out whose end nobody has seen yet */
    LAYOUT_JOIN_ELEMS = 1 << 24,  /* masters that are joined at once: bounds the scratch */
    LAYOUT_PACK_ELEMS = 1 << 17,  /* of a table's rows that a worker packs at a time */
    LAYOUT_SETS = 2,              /* groups whose batches are on the device */
    LAYOUT_LOGIT_ROWS = 16,       /* rows of logits formed at once */
    LAYOUT_MIN_EVENTS = 1 << 15
};

/* What a micro-batch has of every token, an int32 each. */
enum {
    STREAM_IDS,
    STREAM_ROWS,
    STREAM_TARGETS,
    STREAM_POSITIONS,
    STREAM_GRAD_ROWS /* where gradients have other rows: in sums of several groups on the device */
};

typedef enum layout_region {
    /* device */
    LAYOUT_WEIGHTS,
    LAYOUT_GRADS,
    LAYOUT_GRAD_SUMS,
    LAYOUT_ACTIVATIONS,
    LAYOUT_ACTIVATION_GRADS,
    LAYOUT_SAVED,
    LAYOUT_CARRIED,
    LAYOUT_TALLIES,
    LAYOUT_WORK,
    LAYOUT_BATCH,
    LAYOUT_LOSS,
    LAYOUT_JOIN,
    LAYOUT_REDUCTIONS,
    LAYOUT_STATE,
    LAYOUT_LOGITS,
    /* host; the first three make up the store */
    LAYOUT_MASTERS,
    LAYOUT_STATES,
    LAYOUT_GRAD_PLANE,
    LAYOUT_NARROW_PLANE,
    LAYOUT_SLAB,
    LAYOUT_BLOCKS,
    LAYOUT_SHARED_GRADS,
    LAYOUT_GATHERED,
    LAYOUT_ROW_INDEX,
    LAYOUT_HOST_BATCH,
    LAYOUT_HOST_LOSS,
    LAYOUT_HOST_AUX_LOSS,
    LAYOUT_HOST_REDUCTIONS,
    LAYOUT_HOST_LOGITS,
    LAYOUT_HOST_OFFSETS,
    LAYOUT_TIMELINE,
    LAYOUT_REGIONS
} layout_region;

const char *layout_region_name(layout_region r);
static inline plan_tier layout_region_tier(layout_region r)
{
    return r < LAYOUT_MASTERS ? PLAN_DEVICE : PLAN_HOST;
}

typedef struct layout {
    int64_t bytes[LAYOUT_REGIONS];
    int64_t tokens, documents; /* bounds of a micro-batch */
    int64_t n_pieces;          /* that are streamed: units, or segments of those that are cut */
    int64_t n_forward;         /* visits of a forward pass */
    int64_t n_visits;          /* of forward and backward */
    int64_t weight_stride;     /* bytes of a weight buffer */
    int64_t grad_size;         /* bytes of a gradient that leaves the device */
    int64_t sum_stride;        /* bytes of the largest piece's gradients in FP32 */
    int64_t grad_stride;       /* the same as they leave */
    int64_t n_grads;           /* buffers that gradients leave from */
    int64_t leave_bytes;       /* of all of them, unless they leave from the sums */
    int64_t activation_stride; /* inference: bytes of one micro-batch's boundary values */
    int64_t value_stride;      /* bytes of one boundary gradient */
    int64_t n_values;          /* boundary gradients */
    int64_t micro_elems;       /* int32 of a micro-batch: its streams, and the documents' starts */
    int64_t stream_elems;      /* of each of them */
    int64_t streams;
    int64_t trained_elems; /* of all parameters that are updated */
    int64_t n_slabs, slab_elems;
    int64_t block_elems; /* of a worker's block: the most that one call of the optimizer gets */
    int64_t gather_rows, gather_cols; /* rows of gradients; cols: summed over gathered slots */
    int64_t pack_rows;                /* that a group uses, and fetches */
    int64_t n_slots;                  /* parameter slots of all units */
    int64_t n_sums;                   /* parts of them whose squares are summed */
    int64_t n_aux_losses;             /* units that add a loss of their own */
    int64_t carried_stride;           /* bytes of a micro-batch from stage to stage */
    int64_t tally_stride;             /* bytes of a micro-batch's sums over units */
    int64_t n_blocks;                 /* slices of all parameters: partial sums of squares */
    int64_t sum_scratch;              /* bytes */
    int64_t join_bytes;
    int64_t n_events;
    int64_t parked_bytes; /* of buffers in what forward saved for units above */
    int64_t park_apart;   /* of those that find no room there */
    bool own_grads;       /* every piece has a buffer of its own */
    bool leave_sums;      /* and that is its sums */
    bool parked;          /* they may wait there: in their sums, or in what forward saved for units
                           * above, as far as there is room */
    bool grad_plane;      /* FP32, in the store */
    bool narrow_plane;    /* BF16, of parameters with one contribution a step */
} layout;

/* Bytes rounded up to the alignment of device memory. */
static inline int64_t layout_align(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Elements of one slice of parameter p: whole rows for a matrix whose rows fit, fixed by shapes
 * only so that results do not depend on threads. [pure] */
int64_t layout_slice(const model_param *p, int64_t slab_elems);

/* Uses of parameter p by unit slots, itself included. */
int32_t layout_contributors(const model *m, int32_t param);

/* Boundary values of unit u for one micro-batch, bytes. */
int64_t layout_out_bytes(const tpl_plan *t);

/* Bytes of a segment's gradients where all groups are summed on the device. */
int64_t layout_sum_bytes(const tpl_segment *s);

/* Bytes that they take as they leave the device, in elements of `grad_size` bytes. */
int64_t layout_leave_bytes(const tpl_segment *s, int64_t grad_size);

/* Where gradients can wait in what forward saved for units above theirs, which backward is through
 * with when they are formed: ret_at[piece], bytes into the saved activations, -1: nowhere. Returns
 * the bytes of all pieces that must have memory of their own. `ret_at` may be NULL. */
int64_t layout_park(const plan *p, int64_t grad_size, int64_t *ret_at);

/* Bytes of the offsets of experts' rows that a unit's forward leaves on the host for one
 * micro-batch; 0 for a unit without experts. */
int64_t layout_offsets_bytes(const tpl *t);

/* p->request, groups, group_batches, weight_buffers, workers, device_sums, held and tpl[] must be
 * set. [pure] */
void layout_make(const plan *p, const mt_backend *backend, void *device, layout *ret);

#endif
