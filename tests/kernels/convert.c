/* SPDX-License-Identifier: Apache-2.0
 *
 * The bit-level conversions of the SDK: BF16 rounding and the split of the FP32 master, for all
 * 65536 upper halves with the lower halves where something can go wrong.
 */
#include "../check.h"

#include <megatrain/base.h>

#include <math.h>

static const uint16_t lows[] = { 0x0000, 0x0001, 0x0002, 0x00ff, 0x3fff, 0x4000,
                                 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xbfff,
                                 0xc000, 0xff00, 0xfffe, 0xffff, 0x1234, 0x9abc };
enum { LOWS = sizeof lows / sizeof *lows };

static bool is_nan(uint32_t u)
{
    return (u & 0x7fffffffu) > 0x7f800000u;
}

/* The nearer of the two BF16 neighbours in magnitude, the upper one at a tie when `up` or, to even,
 * when the lower one is odd. Works on the bits as on a number line: Inf follows the largest. */
static uint16_t nearest(uint32_t u, bool tie_up)
{
    uint16_t upper = (uint16_t)(u >> 16), low = (uint16_t)u;
    bool up = low > 0x8000 || (low == 0x8000 && (tie_up || (upper & 1)));
    return (uint16_t)(upper + (up ? 1 : 0));
}

static void bf16_rounds_to_nearest_even(void)
{
    int wrong = 0;
    for (uint32_t hi = 0; hi < 0x10000; hi++) {
        for (int i = 0; i < LOWS; i++) {
            uint32_t u = hi << 16 | lows[i];
            uint16_t got = mt_f32_to_bf16(mt_bits_f32(u));
            bool good = is_nan(u) ? is_nan((uint32_t)got << 16) && got >> 15 == u >> 31
                                  : got == nearest(u, false);
            CHECK(good || wrong++ > 5, "%08x gave %04x", u, got);
        }
        uint32_t back = mt_f32_bits(mt_bf16_to_f32((uint16_t)hi));
        CHECK(back == hi << 16, "%04x widened to %08x", hi, back);
    }
    CHECK(mt_f32_to_bf16(3.4028235e38f) == 0x7f80, "the largest FP32 rounds to Inf");
    CHECK(mt_f32_to_bf16(mt_bits_f32(0x7f800001)) == 0x7fc0, "a quiet NaN");
    CHECK(mt_f32_to_bf16(1.00390625f) == 0x3f80, "a tie, down to even");
    CHECK(mt_f32_to_bf16(1.01171875f) == 0x3f82, "a tie, up to even");
}

static void split_is_exact_and_nearest(void)
{
    int wrong = 0;
    for (uint32_t upper = 0; upper < 0x10000; upper++) {
        for (int i = 0; i < LOWS; i++) {
            uint32_t u = upper << 16 | lows[i];
            uint16_t hi;
            int16_t lo;
            mt_split_f32(mt_bits_f32(u), &hi, &lo);
            uint32_t joined = mt_f32_bits(mt_join_f32(hi, lo));
            uint32_t want = is_nan(u) ? 0x7fc00000u : u;
            CHECK(joined == want || wrong++ > 5, "%08x came back as %08x", u, joined);
            uint16_t want_hi = is_nan(u) ? 0x7fc0 : nearest(u, true);
            CHECK(hi == want_hi || wrong++ > 5, "%08x: hi %04x, not %04x", u, hi, want_hi);
        }
    }
}

static void split_at_the_edges(void)
{
    static const struct {
        uint32_t u;
        uint16_t hi;
        int16_t lo;
    } rows[] = {
        { 0x00000000, 0x0000, 0 },      { 0x80000000, 0x8000, 0 }, /* zeros keep their sign */
        { 0x7f800000, 0x7f80, 0 },      { 0xff800000, 0xff80, 0 }, /* infinities */
        { 0x3f808000, 0x3f81, -32768 }, /* a tie goes away from zero, lo at its limit */
        { 0x3f807fff, 0x3f80, 32767 },  { 0xbf808000, 0xbf81, -32768 },
        { 0x00000001, 0x0000, 1 }, /* the smallest subnormal */
        { 0x00008000, 0x0001, -32768 }, { 0x007fffff, 0x0080, -1 },
        { 0x7f7fffff, 0x7f80, -1 }, /* finite, yet hi is Inf: still restored */
        { 0x7f7f8000, 0x7f80, -32768 }, { 0x7f7f7fff, 0x7f7f, 32767 },
        { 0x7f800001, 0x7fc0, 0 },      { 0xffffffff, 0x7fc0, 0 }, /* every NaN becomes one */
        { 0x7fc08000, 0x7fc0, 0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint16_t hi;
        int16_t lo;
        mt_split_f32(mt_bits_f32(rows[i].u), &hi, &lo);
        CHECK(hi == rows[i].hi && lo == rows[i].lo, "%08x: %04x %d", rows[i].u, hi, lo);
    }
}

int main(void)
{
    RUN(bf16_rounds_to_nearest_even);
    RUN(split_is_exact_and_nearest);
    RUN(split_at_the_edges);
    return check_done();
}
