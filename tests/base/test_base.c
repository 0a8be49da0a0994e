/* SPDX-License-Identifier: Apache-2.0
 *
 * Arena, status texts, word distances, random numbers, and the machine's limits.
 */
#include "../check.h"
#include "core/base/arena.h"
#include "core/base/machine.h"
#include "core/base/normals.h"
#include "core/base/ordered_hash.h"
#include "core/base/parallel.h"
#include "core/base/planes.h"
#include "core/base/rng.h"
#include "core/base/status.h"
#include "core/base/text.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_arena(void)
{
    arena a = { 0 };
    unsigned char *block[300];
    for (size_t i = 0; i < 300; i++) {
        block[i] = arena_alloc(&a, i * 7);
        CHECK(block[i] && (uintptr_t)block[i] % alignof(max_align_t) == 0);
        for (size_t j = 0; j < i * 7; j++)
            CHECK(block[i][j] == 0);
        memset(block[i], (int)(i & 0xff), i * 7);
    }
    for (size_t i = 0; i < 300; i++)
        for (size_t j = 0; j < i * 7; j++)
            CHECK(block[i][j] == (i & 0xff), "block %zu was overwritten", i);
    unsigned char *big = arena_alloc(&a, 1 << 20);
    CHECK(big != NULL);
    if (big)
        memset(big, 1, 1 << 20);
    CHECK(strcmp(arena_strdup(&a, "abc"), "abc") == 0);
    CHECK(strcmp(arena_printf(&a, "%d-%s", 7, "x"), "7-x") == 0);
    CHECK(!arena_alloc(&a, SIZE_MAX) && strstr(status_text(), "out of memory"));
    CHECK(!arena_array(&a, SIZE_MAX / 4, 16));
    arena_finish(&a);
    CHECK(!a.blocks);
    arena_finish(&a);
}

static void *other_thread(void *arg)
{
    status_set(MT_ERR_IO, "theirs");
    (void)arg;
    return NULL;
}

