/* SPDX-License-Identifier: Apache-2.0
 *
 * Measuring the host: its memory by one, half and all processors, and a disk.
 */
#include "hardware.h"

#include "../base/log.h"
#include "../base/machine.h"
#include "../base/status.h"
#include "host_memory.h"
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { MAX_THREADS = 256, ROUNDS = 5 };

/* ---- threads that do the same at the same time ----------------------------------------------- */

typedef enum gate { GATE_SHUT, GATE_OPEN, GATE_LEAVE } gate;

typedef struct team {
    void (*body)(void *arg, int32_t index, int32_t n);
    void *arg;
    int32_t n;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    gate gate; /* where all wait until the last one is there */
    double began[MAX_THREADS], ended[MAX_THREADS];
} team;

typedef struct member {
    team *t;
    int32_t index;
} member;

static void work(team *t, int32_t index)
{
    t->began[index] = probe_now();
    t->body(t->arg, index, t->n);
    t->ended[index] = probe_now();
}

static void *team_member(void *arg)
{
    const member *m = arg;
    team *t = m->t;
    pthread_mutex_lock(&t->lock);
    while (t->gate == GATE_SHUT)
        pthread_cond_wait(&t->moved, &t->lock);
    bool leave = t->gate == GATE_LEAVE;
    pthread_mutex_unlock(&t->lock);
    if (!leave)
        work(t, m->index);
    return NULL;
}

static void move_gate(team *t, gate to)
{
    pthread_mutex_lock(&t->lock);
    t->gate = to;
    pthread_cond_broadcast(&t->moved);
    pthread_mutex_unlock(&t->lock);
}

/* One round: body(arg, 0 .. n-1, n), each in a thread. */
static mt_status team_round(team *t)
{
    member m[MAX_THREADS];
    pthread_t thread[MAX_THREADS];
    int32_t started = 1;
    int err = 0;
    t->gate = GATE_SHUT;
    for (; started < t->n && err == 0; started += err == 0) {
        m[started] = (member){ t, started };
        err = pthread_create(&thread[started], NULL, team_member, &m[started]);
    }
    move_gate(t, err ? GATE_LEAVE : GATE_OPEN);
    if (!err)
        work(t, 0);
    for (int32_t i = 1; i < started; i++)
        pthread_join(thread[i], NULL);
    if (err)
        return status_set(MT_ERR_NOMEM, "cannot start %d threads: %s", t->n, strerror(err));
    return MT_OK;
}

/* Seconds from the first that began to the last that ended; the least of `rounds`. */
static mt_status team_run(int32_t n, int rounds, void (*body)(void *, int32_t, int32_t), void *arg,
                          double *ret)
{
    team *t = calloc(1, sizeof *t);
    if (!t)
        return status_nomem("threads", sizeof *t);
    mt_status st = MT_OK;
    double best = INFINITY;
    t->body = body;
    t->arg = arg;
    t->n = n;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->moved, NULL);
    for (int round = 0; round < rounds && st == MT_OK; round++) {
        st = team_round(t);
        double first = t->began[0], last = t->ended[0];
        for (int32_t i = 1; i < n; i++) {
            first = fmin(first, t->began[i]);
            last = fmax(last, t->ended[i]);
        }
        best = fmin(best, fmax(last - first, 1e-9));
    }
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->moved);
    free(t);
    if (st == MT_OK)
        *ret = best;
    return st;
}

/* ---- host memory ----------------------------------------------------------------------------- */

typedef uint64_t line __attribute__((vector_size(64), may_alias));

enum { GROUP_BYTES = 2 * 64 + 6 * 64, GROUP_ELEMS = 32, FETCH_AHEAD = 24 };

/* The planes that an update streams through, in lines of 64 bytes: a group of 32 parameters has one
 * line each of the master's planes, two each of the gradient and both moments. */
typedef struct planes {
    line *hi, *lo, *grad, *m, *v;
    int64_t groups;
} planes;

static void share(int64_t n, int32_t index, int32_t of, int64_t *ret_from, int64_t *ret_to)
{
    *ret_from = n * index / of;
    *ret_to = n * (index + 1) / of;
}

/* Everything but the gradient is read and written; next to nothing is computed. */
static void stream_update(void *arg, int32_t index, int32_t n)
{
    const planes *p = arg;
    int64_t from, to;
    share(p->groups, index, n, &from, &to);
    for (int64_t i = from; i < to; i++) {
        __builtin_prefetch(&p->hi[i + FETCH_AHEAD], 1);
        __builtin_prefetch(&p->lo[i + FETCH_AHEAD], 1);
        for (int k = 0; k < 2; k++) {
            __builtin_prefetch(&p->grad[2 * (i + FETCH_AHEAD) + k], 0);
            __builtin_prefetch(&p->m[2 * (i + FETCH_AHEAD) + k], 1);
            __builtin_prefetch(&p->v[2 * (i + FETCH_AHEAD) + k], 1);
        }
        line a = p->grad[2 * i], b = p->grad[2 * i + 1];
        p->m[2 * i] += a;
        p->m[2 * i + 1] += b;
        p->v[2 * i] ^= a;
        p->v[2 * i + 1] ^= b;
        p->hi[i] += a;
        p->lo[i] ^= b;
    }
}

