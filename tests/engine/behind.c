/* SPDX-License-Identifier: Apache-2.0
 *
 * Updates that are behind: worlds in which much of a step is still to be updated when it returns,
 * against serial runs, bit for bit.
 */
#include "world.h"

#include "../check.h"
#include "core/base/status.h"
#include "core/engine/internal.h"

#include <math.h>

static const struct {
    const char *name;
    world_options o;
} worlds[] = {
    { "two tables, one of several slices and slabs", { .wide = 20000 } },
    { "a table in every block", { .tables = true } },
    { "the same and tied", { .tables = true, .tied = true, .wide = 96 } },
    { "one table that is trained", { .only = "embed.weight" } },
    { "a matrix of every block", { .only = "up.weight" } },
    { "a bias of every block", { .only = "v.bias", .tied = true } },
    { "the head", { .only = "head.weight" } },
    { "a table of which one is trained", { .only = "wide.weight", .wide = 40, .tables = true } },
    { "tables of every block", { .only = "table.weight", .tables = true } },
    { "row by row", { .grain = MT_GRAIN_ROW, .wide = 40 } },
    { "row by row, tied", { .grain = MT_GRAIN_ROW, .tied = true, .tables = true } },
    { "whole tensors", { .grain = MT_GRAIN_TENSOR, .tables = true } },
    { "whole tensors, tied", { .grain = MT_GRAIN_TENSOR, .tied = true, .wide = 40 } },
    { "few words", { .vocab = 2, .tables = true } },
    { "many words", { .vocab = 20000 } },
    { "experts", { .plugin = "mistral", .manifest = "mixtral" } },
    { "experts row by row",
      { .plugin = "deepseek", .manifest = "deepseek_v3", .grain = MT_GRAIN_ROW } },
    { "experts and whole tensors",
      { .plugin = "qwen", .manifest = "qwen2_moe", .grain = MT_GRAIN_TENSOR } },
};
enum { WORLDS = sizeof worlds / sizeof *worlds, STEPS = 3 };

/* Full and partial steps, one of a single word, with an evaluation between two of them and a look
 * at the store between others; what is behind at the end is left to engine_destroy. */
static world_outcome train(const world_options *o, bool *ret_parked)
{
    int32_t vocab = o->manifest || !o->vocab ? WORLD_VOCAB : o->vocab;
    world_outcome sum = { 0 };
    world w;
    world_open(o, &w);
    *ret_parked = w.e->l.parked;
    for (int i = 1; i <= STEPS; i++) {
        step_batch *b = world_batch((uint64_t)i, 4 - i % 2, 24 - i % 2 * 5, 3, i == 2 ? 1 : vocab);
        engine_result r = world_step(&w, b, i, 1e-3);
        CHECK(r.updated && isfinite(r.loss_sum), "step %d", i);
        world_add(&sum, &r);
        if (i == 1)
            sum.loss += world_loss(&w, b);
        if (i == 2) {
            world_hash(&w, &sum);
            sum.norm += (double)(sum.hash % 1000003);
        }
        world_batch_free(b);
    }
    engine_destroy(w.e);
    w.e = NULL;
    sum.hash = store_hash(w.s);
    world_close(&w);
    return sum;
}

enum { PARKED, PARKED_SUMS, PARKED_NARROW, GROUPS, CLIPPED, MODES };

