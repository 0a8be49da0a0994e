/* SPDX-License-Identifier: Apache-2.0
 *
 * Running one operation of the CPU backend on numbers given in double, in any dtype, instruction
 * set and number of threads, with rows further apart than they are long.
 */
#ifndef MT_TEST_CPU_OP_H
#define MT_TEST_CPU_OP_H

#include "../check.h"

#include <megatrain/backend.h>
#include <megatrain/plugin.h>

typedef struct op_value {
    int64_t rows, cols;
    bool param;            /* its gradient has the statistics dtype */
    bool stat;             /* it has the statistics dtype itself */
    double scale, middle;  /* values are uniform in middle +- scale; scale 0 stands for 1 */
    bool no_grad;          /* backward does not ask for its gradient */
    bool index;            /* it is int32 and has no gradient */
    bool opaque;           /* an aux that the operation lays out: without pad, not compared */
    const int32_t *values; /* of an int32 operand */
} op_value;

typedef struct op_case {
    const char *op;
    const void *attr;
    uint32_t n_in, n_out, n_aux;
    op_value in[MT_OP_MAX_IN], out[MT_OP_MAX_OUT], aux[MT_OP_MAX_AUX];
    mt_batch batch;
    mt_tensor state[MT_OP_MAX_STATE]; /* generation */
    int64_t used;
    uint32_t drop_in;     /* bit i: backward does not get in[i] */
    uint32_t drop_out;    /* bit i: backward does not get out[i] */
    bool grad_in_forward; /* gradients of parameters come out of forward */
} op_case;

typedef struct op_how {
    mt_dtype dtype;
    const char *isa; /* NULL: the best there is */
    int32_t threads;
    int64_t pad;     /* elements between rows */
    bool accumulate; /* gradients are added to 0.5 */
    bool forward_only;
    mt_pass pass;
} op_how;

/* Every number as double, rows packed. */
typedef struct op_result {
    double *out[MT_OP_MAX_OUT], *aux[MT_OP_MAX_AUX], *d_in[MT_OP_MAX_IN];
} op_result;

/* The interface table, with a host that prints errors. */
const mt_backend *op_backend(void);

/* Random numbers for every operand and every gradient of an output; free them with op_free. */
typedef struct op_data {
    double *in[MT_OP_MAX_IN], *d_out[MT_OP_MAX_OUT];
} op_data;
void op_fill(const op_case *c, uint32_t seed, op_data *ret);
void op_data_free(op_data *d);

void op_run(const op_case *c, const op_data *d, const op_how *how, op_result *ret);
void op_result_free(op_result *r);

/* |a - b| / |b| over all numbers (Euclid); infinite where one is not finite. */
double op_error(const double *a, const double *b, int64_t n);

/* Runs the case in double on plain C and compares every gradient with central differences. */
void op_check_gradients(const op_case *c, uint32_t seed, double tolerance);
/* Fast kernels in F32 and BF16 against double; also accumulation, padding, and that 1, 2 and 3
 * threads give the same bits. */
void op_check_fast(const op_case *c, uint32_t seed, double tolerance_f32, double tolerance_bf16);

#endif
