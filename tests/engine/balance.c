/* SPDX-License-Identifier: Apache-2.0
 *
 * Routers' biases that move after each step so that experts get as many tokens.
 */
#include "world.h"

#include "../check.h"

#include <math.h>

enum { EXPERTS = 16, PICKS = 2, LAYERS = 2 };
static const double rate = 0.01;

static world_options options(double bias_rate)
{
    world_options o = { .plugin = "deepseek",
                        .manifest = "deepseek_v3",
                        .router_bias_rate = bias_rate };
    o.request.training = true;
    return o;
}

/* The bias of the layer-th of the layers with experts. */
static const model_param *bias_of(const world *w, int layer)
{
    int found = 0;
    for (int32_t u = 0; u < w->m->n_units; u++) {
        const model_unit *unit = &w->m->units[u];
        if (unit->t->bias_slot >= 0 && found++ == layer)
            return &w->m->params[unit->slot[unit->t->bias_slot]];
    }
    CHECK(false, "layer %d has no bias", layer);
    exit(1);
}

static float get(const world *w, const model_param *p, int64_t i)
{
    const store_unit *u = &w->s->units[p->unit];
    return mt_join_f32(u->hi[p->offset + i], u->lo[p->offset + i]);
}

static void set(const world *w, const model_param *p, int64_t i, float x)
{
    store_unit *u = &w->s->units[p->unit];
    mt_split_f32(x, &u->hi[p->offset + i], &u->lo[p->offset + i]);
}

static engine_result step(world *w, int i, double lr, int32_t vocab)
{
    step_batch *b = world_batch((uint64_t)i, 3 + i % 2, 24 - i % 2 * 5, 3, vocab);
    engine_result r = world_step(w, b, i, lr);
    if (engine_drain(w->e) < 0)
        world_fail("engine_drain");
    world_batch_free(b);
    return r;
}

/* All tokens of one word go to the same two experts. */
static void busy_experts_go_down_and_others_up(void)
{
    world_options o = options(rate);
    world w;
    world_open(&o, &w);
    engine_result r = step(&w, 1, 1e-3, 1);
    CHECK(fabs(r.router_violation - (EXPERTS / PICKS - 1)) < 1e-12, "%g", r.router_violation);
    for (int layer = 0; layer < LAYERS; layer++) {
        int down = 0, up = 0;
        for (int k = 0; k < EXPERTS; k++) {
            float x = get(&w, bias_of(&w, layer), k);
            down += x == -(float)rate;
            up += x == (float)rate;
        }
        CHECK(down == PICKS && up == EXPERTS - PICKS, "layer %d: %d down, %d up", layer, down, up);
    }
    world_close(&w);
}

/* Two experts of each layer are preferred so much that all tokens take them, and nothing else
 * learns. */
static double last_violation(double bias_rate)
{
    world_options o = options(bias_rate);
    world w;
    double last = NAN;
    world_open(&o, &w);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int k = 0; k < PICKS; k++)
            set(&w, bias_of(&w, layer), k, 0.2f);
    for (int i = 1; i <= 150; i++) {
        engine_result r = step(&w, 1, 0, WORLD_VOCAB); /* the same batch again */
        CHECK(i > 1 || r.router_violation == EXPERTS / PICKS - 1, "%g", r.router_violation);
        last = r.router_violation;
    }
    world_close(&w);
    return last;
}

static void an_unbalanced_router_becomes_balanced(void)
{
    double moved = last_violation(rate / 5), stayed = last_violation(0);
    CHECK(stayed == EXPERTS / PICKS - 1, "%g", stayed);
    CHECK(moved < 1, "%g", moved);
}

typedef struct outcome {
    uint64_t hash;
    double loss, norm, violation;
} outcome;

static outcome train(const world_options *o, int steps)
{
    outcome r = { 0 };
    world w;
    world_open(o, &w);
    for (int i = 1; i <= steps; i++) {
        engine_result s = step(&w, i, 2e-3, WORLD_VOCAB);
        r.loss += s.loss_sum;
        r.norm += s.grad_norm;
        r.violation += s.router_violation;
    }
    r.hash = store_hash(w.s);
    world_close(&w);
    return r;
}

/* The tokens of a step count, not how they are cut, streamed or summed. */
static void all_ways_move_biases_alike(void)
{
    static const plan_gradients place[] = { PLAN_GRADIENTS_HOST, PLAN_GRADIENTS_HELD };
    for (int clip = 0; clip < 2; clip++) {
        world_options o = options(rate);
        o.serial = true;
        o.request.max_grad_norm = clip ? 0.5 : -1;
        outcome want = train(&o, 4), other;
        for (int mode = 0; mode < 8; mode++) {
            world_options m = o;
            m.serial = false;
            m.chaos = (uint64_t)mode + 1;
            m.request.policy = mode % TPL_POLICIES;
            m.request.segment_bytes = mode & 1;
            m.request.groups = 1 + (mode >> 1 & 1);
            m.request.gradients = m.request.groups > 1 ? PLAN_GRADIENTS_DEVICE : place[mode >> 2];
            other = train(&m, 4);
            CHECK(other.hash == want.hash && other.loss == want.loss &&
                      other.violation == want.violation && (!clip || other.norm == want.norm),
                  "mode %d", mode);
        }
        o.router_bias_rate = 0;
        other = train(&o, 4);
        CHECK(other.hash != want.hash && other.loss != want.loss);
    }
}

