/* SPDX-License-Identifier: Apache-2.0
 *
 * What a reference implementation computed (expected.safetensors, see make_fixtures.py), the
 * batches to compare it on, and the comparison.
 */
#ifndef TEST_ORACLE_EXPECTED_H
#define TEST_ORACLE_EXPECTED_H

#include "../../core/engine/batch.h"
#include "../../core/template/model.h"

#include <megatrain/loader.h>

/* Largest errors, each relative to the largest number expected (expected_error). */
typedef struct expected_bounds {
    double loss, aux_loss, logits, grads;
} expected_bounds;

typedef struct expected {
    int64_t tokens, documents, vocab, n_targets;
    int32_t *ids, *targets; /* [tokens] */
    int32_t *doc_starts;    /* [documents + 1] */
    double *logits;         /* [tokens, vocab] */
    double loss;            /* mean over targets, nats */
    /* Where routers add a loss: what they add, and the documents that begin a micro-batch, on which
     * it depends; else 0 and none. */
    double aux_loss;
    int32_t *micro_starts; /* [micro_batches] */
    int64_t micro_batches;
    double **grads;         /* [n_params] */
    expected_bounds bounds; /* set by the caller after expected_read */
} expected;

/* Fails unless the file has the gradient of exactly the model's parameters, in their shapes. */
mt_status expected_read(const char *path, const mt_weights *format, const model *m, expected *ret);
void expected_finish(expected *e, const model *m);

/* The documents in order, packed into micro-batches that start at documents first[0..n-1]. */
mt_status expected_batch(const expected *e, const int64_t *first, int64_t n, step_batch *ret);
void expected_batch_finish(step_batch *b);

/* max |a - b| / max |b|; infinite when any number is not finite. */
double expected_error(const double *a, const double *b, int64_t n);

/* Loss and gradients against what is expected; `what` and the parameter are named on failure.
 * Returns the (largest) error. */
double expected_check_loss(const expected *e, const char *what, double loss_sum);
double expected_check_aux_loss(const expected *e, const char *what, double aux_loss_sum);
double expected_check_grads(const expected *e, const char *what, const model *m,
                            double *const *grads);

/* Memory for the gradient of every parameter. */
double **expected_grads_create(const model *m);
void expected_grads_destroy(double **grads, const model *m);

#endif
