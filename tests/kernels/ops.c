/* SPDX-License-Identifier: Apache-2.0
 *
 * Row-wise operations of the CPU backend: every instruction set this machine has against the plain
 * C reference, FP32 against FP64, and the FP64 backward against central differences.
 */
#include "cpu.h"
#include "isa.h"

#include "../check.h"

#include <math.h>

/* ---- tensors -------------------------------------------------------------------------------- */

static const double PAD = 7.0; /* what columns past `cols` hold, before and after */

static double at(const mt_tensor *t, int64_t r, int64_t j)
{
    int64_t i = r * t->ld + j;
    if (t->dtype == MT_F64)
        return ((const double *)t->data)[i];
    if (t->dtype == MT_F32)
        return (double)((const float *)t->data)[i];
    return (double)mt_bf16_to_f32(((const uint16_t *)t->data)[i]);
}

static void put(const mt_tensor *t, int64_t r, int64_t j, double x)
{
    int64_t i = r * t->ld + j;
    if (t->dtype == MT_F64)
        ((double *)t->data)[i] = x;
    else if (t->dtype == MT_F32)
        ((float *)t->data)[i] = (float)x;
    else
        ((uint16_t *)t->data)[i] = mt_f32_to_bf16((float)x);
}

static uint64_t rng_state = 1;

/* Uniform in [-2, 2], exact in BF16, so that one seed means the same numbers in every dtype. */
static double rng(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    double u = (double)(rng_state >> 40) / (double)(1 << 24);
    return (double)mt_bf16_to_f32(mt_f32_to_bf16((float)(4.0 * u - 2.0)));
}

static mt_tensor tensor(int64_t rows, int64_t cols, int64_t pad, mt_dtype dtype)
{
    mt_tensor t = { NULL, rows, cols, cols + pad, dtype, 0 };
    t.data = calloc((size_t)(rows * t.ld), (size_t)mt_dtype_size(dtype));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < t.ld; j++)
            put(&t, r, j, j < cols ? rng() : PAD);
    return t;
}

/* ---- an operation with all its tensors ------------------------------------------------------ */

typedef struct kase {
    const cpu_op *op;
    const void *attr;
    uint32_t n_in;
    int32_t heads; /* groups of a row; cols is a multiple of it */
    int64_t rows, cols, pad;
    uint32_t accumulate;
    uint32_t unwanted; /* bit i: d_in[i] is absent */
    uint32_t seed;
    int32_t max_position;
} kase;

typedef struct fixture {
    const kase *k;
    mt_op_call call;
    int32_t *positions;
} fixture;

static void fixture_init(fixture *f, const kase *k, mt_dtype dtype)
{
    mt_dtype stat = dtype == MT_F64 ? MT_F64 : MT_F32;
    bool norm = k->op == &cpu_op_rmsnorm;
    rng_state = k->seed;
    *f = (fixture){ .k = k };
    mt_op_call *c = &f->call;
    *c = (mt_op_call){ .struct_size = sizeof *c,
                       .attr = k->attr,
                       .n_in = k->n_in,
                       .n_out = 1,
                       .d_accumulate = k->accumulate };
    for (uint32_t i = 0; i < k->n_in; i++) {
        bool weight = norm && i == 1;
        int64_t rows = weight ? 1 : k->rows, cols = weight ? k->cols / k->heads : k->cols;
        c->in[i] = tensor(rows, cols, weight ? 0 : k->pad, dtype);
        c->d_in[i] = tensor(rows, cols, weight ? 0 : k->pad, weight ? stat : dtype);
        if (k->unwanted & (1u << i)) {
            free(c->d_in[i].data);
            c->d_in[i].data = NULL;
        }
    }
    c->out[0] = tensor(k->rows, k->cols, k->pad, dtype);
    c->d_out[0] = tensor(k->rows, k->cols, k->pad, dtype);
    if (norm) {
        c->n_aux = 1;
        c->aux[0] = tensor(k->rows, k->heads, 0, stat);
    }
    f->positions = calloc((size_t)k->rows, sizeof *f->positions);
    for (int64_t t = 0; t < k->rows; t++)
        f->positions[t] = (int32_t)((t * 37 + 11) % (k->max_position + 1));
    c->batch.tokens = k->rows;
    c->batch.positions = f->positions;
}

