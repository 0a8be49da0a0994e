/* SPDX-License-Identifier: Apache-2.0
 *
 * What is said of a run that does not fit.
 */
#include "../base/status.h"
#include "plan_internal.h"

#include <stdio.h>

typedef struct text {
    char s[1700];
    size_t n;
    int offers; /* settings that were named */
} text;

static void MT_PRINTF(2, 3) text_add(text *t, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(t->s + t->n, sizeof t->s - t->n, fmt, args);
    va_end(args);
    if (n > 0)
        t->n = t->n + (size_t)n < sizeof t->s ? t->n + (size_t)n : sizeof t->s - 1;
}

static void text_bytes(text *t, int64_t bytes)
{
    if (bytes >= (int64_t)1 << 30)
        text_add(t, "%.2f GiB", (double)bytes / (1 << 30));
    else if (bytes >= (int64_t)1 << 20 || bytes == 0)
        text_add(t, "%.2f MiB", (double)bytes / (1 << 20));
    else
        text_add(t, "%.2f KiB", (double)bytes / (1 << 10));
}

static void text_tier(text *t, const plan *p, plan_tier tier, int64_t limit)
{
    text_add(t, "%s ", tier == PLAN_DEVICE ? "device" : "host");
    text_bytes(t, p->tier_bytes[tier]);
    text_add(t, " of ");
    text_bytes(t, limit);
    text_add(t, " (");
    const char *sep = "";
    for (int32_t i = 0; i < p->n_items; i++)
        if (p->item[i].tier == tier && p->item[i].bytes >= p->tier_bytes[tier] / 20) {
            text_add(t, "%s%s ", sep, p->item[i].name);
            text_bytes(t, p->item[i].bytes);
            sep = ", ";
        }
    text_add(t, ")");
}

/* Would the request fit with these changes? */
static bool would_fit(plan *p, const plan_request *changed, const plan_limits *lim)
{
    plan_request saved = p->request;
    bool ok = false;
    p->request = *changed;
    if (plan_choose(p, lim, &ok) < 0)
        ok = false;
    p->request = saved;
    return ok;
}

static void describe(const plan *p, const plan_limits *lim, text *t)
{
    int64_t device = plan_missing(p, lim, PLAN_DEVICE), host = plan_missing(p, lim, PLAN_HOST);
    text_add(t, "the run does not fit, ");
    text_bytes(t, device > host ? device : host);
    text_add(t, " are missing: ");
    text_tier(t, p, PLAN_DEVICE, lim->device);
    text_add(t, "; ");
    text_tier(t, p, PLAN_HOST, lim->host);
    if (lim->unified)
        text_add(t, "; both are the same memory");
}

static void begin_offer(text *t)
{
    text_add(t, t->offers++ ? ", or with " : ". It fits with ");
}

/* Names `setting` where the request fits with it. */
static void offer(plan *p, const plan_limits *lim, const plan_request *changed, const char *setting,
                  text *t)
{
    if (!would_fit(p, changed, lim))
        return;
    begin_offer(t);
    text_add(t, "%s", setting);
}

static void offer_settings(plan *p, const plan_limits *lim, text *t)
{
    const plan_request *r = &p->request;
    plan_request c = *r;
    c.policy = PLAN_AUTO;
    if (r->training && r->policy != PLAN_AUTO && r->policy != TPL_INPUT)
        offer(p, lim, &c, "memory.activations: auto or input", t);
    c = *r;
    c.groups = r->micro_batches;
    if (r->groups != PLAN_AUTO && r->groups < r->micro_batches) {
        char setting[64];
        snprintf(setting, sizeof setting, "memory.groups: auto or up to %lld",
                 (long long)r->micro_batches);
        offer(p, lim, &c, setting, t);
    }
    c = *r;
    c.segment_bytes = PLAN_AUTO;
    if (r->segment_bytes != PLAN_AUTO)
        offer(p, lim, &c, "memory.segment_size: auto", t);
    c = *r;
    c.gradients = PLAN_GRADIENTS_AUTO;
    if (r->training && r->gradients != PLAN_GRADIENTS_AUTO)
        offer(p, lim, &c, "memory.gradients: auto", t);
    c = *r;
    c.max_grad_norm = 0;
    if (r->training && r->max_grad_norm > 0)
        offer(p, lim, &c, "train.max_grad_norm: 0 (no gradient plane)", t);
    c = *r;
    c.gradient_dtype = MT_BF16;
    if (r->training && r->gradient_dtype == MT_F32 && plan_can_narrow(p->owner->backend))
        offer(p, lim, &c, "memory.gradient_dtype: bf16 (gradients leave and wait as BF16)", t);
}

/* Names the largest micro-batches, by halves, with which the request fits. */
static void offer_smaller_batches(plan *p, const plan_limits *lim, text *t)
{
    plan_request c = p->request;
    c.groups = PLAN_AUTO;
    c.policy = PLAN_AUTO;
    while (c.micro_tokens > 64) {
        c.micro_tokens /= 2;
        c.max_seq_len = min64(c.max_seq_len, c.micro_tokens);
        c.micro_documents = min64(c.micro_documents, c.micro_tokens);
        if (!would_fit(p, &c, lim))
            continue;
        begin_offer(t);
        text_add(t,
                 "micro-batches of at most %lld tokens (a smaller train.micro_batch_size or "
                 "data.max_seq_len)",
                 (long long)c.micro_tokens);
        return;
    }
}

/* Names the most micro-batches, by halves, with which the request fits, if need be without
 * clipping: few enough are one group, and no sum of all gradients is kept from group to group. */
static void offer_fewer_batches(plan *p, const plan_limits *lim, text *t)
{
    plan_request c = p->request;
    c.groups = PLAN_AUTO;
    while (c.training && c.micro_batches > 1) {
        c.micro_batches /= 2;
        c.max_grad_norm = p->request.max_grad_norm;
        bool fits = would_fit(p, &c, lim);
        if (!fits && c.max_grad_norm > 0 && t->offers == 0) {
            c.max_grad_norm = 0;
            fits = would_fit(p, &c, lim);
        }
        if (!fits)
            continue;
        begin_offer(t);
        text_add(t, "at most %lld micro-batch%s a step (train.gradient_accumulation_steps)%s",
                 (long long)c.micro_batches, c.micro_batches == 1 ? "" : "es",
                 c.max_grad_norm < p->request.max_grad_norm ? " and train.max_grad_norm: 0" : "");
        return;
    }
}

/* The key of a limit that the run sets and that is passed; NULL: none. */
static const char *own_limit(const plan *p, const plan_limits *lim)
{
    if (p->request.device_limit != PLAN_AUTO && plan_missing(p, lim, PLAN_DEVICE) > 0)
        return "memory.gpu";
    bool host = p->request.host_limit != PLAN_AUTO && plan_missing(p, lim, PLAN_HOST) > 0;
    return host ? "memory.host" : NULL;
}

mt_status plan_refuse(plan *p, const plan_limits *lim)
{
    text t = { .n = 0 };
    describe(p, lim, &t);
    offer_settings(p, lim, &t);
    offer_smaller_batches(p, lim, &t);
    offer_fewer_batches(p, lim, &t);
    const char *own = own_limit(p, lim);
    if (t.offers == 0)
        text_add(&t, ". No setting%s%s makes it fit: a smaller model or more memory is needed%s",
                 own ? " but a larger " : "", own ? own : "",
                 p->request.machine ? ""
                                    : "; `megatrain plan --profile FILE` plans for another "
                                      "machine");
    return status_set(MT_ERR_NOMEM, "%s", t.s);
}
