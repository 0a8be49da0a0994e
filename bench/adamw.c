/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast an element-wise optimizer with two FP32 states updates, and how near that is to what
 * memory allows: parameters a second, bytes a second at 28 bytes a parameter (16 read, 12 written),
 * and the same for kernels that stream the same bytes and do next to nothing, one plain and one
 * that prefetches; the ratio is to the faster one.
 *
 *     bench-adamw PLUGIN.so [MILLIONS OF PARAMETERS [THREADS]]
 */
#include "plugin.h"

#include <megatrain/optim.h>

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

enum { REPEATS = 7, SLICE = 1 << 20, BYTES_A_PARAMETER = 28 };

typedef struct planes {
    uint16_t *hi;
    int16_t *lo;
    float *grad, *m, *v;
} planes;

/* What is timed: the plain streaming kernel, the one that fetches ahead, the optimizer. */
enum { STREAM, STREAM_AHEAD, UPDATE, KINDS };

typedef struct bench {
    const mt_optim *table;
    void *optim;
    planes p;
    int64_t n;
    int threads;
    pthread_barrier_t barrier;
    double best[KINDS]; /* seconds */
} bench;

typedef struct worker {
    bench *b;
    int index;
} worker;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the ceiling ---------------------------------------------------------------------------- */

/* Reads and writes what a step reads and writes, with one cheap operation on each plane; `ahead` is
 * how many elements ahead lines are fetched, 0 for not at all. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void
stream(int64_t ahead, uint32_t key, int64_t n, uint16_t *restrict hi, uint16_t *restrict lo,
       const uint32_t *restrict grad, uint32_t *restrict m, uint32_t *restrict v)
{
    enum { BLOCK = 32, LINE = 16 };
    for (int64_t i = 0; i + BLOCK <= n; i += BLOCK) {
        if (ahead) {
            __builtin_prefetch(hi + i + ahead, 1);
            __builtin_prefetch(lo + i + ahead, 1);
            for (int64_t j = 0; j < BLOCK; j += LINE) {
                __builtin_prefetch(grad + i + j + ahead, 0);
                __builtin_prefetch(m + i + j + ahead, 1);
                __builtin_prefetch(v + i + j + ahead, 1);
            }
        }
        for (int64_t j = i; j < i + BLOCK; j++) {
            hi[j] = (uint16_t)(hi[j] ^ key);
            lo[j] = (uint16_t)(lo[j] ^ key);
            m[j] ^= grad[j] & key;
            v[j] ^= grad[j] & key;
        }
    }
}

/* ---- workers -------------------------------------------------------------------------------- */

static void first_touch(const bench *b, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        mt_split_f32(0.5f + 1e-9f * (float)(i & 0xffff), &b->p.hi[i], &b->p.lo[i]);
        b->p.grad[i] = 1e-3f * (float)((i & 0xff) - 128);
        b->p.m[i] = 0.0f;
        b->p.v[i] = 1e-6f;
    }
}

static void update(const bench *b, int64_t begin, int64_t end, int64_t step)
{
    for (int64_t i = begin; i < end; i += SLICE) {
        mt_update u = { .struct_size = sizeof u,
                        .rows = 1,
                        .cols = b->n,
                        .first = i,
                        .n = end - i < SLICE ? end - i : SLICE,
                        .hi = b->p.hi + i,
                        .lo = b->p.lo + i,
                        .grad = b->p.grad + i,
                        .state = { b->p.m + i, b->p.v + i },
                        .step = step,
                        .lr = 1e-4,
                        .grad_scale = 1.0 };
        b->table->update(b->optim, &u);
    }
}

