/* SPDX-License-Identifier: Apache-2.0
 *
 * What surrounds a step: the plan's bytes and choices, the timeline, evaluation and generation.
 */
#include "world.h"

#include "../check.h"
#include "core/base/status.h"
#include "core/engine/layout.h"

#include <math.h>
#include <stddef.h>
#include <unistd.h>

static world_options training(void)
{
    world_options o = { 0 };
    o.request.training = true;
    return o;
}

static void bytes_are_as_planned(void)
{
    static const plan_gradients where[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_DEVICE,
                                            PLAN_GRADIENTS_HELD };
    for (int mode = 0; mode < 192; mode++) {
        world_options o = training();
        world w;
        o.tied = mode & 1;
        o.request.compute = mode & 2 ? MT_BF16 : MT_F32;
        o.request.max_grad_norm = mode & 4 ? -1 : 1;
        o.request.groups = mode & 8 ? 2 : 1;
        o.request.training = !(mode & 16);
        o.request.context = mode & 16 ? 40 : 0;
        o.request.policy = mode % 3;
        o.request.gradients = where[mode / 64];
        o.request.gradient_dtype = mode & 32 ? MT_BF16 : MT_F32;
        o.grain = mode % 5 % 3;
        o.threads = 1 + mode % 7;
        world_open(&o, &w);
        int64_t bytes[PLAN_TIERS], listed[PLAN_TIERS] = { 0 };
        engine_bytes(w.e, bytes);
        for (int32_t i = 0; i < w.p->n_items; i++)
            listed[w.p->item[i].tier] += w.p->item[i].bytes;
        for (int t = 0; t < PLAN_TIERS; t++) {
            CHECK(bytes[t] == w.p->tier_bytes[t], "mode %d tier %d: %lld %lld", mode, t,
                  (long long)bytes[t], (long long)w.p->tier_bytes[t]);
            CHECK(listed[t] == bytes[t]);
        }
        CHECK(w.s->region_bytes == store_bytes(w.m, w.p->request.states, w.p->request.n_states,
                                               plan_needs_grad_plane(w.p)));
        world_close(&w);
    }
}

static void the_store_takes_12_bytes_a_parameter(void)
{
    world_options o = training();
    world w;
    o.hidden = 128;
    o.vocab = 512;
    o.request.max_grad_norm = -1;
    world_open(&o, &w);
    double each = (double)w.s->region_bytes / (double)w.m->total_params;
    CHECK(each >= 12.0 && each < 12.36, "%g", each);
    world_close(&w);
}

static int64_t item_bytes(const plan *p, const char *name)
{
    for (int32_t i = 0; i < p->n_items; i++)
        if (strcmp(p->item[i].name, name) == 0)
            return p->item[i].bytes;
    return 0;
}

/* What the optimizer gets at once in a form of its own: a little, or a whole slice where it takes
 * rows or tensors. */
static void the_plan_counts_the_workers_blocks(void)
{
    static const mt_granularity grains[] = { MT_GRAIN_ELEMENT, MT_GRAIN_ROW, MT_GRAIN_TENSOR };
    for (int k = 0; k < 3; k++) {
        world_options o = training();
        world w = { 0 };
        int64_t host[2], blocks[2];
        o.hidden = 1024; /* half a million elements and more in a matrix */
        o.grain = grains[k];
        world_model(&o, &w);
        for (int i = 0; i < 2; i++) {
            plan *p;
            o.threads = i ? 300 : 3; /* more than there may be, which are 256 */
            CHECK(world_plan(&o, w.m, &p) == MT_OK);
            host[i] = p->tier_bytes[PLAN_HOST];
            blocks[i] = item_bytes(p, "workers' blocks");
            plan_destroy(p);
        }
        int64_t each = k ? LAYOUT_SLAB_ELEMS * 4 : LAYOUT_BLOCK_ELEMS * 4;
        CHECK(blocks[0] == 3 * each && blocks[1] == 256 * each, "%lld %lld", (long long)blocks[0],
              (long long)blocks[1]);
        CHECK(host[1] - host[0] == blocks[1] - blocks[0]);
        world_close(&w);
    }
}

/* Host memory of a larger model, per parameter, in four groups. */
static double host_bytes(double clip, plan_gradients sums, mt_dtype dtype, plan **ret)
{
    world_options o = training();
    static world large;
    o.hidden = 2048;
    o.blocks = 16;
    o.vocab = 32000;
    if (!large.m)
        world_model(&o, &large);
    o.request.compute = MT_BF16;
    o.request.micro_tokens = 8192;
    o.request.groups = 4;
    o.request.policy = TPL_INPUT;
    o.request.max_grad_norm = clip;
    o.request.gradients = sums;
    o.request.gradient_dtype = dtype;
    if (world_plan(&o, large.m, ret) < 0)
        world_fail("plan_create");
    return (double)(*ret)->tier_bytes[PLAN_HOST] / (double)large.m->total_params;
}

