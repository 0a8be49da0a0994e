/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing a plan: the number of groups, every unit's policy and the weight buffers, by exact bytes
 * and a cost model. Bytes come from layout.c; printing and measuring have files of their own.
 */
#include "plan.h"

#include "../base/status.h"
#include "host_memory.h"
#include "layout.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
typedef struct limits {
    int64_t device, host;
    bool unified; /* both tiers are the same memory */
} limits;

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

bool plan_needs_grad_plane(const plan *p)
{
    const plan_request *r = &p->request;
    bool add_up = p->groups > 1 && !p->device_sums;
    bool wait = r->max_grad_norm > 0 && r->gradient_dtype == MT_F32 && !p->held;
    return r->training && (add_up || wait);
}

/* Parts of the template's experts that are streamed at a time; 0: all of the unit. Where even one
 * part is larger than a segment is to be, it is one part. */
static int32_t segment_parts(const plan *p, const tpl *t)
{
    int64_t esize = mt_dtype_size(p->request.compute), each = tpl_part_elems(t) * esize;
    if (p->segment_bytes == 0 || t->parts == 1 || t->flat_elems * esize <= p->segment_bytes)
        return 0;
    int64_t parts = p->segment_bytes / each;
    return parts < 1 ? 1 : parts < t->parts ? (int32_t)parts : t->parts;
}

static mt_status get_tpl(plan *p, int32_t tpl_index, tpl_policy policy, int64_t gather_rows,
                         tpl_plan **ret)
{
    struct plan_owner *o = p->owner;
    int32_t parts = segment_parts(p, p->m->tpls[tpl_index]);
    for (int32_t i = 0; i < o->n_tpl; i++)
        if (o->tpl[i].tpl == tpl_index && o->tpl[i].policy == policy &&
            o->tpl[i].gather_rows == gather_rows && o->tpl[i].segment_parts == parts) {
            *ret = o->tpl[i].plan;
            return MT_OK;
        }
    if (o->n_tpl == o->cap_tpl) {
        int32_t cap = o->cap_tpl ? 2 * o->cap_tpl : 16;
        owned_tpl *grown = realloc(o->tpl, (size_t)cap * sizeof *grown);
        if (!grown)
            return status_nomem("the plan", (size_t)cap * sizeof *grown);
        o->tpl = grown;
        o->cap_tpl = cap;
    }
    const plan_request *r = &p->request;
    tpl_bounds bounds = { .tokens = r->micro_tokens,
                          .documents = r->micro_documents,
                          .gather_rows = gather_rows,
                          .context = r->context,
                          .segment_parts = parts,
                          .compute = r->compute };
    if (!r->training && r->context > bounds.tokens)
        bounds.tokens = r->context; /* a prompt is one micro-batch */
    tpl_plan *made;
    mt_status st =
        tpl_plan_create(p->m->tpls[tpl_index], policy, &bounds, o->backend, o->device, &made);
    if (st < 0)
        return st;
    o->tpl[o->n_tpl++] = (owned_tpl){ tpl_index, policy, gather_rows, parts, made };
    *ret = made;
    return MT_OK;
}

/* ---- bytes and time of one candidate --------------------------------------------------------- */

static mt_status set_policy(plan *p, int32_t unit, tpl_policy policy)
{
    int64_t tokens = p->request.micro_tokens;
    if (!p->request.training && p->request.context > tokens)
        tokens = p->request.context;
    /* Rows whose gradients are summed over groups must be those of the whole step. */
    int64_t batches = p->device_sums ? p->request.micro_batches : p->group_batches;
    int64_t rows = min64(p->m->vocab, batches * tokens);
    mt_status st = get_tpl(p, p->m->units[unit].tpl_index, policy, rows, &p->tpl[unit]);
    if (st == MT_OK)
        p->policy[unit] = policy;
    return st;
}

static mt_status set_policies(plan *p, tpl_policy policy)
{
    mt_status st = MT_OK;
    for (int32_t u = 0; u < p->m->n_units && st == MT_OK; u++)
        st = set_policy(p, u, policy);
    return st;
}

