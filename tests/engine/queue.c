/* SPDX-License-Identifier: Apache-2.0
 *
 * The order in which workers take what they are given.
 */
#include "core/engine/work.h"

#include "../check.h"

static work_queue q;

static void push(int32_t lane, int32_t param)
{
    work_queue_push(&q, lane, &(work){ .param = param, .end = 1, .slice = 1 });
}

static int32_t take(int32_t urgent)
{
    const work *w = work_queue_next(&q, urgent);
    int32_t param = w ? w->param : -1;
    if (w)
        work_queue_drop(&q);
    return param;
}

static void the_lowest_lane_comes_first(void)
{
    CHECK(work_queue_init(&q, 4, 8) == MT_OK);
    CHECK(take(-1) == -1 && take(3) == -1);
    push(2, 20);
    push(1, 10);
    push(2, 21);
    push(1, 11);
    CHECK(q.n == 4);
    CHECK(take(-1) == 10);
    push(0, 1); /* lower than what was taken last */
    CHECK(take(-1) == 1 && take(-1) == 11 && take(-1) == 20);
    push(3, 30);
    CHECK(take(-1) == 21 && take(-1) == 30 && take(-1) == -1 && q.n == 0);
    work_queue_free(&q);
}

static void the_urgent_lane_comes_before_it(void)
{
    CHECK(work_queue_init(&q, 4, 8) == MT_OK);
    push(1, 10);
    push(3, 30);
    push(3, 31);
    CHECK(take(3) == 30 && take(-1) == 10 && take(3) == 31 && take(3) == -1);
    push(1, 11);
    CHECK(take(3) == 11); /* there is nothing urgent */
    work_queue_free(&q);
}

static void places_are_used_again(void)
{
    enum { CAP = 5 };
    CHECK(work_queue_init(&q, 3, CAP) == MT_OK);
    for (int32_t i = 0; i < 100; i++) {
        CHECK(!work_queue_full(&q));
        push(i % 3, i);
        if (i >= CAP - 1) {
            CHECK(work_queue_full(&q) && q.n == CAP);
            CHECK(take(-1) >= 0);
        }
    }
    while (take(-1) >= 0)
        ;
    CHECK(q.n == 0);
    work_queue_free(&q);
}

static void a_slice_of_it_may_be_taken(void)
{
    CHECK(work_queue_init(&q, 1, 1) == MT_OK);
    work_queue_push(&q, 0, &(work){ .param = 7, .end = 30, .slice = 10 });
    work_queue_next(&q, -1)->first += 10;
    CHECK(work_queue_next(&q, -1)->first == 10 && q.n == 1);
    work_queue_free(&q);
}

int main(void)
{
    RUN(the_lowest_lane_comes_first);
    RUN(the_urgent_lane_comes_before_it);
    RUN(places_are_used_again);
    RUN(a_slice_of_it_may_be_taken);
    return check_done();
}
