/* SPDX-License-Identifier: Apache-2.0
 *
 * The small world.
 */
#include "world.h"

#include "../plugin.h"
#include "core/base/log.h"
#include "core/base/status.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void world_fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, status_text());
    exit(1);
}

/* ---- backend --------------------------------------------------------------------------------- */

int32_t world_threads = 2;

const mt_backend *world_backend(void **ret_device)
{
    static const mt_backend *backend;
    static void *device;
    if (!backend) {
        backend = plugin_interface(getenv("MT_TEST_CPU_PLUGIN"), MT_BACKEND_INTERFACE);
        if (backend->open(0, world_threads, &device) < 0)
            world_fail("cannot open the CPU device");
    }
    *ret_device = device;
    return backend;
}

/* The same backend, whose attention holds the compute queue up first: what must overlap with
 * compute then has the time to, on a busy machine too. */
static uint64_t slow_ns;
static const mt_backend *fast;
static const mt_kernel *fast_attention;

static void slow_attention(void *device, void *queue, const mt_op_call *call)
{
    fast->delay(device, queue, slow_ns);
    fast_attention->forward(device, queue, call);
}

static const mt_kernel *slow_kernel(const void *device, const char *op)
{
    static mt_kernel k;
    const mt_kernel *real = fast->kernel(device, op);
    if (!real || strcmp(op, "attention") != 0)
        return real;
    fast_attention = real;
    k = *real;
    k.forward = slow_attention;
    return &k;
}

static void info_apart(const void *device, mt_device_info *ret)
{
    fast->info(device, ret);
    ret->unified = 0;
}

static const mt_backend *backend_for(const world_options *o, void **ret_device)
{
    static mt_backend changed;
    fast = world_backend(ret_device);
    changed = *fast;
    slow_ns = o->slow_ns;
    if (slow_ns)
        changed.kernel = slow_kernel;
    if (o->apart)
        changed.info = info_apart;
    return slow_ns || o->apart ? &changed : fast;
}

/* ---- model ----------------------------------------------------------------------------------- */

struct world_config {
    mt_config base; /* nothing in it: the fields below say everything */
    bool tied, frozen_norms, tables;
    int32_t hidden, blocks, vocab, wide;
    const char *only;
};

static uint32_t frozen(const struct world_config *c, const char *name)
{
    return c->only && strcmp(c->only, name) != 0 ? MT_PARAM_FROZEN : 0;
}

static mt_val matrix(mt_builder *b, const struct world_config *c, const char *name, int64_t rows,
                     int64_t cols, double std)
{
    mt_param_info p = { .struct_size = sizeof p,
                        .flags = frozen(c, name),
                        .name = name,
                        .rows = rows,
                        .cols = cols,
                        .init = MT_INIT_NORMAL,
                        .init_std = (float)std };
    return b->api->param(b, &p);
}

static mt_val bias(mt_builder *b, const struct world_config *c, const char *name, int64_t n)
{
    mt_param_info p = { .struct_size = sizeof p,
                        .flags = MT_PARAM_NO_DECAY | frozen(c, name),
                        .name = name,
                        .cols = n,
                        .init = MT_INIT_ZEROS };
    return b->api->param(b, &p);
}

static mt_val norm(mt_builder *b, const struct world_config *c, mt_val x, const char *name)
{
    mt_param_info p = { .struct_size = sizeof p,
                        .flags = MT_PARAM_NO_DECAY | frozen(c, name),
                        .name = name,
                        .cols = c->hidden,
                        .init = MT_INIT_ONES };
    if (c->frozen_norms)
        p.flags |= MT_PARAM_FROZEN;
    return mt_rmsnorm(b, x, b->api->param(b, &p), &(mt_rmsnorm_attr){ .eps = 1e-5, .heads = 1 });
}

static mt_status build_embed(mt_builder *b, const void *arch, const void *arg)
{
    const struct world_config *c = arch;
    (void)arg;
    mt_val x = mt_embedding(b, matrix(b, c, "embed.weight", c->vocab, c->hidden, 0.5));
    if (c->wide) {
        mt_val w = mt_embedding(b, matrix(b, c, "wide.weight", c->vocab, c->wide, 0.5));
        double std = 1 / sqrt((double)c->wide);
        x = mt_add(
            b, x, mt_linear(b, w, matrix(b, c, "narrow.weight", c->hidden, c->wide, std), MT_NONE));
    }
    mt_output(b, 0, x);
    return MT_OK;
}

