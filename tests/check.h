/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole test harness: named cases, checks that go on after a failure, one closing line.
 */
#ifndef MT_TEST_CHECK_H
#define MT_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One set of counters for a program, however many of its files use CHECK: weak definitions merge
 * where static ones would let a failure in a helper's file go uncounted. */
__attribute__((weak)) int check_passed, check_failed, check_case_failed;

/* Records a failure with its place when `cond` does not hold; further arguments explain (printf).
 */
#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            check_case_failed = 1;                                                                 \
            fprintf(stderr, "%s:%d: not so: %s", __FILE__, __LINE__, #cond);                       \
            fprintf(stderr, "  " __VA_ARGS__);                                                     \
            fputc('\n', stderr);                                                                   \
        }                                                                                          \
    } while (0)

/* Runs one case: a void function without arguments. With MT_TEST_ONLY set, only the case named. */
#define RUN(fn)                                                                                    \
    do {                                                                                           \
        const char *only_ = getenv("MT_TEST_ONLY");                                                \
        if (only_ && strcmp(only_, #fn) != 0)                                                      \
            break;                                                                                 \
        check_case_failed = 0;                                                                     \
        fn();                                                                                      \
        check_case_failed ? check_failed++ : check_passed++;                                       \
        fprintf(stderr, "%-6s %s\n", check_case_failed ? "FAILED" : "ok", #fn);                    \
    } while (0)

/* Closing line and exit status of a test program. */
static inline int check_done(void)
{
    printf("%d passed, %d failed\n", check_passed, check_failed);
    return check_failed || !check_passed ? 1 : 0;
}

#endif
