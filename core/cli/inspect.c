/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain inspect: what a model consists of, exactly, without loading a weight.
 */
#include "../../plugins/host/registry.h"
#include "../base/status.h"
#include "../template/unit_runs.h"
#include "../train/human.h"
#include "../train/run_folder.h"
#include "../train/session.h"
#include "../train/weights.h"
#include "cli.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

/* The tensors of a weights folder, and how they fit the model. */
typedef struct weights_facts {
    int64_t tensors, files, elems, bytes;
    int64_t missing, unknown; /* parameters without a tensor, tensors without a parameter */
    bool dtype[MT_DTYPE_COUNT];
    int32_t first_missing; /* index of a parameter; with missing > 0 */
} weights_facts;

static int64_t unit_params(const model *m, int32_t unit)
{
    int64_t n = 0;
    for (int32_t i = 0; i < m->n_params; i++)
        if (m->params[i].unit == unit)
            n += m->params[i].elems;
    return n;
}

static const char *flag_names(uint32_t flags, bool gathered, char ret[64])
{
    snprintf(ret, 64, "%s%s%s%s", flags & MT_PARAM_ALIAS ? " alias" : "",
             flags & MT_PARAM_FROZEN ? " frozen" : "", flags & MT_PARAM_NO_DECAY ? " no-decay" : "",
             gathered ? " gathered" : "");
    return ret;
}

/* The shape in truth: [experts, out, in] where matrices are stacked. Returns the dimensions. */
static int32_t true_shape(const mt_param_info *p, int64_t ret[3])
{
    int32_t n = 0;
    if (p->stack)
        ret[n++] = p->stack;
    if (!tpl_is_vector(p))
        ret[n++] = p->rows / tpl_matrices(p);
    ret[n++] = p->cols;
    return n;
}

static const char *shape_text(const mt_param_info *p, char ret[WEIGHTS_SHAPE])
{
    int64_t dim[3];
    int32_t n = true_shape(p, dim);
    return weights_shape(ret, n, dim);
}

/* ---- weights --------------------------------------------------------------------------------- */

static mt_status count_tensor(const weights_match *w, const mt_weights *format, const void *reader,
                              int64_t index, weights_facts *f)
{
    mt_tensor_info info;
    mt_status st = format->info(reader, index, &info);
    if (st != MT_OK)
        return st;
    int64_t elems = 1;
    for (int32_t d = 0; d < info.ndim; d++)
        elems *= info.dim[d];
    f->tensors++;
    f->elems += elems;
    f->bytes += info.bytes;
    if (info.dtype >= 0)
        f->dtype[info.dtype] = true;
    if (w->tensor[index] >= 0)
        return weights_check_tensor(w, format, reader, index);
    f->unknown += !weights_ignored(w->map->m, info.name);
    return MT_OK;
}

static mt_status read_weights(const model *m, const char *path, weights_facts *ret)
{
    const mt_weights *format = NULL;
    void *reader = NULL;
    weights_match *w = NULL;
    weights_facts f = { 0 };
    mt_status st = session_format(&format);
    if (st == MT_OK)
        st = format->open(path, &reader);
    if (st != MT_OK)
        return st;
    st = weights_match_create(m, format, reader, &w);
    const char *last = "";
    for (int64_t i = 0; st == MT_OK && i < w->count; i++) {
        const char *file = format->file(reader, i);
        f.files += strcmp(file, last) != 0;
        last = file;
        st = count_tensor(w, format, reader, i, &f);
    }
    if (st == MT_OK) {
        f.missing = w->missing;
        f.first_missing = w->first_missing;
        *ret = f;
    }
    weights_match_destroy(w);
    format->close(reader);
    return st;
}

static void print_weights(const char *path, const weights_facts *f)
{
    printf("\nweights   %s\n          %s tensors in %lld file%s, %s elements, %s bytes (%s):", path,
           human_grouped(f->tensors).s, (long long)f->files, f->files == 1 ? "" : "s",
           human_grouped(f->elems).s, human_grouped(f->bytes).s, human_bytes(f->bytes).s);
    for (int t = 0; t < MT_DTYPE_COUNT; t++)
        if (f->dtype[t])
            printf(" %s", mt_dtype_name(t));
    printf(
        "\n          every shape fits; %lld parameters have no tensor, %lld tensors no parameter\n",
        (long long)f->missing, (long long)f->unknown);
}