static void count_bytes(plan *p)
{
    layout l;
    layout_make(p, p->owner->backend, p->owner->device, &l);
    p->n_items = 0;
    memset(p->tier_bytes, 0, sizeof p->tier_bytes);
    for (int r = 0; r < LAYOUT_REGIONS; r++) {
        if (l.bytes[r] == 0)
            continue;
        plan_tier tier = layout_region_tier(r);
        p->item[p->n_items++] = (plan_item){ layout_region_name(r), tier, l.bytes[r] };
        p->tier_bytes[tier] += l.bytes[r];
    }
}
_Static_assert(LAYOUT_REGIONS <= (int)(sizeof((plan *)0)->item / sizeof(plan_item)),
               "every region has an item");

static bool fits(const plan *p, const limits *lim)
{
    int64_t device = p->tier_bytes[PLAN_DEVICE], host = p->tier_bytes[PLAN_HOST];
    if (lim->unified && device + host > lim->host)
        return false;
    return device <= lim->device && host <= lim->host;
}

/* What a run keeps up of the best that was measured: GEMMs of all shapes, sizes and operand orders,
 * hour after hour; host memory that copies and workers pull at together. */
static const double gemm_share = 0.9, host_share = 0.9;

typedef enum resource { COMPUTE, COPY_IN, COPY_OUT, HOST, RESOURCES } resource;

/* What a group's pass through all units takes. */
typedef struct costs {
    double forward, backward; /* s of compute */
    double weights, again;    /* bytes that forward fetches; that backward does */
    double grads;             /* elements */
    double determinism;       /* s of compute that any order of sums would save */
} costs;

/* Bytes that a unit's cheap operations read and write on the device for one micro-batch. Forward
 * writes what backward may need once and reads it about half as often again; backward reads all of
 * it, and reads and writes gradients of the same sizes; what is made again is written and read. */
static mt_status move_bytes(plan *p, int32_t u, double *ret_forward, double *ret_backward)
{
    tpl_plan *keep;
    mt_status st =
        get_tpl(p, p->m->units[u].tpl_index, TPL_KEEP, p->tpl[u]->bounds.gather_rows, &keep);
    if (st < 0)
        return st;
    double all = (double)keep->saved_bytes, again = all - (double)p->tpl[u]->saved_bytes;
    *ret_forward = 1.5 * all;
    *ret_backward = 3 * all + 2 * fmax(again, 0);
    return MT_OK;
}

/* Bytes of weights that backward fetches: all but the pieces that are still there, and the dense
 * part of a unit that is cut once more. */
static double weights_again(const plan *p)
{
    double esize = (double)mt_dtype_size(p->request.compute), bytes = 0;
    int32_t kept = 0;
    for (int32_t u = p->m->n_units - 1; u >= 0; u--) {
        const tpl_plan *t = p->tpl[u];
        for (int32_t i = t->n_segments - 1; i >= 0; i--)
            bytes += kept++ < p->weight_buffers ? 0 : (double)t->segment[i].elems * esize;
        bytes += t->n_segments > 1 ? (double)t->segment[0].elems * esize : 0;
    }
    return bytes;
}

