/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of packed documents through cuDNN's graph API: the library, opened when it is there;
 * plans, one for each shape, built ahead of the first step; and running them. What the tensors of
 * a call mean is decided in ops/attention_dnn.cu.
 */
#ifndef MT_CUDA_DNN_H
#define MT_CUDA_DNN_H

#include "cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tensors of a plan; those from DNN_D_OUT on belong to backward. */
enum {
    DNN_Q,
    DNN_K,
    DNN_V,
    DNN_OUT,
    DNN_LSE, /* FP32; the others are BF16 */
    DNN_D_OUT,
    DNN_DQ,
    DNN_DK,
    DNN_DV,
    DNN_DQ_SUM, /* FP32, scratch: where blocks of keys add up dq in any order */
    DNN_TENSORS,
    DNN_FORWARD_TENSORS = DNN_D_OUT,
    DNN_CALL_TENSORS = DNN_DQ_SUM /* those of an operation's call */
};

/* What is fixed in a plan, and the key it is found by: compared as bytes, so zero it first. */
typedef struct dnn_shape {
    int64_t documents; /* of one launch; fewer are followed by empty ones */
    int64_t rows;      /* tokens of a document at most: a multiple of 128 */
    int64_t ld[DNN_TENSORS];
    int32_t heads, kv_heads, qk_dim, v_dim;
    int32_t backward, window, softcap; /* 0 or 1 */
    int32_t any_order;                 /* backward: 1: with DNN_DQ_SUM */
} dnn_shape;

/* How many of the tensors a plan of that shape has. */
static inline int dnn_tensors(const dnn_shape *s)
{
    return !s->backward ? DNN_FORWARD_TENSORS : s->any_order ? DNN_TENSORS : DNN_DQ_SUM;
}

/* One launch. Pointers of tensors point at the row that offset 0 stands for. */
typedef struct dnn_launch {
    void *data[DNN_TENSORS];
    const int64_t *starts[DNN_TENSORS]; /* [documents + 1] elements, on the device */
    const int32_t *lengths;             /* [documents] tokens, on the device */
    float *sums;                        /* backward: [documents, heads, rows], scratch */
    void *work;                         /* dnn_plan_work() bytes, 256-byte aligned */
    float scale, softcap, window;
} dnn_launch;

typedef struct dnn_plan dnn_plan;

/* Never fails: without the library, or where it is switched off or refuses the device, the device
 * has none and the own kernels run. MEGATRAIN_CUDNN=0 switches it off. [main] */
void dnn_open(cuda_device *d);
void dnn_close(cuda_device *d);

/* Builds the plans of shapes that are asked for first, about a second each, several at a time.
 * [main] */
void dnn_plans_make(const cuda_device *d, const dnn_shape *shapes, int n);
/* The plan of a shape; NULL where none was built or cuDNN has none. [main] */
const dnn_plan *dnn_plan_find(const cuda_device *d, const dnn_shape *shape);
int64_t dnn_plan_work(const dnn_plan *p);

/* Enqueues; false when the device has failed. [main] */
bool dnn_run(cuda_queue *q, const dnn_plan *p, const dnn_launch *launch);

#ifdef __cplusplus
}
#endif
#endif
