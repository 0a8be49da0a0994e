/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of kernels: each operation's entry in ops/ behind the functions of mt_kernel.
 */
#include "cuda.h"

/* Every operation of the backend. The macros below make one mt_kernel of each. */
#define CUDA_OPS(X)                                                                                \
    X(embedding)                                                                                   \
    X(linear)                                                                                      \
    X(rmsnorm)                                                                                     \
    X(rope)                                                                                        \
    X(act)                                                                                         \
    X(glu)                                                                                         \
    X(add)                                                                                         \
    X(mul)                                                                                         \
    X(scale)                                                                                       \
    X(attention)                                                                                   \
    X(linear_cross_entropy)                                                                        \
    X(router)                                                                                      \
    X(dispatch)                                                                                    \
    X(grouped_linear)                                                                              \
    X(balance_loss)                                                                                \
    X(causal_conv)                                                                                 \
    X(log_decay)                                                                                   \
    X(gated_delta)                                                                                 \
    X(combine)                                                                                     \
    X(slice)                                                                                       \
    X(concat)

static void run(cuda_device *d, cuda_queue *q, const char *name, const cuda_op *op,
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

static int64_t planned_work(const cuda_device *d, const cuda_op *op, const mt_op_call *c,
                            bool backward)
{
    cuda_work_fn *fn = op->plan ? op->plan : op->workspace;
    return fn ? fn(d, c, backward) : 0;
}

#define OP_FUNCTIONS(id)                                                                           \
    static void forward_##id(void *device, void *queue, const mt_op_call *c)                       \
    {                                                                                              \
        run(device, queue, #id, &cuda_op_##id, c, false);                                          \
    }                                                                                              \
    static void backward_##id(void *device, void *queue, const mt_op_call *c)                      \
    {                                                                                              \
        run(device, queue, #id, &cuda_op_##id, c, true);                                           \
    }                                                                                              \
    static int64_t workspace_##id(const void *device, const mt_op_call *c, bool backward)          \
    {                                                                                              \
        return planned_work(device, &cuda_op_##id, c, backward);                                   \
    }

#define OP_KERNEL(id) { sizeof(mt_kernel), 0, #id, forward_##id, backward_##id, workspace_##id },

CUDA_OPS(OP_FUNCTIONS)

static const mt_kernel kernels[] = { CUDA_OPS(OP_KERNEL) };

const mt_kernel *cuda_kernel(const void *device, const char *op)
{
    (void)device;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].op, op) == 0)
            return &kernels[i];
    return NULL;
}
