/* SPDX-License-Identifier: Apache-2.0
 *
 * The cost model: what a plan says of a step's seconds, by hand, on machines of which all is
 * infinitely fast but what a case is about.
 */
#include "world.h"

#include "../check.h"

#include <math.h>

/* ---- machines -------------------------------------------------------------------------------- */

static const plan_profile no_time = { .gemm_flops = 1e30,
                                      .attn_flops = 1e30,
                                      .copy_in = 1e30,
                                      .copy_out = 1e30,
                                      .host_bandwidth = 1e30,
                                      .attn_backward_flops = 1e30,
                                      .device_bandwidth = 1e30 };

/* The same with some rates of its own. */
#define MACHINE(name, ...)                                                                         \
    plan_profile name = no_time;                                                                   \
    do {                                                                                           \
        plan_profile *m = &name;                                                                   \
        __VA_ARGS__;                                                                               \
    } while (0)

static const mt_backend *backend;

/* The backend as a device with memory of its own, for plans only. */
static void apart(const void *device, mt_device_info *ret)
{
    backend->info(device, ret);
    ret->unified = 0;
}

/* And as one whose memory is the host's. */
static void together(const void *device, mt_device_info *ret)
{
    backend->info(device, ret);
    ret->unified = 1;
}

/* ---- plans ----------------------------------------------------------------------------------- */

enum { TOKENS = 24, MICRO_BATCHES = 4, STEP_TOKENS = TOKENS * MICRO_BATCHES };

/* Keys of each query of a document of TOKENS tokens, in the mean. */
static const double mean_keys = (TOKENS + 1) / 2.0;

static const plan_request one_group = { .groups = 1, .policy = TPL_KEEP, .max_grad_norm = 1 };

static plan *plan_of(const model *m, plan_request r, const plan_profile *f, bool unified)
{
    void *device;
    plan *p;
    backend = world_backend(&device);
    mt_backend b = *backend;
    b.info = unified ? together : apart;
    r.training = true;
    r.micro_tokens = r.max_seq_len = TOKENS;
    r.micro_batches = MICRO_BATCHES;
    r.micro_documents = 4;
    r.weight_buffers = 2;
    r.device_limit = INT64_MAX / 4;
    r.host_limit = INT64_MAX / 2;
    r.n_states = 2;
    r.states[0] = r.states[1] = (mt_state_spec){ "s", MT_F32 };
    if (plan_create(m, &r, f, &b, device, &p) < 0)
        world_fail("plan_create");
    return p;
}

static const model *small_model(void)
{
    static world w;
    if (!w.m)
        world_model(&(world_options){ .blocks = 6 }, &w);
    return w.m;
}

/* The plan of the small model takes `want` seconds, of which `p` may be asked, and is bound by
 * `bounded`. */
#define TAKES(request, profile, unified, want, bounded)                                            \
    do {                                                                                           \
        plan *p = plan_of(small_model(), (request), &(profile), (unified));                        \
        CHECK(fabs(p->seconds - (want)) < 1e-9 * p->seconds && strcmp(p->bound, bounded) == 0,     \
              "%.12g, not %.12g, bound by %s", p->seconds, want, p->bound);                        \
        plan_destroy(p);                                                                           \
    } while (0)

/* ---- what a step does ------------------------------------------------------------------------ */

/* FLOPs of a step's forward. */
typedef struct work {
    double gemm, attn, scan;
} work;

static work forward_of(const model *m)
{
    work w = { 0 };
    for (int32_t u = 0; u < m->n_units; u++) {
        const tpl *t = m->units[u].t;
        w.gemm += STEP_TOKENS * t->gemm_flops_per_token;
        w.attn += STEP_TOKENS * mean_keys * t->attn_flops_per_pair;
        w.scan += STEP_TOKENS * t->scan_flops_per_token;
    }
    return w;
}

/* And of what backward makes again where units keep their input only. */
static work again_of(const model *m)
{
    work w = { 0 };
    for (int32_t u = 0; u < m->n_units; u++) {
        const tpl *t = m->units[u].t;
        w.gemm += STEP_TOKENS * t->recompute_gemm_flops[TPL_INPUT];
        w.attn += STEP_TOKENS * mean_keys * t->recompute_attn_flops[TPL_INPUT];
        w.scan += STEP_TOKENS * t->recompute_scan_flops[TPL_INPUT];
    }
    return w;
}

/* Bytes that a step's micro-batches save, that a pass brings in, that every group's two passes do
 * (backward of the embedding reads none), and that its gradients have in FP32. */
static double saved_bytes(const plan *p)
{
    double bytes = 0;
    for (int32_t u = 0; u < p->m->n_units; u++)
        bytes += MICRO_BATCHES * (double)p->tpl[u]->saved_bytes;
    return bytes;
}

