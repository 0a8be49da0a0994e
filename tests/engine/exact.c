/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters that a device computing in BF16 gets in FP32: both planes reach it, where of all
 * others only the upper one does.
 */
#include "world.h"

#include "../check.h"

#include <stdio.h>

static world_options options(void)
{
    world_options o = { .plugin = "qwen", .manifest = "qwen3_next" };
    o.request.compute = MT_BF16;
    o.request.training = true;
    return o;
}

static const model_param *find(const world *w, const char *name)
{
    for (int32_t i = 0; i < w->m->n_params; i++)
        if (strcmp(w->m->params[i].name, name) == 0)
            return &w->m->params[i];
    world_fail(name);
    return NULL;
}

/* Upper plane: -0.5, so that states last for a few tokens whatever was drawn. */
static void set(world *w, const char *name)
{
    const model_param *p = find(w, name);
    const store_unit *u = &w->s->units[p->unit];
    for (int64_t k = 0; k < p->elems; k++)
        mt_split_f32(-0.5f, &u->hi[p->offset + k], &u->lo[p->offset + k]);
    w->s->version++;
}

/* The lower plane as far up as it goes; the upper one stays. */
static void raise_lower_plane(world *w, const char *name)
{
    const model_param *p = find(w, name);
    int16_t *lo = w->s->units[p->unit].lo + p->offset;
    for (int64_t k = 0; k < p->elems; k++)
        lo[k] = 32000;
    w->s->version++;
}

static void lower_planes(void)
{
    static const struct {
        const char *name;
        bool exact;
    } list[] = { { "model.layers.0.input_layernorm.weight", false },
                 { "model.layers.0.linear_attn.conv1d.weight", false },
                 { "model.layers.0.linear_attn.A_log", true },
                 { "model.layers.2.linear_attn.dt_bias", true } };
    world_options o = options();
    for (int64_t segment = 0; segment <= 4096; segment += 4096)
        for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
            world w;
            o.request.segment_bytes = segment;
            world_open(&o, &w);
            step_batch *b = world_batch(7, 2, 24, 3, WORLD_VOCAB);
            set(&w, list[i].name);
            set(&w, "model.layers.0.linear_attn.A_log");
            set(&w, "model.layers.2.linear_attn.A_log");
            double before = world_loss(&w, b);
            raise_lower_plane(&w, list[i].name);
            double after = world_loss(&w, b);
            CHECK((before != after) == list[i].exact,
                  "%s, segments of %d bytes: loss %.17g, then %.17g", list[i].name, (int)segment,
                  before, after);
            world_batch_free(b);
            world_close(&w);
        }
}

/* They take no more room than 4 bytes an element and alignment. */
static void bytes(void)
{
    world_options o = options();
    world w;
    world_open(&o, &w);
    for (int32_t u = 0; u < w.m->n_units; u++) {
        const tpl_segment *s = &w.p->tpl[u]->segment[0];
        const tpl *t = w.m->units[u].t;
        int64_t exact = 0;
        for (uint32_t k = 0; k < t->n_params; k++)
            if (t->params[k].info.flags & MT_PARAM_STREAM_F32)
                exact += t->params[k].elems;
        CHECK(s->f32_elems >= exact && s->f32_elems <= 2 * TPL_PARAM_ALIGN &&
                  !exact == !s->f32_elems,
              "unit %d: %d elements in FP32 for %d", u, (int)s->f32_elems, (int)exact);
    }
    world_close(&w);
}

int main(void)
{
    RUN(lower_planes);
    RUN(bytes);
    return check_done();
}
