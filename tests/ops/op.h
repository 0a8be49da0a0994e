/* SPDX-License-Identifier: Apache-2.0
 *
 * Running one operation on a side, which is a device of any backend with a queue: everything goes
 * through the backend's interface, and numbers come and go as double. What an operation is given to
 * run on is in cases.h; what is checked of it in tests/cpu and tests/cuda.
 */
#ifndef MT_TEST_OP_H
#define MT_TEST_OP_H

#include "../check.h"

#include <megatrain/backend.h>
#include <megatrain/plugin.h>

typedef struct side {
    const mt_backend *b;
    void *device, *queue;
} side;

/* The backend of a plugin, with a host that keeps the last error text. Exits where it does not
 * start. */
const mt_backend *side_backend(const mt_plugin *p);
const char *side_last_error(void);

/* A device with all threads where `threads` is 0, and a queue; false where it does not open. */
bool side_try_open(const mt_backend *b, int32_t threads, side *ret);
void side_open(const mt_backend *b, int32_t threads, side *ret); /* or exits */
void side_close(side *s);

/* Device memory holding `bytes` of `host`, or poisoned (NaN in every dtype) where host is NULL. */
void *side_put(const side *s, const void *host, int64_t bytes);
void side_get(const side *s, void *host, const void *p, int64_t bytes);
void side_free(const side *s, void *p, int64_t bytes);

typedef struct op_value {
    int64_t rows, cols;   /* cols 0: absent */
    bool param;           /* its gradient has the statistics dtype */
    bool stat;            /* it has the statistics dtype itself */
    double scale, middle; /* values are uniform in middle +- scale; scale 0 stands for 1 */
    bool no_grad;         /* backward does not ask for its gradient */
    bool is_index;        /* int32, without a gradient; compared number by number */
    bool opaque;          /* an aux that the operation lays out: without pad, not compared */
    const int32_t *index; /* the numbers of such an operand, rows packed */
} op_value;

/* Pointers of the batch are host pointers; they are copied to the device. Positions that are not
 * given follow from the documents. */
typedef struct op_case {
    const char *op;
    const void *attr;
    uint32_t n_in, n_out, n_aux;
    op_value in[MT_OP_MAX_IN], out[MT_OP_MAX_OUT], aux[MT_OP_MAX_AUX];
    mt_batch batch;
    uint32_t drop_in;                 /* bit i: backward does not get in[i] */
    bool grad_in_forward;             /* gradients of parameters come out of forward */
    mt_tensor state[MT_OP_MAX_STATE]; /* generation; on the side's device */
    int64_t used;
    const double *tally; /* [n_tally] before forward; host */
    int64_t n_tally;
} op_case;

typedef struct op_how {
    mt_dtype dtype;
    mt_pass pass;
    int64_t pad;     /* elements between rows, but of parameters' gradients */
    bool accumulate; /* gradients are added to 0.5 */
    bool forward_only;
} op_how;

/* Random numbers for every operand and every gradient of an output. */
typedef struct op_data {
    double *in[MT_OP_MAX_IN], *d_out[MT_OP_MAX_OUT];
} op_data;
void op_fill(const op_case *c, uint32_t seed, op_data *ret);
void op_data_free(op_data *d);

/* Every number as double, rows packed. */
typedef struct op_result {
    double *out[MT_OP_MAX_OUT], *aux[MT_OP_MAX_AUX], *d_in[MT_OP_MAX_IN];
    double *tally;         /* [n_tally] at the end */
    double *logits;        /* [n_logit_rows, vocab] where the batch asks for them */
    int64_t work_bytes[2]; /* of forward and of backward */
} op_result;
void op_run(const side *s, const op_case *c, const op_data *d, const op_how *how, op_result *ret);
void op_result_free(op_result *r);

int64_t op_count(const op_value *v); /* of its numbers */

/* |a - b| / |b| over all numbers (Euclid); infinite where one is not finite. */
double op_error(const double *a, const double *b, int64_t n);

/* Checks every result of `a`: off by no more than `bound`, or with bound 0 the same bits; integers
 * always equal. With MT_TEST_VERBOSE in the environment, prints the errors. */
void op_compare(const op_case *c, const op_result *a, const op_result *b, double bound,
                const char *how);

/* How check_generation runs a case of one document. */
typedef struct op_generation {
    const side *side, *reference;
    mt_dtype dtype, reference_dtype;
    op_value state[MT_OP_MAX_STATE]; /* what is kept from call to call: rows, cols, stat */
    int32_t prefill;                 /* tokens of the first call */
    int32_t decode;                  /* tokens of the longest of the others; at least 3 */
    double tolerance;
} op_generation;

/* Prefill of some tokens and decode of the others give the rows of one whole pass. */
void op_check_generation(const op_case *whole, const op_generation *g);

#endif