static double weight_bytes(const plan *p)
{
    double bytes = 0;
    for (int32_t u = 0; u < p->m->n_units; u++)
        bytes += (double)p->tpl[u]->weight_bytes;
    return bytes;
}

static double in_bytes(const plan *p)
{
    double bytes = 0;
    for (int32_t u = 0; u < p->m->n_units; u++)
        bytes += (double)p->tpl[u]->weight_bytes * (u > 0 && u < p->m->n_units - 2 ? 2 : 1);
    /* A group fetches the rows of its own tokens; gradients may have those of the step's. */
    int64_t more = p->tpl[0]->bounds.gather_rows - p->group_batches * p->request.micro_tokens;
    return bytes - (double)((more > 0 ? more : 0) * p->m->units[0].t->params[0].info.cols *
                            mt_dtype_size(p->request.compute));
}

static double grad_bytes(const plan *p)
{
    double bytes = 0;
    for (int32_t u = 0; u < p->m->n_units; u++)
        bytes += (double)p->tpl[u]->grad_bytes;
    return bytes;
}

/* ---- cases ----------------------------------------------------------------------------------- */

/* GEMMs run at nine tenths of the best, attention each way at its own rate. */
static void compute_takes_its_flops(void)
{
    work w = forward_of(small_model()), again = again_of(small_model());
    MACHINE(slow_gemm, m->gemm_flops = 1e9);
    TAKES(one_group, slow_gemm, false, 3 * w.gemm / 0.9e9, "compute");
    MACHINE(slow_attention, m->attn_flops = 1e9, m->attn_backward_flops = 2e9);
    TAKES(one_group, slow_attention, false, w.attn / 1e9 + 2.5 * w.attn / 2e9, "compute");

    plan_request r = one_group;
    r.policy = TPL_INPUT;
    MACHINE(both, m->gemm_flops = m->attn_flops = m->attn_backward_flops = 1e9,
            m->device_bandwidth = 0);
    CHECK(again.gemm > 0 && again.attn > 0, "nothing is made again");
    TAKES(r, both, false, (3 * w.gemm + again.gemm) / 0.9e9 + (3.5 * w.attn + again.attn) / 1e9,
          "compute");
}

static void any_order_has_a_rate_of_its_own(void)
{
    work w = forward_of(small_model());
    plan_request r = one_group;
    MACHINE(f, m->attn_flops = 1e9, m->attn_backward_flops = 2e9, m->attn_any_order = 7e9);
    TAKES(r, f, false, w.attn / 1e9 + 2.5 * w.attn / 2e9, "compute");
    plan *made = plan_of(small_model(), r, &f, false);
    double saves = made->seconds - 3.5 * w.attn / 7e9;
    CHECK(fabs(made->determinism_seconds - saves) < 1e-9 * made->seconds, "%g, not %g",
          made->determinism_seconds, saves);
    plan_destroy(made);
    r.any_order = true;
    TAKES(r, f, false, 3.5 * w.attn / 7e9, "compute");
}

static void a_recurrence_has_a_rate_of_its_own(void)
{
    MACHINE(f, m->scan_flops = 1e9, m->scan_backward_flops = 2e9);
    MACHINE(old, m->gemm_flops = 1e9); /* measured none */
    plan_request r = one_group, input = one_group;
    input.policy = TPL_INPUT;
    world w;
    world_model(&(world_options){ .plugin = "qwen", .manifest = "qwen3_next" }, &w);
    work once = forward_of(w.m), again = again_of(w.m);
    CHECK(once.scan > 0 && again.scan == once.scan, "%g %g", once.scan, again.scan);
    const struct {
        const plan_request *r;
        const plan_profile *f;
        double want;
    } kind[] = { { &r, &f, once.scan / 1e9 + 2 * once.scan / 2e9 },
                 { &r, &old, 3 * (once.scan + once.gemm) / 0.9e9 },
                 { &input, &f, once.scan / 1e9 + 2 * once.scan / 2e9 + again.scan / 1e9 } };
    for (int i = 0; i < 3; i++) {
        plan *p = plan_of(w.m, *kind[i].r, kind[i].f, false);
        CHECK(fabs(p->seconds - kind[i].want) < 1e-9 * p->seconds &&
                  strcmp(p->bound, "compute") == 0,
              "%d: %.12g, not %.12g, bound by %s", i, p->seconds, kind[i].want, p->bound);
        plan_destroy(p);
    }
    world_close(&w);
}

/* What operations and the sums of gradients read and write on the device. */
static void device_memory_bounds_compute(void)
{
    plan_request r = one_group;
    MACHINE(f, m->device_bandwidth = 1e9);
    plan *kept = plan_of(small_model(), r, &f, false);
    double saved = saved_bytes(kept), sums = (2 * MICRO_BATCHES - 1) * grad_bytes(kept);
    plan_destroy(kept);
    TAKES(r, f, false, (4.5 * saved + sums) / 1e9, "compute");
    r.policy = TPL_INPUT;
    TAKES(r, f, false, (4.5 * saved + sums + 2 * (saved - saved_bytes(p))) / 1e9, "compute");
}