static void *work(void *arg)
{
    const worker *w = arg;
    bench *b = w->b;
    int64_t begin = b->n * w->index / b->threads, end = b->n * (w->index + 1) / b->threads;
    first_touch(b, begin, end);
    /* Taken in turn, so that what else the machine does meets both alike. */
    for (int r = 0; r < REPEATS; r++) {
        for (int kind = 0; kind < KINDS; kind++) {
            pthread_barrier_wait(&b->barrier);
            double start = now();
            if (kind == UPDATE)
                update(b, begin, end, r + 1);
            else /* Key 0 changes nothing, which the compiler cannot know. */
                stream(kind == STREAM ? 0 : 1024, (uint32_t)(b->threads >> 20), end - begin,
                       b->p.hi + begin, (uint16_t *)b->p.lo + begin,
                       (const uint32_t *)(const void *)(b->p.grad + begin),
                       (uint32_t *)(void *)(b->p.m + begin), (uint32_t *)(void *)(b->p.v + begin));
            pthread_barrier_wait(&b->barrier);
            double took = now() - start;
            if (w->index == 0 && took < b->best[kind])
                b->best[kind] = took;
        }
    }
    return NULL;
}

/* Memory as the store has it: huge pages where the system gives them, untouched. */
static void *map(int64_t bytes)
{
    size_t size = ((size_t)bytes + (2u << 20) - 1) & ~(size_t)((2u << 20) - 1);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "bench-adamw: no memory for %.1f GB\n", (double)bytes * 1e-9);
        exit(1);
    }
    madvise(p, size, MADV_HUGEPAGE);
    return p;
}

static void measure(bench *b, int threads)
{
    pthread_t thread[256];
    worker workers[256];
    b->threads = threads;
    for (int kind = 0; kind < KINDS; kind++)
        b->best[kind] = 1e30;
    pthread_barrier_init(&b->barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        workers[i] = (worker){ b, i };
        if (pthread_create(&thread[i], NULL, work, &workers[i]) != 0) {
            fprintf(stderr, "bench-adamw: cannot start thread %d\n", i);
            exit(1);
        }
    }
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&b->barrier);
    double bytes = (double)b->n * BYTES_A_PARAMETER * 1e-9;
    double plain = bytes / b->best[STREAM], ahead = bytes / b->best[STREAM_AHEAD];
    double ceiling = plain > ahead ? plain : ahead, reached = bytes / b->best[UPDATE];
    printf("%7d %10.3f %8.1f %8.1f %13.1f %7.0f%%\n", threads,
           (double)b->n * 1e-9 / b->best[UPDATE], reached, plain, ahead, 100 * reached / ceiling);
    fflush(stdout);
}

/* ---- the plugin ----------------------------------------------------------------------------- */

static bool has_nothing(const mt_config *c, const char *key)
{
    (void)c;
    (void)key;
    return false;
}

static bool load(const char *path, bench *b)
{
    static const mt_config defaults = { .struct_size = sizeof defaults, .has = has_nothing };
    b->table = bench_interface(path, MT_OPTIM_INTERFACE);
    if (b->table->create(&defaults, &b->optim) == MT_OK)
        return true;
    fprintf(stderr, "%s\n", bench_error());
    return false;
}

int main(int argc, char **argv)
{
    bench b = { 0 };
    cpu_set_t set;
    int max_threads = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    double millions = argc > 2 ? atof(argv[2]) : 128.0;
    if (argc > 3)
        max_threads = atoi(argv[3]);
    if (argc < 2 || !(millions > 0 && millions < 1e6) || max_threads < 1 || max_threads > 256) {
        fprintf(stderr, "usage: bench-adamw PLUGIN.so [MILLIONS OF PARAMETERS [THREADS]]\n");
        return 2;
    }
    if (!load(argv[1], &b))
        return 1;

    b.n = (int64_t)(millions * 1e6);
    printf("%.0f million parameters, best of %d\n", millions, REPEATS);
    printf("threads   Gparam/s     GB/s   stream  stream ahead    ratio\n");
    for (int threads = 1;; threads = threads * 2 < max_threads ? threads * 2 : max_threads) {
        b.p = (planes){ map(2 * b.n), map(2 * b.n), map(4 * b.n), map(4 * b.n), map(4 * b.n) };
        measure(&b, threads);
        munmap(b.p.hi, (size_t)(2 * b.n));
        munmap(b.p.lo, (size_t)(2 * b.n));
        munmap(b.p.grad, (size_t)(4 * b.n));
        munmap(b.p.m, (size_t)(4 * b.n));
        munmap(b.p.v, (size_t)(4 * b.n));
        if (threads == max_threads)
            break;
    }
    b.table->destroy(b.optim);
    return 0;
}