static void fixture_finish(fixture *f)
{
    for (uint32_t i = 0; i < MT_OP_MAX_IN; i++) {
        free(f->call.in[i].data);
        free(f->call.d_in[i].data);
    }
    free(f->call.out[0].data);
    free(f->call.d_out[0].data);
    free(f->call.aux[0].data);
    free(f->positions);
}

/* Runs all tasks of all phases, backwards when `reverse`: their order must not matter. */
static void run_pass(fixture *f, cpu_isa isa, bool backward, bool reverse)
{
    const cpu_op *op = f->k->op;
    mt_op_call *c = &f->call;
    int64_t bytes = op->workspace ? op->workspace(c, backward) : 0;
    c->work = malloc((size_t)bytes + 1);
    memset(c->work, 0xff, (size_t)bytes);
    c->work_bytes = bytes;
    int32_t phases = op->phases ? op->phases(c, backward) : 1;
    for (int32_t p = 0; p < phases; p++) {
        int64_t n = op->tasks(c, backward, p);
        for (int64_t i = 0; i < n; i++)
            op->run(isa, c, backward, p, reverse ? n - 1 - i : i);
    }
    free(c->work);
    c->work = NULL;
}

static void run_both(fixture *f, cpu_isa isa, bool reverse)
{
    run_pass(f, isa, false, reverse);
    run_pass(f, isa, true, reverse);
}

/* |a - b| <= rel * |b| + abs everywhere, and nothing written past `cols`. */
static void compare(const mt_tensor *a, const mt_tensor *b, double rel, double abs,
                    const char *what, const kase *k, int isa)
{
    int shown = 0;
    if (!a->data && !b->data)
        return;
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t j = 0; j < a->ld && shown < 3; j++) {
            double x = at(a, r, j), y = at(b, r, j);
            bool good = j < a->cols ? fabs(x - y) <= rel * fabs(y) + abs || (isnan(x) && isnan(y))
                                    : x == PAD && y == PAD;
            shown += !good;
            CHECK(good,
                  "%s %s of [%d, %d], pad %d, accumulate %u, isa %d, %s: (%d, %d): %.9g, %.9g",
                  k->op->name, what, (int)k->rows, (int)k->cols, (int)k->pad, k->accumulate, isa,
                  mt_dtype_name(a->dtype), (int)r, (int)j, x, y);
        }
    }
}

static void compare_all(const fixture *a, const fixture *b, double rel, double abs, int isa)
{
    static const char *const names[] = { "d_in[0]", "d_in[1]" };
    compare(&a->call.out[0], &b->call.out[0], rel, abs, "out", a->k, isa);
    if (a->call.n_aux)
        compare(&a->call.aux[0], &b->call.aux[0], 1e-5, 0, "aux", a->k, isa);
    for (uint32_t i = 0; i < a->k->n_in; i++) {
        /* A gradient of a weight is a sum over all rows. */
        double more = a->call.d_in[i].rows == 1 ? (double)a->k->rows * (double)a->k->heads : 1.0;
        compare(&a->call.d_in[i], &b->call.d_in[i], rel, abs * (1.0 + sqrt(more)), names[i], a->k,
                isa);
    }
}

