/* SPDX-License-Identifier: Apache-2.0
 *
 * From a stream of documents to packed steps: packing, the prefetch thread, positions for resume.
 */
#ifndef MT_CORE_DATA_H
#define MT_CORE_DATA_H

#include "../engine/batch.h"

#include <megatrain/loader.h>

/* Packs documents into micro-batches of at most `micro_tokens` tokens. Packed: micro-batches are
 * full, a document that does not fit goes on in the next one as a document of its own (every target
 * is trained exactly once). Not packed: each document stands alone in its micro-batch. */
typedef struct data_options {
    int64_t micro_tokens;
    int64_t micro_batches; /* per step */
    bool packing;
    bool prefetch; /* read ahead in a thread */
} data_options;

/* Where in the data a run is; saved in checkpoints. */
typedef struct data_position {
    int64_t epoch, index; /* of the document that is being packed */
    int64_t offset;       /* its tokens that earlier micro-batches have used */
} data_position;

typedef struct data_source data_source;

/* `stream` is an open stream of `iface`; the source takes it over and closes it. [main] */
mt_status data_open(const mt_data *iface, void *stream, const data_options *options,
                    data_source **ret);
void data_close(data_source *d); /* accepts NULL; joins the prefetch thread */

/* The next step. Micro-batches without any target are left out. MT_END at the end of a validation
 * stream (a last partial step comes before it). The batch lives until the second next call. [main]
 */
mt_status data_next(data_source *d, const step_batch **ret);

/* Position after the step that data_next returned last; seek before the first data_next. [main] */
data_position data_tell(const data_source *d);
mt_status data_seek(data_source *d, data_position p);

/* Most documents that a micro-batch can hold, for the plan. */
int64_t data_max_documents(const data_source *d);

#endif