static mt_status count_costs(plan *p, costs *ret)
{
    const plan_request *r = &p->request;
    const plan_profile *f = &p->owner->profile;
    const model *m = p->m;
    double batches = (double)r->micro_batches / (double)p->groups;
    double tokens = (double)r->micro_tokens * batches, gemm_flops = f->gemm_flops * gemm_share;
    double pairs = tokens * (double)(r->max_seq_len > 0 ? r->max_seq_len + 1 : 1) / 2;
    double attn_forward = f->attn_flops;
    double attn_backward = f->attn_backward_flops > 0 ? f->attn_backward_flops : f->attn_flops;
    double scan_forward = f->scan_flops > 0 ? f->scan_flops : gemm_flops;
    double scan_backward = f->scan_backward_flops > 0 ? f->scan_backward_flops : gemm_flops;
    bool faster = f->attn_any_order > 0;
    if (faster && r->any_order)
        attn_forward = attn_backward = f->attn_any_order;
    costs c = { 0 };
    for (int32_t u = 0; u < m->n_units; u++) {
        const tpl *t = m->units[u].t;
        const tpl_plan *tp = p->tpl[u];
        double allowed = pairs, moved[2] = { 0, 0 };
        if (t->attn_window > 0 && t->attn_window < r->max_seq_len)
            allowed = tokens * (double)t->attn_window;
        double attn = t->attn_flops_per_pair * allowed;
        double gemm = tokens * t->gemm_flops_per_token;
        c.forward += gemm / gemm_flops + attn / attn_forward;
        c.backward += (2 * gemm + tokens * tp->recompute_gemm_flops) / gemm_flops;
        double scan = tokens * t->scan_flops_per_token;
        c.forward += scan / scan_forward;
        c.backward += 2 * scan / scan_backward + tokens * tp->recompute_scan_flops / scan_forward;
        c.backward +=
            2.5 * attn / attn_backward + tp->recompute_attn_flops * allowed / attn_forward;
        if (faster && r->training)
            c.determinism +=
                attn / attn_forward + 2.5 * attn / attn_backward - 3.5 * attn / f->attn_any_order;
        if (r->training && f->device_bandwidth > 0) {
            mt_status st = move_bytes(p, u, &moved[0], &moved[1]);
            if (st < 0)
                return st;
            c.forward += batches * moved[0] / f->device_bandwidth;
            c.backward += batches * moved[1] / f->device_bandwidth;
            /* Every micro-batch but the first adds its gradients to those before. */
            c.backward += fmax(2 * batches - 1, 1) * (double)tp->grad_bytes / f->device_bandwidth;
            /* What lies between experts' products runs over all rows for every segment of them. */
            double more = batches * fmax(tp->n_segments - 2, 0);
            c.forward += more * (double)tp->between_bytes[0] / f->device_bandwidth;
            c.backward += more * (double)tp->between_bytes[1] / f->device_bandwidth;
        }
        c.weights += (double)tp->weight_bytes;
        c.grads += (double)tp->grad_bytes / 4;
    }
    c.again = weights_again(p);
    *ret = c;
    return MT_OK;
}

/* Seconds of a pass that asks for so many of every resource: those that overlap take as long as the
 * slowest, which the time is charged to. A device that is the host does everything on the same
 * cores. */
static double pass_seconds(const plan *p, const double *need, double *charge)
{
    int worst = 0;
    double sum = 0;
    for (int k = 0; k < RESOURCES; k++) {
        worst = need[k] > need[worst] ? k : worst;
        sum += need[k];
        if (p->owner->unified)
            charge[k] += need[k];
    }
    if (p->owner->unified)
        return sum;
    charge[worst] += need[worst];
    return need[worst];
}

/* Seconds of a full step. With clipping the optimizer runs beside the first forward of the next
 * step, and so do gradients that were held until then; without it beside the last backward, and
 * beside that forward too. Copies and workers share the host's memory. */
