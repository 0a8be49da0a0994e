/* SPDX-License-Identifier: Apache-2.0
 *
 * Printing and writing what `bench step` found: every figure beside the ceiling that the profile of
 * the machine gives for it.
 */
#include "bench_report.h"

#include "../base/status.h"
#include "../train/human.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

/* Figures of one size, per step unless they are rates. */
typedef struct figures {
    double tokens_per_second, predicted_tokens_per_second;
    double flops_6n, flops_model;    /* per second, by the median step */
    double flops_busy;               /* of the model, per second that compute was busy */
    double busy, wait[ENGINE_WAITS]; /* shares of the time */
    double in_bytes, out_bytes;
    double in_rate, out_rate; /* bytes a second while copying */
    double update_rate;       /* parameters a second while updating */
    double update_ceiling;
} figures;

static double ratio(double a, double b)
{
    return b > 0 ? a / b : 0;
}

/* Bytes of host memory that an update reads and writes for one parameter: both planes of the master
 * and all states in and out, and its gradient in. */
static double update_bytes(const step_report *r)
{
    double bytes = 2 * 4 + (r->run->gradient_dtype == RUN_GRADIENT_BF16 ? 2 : 4);
    for (uint32_t i = 0; i < r->s->n_states; i++)
        bytes += 2.0 * (double)mt_dtype_size(r->s->states[i].dtype);
    return bytes;
}

static figures figures_of(const step_report *r, const step_bench *b)
{
    const engine_result *sum = &b->sum;
    double tokens = (double)b->tokens, steps = (double)b->steps;
    double document = (double)(r->run->max_seq_len < b->tokens ? r->run->max_seq_len : b->tokens);
    double work = model_train_flops_per_token(r->s->model, document) * tokens;
    figures f = { .tokens_per_second = ratio(tokens, b->median),
                  .predicted_tokens_per_second = ratio(tokens, b->plan->seconds),
                  .flops_6n = ratio(6 * (double)r->s->model->total_params * tokens, b->median),
                  .flops_model = ratio(work, b->median),
                  .flops_busy = ratio(work * steps, sum->compute_seconds),
                  .busy = ratio(sum->compute_seconds, sum->seconds),
                  .in_bytes = (double)sum->copy_in_bytes / steps,
                  .out_bytes = (double)sum->copy_out_bytes / steps,
                  .in_rate = ratio((double)sum->copy_in_bytes, sum->copy_in_seconds),
                  .out_rate = ratio((double)sum->copy_out_bytes, sum->copy_out_seconds),
                  .update_rate = ratio((double)sum->updated_elems, sum->update_seconds),
                  .update_ceiling = r->s->profile.host_bandwidth / update_bytes(r) };
    for (int k = 0; k < ENGINE_WAITS; k++)
        f.wait[k] = ratio(sum->wait_seconds[k], sum->seconds);
    return f;
}

/* ---- the table ------------------------------------------------------------------------------- */

static human_text rate(double x, const char *unit)
{
    human_text t;
    if (x >= 1e12)
        snprintf(t.s, sizeof t.s, "%.1f T%s", x * 1e-12, unit);
    else if (x >= 1e9)
        snprintf(t.s, sizeof t.s, "%.2f G%s", x * 1e-9, unit);
    else if (x >= 1e6)
        snprintf(t.s, sizeof t.s, "%.2f M%s", x * 1e-6, unit);
    else if (x >= 1e3)
        snprintf(t.s, sizeof t.s, "%.2f k%s", x * 1e-3, unit);
    else
        snprintf(t.s, sizeof t.s, "%.*f %s", plan_rate_decimals(x), x, unit);
    return t;
}

/* A figure beside its ceiling. A share is of what was measured with care: of a rough figure, which
 * may well be passed, it would say nothing. */
static void row(const step_report *r, const char *name, const char *figure, const char *what,
                const char *ceiling, double share)
{
    printf("  %-18s %-28s %s ", name, figure, what);
    if (r->s->measured_at)
        printf("%s, %.0f%%\n", ceiling, 100 * share);
    else
        printf("roughly %s\n", ceiling);
}

/* "keep 30, select 4". */
static void print_policies(const plan *p)
{
    const char *sep = "";
    for (int k = 0; k < TPL_POLICIES; k++) {
        int count = 0;
        for (int32_t u = 0; u < p->m->n_units; u++)
            count += p->policy[u] == (tpl_policy)k;
        if (count)
            printf("%s%d %s", sep, count, tpl_policy_name((tpl_policy)k));
        sep = count ? ", " : sep;
    }
}

