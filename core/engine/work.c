/* SPDX-License-Identifier: Apache-2.0
 *
 * Work in lanes: lists through one array of nodes.
 */
#include "work.h"

#include "../base/status.h"

#include <stdlib.h>

typedef struct work_node {
    work w;
    int32_t next; /* -1: none */
} work_node;

typedef struct work_lane {
    int32_t first, last; /* first is -1: empty */
} work_lane;

mt_status work_queue_init(work_queue *q, int32_t lanes, int32_t cap)
{
    *q = (work_queue){ .node = calloc((size_t)cap, sizeof *q->node),
                       .lane = calloc((size_t)lanes, sizeof *q->lane),
                       .lanes = lanes,
                       .lowest = lanes,
                       .free = cap > 0 ? 0 : -1 };
    if (!q->node || !q->lane)
        return status_nomem("the workers' queue", (size_t)cap * sizeof *q->node);
    for (int32_t i = 0; i < lanes; i++)
        q->lane[i].first = -1;
    for (int32_t i = 0; i < cap; i++)
        q->node[i].next = i + 1 < cap ? i + 1 : -1;
    return MT_OK;
}

void work_queue_free(work_queue *q)
{
    free(q->node);
    free(q->lane);
}

void work_queue_push(work_queue *q, int32_t lane, const work *w)
{
    int32_t i = q->free;
    work_lane *l = &q->lane[lane];
    q->free = q->node[i].next;
    q->node[i] = (work_node){ *w, -1 };
    if (l->first < 0)
        l->first = i;
    else
        q->node[l->last].next = i;
    l->last = i;
    q->lowest = lane < q->lowest ? lane : q->lowest;
    q->n++;
}

work *work_queue_next(work_queue *q, int32_t urgent)
{
    while (q->lowest < q->lanes && q->lane[q->lowest].first < 0)
        q->lowest++;
    q->next = urgent >= 0 && q->lane[urgent].first >= 0 ? urgent : q->lowest;
    return q->next < q->lanes ? &q->node[q->lane[q->next].first].w : NULL;
}

void work_queue_drop(work_queue *q)
{
    work_lane *l = &q->lane[q->next];
    int32_t i = l->first;
    l->first = q->node[i].next;
    q->node[i].next = q->free;
    q->free = i;
    q->n--;
}