static void gradients_live_where_they_should(void)
{
    const plan_gradients HOST = PLAN_GRADIENTS_HOST, DEVICE = PLAN_GRADIENTS_DEVICE,
                         HELD = PLAN_GRADIENTS_HELD;
    plan *p;
    double each = host_bytes(-1, DEVICE, MT_F32, &p), n = (double)p->m->total_params;
    CHECK(p->device_sums && each >= 12 && each <= 12.5, "%g bytes a parameter", each);
    CHECK((double)item_bytes(p, "gradient sums") >= 4 * n && !item_bytes(p, "gradient buffers"));
    plan_destroy(p);
    each = host_bytes(-1, PLAN_GRADIENTS_AUTO, MT_F32, &p);
    CHECK(p->device_sums && each <= 12.5, "%g bytes a parameter", each);
    plan_destroy(p);
    each = host_bytes(-1, HOST, MT_F32, &p);
    CHECK(!p->device_sums && each >= 16 && each <= 16.5, "%g bytes a parameter", each);
    plan_destroy(p);
    each = host_bytes(1, DEVICE, MT_F32, &p);
    CHECK(each >= 16 && each <= 16.5, "%g bytes a parameter", each);
    plan_destroy(p);
    each = host_bytes(1, DEVICE, MT_BF16, &p);
    CHECK(each >= 14 && each <= 14.5, "%g bytes a parameter", each);
    CHECK(item_bytes(p, "gradient buffers") > 0 && !plan_needs_grad_plane(p));
    plan_destroy(p);
    each = host_bytes(1, HELD, MT_F32, &p);
    CHECK(p->held && each >= 12 && each <= 12.5, "%g bytes a parameter", each);
    CHECK((double)item_bytes(p, "gradient sums") >= 4 * n && !item_bytes(p, "gradient buffers"));
    plan_destroy(p);
    each = host_bytes(1, HELD, MT_BF16, &p);
    CHECK(p->held && each >= 12 && each <= 12.5, "%g bytes a parameter", each);
    CHECK((double)item_bytes(p, "gradient buffers") >= 2 * n);
    plan_destroy(p);
    each = host_bytes(-1, HELD, MT_F32, &p);
    CHECK(!p->held && p->device_sums && each <= 12.5, "%g bytes a parameter", each);
    plan_destroy(p);
}

/* Gradients that wait on the device are what is chosen when host memory is short of their plane. */
static void gradients_wait_where_they_fit(void)
{
    world_options o = training();
    world any;
    plan *p;
    for (int narrow = 0; narrow < 2; narrow++) {
        const plan_machine apart = { .device = INT64_MAX / 4, .host = INT64_MAX / 4 };
        world_model(&o, &any);
        o.request.machine = &apart;
        o.request.gradient_dtype = narrow ? MT_BF16 : MT_F32;
        o.request.gradients = PLAN_GRADIENTS_HELD;
        CHECK(world_plan(&o, any.m, &p) == MT_OK && p->held);
        CHECK(item_bytes(p, "gradient sums") == 0 || !narrow);
        int64_t host = p->tier_bytes[PLAN_HOST], device = p->tier_bytes[PLAN_DEVICE];
        plan_destroy(p);
        o.request.gradients = PLAN_GRADIENTS_AUTO;
        CHECK(world_plan(&o, any.m, &p) == MT_OK && !p->held);
        CHECK(p->tier_bytes[PLAN_HOST] > host && p->tier_bytes[PLAN_DEVICE] < device);
        o.request.host_limit = p->tier_bytes[PLAN_HOST] - 1;
        plan_destroy(p);
        CHECK(world_plan(&o, any.m, &p) == MT_OK && p->held);
        CHECK(p->tier_bytes[PLAN_HOST] == host && p->tier_bytes[PLAN_DEVICE] == device);
        plan_destroy(p);
        o.request.device_limit = device - 1;
        CHECK(world_plan(&o, any.m, &p) == MT_ERR_NOMEM);
        o.request.host_limit = o.request.device_limit = 0;
        world_close(&any);
    }
}

