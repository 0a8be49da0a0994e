/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector layer on every instruction set of this machine: errors of its functions in ulp over
 * all of FP32, limits, conversions, partial loads and stores.
 */
#include "isa.h"
#include "simd_probe.h"

#include "../check.h"

#include <megatrain/base.h>

#include <math.h>

static const simd_probe *probes[3];
static int n_probes;

/* |got - want| in spacings of FP32 at want; 0 where both are the same infinity. */
static double ulp(float got, double want)
{
    float w = (float)want, a = fabsf(w);
    if (isinf(w))
        return got == w ? 0.0 : INFINITY;
    double spacing = a < 0x1p-126f   ? 0x1p-149
                     : a >= 0x1p127f ? 0x1p104
                                     : (double)(nextafterf(a, INFINITY) - a);
    return fabs((double)got - want) / spacing;
}

static double sigmoid64(double x)
{
    return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x));
}

/* The worst error over every `STRIDE`th float of all bit patterns; NaN must stay NaN. */
static void check_function(void (*fn)(float *, const float *, int64_t), double (*want)(double),
                           double limit, const char *name, int width)
{
    enum { STRIDE = 1031, N = 1021 };
    float in[N], out[N];
    double worst = 0.0;
    float worst_at = 0.0f;
    for (uint64_t u = 0; u < 1ull << 32; u += (uint64_t)STRIDE * N) {
        for (int i = 0; i < N; i++)
            in[i] = mt_bits_f32((uint32_t)(u + (uint64_t)STRIDE * (uint64_t)i));
        fn(out, in, N);
        for (int i = 0; i < N; i++) {
            if (isnan(in[i])) {
                CHECK(isnan(out[i]), "%s lost a NaN, width %d", name, width);
                continue;
            }
            double e = ulp(out[i], want((double)in[i]));
            if (!(e <= worst)) {
                worst = e;
                worst_at = in[i];
            }
        }
    }
    CHECK(worst <= limit, "%s, width %d: %.3f ulp at %.9g", name, width, worst, (double)worst_at);
}

static void functions_keep_their_error(void)
{
    for (int k = 0; k < n_probes; k++) {
        const simd_probe *p = probes[k];
        check_function(p->exp, exp, 1.1, "exp", p->width);
        check_function(p->tanh, tanh, 2.5, "tanh", p->width);
        check_function(p->sigmoid, sigmoid64, 2.5, "sigmoid", p->width);
    }
}

static void functions_meet_their_limits(void)
{
    float x[] = { INFINITY, -INFINITY, 3e38f, -3e38f, 0.0f, -0.0f, 88.0f, -103.0f, 1e-45f };
    enum { N = sizeof x / sizeof *x };
    float y[N];
    for (int k = 0; k < n_probes; k++) {
        const simd_probe *p = probes[k];
        p->exp(y, x, N);
        CHECK(y[0] == INFINITY && y[1] == 0 && y[2] == INFINITY && y[3] == 0);
        CHECK(y[4] == 1 && y[5] == 1 && y[6] < INFINITY && y[7] == 0x1p-149f);
        p->tanh(y, x, N);
        CHECK(y[0] == 1 && y[1] == -1 && y[2] == 1 && y[3] == -1);
        CHECK(y[4] == 0 && !signbit(y[4]) && y[5] == 0 && signbit(y[5]) && y[8] == x[8]);
        p->sigmoid(y, x, N);
        CHECK(y[0] == 1 && y[1] == 0 && y[2] == 1 && y[3] == 0 && y[4] == 0.5f && y[5] == 0.5f);
    }
}

