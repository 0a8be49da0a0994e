/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of kernels: each operation's entry in ops/ behind the functions of mt_kernel.
 */
#include "cuda.h"

#include <megatrain/kernels.h>

static void run_kernel(cuda_device *d, cuda_queue *q, const char *name, const cuda_op *op,
                       const mt_op_call *c, bool backward)
{
    int64_t need = op->workspace ? op->workspace(d, c, backward) : 0;
    cuda_use(d);
    if (c->work_bytes < need) {
        cuda_fail(d, MT_ERR_INTERNAL, "%s needs %lld bytes of work, the call brings %lld", name,
                  (long long)need, (long long)c->work_bytes);
        return;
    }
    (backward ? op->backward : op->forward)(d, q, c);
    cuda_launched(d, name);
}

static int64_t kernel_workspace(const cuda_device *d, const cuda_op *op, const mt_op_call *c,
                                bool backward)
{
    cuda_work_fn *fn = op->plan ? op->plan : op->workspace;
    return fn ? fn(d, c, backward) : 0;
}

#define MT_KERNEL_OP(id) &cuda_op_##id

MT_OPERATIONS(MT_KERNEL_FUNCTIONS)

static const mt_kernel kernels[] = { MT_OPERATIONS(MT_KERNEL_ENTRY) };

const mt_kernel *cuda_kernel(const void *device, const char *op)
{
    (void)device;
    return mt_kernel_find(kernels, sizeof kernels / sizeof *kernels, op);
}
