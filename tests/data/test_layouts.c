/* SPDX-License-Identifier: Apache-2.0
 *
 * Layouts of parameters: stacks per expert and whole, interleaved, transposed and shared tensors
 * are written by hand, element by element, and must be read, and written, as exactly that.
 */
#include "../../core/template/graph.h"
#include "../../core/train/checkpoint.h"
#include "../../core/train/export.h"
#include "../../core/train/weights.h"
#include "small_model.h"
#include "support.h"

#include <dirent.h>

static const mt_weights *format;
static char folder[64];

enum { E = 3, I = 5, H = 7, C = 6, K = 4, HEADS = 2, D = 3, MAX_PARAMS = 8, MAX_LAYOUTS = 4 };

/* ---- a model of one unit --------------------------------------------------------------------- */

typedef struct layered {
    model base;
    model_param params[MAX_PARAMS];
    mt_param_info info[MAX_PARAMS];
    model_unit unit;
    tpl t;
    arena mem;
} layered;

static layered *layered_create(const mt_param_info *list, int32_t n)
{
    layered *l = calloc(1, sizeof *l);
    if (!l)
        exit(1);
    l->base = (model){ .n_units = 1, .units = &l->unit, .n_params = n, .params = l->params };
    l->unit = (model_unit){ .t = &l->t };
    for (int32_t p = 0; p < n; p++) {
        mt_status status = graph_copy_param(&list[p], &l->mem, &l->info[p]);
        CHECK(status == MT_OK, "%s: %s", list[p].name, status_text());
        int64_t elems = (list[p].rows ? list[p].rows : 1) * list[p].cols;
        l->params[p] = (model_param){ .name = arena_printf(&l->mem, "layers.0.%s", list[p].name),
                                      .prefix = "layers.0.",
                                      .info = &l->info[p],
                                      .offset = l->t.own_elems,
                                      .elems = elems,
                                      .rows = list[p].rows,
                                      .cols = list[p].cols };
        l->t.own_elems += elems;
    }
    return l;
}

static void layered_destroy(layered *l)
{
    arena_finish(&l->mem);
    free(l);
}

/* What element i of parameter p is: finite, exact in BF16, and seldom what its neighbours are. */
static uint16_t bits_of(int32_t p, int64_t i)
{
    return (uint16_t)((uint64_t)(i * 2 + 1 + p * 4099) * 40503u % 0x7f80u) | (i & 1 ? 0x8000u : 0);
}

/* ---- every layout, by hand ------------------------------------------------------------------- */

enum { GATE_UP, BIAS, DOWN, CONV, QUERY, GATE, NORM, PARAMS };

static const mt_source mixtral[] = {
    { .name = "block_sparse_moe.experts.{}.w1.weight", .n_rows = I },
    { .name = "block_sparse_moe.experts.{}.w3.weight", .first_row = I },
};
static const mt_source fused[] = { { .name = "mlp.experts.gate_up_proj" } };
static const mt_source oss[] = {
    { .name = "mlp.oss_gate_up_proj", .flags = MT_SOURCE_TRANSPOSED, .n_rows = I, .step = 2 },
    { .name = "mlp.oss_gate_up_proj",
      .flags = MT_SOURCE_TRANSPOSED,
      .first_row = I,
      .from_row = 1,
      .step = 2 },
};
static const mt_source blocks[] = {
    { .name = "mlp.experts.gate_up_proj_blocks", .first_row = I, .from_row = 1, .step = 2 },
    { .name = "mlp.experts.gate_up_proj_blocks", .n_rows = I, .step = 2 },
};
static const mt_source bias_whole[] = {
    { .name = "mlp.gate_up_bias", .n_rows = I, .step = 2 },
    { .name = "mlp.gate_up_bias", .first_row = I, .from_row = 1, .step = 2 },
};
static const mt_source bias_each[] = { { .name = "mlp.experts.{}.bias" } };
static const mt_source down_whole[] = { { .name = "mlp.down_proj",
                                          .flags = MT_SOURCE_TRANSPOSED } };
static const mt_source down_each[] = { { .name = "mlp.experts.{}.w2.weight" } };
static const mt_source conv[] = { { .name = "conv1d.weight", .flags = MT_SOURCE_MIDDLE_ONE } };
static const mt_source query[] = { { .name = "q_proj.weight", .block = D, .step = 2 * D } };
static const mt_source gate[] = {
    { .name = "q_proj.weight", .from_row = D, .block = D, .step = 2 * D }
};

