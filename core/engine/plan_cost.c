/* SPDX-License-Identifier: Apache-2.0
 *
 * The cost model: how long a full step of a plan takes, and what bounds it.
 */
#include "plan_internal.h"

#include <math.h>
#include <string.h>

/* What a run keeps up of the best that was measured: GEMMs of all shapes, sizes and operand orders,
 * hour after hour. */
static const double gemm_share = 0.9;

/* What copies take of host memory, in bytes of the workers': processors do not use all that it
 * gives, so that part of what a copy moves comes on top (docs/performance.md). */
static const double copy_share = 2.0 / 3;

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
        plan_get_tpl(p, p->m->units[u].tpl_index, TPL_KEEP, p->tpl[u]->bounds.gather_rows, &keep);
    if (st < 0)
        return st;
    double all = (double)keep->saved_bytes, again = all - (double)p->tpl[u]->saved_bytes;
    *ret_forward = 1.5 * all;
    *ret_backward = 3 * all + 2 * fmax(again, 0);
    return MT_OK;
}

/* Bytes of weights that backward fetches: of all that reads any, but for the pieces that are still
 * there, and the dense part of a unit that is cut once more. */
static double weights_again(const plan *p)
{
    double esize = (double)mt_dtype_size(p->request.compute), bytes = 0;
    int32_t kept = 0;
    for (int32_t u = p->m->n_units - 1; u >= 0; u--) {
        const tpl_plan *t = p->tpl[u];
        if (t->n_segments == 1 && !t->backward_reads)
            continue;
        for (int32_t i = t->n_segments - 1; i >= 0; i--)
            bytes += kept++ < p->weight_buffers ? 0 : (double)t->segment[i].elems * esize;
        bytes += t->n_segments > 1 ? (double)t->segment[0].elems * esize : 0;
    }
    return bytes;
}

/* Bytes of the unit's tables that the step's gradients have rows of, and no group fetches. */
static double bytes_unfetched(const plan *p, int32_t u)
{
    const tpl_plan *t = p->tpl[u];
    int64_t rows = t->bounds.gather_rows - p->group_batches * p->request.micro_tokens, cols = 0;
    for (uint32_t k = 0; k < t->t->n_params; k++)
        cols += t->t->params[k].gathered ? t->t->params[k].info.cols : 0;
    return p->device_sums && rows > 0 ? (double)(rows * cols * mt_dtype_size(t->bounds.compute))
                                      : 0;
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
        c.weights += (double)tp->weight_bytes - bytes_unfetched(p, u);
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

/* Seconds in which the workers read and write what the optimizer takes of every parameter. */
static double optimizer_seconds(const plan *p)
{
    const plan_request *r = &p->request;
    if (!r->training)
        return 0;
    /* Both planes read and written, the gradient read. */
    double each = 8 + (double)mt_dtype_size(r->gradient_dtype);
    for (uint32_t s = 0; s < r->n_states; s++)
        each += 2.0 * (double)mt_dtype_size(r->states[s].dtype);
    return each * (double)p->m->total_params / p->owner->profile.host_bandwidth;
}

/* Seconds that group g's forward and backward ask of every resource, the optimizer apart. */
static void count_group(const plan *p, const costs *c, int64_t g, double ret[2][RESOURCES])
{
    const plan_profile *f = &p->owner->profile;
    double grad_size = (double)mt_dtype_size(p->request.gradient_dtype);
    double grads = c->grads * grad_size;
    bool leave = !p->held && (!p->device_sums || g == p->groups - 1);
    bool add = !p->device_sums && g > 0;
    double in[2] = { c->weights, c->again };
    double out[2] = { p->held && g == 0 ? grads : 0, leave ? grads : 0 };
    double dram[2] = { copy_share * (in[0] + out[0]), copy_share * (in[1] + out[1]) };
    if (p->owner->unified)
        dram[0] = dram[1] = 0; /* copies are counted as such */
    if (add)
        dram[1] += c->grads * (8 + grad_size); /* the plane read and written, the slab read */
    for (int k = 0; k < 2; k++) {
        ret[k][COMPUTE] = k == 0 ? c->forward : c->backward;
        ret[k][COPY_IN] = in[k] / f->copy_in;
        ret[k][COPY_OUT] = out[k] / f->copy_out;
        ret[k][HOST] = dram[k] / f->host_bandwidth;
    }
}

/* How passes add up. */
typedef struct timeline {
    double charge[RESOURCES]; /* seconds by what bounds them */
    double held[RESOURCES];   /* those that the optimizer runs beside without clipping */
    double first_forward, last_backward;
    double shared; /* s of host memory that these two ask for */
} timeline;

static void add_group(plan *p, const costs *c, int64_t g, timeline *t)
{
    const plan_request *r = &p->request;
    bool clip = r->max_grad_norm > 0, first = g == 0, last = g == p->groups - 1;
    double need[2][RESOURCES];
    count_group(p, c, g, need);
    if (first)
        t->shared += need[0][HOST];
    if (last)
        t->shared += need[1][HOST];
    if (first && clip)
        need[0][HOST] += p->optimizer_seconds;
    for (int k = 0; k < (r->training ? 2 : 1); k++) {
        bool beside = !clip && (k == 0 ? first : last);
        double seconds = pass_seconds(p, need[k], beside ? t->held : t->charge);
        p->seconds += seconds;
        p->compute_seconds += need[k][COMPUTE];
        p->copy_in_seconds += need[k][COPY_IN];
        p->copy_out_seconds += need[k][COPY_OUT];
        if (first && k == 0)
            t->first_forward = seconds;
        if (k == 1)
            t->last_backward = seconds;
    }
}

/* Without clipping the optimizer runs beside the last backward and the first forward, as far as
 * host memory allows; on a device that is the host, after them. */
static void add_optimizer(plan *p, timeline *t)
{
    double optimizer = p->optimizer_seconds, both = t->first_forward + t->last_backward;
    if (p->owner->unified) {
        p->seconds += optimizer;
        t->charge[HOST] += optimizer;
    } else if (t->shared + optimizer > both) {
        p->seconds += t->shared + optimizer - both;
        t->charge[HOST] += t->shared + optimizer;
        memset(t->held, 0, sizeof t->held);
    }
}

static const char *bound_by(const timeline *t)
{
    static const char *const name[] = { "compute", "copy-in", "copy-out", "host memory" };
    int worst = 0;
    for (int k = 1; k < RESOURCES; k++)
        worst = t->charge[k] + t->held[k] > t->charge[worst] + t->held[worst] ? k : worst;
    return name[worst];
}

/* Seconds of a full step. With clipping the optimizer runs beside the first forward of the next
 * step, and so do gradients that were held until then; without it beside the last backward, and
 * beside that forward too. Copies and workers share the host's memory. */
mt_status plan_predict(plan *p)
{
    timeline t = { 0 };
    costs c;
    mt_status st = count_costs(p, &c);
    if (st < 0)
        return st;
    p->determinism_seconds = (double)p->groups * fmax(c.determinism, 0);
    p->optimizer_seconds = optimizer_seconds(p);
    p->compute_seconds = p->copy_in_seconds = p->copy_out_seconds = p->seconds = 0;
    for (int64_t g = 0; g < p->groups; g++)
        add_group(p, &c, g, &t);
    if (p->request.training && !(p->request.max_grad_norm > 0))
        add_optimizer(p, &t);
    p->bound = bound_by(&t);
    return MT_OK;
}