static void print_rates(const step_report *r, const figures *f)
{
    const plan_profile *top = &r->s->profile;
    char text[96];
    row(r, "model, 6N", rate(f->flops_6n, "FLOP/s").s, "of a GEMM's",
        rate(top->gemm_flops, "FLOP/s").s, f->flops_6n / top->gemm_flops);
    row(r, "model", rate(f->flops_model, "FLOP/s").s, "of a GEMM's",
        rate(top->gemm_flops, "FLOP/s").s, f->flops_model / top->gemm_flops);
    row(r, "  while computing", rate(f->flops_busy, "FLOP/s").s, "of a GEMM's",
        rate(top->gemm_flops, "FLOP/s").s, f->flops_busy / top->gemm_flops);
    snprintf(text, sizeof text, "%s at %s", human_bytes((int64_t)f->in_bytes).s,
             rate(f->in_rate, "B/s").s);
    row(r, "copy-in", text, "of", rate(top->copy_in, "B/s").s, f->in_rate / top->copy_in);
    snprintf(text, sizeof text, "%s at %s", human_bytes((int64_t)f->out_bytes).s,
             rate(f->out_rate, "B/s").s);
    row(r, "copy-out", text, "of", rate(top->copy_out, "B/s").s, f->out_rate / top->copy_out);
    row(r, "optimizer", rate(f->update_rate, "param/s").s, "of",
        rate(f->update_ceiling, "param/s").s, f->update_rate / f->update_ceiling);
}

void report_begin(const step_report *r)
{
    printf("model      %s, %s parameters in %d units\n", r->model,
           human_grouped(r->s->model->total_params).s, r->s->model->n_units);
    printf("device     %s (%s), %s\n", r->s->info.name, r->s->info.details,
           mt_dtype_name(r->s->compute));
    printf("optimizer  %s, %s\n", r->run->optimizer,
           r->run->max_grad_norm > 0 ? "clipping" : "no clipping");
    printf("ceilings   by %s%s\n", session_profile_name(r->s).s,
           r->s->measured_at ? "" : "; `megatrain bench hardware` makes better ones");
    printf("data       documents of %lld random tokens\n", (long long)r->run->max_seq_len);
    fflush(stdout);
}

