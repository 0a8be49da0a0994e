/* SPDX-License-Identifier: Apache-2.0
 *
 * The same operation on two backends: a side is a backend of the build tree with a device and a
 * queue, everything goes through its interface, and numbers come and go as double.
 */
#ifndef MT_TEST_CUDA_SIDE_H
#define MT_TEST_CUDA_SIDE_H

#include "../check.h"

#include <megatrain/backend.h>

enum { SIDE_SKIP = 77 };

typedef struct side {
    const mt_backend *b;
    void *device, *queue;
} side;

/* The CPU and the CUDA backend, from MT_TEST_CPU_PLUGIN and MT_TEST_CUDA_PLUGIN. Exits with
 * SIDE_SKIP where there is no GPU, with 1 where a plugin is broken. */
extern side cpu, cuda;
void sides_open(void);
void sides_close(void);

/* One more device of the CUDA backend, with `value` for the variable MEGATRAIN_CUDNN. */
void side_open_cudnn(const char *value, side *ret);
void side_close(side *s);

typedef struct op_value {
    int64_t rows, cols;
    bool param;           /* its gradient has the statistics dtype */
    bool stat;            /* it has the statistics dtype itself */
    double scale, middle; /* values are uniform in middle +- scale; scale 0 stands for 1 */
    bool no_grad;         /* backward does not ask for its gradient */
    bool is_index;        /* int32, without a gradient; compared number by number */
    bool opaque;          /* an aux that the operation lays out: without pad, not compared */
    const int32_t *index; /* the numbers of such an operand, rows packed */
} op_value;

/* Pointers of the batch are host pointers; they are copied to the device. */
typedef struct op_case {
    const char *op;
    const void *attr;
    uint32_t n_in, n_out, n_aux;
    op_value in[MT_OP_MAX_IN], out[MT_OP_MAX_OUT], aux[MT_OP_MAX_AUX];
    mt_batch batch;
    bool grad_in_forward;             /* gradients of parameters come out of forward */
    mt_tensor state[MT_OP_MAX_STATE]; /* generation; on the side's device */
    int64_t used;
} op_case;

typedef struct op_how {
    mt_dtype dtype;
    mt_pass pass;
    int64_t pad;     /* elements between rows */
    bool accumulate; /* gradients are added to 0.5 */
    bool forward_only;
} op_how;

typedef struct op_data {
    double *in[MT_OP_MAX_IN], *d_out[MT_OP_MAX_OUT];
} op_data;
void op_fill(const op_case *c, uint32_t seed, op_data *ret);
void op_data_free(op_data *d);

/* Every number as double, rows packed. */
typedef struct op_result {
    double *out[MT_OP_MAX_OUT], *aux[MT_OP_MAX_AUX], *d_in[MT_OP_MAX_IN];
    double *logits;        /* [n_logit_rows, vocab] where the batch asks for them */
    int64_t work_bytes[2]; /* of forward and of backward */
} op_result;
void op_run(const side *s, const op_case *c, const op_data *d, const op_how *how, op_result *ret);
void op_result_free(op_result *r);

/* |a - b| / |b| over all numbers (Euclid); infinite where one is not finite. */
double op_error(const double *a, const double *b, int64_t n);

typedef struct op_bounds {
    double f32, bf16; /* F64 has 1e-11 */
} op_bounds;

/* CUDA against the CPU in F32, BF16 and F64, forward and backward, with rows packed and apart,
 * overwriting and accumulating; and that a second run gives the same bits. */
void op_check(const op_case *c, uint32_t seed, op_bounds bounds);

/* Device memory holding `bytes` of `host`, or poisoned (NaN in every dtype) where host is NULL. */
void *side_put(const side *s, const void *host, int64_t bytes);
void side_get(const side *s, void *host, const void *p, int64_t bytes);
void side_free(const side *s, void *p, int64_t bytes);

#endif