/* Without the memory for it, gradients are not summed on the device unless that is asked for. */
static void sums_go_where_they_fit_on(bool apart)
{
    world_options o = training();
    world any;
    plan *p;
    o.apart = apart;
    world_model(&o, &any);
    o.request.groups = 4;
    o.request.policy = TPL_INPUT;
    o.request.gradients = PLAN_GRADIENTS_DEVICE;
    CHECK(world_plan(&o, any.m, &p) == MT_OK);
    int64_t need = p->tier_bytes[PLAN_DEVICE];
    plan_destroy(p);
    o.request.gradients = PLAN_GRADIENTS_AUTO;
    o.request.device_limit = need;
    CHECK(world_plan(&o, any.m, &p) == MT_OK && p->device_sums);
    plan_destroy(p);
    o.request.device_limit = need - 1;
    CHECK(world_plan(&o, any.m, &p) == MT_OK && !p->device_sums);
    plan_destroy(p);
    o.request.gradients = PLAN_GRADIENTS_DEVICE;
    CHECK(world_plan(&o, any.m, &p) == MT_ERR_NOMEM);
    CHECK(strstr(status_text(), "memory.gradients: auto") != NULL, "%s", status_text());
    world_close(&any);
}

static void sums_go_where_they_fit(void)
{
    sums_go_where_they_fit_on(false);
    sums_go_where_they_fit_on(true);
}

static void a_backend_without_narrow_has_fp32_gradients(void)
{
    world_options o = training();
    world w;
    void *device;
    mt_backend old = *world_backend(&device);
    plan *p = NULL;
    plan_profile f = { 1e11, 5e10, 1e10, 1e10, 1e10, 5e10, 0, 0, 0, 0 };
    world_open(&o, &w);
    plan_request r = w.p->request;
    old.struct_size = offsetof(mt_backend, narrow);
    CHECK(plan_create(w.m, &r, &f, &old, device, &p) == MT_OK && p);
    plan_destroy(p);
    r.gradient_dtype = MT_BF16;
    CHECK(plan_create(w.m, &r, &f, &old, device, &p) == MT_ERR_UNSUPPORTED);
    CHECK(strstr(status_text(), "memory.gradient_dtype") != NULL, "%s", status_text());
    world_close(&w);
}

static void a_tight_limit_gives_a_mixed_plan(void)
{
    world_options o = training();
    world any;
    plan *p;
    o.request.policy = TPL_KEEP;
    world_model(&o, &any);
    CHECK(world_plan(&o, any.m, &p) == MT_OK);
    int64_t keep = p->tier_bytes[PLAN_DEVICE];
    plan_destroy(p);
    o.request.policy = TPL_INPUT;
    CHECK(world_plan(&o, any.m, &p) == MT_OK);
    int64_t input = p->tier_bytes[PLAN_DEVICE];
    plan_destroy(p);

    o.request.policy = PLAN_AUTO;
    o.request.device_limit = (keep + input) / 2;
    CHECK(world_plan(&o, any.m, &p) == MT_OK, "%s", status_text());
    CHECK(p->tier_bytes[PLAN_DEVICE] <= (keep + input) / 2);
    int raised = 0;
    for (int32_t u = 0; u < any.m->n_units; u++)
        raised += p->policy[u] != TPL_INPUT;
    CHECK(raised > 0 && raised <= any.m->n_units);
    plan_destroy(p);

    o.request.device_limit = keep;
    CHECK(world_plan(&o, any.m, &p) == MT_OK);
    for (int32_t u = 0; u < any.m->n_units; u++)
        CHECK(p->policy[u] == TPL_KEEP, "unit %d", u);
    plan_destroy(p);

    /* More groups hold fewer activations. */
    o.request.groups = PLAN_AUTO;
    o.request.device_limit = input - 1024;
    CHECK(world_plan(&o, any.m, &p) == MT_OK, "%s", status_text());
    CHECK(p->groups > 1);
    plan_destroy(p);

    /* And what cannot fit is refused with a way out. */
    o.request.groups = 1;
    p = NULL;
    CHECK(world_plan(&o, any.m, &p) == MT_ERR_NOMEM && !p);
    CHECK(strstr(status_text(), "memory.groups: auto") && strstr(status_text(), "are missing"),
          "%s", status_text());
    o.request.device_limit = 4096;
    CHECK(world_plan(&o, any.m, &p) == MT_ERR_NOMEM && strstr(status_text(), "No setting"), "%s",
          status_text());
    world_close(&any);
}

/* ---- the timeline ---------------------------------------------------------------------------- */

typedef struct span {
    double from, to;
} span;

