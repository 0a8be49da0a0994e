/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain bench unit: one layer of each kind by itself, forward and backward with its streaming.
 * The engine runs a model of embedding, two such layers and head, so that a model of any size can
 * be measured where one of its layers fits.
 */
#include "bench.h"

#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"
#include "../train/files.h"
#include "bench_setup.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* One computes while the other's weights arrive and its gradients leave. */
enum { COPIES = 2 };

/* One size of step. Seconds are means over the timed steps and the copies of the unit. */
typedef struct unit_size {
    int64_t tokens, micro_tokens;
    char refused[2048]; /* why; else "" */
    tpl_policy policy;
    double forward, backward; /* s of compute; the last unit's forward is part of its backward */
    double in, out;           /* s of copying its weights in once, its gradients out */
    double flops;             /* of the step, active experts only, without recompute */
} unit_size;

/* One kind of layer. */
typedef struct unit_bench {
    int32_t unit; /* the first of its kind, in the whole model */
    int32_t like; /* units of this kind */
    const tpl *t; /* of the whole model */
    int64_t params;
    double weight_bytes, gradient_bytes; /* that cross the bus */
    unit_size size[BENCH_MAX_SIZES];
    int32_t n_sizes;
} unit_bench;

typedef struct report {
    const char *model_path;
    const session *s;
    const run_manifest *run;
    const model *whole;
    unit_bench *unit;
    int32_t n;
} report;

/* Keys of a run manifest that change how a unit runs. */
static const char *const keys[] = { "device=",
                                    "precision=",
                                    "threads=",
                                    "seed=",
                                    "deterministic=",
                                    "memory.gpu=",
                                    "memory.host=",
                                    "memory.activations=",
                                    "memory.weight_buffers=",
                                    "memory.gradient_dtype=",
                                    "train.micro_batch_size=",
                                    NULL };
/* ---- an optimizer that takes gradients and leaves weights alone ------------------------------ */

static uint32_t no_states(const void *optim, mt_state_spec *ret)
{
    (void)optim;
    (void)ret;
    return 0;
}

static mt_status no_update(const void *optim, const mt_update *u)
{
    (void)optim;
    (void)u;
    return MT_OK;
}

static void no_destroy(void *optim)
{
    (void)optim;
}

static const mt_optim no_optim = { sizeof no_optim, MT_GRAIN_ELEMENT, NULL, no_destroy,
                                   no_states,       no_update,        0,    0 };

/* ---- which units ----------------------------------------------------------------------------- */

static bool is_asked_for(const model *m, int32_t unit, const char *name)
{
    return !name || strcmp(m->units[unit].name, name) == 0 ||
           strcmp(m->units[unit].t->name, name) == 0;
}

static int32_t find_kind(const report *r, const tpl *t)
{
    for (int32_t i = 0; i < r->n; i++)
        if (r->unit[i].t == t)
            return i;
    return -1;
}

/* Lists one unit of every kind that is asked for. The first unit of a model looks up rows and
 * streams next to nothing: it is none of them. */
static mt_status choose_units(report *r, const char *name)
{
    const model *m = r->whole;
    r->unit = calloc((size_t)m->n_tpls, sizeof *r->unit);
    if (!r->unit)
        return status_nomem("the report", (size_t)m->n_tpls * sizeof *r->unit);
    for (int32_t u = 1; u < m->n_units; u++)
        if (find_kind(r, m->units[u].t) < 0 && is_asked_for(m, u, name))
            r->unit[r->n++] = (unit_bench){ .unit = u, .t = m->units[u].t };
    for (int32_t u = 1; u < m->n_units; u++) {
        int32_t kind = find_kind(r, m->units[u].t);
        if (kind >= 0)
            r->unit[kind].like++;
    }
    for (int32_t i = 0; i < r->n; i++)
        for (uint32_t k = 0; k < r->unit[i].t->n_params; k++)
            r->unit[i].params += r->unit[i].t->params[k].elems;
    if (r->n > 0)
        return MT_OK;
    char kinds[512] = "";
    for (int32_t i = 1; i < m->n_tpls; i++)
        text_append(kinds, sizeof kinds, "%s%s", i > 1 ? ", " : "", m->tpls[i]->name);
    return status_set(MT_ERR_NOT_FOUND,
                      "--unit '%s' is neither one of the model's units '%s' to '%s' nor one of "
                      "their kinds: %s",
                      name, m->units[1].name, m->units[m->n_units - 1].name, kinds);
}