static void test_status(void)
{
    CHECK(status_set(MT_ERR_IO, "%s: %d", "a", 5) == MT_ERR_IO);
    CHECK(strcmp(status_text(), "a: 5") == 0);
    CHECK(status_prefix(MT_ERR_FORMAT, "in %s", "b") == MT_ERR_FORMAT);
    CHECK(strcmp(status_text(), "in b: a: 5") == 0, "%s", status_text());
    status_set(MT_ERR_IO, "again: %s", status_text());
    CHECK(strcmp(status_text(), "again: in b: a: 5") == 0, "%s", status_text());
    pthread_t t;
    if (pthread_create(&t, NULL, other_thread, NULL) == 0)
        pthread_join(t, NULL);
    CHECK(strcmp(status_text(), "again: in b: a: 5") == 0, "another thread's text shows here");
    char longer[5000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    status_set(MT_ERR_IO, "%s", longer);
    CHECK(strlen(status_text()) > 1000 && strlen(status_text()) < sizeof longer);
}

static void test_distance(void)
{
    CHECK(text_distance("", "") == 0 && text_distance("abc", "") == 3);
    CHECK(text_distance("", "abcd") == 4 && text_distance("abc", "abc") == 0);
    CHECK(text_distance("kitten", "sitting") == 3 && text_distance("sitting", "kitten") == 3);
    CHECK(text_distance("form", "from") == 1 && text_distance("ab", "ba") == 1);
    CHECK(text_distance("learning_rat", "learning_rate") == 1);
    char a[200], b[200];
    memset(a, 'a', sizeof a - 1);
    memset(b, 'b', sizeof b - 1);
    a[199] = b[199] = '\0';
    CHECK(text_distance(a, b) == 63, "words are cut");

    const char *words[] = { "warmup_steps", NULL, "save_steps", "eval_steps", "seed" };
    CHECK(text_nearest("eval_step", words, 5) == 3);
    CHECK(text_nearest("warmup_setps", words, 5) == 0);
    CHECK(text_nearest("sede", words, 5) == 4);
    CHECK(text_nearest("bananas", words, 5) == -1);
    CHECK(text_nearest("x", words, 0) == -1);
    const char *one[] = { "a" };
    CHECK(text_nearest("b", one, 1) == -1, "one letter is not like another");
}

static void test_append(void)
{
    char text[8] = "", full[3] = "ab";
    text_append(text, sizeof text, "%s", "abc");
    text_append(text, sizeof text, "%d", 12);
    CHECK(strcmp(text, "abc12") == 0, "%s", text);
    text_append(text, sizeof text, "%s", "defg");
    CHECK(strcmp(text, "abc12de") == 0, "%s", text);
    text_append(text, sizeof text, "%s", "more");
    CHECK(strcmp(text, "abc12de") == 0, "%s", text);
    text_append(full, sizeof full, "%s", "c");
    CHECK(strcmp(full, "ab") == 0, "%s", full);
}

/* ---- loops over all processors -------------------------------------------------------------- */

enum { PIECES = 1000 };

typedef struct pieces {
    _Atomic int32_t runs[PIECES];
    _Atomic int32_t inside[PARALLEL_MAX_THREADS]; /* pieces that a thread is at */
    _Atomic bool shared;
    int64_t fail_from; /* pieces from here on do */
} pieces;

static mt_status run_piece(void *arg, int64_t i, int32_t thread)
{
    pieces *p = arg;
    if (atomic_fetch_add(&p->inside[thread], 1))
        p->shared = true;
    p->runs[i]++;
    if (i % 7 == 0)
        usleep(100);
    atomic_fetch_sub(&p->inside[thread], 1);
    return i < p->fail_from ? MT_OK : status_set(MT_ERR_IO, "piece %d", (int)i);
}

static void test_parallel(void)
{
    static pieces all = { .fail_from = PIECES }, some = { .fail_from = 300 };
    CHECK(parallel_threads(0) == 1 && parallel_threads(1) == 1);
    CHECK(parallel_threads(PIECES) >= 1 && parallel_threads(PIECES) <= PARALLEL_MAX_THREADS);
    CHECK(parallel_for(0, run_piece, &all) == MT_OK);
    CHECK(parallel_for(PIECES, run_piece, &all) == MT_OK && !all.shared);
    for (int i = 0; i < PIECES; i++)
        CHECK(all.runs[i] == 1, "piece %d ran %d times", i, all.runs[i]);
    CHECK(parallel_for(PIECES, run_piece, &some) == MT_ERR_IO);
    CHECK(strcmp(status_text(), "piece 300") == 0, "%s", status_text());
    int begun = 0;
    for (int i = 0; i < PIECES; i++)
        begun += some.runs[i];
    CHECK(begun >= 301 && begun <= 301 + PARALLEL_MAX_THREADS, "%d begun", begun);
}

typedef struct meeting {
    pthread_barrier_t all;
    _Atomic uint32_t threads; /* a bit for each */
} meeting;

static mt_status meet(void *arg, int64_t i, int32_t thread)
{
    meeting *m = arg;
    (void)i;
    m->threads |= 1u << thread;
    pthread_barrier_wait(&m->all);
    return MT_OK;
}

/* As many threads as were asked for, whatever the machine has: they have buffers of their own. */
static void test_parallel_threads(void)
{
    for (int32_t n = 1; n <= PARALLEL_MAX_THREADS; n++) {
        meeting m = { .threads = 0 };
        pthread_barrier_init(&m.all, NULL, (unsigned)n);
        CHECK(parallel_run(n, n, meet, &m) == MT_OK && m.threads == (1u << n) - 1, "%d: %x", n,
              m.threads);
        m.threads = 0;
        CHECK(parallel_run(PARALLEL_MAX_THREADS + 1, n, meet, &m) == MT_OK);
        CHECK(m.threads == (1u << n) - 1, "%d pieces: %x", n, m.threads);
        pthread_barrier_destroy(&m.all);
    }
}

/* Many at once are what they are one by one, whatever their number. */
static void test_planes(void)
{
    enum { N = 200 };
    float x[N], y[N];
    uint16_t hi[N + 1];
    int16_t lo[N + 1];
    for (int i = 0; i < N; i++)
        x[i] = mt_bits_f32((uint32_t)i * 0x9E3779B9u);
    x[3] = x[150] = NAN;
    x[64] = -INFINITY;
    for (int n = 0; n <= N; n++) {
        hi[n] = 0x1234;
        lo[n] = 0x4321;
        planes_split(x, n, hi, lo);
        CHECK(hi[n] == 0x1234 && lo[n] == 0x4321, "written beyond %d", n);
        planes_join(hi, lo, n, y);
        for (int i = 0; i < n; i++) {
            uint16_t h;
            int16_t l;
            mt_split_f32(x[i], &h, &l);
            CHECK(hi[i] == h && lo[i] == l, "%d of %d", i, n);
            CHECK(mt_f32_bits(y[i]) == mt_f32_bits(mt_join_f32(h, l)), "%d of %d", i, n);
        }
    }
}

/* Known answers of the authors' Random123 1.09 (kat_vectors). */
static void test_philox(void)
{
    static const struct {
        uint32_t counter[4], key[2], expected[4];
    } cases[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff },
          { 0xffffffff, 0xffffffff },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t words[4];
        rng_philox(cases[i].key, cases[i].counter, words);
        CHECK(memcmp(words, cases[i].expected, sizeof words) == 0, "%08x %08x %08x %08x", words[0],
              words[1], words[2], words[3]);
    }
}