static world_options in_mode(int k, int mode)
{
    static const plan_gradients place[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_DEVICE,
                                            PLAN_GRADIENTS_HELD };
    world_options o = worlds[k].o;
    bool parked = mode == PARKED || mode == PARKED_NARROW, sums = mode == PARKED_SUMS;
    o.apart = o.request.training = true;
    o.request.compute = (mode + k) & 1 ? MT_BF16 : MT_F32;
    o.request.gradient_dtype = mode == PARKED_NARROW || (k % 4 == 3 && !sums) ? MT_BF16 : MT_F32;
    o.request.max_grad_norm = mode == CLIPPED ? 0.5 : -1;
    o.request.groups = mode == GROUPS || sums ? 2 : 1;
    o.request.gradients = parked ? PLAN_GRADIENTS_HOST
                          : sums ? PLAN_GRADIENTS_DEVICE
                                 : place[k % 3];
    if (mode == GROUPS && o.request.gradients != PLAN_GRADIENTS_HOST)
        o.request.gradient_dtype = MT_BF16; /* rounded, they leave their sums at once */
    o.request.policy = parked ? TPL_KEEP : (mode + k) % TPL_POLICIES;
    o.request.weight_buffers = 2 + k % 2;
    o.trace = k % 3 == 1 ? "/dev/null" : NULL;
    /* Forward then saves enough for the gradients of all segments but those of the head. */
    o.request.micro_tokens = o.manifest && parked ? 2048 : 0;
    if (o.manifest && mode != PARKED && o.grain != MT_GRAIN_TENSOR)
        o.request.segment_bytes = 1;
    return o;
}

static void behind_equals_serial(void)
{
    for (int k = 0; k < WORLDS; k++)
        for (int mode = 0; mode < MODES; mode++) {
            world_options o = in_mode(k, mode);
            bool parked;
            o.serial = true;
            world_outcome want = train(&o, &parked);
            CHECK(parked == (mode <= PARKED_NARROW), "%s, mode %d", worlds[k].name, mode);
            o.serial = false;
            for (int run = mode > PARKED_SUMS; run < 2; run++) {
                o.threads = k == 1 && run ? 256 : 1 + (run + mode + k) % 3;
                o.chaos = run ? (uint64_t)(4 * k + mode) : 0;
                o.slow_update_ns = !run && k % 2 ? 20000 : 0;
                world_outcome got = train(&o, &parked);
                CHECK(world_same(&got, &want), "%s, mode %d run %d: %s", worlds[k].name, mode, run,
                      world_compare(&got, &want));
            }
        }
}

/* Segments of a tensor are updated as they come, unless they wait for their norm on the host. */
static void tensors_are_whole_or_refused(void)
{
    for (int mode = 0; mode < 5; mode++) {
        world_options o = { .plugin = "qwen", .manifest = "qwen2_moe", .grain = MT_GRAIN_TENSOR };
        bool host = mode == 3 || mode == 4, fits;
        o.request.training = true;
        o.request.segment_bytes = 1;
        o.request.max_grad_norm = mode == 2 || host ? 1 : -1;
        o.request.groups = 1 + (mode == 1);
        o.request.gradients = mode == 2 ? PLAN_GRADIENTS_HELD : PLAN_GRADIENTS_HOST;
        o.request.gradient_dtype = mode == 4 ? MT_BF16 : MT_F32;
        world w;
        fits = world_try(&o, &w) == MT_OK;
        CHECK(fits == host && (fits || strstr(status_text(), "updates whole tensors")),
              "mode %d: %s", mode, fits ? "taken" : status_text());
        if (fits) {
            step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
            CHECK(world_step(&w, b, 1, 1e-3).updated && engine_drain(w.e) == MT_OK, "mode %d: %s",
                  mode, status_text());
            world_batch_free(b);
        }
        world_close(&w);
    }
}

/* Whichever call of the optimizer fails, and whoever waits for it. */
static void a_failed_update_is_told_and_stops_nothing(void)
{
    for (int mode = 0; mode < 16; mode++) {
        world_options o = { .apart = true, .tables = mode & 2, .tied = mode & 4 };
        o.request.training = true;
        o.request.max_grad_norm = mode & 1 ? 1 : -1;
        o.good_updates = 1 + 11 * mode;
        o.threads = 1 + mode % 3;
        world w;
        world_open(&o, &w);
        step_batch *b = world_batch(1, 4, 24, 3, WORLD_VOCAB);
        engine_step_params p = { 1, 1e-3, w.p->request.max_grad_norm };
        engine_result r;
        mt_status st = MT_OK;
        for (; st == MT_OK && p.step < 20; p.step++)
            st = engine_step(w.e, b, &p, &r);
        CHECK(st == MT_ERR_INTERNAL && strstr(status_text(), "out of ink") &&
                  strstr(status_text(), "update of '"),
              "mode %d, step %d: %s", mode, (int)p.step, status_text());
        double loss;
        CHECK(engine_drain(w.e) == MT_ERR_INTERNAL && engine_eval(w.e, b, &loss) == st);
        world_batch_free(b);
        world_close(&w);
    }
}

