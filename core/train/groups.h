/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters by pattern: which ones are frozen, and which are updated at another rate or decay.
 */
#ifndef MT_CORE_GROUPS_H
#define MT_CORE_GROUPS_H

#include "../engine/engine.h"
#include "../manifest/run.h"

/* Reads train.freeze and optimizer.groups of the run and applies them to the model: marks
 * parameters as frozen, and fills ret_rules with a rule for each parameter, NULL where there are no
 * groups; the caller frees it. A pattern is a glob over names as `inspect` shows them: of a tensor
 * (model.layers.0.self_attn.q_proj.weight), or of a unit and the name in its template
 * (block.0.self_attn.q_proj.weight). One that matches nothing is an error, and so is a run in which
 * nothing is left to train. Before any plan is made. [main] */
mt_status groups_apply(const run_manifest *run, const mt_optim *optim, model *m,
                       engine_rule **ret_rules);

#endif