/* ---- measuring ------------------------------------------------------------------------------- */

/* Means over everything that was added. */
static double mean(double seconds, int32_t n)
{
    return n > 0 ? seconds / n : 0;
}

static void add_times(engine_unit_times *sum, const engine_unit_times *t)
{
    sum->forward += t->forward;
    sum->backward += t->backward;
    sum->copy_in += t->copy_in;
    sum->copy_out += t->copy_out;
    sum->n_forward += t->n_forward;
    sum->n_backward += t->n_backward;
    sum->n_copy_in += t->n_copy_in;
    sum->n_copy_out += t->n_copy_out;
}

/* One step that sets things up, then those that count. The units between the first and the last
 * are the copies; where there are none, the last one is meant. */
static mt_status run_steps(session *s, const step_batch *batch, int64_t steps, unit_size *size)
{
    int32_t n_units = s->model->n_units;
    int32_t first = n_units > 2 ? 1 : n_units - 1, end = n_units > 2 ? n_units - 1 : n_units;
    engine_unit_times sum = { 0 };
    for (int64_t i = 0; i <= steps; i++) {
        engine_result r;
        const engine_step_params params = { .step = i + 1 };
        mt_status st = engine_step(s->engine, batch, &params, &r);
        if (st != MT_OK)
            return st;
        for (int32_t u = first; i > 0 && u < end; u++) {
            engine_unit_times t;
            engine_time_unit(s->engine, u, &t);
            add_times(&sum, &t);
        }
    }
    size->forward = mean(sum.forward, sum.n_forward);
    size->backward = mean(sum.backward, sum.n_backward);
    size->in = mean(sum.copy_in, sum.n_copy_in);
    size->out = mean(sum.copy_out, sum.n_copy_out);
    return MT_OK;
}

/* The plan and the store must be there. */
static mt_status measure_size(session *s, const run_manifest *run, int64_t steps, unit_size *size)
{
    const session_engine_options how = { 0 };
    step_batch *batch = NULL;
    bool fresh = !s->store;
    mt_status st = bench_make_batch(size->tokens, size->micro_tokens, run->max_seq_len,
                                    s->model->vocab, (uint64_t)run->seed, &batch);
    if (st == MT_OK)
        st = session_start(s, &how);
    if (st == MT_OK && fresh)
        st = store_init_pattern(s->store);
    if (st == MT_OK)
        st = run_steps(s, batch, steps, size);
    session_stop(s);
    bench_free_batch(batch);
    return st;
}

/* Everything about one size; what is refused for lack of memory is not an error. */
static mt_status bench_size(session *s, const run_manifest *run, int64_t steps, unit_bench *b,
                            unit_size *size)
{
    double document = (double)(run->max_seq_len < size->tokens ? run->max_seq_len : size->tokens);
    mt_status st = bench_plan(s, run, size->tokens, &s->plan);
    if (st == MT_OK) {
        int32_t unit = s->model->n_units > 2 ? 1 : s->model->n_units - 1;
        const tpl_plan *t = s->plan->tpl[unit];
        size->policy = s->plan->policy[unit];
        size->micro_tokens = s->plan->request.micro_tokens;
        size->flops = model_tpl_train_flops_per_token(b->t, document) * (double)size->tokens;
        b->weight_bytes = (double)t->weight_bytes;
        b->gradient_bytes =
            (double)t->grad_bytes / 4 * (double)mt_dtype_size(s->plan->request.gradient_dtype);
        st = measure_size(s, run, steps, size);
    }
    plan_destroy(s->plan);
    s->plan = NULL;
    if (st == MT_ERR_NOMEM) {
        snprintf(size->refused, sizeof size->refused, "%s", status_text());
        st = MT_OK;
    }
    return st;
}