static mt_status predict(plan *p)
{
    const plan_request *r = &p->request;
    const plan_profile *f = &p->owner->profile;
    bool clip = r->max_grad_norm > 0;
    double host_bandwidth = f->host_bandwidth * host_share;
    double grad_size = (double)mt_dtype_size(r->gradient_dtype);
    costs c;
    mt_status st = count_costs(p, &c);
    if (st < 0)
        return st;

    p->determinism_seconds = (double)p->groups * fmax(c.determinism, 0);
    double optimizer = 0;
    if (r->training) {
        double each = 8 + grad_size; /* both planes read and written, the gradient read */
        for (uint32_t s = 0; s < r->n_states; s++)
            each += 2.0 * (double)mt_dtype_size(r->states[s].dtype);
        optimizer = each * (double)p->m->total_params / host_bandwidth;
    }
    p->compute_seconds = p->copy_in_seconds = p->copy_out_seconds = p->seconds = 0;
    p->optimizer_seconds = optimizer;
    /* Passes that the optimizer runs beside without clipping are held back until it is known. */
    double charge[RESOURCES] = { 0 }, held[RESOURCES] = { 0 }, first_forward = 0, last_backward = 0,
           shared = 0;
    for (int64_t g = 0; g < p->groups; g++) {
        bool leave = !p->held && (!p->device_sums || g == p->groups - 1);
        bool add = !p->device_sums && g > 0;
        double in[2] = { c.weights, c.again }, grads = c.grads * grad_size;
        double out[2] = { p->held && g == 0 ? grads : 0, leave ? grads : 0 };
        double dram[2] = { in[0] + out[0], in[1] + out[1] };
        if (p->owner->unified)
            dram[0] = dram[1] = 0; /* copies are counted as such */
        if (add)
            dram[1] += c.grads * (8 + grad_size); /* the plane read and written, the slab read */
        double need[2][RESOURCES] = {
            { c.forward, in[0] / f->copy_in, out[0] / f->copy_out, dram[0] / host_bandwidth },
            { c.backward, in[1] / f->copy_in, out[1] / f->copy_out, dram[1] / host_bandwidth }
        };
        if (g == 0)
            shared += need[0][HOST];
        if (g == p->groups - 1)
            shared += need[1][HOST];
        if (g == 0 && clip && r->training)
            need[0][HOST] += optimizer;
        for (int k = 0; k < (r->training ? 2 : 1); k++) {
            bool beside = !clip && (k == 0 ? g == 0 : g == p->groups - 1);
            double seconds = pass_seconds(p, need[k], beside ? held : charge);
            p->seconds += seconds;
            p->compute_seconds += need[k][COMPUTE];
            p->copy_in_seconds += need[k][COPY_IN];
            p->copy_out_seconds += need[k][COPY_OUT];
            if (g == 0 && k == 0)
                first_forward = seconds;
            if (k == 1)
                last_backward = seconds;
        }
    }
    double both = first_forward + last_backward;
    if (r->training && !clip && p->owner->unified) {
        p->seconds += optimizer;
        charge[HOST] += optimizer;
    } else if (r->training && !clip && shared + optimizer > both) {
        p->seconds += shared + optimizer - both;
        charge[HOST] += shared + optimizer;
        memset(held, 0, sizeof held);
    }
    for (int k = 0; k < RESOURCES; k++)
        charge[k] += held[k];
    static const char *const name[] = { "compute", "copy-in", "copy-out", "host memory" };
    int worst = 0;
    for (int k = 1; k < RESOURCES; k++)
        worst = charge[k] > charge[worst] ? k : worst;
    p->bound = name[worst];
    return MT_OK;
}

/* Raises policies from `from` to `to`, unit by unit, as long as everything fits. */
static mt_status raise_policies(plan *p, tpl_policy from, tpl_policy to, const limits *lim)
{
    for (int32_t u = p->m->n_units - 1; u >= 0; u--) {
        if (p->policy[u] != from)
            continue;
        mt_status st = set_policy(p, u, to);
        if (st < 0)
            return st;
        count_bytes(p);
        if (!fits(p, lim)) {
            st = set_policy(p, u, from);
            count_bytes(p);
            return st;
        }
    }
    return MT_OK;
}

/* Half of the experts that are streamed together in the unit where they are largest, in bytes; 0:
 * nothing can be cut further. */
static int64_t smaller_segments(const plan *p)
{
    int64_t esize = mt_dtype_size(p->request.compute), largest = 0;
    for (int32_t u = 0; u < p->m->n_units; u++) {
        const tpl_plan *t = p->tpl[u];
        int32_t parts = t->bounds.segment_parts ? t->bounds.segment_parts : t->t->parts;
        int64_t bytes = parts > 1 ? parts * tpl_part_elems(t->t) * esize : 0;
        largest = bytes > largest ? bytes : largest;
    }
    return largest / 2;
}

/* May the plan choose segments? */
static bool may_cut(const plan *p)
{
    bool any = false;
    for (int32_t i = 0; i < p->m->n_tpls; i++)
        any |= p->m->tpls[i]->parts > 1;
    return any && p->request.segment_bytes == PLAN_AUTO;
}