static void check_case(const kase *k)
{
    fixture ref32, ref64;
    fixture_init(&ref32, k, MT_F32);
    fixture_init(&ref64, k, MT_F64);
    run_both(&ref32, CPU_SCALAR, false);
    run_both(&ref64, CPU_SCALAR, true);
    compare_all(&ref32, &ref64, 2e-6, 2e-6 * (1.0 + k->max_position), -1);

    fixture ref16;
    fixture_init(&ref16, k, MT_BF16);
    run_both(&ref16, CPU_SCALAR, false);
    compare_all(&ref16, &ref64, 0x1p-7, 0.02, -1);
    for (int isa = 1; isa <= test_best_isa(); isa++) {
        fixture simd;
        fixture_init(&simd, k, MT_F32);
        run_both(&simd, isa, isa == 1);
        compare_all(&simd, &ref32, 2e-6, 2e-6, isa);
        fixture_finish(&simd);
        fixture_init(&simd, k, MT_BF16);
        run_both(&simd, isa, isa == 2);
        compare_all(&simd, &ref16, 0x1.01p-7, 4e-6, isa);
        fixture_finish(&simd);
    }
    fixture_finish(&ref32);
    fixture_finish(&ref64);
    fixture_finish(&ref16);
}

/* The FP64 backward against (L(x + h) - L(x - h)) / 2h with L = sum of d_out * out. */
static void check_gradient(const kase *base)
{
    kase k = *base;
    k.accumulate = 0;
    fixture f;
    fixture_init(&f, &k, MT_F64);
    run_both(&f, CPU_SCALAR, false);
    for (uint32_t i = 0; i < k.n_in; i++) {
        const mt_tensor *x = &f.call.in[i];
        for (int64_t r = 0; r < x->rows; r++) {
            for (int64_t j = 0; j < x->cols; j++) {
                double old = at(x, r, j), loss[2], h = 1e-5;
                for (int side = 0; side < 2; side++) {
                    put(x, r, j, side ? old - h : old + h);
                    run_pass(&f, CPU_SCALAR, false, false);
                    loss[side] = 0.0;
                    for (int64_t a = 0; a < k.rows; a++)
                        for (int64_t b = 0; b < k.cols; b++)
                            loss[side] += at(&f.call.d_out[0], a, b) * at(&f.call.out[0], a, b);
                }
                put(x, r, j, old);
                double want = (loss[0] - loss[1]) / (2.0 * h), got = at(&f.call.d_in[i], r, j);
                CHECK(fabs(got - want) <= 2e-8 * (1.0 + fabs(want)),
                      "%s d_in[%u] (%d, %d): %.12g, by differences %.12g", k.op->name, i, (int)r,
                      (int)j, got, want);
            }
        }
    }
    fixture_finish(&f);
}

/* All sizes, strides, accumulation and absent gradients of one operation. cols per group. */
static void check_op(kase k)
{
    static const int64_t cols[] = { 2, 6, 8, 16, 18, 32, 34, 62, 128, 146 };
    static const int64_t rows[] = { 1, 3, 65, 130 };
    uint32_t seed = 1;
    for (size_t i = 0; i < sizeof cols / sizeof *cols; i++) {
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
            k.cols =
                cols[i] * k.heads + (k.op == &cpu_op_rope || k.heads > 1 ? 0 : (int64_t)(j & 1));
            k.rows = rows[j];
            k.pad = j % 2 ? 3 : 0;
            k.accumulate = seed % 4;
            k.unwanted = seed % 5 == 4 ? 1u << (seed % k.n_in) : 0;
            k.seed = seed++;
            check_case(&k);
        }
    }
    k.rows = 3;
    k.cols = k.heads * 6;
    k.pad = 2;
    k.unwanted = 0;
    check_gradient(&k);
}

static void rmsnorm(void)
{
    for (mt_norm_variant v = MT_NORM_ROUND_THEN_SCALE; v <= MT_NORM_ONE_PLUS; v++) {
        for (int32_t heads = 1; heads <= 3; heads += 2) {
            mt_rmsnorm_attr attr = { 1e-5, v, heads };
            check_op((kase){ .op = &cpu_op_rmsnorm, .attr = &attr, .n_in = 2, .heads = heads });
        }
    }
}

