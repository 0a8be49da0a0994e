/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend's table of kernels, for backends that run every operation by the same function:
 *
 *     static void run_kernel(void *device, void *queue, const char *name, const my_op *op,
 *                            const mt_op_call *call, bool backward);
 *     static int64_t kernel_workspace(const void *device, const my_op *op, const mt_op_call *call,
 *                                     bool backward);
 *     #define MT_KERNEL_OP(id) &my_op_##id
 *     MT_OPERATIONS(MT_KERNEL_FUNCTIONS)
 *     static const mt_kernel kernels[] = { MT_OPERATIONS(MT_KERNEL_ENTRY) };
 *
 * Of the two functions the types of device, queue and op are the backend's own. One that lacks some
 * operations makes a list of its own in place of MT_OPERATIONS (template.h).
 */
#ifndef MEGATRAIN_KERNELS_H
#define MEGATRAIN_KERNELS_H

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_KERNEL_FUNCTIONS(id)                                                                    \
    static void forward_##id(void *device, void *queue, const mt_op_call *call)                    \
    {                                                                                              \
        run_kernel(device, queue, #id, MT_KERNEL_OP(id), call, false);                             \
    }                                                                                              \
    static void backward_##id(void *device, void *queue, const mt_op_call *call)                   \
    {                                                                                              \
        run_kernel(device, queue, #id, MT_KERNEL_OP(id), call, true);                              \
    }                                                                                              \
    static int64_t workspace_##id(const void *device, const mt_op_call *call, bool backward)       \
    {                                                                                              \
        return kernel_workspace(device, MT_KERNEL_OP(id), call, backward);                         \
    }

#define MT_KERNEL_ENTRY(id)                                                                        \
    { sizeof(mt_kernel), 0, #id, forward_##id, backward_##id, workspace_##id },

/* The entry of `op` among n; NULL where there is none. [pure] */
static inline const mt_kernel *mt_kernel_find(const mt_kernel *kernels, size_t n, const char *op)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(kernels[i].op, op) == 0)
            return &kernels[i];
    return NULL;
}

#ifdef __cplusplus
}
#endif
#endif