/* A quarter of the largest unit leaves most of the room that whole ones take, in copies that are
 * still large. */
static int64_t small_segments(const plan *p)
{
    int64_t largest = 0;
    for (int32_t i = 0; i < p->m->n_tpls; i++)
        if (p->m->tpls[i]->parts > 1 && p->m->tpls[i]->flat_elems > largest)
            largest = p->m->tpls[i]->flat_elems;
    return largest * mt_dtype_size(p->request.compute) / 4;
}

/* Sets all policies and, where they are to be chosen, segments: small ones if asked for, else units
 * as a whole, and in both cases smaller ones until everything fits. */
static mt_status set_lowest(plan *p, tpl_policy policy, bool small, const limits *lim,
                            bool *ret_fits)
{
    const plan_request *r = &p->request;
    p->segment_bytes = r->segment_bytes == PLAN_AUTO ? 0 : r->segment_bytes;
    if (small)
        p->segment_bytes = small_segments(p);
    for (;;) {
        mt_status st = set_policies(p, policy);
        if (st < 0)
            return st;
        count_bytes(p);
        *ret_fits = fits(p, lim);
        int64_t smaller = *ret_fits || !may_cut(p) ? 0 : smaller_segments(p);
        if (smaller == 0)
            return MT_OK;
        p->segment_bytes = smaller;
    }
}

/* Where a step's gradients are before they leave the device: buffers of two units, from which every
 * group's leave; sums of all units, which leave as they become complete; the same, but they leave
 * when their norm is known. */
typedef enum place { PLACE_SUMS, PLACE_BUFFERS, PLACE_HELD, PLACES } place;

/* May gradients be there? One group has nothing to sum, and without clipping nothing to wait for.
 */
static bool may_place(const plan_request *r, int64_t groups, place where)
{
    bool clip = r->max_grad_norm > 0;
    if (!r->training)
        return where == PLACE_BUFFERS;
    switch (r->gradients) {
    case PLAN_GRADIENTS_HOST:
        return where == PLACE_BUFFERS;
    case PLAN_GRADIENTS_DEVICE:
        return where == PLACE_SUMS;
    case PLAN_GRADIENTS_HELD:
        return where == (clip ? PLACE_HELD : PLACE_SUMS);
    case PLAN_GRADIENTS_AUTO:
        break;
    }
    return where == PLACE_BUFFERS || (where == PLACE_SUMS ? groups > 1 : clip);
}

/* What a plan is completed from. */
typedef struct candidate {
    int64_t groups;
    place where;
    bool small; /* segments, where it may have any */
} candidate;

/* Completes a candidate. GEMMs are what recompute costs, so that every unit reaches `select`, which
 * repeats none, before the first is raised to `keep`. */
static mt_status complete(plan *p, const candidate *c, const limits *lim, bool *ret_fits)
{
    const plan_request *r = &p->request;
    p->groups = c->groups;
    p->held = c->where == PLACE_HELD;
    /* BF16 gradients of one group are held as such: one unit's sums suffice. */
    p->device_sums =
        c->where == PLACE_SUMS || (p->held && (c->groups > 1 || r->gradient_dtype == MT_F32));
    p->group_batches = (r->micro_batches + c->groups - 1) / c->groups;
    p->weight_buffers = r->weight_buffers == PLAN_AUTO ? 2 : r->weight_buffers;
    tpl_policy lowest = r->policy == PLAN_AUTO ? TPL_INPUT : (tpl_policy)r->policy;
    if (!r->training)
        lowest = TPL_KEEP; /* nothing is saved; the policy makes no difference */
    bool ok;
    mt_status st = set_lowest(p, lowest, c->small, lim, &ok);
    if (st < 0)
        return st;
    if (ok && r->training && r->policy == PLAN_AUTO) {
        st = raise_policies(p, TPL_INPUT, TPL_SELECT, lim);
        if (st == MT_OK)
            st = raise_policies(p, TPL_SELECT, TPL_KEEP, lim);
        if (st < 0)
            return st;
    }
    if (ok && r->weight_buffers == PLAN_AUTO && !r->training && r->context) {
        /* Decoding reads every weight for one token: all of them stay when they can. */
        p->weight_buffers = p->m->n_units > 2 ? p->m->n_units : 2;
        count_bytes(p);
        if (!fits(p, lim)) {
            p->weight_buffers = 2;
            count_bytes(p);
        }
    }
    *ret_fits = ok;
    return predict(p);
}

