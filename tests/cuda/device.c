/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA device apart from its operations: memory, queues in order, events between them, copies,
 * the join of the two planes, sums of squares, time.
 */
#include "side.h"

#include <math.h>
#include <pthread.h>
#include <time.h>

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *pinned(int64_t bytes)
{
    void *p = NULL;
    CHECK(cuda.b->host_alloc(cuda.device, bytes, &p) == MT_OK, "no host memory");
    if (!p)
        exit(check_done());
    return p;
}

/* Sizes around pages, and copies there, on the device, and back. */
static void copies(void)
{
    static const int64_t sizes[] = { 1, 4096, 4097, (5 << 20) + 3 };
    for (int i = 0; i < 4; i++) {
        int64_t n = sizes[i];
        uint8_t *from = pinned(n), *to = pinned(n);
        uint8_t *a = side_put(&cuda, NULL, n), *b = side_put(&cuda, NULL, n);
        CHECK((uintptr_t)a % 256 == 0, "alignment");
        for (int64_t k = 0; k < n; k++)
            from[k] = (uint8_t)(k * 7 + k / 256);
        cuda.b->copy_in(cuda.device, cuda.queue, a, from, n);
        cuda.b->copy(cuda.device, cuda.queue, b, a, n);
        cuda.b->fill(cuda.device, cuda.queue, a, 9, n);
        cuda.b->copy_out(cuda.device, cuda.queue, to, b, n);
        cuda.b->queue_sync(cuda.device, cuda.queue);
        CHECK(memcmp(from, to, (size_t)n) == 0, "%d bytes", (int)n);
        side_get(&cuda, to, a, n);
        CHECK(to[0] == 9 && to[n - 1] == 9, "fill of %d bytes", (int)n);
        side_free(&cuda, a, n);
        side_free(&cuda, b, n);
        cuda.b->host_free(cuda.device, from, n);
        cuda.b->host_free(cuda.device, to, n);
    }
    CHECK(cuda.b->error(cuda.device) == MT_OK, "an error is left");
}

/* More than a registration: the copy must not care where the next one starts. */
static void large_copy(void)
{
    const int64_t n = ((int64_t)5 << 28) + 4096; /* 1.25 GiB */
    uint8_t *host = pinned(n), *a = side_put(&cuda, NULL, n);
    memset(host, 1, (size_t)n);
    for (int64_t k = 0; k < n; k += 1 << 20)
        host[k] = (uint8_t)(k >> 20);
    cuda.b->copy_in(cuda.device, cuda.queue, a, host, n);
    cuda.b->queue_sync(cuda.device, cuda.queue);
    memset(host, 0, (size_t)n);
    side_get(&cuda, host, a, n);
    int64_t wrong = host[n - 1] != 1;
    for (int64_t k = 0; k < n; k += 1 << 20)
        wrong += host[k] != (uint8_t)(k >> 20) || host[k + 1] != 1;
    CHECK(wrong == 0 && cuda.b->error(cuda.device) == MT_OK, "%d places", (int)wrong);
    side_free(&cuda, a, n);
    cuda.b->host_free(cuda.device, host, n);
}

static void *wait_for_event(void *event)
{
    cuda.b->event_sync(cuda.device, event);
    return NULL;
}

/* An event that was never recorded is done; one behind a delay is not; a queue that waits sees
 * what came before the record, also when another thread looks. */
static void events(void)
{
    void *other = NULL, *event = NULL;
    CHECK(cuda.b->queue_create(cuda.device, "other", &other) == MT_OK, " ");
    CHECK(cuda.b->event_create(cuda.device, &event) == MT_OK, " ");
    CHECK(cuda.b->event_query(cuda.device, event), "never recorded, not done");
    cuda.b->event_sync(cuda.device, event);
    cuda.b->event_wait(cuda.device, cuda.queue, event);
    uint32_t *x = side_put(&cuda, NULL, 4), *host = pinned(4);
    for (int i = 0; i < 20; i++) {
        cuda.b->fill(cuda.device, cuda.queue, x, 0, 4);
        cuda.b->delay(cuda.device, cuda.queue, 3000000);
        cuda.b->fill(cuda.device, cuda.queue, x, (uint8_t)(i + 1), 4);
        cuda.b->event_record(cuda.device, event, cuda.queue);
        CHECK(!cuda.b->event_query(cuda.device, event), "done before the delay was over");
        cuda.b->event_wait(cuda.device, other, event);
        cuda.b->copy_out(cuda.device, other, host, x, 4);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, wait_for_event, event) == 0, " ");
        cuda.b->queue_sync(cuda.device, other);
        CHECK(*host == 0x01010101u * (uint32_t)(i + 1), "%08x in round %d", *host, i);
        pthread_join(thread, NULL);
        CHECK(cuda.b->event_query(cuda.device, event), "not done");
    }
    cuda.b->queue_destroy(cuda.device, other);
    cuda.b->event_destroy(cuda.device, event);
    side_free(&cuda, x, 4);
    cuda.b->host_free(cuda.device, host, 4);
}