/* The n-th event of that name. */
static span find_span(const char *path, const char *name, int n)
{
    char line[512], quoted[96];
    span s = { -1, -1 };
    FILE *f = fopen(path, "re");
    snprintf(quoted, sizeof quoted, "\"name\":\"%s\"", name);
    while (f && fgets(line, sizeof line, f)) {
        const char *at = strstr(line, "\"ts\":");
        double ts, dur;
        if (at && strstr(line, quoted) && sscanf(at, "\"ts\":%lf,\"dur\":%lf", &ts, &dur) == 2 &&
            n-- == 0) {
            s = (span){ ts, ts + dur };
            break;
        }
    }
    if (f)
        fclose(f);
    return s;
}

/* Two passes and a step, each of whose attentions takes `slow_ns`. */
static void write_timeline(const char *path, uint64_t slow_ns)
{
    world_options o = training();
    world w;
    o.slow_ns = slow_ns;
    o.trace = path;
    world_open(&o, &w);
    step_batch *b = world_batch(1, 4, 24, 2, WORLD_VOCAB);
    world_loss(&w, b);
    world_loss(&w, b);
    engine_step_params p = { 1, 1e-3, 1 };
    engine_result r;
    CHECK(engine_step(w.e, b, &p, &r) == MT_OK);
    double waits = 0;
    for (int k = 0; k < ENGINE_WAITS; k++)
        waits += r.wait_seconds[k];
    CHECK(r.compute_seconds > 0 && waits >= 0 && r.compute_seconds + waits <= r.seconds * 1.001,
          "%g + %g > %g", r.compute_seconds, waits, r.seconds);
    world_batch_free(b);
    world_close(&w);
}

/* How many passes copied the weights of block.2 in while block.1 computed. */
static int overlaps(const char *path)
{
    int n = 0;
    for (int i = 0; i < 2; i++) {
        span compute = find_span(path, "forward block.1", i);
        span copy = find_span(path, "copy in block.2", i);
        CHECK(compute.from >= 0 && copy.from >= 0);
        n += copy.from < compute.to && compute.from < copy.to;
        /* Never before the buffer's former unit is through, never used before it is there. */
        CHECK(copy.from >= find_span(path, "forward block.0", i).to);
        CHECK(copy.to <= find_span(path, "forward block.2", i).from);
    }
    return n;
}

/* What workers do is on it too, where it is traced: of a large model most of what there is. */
static void the_timeline_holds_two_steps(void)
{
    world_options o = training();
    world w;
    void *device;
    const mt_backend *b = world_backend(&device);
    layout l;
    o.hidden = 2048;
    o.vocab = 100000;
    o.blocks = 96;
    o.request.groups = 4;
    o.request.gradients = PLAN_GRADIENTS_HOST;
    world_model(&o, &w);
    CHECK(world_plan(&o, w.m, &w.p) == MT_OK, "%s", status_text());
    layout_make(w.p, b, device, &l);
    int64_t adds = 4 * l.n_blocks, updates = l.n_blocks;
    CHECK(2 * (adds + updates) > LAYOUT_MIN_EVENTS && l.n_events > 2 * (adds + updates),
          "%lld events for %lld adds and %lld updates", (long long)l.n_events, (long long)adds,
          (long long)updates);
    world_close(&w);
}

static int count_spans(const char *path, const char *name)
{
    int n = 0;
    while (find_span(path, name, n).from >= 0)
        n++;
    return n;
}

/* From one group to the next nothing has to come but the rows of the table: backward of the
 * embedding reads no weights, and those of the lowest block stay. */
static void the_turn_to_the_next_group_copies_rows_only(void)
{
    enum { GROUPS = 3 };
    char path[] = "/tmp/mt-trace-XXXXXX";
    close(mkstemp(path));
    world_options o = training();
    world w;
    o.trace = path;
    o.request.groups = GROUPS;
    o.request.micro_batches = GROUPS;
    world_open(&o, &w);
    step_batch *b = world_batch(1, GROUPS, 24, 2, WORLD_VOCAB);
    world_step(&w, b, 1, 1e-3);
    world_batch_free(b);
    world_close(&w);
    int rows = count_spans(path, "copy in embed"), lowest = count_spans(path, "copy in block.0");
    CHECK(rows == GROUPS, "rows of the table came %d times", rows);
    CHECK(lowest == GROUPS + 1, "the lowest block came %d times", lowest);
    unlink(path);
}

/* Wherever gradients are summed, though on the device their rows are the whole step's. */
static void a_group_fetches_the_rows_of_its_own_tokens(void)
{
    static const plan_gradients where[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_DEVICE };
    int64_t bytes[2];
    for (int k = 0; k < 2; k++) {
        world_options o = training();
        world w;
        o.vocab = 20000;
        o.request.groups = 4;
        o.request.gradients = where[k];
        world_open(&o, &w);
        CHECK(w.p->device_sums == (k == 1), "place %d", k);
        step_batch *b = world_batch(1, 4, 24, 2, o.vocab);
        bytes[k] = world_step(&w, b, 1, 1e-3).copy_in_bytes;
        world_batch_free(b);
        world_close(&w);
    }
    CHECK(bytes[0] == bytes[1], "%lld bytes, %lld with sums on the device", (long long)bytes[0],
          (long long)bytes[1]);
}

