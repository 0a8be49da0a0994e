/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations of a gated delta net on CUDA against the CPU: documents of less than a chunk and
 * of several, odd sizes and those of published models, and generation against a whole forward pass.
 *
 *     MT_TEST_SMALL=1     small shapes only
 *     MT_TEST_ONLY=name   one case
 */
#include "side.h"

static const int32_t docs_37[] = { 0, 1, 6, 37 };
static const int32_t docs_300[] = { 0, 64, 67, 290, 300 };
static const int32_t docs_75[] = { 0, 70, 75 }; /* chunks of each kind */
static const int32_t docs_40[] = { 0, 40 };

static void convolution(void)
{
    for (int64_t width = 1; width < 6; width += 3) {
        op_case odd = conv_case(docs_37, 3, 101, width), even = conv_case(docs_300, 4, 1024, width);
        op_check(&odd, 40, (op_bounds){ 2e-6, 5e-4 });
        op_check(&even, 41, (op_bounds){ 2e-6, 5e-4 });
    }
}

/* a_log and dt_bias in the compute dtype, and streamed in the statistics dtype. */
static void decay(void)
{
    for (int stat = 0; stat < 2; stat++) {
        op_case c = decay_case(700, 5, stat);
        c.in[0].scale = 20;
        op_check(&c, 42, (op_bounds){ 1e-6, 5e-4 });
    }
}

static void delta_rule(void)
{
    static const mt_delta_attr attr[] = { { 2, 2, 8, 8, 1e-6, 0.35 },
                                          { 1, 2, 7, 5, 1e-3, 0.4 },
                                          { 1, 1, 33, 40, 1e-6, 0.2 },
                                          { 1, 1, 100, 70, 1e-6, 0.1 } };
    for (size_t i = 0; i < sizeof attr / sizeof *attr; i++) {
        op_case c = delta_case(docs_75, 2, &attr[i]);
        op_check(&c, 43, (op_bounds){ 3e-5, 2e-3 });
    }
}

static void large_delta_rule(void)
{
    static const mt_delta_attr attr[] = { { 2, 2, 8, 8, 1e-6, 0.35 },
                                          { 2, 6, 7, 5, 1e-3, 0.4 },
                                          { 1, 2, 33, 40, 1e-6, 0.2 },
                                          { 2, 4, 128, 128, 1e-6, 0.0884 },
                                          { 1, 1, 100, 70, 1e-6, 0.1 } };
    for (size_t i = 0; i < sizeof attr / sizeof *attr; i++) {
        op_case few = delta_case(docs_37, 3, &attr[i]);
        op_check(&few, 43, (op_bounds){ 3e-5, 2e-3 });
        op_case many = delta_case(docs_300, 4, &attr[i]);
        op_check(&many, 44, (op_bounds){ 3e-5, 2e-3 });
    }
}

/* e^-c of a chunk would overflow; the gradient of g is a small difference of large numbers. */
static void strong_decay(void)
{
    const mt_delta_attr attr = { 1, 2, 64, 64, 1e-6, 0.125 };
    op_case c = only_small() ? delta_case(docs_75, 2, &attr) : delta_case(docs_300, 4, &attr);
    c.in[3].middle = -6;
    c.in[3].scale = 5.5;
    op_check(&c, 45, (op_bounds){ 2e-4, 2e-3 });
}

static void check_generation(const op_case *whole, op_value state, mt_dtype dtype, int32_t prefill,
                             double tolerance)
{
    op_check_generation(whole, &(op_generation){ .side = &cuda,
                                                 .reference = &cpu,
                                                 .dtype = dtype,
                                                 .reference_dtype = dtype,
                                                 .state = { state },
                                                 .prefill = prefill,
                                                 .decode = 3,
                                                 .tolerance = tolerance });
}

static void generation(void)
{
    static const mt_delta_attr attr[] = { { 2, 6, 7, 5, 1e-3, 0.4 },
                                          { 1, 2, 128, 128, 1e-6, 0.1 } };
    for (int32_t prefill = 1; prefill < 24; prefill += 11) {
        op_case conv = conv_case(docs_40, 1, 133, 4);
        check_generation(&conv, conv_state(&conv), MT_F32, prefill, 1e-6);
        check_generation(&conv, conv_state(&conv), MT_BF16, prefill, 2e-3);
        for (int i = 0; i < 2; i++) {
            op_case delta = delta_case(docs_40, 1, &attr[i]);
            check_generation(&delta, delta_state(&attr[i]), MT_F32, prefill, 1e-5);
            check_generation(&delta, delta_state(&attr[i]), MT_BF16, prefill, 5e-3);
        }
    }
}

int main(void)
{
    sides_open();
    RUN(convolution);
    RUN(decay);
    RUN(delta_rule);
    RUN_LARGE(large_delta_rule);
    RUN(strong_decay);
    RUN(generation);
    sides_close();
    return check_done();
}