static mt_status build_block(mt_builder *b, const void *arch, const void *arg)
{
    const struct world_config *c = arch;
    (void)arg;
    int32_t h = c->hidden, heads = 4, kv = 2, dim = h / heads, inner = h * 3 / 2;
    double std = 0.7 / sqrt((double)h);
    mt_rope_attr rope = { .head_dim = dim, .rotary_dim = dim, .attention_factor = 1.0f };
    for (int i = 0; i < dim / 2; i++)
        rope.inv_freq[i] = powf(100.0f, -2.0f * (float)i / (float)dim);
    mt_val in = mt_input(b, 0, h);
    if (c->tables)
        in = mt_add(b, in, mt_embedding(b, matrix(b, c, "table.weight", c->vocab, h, 0.1)));
    mt_val x = norm(b, c, in, "norm1.weight");
    mt_val q = mt_linear(b, x, matrix(b, c, "q.weight", h, h, std), MT_NONE);
    mt_val k = mt_linear(b, x, matrix(b, c, "k.weight", kv * dim, h, std), MT_NONE);
    mt_val v =
        mt_linear(b, x, matrix(b, c, "v.weight", kv * dim, h, std), bias(b, c, "v.bias", kv * dim));
    mt_attn_attr attn = { .heads = heads,
                          .kv_heads = kv,
                          .qk_dim = dim,
                          .v_dim = dim,
                          .scale = 1.0 / sqrt((double)dim) };
    mt_val a =
        mt_attention(b, mt_rope(b, q, &rope, heads), mt_rope(b, k, &rope, kv), v, MT_NONE, &attn);
    x = mt_add(b, in, mt_linear(b, a, matrix(b, c, "o.weight", h, h, std), MT_NONE));
    mt_val y = norm(b, c, x, "norm2.weight");
    mt_val gate = mt_linear(b, y, matrix(b, c, "gate.weight", inner, h, std), MT_NONE);
    mt_val up = mt_linear(b, y, matrix(b, c, "up.weight", inner, h, std), MT_NONE);
    mt_val g = mt_glu(b, gate, up, &(mt_act_attr){ .kind = MT_ACT_SILU });
    mt_output(b, 0,
              mt_add(b, x, mt_linear(b, g, matrix(b, c, "down.weight", h, inner, std), MT_NONE)));
    return MT_OK;
}

static mt_status build_head(mt_builder *b, const void *arch, const void *arg)
{
    const struct world_config *c = arch;
    (void)arg;
    mt_val x = norm(b, c, mt_input(b, 0, c->hidden), "norm.weight");
    mt_val w = c->tied ? mt_alias(b, "embed.weight", c->vocab, c->hidden)
                       : matrix(b, c, "head.weight", c->vocab, c->hidden, 0.2);
    mt_output(b, 0, mt_linear_cross_entropy(b, x, w, &(mt_xent_attr){ 0 }));
    return MT_OK;
}

static mt_status configure(const mt_config *hyper, mt_model *m, void **ret)
{
    const struct world_config *c = (const struct world_config *)hyper;
    int32_t embed = mt_add_template(m, "embed", build_embed, NULL);
    int32_t block = mt_add_template(m, "block", build_block, NULL);
    int32_t head = mt_add_template(m, "head", build_head, NULL);
    mt_add_unit(m, "embed", embed, "");
    for (int32_t i = 0; i < c->blocks; i++) {
        char name[32], prefix[32];
        snprintf(name, sizeof name, "block.%d", i);
        snprintf(prefix, sizeof prefix, "layers.%d.", i);
        mt_add_unit(m, name, block, prefix);
    }
    mt_add_unit(m, "head", head, "");
    m->api->set_vocab(m, c->vocab);
    m->api->set_max_positions(m, 4096);
    *ret = (void *)c;
    return MT_OK;
}

static void destroy(void *arch)
{
    (void)arch;
}

static void open_manifest(const world_options *o, world *ret)
{
    const char *plugins = getenv("MT_TEST_PLUGINS"), *models = getenv("MT_TEST_MODELS");
    char path[1024];
    *ret = (world){ 0 };
    snprintf(path, sizeof path, "%s/%s.so", plugins ? plugins : ".", o->plugin);
    const mt_arch *arch = plugin_interface(path, MT_ARCH_INTERFACE);
    snprintf(path, sizeof path, "%s/%s.yaml", models ? models : ".", o->manifest);
    if (model_source_open(path, &ret->source) < 0 ||
        model_create(arch, ret->source.hyper, &ret->m) < 0)
        world_fail(path);
}

