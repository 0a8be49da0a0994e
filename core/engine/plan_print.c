/* SPDX-License-Identifier: Apache-2.0
 *
 * A plan as a table for people.
 */
#include "../template/unit_runs.h"
#include "plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *human(int64_t bytes, char *buf, size_t size)
{
    if (bytes >= (int64_t)1 << 30)
        snprintf(buf, size, "%.2f GiB", (double)bytes / (1 << 30));
    else if (bytes >= 1 << 20)
        snprintf(buf, size, "%.2f MiB", (double)bytes / (1 << 20));
    else
        snprintf(buf, size, "%.2f KiB", (double)bytes / (1 << 10));
    return buf;
}

static const char *duration(double seconds, char *buf, size_t size)
{
    if (seconds >= 0.1)
        snprintf(buf, size, "%.2f s", seconds);
    else
        snprintf(buf, size, "%.2f ms", seconds * 1e3);
    return buf;
}

enum { MOST_DECIMALS = 12 };

int plan_rate_decimals(double rate)
{
    int decimals = 0;
    for (double r = rate; r > 0 && r < 99.95 && decimals < MOST_DECIMALS; r *= 10)
        decimals++;
    return decimals;
}

typedef struct printer {
    void (*line)(void *arg, const char *text);
    void *arg;
} printer;

static void MT_PRINTF(2, 3) put(const printer *p, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    p->line(p->arg, text);
}

/* "keep 30, select 4": how many units have each policy. */
static const char *policies(const plan *p, char *buf, size_t size)
{
    size_t n = 0;
    buf[0] = '\0';
    for (int k = 0; k < TPL_POLICIES; k++) {
        int count = 0;
        for (int32_t u = 0; u < p->m->n_units; u++)
            count += p->policy[u] == (tpl_policy)k;
        if (count && n < size)
            n += (size_t)snprintf(buf + n, size - n, "%s%s %d", n ? ", " : "",
                                  tpl_policy_name((tpl_policy)k), count);
    }
    return buf;
}

static void put_tier(const printer *out, const plan *p, plan_tier tier, const char *name)
{
    char b[32];
    put(out, "%-26s %12s", name, human(p->tier_bytes[tier], b, sizeof b));
    for (int32_t i = 0; i < p->n_items; i++)
        if (p->item[i].tier == tier)
            put(out, "  %-24s %12s", p->item[i].name, human(p->item[i].bytes, b, sizeof b));
}

static bool alike(const void *arg, int32_t a, int32_t b)
{
    const plan *p = arg;
    return p->policy[a] == p->policy[b] && p->m->units[a].tpl_index == p->m->units[b].tpl_index;
}

static void put_run(const printer *out, const plan *p, const unit_run *r)
{
    const model_unit *first = &p->m->units[r->first], *last = &p->m->units[r->last];
    bool one = r->first == r->last;
    char name[128], b[32];
    snprintf(name, sizeof name, "%s%s%s", first->name, one ? "" : " .. ", one ? "" : last->name);
    if (p->request.training)
        put(out, "  %-24s %-8s %12s saved a micro-batch", name,
            tpl_policy_name(p->policy[r->first]),
            human(p->tpl[r->first]->saved_bytes, b, sizeof b));
    else
        put(out, "  %-24s %12s of weights", name,
            human(p->tpl[r->first]->weight_bytes, b, sizeof b));
    if (r->times > 1)
        put(out, "  .. %-21s these %d lines %d times", p->m->units[r->until].name, r->lines,
            r->times);
}

static void put_units(const printer *out, const plan *p)
{
    unit_run *runs = calloc((size_t)p->m->n_units + 1, sizeof *runs);
    int32_t n = runs ? unit_runs(p->m->n_units, alike, p, runs) : 0;
    put(out, runs ? "units" : "units: out of memory to list them");
    for (int32_t i = 0; i < n; i++)
        put_run(out, p, &runs[i]);
    free(runs);
}

/* Which units are streamed in segments, and which are larger than a segment is to be all the same.
 */
static void put_segments(const printer *out, const plan *p)
{
    char b[32];
    int32_t cut = 0, most = 0, whole = 0;
    int64_t largest = 0, esize = mt_dtype_size(p->request.compute);
    for (int32_t u = 0; u < p->m->n_units; u++) {
        const tpl_plan *t = p->tpl[u];
        if (t->n_segments == 1) {
            whole += t->weight_bytes > p->segment_bytes;
            continue;
        }
        cut++;
        most = t->n_segments > most ? t->n_segments : most;
        largest = t->buffer_elems > largest ? t->buffer_elems : largest;
    }
    if (cut)
        put(out, "segments: %d unit%s streamed by their experts, in up to %d segments of up to %s",
            cut, cut == 1 ? " is" : "s are", most, human(largest * esize, b, sizeof b));
    if (whole && p->request.segment_bytes > 0)
        put(out,
            "segments: %d unit%s larger than memory.segment_size, but without experts to stream by",
            whole, whole == 1 ? " is" : "s are");
}

