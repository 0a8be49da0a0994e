/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW through its plugin interface: against the same formula in double, cut into ranges, from
 * several threads, at the edges of its keys; and its kernels against each other, bit for bit.
 */
#include "step.h"

#include "../check.h"

#include <megatrain/optim.h>
#include <megatrain/plugin.h>
#include <megatrain/template.h>

#include <math.h>
#include <pthread.h>

/* ---- a host and a configuration ------------------------------------------------------------- */

static char last_error[256];

static void set_error(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(last_error, sizeof last_error, fmt, args);
    va_end(args);
}

static const mt_host host = { .struct_size = sizeof host,
                              .abi_major = MT_ABI_MAJOR,
                              .set_error = set_error };

/* A section with at most one key. */
typedef struct section {
    mt_config base;
    const char *key;
    double value;
    char rejected[32];
} section;

static bool section_has(const mt_config *c, const char *key)
{
    const section *s = (const section *)c;
    return s->key && strcmp(s->key, key) == 0;
}

static mt_status section_float(const mt_config *c, const char *key, double *ret)
{
    (void)key;
    *ret = ((const section *)c)->value;
    return MT_OK;
}

static mt_status section_reject(const mt_config *c, const char *key, const char *fmt, ...)
{
    (void)fmt;
    snprintf(((section *)(uintptr_t)c)->rejected, sizeof((section *)0)->rejected, "%s", key);
    return MT_ERR_INVALID;
}

static section section_of(const char *key, double value)
{
    return (section){ { .struct_size = sizeof(mt_config),
                        .has = section_has,
                        .get_float = section_float,
                        .reject = section_reject },
                      key,
                      value,
                      "" };
}

static const mt_optim *plugin(void)
{
    const mt_plugin *p = mt_plugin_entry_v1(MT_ABI_MAJOR, MT_ABI_MINOR);
    p->init(&host);
    return p->get_interface(MT_OPTIM_INTERFACE);
}

static void *create(const char *key, double value)
{
    section s = section_of(key, value);
    void *optim = NULL;
    CHECK(plugin()->create(&s.base, &optim) == MT_OK, "%s", last_error);
    return optim;
}

/* ---- a tensor with its states --------------------------------------------------------------- */

typedef struct tensor {
    int64_t n;
    uint16_t *hi;
    int16_t *lo;
    float *grad, *m, *v;
} tensor;

static uint64_t rng_state;

static double rng(void) /* in [-1, 1) */
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(rng_state >> 32) / 2147483648.0 - 1.0;
}

static void *copy_of(const void *p, int64_t n, size_t size)
{
    void *q = malloc((size_t)n * size + 1);
    if (p)
        memcpy(q, p, (size_t)n * size);
    else
        memset(q, 0, (size_t)n * size);
    return q;
}

static tensor tensor_copy(const tensor *t)
{
    return (tensor){ t->n,
                     copy_of(t->hi, t->n, 2),
                     copy_of(t->lo, t->n, 2),
                     copy_of(t->grad, t->n, 4),
                     copy_of(t->m, t->n, 4),
                     copy_of(t->v, t->n, 4) };
}

static tensor tensor_of(int64_t n)
{
    tensor none = { .n = n };
    return tensor_copy(&none);
}

static void tensor_random(tensor *t, uint64_t seed)
{
    rng_state = seed;
    for (int64_t i = 0; i < t->n; i++) {
        mt_split_f32((float)rng(), &t->hi[i], &t->lo[i]);
        t->grad[i] = (float)rng();
        t->m[i] = (float)rng();
        t->v[i] = (float)fabs(rng());
    }
}

static void tensor_free(tensor *t)
{
    free(t->hi);
    free(t->lo);
    free(t->grad);
    free(t->m);
    free(t->v);
}

static bool tensor_equal(const tensor *a, const tensor *b)
{
    size_t n = (size_t)a->n;
    return memcmp(a->hi, b->hi, 2 * n) == 0 && memcmp(a->lo, b->lo, 2 * n) == 0 &&
           memcmp(a->m, b->m, 4 * n) == 0 && memcmp(a->v, b->v, 4 * n) == 0;
}

