/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files that make a plan share: plan.c chooses, plan_cost.c says what a choice takes,
 * plan_refuse.c what would fit where nothing does.
 */
#ifndef MT_CORE_PLAN_INTERNAL_H
#define MT_CORE_PLAN_INTERNAL_H

#include "plan.h"

/* Template plans are made once for each template, policy, number of gathered rows and cut. */
typedef struct owned_tpl {
    int32_t tpl;
    tpl_policy policy;
    int64_t gather_rows;
    int32_t segment_parts;
    tpl_plan *plan;
} owned_tpl;

struct plan_owner {
    owned_tpl *tpl;
    int32_t n_tpl, cap_tpl;
    plan_profile profile;
    const mt_backend *backend;
    void *device;
    bool unified; /* the device is the host */
};

/* What there is. */
typedef struct plan_limits {
    int64_t device, host;
    bool unified; /* both tiers are the same memory */
} plan_limits;

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The template plan for p's segments, which the owner keeps. */
mt_status plan_get_tpl(plan *p, int32_t tpl_index, tpl_policy policy, int64_t gather_rows,
                       tpl_plan **ret);

/* Bytes by which a complete choice passes the limit of the tier, 0: it does not. Where both are the
 * same memory the host's hold the device's too. */
int64_t plan_missing(const plan *p, const plan_limits *lim, plan_tier tier);

/* Completes p with the fastest choice that fits, or where none does with the one that is nearest to
 * it: the least device memory is missing, and of such, the least host memory. */
mt_status plan_choose(plan *p, const plan_limits *lim, bool *ret_fits);

/* Can the backend round gradients to BF16? */
bool plan_can_narrow(const mt_backend *backend);

/* Fills in the seconds of a full step, of a choice that is complete. */
mt_status plan_predict(plan *p);

/* The error of a run that does not fit: what takes how much, and the settings with which it would.
 * Leaves p in an arbitrary, complete state. */
mt_status plan_refuse(plan *p, const plan_limits *lim);

#endif