typedef struct halves {
    char *from, *to;
    int64_t bytes;
} halves;

static void stream_copy(void *arg, int32_t index, int32_t n)
{
    const halves *h = arg;
    int64_t from, to;
    share(h->bytes / 64, index, n, &from, &to);
    memcpy(h->to + from * 64, h->from + from * 64, (size_t)((to - from) * 64));
}

/* Every thread touches first what it will stream through. */
static void touch(void *arg, int32_t index, int32_t n)
{
    const halves *h = arg;
    int64_t from, to;
    share(h->bytes / 64, index, n, &from, &to);
    memset(h->from + from * 64, 1, (size_t)((to - from) * 64));
}

static mt_status time_copy(char *memory, int64_t bytes, int32_t threads, double *ret)
{
    halves h = { memory, memory + bytes / 2, bytes / 2 };
    double seconds;
    mt_status st = team_run(threads, ROUNDS, stream_copy, &h, &seconds);
    if (st == MT_OK)
        *ret = 2 * (double)h.bytes / seconds;
    return st;
}

static mt_status time_update(void *memory, int64_t bytes, int32_t threads, double *ret)
{
    int64_t lines = bytes / GROUP_BYTES;
    line *l = memory;
    planes p = { .groups = lines - FETCH_AHEAD }; /* so that nothing past the end is fetched */
    p.hi = l;
    p.lo = l + lines;
    p.grad = l + 2 * lines;
    p.m = l + 4 * lines;
    p.v = l + 6 * lines;
    double seconds;
    mt_status st = team_run(threads, ROUNDS, stream_update, &p, &seconds);
    if (st == MT_OK)
        *ret = 28.0 * GROUP_ELEMS * (double)p.groups / seconds;
    return st;
}

static int32_t most_threads(void)
{
    int64_t cpus = machine_cpus();
    return cpus > MAX_THREADS ? MAX_THREADS : (int32_t)cpus;
}

/* Memory to measure with, `bytes` of it where the host has them to spare, touched by all threads.
 */
static mt_status make_memory(const mt_backend *b, void *device, int64_t bytes, void **ret,
                             int64_t *ret_bytes)
{
    int64_t available = host_memory_available();
    double seconds;
    if (bytes > available / 4)
        bytes = available / 4;
    bytes = bytes / 4096 * 4096;
    if (bytes < 1 << 20)
        return status_set(MT_ERR_NOMEM, "%lld bytes of host memory are too few to measure with",
                          (long long)available);
    mt_status st = b->host_alloc(device, bytes, ret);
    if (st < 0)
        return status_prefix(st, "measuring host memory");
    st = team_run(most_threads(), 1, touch, &(halves){ *ret, NULL, bytes }, &seconds);
    if (st < 0)
        b->host_free(device, *ret, bytes);
    *ret_bytes = bytes;
    return st;
}

mt_status hardware_time_update(const mt_backend *b, void *device, double *ret)
{
    /* More than caches hold, but little where the plan need not know what runs beside what. */
    mt_device_info info = { .struct_size = sizeof info };
    b->info(device, &info);
    const int64_t each = (int64_t)(info.unified ? 16 : 64) << 20, most = 1 << 30;
    int64_t bytes = each * most_threads();
    void *memory;
    mt_status st = make_memory(b, device, bytes < most ? bytes : most, &memory, &bytes);
    if (st < 0)
        return st;
    st = time_update(memory, bytes, most_threads(), ret);
    b->host_free(device, memory, bytes);
    return st;
}

mt_status hardware_measure_host(const mt_backend *b, void *device, const hardware_options *options,
                                hardware *h)
{
    h->cpus = machine_cpus();
    h->host_memory = host_memory_available();
    if (options->progress)
        options->progress("host memory");
    const int32_t all = most_threads(), threads[HARDWARE_THREADS] = { 1, all / 2, all };
    int64_t bytes = (int64_t)(options->quick ? 16 : 1024) << 20; /* more than caches hold */
    void *memory;
    double from = probe_now();
    mt_status st = make_memory(b, device, bytes, &memory, &bytes);
    if (st < 0)
        return st;
    h->pin = (double)bytes / (probe_now() - from);
    for (int i = 0; i < HARDWARE_THREADS && st == MT_OK; i++) {
        if (threads[i] <= (h->n_threads ? h->memory[h->n_threads - 1].threads : 0))
            continue;
        hardware_host *m = &h->memory[h->n_threads++];
        m->threads = threads[i];
        st = time_copy(memory, bytes, threads[i], &m->copy);
        if (st == MT_OK)
            st = time_update(memory, bytes, threads[i], &m->update);
    }
    b->host_free(device, memory, bytes);
    return st;
}