/* ---- as text --------------------------------------------------------------------------------- */

static bool alike(const void *arg, int32_t a, int32_t b)
{
    const model *m = arg;
    return m->units[a].tpl_index == m->units[b].tpl_index && unit_params(m, a) == unit_params(m, b);
}

static mt_status print_units(const model *m)
{
    unit_run *runs = calloc((size_t)m->n_units + 1, sizeof *runs);
    if (!runs)
        return status_nomem("a table of units", (size_t)m->n_units * sizeof *runs);
    int32_t n = unit_runs(m->n_units, alike, m, runs);
    printf("\n%-28s %-16s %18s\n", "units, in order", "template", "parameters each");
    for (const unit_run *r = runs; r < runs + n; r++) {
        const model_unit *first = &m->units[r->first];
        bool one = r->first == r->last;
        char name[64];
        snprintf(name, sizeof name, "%s%s%s", first->name, one ? "" : " .. ",
                 one ? "" : m->units[r->last].name);
        printf("%-28s %-16s %18s\n", name, first->t->name,
               human_grouped(unit_params(m, r->first)).s);
        if (r->times > 1)
            printf(".. %-25s these %d lines %d times\n", m->units[r->until].name, r->lines,
                   r->times);
    }
    free(runs);
    return MT_OK;
}

static void print_template(const tpl *t)
{
    char shape[WEIGHTS_SHAPE], flags[64];
    printf("\ntemplate %s: %s forward GEMM FLOPs a token\n", t->name,
           human_count(t->gemm_flops_per_token).s);
    for (uint32_t i = 0; i < t->n_params; i++) {
        const tpl_param *p = &t->params[i];
        printf("  %-40s %-18s %15s %s\n", p->info.name, shape_text(&p->info, shape),
               human_grouped(p->elems).s, flag_names(p->info.flags, p->gathered, flags));
    }
}

static void print_bytes(const char *what, double per_param, int64_t params)
{
    int64_t bytes = (int64_t)(per_param * (double)params);
    printf("  %-44s %20s  (%s)\n", what, human_grouped(bytes).s, human_bytes(bytes).s);
}

static mt_status print_model(const session *s, const char *path)
{
    const model *m = s->model;
    printf("model     %s\ntype      %s\nunits     %d of %d templates\nvocab     %lld\n", path,
           s->source.model_type, m->n_units, m->n_tpls, (long long)m->vocab);
    if (m->max_positions > 0)
        printf("positions %lld\n", (long long)m->max_positions);
    mt_status st = print_units(m);
    for (int32_t i = 0; i < m->n_tpls; i++)
        print_template(m->tpls[i]);
    printf("\ntotal     %s parameters in %s tensors\n", human_grouped(m->total_params).s,
           human_grouped(m->n_params).s);
    print_bytes("bytes of weights, bf16 (streamed)", 2, m->total_params);
    print_bytes("bytes of weights, fp32 (masters, checkpoint)", 4, m->total_params);
    print_bytes("bytes of masters and AdamW's states", 12, m->total_params);
    double context = m->max_positions > 0 ? (double)m->max_positions : 4096;
    printf("  %-44s %20s\n", "training FLOPs a token, without recompute",
           human_count(model_train_flops_per_token(m, context)).s);
    printf("    (documents of %.0f tokens)\n", context);
    return st;
}

/* ---- as JSON --------------------------------------------------------------------------------- */

static json_t *json_param(const model_param *p, const model *m)
{
    int64_t dim[3];
    int32_t n = true_shape(p->info, dim);
    json_t *shape = json_array();
    for (int32_t i = 0; i < n; i++)
        json_array_append_new(shape, json_integer(dim[i]));
    return json_pack("{s:s, s:s, s:o, s:I, s:b, s:b}", "name", p->name, "unit",
                     m->units[p->unit].name, "shape", shape, "elements", (json_int_t)p->elems,
                     "decay", !(p->flags & MT_PARAM_NO_DECAY), "frozen",
                     (p->flags & MT_PARAM_FROZEN) != 0);
}

