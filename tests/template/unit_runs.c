/* SPDX-License-Identifier: Apache-2.0
 *
 * Tables of units: each letter of a word is a unit, equal letters are alike.
 */
#include "core/template/unit_runs.h"

#include "../check.h"

static bool alike(const void *word, int32_t a, int32_t b)
{
    return ((const char *)word)[a] == ((const char *)word)[b];
}

/* "e b2 s1": the letter and how many of it; "(2x5)" behind lines of which 2 stand there 5 times. */
static void expect(const char *word, const char *table)
{
    unit_run run[64];
    char text[256] = "";
    size_t at = 0;
    int32_t covered = 0;
    int32_t n = unit_runs((int32_t)strlen(word), alike, word, run);
    for (int32_t i = 0; i < n; i++) {
        const unit_run *r = &run[i];
        CHECK(r->first == covered, "%s", word);
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%c%d", i ? " " : "", word[r->first],
                               r->last - r->first + 1);
        if (r->times > 1)
            at += (size_t)snprintf(text + at, sizeof text - at, "(%dx%d)", r->lines, r->times);
        covered = (r->times > 1 ? r->until : r->last) + 1;
    }
    CHECK(covered == (int32_t)strlen(word), "%s: %d of its units", word, covered);
    CHECK(strcmp(text, table) == 0, "%s: %s, expected %s", word, text, table);
}

static void neighbours_share_a_line(void)
{
    expect("", "");
    expect("ebbbbh", "e1 b4 h1");
    expect("edddmmmmh", "e1 d3 m4 h1");
}

static void what_repeats_stands_once(void)
{
    expect("esfsfsfh", "e1 s1 f1(2x3) h1");
    expect("esssfsssfsssfssh", "e1 s3 f1(2x3) s2 h1");
    expect("eabcabch", "e1 a1 b1 c1(3x2) h1");
    expect("esfsfkfkfkfh", "e1 s1 f1 s1 f1 k1(2x3) f1 h1");
}

static void little_is_left_as_it_is(void)
{
    expect("esfsfh", "e1 s1 f1 s1 f1 h1"); /* a line to tell of it would save one only */
    expect("essfsfsssfh", "e1 s2 f1 s1 f1 s3 f1 h1");
}

int main(void)
{
    RUN(neighbours_share_a_line);
    RUN(what_repeats_stands_once);
    RUN(little_is_left_as_it_is);
    return check_done();
}