static float master(const tensor *t, int64_t i)
{
    return mt_join_f32(t->hi[i], t->lo[i]);
}

static void update(const void *optim, tensor *t, int64_t first, int64_t n, int64_t step, double lr,
                   double scale, uint32_t flags)
{
    mt_update u = { .struct_size = sizeof u,
                    .flags = flags,
                    .rows = 1,
                    .cols = t->n,
                    .first = first,
                    .n = n,
                    .hi = t->hi + first,
                    .lo = t->lo + first,
                    .grad = t->grad + first,
                    .state = { t->m + first, t->v + first },
                    .step = step,
                    .lr = lr,
                    .grad_scale = scale };
    CHECK(plugin()->update(optim, &u) == MT_OK, "%s", last_error);
}

/* ---- cases ---------------------------------------------------------------------------------- */

static void states_are_declared(void)
{
    void *optim = create(NULL, 0);
    mt_state_spec spec[MT_OPTIM_MAX_STATES];
    CHECK(plugin()->state_specs(optim, spec) == 2);
    CHECK(strcmp(spec[0].name, "m") == 0 && spec[0].dtype == MT_F32);
    CHECK(strcmp(spec[1].name, "v") == 0 && spec[1].dtype == MT_F32);
    CHECK(plugin()->granularity == MT_GRAIN_ELEMENT);
    plugin()->destroy(optim);
    plugin()->destroy(NULL);
}

static void impossible_keys_are_refused(void)
{
    static const struct {
        const char *key;
        double value;
        bool good;
    } keys[] = { { "adam_beta1", 0.0, true },      { "adam_beta1", 1.0, false },
                 { "adam_beta1", -0.1, false },    { "adam_beta1", NAN, false },
                 { "adam_beta2", 0.95, true },     { "adam_beta2", 1.0, false },
                 { "adam_epsilon", 1e-6, true },   { "adam_epsilon", 0.0, false },
                 { "adam_epsilon", 1e-60, false }, { "adam_epsilon", 2.0, false },
                 { "weight_decay", 0.0, true },    { "weight_decay", 1.0, true },
                 { "weight_decay", -1.0, false },  { "weight_decay", 1.5, false },
                 { "weight_decay", NAN, false } };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        section s = section_of(keys[i].key, keys[i].value);
        void *optim = &s;
        mt_status status = plugin()->create(&s.base, &optim);
        CHECK((status == MT_OK) == keys[i].good, "%s %g", keys[i].key, keys[i].value);
        if (status == MT_OK) {
            plugin()->destroy(optim);
            continue;
        }
        CHECK(optim == &s, "the output was touched");
        CHECK(strcmp(s.rejected, keys[i].key) == 0, "%s: '%s'", keys[i].key, s.rejected);
    }
    setenv("MEGATRAIN_CPU_FLAGS", "mmx", 1);
    section s = section_of(NULL, 0);
    void *optim = NULL;
    CHECK(plugin()->create(&s.base, &optim) == MT_ERR_INVALID && !optim);
    CHECK(strstr(last_error, "mmx") != NULL, "%s", last_error);
    unsetenv("MEGATRAIN_CPU_FLAGS");
}

