/* SPDX-License-Identifier: Apache-2.0
 *
 * What the optimizer's workers are given to do, and the order in which they take it.
 */
#ifndef MT_CORE_ENGINE_WORK_H
#define MT_CORE_ENGINE_WORK_H

#include <megatrain/base.h>

#include <stdbool.h>

typedef enum work_kind {
    WORK_UPDATE_PLANE, /* slices of the gradient plane */
    WORK_UPDATE_SLAB,  /* one slice whose gradient is in a slab */
    WORK_UPDATE_ROWS,  /* of a table: the slab holds the gradients of rows that the batch used */
    WORK_ADD,          /* plane = or += slab */
    WORK_SCATTER,      /* plane rows = or += rows in the slab */
    WORK_SUM_SQUARES,  /* of the plane, a partial sum for each slice */
    WORK_GATHER        /* pack rows of a table's planes for the device */
} work_kind;

typedef struct update_params {
    int64_t step;
    double lr, grad_scale;
} update_params;

/* Elements first .. end of a parameter (of its packed rows for a gather), in slices. */
typedef struct work {
    work_kind kind;
    int32_t param;
    int64_t first, end, slice;
    void *slab;          /* gradients as they leave; becomes free afterwards; NULL: zeros */
    int32_t set;         /* packed rows: of which set */
    int64_t first_row;   /* which of them the slab begins with */
    int64_t pack_offset; /* gather: elements into the set's staging */
    bool first_share;    /* add, scatter: the first contribution of the step */
    bool then_update;    /* add, scatter: the last contribution, update at once */
    bool announced;      /* by pool_announce */
    bool by_row;         /* set by the pool: rows are updated by whoever claims them */
    update_params update;
} work;

/* Does it change masters? */
static inline bool work_updates(const work *w)
{
    return w->kind == WORK_UPDATE_PLANE || w->kind == WORK_UPDATE_SLAB ||
           w->kind == WORK_UPDATE_ROWS || w->then_update;
}

/* Work that waits, in lanes: what is in the lowest lane is taken first, and of a lane what came
 * first. Not locked by itself. */
typedef struct work_queue {
    struct work_node *node; /* [cap] */
    struct work_lane *lane; /* [lanes] */
    int32_t lanes, lowest;  /* no lane below `lowest` has any */
    int32_t next;           /* lane of what was returned last */
    int32_t free;           /* first of the nodes that are not in a lane, -1: none */
    int64_t n;
} work_queue;

/* Room for `cap` pieces of work in lanes 0 .. lanes-1. Free it even if this fails.
 * Errors: MT_ERR_NOMEM. */
mt_status work_queue_init(work_queue *q, int32_t lanes, int32_t cap);
void work_queue_free(work_queue *q);

static inline bool work_queue_full(const work_queue *q)
{
    return q->free < 0;
}

/* There must be room. */
void work_queue_push(work_queue *q, int32_t lane, const work *w);
/* The next one, which stays in the queue: its `first` may be moved on. NULL: there is none. What is
 * in lane `urgent` goes ahead of all; -1: none does. */
work *work_queue_next(work_queue *q, int32_t urgent);
/* Removes what work_queue_next has returned last. */
void work_queue_drop(work_queue *q);

#endif