static void copies_go_group_by_group(void)
{
    plan_request r = one_group;
    MACHINE(slow_in, m->copy_in = 1e9);
    MACHINE(slow_out, m->copy_out = 1e9);
    TAKES(r, slow_in, false, in_bytes(p) / 1e9, "copy-in");
    r.gradients = PLAN_GRADIENTS_HELD;
    TAKES(r, slow_out, false, grad_bytes(p) / 1e9, "copy-out");
    r.groups = 4;
    r.gradients = PLAN_GRADIENTS_HOST;
    TAKES(r, slow_out, false, 4 * grad_bytes(p) / 1e9, "copy-out");
    r.gradients = PLAN_GRADIENTS_DEVICE;
    r.gradient_dtype = MT_BF16;
    TAKES(r, slow_out, false, grad_bytes(p) / 2 / 1e9, "copy-out");
}

/* What a copied byte takes of what the workers reach. */
static const double share = 2.0 / 3;

/* Copies and the optimizer pull at host memory together; sums of groups add theirs. */
static void host_memory_is_shared(void)
{
    double params = (double)small_model()->total_params;
    plan_request r = one_group;
    MACHINE(f, m->host_bandwidth = 1e9);
    r.groups = 4;
    r.gradients = PLAN_GRADIENTS_DEVICE;
    r.gradient_dtype = MT_BF16;
    TAKES(r, f, false, (26 * params + share * (4 * in_bytes(p) + grad_bytes(p) / 2)) / 1e9,
          "host memory");
    r.gradient_dtype = MT_F32;
    r.gradients = PLAN_GRADIENTS_HOST;
    TAKES(r, f, false,
          (28 * params + share * 4 * (in_bytes(p) + grad_bytes(p)) + 3 * 12 * grad_bytes(p) / 4) /
              1e9,
          "host memory");
}

/* A step with 3 s of compute, and host memory with which the optimizer takes 1.8 s. */
static plan_profile three_seconds(void)
{
    MACHINE(f, m->gemm_flops = forward_of(small_model()).gemm / 0.9,
            m->host_bandwidth = (double)small_model()->total_params * 28 / 1.8);
    return f;
}

/* With clipping only the first forward hides the optimizer. */
static void clipping_leaves_one_forward_to_hide_behind(void)
{
    plan_profile f = three_seconds();
    double bandwidth = f.host_bandwidth / share;
    plan_request r = one_group;
    TAKES(r, f, false, 1.8 + weight_bytes(p) / bandwidth + 2.0, "compute");
    plan *made = plan_of(small_model(), r, &f, false);
    CHECK(fabs(made->optimizer_seconds - 1.8) < 1e-9 && fabs(made->compute_seconds - 3) < 1e-9,
          "%g, %g", made->optimizer_seconds, made->compute_seconds);
    plan_destroy(made);
    /* Gradients that were held until then leave beside it. */
    r.gradients = PLAN_GRADIENTS_HELD;
    TAKES(r, f, false, 1.8 + (weight_bytes(p) + grad_bytes(p)) / bandwidth + 2.0, "host memory");
}

/* Without it the last backward hides the optimizer as well, but never the groups between. */
static void without_clipping_two_passes_hide_the_optimizer(void)
{
    plan_profile f = three_seconds();
    plan_request r = one_group;
    r.max_grad_norm = 0;
    TAKES(r, f, false, 3.0, "compute");
    r.groups = 4;
    r.gradients = PLAN_GRADIENTS_DEVICE;
    TAKES(r, f, false, 0.75 * 3.0 + 1.8 + share * (in_bytes(p) + grad_bytes(p)) / f.host_bandwidth,
          "host memory");
}

static void on_a_device_that_is_the_host_all_takes_turns(void)
{
    plan_profile f = three_seconds();
    plan_request r = one_group;
    r.max_grad_norm = 0;
    r.gradients = PLAN_GRADIENTS_DEVICE;
    TAKES(r, f, true, 3.0 + 1.8, "compute");
}

int main(void)
{
    RUN(compute_takes_its_flops);
    RUN(any_order_has_a_rate_of_its_own);
    RUN(a_recurrence_has_a_rate_of_its_own);
    RUN(device_memory_bounds_compute);
    RUN(copies_go_group_by_group);
    RUN(host_memory_is_shared);
    RUN(clipping_leaves_one_forward_to_hide_behind);
    RUN(without_clipping_two_passes_hide_the_optimizer);
    RUN(on_a_device_that_is_the_host_all_takes_turns);
    return check_done();
}