static void weights_arrive_while_the_unit_below_computes(void)
{
    char path[] = "/tmp/mt-trace-XXXXXX";
    int fd = mkstemp(path);
    close(fd);
    /* A busy machine may not get round to the copy in the first few milliseconds; an engine that
     * does not overlap never does, however long computing takes. */
    int n = 0;
    for (uint64_t ms = 10; ms <= 5120 && n == 0; ms *= 2) {
        write_timeline(path, ms * 1000 * 1000);
        n = overlaps(path);
    }
    CHECK(n > 0);
    span mb = find_span(path, "backward block.2 mb 1", 0);
    CHECK(mb.from >= 0 && mb.to >= mb.from);
    CHECK(find_span(path, "copy out block.2", 0).from >= mb.to);
    CHECK(find_span(path, "update block.1", 0).from >= find_span(path, "copy out block.1", 0).to);
    unlink(path);
}

/* With clipping, updates run beside the next forward: it begins as soon as its first unit is
 * updated, whatever waits for the workers. */
static void a_forward_begins_before_the_last_update(void)
{
    char path[] = "/tmp/mt-trace-XXXXXX";
    int fd = mkstemp(path);
    close(fd);
    bool beside = false;
    for (uint64_t ms = 1; ms <= 64 && !beside; ms *= 2) {
        world_options o = training();
        world w;
        o.threads = 1;
        o.slow_update_ns = ms * 1000 * 1000;
        o.trace = path;
        world_open(&o, &w);
        step_batch *b = world_batch(1, 4, 24, 2, WORLD_VOCAB);
        for (int i = 1; i <= 2; i++) {
            engine_step_params p = { i, 1e-3, 1 };
            engine_result r;
            CHECK(engine_step(w.e, b, &p, &r) == MT_OK);
        }
        world_batch_free(b);
        world_close(&w);
        /* Of the first step, because the second one's begin after its own backward. */
        span forward = find_span(path, "forward block.0", 1), of_head = { -1, -1 };
        span backward = find_span(path, "backward embed", 1);
        for (int i = 0;; i++) {
            span s = find_span(path, "update head", i);
            if (s.from < 0 || s.from > backward.from)
                break;
            of_head = s;
        }
        CHECK(forward.from >= 0 && backward.from >= 0 && of_head.from >= 0);
        beside = forward.from < of_head.to;
    }
    CHECK(beside);
    unlink(path);
}

/* Two steps of a model with one slow optimizer: does that of `unit`, of the first step, go on when
 * the second has begun the forward of `of`? */
static bool goes_on_beside(world_options o, int32_t vocab, const char *unit, const char *of)
{
    char path[] = "/tmp/mt-trace-XXXXXX", update[64], forward[64];
    int fd = mkstemp(path);
    close(fd);
    snprintf(update, sizeof update, "update %s", unit);
    snprintf(forward, sizeof forward, "forward %s", of);
    bool beside = false;
    for (uint64_t ms = 1; ms <= 64 && !beside; ms *= 2) {
        world w;
        o.slow_update_ns = ms * 1000 * 1000;
        o.trace = path;
        world_open(&o, &w);
        step_batch *b = world_batch(1, 4, 24, 2, vocab);
        for (int i = 1; i <= 2; i++)
            world_step(&w, b, i, 1e-3);
        world_batch_free(b);
        world_close(&w);
        span begins = find_span(path, forward, 1), ends = find_span(path, "backward head", 1);
        CHECK(begins.from >= 0 && ends.from >= 0);
        for (int i = 0;; i++) {
            span s = find_span(path, update, i);
            if (s.from < 0 || s.from > ends.from)
                break;
            beside |= s.to > begins.from;
        }
    }
    unlink(path);
    return beside;
}

/* Of a large table a batch needs a few rows: the next forward waits for no others, with clipping
 * and without. */
static void a_forward_needs_few_rows_of_a_table(void)
{
    for (int clip = 0; clip < 2; clip++) {
        world_options o = training();
        o.vocab = 1 << 16;
        o.threads = 2;
        o.request.max_grad_norm = clip ? 1 : -1;
        CHECK(goes_on_beside(o, 8, "embed", "embed"), "clipping %d", clip);
    }
}