/* 1000 steps of random gradients, clipped now and then, against double. */
static void follows_double(void)
{
    enum { N = 37 };
    for (int decayed = 0; decayed < 2; decayed++) {
        void *optim = create("weight_decay", 0.1);
        tensor t = tensor_of(N);
        double p[N], m[N] = { 0 }, v[N] = { 0 };
        rng_state = 5;
        for (int i = 0; i < N; i++) {
            mt_split_f32((float)rng(), &t.hi[i], &t.lo[i]);
            p[i] = (double)master(&t, i);
        }
        for (int step = 1; step <= 1000; step++) {
            double lr = 3e-4 * (1.0 + cos(step * 0.003)), scale = step % 7 ? 1.0 : 0.25;
            double c1 = 1.0 - pow(0.9, step), c2 = 1.0 - pow(0.999, step);
            for (int i = 0; i < N; i++) {
                t.grad[i] = (float)(rng() * pow(10.0, i % 9 - 6) + 1e-4);
                double g = (double)t.grad[i] * scale;
                m[i] += 0.1 * (g - m[i]);
                v[i] += 0.001 * (g * g - v[i]);
                p[i] -= (decayed ? lr * 0.1 * p[i] : 0.0) +
                        lr / c1 * m[i] / (sqrt(v[i]) / sqrt(c2) + 1e-8);
            }
            update(optim, &t, 0, N, step, lr, scale, decayed ? 0 : MT_PARAM_NO_DECAY);
        }
        for (int i = 0; i < N; i++) {
            CHECK(fabs((double)master(&t, i) - p[i]) < 3e-6, "%d: %.9g, not %.9g", i,
                  (double)master(&t, i), p[i]);
            CHECK(fabs((double)t.m[i] - m[i]) <= 2e-6 * (fabs(m[i]) + 1e-4 * sqrt(v[i])) + 1e-12,
                  "m %d: %.9g, not %.9g", i, (double)t.m[i], m[i]);
            CHECK(fabs((double)t.v[i] - v[i]) <= 1e-5 * v[i], "v %d: %.9g, not %.9g", i,
                  (double)t.v[i], v[i]);
        }
        tensor_free(&t);
        plugin()->destroy(optim);
    }
}

/* Updates far below BF16's spacing (2^-8 at 1.0) add up; then decay alone. */
static void small_updates_do_not_vanish(void)
{
    void *optim = create("weight_decay", 0.1);
    tensor t = tensor_of(1);
    mt_split_f32(1.0f, &t.hi[0], &t.lo[0]);
    t.grad[0] = 0.5f;
    for (int step = 1; step <= 10000; step++)
        update(optim, &t, 0, 1, step, 1e-5, 1.0, MT_PARAM_NO_DECAY);
    /* Each step rounds FP32 once: half a spacing below 1, and always the same way here. */
    CHECK(fabs((double)master(&t, 0) - 0.9) < 10000 * 0x1p-25, "%.9g", (double)master(&t, 0));

    t.grad[0] = t.m[0] = t.v[0] = 0.0f;
    double want = (double)master(&t, 0);
    for (int step = 10001; step <= 20000; step++) {
        update(optim, &t, 0, 1, step, 1e-3, 1.0, 0);
        want *= 1.0 - 1e-3 * 0.1;
    }
    CHECK(fabs((double)master(&t, 0) - want) < 2e-5 * want, "%.9g, not %.9g", (double)master(&t, 0),
          want);

    float before = master(&t, 0);
    update(optim, &t, 0, 1, 20001, 1e-3, 1.0, MT_PARAM_NO_DECAY);
    CHECK(master(&t, 0) == before, "no gradient, no decay, and yet it moved");
    tensor_free(&t);
    plugin()->destroy(optim);
}

static void cut_into_ranges_is_whole(void)
{
    void *optim = create(NULL, 0);
    tensor start = tensor_of(1003);
    tensor_random(&start, 3);
    tensor whole = tensor_copy(&start);
    update(optim, &whole, 0, whole.n, 9, 1e-2, 0.5, 0);
    for (int64_t piece = 1; piece < 70; piece += 4) {
        tensor cut = tensor_copy(&start);
        for (int64_t i = 0; i < cut.n; i += piece)
            update(optim, &cut, i, piece < cut.n - i ? piece : cut.n - i, 9, 1e-2, 0.5, 0);
        CHECK(tensor_equal(&cut, &whole), "pieces of %d", (int)piece);
        tensor_free(&cut);
    }
    tensor_free(&start);
    tensor_free(&whole);
    plugin()->destroy(optim);
}

typedef struct job {
    const void *optim;
    tensor *t;
    int64_t first, n;
} job;

