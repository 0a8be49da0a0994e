/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU device: memory, queues, events, copies, and the compute pool.
 */
#include "device.h"
#include "side.h"

#include <math.h>
#include <stdatomic.h>
#include <time.h>

static const mt_backend *b;
static void *device, *q1, *q2;

static void set_up(void)
{
    b = op_backend();
    unsetenv("MEGATRAIN_CPU_FLAGS");
    if (b->open(0, 3, &device) != MT_OK || b->queue_create(device, "one", &q1) != MT_OK ||
        b->queue_create(device, "two", &q2) != MT_OK)
        abort();
}

static void tear_down(void)
{
    CHECK(b->error(device) == MT_OK, "device failed");
    b->queue_destroy(device, q1);
    b->queue_destroy(device, q2);
    b->close(device);
}

static void info(void)
{
    set_up();
    mt_device_info i;
    b->info(device, &i);
    CHECK(i.compute_threads == 3, "%u", i.compute_threads);
    CHECK(i.unified == 1 && i.name[0] && i.details[0], "%s", i.details);
    CHECK(i.memory_total > 0 && i.memory_free > 0 && i.memory_free <= i.memory_total, "%lld %lld",
          (long long)i.memory_free, (long long)i.memory_total);
    tear_down();
}

static void bad_flags(void)
{
    void *d = NULL;
    b = op_backend();
    setenv("MEGATRAIN_CPU_FLAGS", "sse9", 1);
    CHECK(b->open(0, 1, &d) == MT_ERR_INVALID && !d, "accepted");
    unsetenv("MEGATRAIN_CPU_FLAGS");
    CHECK(b->open(1, 1, &d) == MT_ERR_NOT_FOUND && !d, "accepted");
}

static void memory(void)
{
    static const int64_t size[] = { 0, 1, 257, 1 << 20, (2 << 20) - 1, 2 << 20, (5 << 20) + 3 };
    set_up();
    for (int i = 0; i < 7; i++) {
        void *p = NULL;
        CHECK(b->device_alloc(device, size[i], &p) == MT_OK && (uintptr_t)p % 256 == 0, "%d", i);
        memset(p, 1, (size_t)size[i]);
        b->device_free(device, p, size[i]);
    }
    void *p = &p;
    CHECK(b->host_alloc(device, INT64_MAX, &p) == MT_ERR_NOMEM && p == &p, "that much");
    CHECK(b->host_alloc(device, (int64_t)1 << 60, &p) == MT_ERR_NOMEM && p == &p, "that much");
    tear_down();
}

/* Far more commands than the ring holds, each depending on the one before. */
static void order(void)
{
    enum { N = 2000 };
    static int32_t x[N + 1];
    set_up();
    x[0] = 42;
    for (int i = 0; i < N; i++)
        b->copy(device, q1, &x[i + 1], &x[i], sizeof x[0]);
    b->queue_sync(device, q1);
    CHECK(x[N] == 42, "%d", x[N]);
    b->fill(device, q1, x, 0x01, sizeof x);
    b->copy_out(device, q1, x, &x[1], sizeof x[0]);
    b->queue_sync(device, q1);
    CHECK(x[0] == 0x01010101, "%x", x[0]);
    tear_down();
}

/* A value goes to and fro between two queues; one pair of events is used over and over. */
static void ping_pong(void)
{
    enum { N = 300 };
    static int32_t a[N + 1], c[N + 1];
    void *there, *back;
    set_up();
    b->event_create(device, &there);
    b->event_create(device, &back);
    CHECK(b->event_query(device, there), "an event never recorded counts as done");
    b->event_wait(device, q1, there);
    b->event_sync(device, there);
    a[0] = 5;
    for (int i = 0; i < N; i++) {
        if (i % 50 == 0)
            b->delay(device, q1, 2000000);
        b->copy(device, q1, &c[i], &a[i], sizeof a[0]);
        b->event_record(device, there, q1);
        b->event_wait(device, q2, there);
        if (i % 70 == 0)
            b->delay(device, q2, 2000000);
        b->copy(device, q2, &a[i + 1], &c[i], sizeof a[0]);
        b->event_record(device, back, q2);
        b->event_wait(device, q1, back);
    }
    b->event_sync(device, back);
    CHECK(a[N] == 5, "%d", a[N]);
    CHECK(b->event_query(device, back), "passed");
    b->event_destroy(device, there);
    b->event_destroy(device, back);
    tear_down();
}

/* A wait refers to the record before it, not to a later one that never comes to pass before it. */
static void wait_is_by_value(void)
{
    void *e, *late;
    int32_t x = 0, one = 1;
    set_up();
    b->event_create(device, &e);
    b->event_create(device, &late);
    b->copy(device, q1, &x, &one, sizeof x);
    b->event_record(device, e, q1);
    b->event_wait(device, q2, e);
    b->event_record(device, late, q2);
    /* q1 now waits for q2, and e is recorded behind that: if q2 waited for this record, neither
     * queue would ever go on. */
    b->event_wait(device, q1, late);
    b->event_record(device, e, q1);
    b->queue_sync(device, q2);
    b->queue_sync(device, q1);
    CHECK(x == 1, "%d", x);
    b->event_destroy(device, e);
    b->event_destroy(device, late);
    tear_down();
}

static void query_before_done(void)
{
    void *e;
    set_up();
    b->event_create(device, &e);
    b->delay(device, q1, 50000000);
    b->event_record(device, e, q1);
    CHECK(!b->event_query(device, e), "the queue is still held up");
    b->event_sync(device, e);
    CHECK(b->event_query(device, e), "not done after sync");
    b->event_destroy(device, e);
    tear_down();
}