void report_size(const step_report *r, const step_bench *b)
{
    if (!b->plan) {
        printf("\n%s tokens a step: refused: %s\n", human_grouped(b->tokens).s, b->refused);
        fflush(stdout);
        return;
    }
    const plan *p = b->plan;
    figures f = figures_of(r, b);
    char text[96];
    printf("\n%s tokens a step: %lld micro-batch%s of %lld in %lld group%s, %d weight buffers, ",
           human_grouped(b->tokens).s, (long long)p->request.micro_batches,
           p->request.micro_batches == 1 ? "" : "es", (long long)p->request.micro_tokens,
           (long long)p->groups, p->groups == 1 ? "" : "s", p->weight_buffers);
    print_policies(p);
    printf("\n  %-18s median %.4g s, best %.4g s, of %lld\n", "step", b->median, b->best,
           (long long)b->steps);
    double rate = f.tokens_per_second, predicted = f.predicted_tokens_per_second;
    snprintf(text, sizeof text, "%.*f tokens/s", plan_rate_decimals(rate), rate);
    printf("  %-18s %-28s plan %.*f, bound by %s, %.0f%%\n", "throughput", text,
           plan_rate_decimals(predicted), predicted, p->bound, 100 * ratio(rate, predicted));
    printf("  %-18s %.1f%%; waits: weights %.1f%%, gradients %.1f%%, optimizer %.1f%%, data "
           "%.1f%%\n",
           "compute busy", 100 * f.busy, 100 * f.wait[ENGINE_WAIT_WEIGHTS],
           100 * f.wait[ENGINE_WAIT_GRADIENTS], 100 * f.wait[ENGINE_WAIT_OPTIMIZER],
           100 * f.wait[ENGINE_WAIT_DATA]);
    print_rates(r, &f);
    printf("  %-18s device %s, host %s (%.2f bytes a parameter)\n", "memory",
           human_bytes(b->bytes[PLAN_DEVICE]).s, human_bytes(b->bytes[PLAN_HOST]).s,
           (double)b->bytes[PLAN_HOST] / (double)r->s->model->total_params);
    fflush(stdout);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_memory(const plan *p)
{
    static const char *const tier[PLAN_TIERS] = { "device", "host" };
    json_t *items = json_array();
    for (int32_t i = 0; i < p->n_items; i++)
        json_array_append_new(items,
                              json_pack("{s:s, s:s, s:I}", "tier", tier[p->item[i].tier], "name",
                                        p->item[i].name, "bytes", (json_int_t)p->item[i].bytes));
    return items;
}

static json_t *json_size(const step_report *r, const step_bench *b)
{
    if (!b->plan)
        return json_pack("{s:I, s:s}", "tokens", (json_int_t)b->tokens, "refused", b->refused);
    const plan *p = b->plan;
    figures f = figures_of(r, b);
    json_t *policies = json_object();
    for (int k = 0; k < TPL_POLICIES; k++) {
        int count = 0;
        for (int32_t u = 0; u < p->m->n_units; u++)
            count += p->policy[u] == (tpl_policy)k;
        json_object_set_new(policies, tpl_policy_name((tpl_policy)k), json_integer(count));
    }
    json_t *waits = json_pack("{s:f, s:f, s:f, s:f}", "weights", f.wait[ENGINE_WAIT_WEIGHTS],
                              "gradients", f.wait[ENGINE_WAIT_GRADIENTS], "optimizer",
                              f.wait[ENGINE_WAIT_OPTIMIZER], "data", f.wait[ENGINE_WAIT_DATA]);
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:i, s:o, s:I, s:f, s:f, s:f, s:f, s:s, s:f, s:f, s:f, s:f, s:o, "
        "s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:o}",
        "tokens", (json_int_t)b->tokens, "micro_tokens", (json_int_t)p->request.micro_tokens,
        "micro_batches", (json_int_t)p->request.micro_batches, "groups", (json_int_t)p->groups,
        "weight_buffers", (int)p->weight_buffers, "activations", policies, "steps",
        (json_int_t)b->steps, "seconds_median", b->median, "seconds_best", b->best,
        "tokens_per_second", f.tokens_per_second, "predicted_tokens_per_second",
        f.predicted_tokens_per_second, "predicted_bound", p->bound, "flops_6n_per_second",
        f.flops_6n, "model_flops_per_second", f.flops_model, "model_flops_per_busy_second",
        f.flops_busy, "compute_busy", f.busy, "waits", waits, "copy_in_bytes", f.in_bytes,
        "copy_in_bytes_per_second", f.in_rate, "copy_out_bytes", f.out_bytes,
        "copy_out_bytes_per_second", f.out_rate, "updates_per_second", f.update_rate, "loss",
        b->loss, "device_bytes", (json_int_t)b->bytes[PLAN_DEVICE], "host_bytes",
        (json_int_t)b->bytes[PLAN_HOST], "memory", json_memory(p));
}

mt_status report_write(const step_report *r, const char *path)
{
    const session *s = r->s;
    const plan_profile *top = &s->profile;
    json_t *sizes = json_array();
    for (int32_t i = 0; i < r->n; i++)
        json_array_append_new(sizes, json_size(r, &r->size[i]));
    json_t *ceilings =
        json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "measured_at", (json_int_t)s->measured_at,
                  "gemm_flops_per_second", top->gemm_flops, "attention_flops_per_second",
                  top->attn_flops, "copy_in_bytes_per_second", top->copy_in,
                  "copy_out_bytes_per_second", top->copy_out, "host_bytes_per_second",
                  top->host_bandwidth, "updates_per_second", top->host_bandwidth / update_bytes(r));
    json_t *root =
        json_pack("{s:s, s:i, s:s, s:I, s:s, s:s, s:s, s:s, s:f, s:I, s:o, s:o}", "format",
                  "megatrain-bench-step", "version", 1, "model", r->model, "parameters",
                  (json_int_t)s->model->total_params, "device", s->info.name, "device_details",
                  s->info.details, "precision", mt_dtype_name(s->compute), "optimizer",
                  r->run->optimizer, "max_grad_norm", r->run->max_grad_norm, "document",
                  (json_int_t)r->run->max_seq_len, "ceilings", ceilings, "sizes", sizes);
    mt_status st = root ? MT_OK : status_nomem("JSON", 0);
    if (st == MT_OK && json_dump_file(root, path, JSON_INDENT(2)) != 0)
        st = status_set(MT_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    json_decref(root);
    return st;
}

void report_finish(step_report *r)
{
    for (int32_t i = 0; i < r->n; i++)
        plan_destroy(r->size[i].plan);
    free(r->size);
}