/* In BF16 the three variants differ by where they round; values chosen by hand. */
static void rmsnorm_rounds_where_its_variant_says(void)
{
    for (int isa = 0; isa <= test_best_isa(); isa++) {
        for (mt_norm_variant v = 0; v <= MT_NORM_ONE_PLUS; v++) {
            mt_rmsnorm_attr attr = { 1e-6, v, 1 };
            kase k = { .op = &cpu_op_rmsnorm,
                       .attr = &attr,
                       .n_in = 2,
                       .heads = 1,
                       .rows = 40,
                       .cols = 33,
                       .seed = 9 };
            fixture f;
            fixture_init(&f, &k, MT_BF16);
            run_pass(&f, (cpu_isa)isa, false, false);
            int wrong = 0, differs = 0;
            for (int64_t t = 0; t < k.rows; t++) {
                for (int64_t j = 0; j < k.cols; j++) {
                    float r = (float)at(&f.call.aux[0], t, 0);
                    float x = (float)at(&f.call.in[0], t, j), w = (float)at(&f.call.in[1], 0, j);
                    float rounded = mt_bf16_to_f32(mt_f32_to_bf16(x * r));
                    float want[3] = { w * rounded, w * (x * r), (w + 1.0f) * (x * r) };
                    wrong +=
                        mt_f32_to_bf16((float)at(&f.call.out[0], t, j)) != mt_f32_to_bf16(want[v]);
                    differs += mt_f32_to_bf16(want[0]) != mt_f32_to_bf16(want[1]);
                }
            }
            CHECK(wrong == 0 && differs > 0, "variant %d, isa %d: %d of %d", v, isa, wrong,
                  (int)(k.rows * k.cols));
            fixture_finish(&f);
        }
    }
}

static void rope(void)
{
    for (int32_t head_dim = 2; head_dim <= 150; head_dim += 34) {
        for (int variant = 0; variant < 8; variant++) {
            mt_rope_attr attr = { .heads = 3,
                                  .head_dim = head_dim,
                                  .rotary_dim = variant & 2 ? head_dim / 4 * 2 : head_dim,
                                  .pairing = variant & 1,
                                  .attention_factor = 1.25f,
                                  .growth = variant & 4 ? 0.5f : 0.0f,
                                  .growth_positions = 7 };
            for (int32_t i = 0; i < attr.rotary_dim / 2; i++)
                attr.inv_freq[i] = powf(1e4f, -2.0f * (float)i / (float)attr.rotary_dim);
            for (int64_t rows = 1; rows < 140; rows += 66) {
                kase k = { .op = &cpu_op_rope,
                           .attr = &attr,
                           .n_in = 1,
                           .heads = 3,
                           .rows = rows,
                           .cols = 3 * (int64_t)head_dim,
                           .pad = rows % 5,
                           .accumulate = (uint32_t)rows & 1u,
                           .seed = (uint32_t)rows,
                           .max_position = 30 };
                check_case(&k);
                if (rows == 1)
                    check_gradient(&k);
            }
        }
    }
}

/* Rotation by an angle that FP32 forms as inv_freq * position, far out. */
static void rope_forms_its_angle_in_fp32(void)
{
    mt_rope_attr attr = {
        .heads = 1, .head_dim = 2, .rotary_dim = 2, .attention_factor = 1.0f, .inv_freq = { 0.7f }
    };
    for (int isa = 0; isa <= test_best_isa(); isa++) {
        kase k = { .op = &cpu_op_rope,
                   .attr = &attr,
                   .n_in = 1,
                   .heads = 1,
                   .rows = 9,
                   .cols = 2,
                   .seed = 3,
                   .max_position = 131071 };
        fixture f;
        fixture_init(&f, &k, MT_F32);
        for (int64_t t = 0; t < k.rows; t++) {
            f.positions[t] = 131071 - (int32_t)t;
            put(&f.call.in[0], t, 0, 1.0);
            put(&f.call.in[0], t, 1, 0.0);
        }
        run_pass(&f, (cpu_isa)isa, false, false);
        for (int64_t t = 0; t < k.rows; t++) {
            float angle = 0.7f * (float)f.positions[t];
            CHECK(fabs(at(&f.call.out[0], t, 0) - cos((double)angle)) < 1e-7 &&
                      fabs(at(&f.call.out[0], t, 1) - sin((double)angle)) < 1e-7,
                  "isa %d, position %d", isa, f.positions[t]);
        }
        fixture_finish(&f);
    }
}