/* All sizes of one kind of layer, in a model of its own. */
static mt_status bench_kind(session *s, const run_manifest *run, const bench_request *r,
                            unit_bench *b)
{
    model *whole = s->model;
    char line[160];
    mt_status st = model_create_excerpt(s->arch, s->source.hyper, b->unit, COPIES, &s->model);
    if (st != MT_OK)
        return st;
    for (int32_t i = 0; st == MT_OK && i < r->sizes.n; i++) {
        snprintf(line, sizeof line, "%s: %lld tokens", b->t->name, (long long)r->sizes.tokens[i]);
        log_live(line);
        b->size[i].tokens = r->sizes.tokens[i];
        b->n_sizes = i + 1;
        st = bench_size(s, run, r->steps, b, &b->size[i]);
    }
    log_live(NULL);
    store_destroy(s->store);
    s->store = NULL;
    model_destroy(s->model);
    s->model = whole;
    return st;
}

/* ---- what the figures say -------------------------------------------------------------------- */

/* Tokens a step from which `compute` takes at least `needed` seconds: by the line through the two
 * neighbouring sizes, of which 0 tokens in no time is one. 0: not to be told. */
static double tokens_for(const unit_bench *b, double needed, size_t compute)
{
    double x0 = 0, y0 = 0, slope = 0;
    for (int32_t i = 0; i < b->n_sizes; i++) {
        const unit_size *s = &b->size[i];
        double x = (double)s->tokens, y = *(const double *)((const char *)s + compute);
        if (s->refused[0] || x <= x0 || y <= y0)
            continue;
        slope = (y - y0) / (x - x0);
        if (y >= needed)
            return x0 + fmax(needed - y0, 0) / slope;
        x0 = x;
        y0 = y;
    }
    return slope > 0 ? x0 + (needed - y0) / slope : 0;
}

/* Tokens a step from which a pass computes longer than its weights take to arrive, and backward
 * also longer than its gradients take to leave. */
static double hidden_from(const unit_bench *b)
{
    double in = 0, out = 0;
    for (int32_t i = 0; i < b->n_sizes; i++) {
        in = fmax(in, b->size[i].in);
        out = fmax(out, b->size[i].out);
    }
    double forward = tokens_for(b, in, offsetof(unit_size, forward));
    return fmax(forward, tokens_for(b, fmax(in, out), offsetof(unit_size, backward)));
}

static double seconds_at_gemm_rate(const report *r, const unit_size *s)
{
    return s->flops / r->s->profile.gemm_flops;
}