/* ---- disk ------------------------------------------------------------------------------------ */

enum { DISK_THREADS = 4, DISK_BLOCK = 4 << 20, DISK_ALIGN = 4096 };
static const double disk_seconds = 3; /* at most, each way */

typedef struct disk_job {
    int fd;
    bool write;
    int64_t blocks;
    double until;
    char *buffer; /* [DISK_THREADS][DISK_BLOCK] */
    _Atomic int64_t next, done;
    _Atomic int error;
} disk_job;

static void move_blocks(void *arg, int32_t index, int32_t n)
{
    disk_job *j = arg;
    char *buffer = j->buffer + (int64_t)index * DISK_BLOCK;
    (void)n;
    while (probe_now() < j->until && !j->error) {
        int64_t i = j->next++;
        if (i >= j->blocks)
            break;
        ssize_t got = j->write ? pwrite(j->fd, buffer, DISK_BLOCK, i * DISK_BLOCK)
                               : pread(j->fd, buffer, DISK_BLOCK, i * DISK_BLOCK);
        if (got != DISK_BLOCK)
            j->error = got < 0 ? errno : EIO;
        else
            j->done++;
    }
    if (j->write && fdatasync(j->fd) != 0)
        j->error = errno;
}

/* A file that has no name any more, so that nothing is left behind however this ends. */
static int open_file(const char *folder, bool *ret_direct)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s/.megatrain-bench-%ld", folder, (long)getpid()) >=
        (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    *ret_direct = true;
    int fd = open(path, flags | O_DIRECT, 0600);
    if (fd < 0 && errno == EINVAL) {
        *ret_direct = false;
        fd = open(path, flags, 0600);
    }
    if (fd >= 0)
        unlink(path);
    return fd;
}

static mt_status move(disk_job *j, bool write, int64_t blocks, double *ret)
{
    double seconds = 0;
    j->write = write;
    j->blocks = blocks;
    j->next = j->done = 0;
    j->until = probe_now() + disk_seconds;
    mt_status st = team_run(DISK_THREADS, 1, move_blocks, j, &seconds);
    if (st < 0)
        return st;
    if (j->error)
        return status_set(MT_ERR_IO, "cannot %s: %s", write ? "write" : "read", strerror(j->error));
    *ret = (double)(j->done * DISK_BLOCK) / seconds;
    return MT_OK;
}

mt_status hardware_measure_disk(const hardware_options *options, hardware *h)
{
    int64_t bytes = (int64_t)(options->quick ? 16 : 1024) << 20;
    struct statvfs v;
    if (options->progress)
        options->progress("disk");
    if (statvfs(options->disk, &v) != 0)
        return status_set(MT_ERR_IO, "%s: cannot measure this disk: %s; name a folder that exists",
                          options->disk, strerror(errno));
    if ((int64_t)v.f_bavail * (int64_t)v.f_frsize < 2 * bytes) {
        log_write(MT_LOG_WARNING, "%s: less than %lld MiB are free; the disk is not measured",
                  options->disk, (long long)(2 * bytes >> 20));
        return MT_OK;
    }
    disk_job j = { .fd = open_file(options->disk, &h->disk_direct) };
    mt_status st = MT_OK;
    void *buffer = NULL;
    if (j.fd < 0)
        return status_set(MT_ERR_IO,
                          "%s: cannot make a file here: %s; name a folder that you can "
                          "write to",
                          options->disk, strerror(errno));
    if (posix_memalign(&buffer, DISK_ALIGN, (size_t)DISK_THREADS * DISK_BLOCK) != 0) {
        st = status_nomem("measuring a disk", (size_t)DISK_THREADS * DISK_BLOCK);
        goto out;
    }
    memset(buffer, 0x5a, (size_t)DISK_THREADS * DISK_BLOCK);
    j.buffer = buffer;
    st = move(&j, true, bytes / DISK_BLOCK, &h->disk_write);
    if (st == MT_OK) {
        posix_fadvise(j.fd, 0, 0, POSIX_FADV_DONTNEED);
        st = move(&j, false, j.done, &h->disk_read);
    }
    if (st < 0)
        status_prefix(st, "%s", options->disk);
out:
    free(buffer);
    close(j.fd);
    return st;
}