static const mt_param_layout gate_up_layouts[] = {
    { mixtral, 2, 0 }, { fused, 1, 0 }, { oss, 2, 0 }, { blocks, 2, 0 }
};
static const mt_param_layout bias_layouts[] = { { bias_whole, 2, 0 }, { bias_each, 1, 0 } };
static const mt_param_layout down_layouts[] = { { down_whole, 1, 0 }, { down_each, 1, 0 } };
static const mt_param_layout conv_layout = { conv, 1, 0 }, query_layout = { query, 1, 0 },
                             gate_layout = { gate, 1, 0 };

#define PARAM(name_, stack_, rows_, cols_, layouts_, n_)                                           \
    {                                                                                              \
        .struct_size = sizeof(mt_param_info), .name = (name_), .rows = (rows_), .cols = (cols_),   \
        .stack = (stack_), .layouts = (layouts_), .n_layouts = (n_)                                \
    }

static const mt_param_info declared[PARAMS] = {
    PARAM("experts.gate_up", E, (int64_t)E * 2 * I, H, gate_up_layouts, 4),
    PARAM("experts.bias", E, E, 2 * I, bias_layouts, 2),
    PARAM("experts.down", E, (int64_t)E *H, I, down_layouts, 2),
    PARAM("conv", 0, C, K, &conv_layout, 1),
    PARAM("query", 0, (int64_t)HEADS *D, H, &query_layout, 1),
    PARAM("gate", 0, (int64_t)HEADS *D, H, &gate_layout, 1),
    PARAM("norm.weight", 0, 0, H, NULL, 0),
};

/* The parameters with the layouts `k` first. */
static layered *model_with(const int k[PARAMS], mt_param_layout rotated[PARAMS][MAX_LAYOUTS])
{
    mt_param_info list[PARAMS];
    memcpy(list, declared, sizeof list);
    for (int p = 0; p < PARAMS; p++) {
        for (uint32_t i = 0; i < list[p].n_layouts; i++)
            rotated[p][i] = declared[p].layouts[((uint32_t)k[p] + i) % list[p].n_layouts];
        list[p].layouts = list[p].n_layouts ? rotated[p] : NULL;
    }
    return layered_create(list, PARAMS);
}

/* A tensor as it must stand in a file: its elements in file order. */
typedef struct plain {
    char name[96];
    int32_t ndim;
    int64_t dim[3];
    uint16_t data[E * 2 * I * H];
    int64_t n;
} plain;

typedef struct plain_set {
    plain list[32];
    int n;
} plain_set;

static plain *add(plain_set *set, const char *name, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    plain *t = &set->list[set->n++];
    *t = (plain){ .ndim = ndim, .dim = { a, b, c } };
    snprintf(t->name, sizeof t->name, "layers.0.%s", name);
    return t;
}

static void put(plain *t, int32_t param, int64_t element)
{
    t->data[t->n++] = bits_of(param, element);
}

static int64_t gate_up_at(int64_t e, int64_t row, int64_t col)
{
    return (e * 2 * I + row) * H + col;
}

static void write_gate_up(plain_set *set, int k)
{
    static const char *const w[] = { "w1", "w3" };
    char name[64];
    if (k == 0) {
        for (int e = 0; e < E; e++)
            for (int part = 0; part < 2; part++) {
                snprintf(name, sizeof name, "block_sparse_moe.experts.%d.%s.weight", e, w[part]);
                plain *t = add(set, name, 2, I, H, 0);
                for (int r = 0; r < I; r++)
                    for (int c = 0; c < H; c++)
                        put(t, GATE_UP, gate_up_at(e, part * I + r, c));
            }
    } else if (k == 1) {
        plain *t = add(set, "mlp.experts.gate_up_proj", 3, E, 2 * I, H);
        for (int i = 0; i < E * 2 * I * H; i++)
            put(t, GATE_UP, i);
    } else if (k == 2) {
        plain *t = add(set, "mlp.oss_gate_up_proj", 3, E, H, 2 * I);
        for (int e = 0; e < E; e++)
            for (int c = 0; c < H; c++)
                for (int r = 0; r < 2 * I; r++)
                    put(t, GATE_UP, gate_up_at(e, r % 2 * I + r / 2, c));
    } else {
        plain *t = add(set, "mlp.experts.gate_up_proj_blocks", 3, E, 2 * I, H);
        for (int e = 0; e < E; e++)
            for (int r = 0; r < 2 * I; r++)
                for (int c = 0; c < H; c++)
                    put(t, GATE_UP, gate_up_at(e, r % 2 * I + r / 2, c));
    }
}