/* An event outlives the queue it was recorded in, and a new queue in its place. */
static void queue_reuse(void)
{
    void *e, *q;
    set_up();
    b->event_create(device, &e);
    CHECK(b->queue_create(device, "short", &q) == MT_OK, " ");
    b->delay(device, q, 1000000);
    b->event_record(device, e, q);
    b->queue_destroy(device, q);
    CHECK(b->event_query(device, e), "queue_destroy lets the queue run out");
    CHECK(b->queue_create(device, "again", &q) == MT_OK, " ");
    b->delay(device, q, 20000000);
    CHECK(b->event_query(device, e), "still done");
    b->event_wait(device, q1, e);
    b->queue_sync(device, q1);
    b->queue_destroy(device, q);
    b->event_destroy(device, e);
    tear_down();
}

static void timestamps(void)
{
    uint64_t t[2];
    set_up();
    b->timestamp(device, q1, &t[0]);
    b->delay(device, q1, 3000000);
    b->timestamp(device, q1, &t[1]);
    b->queue_sync(device, q1);
    CHECK(t[1] - t[0] >= 3000000, "%llu", (unsigned long long)(t[1] - t[0]));
    tear_down();
}

static void join(void)
{
    enum { N = 1003 };
    static float x[N], y[N];
    static uint16_t hi[N];
    static int16_t lo[N];
    set_up();
    for (int i = 0; i < N; i++) {
        x[i] = mt_bits_f32(0x3f7f0000u + (uint32_t)i * 12347u);
        mt_split_f32(x[i], &hi[i], &lo[i]);
    }
    b->copy_in_join(device, q1, y, hi, lo, N, NULL);
    b->queue_sync(device, q1);
    CHECK(memcmp(x, y, sizeof x) == 0, "not the same bits");
    tear_down();
}

static void sum_squares(void)
{
    enum { N = 200003 };
    float *x = malloc(N * sizeof *x);
    double want = 0, got[3];
    for (int i = 0; i < N; i++) {
        x[i] = (float)(i % 1001) / 77 - 5;
        want += (double)x[i] * x[i];
    }
    for (int threads = 1; threads <= 3; threads++) {
        b = op_backend();
        void *d, *q;
        if (b->open(0, threads, &d) != MT_OK || b->queue_create(d, "q", &q) != MT_OK)
            abort();
        void *scratch = malloc((size_t)b->sum_squares_scratch(d, N));
        b->sum_squares(d, q, x, N, &got[threads - 1], scratch);
        b->queue_sync(d, q);
        free(scratch);
        b->queue_destroy(d, q);
        b->close(d);
    }
    CHECK(fabs(got[0] - want) < 1e-9 * want, "%.17g, not %.17g", got[0], want);
    CHECK(got[0] == got[1] && got[0] == got[2], "depends on the number of threads");
    free(x);
}

static void narrow(void)
{
    enum { N = 150001 };
    float *x = malloc(N * sizeof *x), *want = malloc(N * sizeof *want);
    uint16_t *got = malloc(N * sizeof *got);
    set_up();
    for (int i = 0; i < N; i++)
        x[i] = want[i] = mt_bits_f32((uint32_t)i * 2654435761u);
    x[0] = want[0] = NAN;
    x[1] = want[1] = mt_bits_f32(0x3f808000u); /* a tie */
    b->narrow(device, q1, got, x, N);
    b->queue_sync(device, q1);
    int wrong = 0;
    for (int i = 0; i < N; i++)
        wrong += got[i] != mt_f32_to_bf16(want[i]) ||
                 mt_f32_bits(x[i]) != (uint32_t)mt_f32_to_bf16(want[i]) << 16;
    CHECK(wrong == 0, "%d of %d", wrong, N);
    CHECK(got[1] == 0x3f80 && isnan(x[0]), "%04x %g", got[1], (double)x[0]);
    tear_down();
    free(x);
    free(want);
    free(got);
}

typedef struct pool_probe {
    atomic_int seen[64];
    atomic_int slot_busy[3];
    atomic_int clashes;
} pool_probe;

static void probe_task(void *context, int64_t task, int32_t slot)
{
    pool_probe *p = context;
    if (atomic_fetch_add(&p->slot_busy[slot], 1) != 0)
        atomic_fetch_add(&p->clashes, 1);
    atomic_fetch_add(&p->seen[task], 1);
    atomic_fetch_sub(&p->slot_busy[slot], 1);
}

/* Jobs of changing size in quick succession: every task runs exactly once, in a slot of its own. */
static void pool(void)
{
    op_backend();
    cpu_pool *p;
    CHECK(cpu_pool_create(3, &p) == MT_OK, " ");
    for (int job = 0; job < 3000; job++) {
        pool_probe probe = { 0 };
        int n = job * 7 % 65;
        cpu_pool_run(p, n, probe_task, &probe);
        int wrong = 0;
        for (int i = 0; i < 64; i++)
            wrong += atomic_load(&probe.seen[i]) != (i < n);
        CHECK(wrong == 0 && atomic_load(&probe.clashes) == 0, "job %d: %d wrong", job, wrong);
    }
    cpu_pool_destroy(p);
}

int main(void)
{
    RUN(info);
    RUN(bad_flags);
    RUN(memory);
    RUN(order);
    RUN(ping_pong);
    RUN(wait_is_by_value);
    RUN(query_before_done);
    RUN(queue_reuse);
    RUN(timestamps);
    RUN(join);
    RUN(sum_squares);
    RUN(narrow);
    RUN(pool);
    return check_done();
}