static mt_status print_json(const session *s, const char *path, const weights_facts *f)
{
    const model *m = s->model;
    json_t *units = json_array(), *params = json_array();
    for (int32_t u = 0; u < m->n_units; u++)
        json_array_append_new(units, json_pack("{s:s, s:s, s:I}", "name", m->units[u].name,
                                               "template", m->units[u].t->name, "parameters",
                                               (json_int_t)unit_params(m, u)));
    for (int32_t i = 0; i < m->n_params; i++)
        json_array_append_new(params, json_param(&m->params[i], m));
    json_t *root = json_pack("{s:s, s:s, s:I, s:I, s:I, s:o, s:o}", "path", path, "model_type",
                             s->source.model_type, "total_parameters", (json_int_t)m->total_params,
                             "vocab_size", (json_int_t)m->vocab, "max_positions",
                             (json_int_t)m->max_positions, "units", units, "parameters", params);
    if (f && root)
        json_object_set_new(root, "weights",
                            json_pack("{s:I, s:I, s:I, s:I, s:I}", "tensors",
                                      (json_int_t)f->tensors, "elements", (json_int_t)f->elems,
                                      "bytes", (json_int_t)f->bytes, "missing",
                                      (json_int_t)f->missing, "unknown", (json_int_t)f->unknown));
    char *text = json_dumps(root, JSON_INDENT(2));
    if (text)
        puts(text);
    mt_status st = text ? MT_OK : status_nomem("JSON", 0);
    free(text);
    json_decref(root);
    return st;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* What is incomplete is shown, and is a failure all the same: it cannot be loaded. */
static mt_status check_complete(const session *s, const weights_facts *f)
{
    if (f->missing == 0)
        return MT_OK;
    fflush(stdout);
    return status_set(
        MT_ERR_FORMAT,
        "%s: incomplete: %lld of the model's parameters have no tensor, '%s' the first "
        "of them; get the missing files",
        s->source.weights, (long long)f->missing, s->model->params[f->first_missing].name);
}

static mt_status inspect(const char *path, bool json, session *s)
{
    char found[RUN_FOLDER_PATH];
    weights_facts facts = { 0 };
    mt_status st = run_folder_find_model(path, found);
    if (st == MT_OK)
        st = session_open_model(s, found);
    if (st == MT_OK && s->source.weights)
        st = read_weights(s->model, s->source.weights, &facts);
    if (st != MT_OK)
        return st;
    if (json && (st = print_json(s, found, s->source.weights ? &facts : NULL)) != MT_OK)
        return st;
    if (!json && (st = print_model(s, found)) != MT_OK)
        return st;
    if (!json && s->source.weights)
        print_weights(s->source.weights, &facts);
    return check_complete(s, &facts);
}

static int run_inspect(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    bool json = false;
    const cli_option options[] = { { "json", CLI_FLAG, &json, NULL, "print one JSON object" },
                                   CLI_PLUGIN_DIR(&dirs),
                                   { 0 } };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON && words != 1)
        rc = cli_usage(self, words ? "one path at a time" : "what? name a path");
    if (rc != CLI_GO_ON)
        return rc;

    session s = { 0 };
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = inspect(argv[0], json, &s);
    rc = cli_exit(st);
    session_close(&s);
    registry_finish();
    return rc;
}

const cli_command cli_inspect = {
    .name = "inspect",
    .words = "PATH [options]",
    .brief = "show a model's units, parameters and exact sizes",
    .help =
        "Shows what a model consists of: its units, their templates, every parameter with its\n"
        "shape, exact totals, and bytes. PATH is a model manifest, a Hugging Face model folder,\n"
        "a checkpoint, or a run folder (its newest checkpoint). Where there are weights, their\n"
        "names and shapes are checked against the model.",
    .example = "example: count the parameters of a model before downloading it\n"
               "  megatrain inspect arch/llama/models/llama-3.1-8b.yaml",
    .run = run_inspect,
};