/* Of the candidates with that many groups the fastest that fits, if it is faster than *best. */
static mt_status choose_place(plan *p, int64_t groups, const limits *lim, candidate *best,
                              double *best_seconds)
{
    /* Of two that are equally fast, the one that moves less, or leaves the device more room; and
     * units stay whole unless there is something in it. */
    for (place where = 0; where < PLACES; where++)
        for (int small = 0; small <= may_cut(p); small++) {
            const candidate c = { groups, where, small };
            bool ok;
            if (!may_place(&p->request, groups, where))
                continue;
            mt_status st = complete(p, &c, lim, &ok);
            if (st < 0)
                return st;
            if (ok && p->seconds < *best_seconds * (small ? 0.98 : 0.999)) {
                *best = c;
                *best_seconds = p->seconds;
            }
        }
    return MT_OK;
}

/* The fastest number of groups, place of gradients and segments that fits, completed in p. */
static mt_status choose(plan *p, const limits *lim, bool *ret_fits)
{
    const plan_request *r = &p->request;
    int64_t from = r->groups == PLAN_AUTO ? 1 : r->groups;
    int64_t to = r->groups == PLAN_AUTO ? r->micro_batches : r->groups;
    candidate best = { to, PLACE_BUFFERS, false };
    double best_seconds = INFINITY;
    while (!may_place(r, to, best.where)) /* what is asked for, should nothing fit */
        best.where = (best.where + 1) % PLACES;
    for (int64_t groups = from; groups <= to; groups++) {
        /* Numbers of groups that leave groups equally large move more for nothing. */
        int64_t largest = (r->micro_batches + groups - 1) / groups;
        if (groups > from && largest == (r->micro_batches + groups - 2) / (groups - 1))
            continue;
        mt_status st = choose_place(p, groups, lim, &best, &best_seconds);
        if (st < 0)
            return st;
    }
    return complete(p, &best, lim, ret_fits);
}

/* ---- refusing -------------------------------------------------------------------------------- */

