/* SPDX-License-Identifier: Apache-2.0
 *
 * The value of one key of a run manifest.
 */
#ifndef MT_CORE_RUN_VALUE_H
#define MT_CORE_RUN_VALUE_H

#include "node.h"
#include "run.h"

/* Reads the node of a key, or of its default, into the manifest's field. `section` is where it
 * stands, for messages. [main] */
mt_status run_read_value(run_manifest *r, const mt_config *section, const run_key *k,
                         const node *n);

#endif
