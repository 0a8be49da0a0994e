/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of kernels: each operation's entry in ops/ behind the functions of mt_kernel.
 */
#include "device.h"

#include <megatrain/kernels.h>

static void run_kernel(void *device, void *queue, const char *name, const cpu_op *op,
                       const mt_op_call *call, bool backward)
{
    (void)device, (void)name;
    cpu_enqueue_op(queue, op, call, backward);
}

static int64_t kernel_workspace(const void *device, const cpu_op *op, const mt_op_call *call,
                                bool backward)
{
    return cpu_op_work(device, op, call, backward);
}

#define MT_KERNEL_OP(id) &cpu_op_##id

MT_OPERATIONS(MT_KERNEL_FUNCTIONS)

static const mt_kernel kernels[] = { MT_OPERATIONS(MT_KERNEL_ENTRY) };

const mt_kernel *cpu_kernel(const void *device, const char *op)
{
    (void)device;
    return mt_kernel_find(kernels, sizeof kernels / sizeof *kernels, op);
}