static void write_bias(plain_set *set, int k)
{
    char name[64];
    plain *t = k == 0 ? add(set, "mlp.gate_up_bias", 2, E, 2 * I, 0) : NULL;
    for (int e = 0; e < E; e++) {
        snprintf(name, sizeof name, "mlp.experts.%d.bias", e);
        plain *u = t ? t : add(set, name, 1, 2 * I, 0, 0);
        for (int r = 0; r < 2 * I; r++)
            put(u, BIAS, e * 2 * I + (t ? r % 2 * I + r / 2 : r));
    }
}

static void write_down(plain_set *set, int k)
{
    char name[64];
    plain *t = k == 0 ? add(set, "mlp.down_proj", 3, E, I, H) : NULL;
    for (int e = 0; e < E; e++) {
        snprintf(name, sizeof name, "mlp.experts.%d.w2.weight", e);
        plain *u = t ? t : add(set, name, 2, H, I, 0);
        for (int i = 0; i < H * I; i++) /* transposed: i = column * H + row */
            put(u, DOWN, e * H * I + (t ? i % H * I + i / H : i));
    }
}

static void write_others(plain_set *set)
{
    plain *t = add(set, "conv1d.weight", 3, C, 1, K);
    for (int i = 0; i < C * K; i++)
        put(t, CONV, i);
    t = add(set, "q_proj.weight", 2, HEADS * 2 * D, H, 0);
    for (int head = 0; head < HEADS; head++)
        for (int part = 0; part < 2; part++)
            for (int i = 0; i < D * H; i++)
                put(t, part ? GATE : QUERY, head * D * H + i);
    t = add(set, "norm.weight", 1, H, 0, 0);
    for (int i = 0; i < H; i++)
        put(t, NORM, i);
}

static plain_set *expected_set(const int k[PARAMS])
{
    plain_set *set = calloc(1, sizeof *set);
    if (!set)
        exit(1);
    write_gate_up(set, k[GATE_UP]);
    write_bias(set, k[BIAS]);
    write_down(set, k[DOWN]);
    write_others(set);
    return set;
}

/* Writes the set as `dtype`, back to front so that files are in no order that a reader may like. */
static void write_set(const plain_set *set, mt_dtype dtype, int64_t shard)
{
    mt_tensor_info list[32] = { 0 };
    void *w;
    for (int i = 0; i < set->n; i++) {
        const plain *t = &set->list[set->n - 1 - i];
        list[i] = (mt_tensor_info){ .name = t->name, .dtype = dtype, .ndim = t->ndim };
        memcpy(list[i].dim, t->dim, sizeof t->dim);
        list[i].bytes = t->n * mt_dtype_size(dtype);
    }
    CHECK(format->create(".", "model", list, set->n, shard, &w) == MT_OK, "%s", status_text());
    for (int i = 0; i < set->n; i++) {
        const plain *t = &set->list[set->n - 1 - i];
        for (int64_t j = 0; j < t->n; j++) {
            float f = mt_bf16_to_f32(t->data[j]);
            const void *p = dtype == MT_BF16 ? (const void *)&t->data[j] : &f;
            CHECK(format->write(w, i, p, mt_dtype_size(dtype)) == MT_OK, "%s", status_text());
        }
    }
    CHECK(format->finish(w) == MT_OK, "%s", status_text());
}

