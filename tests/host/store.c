/* SPDX-License-Identifier: Apache-2.0
 *
 * The host store: exact masters, planes that do not overlap, initialisation and hashing.
 */
#include "../engine/world.h"

#include "../check.h"
#include "core/base/status.h"

#include <math.h>

typedef struct fixture {
    world w;
    store *s;
} fixture;

static void open_store(fixture *f, bool grad_plane)
{
    static const mt_state_spec states[] = { { "m", MT_F32 }, { "q", MT_I8 } };
    void *device;
    const mt_backend *b = world_backend(&device);
    world_model(&(world_options){ .tied = true }, &f->w);
    if (store_create(f->w.m, states, 2, grad_plane, b, device, &f->s) < 0)
        world_fail("store_create");
}

static void close_store(fixture *f)
{
    store_destroy(f->s);
    f->s = NULL;
    world_close(&f->w);
}

static void masters_are_exact(void)
{
    static const uint32_t bits[] = { 0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff,
                                     0x3f800000, 0x3f808000, 0x3f818000, 0x3f807fff, 0x7f7fffff,
                                     0xff7fffff, 0x7f7f8000, 0x7f800000, 0xff800000, 0x33800001 };
    enum { N = sizeof bits / sizeof *bits };
    fixture f;
    open_store(&f, false);
    int32_t p = model_find_param(f.w.m, "layers.1.gate.weight");
    float x[N], y[N], nan[2] = { NAN, -NAN };
    for (int i = 0; i < N; i++)
        x[i] = mt_bits_f32(bits[i]);
    store_set(f.s, p, 7, N, x);
    store_get(f.s, p, 7, N, y);
    for (int i = 0; i < N; i++)
        CHECK(mt_f32_bits(y[i]) == bits[i], "%08x became %08x", bits[i], mt_f32_bits(y[i]));
    store_set(f.s, p, 100, 2, nan);
    store_get(f.s, p, 100, 2, y);
    CHECK(isnan(y[0]) && isnan(y[1]) && mt_f32_bits(y[0]) == mt_f32_bits(y[1]));
    /* What is streamed is the nearest BF16. */
    const model_param *q = &f.w.m->params[p];
    CHECK(f.s->units[q->unit].hi[q->offset + 7 + 8] == 0x3f80, "3f807fff rounds down");
    CHECK(f.s->units[q->unit].hi[q->offset + 7 + 9] == 0x7f80, "the largest rounds to Inf");
    close_store(&f);
}

static void planes_do_not_overlap(void)
{
    fixture f;
    open_store(&f, true);
    const store *s = f.s;
    CHECK(s->n_regions == 1);
    char *base = s->regions[0].data, *end = base;
    for (int32_t u = 0; u < s->n_units; u++) {
        const store_unit *w = &s->units[u];
        struct {
            void *at;
            int64_t bytes;
        } plane[] = { { w->hi, w->elems * 2 },
                      { w->lo, w->elems * 2 },
                      { w->state[0], w->elems * 4 },
                      { w->state[1], w->elems },
                      { w->grad, w->elems * 4 } };
        for (int k = 0; k < 5; k++) {
            CHECK((char *)plane[k].at >= end && (char *)plane[k].at - end < 256, "unit %d", u);
            CHECK((uintptr_t)plane[k].at % 64 == 0);
            end = (char *)plane[k].at + plane[k].bytes;
        }
    }
    CHECK(base + s->region_bytes >= end);
    CHECK(s->region_bytes == s->weight_bytes + s->state_bytes + s->grad_bytes);
    CHECK(s->region_bytes == store_bytes(f.w.m, s->states, s->n_states, true));
    for (int64_t i = 0; i < s->region_bytes; i++)
        if (base[i]) {
            CHECK(false, "byte %lld of a new store is not zero", (long long)i);
            break;
        }
    close_store(&f);
}

/* A large model's planes lie in several regions, whole units in each. */
static void regions_make_no_difference(void)
{
    fixture one, many;
    void *device;
    const mt_backend *b = world_backend(&device);
    open_store(&one, true);
    open_store(&many, true);
    store_destroy(many.s);
    const store *s = one.s;
    CHECK(store_create_in(many.w.m, s->states, 2, true, 40000, b, device, &many.s) == MT_OK);
    CHECK(many.s->n_regions > 1 && many.s->n_regions < many.s->n_units, "%d regions",
          many.s->n_regions);
    int64_t bytes = 0;
    int32_t u = 0;
    for (int32_t r = 0; r < many.s->n_regions; r++) {
        const char *from = many.s->regions[r].data, *to = from + many.s->regions[r].bytes;
        bytes += to - from;
        CHECK(r == many.s->n_regions - 1 || to - from >= 40000);
        int32_t first = u;
        for (; u < many.s->n_units; u++) {
            const store_unit *w = &many.s->units[u];
            if ((char *)w->hi < from || (char *)w->hi >= to)
                break;
            CHECK((char *)(w->grad + w->elems) <= to);
        }
        CHECK(u > first, "region %d is empty", r);
    }
    CHECK(u == many.s->n_units && bytes == s->region_bytes && bytes == many.s->region_bytes);
    store_init_random(one.s, 5);
    store_init_random(many.s, 5);
    CHECK(store_hash(one.s) == store_hash(many.s));
    close_store(&one);
    close_store(&many);
}

