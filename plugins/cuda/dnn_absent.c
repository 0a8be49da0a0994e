/* SPDX-License-Identifier: Apache-2.0
 *
 * In place of dnn.c where cuDNN's header was not there when this was built: no device has it.
 */
#include "dnn.h"

void dnn_open(cuda_device *d)
{
    (void)d;
    mt_log(MT_LOG_DEBUG, "cuDNN is not used: this plugin was built without its header");
}

void dnn_close(cuda_device *d)
{
    (void)d;
}

void dnn_plans_make(const cuda_device *d, const dnn_shape *shapes, int n)
{
    (void)d;
    (void)shapes;
    (void)n;
}

const dnn_plan *dnn_plan_find(const cuda_device *d, const dnn_shape *shape)
{
    (void)d;
    (void)shape;
    return NULL;
}

int64_t dnn_plan_work(const dnn_plan *p)
{
    (void)p;
    return 0;
}

bool dnn_run(cuda_queue *q, const dnn_plan *p, const dnn_launch *launch)
{
    (void)q;
    (void)p;
    (void)launch;
    return false;
}