/* The files hold the tensors of the set, and nothing else. */
static void expect_files(const char *path, const plain_set *set)
{
    void *r = NULL;
    CHECK(format->open(path, &r) == MT_OK, "%s", status_text());
    if (!r)
        return;
    CHECK(format->count(r) == set->n, "%d tensors, expected %d", (int)format->count(r), set->n);
    for (int64_t i = 0; i < format->count(r); i++) {
        mt_tensor_info info = { 0 };
        const plain *t = NULL;
        uint16_t data[E * 2 * I * H];
        CHECK(format->info(r, i, &info) == MT_OK, "%s", status_text());
        for (int k = 0; k < set->n && !t; k++)
            t = strcmp(set->list[k].name, info.name) == 0 ? &set->list[k] : NULL;
        CHECK(t, "%s", info.name);
        if (!t)
            continue;
        bool same = info.ndim == t->ndim && info.dtype == MT_BF16 && info.bytes == t->n * 2;
        for (int d = 0; d < t->ndim && same; d++)
            same = info.dim[d] == t->dim[d];
        CHECK(same, "%s: shape or dtype", info.name);
        CHECK(same && format->read(r, i, 0, info.bytes, data) == MT_OK, "%s", status_text());
        CHECK(same && memcmp(data, t->data, (size_t)info.bytes) == 0, "%s: data", info.name);
    }
    format->close(r);
}

static void expect_masters(const store *s)
{
    for (int32_t p = 0; p < s->m->n_params; p++)
        for (int64_t i = 0; i < s->m->params[p].elems; i++) {
            float x, want = mt_bf16_to_f32(bits_of(p, i));
            store_get(s, p, i, 1, &x);
            CHECK(mt_f32_bits(x) == mt_f32_bits(want), "%s, element %d: %g, expected %g",
                  s->m->params[p].name, (int)i, (double)x, (double)want);
        }
}

static void save(const store *s, bool weights_only)
{
    const checkpoint_options o = { .folder = "runs",
                                   .weights_only = weights_only,
                                   .weights_dtype = weights_only ? MT_BF16 : MT_F32,
                                   .model_type = "layered" };
    const checkpoint_state state = { .step = 1 };
    CHECK(checkpoint_save(s, &state, &o, format, NULL, NULL) == MT_OK, "%s", status_text());
}

/* Every layout is found and read whichever comes first, and each one is written when it does. */
static void every_layout(void)
{
    for (int k = 0; k < MAX_LAYOUTS; k++) {
        support_enter(folder);
        const int there[PARAMS] = { k, k % 2, k / 2 }, none[PARAMS] = { 0 };
        mt_param_layout rotated[PARAMS][MAX_LAYOUTS];
        plain_set *set = expected_set(there);
        layered *first = model_with(there, rotated);
        layered *declared_order = model_with(none, rotated);
        store *s = small_store_create(&declared_order->base, NULL, 0);
        write_set(set, k % 2 ? MT_F32 : MT_BF16, k > 1 ? 200 : 0);
        CHECK(weights_load(s, ".", format, NULL) == MT_OK, "%s", status_text());
        expect_masters(s);
        store_destroy(s);
        s = small_store_create(&first->base, NULL, 0);
        CHECK(weights_load(s, ".", format, NULL) == MT_OK, "%s", status_text());
        expect_masters(s);
        save(s, true);
        expect_files("runs/step-000001", set);
        store_destroy(s);
        layered_destroy(first);
        layered_destroy(declared_order);
        free(set);
        support_leave(folder);
    }
}

/* Masters and states come back bit for bit through tensors that are cut and transposed. */
static void resume(void)
{
    static const mt_state_spec states[] = { { "m", MT_F32 } };
    for (int k = 0; k < MAX_LAYOUTS; k++) {
        support_enter(folder);
        const int first[PARAMS] = { k, k % 2, k / 2 };
        mt_param_layout rotated[PARAMS][MAX_LAYOUTS];
        layered *l = model_with(first, rotated);
        store *a = small_store_create(&l->base, states, 1);
        store *b = small_store_create(&l->base, states, 1);
        for (int32_t p = 0; p < PARAMS; p++)
            for (int64_t i = 0; i < l->params[p].elems; i++) {
                float x = mt_bits_f32((uint32_t)bits_of(p, i) << 16 | (uint32_t)(i * 977 % 65536));
                store_set(a, p, i, 1, &x);
                ((float *)store_state(a, p, 0))[i] = (float)i;
            }
        save(a, false);
        checkpoint_state got;
        CHECK(checkpoint_load(b, "runs/step-000001", format, &got) == MT_OK, "%s", status_text());
        CHECK(store_hash(a) == store_hash(b), "layout %d", k);
        store_destroy(a);
        store_destroy(b);
        layered_destroy(l);
        support_leave(folder);
    }
}

/* ---- export ---------------------------------------------------------------------------------- */

static void write_text(const char *path, const char *text)
{
    support_write(path, text, strlen(text));
}