/* Both directions of BF16 on every upper half and the lower halves around a tie. */
static void bf16_is_the_scalar_conversion(void)
{
    static const uint16_t lows[] = { 0, 1, 0x7fff, 0x8000, 0x8001, 0xffff };
    enum { N = 65536 };
    float *in = malloc(N * sizeof *in), *back = malloc(N * sizeof *back);
    uint16_t *out = malloc(N * sizeof *out), *all = malloc(N * sizeof *all);
    for (int k = 0; k < n_probes; k++) {
        for (size_t l = 0; l < sizeof lows / sizeof *lows; l++) {
            for (uint32_t i = 0; i < N; i++) {
                in[i] = mt_bits_f32(i << 16 | lows[l]);
                all[i] = (uint16_t)i;
            }
            probes[k]->to_bf16(out, in, N);
            probes[k]->from_bf16(back, all, N);
            int wrong = 0;
            for (uint32_t i = 0; i < N; i++)
                wrong += out[i] != mt_f32_to_bf16(in[i]) || mt_f32_bits(back[i]) != i << 16;
            CHECK(wrong == 0, "width %d, low half %04x: %d differ", probes[k]->width, lows[l],
                  wrong);
        }
    }
    free(in);
    free(back);
    free(out);
    free(all);
}

/* Partial stores leave the elements behind them alone. */
static void tails_touch_only_their_own(void)
{
    float in[48] = { 0 }, out[48], back[48];
    uint16_t half[48];
    for (int k = 0; k < n_probes; k++) {
        for (int n = 0; n < 40; n++) {
            for (int i = 0; i < 48; i++) {
                out[i] = back[i] = 7.0f;
                half[i] = 7;
            }
            probes[k]->exp(out, in, n);
            probes[k]->to_bf16(half, in, n);
            probes[k]->from_bf16(back, half, n);
            int wrong = 0;
            for (int i = 0; i < 48; i++)
                wrong += out[i] != (i < n ? 1.0f : 7.0f) || half[i] != (i < n ? 0 : 7) ||
                         back[i] != (i < n ? 0.0f : 7.0f);
            CHECK(wrong == 0, "width %d, n %d", probes[k]->width, n);
        }
    }
}

static void max_and_min_return_the_second_where_one_is_nan(void)
{
    float a[] = { 1, 2, NAN, 3, -0.0f }, b[] = { 2, 1, 5, NAN, 1 }, y[5];
    for (int k = 0; k < n_probes; k++) {
        probes[k]->max(y, a, b, 5);
        CHECK(y[0] == 2 && y[1] == 2 && y[2] == 5 && isnan(y[3]) && y[4] == 1);
        probes[k]->min(y, a, b, 5);
        CHECK(y[0] == 1 && y[1] == 1 && y[2] == 5 && isnan(y[3]) && y[4] == 0);
    }
}

/* Every lane takes part once; halves are added until one is left. */
static void sums_take_every_lane_in_order(void)
{
    for (int k = 0; k < n_probes; k++) {
        int w = probes[k]->width;
        float x[16] = { 0 }, tree[16] = { 0 };
        for (int i = 0; i < w; i++)
            x[i] = tree[i] = powf(-1.7f, (float)(i * 7 % 16));
        for (int half = w / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++)
                tree[i] += tree[i + half];
        CHECK(probes[k]->sum(x) == tree[0], "width %d", w);
        for (int i = 0; i < w; i++) {
            float y[16] = { 0 };
            for (int j = 0; j < w; j++)
                y[j] = j == i ? -1.0f : -2.0f;
            CHECK(probes[k]->hmax(y) == -1.0f, "width %d, lane %d", w, i);
        }
    }
}

int main(void)
{
    probes[n_probes++] = &simd_probe_base;
#if defined(__x86_64__)
    if (test_best_isa() >= 1)
        probes[n_probes++] = &simd_probe_avx2;
    if (test_best_isa() >= 2)
        probes[n_probes++] = &simd_probe_avx512;
#endif
    RUN(functions_keep_their_error);
    RUN(functions_meet_their_limits);
    RUN(bf16_is_the_scalar_conversion);
    RUN(tails_touch_only_their_own);
    RUN(max_and_min_return_the_second_where_one_is_nan);
    RUN(sums_take_every_lane_in_order);
    return check_done();
}
