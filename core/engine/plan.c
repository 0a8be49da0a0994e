/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing a plan: the number of groups, every unit's policy and the weight buffers, by exact bytes
 * and a cost model. Bytes come from layout.c, seconds from plan_cost.c; refusing, printing and
 * measuring have files of their own.
 */
#include "plan.h"

#include "../base/machine.h"
#include "../base/status.h"
#include "host_memory.h"
#include "layout.h"
#include "plan_internal.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORKERS = 256 };

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

mt_status plan_get_tpl(plan *p, int32_t tpl_index, tpl_policy policy, int64_t gather_rows,
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
    mt_status st = plan_get_tpl(p, p->m->units[unit].tpl_index, policy, rows, &p->tpl[unit]);
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
    p->parked = l.parked;
    p->parked_bytes = l.parked_bytes;
    p->park_apart = l.park_apart;
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

int64_t plan_missing(const plan *p, const plan_limits *lim, plan_tier tier)
{
    int64_t device = p->tier_bytes[PLAN_DEVICE], host = p->tier_bytes[PLAN_HOST];
    int64_t bytes =
        tier == PLAN_DEVICE ? device - lim->device : host + (lim->unified ? device : 0) - lim->host;
    return bytes > 0 ? bytes : 0;
}

static bool fits(const plan *p, const plan_limits *lim)
{
    return plan_missing(p, lim, PLAN_DEVICE) == 0 && plan_missing(p, lim, PLAN_HOST) == 0;
}

/* Raises policies from `from` to `to`, unit by unit, as long as everything fits. */
static mt_status raise_policies(plan *p, tpl_policy from, tpl_policy to, const plan_limits *lim)
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
static mt_status set_lowest(plan *p, tpl_policy policy, bool small, const plan_limits *lim,
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

/* The best one so far, and what makes it that. */
typedef struct choice {
    candidate c;
    bool fits;
    double seconds;                       /* where it fits */
    int64_t device_missing, host_missing; /* where it does not */
} choice;

/* Where updates run beside backward they may be behind when it ends, with as many slabs as host
 * memory has room for. */
static void deepen(plan *p, const plan_limits *lim)
{
    p->deep = p->request.training && !(p->request.max_grad_norm > 0) && !lim->unified;
    count_bytes(p);
    if (!p->deep || fits(p, lim))
        return;
    p->slab_cut = p->tier_bytes[PLAN_HOST] - lim->host;
    count_bytes(p);
}

/* Completes a candidate. GEMMs are what recompute costs, so that every unit reaches `select`, which
 * repeats none, before the first is raised to `keep`. */
static mt_status complete(plan *p, const candidate *c, const plan_limits *lim, bool *ret_fits)
{
    const plan_request *r = &p->request;
    p->groups = c->groups;
    p->held = c->where == PLACE_HELD;
    p->deep = false;
    p->slab_cut = 0;
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
    if (ok)
        deepen(p, lim);
    return plan_predict(p);
}

/* Seconds by which a choice counts. There must be something in cutting units; and in adding groups
 * up on the host, which takes 4 bytes a parameter and comes in bursts that no rate tells of. */
static double counted_seconds(const choice *c)
{
    bool adds = c->c.where == PLACE_BUFFERS && c->c.groups > 1;
    return c->seconds * (c->c.small ? 1.02 : 1) * (adds ? 1.02 : 1);
}

/* Of two that are equally fast the earlier one stays. Where nothing fits, host memory is what can
 * be bought: it may be short where the device need not be. */
static bool is_better(const choice *a, const choice *b)
{
    if (a->fits != b->fits)
        return a->fits;
    if (a->fits)
        return counted_seconds(a) < counted_seconds(b) * 0.999;
    if (a->device_missing != b->device_missing)
        return a->device_missing < b->device_missing;
    return a->host_missing < b->host_missing;
}

/* Completes all candidates with that many groups; *best becomes the best of them and of itself. */
static mt_status choose_place(plan *p, int64_t groups, const plan_limits *lim, choice *best)
{
    bool one_limit = lim->unified && lim->device == lim->host; /* and the host's counts both */
    /* Places that come first move less, or leave the device more room. */
    for (place where = 0; where < PLACES; where++)
        for (int small = 0; small <= may_cut(p); small++) {
            choice one = { .c = { groups, where, small } };
            if (!may_place(&p->request, groups, where))
                continue;
            mt_status st = complete(p, &one.c, lim, &one.fits);
            if (st < 0)
                return st;
            one.seconds = p->seconds;
            one.device_missing = one_limit ? 0 : plan_missing(p, lim, PLAN_DEVICE);
            one.host_missing = plan_missing(p, lim, PLAN_HOST);
            if (best->c.groups == 0 || is_better(&one, best))
                *best = one;
        }
    return MT_OK;
}

/* The fastest number of groups, place of gradients and segments that fits, or else what is nearest
 * to fitting, completed in p. */
mt_status plan_choose(plan *p, const plan_limits *lim, bool *ret_fits)
{
    const plan_request *r = &p->request;
    int64_t from = r->groups == PLAN_AUTO ? 1 : r->groups;
    int64_t to = r->groups == PLAN_AUTO ? r->micro_batches : r->groups;
    choice best = { .c = { .groups = 0 } }; /* none yet */
    for (int64_t groups = from; groups <= to; groups++) {
        /* Numbers of groups that leave groups equally large move more for nothing. */
        int64_t largest = (r->micro_batches + groups - 1) / groups;
        if (groups > from && largest == (r->micro_batches + groups - 2) / (groups - 1))
            continue;
        mt_status st = choose_place(p, groups, lim, &best);
        if (st < 0)
            return st;
    }
    return complete(p, &best.c, lim, ret_fits);
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

static plan_limits find_limits(const plan_request *r, const mt_backend *backend, const void *device)
{
    mt_device_info info = { .struct_size = sizeof info };
    backend->info(device, &info);
    int64_t host = r->machine ? r->machine->host : host_memory_available();
    if (r->machine) {
        info.unified = r->machine->unified;
        info.memory_free = r->machine->device;
    }
    plan_limits lim = { .unified = info.unified != 0 };
    lim.host = r->host_limit == PLAN_AUTO ? host : r->host_limit;
    if (r->device_limit != PLAN_AUTO)
        lim.device = r->device_limit;
    else if (lim.unified)
        lim.device = lim.host;
    else
        lim.device = info.memory_free - info.memory_free / 32 - ((int64_t)256 << 20);
    return lim;
}

static int32_t count_workers(const plan_request *r)
{
    int32_t n = r->workers > 0 ? r->workers : r->machine ? r->machine->cpus : machine_cpus();
    return n < 1 ? 1 : n > MAX_WORKERS ? MAX_WORKERS : n;
}

bool plan_can_narrow(const mt_backend *backend)
{
    const size_t has_narrow = offsetof(mt_backend, narrow) + sizeof backend->narrow;
    return backend->struct_size >= has_narrow && backend->narrow;
}

mt_status plan_create(const model *m, const plan_request *request, const plan_profile *profile,
                      const mt_backend *backend, void *device, plan **ret)
{
    mt_status st = check_request(m, request);
    if (st < 0)
        return st;
    if (request->training && request->gradient_dtype == MT_BF16 && !plan_can_narrow(backend))
        return status_set(MT_ERR_UNSUPPORTED,
                          "memory.gradient_dtype is bf16, but the backend '%s' cannot round "
                          "gradients; use fp32",
                          backend->kind);
    plan *p = calloc(1, sizeof *p);
    if (!p)
        return status_nomem("the plan", sizeof *p);
    p->m = m;
    p->request = *request;
    p->workers = count_workers(request);
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
    plan_limits lim = find_limits(request, backend, device);
    p->owner->unified = lim.unified;
    bool ok = false;
    st = plan_choose(p, &lim, &ok);
    if (st == MT_OK && !ok)
        st = plan_refuse(p, &lim);
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