void world_model(const world_options *o, world *ret)
{
    if (o->manifest) {
        open_manifest(o, ret);
        return;
    }
    static const char *const types[] = { "world" };
    static const mt_arch arch = { sizeof arch, 1, types, configure, destroy };
    struct world_config *c = calloc(1, sizeof *c);
    if (!c)
        world_fail("config");
    c->base.struct_size = sizeof c->base;
    c->tied = o->tied;
    c->tables = o->tables;
    c->wide = o->wide;
    c->only = o->only;
    c->frozen_norms = o->frozen_norms;
    c->hidden = o->hidden ? o->hidden : WORLD_HIDDEN;
    c->blocks = o->blocks ? o->blocks : WORLD_BLOCKS;
    c->vocab = o->vocab ? o->vocab : WORLD_VOCAB;
    *ret = (world){ .config = c };
    if (model_create(&arch, &c->base, &ret->m) < 0)
        world_fail("model_create");
}

/* ---- optimizer ------------------------------------------------------------------------------- */

static uint64_t slow_update_ns;
static _Atomic int64_t updates_left; /* before they fail */

static mt_status update(const void *optim, const mt_update *u)
{
    struct timespec t = { (time_t)(slow_update_ns / 1000000000),
                          (long)(slow_update_ns % 1000000000) };
    (void)optim;
    if (slow_update_ns)
        nanosleep(&t, NULL);
    if (updates_left-- <= 0)
        return status_set(MT_ERR_INTERNAL, "the optimizer is out of ink");
    float *m = u->state[0], *v = u->state[1];
    double c1 = 1 - pow(0.9, (double)u->step), c2 = 1 - pow(0.99, (double)u->step);
    for (int64_t i = 0; i < u->n; i++) {
        float w = mt_join_f32(u->hi[i], u->lo[i]);
        float g = (float)(u->grad[i] * u->grad_scale);
        m[i] += 0.1f * (g - m[i]);
        v[i] += 0.01f * (g * g - v[i]);
        double decay = u->flags & MT_PARAM_NO_DECAY ? 0 : 0.01;
        w -= (float)(u->lr * (m[i] / c1 / (sqrt(v[i] / c2) + 1e-6) + decay * w));
        mt_split_f32(w, &u->hi[i], &u->lo[i]);
    }
    return MT_OK;
}

static uint32_t state_specs(const void *optim, mt_state_spec *ret)
{
    (void)optim;
    ret[0] = (mt_state_spec){ "m", MT_F32 };
    ret[1] = (mt_state_spec){ "v", MT_F32 };
    return 2;
}

static const mt_optim adam = { .struct_size = sizeof adam,
                               .granularity = MT_GRAIN_ELEMENT,
                               .state_specs = state_specs,
                               .update = update };

/* The same with gradients divided by their norm, row by row or in the whole tensor. */
static mt_status update_normalized(const mt_update *u, int64_t group)
{
    if (u->first % group || u->n % group)
        return status_set(MT_ERR_INVALID, "elements %lld to %lld of groups of %lld",
                          (long long)u->first, (long long)(u->first + u->n), (long long)group);
    for (int64_t at = 0; at < u->n; at += group) {
        double sum = 1e-12;
        for (int64_t i = at; i < at + group; i++)
            sum += (double)u->grad[i] * u->grad[i];
        mt_update part = *u;
        part.first += at;
        part.n = group;
        part.hi += at;
        part.lo += at;
        part.grad += at;
        part.state[0] = (float *)u->state[0] + at;
        part.state[1] = (float *)u->state[1] + at;
        part.grad_scale /= sqrt(sum);
        mt_status st = update(NULL, &part);
        if (st < 0)
            return st;
    }
    return MT_OK;
}

static mt_status update_rows(const void *optim, const mt_update *u)
{
    (void)optim;
    return update_normalized(u, u->cols);
}

static mt_status update_tensors(const void *optim, const mt_update *u)
{
    (void)optim;
    return update_normalized(u, u->rows * u->cols);
}

static const mt_optim *optim_for(mt_granularity grain)
{
    static mt_optim coarse;
    coarse = adam;
    coarse.granularity = grain;
    coarse.update = grain == MT_GRAIN_ROW ? update_rows : update_tensors;
    return grain == MT_GRAIN_ELEMENT ? &adam : &coarse;
}

/* ---- engine ---------------------------------------------------------------------------------- */