static void initialisation_depends_on_names_and_seed_only(void)
{
    fixture a, b;
    open_store(&a, false);
    open_store(&b, true);
    store_init_random(a.s, 5);
    store_init_random(b.s, 5);
    CHECK(store_hash(a.s) == store_hash(b.s));
    store_init_random(b.s, 6);
    CHECK(store_hash(a.s) != store_hash(b.s));

    int32_t ones = model_find_param(a.w.m, "layers.0.norm1.weight");
    int32_t zeros = model_find_param(a.w.m, "layers.0.v.bias");
    float x, y;
    store_get(a.s, ones, 3, 1, &x);
    store_get(a.s, zeros, 3, 1, &y);
    CHECK(x == 1.0f && y == 0.0f);

    /* Two blocks are alike in shape but not in weights; mean and deviation are as declared. */
    int32_t g0 = model_find_param(a.w.m, "layers.0.gate.weight");
    int32_t g1 = model_find_param(a.w.m, "layers.1.gate.weight");
    int64_t n = a.w.m->params[g0].elems;
    double sum = 0, squares = 0, cross = 0, std = 0.7 / sqrt(WORLD_HIDDEN);
    for (int64_t i = 0; i < n; i++) {
        store_get(a.s, g0, i, 1, &x);
        store_get(a.s, g1, i, 1, &y);
        sum += (double)x;
        squares += (double)x * x;
        cross += (double)x * y;
    }
    double N = (double)n;
    CHECK(fabs(sum / N) < 4 * std / sqrt(N), "%g", sum / N);
    CHECK(fabs(squares / N / (std * std) - 1) < 6 / sqrt(N), "%g", squares / N);
    CHECK(fabs(cross / N) < 4 * std * std / sqrt(N), "%g", cross / N);
    close_store(&a);
    close_store(&b);
}

static void a_pattern_has_the_declared_distribution(void)
{
    fixture f;
    open_store(&f, false);
    CHECK(store_init_pattern(f.s) == MT_OK);
    int32_t ones = model_find_param(f.w.m, "layers.0.norm1.weight");
    int32_t gate = model_find_param(f.w.m, "layers.0.gate.weight");
    int64_t n = f.w.m->params[gate].elems;
    float x;
    store_get(f.s, ones, 3, 1, &x);
    CHECK(x == 1.0f);
    double squares = 0, std = 0.7 / sqrt(WORLD_HIDDEN);
    for (int64_t i = 0; i < n; i++) {
        store_get(f.s, gate, i, 1, &x);
        squares += (double)x * x;
    }
    double N = (double)n;
    CHECK(fabs(squares / N / (std * std) - 1) < 6 / sqrt(N), "%g", squares / N);
    close_store(&f);
}

static void the_hash_sees_every_plane(void)
{
    fixture f;
    open_store(&f, false);
    store_init_random(f.s, 5);
    uint64_t h = store_hash(f.s);
    const model_param *p = &f.w.m->params[2];
    f.s->units[p->unit].lo[p->offset] ^= 1;
    CHECK(store_hash(f.s) != h);
    f.s->units[p->unit].lo[p->offset] ^= 1;
    CHECK(store_hash(f.s) == h);
    ((int8_t *)store_state(f.s, 2, 1))[p->elems - 1] = 1;
    CHECK(store_hash(f.s) != h);
    close_store(&f);
}

static void versions_count_changes(void)
{
    fixture f;
    open_store(&f, false);
    uint64_t v = f.s->version;
    store_init_random(f.s, 1);
    CHECK(f.s->version != v);
    v = f.s->version;
    float x = 1;
    store_set(f.s, 0, 0, 1, &x);
    CHECK(f.s->version != v);
    close_store(&f);
}

int main(void)
{
    RUN(masters_are_exact);
    RUN(planes_do_not_overlap);
    RUN(regions_make_no_difference);
    RUN(initialisation_depends_on_names_and_seed_only);
    RUN(a_pattern_has_the_declared_distribution);
    RUN(the_hash_sees_every_plane);
    RUN(versions_count_changes);
    return check_done();
}