typedef struct text {
    char s[1700];
    size_t n;
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
    else
        text_add(t, "%.2f MiB", (double)bytes / (1 << 20));
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

/* Would the request fit with these changes? Leaves p in an arbitrary, complete state. */
static bool would_fit(plan *p, const plan_request *changed, const limits *lim)
{
    plan_request saved = p->request;
    bool ok = false;
    p->request = *changed;
    if (choose(p, lim, &ok) < 0)
        ok = false;
    p->request = saved;
    return ok;
}

static mt_status refuse(plan *p, const limits *lim)
{
    text t = { .n = 0 };
    int64_t device = p->tier_bytes[PLAN_DEVICE], host = p->tier_bytes[PLAN_HOST];
    int64_t short_by =
        device - lim->device > host - lim->host ? device - lim->device : host - lim->host;
    if (lim->unified && device + host - lim->host > short_by)
        short_by = device + host - lim->host;
    text_add(&t, "the run does not fit, ");
    text_bytes(&t, short_by);
    text_add(&t, " are missing: ");
    text_tier(&t, p, PLAN_DEVICE, lim->device);
    text_add(&t, "; ");
    text_tier(&t, p, PLAN_HOST, lim->host);
    if (lim->unified)
        text_add(&t, "; both are the same memory");

    const plan_request *r = &p->request;
    plan_request c = *r;
    const char *sep = ". It fits with ";
    c.policy = PLAN_AUTO;
    if (r->training && r->policy != PLAN_AUTO && r->policy != TPL_INPUT && would_fit(p, &c, lim)) {
        text_add(&t, "%smemory.activations: auto or input", sep);
        sep = ", or with ";
    }
    c = *r;
    c.groups = r->micro_batches;
    if (r->groups != PLAN_AUTO && r->groups < r->micro_batches && would_fit(p, &c, lim)) {
        text_add(&t, "%smemory.groups: auto or up to %lld", sep, (long long)r->micro_batches);
        sep = ", or with ";
    }
    c = *r;
    c.segment_bytes = PLAN_AUTO;
    if (r->segment_bytes != PLAN_AUTO && would_fit(p, &c, lim)) {
        text_add(&t, "%smemory.segment_size: auto", sep);
        sep = ", or with ";
    }
    c = *r;
    c.gradients = PLAN_GRADIENTS_AUTO;
    if (r->training && r->gradients != PLAN_GRADIENTS_AUTO && would_fit(p, &c, lim)) {
        text_add(&t, "%smemory.gradients: auto", sep);
        sep = ", or with ";
    }
    c = *r;
    c.max_grad_norm = 0;
    if (r->training && r->max_grad_norm > 0 && would_fit(p, &c, lim)) {
        text_add(&t, "%strain.max_grad_norm: 0 (no gradient plane)", sep);
        sep = ", or with ";
    }
    c = *r;
    c.groups = PLAN_AUTO;
    c.policy = PLAN_AUTO;
    while (c.micro_tokens > 64) {
        c.micro_tokens /= 2;
        c.max_seq_len = min64(c.max_seq_len, c.micro_tokens);
        c.micro_documents = min64(c.micro_documents, c.micro_tokens);
        if (would_fit(p, &c, lim)) {
            text_add(&t,
                     "%smicro-batches of at most %lld tokens (a smaller train.micro_batch_size or "
                     "data.max_seq_len)",
                     sep, (long long)c.micro_tokens);
            sep = ", or with ";
            break;
        }
    }
    if (sep[0] == '.')
        text_add(&t, ". No setting makes it fit: a smaller model or more memory is needed");
    return status_set(MT_ERR_NOMEM, "%s", t.s);
}

/* ---- creating -------------------------------------------------------------------------------- */

static mt_status check_request(const model *m, const plan_request *r)
{
    if (r->compute != MT_F32 && r->compute != MT_BF16)
        return status_set(MT_ERR_UNSUPPORTED, "precision %s: the engine computes in fp32 or bf16",
                          mt_dtype_name(r->compute));
    if (r->micro_tokens < 1 || r->micro_batches < 1 || r->micro_documents < 1)
        return status_set(MT_ERR_INVALID,
                          "a step of %lld micro-batches of %lld tokens in %lld documents; all must "
                          "be at least 1",
                          (long long)r->micro_batches, (long long)r->micro_tokens,
                          (long long)r->micro_documents);
    if (r->groups != PLAN_AUTO && (r->groups < 1 || r->groups > r->micro_batches))
        return status_set(MT_ERR_INVALID,
                          "memory.groups is %lld; expected 1 to the %lld micro-batches of a step",
                          (long long)r->groups, (long long)r->micro_batches);
    if (r->policy != PLAN_AUTO && (r->policy < 0 || r->policy >= TPL_POLICIES))
        return status_set(MT_ERR_INVALID, "activation policy %d is none of keep, select, input",
                          r->policy);
    if (r->weight_buffers != PLAN_AUTO && r->weight_buffers < 2)
        return status_set(MT_ERR_INVALID, "memory.weight_buffers is %d; at least 2 are needed",
                          r->weight_buffers);
    if (r->segment_bytes != PLAN_AUTO && r->segment_bytes < 0)
        return status_set(MT_ERR_INVALID, "memory.segment_size is %lld bytes; at least 0",
                          (long long)r->segment_bytes);
    if (r->gradient_dtype != MT_F32 && r->gradient_dtype != MT_BF16)
        return status_set(MT_ERR_UNSUPPORTED,
                          "memory.gradient_dtype %s: gradients leave the device as fp32 or bf16",
                          mt_dtype_name(r->gradient_dtype));
    if (r->n_states > MT_OPTIM_MAX_STATES)
        return status_set(MT_ERR_INVALID, "%u optimizer states; at most %d", r->n_states,
                          MT_OPTIM_MAX_STATES);
    if (m->n_units < 2)
        return status_set(MT_ERR_INVALID,
                          "the model has %d units; at least an embedding and a "
                          "head are needed",
                          m->n_units);
    if (!m->units[m->n_units - 1].t->makes_loss)
        return status_set(MT_ERR_INVALID, "the last unit, '%s', computes no loss",
                          m->units[m->n_units - 1].name);
    if (m->vocab < 1)
        return status_set(MT_ERR_INVALID, "the architecture did not say how large the vocabulary "
                                          "is (set_vocab)");
    for (int32_t u = 0; u < m->n_units - 1; u++)
        if (m->units[u].t->n_out != m->units[u + 1].t->n_in)
            return status_set(MT_ERR_INVALID, "unit '%s' passes on %u values, '%s' takes %u",
                              m->units[u].name, m->units[u].t->n_out, m->units[u + 1].name,
                              m->units[u + 1].t->n_in);
    if (m->units[0].t->n_in != 0)
        return status_set(MT_ERR_INVALID, "the first unit, '%s', takes values from a unit below",
                          m->units[0].name);
    return MT_OK;
}

static limits find_limits(const plan_request *r, const mt_backend *backend, const void *device)
{
    mt_device_info info = { .struct_size = sizeof info };
    backend->info(device, &info);
    int64_t host = r->machine ? r->machine->host : host_memory_available();
    if (r->machine) {
        info.unified = r->machine->unified;
        info.memory_free = r->machine->device;
    }
    limits lim = { .unified = info.unified != 0 };
    lim.host = r->host_limit == PLAN_AUTO ? host : r->host_limit;
    if (r->device_limit != PLAN_AUTO)
        lim.device = r->device_limit;
    else if (lim.unified)
        lim.device = lim.host;
    else
        lim.device = info.memory_free - info.memory_free / 32 - ((int64_t)256 << 20);
    return lim;
}

mt_status plan_create(const model *m, const plan_request *request, const plan_profile *profile,
                      const mt_backend *backend, void *device, plan **ret)
{
    mt_status st = check_request(m, request);
    if (st < 0)
        return st;
    const size_t has_narrow = offsetof(mt_backend, narrow) + sizeof backend->narrow;
    if (request->training && request->gradient_dtype == MT_BF16 &&
        (backend->struct_size < has_narrow || !backend->narrow))
        return status_set(MT_ERR_UNSUPPORTED,
                          "memory.gradient_dtype is bf16, but the backend '%s' cannot round "
                          "gradients; use fp32",
                          backend->kind);
    plan *p = calloc(1, sizeof *p);
    if (!p)
        return status_nomem("the plan", sizeof *p);
    p->m = m;
    p->request = *request;
    p->owner = calloc(1, sizeof *p->owner);
    p->policy = calloc((size_t)m->n_units, sizeof *p->policy);
    p->tpl = calloc((size_t)m->n_units, sizeof *p->tpl);
    if (!p->owner || !p->policy || !p->tpl) {
        st = status_nomem("the plan", (size_t)m->n_units * sizeof *p->tpl);
        goto out;
    }
    p->owner->profile = *profile;
    p->owner->backend = backend;
    p->owner->device = device;
    limits lim = find_limits(request, backend, device);
    p->owner->unified = lim.unified;
    bool ok = false;
    st = choose(p, &lim, &ok);
    if (st == MT_OK && !ok)
        st = refuse(p, &lim);
    if (st < 0)
        goto out;
    *ret = p;
    p = NULL;
out:
    plan_destroy(p);
    return st;
}

void plan_destroy(plan *p)
{
    if (!p)
        return;
    if (p->owner) {
        for (int32_t i = 0; i < p->owner->n_tpl; i++)
            tpl_plan_destroy(p->owner->tpl[i].plan);
        free(p->owner->tpl);
    }
    free(p->owner);
    free(p->policy);
    free(p->tpl);
    free(p);
}