static void test_normals(void)
{
    enum { N = 200000 };
    static float x[N], y[N];
    uint64_t key = rng_key(1, "model.norm.weight");
    rng_normals(key, 0, N, x);
    for (int64_t i = 0, n = 1; i < N; i += n, n = n % 97 + 1)
        rng_normals(key, (uint64_t)i, n < N - i ? n : N - i, y + i);
    CHECK(memcmp(x, y, sizeof x) == 0, "pieces differ from the whole");
    double sum[4] = { 0 };
    for (int64_t i = 0; i < N; i++)
        for (int p = 0; p < 4; p++)
            sum[p] += pow(x[i], p + 1) / N;
    CHECK(fabs(sum[0]) < 0.01 && fabs(sum[1] - 1) < 0.02, "mean %g, variance %g", sum[0], sum[1]);
    CHECK(fabs(sum[2]) < 0.03 && fabs(sum[3] - 3) < 0.1, "skew %g, kurtosis %g", sum[2], sum[3]);
    CHECK(rng_key(1, "a") != rng_key(2, "a") && rng_key(1, "a") != rng_key(1, "b"));
    rng_normals(rng_key(2, "model.norm.weight"), 0, 8, y);
    CHECK(memcmp(x, y, 8 * sizeof *x) != 0);
}

/* The sequence as it is defined, one block at a time, by the C library's functions. */
static void define_normals(uint64_t key, uint64_t block, float ret[4])
{
    const uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
    const uint32_t counter[4] = { (uint32_t)block, (uint32_t)(block >> 32), 1, 0 };
    uint32_t w[4];
    rng_philox(k, counter, w);
    for (int i = 0; i < 4; i += 2) {
        double radius = sqrt(-2.0 * log(((double)w[i] + 1.0) * 0x1p-32));
        double angle = 6.283185307179586 * ((double)w[i + 1] * 0x1p-32);
        ret[i] = (float)(radius * cos(angle));
        ret[i + 1] = (float)(radius * sin(angle));
    }
}

/* Every instruction set gives the same bits, and all of them what the definition says: all but the
 * last bit always, and nearly always that too. */
static void test_normals_variants(void)
{
    enum { BATCHES = 4000 };
    uint64_t key = rng_key(4, "variants"), high = UINT64_C(1) << 40;
    int64_t rounded = 0;
    for (uint64_t b = 0; b < BATCHES; b++) {
        uint64_t first = b % 2 ? high + b * NORMALS_BLOCKS : b * NORMALS_BLOCKS;
        float want[NORMALS], got[NORMALS], base[NORMALS];
        normals_base(key, first, base);
        for (const normals_variant *v = normals_variants(); v->draw; v++) {
            v->draw(key, first, got);
            CHECK(memcmp(got, base, sizeof got) == 0, "%s differs in batch %d", v->name, (int)b);
        }
        for (int i = 0; i < NORMALS; i += NORMALS_PER_BLOCK)
            define_normals(key, first + (uint64_t)i / NORMALS_PER_BLOCK, want + i);
        for (int i = 0; i < NORMALS; i++) {
            uint32_t a = mt_f32_bits(base[i]), c = mt_f32_bits(want[i]);
            CHECK(a - c + 1 <= 2, "%.9g, expected %.9g", base[i], want[i]);
            rounded += a != c;
        }
    }
    CHECK(rounded <= 2, "%lld of %d differ in the last bit", (long long)rounded, BATCHES * NORMALS);
}