mt_status world_plan(const world_options *o, const model *m, plan **ret)
{
    void *device;
    const mt_backend *b = backend_for(o, &device);
    plan_request r = o->request;
    plan_profile f = { 1e11, 5e10, 1e10, 1e10, 1e10, 5e10, 0, 0, 0, 0 };
    if (r.micro_tokens == 0)
        r.micro_tokens = 24;
    if (r.micro_batches == 0)
        r.micro_batches = 4;
    if (r.micro_documents == 0)
        r.micro_documents = 4;
    if (r.max_seq_len == 0)
        r.max_seq_len = r.micro_tokens;
    if (r.groups == 0)
        r.groups = 1;
    if (r.weight_buffers == 0)
        r.weight_buffers = 2;
    if (r.device_limit == 0)
        r.device_limit = INT64_MAX / 4;
    if (r.host_limit == 0)
        r.host_limit = INT64_MAX / 2;
    if (r.max_grad_norm == 0)
        r.max_grad_norm = 1;
    if (r.max_grad_norm < 0)
        r.max_grad_norm = 0;
    r.workers = o->threads ? o->threads : 2;
    r.grain = o->grain;
    if (r.training)
        r.n_states = state_specs(NULL, r.states);
    return plan_create(m, &r, &f, b, device, ret);
}

mt_status world_try(const world_options *o, world *ret)
{
    void *device;
    const mt_backend *b = backend_for(o, &device);
    slow_update_ns = o->slow_update_ns;
    updates_left = o->good_updates ? o->good_updates : INT64_MAX / 2;
    world_model(o, ret);
    if (world_plan(o, ret->m, &ret->p) < 0)
        world_fail("plan_create");
    const plan_request *r = &ret->p->request;
    if (store_create(ret->m, r->states, r->n_states, plan_needs_grad_plane(ret->p), b, device,
                     &ret->s) < 0)
        world_fail("store_create");
    store_init_random(ret->s, o->seed + 1);
    engine_config c = { .plan = ret->p,
                        .store = ret->s,
                        .backend = b,
                        .device = device,
                        .optim = optim_for(o->grain),
                        .router_bias_rate = o->router_bias_rate,
                        .serial = o->serial,
                        .chaos = o->chaos,
                        .trace_path = o->trace };
    return engine_create(&c, &ret->e);
}

void world_open(const world_options *o, world *ret)
{
    if (world_try(o, ret) < 0)
        world_fail("engine_create");
}

void world_close(world *w)
{
    engine_destroy(w->e);
    store_destroy(w->s);
    plan_destroy(w->p);
    model_destroy(w->m);
    if (w->source.config)
        model_source_close(&w->source);
    free(w->config);
}

/* ---- batches --------------------------------------------------------------------------------- */

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static void micro_alloc(micro_batch *mb, int64_t tokens, int64_t documents)
{
    *mb = (micro_batch){ .tokens = tokens, .documents = documents };
    mb->ids = calloc((size_t)tokens, 4);
    mb->targets = calloc((size_t)tokens, 4);
    mb->positions = calloc((size_t)tokens, 4);
    mb->doc_starts = calloc((size_t)documents + 1, 4);
    if (!mb->ids || !mb->targets || !mb->positions || !mb->doc_starts)
        world_fail("batch");
}

static void count(step_batch *b)
{
    b->tokens = b->n_targets = 0;
    for (int64_t k = 0; k < b->n; k++) {
        micro_batch *mb = &b->micro[k];
        mb->n_targets = mb->max_document = 0;
        for (int64_t d = 0; d < mb->documents; d++) {
            int32_t n = mb->doc_starts[d + 1] - mb->doc_starts[d];
            mb->max_document = n > mb->max_document ? n : mb->max_document;
            for (int32_t t = 0; t < n; t++)
                mb->positions[mb->doc_starts[d] + t] = t;
        }
        for (int64_t t = 0; t < mb->tokens; t++)
            mb->n_targets += mb->targets[t] != -100;
        b->tokens += mb->tokens;
        b->n_targets += mb->n_targets;
    }
}

static step_batch *batch_alloc(int64_t n)
{
    step_batch *b = calloc(1, sizeof *b);
    if (!b)
        world_fail("batch");
    b->n = n;
    b->micro = calloc((size_t)n, sizeof *b->micro);
    if (!b->micro)
        world_fail("batch");
    return b;
}

