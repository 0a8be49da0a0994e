/* SPDX-License-Identifier: Apache-2.0
 *
 * A layer of experts as a whole: a batch that needs few of them, slices that cost nothing, and what
 * is refused.
 */
#include "core/base/status.h"
#include "core/template/template.h"
#include "tests/check.h"
#include "zoo.h"

#include <math.h>
#include <stdlib.h>

static const mt_backend *backend;
static void *device;

enum { T = 9 };

static void *memory(int64_t bytes)
{
    void *p = calloc(1, (size_t)(bytes > 0 ? bytes : 1));
    if (!p)
        abort();
    return p;
}

static void fill(float *x, int64_t n, uint32_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (1 << 23) - 1.0f;
    }
}

/* Is every gradient of expert e of parameter `name` zero (0), are all of them finite and some not
 * zero (1), or neither (-1)? */
static int state_of(const tpl_plan *p, const float *grads, const char *name, int64_t experts,
                    int64_t e)
{
    for (uint32_t i = 0; i < p->t->n_params; i++) {
        if (strcmp(p->t->params[i].info.name, name) != 0)
            continue;
        int64_t n = p->t->params[i].elems / experts;
        const float *g = grads + p->slot_offset[i] + e * n;
        bool any = false, finite = true;
        for (int64_t k = 0; k < n; k++) {
            any |= g[k] != 0.0f;
            finite &= isfinite(g[k]) != 0;
        }
        return !finite ? -1 : any;
    }
    return -1;
}

/* All tokens go to experts 2 and 5 of 8; gradients start as NaN, as recycled memory may. */
static void two_of_eight(void)
{
    static const zoo_moe m = { 8, .corrected = true, .biased = true, .shared = true,
                               .router = { 2, MT_ROUTER_SIGMOID, 1, .scale = 2.5 } };
    static const char *const stacked[] = { "gate_up", "down", "gate_up_bias", "down_bias" };
    static const int32_t doc_starts[] = { 0, T }, zero[T] = { 0 };
    const zoo_entry *z = zoo_find("experts, sigmoid");
    tpl *t = NULL;
    tpl_plan *p = NULL;
    tpl_bounds bounds = { T, 1, 1, MT_F32, 0, 0 };
    CHECK(tpl_create("experts", z->build, NULL, &m, &t) == MT_OK, "%s", status_text());
    CHECK(t && tpl_plan_create(t, TPL_SELECT, &bounds, backend, device, &p) == MT_OK, "%s",
          status_text());
    if (!p)
        return;
    float *weights = memory(p->weight_bytes), *grads = memory(p->grad_bytes);
    int64_t work = p->work_bytes[0] > p->work_bytes[1] ? p->work_bytes[0] : p->work_bytes[1];
    tpl_binding bind = { .weights = weights,
                         .grads = grads,
                         .in = { memory(p->in_bytes[0]) },
                         .out = { memory(p->out_bytes[0]) },
                         .d_out = { memory(p->out_bytes[0]) },
                         .saved = memory(p->saved_bytes) };
    void *queue = NULL, *scratch = NULL;
    CHECK(backend->device_alloc(device, work, &scratch) == MT_OK &&
              backend->queue_create(device, "test", &queue) == MT_OK,
          "no device");
    bind.work = scratch;
    void *own = p->d_in_place[0] < 0 ? memory(p->in_bytes[0]) : NULL;
    bind.d_in[0] = own ? own : bind.d_out[0];
    fill(weights, p->device_elems, 1);
    fill(bind.in[0], (int64_t)T * ZOO_HIDDEN, 2);
    for (uint32_t i = 0; i < t->n_params; i++)
        if (strcmp(t->params[i].info.name, "correction") == 0)
            weights[p->slot_offset[i] + 2] = weights[p->slot_offset[i] + 5] = 9.0f;
    mt_batch batch = { .tokens = T,
                       .documents = 1,
                       .max_document = T,
                       .positions = zero,
                       .doc_starts = doc_starts,
                       .host_doc_starts = doc_starts };
    for (int pass = 0; pass < 2; pass++) {
        bind.accumulate = pass == 1;
        if (!bind.accumulate)
            for (int64_t i = 0; i < p->grad_bytes / 4; i++)
                grads[i] = NAN;
        fill(bind.d_out[0], (int64_t)T * ZOO_HIDDEN, 3);
        tpl_forward(p, queue, &bind, &batch, MT_PASS_TRAIN);
        tpl_backward(p, queue, &bind, &batch);
        backend->queue_sync(device, queue);
        CHECK(backend->error(device) == MT_OK, "%s", status_text());
        for (int n = 0; n < 4; n++)
            for (int64_t e = 0; e < 8; e++) {
                int state = state_of(p, grads, stacked[n], 8, e);
                CHECK(state == (e == 2 || e == 5), "pass %d: gradient of %s, expert %d: %s", pass,
                      stacked[n], (int)e, state < 0 ? "not finite" : (state ? "not zero" : "zero"));
            }
        for (int64_t e = 0; e < 8; e++)
            CHECK(state_of(p, grads, "router", 8, e) == (e == 2 || e == 5), "router, expert %d",
                  (int)e);
    }
    backend->queue_destroy(device, queue);
    backend->device_free(device, scratch, work);
    free(own);
    free(bind.in[0]);
    free(bind.out[0]);
    free(bind.d_out[0]);
    free(bind.saved);
    free(weights);
    free(grads);
    tpl_plan_destroy(p);
    tpl_destroy(t);
}

