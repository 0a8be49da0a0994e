/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast a checkpoint is saved and loaded, its files on the disk only and again in memory, beside
 * as many threads that do nothing but write or read as much in pieces of the same size.
 *
 *     bench-checkpoint PLUGIN_DIR MODEL.yaml FOLDER [ROUNDS]      (FOLDER: on the disk in question)
 */
#include "core/train/checkpoint.h"
#include "core/base/parallel.h"
#include "core/base/progress.h"
#include "core/base/status.h"
#include "core/train/files.h"
#include "core/train/session.h"
#include "plugins/host/registry.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILES = 256, PIECE = 2 << 20, ALIGN = 4096 };

static void require(mt_status st, const char *what)
{
    if (st >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, status_text());
    exit(1);
}

/* Seconds of all processors, in the program and in the kernel. */
typedef struct cpu_time {
    double user, system;
} cpu_time;

static double seconds_of(struct timeval t)
{
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

static cpu_time processor_time(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (cpu_time){ seconds_of(u.ru_utime), seconds_of(u.ru_stime) };
}

/* ---- work with nothing but files ------------------------------------------------------------- */

typedef struct raw {
    int fd[MAX_FILES];
    int64_t bytes[MAX_FILES];
    int32_t n;
    int64_t total;
    bool out;
    void *buffer[PARALLEL_MAX_THREADS];
} raw;

/* The files one after the other when reading, by turns when writing. */
static mt_status raw_piece(void *arg, int64_t i, int32_t thread)
{
    raw *r = arg;
    int32_t f = 0;
    int64_t at = i;
    if (r->out) {
        f = (int32_t)(i % r->n);
        at = i / r->n;
    }
    while (!r->out && at >= (r->bytes[f] + PIECE - 1) / PIECE)
        at -= (r->bytes[f++] + PIECE - 1) / PIECE;
    ssize_t done = r->out ? pwrite(r->fd[f], r->buffer[thread], PIECE, at * PIECE)
                          : pread(r->fd[f], r->buffer[thread], PIECE, at * PIECE);
    if (r->out && at % 32 == 31)
        sync_file_range(r->fd[f], 0, 0, SYNC_FILE_RANGE_WRITE);
    return done > 0 ? MT_OK : status_set(MT_ERR_IO, "file %d, piece %lld", f, (long long)at);
}

static void raw_buffers(raw *r)
{
    for (int i = 0; i < PARALLEL_MAX_THREADS; i++) {
        r->buffer[i] = aligned_alloc(ALIGN, PIECE);
        memset(r->buffer[i], i + 1, PIECE);
    }
}

static void raw_close(raw *r)
{
    for (int32_t i = 0; i < r->n; i++)
        close(r->fd[i]);
    for (int i = 0; i < PARALLEL_MAX_THREADS; i++)
        free(r->buffer[i]);
}

static void raw_open(raw *r, const char *folder, int flags)
{
    *r = (raw){ .n = 0 };
    DIR *d = opendir(folder);
    for (struct dirent *e; d && r->n < MAX_FILES && (e = readdir(d));) {
        char path[PATH_MAX];
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (!files_is_file(path) || (r->fd[r->n] = open(path, O_RDONLY | flags)) < 0 ||
            fstat(r->fd[r->n], &st) < 0)
            continue;
        r->bytes[r->n++] = st.st_size;
        r->total += st.st_size;
    }
    if (d)
        closedir(d);
    raw_buffers(r);
}

static void raw_forget(const raw *r)
{
    for (int32_t i = 0; i < r->n; i++) {
        fdatasync(r->fd[i]);
        posix_fadvise(r->fd[i], 0, 0, POSIX_FADV_DONTNEED);
    }
}

static double raw_read(const char *folder, int flags, bool cold)
{
    raw r;
    int64_t pieces = 0;
    raw_open(&r, folder, flags);
    if (cold)
        raw_forget(&r);
    for (int32_t i = 0; i < r.n; i++)
        pieces += (r.bytes[i] + PIECE - 1) / PIECE;
    double began = progress_now();
    require(parallel_run(parallel_io_threads(pieces), pieces, raw_piece, &r), "reading");
    double rate = (double)r.total / (progress_now() - began);
    raw_close(&r);
    return rate;
}

static double raw_write(const char *folder, int64_t bytes)
{
    enum { FILES = 4 };
    raw r = { .n = FILES, .out = true };
    char path[FILES][PATH_MAX];
    raw_buffers(&r);
    for (int i = 0; i < FILES; i++) {
        snprintf(path[i], PATH_MAX, "%s/raw-%d", folder, i);
        r.fd[i] = open(path[i], O_WRONLY | O_CREAT | O_TRUNC, 0666);
    }
    int64_t pieces = bytes / PIECE;
    double began = progress_now();
    require(parallel_run(parallel_io_threads(pieces), pieces, raw_piece, &r), "writing");
    for (int i = 0; i < FILES; i++)
        if (fsync(r.fd[i]) < 0)
            perror("fsync");
    double rate = (double)bytes / (progress_now() - began);
    raw_close(&r);
    for (int i = 0; i < FILES; i++)
        unlink(path[i]);
    return rate;
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void forget(const char *folder)
{
    raw r;
    raw_open(&r, folder, 0);
    raw_forget(&r);
    raw_close(&r);
}

typedef struct stretch {
    double began;
    cpu_time cpu;
} stretch;

static stretch start(void)
{
    return (stretch){ progress_now(), processor_time() };
}

static void print(const char *what, int64_t bytes, stretch s, double ceiling)
{
    double seconds = progress_now() - s.began, gb = 1e-9 * (double)bytes;
    cpu_time cpu = processor_time();
    printf(
        "%-19s %6.2f s %6.2f GB/s; alone %6.2f GB/s: %3.0f%%; of processors %.2f + %.2f s a GB\n",
        what, seconds, gb / seconds, 1e-9 * ceiling, 100 * gb / seconds / (1e-9 * ceiling),
        (cpu.user - s.cpu.user) / gb, (cpu.system - s.cpu.system) / gb);
    fflush(stdout);
}

static void bench(store *s, const mt_weights *format, const char *folder)
{
    const checkpoint_options o = { .folder = folder, .weights_dtype = MT_F32 };
    checkpoint_state state = { .step = 1 };
    char path[PATH_MAX];
    int64_t bytes = s->weight_bytes + s->state_bytes;
    snprintf(path, sizeof path, "%s/step-000001", folder);
    require(files_make_folders(folder), folder);
    raw_write(folder, bytes); /* finds the memory of the page cache */
    double alone = raw_write(folder, bytes);
    stretch t = start();
    require(checkpoint_save(s, &state, &o, format, NULL, NULL), "saving");
    print("save", bytes, t, alone);

    for (int k = 0; k < 2; k++) {
        if (k == 1)
            raw_read(path, 0, false);
        else
            printf("cold, through the page cache: alone %.2f GB/s\n",
                   1e-9 * raw_read(path, 0, true));
        alone = raw_read(path, k ? 0 : O_DIRECT, k == 0);
        if (k == 0)
            forget(path);
        t = start();
        require(checkpoint_load(s, path, format, &state), "loading");
        print(k ? "load, in memory" : "load, from the disk", bytes, t, alone);
    }
    require(files_remove_tree(path), path);
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    const mt_state_spec states[] = { { "m", MT_F32 }, { "v", MT_F32 } };
    const char *dirs[] = { argv[1] };
    const mt_weights *format = NULL;
    session s = { 0 };
    require(registry_init(dirs, 1), argv[1]);
    require(session_format(&format), "format");
    require(session_open_device(&s, "cpu", "fp32", 0), "device");
    require(session_open_model(&s, argv[2]), argv[2]);
    require(store_create(s.model, states, 2, false, s.backend, s.device, &s.store), "store");
    require(store_init_pattern(s.store), "weights");
    printf("%.2f billion parameters, %.2f GB, %d threads\n", 1e-9 * (double)s.model->total_params,
           1e-9 * (double)(s.store->weight_bytes + s.store->state_bytes),
           parallel_io_threads(PARALLEL_MAX_THREADS));
    for (int i = argc > 4 ? atoi(argv[4]) : 1; i > 0; i--)
        bench(s.store, format, argv[3]);
    session_close(&s);
    registry_finish();
    return 0;
}