static void test_sequence(void)
{
    rng r = { rng_key(3, "sampling"), 0 };
    int count[7] = { 0 };
    double mean = 0, square = 0;
    for (int i = 0; i < 70000; i++) {
        uint64_t x = rng_below(&r, 7);
        CHECK(x < 7);
        count[x < 7 ? x : 0]++;
    }
    for (int i = 0; i < 7; i++)
        CHECK(abs(count[i] - 10000) < 500, "%d: %d", i, count[i]);
    rng saved = r;
    for (int i = 0; i < 50000; i++) {
        double u = rng_uniform(&r);
        CHECK(u >= 0 && u < 1);
        mean += u / 50000;
        square += u * u / 50000;
    }
    CHECK(fabs(mean - 0.5) < 0.01 && fabs(square - 1.0 / 3) < 0.01, "%g %g", mean, square);
    rng again = { saved.key, saved.position };
    for (int i = 0; i < 10; i++)
        CHECK(rng_next(&again) == rng_next(&saved), "key and position are all the state");
    CHECK(rng_below(&r, 1) == 0);
    uint64_t high = 0;
    for (int i = 0; i < 100; i++)
        high |= rng_below(&r, (UINT64_C(1) << 63) + 1) >> 62;
    CHECK(high == 1 || high == 3, "large bounds");
}

/* ---- the machine ---------------------------------------------------------------------------- */

static char root[] = "/tmp/mt-machine-XXXXXX";

static void put(const char *path, const char *text)
{
    char whole[512];
    snprintf(whole, sizeof whole, "%s/%s", root, path);
    for (char *p = whole + strlen(root) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        mkdir(whole, 0755);
        *p = '/';
    }
    FILE *f = fopen(whole, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0)
        abort();
}

static void test_cgroup2(void)
{
    put("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:   8192 kB\n");
    CHECK(machine_memory_limit_at(root) == 16384 * 1024, "no control groups");
    CHECK(machine_cpu_quota_at(root) < 0);
    put("proc/self/cgroup", "0::/a.slice/b\n");
    CHECK(machine_memory_limit_at(root) == 16384 * 1024, "its files are missing");
    put("sys/fs/cgroup/a.slice/b/memory.max", "max\n");
    put("sys/fs/cgroup/a.slice/memory.max", "4194304\n"); /* the limit of a group above counts */
    CHECK(machine_memory_limit_at(root) == 4194304, "%lld",
          (long long)machine_memory_limit_at(root));
    put("sys/fs/cgroup/a.slice/memory.current", "3145728\n");
    CHECK(machine_memory_available_at(root) == 1048576);
    put("sys/fs/cgroup/a.slice/memory.stat", "anon 5\ninactive_file 1048576\n");
    CHECK(machine_memory_available_at(root) == 2097152, "page cache can be reclaimed");
    put("sys/fs/cgroup/a.slice/b/cpu.max", "max 100000\n");
    CHECK(machine_cpu_quota_at(root) < 0);
    put("sys/fs/cgroup/a.slice/cpu.max", "150000 100000\n");
    CHECK(machine_cpu_quota_at(root) == 1.5);
    put("sys/fs/cgroup/a.slice/b/cpu.max", "50000 100000\n");
    CHECK(machine_cpu_quota_at(root) == 0.5);
}

static void test_cgroup1(void)
{
    /* A container: the path is the host's, the mount shows the group as its root. */
    put("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152\n");
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n");
    put("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 4096\n");
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(machine_memory_limit_at(root) == 2097152);
    CHECK(machine_memory_available_at(root) == 1048576 + 4096);
    CHECK(machine_cpu_quota_at(root) < 0);
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n");
    CHECK(machine_cpu_quota_at(root) == 2.5);
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* v1's "none" */
    CHECK(machine_memory_limit_at(root) == 16384 * 1024);
    put("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "524288\n"); /* no container */
    put("sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", "4096\n");
    CHECK(machine_memory_available_at(root) == 524288 - 4096);
}

static void test_cpu_order(void)
{
    /* Eight processors on four cores, of which the process may use seven. */
    for (int i = 0; i < 8; i++) {
        char path[128], text[16];
        snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 i);
        snprintf(text, sizeof text, i & 4 ? "%d,%d\n" : "%d-%d\n", i & 3, (i & 3) + 4);
        put(path, text);
    }
    int32_t cpus[] = { 0, 1, 2, 4, 5, 6, 7 };
    static const int32_t want[] = { 0, 1, 2, 7, 4, 5, 6 };
    machine_order_cpus_at(root, cpus, 7);
    CHECK(memcmp(cpus, want, sizeof want) == 0, "%d %d %d %d ...", cpus[0], cpus[1], cpus[2],
          cpus[3]);
    int32_t unknown[] = { 3, 100, 101 };
    machine_order_cpus_at("/nowhere", unknown, 3);
    CHECK(unknown[0] == 3 && unknown[1] == 100 && unknown[2] == 101);
}