/* Without clipping updates of upper units, too slow for backward, go on beside the next forward. */
static void updates_may_be_behind(void)
{
    world_options o = training();
    o.apart = true;
    o.threads = 1;
    o.request.max_grad_norm = -1;
    CHECK(goes_on_beside(o, WORLD_VOCAB, "block.2", "block.0"));
}

/* ---- where gradients wait -------------------------------------------------------------------- */

static void gradients_wait_in_what_is_done_with(void)
{
    for (int policy = 0; policy < TPL_POLICIES; policy++) {
        world_options o = training();
        int64_t at[64], saved[64] = { 0 }, own = 0, end = 0;
        world w = { 0 };
        plan *p;
        o.request.policy = policy;
        world_model(&o, &w);
        CHECK(world_plan(&o, w.m, &p) == MT_OK);
        for (int32_t u = 0; u < w.m->n_units; u++) {
            bool last = u == w.m->n_units - 1;
            saved[u] = end;
            end += layout_align(p->tpl[u]->saved_bytes) * (last ? 1 : p->group_batches);
        }
        saved[w.m->n_units] = end;
        int64_t rest = layout_park(p, 4, at), parked = 0;
        for (int32_t u = w.m->n_units - 1; u >= 0; u--) { /* units are whole: one piece each */
            int64_t bytes = layout_leave_bytes(&p->tpl[u]->segment[0], 4);
            own += at[u] < 0 ? bytes : 0;
            if (at[u] < 0)
                continue;
            CHECK(at[u] >= saved[u + 1] && at[u] + bytes <= end, "unit %d", u);
            end = at[u]; /* none lies over another */
            parked++;
        }
        CHECK(own == rest);
        CHECK(policy == TPL_INPUT || parked > 0);
        plan_destroy(p);
        world_close(&w);
    }
}

/* Slabs are many where updates may be behind, and few where the host has no room for more. */
static void slabs_take_what_the_host_has(void)
{
    const int64_t few = LAYOUT_SLABS * (int64_t)LAYOUT_SLAB_ELEMS * 4;
    world_options o = training();
    world w = { 0 };
    plan *p;
    o.apart = true;
    o.hidden = 1024;
    o.vocab = 1 << 18; /* half a billion parameters, of which only a plan is made */
    o.request.max_grad_norm = -1;
    world_model(&o, &w);
    CHECK(world_plan(&o, w.m, &p) == MT_OK);
    int64_t host = p->tier_bytes[PLAN_HOST], many = item_bytes(p, "gradient slabs");
    int64_t share = (many + item_bytes(p, "embedding staging")) * LAYOUT_DEEP_SHARE;
    CHECK(many > 2 * few && share <= w.m->total_params * 4, "%lld", (long long)many);
    plan_destroy(p);

    /* One slab less for a byte less, and so on to the fewest. */
    for (int64_t n = 0; n < 3; n++) {
        int64_t slabs = n < 2 ? many - (n + 1) * few / LAYOUT_SLABS : few;
        o.request.host_limit = n < 2 ? host - n * few / LAYOUT_SLABS - 1 : host - (many - few);
        CHECK(world_plan(&o, w.m, &p) == MT_OK, "%s", status_text());
        CHECK(item_bytes(p, "gradient slabs") == slabs, "%lld", (long long)n);
        CHECK(p->deep && p->tier_bytes[PLAN_HOST] <= o.request.host_limit);
        plan_destroy(p);
    }
    o.request.host_limit = host - (many - few) - 1;
    CHECK(world_plan(&o, w.m, &p) == MT_ERR_NOMEM);

    o.request.host_limit = 0;
    o.request.max_grad_norm = 1;
    CHECK(world_plan(&o, w.m, &p) == MT_OK);
    CHECK(item_bytes(p, "gradient slabs") == few);
    plan_destroy(p);
    world_close(&w);
}

/* ---- evaluation and generation --------------------------------------------------------------- */

static void evaluation_takes_any_number_of_batches(void)
{
    for (int train = 0; train < 2; train++) {
        world_options o = training();
        world w;
        o.request.training = train;
        world_open(&o, &w);
        step_batch *b = world_batch(3, 9, 24, 3, WORLD_VOCAB);
        double all = world_loss(&w, b), sum = 0;
        for (int64_t k = 0; k < b->n; k++) {
            step_batch one = { .n = 1,
                               .micro = &b->micro[k],
                               .tokens = b->micro[k].tokens,
                               .n_targets = b->micro[k].n_targets };
            sum += world_loss(&w, &one);
        }
        CHECK(fabs(all - sum) < 1e-9 * all, "%.17g %.17g", all, sum);
        world_batch_free(b);
        world_close(&w);
    }
}

