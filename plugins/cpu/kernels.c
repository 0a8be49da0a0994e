/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of kernels: each operation's entry in ops/ behind the functions of mt_kernel.
 */
#include "device.h"

/* Every operation of the backend. The macros below make one mt_kernel of each. */
#define CPU_OPS(X)                                                                                 \
    X(embedding)                                                                                   \
    X(linear)                                                                                      \
    X(rmsnorm)                                                                                     \
    X(rope)                                                                                        \
    X(act)                                                                                         \
    X(glu)                                                                                         \
    X(add)                                                                                         \
    X(mul)                                                                                         \
    X(scale)                                                                                       \
    X(slice)                                                                                       \
    X(concat)                                                                                      \
    X(router)                                                                                      \
    X(dispatch)                                                                                    \
    X(grouped_linear)                                                                              \
    X(balance_loss)                                                                                \
    X(causal_conv)                                                                                 \
    X(log_decay)                                                                                   \
    X(gated_delta)                                                                                 \
    X(combine)                                                                                     \
    X(attention)                                                                                   \
    X(linear_cross_entropy)

#define OP_FUNCTIONS(id)                                                                           \
    static void forward_##id(void *device, void *queue, const mt_op_call *c)                       \
    {                                                                                              \
        (void)device;                                                                              \
        cpu_enqueue_op(queue, &cpu_op_##id, c, false);                                             \
    }                                                                                              \
    static void backward_##id(void *device, void *queue, const mt_op_call *c)                      \
    {                                                                                              \
        (void)device;                                                                              \
        cpu_enqueue_op(queue, &cpu_op_##id, c, true);                                              \
    }                                                                                              \
    static int64_t workspace_##id(const void *device, const mt_op_call *c, bool backward)          \
    {                                                                                              \
        return cpu_op_work(device, &cpu_op_##id, c, backward);                                     \
    }

#define OP_KERNEL(id) { sizeof(mt_kernel), 0, #id, forward_##id, backward_##id, workspace_##id },

CPU_OPS(OP_FUNCTIONS)

static const mt_kernel kernels[] = { CPU_OPS(OP_KERNEL) };

const mt_kernel *cpu_kernel(const void *device, const char *op)
{
    (void)device;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].op, op) == 0)
            return &kernels[i];
    return NULL;
}
