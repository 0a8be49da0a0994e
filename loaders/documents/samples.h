/* SPDX-License-Identifier: Apache-2.0
 *
 * Samples: the documents of a source, cut to what a sequence can hold.
 */
#ifndef DOCUMENTS_SAMPLES_H
#define DOCUMENTS_SAMPLES_H

#include "source.h"

/* n tokens from `start` on, of which `targets` are trained; the first never is. */
typedef struct sample {
    uint64_t start; /* of its plane, whose index is in the upper bits: SAMPLE_PLANE_SHIFT */
    uint32_t n, targets;
} sample;

enum { SAMPLE_PLANE_SHIFT = 40 }; /* 10^12 tokens a plane, 16 million planes */

typedef struct samples {
    sample *items; /* NULL: in `file` */
    doc_file file;
    int64_t n;
    int64_t tokens; /* inputs and targets of all samples: the sum of n - 1 */
    int64_t targets;
    int64_t most;    /* n of the longest sample */
    int64_t longest; /* n of the longest document */
    int64_t cut;     /* documents that were longer than a sequence: split, or their ends lost */
    int64_t dropped; /* documents that were left out because they were longer */
    int64_t empty;   /* documents and pieces without a token to train on, left out */
    int64_t vocab;   /* one more than the largest id */
} samples;

/* Cuts documents to at most `inputs` + 1 tokens. Pieces of a document that is split share a token,
 * so that every token is a target once. `folder` is for the file behind a large table. [main] */
mt_status samples_build(const source *s, int64_t inputs, doc_long policy, const char *folder,
                        samples *ret);
void samples_free(samples *t);

/* Sample i. Who goes through many of them in order, and they are in a file, does so by a window on
 * it, else it is NULL. [any] */
mt_status samples_get(const samples *t, int64_t i, doc_window *w, sample *ret);

#endif