/* glu of two halves, given as slices that cover their value, or as slices that do not. */
static mt_status halves(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    int64_t unused = *(const int64_t *)arg;
    mt_val x = mt_linear(b, mt_input(b, 0, ZOO_HIDDEN),
                         mt_matrix(b, "w", 64 + unused, ZOO_HIDDEN, 0.1), MT_NONE);
    mt_val y = mt_glu(b, mt_slice(b, x, 1, 0, 32), mt_slice(b, x, 1, 32, 32),
                      &(mt_act_attr){ .kind = MT_ACT_SILU });
    mt_output(b, 0, mt_linear(b, y, mt_matrix(b, "v", 3, 32, 0.1), MT_NONE));
    return MT_OK;
}

/* Slices that cover their value are saved with it; others are copies. */
static void slices_cost_nothing(void)
{
    for (int64_t unused = 0; unused < 2; unused++) {
        tpl *t = NULL;
        tpl_plan *p = NULL;
        tpl_bounds bounds = { 64, 1, 1, MT_F32, 0, 0 };
        CHECK(tpl_create("halves", halves, NULL, &unused, &t) == MT_OK &&
                  tpl_plan_create(t, TPL_KEEP, &bounds, backend, device, &p) == MT_OK,
              "%s", status_text());
        int64_t expected = (64 + 32) * 64 * 4; /* both halves, and their product */
        CHECK(p && p->saved_bytes == expected, "%d unused: %lld bytes saved, expected %lld",
              (int)unused, p ? (long long)p->saved_bytes : 0, (long long)expected);
        /* d_y, d_x; a copy needs d of both slices beside d_x */
        int64_t views = (32 + 64) * 64 * 4, copies = (32 + 32 + 65) * 64 * 4;
        CHECK(p && (unused ? p->work_bytes[1] >= copies : p->work_bytes[1] == views),
              "%d unused: %lld bytes of work", (int)unused, p ? (long long)p->work_bytes[1] : 0);
        tpl_plan_destroy(p);
        tpl_destroy(t);
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

typedef struct bad {
    const char *says;
    int64_t experts, rows;
    int trainable, output;
    mt_router_attr a;
} bad;

static mt_status build_bad(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    const bad *k = arg;
    mt_val x = mt_input(b, 0, ZOO_HIDDEN), bias = MT_NONE;
    if (k->trainable)
        bias = mt_vector(b, "bias", k->experts, MT_INIT_ZEROS);
    mt_val logits = mt_linear(b, x, mt_matrix(b, "r", k->experts, ZOO_HIDDEN, 0.1), MT_NONE);
    mt_routing r = mt_router(b, logits, bias, &k->a);
    mt_val d = mt_dispatch(b, x, &r);
    mt_val y = mt_grouped_linear(b, d, mt_matrix(b, "w", k->rows, ZOO_HIDDEN, 0.1), MT_NONE, &r);
    mt_output(b, 0, k->output == 1 ? y : k->output == 2 ? r.weights : mt_combine(b, y, &r));
    return MT_OK;
}

static void refusals(void)
{
    static const bad kind[] = {
        { "top_k must be 1 to 4", 4, 8, .a = { .top_k = 5, .scale = 1 } },
        { "top_k must be 1 to 4", 4, 8, .a = { .top_k = 0, .scale = 1 } },
        { "scale must be above 0", 4, 8, .a = { .top_k = 2 } },
        { "scoring 7", 4, 8, .a = { 2, 7, .scale = 1 } },
        { "divide into 3 groups", 4, 8, .a = { 2, .groups = 3, .top_groups = 1, .scale = 1 } },
        { "cannot give 2", 4, 8, .a = { 2, .groups = 4, .top_groups = 1, .scale = 1 } },
        { "no two best", 4, 8, .a = { 1, 0, 0, 4, 2, MT_GROUP_TOP2_SUM, 1 } },
        { "4 experts * out", 4, 9, .a = { .top_k = 2, .scale = 1 } },
        { "declare it frozen", 4, 8, .trainable = 1, .a = { .top_k = 2, .scale = 1 } },
        { "one row a token", 4, 8, .output = 1, .a = { .top_k = 2, .scale = 1 } },
        { "compute dtype", 4, 8, .output = 2, .a = { .top_k = 2, .scale = 1 } },
    };
    for (size_t i = 0; i < sizeof kind / sizeof *kind; i++) {
        tpl *t = NULL;
        mt_status st = tpl_create("bad", build_bad, NULL, &kind[i], &t);
        CHECK(st == MT_ERR_INVALID && strstr(status_text(), kind[i].says), "%s: %s", kind[i].says,
              st == MT_OK ? "accepted" : status_text());
        tpl_destroy(t);
    }
}

/* Operands that do not fit what the attribute says of them. */
static mt_status build_concat(mt_builder *b, const void *arch, const void *arg)
{
    (void)arch;
    int kind = *(const int *)arg;
    mt_val x = mt_input(b, 0, 6), in[3] = { x, kind == 1 ? MT_NONE : x, x };
    mt_concat_attr a = { .heads = 2, .cols = { 3, kind == 1 ? 0 : 3, kind == 2 ? 6 : 3 } };
    mt_output(b, 0, mt_concat(b, in, kind == 3 ? 2 : 3, &a));
    return MT_OK;
}

static void concat_refusals(void)
{
    static const char *const says[] = { NULL, "operand 1 is missing", "6 columns, expected 12",
                                        "operand 2 must be" };
    for (int kind = 0; kind < 4; kind++) {
        tpl *t = NULL;
        mt_status st = tpl_create("concat", build_concat, NULL, &kind, &t);
        CHECK(says[kind] ? st == MT_ERR_INVALID && strstr(status_text(), says[kind]) : st == MT_OK,
              "case %d: %s", kind, st == MT_OK ? "accepted" : status_text());
        tpl_destroy(t);
    }
}

int main(void)
{
    backend = zoo_backend(&device);
    RUN(two_of_eight);
    RUN(slices_cost_nothing);
    RUN(refusals);
    RUN(concat_refusals);
    backend->close(device);
    return check_done();
}
