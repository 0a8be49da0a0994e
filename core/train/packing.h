/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing: from a stream of documents to micro-batches, and where in the stream the next one is.
 */
#ifndef MT_CORE_PACKING_H
#define MT_CORE_PACKING_H

#include "../engine/batch.h"

#include <megatrain/loader.h>

typedef enum packing_mode {
    /* Documents stay whole. Those of a window, many micro-batches' worth that follow each other in
     * one epoch, are laid out best fit, longest first, and then spread evenly over as many
     * micro-batches as that took. */
    PACKING_BEST_FIT,
    /* In the order of the stream; a document that does not fit goes on in the next micro-batch as a
     * document of its own, so that all are full. */
    PACKING_SEQUENTIAL,
    PACKING_NONE /* one document a micro-batch */
} packing_mode;

/* Where in the data a run is; saved in checkpoints. */
typedef struct data_position {
    int64_t epoch, index; /* of a document: the first of the window, or the one being packed */
    int64_t offset;       /* the window's micro-batches, or the document's tokens, that were used */
    int64_t micro_tokens; /* of the window's micro-batches; 0: there is no window */
} data_position;

typedef struct packer packer;

/* Over an open stream, which stays the caller's. [main] */
mt_status packer_create(const mt_data *iface, void *stream, packing_mode mode, int64_t micro_tokens,
                        packer **ret);
void packer_destroy(packer *p); /* accepts NULL */

/* Fills b's arrays, which have room for micro_tokens tokens in as many documents. What has no
 * target is left out, counted and warned of: no micro-batch is without one. MT_END at the end of
 * the stream; an error when a whole epoch has no target. [loader] */
mt_status packer_next(packer *p, micro_batch *b);

/* Position before the micro-batch that packer_next would give. [loader] */
data_position packer_tell(const packer *p);
/* The same as a fraction of the epoch's documents: how many of them are used. [loader] */
double packer_documents_used(const packer *p);
/* [main] */
mt_status packer_seek(packer *p, data_position to);

/* Micro-batches of the epoch that begins where the stream stands, by best fit. [main] */
mt_status packing_count_epoch(const mt_data *iface, void *stream, int64_t micro_tokens,
                              int64_t *ret);

#endif