static void generate(world *w, const int32_t *tokens, int64_t n, int64_t used, float *last,
                     float *all)
{
    if (engine_generate(w->e, tokens, n, used, last, all) < 0)
        world_fail("engine_generate");
}

static void decoding_equals_prefill(void)
{
    enum { N = 23 };
    static float all[N * WORLD_VOCAB], last[WORLD_VOCAB], one[WORLD_VOCAB];
    for (int mode = 0; mode < 4; mode++) {
        world_options o = { .tied = mode & 1 };
        world w;
        o.request.context = 40;
        o.request.weight_buffers = mode & 2 ? PLAN_AUTO : 2;
        world_open(&o, &w);
        CHECK(w.p->weight_buffers == (mode & 2 ? w.m->n_units : 2));
        step_batch *b = world_batch(6, 1, N, 1, WORLD_VOCAB);
        int32_t *ids = b->micro[0].ids, *targets = b->micro[0].targets;
        generate(&w, ids, N, 0, last, all);
        CHECK(memcmp(last, all + (N - 1) * WORLD_VOCAB, sizeof last) == 0);
        double nll = 0;
        for (int t = 0; t < N; t++) {
            double sum = 0;
            for (int v = 0; v < WORLD_VOCAB; v++)
                sum += exp((double)all[t * WORLD_VOCAB + v]);
            if (targets[t] >= 0)
                nll += log(sum) - (double)all[t * WORLD_VOCAB + targets[t]];
        }
        double loss = world_loss(&w, b);
        CHECK(fabs(nll - loss) < 1e-4 * loss, "%g %g", nll, loss);
        static const int pieces[][N] = { { 1 }, { 3, 1, 7, 2 }, { 1, 22 } };
        for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
            for (int t = 0, k = 0, n; t < N; t += n, k++) {
                n = pieces[i][k] ? pieces[i][k] : 1;
                generate(&w, ids + t, n, t, one, NULL);
                double worst = 0;
                const float *whole = all + (t + n - 1) * WORLD_VOCAB;
                for (int v = 0; v < WORLD_VOCAB; v++)
                    worst = fmax(worst, fabs((double)one[v] - (double)whole[v]));
                CHECK(worst < 1e-4, "tokens %d to %d: %g", t, t + n - 1, worst);
            }
        }
        /* Weights that stayed in their buffers must not outlive a change of the store. */
        float x = 3;
        store_set(w.s, model_find_param(w.m, "layers.1.down.weight"), 5, 1, &x);
        generate(&w, ids, N, 0, one, NULL);
        CHECK(memcmp(one, last, sizeof last) != 0);
        CHECK(engine_generate(w.e, ids, 1, N + 1, one, NULL) == MT_ERR_INVALID);
        CHECK(engine_generate(w.e, ids, 1, 40, one, NULL) == MT_ERR_INVALID);
        world_batch_free(b);
        world_close(&w);
    }
}

static int printed;
static bool saw_total;
static void count_line(void *arg, const char *text)
{
    (void)arg;
    printed++;
    saw_total |= strstr(text, "master weights") != NULL;
}

static void the_plan_prints(void)
{
    world_options o = training();
    world w;
    void *device;
    const mt_backend *b = world_backend(&device);
    world_open(&o, &w);
    plan_print(w.p, true, count_line, NULL);
    int brief = printed;
    CHECK(brief >= 3 && brief <= 6 && !saw_total);
    plan_print(w.p, false, count_line, NULL);
    CHECK(printed - brief > 15 && saw_total);
    plan_profile f = { 0 };
    CHECK(plan_measure(b, device, MT_F32, &f) == MT_OK, "%s", status_text());
    CHECK(f.scan_flops > 1e6 && f.scan_backward_flops > 1e6);
    CHECK(f.gemm_flops > 1e8 && f.copy_in > 1e7 && f.copy_out > 1e7 && f.host_bandwidth > 1e7);
    world_close(&w);
}

/* A backend with a clock of its own, by which every second linear is held up for a second: what a
 * busy machine does to it. */
static const mt_backend *steady;
static mt_kernel counted;
static int64_t linears, zeros, copies[2];
static bool readable; /* device memory, by the host */
static uint64_t clock_ns;
enum { LINEAR_NS = 10 * 1000 * 1000, COPY_NS = 1000 * 1000, HELD_UP_NS = 1000 * 1000 * 1000 };

static void count_linear(void *device, void *queue, const mt_op_call *call)
{
    const float *x = call->in[0].data, *w = call->in[1].data;
    clock_ns += LINEAR_NS + (++linears % 2 ? HELD_UP_NS : 0);
    for (int64_t i = 0; readable && i < call->in[0].rows * call->in[0].cols; i++)
        zeros += (x[i] == 0) + (w[i] == 0);
    steady->kernel(device, "linear")->forward(device, queue, call);
}