static void *run_job(void *arg)
{
    job *j = arg;
    for (int64_t i = 0; i < j->n; i += 50)
        update(j->optim, j->t, j->first + i, 50 < j->n - i ? 50 : j->n - i, 2, 1e-3, 1.0, 0);
    return NULL;
}

static void ranges_run_concurrently(void)
{
    enum { THREADS = 4, EACH = 2501 };
    void *optim = create(NULL, 0);
    tensor whole = tensor_of(THREADS * EACH);
    tensor_random(&whole, 4);
    tensor shared = tensor_copy(&whole);
    update(optim, &whole, 0, whole.n, 2, 1e-3, 1.0, 0);
    pthread_t thread[THREADS];
    job jobs[THREADS];
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (job){ optim, &shared, (int64_t)i * EACH, EACH };
        pthread_create(&thread[i], NULL, run_job, &jobs[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    CHECK(tensor_equal(&shared, &whole));
    tensor_free(&whole);
    tensor_free(&shared);
    plugin()->destroy(optim);
}

/* Every kernel gives the scalar one's bits, at every length and on unpleasant numbers. */
static void kernels_agree_bit_for_bit(void)
{
    static const float odd[] = { 0.0f,   -0.0f,   1e-45f, -1e-40f, 1e-38f,       1e30f,
                                 -3e38f, 65504.f, 1e-20f, 1.0f,    3.3961775e38f };
    adamw_constants k = { 1.0f, 0.1f, 0.999f, 0.001f, 1.5f, 1e-8f, 1e-3f, 1e-5f };
    for (int isa = ADAMW_BASE; isa < ADAMW_ISAS; isa++) {
        adamw_step_fn *fn = adamw_step_for((adamw_isa)isa);
        if (!fn)
            continue;
        for (int64_t n = 0; n < 140; n++) {
            tensor a = tensor_of(n);
            tensor_random(&a, (uint64_t)n);
            for (int64_t i = 0; i < n; i++) {
                float x = odd[(i + n) % 11];
                if (i % 3 == 0)
                    a.grad[i] = x;
                if (i % 5 == 0)
                    mt_split_f32(x, &a.hi[i], &a.lo[i]);
                if (i % 7 == 0)
                    a.m[i] = x;
                if (i % 7 == 1)
                    a.v[i] = fabsf(x);
            }
            tensor b = tensor_copy(&a);
            adamw_step_scalar(&k, n, a.hi, a.lo, a.grad, a.m, a.v);
            fn(&k, n, b.hi, b.lo, b.grad, b.m, b.v);
            CHECK(tensor_equal(&a, &b), "kernel %d, %d elements", isa, (int)n);
            tensor_free(&a);
            tensor_free(&b);
        }
    }
}

/* A NaN gradient makes the master weight the one NaN that survives the split. */
static void nan_is_canonical(void)
{
    for (int isa = 0; isa < ADAMW_ISAS; isa++) {
        adamw_step_fn *fn = adamw_step_for((adamw_isa)isa);
        if (!fn)
            continue;
        adamw_constants k = { 1.0f, 0.1f, 0.999f, 0.001f, 1.5f, 1e-8f, 1e-3f, 0.0f };
        tensor t = tensor_of(17);
        tensor_random(&t, 6);
        for (int64_t i = 0; i < t.n; i += 2)
            t.grad[i] = mt_bits_f32(0xff80abcdu);
        fn(&k, t.n, t.hi, t.lo, t.grad, t.m, t.v);
        for (int64_t i = 0; i < t.n; i++) {
            bool canonical = t.hi[i] == 0x7fc0 && t.lo[i] == 0;
            CHECK(canonical == (i % 2 == 0), "kernel %d, element %d: %04x", isa, (int)i, t.hi[i]);
        }
        tensor_free(&t);
    }
}

int main(void)
{
    RUN(states_are_declared);
    RUN(impossible_keys_are_refused);
    RUN(follows_double);
    RUN(small_updates_do_not_vanish);
    RUN(cut_into_ranges_is_whole);
    RUN(ranges_run_concurrently);
    RUN(kernels_agree_bit_for_bit);
    RUN(nan_is_canonical);
    return check_done();
}
