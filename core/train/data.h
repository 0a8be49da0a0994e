/* SPDX-License-Identifier: Apache-2.0
 *
 * From a stream of documents to packed steps: the prefetch thread, positions for resume.
 */
#ifndef MT_CORE_DATA_H
#define MT_CORE_DATA_H

#include "packing.h"

typedef struct data_options {
    int64_t micro_tokens;  /* of a micro-batch, at most */
    int64_t micro_batches; /* per step */
    packing_mode packing;
    bool prefetch; /* read ahead in a thread */
} data_options;

typedef struct data_source data_source;

/* `stream` is an open stream of `iface`; the source takes it over and closes it. [main] */
mt_status data_open(const mt_data *iface, void *stream, const data_options *options,
                    data_source **ret);
void data_close(data_source *d); /* accepts NULL; joins the prefetch thread */

/* The next step; no micro-batch is without a target. MT_END at the end of a validation
 * stream (a last partial step comes before it). The batch lives until the second next call. [main]
 */
mt_status data_next(data_source *d, const step_batch **ret);

/* Position after the step that data_next returned last; seek before the first data_next. [main] */
data_position data_tell(const data_source *d);
mt_status data_seek(data_source *d, data_position p);

/* Epochs done after that step, of epoch_documents documents each. [main] */
double data_epochs(const data_source *d, int64_t epoch_documents);

/* Most documents that a micro-batch can hold, for the plan. */
int64_t data_max_documents(const data_source *d);

#endif