static void joins(void)
{
    enum { N = 70001 };
    uint16_t *hi = pinned(N * 2);
    int16_t *lo = pinned(N * 2);
    float *want = malloc(N * 4), *got = malloc(N * 4);
    uint32_t seed = 5;
    for (int i = 0; i < N; i++) {
        seed = seed * 1664525u + 1013904223u;
        want[i] = mt_bits_f32(i < 4 ? (uint32_t[]){ 0x7f800000u, 0, 0x7f7fffffu, 1 }[i]
                                    : (seed & 0xbfffffffu));
        mt_split_f32(want[i], &hi[i], &lo[i]);
    }
    float *x = side_put(&cuda, NULL, N * 4);
    int64_t bytes = cuda.b->join_scratch(cuda.device, N);
    void *scratch = side_put(&cuda, NULL, bytes);
    cuda.b->copy_in_join(cuda.device, cuda.queue, x, hi, lo, N, scratch);
    side_get(&cuda, got, x, N * 4);
    CHECK(memcmp(got, want, N * 4) == 0, "not the master's bits");
    side_free(&cuda, x, N * 4);
    side_free(&cuda, scratch, bytes);
    cuda.b->host_free(cuda.device, hi, N * 2);
    cuda.b->host_free(cuda.device, lo, N * 2);
    free(want);
    free(got);
}

static void sums(void)
{
    static const int64_t sizes[] = { 1, 3, 16384, 16385, 3000001 };
    for (int i = 0; i < 5; i++) {
        int64_t n = sizes[i], bytes = cuda.b->sum_squares_scratch(cuda.device, n);
        float *host = malloc((size_t)n * 4);
        double want = 0, got[2];
        for (int64_t k = 0; k < n; k++) {
            host[k] = (float)((k * 7919 % 1000) - 500) * 0.01f;
            want += (double)host[k] * host[k];
        }
        float *x = side_put(&cuda, host, n * 4);
        double *dst = side_put(&cuda, NULL, 8);
        void *scratch = side_put(&cuda, NULL, bytes);
        for (int k = 0; k < 2; k++) {
            cuda.b->sum_squares(cuda.device, cuda.queue, x, n, dst, scratch);
            side_get(&cuda, &got[k], dst, 8);
        }
        CHECK(fabs(got[0] - want) <= 1e-12 * want, "%g, not %g", got[0], want);
        CHECK(memcmp(&got[0], &got[1], 8) == 0, "changes from run to run");
        side_free(&cuda, x, n * 4);
        side_free(&cuda, dst, 8);
        side_free(&cuda, scratch, bytes);
        free(host);
    }
}

static void narrows(void)
{
    enum { N = 300003 };
    float *want = malloc(N * 4), *got = malloc(N * 4);
    uint16_t *half = malloc(N * 2);
    for (int i = 0; i < N; i++)
        want[i] = mt_bits_f32((uint32_t)i * 2654435761u);
    want[1] = mt_bits_f32(0x3f808000u); /* a tie */
    float *x = side_put(&cuda, want, N * 4);
    uint16_t *dst = side_put(&cuda, NULL, N * 2);
    /* In two parts, the second of which begins where no vector does. */
    cuda.b->narrow(cuda.device, cuda.queue, dst, x, 1001);
    cuda.b->narrow(cuda.device, cuda.queue, dst + 1001, x + 1001, N - 1001);
    side_get(&cuda, half, dst, N * 2);
    side_get(&cuda, got, x, N * 4);
    int wrong = 0;
    for (int i = 0; i < N; i++)
        wrong += half[i] != mt_f32_to_bf16(want[i]) ||
                 mt_f32_bits(got[i]) != (uint32_t)mt_f32_to_bf16(want[i]) << 16;
    CHECK(wrong == 0, "%d of %d", wrong, N);
    side_free(&cuda, x, N * 4);
    side_free(&cuda, dst, N * 2);
    free(want);
    free(got);
    free(half);
}

/* Times lie between those of the host around them, and follow each other. The clocks agree to some
 * microseconds. */
static void times(void)
{
    const uint64_t slack = 50000;
    uint64_t *slot = pinned(64);
    uint64_t before = now();
    cuda.b->timestamp(cuda.device, cuda.queue, &slot[0]);
    cuda.b->delay(cuda.device, cuda.queue, 5000000);
    cuda.b->timestamp(cuda.device, cuda.queue, &slot[1]);
    cuda.b->queue_sync(cuda.device, cuda.queue);
    uint64_t after = now();
    CHECK(slot[0] + slack >= before && slot[1] <= after + slack, "%lld and %lld ns outside",
          (long long)(before - slot[0]), (long long)(slot[1] - after));
    CHECK(slot[1] - slot[0] >= 5000000, "the delay took %lld ns", (long long)(slot[1] - slot[0]));
    cuda.b->host_free(cuda.device, slot, 64);
}

static void information(void)
{
    mt_device_info i;
    cuda.b->info(cuda.device, &i);
    CHECK(i.memory_total > 0 && i.memory_free > 0 && i.memory_free <= i.memory_total, " ");
    CHECK(i.compute_dtypes == (1u << MT_F32 | 1u << MT_BF16 | 1u << MT_F64) && !i.unified, " ");
    CHECK(cuda.b->kernel(cuda.device, "no such operation") == NULL, " ");
    void *p = NULL;
    CHECK(cuda.b->device_alloc(cuda.device, i.memory_total * 2, &p) == MT_ERR_NOMEM && !p, " ");
    CHECK(cuda.b->open(99, 0, &p) == MT_ERR_NOT_FOUND && !p, " ");
    CHECK(cuda.b->error(cuda.device) == MT_OK, "a refusal became a failure");
    cuda.b->close(NULL);
    cuda.b->queue_destroy(cuda.device, NULL);
}

int main(void)
{
    sides_open();
    RUN(information);
    RUN(copies);
    RUN(large_copy);
    RUN(events);
    RUN(joins);
    RUN(sums);
    RUN(narrows);
    RUN(times);
    sides_close();
    return check_done();
}