static double flops_per_second(const unit_size *s)
{
    return s->flops / (s->forward + s->backward);
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print_head(const report *r)
{
    printf("model      %s, %s parameters in %d units\n", r->model_path,
           human_grouped(r->whole->total_params).s, r->whole->n_units);
    printf("device     %s (%s), %s\n", r->s->info.name, r->s->info.details,
           mt_dtype_name(r->s->compute));
    printf("data       documents of %lld random tokens; one group, gradients leave as %s\n",
           (long long)r->run->max_seq_len,
           r->run->gradient_dtype == RUN_GRADIENT_BF16 ? "bf16" : "fp32");
    fflush(stdout);
}

static void print_size(const report *r, const unit_size *s)
{
    if (s->refused[0]) {
        printf("  %10s  refused: %s\n", human_grouped(s->tokens).s, s->refused);
        return;
    }
    printf("  %10s %8s %10.3f %10.3f %10.3f %10.3f %11.3f %12.*f %8.0f%%\n",
           human_grouped(s->tokens).s, tpl_policy_name(s->policy), s->forward * 1e3,
           s->backward * 1e3, s->in * 1e3, s->out * 1e3, seconds_at_gemm_rate(r, s) * 1e3,
           plan_rate_decimals(flops_per_second(s) * 1e-12), flops_per_second(s) * 1e-12,
           100 * flops_per_second(s) / r->s->profile.gemm_flops);
}

static void print_unit(const report *r, const unit_bench *b)
{
    double hidden = hidden_from(b);
    printf("\n%s: %d like %s, %s parameters, %.3f GFLOP a token forward\n", b->t->name, b->like,
           r->whole->units[b->unit].name, human_grouped(b->params).s,
           (b->t->gemm_flops_per_token + b->t->scan_flops_per_token) * 1e-9);
    printf("  %10s %8s %10s %10s %10s %10s %11s %12s %9s\n", "tokens", "keeps", "forward",
           "backward", "in", "out", "all at GEMM", "TFLOP/s", "of GEMM");
    for (int32_t i = 0; i < b->n_sizes; i++)
        print_size(r, &b->size[i]);
    if (hidden > 0)
        printf(
            "  streaming (%s of weights in, %s of gradients out) is hidden from %s tokens a step\n",
            human_bytes((int64_t)b->weight_bytes).s, human_bytes((int64_t)b->gradient_bytes).s,
            human_grouped((int64_t)ceil(hidden)).s);
    fflush(stdout);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_size(const report *r, const unit_size *s)
{
    if (s->refused[0])
        return json_pack("{s:I, s:s}", "tokens", (json_int_t)s->tokens, "refused", s->refused);
    return json_pack("{s:I, s:I, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "tokens",
                     (json_int_t)s->tokens, "micro_tokens", (json_int_t)s->micro_tokens,
                     "activations", tpl_policy_name(s->policy), "forward_seconds", s->forward,
                     "backward_seconds", s->backward, "copy_in_seconds", s->in, "copy_out_seconds",
                     s->out, "active_flops", s->flops, "active_flops_per_second",
                     flops_per_second(s), "seconds_at_gemm_rate", seconds_at_gemm_rate(r, s));
}

static json_t *json_unit(const report *r, const unit_bench *b)
{
    json_t *sizes = json_array();
    for (int32_t i = 0; i < b->n_sizes; i++)
        json_array_append_new(sizes, json_size(r, &b->size[i]));
    return json_pack("{s:s, s:s, s:i, s:I, s:f, s:f, s:f, s:f, s:o}", "kind", b->t->name, "unit",
                     r->whole->units[b->unit].name, "units", (int)b->like, "parameters",
                     (json_int_t)b->params, "gemm_flops_per_token", b->t->gemm_flops_per_token,
                     "weight_bytes", b->weight_bytes, "gradient_bytes", b->gradient_bytes,
                     "hidden_from_tokens", hidden_from(b), "sizes", sizes);
}

static mt_status write_json(const report *r, const char *path)
{
    const plan_profile *top = &r->s->profile;
    json_t *units = json_array();
    for (int32_t i = 0; i < r->n; i++)
        json_array_append_new(units, json_unit(r, &r->unit[i]));
    json_t *ceilings =
        json_pack("{s:I, s:f, s:f, s:f}", "measured_at", (json_int_t)r->s->measured_at,
                  "gemm_flops_per_second", top->gemm_flops, "copy_in_bytes_per_second",
                  top->copy_in, "copy_out_bytes_per_second", top->copy_out);
    json_t *root =
        json_pack("{s:s, s:i, s:s, s:I, s:s, s:s, s:s, s:I, s:o, s:o}", "format",
                  "megatrain-bench-unit", "version", 1, "model", r->model_path, "parameters",
                  (json_int_t)r->whole->total_params, "device", r->s->info.name, "device_details",
                  r->s->info.details, "precision", mt_dtype_name(r->s->compute), "document",
                  (json_int_t)r->run->max_seq_len, "ceilings", ceilings, "units", units);
    mt_status st = root ? MT_OK : status_nomem("JSON", 0);
    if (st == MT_OK && json_dump_file(root, path, JSON_INDENT(2)) != 0)
        st = status_set(MT_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    json_decref(root);
    return st;
}

/* ---- the command ----------------------------------------------------------------------------- */

static mt_status bench(session *s, const run_manifest *run, const bench_request *q,
                       const char *unit, report *r)
{
    int32_t measured = 0;
    *r = (report){ r->model_path, s, run, s->model, NULL, 0 };
    s->optim = &no_optim;
    mt_status st = choose_units(r, unit);
    if (st != MT_OK)
        return st;
    print_head(r);
    for (int32_t i = 0; st == MT_OK && i < r->n; i++) {
        unit_bench *b = &r->unit[i];
        st = bench_kind(s, run, q, b);
        if (st == MT_OK && i == 0)
            printf("ceilings   by %s: GEMM %.1f TFLOP/s, copies %.1f GB/s in, %.1f out\n",
                   session_profile_name(s).s, s->profile.gemm_flops * 1e-12,
                   s->profile.copy_in * 1e-9, s->profile.copy_out * 1e-9);
        if (st == MT_OK)
            print_unit(r, b);
        for (int32_t k = 0; k < b->n_sizes; k++)
            measured += !b->size[k].refused[0];
    }
    if (st == MT_OK && measured == 0)
        st = status_set(MT_ERR_NOMEM, "no size fits; the reasons are above");
    return st;
}

static int run_bench_unit(const cli_command *self, int argc, char **argv)
{
    const char *unit = NULL; /* name of a unit or of its template; NULL: one of each kind */
    bench_request q = BENCH_DEFAULTS;
    const cli_option options[] = { { "unit", CLI_TEXT, &unit, "NAME",
                                     "a unit or a kind of unit (one of each kind)" },
                                   BENCH_OPTIONS(&q),
                                   { 0 } };
    int words = 0, rc = bench_parse(self, options, argc, argv, keys, &q, &words);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    run_manifest *run = NULL;
    report r = { .model_path = argv[0] };
    mt_status st = cli_find_plugins(&q.dirs);
    if (st == MT_OK)
        st = bench_read_words(argv, words, q.document, "train.max_grad_norm=0", &run);
    if (st == MT_OK)
        st = bench_open(&s, q.document, run);
    if (st == MT_OK && q.json)
        st = files_check_output(q.json, REPORT_MARK, false);
    if (st == MT_OK) {
        run->groups = 1;
        run->segment_bytes = 0; /* times are those of a unit's one copy each way */
        st = bench(&s, run, &q, unit, &r);
    }
    if (st == MT_OK && q.json)
        st = write_json(&r, q.json);
    rc = cli_exit(st);
    free(r.unit);
    session_close(&s);
    run_destroy(run);
    registry_finish();
    return rc;
}

const cli_command cli_bench_unit = {
    .name = "bench unit",
    .words = "MODEL [key=value ...] [options]",
    .brief = "measure one layer of each kind, with its streaming",
    .help =
        "Takes one unit of every kind that MODEL (a model manifest or folder) has, such as dense\n"
        "and mixture-of-experts layers and the head, and runs it by itself with random weights:\n"
        "the times of its forward and backward, of bringing its weights in and its gradients out,\n"
        "FLOP a second of what each token really uses, and the tokens a step from which the\n"
        "streaming is hidden. Beside that, how long the same FLOPs would take at the rate of the\n"
        "device's best dense GEMM. Nothing of the rest of the model is in memory but the\n"
        "embedding and the head. Times are in milliseconds; 8k is 8192 tokens, 131k is 131072.\n\n"
        "The keys are those of a run manifest that change how a unit runs: device, precision,\n"
        "threads, seed, deterministic, train.micro_batch_size (documents of a micro-batch),\n"
        "memory.gpu, memory.host, memory.activations, memory.weight_buffers and\n"
        "memory.gradient_dtype.",
    .example = "example: the layers of Mixtral 8x7B\n"
               "  megatrain bench unit arch/mistral/models/mixtral-8x7b.yaml --tokens 8k,32k",
    .run = run_bench_unit,
};