static bool holds(const char *path, const char *text)
{
    size_t n;
    char *content = support_read(path, &n);
    bool yes = strstr(content, text) != NULL;
    free(content);
    return yes;
}

/* From every layout to the first one, without a store; BF16 bit for bit. */
static void export_every_layout(void)
{
    for (int k = 0; k < MAX_LAYOUTS; k++) {
        support_enter(folder);
        const int there[PARAMS] = { k, k % 2, k / 2 }, none[PARAMS] = { 0 };
        mt_param_layout rotated[PARAMS][MAX_LAYOUTS];
        plain_set *set = expected_set(there), *hub = expected_set(none);
        layered *l = model_with(none, rotated);
        CHECK(mkdir("hf", 0777) == 0 && chdir("hf") == 0, " ");
        write_set(set, k % 2 ? MT_F32 : MT_BF16, k > 1 ? 200 : 0);
        CHECK(chdir("..") == 0, " ");
        write_text("hf/config.json", "{\"model_type\": \"layered\", \"dtype\": \"float16\", "
                                     "\"hidden_size\": 7, \"quantization_config\": "
                                     "{\"quant_method\": \"mxfp4\"}}");
        write_text("hf/tokenizer.json", "the tokenizer");
        write_text("hf/generation_config.json", "{}");
        write_text("hf/README.md", "not carried over");
        model_source source = { 0 };
        CHECK(model_source_open("hf", &source) == MT_OK, "%s", status_text());
        export_options o = { .folder = "out/first",
                             .dtype = MT_BF16,
                             .shard_bytes = k == 3 ? 300 : 0 };
        int64_t bytes = 0;
        CHECK(export_model(&source, &l->base, format, &o, &bytes) == MT_OK, "%s", status_text());
        CHECK(export_model(&source, &l->base, format, &o, &bytes) != MT_OK, "twice");
        CHECK(support_says("out/first: the folder is not empty"), " ");
        expect_files("out/first", hub);
        CHECK(support_exists("out/first/model.safetensors.index.json") == (k == 3), "shards");
        CHECK(holds("out/first/config.json", "\"bfloat16\"") &&
                  holds("out/first/config.json", "hidden_size") &&
                  !holds("out/first/config.json", "quant") &&
                  !holds("out/first/config.json", "\"float16\""),
              "config.json");
        CHECK(holds("out/first/tokenizer.json", "the tokenizer"), " ");
        CHECK(support_exists("out/first/generation_config.json"), " ");
        CHECK(!support_exists("out/first/README.md"), " ");

        /* A format that takes tensors in their order only, as an older plugin's. */
        mt_weights in_order = *format;
        in_order.struct_size = offsetof(mt_weights, write_at);
        o.folder = "out/ordered";
        CHECK(export_model(&source, &l->base, &in_order, &o, &bytes) == MT_OK, "%s", status_text());
        CHECK(system("diff -r out/first out/ordered") == 0, "other files when written in order");

        /* The masters as they are, into an empty folder, named with a slash. */
        CHECK(mkdir("masters", 0777) == 0, " ");
        o = (export_options){ .folder = "masters/", .dtype = MT_F32 };
        CHECK(export_model(&source, &l->base, format, &o, &bytes) == MT_OK, "%s", status_text());
        store *s = small_store_create(&l->base, NULL, 0);
        CHECK(weights_load(s, "masters", format, NULL) == MT_OK, "%s", status_text());
        expect_masters(s);
        int64_t elems = 0;
        for (int p = 0; p < PARAMS; p++)
            elems += l->params[p].elems;
        CHECK(bytes == elems * 4, "%d bytes", (int)bytes);
        store_destroy(s);
        model_source_close(&source);
        layered_destroy(l);
        free(set);
        free(hub);
        support_leave(folder);
    }
}