step_batch *world_batch(uint64_t seed, int64_t n, int64_t tokens, int64_t documents, int32_t vocab)
{
    uint64_t rng = seed * 77 + 5;
    step_batch *b = batch_alloc(n);
    for (int64_t k = 0; k < n; k++) {
        micro_batch *mb = &b->micro[k];
        micro_alloc(mb, tokens, documents);
        for (int64_t t = 0; t < tokens; t++) {
            mb->ids[t] = (int32_t)(draw(&rng) % (uint32_t)vocab);
            mb->targets[t] = draw(&rng) % 8 ? (int32_t)(draw(&rng) % (uint32_t)vocab) : -100;
        }
        /* Documents of unequal, at least one token's length. */
        for (int64_t d = 1; d < documents; d++) {
            int64_t least = mb->doc_starts[d - 1] + 1, most = tokens - (documents - d);
            int64_t even = tokens * d / documents + (int64_t)(draw(&rng) % 5) - 2;
            even = even < least ? least : even > most ? most : even;
            mb->doc_starts[d] = (int32_t)even;
        }
        mb->doc_starts[documents] = (int32_t)tokens;
    }
    count(b);
    return b;
}

step_batch *world_recut(const step_batch *b, const int64_t *documents, int64_t n)
{
    step_batch *r = batch_alloc(n);
    int64_t from = 0, doc = 0; /* micro-batch of b, document in it */
    for (int64_t k = 0; k < n; k++) {
        int64_t tokens = 0, f = from, d = doc;
        for (int64_t i = 0; i < documents[k]; i++) {
            tokens += b->micro[f].doc_starts[d + 1] - b->micro[f].doc_starts[d];
            if (++d == b->micro[f].documents) {
                d = 0;
                f++;
            }
        }
        micro_batch *mb = &r->micro[k];
        micro_alloc(mb, tokens, documents[k]);
        for (int64_t i = 0, at = 0; i < documents[k]; i++) {
            const micro_batch *src = &b->micro[from];
            int32_t first = src->doc_starts[doc], len = src->doc_starts[doc + 1] - first;
            memcpy(mb->ids + at, src->ids + first, (size_t)len * 4);
            memcpy(mb->targets + at, src->targets + first, (size_t)len * 4);
            at += len;
            mb->doc_starts[i + 1] = (int32_t)at;
            if (++doc == src->documents) {
                doc = 0;
                from++;
            }
        }
    }
    count(r);
    return r;
}

void world_batch_free(step_batch *b)
{
    for (int64_t k = 0; k < b->n; k++) {
        free(b->micro[k].ids);
        free(b->micro[k].targets);
        free(b->micro[k].positions);
        free(b->micro[k].doc_starts);
    }
    free(b->micro);
    free(b);
}

engine_result world_step(world *w, const step_batch *b, int64_t i, double lr)
{
    engine_step_params p = { i, lr, w->p->request.max_grad_norm };
    engine_result r = { 0 };
    if (engine_step(w->e, b, &p, &r) < 0)
        world_fail("engine_step");
    return r;
}

void world_add(world_outcome *sum, const engine_result *r)
{
    sum->loss += r->loss_sum;
    sum->aux_loss += r->aux_loss_sum;
    sum->norm += r->grad_norm;
}

void world_hash(world *w, world_outcome *ret)
{
    if (engine_drain(w->e) < 0)
        world_fail("engine_drain");
    ret->hash = store_hash(w->s);
}

static bool same(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

bool world_same(const world_outcome *a, const world_outcome *b)
{
    return a->hash == b->hash && same(a->loss, b->loss) && same(a->aux_loss, b->aux_loss) &&
           same(a->norm, b->norm);
}

const char *world_compare(const world_outcome *got, const world_outcome *want)
{
    static char text[512];
    snprintf(text, sizeof text,
             "loss %.17g, auxiliary %.17g, norm %.17g, hash %llx; not %.17g, %.17g, %.17g, %llx",
             got->loss, got->aux_loss, got->norm, (unsigned long long)got->hash, want->loss,
             want->aux_loss, want->norm, (unsigned long long)want->hash);
    return text;
}

double world_loss(world *w, const step_batch *b)
{
    double loss;
    if (engine_eval(w->e, b, &loss) < 0)
        world_fail("engine_eval");
    return loss;
}

int64_t world_offset(const world *w, int32_t param)
{
    int64_t at = 0;
    for (int32_t i = 0; i < param; i++)
        at += w->m->params[i].elems;
    return at;
}

float *world_gradients(world *w, const step_batch *b, double *ret_loss)
{
    float *all = calloc((size_t)w->m->total_params, sizeof *all);
    float **part = calloc((size_t)w->m->n_params, sizeof *part);
    if (!all || !part)
        world_fail("gradients");
    for (int32_t i = 0; i < w->m->n_params; i++)
        part[i] = all + world_offset(w, i);
    if (engine_gradients(w->e, b, ret_loss, NULL, part) < 0)
        world_fail("engine_gradients");
    free(part);
    return all;
}