static void act(void)
{
    for (mt_activation kind = MT_ACT_SILU; kind <= MT_ACT_SIGMOID; kind++) {
        mt_act_attr attr = { kind, 0, 0.0 };
        check_op((kase){ .op = &cpu_op_act, .attr = &attr, .n_in = 1, .heads = 1 });
    }
}

static void glu(void)
{
    for (mt_activation kind = MT_ACT_SILU; kind <= MT_ACT_CLAMPED_SWIGLU; kind++) {
        mt_act_attr attr = { kind, 0, 1.3 };
        check_op((kase){ .op = &cpu_op_glu, .attr = &attr, .n_in = 2, .heads = 1 });
    }
}

static void add_mul_scale(void)
{
    mt_scale_attr attr = { 1.625 };
    check_op((kase){ .op = &cpu_op_add, .n_in = 2, .heads = 1 });
    check_op((kase){ .op = &cpu_op_mul, .n_in = 2, .heads = 1 });
    check_op((kase){ .op = &cpu_op_scale, .attr = &attr, .n_in = 1, .heads = 1 });
}

/* Gemma multiplies by sqrt(hidden) as BF16 has it. */
static void scale_rounds_its_factor(void)
{
    mt_scale_attr attr = { 55.425625842204074 }; /* sqrt(3072); 55.5 in BF16 */
    kase k = { .op = &cpu_op_scale, .attr = &attr, .n_in = 1, .heads = 1, .rows = 1, .cols = 20 };
    for (int isa = 0; isa <= test_best_isa(); isa++) {
        for (mt_dtype dtype = MT_F32; dtype <= MT_F64; dtype++) {
            fixture f;
            fixture_init(&f, &k, dtype);
            put(&f.call.in[0], 0, 3, 1.0);
            run_pass(&f, (cpu_isa)isa, false, false);
            double want = dtype == MT_BF16  ? 55.5
                          : dtype == MT_F32 ? (double)(float)attr.factor
                                            : attr.factor;
            CHECK(at(&f.call.out[0], 0, 3) == want, "%s: %.17g", mt_dtype_name(dtype),
                  at(&f.call.out[0], 0, 3));
            fixture_finish(&f);
        }
    }
}

/* GPT-OSS: bounds belong to the inside, the gate has no lower one. */
static void clamped_swiglu_cuts_gradients_outside_only(void)
{
    static const struct {
        double gate, up;
        bool by_gate, by_up; /* is there a gradient? */
    } rows[] = { { 7, 7, true, true },      { 7.0625, 1, false, true },  { 1, 7.0625, true, false },
                 { 1, -7, true, true },     { 1, -7.0625, true, false }, { -8, 1, true, true },
                 { -1e30, 1, false, true }, { 1e30, 1e30, false, false } };
    enum { N = sizeof rows / sizeof *rows };
    mt_act_attr attr = { MT_ACT_CLAMPED_SWIGLU, 0, 7.0 };
    kase k = { .op = &cpu_op_glu, .attr = &attr, .n_in = 2, .heads = 1, .rows = 1, .cols = N };
    for (int isa = 0; isa <= test_best_isa(); isa++) {
        for (mt_dtype dtype = MT_F32; dtype <= MT_F64; dtype++) {
            fixture f;
            fixture_init(&f, &k, dtype);
            for (int64_t j = 0; j < N; j++) {
                put(&f.call.in[0], 0, j, rows[j].gate);
                put(&f.call.in[1], 0, j, rows[j].up);
                put(&f.call.d_out[0], 0, j, 1.0);
            }
            run_both(&f, (cpu_isa)isa, false);
            for (int64_t j = 0; j < N; j++) {
                double g = fmin(rows[j].gate, 7), u = fmax(-7, fmin(rows[j].up, 7));
                double want = (u + 1) * g / (1 + exp(-1.702 * g));
                double got = at(&f.call.out[0], 0, j);
                CHECK(fabs(got - want) <= (dtype == MT_BF16 ? 0x1p-8 : 1e-6) * fabs(want),
                      "value %d: %g, not %g", (int)j, got, want);
                CHECK((at(&f.call.d_in[0], 0, j) != 0) == rows[j].by_gate, "gate %d", (int)j);
                bool tiny = rows[j].gate < -100; /* by_up itself is 0 there */
                CHECK((at(&f.call.d_in[1], 0, j) != 0) == (rows[j].by_up && !tiny), "up %d",
                      (int)j);
            }
            fixture_finish(&f);
        }
    }
}