/* Attention and recurrences take no longer forward than backward. */
static void skip_work(void *device, void *queue, const mt_op_call *call)
{
    (void)device;
    (void)queue;
    (void)call;
    clock_ns += LINEAR_NS;
}

static const mt_kernel *counted_kernel(const void *device, const char *op)
{
    static mt_kernel skipped[2];
    static const char *const names[2] = { "attention", "gated_delta" };
    for (int i = 0; i < 2; i++) {
        if (strcmp(op, names[i]) != 0)
            continue;
        skipped[i] = *steady->kernel(device, op);
        skipped[i].forward = skipped[i].backward = skip_work;
        return &skipped[i];
    }
    return strcmp(op, "linear") == 0 ? &counted : steady->kernel(device, op);
}

static void count_in(void *device, void *queue, void *dst, const void *src, int64_t bytes)
{
    if (bytes == 32 << 20)
        clock_ns += COPY_NS * (uint64_t)(5 - copies[0]++);
    steady->copy_in(device, queue, dst, src, bytes);
}

static void count_out(void *device, void *queue, void *dst, const void *src, int64_t bytes)
{
    clock_ns += COPY_NS * (uint64_t)(2 + copies[1]++);
    steady->copy_out(device, queue, dst, src, bytes);
}

static void tell_time(void *device, void *queue, uint64_t *slot)
{
    steady->queue_sync(device, queue);
    *slot = clock_ns;
}

static void a_measurement_is_the_best_of_several(void)
{
    void *device;
    steady = world_backend(&device);
    mt_device_info info = { .struct_size = sizeof info };
    steady->info(device, &info);
    readable = info.unified;
    counted = *steady->kernel(device, "linear");
    counted.forward = count_linear;
    mt_backend b = *steady;
    b.kernel = counted_kernel;
    b.copy_in = count_in;
    b.copy_out = count_out;
    b.timestamp = tell_time;
    plan_profile f = { 0 };
    CHECK(plan_measure(&b, device, MT_F32, &f) == MT_OK, "%s", status_text());
    double want = 2.0 * 256 * 256 * 256 / (LINEAR_NS * 1e-9);
    CHECK(fabs(f.gemm_flops - want) < 1e-6 * want, "%g FLOP/s, not %g", f.gemm_flops, want);
    CHECK(copies[0] == 5 && copies[1] == 5);
    CHECK(linears > 0 && zeros == 0, "%lld zeros, which devices multiply faster than real data",
          (long long)zeros);
    /* 256 tokens, 4 heads of 128: four FLOPs a pair and dimension forward, ten backward. */
    want = 256.0 * 257 / 2 * 4 * 4 * 128 / (LINEAR_NS * 1e-9);
    CHECK(fabs(f.attn_flops - want) < 1e-6 * want, "%g FLOP/s, not %g", f.attn_flops, want);
    CHECK(fabs(f.attn_backward_flops - 2.5 * want) < 1e-6 * want);
    want = (32 << 20) / (COPY_NS * 1e-9);
    CHECK(fabs(f.copy_in - want) < 1e-6 * want, "%g B/s, not %g", f.copy_in, want);
    CHECK(fabs(f.copy_out - want / 2) < 1e-6 * want, "%g B/s, not %g", f.copy_out, want / 2);
}

int main(void)
{
    RUN(bytes_are_as_planned);
    RUN(the_store_takes_12_bytes_a_parameter);
    RUN(the_plan_counts_the_workers_blocks);
    RUN(gradients_live_where_they_should);
    RUN(sums_go_where_they_fit);
    RUN(gradients_wait_where_they_fit);
    RUN(a_backend_without_narrow_has_fp32_gradients);
    RUN(a_tight_limit_gives_a_mixed_plan);
    RUN(the_timeline_holds_two_steps);
    RUN(the_turn_to_the_next_group_copies_rows_only);
    RUN(a_group_fetches_the_rows_of_its_own_tokens);
    RUN(weights_arrive_while_the_unit_below_computes);
    RUN(a_forward_begins_before_the_last_update);
    RUN(a_forward_needs_few_rows_of_a_table);
    RUN(updates_may_be_behind);
    RUN(gradients_wait_in_what_is_done_with);
    RUN(slabs_take_what_the_host_has);
    RUN(evaluation_takes_any_number_of_batches);
    RUN(decoding_equals_prefill);
    RUN(the_plan_prints);
    RUN(a_measurement_is_the_best_of_several);
    return check_done();
}