typedef struct bound {
    int32_t cpu;
    bool good;
    int32_t left; /* processors afterwards */
} bound;

static void *bind_one(void *arg)
{
    bound *b = arg;
    b->good = machine_bind_thread(b->cpu);
    b->left = machine_cpus();
    return NULL;
}

static void test_binding(void)
{
    enum { MOST = 1024 };
    static int32_t cpus[MOST];
    int32_t n = machine_own_cpus(cpus, MOST);
    CHECK(n == 0 || n >= machine_cpus());
    CHECK(machine_own_cpus(cpus, 0) == 0);
    if (n == 0)
        return; /* a quota: nothing is bound here */
    pthread_t thread;
    bound b = { .cpu = cpus[n - 1] };
    CHECK(pthread_create(&thread, NULL, bind_one, &b) == 0);
    pthread_join(thread, NULL);
    CHECK(!b.good || b.left == 1, "%d processors are left", b.left);
    CHECK(machine_own_cpus(cpus, MOST) == n, "other threads keep theirs");
    CHECK(!machine_bind_thread(60000));
}

static ordered_hash hash;
static uint8_t hashed[PIECES * 100];

/* Every third block is late. */
static mt_status hash_piece(void *arg, int64_t i, int32_t thread)
{
    (void)thread;
    const int64_t *failing = arg;
    if (i % 3 == 0)
        sched_yield();
    if (i == *failing) {
        ordered_hash_give_up(&hash);
        return MT_ERR_IO;
    }
    int64_t at = i * 100;
    return ordered_hash_add(&hash, at, hashed + at, 100) ? MT_OK : MT_ERR_STOPPED;
}

static void test_ordered_hash(void)
{
    for (size_t i = 0; i < sizeof hashed; i++)
        hashed[i] = (uint8_t)(i * 7 + i / 256);
    int64_t failing = -1;
    CHECK(ordered_hash_init(&hash) == MT_OK);
    CHECK(parallel_for(PIECES, hash_piece, &failing) == MT_OK);
    CHECK(ordered_hash_digest(&hash) == XXH3_64bits(hashed, sizeof hashed));
    ordered_hash_finish(&hash);
    /* Nobody waits for a block that does not come. */
    failing = PIECES / 2;
    CHECK(ordered_hash_init(&hash) == MT_OK);
    CHECK(parallel_for(PIECES, hash_piece, &failing) < 0);
    ordered_hash_finish(&hash);
    ordered_hash_finish(&hash);
}

static void test_process(void)
{
    CHECK(machine_memory_limit() > 1 << 20 && machine_memory_available() > 0);
    CHECK(machine_memory_available() <= machine_memory_limit());
    CHECK(machine_cpus() >= 1 && machine_cpus() <= sysconf(_SC_NPROCESSORS_CONF));
    int64_t before = machine_rss();
    CHECK(before > 0 && machine_peak_rss() >= before);
    size_t n = 64 << 20;
    volatile char *p = malloc(n);
    for (size_t i = 0; p && i < n; i += 1024)
        p[i] = 1;
    CHECK(machine_rss() > before + (32 << 20), "64 MiB in use do not show");
    free((void *)p);
    CHECK(machine_peak_rss() > before + (32 << 20));
}

int main(void)
{
    if (!mkdtemp(root))
        return 1;
    RUN(test_arena);
    RUN(test_status);
    RUN(test_distance);
    RUN(test_append);
    RUN(test_parallel);
    RUN(test_parallel_threads);
    RUN(test_ordered_hash);
    RUN(test_planes);
    RUN(test_philox);
    RUN(test_normals);
    RUN(test_normals_variants);
    RUN(test_sequence);
    RUN(test_cgroup2);
    RUN(test_cgroup1);
    RUN(test_cpu_order);
    RUN(test_binding);
    RUN(test_process);
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command) ? 1 : check_done();
}