/* Very large, very small and non-finite inputs: limits are met, NaN comes out only where one went
 * in. */
static void extreme_inputs(void)
{
    static const double xs[] = { 0.0,  -0.0,  1e-40, -1e-40, 1e-20, -1e-20, 10,   -10,   50,
                                 -50,  87.5,  -87.5, 89,     -89,   104,    -104, 300,   -300,
                                 1001, -1001, 1e10,  -1e10,  1e30,  -1e30,  3e38, -3e38, NAN };
    enum { N = sizeof xs / sizeof *xs };
    for (int gated = 0; gated < 2; gated++) {
        for (mt_activation kind = 0; kind <= (gated ? MT_ACT_CLAMPED_SWIGLU : MT_ACT_SIGMOID);
             kind++) {
            mt_act_attr attr = { kind, 0, 7.0 };
            kase k = { .op = gated ? &cpu_op_glu : &cpu_op_act,
                       .attr = &attr,
                       .n_in = gated ? 2 : 1,
                       .heads = 1,
                       .rows = 1,
                       .cols = N };
            for (mt_dtype dtype = MT_F32; dtype <= MT_BF16; dtype++) {
                fixture ref;
                for (int isa = 0; isa <= test_best_isa(); isa++) {
                    fixture f;
                    fixture_init(&f, &k, dtype);
                    for (int64_t j = 0; j < N; j++) {
                        put(&f.call.in[0], 0, j, xs[j]);
                        if (gated)
                            put(&f.call.in[1], 0, j, 0.5);
                        put(&f.call.d_out[0], 0, j, 1.0);
                    }
                    run_both(&f, (cpu_isa)isa, false);
                    for (int64_t j = 0; j < N; j++) {
                        bool nan = isnan(at(&f.call.out[0], 0, j));
                        CHECK(nan == isnan(xs[j]) &&
                                  isnan(at(&f.call.d_in[0], 0, j)) == isnan(xs[j]),
                              "%s kind %d at %g, isa %d: %g, slope %g", k.op->name, kind, xs[j],
                              isa, at(&f.call.out[0], 0, j), at(&f.call.d_in[0], 0, j));
                    }
                    if (isa) {
                        compare_all(&f, &ref, dtype == MT_BF16 ? 0x1.01p-7 : 2e-6, 1e-30, isa);
                        fixture_finish(&f);
                    } else {
                        ref = f;
                    }
                }
                fixture_finish(&ref);
            }
        }
    }
}

int main(void)
{
    RUN(rmsnorm);
    RUN(rmsnorm_rounds_where_its_variant_says);
    RUN(rope);
    RUN(rope_forms_its_angle_in_fp32);
    RUN(act);
    RUN(glu);
    RUN(add_mul_scale);
    RUN(scale_rounds_its_factor);
    RUN(clamped_swiglu_cuts_gradients_outside_only);
    RUN(extreme_inputs);
    return check_done();
}