/* ---- what the plan says ---------------------------------------------------------------------- */

static char said[512];
static void find_parking(void *arg, const char *text)
{
    if (strncmp(text, "parking: ", 9) == 0)
        snprintf(said, sizeof said, "%s", text);
    *(int *)arg += strncmp(text, "parking: ", 9) == 0;
}

/* Bytes of gradient buffers in what is saved, and of all others. */
static void buffer_bytes(const engine *e, int64_t ret[2])
{
    const char *saved = e->region[LAYOUT_SAVED];
    ret[0] = ret[1] = 0;
    for (int64_t i = 0; i < e->l.n_grads; i++) {
        const char *at = e->grads[i].data;
        ret[at >= saved && at < saved + e->l.bytes[LAYOUT_SAVED] ? 0 : 1] += e->grads[i].bytes;
    }
}

static void the_plan_says_what_waits_on_the_device(void)
{
    static const struct {
        const char *what, *text; /* "": with the bytes; NULL: nothing is said */
        tpl_policy policy;
        plan_gradients gradients;
        int groups;
        bool clip, unified;
    } cases[] = {
        { "one group", "", TPL_KEEP, PLAN_GRADIENTS_HOST, 1, false, false },
        { "input", "parking: none, too little is saved: ", TPL_INPUT, PLAN_GRADIENTS_HOST, 1, false,
          false },
        { "two groups", "parking: none, gradients leave after every group", TPL_KEEP,
          PLAN_GRADIENTS_HOST, 2, false, false },
        { "sums", "parking: gradients that the optimizer is behind with wait where they are summed",
          TPL_KEEP, PLAN_GRADIENTS_DEVICE, 2, false, false },
        { "clipping", NULL, TPL_KEEP, PLAN_GRADIENTS_HOST, 1, true, false },
        { "the host itself", NULL, TPL_KEEP, PLAN_GRADIENTS_HOST, 1, false, true },
    };
    void *device;
    mt_device_info info = { .struct_size = sizeof info };
    world_backend(&device)->info(device, &info);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        world_options o = { .apart = !cases[k].unified };
        if (cases[k].unified && !info.unified)
            continue;
        o.request.training = true;
        o.request.max_grad_norm = cases[k].clip ? 1 : -1;
        o.request.groups = cases[k].groups;
        o.request.policy = (int32_t)cases[k].policy;
        o.request.gradients = cases[k].gradients;
        const char *want = cases[k].text;
        char parked[128];
        int64_t bytes[2];
        world w;
        world_open(&o, &w);
        buffer_bytes(w.e, bytes);
        snprintf(parked, sizeof parked, "%.2f KiB of them behind saved activations, %.2f KiB in",
                 (double)bytes[0] / 1024, (double)bytes[1] / 1024);
        want = want && !*want ? parked : want;
        CHECK((bytes[0] > 0) == (k == 0), "%s", cases[k].what);
        for (int brief = 0; brief < 2; brief++) {
            int lines = 0;
            plan_print(w.p, brief, find_parking, &lines);
            CHECK(lines == (want != NULL), "%s: %d lines", cases[k].what, lines);
            CHECK(!want || strstr(said, want), "%s: '%s', not '%s'", cases[k].what, said, want);
        }
        world_close(&w);
    }
}

int main(void)
{
    RUN(a_failed_update_is_told_and_stops_nothing);
    RUN(tensors_are_whole_or_refused);
    RUN(the_plan_says_what_waits_on_the_device);
    RUN(behind_equals_serial);
    return check_done();
}