/* A failed export leaves nothing. */
static void export_fails(void)
{
    support_enter(folder);
    const int none[PARAMS] = { 0 };
    mt_param_layout rotated[PARAMS][MAX_LAYOUTS];
    plain_set *set = expected_set(none);
    layered *l = model_with(none, rotated);
    plain *extra = add(set, "unknown.weight", 1, 1, 0, 0);
    extra->n = 1;
    CHECK(mkdir("hf", 0777) == 0 && chdir("hf") == 0, " ");
    write_set(set, MT_BF16, 0);
    CHECK(chdir("..") == 0, " ");
    write_text("hf/config.json", "{\"model_type\": \"layered\"}");
    model_source source = { 0 };
    CHECK(model_source_open("hf", &source) == MT_OK, "%s", status_text());
    const export_options o = { .folder = "out", .dtype = MT_BF16, .shard_bytes = 0 };
    int64_t bytes = 0;
    CHECK(export_model(&source, &l->base, format, &o, &bytes) == MT_ERR_FORMAT, "unknown tensor");
    CHECK(support_says("'layers.0.unknown.weight' belongs to no parameter"), " ");
    set->n -= 2; /* the norm as well */
    CHECK(chdir("hf") == 0, " ");
    write_set(set, MT_BF16, 0);
    CHECK(chdir("..") == 0, " ");
    CHECK(export_model(&source, &l->base, format, &o, &bytes) == MT_ERR_FORMAT, "missing");
    CHECK(support_says("'layers.0.norm.weight' is missing"), " ");
    DIR *d = opendir(".");
    int entries = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        entries += e->d_name[0] != '.' || strncmp(e->d_name, "out", 3) == 0;
    closedir(d);
    CHECK(entries == 1, "%d entries", entries); /* the model alone */
    model_source_close(&source);
    layered_destroy(l);
    free(set);
    support_leave(folder);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void which_layout(void)
{
    support_enter(folder);
    const int none[PARAMS] = { 0 };
    mt_param_layout rotated[PARAMS][MAX_LAYOUTS];
    layered *l = model_with(none, rotated);
    store *s = small_store_create(&l->base, NULL, 0);

    plain_set *set = expected_set(none);
    set->list[3].name[0] = 'x'; /* expert 1's w3 */
    write_set(set, MT_BF16, 0);
    CHECK(weights_load(s, ".", format, NULL) == MT_ERR_FORMAT, "incomplete");
    CHECK(support_says("parameter 'layers.0.experts.gate_up' stands there in none of its layouts"),
          " ");
    CHECK(support_says("'block_sparse_moe.experts.{}.w1.weight' ... (5 of 6 tensors there, "
                       "'layers.0.block_sparse_moe.experts.1.w3.weight' is not)"),
          " ");
    CHECK(support_says("'mlp.experts.gate_up_proj' (0 of 1 tensors there"), " ");
    set->list[3].name[0] = 'l';

    write_gate_up(set, 1);
    write_set(set, MT_BF16, 0);
    CHECK(weights_load(s, ".", format, NULL) == MT_ERR_FORMAT, "twice");
    CHECK(support_says("'layers.0.mlp.experts.gate_up_proj' holds 'layers.0.experts.gate_up'"),
          " ");
    set->n--;

    plain *conv1d = &set->list[set->n - 3];
    conv1d->ndim = 2;
    conv1d->dim[1] = K;
    write_set(set, MT_BF16, 0);
    CHECK(weights_load(s, ".", format, NULL) == MT_ERR_FORMAT, "shape");
    CHECK(support_says("conv1d.weight' has shape [6, 4], the model's has [6, 1, 4]"), " ");
    free(set);
    store_destroy(s);
    layered_destroy(l);
    support_leave(folder);
}

static void refuse(mt_param_info p, const char *says)
{
    arena mem = { 0 };
    mt_param_info copy;
    CHECK(graph_copy_param(&p, &mem, &copy) == MT_ERR_INVALID, "%s", says);
    CHECK(support_says(says), "%s", says);
    arena_finish(&mem);
}

static void declarations(void)
{
    mt_source s[2] = { { .name = "a", .n_rows = 2 }, { .name = "b", .first_row = 2 } };
    mt_param_layout l = { s, 2, 0 };
    const mt_param_info good = PARAM("w", 0, 4, 3, &l, 1);
    arena mem = { 0 };
    mt_param_info copy;
    CHECK(graph_copy_param(&good, &mem, &copy) == MT_OK, "%s", status_text());
    CHECK(copy.layouts[0].sources[1].n_rows == 2 && copy.layouts[0].sources[1].step == 1, " ");
    mt_param_info older = good;
    older.struct_size = offsetof(mt_param_info, stack);
    CHECK(graph_copy_param(&older, &mem, &copy) == MT_OK && copy.n_layouts == 1 &&
              strcmp(copy.layouts[0].sources[0].name, "w") == 0,
          "a plugin of an older header");
    arena_finish(&mem);

    s[1].first_row = 3;
    refuse(good, "parameter 'w': the sources of the layout 'a' fill rows twice or leave out row 2");
    s[1].first_row = 1;
    refuse(good, "fill rows twice");
    s[1].first_row = 5;
    refuse(good, "source 'b': rows 5 .. +0, but each matrix has 4 rows");
    s[1] = (mt_source){ .name = "b.{}", .first_row = 2 };
    refuse(good, "only for a stack");
    s[1] = (mt_source){ .name = "b", .first_row = 2, .block = 4, .step = 2 };
    refuse(good, "no step within a block");
    s[1] = (mt_source){ .name = "b", .first_row = 2, .flags = 8 };
    refuse(good, "flags 0x8");
    refuse((mt_param_info)PARAM("w", 3, 4, 3, NULL, 0), "4 rows are no stack of 3");
    l.n_sources = 0;
    refuse(good, "a layout without sources");

    /* What one parameter alone cannot tell: rows 0 and 2 of a tensor of which nothing is row 1. */
    mt_source odd = { .name = "odd", .step = 2 };
    mt_param_layout o = { &odd, 1, 0 };
    const mt_param_info hole = PARAM("w", 0, 2, 3, &o, 1);
    layered *x = layered_create(&hole, 1);
    tensor_map *map = NULL;
    CHECK(tensor_map_create(&x->base, NULL, &map) == MT_ERR_INVALID, "a hole");
    CHECK(support_says("layout of 'layers.0.w' is wrong: its sources in 'layers.0.odd' leave out"),
          " ");
    layered_destroy(x);
}

/* ---- large ones ------------------------------------------------------------------------------ */

/* Transposed matrices of more than a piece, and one of which not even a column fits a piece. */
static void large_transposed(void)
{
    support_enter(folder);
    mt_source wide = { .name = "wide", .flags = MT_SOURCE_TRANSPOSED };
    mt_source tall = { .name = "tall", .flags = MT_SOURCE_TRANSPOSED };
    const mt_param_layout l[] = { { &wide, 1, 0 }, { &tall, 1, 0 } };
    const mt_param_info list[] = { PARAM("w", 2, 2 * 700, 3100, &l[0], 1),
                                   PARAM("t", 0, 2100001, 2, &l[1], 1) };
    layered *m = layered_create(list, 2);
    store *a = small_store_create(&m->base, NULL, 0), *b = small_store_create(&m->base, NULL, 0);
    for (int32_t p = 0; p < 2; p++)
        for (int64_t i = 0; i < m->params[p].elems; i++) {
            float x = mt_bf16_to_f32(bits_of(p, i));
            store_set(a, p, i, 1, &x);
        }
    save(a, true);
    CHECK(weights_load(b, "runs/step-000001", format, NULL) == MT_OK, "%s", status_text());
    CHECK(store_hash(a) == store_hash(b), "there and back");

    void *r = NULL;
    uint16_t *data = malloc(2 * 700 * 3100 * sizeof *data);
    CHECK(data && format->open("runs/step-000001", &r) == MT_OK, "%s", status_text());
    for (int64_t k = 0; r && data && k < 2; k++) {
        mt_tensor_info info;
        CHECK(format->info(r, k, &info) == MT_OK &&
                  format->read(r, k, 0, info.bytes, data) == MT_OK,
              "%s", status_text());
        bool w = strcmp(info.name, "layers.0.wide") == 0;
        int64_t rows = w ? 700 : 2100001, cols = w ? 3100 : 2, wrong = 0;
        for (int64_t i = 0; i < info.bytes / 2; i++) {
            int64_t e = i / (rows * cols), col = i / rows % cols, row = i % rows;
            wrong += data[i] != bits_of(w ? 0 : 1, (e * rows + row) * cols + col);
        }
        CHECK(wrong == 0, "%s: %d elements", info.name, (int)wrong);
    }
    format->close(r);
    free(data);
    store_destroy(a);
    store_destroy(b);
    layered_destroy(m);
    support_leave(folder);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    format = plugin_interface(argv[1], MT_WEIGHTS_INTERFACE);
    RUN(every_layout);
    RUN(resume);
    RUN(export_every_layout);
    RUN(export_fails);
    RUN(which_layout);
    RUN(declarations);
    RUN(large_transposed);
    return check_done();
}