/* A step is over when biases move: nothing else in it differs from a run in which they stay. */
static void nothing_else_knows(void)
{
    for (int clip = 0; clip < 2; clip++) {
        world_options o = options(0);
        world stays, moves;
        o.request.max_grad_norm = clip ? 0.5 : -1;
        world_open(&o, &stays);
        o.router_bias_rate = rate;
        world_open(&o, &moves);
        engine_result x = step(&stays, 1, 2e-3, WORLD_VOCAB),
                      y = step(&moves, 1, 2e-3, WORLD_VOCAB);
        CHECK(x.loss_sum == y.loss_sum && (!clip || x.grad_norm == y.grad_norm));
        CHECK(store_hash(stays.s) != store_hash(moves.s));
        for (int layer = 0; layer < LAYERS; layer++)
            for (int k = 0; k < EXPERTS; k++) {
                CHECK(get(&stays, bias_of(&stays, layer), k) == 0);
                set(&moves, bias_of(&moves, layer), k, 0);
            }
        CHECK(store_hash(stays.s) == store_hash(moves.s));
        world_close(&stays);
        world_close(&moves);
    }
}

static void biases_stay_where_nothing_may_change(void)
{
    world_options o = options(rate);
    world w;
    world_open(&o, &w);
    w.m->params[bias_of(&w, 0) - w.m->params].pinned = true;
    step(&w, 1, 1e-3, WORLD_VOCAB);
    float before = get(&w, bias_of(&w, 1), 0);
    CHECK(fabsf(before) == (float)rate, "%g", before);
    CHECK(get(&w, bias_of(&w, 0), 0) == 0, "a pinned bias moved");
    set(&w, &w.m->params[model_find_param(w.m, "lm_head.weight")], 0, INFINITY);
    w.s->version++;
    engine_result r = step(&w, 2, 1e-3, WORLD_VOCAB);
    CHECK(!r.updated);
    CHECK(get(&w, bias_of(&w, 1), 0) == before, "a step that changed nothing moved a bias");
    world_close(&w);
}

/* Which experts of the last layer a word goes to in BF16: bit k for expert k. Its router's rows are
 * zero but for those of experts 5 and 9, `sign` everywhere, which differ in one small element by
 * its last bit of BF16; expert 0 is always taken. */
static uint32_t picks_between_neighbours(float sign, float element)
{
    enum { UP = 5, DOWN = 9, AT = 3 };
    world_options o = options(rate);
    world w;
    float row[EXPERTS][WORLD_HIDDEN] = { 0 };
    uint32_t down = 0;
    o.request.compute = MT_BF16;
    world_open(&o, &w);
    for (int i = 0; i < WORLD_HIDDEN; i++)
        row[UP][i] = row[DOWN][i] = sign * (i & 1 ? 1.0f : 0.25f);
    row[UP][AT] = 0.0625f;
    row[DOWN][AT] = element;
    store_set(w.s, model_find_param(w.m, "model.layers.2.mlp.gate.weight"), 0,
              EXPERTS * WORLD_HIDDEN, row[0]);
    set(&w, bias_of(&w, 1), 0, 1);
    step(&w, 1, 0, 1);
    for (int k = 0; k < EXPERTS; k++)
        down |= (uint32_t)(get(&w, bias_of(&w, 1), k) == (k ? 0.0f : 1.0f) - (float)rate) << k;
    world_close(&w);
    return down;
}

/* As in the released training code: what BF16 would round to the same logit is not the same. */
static void logits_are_compared_in_fp32(void)
{
    int fifth = 0, ninth = 0;
    for (float sign = -1; sign <= 1; sign += 2)
        for (int more = -1; more <= 1; more += 2) {
            uint32_t picks = picks_between_neighbours(sign, 0.0625f + (float)more * 0x1p-11f);
            CHECK(picks & 1, "%x", picks);
            fifth += picks >> 5 & 1u;
            ninth += picks >> 9 & 1u;
        }
    CHECK(fifth == 1 && ninth == 1, "%d, %d", fifth, ninth);
}

int main(void)
{
    RUN(busy_experts_go_down_and_others_up);
    RUN(an_unbalanced_router_becomes_balanced);
    RUN(all_ways_move_biases_alike);
    RUN(nothing_else_knows);
    RUN(logits_are_compared_in_fp32);
    RUN(biases_stay_where_nothing_may_change);
    return check_done();
}