/* Where the optimizer may be behind: do gradients wait for it on the device? */
static void put_parking(const printer *out, const plan *p)
{
    char a[32], b[32];
    if (p->parked && p->device_sums)
        put(out, "parking: gradients that the optimizer is behind with wait where they are summed");
    else if (p->parked)
        put(out,
            "parking: gradients that the optimizer is behind with wait on the device, %s of them "
            "behind saved activations, %s in buffers of their own",
            human(p->parked_bytes, a, sizeof a), human(p->park_apart, b, sizeof b));
    else if (p->device_sums)
        put(out, "parking: none, gradients leave their sums rounded to bf16");
    else if (p->groups > 1)
        put(out, "parking: none, gradients leave after every group");
    else
        put(out,
            "parking: none, too little is saved: %s of gradients would find no room behind saved "
            "activations",
            human(p->park_apart, a, sizeof a));
}

void plan_print(const plan *p, bool brief, void (*line)(void *arg, const char *text), void *arg)
{
    const printer out = { line, arg };
    const plan_request *r = &p->request;
    char a[64], b[64], c[64], d[64], e[64];
    double tokens = (double)r->micro_tokens * (double)r->micro_batches;
    put(&out, "%.3f M parameters in %d units, compute %s", (double)p->m->total_params * 1e-6,
        p->m->n_units, mt_dtype_name(r->compute));
    put(&out,
        "step: %lld micro-batch%s of %lld tokens in %lld group%s of up to %lld; %d weight buffers",
        (long long)r->micro_batches, r->micro_batches == 1 ? "" : "es", (long long)r->micro_tokens,
        (long long)p->groups, p->groups == 1 ? "" : "s", (long long)p->group_batches,
        p->weight_buffers);
    if (p->segment_bytes)
        put_segments(&out, p);
    if (p->held)
        put(&out,
            "gradients: held in device memory until their norm is known, leave as %s once a "
            "step, ahead of the updates",
            mt_dtype_name(r->gradient_dtype));
    else if (r->training)
        put(&out, "gradients: summed in fp32 %s, leave the device as %s%s",
            p->device_sums   ? "in device memory"
            : p->groups == 1 ? "on the device, a unit at a time"
                             : "in host memory",
            mt_dtype_name(r->gradient_dtype),
            p->device_sums || p->groups == 1 ? " once a step" : " after every group");
    if (p->deep)
        put_parking(&out, p);
    if (brief) {
        put(&out, "memory: device %s, host %s%s%s", human(p->tier_bytes[PLAN_DEVICE], a, sizeof a),
            human(p->tier_bytes[PLAN_HOST], b, sizeof b), r->training ? "; activations: " : "",
            r->training ? policies(p, c, sizeof c) : "");
    } else {
        put_tier(&out, p, PLAN_DEVICE, "device memory");
        put_tier(&out, p, PLAN_HOST, "host memory");
        put_units(&out, p);
    }
    double rate = p->seconds > 0 ? tokens / p->seconds : 0;
    put(&out, "predicted: %s a step, %.*f tokens/s, bound by %s", duration(p->seconds, a, sizeof a),
        plan_rate_decimals(rate), rate, p->bound);
    if (!brief)
        put(&out, "  compute %s, copy-in %s, copy-out %s, optimizer %s",
            duration(p->compute_seconds, b, sizeof b), duration(p->copy_in_seconds, c, sizeof c),
            duration(p->copy_out_seconds, d, sizeof d),
            duration(p->optimizer_seconds, e, sizeof e));
    if (p->determinism_seconds > 0.001 * p->compute_seconds)
        put(&out, "  of compute, results that repeat bit for bit cost %s (deterministic: false)",
            duration(p->determinism_seconds, a, sizeof a));
    double busy = p->seconds > 0 ? p->compute_seconds / p->seconds : 1;
    if (r->training && busy < 0.25)
        put(&out,
            "  compute works %.0f%% of a step: more tokens a step cost little "
            "(train.gradient_accumulation_steps)",
            100 * busy);
}
