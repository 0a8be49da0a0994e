/* SPDX-License-Identifier: Apache-2.0
 *
 * Small templates of every kind, for tests of the template layer.
 */
#ifndef MT_TEST_ZOO_H
#define MT_TEST_ZOO_H

#include "core/template/template.h"

typedef struct zoo_entry {
    const char *name;
    mt_build_fn build;
    const void *arg;
} zoo_entry;

/* What the templates of experts take as `arg`. */
typedef struct zoo_moe {
    int32_t experts;
    bool corrected, biased, shared;
    mt_act_attr act;
    mt_router_attr router;
    mt_balance_attr balance; /* coef 0: none */
    bool exact;              /* logits in the statistics dtype */
} zoo_moe;

/* Ends with a NULL name. */
extern const zoo_entry zoo[];

/* The entry of that name, which must be there. */
const zoo_entry *zoo_find(const char *name);

enum { ZOO_VOCAB = 11, ZOO_HIDDEN = 10 };

/* The CPU backend of the build tree, opened; its path comes from MT_TEST_CPU_PLUGIN. Exits when
 * that fails. */
const mt_backend *zoo_backend(void **ret_device);

#endif
